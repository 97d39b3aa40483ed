"""
Where callers hand in work, and where its result is kept until they fetch it.

A submission is a piece of work of the router's own, in the same store: handed in means kept, whether the router runs or
not. A router that comes back claims what it had taken on and sends it again; a worker that knows the assignment already
answers with the result it stored.
"""

import asyncio

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import Requeued, timestamp
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import ExecAssignment, ExecResult, JobType, ResultStatus, encode
from reefknot.core.work import HandBack, WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.errors import QueueFullError
from reefknot.execution.journal import Journal, event_id
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Enqueued, Held, Settlement, WorkQueue

CLASS = "router"
STORE_S = 30.0
LEASE_S = 30.0
LOOK_S = 0.5
"""How often a caller looks when nothing wakes it."""
_NEVER = 1_000_000_000
"""A router may vanish as often as it likes: that says nothing about the work."""

_results = msgspec.json.Decoder(ExecResult)
_assignments = msgspec.json.Decoder(ExecAssignment)
_ENDED = frozenset({WorkState.SUCCEEDED, WorkState.FAILED, WorkState.CANCELLED, WorkState.DISCARDED})


class TakenOn(Struct, frozen=True):
    """A submission that this router has claimed. `deadline_at` is milliseconds UTC."""

    assignment: ExecAssignment
    held: Held
    deadline_at: int | None = None
    sent_before: bool = False
    """Another router had it, or an earlier life of this one: a worker may have its result."""


def work_id(assignment_id: str) -> str:
    """The submission's own id; the worker's piece of work has the assignment's."""
    return f"route/{assignment_id}"


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
        deadline = assignment.options.deadline_ms
        wall = self._clock.wall()
        item = WorkItem(
            id=work_id(assignment.assignment_id),
            kind=assignment.job.type,
            resource_class=CLASS,
            tenant_id=assignment.tenant_id,
            correlation_id=assignment.request_id,
            trace_id=assignment.trace_id,
            priority=assignment.priority,
            due_at=int(wall * 1000),
            deadline_at=None if deadline is None else int(wall * 1000) + deadline,
            payload=encode(assignment),
        )
        async with asyncio.timeout(STORE_S):
            (kept,) = await self._work.enqueue([item], limit=self._size, events=events)
        if kept is Enqueued.FULL:
            raise QueueFullError(depth=self._size, limit=self._size, retry_after=retry_after)
        return kept is Enqueued.ACCEPTED

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
                taken.append(TakenOn(_assignments.decode(item.payload), held, item.deadline_at, _sent_before(item)))
            except msgspec.DecodeError as error:
                await self._unreadable(held, f"what was handed in cannot be read: {error}")
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

    async def answer(self, held: Held, result: ExecResult, *, events: tuple[AuditEntry, ...] = ()) -> bool:
        """Put the result where its caller finds it. False when somebody else took over."""
        text = encode(result).decode()
        succeeded = result.status is ResultStatus.SUCCESS
        settled = WorkDone(text) if succeeded else WorkFailed(None, text, result.status.value)
        async with asyncio.timeout(STORE_S):
            (kept,) = await self._work.settle([Settlement(held.id, held.owner, held.fence, settled, events)])
        return kept

    async def call_off(self, assignment_id: str, reason: str, events: tuple[AuditEntry, ...] = ()) -> bool:
        """Nobody has taken it on yet, and nobody has to."""
        item = await self._work.get(work_id(assignment_id))
        if item is None or item.state is not WorkState.PENDING:
            return False
        async with asyncio.timeout(STORE_S):
            return await self._work.cancel(item.id, reason=reason, events=events)

    async def look(self, assignment_id: str) -> ExecResult | None:
        """The result, if there is one."""
        item = await self._work.get(work_id(assignment_id))
        if item is None or item.state not in _ENDED:
            return None
        if item.result is not None:
            return _results.decode(item.result)
        assignment = _assignments.decode(item.payload)
        status = ResultStatus.CANCELLED if item.state is WorkState.CANCELLED else ResultStatus.ERROR
        code = ErrorCode.cancelled_by_user if item.state is WorkState.CANCELLED else ErrorCode.internal_error
        return ended_here(assignment, status, code, item.reason)

    async def result(self, assignment_id: str, timeout: float) -> ExecResult | None:
        """The result as soon as there is one, or None after `timeout` seconds."""
        ends = self._clock.now() + timeout
        while True:
            found = await self.look(assignment_id)
            left = ends - self._clock.now()
            if found is not None or left <= 0:
                return found
            await self._clock.asleep(min(LOOK_S, left))

    async def wait(self, timeout: float) -> bool:
        return await self._work.wait(timeout, classes=(CLASS,))

    async def _unreadable(self, held: Held, reason: str) -> None:
        await self._work.settle([Settlement(held.id, held.owner, held.fence, WorkFailed(None, None, reason))])

    def _crashed(self, item: WorkItem) -> list[AuditEntry]:
        event = Requeued(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=item.tenant_id,
            trace_id=item.trace_id,
            correlation_id=item.correlation_id,
            work_id=item.id.removeprefix("route/"),
            reason="its router vanished",
            generation=item.crashes,
        )
        return self._journal.entries([event])


def _sent_before(item: WorkItem) -> bool:
    return item.crashes + item.interruptions > 0


def ended_here(assignment: ExecAssignment, status: ResultStatus, code: ErrorCode, message: str) -> ExecResult:
    """The result of an assignment that no worker ended."""
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=status,
        provider_id=(assignment.executor and assignment.executor.provider_id) or "router",
        job=JobType(assignment.job.type),
        latency_ms=0,
        cost=0,
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        retries_used=0,
        error_code=code.wire,
        error_message=message or None,
    )
