"""Levels begin at their thresholds; the reported one goes up at once and comes down late."""

from hypothesis import given
from hypothesis import strategies as st

from reefknot.queue.model.admission import (
    HOLD_S,
    HYSTERESIS,
    HeldStatus,
    OverloadStatus,
    Thresholds,
    held,
    level,
    reported,
)
from tests.rows import for_each_row

H, D, O, C = OverloadStatus  # noqa: E741 - the four levels, in their order


@for_each_row(
    ("depth", "expected"), [(0, H), (499, H), (500, D), (799, D), (800, O), (999, O), (1000, C), (1001, C), (5000, C)]
)
def test_each_level_begins_at_its_share_of_a_full_queue(depth: int, expected: OverloadStatus) -> None:
    assert level(depth, 1000) is expected


def test_the_thresholds_are_the_configured_ones() -> None:
    own = Thresholds(0.1, 0.2, 0.3)

    assert [level(depth, 100, own) for depth in (9, 10, 19, 20, 29, 30)] == [H, D, D, O, O, C]


@for_each_row(("status", "begins"), [(H, 0.0), (D, 0.5), (O, 0.8), (C, 1.0)])
def test_a_level_knows_where_it_begins(status: OverloadStatus, begins: float) -> None:
    assert Thresholds().of(status) == begins
    assert Thresholds() == Thresholds(0.5, 0.8, 1.0)


def test_the_words_on_the_wire_go_from_well_to_full() -> None:
    assert [status.value for status in OverloadStatus] == ["healthy", "degraded", "overloaded", "critical"]
    assert [status.severity for status in OverloadStatus] == [0, 1, 2, 3]


@for_each_row("before", list(OverloadStatus))
@for_each_row(("depth", "raw"), [(500, D), (800, O), (1000, C)])
def test_the_reported_status_rises_at_once(before: OverloadStatus, depth: int, raw: OverloadStatus) -> None:
    if raw.severity >= before.severity:
        assert reported(before, depth, 1000) is raw


@for_each_row(
    ("before", "depth", "told"),
    [
        (D, 400, D),
        (D, 399, H),
        (O, 700, O),
        (O, 699, D),
        (O, 400, D),
        (O, 399, H),
        (C, 900, C),
        (C, 899, O),
        (C, 750, O),
        (C, 700, O),
        (C, 699, D),
        (C, 0, H),
        (H, 0, H),
    ],
)
def test_it_leaves_a_level_only_below_its_threshold_less_a_tenth(
    before: OverloadStatus, depth: int, told: OverloadStatus
) -> None:
    """700 of 1000 is not below 70 %, whatever floats make of 0.8 - 0.1."""
    assert HYSTERESIS == 0.1
    assert reported(before, depth, 1000) is told


def test_its_own_thresholds_hold_on_the_way_down() -> None:
    assert reported(D, 15, 100, Thresholds(0.2, 0.5, 0.9)) is D
    assert reported(D, 9, 100, Thresholds(0.2, 0.5, 0.9)) is H


@given(st.lists(st.integers(0, 120), max_size=30))
def test_what_is_told_is_never_milder_than_what_is(depths: list[int]) -> None:
    told = H
    for depth in depths:
        told = reported(told, depth, 100)
        assert told.severity >= level(depth, 100).severity
        assert told.severity - level(max(0, depth + 10), 100).severity <= 0


def told(*seen: tuple[float, OverloadStatus]) -> list[OverloadStatus]:
    """The levels that people are told, one after each measured level."""
    status, levels = HeldStatus(), []
    for now, measured in seen:
        status = held(status, measured, now)
        levels.append(status.status)
    return levels


def test_people_are_told_of_a_higher_level_at_once() -> None:
    assert told((0.0, D), (0.1, O), (0.2, C)) == [D, O, C]
    assert told((0.0, C)) == [C]


def test_people_are_told_of_a_lower_level_when_it_has_lasted() -> None:
    assert HOLD_S == 2.0
    assert told((0.0, C), (1.0, H), (2.99, H), (3.0, H)) == [C, C, C, H]


def test_coming_back_begins_the_time_anew() -> None:
    assert told((0.0, C), (1.0, H), (2.0, C), (3.0, H), (4.9, H), (5.0, H)) == [C, C, C, C, C, H]


def test_the_level_comes_down_to_the_highest_of_the_time_below_it() -> None:
    """Overloaded in between: it is told next, and the lower one has to last by itself."""
    assert told((0.0, C), (1.0, H), (2.0, O), (3.0, D), (4.9, D), (5.0, D)) == [C, C, C, O, O, D]
    assert told((0.0, C), (1.0, O), (3.0, O), (3.1, C)) == [C, C, O, C]


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
