"""
Time that passes when nobody waits for it.

`VirtualClock` is for one caller: a sleep moves the clock and returns. `VirtualLoop` is a whole event loop whose time
jumps to the next timer when nothing else can run, so any number of tasks wait side by side and a day takes
milliseconds. Neither touches the wall clock of the machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""Where virtual wall time begins: a fixed moment, so that runs can be compared."""


class VirtualClock:
    """A clock that one caller moves by waiting. `waits` lists what was slept."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._start = start
        self.waits: list[float] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return EPOCH + self._now - self._start

    def advance(self, seconds: float) -> None:
        """Let time pass without anybody sleeping: a slow attempt, say."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"time only moves forward by finite steps, not by {seconds!r}")
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)
        await asyncio.sleep(0)

    @property
    def waited(self) -> float:
        """Seconds slept in all."""
        return sum(self.waits)


class SkippingClock(VirtualClock):
    """Waits take no time at all, not even virtual time: deadlines are as far away as before."""

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


class LoopClock:
    """The time of the running `VirtualLoop`."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH + self._loop.time()

    def sleep(self, seconds: float) -> None:
        self._loop.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _JumpingSelector(selectors.SelectSelector):
    """Looks for real I/O without waiting; when there is none, the loop's time jumps instead."""

    def __init__(self) -> None:
        super().__init__()
        self.jump = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout is None:
            return ready or super().select(0.05)
        self.jump += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._advanced = 0.0

    def time(self) -> float:
        return self._jumping.jump + self._advanced

    def advance(self, seconds: float) -> None:
        self._advanced += max(0.0, seconds)


def run_in_virtual_loop(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """`asyncio.run`, on a loop of virtual time."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
