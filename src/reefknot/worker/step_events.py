"""What is put on record about one attempt."""

from typing import Any

from reefknot.core.audit.event import (
    BreakerEvent,
    DecisionRecord,
    Event,
    FailureRecord,
    Quarantined,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
    timestamp,
)
from reefknot.core.failure import Failure
from reefknot.core.messages import ExecAssignment
from reefknot.core.overload.breaker import BreakerState
from reefknot.core.retry.decide import Reason
from reefknot.execution.journal import event_id
from reefknot.worker.raised import CutOff

_REFUSED = frozenset({Reason.NOT_RETRYABLE, Reason.INNER_EXHAUSTED, Reason.THROTTLED, Reason.BREAKER_OPEN})


def about(assignment: ExecAssignment, wall: float) -> dict[str, Any]:
    """When, and whose."""
    return {
        "timestamp": timestamp(wall),
        "event_id": event_id(),
        "tenant_id": assignment.tenant_id,
        "trace_id": assignment.trace_id,
        "correlation_id": assignment.request_id,
        "work_id": assignment.assignment_id,
    }


def again(assignment: ExecAssignment, wall: float, attempts: int, record: DecisionRecord) -> RetryAttempt:
    return RetryAttempt(
        **about(assignment, wall),
        operation=assignment.job.type,
        attempt_number=attempts,
        max_attempts=record.policy.max_attempts,
        delay_seconds=record.delay or 0.0,
        exception_type=record.failure.code,
        exception_message=record.failure.message,
        decision=record,
    )


def the_end(
    assignment: ExecAssignment, wall: float, attempts: int, reason: Reason, record: DecisionRecord
) -> RetryExhausted | RetryRefused:
    kind = RetryRefused if reason in _REFUSED else RetryExhausted
    return kind(
        **about(assignment, wall),
        operation=assignment.job.type,
        total_attempts=attempts,
        final_exception_type=record.failure.code,
        final_exception_message=record.failure.message,
        reason=reason,
        decision=record,
    )


def recovered(assignment: ExecAssignment, wall: float, attempts: int, elapsed: float) -> RetryRecovered:
    return RetryRecovered(
        **about(assignment, wall), operation=assignment.job.type, total_attempts=attempts, elapsed_seconds=elapsed
    )


def expired(assignment: ExecAssignment, wall: float, attempts: int) -> TimeoutOccurred:
    return TimeoutOccurred(
        **about(assignment, wall),
        operation=assignment.job.type,
        attempt_number=attempts,
        timeout_seconds=(assignment.options.deadline_ms or 0) / 1000,
        whole=True,
    )


def cut_off(assignment: ExecAssignment, wall: float, attempt: int, limit: CutOff) -> TimeoutOccurred:
    """One attempt was cut off: at its own limit, or where the time for all of them ends."""
    return TimeoutOccurred(
        **about(assignment, wall),
        operation=assignment.job.type,
        attempt_number=attempt,
        timeout_seconds=limit.seconds,
        whole=limit.whole,
    )


def quarantined(assignment: ExecAssignment, wall: float, reason: str, failure: Failure) -> Quarantined:
    return Quarantined(**about(assignment, wall), reason=reason, failure=FailureRecord.of(failure))


def put_off(assignment: ExecAssignment, wall: float, name: str, seconds: float) -> Event:
    """Its destination is left alone; it waits for so long, and spends nothing."""
    return BreakerEvent(**about(assignment, wall), name=name, state=BreakerState.OPEN.value, wait_seconds=seconds)


def breaker(name: str, state: str, wall: float) -> Event:
    return BreakerEvent(timestamp=timestamp(wall), event_id=event_id(), name=name, state=state)
