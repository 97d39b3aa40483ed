"""
Per-connector retry policies: the document's test plan, by its names, as far as it is about policies.

What its plan says of the running orchestrator is held where the orchestrator is tested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

import reefknot as rk
from reefknot.core.backoff import delay_before
from reefknot.core.failure import FailureType
from reefknot.core.policy import RetryStrategy
from reefknot.errors import ConfigurationError
from reefknot.policy.model.defaults import JobType
from tests.pace import slowness

T = TypeVar("T")
DOCUMENT = Path(__file__).parent / "samples" / "spec3-connectors.yaml"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "retry_policies.yaml"
    path.write_text(text)
    return path


def policy(**fields: Any) -> rk.ConnectorPolicy:
    return rk.ConnectorPolicy(connector_type=JobType.LOCAL_FILES, **fields)


def test_policy_registry_defaults() -> None:
    """Numbers as written: retries and seconds. Where code and YAML of the document differ, the YAML holds (C7)."""
    for job_type, expected in {
        JobType.LOCAL_FILES: (3, 30, 300, 0.2, None, None),
        JobType.OBSIDIAN_VAULT: (3, 30, 300, 0.2, None, None),
        JobType.IMAP_MAILBOX: (5, 120, 1800, 0.3, 7, 600),
        JobType.GITHUB_REPOSITORY: (5, 300, 3600, 0.25, None, 900),
    }.items():
        found = rk.RetryPolicyRegistry().get_policy(job_type)
        assert found.connector_type is job_type
        assert (found.strategy, found.backoff_multiplier) == (RetryStrategy.EXPONENTIAL_BACKOFF, 2.0)
        assert found.permanent_failures_no_retry is True
        waits = (found.base_delay_seconds, found.max_delay_seconds, found.jitter_factor)
        assert (found.max_attempts, *waits, found.transient_max_attempts, found.rate_limit_delay_seconds) == expected


def test_policy_configuration_loading() -> None:
    """The document's own file says what is built in, so that every connector comes out the same."""
    assert rk.RetryPolicyRegistry(DOCUMENT).list_policies() == rk.RetryPolicyRegistry().list_policies()
    written, built_in = rk.PolicyBook.load(DOCUMENT, environ={}), rk.PolicyBook()
    for target, kind in product([f"connector:{one.value}" for one in JobType], FailureType):
        assert written.resolve(target, failure_type=kind) == built_in.resolve(target, failure_type=kind)


def test_invalid_retry_policy_rejection(tmp_path: Path) -> None:
    for line, message in {
        "strategy: exponential": "'exponential' is not accepted; accepted: 'exponential_backoff'",
        "max_attempts: three": "'three' is not accepted; accepted: a whole number",
        "base_delay_seconds: 1.5": "1.5 is not accepted; accepted: a whole number",
        "permanent_failures_no_retry: maybe": "'maybe' is not accepted; accepted: true or false",
        "max_atempts: 3": "unknown key; accepted: backoff_multiplier",
        "base_delay_seconds: 301": "the base delay of 301 s is above the cap of 300 s",
        "max_attempts: null": "null is not a value here",
    }.items():
        path = written(tmp_path, f"retry_policies:\n  local_files:\n    {line}\n")
        with pytest.raises(ConfigurationError) as caught:
            rk.RetryPolicyRegistry(path)
        assert f"{path}:3:5: retry_policies.local_files." in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "least", "most", "step"),
    [
        ("max_attempts", 1, 10, 1),
        ("base_delay_seconds", 1, 3600, 1),
        ("max_delay_seconds", 1, 86400, 1),
        ("jitter_factor", 0.0, 1.0, 0.01),
        ("backoff_multiplier", 1.0, 10.0, 0.01),
        ("transient_max_attempts", 1, 20, 1),
        ("rate_limit_delay_seconds", 1, 7200, 1),
    ],
)
def test_retry_policy_bounds_checking(tmp_path: Path, field: str, least: float, most: float, step: float) -> None:
    """In code and in a file alike: the bounds themselves are in, one step beyond is out."""
    beside: dict[str, Any] = {"base_delay_seconds": 1} if field == "max_delay_seconds" else {}
    beside |= {"max_delay_seconds": 86400} if field == "base_delay_seconds" else {}
    also = "".join(f", {name}: {value}" for name, value in beside.items())

    def load(value: float) -> object:
        path = written(tmp_path, f"retry_policies: {{local_files: {{{field}: {value}{also}}}}}")
        return getattr(rk.RetryPolicyRegistry(path).get_policy("local_files"), field)

    for value in (least, most):
        assert getattr(policy(**{field: value}, **beside), field) == value
        assert load(value) == value
    for value in (least - step, most + step):
        with pytest.raises(ValidationError):
            policy(**{field: value}, **beside)
        with pytest.raises(ConfigurationError, match=f"out of bounds; accepted: from {least:g}|from {least}"):
            load(value)


