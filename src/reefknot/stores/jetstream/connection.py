"""
The connection to a NATS server or cluster: reconnects until it is closed, sends requests to JetStream, and translates
errors.

The first connection is tried for the patience of the store; then a lost one is tried again until the store is closed,
and a log line says so once. nats-py is used only here and in `wire`: its defaults would give up after 60 tries and
notice a frozen server only after minutes.

A request without an answer may have been carried out: `UnansweredError` says so, and the caller checks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, json

from reefknot.core.redaction import redact
from reefknot.errors import (
    ParameterError,
    StoreFullError,
    StorePermissionError,
    StoreReplacedError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.runtime.addresses import nats_address
from reefknot.runtime.files import is_special
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import within
from reefknot.stores.jetstream.requests import NobodyThereError, RefusedError, Requests, UnansweredError
from reefknot.stores.jetstream.wire import (
    BATCH_ID,
    BATCH_SEQUENCE,
    DENIED,
    FULL,
    NO_JETSTREAM,
    READS,
    Direct,
    Hear,
    Heard,
    Written,
    answer_in,
    as_heard,
    batch_lines,
    check_server,
    close_quietly,
    cluster_of,
    explained,
    has_jetstream,
    hear_directly,
    insist_on_tls,
    is_refusal,
    line_of,
    outlive_errors,
    revive,
    send,
    tls_of,
    too_large,
)

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.subscription import Subscription

PING_EVERY_S = 2
RECONNECT_EVERY_S = 0.2
REQUEST_S = 5.0
BUFFERED_BYTES = 16 << 20
DEFAULT_NAME = "reefknot"
JETSTREAM_OFF = "start the server with -js, or enable JetStream for this account"
NOT_JETSTREAM = "its answer is not one of JetStream's", "check that it is a NATS server"
NO_RESPONDERS = "503"
ADVISORY = "$JS.EVENT.ADVISORY."
"""The beginning of the subjects on which a server says what happens to its streams."""
UNTRUSTED = (
    "the connection is back, and it is not known yet whether the server has the same store",
    "it is being looked at; check the server",
)
FENCED, RESULT_DEDUP = "fenced", "result-dedup"


class NatsOptions(Struct, frozen=True):
    """The address of a store on NATS, and how to log in. Secrets are values here; the configuration has references."""

    servers: tuple[str, ...]
    name: str = DEFAULT_NAME
    guarantee: str = FENCED
    replicas: int | None = None
    """Servers that hold each record; None: three in a cluster of three or more servers, else one."""
    roles: tuple[str, ...] = ()
    """The roles of this user, as `roles` knows them; without one it may need every permission."""
    token: str | None = None
    user: str | None = None
    password: str | None = None
    credentials: str | None = None
    """A file of credentials, as `nsc` writes them."""
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    patience: float = 5.0
    max_shared_assignments: int = 10_000
    max_bytes: int | None = None
    """Limit in bytes for the stream of the store, if it is created now; None: the account's limit."""
    creates: bool = True
    """Whether missing streams are created; a command that only reads a store creates none."""
    read_only: bool = False
    """Whether the store is read only: requests that would change it are refused here."""
    subject_prefix: str | None = None
    """The prefix of the documented subjects; None: empty for a store with the default name, else its name."""

    @property
    def prefix(self) -> str:
        """The text before the documented subjects: stores of several names on one server do not hear each other."""
        own = "" if self.name == DEFAULT_NAME else f"{self.name}."
        return own if self.subject_prefix is None else self.subject_prefix

    @property
    def inbox(self) -> str:
        """The beginning of the subjects on which answers arrive here: other roles cannot hear them."""
        return f"_INBOX.{self.name}.{'-'.join(sorted(self.roles)) or 'any'}"

    @property
    def shown(self) -> str:
        """The address for messages: without user, password or token."""
        places = [urlsplit(server) for server in self.servers]
        hosts = ",".join(place.netloc.rpartition("@")[2] for place in places)
        return f"{places[0].scheme}://{hosts}" + ("" if self.name == DEFAULT_NAME else f"/{self.name}")


def options_from_url(url: str, **more: Any) -> NatsOptions:
    """The options of `nats://a:4222,b:4222/NAME`; `more` are those that are not part of an address."""
    try:
        servers, name = nats_address(url)
    except ValueError as error:
        raise ParameterError("url", redact(url), str(error)) from error
    return NatsOptions(servers, name=name or DEFAULT_NAME, **more)


Denial = Callable[[NatsOptions, str], StorePermissionError]
"""The error for what the server says when this user may not use a subject."""


