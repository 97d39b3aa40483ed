"""What the record says about retries."""

import random

import pytest

from reefknot.audit.model.analysis import (
    MOST_ALERTS,
    MOST_CATEGORIES,
    OTHERS,
    UNNAMED,
    WINDOW,
    Alert,
    Analyser,
    Window,
    canonical_category,
    epoch_seconds,
)
from reefknot.audit.model.event import (
    AnyEvent,
    BreakerEvent,
    Completed,
    DecisionRecord,
    IdempotencyEvent,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
    timestamp,
)
from reefknot.core.decide import Again, History
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.errors import ParameterError
from tests.rows import for_each_row
from tests.unit.audit import retry_events

NOON = 1_769_342_400
FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "it broke")
DECISION = DecisionRecord.of(Again(1.0), RetryPolicy(), History(1, 0.0, 0.0), FAILURE, 0.5)


def attempt(second: float = 0, category: str | None = "RETRY_KV_GET") -> AnyEvent:
    return retry_events.attempt(DECISION, timestamp=timestamp(NOON + second), retry_category=category)


def ended(kind: str, total: int, second: float = 0, category: str | None = "RETRY_KV_GET") -> AnyEvent:
    at = timestamp(NOON + second)
    if kind == "recovered":
        return RetryRecovered(timestamp=at, retry_category=category, total_attempts=total, elapsed_seconds=1.0)
    which = RetryExhausted if kind == "exhausted" else RetryRefused
    return retry_events.given_up(DECISION, which, timestamp=at, retry_category=category, total_attempts=total)


def analysed(*events: AnyEvent, threshold: float | None = None) -> Analyser:
    analyser = Analyser(threshold=threshold)
    for event in events:
        analyser.add(event)
    return analyser


def test_an_empty_record_has_no_rates() -> None:
    result = analysed().result()

    assert (result.events, result.first, result.last, result.categories, result.alerts) == (0, None, None, {}, ())
    assert (result.overall.success_rate, result.overall.avg_attempts, result.retries_per_minute) == (None, None, 0)


def test_the_success_rate_and_the_mean_are_those_of_operations_that_ended() -> None:
    """Recovered at the third execution, exhausted at the third, refused at the first, one still under way."""
    result = analysed(
        attempt(), attempt(), ended("recovered", 3),
        attempt(), attempt(), ended("exhausted", 3),
        ended("refused", 1),
        attempt(),
    ).result()  # fmt: skip
    pattern = result.categories["RETRY_KV_GET"]

    assert (pattern.total_attempts, pattern.retries) == (8, 5)
    assert (pattern.recovered, pattern.exhausted, pattern.refused) == (1, 1, 1)
    assert pattern.success_rate == pytest.approx(1 / 3)
    assert pattern.avg_attempts == pytest.approx(7 / 3)
    assert result.overall == pattern


def completed(status: str, attempts: int = 1, operation: str = "http.request") -> AnyEvent:
    return Completed(timestamp=timestamp(NOON), status=status, operation=operation, attempts=attempts)


def test_the_success_rate_of_a_step_is_that_of_all_assignments_that_ended() -> None:
    """Nine succeed at once, one is retried and gives up: nine in ten, and not none of one."""
    step = "block:http.request"
    result = analysed(
        *[completed("success")] * 9, attempt(0, step), ended("exhausted", 2, 0, step), completed("error", 2)
    ).result()
    pattern = result.categories[step]

    assert (pattern.success_rate, pattern.avg_attempts, pattern.total_attempts) == (0.9, 1.1, 11)
    assert (pattern.success_of, pattern.ended) == ("assignments", {"error": 1, "success": 9})
    assert (pattern.retries, pattern.exhausted) == (1, 1)
    assert result.overall == pattern


def test_without_the_ends_of_assignments_the_rate_says_of_what_it_is() -> None:
    """The control: the same log before ends were recorded."""
    result = analysed(attempt(), ended("exhausted", 2)).result()

    assert (result.overall.success_rate, result.overall.ended) == (0.0, {})
    assert result.overall.success_of == "operations that failed at least once"


def test_timeouts_and_keys_are_counted_and_other_events_only_by_type() -> None:
    at = timestamp(NOON)
    result = analysed(
        IdempotencyEvent(timestamp=at, idempotency_key="k", action="hit"),
        IdempotencyEvent(timestamp=at, idempotency_key="k", action="hit"),
        IdempotencyEvent(timestamp=at, idempotency_key="k", action="record"),
        TimeoutOccurred(timestamp=at, attempt_number=1, timeout_seconds=5.0),
        BreakerEvent(timestamp=at, name="b", state="open"),
    ).result()
    pattern = result.categories[UNNAMED]

    assert (pattern.idempotency_hits, pattern.idempotency_records, pattern.timeouts) == (2, 1, 1)
    assert pattern.total_attempts == 0
    assert result.by_type == {"breaker": 1, "idempotency": 3, "timeout_occurred": 1}
    assert result.events == 5


