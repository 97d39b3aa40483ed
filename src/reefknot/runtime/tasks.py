"""
Several at once, and never more.

A crew runs coroutines side by side up to a bound; who brings more waits until one ends. A failure is logged and ends
nobody else. It keeps nothing: what must not be lost is in a store.

Work that goes on after its caller has left.

It is held until it ends, because a loop holds its tasks only loosely, and its failure is logged. Nothing is started
here that would be missed if the process ended: whoever needs that keeps it in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from reefknot.runtime.log import logger, printable


class Crew:
    """At most `most` at once; `name` is what log lines begin with."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, what: str, work: Callable[..., Coroutine[Any, Any, Any]], *given: Any) -> None:
        """Begin as soon as there is room. `what` says in a log line what failed."""
        await self._free.acquire()
        task = asyncio.get_running_loop().create_task(self.survive(what, work, *given))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def survive(self, what: str, work: Callable[..., Coroutine[Any, Any, Any]], *given: Any) -> None:
        """Run it here; a failure is a log line."""
        try:
            await work(*given)
        except Exception as error:
            said = printable(f"{type(error).__name__}: {error}", most=300)
            logger().error("%s: %s (%s)", self._name, what, said)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._free.release()

    async def stop(self) -> None:
        """End them all, wherever they are."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_going: set[asyncio.Task[Any]] = set()


def start(work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
    """Run `work` in a task of its own; `what` names it in a log line."""
    task = asyncio.get_running_loop().create_task(work)
    _going.add(task)
    task.add_done_callback(partial(_ended, what))
    return task


def _ended(what: str, task: asyncio.Task[Any]) -> None:
    _going.discard(task)
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        said = printable(str(error), most=300)
        logger().error("%s failed after its caller had left: %s: %s", what, type(error).__name__, said)
