"""
`JetStreamTransport`: messages between the processes that share a NATS server, on its subjects as they are documented.

Core NATS carries them, and has no back-pressure, so the ends of a store keep it up among themselves: each announces its
subscriptions on `NAME.listeners` once a second. A sender that knows a listener of a subject counts what it sends there
and marks a message of each quarter of the listener's limit; the listener answers a mark when it has read so far; a
sender that is a whole limit ahead waits. A listener that is silent for three seconds is forgotten, and a peer that
knows only the documented subjects is never waited for. Where nobody is known to listen a message costs nothing more.

A message that is larger than the server takes goes in parts, on a subject of its own that only ends of a store hear.

The shared subject of assignments is a stream where the transport is made so: see `assignments`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, json, msgpack

from reefknot.core.messages import ASSIGN
from reefknot.engines.jetstream.assignments import (
    ACK_WAIT_S,
    MOST_ASSIGNMENTS,
    AssignmentStream,
    Puller,
    SubjectTakenError,
    Taken,
)
from reefknot.engines.jetstream.connection import Connection, NatsOptions, token_of
from reefknot.errors import StoreError, StoreFullError
from reefknot.ports.transport import Delivery
from reefknot.runtime.changes import Waiters, until
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.seeds import new_id

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

ANNOUNCE_EVERY_S = 1.0
FORGET_AFTER_S = 3.0
ON_THE_WAY_S = 1.0
"""What was sent longer ago has arrived, or is lost."""
REMEMBERED_IDS = 10_000
LARGEST = 64 << 20
"""The largest message that is sent in parts, and the most bytes of unfinished ones."""
MOST_UNREAD = 65_536
MOST_UNREAD_BYTES = 256 << 20
"""Bounds against peers that do not wait: what is beyond them, and beyond a subscriber's limit, is dropped."""
CLOSE_S = 2.0

MESSAGE_ID = "Nats-Msg-Id"
MARK = "Reefknot-Mark"
PART = "Reefknot-Part"
HEADERS = "Reefknot-Headers"
"""Headers that NATS would not carry as they are, as JSON."""
OWN = ("Nats-", "Reefknot-")
_HEADER_LINE = len("NATS/1.0\r\n\r\n")

_starting: dict[asyncio.Task[None], NatsOptions] = {}
"""Subscriptions of this process that a server may not know yet."""


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


class Whole(Struct, frozen=True, array_like=True):
    """A message that is sent in parts."""

    body: bytes
    headers: dict[str, str]


_announcements = json.Decoder(Announcement)
_wholes = msgpack.Decoder(Whole)


class _Listener:
    """A subscription somewhere, and how far ahead of its reader this end is."""

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
        """Believe the listener's own count when all that was sent has arrived: the rest was lost on the way."""
        if now - self.sent_at >= ON_THE_WAY_S:
            self.read = max(self.read, self.sent - unread)


class _Parts:
    """Messages of which not all parts are there yet."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, list[bytes]] = OrderedDict()
        self._bytes = 0

    def add(self, label: str, part: bytes) -> bytes | None:
        """The whole message, if this is its last part. Parts that have a gap before them are dropped."""
        name, at, count = label.split("/")
        parts = self._found.setdefault(name, [])
        if int(at) != len(parts):
            self._forget(name)
            return None
        parts.append(part)
        self._bytes += len(part)
        if int(at) + 1 == int(count):
            self._forget(name)
            return b"".join(parts)
        while self._bytes > LARGEST:
            self._forget(next(iter(self._found)))
        return None

    def _forget(self, name: str) -> None:
        self._bytes -= sum(map(len, self._found.pop(name)))


class _Inbox:
    """Messages for one subscriber that it has not taken yet."""

    def __init__(self, number: int, subjects: frozenset[str], limit: int) -> None:
        self.number = number
        self.subjects = subjects
        self.limit = limit
        self.unread: asyncio.Queue[tuple[Delivery | None, Taken | None] | Exception | None] = asyncio.Queue()
        self.subscriptions: list[Subscription] = []
        self.pulling: asyncio.Task[None] | None = None
        self.puller: Puller | None = None
        self.parts = _Parts()
        self._bytes = 0
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._is_flooded = False

    def offer(self, delivery: Delivery, taken: Taken | None, message_id: str = "") -> None:
        """Take it in. A repeated id leaves only its mark."""
        if message_id and not self._is_new((delivery.subject, message_id)):
            if taken is not None:
                self.unread.put_nowait((None, taken))
            return
        waiting = self.unread.qsize() - self.limit
        if waiting >= MOST_UNREAD or (waiting >= 0 and self._bytes + len(delivery.body) > MOST_UNREAD_BYTES):
            if not self._is_flooded:
                subject = printable(delivery.subject, most=100)
                logger().error("messages to %s are dropped: %d wait unread", subject, self.unread.qsize())
            self._is_flooded = True
            return
        self._bytes += len(delivery.body)
        self.unread.put_nowait((delivery, taken))

    def _is_new(self, name: tuple[str, str]) -> bool:
        if name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return True

    async def take(self) -> Delivery | None:
        """The next message; None after the last one."""
        while (one := await self.unread.get()) is not None:
            if isinstance(one, Exception):
                raise one
            delivery, taken = one
            if taken is not None:
                await taken()
            if delivery is not None:
                self._bytes -= len(delivery.body)
                self._is_flooded = self._is_flooded and self.unread.qsize() >= self.limit
                return delivery
        return None

    def end(self, error: Exception | None = None) -> None:
        """End the subscriber's iterator. What is unread is dropped."""
        while not self.unread.empty():
            self.unread.get_nowait()
        self.unread.put_nowait(error)


