"""A step's result, as the wire carries it."""

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import ExecAssignment, ExecResult, JobType, ResultStatus, StepResult, StepStatus

_RESULT_OF = {
    StepStatus.OK: ResultStatus.SUCCESS,
    StepStatus.ERROR: ResultStatus.ERROR,
    StepStatus.TIMEOUT: ResultStatus.TIMEOUT,
    StepStatus.CANCELLED: ResultStatus.CANCELLED,
}


def result_of(
    assignment: ExecAssignment,
    step: StepResult,
    *,
    provider_id: str,
    worker_id: str | None,
    wall: float,
    retries_used: int,
) -> ExecResult:
    """What the router is told. Error codes travel by their names."""
    failed = step.error_code is not ErrorCode.none
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=_RESULT_OF[step.status],
        provider_id=provider_id,
        job=JobType(assignment.job.type),
        latency_ms=round(step.latency_ms, 3),
        cost=step.metadata.get("cost", 0),
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        timestamp=int(wall * 1000),
        worker_id=worker_id,
        retries_used=retries_used,
        error_code=step.error_code.wire if failed else None,
        error_message=step.error_message or None,
        output=step.outputs or None,
    )
