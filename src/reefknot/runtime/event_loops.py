"""
Event loops: what a retry needs of the loop that runs it, for asyncio and for Trio.

`time_limit` bounds a block, `sleep_unless_set` is a wait that an event ends, and `require_asyncio` refuses, by its
name, a part that has no other loop. anyio runs on either of the two and needs nothing of its own. Trio is never
imported here: code that runs in one of its tasks has imported it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from sys import modules
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from reefknot import clock
from reefknot.errors import AsyncioOnlyError
from reefknot.runtime.timeouts import Timeout

if TYPE_CHECKING:
    from threading import Event

POLL_S = 0.05
"""How often async code looks at an event of `threading`, which no loop can wait for."""


def require_asyncio(part: str) -> None:
    """Refuse Trio for a part of reefknot that runs on asyncio alone."""
    if clock.in_trio():
        raise AsyncioOnlyError(part)


def time_limit(seconds: float, make_error: Callable[[], Exception]) -> Timeout | TrioTimeout:
    """A limit of `seconds` around one block of this task, for `with`; `make_error` gives the error that ends it."""
    return TrioTimeout(seconds, make_error) if clock.in_trio() else Timeout(seconds, make_error)


class TrioTimeout:
    """`Timeout` for a task of Trio: a cancel scope with a deadline."""

    __slots__ = ("_make_error", "_scope", "_seconds")

    def __init__(self, seconds: float, make_error: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._make_error = make_error

    def __enter__(self) -> Self:
        self._scope: Any = modules["trio"].move_on_after(max(0.0, self._seconds))
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nothing_else = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught and nothing_else:
            raise self._make_error() from None


async def sleep_unless_set(event: Any, seconds: float) -> None:
    """Sleep for `seconds` in the library's time, or until the event is set."""
    if event.is_set():
        return
    watch = _polled if _is_of_threading(event) else event.wait
    if clock.in_trio():
        await _race_in_trio(watch, event, seconds)
        return
    await first_of(clock.asleep(seconds), _watched(watch, event))


async def first_of(*waiting: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of these, and cancel the others."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _race_in_trio(watch: Callable[..., Any], event: Any, seconds: float) -> None:
    async with modules["trio"].open_nursery() as nursery:

        async def watching() -> None:
            await _watched(watch, event)
            nursery.cancel_scope.cancel()

        nursery.start_soon(watching)
        await clock.asleep(seconds)
        nursery.cancel_scope.cancel()


async def _watched(watch: Callable[..., Any], event: Any) -> None:
    await (watch(event) if watch is _polled else watch())


async def _polled(event: Event) -> None:
    while not event.is_set():
        await clock.pause(POLL_S)


def _is_of_threading(event: object) -> bool:
    threading = modules.get("threading")
    return threading is not None and isinstance(event, threading.Event)
