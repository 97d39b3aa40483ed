"""Strategies that other packages bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, nan

import pytest

from reefknot.core.audit.event import PolicyRecord
from reefknot.core.retry.backoff import delay_before, register, undisturbed, wait_range
from reefknot.core.retry.policy import OWN_STRATEGIES, RetryPolicy
from reefknot.errors import ParameterError, ParameterTypeError


@pytest.fixture(autouse=True)
def no_strangers() -> Iterator[None]:
    yield
    OWN_STRATEGIES.clear()


def fibonacci(retry: int, policy: RetryPolicy) -> float:
    """1, 1, 2, 3, 5, … times the base delay, until it cannot matter any more."""
    last, this = 0, 1
    for _ in range(min(retry, 64)):
        last, this = this, last + this
    return policy.base_delay * this


def test_a_registered_strategy_is_a_policys_like_any_other() -> None:
    register("fibonacci", fibonacci)
    policy = RetryPolicy(8, 2.0, max_delay=30, strategy="fibonacci", jitter="none")

    assert [undisturbed(k, policy) for k in range(7)] == [2, 2, 4, 6, 10, 16, 26]
    assert undisturbed(7, policy) == 30  # the policy's cap holds
    assert undisturbed(10**9, policy) == 30
    assert policy.describe() == "8 attempts (1 + 7 retries), as fibonacci says, at most 30 s, jitter none"
    assert wait_range(2, policy.replace(jitter="full")) == (0, 4)
    assert delay_before(2, policy.replace(jitter="proportional", jitter_factor=0.5), draw=0.0) == 2


def test_a_recorded_policy_comes_back_with_its_strategy_and_not_without_it() -> None:
    register("fibonacci", fibonacci)
    policy = RetryPolicy(strategy="fibonacci")
    record = PolicyRecord.of(policy)

    assert record.policy() == policy
    OWN_STRATEGIES.clear()
    with pytest.raises(ParameterError, match="strategy='fibonacci' is not accepted"):
        record.policy()


def broken(retry: int, policy: RetryPolicy) -> float:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "later", [lambda k, p: nan, lambda k, p: -1.0, lambda k, p: "soon", broken, lambda k, p: inf, lambda k, p: None]
)
def test_what_is_no_wait_at_run_time_is_the_longest_wait(later: Callable[[int, RetryPolicy], float]) -> None:
    register("moody", lambda k, p: 1.0)
    OWN_STRATEGIES["moody"] = later

    assert undisturbed(0, RetryPolicy(strategy="moody", max_delay=9)) == 9


@pytest.mark.parametrize("name", ["", "exponential", "no_retry", "Big", "two words", "x" * 65, "-x"])
def test_a_name_that_is_taken_or_unreadable_is_refused(name: str) -> None:
    with pytest.raises(ParameterError, match="a lower-case name of its own"):
        register(name, fibonacci)


drawn = iter(range(1000))


@pytest.mark.parametrize(
    "function",
    [
        broken,
        lambda k, p: nan,
        lambda k, p: inf,
        lambda k, p: -0.1,
        lambda k, p: True,
        lambda k, p: "1",
        lambda k, p: float(next(drawn)),
        lambda k, p: 2.0**k,
        lambda k, p: 10**400,
    ],
)
def test_a_function_that_gives_no_wait_for_some_retry_is_refused(
    function: Callable[[int, RetryPolicy], float],
) -> None:
    with pytest.raises(ParameterError, match="gives seconds"):
        register("bad", function)
    assert "bad" not in OWN_STRATEGIES


def test_what_cannot_be_called_is_no_strategy() -> None:
    with pytest.raises(ParameterTypeError):
        register("number", 3)  # type: ignore[arg-type]
