"""
A step's result, as the wire carries it, and what an assignment that ended without one is answered with.
"""

from math import isfinite
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from reefknot.core.canonical import canonical
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    LARGEST_MESSAGE,
    Correlation,
    ExecAssignment,
    ExecResult,
    Job,
    ResultJob,
    ResultStatus,
    StepResult,
    StepStatus,
)
from reefknot.core.overload.admission import RejectReason
from reefknot.core.overload.level import OverloadStatus
from reefknot.core.work import WorkItem, WorkState

EXPIRED = "expired while queued"
"""The reason that is kept with an assignment whose deadline passed before it could run."""
DROPPED = RejectReason.DROPPED_OLDEST.value
DROPPED_MESSAGE = "Assignment dropped from a full queue to make room for newer work"
EXPIRED_MESSAGE = "the deadline passed while the assignment was queued; it was not run"
_ROOM = 64 * 1024
"""Beside its outputs a result has little in it."""

_RESULT_OF = {
    StepStatus.OK: ResultStatus.SUCCESS,
    StepStatus.ERROR: ResultStatus.ERROR,
    StepStatus.TIMEOUT: ResultStatus.TIMEOUT,
    StepStatus.CANCELLED: ResultStatus.CANCELLED,
}


class Envelope(Struct, frozen=True):
    """What is kept of an accepted assignment: itself, what admission changed, and the queue it met."""

    assignment: ExecAssignment
    skip_retries: bool = False
    timeout_factor: float = 1.0
    skip_circuit_breaker: bool = False
    queue_depth: int = 0
    overload_status: OverloadStatus = OverloadStatus.HEALTHY


envelopes = msgspec.json.Decoder(Envelope)


def envelope_of(item: WorkItem) -> Envelope:
    """What was kept of it. Should that be unreadable, whose it is can still be said."""
    try:
        return envelopes.decode(item.payload)
    except msgspec.DecodeError:
        return stand_in(item)


def stand_in(item: WorkItem) -> Envelope:
    """As much of an assignment as stands beside its payload: enough for a result and an event."""
    correlation = None if item.trace_id is None else Correlation(item.trace_id)
    job, whose = Job(item.kind), item.correlation_id or ""
    return Envelope(ExecAssignment(item.id, whose, job, tenant_id=item.tenant_id, correlation=correlation))


def is_same_work(known: WorkItem, assignment: ExecAssignment) -> bool:
    """Whether what is kept under the assignment's id is its job."""
    try:
        return envelopes.decode(known.payload).assignment.job == assignment.job
    except msgspec.ValidationError:  # it is something, and no assignment
        return False
    except msgspec.DecodeError:  # it is damaged: whoever runs it says so
        return True


def result_of(
    assignment: ExecAssignment, step: StepResult, *, worker_id: str, v2: bool, wall: float, retries_used: int
) -> ExecResult:
    """What the router is told. Error codes travel by their names; the baseline does not say who worked."""
    failed = step.error_code is not ErrorCode.none
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=_RESULT_OF[step.status],
        provider_id=(assignment.executor and assignment.executor.provider_id) or worker_id,
        job=ResultJob(assignment.job.type),
        latency_ms=round(step.latency_ms, 3),
        cost=_cost(step.metadata.get("cost")),
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        timestamp=int(wall * 1000),
        queue_depth=step.queue_depth_at_queue if v2 else UNSET,
        worker_id=worker_id if v2 else None,
        retries_used=retries_used,
        error_code=step.error_code.wire if failed else None,
        error_message=step.error_message or None,
        output=step.outputs or None,
    )


def _cost(given: object) -> int | float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return 0
    return given if isfinite(given) else 0


def sendable(step: Any) -> StepResult:
    """The step's result, or a failure when it is none, cannot be written as JSON, or is larger than a message."""
    if not isinstance(step, StepResult):
        return _broken(f"the block gave a {type(step).__name__}, not a StepResult")
    try:
        written = msgspec.json.encode((step.outputs, step.metadata))
        if b"null" in written:  # which is also how "not a number" is written
            canonical(step.outputs, "outputs")
        size = len(written)
    except (TypeError, ValueError, RecursionError, OverflowError, UnicodeError) as error:
        return _broken(f"the block's outputs cannot be written as JSON: {error}")
    if size > LARGEST_MESSAGE - _ROOM:
        return _broken(f"the block's outputs have {size} bytes; accepted: at most {LARGEST_MESSAGE - _ROOM}")
    if not step.ok and step.error_code is ErrorCode.none:
        return msgspec.structs.replace(step, error_code=ErrorCode.execution_failed)
    return step


def _broken(message: str) -> StepResult:
    return StepResult(StepStatus.ERROR, ErrorCode.execution_failed, error_message=message)


def ended_without_result(item: WorkItem) -> StepResult | None:
    """What to say of an item that ended outside of a slot, by the reason that was kept. None: it has not ended."""
    if item.state is WorkState.QUARANTINED or item.state is WorkState.DISCARDED:
        return StepResult(StepStatus.ERROR, ErrorCode.internal_error, error_message=f"quarantined: {item.reason}")
    if item.state is not WorkState.CANCELLED:
        return None
    if item.reason == DROPPED:
        return StepResult(StepStatus.ERROR, ErrorCode.system_overload, error_message=DROPPED_MESSAGE)
    if item.reason == EXPIRED:
        return StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=EXPIRED_MESSAGE)
    return StepResult(StepStatus.CANCELLED, ErrorCode.cancelled_by_user, error_message=item.reason)
