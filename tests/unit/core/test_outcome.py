"""An outcome is what came of it: the value, or the error, never both."""

import pytest

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.decide import AttemptRecord, Outcome, Reason

FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "cut")
RECORD = AttemptRecord(number=1, failure=FAILURE, elapsed=0.5, delay=None, draw=0.25)


def test_a_success_unwraps_to_its_value() -> None:
    outcome = Outcome(ok=True, value=7, error=None, attempts=1, history=(), elapsed=0.1, reason=None)

    assert outcome.unwrap() == 7


def test_a_success_may_be_none() -> None:
    outcome: Outcome[None] = Outcome(
        ok=True, value=None, error=None, attempts=2, history=(RECORD,), elapsed=0.1, reason=None
    )

    assert outcome.unwrap() is None


def test_a_failure_unwraps_by_raising_the_very_error() -> None:
    error = ConnectionError("cut")
    outcome: Outcome[int] = Outcome(
        ok=False,
        value=None,
        error=error,
        attempts=1,
        history=(RECORD,),
        elapsed=0.5,
        reason=Reason.ATTEMPTS_SPENT,
    )

    with pytest.raises(ConnectionError) as caught:
        outcome.unwrap()

    assert caught.value is error


def test_a_record_of_an_attempt_does_not_change() -> None:
    with pytest.raises(AttributeError):
        RECORD.delay = 1.0  # type: ignore[misc]