def test_retry_policy_calculation() -> None:
    for strategy, delays in {
        RetryStrategy.EXPONENTIAL_BACKOFF: [60, 120, 240, 480],
        RetryStrategy.LINEAR_BACKOFF: [60, 120, 180, 240],
        RetryStrategy.FIXED_DELAY: [60, 60, 60, 60],
        RetryStrategy.IMMEDIATE: [0, 0, 0, 0],
        RetryStrategy.NO_RETRY: [0, 0, 0, 0],
    }.items():
        found = policy(strategy=strategy, jitter_factor=0.0)
        assert [found.calculate_delay(attempt) for attempt in range(4)] == delays, strategy


@pytest.mark.parametrize(("attempt", "least", "most"), [(0, 48, 72), (1, 96, 144), (2, 192, 288)])
def test_jitter_distribution(attempt: int, least: int, most: int) -> None:
    """The document's samples: 60 s ± 12, 120 s ± 24, 240 s ± 48."""
    delays = [policy().calculate_delay(attempt) for _ in range(2000)]

    assert least <= min(delays)
    assert max(delays) <= most
    spread = most - least
    assert min(delays) < least + spread * 0.1
    assert max(delays) > most - spread * 0.1
    assert abs(sum(delays) / len(delays) - (least + most) / 2) < spread * 0.06


def test_without_the_connectors_rule_a_wait_keeps_its_fractions() -> None:
    """The control: it is `whole_seconds` that cuts."""
    fractions = rk.PolicyBook().resolve("connector:my.own").replace(whole_seconds=False)

    assert delay_before(0, fractions, draw=0.04) == pytest.approx(48.96)


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run it in so many threads that begin together; the results, by number. An error in any of them is raised here."""
    gate = threading.Barrier(count)

    def body(number: int) -> T:
        gate.wait(10)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, range(count), timeout=20))


def test_concurrent_retry_scheduling() -> None:
    """Eight threads spend the budgets of their own jobs from one registry: each job gets exactly its retries."""
    registry = rk.RetryPolicyRegistry()
    types = list(JobType)

    def schedule(number: int) -> list[int]:
        spent = []
        for job in range(48):
            found = registry.get_policy(types[job % 4])
            budget = rk.RetryBudget(f"{number}/{job}", types[job % 4])
            while budget.can_retry(found):
                budget.spend(budget.next_delay(found))
            spent.append(budget.attempts)
        return spent

    assert in_threads(8, schedule) == [[3, 3, 5, 5] * 12] * 8


def test_concurrent_retry_scheduling_while_policies_are_set() -> None:
    """A reader sees the old policy or the new one, never a mixture and never none."""
    registry = rk.RetryPolicyRegistry()
    few, many = policy(max_attempts=1, base_delay_seconds=1), policy(max_attempts=9, base_delay_seconds=9)
    registry.set_policy(few)

    def read_or_write(number: int) -> set[tuple[int, int]]:
        seen = set()
        for step in range(300):
            if number % 2:
                registry.set_policy(many if step % 2 else few)
                registry.set_policy(rk.ConnectorPolicy(connector_type=f"custom-{number}-{step % 7}"))
            else:
                found = registry.get_policy(JobType.LOCAL_FILES)
                seen.add((found.max_attempts, found.base_delay_seconds))
                registry.list_policies()
        return seen

    assert set().union(*in_threads(4, read_or_write)) <= {(1, 1), (9, 9)}
    assert len(registry.list_policies()) == 4 + 2 * 7


def test_jitter_overhead() -> None:
    """No benchmark: only that chance is no more than a small part of a delay that is waited for in seconds."""
    found = policy()
    started = time.process_time()
    for attempt in range(1000):
        found.calculate_delay(attempt % 5)

    assert time.process_time() - started < 1.0 * slowness()
