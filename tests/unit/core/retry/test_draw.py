"""A draw belongs to (seed, key, index), looks like chance, and remembers nothing."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.retry.backoff import draw, key_number

whole = st.integers(min_value=0, max_value=2**64 - 1)
CHI_SQUARE_99_DF_LIMIT = 148.2
"""Beyond it: p < 0.001 for 100 bins."""


@given(st.integers(), st.integers(), st.integers(min_value=-1, max_value=10**9))
def test_a_draw_is_at_least_zero_and_below_one(seed: int, key: int, index: int) -> None:
    assert 0.0 <= draw(seed, key, index) < 1.0


@given(whole, whole, st.integers(min_value=0, max_value=10**9))
def test_the_same_inputs_give_the_same_number_whatever_was_drawn_between(seed: int, key: int, index: int) -> None:
    first = draw(seed, key, index)
    draw(seed, key, index + 1)

    assert draw(seed, key, index) == first


@pytest.mark.parametrize(
    ("inputs", "number"),
    [
        ((0, 0, 0), 0.5079605879681605),
        ((1, 2, 3), 0.0725793648193529),
        ((2**64 - 1, 2**64 - 1, 10**9), 0.021084166105208246),
    ],
)
def test_the_numbers_are_promised_because_recorded_decisions_are_replayed(
    inputs: tuple[int, int, int], number: float
) -> None:
    assert draw(*inputs) == number


SERIES: dict[str, Callable[[int], float]] = {
    "over retries": lambda i: draw(11, 12, i),
    "over keys in a row": lambda i: draw(11, i, 0),
    "over seeds in a row": lambda i: draw(i, 12, 0),
    "over keys far apart": lambda i: draw(11, key_number(f"job-{i}"), 2),
}


@pytest.mark.parametrize("series", SERIES, ids=str)
def test_draws_fill_the_range_evenly(series: str) -> None:
    draw_of, many, bins = SERIES[series], 20_000, 100
    counts = [0] * bins
    for i in range(many):
        counts[int(draw_of(i) * bins)] += 1

    expected = many / bins
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < CHI_SQUARE_99_DF_LIMIT


def test_the_evenness_test_notices_a_lopsided_series() -> None:
    """The control: squares of even draws crowd near zero."""
    counts = [0] * 100
    for i in range(20_000):
        counts[int(draw(11, 12, i) ** 1.1 * 100)] += 1

    assert sum((count - 200) ** 2 / 200 for count in counts) > CHI_SQUARE_99_DF_LIMIT


def _correlation(left: list[float], right: list[float]) -> float:
    n = len(left)
    mean_l, mean_r = sum(left) / n, sum(right) / n
    covariance = sum((a - mean_l) * (b - mean_r) for a, b in zip(left, right, strict=True))
    spread = sum((a - mean_l) ** 2 for a in left) * sum((b - mean_r) ** 2 for b in right)
    return float(covariance / spread**0.5)


@pytest.mark.parametrize("neighbour", ["seed", "key", "index"])
def test_neighbours_do_not_draw_alike(neighbour: str) -> None:
    """Two workers, two pieces of work, two retries: their waits have nothing to do with each other."""
    step = {"seed": (1, 0, 0), "key": (0, 1, 0), "index": (0, 0, 1)}[neighbour]
    points = [(1000 + i * 7, i * 13, i % 50) for i in range(4000)]
    left = [draw(*point) for point in points]
    right = [draw(seed + step[0], key + step[1], index + step[2]) for seed, key, index in points]

    assert abs(_correlation(left, right)) < 0.05
    assert sum(a == b for a, b in zip(left, right, strict=True)) == 0


def test_a_fleet_of_seeds_does_not_collide() -> None:
    assert len({draw(seed, key, index) for seed in range(20) for key in range(20) for index in range(20)}) == 8000


def test_a_text_key_is_the_same_number_in_every_process() -> None:
    assert key_number("order-7") == 16840415683540218609
    assert key_number("") != key_number("order-7")


@given(st.text(alphabet="az09-é€😀"))
def test_any_text_is_a_key(key: str) -> None:
    assert 0 <= key_number(key) < 2**64


def test_a_lone_surrogate_is_a_key_too() -> None:
    assert 0 <= key_number("\ud800") < 2**64
