"""
Reading a stream: its last message on a subject, all its messages once, or all of them as they come.

Single reads are answered by the stream's leader. A `Feed` is a push consumer of our own: the server sends in order,
with flow control, and a heartbeat when there is nothing to send. After a gap in its numbers, or silence for longer than
three heartbeats, it is recreated behind the last message that arrived. Nothing is acknowledged, nothing redelivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, json

from reefknot.audit.model.event import timestamp_ms
from reefknot.errors import StoreError, StorePermissionError
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.stores.jetstream.connection import NO_RESPONDERS, REQUEST_S, Connection
from reefknot.stores.jetstream.requests import NobodyThereError, RefusedError, UnansweredError
from reefknot.stores.jetstream.streams import NO_MESSAGE, patient_info, patiently
from reefknot.stores.jetstream.wire import Heard, read_headers

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

HEARTBEAT_S = 1.0
SILENCE_S = 3.5
SCAN_S = 60.0
READ_S = 1.5
"""How long one read waits for its answer: within the patience it is repeated, since an answer may get lost."""
R = TypeVar("R")
_NANOSECONDS = 1_000_000_000


class StreamMessage(Struct, frozen=True, gc=False):
    """A stored message."""

    subject: str
    sequence: int
    body: bytes
    raw_headers: bytes = b""
    stored_at: int = 0
    """Milliseconds UTC by the server's clock."""

    @property
    def headers(self) -> dict[str, str]:
        return read_headers(self.raw_headers)


class _Stored(Struct):
    subject: str
    seq: int
    hdrs: bytes = b""
    data: bytes = b""
    time: str = ""


class _Got(Struct):
    message: _Stored


async def last_message(connection: Connection, stream: str, subject: str) -> StreamMessage | None:
    """The last message on a subject, which may have wildcards, as the leader has it; None without one."""
    return await _get(connection, stream, {"last_by_subj": subject})


async def first_message(connection: Connection, stream: str, subject: str) -> StreamMessage | None:
    """The first message on a subject, which may have wildcards, as the leader has it; None without one."""
    return await _get(connection, stream, {"seq": 1, "next_by_subj": subject})


async def message_at(connection: Connection, stream: str, sequence: int) -> StreamMessage | None:
    """The message of this sequence; None when it was removed."""
    return await _get(connection, stream, {"seq": sequence})


async def _get(connection: Connection, stream: str, what: dict[str, Any]) -> StreamMessage | None:
    try:
        answer = await patiently(connection, lambda: connection.api(f"STREAM.MSG.GET.{stream}", what, timeout=READ_S))
    except RefusedError as error:
        if error.number == NO_MESSAGE:
            return None
        raise
    found = json.decode(answer, type=_Got).message
    return StreamMessage(found.subject, found.seq, found.data, found.hdrs, timestamp_ms(found.time) or 0)


AT_ONCE = 100
"""Single reads that are on their way at once."""


async def gathered(read: Callable[[str], Awaitable[R]], wanted: Sequence[str]) -> list[R]:
    """The answers for each of these, a few of them asked for at a time."""
    found: list[R] = []
    for at in range(0, len(wanted), AT_ONCE):
        found += await asyncio.gather(*(read(one) for one in wanted[at : at + AT_ONCE]))
    return found


MOST_DIRECT = 500
"""Subjects of one direct read; the server answers at most 1024."""
TOO_MANY = 413
"""The status of a direct read that more subjects match."""


