"""
Functions as contestants.

Each gets a timing loop compiled for itself: in CPython the call site adapts to what it calls, and one site shared by
all would be fast for none. The loop's own cost, some 10 ns, is in every figure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import repeat
from time import perf_counter
from timeit import Timer
from types import FunctionType

from bench.measure import Contestant

ARGUMENT = 7
"""What every contestant is called with, and must give back."""


def sync_call(name: str, fn: Callable[[int], object]) -> Contestant:
    """`fn(7)`, over and over."""
    answer = fn(ARGUMENT)
    if answer != ARGUMENT:
        raise ValueError(f"{name} gave back {answer!r}, not {ARGUMENT}: it does not do the work it is measured for")
    return Contestant(name, Timer(f"fn({ARGUMENT})", globals={"fn": fn}).timeit)


def async_call(name: str, fn: Callable[[int], Awaitable[object]], runner: asyncio.Runner) -> Contestant:
    """`await fn(7)`, over and over, in a loop that is running already."""
    site = FunctionType(_await_often.__code__.replace(), _await_often.__globals__, name)

    async def once() -> object:
        return await fn(ARGUMENT)

    answer = runner.run(once())
    if answer != ARGUMENT:
        raise ValueError(f"{name} gave back {answer!r}, not {ARGUMENT}: it does not do the work it is measured for")
    return Contestant(name, lambda calls: float(runner.run(site(fn, calls))))


async def _await_often(fn: Callable[[int], Awaitable[object]], calls: int) -> float:
    began = perf_counter()
    for _ in repeat(None, calls):
        await fn(7)
    return perf_counter() - began
