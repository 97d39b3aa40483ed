"""
Reads beside the writer.

One thread with a connection of its own: in WAL mode a reader never waits for the writer, nor the writer for it. Every
read is bounded in time.

Noticing that something has changed.

Commits of this process wake up those who wait for their topic at once. Commits of other processes are noticed by
`PRAGMA data_version`, which costs microseconds, every 25 ms, every 5 ms right after a change, and only while somebody
waits.

What every part of a SQLite store works through: the writer, the reader, waking up, and the time.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import apsw

from reefknot.core.time import Moment
from reefknot.engines.sqlite.connection import LIFE, translated
from reefknot.engines.sqlite.writer import Writer
from reefknot.errors import StoreError, StoreUnavailableError

R = TypeVar("R")


class Reader:
    """Runs read-only functions of a connection. `inline`: no thread, for simulations in virtual time."""

    def __init__(
        self, open_it: Callable[[], apsw.Connection], *, path: str, patience: float, inline: bool = False
    ) -> None:
        self._open_it = open_it
        self._path = path
        self._patience = patience
        self._pool = None if inline else ThreadPoolExecutor(1, thread_name_prefix="reefknot-reader")
        self._connection: apsw.Connection | None = None
        self._closed = False
        self._life = LIFE.number

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """What the function finds. Each of its statements sees a snapshot."""
        patience = self._patience if patience is None else patience
        if self._closed or self._life != LIFE.number:
            raise StoreUnavailableError(f"sqlite:{self._path}", "it is closed, or was opened before a fork", "open it")
        if self._pool is None:
            return self._now(function)
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._now, function)
        try:
            async with asyncio.timeout(patience):
                return await running
        except TimeoutError as error:
            if self._connection is not None:
                self._connection.interrupt()
            problem = f"a read has not finished within {patience:g} s"
            raise StoreUnavailableError(f"sqlite:{self._path}", problem, "ask for less, or try again") from error

    def _now(self, function: Callable[[apsw.Connection], R]) -> R:
        try:
            if self._connection is None:
                self._connection = self._open_it()
                self._connection.execute("PRAGMA query_only = ON")
            return function(self._connection)
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            raise translated(error, self._path) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pool is None:
            self._let_go()
        elif self._life == LIFE.number:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._let_go)
            self._pool.shutdown(wait=False)

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()


INTERVAL = 0.025
QUICK_INTERVAL = 0.005
QUICK_FOR = 0.05
"""After a change the next one is likely to be near: a conversation between processes is not held up at every turn."""


class Wake:
    """Belongs to the loop that opened the store."""

    def __init__(self, open_it: Callable[[], apsw.Connection]) -> None:
        self._open_it = open_it
        self._connection: apsw.Connection | None = None
        self._version: object = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quick_until = 0.0

    @contextmanager
    def listening(self, *topics: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next change of a topic. Look at the store after entering, not before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        for topic in topics:
            self._waiting.setdefault(topic, set()).add(future)
        if self._timer is None:
            self._version = self._read_version()
            self._timer = loop.call_later(INTERVAL, self._look, loop)
        try:
            yield future
        finally:
            for topic in topics:
                waiting = self._waiting.get(topic)
                if waiting is not None:
                    waiting.discard(future)
                    if not waiting:
                        del self._waiting[topic]

    def fire(self, topics: set[str]) -> None:
        """This process wrote: whoever waits for one of these looks again."""
        for topic in topics & self._waiting.keys() if self._waiting else ():
            _release(self._waiting.pop(topic))
        if topics and "" in self._waiting:
            _release(self._waiting.pop(""))

    def nudge(self, topic: str) -> None:
        """Nothing was written, but whoever waits for this topic has reason to look again."""
        _release(self._waiting.pop(topic, set()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._release_all()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            self._timer = None
            return
        version = self._read_version()
        if version != self._version:
            self._version = version
            self._quick_until = loop.time() + QUICK_FOR
            self._release_all()
        soon = QUICK_INTERVAL if loop.time() < self._quick_until else INTERVAL
        self._timer = loop.call_later(soon, self._look, loop)

    def _release_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for futures in waiting.values():
            _release(futures)

    def _read_version(self) -> object:
        try:
            if self._connection is None:
                self._connection = self._open_it()
            return self._connection.pragma("data_version")
        except (apsw.Error, StoreError):
            return self._version  # not now: whoever reads or writes next says what is wrong


def _release(futures: set[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


async def until(future: asyncio.Future[None], seconds: float) -> bool:
    """Wait for the future, at most so long."""
    done, _ = await asyncio.wait([future], timeout=max(0.0, seconds))
    return bool(done)


class Link:
    """One store's machinery, shared by its parts."""

    __slots__ = ("_reader", "_wake", "_writer", "now", "write")

    def __init__(self, writer: Writer, reader: Reader, wake: Wake, now: Callable[[], Moment]) -> None:
        self._writer = writer
        self._reader = reader
        self._wake = wake
        self.now = now
        self.write: Callable[..., asyncio.Future[Any]] = writer.submit

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        return await self._reader.read(function, patience=patience)

    def deadline(self, timeout: float) -> float:
        """When a wait that begins now ends, in the time of the loop that waits."""
        return asyncio.get_running_loop().time() + max(0.0, timeout)

    def left(self, deadline: float) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(0.0, deadline - asyncio.get_running_loop().time())

    def listening(self, *topics: str) -> AbstractContextManager[asyncio.Future[None]]:
        return self._wake.listening(*topics)
