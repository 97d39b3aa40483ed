"""
The speed of this machine at plain Python, measured now, for the few tests that have to name a limit in seconds.

A shared machine, or one that traces every call, is several times slower than the one a limit was written for. Code that
is too slow by its own fault is too slow beside this measure as well.
"""

import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

T = TypeVar("T")

NOMINAL_S = 0.012
"""CPU time of the work below on the machine that the limits were written for."""


def slowness() -> float:
    """How many times slower this machine is than the nominal one; never less than 1."""
    return max(1.0, min(_spent() for _ in range(3)) / NOMINAL_S)


def _spent() -> float:
    began = time.process_time()
    words: dict[str, int] = {}
    for number in range(40_000):
        _count(words, number)
    return time.process_time() - began


def _count(words: dict[str, int], number: int) -> None:
    word = str(number % 97)
    words[word] = words.get(word, 0) + 1


def within(seconds: float, do: Callable[[], T]) -> T:
    """
    The result of `do`, which has to end in time at least once in three tries: a stalled machine does not stall thrice.

    On a machine that is slow all the time the limit grows with its slowness.
    """
    shortest, limit = inf, seconds
    for _ in range(3):
        began = time.monotonic()
        given = do()
        shortest = min(shortest, time.monotonic() - began)
        if shortest >= limit:
            limit = max(limit, seconds * slowness())
        if shortest < limit:
            return given
    raise AssertionError(f"it took {shortest:.2f} s at its best of three, and may take {limit:.2f} s")


def fastest(call: Callable[[], object], times: int = 8, limit: float = 0.010) -> float:
    """The best of several, by the time this thread was at work: the machine may be busy, the code may not be slow."""
    best = inf
    for _ in range(times):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
        if best < limit:
            break
    return best
