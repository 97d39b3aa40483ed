"""Backoff: waits, draws, and strategies of other packages."""

from collections.abc import Callable, Iterator
from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reefknot.audit.model.event import PolicyRecord
from reefknot.core.backoff import (
    delay_before,
    delay_without_jitter,
    draw,
    in_whole_seconds,
    key_number,
    register_strategy,
    wait_range,
)
from reefknot.core.backoff import draw as drawn
from reefknot.core.policy import CUSTOM_STRATEGIES, Jitter, RetryPolicy, RetryStrategy
from reefknot.errors import ParameterError, ParameterTypeError
from tests.rows import for_each_row

ALMOST_ONE = 1 - 2**-53
indices = st.integers(0, 10**9) | st.integers(0, 100)
draws = st.floats(0, 1, exclude_max=True)


@st.composite
def policies(draw: st.DrawFn, /, **fixed: Any) -> RetryPolicy:
    cap = draw(st.floats(0, 1e8) | st.floats(0, 100))
    return RetryPolicy(
        base_delay=draw(st.floats(0, cap)),
        max_delay=cap,
        multiplier=draw(st.floats(1, 1000) | st.floats(1, 1.000001)),
        jitter=fixed.get("jitter") or draw(st.sampled_from(Jitter)),
        jitter_factor=draw(st.floats(0, 1)),
        strategy=fixed.get("strategy") or draw(st.sampled_from(RetryStrategy)),
        whole_seconds=fixed.get("whole_seconds", False),
    )


# --- strategies and jitters ----------------------------------------------------------------------------------------


@for_each_row(
    ("strategy", "seconds"),
    [
        ("exponential_backoff", [60, 120, 240, 480]),
        ("linear_backoff", [60, 120, 180, 240]),
        ("fixed_delay", [60, 60, 60, 60]),
        ("immediate", [0, 0, 0, 0]),
        ("no_retry", [0, 0, 0, 0]),
    ],
)
def test_the_connectors_strategies(strategy: Any, seconds: list[float]) -> None:
    policy = RetryPolicy(base_delay=60, max_delay=3600, strategy=strategy, jitter="none")

    assert [delay_without_jitter(k, policy) for k in range(4)] == seconds
    assert [delay_before(k, policy, draw=0.7) for k in range(4)] == seconds


