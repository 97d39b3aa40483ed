"""The connectors' own front: retries, whole seconds, failure types."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from reefknot.core.failure import FailureType
from reefknot.core.policy import RetryStrategy
from reefknot.policy.book import PolicyBook
from reefknot.policy.model.defaults import JobType
from reefknot.policy.registry import ConnectorPolicy, RetryBudget, RetryPolicyRegistry
from tests.rows import for_each_row

PLAIN = ConnectorPolicy(connector_type="x", jitter_factor=0)


def policy(**fields: Any) -> ConnectorPolicy:
    return ConnectorPolicy(connector_type="x", **({"jitter_factor": 0.0} | fields))


# ---- a policy --------------------------------------------------------------------------------------------------------


def test_a_policy_has_the_documented_defaults_which_cannot_be_changed_nor_extended() -> None:
    default = ConnectorPolicy(connector_type=JobType.LOCAL_FILES)

    delays = {"base_delay_seconds": 60, "max_delay_seconds": 3600, "rate_limit_delay_seconds": None}
    factors = {"jitter_factor": 0.2, "backoff_multiplier": 2.0}
    retries = {"max_attempts": 3, "transient_max_attempts": None, "permanent_failures_no_retry": True}
    kind = {"connector_type": JobType.LOCAL_FILES, "strategy": RetryStrategy.EXPONENTIAL_BACKOFF}
    assert default.model_dump() == kind | delays | factors | retries

    with pytest.raises(ValidationError, match="frozen"):
        PLAIN.max_attempts = 4
    with pytest.raises(ValidationError, match="Extra inputs"):
        policy(max_delay=3)
    with pytest.raises(ValidationError, match="base_delay_seconds=61 is above max_delay_seconds=60"):
        policy(base_delay_seconds=61, max_delay_seconds=60)
    assert policy(base_delay_seconds=60, max_delay_seconds=60).base_delay_seconds == 60


@for_each_row(
    ("fields", "retries"),
    [
        ({}, [3, 3, 0, 3]),
        ({"transient_max_attempts": 7}, [7, 3, 0, 3]),
        ({"transient_max_attempts": 1, "max_attempts": 5}, [1, 5, 0, 5]),
        ({"permanent_failures_no_retry": False}, [3, 3, 3, 3]),
        ({"strategy": "no_retry"}, [0, 0, 0, 0]),
        ({"strategy": "no_retry", "transient_max_attempts": 7}, [0, 0, 0, 0]),
    ],
)
def test_a_kind_of_failure_gets_its_own_number_of_retries(fields: dict[str, Any], retries: list[int]) -> None:
    assert [policy(**fields).retries_for(one) for one in FailureType] == retries


@for_each_row(
    ("fields", "failure_type", "delays"),
    [
        ({"max_delay_seconds": 600}, FailureType.UNKNOWN, [60, 120, 240, 480, 600, 600]),
        ({}, FailureType.RATE_LIMITED, [60]),
        # a rate limit begins at its own delay, which may exceed the cap
        ({"rate_limit_delay_seconds": 900, "max_delay_seconds": 300}, FailureType.RATE_LIMITED, [900, 900, 900]),
        ({"rate_limit_delay_seconds": 900, "max_delay_seconds": 300}, FailureType.UNKNOWN, [60, 120, 240, 300]),
        ({"rate_limit_delay_seconds": 100, "max_delay_seconds": 300}, FailureType.RATE_LIMITED, [100, 200, 300]),
    ],
)
def test_a_delay_is_a_whole_number_of_seconds_up_to_the_cap(
    fields: dict[str, Any], failure_type: FailureType, delays: list[int]
) -> None:
    found = [policy(**fields).calculate_delay(attempt, failure_type) for attempt in range(len(delays))]

    assert (found, {type(delay) for delay in found}) == (delays, {int})
    assert policy().calculate_delay(10**9) == 3600


def test_a_wait_is_at_least_a_second_unless_retries_are_immediate_and_a_resolved_policy_counts_executions() -> None:
    waits = {policy(base_delay_seconds=1, jitter_factor=1.0).calculate_delay(0) for _ in range(200)}
    assert waits <= {1, 2}
    assert 1 in waits
    assert policy(strategy="immediate", jitter_factor=1.0).calculate_delay(0) == 0

    resolved = policy(transient_max_attempts=7).resolved(FailureType.TRANSIENT)
    assert (resolved.max_attempts, resolved.retryable, resolved.whole_seconds) == (8, True, True)
    assert policy().resolved(FailureType.PERMANENT).retryable is False
    assert policy().resolved().max_attempts == 4


@for_each_row("job_type", [*JobType, "rss_feed"])
@for_each_row("failure_type", FailureType)
def test_registry_and_book_agree_about_every_connector(job_type: str, failure_type: FailureType) -> None:
    mine = RetryPolicyRegistry().get_policy(job_type).resolved(failure_type)
    books = PolicyBook().resolve(f"connector:{job_type}", failure_type=failure_type)

    assert mine.retryable == books.retryable
    if books.retryable:
        assert mine.max_attempts == books.max_attempts
    for field in ("strategy", "base_delay", "max_delay", "multiplier", "jitter", "jitter_factor", "whole_seconds"):
        assert getattr(mine, field) == getattr(books, field)


# ---- a budget --------------------------------------------------------------------------------------------------------


def test_a_budget_of_three_allows_three_retries_and_its_delays_grow_with_what_was_spent() -> None:
    budget = RetryBudget("job-1", JobType.LOCAL_FILES)
    allowed = []
    for _ in range(5):
        allowed.append(budget.can_retry(PLAIN))
        budget.attempts += 1
    assert allowed == [True, True, True, False, False]

    one = policy(rate_limit_delay_seconds=900)
    assert RetryBudget("j", "x", attempts=2).next_delay(one) == 240
    assert RetryBudget("j", "x", attempts=1, failure_type=FailureType.RATE_LIMITED).next_delay(one) == 1800


@for_each_row(
    ("failure_type", "most"),
    [(FailureType.TRANSIENT, 7), (FailureType.RATE_LIMITED, 3), (FailureType.PERMANENT, 0), (FailureType.UNKNOWN, 3)],
)
def test_a_budget_looks_at_the_last_failures_type(failure_type: FailureType, most: int) -> None:
    one = policy(transient_max_attempts=7)

    assert RetryBudget("j", "x", attempts=most, failure_type=failure_type).can_retry(one) is False
    if most:
        assert RetryBudget("j", "x", attempts=most - 1, failure_type=failure_type).can_retry(one) is True


def test_spending_keeps_count_times_and_delays_and_takes_the_present_time_when_none_is_given() -> None:
    budget, now = RetryBudget("j", "x"), RetryBudget("j", "x")
    first, second = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    budget.spend(60, now=first)
    budget.spend(120, now=second)
    assert (budget.attempts, budget.total_delay_seconds) == (2, 180)
    assert (budget.first_attempt_at, budget.last_attempt_at) == (first, second)

    now.spend(1)
    assert now.first_attempt_at is not None
    assert now.first_attempt_at.tzinfo is UTC
    assert now.first_attempt_at == now.last_attempt_at


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_a_policy_set_by_hand_replaces_the_one_before_and_what_is_built_in_stays() -> None:
    registry = RetryPolicyRegistry()
    mail = ConnectorPolicy(connector_type="imap_mailbox", max_attempts=1)
    feed = ConnectorPolicy(connector_type="rss_feed", max_attempts=2)

    registry.set_policy(mail)
    registry.set_policy(feed)

    assert registry.get_policy(JobType.IMAP_MAILBOX) is registry.get_policy("imap_mailbox") is mail
    assert registry.get_policy("rss_feed") is feed
    assert [one.connector_type for one in registry.list_policies()] == [*JobType, "rss_feed"]
    assert RetryPolicyRegistry().get_policy("imap_mailbox").max_attempts == 5
    assert RetryPolicyRegistry.DEFAULT_POLICIES[JobType.IMAP_MAILBOX].max_attempts == 5
    assert [*RetryPolicyRegistry.DEFAULT_POLICIES] == [*JobType]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_file_changes_what_it_speaks_of(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "retry_policies.yaml"
    mailbox = "  imap_mailbox: {max_attempts: 4, transient_max_attempts: null}\n"
    path.write_text(f"retry_policies:\n  local_files: {{strategy: linear_backoff}}\n{mailbox}")
    registry = RetryPolicyRegistry(str(path) if as_text else path)

    local, mail = registry.get_policy(JobType.LOCAL_FILES), registry.get_policy(JobType.IMAP_MAILBOX)
    assert (local.strategy, local.max_attempts, local.base_delay_seconds) == (RetryStrategy.LINEAR_BACKOFF, 3, 30)
    assert (mail.max_attempts, mail.transient_max_attempts, mail.rate_limit_delay_seconds) == (4, None, 600)
    assert mail.retries_for(FailureType.TRANSIENT) == 4
    assert registry.get_policy(JobType.GITHUB_REPOSITORY).base_delay_seconds == 300


def test_a_missing_file_means_defaults_and_a_warning_and_no_file_no_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = RetryPolicyRegistry(None)
    with caplog.at_level(logging.WARNING, logger="reefknot"):
        registry = RetryPolicyRegistry(tmp_path / "gone.yaml")

    assert registry.list_policies() == plain.list_policies() == RetryPolicyRegistry().list_policies()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"{tmp_path / 'gone.yaml'} does not exist; connectors keep their built-in policies"
