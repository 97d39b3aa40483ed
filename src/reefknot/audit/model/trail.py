"""
Trails of assignments: the fields of an event that follow from earlier events of the same assignment.

The decision to stop, the quarantine and the end of an assignment are written together, and a success after retries
comes after the last of them. So a quarantine has the reason of its decision, a recovery one attempt more than its last
retry, and an end the attempts of what led to it. An assignment has a trail from its first failure to its end.
"""

from msgspec import Struct

from reefknot.audit.model.event import (
    AnyEvent,
    Completed,
    DecisionRecord,
    Dropped,
    Event,
    FailureRecord,
    Quarantined,
    Requeued,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
)
from reefknot.core.classify import classify
from reefknot.core.decide import Reason
from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.model.results import (
    DROPPED,
    UNKNOWN_OUTCOME,
    UNKNOWN_TYPE,
    UNREADABLE_SUBMISSION,
    UNREADABLE_WORK,
    WORKER_FAILED,
)
from reefknot.queue.model.source_health import NO_ANSWER
from reefknot.queue.model.work import vanished_reason

FieldPair = tuple[object, object]
"""The recorded value of a field, and the value that follows."""
Fields = dict[str, FieldPair]

MOST_TRAILS = 10_000
"""Assignments that are followed at once. Of more, those without news for the longest time are forgotten."""
_FACTS = {
    UNKNOWN_TYPE: "of an unknown type",
    WORKER_FAILED: "by a worker that failed inside",
    UNREADABLE_WORK: "as unreadable",
    UNREADABLE_SUBMISSION: "as unreadable",
    NO_ANSWER: "after a long outage of its source",
}
"""Reasons of quarantine that record a fact, up to their colon."""
_REASONS = frozenset(reason.value for reason in Reason)
_SUCCESS, _ERROR, _TIMEOUT = ResultStatus.SUCCESS.value, ResultStatus.ERROR.value, ResultStatus.TIMEOUT.value


class Trail(Struct, frozen=True):
    """The last events of an assignment, as far as later ones follow from them."""

    decision: DecisionRecord | None = None
    attempts: int | None = None
    """The attempts that its end has to have, if they are known."""
    status: str | None = None
    """The status that its end has to have, if it is known."""
    can_succeed: bool = True
    timed_out: int | None = None
    """The attempt that exceeded its time, until the decision about it."""


