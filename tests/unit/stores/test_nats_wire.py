"""A connection to NATS: messages as bytes, a request that is cancelled, and back-pressure between ends."""

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import json
from nats.aio.client import Client
from nats.protocol.command import hpub_cmd, pub_cmd

from reefknot.errors import StoreFullError, StorePermissionError
from reefknot.stores.jetstream.connection import Connection, NatsOptions, options_from_url
from reefknot.stores.jetstream.listeners import Announcement, Line, Listeners
from reefknot.stores.jetstream.requests import NobodyThereError, UnansweredError
from reefknot.stores.jetstream.wire import Direct, Heard, batch_lines, hear_directly, line_of, read_headers
from tests.rows import for_each_row


def test_a_message_has_the_bytes_that_nats_py_would_send() -> None:
    head = b"NATS/1.0\r\nNats-TTL: 5s\r\n\r\n"
    assert line_of("a.b", b"body") == pub_cmd("a.b", "", b"body")
    assert line_of("a.b", b"", reply="inbox.1") == pub_cmd("a.b", "inbox.1", b"")
    assert line_of("a.b", b"body", {"Nats-TTL": "5s"}, "inbox.1") == hpub_cmd("a.b", "inbox.1", head, b"body")


@for_each_row(
    ("subject", "reply", "headers"),
    [
        ("a b", "", {}),
        ("a\r\nPUB b 0\r\n", "", {}),
        ("a", "b\r\n", {}),
        ("a", "", {"Own": "1\r\nNats-Batch-Commit: 1"}),
        ("a", "", {"Own\n": "1"}),
    ],
)
def test_a_text_that_reads_as_a_second_command_is_refused(subject: str, reply: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"blank|line break"):
        line_of(subject, b"", headers, reply)


def test_the_messages_of_a_batch_are_numbered_from_one() -> None:
    numbers = [{"Nats-Batch-Id": "batch", "Nats-Batch-Sequence": number} for number in ("1", "2")]
    lines = line_of("a", b"x", {"Own": "1", **numbers[0]}) + line_of("b", b"", numbers[1])
    assert batch_lines([("a", b"x", {"Own": "1"}), ("b", b"", {})], "batch") == lines
    assert batch_lines([], "batch") == b""


