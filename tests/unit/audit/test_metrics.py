"""`EventCounters`: totals with bounded labels and the last 15 minutes, from events."""

import msgspec
import pytest

from reefknot.audit.journal import envelope
from reefknot.audit.metrics import MOST_BLOCKS, SPANS, STEPS, ActivityRecord, EventCounters, added, held, less, series
from reefknot.audit.model.event import (
    Admission,
    BreakerEvent,
    Completed,
    DecisionRecord,
    Dropped,
    Event,
    IdempotencyEvent,
    OperatorAction,
    Quarantined,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TakenOver,
    TimeoutOccurred,
)
from reefknot.core.decide import Again, History, Reason, Stop
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from tests.unit.audit import retry_events

NOW = 1_700_000_000.0
ABOUT = envelope(wall=NOW, work_id="a")
FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "away")


class Wall:
    """A wall clock that a test moves."""

    def __init__(self) -> None:
        self.at = NOW

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def counters(wall: Wall) -> EventCounters:
    return EventCounters(wall)


def retry(block: str | None = "http.request", delay: float = 0.3) -> RetryAttempt:
    decision = DecisionRecord.of(Again(delay), RetryPolicy(), History(1, 0.0, 0.0), FAILURE, 0.5)
    return retry_events.attempt(decision, **ABOUT, operation=block, delay_seconds=delay)


def given_up(kind: type[RetryExhausted | RetryRefused], reason: Reason, attempts: int = 2) -> Event:
    decision = DecisionRecord.of(Stop(reason), RetryPolicy(), History(1, 0.0, 0.0), FAILURE, 0.5)
    return retry_events.given_up(decision, kind, **ABOUT, total_attempts=attempts, reason=reason)


WAITED = {"retry_attempts|http.request|NETWORK_ERROR": 1, "retry_wait|0.5": 1, "retry_wait_sum": 0.3}
SPENT, REFUSED = given_up(RetryExhausted, Reason.BUDGET_SPENT), given_up(RetryRefused, Reason.THROTTLED)
REJECTED = {"refused": {"queue_full io": 4, "queue_full cpu": 1}}
SHORT = {"jobs|success": 1, "job_seconds|0.05": 1, "job_seconds_sum": 0.04}
LONG = {"jobs|timeout": 1, "job_seconds|+Inf": 1, "job_seconds_sum": 4000.0}


def admitted(message: str) -> Admission:
    return Admission(**ABOUT, inputs={"message": message})


@pytest.mark.parametrize(
    ("event", "totals", "counted"),
    [
        (retry(), WAITED, {"retries": 1}),
        (SPENT, {"retry_given_up|budget_spent": 1}, {"given_up": 1, "unrecovered": 1}),
        (REFUSED, {"retry_given_up|throttled": 1}, {"given_up": 1, "unrecovered": 1, "throttled": 1}),
        (given_up(RetryRefused, Reason.NOT_RETRYABLE, 1), {"retry_given_up|not_retryable": 1}, {"given_up": 1}),
        (RetryRecovered(**ABOUT, total_attempts=2, elapsed_seconds=1.0), {"retry_recovered": 1}, {"recovered": 1}),
        (Admission(**ABOUT), {"admissions|accepted": 1}, {"accepted": 1}),
        (admitted("Assignment deferred for 20ms"), {"admissions|deferred": 1}, {"deferred": 1}),
        (admitted("Assignment accepted with degradation: light"), {"admissions|degraded": 1}, {"degraded": 1}),
        (Admission(**ABOUT, status="rejected", reason="queue_full"), {"admissions|rejected": 1}, {"rejected": 1}),
        (Admission(**ABOUT, status="rejected", inputs=REJECTED), {"admissions|rejected": 5}, {"rejected": 5}),
        (Dropped(**ABOUT, reason="dropped"), {"admissions|dropped": 1}, {"dropped": 1}),
        (Completed(**ABOUT, status="success", duration_ms=40), SHORT, {"ended": 1, "succeeded": 1}),
        (Completed(**ABOUT, status="timeout", duration_ms=4_000_000), LONG, {"ended": 1, "failed": 1}),
        (Completed(**ABOUT, status="cancelled"), {"jobs|cancelled": 1}, {"ended": 1}),
        (IdempotencyEvent(**ABOUT, idempotency_key="k", action="hit"), {"idempotency|hit": 1}, {}),
        (IdempotencyEvent(**ABOUT, idempotency_key="k", action="new word"), {"idempotency|other": 1}, {}),
        (
            TakenOver(**ABOUT, idempotency_key="k", owner="a", fence=2, previous_owner="b", previous_fence=1),
            {"idempotency|taken_over": 1},
            {},
        ),
        (TimeoutOccurred(**ABOUT, attempt_number=1, timeout_seconds=1.0), {"timeouts": 1}, {}),
        (BreakerEvent(**ABOUT, name="api", state="open"), {"breaker_changes|open": 1}, {}),
        (BreakerEvent(**ABOUT, name="api", state="open", wait_seconds=2.0), {}, {}),
        (BreakerEvent(**ABOUT, name="source:m", state="cooling", wait_seconds=2.0), {"breaker_changes|cooling": 1}, {}),
        (OperatorAction(**ABOUT, actor="a", action="drain"), {}, {}),
    ],
)
def test_an_event_is_counted_by_its_kind(
    counters: EventCounters, event: Event, totals: dict[str, float], counted: dict[str, float]
) -> None:
    counters.observe(event)
    record = counters.record()

    assert record.totals == totals
    assert [one for one in record.buckets.values() if one] == ([counted] if counted else [])


