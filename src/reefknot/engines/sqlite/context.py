"""
`StoreContext`: what every part of a SQLite store works through.

A part submits requests to the one writer, reads beside it, waits for changes, and asks for the time; it opens no
connection of its own.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import apsw

from reefknot.core.time import Moment
from reefknot.engines.sqlite.reads import ChangeWatcher, Reader
from reefknot.engines.sqlite.writer import Writer

R = TypeVar("R")


class StoreContext:
    """The writer, the reader, the change watcher and the clock of one store, as its parts use them."""

    __slots__ = ("_reader", "listening", "now", "write")

    def __init__(self, writer: Writer, reader: Reader, watcher: ChangeWatcher, now: Callable[[], Moment]) -> None:
        self._reader = reader
        self.now = now
        # Bound once: every request looks them up.
        self.write: Callable[..., asyncio.Future[Any]] = writer.submit
        self.listening: Callable[..., AbstractContextManager[asyncio.Future[None]]] = watcher.listening

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """The function's result over a read-only connection; at most `patience` seconds."""
        return await self._reader.read(function, patience=patience)

    def deadline(self, timeout: float) -> float:
        """The time of the running loop at which a wait of `timeout` seconds ends."""
        return asyncio.get_running_loop().time() + max(0.0, timeout)

    def left(self, deadline: float) -> float:
        """Seconds until the deadline, 0 when it has passed."""
        return max(0.0, deadline - asyncio.get_running_loop().time())


async def until(change: asyncio.Future[None], seconds: float) -> bool:
    """Wait for a change, at most so many seconds. False when there was none."""
    done, _ = await asyncio.wait([change], timeout=max(0.0, seconds))
    return bool(done)