class Trails:
    """Follows assignments through a log, event by event, in bounded memory."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Trail] = {}

    def follow(self, event: AnyEvent) -> tuple[Fields, str]:
        """The fields of an event that follow from earlier ones; and, if there should be some and are not, the cause."""
        before = self._open.pop(_key(event), None)
        after: Trail | None
        match event:
            case RetryAttempt() | RetryExhausted() | RetryRefused():
                fields, after = _decided(event, before or Trail())
            case RetryRecovered():
                fields, after = _recovered(event, before)
            case Quarantined():
                fields, after = _quarantined(event, before)
            case TimeoutOccurred():
                known = before or Trail()
                can_succeed = known.can_succeed and not event.whole
                fields, after = {}, Trail(known.decision, None, None, can_succeed, event.attempt_number)
            case Dropped():
                fields, after = {"reason": (event.reason, DROPPED)}, Trail(status=_ERROR)
            case Requeued() if before is not None and not before.can_succeed:  # out of quarantine, with a fresh budget
                fields, after = {}, None
            case Completed():
                return ({} if before is None else _ended(event, before)), _missing(event, before)
            case _:
                fields, after = {}, before
        if event.work_id is not None and after is not None:
            self._open[_key(event)] = after
            if len(self._open) > MOST_TRAILS:
                del self._open[next(iter(self._open))]
        return fields, _missing(event, before)


def _key(event: Event) -> tuple[str, str]:
    return event.work_id or "", event.tenant_id or ""


def _decided(event: RetryAttempt | RetryExhausted | RetryRefused, before: Trail) -> tuple[Fields, Trail]:
    record = event.decision
    fields: Fields = {}
    if before.timed_out is not None:
        fields["attempt_number of its time-out"] = before.timed_out, record.history.attempts
    if isinstance(event, RetryAttempt):
        return fields, Trail(record)
    status = _TIMEOUT if record.answer == Reason.BUDGET_SPENT.value else None
    # A result counts the attempt that it tells of, even if a breaker was open and it was not made.
    return fields, Trail(record, max(1, event.total_attempts), status, can_succeed=False)


def _recovered(event: RetryRecovered, before: Trail | None) -> tuple[Fields, Trail]:
    history, fields = event.history, Fields()
    if before is not None and before.decision is not None:
        fields["total_attempts"] = event.total_attempts, before.decision.history.attempts + 1
    if history is not None:
        fields.setdefault("total_attempts", (event.total_attempts, history.attempts + 1))
        fields["history.attempts"] = history.attempts, event.total_attempts - 1
        fields["elapsed_seconds"] = event.elapsed_seconds, history.elapsed
    return fields, Trail(attempts=event.total_attempts, status=_SUCCESS)


def _quarantined(event: Quarantined, before: Trail | None) -> tuple[Fields, Trail]:
    """A quarantine after crashes, by a decision to stop, or for a fact."""
    inputs, reason, failure = event.inputs or {}, event.reason, event.failure
    decision = None if before is None or before.can_succeed else before.decision
    if "crashes" in inputs:
        crashes, limit = inputs["crashes"], inputs.get("limit")
        is_enough = isinstance(crashes, int) and isinstance(limit, int) and crashes >= limit
        expected = vanished_reason(crashes) if is_enough else f"no quarantine after {crashes} of {limit} crashes"
        attempts = inputs["attempts"] if isinstance(inputs.get("attempts"), int) else None
        return {"reason": (reason, expected), "failure": (failure, None)}, Trail(attempts=attempts, status=_ERROR)
    if decision is not None and before is not None:
        expected = f"{UNKNOWN_OUTCOME}: {inputs['key']}" if "key" in inputs else decision.answer
        return {"reason": (reason, expected), "failure": (failure, decision.failure)}, before
    fields: Fields = {}
    if not _cause(reason):
        fields["reason"] = reason, "no reason for a quarantine"
    elif failure is not None and reason.partition(": ")[0] in _FACTS:
        fields["failure"] = failure, FailureRecord.of(classify(reason, code=ErrorCode.internal_error))
    return fields, Trail(status=_ERROR if reason.partition(": ")[0] in _FACTS else None, can_succeed=False)


def _cause(reason: str) -> str:
    """The cause of a quarantine by its reason alone; empty when no quarantine has such a reason."""
    beginning = reason.partition(": ")[0]
    if beginning in _FACTS:
        return _FACTS[beginning]
    if reason in _REASONS or beginning == UNKNOWN_OUTCOME:
        return "whose decision is missing"
    return "after crashes" if reason.startswith(vanished_reason(0).partition("0")[0]) else ""


def _ended(event: Completed, before: Trail) -> Fields:
    fields: Fields = {}
    if before.attempts is not None:
        fields["attempts"] = event.attempts, before.attempts
    if before.status is not None:
        fields["status"] = event.status, before.status
    elif event.status == _SUCCESS:  # after a failure, a success comes with a recovery
        fields["status"] = event.status, "no success"
    return fields


def _missing(event: AnyEvent, before: Trail | None) -> str:
    """The kind and cause of an event that nothing before it, and no input of its own, says anything about."""
    match event:
        case RetryRecovered(history=None) if before is None or before.decision is None:
            return "retry_recovered whose retries are missing"
        case Quarantined(inputs=None) if before is None or before.decision is None or before.can_succeed:
            return f"quarantined {_cause(event.reason) or 'for no known reason'}"
        case Completed(status=ResultStatus.SUCCESS.value) if before is None and (event.attempts or 0) > 1:
            return "completed whose retries are missing"
        case _:
            return ""
