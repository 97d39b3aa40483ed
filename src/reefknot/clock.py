"""
Time as the library reads it, and how it waits.

`now`, `wall`, `sleep` and `asleep` are module attributes on purpose: `clock.now()` costs nothing extra, and a test can
replace them by a virtual clock for its own context (`reefknot.testing`). While no virtual clock is in use, no context
is looked at.
"""

from __future__ import annotations

import time
from _thread import allocate_lock  # what threading.Lock is, without its import
from contextvars import ContextVar
from sys import modules

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token

    from reefknot.core.clock import Clock

_virtual: ContextVar[Clock | None] = ContextVar("reefknot_clock", default=None)
_contexts = 0
_counting = allocate_lock()


def _real_sleep(seconds: float) -> None:
    if seconds > 0.0:
        time.sleep(seconds)


async def _real_asleep(seconds: float) -> None:
    if seconds > 0.0:
        await pause(seconds)


def in_trio() -> bool:
    """Whether this code runs in a task of Trio; what was never imported runs nothing."""
    # Another thread may be importing it at this moment: until it is done, no task runs in it.
    asked = getattr(getattr(modules.get("trio"), "lowlevel", None), "in_trio_task", None)
    return asked is not None and bool(asked())


async def pause(seconds: float) -> None:
    """Sleep in the event loop that runs this task, asyncio's or Trio's; 0 lets others run."""
    if in_trio():
        await modules["trio"].sleep(seconds)
        return
    from asyncio import sleep

    await sleep(seconds)


now = time.monotonic
wall = time.time
sleep = _real_sleep
asleep = _real_asleep


def _scoped_now() -> float:
    clock = _virtual.get()
    return time.monotonic() if clock is None else clock.now()


def _scoped_wall() -> float:
    clock = _virtual.get()
    return time.time() if clock is None else clock.wall()


def _scoped_sleep(seconds: float) -> None:
    clock = _virtual.get()
    (_real_sleep if clock is None else clock.sleep)(seconds)


async def _scoped_asleep(seconds: float) -> None:
    clock = _virtual.get()
    await (_real_asleep if clock is None else clock.asleep)(seconds)


def sleep_unless_set(event: object, seconds: float) -> None:
    """Sleep for `seconds`, or until the event of `threading` is set. Virtual time cannot be interrupted, and passes."""
    if not event.is_set():  # type: ignore[attr-defined]  # an event, which this module need not import
        if _virtual.get() is None:
            event.wait(seconds)  # type: ignore[attr-defined]
        else:
            sleep(seconds)


class using_clock:  # noqa: N801 - used like a function; contextlib would be imported for it alone
    """Makes `clock` the time within this context, and only there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._token: Token[Clock | None] | None = None

    def __enter__(self) -> None:
        self._token = _virtual.set(self._clock)
        _count_contexts(+1)

    def __exit__(self, *ended: object) -> None:
        assert self._token is not None
        _count_contexts(-1)
        _virtual.reset(self._token)


def _count_contexts(change: int) -> None:
    global _contexts, now, wall, sleep, asleep
    with _counting:
        _contexts += change
        if _contexts:
            now, wall, sleep, asleep = _scoped_now, _scoped_wall, _scoped_sleep, _scoped_asleep
        else:
            now, wall, sleep, asleep = time.monotonic, time.time, _real_sleep, _real_asleep


class SteadyClock:
    """
    A clock whose wall time does not jump: the machine's, read once and carried on by the monotonic clock.

    Stores reckon the same way, so a due time computed here comes due there, whatever happens to the machine's clock
    meanwhile. Wrapping a steady clock keeps its offset: parts that are given the same one agree to the millisecond.
    With an `offset` its wall time is that of the store that measured it, on which all processes of a host agree.
    """

    _clock: Clock
    _offset: float
    now: Callable[[], float]
    """That of the clock below, without a call in between: the clock is read thirty times for each assignment."""

    def __init__(self, clock: Clock, *, offset: float | None = None) -> None:
        if isinstance(clock, SteadyClock):
            self._clock, self._offset = clock._clock, clock._offset
        else:
            self._clock, self._offset = clock, clock.wall() - clock.now()
        if offset is not None:
            self._offset = offset
        self.now = self._clock.now

    @property
    def boot(self) -> str:
        """The boot whose steady clock this is; empty when no other process can share it."""
        return getattr(self._clock, "boot", "")

    def wall(self) -> float:
        return self.now() + self._offset

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await self._clock.asleep(seconds)
