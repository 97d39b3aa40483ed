"""The failing path: raise twice, then succeed, with no wait in between."""

from __future__ import annotations

from itertools import count, cycle
from typing import Any

from bench import peers
from bench.calls import sync_call
from bench.measure import Effort, measure
from bench.peers import HAND, PACKAGES, SYNC_PEERS, Function
from bench.table import MICROSECONDS, Run, Table
from bench.tables.retry_success import BARE, price
from bench.verdict import AtMostTimes

NEWS = "reefknot, another message each time"
HOOKED = "reefknot, a hook on every retry"


def flaky() -> Function:
    """Fails twice, succeeds once, and again from the start. Everybody gets one of their own."""
    fails = cycle((True, True, False)).__next__

    def work(x: int) -> int:
        if fails():
            raise ConnectionError("connection refused")
        return x

    return work


def flaky_with_news() -> Function:
    """The same, but no two failures say the same: nothing that was read before can be used again."""
    fails, number = cycle((True, True, False)).__next__, count().__next__

    def work(x: int) -> int:
        if fails():
            raise ConnectionError(f"connection {number()} refused")
        return x

    return work


@peers.silence()
def run(effort: Effort) -> Run:
    contestants = [
        sync_call(HAND, peers.hand_loop(flaky())),
        sync_call("hand loop as a decorator", peers.loop_for_any(flaky())),
        sync_call("hand loop, another message each time", peers.hand_loop(flaky_with_news())),
        sync_call(BARE, peers.ours(flaky())),
        sync_call(NEWS, peers.ours(flaky_with_news())),
        sync_call("reefknot, deadline", peers.ours(flaky(), deadline=10)),
        sync_call(HOOKED, peers.ours(flaky(), on_retry=_nothing)),
        *(sync_call(name, decorate(flaky())) for name, decorate in SYNC_PEERS.items()),
        sync_call("tenacity, its sleep taken out", peers.with_tenacity(flaky(), sleep=_nothing)),
    ]
    timings = measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds)
    return Run(timings, (price(timings, (NEWS, HOOKED)),))


def _nothing(_: Any) -> None:
    return None


TABLES = (
    Table(
        name="retry-failing",
        title="Two failures, then a success",
        about=(
            "A function that raises `ConnectionError` twice and then succeeds, no wait in between. For each failure "
            "reefknot reads, redacts and classifies the exception, decides, and keeps a record. A failure that says "
            "the same as the last one of its class is not read again. The target is held against that case; the rows "
            "with another message each time show what it costs otherwise. reefknot logs a burst of ten lines, then one "
            "a second, so a steady stream of failures hardly pays for logging. The figures of most peers are mostly "
            "their `time.sleep(0)`."
        ),
        unit=MICROSECONDS,
        reference=HAND,
        targets={BARE: (AtMostTimes(4.0, HAND),)},
        packages=PACKAGES,
        run=run,
    ),
)
