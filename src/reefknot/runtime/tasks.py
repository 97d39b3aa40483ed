"""
Background work: services that begin again, bounded tasks, tasks that outlive their caller, tasks of which the first to
end ends all, and writes in batches.

Failures are logged. None of it is durable: work that must survive the process is kept in a store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from reefknot.errors import StoreUnavailableError
from reefknot.runtime.log import RepeatedErrors, error_text, logger

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""How soon a service that has ended before its part begins again: twice as long each time, while it ends soon."""

Service = Callable[[], Coroutine[Any, Any, None]]

_background: set[asyncio.Task[Any]] = set()


class Services:
    """
    The services of one part, each in a task that is kept running until `stop`.

    A step can cancel every task of its process. A service that was cancelled from outside, or has failed, is logged and
    begins again: without one of them a part looks alive and does half of its work. One that returns has nothing left
    to do.
    """

    def __init__(self, part: str) -> None:
        """`part` starts the names of the tasks, and the log lines."""
        self._part = part
        self._kept: dict[str, asyncio.Task[None] | asyncio.TimerHandle] = {}

    @property
    def names(self) -> frozenset[str]:
        """The services that run, or are about to begin again."""
        return frozenset(name for name, kept in self._kept.items() if not _has_returned(kept))

    def keep(self, name: str, service: Service) -> None:
        """Run a service; one of this name that runs, or is about to begin again, is left alone."""
        if name not in self.names:
            self._begin(name, service, 0.0)

    def _begin(self, name: str, service: Service, pause: float) -> None:
        loop = asyncio.get_running_loop()
        self._kept[name] = task = loop.create_task(service(), name=f"{self._part} {name}")
        task.add_done_callback(partial(self._ended, name, service, pause, loop.time()))

    def _ended(self, name: str, service: Service, pause: float, began: float, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._kept.get(name) is not task:
            return  # it was stopped
        if error is None and not task.cancelled():
            del self._kept[name]
            return
        why = "was cancelled from outside" if error is None else f"failed: {error_text(error)}"
        loop = task.get_loop()
        was_long = loop.time() - began > LONGEST_PAUSE_S
        pause = FIRST_PAUSE_S if was_long else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause))
        self._kept[name] = loop.call_later(pause, self._begin_again, name, service, pause, why)

    def _begin_again(self, name: str, service: Service, pause: float, why: str) -> None:
        """Log here and not before: at the end of the loop every task is cancelled, and none begins again."""
        logger().error("%s: its service %s %s; it begins again", self._part, name, why)
        self._begin(name, service, pause)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all, for good. Returns the tasks that are about to end."""
        kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            one.cancel()
        return [one for one in kept if isinstance(one, asyncio.Task)]

    async def finish(self, timeout: float) -> None:
        """Wait until all have returned, at most `seconds`, then stop the others."""
        tasks = [one for one in self._kept.values() if isinstance(one, asyncio.Task)]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        await self.stop()

    async def stop(self, timeout: float | None = None) -> None:
        """Cancel all, for good, and wait for them."""
        tasks = self.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)


def _has_returned(kept: asyncio.Task[None] | asyncio.TimerHandle) -> bool:
    """Whether a service has nothing left to do. Its task may have ended a moment before the loop says so."""
    return isinstance(kept, asyncio.Task) and kept.done() and not kept.cancelled() and kept.exception() is None


async def until_first_ends(*running: Awaitable[Any], timeout: float | None = None) -> None:
    """Run all until one of them ends, and cancel the others; an exception is the caller's."""
    tasks = [asyncio.ensure_future(one) for one in running]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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

    async def run_logged(self, what: str, work: Callable[..., Awaitable[Any]], *args: Any) -> None:
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


class ReaderQueue(Generic[T]):
    """
    A bounded queue with one reader. Without a wait, putting and taking cost a fraction of what `asyncio.Queue` takes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._taken = asyncio.Event()

    def full(self) -> bool:
        return len(self.items) >= self.limit

    def put_nowait(self, item: T) -> None:
        """Add an item, whatever the bound: the caller has asked for room."""
        self.items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def put(self, item: T) -> None:
        """Add an item as soon as there is room."""
        while len(self.items) >= self.limit:
            self._taken.clear()
            await self._taken.wait()
        self.put_nowait(item)

    async def get(self) -> T:
        """The next item, as soon as there is one."""
        while not self.items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if len(self.items) >= self.limit:
            self._taken.set()
        return self.items.popleft()


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
        except asyncio.CancelledError:  # by a step: only `serve` is cancelled from here
            logger().error("%s: the write was cancelled from outside (batch of %d)", self._what, len(batch))
        except Exception as error:
            logger().error("%s: %s (batch of %d)", self._what, error_text(error), len(batch))
