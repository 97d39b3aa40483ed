"""
Explanations: the decision about a failure that has not happened, and every wait that would follow.

The answer comes from the same `decide`, together with the provenance of the policy. Explaining runs nothing and does
not wait.
"""

from collections.abc import Callable, Iterator, Mapping
from math import ceil, inf

from msgspec import Struct

from reefknot.core.backoff import delay_before, delay_without_jitter, draw, in_whole_seconds, key_number, wait_range
from reefknot.core.decide import Again, History, Reason, decide
from reefknot.core.failure import Failure
from reefknot.core.policy import RetryPolicy
from reefknot.policy.model.book import FieldOrigin, Layer

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


def lost_retries(
    policy: RetryPolicy, provenance: Mapping[str, FieldOrigin], *, near: Callable[[str], str] = str
) -> str:
    """
    Why a step's own wait and its time budget lose its retries, and what to write instead; empty when the wait fits.

    A wait that would outlive the budget is not begun: `base_delay=60` alone leaves one attempt of the default 30 s.
    `near` shortens the places that are named.
    """
    base, budget = provenance["base_delay"], provenance["time_budget"]
    low, high = wait_range(0, policy)
    is_own = Layer.STEP in (base.layer, budget.layer)
    fits = delay_without_jitter(0, policy) < policy.time_budget
    if fits or not is_own or not policy.retries or not policy.retryable:
        return ""
    waits = sum(one.max for one in schedule(policy.replace(time_budget=None)))
    needed = ceil(waits + policy.time_budget)
    if budget.layer is Layer.REQUEST:
        remedy = f"give the assignment a timeout of {needed} s"
    elif budget.layer.rank > Layer.STEP.rank:
        remedy = f"set timeout_ms to {needed * 1000} at {near(budget.source)}"
    else:
        remedy = f"write @rk.block(…, timeout={needed})"
    return (
        f"the first wait is {'' if low == high else 'up to '}{high:g} s (base_delay, {near(base.source)}), and all "
        f"executions and waits have {policy.time_budget:g} s (time_budget, {near(budget.source)}), so a failed "
        f"execution is {'never' if low >= policy.time_budget else 'often not'} retried; {remedy}, which has room for "
        "every wait, or a shorter base_delay"
    )


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
