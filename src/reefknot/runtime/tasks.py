"""
Background tasks of a service: bounded, held until they end, failures logged.

None of them is durable. Work that must survive the process is kept in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from reefknot.runtime.log import error_text, logger

_background: set[asyncio.Task[Any]] = set()


class BoundedTasks:
    """Runs at most `limit` coroutines at once; `name` starts its log lines."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(limit)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, what: str, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Start `work(*args)` as soon as there is room. `what` says in a log line what failed."""
        await self._free.acquire()
        task = asyncio.get_running_loop().create_task(self.run_logged(what, work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def run_logged(self, what: str, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Await `work(*args)` here, whatever the bound; a failure becomes a log line."""
        try:
            await work(*args)
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
