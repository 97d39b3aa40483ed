"""Retry and idempotency design, backoff: defaults, delays of attempts 1 to 4 with ±10 %, and the cap."""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.core.backoff import delay_before, draw, wait_range
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import Work

RANGES = [(1, 0.9, 1.1), (2, 1.8, 2.2), (3, 3.6, 4.4), (4, 7.2, 8.8)]


def test_a_policy_that_says_nothing_has_the_documents_defaults() -> None:
    policy = rk.RetryPolicy()

    assert policy.max_attempts == 3
    assert policy.base_delay == 1.0
    assert policy.max_delay == 30.0
    assert policy.multiplier == 2.0
    assert policy.jitter is rk.Jitter.PROPORTIONAL
    assert policy.jitter_factor == 0.1


def test_max_attempts_are_executions_here(virtual_time: VirtualClock) -> None:
    """Three executions, so two waits: about 1 s and about 2 s."""
    work = Work(TimeoutError())

    outcome = rk.Retrier(rk.RetryPolicy()).run(work)

    assert (work.executions, outcome.reason) == (3, rk.Reason.ATTEMPTS_SPENT)
    first, second = virtual_time.waits
    assert 0.9 <= first <= 1.1
    assert 1.8 <= second <= 2.2


@pytest.mark.parametrize(("attempt", "low", "high"), RANGES)
def test_the_delay_after_an_attempt_lies_within_10_percent(attempt: int, low: float, high: float) -> None:
    """The document counts attempts from 1; the wait after attempt n is the one before retry n - 1."""
    policy = rk.RetryPolicy()
    drawn = [delay_before(attempt - 1, policy, draw=draw(11, key, attempt)) for key in range(2000)]

    assert wait_range(attempt - 1, policy) == pytest.approx((low, high))
    assert all(low <= wait <= high for wait in drawn)
    assert min(drawn) < low + (high - low) * 0.02
    assert max(drawn) > high - (high - low) * 0.02


def test_a_delay_is_capped_jitter_included() -> None:
    """The document's own code goes 10 % beyond the cap; ours never does, and keeps its lower end."""
    assert wait_range(3, rk.RetryPolicy(max_delay=8.0)) == pytest.approx((7.2, 8.0))
    assert wait_range(5, rk.RetryPolicy()) == pytest.approx((27.0, 30.0))
    assert all(delay_before(9, rk.RetryPolicy(), draw=draw(1, key, 9)) <= 30.0 for key in range(1000))


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 16.0), (6, 30.0)])
def test_with_jitter_disabled_the_delay_is_exact(attempt: int, seconds: float) -> None:
    policy = rk.RetryPolicy(jitter_enabled=False)

    assert {delay_before(attempt - 1, policy, draw=u) for u in (0.0, 0.3, 0.99)} == {seconds}


def test_the_critical_policy_of_the_procedures_is_taken_as_written() -> None:
    policy = rk.RetryPolicy(
        max_attempts=5, base_delay=2.0, max_delay=60.0, backoff_multiplier=1.5, jitter_enabled=True, jitter_factor=0.2
    )

    assert policy.multiplier == 1.5
    assert [wait_range(k, policy) for k in range(4)] == [
        pytest.approx((1.6, 2.4)),
        pytest.approx((2.4, 3.6)),
        pytest.approx((3.6, 5.4)),
        pytest.approx((5.4, 8.1)),
    ]


def test_every_retry_ends(virtual_time: VirtualClock) -> None:
    """Rule R2: finite, whatever the failure does."""
    for attempts in (1, 2, 5):
        work = Work(TimeoutError())
        rk.Retrier(rk.RetryPolicy(attempts)).run(work)
        assert work.executions == attempts


def test_the_same_draw_gives_the_same_delay() -> None:
    """Replay is arithmetic: seed, key and index are all there is to a wait."""
    policy = rk.RetryPolicy()

    first, again = ([delay_before(k, policy, draw=draw(42, 7, k)) for k in range(5)] for _ in range(2))
    other = [delay_before(k, policy, draw=draw(43, 7, k)) for k in range(5)]

    assert first == again
    assert first != other
