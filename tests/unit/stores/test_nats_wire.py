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

from reefknot.stores.jetstream.connection import Connection, NatsOptions, options_from_url
from reefknot.stores.jetstream.listeners import Announcement, Line, Listeners
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


class WaitingClient:
    """A client that has one answer, which a test gives."""

    is_connected = True

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def request(self, *given: Any, **named: Any) -> str:
        return await asyncio.wait_for(self.answer, 30)


async def _cancelled_with_the_answer(asking: asyncio.Task[Any], client: WaitingClient) -> bool:
    """Whether a task that is cancelled in the moment of its answer ends as cancelled."""
    for _ in range(5):
        await asyncio.sleep(0)
    client.answer.set_result("an answer")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return asking.cancelled()


@pytest.mark.real_time
async def test_a_request_that_is_cancelled_while_its_answer_arrives_is_cancelled() -> None:
    """Else a task that is told to end goes on, and whoever waits for its end waits for ever."""
    client = WaitingClient()
    connection = Connection(options_from_url("nats://127.0.0.1:4222"))
    connection._client = cast("Client", client)
    assert await _cancelled_with_the_answer(asyncio.create_task(connection.request("a")), client)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for keeps cancellations since Python 3.12")
@pytest.mark.real_time
async def test_control_the_clients_own_request_loses_the_cancellation() -> None:
    client = WaitingClient()
    assert not await _cancelled_with_the_answer(asyncio.create_task(client.request()), client)


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
