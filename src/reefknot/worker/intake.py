"""
An assignment at the door.

    read it → do we know the step → is there room → keep it → say so

Accepted means kept: the ack goes out after the store has it. Every refusal names its reason, is on record, and never
stops the worker.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, Struct, structs

from reefknot.core.audit.event import Admission as AdmissionEvent
from reefknot.core.audit.event import Dropped, Event, timestamp
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    AckStatus,
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    InvalidMessage,
    JobType,
    ResultStatus,
    encode,
    read_assignment,
    resource_class,
)
from reefknot.core.overload.admission import (
    Accept,
    AcceptDropping,
    Admission,
    Defer,
    Degrade,
    Newcomer,
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
from reefknot.worker.settings import WorkerSettings

STORE_S = 30.0


class Taken(Struct, frozen=True):
    """What came of one message at the door."""

    ack: ExecAssignmentAck
    dropped: tuple[ExecAssignmentAck, ExecResult] | None = None
    """Another assignment had to make room: its ack and its result."""
    duplicate: bool = False


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
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._pools = pools
        self._known = known
        self._work = work
        self._journal = journal
        self._clock = clock
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
        answer = self._admission(read, pool)
        match answer:
            case Reject(reason=reason, message=message, retry_after_ms=wait):
                return await self._refused(
                    read.assignment_id, AckStatus.REJECTED, reason, message, assignment=read, pool=pool, wait=wait
                )
            case AcceptDropping(victim=victim):
                return await self._keep(read, pool, answer, dropped=await self._drop(victim, pool))
            case _:
                return await self._keep(read, pool, answer)

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

    def _admission(self, assignment: ExecAssignment, pool: Pool) -> Admission:
        if not self._settings.queue_v2:
            if self.draining:
                return Reject(RejectReason.DRAINING, "Worker is draining, rejecting assignment", 30_000)
            return Accept()
        deadline = assignment.options.deadline_ms
        newcomer = Newcomer(assignment.priority, None if deadline is None else float(deadline))
        return admit(pool.view(draining=self.draining), newcomer, pool.rules)

    async def _keep(
        self,
        assignment: ExecAssignment,
        pool: Pool,
        answer: Accept | AcceptDropping | Defer | Degrade,
        *,
        dropped: tuple[ExecAssignmentAck, ExecResult] | None = None,
    ) -> Taken:
        now, wall = self._clock.now(), self._clock.wall()
        delay = answer.milliseconds / 1000 if isinstance(answer, Defer) else 0.0
        deadline = assignment.options.deadline_ms
        item = WorkItem(
            id=assignment.assignment_id,
            kind=assignment.job.type,
            resource_class=pool.queue_name,
            tenant_id=assignment.tenant_id,
            correlation_id=assignment.request_id,
            trace_id=assignment.trace_id,
            priority=assignment.priority,
            due_at=int((wall + delay) * 1000),
            deadline_at=None if deadline is None else int(wall * 1000) + deadline,
            payload=_stored(assignment, answer, pool.depth()),
        )
        expires = float("inf") if deadline is None else now + deadline / 1000
        queued = Queued(item.id, item.priority, now, now + delay if delay else 0.0, expires)
        pool.put(queued)  # the place is taken before the store is asked, so that nobody else gets it
        event = self._event(assignment, AckStatus.ACCEPTED, None, pool)
        try:
            async with asyncio.timeout(STORE_S):
                (kept,) = await self._work.enqueue([item], events=self._journal.entries([event]))
        except BaseException:
            pool.queue.remove(item.id)
            raise
        if kept is Enqueued.DUPLICATE:
            pool.queue.remove(item.id)
        pool.wake()
        ack = self._ack(assignment.assignment_id, AckStatus.ACCEPTED, answer.message, pool=pool)
        return Taken(ack, dropped, duplicate=kept is Enqueued.DUPLICATE)

    async def _drop(self, victim: str, pool: Pool) -> tuple[ExecAssignmentAck, ExecResult] | None:
        """Make room. The one that goes gets an ack, a result and an event, like every end."""
        pool.queue.remove(victim)
        item = await self._work.get(victim)
        event = Dropped(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            work_id=victim,
            reason=RejectReason.DROPPED_OLDEST.value,
            resource_class=pool.name,
        )
        reason = RejectReason.DROPPED_OLDEST
        if not await self._work.cancel(victim, reason=reason.value, events=self._journal.entries([event])):
            return None
        message = "Assignment dropped from a full queue to make room for newer work"
        ack = self._ack(victim, AckStatus.REJECTED, message, pool=pool, reason=reason)
        result = ExecResult(
            assignment_id=victim,
            request_id="" if item is None else item.correlation_id or "",
            status=ResultStatus.ERROR,
            provider_id=self._worker_id,
            job=JobType("" if item is None else item.kind),
            latency_ms=0,
            cost=0,
            worker_id=self._worker_id,
            retries_used=0 if item is None else item.attempts,
            error_code=ErrorCode.system_overload.wire,
            error_message=message,
        )
        return ack, result

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
    ) -> Taken:
        event = self._event(assignment, status, reason, pool, assignment_id=assignment_id, message=message)
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
        return structs.replace(
            ack,
            overload_status=None if pool is None else pool.status(),
            queue_depth=UNSET if pool is None else pool.depth(),
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
    ) -> Event:
        inputs: dict[str, Any] = {} if pool is None else {"depth": pool.depth(), "size": pool.rules.size}
        if message:
            inputs["message"] = message[:300]
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
            inputs=inputs,
        )


class Envelope(Struct, frozen=True):
    """What is kept of an accepted assignment: itself, what admission changed, and the queue it met."""

    assignment: ExecAssignment
    skip_retries: bool = False
    timeout_factor: float = 1.0
    skip_circuit_breaker: bool = False
    queue_depth: int = 0


def _stored(assignment: ExecAssignment, answer: Admission, depth: int) -> bytes:
    if isinstance(answer, Degrade):
        change = answer.change
        return encode(
            Envelope(assignment, change.skip_retries, change.timeout_factor, change.skip_circuit_breaker, depth)
        )
    return encode(Envelope(assignment, skip_circuit_breaker=assignment.options.skip_circuit_breaker, queue_depth=depth))
