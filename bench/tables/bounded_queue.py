"""The places of a worker's queue: what it costs to be bounded, to know the oldest, and to be removable by id."""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter

from bench.measure import Contestant, Effort, measure
from bench.table import MICROSECONDS, Run, Table
from bench.verdict import AtMostTimes
from reefknot.queue.worker.pool import BoundedQueue, Queued

DEQUE = "a bare deque"
ASYNCIO = "asyncio.Queue, without waiting"
OURS = "reefknot's bounded queue"
ADMITTED = "reefknot's bounded queue, seen by admission"

GROUP = 100
ITEMS = [Queued(f"item-{number}") for number in range(GROUP)]


def bare() -> Contestant:
    line: deque[Queued] = deque()

    def batch(times: int) -> float:
        put, take = line.append, line.popleft
        began = perf_counter()
        for _ in range(0, times, GROUP):
            for item in ITEMS:
                put(item)
            for _ in ITEMS:
                take()
        return perf_counter() - began

    return Contestant(DEQUE, batch)


def asyncios() -> Contestant:
    queue: asyncio.Queue[Queued] = asyncio.Queue(1000)

    def batch(times: int) -> float:
        put, take = queue.put_nowait, queue.get_nowait
        began = perf_counter()
        for _ in range(0, times, GROUP):
            for item in ITEMS:
                put(item)
            for _ in ITEMS:
                take()
        return perf_counter() - began

    return Contestant(ASYNCIO, batch)


def ours() -> Contestant:
    """As a worker uses it: the store says which one runs, and its place is given up by id."""
    queue = BoundedQueue(1000)

    def batch(times: int) -> float:
        put, remove = queue.put, queue.remove
        began = perf_counter()
        for _ in range(0, times, GROUP):
            for item in ITEMS:
                put(item, 1.0)
            for item in ITEMS:
                remove(item.id)
        return perf_counter() - began

    return Contestant(OURS, batch)


def admitted() -> Contestant:
    """The same, and before each arrival admission looks at the depth and at the oldest place."""
    queue = BoundedQueue(1000)

    def batch(times: int) -> float:
        put, remove, oldest = queue.put, queue.remove, queue.oldest
        began = perf_counter()
        for _ in range(0, times, GROUP):
            for item in ITEMS:
                if queue.depth < GROUP:
                    oldest(1.0)
                    put(item, 1.0)
            for item in ITEMS:
                remove(item.id)
        return perf_counter() - began

    return Contestant(ADMITTED, batch)


def run(effort: Effort) -> Run:
    contestants = [bare(), asyncios(), ours(), admitted()]
    timings = measure(contestants, rounds=effort.rounds, batch_seconds=effort.batch_seconds)
    rate = ", ".join(f"{name} {1 / timing.best / 1e6:.2f}" for name, timing in timings.items())
    return Run(timings, (f"Million pairs each second: {rate}.",))


TABLES = (
    Table(
        name="bounded-queue",
        title="The worker's bounded queue",
        about=(
            "A place taken and given up by id, a hundred in the queue, in one loop. asyncio.Queue puts and gets "
            "without waiting, which is its fastest way. Ours also knows due times, deadlines and the oldest place of "
            "each priority. The order in which work runs is the store's."
        ),
        unit=MICROSECONDS,
        reference=ASYNCIO,
        targets={OURS: (AtMostTimes(1.0, ASYNCIO),)},
        packages=("reefknot",),
        run=run,
    ),
)
