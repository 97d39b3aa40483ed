"""Messages on their way over a NATS connection, as bytes, and a request that is cancelled."""

import asyncio
import sys
from typing import Any, cast

import pytest
from nats.aio.client import Client
from nats.protocol.command import hpub_cmd, pub_cmd

from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.wire import Direct, Heard, batch_lines, hear_directly, line_of, read_headers


def test_a_message_has_the_bytes_that_nats_py_would_send() -> None:
    head = b"NATS/1.0\r\nNats-TTL: 5s\r\n\r\n"

    assert line_of("a.b", b"body") == pub_cmd("a.b", "", b"body")
    assert line_of("a.b", b"", reply="inbox.1") == pub_cmd("a.b", "inbox.1", b"")
    assert line_of("a.b", b"body", {"Nats-TTL": "5s"}, "inbox.1") == hpub_cmd("a.b", "inbox.1", head, b"body")


@pytest.mark.parametrize(
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
    lines = batch_lines([("a", b"x", {"Own": "1"}), ("b", b"", {})], "batch")

    assert lines == (
        line_of("a", b"x", {"Own": "1", "Nats-Batch-Id": "batch", "Nats-Batch-Sequence": "1"})
        + line_of("b", b"", {"Nats-Batch-Id": "batch", "Nats-Batch-Sequence": "2"})
    )
    assert batch_lines([], "batch") == b""


def test_headers_and_the_servers_status_are_read_from_the_bytes() -> None:
    plain = Heard("a", "", b"", b"NATS/1.0\r\nOne: 1\r\nTwo:  a: b \r\n\r\n")
    idle = Heard("a", "", b"", b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n")

    assert (plain.status, plain.headers) == ("", {"One": "1", "Two": "a: b"})
    assert (idle.status, idle.headers) == ("100", {"Nats-Last-Consumer": "7"})
    assert (Heard("a", "", b"", b"").status, read_headers(b"")) == ("", {})


def test_what_is_listened_for_is_heard_at_once_and_all_else_goes_nats_pys_way() -> None:
    client: Any = Client()
    heard: list[Heard] = []
    usual: list[int] = []

    async def as_usual(sid: int, *_: bytes) -> None:
        usual.append(sid)

    class Subscription:
        def __init__(self, queue: asyncio.Queue[Any]) -> None:
            self._pending_queue = queue

    client._process_msg = as_usual
    hear_directly(client)
    client._subs = {1: Subscription(Direct(heard.append)), 2: Subscription(asyncio.Queue())}

    async def receive() -> None:
        for sid in (1, 2, 3):
            await client._process_msg(sid, b"subject", b"reply", b"data", None)

    asyncio.run(receive())

    assert [(one.subject, one.reply, one.data, one.headers) for one in heard] == [("subject", "reply", b"data", {})]
    assert usual == [2, 3]


def test_a_hearer_that_fails_does_not_end_the_connection() -> None:
    def fails(_: Heard) -> None:
        raise ValueError("not mine")

    asyncio.run(Direct(fails).hear(Heard("a", "", b"", b"")))


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
    asking = asyncio.create_task(connection.request("a"))
    assert await _cancelled_with_the_answer(asking, client)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for keeps cancellations since Python 3.12")
@pytest.mark.real_time
async def test_control_the_clients_own_request_loses_the_cancellation() -> None:
    client = WaitingClient()
    assert not await _cancelled_with_the_answer(asyncio.create_task(client.request()), client)