class DirectReads:
    """
    The last messages of many subjects by one request, answered by any server that has a replica.

    Such an answer may be a moment behind what the stream's leader has.
    """

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = f"$JS.API.DIRECT.GET.{stream}"
        self._inbox = f"{connection.options.inbox}.direct-{new_id()}"
        self._subscription: Subscription | None = None
        self._asked = 0
        self._waiting: dict[str, tuple[list[StreamMessage], asyncio.Future[Any]]] = {}

    async def last(self, subjects: Sequence[str]) -> list[StreamMessage]:
        """The last message of each of these subjects, which may have wildcards, where there is one."""
        found: list[StreamMessage] = []
        for at in range(0, len(subjects), MOST_DIRECT):
            some = partial(self._ask, subjects[at : at + MOST_DIRECT])
            found += await patiently(self._connection, some)
        return found

    async def _ask(self, subjects: Sequence[str]) -> list[StreamMessage]:
        if self._subscription is None:
            self._subscription = await self._connection.listen(f"{self._inbox}.*", self._hear)
        self._asked += 1
        name = f"{self._inbox}.{self._asked}"
        found: list[StreamMessage] = []
        try:
            with self._connection.expecting(self._subject, READ_S) as answer:
                self._waiting[name] = found, answer
                await self._connection.publish(self._subject, json.encode({"multi_last": subjects}), reply=name)
                problem = await answer
        finally:
            self._waiting.pop(name, None)
        if isinstance(problem, TimeoutError):
            shown = self._connection.options.shown
            raise UnansweredError(shown, "a direct read was not answered", "it is tried again")
        if isinstance(problem, Exception):
            raise problem
        return found

    async def matching(self, subject: str) -> list[StreamMessage]:
        """The last message of every subject that matches this one."""
        try:
            return await self.last([subject])
        except RefusedError as error:
            if error.number != TOO_MANY:
                raise
            return await scan(self._connection, self._stream, [subject])

    def _hear(self, message: Heard) -> None:
        found, answer = self._waiting.get(message.subject, ([], None))
        if answer is None or answer.done():
            return
        if message.status in ("204", "404"):  # the end of the answer, or nothing there
            answer.set_result(None)
        elif message.status == NO_RESPONDERS:
            shown = self._connection.options.shown
            answer.set_exception(NobodyThereError(shown, "no server has its stream at the moment", "check the servers"))
        elif message.status:
            refusal = RefusedError(self._connection.options.shown, int(message.status), "a direct read is refused")
            answer.set_exception(refusal)
        else:
            headers = message.headers
            sequence = int(headers["Nats-Sequence"])
            found.append(StreamMessage(headers["Nats-Subject"], sequence, message.data, message.raw_headers))


Start = dict[str, Any]
LATEST: Start = {"deliver_policy": "last_per_subject"}
EVERYTHING: Start = {"deliver_policy": "all"}


def behind(sequence: int) -> Start:
    """The delivery options to begin with the message after this one."""
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence + 1}


class _Consumer(Struct):
    name: str
    num_pending: int = 0


async def count(connection: Connection, stream: str, filters: Sequence[str], *, start: Start = LATEST) -> int:
    """The number of messages of these filters from `start` on; without it, of subjects that have a message."""
    feed = Feed(connection, stream, filters, _ignore, start=start)
    made = await feed.create(f"count-{new_id()}", deliver=False)
    await feed.delete(made.name)
    return made.num_pending


def _ignore(message: StreamMessage) -> None:
    """Ignore the message."""


async def scan(
    connection: Connection, stream: str, filters: Sequence[str], *, start: Start = LATEST, most: int | None = None
) -> list[StreamMessage]:
    """All messages of these filters, as of now; at most the first `most`."""
    found: list[StreamMessage] = []
    enough = asyncio.Event()

    def take(message: StreamMessage) -> None:
        if most is None or len(found) < most:
            found.append(message)
        if most is not None and len(found) >= most:
            enough.set()

    feed = Feed(connection, stream, filters, take, start=start)
    try:
        async with asyncio.timeout(SCAN_S):
            await feed.start()
            waiting = [asyncio.ensure_future(one.wait()) for one in (feed.caught_up, enough)]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()
    finally:
        await feed.stop()
    return found


async def scan_each(
    connection: Connection, stream: str, filters: Sequence[str], handle: Callable[[StreamMessage], None]
) -> None:
    """Handle all messages of these filters, as of now, one by one: none is kept."""
    feed = Feed(connection, stream, filters, handle, start=LATEST)
    try:
        async with asyncio.timeout(SCAN_S):
            await feed.start()
            await feed.caught_up.wait()
    finally:
        await feed.stop()


MOST_OF_IT = 4
"""What a part of the stream is of the whole at most: for a larger one the whole is read at once."""
SPREAD = 16
"""Sequences that are read back for each wanted message: other records lie in between."""