def test_headers_and_the_servers_status_are_read_from_the_bytes() -> None:
    plain = Heard("a", "", b"", b"NATS/1.0\r\nOne: 1\r\nTwo:  a: b \r\n\r\n")
    idle = Heard("a", "", b"", b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n")
    assert (plain.status, plain.headers) == ("", {"One": "1", "Two": "a: b"})
    assert (idle.status, idle.headers) == ("100", {"Nats-Last-Consumer": "7"})
    assert (Heard("a", "", b"", b"").status, read_headers(b"")) == ("", {})


async def test_what_is_listened_for_is_heard_at_once_and_all_else_goes_nats_pys_way() -> None:
    client: Any = Client()
    heard: list[Heard] = []
    usual: list[int] = []

    async def as_usual(sid: int, *_: bytes) -> None:
        usual.append(sid)

    client._process_msg = as_usual
    hear_directly(client)
    queues = {1: Direct(heard.append), 2: asyncio.Queue[Any]()}
    client._subs = {sid: SimpleNamespace(_pending_queue=queue) for sid, queue in queues.items()}
    for sid in (1, 2, 3):
        await client._process_msg(sid, b"subject", b"reply", b"data", None)
    assert [(one.subject, one.reply, one.data, one.headers) for one in heard] == [("subject", "reply", b"data", {})]
    assert usual == [2, 3]


async def test_a_hearer_that_fails_does_not_end_the_connection() -> None:
    def fails(_: Heard) -> None:
        raise ValueError("not mine")

    await Direct(fails).hear(Heard("a", "", b"", b""))


class SilentClient:
    """A client whose server answers when a test says so."""

    is_connected = True
    max_payload = 1 << 20
    _flush_queue = None

    def __init__(self) -> None:
        self.subscription = SimpleNamespace(_pending_queue=asyncio.Queue[Any]())
        self.sent: list[bytes] = []

    async def subscribe(self, subject: str, **limits: int) -> Any:
        return self.subscription

    async def _send_command(self, lines: bytes) -> None:
        self.sent.append(lines)

    async def answer(self, number: int, body: bytes = b"{}", head: bytes = b"") -> None:
        """Answer the request that was sent with this number, from 0."""
        reply = self.sent[number].split()[2].decode()
        await self.subscription._pending_queue.hear(Heard(reply, "", body, head))


@pytest.fixture
def silent() -> SilentClient:
    return SilentClient()


@pytest.fixture
def connection(silent: SilentClient) -> Connection:
    made = Connection(options_from_url("nats://127.0.0.1:4222"))
    made._client = cast("Client", silent)
    return made


async def asked(connection: Connection, *subjects: str, timeout: float = 5.0) -> list[asyncio.Task[Heard]]:
    """Requests that were sent and are not answered."""
    asking = [asyncio.create_task(connection.request(subject, timeout=timeout)) for subject in subjects]
    await asyncio.sleep(0)
    return asking


async def test_requests_are_all_sent_at_once_and_each_gets_its_own_answer(
    connection: Connection, silent: SilentClient
) -> None:
    asking = await asked(connection, "a", "b", "c")
    for number, body in ((2, b"third"), (0, b"first"), (1, b"second")):
        await silent.answer(number, body)
    assert [one.data for one in await asyncio.gather(*asking)] == [b"first", b"second", b"third"]


async def test_a_request_without_an_answer_ends_at_its_own_time(connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    (late,), (soon,) = await asked(connection, "a", timeout=5.0), await asked(connection, "b", timeout=0.5)
    with pytest.raises(UnansweredError, match=r"within 0\.5 s"):
        await soon
    assert loop.time() - began == pytest.approx(0.5)
    with pytest.raises(UnansweredError, match="within 5 s"):
        await late
    assert loop.time() - began == pytest.approx(5.0)
    again, _ = await asked(connection, "a", "b", timeout=1.0)
    with pytest.raises(UnansweredError):
        await again
    assert loop.time() - began == pytest.approx(6.0)


async def test_a_lost_or_closed_connection_ends_every_request(connection: Connection) -> None:
    lost = await asked(connection, "a", "b")
    await connection._lost()
    for one in lost:
        with pytest.raises(UnansweredError, match="connection was lost"):
            await one
    (closed,) = await asked(connection, "c")
    connection._client = None
    await connection.close()
    with pytest.raises(UnansweredError, match="connection was closed"):
        await closed


async def test_a_denied_subject_ends_its_own_requests_and_a_denied_inbox_all(connection: Connection) -> None:
    denied, other = await asked(connection, "A.b", "c")
    connection._deny('permissions violation for publish to "a.b"')
    with pytest.raises(StorePermissionError, match=r"a\.b"):
        await denied
    assert not other.done()
    connection._deny('permissions violation for subscription to "_inbox.other.any.x.*"')
    assert not other.done(), "it is not heard in this inbox"
    connection._deny(f'permissions violation for subscription to "{connection.options.inbox.lower()}.x.*"')
    with pytest.raises(StorePermissionError, match=r"_inbox\.reefknot\.any"):
        await other


async def test_a_request_that_no_stream_answers_says_so(connection: Connection, silent: SilentClient) -> None:
    (asking,) = await asked(connection, "a")
    await silent.answer(0, b"", b"NATS/1.0 503\r\n\r\n")
    with pytest.raises(NobodyThereError):
        await asking


async def test_a_request_larger_than_the_server_takes_is_not_sent(connection: Connection, silent: SilentClient) -> None:
    with pytest.raises(StoreFullError, match="larger than the 1048576 bytes"):
        await connection.request("a", bytes((1 << 20) + 1))
    assert silent.sent == []


async def test_a_request_that_is_cancelled_while_its_answer_arrives_is_cancelled(
    connection: Connection, silent: SilentClient
) -> None:
    """Else a task that is told to end goes on, and whoever waits for its end waits for ever."""
    (asking,) = await asked(connection, "a")
    await silent.answer(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    await silent.answer(0)  # once more, and too late


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for keeps cancellations since Python 3.12")
async def test_control_a_wait_as_nats_py_makes_it_loses_the_cancellation() -> None:
    answer = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(asyncio.wait_for(answer, 30))
    await asyncio.sleep(0)
    answer.set_result(None)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not asking.cancelled()


SUBJECT = "reefknot.listeners"


class FakeConnection:
    """Delivers at once what is published to a handler that is here."""

    options = NatsOptions(("nats://nowhere",))

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Any], None]] = {}
        self.sent: list[tuple[str, bytes]] = []

    async def listen(self, subject: str, handler: Callable[[Any], None]) -> None:
        self.handlers[subject] = handler

    async def publish(self, subject: str, body: bytes) -> None:
        self.sent.append((subject, body))
        if subject in self.handlers:
            self.handlers[subject](SimpleNamespace(data=body))


