"""
Explanations: the decision about a failure that has not happened, and every wait that would follow.

The answer comes from the same `decide`, beside the provenance of the policy. Explaining runs nothing and waits for
nothing.
"""

from collections.abc import Iterator
from math import inf

from msgspec import Struct

from reefknot.core.failure import Failure
from reefknot.core.retry.backoff import delay_before, draw, in_whole_seconds, key_number, wait_range
from reefknot.core.retry.decide import Again, History, Reason, decide
from reefknot.core.retry.policy import RetryPolicy

MOST_SHOWN = 100


class PlannedWait(Struct, frozen=True):
    """The wait before retry `retry` (counted from 0): its range, and with a seed the exact delay."""

    retry: int
    min: float
    max: float
    delay: float | None = None


class Explanation(Struct, frozen=True):
    """The decision after a first failed execution, and the schedule if it kept failing that way."""

    target: str
    failure: Failure
    policy: RetryPolicy
    reason: Reason | None
    """Why there would be no retry; None when there would be one."""
    schedule: tuple[PlannedWait, ...]

    @property
    def retries(self) -> bool:
        return self.reason is None


def explain(target: str, policy: RetryPolicy, failure: Failure, *, seed: int | None = None) -> Explanation:
    """The explanation of what `decide` answers for `failure` under `policy`."""
    first = decide(policy, History(attempts=1), failure, 0.0)
    if not isinstance(first, Again):
        return Explanation(target, failure, policy, first.reason, ())
    return Explanation(
        target, failure, policy, None, tuple(schedule(policy, failure.retry_after, seed=seed, key=target))
    )


def horizon(policy: RetryPolicy) -> float:
    """
    The longest time that work under this policy may take from its first execution on, as far as the policy bounds it.

    An attempt without a time limit counts as 0: the policy does not bound it.
    """
    waits = sum(one.max for one in schedule(policy))
    attempts = 0.0 if policy.attempt_timeout == inf else policy.max_attempts * policy.attempt_timeout
    return min(policy.time_budget, waits + attempts)


def schedule(
    policy: RetryPolicy, hint: float | None = None, *, seed: int | None = None, key: str = ""
) -> Iterator[PlannedWait]:
    """The waits that the time budget has room for, at most a hundred of them: a longer schedule repeats its cap."""
    number = key_number(key)
    longest = previous = shortest_sum = 0.0
    for k in range(min(policy.retries, MOST_SHOWN)):
        low, high = wait_range(k, policy, previous=longest)
        chosen = None if seed is None else draw(seed, number, k)
        delay = None if chosen is None else delay_before(k, policy, draw=chosen, previous=previous)
        if policy.whole_seconds:
            low, high = in_whole_seconds(low, policy), in_whole_seconds(high, policy)
        if hint is not None:
            spread = min(1.0, 0.1 * hint)
            low, high = max(low, hint), max(high, hint) + spread
            delay = None if delay is None or chosen is None else max(delay, hint) + chosen * spread
        longest, previous = high, delay or 0.0
        shortest_sum += low
        if shortest_sum >= policy.time_budget:
            return
        yield PlannedWait(k, low, high, delay)
