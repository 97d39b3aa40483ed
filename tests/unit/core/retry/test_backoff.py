"""Waits: the documents' tables, and what holds for every policy and every index."""

from math import inf, isfinite
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reefknot.core.retry.backoff import delay_before, undisturbed, wait_range, whole
from reefknot.core.retry.backoff import draw as drawn
from reefknot.core.retry.policy import Jitter, RetryPolicy, RetryStrategy

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


# --- the documents' tables ----------------------------------------------------------------------------------------


def test_the_workers_table_of_exponential_delays() -> None:
    """100 ms doubling, at most 30 s: index 8 is the last one below the cap."""
    policy = RetryPolicy(base_delay=0.1, max_delay=30, jitter="none")
    millis = [round(1000 * undisturbed(k, policy)) for k in range(11)]

    assert millis == [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]


@pytest.mark.parametrize(
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

    assert [undisturbed(k, policy) for k in range(4)] == seconds
    assert [delay_before(k, policy, draw=0.7) for k in range(4)] == seconds


def test_the_baseline_is_linear() -> None:
    policy = RetryPolicy(base_delay=0.1, strategy="linear", jitter="none")

    assert [undisturbed(k, policy) for k in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert undisturbed(10**9, policy) == 30.0


@pytest.mark.parametrize(
    ("k", "low", "high"), [(0, 0.9, 1.1), (1, 1.8, 2.2), (2, 3.6, 4.4), (3, 7.2, 8.8), (4, 14.4, 17.6), (5, 27.0, 30.0)]
)
def test_the_operations_ranges(k: int, low: float, high: float) -> None:
    """±10 % of 1 s, 2 s, 4 s …; at the cap the range ends at the cap."""
    assert wait_range(k, RetryPolicy()) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("jitter", "low", "high"),
    [("none", 0.8, 0.8), ("full", 0.0, 0.8), ("equal", 0.4, 0.8), ("proportional", 0.64, 0.96)],
)
def test_the_ranges_of_the_jitters(jitter: Any, low: float, high: float) -> None:
    policy = RetryPolicy(base_delay=0.1, jitter=jitter, jitter_factor=0.2)

    assert wait_range(3, policy) == pytest.approx((low, high))
    assert delay_before(3, policy, draw=0.0) == pytest.approx(low)
    assert delay_before(3, policy, draw=0.25) == pytest.approx(low + (high - low) / 4)
    assert delay_before(3, policy, draw=ALMOST_ONE) == pytest.approx(high)


def test_sixty_seconds_plus_minus_a_fifth() -> None:
    policy = RetryPolicy(base_delay=60, max_delay=3600, jitter_factor=0.2)

    assert wait_range(0, policy) == pytest.approx((48, 72))


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
def test_every_wait_is_finite_and_within_the_cap(k: int, policy: RetryPolicy, draw: float, previous: float) -> None:
    delay = delay_before(k, policy, draw=draw, previous=previous)

    assert isfinite(delay)
    assert 0.0 <= delay <= policy.max_delay


@given(indices, policies(), draws, st.floats(0, 1e8))
def test_every_wait_lies_in_the_range_that_is_shown_for_it(
    k: int, policy: RetryPolicy, draw: float, previous: float
) -> None:
    low, high = wait_range(k, policy, previous=previous)

    assert 0.0 <= low <= high <= policy.max_delay
    assert low <= delay_before(k, policy, draw=draw, previous=previous) <= high


@given(st.integers(0, 10**9), policies())
def test_the_undisturbed_delay_never_shrinks(k: int, policy: RetryPolicy) -> None:
    assert undisturbed(k, policy) <= undisturbed(k + 1, policy) * (1 + 1e-9)


@given(st.integers(0, 200), policies(strategy=RetryStrategy.EXPONENTIAL_BACKOFF))
def test_the_clamp_in_the_exponent_gives_what_plain_arithmetic_gives(k: int, policy: RetryPolicy) -> None:
    try:
        plain = policy.base_delay * policy.multiplier**k
    except OverflowError:
        plain = inf if policy.base_delay else 0.0

    assert undisturbed(k, policy) == pytest.approx(min(plain, policy.max_delay), rel=1e-9)


@pytest.mark.parametrize("k", [63, 64, 65, 1000, 10**9])
def test_an_index_far_out_grows_no_further_than_its_cap_or_not_at_all(k: int) -> None:
    assert undisturbed(k, RetryPolicy(base_delay=0.1, max_delay=7)) == 7
    assert undisturbed(k, RetryPolicy(base_delay=0.1, max_delay=7, multiplier=1)) == 0.1
    assert undisturbed(k, RetryPolicy(base_delay=0.0, max_delay=7)) == 0.0
    assert undisturbed(k, RetryPolicy(base_delay=0.0, max_delay=0.0)) == 0.0


def test_slow_growth_is_still_exact_beyond_the_safe_index() -> None:
    policy = RetryPolicy(base_delay=1, max_delay=1000, multiplier=1.05)

    assert undisturbed(64, policy) == pytest.approx(1.05**64)
    assert undisturbed(141, policy) == pytest.approx(1.05**141)
    assert undisturbed(142, policy) == 1000


def test_a_huge_index_costs_no_more_than_a_small_one() -> None:
    """By work done, not by clock: a power of a large integer would not fit a float, a loop would take minutes."""
    policy = RetryPolicy(base_delay=1, max_delay=1e8, multiplier=1 + 1e-9, jitter="none")

    assert undisturbed(10**9, policy) == pytest.approx(2.718281828, rel=1e-6)


@pytest.mark.parametrize("jitter", ["full", "equal", "proportional", "decorrelated"])
@pytest.mark.parametrize("k", [5, 50, 10**9])
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
    assert delay_before(k, policy, draw=draw) == pytest.approx(draw * undisturbed(k, policy), rel=1e-12, abs=1e-300)


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


def test_whole_seconds_are_cut_not_rounded() -> None:
    policy = RetryPolicy(base_delay=2.9, jitter="none", whole_seconds=True)

    assert delay_before(0, policy, draw=0.0) == 2.0
    assert whole(0.2, policy) == 1.0
    assert whole(1.99, policy) == 1.0
    assert delay_before(0, policy.replace(base_delay=0), draw=0.5) == 1.0


@pytest.mark.parametrize("strategy", ["immediate", "no_retry"])
def test_who_retries_at_once_does_not_wait_a_second(strategy: Any) -> None:
    policy = RetryPolicy(base_delay=5, strategy=strategy, whole_seconds=True)

    assert delay_before(3, policy, draw=0.5) == 0.0
    assert whole(0.4, policy) == 0.4
