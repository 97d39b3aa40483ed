"""
Time limits around a block of one asyncio task.

`Timeout` cancels the task when the time is over and turns that cancellation, and no other, into an error: when
other code cancels the task as well, the other one wins, as with `asyncio.timeout`. `Timeouts` hands out limits that
share a single timer, set to the earliest of them: a block that ends in time, as nearly all do, never touches the
loop's heap.
"""

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from types import TracebackType
from typing import Any, Self, TypeVar

AWAY_S = 3.0
"""How long the end of a process waits for a store that is away: what cannot be given back is left to its lease."""
LOOK_S = 0.1
STORE_S = 30.0
"""Time limit of one operation of a store."""
CANCELLATIONS, CANCELLATION_S = 20, 0.25
"""How often work is cancelled that does not end, and how long each time is waited for it."""

T = TypeVar("T")


class Timeout:
    """A limit of `seconds` around one block, used once; `make_error` gives the error that ends it."""

    __slots__ = ("_cancelled_before", "_given", "_handle", "_make_error", "_seconds", "_task", "expired")
    _given: asyncio.Task[Any] | None

    def __init__(self, seconds: float, make_error: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._make_error = make_error
        self._given = None
        self._handle: asyncio.TimerHandle | None = None
        self.expired = False
        """Whether this limit ended the block."""

    def __enter__(self) -> Self:
        task = self._given or asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a running asyncio task")
        self._task = task
        self._cancelled_before = task.cancelling()
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disarm()
        if not self.expired:
            return
        cancelled_by_others = self._task.uncancel() > self._cancelled_before
        if kind is not None and issubclass(kind, asyncio.CancelledError) and not cancelled_by_others:
            raise self._make_error() from None

    def expire(self) -> None:
        """End the block now."""
        self.expired = True
        self._task.cancel()

    def _arm(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self.expire)

    def _disarm(self) -> None:
        assert self._handle is not None
        self._handle.cancel()


class Timeouts:
    """Limits of one owner in one loop, all on one timer."""

    __slots__ = ("_loop", "_timer", "ends", "next_end")

    def __init__(self) -> None:
        self.ends: dict[Timeout, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.next_end = inf
        self._timer: asyncio.TimerHandle | None = None

    def timeout(
        self, seconds: float, expired: Callable[[], None] | None = None, *, task: asyncio.Task[Any] | None = None
    ) -> "SharedTimeout":
        """
        A limit of `seconds` from now; `inf` is no limit. `expired` is called when it cancels the block.

        `task` is the one that runs the block, where the caller knows it.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        return SharedTimeout(self, loop.time() + seconds, expired, task)

    def set_timer(self, at: float) -> None:
        """Move the timer to `at`, the earliest end; `inf` stops it."""
        if self._timer is not None:
            self._timer.cancel()
        self.next_end = at
        self._timer = None if at == inf or self._loop is None else self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        assert self._loop is not None
        # A loop fires timers that are due within its clock's resolution; so does this.
        reached = max(self.next_end, self._loop.time())
        for timeout in [one for one, ends in self.ends.items() if ends <= reached]:
            del self.ends[timeout]
            timeout.expire()
        self.set_timer(min(self.ends.values(), default=inf))


class SharedTimeout(Timeout):
    """A limit of `Timeouts`, which ends at `end` by the loop's clock."""

    __slots__ = ("_on_expiry", "_owner", "end")

    def __init__(
        self,
        owner: Timeouts,
        end: float,
        on_expiry: Callable[[], None] | None = None,
        task: asyncio.Task[Any] | None = None,
    ) -> None:
        self._make_error = TimeoutError
        self._given = task
        self.expired = False
        self._owner = owner
        self.end = end
        self._on_expiry = on_expiry

    def expire(self) -> None:
        super().expire()
        if self._on_expiry is not None:
            self._on_expiry()

    def _arm(self) -> None:
        owner, end = self._owner, self.end
        owner.ends[self] = end
        if end < owner.next_end:
            owner.set_timer(end)

    def _disarm(self) -> None:
        """Forget this limit. The timer stays as it is: when it fires, it finds nothing or the next limit."""
        self._owner.ends.pop(self, None)


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """
    The result of work that ends in these seconds; `TimeoutError` otherwise.

    For clients of others that may take a cancellation for the end of a socket and go on as if nothing had happened: the
    work is cancelled until it ends.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            raise TimeoutError
        return task.result()
    finally:
        await ended(task)


async def unless_away(work: Coroutine[Any, Any, T], is_away: Callable[[], bool], seconds: float) -> T | None:
    """The result of work; None when it was cancelled, because what it needs was away for that long without a break."""
    loop = asyncio.get_running_loop()
    task, there_at = asyncio.ensure_future(work), loop.time()
    try:
        while not task.done() and loop.time() - there_at < seconds:
            await asyncio.wait([task], timeout=LOOK_S)
            if not is_away():
                there_at = loop.time()
        return task.result() if task.done() else None
    finally:
        await ended(task)


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they end, for a bounded time; those that have ended are left as they are."""
    for _ in range(CANCELLATIONS):
        left = [task for task in tasks if not task.done()]
        if not left:
            break
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CANCELLATION_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved: the caller no longer waits for it
