"""
Noticing that something has changed.

Commits of this process wake up those who wait for their topic at once. Commits of other processes are noticed by
`PRAGMA data_version`, which costs microseconds, every 25 ms, every 5 ms right after a change, and only while somebody
waits.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import apsw

from reefknot.errors import StoreError

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
    def listening(self, topic: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next change of the topic. Look at the store after entering, not before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waiting = self._waiting.setdefault(topic, set())
        waiting.add(future)
        if self._timer is None:
            self._version = self._read_version()
            self._timer = loop.call_later(INTERVAL, self._look, loop)
        try:
            yield future
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(topic) is waiting:
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
