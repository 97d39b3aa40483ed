"""
The shared subject of assignments as a stream: `AssignmentStream` makes it and publishes to it, `Puller` reads from it.

Peers that know only the documented subjects publish to `caf.exec.assign.v1`. A bounded work-queue stream on exactly
this subject keeps what they send while no worker is there, and refuses what has no room. All workers share one
consumer: an assignment goes to one of them, and comes back when it is not acknowledged in time.

A reader that tells its `Room` is sent no more than it has room for: the rest stays in the stream, for it or another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import DecodeError, Struct, json

from reefknot.errors import StoreError, StoreMissingError, StorePermissionError, StoreUnavailableError
from reefknot.queue.model.messages import ASSIGN
from reefknot.queue.port.transport import Delivery, Room
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.requests import NobodyThereError, RefusedError
from reefknot.stores.jetstream.streams import Names, stream_info
from reefknot.stores.jetstream.wire import NOT_FOUND, Heard, stop_sending

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

MOST_ASSIGNMENTS = 10_000
ACK_WAIT_S = 30.0
CONSUMER = "workers"
EXPIRES_S = 30.0
"""How long a request for messages waits at the server before it is renewed."""
IDLE_EVERY_S = 1.0
"""How often the server confirms that it still has a request."""
SILENT_S = 4.0
"""Silence after which a request is made again: a restarted server has lost it."""
LOOK_S = 1.0
"""How often the room of a full reader is looked at, although it says nothing."""
TOGETHER_S = 0.005
"""Room that becomes free within this time is asked for together."""
AGAIN_S = 1.0
DENIED_S = 30.0
"""The pause after a refusal of this user, whose permissions a person has to change."""
NANOSECONDS = 1_000_000_000
NAME_IN_USE, OVERLAPPING = 10058, 10065
IDLE, NO_MESSAGES, EXPIRED, NOBODY = "100", "404", "408", "503"
ACK, NAK, IN_PROGRESS = b"+ACK", b"-NAK", b"+WPI"

Taken = Callable[[], Awaitable[None]]
"""Called when a reader takes a message."""


class SubjectTakenError(StoreUnavailableError):
    """The shared subject of assignments belongs to a stream that is not this store's."""


class _StreamNames(Struct):
    streams: list[str] | None = None


