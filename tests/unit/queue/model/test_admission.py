"""Four policies, one function: who comes in, in whose place, when, with how much service, and what is said."""

import pytest

from reefknot.queue.model.admission import (
    HEAVY_FROM,
    KNOWN_AFTER,
    LONGEST_WAIT_MS,
    SHORTEST_WAIT_MS,
    UNKNOWN_WAIT_MS,
    Accept,
    AcceptDropping,
    Arrival,
    Defer,
    Degradation,
    DegradationLevel,
    Degrade,
    Oldest,
    OverloadStatus,
    QueueView,
    Reject,
    RejectionPolicy,
    RejectReason,
    Rules,
    Thresholds,
    admit,
    defer_time_ms,
    expected_wait_ms,
    retry_after_ms,
    tells_unknown_type,
    unknown_type_message,
    would_miss_deadline,
)
from tests.rows import for_each_row

NEW = Arrival()
REJECT, DROP, DEFER, DEGRADE = RejectionPolicy


def rules(policy: RejectionPolicy = REJECT, **changes: object) -> Rules:
    return Rules(policy=policy, **changes)  # type: ignore[arg-type]


def view(depth: int, **changes: object) -> QueueView:
    return QueueView(depth, **changes)  # type: ignore[arg-type]


def full(message: str = "Queue full, rejecting assignment") -> Reject:
    return Reject(RejectReason.QUEUE_FULL, message, UNKNOWN_WAIT_MS)


def test_the_words_of_the_wire() -> None:
    assert [one.value for one in RejectionPolicy] == ["reject_new", "drop_oldest", "defer", "degrade"]
    assert [one.value for one in RejectReason] == [
        "queue_full",
        "overloaded",
        "would_miss_deadline",
        "dropped_oldest",
        "invalid",
        "unknown_job_type",
        "draining",
    ]
    assert [one.value for one in DegradationLevel] == ["light", "medium", "heavy"]


def test_the_defaults_are_the_documented_ones() -> None:
    assert Rules() == Rules(
        size=1000,
        policy=REJECT,
        reject_at=OverloadStatus.CRITICAL,
        thresholds=Thresholds(0.5, 0.8, 1.0),
        max_drop_age_ms=60_000,
        max_defer_time_ms=30_000,
        max_wait_fraction=0.5,
        light=Degradation(False, 1.0, False),
        medium=Degradation(True, 0.8, False),
        heavy=Degradation(True, 0.5, True),
    )
    assert (KNOWN_AFTER, UNKNOWN_WAIT_MS, SHORTEST_WAIT_MS, LONGEST_WAIT_MS, HEAVY_FROM) == (
        20,
        1000,
        100,
        30_000,
        0.95,
    )
    assert QueueView(0) == QueueView(0, 1, 0, 0.0, None, False)


# ---- reject_new -----------------------------------------------------------------------------------------------------


@for_each_row("depth", [0, 499, 500, 800, 999])
def test_below_the_bound_the_default_policy_queues(depth: int) -> None:
    answer = admit(view(depth), NEW, rules())

    assert answer == Accept()
    assert answer.message == "Assignment queued"


@pytest.mark.parametrize("depth", [1000, 1001])
def test_at_the_bound_it_rejects(depth: int) -> None:
    assert admit(view(depth), NEW, rules()) == full()


def test_a_critical_threshold_below_the_size_rejects_there() -> None:
    own = rules(thresholds=Thresholds(0.1, 0.2, 0.9))

    assert admit(view(899), NEW, own) == Accept()
    assert admit(view(900), NEW, own) == full()


def test_a_critical_threshold_above_the_size_does_not_lift_the_bound() -> None:
    own = rules(thresholds=Thresholds(0.5, 0.8, 2.0))

    assert admit(view(999), NEW, own) == Accept()
    assert admit(view(1000), NEW, own) == full()


@for_each_row("policy", list(RejectionPolicy))
def test_reject_at_overloaded_gives_the_documents_table(policy: RejectionPolicy) -> None:
    own = rules(policy, reject_at=OverloadStatus.OVERLOADED)
    answer = admit(view(800), NEW, own)

    assert not isinstance(admit(view(799), NEW, own), Reject)
    assert answer == Reject(RejectReason.OVERLOADED, "Worker overloaded, rejecting assignment", UNKNOWN_WAIT_MS)


@for_each_row("policy", list(RejectionPolicy))
def test_a_draining_worker_takes_nothing(policy: RejectionPolicy) -> None:
    answer = admit(view(0, draining=True), NEW, rules(policy))

    assert answer == Reject(RejectReason.DRAINING, "Worker is draining, rejecting assignment", 30_000)


# ---- drop_oldest ----------------------------------------------------------------------------------------------------


def test_drop_oldest_queues_while_there_is_room() -> None:
    assert admit(view(999, oldest=Oldest("a", 0, 5)), NEW, rules(DROP)) == Accept()


