"""
An assignment at the door.

    read it → do we know the step → do we have it already → is there room → keep it → say so

Accepted means kept: the ack goes out after the store has it. Admission and the place it gives are one step, between two
awaits. Every refusal names its reason, is on record, and never stops the worker.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import UNSET, Struct, structs, to_builtins

from reefknot.core.audit.event import Admission as AdmissionEvent
from reefknot.core.audit.event import Event, timestamp
from reefknot.core.messages import (
    AckStatus,
    ExecAssignment,
    ExecAssignmentAck,
    InvalidMessage,
    encode,
    read_assignment,
    resource_class,
)
from reefknot.core.overload.admission import (
    LONGEST_WAIT_MS,
    Accept,
    AcceptDropping,
    Admission,
    Defer,
    Degrade,
    Newcomer,
    QueueView,
    Reject,
    RejectReason,
    admit,
)
from reefknot.core.work import WorkItem
from reefknot.execution.journal import Journal, event_id
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Enqueued, WorkQueue
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.results import DROPPED_MESSAGE, Envelope
from reefknot.worker.settings import WorkerSettings

STORE_S = 30.0
_DRAINING = "Worker is draining, rejecting assignment"


class Drops(Protocol):
    """Who gives up queued work to make room."""

    async def drop(self, victim: str, pool: Pool) -> bool: ...


class Taken(Struct, frozen=True):
    """What came of one message at the door."""

    ack: ExecAssignmentAck
    dropped: ExecAssignmentAck | None = None
    """Another assignment had to make room: its ack. Its result follows from what is kept of it."""
    known_in: str | None = None
    """The store had it already; the class it was sent for."""


class Intake:
    """Admits assignments into a worker's pools."""

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        *,
        pools: Mapping[str, Pool],
        known: Mapping[str, object],
        work: WorkQueue,
        journal: Journal,
        clock: Clock,
        drops: Drops,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._pools = pools
        self._known = known
        self._work = work
        self._journal = journal
        self._clock = clock
        self._drops = drops
        self.draining = False

    async def take(self, body: bytes, headers: Mapping[str, str]) -> Taken:
        """One message, from bytes to ack."""
        read = read_assignment(body, headers)
        if isinstance(read, InvalidMessage):
            return await self._refused(read.assignment_id, read.ack_status, RejectReason.INVALID, read.message)
        mistake = self._cannot_run(read)
        if mistake is not None:
            return await self._refused(read.assignment_id, AckStatus.REJECTED, *mistake, assignment=read)
        pool = self._pools[resource_class(read)]
        if pool.has(read.assignment_id):
            return self._again(read, pool)
        answer, inputs = self._admission(read, pool)
        if isinstance(answer, Reject | AcceptDropping):
            async with asyncio.timeout(STORE_S):
                known = await self._work.get(read.assignment_id)
            if known is not None:
                return self._again(read, pool)
            answer, inputs = self._admission(read, pool)  # the queue may have changed meanwhile
        if isinstance(answer, Reject):
            return await self._refused(
                read.assignment_id,
                AckStatus.REJECTED,
                answer.reason,
                answer.message,
                assignment=read,
                pool=pool,
                wait=answer.retry_after_ms,
                inputs=inputs,
            )
        return await self._keep(read, pool, answer, inputs)

    def _again(self, assignment: ExecAssignment, pool: Pool) -> Taken:
        """It was taken in before: accepted is what it is, whatever the queue looks like now."""
        ack = self._ack(assignment.assignment_id, AckStatus.ACCEPTED, Accept().message, pool=pool)
        return Taken(ack, known_in=pool.name)

    def _cannot_run(self, assignment: ExecAssignment) -> tuple[RejectReason, str] | None:
        if assignment.job.type not in self._known:
            known = ", ".join(sorted(self._known))
            return RejectReason.UNKNOWN_JOB_TYPE, f"job.type: {assignment.job.type!r} is not known here; known: {known}"
        if assignment.job.payload_ref is not None:
            return RejectReason.INVALID, "job.payload_ref: this worker has no resolver for references; send job.payload"
        name = resource_class(assignment)
        if name not in self._pools:
            return RejectReason.INVALID, f"resource_class: {name!r} is not known here; known: {', '.join(self._pools)}"
        return None

    def _admission(self, assignment: ExecAssignment, pool: Pool) -> tuple[Admission, dict[str, Any]]:
        """The answer, and everything it was made of."""
        deadline = assignment.options.deadline_ms
        newcomer = Newcomer(assignment.priority, None if deadline is None else float(deadline))
        view = pool.view(draining=self.draining)
        if self._settings.queue_v2:
            answer = admit(view, newcomer, pool.rules)
        elif self.draining:
            answer = Reject(RejectReason.DRAINING, _DRAINING, LONGEST_WAIT_MS)
        else:
            answer = Accept()
        return answer, self._inputs(view, newcomer, pool)

    def _inputs(self, view: QueueView, newcomer: Newcomer, pool: Pool) -> dict[str, Any]:
        if not self._settings.queue_v2:
            return {"view": to_builtins(view)}
        rules = to_builtins(pool.rules)
        return {"view": to_builtins(view), "newcomer": to_builtins(newcomer), "rules": rules}

    async def _keep(
        self,
        assignment: ExecAssignment,
        pool: Pool,
        answer: Accept | AcceptDropping | Defer | Degrade,
        inputs: dict[str, Any],
    ) -> Taken:
        pool.entering += 1  # the place is taken before anything is awaited, so that nobody else gets it
        try:
            dropped = await self._make_room(answer, pool)
            item = self._item(assignment, pool, answer)
            event = self._event(assignment, AckStatus.ACCEPTED, None, pool, message=answer.message, inputs=inputs)
            async with asyncio.timeout(STORE_S):
                (kept,) = await self._work.enqueue([item], events=self._journal.entries([event]))
        finally:
            pool.entering -= 1
        if kept is Enqueued.DUPLICATE:
            return structs.replace(self._again(assignment, pool), dropped=dropped)
        if item.id not in pool.running:
            pool.put(self._place(item))
        ack = self._ack(assignment.assignment_id, AckStatus.ACCEPTED, answer.message, pool=pool)
        return Taken(ack, dropped)

    async def _make_room(self, answer: Admission, pool: Pool) -> ExecAssignmentAck | None:
        """The one that goes gets an ack, a result and an event, like every end."""
        if not isinstance(answer, AcceptDropping):
            return None
        pool.queue.remove(answer.victim)
        if not await self._drops.drop(answer.victim, pool):
            return None
        reason = RejectReason.DROPPED_OLDEST
        return self._ack(answer.victim, AckStatus.REJECTED, DROPPED_MESSAGE, pool=pool, reason=reason)

    def _item(self, assignment: ExecAssignment, pool: Pool, answer: Admission) -> WorkItem:
        wall = self._clock.wall()
        delay_ms = answer.milliseconds if isinstance(answer, Defer) else 0
        deadline = assignment.options.deadline_ms
        return WorkItem(
            id=assignment.assignment_id,
            kind=assignment.job.type,
            resource_class=pool.queue_name,
            tenant_id=assignment.tenant_id,
            correlation_id=assignment.request_id,
            trace_id=assignment.trace_id,
            priority=assignment.priority,
            due_at=int(wall * 1000) + delay_ms,
            deadline_at=None if deadline is None else int(wall * 1000) + deadline,
            payload=encode(_envelope(assignment, answer, pool.depth())),
        )

    def _place(self, item: WorkItem) -> Queued:
        now, wall = self._clock.now(), self._clock.wall()
        expires = float("inf") if item.deadline_at is None else now + item.deadline_at / 1000 - wall
        return Queued(item.id, item.priority, now, now + item.due_at / 1000 - wall, expires)

    async def _refused(
        self,
        assignment_id: str,
        status: AckStatus,
        reason: RejectReason,
        message: str,
        *,
        assignment: ExecAssignment | None = None,
        pool: Pool | None = None,
        wait: int | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> Taken:
        event = self._event(
            assignment, status, reason, pool, assignment_id=assignment_id, message=message, inputs=inputs
        )
        await self._journal.write(event)
        return Taken(self._ack(assignment_id, status, message, pool=pool, reason=reason, wait=wait))

    def _ack(
        self,
        assignment_id: str,
        status: AckStatus,
        message: str,
        *,
        pool: Pool | None = None,
        reason: RejectReason | None = None,
        wait: int | None = None,
    ) -> ExecAssignmentAck:
        ack = ExecAssignmentAck(assignment_id, status, message)
        if not self._settings.queue_v2:
            return ack
        if pool is None:  # it belongs to no class: then the fullest one speaks for the worker
            pool = max(self._pools.values(), key=lambda one: (one.status().severity, one.depth()))
        return structs.replace(
            ack,
            overload_status=pool.status(),
            queue_depth=pool.depth(),
            worker_id=self._worker_id,
            reason=None if reason is None else reason.value,
            retry_after_ms=UNSET if wait is None else wait,
        )

    def _event(
        self,
        assignment: ExecAssignment | None,
        status: AckStatus,
        reason: RejectReason | None,
        pool: Pool | None,
        *,
        assignment_id: str = "",
        message: str = "",
        inputs: dict[str, Any] | None = None,
    ) -> Event:
        return AdmissionEvent(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=None if assignment is None else assignment.tenant_id,
            trace_id=None if assignment is None else assignment.trace_id,
            correlation_id=None if assignment is None else assignment.request_id,
            work_id=assignment_id if assignment is None else assignment.assignment_id,
            status=status.value,
            reason=None if reason is None else reason.value,
            resource_class=None if pool is None else pool.name,
            queue_depth=None if pool is None else pool.depth(),
            overload_status=None if pool is None else pool.status().value,
            inputs={**(inputs or {}), "message": message[:300]},
        )


def _envelope(assignment: ExecAssignment, answer: Admission, depth: int) -> Envelope:
    asked = assignment.options.skip_circuit_breaker
    if isinstance(answer, Degrade):
        change = answer.change
        skips = asked or change.skip_circuit_breaker
        return Envelope(assignment, change.skip_retries, change.timeout_factor, skips, depth)
    return Envelope(assignment, skip_circuit_breaker=asked, queue_depth=depth)
