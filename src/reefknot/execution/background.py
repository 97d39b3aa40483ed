"""
Work that goes on after its caller has left.

It is held until it ends, because a loop holds its tasks only loosely, and its failure is logged. Nothing is started
here that would be missed if the process ended: whoever needs that keeps it in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from reefknot.execution import report

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
        said = report.printable(str(error), most=300)
        report.logger().error("%s failed after its caller had left: %s: %s", what, type(error).__name__, said)
