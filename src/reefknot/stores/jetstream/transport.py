"""
`JetStreamTransport`: messages between the processes that share a NATS server, on its subjects as they are documented.

Core NATS carries them. Where an end of the same store listens, a sender waits for room: see `listeners`. Where no
listener is known, a message costs no more than NATS itself.

A message that is larger than the server takes goes in parts, on a subject of its own that only ends of a store hear.

The shared subject of assignments is a stream where the transport is made so: see `assignments`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, json, msgpack

from reefknot.errors import StoreError, StoreFullError, StoreUnavailableError
from reefknot.queue.model.messages import ASSIGN
from reefknot.queue.port.transport import Delivery, Notice, Room
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.stores.jetstream.assignments import (
    ACK_WAIT_S,
    MOST_ASSIGNMENTS,
    AssignmentStream,
    Puller,
    SharedAnswers,
    Taken,
)
from reefknot.stores.jetstream.connection import Connection, NatsOptions
from reefknot.stores.jetstream.listeners import Line, Listeners
from reefknot.stores.jetstream.streams import token_of
from reefknot.stores.jetstream.wire import Heard

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

REMEMBERED_IDS = 10_000
LARGEST = 64 << 20
"""The largest message that is sent in parts, and the most bytes of unfinished ones."""
MOST_UNFINISHED = 256
MOST_UNREAD = 65_536
MOST_UNREAD_BYTES = 256 << 20
"""Bounds against peers that do not wait: messages beyond these and beyond a subscriber's limit are dropped."""
CLOSE_S = 2.0

MESSAGE_ID = "Nats-Msg-Id"
MARK = "Reefknot-Mark"
PART = "Reefknot-Part"
HEADERS = "Reefknot-Headers"
"""Headers that NATS would not carry as they are, as JSON."""
OWN = ("Nats-", "Reefknot-")
_HEADER_LINE = len("NATS/1.0\r\n\r\n")
_PART_HEADERS = 128

_starting: dict[asyncio.Task[None], NatsOptions] = {}
"""Subscriptions of this process that a server may not know yet."""


class Whole(Struct, frozen=True, array_like=True):
    """A message that is sent in parts."""

    body: bytes
    headers: dict[str, str]


_wholes = msgpack.Decoder(Whole)


