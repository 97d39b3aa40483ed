"""
Many small writes as one.

Whatever comes while a write is under way is the next write. Who comes alone waits for nobody. What was begun is
finished, even when the one who writes is called off meanwhile: whether it was kept must be known.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from reefknot.runtime.log import logger, printable

T = TypeVar("T")


class Gather(Generic[T]):
    """Collects items for one writer. `write` sees to every item it is given, and fails for all of them or for none."""

    def __init__(self, what: str, write: Callable[[list[T]], Awaitable[None]], *, most: int) -> None:
        self._what = what
        self._write = write
        self._most = most
        self._waiting: list[T] = []
        self._some = asyncio.Event()
        self._fewer = asyncio.Event()
        self._writing = 0
        self.served = False
        """Whether somebody writes what comes."""

    def __len__(self) -> int:
        """Those that are not written yet."""
        return len(self._waiting) + self._writing

    def put(self, item: T) -> None:
        self._waiting.append(item)
        self._some.set()

    async def room(self) -> None:
        """Until no more than one write's worth waits. Who feeds without end asks this first."""
        while len(self._waiting) >= self._most:
            self._fewer.clear()
            await self._fewer.wait()

    async def serve(self) -> None:
        """Write, for as long as it is let."""
        self.served = True
        try:
            while True:
                if not self._waiting:
                    self._some.clear()
                    await self._some.wait()
                await self._next()
        finally:
            self.served = False

    async def finish(self) -> None:
        """Write what is there, while nobody serves."""
        while self._waiting:
            await self._next()

    async def _next(self) -> None:
        batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        self._writing = len(batch)
        work = asyncio.ensure_future(self._survived(batch))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await work
            raise
        finally:
            self._writing = 0
            self._fewer.set()

    async def _survived(self, batch: list[T]) -> None:
        try:
            await self._write(batch)
        except Exception as error:
            said = printable(f"{type(error).__name__}: {error}", most=300)
            logger().error("%s: %s (%d of them)", self._what, said, len(batch))
