"""
Back-pressure between the ends of a store on NATS: `Listeners` tracks subscriptions and makes a sender wait for room.

Core NATS has no back-pressure. Each end announces its subscriptions on `NAME.listeners` once a second and when they
change. A sender that knows a listener of a subject counts what it sends there, and marks a message of each quarter of
the listener's limit; the listener answers a mark when its reader has reached it. A sender that is a whole limit ahead
waits. A listener that is silent for three seconds is forgotten. A sender never waits for a peer that knows only the
documented subjects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, json

from reefknot.errors import StoreError
from reefknot.runtime.changes import Waiters, until
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.streams import token_of
from reefknot.stores.jetstream.wire import Heard

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

ANNOUNCE_EVERY_S = 1.0
FORGET_AFTER_S = 3.0
ON_THE_WAY_S = 1.0
"""Seconds after which a sent message has arrived or is lost."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Line(Struct, frozen=True):
    """A subscription, as its end announces it."""

    name: str
    subjects: list[str]
    limit: int
    unread: int


class Announcement(Struct, frozen=True):
    """All subscriptions of an end; `asks` for those of the others."""

    end: str
    lines: list[Line]
    asks: bool = False


_announcements = json.Decoder(Announcement)


class _Listener:
    """A subscription at another end, and how far ahead of its reader this end is."""

    def __init__(self, line: Line) -> None:
        self.limit = max(1, line.limit)
        self.subjects = line.subjects
        self.sent = self.read = self.marked = 0
        self.sent_at = 0.0
        self._marks: deque[tuple[int, int]] = deque()

    @property
    def is_full(self) -> bool:
        return self.sent - self.read >= self.limit

    def count(self, now: float) -> bool:
        """Count a message. Whether it should be marked."""
        self.sent += 1
        self.sent_at = now
        return self.sent - self.marked >= max(1, self.limit // 4)

    def mark(self, number: int) -> None:
        self.marked = self.sent
        self._marks.append((number, self.sent))

    def has_read(self, number: int) -> None:
        while self._marks and self._marks[0][0] <= number:
            self.read = max(self.read, self._marks.popleft()[1])

    def has_unread(self, unread: int, now: float) -> None:
        """Adopt the listener's own count once everything sent has arrived: the rest was lost on the way."""
        if now - self.sent_at >= ON_THE_WAY_S:
            self.read = max(self.read, self.sent - unread)


class Listeners:
    """The subscriptions of all ends, this one's too. `lines` returns those of this end, `spawn` runs a task of it."""

    def __init__(self, connection: Connection, end: str, lines: Callable[[], list[Line]], spawn: Spawn) -> None:
        self._connection = connection
        self._end = end
        self._lines = lines
        self._spawn = spawn
        self._subject = f"{connection.options.name}.listeners"
        self._marks = 0
        self._ends: dict[str, tuple[float, dict[str, _Listener]]] = {}
        """The listeners of each end, and when they were last announced."""
        self._by_subject: dict[str, list[_Listener]] = {}
        self._room = Waiters()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Subscribe to announcements, and ask for those of the others."""
        own = f"{self._connection.options.name}.read.{self._end}"
        for subject, handler in ((self._subject, self._hear), (own, self._hear_mark)):
            self._subscriptions.append(await self._connection.listen(subject, handler))
        await self.announce(asks=True)

    async def run(self) -> None:
        """Announce at intervals, and forget silent ends."""
        while True:
            await asyncio.sleep(ANNOUNCE_EVERY_S)
            self._forget_silent()
            if self._lines():
                await self.announce()

    async def close(self) -> None:
        """Announce to the others that this end has no listeners any more; `lines` is empty by now."""
        await self.announce()
        await self._connection.unsubscribe(self._subscriptions)
        self.forget()

    def forget(self) -> None:
        """Forget all listeners: it is unknown which messages a lost connection dropped."""
        self._ends.clear()
        self._index()
        self._room.wake_all()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def has(self, subject: str) -> bool:
        return subject in self._by_subject

    async def wait_for_room(self, subject: str) -> str:
        """Wait while a listener has no room, then count a message as sent. Returns its mark, if it needs one."""
        while any(one.is_full for one in self._by_subject.get(subject, ())):
            with self._room.listening(subject) as change:
                await until(change, ANNOUNCE_EVERY_S)
            self._forget_silent()
        listeners, now = self._by_subject.get(subject, ()), asyncio.get_running_loop().time()
        wanted = [one.count(now) for one in listeners]
        if not any(wanted):
            return ""
        self._marks += 1
        for one in listeners:
            one.mark(self._marks)
        return f"{self._end}/{self._marks}"

    def _hear_mark(self, message: Heard) -> None:
        """Note that a listener has read a marked message."""
        try:
            end, name, number = json.decode(message.data, type=tuple[str, str, int])
        except msgspec.DecodeError:
            return
        listener = self._ends.get(end, (0.0, {}))[1].get(name)
        if listener is not None:
            listener.has_read(number)
            self._room.wake(*listener.subjects)

    # ---- receiving --------------------------------------------------------------------------------------------------

    async def answer(self, mark: str, line: str) -> None:
        """Confirm to a sender that the reader of this line has its marked message."""
        end, _, number = mark.partition("/")
        if not (token_of(end) == end and number.isdecimal()):
            return
        with contextlib.suppress(StoreError):  # without a connection no sender waits
            body = json.encode((self._end, line, int(number)))
            await self._connection.publish(f"{self._connection.options.name}.read.{end}", body)

    async def announce(self, *, asks: bool = False) -> None:
        """Announce the subscriptions of this end."""
        with contextlib.suppress(StoreError):  # announced again when the connection is back
            await self._connection.publish(self._subject, json.encode(Announcement(self._end, self._lines(), asks)))

    def _hear(self, message: Heard) -> None:
        """Note the listeners of an end, as it announced them."""
        try:
            found = _announcements.decode(message.data)
        except msgspec.DecodeError:
            return
        now = asyncio.get_running_loop().time()
        known = self._ends.pop(found.end, (now, {}))[1]
        listeners = {line.name: known.get(line.name) or _Listener(line) for line in found.lines}
        for line in found.lines:
            listeners[line.name].has_unread(line.unread, now)
        if listeners:
            self._ends[found.end] = (now, listeners)
        if known.keys() != listeners.keys():
            self._index()
        self._room.wake_all()
        if found.asks and found.end != self._end and self._lines():
            self._spawn(self.announce())

    def _forget_silent(self) -> None:
        oldest = asyncio.get_running_loop().time() - FORGET_AFTER_S
        silent = [end for end, (heard_at, _) in self._ends.items() if heard_at < oldest]
        for end in silent:
            del self._ends[end]
        if silent:
            self._index()

    def _index(self) -> None:
        self._by_subject = {}
        for _, listeners in self._ends.values():
            for one in listeners.values():
                for subject in one.subjects:
                    self._by_subject.setdefault(subject, []).append(one)
