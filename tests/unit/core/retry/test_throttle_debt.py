"""Retries that were granted while the throttle did not act are not held against those that come when it does."""

from __future__ import annotations

from reefknot.core.retry.throttle import RetryThrottle


def test_a_thousand_retries_of_small_work_leave_one_token_missing() -> None:
    throttle = RetryThrottle(tokens=10)
    for _ in range(1000):
        throttle.spend()

    assert throttle.tokens == -1.0


def test_a_few_successes_bring_retries_back_after_a_long_quiet_failure() -> None:
    """Twenty successes are two tokens: one that was missing, one to spend."""
    throttle = RetryThrottle(tokens=10, per_second=0)
    for _ in range(1000):
        throttle.spend()
    for _ in range(21):
        throttle.feed()

    assert throttle.view(0.0).tokens >= 1.0


def test_a_token_that_two_threads_took_at_once_is_missing_afterwards() -> None:
    throttle = RetryThrottle(tokens=1)
    throttle.spend()
    throttle.spend()

    assert throttle.tokens == -1.0