def test_blocks_beyond_the_bound_share_one_label_in_the_sum_of_many_processes_too(counters: EventCounters) -> None:
    for number in (*range(MOST_BLOCKS + 25), 0):
        counters.observe(retry(f"block.{number}"))
    totals = counters.record().totals
    assert len([name for name in totals if name.startswith("retry_attempts|")]) == MOST_BLOCKS + 1
    assert totals["retry_attempts|other|NETWORK_ERROR"] == 25
    assert totals["retry_attempts|block.0|NETWORK_ERROR"] == 2

    records = [ActivityRecord(totals={f"retry_attempts|block.{number}|X": 1.0}) for number in range(80)]
    total = added(records).totals
    assert (len(total), sum(total.values())) == (MOST_BLOCKS + 1, 80)


def test_a_label_can_neither_forge_another_nor_be_endless(counters: EventCounters) -> None:
    counters.observe(retry("a|NETWORK_ERROR\n" + "x" * 500))
    (name,) = [one for one in counters.record().totals if one.startswith("retry_attempts|")]

    assert name.count("|") == 2
    assert "\n" not in name
    assert len(name) < 150


def test_steps_older_than_15_minutes_go(counters: EventCounters, wall: Wall) -> None:
    for _ in range(STEPS + 30):
        counters.observe(Quarantined(**ABOUT, reason="spent"))
        wall.at += 10
    record = counters.record()

    assert len(record.buckets) == STEPS
    assert record.totals == {"quarantined": STEPS + 30}
    assert sum(series(record.buckets, wall.at - 10)["quarantined"]) == STEPS


def test_rates_are_those_of_the_last_ten_seconds(counters: EventCounters, wall: Wall) -> None:
    for _ in range(5):
        counters.observe(retry())
    assert counters.recent()[1]["retries"] == 0.5
    wall.at += 11
    assert counters.recent()[1]["retries"] == 0.0


def test_a_sampled_value_of_a_running_system_holds_until_the_next_one_and_counts_as_a_change_only_when_it_differs(
    counters: EventCounters, wall: Wall
) -> None:
    values = {"queued": 3.0, "oldest_s": 1.0, "quarantine": 2.0, "level": 0.0}
    counters.sample(values)
    changed = counters.changes
    wall.at += 30
    counters.sample(values)
    assert counters.changes == changed
    wall.at += 600
    counters.sample(values | {"quarantine": 5.0})
    assert counters.changes == changed + 1

    columns = series(held(counters.record().buckets, wall.at), wall.at)
    assert columns["quarantine"][-2:] == [2.0, 5.0]
    assert columns["queued"][0] is None, "before the first one nothing is known"
    assert len(columns["queued"]) == STEPS
    assert series(held(counters.record().buckets, wall.at + 5000), wall.at + 5000)["quarantine"] == [5.0] * STEPS


def test_a_step_in_which_nobody_sampled_is_a_gap_and_counts_nothing(counters: EventCounters, wall: Wall) -> None:
    counters.sample({"queued": 3.0})
    wall.at += 20
    columns = series(counters.record().buckets, wall.at)
    assert columns["queued"][-3:] == [3.0, None, None]
    assert columns["retries"][-3:] == [0, 0, 0]


def test_less_is_the_inverse_of_the_sum_in_which_sampled_values_are_not_added() -> None:
    earlier = ActivityRecord(totals={"a": 2.0, "b": 1.0}, buckets={7: {"retries": 1.0}})
    later = ActivityRecord(totals={"a": 5.0, "b": 1.0}, buckets={7: {"retries": 4.0, "queued": 1.0}, 8: {"ended": 1.0}})
    rest = less(later, earlier)
    assert rest.totals == {"a": 3.0}
    assert added([earlier, rest]).totals == later.totals
    assert added([earlier, rest]).buckets == later.buckets
    sampled = [ActivityRecord(buckets={7: {"queued": queued, "retries": 1.0}}) for queued in (3.0, 2.0)]
    assert added(sampled).buckets == {7: {"queued": 3.0, "retries": 2.0}}


def test_a_day_of_counts_is_there_in_coarser_steps_and_stays_bounded(counters: EventCounters, wall: Wall) -> None:
    """Thirty hours, one count and one sample every ten seconds."""
    for number in range(30 * 360):
        counters.count({"quarantined": 1}, {"quarantined": 1})
        counters.sample({"queued": float(number % 7)})
        wall.at += 10
    record = counters.record()

    for name, span in SPANS.items():
        buckets = record.coarse.get(name, record.buckets)
        assert len(buckets) == span.steps
        columns = series(buckets, wall.at - 10, steps=span.steps, step_s=span.step_s)
        assert set(columns["quarantined"][1:-1]) == {span.step_s / 10}, name
        assert max(columns["queued"]) == 6.0
    assert len(msgspec.json.encode(record)) < 20_000
    assert added([record, record]).coarse["24h"].keys() == record.coarse["24h"].keys()
    assert less(added([record, record]), record) == record
    resting = held(record.coarse["2h"], wall.at + 3600, SPANS["2h"])
    assert series(resting, wall.at + 3600, steps=60, step_s=120)["queued"][-1] is not None
