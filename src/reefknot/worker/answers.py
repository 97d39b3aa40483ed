"""
What is said at a worker's door: the ack, and the event that goes on record. The baseline's acks say less.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from reefknot.core.audit.event import Admission as AdmissionEvent
from reefknot.core.audit.event import Event, timestamp
from reefknot.core.messages import AckStatus, ExecAssignment, ExecAssignmentAck
from reefknot.core.overload.admission import RejectReason
from reefknot.execution.journal import event_id
from reefknot.ports.clock import Clock
from reefknot.worker.pool import Pool


class Answers:
    """Words for what admission decided."""

    def __init__(self, worker_id: str, *, pools: Mapping[str, Pool], v2: bool, clock: Clock) -> None:
        self._worker_id = worker_id
        self._pools = pools
        self._v2 = v2
        self._clock = clock

    def ack(
        self,
        assignment_id: str,
        status: AckStatus,
        message: str,
        *,
        pool: Pool | None = None,
        reason: RejectReason | None = None,
        wait: int | None = None,
    ) -> ExecAssignmentAck:
        if not self._v2:
            return ExecAssignmentAck(assignment_id, status, message)
        if pool is None:  # it belongs to no class: then the fullest one speaks for the worker
            pool = max(self._pools.values(), key=lambda one: (one.status().severity, one.depth()))
        return ExecAssignmentAck(
            assignment_id,
            status,
            message,
            overload_status=pool.status(),
            queue_depth=pool.depth(),
            worker_id=self._worker_id,
            reason=None if reason is None else reason.value,
            retry_after_ms=UNSET if wait is None else wait,
        )

    def event(
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
