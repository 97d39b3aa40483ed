"""
Where the library reads the time and waits.

The four functions are module attributes on purpose: reading `timing.now` costs nothing extra, and a test can put a
virtual clock in their place for its own context (`reefknot.testing`). While no virtual clock is in use anywhere, no
context is ever looked at.

One clock whose wall time does not jump.

It reads the machine's wall clock once and carries it on by the steady one. Stores reckon in the same way, so a due time
that was computed here comes due there, whatever somebody does to the machine's clock meanwhile. A clock that is steady
already is not read again: parts that are given the same one agree to the millisecond.
"""

from __future__ import annotations

import time
from _thread import allocate_lock  # what threading.Lock is, without its import
from contextvars import ContextVar

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from contextvars import Token

    from reefknot.ports.clock import Clock

_chosen: ContextVar[Clock | None] = ContextVar("reefknot_clock", default=None)
_users = 0
_counting = allocate_lock()


def _real_sleep(seconds: float) -> None:
    if seconds > 0.0:
        time.sleep(seconds)


async def _real_asleep(seconds: float) -> None:
    if seconds > 0.0:
        from asyncio import sleep

        await sleep(seconds)


now = time.monotonic
wall = time.time
sleep = _real_sleep
asleep = _real_asleep


def _scoped_now() -> float:
    clock = _chosen.get()
    return time.monotonic() if clock is None else clock.now()


def _scoped_wall() -> float:
    clock = _chosen.get()
    return time.time() if clock is None else clock.wall()


def _scoped_sleep(seconds: float) -> None:
    clock = _chosen.get()
    (_real_sleep if clock is None else clock.sleep)(seconds)


async def _scoped_asleep(seconds: float) -> None:
    clock = _chosen.get()
    await (_real_asleep if clock is None else clock.asleep)(seconds)


class using_clock:  # noqa: N801 - used like a function; contextlib would be imported for it alone
    """Within this context, and only there, `clock` is the time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._token: Token[Clock | None] | None = None

    def __enter__(self) -> None:
        self._token = _chosen.set(self._clock)
        _count(+1)

    def __exit__(self, *ended: object) -> None:
        assert self._token is not None
        _count(-1)
        _chosen.reset(self._token)


def _count(change: int) -> None:
    global _users, now, wall, sleep, asleep
    with _counting:
        _users += change
        if _users:
            now, wall, sleep, asleep = _scoped_now, _scoped_wall, _scoped_sleep, _scoped_asleep
        else:
            now, wall, sleep, asleep = time.monotonic, time.time, _real_sleep, _real_asleep


class SteadyClock:
    """Another clock's time, with a wall that only moves as the steady clock does."""

    _clock: Clock
    _offset: float

    def __init__(self, clock: Clock) -> None:
        if isinstance(clock, SteadyClock):
            self._clock, self._offset = clock._clock, clock._offset
        else:
            self._clock, self._offset = clock, clock.wall() - clock.now()

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.now() + self._offset

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await self._clock.asleep(seconds)
