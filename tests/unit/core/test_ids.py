"""Ids that sort by the time they were made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.ids import CHANCE_BITS, next_id, sortable_id, time_of
from reefknot.errors import ParameterError

TIMES = st.integers(0, (1 << 48) - 1)
CHANCES = st.integers(0, (1 << CHANCE_BITS) - 1)


@given(TIMES, CHANCES)
def test_an_id_tells_when_it_was_made(at_ms: int, chance: int) -> None:
    text = sortable_id(at_ms, chance)
    assert len(text) == 26
    assert time_of(text) == at_ms


@given(TIMES, TIMES, CHANCES, CHANCES)
def test_ids_sort_by_time_whatever_the_chance(first: int, second: int, a: int, b: int) -> None:
    if first < second:
        assert sortable_id(first, a) < sortable_id(second, b)


@given(st.lists(st.tuples(TIMES, CHANCES), min_size=2, max_size=20))
def test_ids_of_one_maker_rise_even_when_its_clock_goes_back(moments: list[tuple[int, int]]) -> None:
    made: list[str] = []
    for at_ms, chance in moments:
        made.append(next_id(made[-1] if made else None, at_ms=min(at_ms, 1 << 40), chance=chance))
    assert made == sorted(set(made))


def test_the_known_form_is_kept() -> None:
    assert sortable_id(1469918176385, 0) == "01ARYZ6S410000000000000000"
    assert sortable_id(0, -1) == "0000000000" + "Z" * 16


@pytest.mark.parametrize("at_ms", [-1, 1 << 48])
def test_a_time_that_does_not_fit_is_refused(at_ms: int) -> None:
    with pytest.raises(ParameterError, match="at_ms"):
        sortable_id(at_ms, 0)


def test_after_the_last_id_of_all_there_is_none() -> None:
    with pytest.raises(ParameterError, match="previous"):
        next_id("7" + "Z" * 25, at_ms=0, chance=0)


@pytest.mark.parametrize("text", ["", "0" * 25, "0" * 27, "I" * 26, "8" + "0" * 25, "u" * 26])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="id="):
        time_of(text)


def test_the_id_after_one_of_the_same_moment_is_the_next_number() -> None:
    assert next_id(sortable_id(5, 7), at_ms=5, chance=7) == sortable_id(5, 8)
    assert next_id(sortable_id(5, 7), at_ms=4, chance=9) == sortable_id(5, 8)
    assert next_id(sortable_id(5, 7), at_ms=5, chance=9) == sortable_id(5, 9)
