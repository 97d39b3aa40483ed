"""
Time limits that cost next to nothing while they hold.

`with limits.within(seconds): await …` cuts off what takes longer, as `asyncio.timeout` does. All limits of one owner
share a single timer, set to the earliest of them: who ends in time, as nearly all do, never touches the loop's heap.
A limit is for one task in one loop; it neither retries nor logs.
"""

import asyncio
from math import inf
from types import TracebackType
from typing import Self

STORE_S = 30.0
"""What one step of a store may take."""


class Limit:
    """One limit, used once. `expired` tells whether it was this one that cut off."""

    __slots__ = ("_before", "_ends", "_limits", "_task", "expired")

    def __init__(self, limits: "Limits", ends: float) -> None:
        self._limits = limits
        self._ends = ends
        self.expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._limits.hold(self, self._ends)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.let_go(self)
        if (
            self.expired
            and self._task.uncancel() <= self._before
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):  # nobody else called it off
            raise TimeoutError from error

    def cut_off(self) -> None:
        """Its time is over."""
        self.expired = True
        self._task.cancel()


class Limits:
    """The limits of one owner, in one loop."""

    __slots__ = ("_held", "_loop", "_next", "_timer")

    def __init__(self) -> None:
        self._held: dict[Limit, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = inf
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> Limit:
        """At most so many seconds from now on; `inf` is no limit."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        return Limit(self, loop.time() + seconds)

    def hold(self, limit: Limit, ends: float) -> None:
        """Watch it."""
        self._held[limit] = ends
        if ends < self._next:
            self._set(ends)

    def let_go(self, limit: Limit) -> None:
        """It is over. The timer stays where it is: it finds nothing, or the next one."""
        self._held.pop(limit, None)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = at
        self._timer = None if at == inf or self._loop is None else self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        assert self._loop is not None
        # A loop rings what is due within its clock's grain; so does this.
        reached = max(self._next, self._loop.time())
        for limit in [one for one, ends in self._held.items() if ends <= reached]:
            del self._held[limit]
            limit.cut_off()
        self._set(min(self._held.values(), default=inf))
