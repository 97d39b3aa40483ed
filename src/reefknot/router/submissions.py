"""
What a caller hands in, as it will travel.

Whoever builds an assignment in Python may put anything into it. What JSON cannot say is refused here with its place,
never changed on the way; a value that is not accepted is named by what the caller calls it.

Where callers hand in work, and where its result is kept until they fetch it.

A submission is a piece of work of the router's own, in the same store: handed in means kept, whether the router runs or
not. A router that comes back claims what it had taken on and sends it again; a worker that knows the assignment already
answers with the result it stored.

Where a caller of this process comes in: its work is kept, and its answer found again.

Submissions are kept in groups. As long as there is room to look after them they are this router's own from the first
moment on; otherwise they stand in the store until it, or another router, has room.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal, event_id
from reefknot.core.audit.event import Admission, Quarantined, Requeued, timestamp
from reefknot.core.canonical import canonical, record_fingerprint
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    AckStatus,
    Correlation,
    ExecAssignment,
    ExecResult,
    InvalidMessage,
    Job,
    ResultJob,
    ResultStatus,
    encode,
    read_assignment,
    resource_class,
)
from reefknot.core.overload.admission import Reject, Rules
from reefknot.core.work import (
    ENDED,
    SUBMISSION_ONCE,
    HandBack,
    Quarantine,
    WorkDone,
    WorkFailed,
    WorkItem,
    WorkState,
    submission_id,
    submitted,
)
from reefknot.errors import KeyConflictError, NotJsonError, ParameterError, ParameterTypeError, QueueFullError
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import FIRST_FENCE, Enqueued, Held, Settlement, WorkQueue
from reefknot.router.admission import Door
from reefknot.router.pending import PendingTable, TakenOn
from reefknot.router.records import Records
from reefknot.router.settings import LEASE_S
from reefknot.runtime.batches import Batcher
from reefknot.runtime.timeouts import STORE_S

ARGUMENTS = {
    "job.type": "job_type",
    "job.payload": "inputs",
    "options.deadline_ms": "deadline",
    "options.timeout_ms": "timeout",
    "job.payload.timeout_ms": "inputs.timeout_ms",
    "options.retry_count": "retries",
    "options.priority": "priority",
    "correlation.trace_id": "trace_id",
}
"""Fields of the wire, as `Client.submit` calls them."""

_FREE = ("job.payload", "job.resources", "metadata", "decision")
"""Where a caller's own values stand."""
_UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


def as_it_travels(assignment: ExecAssignment, names: Mapping[str, str] | None = None) -> tuple[ExecAssignment, bytes]:
    """The assignment, checked, and its bytes. `names` are what the caller calls the fields."""
    called = names or {}
    try:
        body = encode(assignment)
    except _UNWRITABLE as error:
        _refuse_what_is_not_json(assignment, called)
        raise NotJsonError("the assignment", str(error) or type(error).__name__) from error
    read = read_assignment(body)
    if isinstance(read, InvalidMessage):
        raise _mistake(assignment, read, called)
    if read.job != assignment.job or read.metadata != assignment.metadata or read.decision != assignment.decision:
        _refuse_what_is_not_json(assignment, called)  # a tuple has become a list, which is fine; much else is not
    return read, body


def _refuse_what_is_not_json(assignment: ExecAssignment, called: Mapping[str, str]) -> None:
    for field in _FREE:
        canonical(_at(assignment, field), called.get(field, field))


def _mistake(assignment: ExecAssignment, found: InvalidMessage, called: Mapping[str, str]) -> ParameterError:
    field = found.field or "job.payload"
    text = found.message.removeprefix(f"{found.field or 'the message'}: ")
    accepted = text.partition("accepted: ")[2] or text
    kind = ParameterTypeError if text.startswith("Expected") else ParameterError
    return kind(called.get(field, field), _at(assignment, field), accepted)