@pytest.mark.parametrize(("priority", "waited"), [(0, 0), (0, 60_000), (-5, 10)])
def test_drop_oldest_makes_room_at_the_bound(priority: int, waited: int) -> None:
    answer = admit(view(1000, oldest=Oldest("a", priority, waited)), NEW, rules(DROP))

    assert answer == AcceptDropping("a")
    assert answer.message == "Assignment queued (dropped oldest)"


@pytest.mark.parametrize(
    "oldest", [None, Oldest("a", 1, 5), Oldest("a", 0, 60_001)], ids=["nobody", "matters more", "protected by its age"]
)
def test_drop_oldest_rejects_when_nobody_may_go(oldest: Oldest | None) -> None:
    assert admit(view(1000, oldest=oldest), NEW, rules(DROP)) == full()


def test_the_protecting_age_is_configured() -> None:
    own = rules(DROP, max_drop_age_ms=10)

    assert admit(view(1000, oldest=Oldest("a", 0, 10)), NEW, own) == AcceptDropping("a")
    assert admit(view(1000, oldest=Oldest("a", 0, 11)), NEW, own) == full()


def test_a_newcomer_of_higher_priority_drops_a_lower_one() -> None:
    assert admit(view(1000, oldest=Oldest("a", 5, 1)), Arrival(5), rules(DROP)) == AcceptDropping("a")
    assert admit(view(1000, oldest=Oldest("a", 6, 1)), Arrival(5), rules(DROP)) == full()


# ---- preemption -----------------------------------------------------------------------------------------------------


@for_each_row("policy", [REJECT, DEFER, DEGRADE])
def test_at_the_bound_a_higher_priority_takes_the_place_of_the_lowest(policy: RejectionPolicy) -> None:
    """However long that one has waited."""
    lowest = view(1000, oldest=Oldest("a", -10, 10**9))

    assert admit(lowest, Arrival(20), rules(policy)) == AcceptDropping("a")
    assert isinstance(admit(lowest, Arrival(-10), rules(policy)), Reject)
    assert isinstance(admit(view(1000), Arrival(20), rules(policy)), Reject), "nobody there may go"


@for_each_row(
    ("policy", "answer"),
    [(REJECT, full()), (DROP, AcceptDropping("a")), (DEFER, AcceptDropping("a")), (DEGRADE, AcceptDropping("a"))],
)
def test_only_reject_new_can_do_without_preemption(policy: RejectionPolicy, answer: Reject | AcceptDropping) -> None:
    lower = view(1000, oldest=Oldest("a", -10, 5))

    assert admit(lower, NEW, rules(policy, preempt=False)) == answer


def test_while_there_is_room_nobody_is_preempted() -> None:
    assert admit(view(999, oldest=Oldest("a", -10, 5)), Arrival(20), rules()) == Accept()


# ---- defer ----------------------------------------------------------------------------------------------------------


@for_each_row(
    ("depth", "milliseconds"),
    [
        (0, 0),
        (499, 0),
        (500, 0),
        (501, 60),
        (600, 6000),
        (700, 12000),
        (750, 15000),
        (999, 29940),
        (1000, 30000),
        (2000, 30000),
    ],
)
def test_a_deferral_grows_in_a_straight_line_from_half_full_to_full(depth: int, milliseconds: int) -> None:
    assert defer_time_ms(depth, rules(DEFER)) == milliseconds


def test_750_of_1000_is_deferred_for_15_seconds_and_says_so() -> None:
    answer = admit(view(750), NEW, rules(DEFER))

    assert answer == Defer(15_000)
    assert answer.message == "Assignment deferred for 15000ms"


def test_a_deferral_of_nothing_is_no_deferral() -> None:
    assert admit(view(500), NEW, rules(DEFER)) == Accept()


def test_a_full_queue_cannot_defer() -> None:
    assert admit(view(1000), NEW, rules(DEFER)) == full("Queue at capacity, cannot defer")


def test_threshold_and_longest_deferral_are_configured() -> None:
    own = rules(DEFER, size=100, max_defer_time_ms=1000, thresholds=Thresholds(0.2, 0.8, 1.0))

    assert [defer_time_ms(depth, own) for depth in (19, 20, 60, 100)] == [0, 0, 500, 1000]
    assert defer_time_ms(100, rules(DEFER, size=100, thresholds=Thresholds(1.0, 1.0, 1.0))) == 0


@pytest.mark.parametrize(
    ("fraction", "deadline", "milliseconds"), [(0.5, 10_000.0, 5000), (0.2, 10_000.0, 2000), (None, 8000.0, 4000)]
)
def test_a_deferral_is_shortened_to_fit_the_deadline(
    fraction: float | None, deadline: float, milliseconds: int
) -> None:
    own = rules(DEFER, max_wait_fraction=fraction)

    assert admit(view(750), Arrival(0, deadline), own) == Defer(milliseconds)
    assert admit(view(750), Arrival(0, 1e6), own) == Defer(15_000)


