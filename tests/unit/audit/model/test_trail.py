"""Fields of an event that follow from the earlier events of its assignment."""

from typing import Any

import msgspec
import pytest

from reefknot.audit.model.event import (
    AnyEvent,
    Completed,
    DecisionRecord,
    Dropped,
    FailureRecord,
    Quarantined,
    Requeued,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
    encode,
)
from reefknot.audit.model.replay import Replayed, replay
from reefknot.core.classify import classify
from reefknot.core.decide import REFUSED, Again, History, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from tests.rows import for_each_row
from tests.unit.audit import retry_events

AT = retry_events.AT
POLICY = RetryPolicy(3, 0.5, jitter="none", time_budget=60)
FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "no route")
A: dict[str, Any] = {"timestamp": AT, "work_id": "a", "tenant_id": "acme"}


def failed(attempts: int, *, elapsed: float = 0.0, **of: Any) -> AnyEvent:
    """The event of the decision after so many executions."""
    history = History(attempts, elapsed)
    decision = decide(POLICY, history, FAILURE, 0.5)
    record = DecisionRecord.of(decision, POLICY, history, FAILURE, 0.5)
    about = A | of
    if isinstance(decision, Again):
        of_attempt = {"attempt_number": attempts, "delay_seconds": decision.delay}
        return retry_events.attempt(record, **about, **of_attempt, exception_message="no route")
    kind = RetryRefused if decision.reason in REFUSED else RetryExhausted
    ending = {"total_attempts": attempts, "reason": decision.reason, "final_exception_message": "no route"}
    return retry_events.given_up(record, kind, **about, **ending)


def recovered(total: int, history: History | None = None, **of: Any) -> RetryRecovered:
    return RetryRecovered(**(A | of), total_attempts=total, elapsed_seconds=1.5, history=history)


def aside(reason: str = "attempts_spent", failure: Failure | None = FAILURE, **fields: Any) -> Quarantined:
    return Quarantined(
        **A, reason=reason, failure=None if failure is None else FailureRecord.of(failure), inputs=fields or None
    )


def ended(status: str, attempts: int) -> Completed:
    return Completed(**A, status=status, attempts=attempts)


def replayed(*events: AnyEvent) -> Replayed:
    return replay(map(encode, events))


def of_fact(reason: str) -> Quarantined:
    return aside(reason, classify(reason, code=ErrorCode.internal_error))


TWO = History(2, 1.5)
GIVEN_UP = (failed(1), failed(2), failed(3))
VANISHED = aside("its owner vanished 3 times", None, crashes=3, limit=3, attempts=1)
OTHER = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "another")
KEPT = aside("the outcome of a guarded key is unknown: k", key="k")


@for_each_row(
    ("events", "forged", "said"),
    [
        ((failed(1), failed(2), recovered(3, TWO)), {"total_attempts": 4}, "total_attempts 4, decided again total_att"),
        ((failed(1), failed(2), recovered(3, TWO)), {"elapsed_seconds": 9.0}, "elapsed_seconds 9.0"),
        ((failed(1), failed(2), recovered(3, TWO)), {"history": History(1, 1.5)}, "history.attempts 1"),
        ((failed(1), failed(2), recovered(3)), {"total_attempts": 2}, "decided again total_attempts 3"),
        ((recovered(3, TWO, work_id=None),), {"total_attempts": 2}, "decided again total_attempts 3"),
        ((*GIVEN_UP, aside()), {"reason": "not_retryable"}, "reason 'not_retryable', decided again reason 'attempts"),
        ((*GIVEN_UP, aside()), {"reason": "all is well"}, "reason 'all is well'"),
        ((*GIVEN_UP, aside()), {"failure": FailureRecord.of(OTHER)}, "failure FailureRecord"),
        ((*GIVEN_UP, KEPT), {"inputs": None}, "reason 'the out"),
        ((*GIVEN_UP, KEPT), {"reason": "x"}, "reason 'x'"),
        ((VANISHED,), {"reason": "its owner vanished 4 times"}, "decided again reason 'its owner vanished 3 times'"),
        ((VANISHED,), {"inputs": {"crashes": 3, "limit": 4}}, "decided again reason 'no quarantine after 3 of 4"),
        ((VANISHED,), {"inputs": {"crashes": "3", "limit": 3}}, "no quarantine after 3 of 3"),
        ((VANISHED,), {"failure": FailureRecord.of(FAILURE)}, "failure FailureRecord"),
        ((of_fact("the worker failed inside"),), {"reason": "it felt like it"}, "no reason for a quarantine"),
        ((of_fact("the stored assignment cannot be read: x"),), {"failure": FailureRecord.of(FAILURE)}, "failure Fail"),
        ((Dropped(**A, reason="dropped_oldest"),), {"reason": "expired"}, "decided again reason 'dropped_oldest'"),
        ((failed(1), recovered(2), ended("success", 2)), {"status": "error"}, "decided again status 'success'"),
        ((failed(1), recovered(2), ended("success", 2)), {"attempts": 1}, "decided again attempts 2"),
        ((*GIVEN_UP, ended("error", 3)), {"status": "success"}, "decided again status 'no success'"),
        ((*GIVEN_UP, ended("error", 3)), {"attempts": 2}, "decided again attempts 3"),
        ((*GIVEN_UP, aside(), ended("error", 3)), {"status": "success"}, "decided again status 'no success'"),
        ((failed(1, elapsed=61), ended("timeout", 1)), {"status": "error"}, "decided again status 'timeout'"),
        ((VANISHED, ended("error", 1)), {"status": "success"}, "decided again status 'error'"),
        ((VANISHED, ended("error", 1)), {"attempts": 3}, "decided again attempts 1"),
        ((of_fact("no worker knows its type"), ended("error", 0)), {"status": "timeout"}, "decided again status 'err"),
        ((Dropped(**A, reason="dropped_oldest"), ended("error", 0)), {"status": "success"}, "status 'success'"),
        ((failed(1), ended("cancelled", 1)), {"status": "success"}, "decided again status 'no success'"),
    ],
)
def test_a_field_that_earlier_events_decide_is_compared(
    events: tuple[AnyEvent, ...], forged: dict[str, Any], said: str
) -> None:
    *before, last = events
    assert replayed(*events).differences == (), "the control"
    found = replayed(*before, msgspec.structs.replace(last, **forged)).differences

    assert said in " | ".join(map(str, found))


