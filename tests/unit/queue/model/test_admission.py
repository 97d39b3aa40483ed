"""Who comes in, in whose place, when, with how much service; and the level that is told meanwhile."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.queue.model import admission
from reefknot.queue.model.admission import (
    HOLD_S,
    UNKNOWN_WAIT_MS,
    Accept,
    AcceptDropping,
    Admission,
    Arrival,
    Defer,
    Degradation,
    Degrade,
    HeldStatus,
    Oldest,
    OverloadStatus,
    QueueView,
    Reject,
    RejectionPolicy,
    RejectReason,
    Rules,
    Thresholds,
    admit,
    held,
    level,
    refused_from,
    reported,
    would_miss_deadline,
)
from tests.rows import for_each_row

NEW = Arrival()
REJECT, DROP, DEFER, DEGRADE = RejectionPolicy


def full(message: str = "Queue full, rejecting assignment") -> Reject:
    return Reject(RejectReason.QUEUE_FULL, message, UNKNOWN_WAIT_MS)


def asked(depth: int, policy: RejectionPolicy = REJECT, arrival: Arrival = NEW, **given: Any) -> Admission:
    """The answer at a queue that is so deep; `given` are fields of what is seen there and of the rules."""
    seen = {name: given.pop(name) for name in list(given) if name in QueueView.__struct_fields__}
    return admit(QueueView(depth, **seen), arrival, Rules(policy=policy, **given))


def test_the_words_of_the_wire_and_the_defaults_are_the_documented_ones() -> None:
    assert list(RejectionPolicy) == ["reject_new", "drop_oldest", "defer", "degrade"]
    reasons = "queue_full overloaded would_miss_deadline dropped_oldest invalid unknown_job_type draining"
    assert (" ".join(RejectReason), list(admission.DegradationLevel)) == (reasons, ["light", "medium", "heavy"])
    light, medium, heavy = Degradation(False, 1.0, False), Degradation(True, 0.8, False), Degradation(True, 0.5, True)
    thresholds, reject_at = Thresholds(0.5, 0.8, 1.0), OverloadStatus.CRITICAL
    assert Rules() == Rules(1000, REJECT, reject_at, thresholds, 60_000, 30_000, 0.5, True, light, medium, heavy)
    assert (admission.KNOWN_AFTER, UNKNOWN_WAIT_MS, admission.HEAVY_FROM) == (20, 1000, 0.95)
    assert (admission.SHORTEST_WAIT_MS, admission.LONGEST_WAIT_MS) == (100, 30_000)
    assert QueueView(0) == QueueView(0, 1, 0, 0.0, None, False)


def test_the_default_policy_queues_below_the_bound_and_rejects_from_there_on() -> None:
    assert [asked(depth) for depth in (0, 499, 500, 800, 999)] == [Accept("Assignment queued")] * 5
    assert [asked(1000), asked(1001)] == [full(), full()]


def test_a_critical_threshold_rejects_below_the_size_and_does_not_lift_the_bound() -> None:
    below, above = Thresholds(0.1, 0.2, 0.9), Thresholds(0.5, 0.8, 2.0)
    assert [asked(899, thresholds=below), asked(900, thresholds=below)] == [Accept(), full()]
    assert [asked(999, thresholds=above), asked(1000, thresholds=above)] == [Accept(), full()]


@for_each_row("policy", list(RejectionPolicy))
def test_reject_at_overloaded_and_draining_hold_under_every_policy(policy: RejectionPolicy) -> None:
    overloaded = Reject(RejectReason.OVERLOADED, "Worker overloaded, rejecting assignment", UNKNOWN_WAIT_MS)
    draining = Reject(RejectReason.DRAINING, "Worker is draining, rejecting assignment", 30_000)
    assert not isinstance(asked(799, policy, reject_at=OverloadStatus.OVERLOADED), Reject)
    assert asked(800, policy, reject_at=OverloadStatus.OVERLOADED) == overloaded
    assert asked(0, policy, draining=True) == draining


@for_each_row(
    ("oldest", "arrival", "own", "answer"),
    [
        (Oldest("a", 0, 0), NEW, {}, AcceptDropping("a", "Assignment queued (dropped oldest)")),
        (Oldest("a", 0, 60_000), NEW, {}, AcceptDropping("a")),
        (Oldest("a", -5, 10), NEW, {}, AcceptDropping("a")),
        (None, NEW, {}, full()),
        (Oldest("a", 1, 5), NEW, {}, full()),  # it matters more
        (Oldest("a", 0, 60_001), NEW, {}, full()),  # it is protected by its age
        (Oldest("a", 0, 10), NEW, {"max_drop_age_ms": 10}, AcceptDropping("a")),
        (Oldest("a", 0, 11), NEW, {"max_drop_age_ms": 10}, full()),
        (Oldest("a", 5, 1), Arrival(5), {}, AcceptDropping("a")),
        (Oldest("a", 6, 1), Arrival(5), {}, full()),
    ],
)
def test_drop_oldest_makes_room_or_rejects_if_the_oldest_stays(
    oldest: Oldest | None, arrival: Arrival, own: dict[str, Any], answer: Admission
) -> None:
    assert asked(1000, DROP, arrival, oldest=oldest, **own) == answer
    assert asked(999, DROP, arrival, oldest=oldest, **own) == Accept(), "there is room"


@for_each_row("policy", [REJECT, DEFER, DEGRADE])
def test_at_the_bound_a_higher_priority_takes_the_place_of_the_lowest_however_old(policy: RejectionPolicy) -> None:
    lowest = Oldest("a", -10, 10**9)
    assert asked(1000, policy, Arrival(20), oldest=lowest) == AcceptDropping("a")
    assert isinstance(asked(1000, policy, Arrival(-10), oldest=lowest), Reject)
    assert isinstance(asked(1000, policy, Arrival(20)), Reject), "nobody there may go"


def test_only_reject_new_can_do_without_preemption_and_none_is_needed_while_there_is_room() -> None:
    answers = {policy: asked(1000, policy, oldest=Oldest("a", -10, 5), preempt=False) for policy in RejectionPolicy}
    assert answers == {REJECT: full(), **dict.fromkeys((DROP, DEFER, DEGRADE), AcceptDropping("a"))}
    assert asked(999, arrival=Arrival(20), oldest=Oldest("a", -10, 5)) == Accept()


def test_a_deferral_grows_in_a_straight_line_from_half_full_to_full() -> None:
    def times(*depths: int, **own: Any) -> list[int]:
        return [admission.defer_time_ms(depth, Rules(policy=DEFER, **own)) for depth in depths]

    assert times(0, 499, 500, 501, 600, 700, 750) == [0, 0, 0, 60, 6000, 12_000, 15_000]
    assert times(999, 1000, 2000) == [29_940, 30_000, 30_000]
    own = {"size": 100, "max_defer_time_ms": 1000, "thresholds": Thresholds(0.2, 0.8, 1.0)}
    assert times(19, 20, 60, 100, **own) == [0, 0, 500, 1000]
    assert times(100, size=100, thresholds=Thresholds(1.0, 1.0, 1.0)) == [0]


@for_each_row(
    ("depth", "deadline", "own", "answer"),
    [
        (750, None, {}, Defer(15_000)),
        (500, None, {}, Accept()),  # a deferral of nothing is none
        (1000, None, {}, full("Queue at capacity, cannot defer")),
        (750, 10_000.0, {}, Defer(5000)),  # it has to fit the deadline
        (750, 10_000.0, {"max_wait_fraction": 0.2}, Defer(2000)),
        (750, 8000.0, {"max_wait_fraction": None}, Defer(4000)),
        (750, 1e6, {"max_wait_fraction": None}, Defer(15_000)),
        (750, 1.0, {}, Accept()),  # without room for waiting
        (750, 2.0, {}, Defer(1)),
    ],
)
def test_defer_puts_an_arrival_off_as_its_deadline_allows(depth: int, deadline: Any, own: Any, answer: Any) -> None:
    assert asked(depth, DEFER, Arrival(0, deadline), **own) == answer
    assert Defer(15_000).message == "Assignment deferred for 15000ms"


@for_each_row(
    ("depth", "word"),
    [(500, "light"), (799, "light"), (800, "medium"), (949, "medium"), (950, "heavy"), (999, "heavy")],
)
def test_degradation_goes_with_the_level_and_heavy_begins_at_95_percent(depth: int, word: str) -> None:
    answer = asked(depth, DEGRADE)
    assert answer == Degrade(admission.DegradationLevel(word), getattr(Rules(), word))
    assert answer.message == f"Assignment accepted with degradation: {word}"
    own: Any = {word: Degradation(True, 0.9, True)}
    assert asked(depth, DEGRADE, **own) == Degrade(admission.DegradationLevel(word), own[word])


def test_below_half_nothing_is_degraded_and_a_full_queue_cannot_degrade() -> None:
    assert asked(499, DEGRADE) == Accept()
    assert asked(1000, DEGRADE) == full("Queue at capacity, cannot degrade")


KNOWN = {"service_times_known": 20, "mean_service_ms": 100.0}


@for_each_row("policy", list(RejectionPolicy))
def test_work_that_could_only_start_too_late_is_rejected(policy: RejectionPolicy) -> None:
    """41 times 100 ms on one slot: 4100 ms, and half of the deadline is 4000."""
    message = "Assignment would miss its deadline in the queue, rejecting assignment"
    assert asked(41, policy, Arrival(0, 8000.0), **KNOWN) == Reject(RejectReason.WOULD_MISS_DEADLINE, message, 2050)
    assert asked(40, policy, Arrival(0, 8000.0), **KNOWN) == Accept()


@for_each_row(
    ("view", "deadline", "fraction", "misses"),
    [
        (QueueView(10, 1, 20, 100.0), 100.0, 0.5, True),
        (QueueView(10, 1, 19, 100.0), 100.0, 0.5, False),  # too few are known
        (QueueView(10, 1, 20, 100.0), None, 0.5, False),
        (QueueView(10, 1, 20, 100.0), 100.0, None, False),
        (QueueView(10, 1, 20, 100.0), 100.0, 1.0, True),
        (QueueView(40, 8, 20, 100.0), 1000.0, 0.5, False),  # eight slots share the queue
        (QueueView(41, 8, 20, 100.0), 1000.0, 0.5, True),
        (QueueView(40, 1, 20, 100.0), 2000.0, 0.5, True),
        (QueueView(40, 1, 20, 100.0, behind=30), 2000.0, 0.5, False),  # it overtakes thirty
    ],
)
def test_only_a_deadline_and_twenty_times_refuse_by_time(view: Any, deadline: Any, fraction: Any, misses: bool) -> None:
    assert would_miss_deadline(view, Arrival(0, deadline), Rules(max_wait_fraction=fraction)) is misses


def test_slots_share_the_queue_and_those_that_an_arrival_overtakes_do_not_delay_it() -> None:
    assert admission.expected_wait_ms(QueueView(40, concurrency=8, mean_service_ms=100.0)) == 500.0
    assert admission.expected_wait_ms(QueueView(40, behind=30, mean_service_ms=100.0)) == 1000.0
    assert admission.expected_wait_ms(QueueView(1, behind=2, mean_service_ms=100.0)) == 0.0, "one has left meanwhile"


@for_each_row(
    ("depth", "mean", "seen", "wait"),
    [(1000, 100.0, 19, 1000), (1000, 100.0, 20, 30_000), (10, 100.0, 20, 500), (1, 1.0, 20, 100), (0, 5.0, 20, 100)],
)
def test_come_back_when_half_of_the_queue_is_gone(depth: int, mean: float, seen: int, wait: int) -> None:
    assert admission.retry_after_ms(QueueView(depth, mean_service_ms=mean, service_times_known=seen)) == wait


def test_the_refusal_of_an_unknown_type_is_recognised_by_its_message() -> None:
    message = admission.unknown_type_message("invoice.render", {"b", "a"})
    assert message == "job.type: 'invoice.render' is not known here; known: a, b"
    assert admission.tells_unknown_type(message)
    assert not admission.tells_unknown_type("job.type: required")


def test_the_baseline_looks_only_at_whether_it_drains_and_people_at_the_depth() -> None:
    view = QueueView(3, concurrency=4, service_times_known=20, mean_service_ms=5.0, draining=True, behind=1)
    assert view.for_baseline() == QueueView(3, draining=True)


H, D, O, C = OverloadStatus  # noqa: E741 - the four levels, in their order


def test_each_level_begins_at_its_share_of_a_full_queue_or_at_the_configured_threshold() -> None:
    depths = (0, 499, 500, 799, 800, 999, 1000, 1001, 5000)
    assert [level(depth, 1000) for depth in depths] == [H, H, D, D, O, O, C, C, C]
    own = Thresholds(0.1, 0.2, 0.3)
    assert [level(depth, 100, own) for depth in (9, 10, 19, 20, 29, 30)] == [H, D, D, O, O, C]
    assert Thresholds() == Thresholds(0.5, 0.8, 1.0)
    assert [Thresholds().of(status) for status in OverloadStatus] == [0.0, 0.5, 0.8, 1.0]


def test_the_words_on_the_wire_go_from_well_to_full() -> None:
    assert [status.value for status in OverloadStatus] == ["healthy", "degraded", "overloaded", "critical"]
    assert [status.severity for status in OverloadStatus] == [0, 1, 2, 3]


@for_each_row("before", list(OverloadStatus))
@for_each_row(("depth", "raw"), [(500, D), (800, O), (1000, C)])
def test_the_reported_status_rises_at_once(before: OverloadStatus, depth: int, raw: OverloadStatus) -> None:
    if raw.severity >= before.severity:
        assert reported(before, depth, 1000) is raw


@for_each_row(
    ("before", "told"),
    [
        (H, {0: H}),
        (D, {400: D, 399: H}),
        (O, {700: O, 699: D, 400: D, 399: H}),
        (C, {900: C, 899: O, 750: O, 700: O, 699: D, 0: H}),
    ],
)
def test_it_leaves_a_level_a_tenth_below_its_threshold(before: OverloadStatus, told: dict[int, OverloadStatus]) -> None:
    """700 of 1000 is not below 70 %, whatever floats make of 0.8 - 0.1."""
    assert admission.HYSTERESIS == 0.1
    assert {depth: reported(before, depth, 1000) for depth in told} == told


def test_its_own_thresholds_hold_on_the_way_down() -> None:
    assert [reported(D, depth, 100, Thresholds(0.2, 0.5, 0.9)) for depth in (15, 9)] == [D, H]


@given(st.lists(st.integers(0, 120), max_size=30))
def test_what_is_told_is_never_milder_than_what_is(depths: list[int]) -> None:
    told = H
    for depth in depths:
        told = reported(told, depth, 100)
        assert told.severity >= level(depth, 100).severity
        assert told.severity - level(max(0, depth + 10), 100).severity <= 0


@for_each_row(
    ("seen", "told"),
    [
        ([(0.0, D), (0.1, O), (0.2, C)], [D, O, C]),  # a higher level at once
        ([(0.0, C)], [C]),
        ([(0.0, C), (1.0, H), (2.99, H), (3.0, H)], [C, C, C, H]),  # a lower one when it has lasted
        ([(0.0, C), (1.0, H), (2.0, C), (3.0, H), (4.9, H), (5.0, H)], [C, C, C, C, C, H]),  # from the beginning again
        ([(0.0, C), (1.0, H), (2.0, O), (3.0, D), (4.9, D), (5.0, D)], [C, C, C, O, O, D]),  # by way of the highest
        ([(0.0, C), (1.0, O), (3.0, O), (3.1, C)], [C, C, O, C]),
    ],
)
def test_people_are_told_of_a_higher_level_at_once_and_of_a_lower_one_when_it_has_lasted(seen: Any, told: Any) -> None:
    assert HOLD_S == 2.0
    status, levels = HeldStatus(), []
    for now, measured in seen:
        status = held(status, measured, now)
        levels.append(status.status)
    assert levels == told


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from(list(OverloadStatus))), min_size=1, max_size=40))
def test_a_level_that_people_are_told_lasts_unless_a_higher_follows(steps: list[tuple[float, OverloadStatus]]) -> None:
    """However a queue flutters, no lower level follows within the hold, and nothing measured is above what is told."""
    now, status, since = 0.0, HeldStatus(), 0.0
    for pause, measured in steps:
        now += pause
        before, status = status.status, held(status, measured, now)
        assert status.status.severity >= measured.severity
        if status.status is not before:
            assert status.status.severity > before.severity or now - since >= HOLD_S
            since = now


@pytest.mark.parametrize("reject_at", [OverloadStatus.OVERLOADED, OverloadStatus.CRITICAL])
@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_the_depth_from_which_arrivals_are_refused_is_the_first_at_which_admission_refuses_one(
    size: int, reject_at: OverloadStatus
) -> None:
    rules = Rules(size=size, reject_at=reject_at, preempt=False)
    refused = [isinstance(admit(QueueView(depth), NEW, rules), Reject) for depth in range(size + 1)]

    assert refused_from(rules) == refused.index(True)
