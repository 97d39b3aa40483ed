"""
Messages on a NATS connection: arriving ones are handled in one call, and batches are written in one call.

nats-py reads the headers of every message, and has a queue and a task for each subscription; it builds the bytes of
every message that is sent in a coroutine of its own. A store receives and sends several messages for each assignment,
so this was a third of a worker's time. Here a message gets from the connection to its handler in one call.

Three more behaviours of nats-py are changed here: what it does when the server names an error, that TLS is the server's
choice, and that its tasks, once cancelled, do not restart.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, json

from reefknot.errors import StoreFullError, StorePermissionError, StoreUnavailableError, StoreVersionError
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.timeouts import ended

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

BATCH_ID, BATCH_SEQUENCE = "Nats-Batch-Id", "Nats-Batch-Sequence"
_MORE_SPACE = "give it more space, or remove what is no longer needed"
FULL = dict.fromkeys((10047, 10077, 10054, 10028, 10023), _MORE_SPACE) | {
    10002: "raise the storage limit of this account, or remove what is no longer needed"
}
"""Numbers of JetStream's refusals because server, account or stream are full, and what to do."""
LIMITS = {
    10026: "raise max_consumers of this account, or end processes that use it",
    10027: "raise max_streams of this account",
    10176: "a message of the batch was refused: check the limits of the account and of the server (reefknot doctor)",
}
"""What to do about other limits that are reached, by the number of the refusal."""
_API = ("INFO", "STREAM.INFO.", "STREAM.NAMES", "STREAM.MSG.GET.", "CONSUMER.")
READS = (*(f"$JS.API.{one}" for one in _API), "$SYS.REQ.USER.INFO")
"""The beginnings of requests that change nothing in a store."""
NO_LEADER, NOT_FOUND = 10008, 10059
"""A cluster has no leader; there is no such stream."""
PASSING = frozenset({10004, 10005, NO_LEADER, 10009, 10118, 10119})
"""Refusals of a cluster that elects a leader, or has just begun: the same request is answered a little later."""
WRONG_LAST = frozenset({10071, 10164})
"""A compare-and-set that lost."""
NO_JETSTREAM = frozenset({10039, 10076, 10035})
NO_TLS = "the server does not ask for TLS"
DENIED = "permissions violation"
OLDEST_SERVER = (2, 12, 0)
"""The first version with atomic batches and time limits of single messages."""
LEAST_PAYLOAD = 640 << 10
"""Bytes of a message that the server must take: parts of large payloads and results have 512 KiB."""
_VERSION = "NATS/1.0"
_STATUS = len(_VERSION)
Written = tuple[str, bytes, dict[str, str]]
"""A message to write: its subject, body and headers, to which those of its batch are added."""


class Heard:
    """A message that has arrived. Its headers are parsed on first use."""

    __slots__ = ("_read", "data", "raw_headers", "reply", "subject")

    def __init__(self, subject: str, reply: str, data: bytes, raw_headers: bytes) -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self.raw_headers = raw_headers
        self._read: dict[str, str] | None = None

    @property
    def status(self) -> str:
        """The server's code, such as 100 for a heartbeat; empty in a client's message."""
        raw = self.raw_headers
        return raw[_STATUS + 1 : _STATUS + 4].decode() if raw[_STATUS : _STATUS + 1] == b" " else ""

    @property
    def headers(self) -> dict[str, str]:
        if self._read is None:
            self._read = read_headers(self.raw_headers)
        return self._read


Hear = Callable[[Heard], Awaitable[None] | None]


def read_headers(raw: bytes) -> dict[str, str]:
    """The headers of a message by name, without the server's status."""
    if not raw:
        return {}
    lines = raw.decode("utf-8", "replace").split("\r\n")[1:]
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def as_heard(message: Msg) -> Heard:
    """A message that nats-py has read."""
    given = dict(message.headers or {})
    status = given.pop("Status", "")
    return Heard(message.subject, message.reply, message.data, _head(given, f" {status}" if status else ""))


def _head(headers: Mapping[str, str], more: str = "") -> bytes:
    named = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if named.count("\n") != len(headers) or named.count("\r") != len(headers):
        raise ValueError("a header contains a line break")
    return f"{_VERSION}{more}\r\n{named}\r\n".encode()


async def send(client: Client, lines: bytes, *, flush: bool = True) -> None:
    """Write ready lines to the connection; with `flush` wake its flusher, unless it is awake."""
    await client._send_command(lines)
    if flush and client._flush_queue is not None and client._flush_queue.empty():
        await client._flush_pending()