def _at(value: Any, field: str) -> Any:
    """The value of a field, by its place on the wire."""
    for part in field.split("."):
        if isinstance(value, Struct):
            value = getattr(value, part, None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


CLASS = "router"
LOOK_S = 0.5
"""How often a caller looks when nothing wakes it."""
_NEVER = 1_000_000_000
"""A router may vanish as often as it likes: that says nothing about the work."""

_results = msgspec.json.Decoder(ExecResult)
_assignments = msgspec.json.Decoder(ExecAssignment)
_ENDED = frozenset({*ENDED, WorkState.QUARANTINED})


class Answer(Struct, frozen=True):
    """The end of a submission, for its caller."""

    held: Held
    result: ExecResult
    events: tuple[AuditEntry, ...] = ()


class Desk:
    """Submissions in a store."""

    def __init__(
        self, work: WorkQueue, clock: Clock, *, size: int, lease: float = LEASE_S, journal: Journal | None = None
    ) -> None:
        self._work = work
        self._clock = clock
        self._size = size
        self._lease = lease
        self._journal = journal or Journal(None)

    async def hand_in(
        self, assignment: ExecAssignment, *, events: tuple[AuditEntry, ...] = (), retry_after: float = 1.0
    ) -> bool:
        """Keep it. False when it is there already; `QueueFullError` when there is no room."""
        item = self.submission(assignment, encode(assignment))
        async with asyncio.timeout(STORE_S):
            (kept,) = await self._work.enqueue([item], limit=self._size, events=events)
        if kept is Enqueued.FULL:
            raise QueueFullError(depth=self._size, limit=self._size, retry_after=retry_after)
        if kept is Enqueued.DUPLICATE:
            await self.refuse_another_job(assignment)
        return kept is Enqueued.ACCEPTED

    async def refuse_another_job(self, assignment: ExecAssignment) -> None:
        """The same id is the same work. `KeyConflictError` when it was handed in with another job."""
        async with asyncio.timeout(STORE_S):
            item = await self.find(assignment.assignment_id)
        if item is not None and item.payload:
            refuse_other(assignment, _assignments.decode(item.payload).job)

    async def hand_in_all(self, items: Sequence[WorkItem], *, owner: str = "") -> list[Enqueued]:
        """Keep these, in one step. With an `owner` they are its at once, and nobody has to claim them."""
        async with asyncio.timeout(STORE_S):
            return await self._work.enqueue(items, limit=self._size, owner=owner, lease=self._lease)

    def submission(self, assignment: ExecAssignment, body: bytes) -> WorkItem:
        """The piece of work that stands for it; its deadline begins now."""
        deadline = assignment.options.deadline_ms
        now_ms = int(self._clock.wall() * 1000)
        return WorkItem(
            id=submission_id(assignment.assignment_id),
            kind=assignment.job.type,
            resource_class=CLASS,
            tenant_id=assignment.tenant_id,
            correlation_id=assignment.request_id,
            trace_id=assignment.trace_id,
            priority=assignment.priority,
            due_at=now_ms,
            deadline_at=None if deadline is None else now_ms + deadline,
            payload=body,
        )

    async def claim(self, n: int, owner: str) -> list[TakenOn]:
        """What was handed in and is nobody's yet."""
        async with asyncio.timeout(STORE_S):
            items = await self._work.claim(
                n, owner=owner, classes=(CLASS,), lease=self._lease, crash_limit=_NEVER, crash_events=self._crashed
            )
        taken = []
        for item in items:
            held = Held(item.id, item.owner, item.fence)
            try:
                assignment = _assignments.decode(item.payload)
                taken.append(TakenOn(assignment, held, item.deadline_at, _sent_before(item), item.payload))
            except msgspec.DecodeError as error:
                await self._unreadable(item, held, f"what was handed in cannot be read: {error}")
        return taken

    async def renew(self, held: list[Held]) -> list[Held]:
        """Keep them for longer; answers those that somebody else has by now."""
        async with asyncio.timeout(STORE_S):
            kept = await self._work.renew(held, lease=self._lease)
        return [one for one, ours in zip(held, kept, strict=True) if not ours]

    async def give_back(self, held: list[Held]) -> None:
        """Whoever routes next takes them on at once."""
        async with asyncio.timeout(STORE_S):
            await self._work.settle([Settlement(one.id, one.owner, one.fence, HandBack()) for one in held])

    async def answer(self, answers: Sequence[Answer]) -> list[bool]:
        """Put the results where their callers find them, in one step. False: somebody else took that one over."""
        reports = []
        for one in answers:
            text, held = encode(one.result).decode(), one.held
            succeeded = one.result.status is ResultStatus.SUCCESS
            settled = WorkDone(text) if succeeded else WorkFailed(None, text, one.result.status.value)
            reports.append(Settlement(held.id, held.owner, held.fence, settled, one.events))
        async with asyncio.timeout(STORE_S):
            return await self._work.settle(reports)

    async def call_off(self, assignment_id: str, reason: str, events: tuple[AuditEntry, ...] = ()) -> bool:
        """Nobody has taken it on yet, and nobody has to."""
        item = await self.find(assignment_id)
        if item is None or item.state is not WorkState.PENDING:
            return False
        async with asyncio.timeout(STORE_S):
            return await self._work.cancel(item.id, reason=reason, events=events)

    async def has(self, assignment_id: str) -> bool:
        """Whether it was handed in before."""
        async with asyncio.timeout(STORE_S):
            return await self.find(assignment_id) is not None

    async def find(self, assignment_id: str) -> WorkItem | None:
        """What was handed in under this id, today or by an earlier version."""
        item = await self._work.get(submission_id(assignment_id))
        if item is None:
            older = await self._work.get(SUBMISSION_ONCE + assignment_id)
            return older if older is not None and older.resource_class == CLASS else None
        return item

    async def look(self, assignment_id: str) -> ExecResult | None:
        """The result, if there is one."""
        async with asyncio.timeout(STORE_S):
            item = await self.find(assignment_id)
        return None if item is None else answer_of(item)

    async def result(self, assignment_id: str, timeout: float) -> ExecResult | None:
        """The result as soon as there is one, or None after `timeout` seconds."""
        ends = self._clock.now() + timeout
        while True:
            found = await self.look(assignment_id)
            left = ends - self._clock.now()
            if found is not None or left <= 0:
                return found
            await self._clock.asleep(min(LOOK_S, left))

    def wall(self) -> float:
        return self._clock.wall()

    async def wait(self, timeout: float) -> bool:
        return await self._work.wait(timeout, classes=(CLASS,))

    async def _unreadable(self, item: WorkItem, held: Held, reason: str) -> None:
        """A person has to look at it; its caller hears that, and it is on record."""
        correlation = None if item.trace_id is None else Correlation(item.trace_id)
        job, whose = Job(item.kind), item.correlation_id or ""
        told = ExecAssignment(submitted(item.id), whose, job, tenant_id=item.tenant_id, correlation=correlation)
        result = encode(ended_here(told, ResultStatus.ERROR, ErrorCode.internal_error, reason)).decode()
        event = Quarantined(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=item.tenant_id,
            trace_id=item.trace_id,
            correlation_id=item.correlation_id,
            work_id=submitted(item.id),
            reason=reason,
        )
        aside = Quarantine(reason, None, result)
        entries = tuple(self._journal.entries([event]))
        async with asyncio.timeout(STORE_S):
            await self._work.settle([Settlement(held.id, held.owner, held.fence, aside, entries)])

    def _crashed(self, item: WorkItem) -> list[AuditEntry]:
        event = Requeued(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=item.tenant_id,
            trace_id=item.trace_id,
            correlation_id=item.correlation_id,
            work_id=submitted(item.id),
            reason="its router vanished",
            generation=item.crashes,
        )
        return self._journal.entries([event])


def answer_of(item: WorkItem) -> ExecResult | None:
    """The result of a submission that has ended: the one it was answered with, else what its end says."""
    if item.state not in _ENDED:
        return None
    if item.result is not None:
        return _results.decode(item.result)
    if item.state is WorkState.QUARANTINED:
        return None
    assignment = _assignments.decode(item.payload)
    status = ResultStatus.CANCELLED if item.state is WorkState.CANCELLED else ResultStatus.ERROR
    code = ErrorCode.cancelled_by_user if item.state is WorkState.CANCELLED else ErrorCode.internal_error
    return ended_here(assignment, status, code, item.reason)


def refuse_other(assignment: ExecAssignment, known: Job) -> None:
    """`KeyConflictError` unless this is the job that is known under the assignment's id."""
    if assignment.job != known:
        recorded, given = record_fingerprint(known), record_fingerprint(assignment.job)
        raise KeyConflictError(assignment.assignment_id, recorded=recorded, given=given)


def _sent_before(item: WorkItem) -> bool:
    return item.crashes + item.interruptions + item.generation > 0


def ended_here(assignment: ExecAssignment, status: ResultStatus, code: ErrorCode, message: str) -> ExecResult:
    """The result of an assignment that no worker ended."""
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=status,
        provider_id=(assignment.executor and assignment.executor.provider_id) or "router",
        job=ResultJob(assignment.job.type),
        latency_ms=0,
        cost=0,
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        retries_used=0,
        error_code=code.wire,
        error_message=message or None,
    )


