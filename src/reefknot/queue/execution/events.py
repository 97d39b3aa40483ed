"""
Events of attempts: retried, given up, recovered, timed out, put off, quarantined.

They are about an assignment, or about a stored item: whichever the caller has.
"""

from typing import Any

from msgspec import to_builtins

from reefknot.audit.journal import about_assignment, about_item
from reefknot.audit.model.event import (
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
)
from reefknot.core.breaker import BreakerState
from reefknot.core.decide import REFUSED, History, Reason
from reefknot.core.failure import Failure
from reefknot.queue.execution.failures import TimedOut
from reefknot.queue.model.destination_health import BreakerInputs
from reefknot.queue.model.messages import ExecAssignment
from reefknot.queue.model.work import WorkItem


def about(work: ExecAssignment | WorkItem, wall: float) -> dict[str, Any]:
    """The envelope of an event about this work."""
    return about_item(work, wall) if isinstance(work, WorkItem) else about_assignment(work, wall)


def _operation(work: ExecAssignment | WorkItem, wall: float) -> dict[str, Any]:
    """The envelope of an event about what this work does."""
    return {**about(work, wall), "operation": work.kind if isinstance(work, WorkItem) else work.job.type}


def retry_event(
    work: ExecAssignment | WorkItem, wall: float, attempts: int, record: DecisionRecord, *, began: float
) -> RetryAttempt:
    """The event of an execution that failed and will be retried; `began` is its start, wall time."""
    return RetryAttempt(
        **_operation(work, wall),
        attempt_number=attempts,
        max_attempts=record.policy.max_attempts,
        delay_seconds=record.delay or 0.0,
        exception_type=record.failure.exception_type,
        exception_message=record.failure.message,
        decision=record,
        attempt_seconds=_seconds(began, wall),
    )


def end_event(
    work: ExecAssignment | WorkItem,
    wall: float,
    attempts: int,
    reason: Reason,
    record: DecisionRecord,
    *,
    began: float | None = None,
) -> RetryExhausted | RetryRefused:
    """The event of work that is given up; `began` is the start of its last execution, None without one."""
    kind = RetryRefused if reason in REFUSED else RetryExhausted
    return kind(
        **_operation(work, wall),
        total_attempts=attempts,
        final_exception_type=record.failure.exception_type,
        final_exception_message=record.failure.message,
        reason=reason,
        decision=record,
        attempt_seconds=None if began is None else _seconds(began, wall),
    )


def _seconds(began: float, wall: float) -> float:
    return round(max(0.0, wall - began), 3)


def recovered_event(work: ExecAssignment | WorkItem, wall: float, history: History) -> RetryRecovered:
    """The event of a success after the executions of this history, which ended in the moment of the success."""
    return RetryRecovered(
        **_operation(work, wall),
        total_attempts=history.attempts + 1,
        elapsed_seconds=history.elapsed,
        history=history,
    )


def expired_event(work: ExecAssignment, wall: float, attempts: int = 0, timeout_ms: int = 0) -> TimeoutOccurred:
    """Work whose deadline, or `timeout_ms` where it has none, was over before it ran, or ran again."""
    return TimeoutOccurred(
        **_operation(work, wall),
        attempt_number=attempts,
        timeout_seconds=(work.options.deadline_ms or timeout_ms) / 1000,
        whole=True,
    )


def timeout_event(work: ExecAssignment | WorkItem, wall: float, attempt: int, limit: TimedOut) -> TimeoutOccurred:
    """An attempt that was cut off: at its own limit, or where the time for all of them ends."""
    return TimeoutOccurred(
        **_operation(work, wall),
        attempt_number=attempt,
        timeout_seconds=limit.seconds,
        whole=limit.whole,
    )


def quarantined_event(
    work: ExecAssignment | WorkItem, wall: float, reason: str, failure: Failure, *, key: str = ""
) -> Quarantined:
    """The event of a quarantine by a worker; `key` is the guarded key whose outcome is unknown, if that is why."""
    inputs = {"key": key} if key else None
    return Quarantined(**about(work, wall), reason=reason, failure=FailureRecord.of(failure), inputs=inputs)


def snooze_event(work: ExecAssignment | WorkItem, wall: float, name: str, seconds: float) -> Event:
    """The breaker of its source holds the job: it waits this time, and spends no attempt."""
    return BreakerEvent(**about(work, wall), name=name, state=BreakerState.OPEN.value, wait_seconds=seconds)


def breaker_event(work: ExecAssignment | WorkItem, wall: float, name: str, inputs: BreakerInputs) -> BreakerEvent:
    """The event of a breaker that this work has changed or probes, or of the wait that it begins for it."""
    state, probe_in, wait = inputs.decided()
    return BreakerEvent(
        **about(work, wall),
        name=name,
        state=state.value,
        wait_seconds=wait,
        probe_seconds=probe_in,
        inputs=to_builtins(inputs),
    )
