"""
`Batcher`: many small writes as one.

Items that arrive during a write form the next one; a lone item is written at once. A write that began is finished even
when its task is cancelled, because it must be known whether the items were kept.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from reefknot.runtime.log import error_text, logger

T = TypeVar("T")


class Batcher(Generic[T]):
    """Collects items for `write`, which keeps all items of a batch or none; `what` starts the log line of a failure."""

    def __init__(self, what: str, write: Callable[[list[T]], Awaitable[None]], *, most: int) -> None:
        self._what = what
        self._write = write
        self._most = most
        self._waiting: list[T] = []
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._writing = 0
        self.served = False
        """Whether `serve` is running."""

    def __len__(self) -> int:
        """Number of items that are not written yet."""
        return len(self._waiting) + self._writing

    def put(self, item: T) -> None:
        self._waiting.append(item)
        self._filled.set()

    async def room(self) -> None:
        """Wait until less than one full batch is waiting: backpressure for an endless producer."""
        while len(self._waiting) >= self._most:
            self._drained.clear()
            await self._drained.wait()

    async def serve(self) -> None:
        """Write batches until cancelled."""
        self.served = True
        try:
            while True:
                if not self._waiting:
                    self._filled.clear()
                    await self._filled.wait()
                await self._write_next()
        finally:
            self.served = False

    async def finish(self) -> None:
        """Write what is waiting; for use while `serve` is not running."""
        while self._waiting:
            await self._write_next()

    async def _write_next(self) -> None:
        batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        self._writing = len(batch)
        write = asyncio.ensure_future(self._write_logged(batch))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await write
            raise
        finally:
            self._writing = 0
            self._drained.set()

    async def _write_logged(self, batch: list[T]) -> None:
        try:
            await self._write(batch)
        except Exception as error:
            logger().error("%s: %s (batch of %d)", self._what, error_text(error), len(batch))
