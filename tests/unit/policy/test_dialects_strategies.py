"""Strategies by name: built in, or offered by an installed package."""

from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.core.policy import CUSTOM_STRATEGIES, RetryPolicy
from reefknot.errors import ConfigurationError
from reefknot.policy import dialects as strategies
from reefknot.policy.book import failure_from_facts
from reefknot.policy.registry import ConnectorPolicy, RetryPolicyRegistry
from tests.rows import for_each_row


class Offered:
    """An entry point."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name = name
        self.load = load


def staircase(retry: int, policy: RetryPolicy) -> float:
    """Three waits on each stair."""
    return policy.base_delay * (1 + min(retry, 1000) // 3)


def not_there() -> Any:
    raise ModuleNotFoundError("No module named 'gone'")


OFFERS = [
    Offered("staircase", lambda: staircase),
    Offered("gone", not_there),
    Offered("moody", lambda: lambda retry, policy: -1.0),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = metadata.entry_points

    def entry_points(*, group: str) -> Any:
        return OFFERS if group == strategies.GROUP else real(group=group)

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    yield
    CUSTOM_STRATEGIES.clear()


BLOCK = "worker: {retries: {v2: {block_policies: {http: {strategy: NAME, base_delay_ms: 1000, jitter_type: none}}}}}"
CONNECTOR = "retry_policies: {imap_mailbox: {strategy: NAME}}"


def test_a_strategy_of_another_package_is_known_to_blocks_connectors_and_the_connectors_own_front(
    tmp_path: Path,
) -> None:
    book = rk.PolicyBook.loads(f"{BLOCK}\n{CONNECTOR}".replace("NAME", "staircase"))
    policy = book.resolve("block:http.request", code="http_error", http_status=503, retry_count=7)
    waits = [one.max for one in book.explain("block:http", failure_from_facts(http_status=503), retry_count=7).schedule]
    assert policy.strategy == "staircase"
    assert waits == [1, 1, 1, 2, 2, 2, 3]
    assert policy.provenance["strategy"].source.startswith("<text>:1:")
    assert book.resolve("connector:imap_mailbox").strategy == "staircase"

    path = tmp_path / "reefknot.yaml"
    path.write_text(CONNECTOR.replace("NAME", "staircase"))
    front = RetryPolicyRegistry(path).get_policy("imap_mailbox")
    assert front.strategy == "staircase"
    assert front.model_copy(update={"jitter_factor": 0.0}).calculate_delay(4) == 2 * front.base_delay_seconds
    with pytest.raises(ValueError, match="'stairs' is not accepted"):
        ConnectorPolicy(connector_type="x", strategy="stairs")


@for_each_row("text", [BLOCK, CONNECTOR])
@for_each_row(
    ("name", "said"),
    [
        ("stairs", "'stairs' is not accepted; accepted: 'exponential_backoff'"),
        ("staircas", "did you mean 'staircase'?"),
        ("gone", "the strategy cannot be loaded (ModuleNotFoundError: No module named 'gone')"),
        ("moody", "the strategy cannot be used: moody='-1.0, then -1.0 for retry 0'"),
        ("7", "7 is not accepted; accepted: 'exponential_backoff'"),
    ],
)
def test_a_strategy_that_cannot_be_used_is_told_with_its_place(text: str, name: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as wrong:
        rk.PolicyBook.loads(text.replace("NAME", name))
    (problem,) = str(wrong.value).splitlines()

    assert said in problem
    assert problem.startswith("<text>:1:")
    assert ".strategy: " in problem


def test_only_what_is_named_is_loaded_unless_all_are_asked_for() -> None:
    rk.PolicyBook.loads(CONNECTOR.replace("NAME", "linear_backoff"))
    assert CUSTOM_STRATEGIES == {}
    rk.PolicyBook.loads(CONNECTOR.replace("NAME", "staircase"))
    assert set(CUSTOM_STRATEGIES) == {"staircase"}
    CUSTOM_STRATEGIES.clear()

    problems = strategies.load_all()
    assert set(CUSTOM_STRATEGIES) == {"staircase"}
    assert [problem.partition(" (")[0] for problem in problems] == [
        "the strategy cannot be loaded",
        "the strategy cannot be used: moody='-1.0, then -1.0 for retry 0' is not accepted: a function of",
    ]
