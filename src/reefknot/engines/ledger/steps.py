"""
One story for sync and async drivers.

A flow is a generator. It yields what may take time, a call or a nap, and gets back what came of it; `drive` does that
by blocking, `adrive` by awaiting. The flows themselves know nothing of an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nap:
    """Wait a little, then look again."""

    seconds: float


Step = Nap | Callable[[], Any]
Steps = Generator[Step, Any, T]


def drive(steps: Steps[T]) -> T:
    """To the end, by blocking."""
    try:
        step = next(steps)
        while True:
            try:
                answer = None
                if isinstance(step, Nap):
                    time.sleep(step.seconds)
                else:
                    answer = step()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def adrive(steps: Steps[T]) -> T:
    """To the end, by awaiting. A cancellation reaches the flow like any other error, so that it can undo."""
    try:
        step = next(steps)
        while True:
            try:
                answer = asyncio.sleep(step.seconds) if isinstance(step, Nap) else step()
                if isawaitable(answer):
                    answer = await answer
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
