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


class MemoryTransport:
    """Publishes to whoever listens now."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._closed = False

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = ""
    ) -> None:
        if message_id and self._is_repeat(f"{subject} {message_id}"):
            return
        delivery = Delivery(subject, body, headers or {})
        for line in list(self._lines):
            if subject in line.subjects:
                await line.unread.put(delivery)

    def _is_repeat(self, name: str) -> bool:
        if name in self._seen:
            return True
        self._seen[name] = None
        if len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return False

    def subscribe(self, *subjects: str, limit: int = 1024) -> AsyncIterator[Delivery]:
        line = _Line(frozenset(subjects), limit)
        self._lines.append(line)
        return self._read(line)

    async def _read(self, line: _Line) -> AsyncIterator[Delivery]:
        try:
            while True:
                delivery = await line.unread.get()
                if delivery is None:
                    return
                yield delivery
        finally:
            if line in self._lines:
                self._lines.remove(line)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for line in self._lines:
                if line.unread.full():
                    line.unread.get_nowait()
                line.unread.put_nowait(None)
