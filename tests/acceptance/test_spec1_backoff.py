"""Worker retry policy, §4: the numbers of exponential backoff, and what full and equal jitter make of them."""

from __future__ import annotations

import pytest

import reefknot as rk
from reefknot.core.backoff import delay_before, delay_without_jitter, draw, wait_range
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import Work

POLICY = rk.RetryPolicy(20, 0.1, max_delay=30.0, multiplier=2.0, jitter="none")
NEARLY_ONE = 1 - 2**-53

DRAWS = [draw(7, key, 3) for key in range(2000)]


def waits(jitter: rk.Jitter) -> list[float]:
    """Two thousand waits of 800 ms (retry 3), each with its own draw."""
    policy = POLICY.replace(jitter=jitter)
    return [delay_before(3, policy, draw=u) for u in DRAWS]


@pytest.mark.parametrize(
    ("k", "milliseconds"),
    [
        (0, 100),
        (1, 200),
        (2, 400),
        (3, 800),
        (4, 1600),
        (5, 3200),
        (6, 6400),
        (7, 12800),
        (8, 25600),
        (9, 30000),
        (10, 30000),
        (10**9, 30000),
    ],
)
def test_4_1_the_delay_doubles_from_100_ms_and_is_capped_at_30_s(k: int, milliseconds: int) -> None:
    assert delay_without_jitter(k, POLICY) * 1000 == pytest.approx(milliseconds)


def test_4_1_a_call_that_keeps_failing_waits_exactly_these_delays(virtual_time: VirtualClock) -> None:
    outcome = rk.Retrier(POLICY.replace(max_attempts=11)).run(Work(ConnectionError()))

    assert outcome.attempts == 11
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])


@pytest.mark.parametrize(
    ("jitter", "u", "milliseconds"),
    [
        ("full", 0.0, 0),
        ("full", 0.25, 200),
        ("full", NEARLY_ONE, 800),
        ("equal", 0.0, 400),
        ("equal", 0.25, 500),
        ("equal", NEARLY_ONE, 800),
        ("none", 0.25, 800),
    ],
)
def test_4_2_a_draw_places_the_wait_evenly_in_its_range(jitter: rk.Jitter, u: float, milliseconds: float) -> None:
    assert delay_before(3, POLICY.replace(jitter=jitter), draw=u) * 1000 == pytest.approx(milliseconds)


def test_4_3_jitter_is_full_unless_said_otherwise(virtual_time: VirtualClock) -> None:
    """The default of the document: 1 + 3 retries, 100 ms doubling up to 30 s, full jitter."""
    retrier = rk.Retrier()

    assert retrier.policy == rk.RetryPolicy(4, 0.1, max_delay=30.0, multiplier=2.0, jitter="full")
    retrier.run(Work(ConnectionError()))
    assert len(virtual_time.waits) == 3
    assert all(0.0 <= wait <= most for wait, most in zip(virtual_time.waits, [0.1, 0.2, 0.4], strict=True))


@pytest.mark.parametrize(
    ("base", "most", "jitter", "ranges"),
    [
        (0.2, 10.0, "equal", [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.6), (1.6, 3.2), (3.2, 6.4), (5.0, 10.0)]),
        (0.1, 5.0, "full", [(0.0, 0.1), (0.0, 0.2), (0.0, 0.4), (0.0, 0.8), (0.0, 1.6), (0.0, 3.2), (0.0, 5.0)]),
        (0.15, 10.0, "full", [(0.0, 0.15), (0.0, 0.3), (0.0, 0.6), (0.0, 1.2), (0.0, 2.4), (0.0, 4.8), (0.0, 9.6)]),
    ],
    ids=["http", "fs", "sql"],
)
def test_4_3_the_blocks_own_jitter_gives_these_ranges(
    base: float, most: float, jitter: rk.Jitter, ranges: list[tuple[float, float]]
) -> None:
    policy = rk.RetryPolicy(8, base, max_delay=most, jitter=jitter)

    assert [wait_range(k, policy) for k in range(7)] == [pytest.approx(expected) for expected in ranges]
