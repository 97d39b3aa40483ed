"""What every part of a SQLite store works through: the writer, the reader, waking up, and the time."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import apsw

from reefknot.core.moment import Moment
from reefknot.engines.sqlite.reader import Reader
from reefknot.engines.sqlite.wake import Wake
from reefknot.engines.sqlite.writer import Writer

R = TypeVar("R")


class Link:
    """One store's machinery, shared by its parts."""

    __slots__ = ("_reader", "_wake", "_writer", "now", "write")

    def __init__(self, writer: Writer, reader: Reader, wake: Wake, now: Callable[[], Moment]) -> None:
        self._writer = writer
        self._reader = reader
        self._wake = wake
        self.now = now
        self.write: Callable[[Callable[..., Any], Any], asyncio.Future[Any]] = writer.submit

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        return await self._reader.read(function, patience=patience)

    def deadline(self, timeout: float) -> float:
        """When a wait that begins now ends, in the time of the loop that waits."""
        return asyncio.get_running_loop().time() + max(0.0, timeout)

    def left(self, deadline: float) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(0.0, deadline - asyncio.get_running_loop().time())

    def listening(self, topic: str) -> AbstractContextManager[asyncio.Future[None]]:
        return self._wake.listening(topic)