def test_neither_slow_growth_nor_waits_of_the_baseline_lose_exactness() -> None:
    policy = RetryPolicy(base_delay=0.1, strategy="linear", jitter="none")
    assert [delay_without_jitter(k, policy) for k in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert delay_without_jitter(10**9, policy) == 30.0

    policy = RetryPolicy(base_delay=1, max_delay=1000, multiplier=1.05)
    assert delay_without_jitter(64, policy) == pytest.approx(1.05**64)
    assert delay_without_jitter(141, policy) == pytest.approx(1.05**141)
    assert delay_without_jitter(142, policy) == 1000
    slow = RetryPolicy(base_delay=1, max_delay=1e8, multiplier=1 + 1e-9, jitter="none")
    assert delay_without_jitter(10**9, slow) == pytest.approx(2.718281828, rel=1e-6), "a loop would take minutes"


@for_each_row(
    ("k", "low", "high"), [(0, 0.9, 1.1), (1, 1.8, 2.2), (2, 3.6, 4.4), (3, 7.2, 8.8), (4, 14.4, 17.6), (5, 27.0, 30.0)]
)
def test_the_operations_ranges(k: int, low: float, high: float) -> None:
    """±10 % of 1 s, 2 s, 4 s …; at the cap the range ends at the cap."""
    assert wait_range(k, RetryPolicy()) == pytest.approx((low, high))


@for_each_row(
    ("jitter", "low", "high"),
    [("none", 0.8, 0.8), ("full", 0.0, 0.8), ("equal", 0.4, 0.8), ("proportional", 0.64, 0.96)],
)
def test_the_ranges_of_the_jitters(jitter: Any, low: float, high: float) -> None:
    policy = RetryPolicy(base_delay=0.1, jitter=jitter, jitter_factor=0.2)

    assert wait_range(3, policy) == pytest.approx((low, high))
    assert delay_before(3, policy, draw=0.0) == pytest.approx(low)
    assert delay_before(3, policy, draw=0.25) == pytest.approx(low + (high - low) / 4)
    assert delay_before(3, policy, draw=ALMOST_ONE) == pytest.approx(high)


def test_decorrelated_waits_grow_from_the_last_wait() -> None:
    policy = RetryPolicy(base_delay=1, max_delay=10, jitter="decorrelated")

    assert wait_range(0, policy) == (1, 3)
    assert wait_range(0, policy, previous=99.0) == (1, 3)
    assert wait_range(0, policy.replace(base_delay=2)) == (2, 6)
    assert wait_range(1, policy) == (1, 1)
    assert wait_range(1, policy, previous=2.0) == (1, 6)
    assert wait_range(1, policy, previous=5.0) == (1, 10)
    assert wait_range(1, policy, previous=0.0) == (1, 1)
    assert delay_before(1, policy, draw=0.5, previous=2.0) == 3.5
    assert delay_before(1, policy, draw=0.5) == 1.0


# --- what always holds --------------------------------------------------------------------------------------------


@given(indices, policies(), draws, st.floats(0, 1e8))
@example(1024, RetryPolicy(base_delay=1, multiplier=2, jitter="none"), 0.0, 0.0)
@example(10**9, RetryPolicy(base_delay=5e-324, max_delay=1e8, multiplier=1000, jitter="none"), 0.0, 0.0)
@example(63, RetryPolicy(base_delay=1e8, max_delay=1e8, multiplier=1000, jitter="none"), 0.0, 0.0)
@example(10**9, RetryPolicy(base_delay=1, max_delay=1e8, multiplier=1 + 2**-52, jitter="proportional"), ALMOST_ONE, 0.0)
def test_every_wait_is_finite_and_lies_in_the_range_that_is_shown_for_it_within_the_cap(
    k: int, policy: RetryPolicy, draw: float, previous: float
) -> None:
    delay = delay_before(k, policy, draw=draw, previous=previous)
    low, high = wait_range(k, policy, previous=previous)

    assert isfinite(delay)
    assert 0.0 <= low <= high <= policy.max_delay
    assert low <= delay <= high


@given(st.integers(0, 10**9), policies())
def test_the_delay_before_jitter_never_shrinks(k: int, policy: RetryPolicy) -> None:
    assert delay_without_jitter(k, policy) <= delay_without_jitter(k + 1, policy) * (1 + 1e-9)


@given(st.integers(0, 200), policies(strategy=RetryStrategy.EXPONENTIAL_BACKOFF))
def test_the_clamp_in_the_exponent_gives_what_plain_arithmetic_gives(k: int, policy: RetryPolicy) -> None:
    try:
        plain = policy.base_delay * policy.multiplier**k
    except OverflowError:
        plain = inf if policy.base_delay else 0.0

    assert delay_without_jitter(k, policy) == pytest.approx(min(plain, policy.max_delay), rel=1e-9)


@for_each_row("k", [63, 64, 65, 1000, 10**9])
def test_an_index_far_out_grows_no_further_than_its_cap_or_not_at_all(k: int) -> None:
    assert delay_without_jitter(k, RetryPolicy(base_delay=0.1, max_delay=7)) == 7
    assert delay_without_jitter(k, RetryPolicy(base_delay=0.1, max_delay=7, multiplier=1)) == 0.1
    assert delay_without_jitter(k, RetryPolicy(base_delay=0.0, max_delay=7)) == 0.0
    assert delay_without_jitter(k, RetryPolicy(base_delay=0.0, max_delay=0.0)) == 0.0


@for_each_row("jitter", ["full", "equal", "proportional", "decorrelated"])
@for_each_row("k", [5, 50, 10**9])
def test_waits_do_not_pile_up_at_the_cap(jitter: Any, k: int) -> None:
    """The cap bounds the range that is drawn from. The mean of the range stays the mean of the waits."""
    policy = RetryPolicy(base_delay=1, max_delay=10, jitter=jitter, jitter_factor=0.5)
    waits = [delay_before(k, policy, draw=drawn(1, key, 0), previous=10.0) for key in range(2000)]
    low, high = wait_range(k, policy, previous=10.0)

    assert high == 10
    assert sum(wait >= 10 * (1 - 1e-9) for wait in waits) <= 2
    assert sum(waits) / len(waits) == pytest.approx((low + high) / 2, rel=0.03)


def test_clamping_after_the_draw_would_pile_up() -> None:
    """The control: what peers do, under the same count."""
    clamped = [min(10.0, 10.0 * (0.5 + drawn(1, key, 0))) for key in range(2000)]

    assert sum(wait >= 10 for wait in clamped) > 900


@given(st.integers(0, 10**9), policies(jitter=Jitter.FULL), draws)
def test_full_jitter_is_between_zero_and_the_delay(k: int, policy: RetryPolicy, draw: float) -> None:
    assert delay_before(k, policy, draw=draw) == pytest.approx(
        draw * delay_without_jitter(k, policy), rel=1e-12, abs=1e-300
    )


# --- whole seconds ------------------------------------------------------------------------------------------------

connector_strategies = st.sampled_from(
    [RetryStrategy.EXPONENTIAL_BACKOFF, RetryStrategy.LINEAR_BACKOFF, RetryStrategy.FIXED_DELAY]
)


@given(indices, connector_strategies.flatmap(lambda s: policies(strategy=s, whole_seconds=True)), draws)
def test_connectors_wait_whole_seconds_and_at_least_one(k: int, policy: RetryPolicy, draw: float) -> None:
    delay = delay_before(k, policy, draw=draw)

    assert type(delay) is float
    assert delay == int(delay)
    assert 1.0 <= delay <= max(1.0, policy.max_delay)
    assert delay == max(1.0, delay_before(k, policy.replace(whole_seconds=False), draw=draw) // 1)


def test_whole_seconds_are_cut_not_rounded_and_a_retry_at_once_does_not_wait_one() -> None:
    policy = RetryPolicy(base_delay=2.9, jitter="none", whole_seconds=True)

    assert delay_before(0, policy, draw=0.0) == 2.0
    assert in_whole_seconds(0.2, policy) == 1.0
    assert in_whole_seconds(1.99, policy) == 1.0
    assert delay_before(0, policy.replace(base_delay=0), draw=0.5) == 1.0
    for strategy in ("immediate", "no_retry"):
        at_once = RetryPolicy(base_delay=5, strategy=strategy, whole_seconds=True)
        assert delay_before(3, at_once, draw=0.5) == 0.0
        assert in_whole_seconds(0.4, at_once) == 0.4


# ---- draws -----------------------------------------------------------------------------------------------------------


CHI_SQUARE_99_DF_LIMIT = 148.2
"""Beyond it: p < 0.001 for 100 bins."""


@given(st.integers(), st.integers(), st.integers(min_value=-1, max_value=10**9))
def test_a_draw_is_below_one_and_the_same_for_the_same_inputs(seed: int, key: int, index: int) -> None:
    first = draw(seed, key, index)
    draw(seed, key, index + 1)

    assert 0.0 <= first < 1.0
    assert draw(seed, key, index) == first


def test_the_numbers_are_promised_because_recorded_decisions_are_replayed() -> None:
    assert draw(0, 0, 0) == 0.5079605879681605
    assert draw(1, 2, 3) == 0.0725793648193529
    assert draw(2**64 - 1, 2**64 - 1, 10**9) == 0.021084166105208246
    assert key_number("order-7") == 16840415683540218609
    assert key_number("") != key_number("order-7")
    assert 0 <= key_number("\ud800") < 2**64


SERIES: dict[str, Callable[[int], float]] = {
    "over retries": lambda i: draw(11, 12, i),
    "over keys in a row": lambda i: draw(11, i, 0),
    "over seeds in a row": lambda i: draw(i, 12, 0),
    "over keys far apart": lambda i: draw(11, key_number(f"job-{i}"), 2),
}


@for_each_row("series", SERIES)
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


@given(st.text(alphabet="az09-é€😀"))
def test_any_text_is_a_key(key: str) -> None:
    assert 0 <= key_number(key) < 2**64


# ---- strategies of other packages ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_strangers() -> Iterator[None]:
    yield
    CUSTOM_STRATEGIES.clear()


def fibonacci(retry: int, policy: RetryPolicy) -> float:
    """1, 1, 2, 3, 5, … times the base delay, until it cannot matter any more."""
    last, this = 0, 1
    for _ in range(min(retry, 64)):
        last, this = this, last + this
    return policy.base_delay * this


def test_a_registered_strategy_is_a_policys_like_any_other() -> None:
    register_strategy("fibonacci", fibonacci)
    policy = RetryPolicy(8, 2.0, max_delay=30, strategy="fibonacci", jitter="none")

    assert [delay_without_jitter(k, policy) for k in range(7)] == [2, 2, 4, 6, 10, 16, 26]
    assert delay_without_jitter(7, policy) == 30  # the policy's cap holds
    assert delay_without_jitter(10**9, policy) == 30
    assert policy.describe() == "8 attempts (1 + 7 retries), as fibonacci says, at most 30 s, jitter none"
    assert wait_range(2, policy.replace(jitter="full")) == (0, 4)
    assert delay_before(2, policy.replace(jitter="proportional", jitter_factor=0.5), draw=0.0) == 2


def test_a_recorded_policy_comes_back_with_its_strategy_and_not_without_it() -> None:
    register_strategy("fibonacci", fibonacci)
    policy = RetryPolicy(strategy="fibonacci")
    record = PolicyRecord.of(policy)

    assert record.policy() == policy
    CUSTOM_STRATEGIES.clear()
    with pytest.raises(ParameterError, match="strategy='fibonacci' is not accepted"):
        record.policy()


def broken(retry: int, policy: RetryPolicy) -> float:
    raise ZeroDivisionError


def always(wait: object) -> Callable[[int, RetryPolicy], Any]:
    return lambda retry, policy: wait


@for_each_row("later", [broken, *map(always, (nan, -1.0, "soon", inf, None))])
def test_what_is_no_wait_at_run_time_is_the_longest_wait(later: Callable[[int, RetryPolicy], float]) -> None:
    register_strategy("moody", lambda k, p: 1.0)
    CUSTOM_STRATEGIES["moody"] = later

    assert delay_without_jitter(0, RetryPolicy(strategy="moody", max_delay=9)) == 9


@for_each_row("name", ["", "exponential", "no_retry", "Big", "two words", "x" * 65, "-x"])
def test_a_name_that_is_taken_or_unreadable_and_what_cannot_be_called_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match="a lower-case name of its own"):
        register_strategy(name, fibonacci)
    with pytest.raises(ParameterTypeError):
        register_strategy("number", 3)  # type: ignore[arg-type]


changing = iter(range(1000))


@for_each_row(
    "function",
    [
        *(broken, *map(always, (nan, inf, -0.1, True, "1", 10**400))),
        *(lambda k, p: float(next(changing)), lambda k, p: 2.0**k),
    ],
)
def test_a_function_that_gives_no_wait_for_some_retry_is_refused(function: Callable[[int, RetryPolicy], float]) -> None:
    with pytest.raises(ParameterError, match="gives seconds"):
        register_strategy("bad", function)
    assert "bad" not in CUSTOM_STRATEGIES