AT_ONCE = 200


class _Newcomer:
    """One that is being kept."""

    __slots__ = ("assignment", "body", "kept")

    def __init__(self, assignment: ExecAssignment, body: bytes) -> None:
        self.assignment = assignment
        self.body = body
        self.kept: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()


class Entry:
    """Callers, and what they wait for."""

    def __init__(
        self,
        *,
        owner: str,
        desk: Desk,
        door: Door,
        table: PendingTable,
        records: Records,
        rules: Rules,
        clock: Clock,
        taken_on: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._desk = desk
        self._door = door
        self._table = table
        self._records = records
        self._rules = rules
        self._clock = clock
        self._taken_on = taken_on
        self._left = left
        self._callers: dict[str, asyncio.Future[ExecResult]] = {}
        self._jobs: dict[str, Job] = {}
        """What they wait for: the same id with another job is not the same work."""
        self.gather: Batcher[_Newcomer] = Batcher("submissions could not be kept", self._keep, most=AT_ONCE)

    async def submit(self, assignment: ExecAssignment, body: bytes) -> asyncio.Future[ExecResult]:
        """Take it on, or raise `QueueFullError` with the time to come back. The future is its result."""
        name = assignment.assignment_id
        future = self._callers.get(name)
        if future is not None and not future.done():
            refuse_other(assignment, self._jobs[name])
            return future
        answer = self._door.admission(assignment)
        if isinstance(answer, Reject) and not await self._desk.has(name):
            await self._records.journal.write(self._refusal(assignment, answer))
            wait, size = answer.retry_after_ms / 1000, self._rules.size
            why = answer.reason.value.replace("_", " ")
            raise QueueFullError(depth=self._door.waiting(), limit=size, retry_after=wait, reason=why)
        future = asyncio.get_running_loop().create_future()
        self._callers[name], self._jobs[name] = future, assignment.job
        self._door.unclaimed.add(name)
        newcomer = _Newcomer(assignment, body)
        self.gather.put(newcomer)
        try:
            if not self.gather.served:  # a router that does not run keeps what it is given all the same
                await self.gather.finish()
            kept = await newcomer.kept
            if kept is Enqueued.FULL:
                raise QueueFullError(depth=self._rules.size, limit=self._rules.size, retry_after=1.0)
            if kept is Enqueued.DUPLICATE:
                self._door.unclaimed.discard(name)
                await self._desk.refuse_another_job(assignment)
                await self.answer_from_record(name)
        except BaseException as error:
            self._forget(name)
            self._door.unclaimed.discard(name)
            if not future.done():  # whoever asked for the same meanwhile waits for this very future
                future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
                future.exception()
            raise
        return future

    async def _keep(self, newcomers: list[_Newcomer]) -> None:
        """Who is gone meanwhile is kept all the same: whether it was is not known to the one who left."""
        items = [self._desk.submission(one.assignment, one.body) for one in newcomers]
        owner = self._owner if len(self._table) + len(items) <= self._rules.size else ""
        try:
            answers = await self._desk.hand_in_all(items, owner=owner)
        except BaseException as error:
            for one in newcomers:
                if not one.kept.done():
                    one.kept.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            raise
        now = self._clock.now()
        for one, item, kept in zip(newcomers, items, answers, strict=True):
            if kept is Enqueued.ACCEPTED and owner:
                self._door.unclaimed.discard(one.assignment.assignment_id)
                held = Held(item.id, owner, FIRST_FENCE)
                taken = TakenOn(one.assignment, held, item.deadline_at, False, one.body)
                self._table.add(taken, resource_class(one.assignment), now)
            if not one.kept.done():
                one.kept.set_result(kept)
        (self._taken_on if owner else self._left)()

    async def answer_from_record(self, assignment_id: str) -> None:
        """The same assignment again: if it has ended, its stored result is the answer."""
        stored = await self._desk.look(assignment_id)
        if stored is not None:
            self.tell(stored)

    def elsewhere(self) -> list[str]:
        """Those whose callers wait here, and that this router does not look after."""
        return [name for name in self._callers if self._table.get(name) is None]

    def tell(self, result: ExecResult) -> None:
        """Whoever waits for it here."""
        self._door.unclaimed.discard(result.assignment_id)
        future = self._forget(result.assignment_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _forget(self, name: str) -> asyncio.Future[ExecResult] | None:
        self._jobs.pop(name, None)
        return self._callers.pop(name, None)

    def _refusal(self, assignment: ExecAssignment, answer: Reject) -> Admission:
        return Admission(
            **self._records.about(assignment),
            status=AckStatus.REJECTED.value,
            reason=answer.reason.value,
            resource_class="router",
            queue_depth=self._door.waiting(),
        )