def test_the_attempt_that_timed_out_is_the_one_that_is_decided_about() -> None:
    late = TimeoutOccurred(**A, attempt_number=2, timeout_seconds=1.0)

    assert replayed(failed(1), late, failed(2)).differences == ()
    assert "time-out 2" in str(replayed(late, failed(1)).differences[0])
    whole = TimeoutOccurred(**A, attempt_number=1, timeout_seconds=1.0, whole=True)
    assert replayed(whole, ended("timeout", 1)).differences == ()
    assert replayed(whole, ended("success", 1)).differences


def test_other_assignments_and_tenants_have_trails_of_their_own() -> None:
    """What happens between the events of one assignment changes nothing; its end is the end of its trail."""
    between = (failed(1, work_id="b"), failed(1, tenant_id=None), Requeued(**A, reason="its worker vanished"))
    assert replayed(failed(1), *between, recovered(2), ended("success", 2), ended("success", 1)).differences == ()
    hidden = msgspec.structs.replace(aside(), reason="[redacted]")
    assert replayed(*GIVEN_UP, hidden).differences == (), "what a secret was taken out of is not compared"


def test_a_job_of_a_source_that_was_requeued_out_of_quarantine_may_succeed_at_once() -> None:
    """It has no end before: its quarantine is one. Without the requeue its success is a difference."""
    requeued = Requeued(**A, reason="taken out of quarantine by ada", generation=1)

    assert replayed(*GIVEN_UP, aside(), requeued, ended("success", 1)).differences == ()
    assert replayed(*GIVEN_UP, aside(), ended("success", 1)).differences


@for_each_row(
    ("event", "cause"),
    [
        (recovered(2), "retry_recovered whose retries are missing"),
        (ended("success", 2), "completed whose retries are missing"),
        (aside(), "quarantined whose decision is missing"),
        (aside("the outcome of a guarded key is unknown: k"), "quarantined whose decision is missing"),
        (aside("its owner vanished 3 times", None), "quarantined after crashes"),
        (of_fact("the worker failed inside"), "quarantined by a worker that failed inside"),
        (aside("no worker knows its type", None), "quarantined of an unknown type"),
        (aside("the submission cannot be read: job: missing", None), "quarantined as unreadable"),
    ],
)
def test_what_older_logs_and_removed_events_leave_open_is_undecided_and_no_difference(
    event: AnyEvent, cause: str
) -> None:
    seen = replayed(event)

    assert (seen.differences, seen.undecided_by) == ((), {cause: 1})


def test_a_flood_of_assignments_needs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without news for the longest time are forgotten, and undecided from then on."""
    monkeypatch.setattr("reefknot.audit.model.trail.MOST_TRAILS", 2)
    begun = [failed(1, work_id=name) for name in "abc"]
    seen = replayed(*begun, *(recovered(9, work_id=name) for name in "bca"))

    assert [one.position for one in seen.differences] == [4, 5]
    assert seen.undecided_by == {"retry_recovered whose retries are missing": 1}
