"""
A step's result, as the wire carries it, and what an assignment that ended without one is answered with.

What is put on record about one attempt.

What a worker's log says about its retries: one line for each decision after a failure.

Retried, not one to retry, or given up, with the wait or the reason; warnings, except that a failure which is not one to
retry is information. Bounded: ten lines at once, then one a second, and the next line says how many were left out.
Secrets are taken out of the whole line. Events are the record; this is for whoever watches.

What a worker counts about its retries, and shows as one frozen snapshot.

Plain numbers of this process; events are the record. Nothing here is on any decision's path.
"""

from collections import Counter
from math import isfinite
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from reefknot.audit.journal import event_id
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
from reefknot.core.canonical import canonical
from reefknot.core.failure import ErrorCode, Failure
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
from reefknot.core.overload.admission import OverloadStatus, RejectReason
from reefknot.core.overload.breaker import BreakerState
from reefknot.core.redaction import Redactor
from reefknot.core.retry.decide import Again, Decision, Reason
from reefknot.core.retry.policy import RetryPolicy
from reefknot.core.work import WorkItem, WorkState
from reefknot.retrying.call import WHY
from reefknot.runtime.log import LogBudget, logger, printable, seconds
from reefknot.worker.failures import CutOff

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


INFO, WARNING = 20, 30
LONGEST = 600


class StepLog:
    """The lines of one worker."""

    def __init__(self, worker_id: str, redactor: Redactor) -> None:
        self._worker_id = worker_id
        self._redactor = redactor
        self._lines = LogBudget()

    def decided(
        self,
        assignment: ExecAssignment,
        decision: Decision,
        policy: RetryPolicy,
        failure: Failure,
        *,
        attempts: int,
        now: float,
    ) -> None:
        """One decision. `attempts` is how many there were."""
        delay, reason = (decision.delay, None) if isinstance(decision, Again) else (None, decision.reason)
        level = INFO if reason is Reason.NOT_RETRYABLE else WARNING
        log = logger()
        if not log.isEnabledFor(level):
            return
        left_out = self._taken(now)
        if left_out is None:
            return
        what = f"trying again in {seconds(delay or 0.0)} s" if reason is None else WHY[reason]
        rest = f" ({left_out} such lines left out)" if left_out else ""
        line = (
            f"{self._worker_id}: {assignment.job.type} {assignment.assignment_id}: "
            f"attempt {attempts} of {policy.max_attempts} failed with {failure}; {what}{rest}"
        )
        log.log(
            level,
            "%s",
            printable(self._redactor(line), most=LONGEST),
            extra={
                "assignment_id": self._redactor(assignment.assignment_id),
                "job_type": self._redactor(assignment.job.type),
                "error_code": failure.code.wire,
                "retryable": policy.retryable,
                "retry_attempt": attempts,
                "retry_delay": delay,
                "reason": None if reason is None else reason.value,
            },
        )

    def _taken(self, now: float) -> int | None:
        """How many lines were left out before this one; None when this one is left out, too."""
        return self._lines.take(now)


class RetryCounts(Struct, frozen=True):
    """Retries of one worker since it started."""

    executions: int
    succeeded: int
    """Assignments that ended well, the first try included."""
    failed: int
    retries: int
    retries_by_code: dict[str, int]
    """By the error code of the failure that is retried."""
    retries_by_block: dict[str, int]
    recovered: int
    """Assignments that succeeded after at least one retry."""
    given_up: int
    """Assignments that failed although they were retried."""
    mean_backoff_s: float
    budget_exhaustions: int
    throttled: int
    expired: int
    retry_success_rate: float | None
    """Of the assignments that were retried and have ended, how many succeeded. None while there is none."""


class Counters:
    """Counts."""

    def __init__(self) -> None:
        self.executions = 0
        self.succeeded = 0
        self.failed = 0
        self.recovered = 0
        self.given_up = 0
        self.budget_exhaustions = 0
        self.throttled = 0
        self.expired = 0
        self._backoff = 0.0
        self._by_code: Counter[str] = Counter()
        self._by_block: Counter[str] = Counter()

    def retry(self, code: str, block: str, delay: float) -> None:
        """Another attempt was granted, after `delay` seconds."""
        self._by_code[code] += 1
        self._by_block[block] += 1
        self._backoff += delay

    def ended(self, *, ok: bool, retried: bool) -> None:
        """An assignment ended."""
        if ok:
            self.succeeded += 1
            self.recovered += retried
        else:
            self.failed += 1
            self.given_up += retried

    def snapshot(self) -> RetryCounts:
        retries, ended = self._by_code.total(), self.recovered + self.given_up
        return RetryCounts(
            executions=self.executions,
            succeeded=self.succeeded,
            failed=self.failed,
            retries=retries,
            retries_by_code=dict(self._by_code),
            retries_by_block=dict(self._by_block),
            recovered=self.recovered,
            given_up=self.given_up,
            mean_backoff_s=self._backoff / retries if retries else 0.0,
            budget_exhaustions=self.budget_exhaustions,
            throttled=self.throttled,
            expired=self.expired,
            retry_success_rate=self.recovered / ended if ended else None,
        )