class _Parts:
    """Messages of which not all parts are there yet."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, list[bytes]] = OrderedDict()
        self._bytes = 0

    def add(self, label: str, part: bytes) -> bytes | None:
        """The whole message, if this is its last part. Parts that have a gap before them are dropped."""
        name, numbers = label.split("/", 1)
        at, count = map(int, numbers.split("/"))
        parts = self._found.setdefault(name, [])
        if at != len(parts):
            self._forget(name)
            return None
        parts.append(part)
        self._bytes += len(part)
        if at + 1 == count:
            self._forget(name)
            return b"".join(parts)
        while self._bytes > LARGEST or len(self._found) > MOST_UNFINISHED:
            self._forget(next(iter(self._found)))
        return None

    def _forget(self, name: str) -> None:
        self._bytes -= sum(map(len, self._found.pop(name)))


class _Subscriber:
    """Messages for one subscriber that it has not taken yet."""

    def __init__(self, number: int, subjects: frozenset[str], limit: int, room: Room | None) -> None:
        self.number = number
        self.subjects = subjects
        self.limit = limit
        self.room = room
        self.unread: asyncio.Queue[tuple[Delivery | None, Taken | None] | Exception | None] = asyncio.Queue()
        self.subscriptions: list[Subscription] = []
        self.pulling = Services("messages on NATS")
        self.puller: Puller | None = None
        self.has_reader = True
        self.parts = _Parts()
        self._bytes = 0
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._is_flooded = False

    def offer(self, delivery: Delivery, taken: Taken | None, message_id: str = "") -> None:
        """Accept a message. Of a repeated id only the mark is kept."""
        if message_id and not self._is_new((delivery.subject, message_id)):
            if taken is not None:
                self.unread.put_nowait((None, taken))
            return
        waiting = self.unread.qsize() - self.limit
        if waiting >= MOST_UNREAD or (waiting >= 0 and self._bytes + len(delivery.body) > MOST_UNREAD_BYTES):
            if not self._is_flooded:
                subject = printable(delivery.subject, most=100)
                logger().error("messages to %s are dropped: %d wait unread here", subject, self.unread.qsize())
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
        """With a `shared_stream`, assignments to any worker are kept at the server, each for one worker."""
        self._connection = connection
        self._name = connection.options.name
        self._prefix = connection.options.prefix
        self._epoch = 0
        """Counts lost connections: it is unknown which messages were lost, so subscriptions get new names."""
        self._count = 0
        self._subscribers: dict[int, _Subscriber] = {}
        self._listeners = Listeners(connection, new_id(), self._lines, self._run)
        self._services = Services("messages on NATS")
        self._tasks: set[asyncio.Task[None]] = set()
        """Running one-off tasks: subscriptions and announcements."""
        self._is_open = self._is_closed = False
        self._forget_connection: Callable[[], None] = lambda: None
        stream = AssignmentStream(connection, most=most_assignments, ack_wait=ack_wait)
        self._stream = stream if shared_stream else None
        self._shared_answers = SharedAnswers(connection)
        self._pulled = frozenset({ASSIGN} if shared_stream else ())

    async def ensure_stream(self) -> None:
        """Make the stream of shared assignments, where this transport has one, or say what is wrong with it."""
        if self._stream is not None:
            await self._stream.ensure()

    async def ready(self) -> None:
        """
        Return when the server has every subscription, and keeps what is sent to the shared subject. If it cannot keep
        that, the reader gets the error, or a warning says that it is tried again.
        """
        if self._connection.is_up:
            await self._subscribed()
        if any(ASSIGN in one.subjects for one in self._subscribers.values()):
            with contextlib.suppress(StoreError):
                await self.ensure_stream()

    # ---- sending ----------------------------------------------------------------------------------------------------

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = "", to: str = ""
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
        if self._listeners.has(subject):
            mark = await self._listeners.wait_for_room(subject)
            if mark:
                carried[MARK] = mark
        if len(body) + _size(carried) > self._connection.max_payload:
            await self._publish_parts(subject, msgpack.encode(Whole(body, carried)))
        else:
            reply = await self._shared_answers.reply() if subject == ASSIGN else ""
            await self._connection.publish(self._prefix + subject, body, headers=carried, reply=reply)

    def notice(self, subject: str, body: bytes, *, message_id: str, to: str) -> Notice | None:
        return None  # the server's messages are not in the store

    async def _subscribed(self) -> None:
        """Wait until the server has all earlier subscriptions of this process."""
        loop, options = asyncio.get_running_loop(), self._connection.options
        tasks = [task for task, one in _starting.items() if one == options and task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks)

    async def _publish_parts(self, subject: str, whole: bytes) -> None:
        if len(whole) > LARGEST:
            problem = f"a message has {len(whole)} bytes, and {LARGEST} are accepted"
            raise StoreFullError(self._connection.options.shown, problem, "send less")
        name, size = new_id(), self._connection.max_payload - _PART_HEADERS
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        for at, part in enumerate(parts):
            label = {PART: f"{name}/{at}/{len(parts)}"}
            await self._connection.publish(f"{self._name}.parts.{subject}", part, headers=label)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        if not self._is_open:
            self._open()
        self._count += 1
        subscriber = _Subscriber(self._count, frozenset(subjects), limit, room)
        self._subscribers[subscriber.number] = subscriber
        self._start(self._listen(subscriber))
        return self._read(subscriber)

    async def _listen(self, subscriber: _Subscriber) -> None:
        try:
            for subject in sorted(subscriber.subjects - self._pulled):
                for heard in (self._prefix + subject, f"{self._name}.parts.{subject}"):
                    handler = partial(self._hear, subscriber, subject)
                    subscriber.subscriptions.append(await self._connection.listen(heard, handler))
        except asyncio.CancelledError:  # by a step: its reader subscribes again
            problem, way_out = "a subscription was cancelled from outside", "subscribe again"
            subscriber.end(StoreUnavailableError(self._connection.options.shown, problem, way_out))
            raise
        except Exception as error:
            subscriber.end(error)
            return
        if ASSIGN in subscriber.subjects and self._stream is not None:
            unread, offer = subscriber.unread.qsize, subscriber.offer
            limit, room = subscriber.limit, subscriber.room
            subscriber.puller = Puller(self._stream, limit=limit, room=room, unread=unread, offer=offer)
            subscriber.pulling.keep("shared assignments", partial(subscriber.puller.run, subscriber.end))
            subscriber.pulling.keep("unread assignments", subscriber.puller.keep)
        await self._listeners.announce()
        await self._round_trip()

    def _hear(self, subscriber: _Subscriber, subject: str, message: Heard) -> None:
        body, headers = bytes(message.data), message.headers
        if not headers:
            subscriber.offer(Delivery(subject, body), None)
            return
        try:
            if PART in headers:
                whole = subscriber.parts.add(headers[PART], body)
                if whole is None:
                    return
                found = _wholes.decode(whole)
                body, headers = found.body, found.headers
            shown = _shown(headers)
        except (ValueError, msgspec.MsgspecError) as error:
            where = printable(subject, most=100)
            logger().warning("a message to %s is unreadable and dropped (%s)", where, error_text(error))
            return
        mark = headers.get(MARK)
        taken = None if mark is None else partial(self._listeners.answer, mark, self._line_name(subscriber))
        subscriber.offer(Delivery(subject, body, shown), taken, headers.get(MESSAGE_ID, ""))

    async def _read(self, subscriber: _Subscriber) -> AsyncIterator[Delivery]:
        try:
            while (delivery := await subscriber.take()) is not None:
                yield delivery
        finally:
            subscriber.has_reader = False
            if not self._is_closed:
                self._run(self._leave(subscriber))

    async def _leave(self, subscriber: _Subscriber) -> None:
        await self._listeners.announce()
        await self._unsubscribe(subscriber)
        self._subscribers.pop(subscriber.number, None)

    async def _unsubscribe(self, subscriber: _Subscriber) -> None:
        await subscriber.pulling.stop()
        await self._connection.unsubscribe(subscriber.subscriptions)

    # ---- life -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_open = True
        self._forget_connection = self._connection.on_reconnect(self._reconnected)
        self._start(self._meet())

    async def _meet(self) -> None:
        try:
            await self._listeners.open()
        except Exception as error:
            logger().warning("listeners are unknown: messages are sent without back-pressure (%s)", error_text(error))
            return
        self._services.keep("listeners", self._listeners.run)
        await self._round_trip()

    def _lines(self) -> list[Line]:
        return [
            Line(self._line_name(one), sorted(one.subjects - self._pulled), one.limit, one.unread.qsize())
            for one in self._subscribers.values()
            if one.has_reader
        ]

    def _line_name(self, subscriber: _Subscriber) -> str:
        return f"{subscriber.number}.{self._epoch}"

    def _reconnected(self) -> None:
        self._epoch += 1
        self._listeners.forget()
        self._run(self._listeners.announce(asks=True))
        for subscriber in self._subscribers.values():
            if subscriber.puller is not None:
                subscriber.puller.ask_again()

    async def _round_trip(self) -> None:
        try:
            await self._connection.round_trip()
        except Exception as error:  # the subscription is there when the connection is back
            logger().info("a subscription on NATS is not confirmed; it holds after a reconnect (%s)", error_text(error))

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
        """Stop listening; the iterators of all subscribers end."""
        if self._is_closed:
            return
        self._is_closed = True
        self._forget_connection()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._services.cancel(), *self._tasks, return_exceptions=True)
        subscribers, self._subscribers = list(self._subscribers.values()), {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._listeners.close()
                for one in subscribers:
                    await self._unsubscribe(one)
        for one in subscribers:
            one.end()


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as NATS can carry them: unchanged, else all of them as JSON in one header."""
    if all(_is_plain(name, value) for name, value in headers.items()):
        return dict(headers)
    return {HEADERS: json.encode(dict(headers)).decode()}


def _is_plain(name: str, value: str) -> bool:
    is_token = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return is_token and not name.startswith(OWN) and value.isprintable() and value == value.strip()


def _shown(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers as the sender gave them."""
    shown = {name: value for name, value in headers.items() if not name.startswith(OWN)}
    if HEADERS in headers:
        shown |= json.decode(headers[HEADERS], type=dict[str, str])
    return shown


def _size(headers: Mapping[str, str]) -> int:
    if not headers:
        return 0
    return _HEADER_LINE + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
