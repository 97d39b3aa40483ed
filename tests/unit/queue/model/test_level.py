"""Levels begin at their thresholds; the reported one goes up at once and comes down late."""

from hypothesis import given
from hypothesis import strategies as st

from reefknot.queue.model import admission
from reefknot.queue.model.admission import HOLD_S, HeldStatus, OverloadStatus, Thresholds, held, level, reported
from tests.rows import for_each_row

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
def test_people_are_told_of_a_higher_level_at_once_and_of_a_lower_one_when_it_has_lasted(
    seen: list[tuple[float, OverloadStatus]], told: list[OverloadStatus]
) -> None:
    assert HOLD_S == 2.0
    status, levels = HeldStatus(), []
    for now, measured in seen:
        status = held(status, measured, now)
        levels.append(status.status)
    assert levels == told


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from(list(OverloadStatus))), min_size=1, max_size=40))
def test_a_level_that_people_are_told_lasts_unless_a_higher_one_follows(
    steps: list[tuple[float, OverloadStatus]],
) -> None:
    """However a queue flutters, no lower level follows within the hold, and nothing measured is above what is told."""
    now, status, since = 0.0, HeldStatus(), 0.0
    for pause, measured in steps:
        now += pause
        before, status = status.status, held(status, measured, now)
        assert status.status.severity >= measured.severity
        if status.status is not before:
            assert status.status.severity > before.severity or now - since >= HOLD_S
            since = now