class JetStreamTransport:
    """The transport of one process over a connection, which it does not close. Belongs to the connection's loop."""

    def __init__(
        self,
        connection: Connection,
        *,
        shared_stream: bool = False,
        most_assignments: int = MOST_ASSIGNMENTS,
        ack_wait: float = ACK_WAIT_S,
    ) -> None:
        """With a `shared_stream` assignments to everybody are kept at the server, each for one worker."""
        self._connection = connection
        self._name = connection.options.name
        self._end = new_id()
        self._epoch = 0
        """Counts lost connections: nobody knows what was lost, so subscriptions get new names."""
        self._count = 0
        self._marks = 0
        self._inboxes: dict[int, _Inbox] = {}
        self._others: dict[str, tuple[float, dict[str, _Listener]]] = {}
        """The listeners of each end, this one's too, and when they were heard of."""
        self._listeners: dict[str, list[_Listener]] = {}
        self._room = Waiters()
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = self._is_closed = False
        self._stream: AssignmentStream | None = None
        if shared_stream:
            self._stream = AssignmentStream(connection, most=most_assignments, ack_wait=ack_wait)

    async def ensure_stream(self) -> None:
        """Make the stream of shared assignments, where this transport has one, or say what is wrong with it."""
        if self._stream is not None:
            await self._stream.ensure()

    # ---- sending ----------------------------------------------------------------------------------------------------

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = ""
    ) -> None:
        if not self._is_open:
            self._open()
        if _starting and self._connection.is_up:
            await self._subscribed()
        carried = _carried(headers) if headers else {}
        if message_id:
            carried[MESSAGE_ID] = token_of(message_id)
        if subject == ASSIGN and self._stream is not None:
            await self._stream.publish(body, carried)
            return
        if subject in self._listeners:
            mark = await self._wait_for_room(subject)
            if mark:
                carried[MARK] = mark
        if len(body) + _size(carried) > self._connection.max_payload:
            await self._publish_parts(subject, msgpack.encode(Whole(body, carried)))
        else:
            await self._connection.publish(subject, body, headers=carried)

    async def _subscribed(self) -> None:
        """Wait until the server knows of what was subscribed to before, by any end of this process."""
        loop, options = asyncio.get_running_loop(), self._connection.options
        tasks = [task for task, one in _starting.items() if one == options and task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks)

    async def _wait_for_room(self, subject: str) -> str:
        """Wait while a listener has no room, then count the message as sent. Returns its mark, if it needs one."""
        while any(one.is_full for one in self._listeners.get(subject, ())):
            with self._room.listening(subject) as change:
                await until(change, ANNOUNCE_EVERY_S)
            self._forget_silent()
        listeners, now = self._listeners.get(subject, ()), asyncio.get_running_loop().time()
        if not any([one.count(now) for one in listeners]):  # each must count it
            return ""
        self._marks += 1
        for one in listeners:
            one.mark(self._marks)
        return f"{self._end}/{self._marks}"

    async def _publish_parts(self, subject: str, whole: bytes) -> None:
        size = self._connection.max_payload - _HEADER_LINE - 128
        if len(whole) > LARGEST:
            problem = f"a message has {len(whole)} bytes, and {LARGEST} are accepted"
            raise StoreFullError(self._connection.options.shown, problem, "send less")
        name, count = new_id(), -(-len(whole) // size)
        for at in range(count):
            part = whole[at * size : (at + 1) * size]
            await self._connection.publish(
                f"{self._name}.parts.{subject}", part, headers={PART: f"{name}/{at}/{count}"}
            )

    # ---- receiving --------------------------------------------------------------------------------------------------

    def subscribe(self, *subjects: str, limit: int = 1024) -> AsyncIterator[Delivery]:
        if not self._is_open:
            self._open()
        self._count += 1
        inbox = _Inbox(self._count, frozenset(subjects), limit)
        self._inboxes[inbox.number] = inbox
        self._start(self._listen(inbox))
        return self._read(inbox)

    async def _listen(self, inbox: _Inbox) -> None:
        plain = inbox.subjects - {ASSIGN} if self._stream is not None else inbox.subjects
        try:
            for subject in plain:
                for heard in (subject, f"{self._name}.parts.{subject}"):
                    handler = partial(self._hear, inbox, subject)
                    inbox.subscriptions.append(await self._connection.subscribe(heard, handler))
        except Exception as error:
            inbox.end(error)
            return
        if len(plain) < len(inbox.subjects) and self._stream is not None:
            unread, offer = inbox.unread.qsize, inbox.offer
            inbox.puller = Puller(self._stream, limit=inbox.limit, unread=unread, offer=offer)
            inbox.pulling = self._run(self._pull(inbox, inbox.puller))
        await self._announce()
        await self._round_trip()

    async def _pull(self, inbox: _Inbox, puller: Puller) -> None:
        try:
            await puller.run()
        except SubjectTakenError as error:
            inbox.end(error)

    async def _hear(self, inbox: _Inbox, subject: str, message: Msg) -> None:
        body, headers = bytes(message.data), message.headers
        if not headers:
            inbox.offer(Delivery(subject, body), None)
            return
        try:
            if PART in headers:
                whole = inbox.parts.add(headers[PART], body)
                if whole is None:
                    return
                found = _wholes.decode(whole)
                body, headers = found.body, found.headers
            shown = _shown(headers)
        except (ValueError, msgspec.MsgspecError) as error:
            logger().warning("a message to %s is unreadable (%s)", printable(subject, most=100), error_text(error))
            return
        mark = headers.get(MARK)
        taken = None if mark is None else partial(self._tell, inbox, mark)
        inbox.offer(Delivery(subject, body, shown), taken, headers.get(MESSAGE_ID, ""))

    async def _tell(self, inbox: _Inbox, mark: str) -> None:
        """Tell a sender that its message was read."""
        end, _, number = mark.partition("/")
        if end.isalnum() and number.isdecimal():
            with contextlib.suppress(StoreError):  # without a connection nobody is waited for
                body = json.encode((self._end, self._line_name(inbox), int(number)))
                await self._connection.publish(f"{self._name}.read.{end}", body)

    async def _read(self, inbox: _Inbox) -> AsyncIterator[Delivery]:
        try:
            while (delivery := await inbox.take()) is not None:
                yield delivery
        finally:
            if self._inboxes.pop(inbox.number, None) is not None and not self._is_closed:
                self._run(self._leave(inbox))

    async def _leave(self, inbox: _Inbox) -> None:
        await self._announce()
        await self._unsubscribe(inbox)

    async def _unsubscribe(self, inbox: _Inbox) -> None:
        if inbox.pulling is not None:
            inbox.pulling.cancel()
            await asyncio.gather(inbox.pulling, return_exceptions=True)
        await _unsubscribed(inbox.subscriptions)

    # ---- who listens ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_open = True
        self._connection.on_reconnect(self._reconnected)
        self._start(self._meet())

    async def _meet(self) -> None:
        """Hear of the others, and ask who listens."""
        try:
            for subject, handler in ((f"{self._name}.listeners", self._met), (f"{self._name}.read.{self._end}", self._told)):
                self._subscriptions.append(await self._connection.subscribe(subject, handler))
        except Exception as error:
            logger().warning("messages are sent without back-pressure (%s)", error_text(error))
            return
        self._run(self._stay())
        await self._announce(asks=True)
        await self._round_trip()

    async def _stay(self) -> None:
        while not self._is_closed:
            await asyncio.sleep(ANNOUNCE_EVERY_S)
            self._forget_silent()
            if self._inboxes:
                await self._announce()

    async def _announce(self, *, asks: bool = False) -> None:
        lines = [
            Line(self._line_name(one), sorted(one.subjects - self._pulled), one.limit, one.unread.qsize())
            for one in self._inboxes.values()
        ]
        with contextlib.suppress(StoreError):  # announced again when the connection is back
            await self._connection.publish(
                f"{self._name}.listeners", json.encode(Announcement(self._end, lines, asks))
            )

    @property
    def _pulled(self) -> frozenset[str]:
        return frozenset() if self._stream is None else frozenset({ASSIGN})

    def _line_name(self, inbox: _Inbox) -> str:
        return f"{inbox.number}.{self._epoch}"

    async def _met(self, message: Msg) -> None:
        """Know the listeners of an end, as it announced them."""
        try:
            found = _announcements.decode(message.data)
        except msgspec.DecodeError:
            return
        now = asyncio.get_running_loop().time()
        known = self._others.get(found.end, (now, {}))[1]
        listeners = {line.name: known.get(line.name) or _Listener(line) for line in found.lines}
        for line in found.lines:
            listeners[line.name].has_unread(line.unread, now)
        self._others[found.end] = (now, listeners)
        if known.keys() != listeners.keys():
            self._index()
        self._room.wake_all()
        if not listeners:
            del self._others[found.end]
        if found.asks and found.end != self._end and self._inboxes:
            await self._announce()

    async def _told(self, message: Msg) -> None:
        """A listener has read a marked message."""
        try:
            end, name, number = json.decode(message.data, type=tuple[str, str, int])
        except msgspec.DecodeError:
            return
        listener = self._others.get(end, (0.0, {}))[1].get(name)
        if listener is not None:
            listener.has_read(number)
            self._room.wake(*listener.subjects)

    def _forget_silent(self) -> None:
        oldest = asyncio.get_running_loop().time() - FORGET_AFTER_S
        silent = [end for end, (heard_at, _) in self._others.items() if heard_at < oldest]
        for end in silent:
            del self._others[end]
        if silent:
            self._index()

    def _index(self) -> None:
        self._listeners = {}
        for _, listeners in self._others.values():
            for one in listeners.values():
                for subject in one.subjects:
                    self._listeners.setdefault(subject, []).append(one)

    def _reconnected(self) -> None:
        if self._is_closed:
            return
        self._epoch += 1
        self._others.clear()
        self._index()
        self._room.wake_all()
        self._run(self._announce(asks=True))
        for inbox in self._inboxes.values():
            if inbox.puller is not None:
                inbox.puller.ask_again()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    async def _round_trip(self) -> None:
        try:
            await self._connection.round_trip()
        except Exception as error:  # the subscription is there when the connection is back
            logger().info("a subscription is not confirmed (%s)", error_text(error))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="messages on NATS")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._run(work)
        _starting[task] = self._connection.options
        task.add_done_callback(lambda done: _starting.pop(done, None))

    async def close(self) -> None:
        """Stop listening. Whoever waits for messages here hears that there are no more."""
        if self._is_closed:
            return
        self._is_closed = True
        inboxes, self._inboxes = list(self._inboxes.values()), {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._announce()
                await _unsubscribed(self._subscriptions)
                for inbox in inboxes:
                    await self._unsubscribe(inbox)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._others.clear()
        self._index()
        self._room.wake_all()
        for inbox in inboxes:
            inbox.end()


async def _unsubscribed(subscriptions: list[Subscription]) -> None:
    for one in subscriptions:
        with contextlib.suppress(Exception):  # the connection is gone, and the subscription with it
            await one.unsubscribe()


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as NATS can carry them: as they are, else all of them as JSON in one."""
    if all(_is_plain(name, value) for name, value in headers.items()):
        return dict(headers)
    return {HEADERS: json.encode(dict(headers)).decode()}


def _is_plain(name: str, value: str) -> bool:
    is_token = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return is_token and not name.startswith(OWN) and value.isprintable() and value == value.strip()


def _shown(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that the sender gave."""
    shown = {name: value for name, value in headers.items() if not name.startswith(OWN)}
    if HEADERS in headers:
        shown |= json.decode(headers[HEADERS], type=dict[str, str])
    return shown


def _size(headers: Mapping[str, str]) -> int:
    if not headers:
        return 0
    return _HEADER_LINE + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
