"""
Messages inside one process.

Every subscriber has its own bounded line; a sender waits while one is full, and says so when that takes too long. The
same message id twice within the window is delivered once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping

from reefknot.ports.transport import Delivery

REMEMBERED_IDS = 10_000


class _Line:
    """One subscriber's unread messages."""

    def __init__(self, subjects: frozenset[str], limit: int) -> None:
        self.subjects = subjects
        self.unread: asyncio.Queue[Delivery | None] = asyncio.Queue(limit)


class Hub:
    """What the ends over one store share."""

    def __init__(self) -> None:
        self.lines: list[_Line] = []
        self.seen: OrderedDict[str, None] = OrderedDict()


class MemoryTransport:
    """Publishes to whoever listens now, at this end or another one of the same hub."""

    def __init__(self, hub: Hub | None = None) -> None:
        self._hub = hub or Hub()
        self._own: list[_Line] = []
        self._closed = False

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = ""
    ) -> None:
        name = f"{subject} {message_id}" if message_id else ""
        if name and self._is_repeat(name):
            return
        delivery = Delivery(subject, body, headers or {})
        try:
            for line in list(self._hub.lines):
                if subject in line.subjects:
                    await line.unread.put(delivery)
        except BaseException:
            self._hub.seen.pop(name, None)  # whoever tries again under this id has something to say
            raise

    def _is_repeat(self, name: str) -> bool:
        seen = self._hub.seen
        if name in seen:
            return True
        seen[name] = None
        if len(seen) > REMEMBERED_IDS:
            seen.popitem(last=False)
        return False

    def subscribe(self, *subjects: str, limit: int = 1024) -> AsyncIterator[Delivery]:
        line = _Line(frozenset(subjects), limit)
        self._hub.lines.append(line)
        self._own.append(line)
        return self._read(line)

    async def _read(self, line: _Line) -> AsyncIterator[Delivery]:
        try:
            while True:
                delivery = await line.unread.get()
                if delivery is None:
                    return
                yield delivery
        finally:
            self._forget(line)

    def _forget(self, line: _Line) -> None:
        for lines in (self._hub.lines, self._own):
            if line in lines:
                lines.remove(line)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for line in list(self._own):
                self._forget(line)
                if line.unread.full():
                    line.unread.get_nowait()
                line.unread.put_nowait(None)