async def newest(
    connection: Connection, stream: str, filters: Sequence[str], *, least: int
) -> AsyncIterator[tuple[list[StreamMessage], int]]:
    """
    The last messages of these filters: at least `least`, then about four times as many, and in the end all of them.

    With them comes the time by which those left out were stored, in milliseconds UTC by the server's clock; 0 if none
    was left out.
    """
    info = (await patient_info(connection, stream)).state
    span, all_of_it = SPREAD * least, info["last_seq"] - info["first_seq"]
    while MOST_OF_IT * span < all_of_it:
        start = info["last_seq"] - span
        found = await scan(connection, stream, filters, start=behind(start))
        if len(found) >= least:
            yield found, found[0].stored_at
        span *= 4
    yield await scan(connection, stream, filters), 0


PAGE_BYTES = 8 << 20
PAGE_TRIES = 3


async def page(
    connection: Connection, stream: str, filters: Sequence[str], *, start: Start, most: int
) -> tuple[list[StreamMessage], bool]:
    """The first `most` messages of these filters, and whether there were more. No further message is sent."""
    for _ in range(PAGE_TRIES):
        found, pending = await _pull(connection, stream, filters, start=start, most=most)
        if found or not pending:
            return found, pending > len(found)
    problem = f"a page of {stream} was not sent in {PAGE_TRIES} tries"
    raise UnansweredError(connection.options.shown, problem, "check the server's load, and try again")


async def stored_now(
    connection: Connection, stream: str, filters: Sequence[str], *, most: int
) -> AsyncIterator[list[StreamMessage]]:
    """
    The messages of these filters that were stored before this, `most` at a time.

    It ends however many are stored in the meantime, while `scan` follows until it has caught up with all.
    """
    info = (await patient_info(connection, stream)).state
    at, is_more = 0, True
    while is_more:
        some, is_more = await page(connection, stream, filters, start=behind(at), most=most)
        yield [one for one in some if one.sequence <= info["last_seq"]]
        at = some[-1].sequence if some else info["last_seq"]
        is_more = is_more and at < info["last_seq"]


async def _pull(
    connection: Connection, stream: str, filters: Sequence[str], *, start: Start, most: int
) -> tuple[list[StreamMessage], int]:
    """The messages of one page, up to the first gap, and how many there were when it was asked for."""
    name = f"page-{new_id()}"
    inbox = f"{connection.options.inbox}.{name}"
    made = await Feed(connection, stream, filters, _ignore, start=start).create(name, deliver=False)
    found: list[StreamMessage] = []
    wanted, subject = min(most, made.num_pending), f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"

    def hear(message: Heard) -> None:
        tokens = message.reply.split(".")
        at = 5 if len(tokens) == 9 else 7
        if done.done():
            return
        if message.status or int(tokens[at + 1]) != len(found) + 1:
            done.set_result(None)
            return
        when = int(tokens[at + 2]) // 1_000_000
        found.append(StreamMessage(message.subject, int(tokens[at]), message.data, message.raw_headers, when))
        if len(found) == wanted:
            done.set_result(None)

    if wanted:
        with connection.expecting(subject, REQUEST_S) as done:
            subscription = await connection.listen(inbox, hear)
            try:
                asked = json.encode({"batch": wanted, "max_bytes": PAGE_BYTES, "no_wait": True})
                await connection.publish(subject, asked, reply=inbox)
                problem = await done
            finally:
                if connection.is_up:
                    await subscription.unsubscribe()
        if isinstance(problem, TimeoutError):
            logger().debug("a page of %s came in part: %s of %s messages", stream, len(found), wanted)
        elif isinstance(problem, StorePermissionError):
            raise problem
    await connection.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", b"")
    return found, made.num_pending