class AssignmentStream:
    """The stream `NAME_assign` and its consumer, as one store has them."""

    def __init__(self, connection: Connection, *, most: int = MOST_ASSIGNMENTS, ack_wait: float = ACK_WAIT_S) -> None:
        self.connection = connection
        self.name = f"{connection.options.name}_assign"
        self._state = Names(connection.options.name).state
        self._subject = f"{connection.options.prefix}{ASSIGN}"
        self.ack_wait = ack_wait
        self._most = most
        self._is_there = False

    async def ensure(self) -> None:
        """Make the stream and its consumer, unless they are there. A foreign stream on the subject is an error."""
        if self._is_there:
            return
        try:
            await self._ensure_stream()
            await self._ensure_consumer()
        except RefusedError as error:
            problem = f"the stream {self.name} cannot be made: {error.text} ({error.number})"
            raise StoreUnavailableError(self._shown, problem, "check the account's limits and permissions") from error
        self._is_there = True

    def doubt(self) -> None:
        """Check again before the next use: the stream or its consumer may have been removed."""
        self._is_there = False

    @property
    def _shown(self) -> str:
        return self.connection.options.shown

    async def _ensure_stream(self) -> None:
        wanted: dict[str, Any] = {
            "name": self.name,
            "subjects": [self._subject],
            "retention": "workqueue",
            "storage": "file",
            "discard": "new",
            "max_msgs": self._most,
        }
        try:
            found = (await stream_info(self.connection, self.name)).config
        except RefusedError as error:
            if error.number != NOT_FOUND:
                raise
        else:
            await self._adapt(found, wanted)
            return
        if self.connection.options.roles:
            problem = f"there is no stream {self.name}, and no role of this user makes it"
            way_out = f"an administrator makes it: reefknot store create --engine {self._shown}"
            raise StoreMissingError(self._shown, problem, way_out)
        wanted["num_replicas"] = self.connection.options.replicas or await self._copies_of_the_store()
        try:
            await self.connection.api(f"STREAM.CREATE.{self.name}", wanted)
        except RefusedError as error:
            if error.number == OVERLAPPING:
                raise await self._taken() from error
            if error.number != NAME_IN_USE:
                raise

    async def _copies_of_the_store(self) -> int:
        try:
            return int((await stream_info(self.connection, self._state)).config["num_replicas"])
        except RefusedError as error:  # a transport alone
            if error.number != NOT_FOUND:
                raise
            return 1

    async def _adapt(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Give the stream of this name the wanted bound and no fewer replicas; any other difference is an error."""
        options = self.connection.options
        fixed = ("subjects", "retention", "storage", "discard")
        wrong = [f"{field} is {found.get(field)!r}" for field in fixed if found.get(field) != wanted[field]]
        if wrong:
            problem = printable(f"the stream {self.name} is not one for assignments: {', '.join(wrong)}", most=300)
            raise SubjectTakenError(self._shown, problem, "remove it, or use a store of another name")
        replicas = max(options.replicas or 1, found.get("num_replicas", 1))
        changed = {**found, "max_msgs": wanted["max_msgs"], "num_replicas": replicas}
        if changed != found and not options.roles:
            try:
                await self.connection.api(f"STREAM.UPDATE.{self.name}", changed)
            except StorePermissionError as error:
                logger().warning("the stream %s is used as it is (%s)", self.name, error_text(error))

    async def _taken(self) -> SubjectTakenError:
        answer = await self.connection.api("STREAM.NAMES", {"subject": self._subject})
        names = ", ".join(json.decode(answer, type=_StreamNames).streams or ()) or "another stream"
        problem = printable(f"the subject {self._subject} belongs to the stream {names}", most=300)
        return SubjectTakenError(
            self._shown,
            problem,
            "take the subject out of that stream, or switch it off here: router.shared_subject: off",
        )

    async def _ensure_consumer(self) -> None:
        config = {
            "name": CONSUMER,
            "durable_name": CONSUMER,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait * NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": -1,
        }
        body = {"stream_name": self.name, "config": config}
        await self.connection.api(f"CONSUMER.CREATE.{self.name}.{CONSUMER}", body)

    async def publish(self, body: bytes, headers: Mapping[str, str] | None) -> None:
        """Add an assignment, and return when the stream has it; `StoreFullError` when it is full."""
        await self.ensure()
        try:
            answer = await self.connection.request(self._subject, body, headers=headers)
        except NobodyThereError:  # the stream was removed, or has no leader
            self.doubt()
            await self.ensure()
            answer = await self.connection.request(self._subject, body, headers=headers)
        try:
            self.connection.check(answer.data)
        except RefusedError as error:
            problem = f"the stream {self.name} refuses a message: {error.text} ({error.number})"
            raise StoreUnavailableError(self._shown, problem, "check the stream") from error


class _Published(Struct):
    error: dict[str, Any] | None = None


class SharedAnswers:
    """
    Answers of the server to assignments on the shared subject, where other parties own it.

    They have listeners there, or a stream of their own. An assignment that no listener takes is sent again by its
    router after a while; a log line says so, once until a listener takes one.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox = f"{connection.options.inbox}.{new_id()}"
        self._subscription: Subscription | None = None
        self._refusal = ""

    async def reply(self) -> str:
        """The subject on which the server answers a message that asks for it."""
        if self._subscription is None:
            self._subscription = await self._connection.listen(self._inbox, self._hear)
        return self._inbox

    def _hear(self, message: Heard) -> None:
        refusal = "no subscriber" if message.status == NOBODY else ""
        if not message.status:
            try:
                found = json.decode(message.data, type=_Published).error
            except DecodeError:  # a listener's own answer
                found = None
            refusal = "" if found is None else printable(str(found.get("description", found)), most=200)
        if refusal and refusal != self._refusal:
            subject = f"{self._connection.options.prefix}{ASSIGN}"
            logger().warning("assignments to %s find no receiver (%s); they are sent again", subject, refusal)
        self._refusal = refusal


class Puller:
    """
    Fetches for one subscriber, never more than it has room for. `offer` is given each message, in the loop.

    At most one request is at the server. While the subscriber's `Room` is closed there is none.
    """

    def __init__(
        self,
        stream: AssignmentStream,
        *,
        limit: int,
        room: Room | None = None,
        unread: Callable[[], int],
        offer: Callable[[Delivery, Taken], None],
    ) -> None:
        self._room = room
        if room is not None:
            room.changed = self._look
        self._stream = stream
        self._connection = stream.connection
        self._limit = limit
        self._unread = unread
        self._offer = offer
        self._inbox = f"{self._connection.options.inbox}.{new_id()}"
        self._subscription: Subscription | None = None
        self._request = 0
        self._left = 0
        """How many messages the request at the server is still for."""
        self._is_refused = False
        self._moved = asyncio.Event()
        self._waiting: dict[str, None] = {}
        """Messages that no reader has taken, by their subjects of acknowledgement."""

    async def run(self, failed: Callable[[Exception], None]) -> None:
        """Fetch until cancelled. `failed` is called if the subject is taken, which ends it."""
        is_failing = False
        try:
            while True:
                try:
                    await self._stream.ensure()
                    if self._subscription is None:
                        self._subscription = await self._connection.listen(f"{self._inbox}.*", self._hear)
                    await self._fetch()
                    is_failing = False
                except SubjectTakenError as error:
                    failed(error)
                    return
                except Exception as error:
                    if not is_failing:
                        logger().warning("assignments cannot be fetched; trying again (%s)", error_text(error))
                    is_failing = True
                    self._stream.doubt()
                    await asyncio.sleep(DENIED_S if isinstance(error, StorePermissionError) else AGAIN_S)
        finally:
            await self._give_back()

    async def _fetch(self) -> None:
        """Ask for as many as there is room for, and wait until they arrive or the request ends."""
        while self._wanted() < 1:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._room is None else LOOK_S):
                    await self._moved.wait()
        if self._wanted() < self._limit // 4:
            await asyncio.sleep(TOGETHER_S)
        room = self._wanted()
        if room < 1:
            return
        self._request += 1
        self._left = room
        request = {
            "batch": room,
            "expires": int(EXPIRES_S * NANOSECONDS),
            "idle_heartbeat": int(IDLE_EVERY_S * NANOSECONDS),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.name}.{CONSUMER}"
        await self._connection.publish(subject, json.encode(request), reply=f"{self._inbox}.{self._request}")
        while self._left > 0:
            self._moved.clear()
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._moved.wait()
            except TimeoutError:
                logger().info("a request for assignments was forgotten by the server; asking again")
                self._stream.doubt()
                return
            if self._is_closed:
                await self._withdraw()
                return
        if self._is_refused:  # the stream, its consumer or its leader is gone
            self._is_refused = False
            self._stream.doubt()
            await asyncio.sleep(AGAIN_S)

    def _wanted(self) -> int:
        """The number of messages to ask for now."""
        unread = self._unread()
        wanted = self._limit - unread
        if wanted < max(1, self._limit // 4):
            return 0
        return wanted if self._room is None else min(wanted, self._room.free() - unread)

    @property
    def _is_closed(self) -> bool:
        return self._room is not None and not self._room.is_open

    def _look(self) -> None:
        """Hear that the subscriber's room has changed."""
        if self._is_closed if self._left > 0 else self._wanted() > 0:
            self._moved.set()

    async def _withdraw(self) -> None:
        """Take the request at the server back: it ends when nothing listens to its answers."""
        subscription, self._subscription = self._subscription, None
        self._inbox, self._left = f"{self._connection.options.inbox}.{new_id()}", 0
        if subscription is None:
            return
        try:
            await stop_sending(self._connection.client, subscription)
            await self._connection.round_trip()  # what was sent before is here then
        finally:
            await self._connection.unsubscribe([subscription])

    def ask_again(self) -> None:
        """Make the request again: the connection was lost, and perhaps the request with it."""
        self._stream.doubt()
        self._left = 0
        self._moved.set()

    def _hear(self, message: Heard) -> None:
        """
        Take an assignment, which has its own subject, or the server's status of a request, which has the request's.
        """
        status = message.status
        if not status:
            self._waiting[message.reply] = None
            self._left -= 1
            headers = {name: value for name, value in message.headers.items() if not name.startswith("Nats-")}
            done = partial(self._connection.publish, message.reply, ACK)
            back = partial(self._put_back, message.reply)
            self._offer(Delivery(ASSIGN, bytes(message.data), headers, done, back), partial(self._taken, message.reply))
        elif status != IDLE and message.subject.endswith(f".{self._request}"):
            self._left = 0
            self._is_refused = status not in (NO_MESSAGES, EXPIRED)
        self._moved.set()

    async def _taken(self, reply: str) -> None:
        self._waiting.pop(reply, None)
        self._moved.set()

    async def _put_back(self, reply: str, seconds: float) -> None:
        await self._connection.publish(reply, NAK + b" " + json.encode({"delay": int(seconds * NANOSECONDS)}))

    async def keep(self) -> None:
        """Confirm to the server at intervals that unread messages are not lost."""
        while True:
            await asyncio.sleep(self._stream.ack_wait / 3)
            await self._answer(IN_PROGRESS)

    async def _give_back(self) -> None:
        """Return untaken messages: another worker gets them at once."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._connection.unsubscribe([subscription])
        await self._answer(NAK)
        self._waiting.clear()

    async def _answer(self, answer: bytes) -> None:
        try:
            for reply in list(self._waiting):
                await self._connection.publish(reply, answer)
        except StoreError as error:
            logger().info(
                "waiting assignments could not be confirmed (%s); they will be delivered again", error_text(error)
            )
