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
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nap:
    """Wait a little, then look again."""

    seconds: float


Step = Nap | Callable[[], Any]
Steps = Generator[Step, Any, T]


class _Flow(Generic[T]):
    """A flow on its way, whoever moves it: what is next, and in the end its result."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.result: T
        self.step: Step | None = None
        self._moved(lambda: next(steps))

    def answered(self, answer: Any) -> None:
        self._moved(lambda: self._steps.send(answer))

    def failed(self, error: BaseException) -> None:
        self._moved(lambda: self._steps.throw(error))

    def _moved(self, move: Callable[[], Step]) -> None:
        try:
            self.step = move()
        except StopIteration as end:
            self.step, self.result = None, end.value


def drive(steps: Steps[T]) -> T:
    """To the end, by blocking."""
    flow = _Flow(steps)
    while flow.step is not None:
        try:
            answer = None
            if isinstance(flow.step, Nap):
                time.sleep(flow.step.seconds)
            else:
                answer = flow.step()
        except BaseException as error:
            flow.failed(error)
        else:
            flow.answered(answer)
    return flow.result


async def adrive(steps: Steps[T]) -> T:
    """To the end, by awaiting. A cancellation reaches the flow like any other error, so that it can undo."""
    flow = _Flow(steps)
    while flow.step is not None:
        try:
            answer = asyncio.sleep(flow.step.seconds) if isinstance(flow.step, Nap) else flow.step()
            if isawaitable(answer):
                answer = await answer
        except BaseException as error:
            flow.failed(error)
        else:
            flow.answered(answer)
    return flow.result
