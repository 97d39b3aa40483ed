"""Retry and idempotency design, exception classification: the three sample policies and the rule behind them."""

from __future__ import annotations

import pytest

import reefknot as rk
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
    ("policy", "thrice", "once"),
    [
        (DEFAULT, [ValueError, TypeError, KeyError, RuntimeError, OSError, NetworkError, TimeoutError], []),
        (STRICT, [NetworkError, TimeoutError, LookupError], [ValueError, TypeError, KeyError, UnicodeError]),
        (LENIENT, [ValueError, UnicodeError, NetworkError, DnsError], [KeyError, TimeoutError]),
    ],
    ids=["default", "strict", "lenient"],
)
def test_a_listed_class_is_heard_with_its_subclasses_and_not_with_its_parents(
    policy: rk.RetryPolicy, thrice: list[type[Exception]], once: list[type[Exception]]
) -> None:
    """In the lenient policy `ValueError` stands in both lists, and what is in neither does not run again."""
    assert {error: executions(policy, error()) for error in thrice} == dict.fromkeys(thrice, 3)
    assert {error: executions(policy, error()) for error in once} == dict.fromkeys(once, 1)


@pytest.mark.parametrize("rule", [NetworkError, "NetworkError", f"{NetworkError.__module__}.NetworkError"])
def test_a_class_is_listed_by_itself_or_by_name(rule: type[Exception] | str) -> None:
    assert executions(rk.RetryPolicy(retryable_exceptions=[rule]), DnsError()) == 3
    assert executions(rk.RetryPolicy(non_retryable_exceptions=[rule]), DnsError()) == 1
