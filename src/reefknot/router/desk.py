"""
Where callers hand in work, and where its result is kept until they fetch it.

A submission is a piece of work of the router's own, in the same store: handed in means kept, whether the router runs or
not. A router that comes back claims what it had taken on and sends it again; a worker that knows the assignment already
answers with the result it stored.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import Quarantined, Requeued, timestamp
from reefknot.core.canonical import record_fingerprint
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import Correlation, ExecAssignment, ExecResult, Job, ResultJob, ResultStatus, encode
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
from reefknot.errors import KeyConflictError, QueueFullError
from reefknot.execution.journal import Journal, event_id
from reefknot.execution.limits import STORE_S
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Enqueued, Held, Settlement, WorkQueue
from reefknot.router.settings import LEASE_S

CLASS = "router"
LOOK_S = 0.5
"""How often a caller looks when nothing wakes it."""
_NEVER = 1_000_000_000
"""A router may vanish as often as it likes: that says nothing about the work."""

_results = msgspec.json.Decoder(ExecResult)
_assignments = msgspec.json.Decoder(ExecAssignment)
_ENDED = frozenset({*ENDED, WorkState.QUARANTINED})


class TakenOn(Struct, frozen=True):
    """A submission that this router has claimed. `deadline_at` is milliseconds UTC."""

    assignment: ExecAssignment
    held: Held
    deadline_at: int | None = None
    sent_before: bool = False
    """Another router had it, or an earlier life of this one: a worker may have its result."""
    body: bytes = b""
    """The assignment as it was handed in, for those who pass it on as it is."""


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
