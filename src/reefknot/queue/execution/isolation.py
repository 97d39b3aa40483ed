"""
`Isolation`: suspects run alone in their process, one at a time.

Work that was running when a process died is suspect: nobody knows which of it was the cause. The one that kills its
process again while it runs alone is known, and the others succeed.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

from reefknot.queue.model.work import CRASH_LIMIT, WorkItem, is_suspect
from reefknot.runtime.log import logger, printable

RUNS_ALONE = "a process died while it ran; it waits to run alone"
AGAIN_S = 2.0
"""How soon a suspect is tried again that waits for functions whose attempts are over."""
LONGEST_WAIT_S = 300.0
"""How long suspects wait for such functions: one that never returns must not hold them for ever."""


class IsolatedPool(Protocol):
    """A pool as its isolation sees it."""

    paused: bool
    starting: int

    @property
    def claimed(self) -> Collection[str]: ...

    @property
    def is_claiming(self) -> bool: ...

    def wake(self) -> None: ...


class Isolation:
    """
    Isolation of suspects in one process, over all of its pools: while a suspect runs, nothing else does.

    The pool that meets a suspect puts it off and asks for the process. Then no pool begins anything, and as soon as
    all have ended what they run, this one claims the suspect again and runs it: should the process die now, it is
    known why. Meanwhile no slot is free, and routers are told so: what arrives waits until the suspects have ended.

    While functions run on although their attempts are over, no suspect is begun, since it would be blamed for what they
    do; everything else goes on, because nobody knows when they return.
    """

    def __init__(self, functions_overdue: Callable[[], int] = lambda: 0) -> None:
        """`functions_overdue` counts the functions of this process that run on although their attempts are over."""
        self.pools: list[IsolatedPool] = []
        self._functions_overdue = functions_overdue
        self._waits_since = self._waited_at = -inf
        """Since when suspects wait for such functions, and when one last did."""
        self._asked_by: IsolatedPool | None = None
        self._has_begun = False
        self._requested = asyncio.Event()
        """Set when a pool asks for the process; the next request has an event of its own."""

    @property
    def is_on(self) -> bool:
        """Whether a suspect runs, or waits for the others to end. A pool that was paused before it asks in vain."""
        pool = self._asked_by
        return pool is not None and (not pool.paused or bool(pool.claimed))

    def _waits_for_functions(self, now: float) -> bool:
        number = self._functions_overdue()
        if not number:
            self._waited_at = -inf
            return False
        if now - self._waited_at > LONGEST_WAIT_S:
            self._waits_since = now
            text = "work that has to run alone waits: %d plain functions run on although their attempts have ended"
            logger().warning(text, number)
        self._waited_at = now
        return now - self._waits_since < LONGEST_WAIT_S

    async def wait(self, timeout: float) -> None:
        """Wait until a pool asks for the process, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._requested.wait()

    def may_claim(self, pool: IsolatedPool, wanted: int) -> int:
        """The number of items that this pool may claim now, of those it wants."""
        if not self.is_on:
            return wanted
        return 1 if self._asked_by is pool and not self._has_begun and self._is_idle(pool) else 0

    def admits(self, pool: IsolatedPool, items: Sequence[WorkItem], now: float, *, name: str) -> bool:
        """
        Whether a pool may run what it has claimed: `items`, of which a suspect is the only one.

        False: the suspect cannot run alone yet, and the pool puts it off. `name` is for the log.
        """
        if not items or not is_suspect(items[0]):
            self.no_suspect(pool)
            return True
        if not self.begin(pool, now):
            return False
        text = "%s: %s runs alone, since the process that ran it died (%d of %d times; then it is quarantined)"
        shown = printable(items[0].assignment_id, most=200)
        logger().warning(text, name, shown, items[0].crashes, CRASH_LIMIT)
        return True

    def begin(self, pool: IsolatedPool, now: float) -> bool:
        """
        Begin a suspect that this pool has claimed.

        False: others run here, and the pool has asked for the process; or functions run on, and nobody is held up.
        """
        if self._waits_for_functions(now):
            self.no_suspect(pool)
            return False
        if not self.is_on:
            self._asked_by, self._has_begun = pool, False
            self._requested.set()
            self._requested = asyncio.Event()
        if self._asked_by is not pool or not self._is_idle(pool):
            return False
        self._has_begun = True
        return True

    def no_suspect(self, pool: IsolatedPool) -> None:
        """End a wait: what this pool has claimed is no suspect."""
        if self._asked_by is pool:
            self._end()

    def ended(self, pool: IsolatedPool) -> None:
        """Look again after this pool has ended something: the suspect, or what it waits for."""
        if self._asked_by is pool and self._has_begun and not pool.claimed:
            self._end()
        elif self._asked_by is not None:
            self._asked_by.wake()

    def _is_idle(self, holder: IsolatedPool) -> bool:
        return not any(
            pool.claimed or pool.starting or (pool.is_claiming and pool is not holder) for pool in self.pools
        )

    def _end(self) -> None:
        self._asked_by, self._has_begun = None, False
        for pool in self.pools:
            pool.wake()
