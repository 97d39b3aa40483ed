"""Values as people type them, and policies in words."""

from datetime import UTC, datetime
from math import inf

import pytest

from reefknot.console.operations.values import duration, duration_s, seconds, time_ms
from reefknot.console.words import policies as words
from reefknot.core.policy import RetryPolicy
from reefknot.errors import ParameterError
from reefknot.policy.model.explain import PlannedWait

NOON = datetime(2026, 1, 25, 12, 0, tzinfo=UTC)


def test_a_time_is_absolute_or_an_age() -> None:
    noon = int(NOON.timestamp() * 1000)
    assert time_ms("since", None) is None
    assert time_ms("since", "90s", now=NOON) == noon - 90_000
    assert time_ms("since", "1.5h", now=NOON) == noon - 5_400_000
    assert time_ms("since", "2026-01-25T12:00:00Z") == noon
    assert time_ms("since", "999999999d", now=NOON) == 0
    with pytest.raises(ParameterError) as refused:
        time_ms("since", "90x")
    assert refused.value.problem.startswith("'90x' is not accepted: a time such as ")


def test_what_is_no_duration_has_no_seconds() -> None:
    for text in ("", "90", "s", "-1s", "1.2345s", "90x", "1h30m", "1234567890s", "5s\n"):
        assert duration_s(text) is None, text


def test_attempts_are_given_both_ways() -> None:
    said = {1: "1 attempt (no retries)", 2: "2 attempts (1 + 1 retry)", 4: "4 attempts (1 + 3 retries)"}
    assert {executions: words.attempts(executions) for executions in said} == said


def test_a_duration_is_shown_in_the_unit_it_is_written_in() -> None:
    said = {0.0: "0 s", 0.1: "100 ms", 0.0005: "0.5 ms", 1.0: "1 s", 1.5: "1.5 s", 86400.0: "86400 s", inf: "no limit"}
    assert {value: seconds(value) for value in said} == said


def test_a_measured_duration_has_its_two_largest_units() -> None:
    said: dict[float | None, str] = {0: "0 s", 0.0004: "0.4 ms", 0.25: "250 ms", 0.9996: "1 s", 4.21: "4.2 s"}
    said |= {59.96: "1 min", 200: "3 min 20 s", 3600: "1 h", 7500: "2 h 5 min", 86_400 * 3 + 4 * 3600: "3 d 4 h"}
    said |= {inf: "without end", -3: "0 s", None: ""}
    assert {value: duration(value) for value in said} == said


def test_a_range_shows_its_unit_once_when_it_can() -> None:
    said = {(1.0, 2.0): "1–2 s", (0.5, 1.0): "500 ms–1 s", (2.0, 2.0): "2 s", (0.0, 0.1): "0 s–100 ms"}
    assert {span: words.span(*span) for span in said} == said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (RetryPolicy(3, 0.5, max_delay=10), "500 ms ×2 up to 10 s, ±10 %"),
        (RetryPolicy(strategy="linear", jitter="none"), "1 s more each time, up to 30 s, no jitter"),
        (RetryPolicy(strategy="fixed", jitter="full"), "1 s each, full jitter"),
        (RetryPolicy(strategy="immediate"), "at once"),
        (RetryPolicy(strategy="no_retry"), "never retried"),
    ],
)
def test_every_strategy_has_its_sentence(policy: RetryPolicy, said: str) -> None:
    assert words.growth(policy) == said


def test_a_long_row_of_waits_is_cut() -> None:
    waits = tuple(PlannedWait(k, k + 1.0, k + 1.0) for k in range(5))
    assert words.waits(waits) == "1 s, then 2 s, then 3 s, …"
    assert words.waits(waits[:2]) == "1 s, then 2 s"