def plain_denial(options: NatsOptions, text: str) -> StorePermissionError:
    """The error of a denied subject, without the roles that need it."""
    way_out = f"`reefknot dev permissions --engine {options.shown}` prints what each role needs"
    return StorePermissionError(options.shown, f"the server refuses this user ({text})", way_out)


class Connection:
    """A connection that all parts of a store share."""

    def __init__(self, options: NatsOptions, denial: Denial = plain_denial) -> None:
        self.options = options
        self._denial = denial
        self._client: Client | None = None
        self._closing = False
        self._last_error: Exception | None = None
        self._reconnected: list[Callable[[], None]] = []
        self._up_since = 0.0
        self._requests = Requests(options.inbox)
        self.expecting = self._requests.expecting
        self._answers: Subscription | None = None
        self._denied: set[str] = set()
        self._services = Services("connection to NATS")
        self.is_watched = False
        """Whether a watch says after every reconnection that the server still has the same store."""
        self._is_trusted = True
        self._replaced: Callable[[], StoreReplacedError] | None = None
        self.highest = 0
        """The highest sequence in the stream of the store that this process knows of."""

    async def open(self) -> None:
        """Connect. An error says which server was tried, and what is wrong with it."""
        try:
            from nats.aio.client import Client
        except ImportError as error:
            raise self._unavailable("nats-py is not installed", "pip install '.[nats]' in a checkout") from error
        client = Client()
        hear_directly(client)
        outlive_errors(client)
        settings = self._settings()
        if settings["tls"] is not None:
            insist_on_tls(client)
        try:
            await within(client.connect(servers=list(self.options.servers), **settings), self.options.patience)
        except TimeoutError:
            await close_quietly(client)
            raise self._explained(self._last_error) from self._last_error
        except Exception as error:
            await close_quietly(client)
            raise self._explained(self._last_error if is_refusal(self._last_error) else error) from error
        self._last_error = None
        self._client = client
        self._up_since = asyncio.get_running_loop().time()
        try:
            check_server(client, self.options.shown)
        except StoreVersionError:
            await self.close()
            raise
        self._services.keep("watch", self._watch)

    async def _watch(self) -> None:
        """Check periodically that the tasks of the client still run, until cancelled."""
        while True:
            await asyncio.sleep(PING_EVERY_S)
            if self._client is not None and await revive(self._client):
                logger().error(
                    "the connection to %s was cancelled from outside; its tasks are restarted", self.options.shown
                )

    def _settings(self) -> dict[str, Any]:
        options = self.options
        for name in ("credentials", "tls_ca", "tls_certificate", "tls_key"):
            if is_special(getattr(options, name)):
                raise self._unavailable(f"the file of nats.{name} is not a regular file", f"check nats.{name}")
        if options.credentials is not None:
            try:
                Path(options.credentials).read_bytes()
            except OSError as error:
                problem = f"its file of credentials cannot be read ({error_text(error)})"
                raise self._unavailable(problem, "check nats.credentials") from error
        return {
            "name": f"reefknot {options.name}",
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_EVERY_S,
            "connect_timeout": 2,
            "ping_interval": PING_EVERY_S,
            "max_outstanding_pings": 2,
            "pending_size": BUFFERED_BYTES,
            "token": options.token,
            "user": options.user,
            "password": options.password,
            "user_credentials": options.credentials,
            "tls": tls_of(options),
            "error_cb": self._failed,
            "disconnected_cb": self._lost,
            "reconnected_cb": self._back,
        }

    async def _failed(self, error: Exception) -> None:
        if self._client is not None and DENIED in (text := error_text(error).lower()):
            self._deny(text)
        elif not is_refusal(self._last_error):  # the error of the closed connection that follows is less specific
            self._last_error = error
            if self._client is not None and is_refusal(error):
                logger().warning("%s refuses this user (%s); trying again", self.options.shown, error_text(error))

    def _deny(self, text: str) -> None:
        """End the requests that this user may not make: the server does not answer them."""
        if ADVISORY.lower() in text:  # a hint alone, which nothing depends on
            return
        error = self._denial(self.options, printable(text[text.index(DENIED) :], most=300))
        is_deaf = f'"{self.options.inbox.lower()}.' in text  # no answer can arrive
        denied = self._requests.fail(lambda: error, lambda subject: is_deaf or f'"{subject.lower()}"' in text)
        if not denied and error.problem not in self._denied and len(self._denied) < MOST_DENIED:
            self._denied.add(error.problem)
            logger().error("%s: %s; %s", self.options.shown, error.problem, error.way_out)

    async def _lost(self) -> None:
        self._is_trusted = not self.is_watched
        self._requests.fail(lambda: self._unanswered("the connection was lost before a request was answered"))
        if not self._closing and self._client is not None:
            why = error_text(self._last_error or ConnectionError("no reason given"))
            logger().warning("the connection to %s is lost (%s); trying again", self.options.shown, why)

    async def _back(self) -> None:
        self._last_error = None
        self._up_since = asyncio.get_running_loop().time()
        logger().warning("connected to %s again", self.options.shown)
        for call in list(self._reconnected):
            call()

    def on_reconnect(self, call: Callable[[], None]) -> Callable[[], None]:
        """
        Register a function to call in the loop whenever a lost connection is back; returns a function that removes it.
        """
        self._reconnected.append(call)
        return lambda: self._reconnected.remove(call)

    def trust(self, is_same: bool) -> None:
        """Allow changes, or refuse them until it is known that the server still has the store of this process."""
        self._is_trusted = is_same

    def end_with(self, error: Callable[[], StoreReplacedError]) -> None:
        """Refuse every request from now on: the store of this process is gone. Those on their way end, too."""
        self._replaced = error
        self._requests.fail(error)

    @property
    def failure(self) -> StoreReplacedError | None:
        return None if self._replaced is None else self._replaced()

    @property
    def client(self) -> Client:
        if self._replaced is not None and not self._closing:
            raise self._replaced()
        if self._client is None or self._closing:
            raise self._unavailable("it is closed", "open a new one")
        return self._client

    @property
    def is_closed(self) -> bool:
        """Whether it is of no use any more: it was closed, or its store is gone."""
        return self._closing or self._replaced is not None

    @property
    def is_up(self) -> bool:
        return self._replaced is None and self._client is not None and self._client.is_connected

    @property
    def up_for(self) -> float:
        """Seconds since the connection was last lost; 0 while it is lost."""
        return asyncio.get_running_loop().time() - self._up_since if self.is_up else 0.0

    @property
    def max_payload(self) -> int:
        return self.client.max_payload

    @property
    def cluster(self) -> str | None:
        """The name of the cluster that the connected server belongs to."""
        return cluster_of(self.client)

    @property
    def has_jetstream(self) -> bool:
        """Whether the connected server says that it has JetStream, and others with it."""
        return has_jetstream(self.client) and self.cluster is not None

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send without waiting for an answer; an error when there is no connection."""
        client = self._check_up()
        if len(body) > client.max_payload:
            raise too_large(self.options.shown, client.max_payload)
        try:
            await send(client, line_of(subject, body, headers, reply))
        except Exception as error:
            raise self._explained(error) from error

    async def publish_each(self, subjects: Iterable[str]) -> None:
        """Send a message without content to each of these subjects, in one write."""
        client = self._check_up()
        try:
            await send(client, b"".join([line_of(subject, b"") for subject in subjects]))
        except Exception as error:
            raise self._explained(error) from error

    async def request(
        self,
        subject: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = REQUEST_S,
        ahead: Sequence[Written] = (),
    ) -> Heard:
        """Send and wait for the answer. `ahead` are the messages of a batch before this one, the last of it."""
        client = self._check_up(subject)
        if len(body) > client.max_payload:
            raise too_large(self.options.shown, client.max_payload)
        if self._answers is None:
            self._answers = await self.listen(self._requests.answers, self._requests.hear)
        reply, outcome = self._requests.add((subject, *(one for one, _, _ in ahead)), timeout)
        try:
            if ahead:
                await send(client, batch_lines(ahead, (headers or {})[BATCH_ID]), flush=False)
            await send(client, line_of(subject, body, headers, reply))
            answer = await outcome
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self._requests.remove(reply)
        if isinstance(answer, TimeoutError):
            raise self._unanswered(f"a request was not answered within {timeout:g} s")
        if isinstance(answer, Exception):
            raise answer
        if answer.status == NO_RESPONDERS:
            raise NobodyThereError(self.options.shown, "JetStream does not answer there", JETSTREAM_OFF)
        return answer

    async def store(self, messages: Sequence[Written]) -> int:
        """
        Store messages (subject, body, headers) as one batch, all or none; returns the sequence of the last one.

        For a stream without replicas the server syncs a batch to its disk before it counts as stored, which takes 2 ms
        or more. A single message needs no batch.
        """
        *others, (subject, body, headers) = messages
        if not others:
            return await self._store_one(messages[-1])
        batch_id = new_id()
        last = {**headers, BATCH_ID: batch_id, BATCH_SEQUENCE: str(len(messages)), "Nats-Batch-Commit": "1"}
        return await self._store_one((subject, body, last), self._checked(others))

    def _checked(self, messages: Sequence[Written]) -> Sequence[Written]:
        if max((len(body) for _, body, _ in messages), default=0) > self.max_payload:
            raise too_large(self.options.shown, self.max_payload)
        return messages

    async def _store_one(self, message: Written, ahead: Sequence[Written] = ()) -> int:
        subject, body, headers = message
        sequence = self.check((await self.request(subject, body, headers=headers, ahead=ahead)).data)
        if not sequence:  # of another service that listens on this subject
            raise self._unavailable(*NOT_JETSTREAM)
        self.highest = max(self.highest, sequence)
        return sequence

    async def api(self, name: str, body: Any = None, *, timeout: float = REQUEST_S) -> bytes:
        """Call JetStream's API: `STREAM.INFO.x`. A refusal is a `RefusedError`."""
        answer = await self.request(f"$JS.API.{name}", b"" if body is None else json.encode(body), timeout=timeout)
        self.check(answer.data)
        return answer.data

    def check(self, answer: bytes) -> int:
        """Raise the error in an answer of JetStream, if any; returns the sequence of the message that it stored."""
        try:
            found = answer_in(answer)
        except msgspec.DecodeError as problem:
            raise self._unavailable(*NOT_JETSTREAM) from problem
        error = found.error
        if error is None:
            return found.seq
        if error.err_code in FULL:
            raise StoreFullError(self.options.shown, printable(error.description, most=200), FULL[error.err_code])
        if error.err_code in NO_JETSTREAM:
            raise StoreVersionError(self.options.shown, "JetStream is not enabled there", JETSTREAM_OFF)
        raise RefusedError(self.options.shown, error.err_code, printable(error.description, most=300))

    async def listen(self, subject: str, heard: Hear) -> Subscription:
        """
        Subscribe to a subject; `heard` is called while the connection is read, in one order for all subjects of this
        server.

        nats-py has a queue and a task for each subscription, and so an order for each. `heard` takes the queue's place.
        """
        client = self.client
        try:
            subscription = await client.subscribe(subject, pending_bytes_limit=0)
        except Exception as error:
            raise self._explained(error) from error
        early, subscription._pending_queue = subscription._pending_queue, (direct := Direct(heard))
        while not early.empty():
            await direct.hear(as_heard(early.get_nowait()))
        return subscription

    async def unsubscribe(self, subscriptions: Iterable[Subscription]) -> None:
        """End subscriptions. Without a connection they have ended already."""
        for one in subscriptions:
            with contextlib.suppress(Exception):
                await one.unsubscribe()

    async def round_trip(self) -> None:
        """
        Return when the server has read everything that was sent before.

        This uses a request: nats-py's ping overtakes unwritten data, and after a ping that timed out and was answered
        later its connection receives nothing more.
        """
        await self.request("$JS.API.INFO")

    async def wait_until_up(self, timeout: float) -> bool:
        """Wait for a lost connection to be back, at most `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not self.is_up and not self.is_closed and loop.time() < deadline:  # noqa: ASYNC110 - nats-py has no event
            await asyncio.sleep(RECONNECT_EVERY_S / 4)
        return self.is_up

    async def close(self) -> None:
        """Close. A second call does nothing."""
        client, self._closing = self._client, True
        self._requests.fail(lambda: self._unanswered("the connection was closed before a request was answered"))
        await self._services.stop()
        if client is not None and not client.is_closed:
            await close_quietly(client)

    def _check_up(self, asks: str = READS[0]) -> Client:
        """The client; raises without a connection, and when a store that is open for reading only would be changed."""
        client = self.client
        if not client.is_connected:
            raise self._unavailable("the connection is lost", "it is being tried again; check the server")
        if self.options.read_only and not asks.startswith(READS):
            way_out = "the role reader writes nothing" if self.options.roles else "open it without read_only"
            raise StorePermissionError(self.options.shown, "it is open for reading only", way_out)
        if not self._is_trusted and not asks.startswith((*READS, f"{self.options.name}.trim.restored")):
            raise self._unavailable(*UNTRUSTED)
        return client

    def _unanswered(self, problem: str) -> UnansweredError:
        return UnansweredError(self.options.shown, problem, "it is tried again when the server answers")

    def _unavailable(self, problem: str, way_out: str) -> StoreUnavailableError:
        return StoreUnavailableError(self.options.shown, problem, way_out)

    def _explained(self, error: BaseException | None) -> Exception:
        return explained(error, self.options.shown, max_payload=0 if self._client is None else self.max_payload)


MOST_DENIED = 20
"""Most refused subjects that are logged, each once."""