async def opened() -> tuple[FakeConnection, Listeners]:
    connection = FakeConnection()
    listeners = Listeners(cast(Connection, connection), "me", list, asyncio.ensure_future)
    await listeners.open()
    return connection, listeners


async def announce(connection: FakeConnection, *, limit: int, unread: int = 0) -> None:
    """A listener of `a` at another end says that it is there."""
    await connection.publish(SUBJECT, json.encode(Announcement("other", [Line("1.0", ["a"], limit, unread)])))


async def answer(connection: FakeConnection, mark: str) -> None:
    """The reader of that listener has come to this mark."""
    await connection.publish("reefknot.read.me", json.encode(("other", "1.0", int(mark.partition("/")[2]))))


async def sent_until_it_waits(listeners: Listeners) -> tuple[list[str], asyncio.Future[str]]:
    marks: list[str] = []
    while True:
        sending = asyncio.ensure_future(listeners.wait_for_room("a"))
        await asyncio.wait([sending], timeout=0.01)
        if not sending.done():
            return marks, sending
        marks.append(sending.result())


async def test_a_message_of_each_quarter_is_marked_and_a_whole_limit_ahead_waits_for_one_answer() -> None:
    connection, listeners = await opened()
    await announce(connection, limit=8)
    marks, waiting = await sent_until_it_waits(listeners)
    assert [bool(mark) for mark in marks] == [False, True] * 4
    await answer(connection, marks[1])
    await waiting
    more, waiting = await sent_until_it_waits(listeners)
    assert len(more) == 1  # an answer makes room for a quarter
    waiting.cancel()


async def test_where_nobody_listens_nobody_waits() -> None:
    connection, listeners = await opened()
    await announce(connection, limit=1)
    assert listeners.has("a")
    assert not listeners.has("b")
    assert [await listeners.wait_for_room("b") for _ in range(5)] == [""] * 5


async def test_a_listener_is_forgotten_after_three_silent_seconds_and_not_before() -> None:
    connection, listeners = await opened()
    loop = asyncio.get_running_loop()
    await announce(connection, limit=1)
    _, waiting = await sent_until_it_waits(listeners)
    for _ in range(5):
        await asyncio.sleep(1.0)
        await announce(connection, limit=1, unread=1)
    assert not waiting.done()
    heard_at = loop.time()
    await waiting
    assert 3.0 <= loop.time() - heard_at <= 4.1


@pytest.mark.parametrize(("seconds", "is_free"), [(1.5, True), (0.5, False)], ids=["arrived or lost", "on its way"])
async def test_a_listeners_own_count_is_believed_when_all_has_arrived(seconds: float, is_free: bool) -> None:
    """What was lost on the way is not waited for; what is still on its way is."""
    connection, listeners = await opened()
    await announce(connection, limit=4)
    _, waiting = await sent_until_it_waits(listeners)
    await asyncio.sleep(seconds)
    await announce(connection, limit=4, unread=0)
    await asyncio.wait([waiting], timeout=0.01)
    assert waiting.done() is is_free
    waiting.cancel()


async def test_messages_of_others_on_these_subjects_change_nothing() -> None:
    connection, listeners = await opened()
    await announce(connection, limit=2)
    for body in (b"", b"{}", b"[1]", b'["other","1.0"]', b"\xff", b'["nobody","9.9",1]'):
        for subject in (SUBJECT, "reefknot.read.me"):
            await connection.publish(subject, body)
    marks, waiting = await sent_until_it_waits(listeners)
    assert len(marks) == 2
    waiting.cancel()


async def test_a_mark_that_is_none_of_ours_is_not_answered() -> None:
    connection, listeners = await opened()
    connection.sent.clear()
    for mark in ("", "x", "a.b/1", "*/1", "me/x", "me/"):
        await listeners.answer(mark, "1.0")
    assert connection.sent == []
