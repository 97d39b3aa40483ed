"""Retry and idempotency design, exception classification: the three sample policies and the rule behind them."""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import Work


class NetworkError(Exception):
    """The sample's own class."""


class DnsError(NetworkError):
    """A special case of it."""


DEFAULT = rk.RetryPolicy(retryable_exceptions=[Exception])
STRICT = rk.RetryPolicy(non_retryable_exceptions=[ValueError, TypeError, KeyError])
LENIENT = rk.RetryPolicy(non_retryable_exceptions=[ValueError], retryable_exceptions=[ValueError, NetworkError])


def executions(policy: rk.RetryPolicy, error: Exception) -> int:
    """How often work runs that always fails with `error`: three times or once."""
    work = Work(error)
    with rk.testing.virtual_time():
        rk.Retrier(policy).run(work)
    return work.executions


@pytest.mark.parametrize(
    "error", [ValueError(), TypeError(), KeyError(), RuntimeError(), OSError(), NetworkError(), TimeoutError()]
)
def test_the_default_policy_retries_every_exception(error: Exception) -> None:
    assert executions(DEFAULT, error) == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(), 1),
        (TypeError(), 1),
        (KeyError(), 1),
        (UnicodeError(), 1),
        (NetworkError(), 3),
        (TimeoutError(), 3),
        (LookupError(), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_strict_policy_fails_fast_on_its_list_and_retries_the_rest(error: Exception, expected: int) -> None:
    """A subclass of a listed class is listed (UnicodeError); its parent is not (LookupError)."""
    assert executions(STRICT, error) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(), 3),
        (UnicodeError(), 3),
        (NetworkError(), 3),
        (DnsError(), 3),
        (KeyError(), 1),
        (TimeoutError(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_in_the_lenient_policy_value_error_wins_and_what_is_not_listed_does_not_run_again(
    error: Exception, expected: int
) -> None:
    assert executions(LENIENT, error) == expected


def test_the_most_specific_class_of_either_list_wins() -> None:
    some = rk.RetryPolicy(retryable_exceptions=[Exception], non_retryable_exceptions=[NetworkError])
    but_dns = rk.RetryPolicy(retryable_exceptions=[DnsError], non_retryable_exceptions=[NetworkError])

    assert executions(some, NetworkError()) == 1
    assert executions(some, DnsError()) == 1
    assert executions(some, ValueError()) == 3
    assert executions(but_dns, DnsError()) == 3
    assert executions(but_dns, NetworkError()) == 1


def test_a_non_retryable_exception_comes_back_as_it_was_raised(virtual_time: VirtualClock) -> None:
    error = ValueError("bad input")

    with pytest.raises(ValueError, match="bad input") as caught:
        rk.Retrier(STRICT).call(Work(error))

    assert caught.value is error
    assert virtual_time.waits == []


@pytest.mark.parametrize("rule", [NetworkError, "NetworkError", f"{NetworkError.__module__}.NetworkError"])
def test_a_class_is_listed_by_itself_or_by_name(rule: type[Exception] | str) -> None:
    assert executions(rk.RetryPolicy(retryable_exceptions=[rule]), DnsError()) == 3
    assert executions(rk.RetryPolicy(non_retryable_exceptions=[rule]), DnsError()) == 1
