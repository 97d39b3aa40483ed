"""The happy path: the first execution succeeds, and the retrier should hardly be noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench import peers
from bench.calls import async_call, sync_call
from bench.measure import Effort, Timings, measure
from bench.peers import ASYNC_PEERS, HAND, PACKAGES, SYNC_PEERS
from bench.table import MICROSECONDS, Run, Table
from bench.verdict import AheadOf, AtMostSeconds, AtMostTimes

BARE = "reefknot"
THROTTLED = "reefknot, throttle and counters"
DEADLINE = "reefknot, deadline"


def work(x: int) -> int:
    return x


async def awork(x: int) -> int:
    return x


async def suspending(x: int) -> int:
    await asyncio.sleep(0)
    return x


def price(timings: Timings, variants: Sequence[str]) -> str:
    """What each variant costs on top of the bare retrier."""
    bare = timings[BARE].best
    parts = [f"{name.removeprefix('reefknot, ')} {(timings[name].best - bare) * 1e6:+.2f} µs" for name in variants]
    return f"The price of a feature, on top of the bare retrier: {'; '.join(parts)}."


@peers.silence()
def run_sync(effort: Effort) -> Run:
    contestants = [
        sync_call("the call alone", work),
        sync_call("hand loop, while and a counter", peers.terse_loop(work)),
        sync_call(HAND, peers.hand_loop(work)),
        sync_call("hand loop as a decorator", peers.loop_for_any(work)),
        sync_call(BARE, peers.ours(work)),
        sync_call(DEADLINE, peers.ours(work, deadline=10)),
        sync_call(THROTTLED, peers.ours(work, throttle=True)),
        *(sync_call(name, decorate(work)) for name, decorate in SYNC_PEERS.items()),
    ]
    timings = measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds)
    return Run(timings, (price(timings, (DEADLINE, THROTTLED)),))


@peers.silence()
def run_async(effort: Effort) -> Run:
    with asyncio.Runner() as runner:
        contestants = [
            async_call("the call alone", awork, runner),
            async_call(HAND, peers.hand_loop_async(awork), runner),
            async_call(BARE, peers.ours(awork), runner),
            async_call(THROTTLED, peers.ours(awork, throttle=True), runner),
            async_call(DEADLINE, peers.ours(awork, deadline=10), runner),
            *(async_call(name, decorate(awork), runner) for name, decorate in ASYNC_PEERS.items()),
        ]
        timings = measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds)
    return Run(timings, (price(timings, (THROTTLED, DEADLINE)),))


@peers.silence()
def run_suspending(effort: Effort) -> Run:
    """The other case of a deadline: the work really waits, so a timer has to be armed."""
    plain = peers.hand_loop_async(suspending)

    async def timed_by_asyncio(x: int) -> int:
        async with asyncio.timeout(10):
            return await plain(x)

    with asyncio.Runner() as runner:
        contestants = [
            async_call(HAND, plain, runner),
            async_call("hand loop under asyncio.timeout", timed_by_asyncio, runner),
            async_call(BARE, peers.ours(suspending), runner),
            async_call(DEADLINE, peers.ours(suspending, deadline=10), runner),
        ]
        timings = measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds)
    return Run(timings, (price(timings, (DEADLINE,)),))


TABLES = (
    Table(
        name="retry-success",
        title="A first-try success, sync",
        about=(
            "A function that gives its argument back, under each retrier. The targets are held against the hand loop "
            "with `range`. The same loop with `while` and a counter is cheaper, because it is compiled around one "
            "known function; no decorator reaches it, since a wrapper for any arguments already costs more."
        ),
        unit=MICROSECONDS,
        reference=HAND,
        targets={
            BARE: (AtMostTimes(1.0, HAND), AheadOf(tuple(SYNC_PEERS))),
            THROTTLED: (AtMostTimes(2.0, HAND), AheadOf(tuple(SYNC_PEERS))),
            DEADLINE: (AheadOf(tuple(SYNC_PEERS)),),
        },
        packages=PACKAGES,
        run=run_sync,
    ),
    Table(
        name="retry-success-async",
        title="A first-try success, async",
        about=(
            "A coroutine function that gives its argument back without suspending. The target of 5 µs for a deadline "
            "is for this case: reefknot arms a timer only when the work really waits, and then it costs more, as the "
            "next table shows. The peers run without a deadline."
        ),
        unit=MICROSECONDS,
        reference=HAND,
        targets={
            BARE: (AtMostTimes(1.0, HAND), AheadOf(tuple(ASYNC_PEERS))),
            THROTTLED: (AtMostTimes(2.0, HAND), AheadOf(tuple(ASYNC_PEERS))),
            DEADLINE: (AtMostSeconds(5e-6),),
        },
        packages=("reefknot", *ASYNC_PEERS),
        run=run_async,
    ),
    Table(
        name="retry-success-suspending",
        title="A first-try success, async, that waits once",
        about=(
            "A coroutine function that yields to the loop once (`asyncio.sleep(0)`). There is no target; it shows what "
            "a deadline costs once its timer is armed, which is about what `asyncio.timeout` costs."
        ),
        unit=MICROSECONDS,
        reference=HAND,
        targets={},
        packages=("reefknot",),
        run=run_suspending,
    ),
)