def test_spellings_of_one_category_are_one_row() -> None:
    result = analysed(attempt(0, "RETRY_REPLAY_PROCESSING"), attempt(0, "replay_replay_processing")).result()

    assert list(result.categories) == ["REPLAY_REPLAY_PROCESSING"]
    assert canonical_category("my.own") == "my.own"
    assert canonical_category("") == UNNAMED


def test_first_and_last_are_the_earliest_and_the_latest_whatever_the_order() -> None:
    result = analysed(attempt(10), attempt(0), attempt(20), attempt(5)).result()
    assert (result.first, result.last) == (timestamp(NOON), timestamp(NOON + 20))
    broken = RetryRecovered(timestamp="yesterday", retry_category="x", total_attempts=2, elapsed_seconds=1.0)
    result = analysed(broken).result()
    assert (result.events, result.first, result.overall.recovered) == (1, None, 1), "it is counted, in no window"


def test_a_rate_is_what_fell_into_the_last_minute_and_of_an_earlier_burst_the_peak_is_left() -> None:
    result = analysed(*(attempt(second) for second in range(0, 100, 10))).result()
    assert (result.retries_per_minute, result.peak_per_minute) == (6, 6)
    result = analysed(*(attempt(0.9) for _ in range(50)), ended("recovered", 2, 60)).result()
    assert (result.retries_per_minute, result.peak_per_minute) == (0, 50)


def test_any_window_agrees_with_counting_by_hand() -> None:
    dice = random.Random(4)
    window, second, seen, peak = Window(), NOON, [], 0
    for _ in range(2000):
        second += dice.choice([0, 0, 0, 1, 1, 2, 7, 59, 60, 61])
        late = second - dice.choice([0, 0, 0, 3, 59, 60, 500])
        window.add(late)
        window.move(second)
        seen.append(late)
        expected = sum(1 for one in seen if second - WINDOW < one <= second)
        peak = max(peak, expected)
        assert window.total == expected
    assert window.peak >= peak


def test_an_alert_lasts_from_the_crossing_until_the_rate_falls_back() -> None:
    events = [attempt(second) for second in (0, 1, 2, 3)]
    result = analysed(*events, ended("recovered", 2, 4), ended("recovered", 2, 90), threshold=2).result()
    since, until = timestamp(NOON + 2), timestamp(NOON + 90)

    assert result.alerts == (Alert(None, since, until, 4, 2), Alert("RETRY_KV_GET", since, until, 4, 2))


def test_a_rate_at_the_threshold_is_no_alert_and_a_category_can_be_fine_while_all_together_are_not() -> None:
    assert analysed(attempt(0), attempt(1), threshold=2).result().alerts == ()
    result = analysed(attempt(0, "a"), attempt(1, "b"), attempt(2, "c"), threshold=2).result()
    assert [(alert.category, alert.until) for alert in result.alerts] == [(None, None)]


def test_falling_in_between_makes_two_alerts_and_a_lower_rate_leaves_the_peak() -> None:
    burst = [attempt(second) for second in (0, 0, 0, 1)]
    again = [attempt(second) for second in (200, 200, 200, 259.5, 260)]
    result = analysed(*burst, *again, threshold=2).result()
    overall = [alert for alert in result.alerts if alert.category is None]

    assert [(alert.peak_per_minute, alert.until is None) for alert in overall] == [(4, False), (4, False)]


def test_alerts_and_categories_are_bounded_and_the_rest_is_counted() -> None:
    analyser = Analyser(threshold=0)
    for number in range(MOST_CATEGORIES + 50):
        analyser.add(attempt(number * 100, f"category {number}"))
        analyser.add(attempt(number * 100 + 1, f"category {number}"))
        analyser.add(ended("recovered", 2, number * 100 + 99, f"category {number}"))
    result = analyser.result()

    assert len(result.categories) == MOST_CATEGORIES + 1
    assert result.categories[OTHERS].recovered == 50
    assert len(result.alerts) == MOST_ALERTS
    assert result.alerts_left_out == 2 * (MOST_CATEGORIES + 50) - MOST_ALERTS


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_a_threshold_that_is_no_rate_is_refused(threshold: float) -> None:
    with pytest.raises(ParameterError, match="threshold"):
        Analyser(threshold=threshold)


@for_each_row(
    ("text", "seconds"),
    [
        ("2026-01-25T21:15:00Z", 1_769_375_700.0),
        ("2026-01-25T21:15:00", 1_769_375_700.0),
        ("2026-01-25T22:15:00.500+01:00", 1_769_375_700.5),
        ("soon", None),
        ("", None),
    ],
)
def test_times_are_read_as_utc_unless_they_say_otherwise(text: str, seconds: float | None) -> None:
    assert epoch_seconds(text) == seconds


def test_steps_have_no_category_and_are_told_by_their_block() -> None:
    operations = ("http.request", "http.request", "sql.query", "")
    told = [
        RetryRecovered(timestamp=timestamp(NOON), operation=operation, total_attempts=2, elapsed_seconds=1.0)
        for operation in operations
    ]
    found = {name: pattern.recovered for name, pattern in analysed(*told, attempt()).result().categories.items()}
    assert found == {"block:http.request": 2, "block:sql.query": 1, UNNAMED: 1, canonical_category("RETRY_KV_GET"): 0}
