"""
Who is how fast, in one run.

The contestants of a table take turns, round after round, in one process; what slows the machine down for a while slows
all of them. Of every contestant the fastest batch counts: noise only ever adds. This module knows neither the peers nor
the targets, and it never repeats a measurement because its result is unwelcome.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

_LARGEST_BATCH = 1 << 24


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do the work. `batch(n)` does it n times and answers how many seconds that took."""

    name: str
    batch: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: rounds of batches for calls, rounds of fresh interpreters for imports."""

    rounds: int
    batch_seconds: float
    process_rounds: int


FULL = Effort(rounds=150, batch_seconds=0.003, process_rounds=25)
QUICK = Effort(rounds=15, batch_seconds=0.002, process_rounds=5)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: in the fastest batch, and in the middle one."""

    best: float
    middle: float

    @property
    def spread(self) -> float:
        """How far the middle batch lies above the fastest: 0.3 is 30 %."""
        return self.middle / self.best - 1.0


Timings = Mapping[str, Timing]


def batch_size(contestant: Contestant, seconds: float) -> int:
    """
    How many calls take about `seconds`. Doubling also warms the contestant up.

    The fastest of three counts here too: a batch that the machine or a first log line held up would make all batches of
    its contestant so small that each begins with cold caches.
    """
    size = 1
    while size < _LARGEST_BATCH:
        taken = min(contestant.batch(size) for _ in range(3))
        if taken * 2 > seconds:
            return max(1, round(size * seconds / taken))
        size *= 2
    return size


def turns(contestants: Sequence[Contestant], rounds: int) -> Iterator[Contestant]:
    """Everybody once a round; each round begins with another, so that nobody always follows the same neighbour."""
    for number in range(rounds):
        first = number % len(contestants)
        yield from contestants[first:]
        yield from contestants[:first]


def measure(contestants: Sequence[Contestant], *, rounds: int, batch_seconds: float | None) -> dict[str, Timing]:
    """The timings by name. `batch_seconds=None`: every batch is one call, after one that does not count."""
    names = [contestant.name for contestant in contestants]
    if len(set(names)) != len(names):
        raise ValueError(f"two contestants share a name: {names}")
    if rounds < 1:
        raise ValueError(f"rounds: {rounds}; accepted is 1 or more")
    sizes: dict[str, int] = {}
    seen: dict[str, list[float]] = {name: [] for name in names}
    with no_collector():
        for contestant in contestants:
            if batch_seconds is None:
                contestant.batch(1)
            sizes[contestant.name] = 1 if batch_seconds is None else batch_size(contestant, batch_seconds)
        for contestant in turns(contestants, rounds):
            size = sizes[contestant.name]
            seen[contestant.name].append(contestant.batch(size) / size)
            gc.collect(0)  # between the batches, so that the garbage of one is not the cache misses of the next
    return {name: Timing(min(taken), median(taken)) for name, taken in seen.items()}


@contextmanager
def no_collector() -> Iterator[None]:
    """The garbage collector does not run by itself in here."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
