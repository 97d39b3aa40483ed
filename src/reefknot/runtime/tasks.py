"""
Background work of a service: bounded tasks, tasks that outlive their caller, and small writes made in batches.

Failures are logged. None of it is durable: work that must survive the process is kept in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from reefknot.errors import StoreUnavailableError
from reefknot.runtime.log import RepeatedErrors, error_text, logger

T = TypeVar("T")

_background: set[asyncio.Task[Any]] = set()


class BoundedTasks:
    """Runs at most `limit` coroutines at once; `name` starts its log lines."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(limit)
        self._tasks: set[asyncio.Task[None]] = set()
        self._outages = RepeatedErrors()

    async def start(self, what: str, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Start `work(*args)` as soon as there is room. `what` says in a log line what failed."""
        await self._free.acquire()
        task = asyncio.get_running_loop().create_task(self.run_logged(what, work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def run_logged(self, what: str, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Await `work(*args)` here, whatever the bound; a failure becomes a log line, an outage one a minute."""
        try:
            await work(*args)
        except StoreUnavailableError as error:
            self._outages.log(f"{self._name}: {what}", error, asyncio.get_running_loop().time())
        except Exception as error:
            logger().error("%s: %s (%s)", self._name, what, error_text(error))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._free.release()

    async def stop(self) -> None:
        """Cancel all tasks, and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_in_background(work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
    """
    Run `work` in a task that outlives its caller; a failure is logged as "`what` failed".

    The task is held here until it ends: an event loop keeps only weak references to its tasks.
    """
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(partial(_background_done, what))
    return task


def _background_done(what: str, task: asyncio.Task[Any]) -> None:
    _background.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger().error("%s failed in the background: %s", what, error_text(error))


class Batcher(Generic[T]):
    """
    Many small writes as one: `write` keeps all items of a batch or none; `what` starts the log line of a failure.

    Items that arrive during a write form the next one; a lone item is written at once. A write that began is finished
    even when its task is cancelled, because it must be known whether the items were kept.
    """

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
