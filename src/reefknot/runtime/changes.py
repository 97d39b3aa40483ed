"""
Waiting for changes: `Waiters` wakes tasks by topic, `FileChanges` tells of writes to a file.

SQLite does not report that another process has committed. Watching its write-ahead log by inotify costs nothing while
nothing happens, where polling would cost a little all the time. Other systems than Linux have no inotify: there the
caller has to poll, and `FileChanges.start` says so.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

R = TypeVar("R")


class Waiters:
    """Tasks that wait for a change, by topic, in the order in which they came. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    @contextmanager
    def listening(self, *topics: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next change of a topic. Look after entering, not before."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._waiting.setdefault(topic, {})[future] = None
        try:
            yield future
        finally:
            for topic in topics:
                waiting = self._waiting.get(topic)
                if waiting is not None:
                    waiting.pop(future, None)
                    if not waiting:
                        del self._waiting[topic]

    def wake(self, *topics: str) -> None:
        """Wake those who wait for one of these topics."""
        for topic in topics:
            for future in self._waiting.pop(topic, ()):
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        self.wake(*self._waiting)

    async def watch(
        self, look: Callable[[], Awaitable[R]], *topics: str, pause: Callable[[R], float], timeout: float
    ) -> R:
        """
        The answer of `look` as soon as it is final, else as it stands after `timeout` seconds.

        `pause` says for how many seconds only a change of a topic can alter an answer: 0 when it is final.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(0.0, timeout)
        while True:
            with self.listening(*topics) as change:
                answer = await look()
                seconds = min(pause(answer), deadline - loop.time())
                if seconds <= 0:
                    return answer
                await until(change, seconds)


async def until(change: asyncio.Future[None], seconds: float) -> bool:
    """Wait for a change, at most `seconds`. False when there was none."""
    done, _ = await asyncio.wait([change], timeout=max(0.0, seconds))
    return bool(done)


_MODIFY = 0x2
_MODIFY_OR_GONE = _MODIFY | 0x400 | 0x800  # IN_DELETE_SELF, IN_MOVE_SELF: another file may have the name now


class FileChanges:
    """A callback in an event loop for writes to one file. Best effort: a caller polls as well, only rarely."""

    def __init__(self, path: str, changed: Callable[[], None]) -> None:
        self._path = path
        self._changed = changed
        self._descriptor: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Watch the file. False when that is not possible: no inotify, no such file yet, a loop without readers."""
        if self._descriptor is not None:
            return True
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if descriptor < 0:
                return False
            if libc.inotify_add_watch(descriptor, os.fsencode(self._path), _MODIFY_OR_GONE) < 0:
                os.close(descriptor)
                return False
        except (OSError, AttributeError):
            return False
        try:
            loop.add_reader(descriptor, self._read)
        except (OSError, RuntimeError):  # a loop without readers
            os.close(descriptor)
            return False
        self._descriptor, self._loop = descriptor, loop
        return True

    def stop(self) -> None:
        """Watch no longer. `start` may follow: it finds the file that has the name by then."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def let_go(self) -> None:
        """Forget the watch without ending it: in a fork it is the parent's."""
        self._descriptor = None

    def _read(self) -> None:
        try:
            events = os.read(self._descriptor or -1, 4096)
        except OSError:
            return
        if any(not mask & _MODIFY for mask in _masks(events)):
            self.stop()  # the file was replaced: the caller's next `start` finds the new one
        self._changed()


def _masks(events: bytes) -> list[int]:
    """The masks of inotify's records: watch, mask, cookie, length of the name, the name."""
    masks, at = [], 0
    while at + 16 <= len(events):
        masks.append(int.from_bytes(events[at + 4 : at + 8], sys.byteorder))
        at += 16 + int.from_bytes(events[at + 12 : at + 16], sys.byteorder)
    return masks
