"""
The proof of concept's test matrix, POC-001 … POC-008, through the real engine in virtual time, without jitter.

"Enabled" is the CP2 policy with the table of error codes; "disabled" is the CP1 baseline, a preset of the same engine.
`tools/poc_report.py` writes `docs/poc-report.md` from what is measured here.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest

import reefknot as rk
from reefknot.core.failure import ErrorCode
from tests.acceptance.steps import V2, StepError, Work, worker

BASELINE = rk.RetryPolicy(4, 0.1, strategy="linear", jitter="none")
"""CP1: 100 ms more each time, no jitter, no classification, no time budget."""


class Row(NamedTuple):
    """A row of the document's matrix."""

    name: str
    flag: str
    error: str
    expected: str


MATRIX = {
    "POC-001": Row("Exponential Backoff", "Enabled", "network_error", "Retry with 100ms, 200ms, 400ms delays"),
    "POC-002": Row("Retryable Error", "Enabled", "network_error", "Retry with exponential backoff"),
    "POC-003": Row("Non-Retryable Error", "Enabled", "invalid_input", "No retry"),
    "POC-004": Row("CP1 Baseline", "Disabled", "network_error", "Fixed backoff, retry all"),
    "POC-005": Row("Feature Flag Toggle", "Toggle", "network_error", "Behavior changes correctly"),
    "POC-006": Row("HTTP Error (PoC)", "Enabled", "http_error", "Retry (PoC simplification)"),
    "POC-007": Row("Connection Timeout", "Enabled", "connection_timeout", "Retry with exponential backoff"),
    "POC-008": Row("Permission Denied", "Enabled", "permission_denied", "No retry"),
}


class Result(NamedTuple):
    """One piece of work, run to its end."""

    waits_ms: list[int]
    retries_used: int
    ok: bool


class Bench:
    """Runs work that fails with the row's error, on either side of the gate, and notes what it measured."""

    def __init__(self, row: Row, note: Callable[[str, object], None]) -> None:
        self._code = ErrorCode[row.error]
        self._note = note

    def run(self, *, enabled: bool, fails: int, code: ErrorCode | None = None) -> Result:
        """`retry_count=3`; the first `fails` executions fail with `code`, or with the row's own."""
        failing = code or self._code
        retrier = worker(V2) if enabled else rk.Retrier.following(lambda failure: BASELINE, BASELINE)
        with rk.testing.virtual_time() as clock:
            outcome = retrier.run(Work(StepError(failing), times=fails))
        result = Result([round(wait * 1000) for wait in clock.waits], outcome.attempts - 1, outcome.ok)
        run = {"flag": "on" if enabled else "off", "error": failing.name, "fails": fails, "waits_ms": result.waits_ms}
        self._note("run", json.dumps(run | {"executions": outcome.attempts, "ok": result.ok}))
        return result


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    """
    The bench for the row that the test is named after.

    Notes go to the item itself: `record_property` warns whenever results are written in pytest's default XML family.
    """

    def note(name: str, value: object) -> None:
        request.node.user_properties.append((name, value))

    poc = "-".join(request.function.__name__.split("_")[1:3]).upper()
    row = MATRIX[poc]
    for field, value in (("poc", poc), *row._asdict().items()):
        note(field, value)
    return Bench(row, note)


def test_poc_001_with_the_first_three_attempts_failing_the_waits_are_100_200_and_400_ms(bench: Bench) -> None:
    """Test 1. One failed attempt, as the plan writes, would show one wait; three are needed to see three."""
    assert bench.run(enabled=True, fails=3) == Result([100, 200, 400], retries_used=3, ok=True)


def test_poc_002_a_retryable_error_is_retried_and_the_result_tells_how_often(bench: Bench) -> None:
    """Test 2."""
    assert bench.run(enabled=True, fails=1) == Result([100], retries_used=1, ok=True)


def test_poc_003_a_non_retryable_error_has_one_attempt(bench: Bench) -> None:
    """Test 3. A second attempt would have succeeded."""
    assert bench.run(enabled=True, fails=1) == Result([], retries_used=0, ok=False)


def test_poc_004_the_baseline_waits_100_200_and_300_ms_and_retries_every_error(bench: Bench) -> None:
    """Test 4."""
    assert bench.run(enabled=False, fails=3) == Result([100, 200, 300], retries_used=3, ok=True)
    assert bench.run(enabled=False, fails=3, code=ErrorCode.invalid_input).waits_ms == [100, 200, 300]


def test_poc_005_the_same_work_behaves_by_the_flag_in_either_order(bench: Bench) -> None:
    """Test 5. Off, on, off: what the flag was before leaves no trace."""
    off, on, off_again = (bench.run(enabled=flag, fails=3) for flag in (False, True, False))
    assert off == off_again == Result([100, 200, 300], retries_used=3, ok=True)
    assert on == Result([100, 200, 400], retries_used=3, ok=True)


def test_poc_006_an_http_error_without_a_status_is_retried(bench: Bench) -> None:
    assert bench.run(enabled=True, fails=3) == Result([100, 200, 400], retries_used=3, ok=True)


def test_poc_007_a_connection_timeout_is_retried_with_exponential_backoff(bench: Bench) -> None:
    assert bench.run(enabled=True, fails=3) == Result([100, 200, 400], retries_used=3, ok=True)


def test_poc_008_a_denied_permission_has_one_attempt(bench: Bench) -> None:
    assert bench.run(enabled=True, fails=1) == Result([], retries_used=0, ok=False)


def test_requirement_3_the_baseline_has_no_time_budget() -> None:
    """Half an hour an attempt, and still all four of them."""

    def slow() -> None:
        clock.advance(1800.0)
        raise StepError(ErrorCode.network_error)

    with rk.testing.virtual_time() as clock:
        outcome = rk.Retrier.following(lambda failure: BASELINE, BASELINE).run(slow)

    assert outcome.attempts == 4
    assert outcome.elapsed == pytest.approx(7200.6)
