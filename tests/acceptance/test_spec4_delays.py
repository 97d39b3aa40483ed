"""Retry and idempotency design, backoff: defaults, delays of attempts 1 to 4 with ±10 %, and the cap."""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.core.backoff import wait_range
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import Work


def test_max_attempts_are_executions_here(virtual_time: VirtualClock) -> None:
    """Three executions, so two waits: about 1 s and about 2 s."""
    work = Work(TimeoutError())

    outcome = rk.Retrier(rk.RetryPolicy()).run(work)

    assert (work.executions, outcome.reason) == (3, rk.Reason.ATTEMPTS_SPENT)
    first, second = virtual_time.waits
    assert 0.9 <= first <= 1.1
    assert 1.8 <= second <= 2.2


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
