"""
Per-connector retry policies: strategies, jitter, and the delays of the examples, by the connectors' rule of whole
seconds, at least one.

What a failure type changes is shown with a policy chosen per failure; loading such policies is the registry's business.
"""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.core.backoff import delay_before, wait_range
from reefknot.core.decide import History, Stop, decide
from reefknot.core.failure import Failure, FailureType
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import Work

CONNECTOR = rk.RetryPolicy(
    4, 60.0, max_delay=3600.0, multiplier=2.0, jitter="proportional", jitter_factor=0.2, whole_seconds=True
)
"""The schema's defaults: 1 + 3 retries, 60 s up to an hour, ×2, ±20 %."""
STEADY = CONNECTOR.replace(jitter="none")
TRANSIENT = Failure(rk.ErrorCode.network_error, FailureType.TRANSIENT)
NEARLY_ONE = 1 - 2**-53


class ConnectorError(Exception):
    """A connector's failure of a known type."""

    def __init__(self, failure_type: FailureType) -> None:
        super().__init__("the connector failed")
        self.failure_type = failure_type


@pytest.mark.parametrize(
    ("value", "strategy"),
    [
        ("exponential_backoff", rk.RetryStrategy.EXPONENTIAL_BACKOFF),
        ("linear_backoff", rk.RetryStrategy.LINEAR_BACKOFF),
        ("fixed_delay", rk.RetryStrategy.FIXED_DELAY),
        ("immediate", rk.RetryStrategy.IMMEDIATE),
        ("no_retry", rk.RetryStrategy.NO_RETRY),
    ],
)
def test_a_strategy_is_written_as_the_document_writes_it(value: str, strategy: rk.RetryStrategy) -> None:
    assert rk.RetryStrategy(value) is strategy
    assert STEADY.replace(strategy=value).strategy is strategy


def test_immediate_waits_0_seconds_even_with_jitter(virtual_time: VirtualClock) -> None:
    """The document's own code would make one second of it; the decision says 0."""
    policy = CONNECTOR.replace(strategy="immediate")
    work = Work(ConnectionError())

    outcome = rk.Retrier(policy).run(work)

    assert [record.delay for record in outcome.history] == [0.0, 0.0, 0.0, None]
    assert work.executions == 4
    assert virtual_time.waited == 0.0


def test_no_retry_fails_at_once(virtual_time: VirtualClock) -> None:
    work = Work(ConnectionError(), times=1)

    outcome = rk.Retrier(CONNECTOR.replace(strategy="no_retry")).run(work)

    assert (work.executions, outcome.reason, virtual_time.waits) == (1, rk.Reason.NOT_RETRYABLE, [])
    assert decide(CONNECTOR.replace(strategy="no_retry"), History(1), TRANSIENT, 0.5) == Stop(rk.Reason.NOT_RETRYABLE)


def test_without_the_connectors_rule_a_wait_keeps_its_fractions() -> None:
    """The control: it is `whole_seconds` that cuts."""
    assert delay_before(0, CONNECTOR.replace(whole_seconds=False), draw=0.04) == pytest.approx(48.96)


@pytest.mark.parametrize(
    ("base", "most", "factor", "ranges"),
    [
        (30, 300, 0.2, [(24, 36), (48, 72), (96, 144), (192, 288), (240, 300)]),
        (120, 1800, 0.3, [(84, 156), (168, 312), (336, 624), (672, 1248), (1260, 1800)]),
        (300, 3600, 0.25, [(225, 375), (450, 750), (900, 1500), (1800, 3000), (2700, 3600)]),
    ],
    ids=["local_files", "imap_mailbox", "github_repository"],
)
def test_a_connectors_numbers_give_these_ranges_and_never_more_than_the_cap(
    base: float, most: float, factor: float, ranges: list[tuple[float, float]]
) -> None:
    policy = CONNECTOR.replace(base_delay=base, max_delay=most, jitter_factor=factor)

    assert [wait_range(k, policy) for k in range(5)] == [pytest.approx(expected) for expected in ranges]
    assert all(delay_before(k, policy, draw=NEARLY_ONE) <= most for k in range(50))


def imap(failure: Failure) -> rk.RetryPolicy:
    """
    The mailbox sample as one policy per failure type: 5 retries from 120 s, 7 when transient, 600 s when rate limited,
    none when permanent.
    """
    policy = STEADY.replace(max_attempts=6, base_delay=120.0, max_delay=1800.0)
    match failure.failure_type:
        case FailureType.TRANSIENT:
            return policy.replace(max_attempts=8)
        case FailureType.RATE_LIMITED:
            return policy.replace(base_delay=600.0)
        case FailureType.PERMANENT:
            return policy.replace(retryable=False)
        case FailureType.UNKNOWN:
            return policy


@pytest.mark.parametrize(
    ("failure_type", "waits"),
    [
        (FailureType.UNKNOWN, [120, 240, 480, 960, 1800]),
        (FailureType.TRANSIENT, [120, 240, 480, 960, 1800, 1800, 1800]),
        (FailureType.RATE_LIMITED, [600, 1200, 1800, 1800, 1800]),
        (FailureType.PERMANENT, []),
    ],
)
def test_the_failure_type_chooses_attempts_and_delays(
    virtual_time: VirtualClock, failure_type: FailureType, waits: list[float]
) -> None:
    """`max_attempts` of the document are retries: 5 of them are six executions."""
    work = Work(ConnectorError(failure_type))

    outcome = rk.Retrier.following(imap, imap(Failure(rk.ErrorCode.none, FailureType.UNKNOWN))).run(work)

    assert virtual_time.waits == waits
    assert work.executions == len(waits) + 1
    assert outcome.reason is (rk.Reason.ATTEMPTS_SPENT if waits else rk.Reason.NOT_RETRYABLE)


def test_a_rate_limit_delay_above_the_cap_raises_the_cap() -> None:
    """900 s for rate limits where 300 s are the most otherwise: the larger of the two is the cap for that type."""
    with pytest.raises(rk.ParameterError, match="base_delay"):
        STEADY.replace(base_delay=900.0, max_delay=300.0)

    limited = STEADY.replace(base_delay=900.0, max_delay=max(300.0, 900.0))
    assert [delay_before(k, limited, draw=0.5) for k in range(2)] == [900.0, 900.0]
