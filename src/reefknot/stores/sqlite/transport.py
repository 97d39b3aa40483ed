"""
`SqliteTransport`: messages between the processes that share the file; `Outgoing` writes them with the next transaction.

A subscriber in the sender's own process gets a message at once; for subscribers elsewhere it is written as a row, and
without any nothing is written. A subscriber reads the rows from its own position on, woken by the commit. A sender does
not wait for the disk, but it waits while too many messages are unwritten, or while a subscriber of the subject that was
seen lately has no room. A message that could not be written is logged.

The transport guarantees no more than routers and workers need: a message reaches every current subscriber, but not one
that subscribes, or returns, later. Nothing that must not be lost is only in a message: it is stored as work, and asked
for again. In a process that subscribes to a subject itself, a new subscriber elsewhere may miss what is sent within its
first second, unless it published first.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial

import apsw
from msgspec import json

from reefknot.errors import ReefknotError
from reefknot.queue.model.messages import ACK, RESULT
from reefknot.queue.port.transport import Delivery, Notice, Room
from reefknot.runtime.changes import until
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import ReaderQueue, Services
from reefknot.stores.sqlite import message_rows as rows
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.wait_table import ROOM_TOPIC

MOST = 256
"""Messages that may be unwritten at once."""
AGAIN_S = 1.0
"""Pause before a refused message is tried again, unless a commit comes first."""
ANSWERS = (ACK, RESULT)
"""What these say is in the store already, so they wait for a transaction that is due anyway."""
ANSWER_WITHIN_S = 0.01
SEEN_EVERY_S = 1.0
"""How often a subscriber writes a sign of life and its position."""
CLOSE_S = 5.0
PAGE = 500
REMEMBERED_IDS = 10_000

Named = tuple[str, rows.Message]
"""The sender's name of a message, and the message."""


class Outgoing:
    """Messages of one transport that are not yet written. `failed` is called with the id of each that never will be."""

    def __init__(self, context: StoreContext, failed: Callable[[str], None]) -> None:
        self._context = context
        self._failed = failed
        self._on_the_way = 0
        self._refused: deque[Named] = deque()
        self._full: Counter[str] = Counter()
        """By subject: how many messages were refused because a subscriber has no room."""
        self._services = Services("transport")
        self._moved = asyncio.Event()

    async def put(self, name: str, message: rows.Message) -> None:
        """Queue a message, as soon as there is room."""
        while not self.has_room(message[2]):
            self._moved.clear()
            await self._moved.wait()
        self._send((name, message))

    def has_room(self, subject: str) -> bool:
        """Whether a message can be written now, as far as is known."""
        return self._on_the_way < MOST and not self._full[subject]

    def _send(self, one: Named) -> asyncio.Future[bool]:
        within = ANSWER_WITHIN_S if one[1][2] in ANSWERS else 0.0
        future: asyncio.Future[bool] = self._context.submit(rows.publish_batch, one[1], within=within)
        self._on_the_way += 1
        future.add_done_callback(partial(self._written, one))
        return future

    def _written(self, one: Named, future: asyncio.Future[bool]) -> None:
        self._on_the_way -= 1
        self._moved.set()
        name, message = one
        error = None if future.cancelled() else future.exception()
        if error is not None:
            subject = printable(message[2], most=100)
            logger().error(
                "message to %s dropped: it could not be written to the store (%s)", subject, error_text(error)
            )
            self._failed(name)
        elif future.cancelled() or not future.result():
            self._refused.append(one)
            self._full[message[2]] += 1
            self._services.keep("messages that a subscriber has no room for", self._try_again)

    async def _try_again(self) -> None:
        while self._refused:
            with self._context.listening(ROOM_TOPIC) as change:
                again = [self._refused.popleft() for _ in range(len(self._refused))]
                try:
                    await self._sent(again)
                finally:
                    for _, message in again:  # one that was refused again has been counted again
                        self._full[message[2]] -= 1
                    self._full += Counter()
                    self._moved.set()
                if self._refused:
                    await until(change, AGAIN_S)

    async def _sent(self, again: list[Named]) -> None:
        for at, one in enumerate(again):
            try:
                future = self._send(one)
            except ReefknotError as error:  # the store is gone: for all of them alike
                for name, _ in again[at:]:
                    self._failed(name)
                logger().error(
                    "%d messages dropped: they could not be written to the store (%s)",
                    len(again) - at,
                    error_text(error),
                )
                break
        else:
            await asyncio.wait([future])  # one transaction takes them in their order

    async def close(self, seconds: float) -> None:
        """
        Write the pending messages, for at most `seconds`. Messages without room at their subscriber are dropped.
        """
        self._services.cancel()
        try:
            async with asyncio.timeout(seconds):
                while self._on_the_way:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return


