"""
Retry, idempotency, audit: the matrix of operations row by row, its spellings, and their timeouts (C6).

And exception classification: the three sample policies, and the rule behind them.
"""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.policy.model.book import Layer
from reefknot.policy.model.defaults import RetryCategory
from tests.acceptance.steps import Work

MATRIX = [
    # category, wire value, attempts, base, cap, seconds that one attempt may take
    ("NATS_CONNECT", "RETRY_NATS_CONNECT", 5, 1.0, 30.0, 10),
    ("NATS_PUBLISH", "RETRY_NATS_PUBLISH", 3, 0.5, 10.0, 5),
    ("NATS_SUBSCRIBE", "RETRY_NATS_SUBSCRIBE", 3, 0.5, 10.0, 5),
    ("NATS_STREAM_CREATE", "RETRY_NATS_STREAM_CREATE", 2, 2.0, 60.0, 15),
    ("KV_CREATE", "RETRY_KV_CREATE", 2, 1.0, 30.0, 10),
    ("KV_GET", "RETRY_KV_GET", 3, 0.5, 10.0, 5),
    ("KV_PUT", "RETRY_KV_PUT", 3, 0.5, 10.0, 5),
    ("KV_DELETE", "RETRY_KV_DELETE", 2, 1.0, 30.0, 5),
    ("EXECUTION_INTENT", "RETRY_EXECUTION_INTENT", 2, 2.0, 60.0, 30),
    ("EXECUTION_CONTAINMENT", "RETRY_EXECUTION_CONTAINMENT", 2, 2.0, 60.0, 60),
    ("EXECUTION_EXPIRATION", "RETRY_EXECUTION_EXPIRATION", 1, 1.0, 30.0, 120),
    ("APPROVAL_CHECK", "RETRY_APPROVAL_CHECK", 3, 1.0, 30.0, 5),
    ("APPROVAL_GRANT", "RETRY_APPROVAL_GRANT", 2, 2.0, 60.0, 10),
    ("REPLAY_PROCESSING", "REPLAY_REPLAY_PROCESSING", 1, 1.0, 30.0, 300),
    ("REPLAY_VALIDATION", "REPLAY_REPLAY_VALIDATION", 2, 1.0, 30.0, 60),
    ("API_REQUEST", "RETRY_API_REQUEST", 3, 1.0, 30.0, 30),
    ("API_VALIDATION", "RETRY_API_VALIDATION", 2, 0.5, 10.0, 10),
]


@pytest.mark.parametrize(("name", "wire", "attempts", "base", "cap", "timeout"), MATRIX, ids=[row[0] for row in MATRIX])
def test_the_matrix_row_is_what_the_book_resolves(
    name: str, wire: str, attempts: int, base: float, cap: float, timeout: int
) -> None:
    policy = rk.PolicyBook().resolve(f"operation:{name}")
    assert RetryCategory[name].value == wire
    assert policy.max_attempts == attempts
    assert (policy.base_delay, policy.max_delay, policy.multiplier) == (base, cap, 2.0)
    assert (policy.jitter.value, policy.jitter_factor) == ("proportional", 0.1)
    assert policy.attempt_timeout == timeout
    assert policy.strategy == "exponential_backoff"
    assert policy.retryable
    assert {field.layer for field in policy.provenance.values()} == {Layer.BUILTIN}


def test_the_matrix_has_seventeen_rows_and_no_category_is_without_one() -> None:
    assert [row[0] for row in MATRIX] == [category.name for category in RetryCategory]
    assert len(MATRIX) == 17


@pytest.mark.parametrize("spelling", ["NATS_PUBLISH", "RETRY_NATS_PUBLISH", "nats.publish", "retry_nats_publish"])
def test_a_row_is_configured_under_any_spelling_in_the_documents_own_words(spelling: str) -> None:
    """The document's example of a custom policy, as a file."""
    book = rk.PolicyBook.loads(
        f"""
operations:
  {spelling}:
    max_attempts: 5
    base_delay: 2.0
    max_delay: 60.0
    backoff_multiplier: 1.5
    jitter_enabled: true
    jitter_factor: 0.2
    retryable_exceptions: [TimeoutError, ConnectionError]
    non_retryable_exceptions: [ValueError, TypeError, KeyError]
"""
    )
    policy = book.resolve("operation:NATS_PUBLISH")

    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.multiplier) == (5, 2.0, 60.0, 1.5)
    assert (policy.jitter.value, policy.jitter_factor, policy.attempt_timeout) == ("proportional", 0.2, 5.0)
    assert policy.retryable_exceptions == ("TimeoutError", "ConnectionError")
    assert policy.non_retryable_exceptions == ("ValueError", "TypeError", "KeyError")
    assert policy.provenance["max_attempts"].layer is Layer.TARGET
    assert policy.provenance["attempt_timeout"].layer is Layer.BUILTIN


def test_a_configured_row_leaves_the_others_alone() -> None:
    book = rk.PolicyBook.loads("operations: {KV_GET: {max_attempts: 9}}")
    others = [category.target for category in RetryCategory if category is not RetryCategory.KV_GET]

    assert [book.resolve(target) for target in others] == [rk.PolicyBook().resolve(target) for target in others]


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
