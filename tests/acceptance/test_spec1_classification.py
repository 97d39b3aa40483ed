"""Worker retry policy, §1.2 and §6: which error codes and which HTTP statuses are worth another try."""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.core.backoff import wait_range
from reefknot.core.classify import retryable_code
from reefknot.core.failure import ErrorCategory, ErrorCode
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import V2, HttpError, StepError, Work, worker

RETRYABLE = [
    ("network_error", 3001, "network"),
    ("connection_timeout", 3002, "network"),
    ("http_error", 3003, "network"),
    ("resource_unavailable", 2002, "execution"),
    ("system_overload", 4002, "system"),
]
NOT_RETRYABLE = [
    ("invalid_input", 1001, "validation"),
    ("missing_required_field", 1002, "validation"),
    ("invalid_format", 1003, "validation"),
    ("execution_failed", 2001, "execution"),
    ("permission_denied", 2003, "execution"),
    ("quota_exceeded", 2004, "execution"),
    ("internal_error", 4001, "system"),
    ("cancelled_by_user", 5001, "cancellation"),
    ("cancelled_by_timeout", 5002, "cancellation"),
]
STATUSES = [
    (400, False),
    (401, False),
    (403, False),
    (404, False),
    (408, True),
    (429, True),
    (500, True),
    (502, True),
    (503, True),
    (504, True),
]
RETRIED_STATUSES = {408, 429, *range(500, 600)}


@pytest.mark.parametrize(("name", "number", "category"), RETRYABLE)
def test_1_2_a_retryable_code_is_retried_with_exponential_backoff(
    virtual_time: VirtualClock, name: str, number: int, category: str
) -> None:
    code = ErrorCode(number)
    assert (code.name, code.category) == (name, ErrorCategory(category))

    outcome = worker(V2).run(Work(StepError(code)))

    assert outcome.attempts == 4
    assert outcome.reason is rk.Reason.ATTEMPTS_SPENT
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.parametrize(("name", "number", "category"), NOT_RETRYABLE)
def test_1_2_a_non_retryable_code_runs_once(virtual_time: VirtualClock, name: str, number: int, category: str) -> None:
    code = ErrorCode(number)
    assert (code.name, code.category) == (name, ErrorCategory(category))

    outcome = worker(V2).run(Work(StepError(code)))

    assert outcome.attempts == 1
    assert not outcome.ok
    assert virtual_time.waits == []


def test_1_2_the_two_tables_together_name_every_code_but_none() -> None:
    """A code added later has to be given its place in one of them."""
    listed = {number for _, number, _ in RETRYABLE + NOT_RETRYABLE}

    assert listed == {code.value for code in ErrorCode if code is not ErrorCode.none}


def test_1_3_what_no_table_names_is_not_retried() -> None:
    assert not retryable_code(ErrorCode.none)


@pytest.mark.parametrize(("status", "retried"), STATUSES)
def test_1_2_an_http_error_is_retried_by_its_status(virtual_time: VirtualClock, status: int, retried: bool) -> None:
    outcome = worker(V2).run(Work(StepError(ErrorCode.http_error, http_status=status)))

    assert outcome.attempts == (4 if retried else 1)
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4] if retried else [])


@pytest.mark.parametrize(("status", "retried"), STATUSES)
def test_1_2_a_clients_exception_with_that_status_is_judged_alike(
    virtual_time: VirtualClock, status: int, retried: bool
) -> None:
    """The same table in the plain library: no code, only what an HTTP client raises."""
    outcome = rk.Retrier(V2).run(Work(HttpError(status)))

    assert outcome.attempts == (4 if retried else 1)
    assert len(virtual_time.waits) == (3 if retried else 0)


def test_1_2_of_all_other_4xx_none_and_of_all_other_5xx_every_one_is_retried(no_wait: VirtualClock) -> None:
    by_code = {
        s
        for s in range(400, 600)
        if worker(V2).run(Work(StepError(ErrorCode.http_error, http_status=s))).history[0].delay is not None
    }
    by_status = {s for s in range(400, 600) if rk.Retrier(V2).run(Work(HttpError(s))).history[0].delay is not None}

    assert by_code == RETRIED_STATUSES
    assert by_status == RETRIED_STATUSES


def test_6_2_a_429_can_have_a_longer_backoff_than_the_rest(virtual_time: VirtualClock) -> None:
    """The sample's override for 429, 1 s up to 60 s, beside the block's own 100 ms."""
    limited = V2.replace(base_delay=1.0, max_delay=60.0)
    retrier = rk.Retrier.following(lambda failure: limited if failure.http_status == 429 else V2, V2)

    retrier.run(Work(StepError(ErrorCode.http_error, http_status=429)))
    retrier.run(Work(StepError(ErrorCode.http_error, http_status=503)))

    assert virtual_time.waits == pytest.approx([1.0, 2.0, 4.0, 0.1, 0.2, 0.4])
    equal = limited.replace(jitter="equal")
    assert [wait_range(k, equal) for k in range(3)] == [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0)]