class _Subscription:
    """Messages that were fetched for one subscriber and not taken yet."""

    def __init__(self, name: str, subjects: frozenset[str], limit: int, place: int) -> None:
        self.name = name
        self.subjects = subjects
        self.limit = limit
        self.unread: ReaderQueue[tuple[int, Delivery] | None] = ReaderQueue(limit)
        self.fetched = place
        """The last row that was checked for it."""
        self.taken = place
        """The last row that its reader has."""
        self.from_elsewhere = 0
        """Rows among the unread."""
        self.announced_to = place
        """Its position as written in the file."""

    @property
    def read_to(self) -> int:
        return self.taken if self.from_elsewhere else self.fetched

    @property
    def has_moved(self) -> bool:
        """Whether it has read far enough for a waiting sender to be notified."""
        return self.read_to - self.announced_to >= max(1, self.limit // 4)

    def offer(self, row: rows.Row) -> bool:
        """Accept a message, if there is room."""
        seq, _, delivery = row
        if delivery.subject in self.subjects:
            if self.unread.full():
                return False
            self.unread.put_nowait((seq, delivery))
            self.from_elsewhere += 1
        self.fetched = seq
        return True

    def got(self, seq: int) -> None:
        if seq:
            self.taken = seq
            self.from_elsewhere -= 1

    def listener(self, origin: str) -> rows.Listener:
        return rows.Listener(self.name, origin, self.subjects, self.limit, self.read_to)


class SqliteTransport:
    """The transport of one process. Belongs to the loop that subscribes."""

    def __init__(
        self, context: StoreContext, connect: Callable[[], apsw.Connection], nudge: Callable[[str], None]
    ) -> None:
        self._context = context
        self._connect = connect
        self._nudge = nudge
        self._origin = new_id()
        self._nudged = f"transport {self._origin}"
        self._lines: list[_Subscription] = []
        self._other_origins: frozenset[str] = frozenset()
        self._other_subjects: frozenset[str] = frozenset()
        """The listeners of other processes, as last read."""
        self._looked = 0
        """How often they were read."""
        self._is_announced = False
        self._announcing: asyncio.Future[list[rows.Listener]] | None = None
        self._unwritten: dict[asyncio.Future[list[rows.Listener]], list[rows.Listener]] = {}
        """The announcements that are on their way."""
        self._announces_now = False
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._outgoing = Outgoing(context, self._forget)
        self._count = 0
        self._announce_at = 0.0
        self._services = Services("transport")
        self._closed = False

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = "", to: str = ""
    ) -> None:
        name = f"{subject} {message_id}" if message_id else ""
        if name and not self._is_new(name):
            return
        here = [line for line in self._lines if subject in line.subjects] if to in ("", self._origin) else []
        try:
            if not here or (subject in self._other_subjects and to != self._origin):
                encoded = json.encode(headers or {}).decode()
                await self._outgoing.put(name, (self._origin, to, subject, message_id or None, encoded, body))
            for line in here:
                await line.unread.put((0, Delivery(subject, body, headers or {}, sender=self._origin)))
        except BaseException:
            self._forget(name)
            raise

    def notice(self, subject: str, body: bytes, *, message_id: str, to: str) -> Notice | None:
        if to == self._origin or not self._outgoing.has_room(subject):
            return None
        if not to and any(subject in line.subjects for line in self._lines):
            return None
        message: rows.Message = (self._origin, to, subject, message_id, "{}", body)
        return Notice(message)

    def _is_new(self, name: str) -> bool:
        if name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return True

    def _forget(self, name: str) -> None:
        """Forget a message id whose publish failed, so that a retry is not taken for a duplicate."""
        self._seen.pop(name, None)

    async def ready(self) -> None: ...  # a subscription is active at once

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        """Deliver everything that is committed after this call: the position is read here and now."""
        connection = self._connect()
        try:
            place = rows.last(connection)
        finally:
            connection.close()
        self._count += 1
        line = _Subscription(f"{self._origin}/{self._count}", frozenset(subjects), limit, place)
        self._lines.append(line)
        self._services.keep("messages from other processes", self._follow)
        self._announce_anew()
        return self._read(line)

    async def _read(self, line: _Subscription) -> AsyncIterator[Delivery]:
        try:
            while (one := await line.unread.get()) is not None:
                was_full = len(line.unread.items) == line.limit - 1
                line.got(one[0])
                if was_full or line.has_moved:
                    self._nudge(self._nudged)
                yield one[1]
        finally:
            if line in self._lines:
                self._lines.remove(line)
                self._announce_anew()

    def _announce_anew(self) -> None:
        self._announce_at, self._is_announced = 0.0, False
        self._nudge(self._nudged)

    def _topics(self) -> set[str]:
        subjects = {subject for line in self._lines for subject in line.subjects}
        return {rows.topic_of(subject, recipient) for subject in subjects for recipient in ("", self._origin)}

    async def _follow(self) -> None:
        """Fetch messages of other processes, and write the position for their senders."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            with self._context.listening(self._nudged, *self._topics()) as change:
                try:
                    more = await self._fetch()
                    if loop.time() >= self._announce_at or any(line.has_moved for line in self._lines):
                        self._announce_at = loop.time() + SEEN_EVERY_S
                        self._announce()
                except Exception as error:
                    logger().error("messages from other processes cannot be read; trying again (%s)", error_text(error))
                    more = False
                    await asyncio.sleep(AGAIN_S)
                if not more:
                    await until(change, max(0.0, self._announce_at - loop.time()))

    async def _fetch(self) -> bool:
        """Fetch a page for every subscription that has room. True when there may be another one."""
        lines = [line for line in self._lines if not line.unread.full()]
        if not lines:
            return False
        start = min(line.fetched for line in lines)
        subjects = frozenset().union(*(line.subjects for line in lines))
        last, found = await self._context.look(
            partial(rows.news, origin=self._origin, after=start, subjects=subjects, limit=PAGE)
        )
        if any(origin not in self._other_origins for _, origin, _ in found):
            looked = self._looked
            self._know(await self._context.read(partial(rows.listeners, now=self._context.now())), looked)
        for row in found:
            lines = [line for line in lines if row[0] <= line.fetched or line.offer(row)]
        if len(found) < PAGE:
            for line in lines:
                line.fetched = max(line.fetched, last)
        return len(found) == PAGE

    def _announce(self) -> None:
        """Write that this end listens, and its position; unless urgent, with the next transaction."""
        is_urgent = not self._is_announced or any(line.has_moved for line in self._lines)
        if self._announcing is not None and (self._announces_now or not is_urgent):
            return
        lines = [(line, line.listener(self._origin)) for line in self._lines]
        self._announces_now = is_urgent
        within = 0.0 if is_urgent else 2 * SEEN_EVERY_S
        own = [one for _, one in lines]
        future = self._context.submit(rows.refresh_batch, (self._origin, own), within=within)
        self._announcing, self._is_announced, self._unwritten[future] = future, True, own
        future.add_done_callback(partial(self._announced, lines, self._looked))

    def _announced(
        self,
        lines: list[tuple[_Subscription, rows.Listener]],
        looked: int,
        future: asyncio.Future[list[rows.Listener]],
    ) -> None:
        self._unwritten.pop(future, None)
        if self._announcing is future:
            self._announcing = None
        if future.cancelled() or future.exception() is not None:
            return  # the next read of the file reports what is wrong
        self._know(future.result(), looked)
        for line, one in lines:
            line.announced_to = max(line.announced_to, one.read_to)
        if any(line.has_moved for line in self._lines) or not self._is_announced:
            self._nudge(self._nudged)

    def _know(self, listeners: list[rows.Listener], looked: int) -> None:
        """
        Adopt these as all listeners; or add them, if others were read since the query: either set may be the older one.
        """
        others = [one for one in listeners if one.origin != self._origin]
        origins = frozenset(one.origin for one in others)
        subjects = frozenset[str]().union(*(one.subjects for one in others))
        if looked != self._looked:
            origins, subjects = origins | self._other_origins, subjects | self._other_subjects
        self._other_origins, self._other_subjects = origins, subjects
        self._looked += 1

    async def close(self) -> None:
        """Stop listening; the iterators of all subscribers end."""
        if self._closed:
            return
        self._closed = True
        await self._outgoing.close(CLOSE_S)
        if self._services.names:
            await self._services.stop()
            for own in self._unwritten.values():
                own.clear()  # one that is not urgent may be written after the removal
            with suppress(Exception):  # the others notice anyway, a little later
                async with asyncio.timeout(CLOSE_S):
                    await self._context.write(rows.leave_batch, self._origin)
        for line in self._lines:
            line.unread.put_nowait(None)