class Feed:
    """The messages of some subjects of a stream, in order. `handle` is called in the loop for each."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        filters: Sequence[str],
        handle: Callable[[StreamMessage], None],
        *,
        start: Start,
        restarted: Callable[[], Start | None] | None = None,
    ) -> None:
        """`restarted` says where to begin when the consumer is recreated; None: behind the last message."""
        self._connection = connection
        self._stream = stream
        self._filters = list(filters)
        self._handle = handle
        self._start = start
        self._restarted = restarted
        self.position = 0
        """The sequence of the last message that was handled."""
        self.caught_up = asyncio.Event()
        """Set when everything that was there at the start was handled."""
        self._consumer = ""
        self._delivered = 0
        self._heard_at = 0.0
        self._subscription: Subscription | None = None
        self._services = Services(f"feed of {stream}")
        self._broken = asyncio.Event()
        self._forget: Callable[[], None] | None = None

    async def start(self) -> None:
        """Begin to read; an error when the stream cannot be read."""
        await self._begin(self._start)
        self._forget = self._connection.on_reconnect(self._broken.set)
        self._services.keep("watch", self._watch)

    async def create(self, name: str, *, deliver: bool = True) -> _Consumer:
        config: dict[str, Any] = {
            "name": name,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subjects": self._filters,
            "mem_storage": True,
            "num_replicas": 1,
            "max_deliver": 1,
            "inactive_threshold": int(10 * _NANOSECONDS),
            **self._start,
        }
        if deliver:
            config |= {
                "deliver_subject": f"{self._connection.options.inbox}.{name}",
                "flow_control": True,
                "idle_heartbeat": int(HEARTBEAT_S * _NANOSECONDS),
            }
        asked = f"CONSUMER.CREATE.{self._stream}.{name}", {"stream_name": self._stream, "config": config}
        answer = await patiently(self._connection, lambda: self._connection.api(*asked))
        return json.decode(answer, type=_Consumer)

    async def delete(self, name: str) -> None:
        try:
            await self._connection.api(f"CONSUMER.DELETE.{self._stream}.{name}", timeout=1.0)
        except (RefusedError, StoreError) as error:  # the server removes it a little later
            logger().debug("a consumer was not deleted (%s)", error_text(error))

    async def _begin(self, start: Start) -> None:
        name = f"feed-{new_id()}"
        subscription = await self._connection.listen(f"{self._connection.options.inbox}.{name}", self._hear)
        old, self._subscription = self._subscription, subscription
        if old is not None:
            await old.unsubscribe()
        self._consumer, self._delivered, self._start = name, 0, start
        if start is LATEST:
            self.position = 0
            self.caught_up.clear()
        self._heard_at = asyncio.get_running_loop().time()
        made = await self.create(name)
        if made.num_pending == 0:
            self.caught_up.set()

    def _hear(self, message: Heard) -> Awaitable[None] | None:
        self._heard_at = asyncio.get_running_loop().time()
        if message.status:
            return self._hear_control(message) if message.status == "100" else None
        tokens = message.reply.split(".")
        at = 5 if len(tokens) == 9 else 7
        if len(tokens) < 9 or tokens[at - 2] != self._consumer:
            return None  # of an earlier consumer
        sequence, delivered, pending = int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 3])
        if delivered != self._delivered + 1:
            self._broken.set()
            return None
        self._delivered = delivered
        if pending == 0:
            self.caught_up.set()  # first, because the handler may read this
        if sequence > self.position:
            self.position = sequence
            stored_at = int(tokens[at + 2]) // 1_000_000
            self._handle(StreamMessage(message.subject, sequence, message.data, message.raw_headers, stored_at))
        return None

    async def _hear_control(self, message: Heard) -> None:
        headers = message.headers
        answer = message.reply or headers.get("Nats-Consumer-Stalled", "")
        if answer:
            await self._connection.publish(answer, b"")
        last = headers.get("Nats-Last-Consumer", "")
        if last.isdecimal() and int(last) > self._delivered:
            self._broken.set()

    async def _watch(self) -> None:
        """Recreate the consumer when it skips or falls silent, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._broken.wait()
            except TimeoutError:
                if loop.time() - self._heard_at < SILENCE_S:
                    continue
            if not await self._connection.wait_until_up(HEARTBEAT_S):
                continue
            self._broken.clear()
            try:
                start = self._restarted() if self._restarted is not None else None
                await self._begin(behind(self.position) if start is None else start)
            except (RefusedError, StoreError, UnansweredError) as error:
                logger().warning("stream %s cannot be followed (%s); trying again", self._stream, error_text(error))
                self._broken.set()
                await asyncio.sleep(HEARTBEAT_S)

    async def stop(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None
        await self._services.stop()
        if self._subscription is not None and self._connection.is_up:
            subscription, self._subscription = self._subscription, None
            await subscription.unsubscribe()
            await self.delete(self._consumer)