def test_a_deadline_without_room_for_waiting_is_not_deferred() -> None:
    assert admit(view(750), Arrival(0, 1.0), rules(DEFER)) == Accept()
    assert admit(view(750), Arrival(0, 2.0), rules(DEFER)) == Defer(1)


# ---- degrade --------------------------------------------------------------------------------------------------------


@for_each_row(
    ("depth", "word"),
    [(500, "light"), (799, "light"), (800, "medium"), (949, "medium"), (950, "heavy"), (999, "heavy")],
)
def test_degradation_goes_with_the_level_and_heavy_begins_at_95_percent(depth: int, word: str) -> None:
    answer = admit(view(depth), NEW, rules(DEGRADE))

    assert isinstance(answer, Degrade)
    assert answer.level.value == word
    assert answer.change == getattr(Rules(), word)
    assert answer.message == f"Assignment accepted with degradation: {word}"


def test_below_half_nothing_is_degraded() -> None:
    assert admit(view(499), NEW, rules(DEGRADE)) == Accept()


def test_a_full_queue_cannot_degrade() -> None:
    assert admit(view(1000), NEW, rules(DEGRADE)) == full("Queue at capacity, cannot degrade")


def test_what_a_level_takes_away_is_configured() -> None:
    own = rules(DEGRADE, light=Degradation(True, 0.9, True))

    assert admit(view(500), NEW, own) == Degrade(DegradationLevel.LIGHT, Degradation(True, 0.9, True))


# ---- time -----------------------------------------------------------------------------------------------------------

KNOWN = {"service_times_known": 20, "mean_service_ms": 100.0}


@for_each_row("policy", list(RejectionPolicy))
def test_work_that_could_only_start_too_late_is_rejected(policy: RejectionPolicy) -> None:
    """41 times 100 ms on one slot: 4100 ms, and half of the deadline is 4000."""
    answer = admit(view(41, **KNOWN), Arrival(0, 8000.0), rules(policy))
    message = "Assignment would miss its deadline in the queue, rejecting assignment"

    assert answer == Reject(RejectReason.WOULD_MISS_DEADLINE, message, 2050)
    assert admit(view(40, **KNOWN), Arrival(0, 8000.0), rules(policy)) == Accept()


@for_each_row(
    ("seen", "deadline", "fraction", "misses"),
    [
        (20, 100.0, 0.5, True),
        (19, 100.0, 0.5, False),
        (20, None, 0.5, False),
        (20, 100.0, None, False),
        (20, 100.0, 1.0, True),
    ],
)
def test_only_a_given_deadline_and_twenty_service_times_refuse_by_time(
    seen: int, deadline: float | None, fraction: float | None, misses: bool
) -> None:
    here = view(10, service_times_known=seen, mean_service_ms=100.0)

    assert would_miss_deadline(here, Arrival(0, deadline), rules(max_wait_fraction=fraction)) is misses


def test_slots_share_the_queue() -> None:
    assert expected_wait_ms(view(40, concurrency=8, mean_service_ms=100.0)) == 500.0
    assert not would_miss_deadline(view(40, concurrency=8, **KNOWN), Arrival(0, 1000.0), rules())
    assert would_miss_deadline(view(41, concurrency=8, **KNOWN), Arrival(0, 1000.0), rules())


def test_those_that_an_arrival_overtakes_do_not_delay_it() -> None:
    assert expected_wait_ms(view(40, behind=30, mean_service_ms=100.0)) == 1000.0
    assert expected_wait_ms(view(1, behind=2, mean_service_ms=100.0)) == 0.0, "one has left meanwhile"
    assert would_miss_deadline(view(40, **KNOWN), Arrival(0, 2000.0), rules())
    assert not would_miss_deadline(view(40, behind=30, **KNOWN), Arrival(0, 2000.0), rules())


@for_each_row(
    ("depth", "mean", "seen", "wait"),
    [(1000, 100.0, 19, 1000), (1000, 100.0, 20, 30_000), (10, 100.0, 20, 500), (1, 1.0, 20, 100), (0, 5.0, 20, 100)],
)
def test_come_back_when_half_of_the_queue_is_gone(depth: int, mean: float, seen: int, wait: int) -> None:
    assert retry_after_ms(view(depth, mean_service_ms=mean, service_times_known=seen)) == wait


def test_the_refusal_of_an_unknown_type_is_recognised_by_its_message() -> None:
    message = unknown_type_message("invoice.render", {"b", "a"})
    assert message == "job.type: 'invoice.render' is not known here; known: a, b"
    assert tells_unknown_type(message)
    assert not tells_unknown_type("job.type: required")


def test_the_baseline_looks_only_at_whether_it_drains_and_people_at_the_depth() -> None:
    view = QueueView(3, concurrency=4, service_times_known=20, mean_service_ms=5.0, draining=True, behind=1)

    assert view.for_baseline() == QueueView(3, draining=True)