def cluster_of(client: Client) -> str | None:
    """The name of the cluster that the connected server belongs to."""
    return client._server_info.get("cluster")


def has_jetstream(client: Client) -> bool:
    """Whether the connected server has JetStream."""
    return bool(client._server_info.get("jetstream"))


class Direct(asyncio.Queue["Msg"]):
    """A handler in place of a subscription's queue; keeps no messages."""

    def __init__(self, heard: Hear) -> None:
        super().__init__()
        self._heard = heard

    async def hear(self, message: Heard) -> None:
        try:
            answer = self._heard(message)
            if answer is not None:
                await answer
        except Exception as error:  # it would end the connection
            subject = printable(message.subject, most=100)
            logger().error("a message to %s failed in its handler and is dropped (%s)", subject, error_text(error))


async def stop_sending(client: Client, subscription: Subscription) -> None:
    """Make the server send nothing more to a subscription, which hears what is on its way."""
    await client._send_unsubscribe(subscription._id)


def hear_directly(client: Client) -> None:
    """Make a client pass messages for a `Direct` to its handler, and treat all others as nats-py does."""
    as_usual = client._process_msg

    async def take(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = client._subs.get(sid)
        if subscription is not None and isinstance(subscription._pending_queue, Direct):
            heard = Heard(subject.decode(), reply.decode(), data, headers or b"")
            await subscription._pending_queue.hear(heard)
        else:
            await as_usual(sid, subject, reply, data, headers)

    client._process_msg = take  # type: ignore[method-assign]


def outlive_errors(client: Client) -> None:
    """
    Let the client reconnect after an error that the server names, such as expired credentials.

    nats-py itself would close the connection for good.
    """
    from nats import errors

    process = client._process_err

    async def process_err(err_msg: str) -> None:
        if DENIED in err_msg.lower():
            await process(err_msg)
            return
        error = errors.Error(f"nats: {err_msg}")
        await client._error_cb(error)
        await client._process_op_err(error)

    client._process_err = process_err  # type: ignore[method-assign]


async def revive(client: Client) -> bool:
    """
    Restart tasks of a client that were cancelled from outside; True if there were any.

    nats-py assumes that it ended its tasks itself: the connection would look alive and receive nothing more.
    """
    deaf = [one for one in client._subs.values() if (task := one._wait_for_msgs_task) is not None and task.done()]
    for subscription in deaf:
        subscription._start(client._error_cb)  # type: ignore[no-untyped-call] # nats-py has no types there
    own = (client._reading_task, client._ping_interval_task, client._flusher_task)
    if client.is_connected and any(task is not None and task.done() for task in own):
        await client._process_op_err(ConnectionError("its tasks were cancelled from outside"))
        return True
    reconnecting = client._reconnection_task
    if client.is_reconnecting and reconnecting is not None and reconnecting.done():
        client._reconnection_task = asyncio.get_running_loop().create_task(client._attempt_reconnect())
        return True
    return bool(deaf)


async def close_quietly(client: Client) -> None:
    """
    Close a client, and also the connection of a reconnect that missed its cancellation: nats-py cancels only once.
    """
    try:
        async with asyncio.timeout(2.0):
            await client.close()
    except Exception as error:
        logger().info("a connection was not closed in order (%s)", error_text(error))
    if client._reconnection_task is not None:
        await ended(client._reconnection_task)
    if client._transport is not None:
        client._transport.close()  # type: ignore[no-untyped-call] # nats-py has no types there


def is_refusal(error: BaseException | None) -> bool:
    """Whether the server refuses this user, in the words of nats-py."""
    text = "" if error is None else error_text(error).lower()
    return any(word in text for word in ("authorization", "permissions", "expired"))


def too_large(store: str, max_payload: int) -> StoreFullError:
    limit = f"a message is larger than the {max_payload} bytes that the server takes"
    return StoreFullError(store, limit, "raise max_payload of the server, or send less")


def explained(error: BaseException | None, store: str, *, max_payload: int) -> Exception:
    """The error of a connection, translated, with what to do."""
    from nats import errors

    if isinstance(error, StoreUnavailableError | StoreFullError | StoreVersionError):
        return error
    text = error_text(error) if error is not None else "no answer"
    if is_refusal(error):
        way_out = "check the user, token or credentials file (section nats of the configuration)"
        return StorePermissionError(store, f"the server refuses this user ({text})", way_out)
    if isinstance(error, errors.MaxPayloadError):
        return too_large(store, max_payload)
    if isinstance(error, ssl.SSLError):
        way_out = "check nats.tls_ca, and that the address has the name in the server's certificate"
        return StoreUnavailableError(store, f"no connection with TLS can be made ({text})", way_out)
    if NO_TLS in text:
        way_out = "switch on tls in the server's configuration, or use nats://… without nats.tls_…"
        return StoreVersionError(store, "its server does not ask for TLS, and this side does", way_out)
    if isinstance(error, ImportError):
        way_out = "pip install '.[nats]' in a checkout"
        return StoreUnavailableError(store, f"a file of credentials needs more ({text})", way_out)
    way_out = "check that a NATS server runs there"
    return StoreUnavailableError(store, f"the server cannot be reached ({text})", way_out)


def insist_on_tls(client: Client) -> None:
    """Send nothing to a server that does not ask for TLS: nats-py would send it the password as plain text."""
    from nats import errors

    command = client._connect_command

    def secure_command() -> bytes:
        if not client._server_info.get("tls_required"):
            raise errors.Error(NO_TLS)
        return command()

    client._connect_command = secure_command  # type: ignore[method-assign]
    logging.getLogger("asyncio").addFilter(_is_not_about_eof)  # once, however many connections there are


def _is_not_about_eof(record: logging.LogRecord) -> bool:
    """Whether a warning of asyncio is not the one that it logs at the end of every TLS connection of nats-py."""
    return "eof_received() has no effect when using ssl" not in record.msg


def check_server(client: Client, store: str) -> None:
    """Refuse a server that is too old, or takes small messages only."""
    version = client.connected_server_version
    found = (version.major, version.minor, version.patch)
    if found < OLDEST_SERVER:
        oldest, shown = (".".join(map(str, one)) for one in (OLDEST_SERVER, found))
        problem = f"its server has version {shown}, and {oldest} or later is needed"
        raise StoreVersionError(store, problem, "update the NATS server")
    if client.max_payload < LEAST_PAYLOAD:
        problem = f"its server takes messages of {client.max_payload} bytes, and {LEAST_PAYLOAD} are needed"
        raise StoreVersionError(store, problem, "raise max_payload of the server; its default of 1 MB is enough")


class TlsFiles(Protocol):
    """Files by which a client and a server know each other."""

    @property
    def servers(self) -> Sequence[str]: ...
    @property
    def shown(self) -> str: ...
    @property
    def tls_ca(self) -> str | None: ...
    @property
    def tls_certificate(self) -> str | None: ...
    @property
    def tls_key(self) -> str | None: ...


def tls_of(options: TlsFiles) -> ssl.SSLContext | None:
    """The TLS of a client; None where it is the server's choice."""
    if not (options.tls_ca or options.tls_certificate or options.servers[0].startswith("tls:")):
        return None
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_certificate:
            context.load_cert_chain(options.tls_certificate, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        problem = f"its TLS files cannot be used ({error_text(error)})"
        way_out = "check nats.tls_ca, nats.tls_certificate and nats.tls_key"
        raise StoreUnavailableError(options.shown, problem, way_out) from error
    return context


def line_of(subject: str, body: bytes, headers: Mapping[str, str] | None = None, reply: str = "") -> bytes:
    """The bytes that send one message. A `ValueError` refuses text that the server would read as something else."""
    if " " in subject or not f"{subject}{reply}".isprintable():
        raise ValueError("a subject contains a blank")
    if not headers:
        return b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(body), body)
    head = _head(headers)
    sizes = len(head), len(head) + len(body)
    return b"HPUB %s %s %d %d\r\n%s%s\r\n" % (subject.encode(), reply.encode(), *sizes, head, body)


def batch_lines(messages: Sequence[Written], batch_id: str) -> bytes:
    """The bytes that send the first messages of an atomic batch, which the server answers only at its end."""
    lines = list[bytes]()
    for number, (subject, body, headers) in enumerate(messages, 1):
        headers[BATCH_ID], headers[BATCH_SEQUENCE] = batch_id, str(number)
        lines.append(line_of(subject, body, headers))
    return b"".join(lines)


class ApiRefusal(Struct):
    """The error in an answer of JetStream."""

    err_code: int = 0
    description: str = ""


class JetStreamAnswer(Struct):
    """An answer of JetStream: an error, or the sequence of a stored message."""

    error: ApiRefusal | None = None
    seq: int = 0


_answers = json.Decoder(JetStreamAnswer)
answer_in = _answers.decode
"""Reads an answer of JetStream; a `msgspec.DecodeError` for other text."""
