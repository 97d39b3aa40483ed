"""The transport on a real NATS server: the wire, a lost connection, the shared stream, and nats-py as a peer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError

from reefknot.console.nats_servers import NatsServer, running_nats
from reefknot.errors import StoreFullError, StoreUnavailableError
from reefknot.queue.model.messages import ACK, ASSIGN, RESULT, encode
from reefknot.queue.port.transport import Delivery
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import assignments
from reefknot.stores.jetstream.assignments import SubjectTakenError
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.transport import JetStreamTransport
from reefknot.stores.memory import MemoryStore
from tests.nats_servers import frozen, kill, restart, round_trip
from tests.stories import LONGEST_S, InLoop
from tests.workshop import Step, work

pytestmark = pytest.mark.real_time

End = JetStreamTransport
MEBIBYTE = 1 << 20


@asynccontextmanager
async def end_of(
    server: NatsServer, name: str, *, subject_prefix: str | None = "", **options: Any
) -> AsyncIterator[End]:
    """An end with a connection of its own, as another process has."""
    connection = Connection(options_from_url(f"{server.url}/{name}", patience=30.0, subject_prefix=subject_prefix))
    await connection.open()
    end = JetStreamTransport(connection, **options)
    try:
        yield end
    finally:
        await end.close()
        await connection.close()


@asynccontextmanager
async def peer_of(server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)
    try:
        yield client
    finally:
        await client.close()


async def until_true(look: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition; the test is bounded."""
    while not await look():  # noqa: ASYNC110 - it is asked of a server
        await asyncio.sleep(0.02)


async def heard_by(client: Client, subject: str) -> asyncio.Queue[Msg]:
    heard: asyncio.Queue[Msg] = asyncio.Queue()

    async def take(message: Msg) -> None:
        heard.put_nowait(message)

    await client.subscribe(subject, cb=take)
    await round_trip(client)
    return heard


@pytest.fixture
def name() -> str:
    return new_id()


@pytest.fixture
def peer(nats_server: NatsServer) -> InLoop:
    return InLoop(lambda: peer_of(nats_server))


@pytest.fixture
def end(nats_server: NatsServer, name: str) -> InLoop:
    return InLoop(lambda: end_of(nats_server, name))


@pytest.fixture
def far(nats_server: NatsServer, name: str) -> InLoop:
    """Another end of the same store."""
    return InLoop(lambda: end_of(nats_server, name))


@pytest.fixture
def assign_server(tmp_path: Path) -> Iterator[NatsServer]:
    """The stream of assignments has one subject for all stores: a server of its own keeps tests apart."""
    with running_nats(tmp_path / "nats") as (server,):
        yield server


class TestTheWire:
    async def test_a_peer_hears_the_very_body_and_the_headers(self, end: End, peer: Client) -> None:
        heard = await heard_by(peer, RESULT)
        await end.publish(RESULT, b'{"b": 1,"a":2}', headers={"trace_id": "t-1"}, message_id="x1")
        message = await heard.get()
        assert message.data == b'{"b": 1,"a":2}'
        assert message.headers == {"trace_id": "t-1", "Nats-Msg-Id": "x1"}

    async def test_a_peers_message_is_heard_and_its_id_counts(self, end: End, peer: Client) -> None:
        line = end.subscribe(RESULT)
        await end.publish(RESULT, b"first")
        assert (await anext(line)).body == b"first"
        for _ in range(2):
            await peer.publish(RESULT, b"once", headers={"Nats-Msg-Id": "1", "tenant_id": "t"})
        await peer.publish(RESULT, b"last")
        one, two = await anext(line), await anext(line)
        assert (one.body, dict(one.headers), two.body) == (b"once", {"tenant_id": "t"}, b"last")

    @pytest.mark.parametrize(
        "headers", [{"a": "x\r\nNats-Msg-Id: 7"}, {"a b": "1"}, {"a": " blank "}, {"Nats-Msg-Id": "mine"}]
    )
    async def test_headers_that_nats_cannot_carry_arrive_and_inject_nothing(
        self, headers: dict[str, str], peer: Client, end: End, far: End
    ) -> None:
        heard, line = await heard_by(peer, "a"), far.subscribe("a")
        await end.publish("a", b"x", headers=headers)
        assert dict((await anext(line)).headers) == headers
        assert "Nats-Msg-Id" not in ((await heard.get()).headers or {})

    async def test_a_peer_that_does_not_read_is_never_waited_for(self, end: End, peer: Client) -> None:
        await peer.subscribe("a", pending_msgs_limit=2)
        for _ in range(3000):
            await end.publish("a", b"x")

    async def test_nothing_is_added_to_a_message_for_peers_alone(self, end: End, peer: Client) -> None:
        heard = await heard_by(peer, "a")
        for _ in range(2000):
            await end.publish("a", b"x")
        assert {str((await heard.get()).headers) for _ in range(2000)} == {"None"}

    async def test_a_round_trip_is_behind_the_subscriptions_before_it(self) -> None:
        """A server that writes down the order of what it is told."""
        told: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inboxes = b""
            writer.write(b'INFO {"version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
            while line := await reader.readline():
                told.append(line)
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n")
                if line.startswith(b"SUB _INBOX"):
                    inboxes = line.split()[-1]
                if line.startswith(b"PUB $JS.API.INFO "):
                    writer.write(b"MSG %s %s 2\r\n{}\r\n" % (line.split()[2], inboxes))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = Connection(options_from_url(f"nats://127.0.0.1:{port}", patience=30.0))
        await connection.open()
        try:
            await connection.listen("a", lambda message: None)
            await connection.round_trip()
            assert b"SUB a" in b"".join(told).rpartition(b"PUB $JS.API.INFO")[0]
        finally:
            await connection.close()
            server.close()

    async def test_a_server_frozen_for_longer_than_a_round_trip_is_heard(self, own_nats_server: NatsServer) -> None:
        connection = Connection(options_from_url(own_nats_server.url, patience=30.0))
        await connection.open()
        try:
            with frozen(own_nats_server), pytest.raises(StoreUnavailableError):
                await connection.request("$JS.API.INFO", timeout=0.2)
            await connection.wait_until_up(30.0)
            await connection.round_trip()
        finally:
            await connection.close()


class TestParts:
    @pytest.mark.parametrize("size", [MEBIBYTE, MEBIBYTE + 1, 3 * MEBIBYTE])
    async def test_a_message_that_is_too_large_arrives_whole_and_once(self, size: int, end: End, far: End) -> None:
        body = (bytes(range(251)) * (size // 251 + 1))[:size]
        line = far.subscribe("a")
        for _ in range(2):
            await end.publish("a", body, headers={"trace_id": "t"}, message_id="one")
        await end.publish("a", b"last", message_id="two")
        one, two = await anext(line), await anext(line)
        assert (one.subject, one.body == body, dict(one.headers)) == ("a", True, {"trace_id": "t"})
        assert two.body == b"last"

    async def test_a_peer_hears_no_parts(self, end: End, peer: Client) -> None:
        heard = await heard_by(peer, "a")
        await end.publish("a", bytes(2 * MEBIBYTE))
        await end.publish("a", b"small")
        assert (await heard.get()).data == b"small"

    async def test_a_part_after_a_gap_is_dropped(self, name: str, end: End, peer: Client) -> None:
        line = end.subscribe("a")
        await end.publish("a", b"first")
        assert (await anext(line)).body == b"first"
        for label in ("x/1/2", "no label", "y/0/two", "z/0/1"):
            await peer.publish(f"{name}.parts.a", b"\xc1", headers={"Reefknot-Part": label})
        await round_trip(peer)
        await end.publish("a", bytes(2 * MEBIBYTE))
        assert len((await anext(line)).body) == 2 * MEBIBYTE

    async def test_a_message_beyond_the_bound_is_refused_by_its_size(self, end: End) -> None:
        with pytest.raises(StoreFullError, match="bytes, and 67108864 are accepted"):
            await end.publish("a", bytes(64 * MEBIBYTE))


async def publish_for_ever(end: End) -> None:
    while True:
        await end.publish("nobody", b"lost")
        await asyncio.sleep(0)


class TestALostConnection:
    async def test_publish_says_so_and_subscriptions_come_back(self, own_nats_server: NatsServer, name: str) -> None:
        async with end_of(own_nats_server, name) as end, end_of(own_nats_server, name) as far:
            line = far.subscribe("a", limit=4)
            await end.publish("a", b"before")
            assert (await anext(line)).body == b"before"
            kill(own_nats_server)

            with pytest.raises(StoreUnavailableError, match="the connection is lost"):
                await publish_for_ever(end)
            restart(own_nats_server)
            hearing = asyncio.ensure_future(anext(line))

            async def is_heard() -> bool:
                try:
                    await end.publish("a", b"after")
                except StoreUnavailableError:
                    return False
                return bool((await asyncio.wait([hearing], timeout=0.1))[0])

            await until_true(is_heard)
            assert (await hearing).body == b"after"

    async def test_a_listener_that_is_gone_is_forgotten(self, nats_server: NatsServer, name: str, end: End) -> None:
        connection = Connection(options_from_url(f"{nats_server.url}/{name}", patience=30.0, subject_prefix=""))
        await connection.open()
        gone = JetStreamTransport(connection)
        line = gone.subscribe("a", limit=1)
        await gone.publish("b", b"")
        hearing = asyncio.ensure_future(anext(line))
        while not hearing.done():
            await end.publish("a", b"x")
            await asyncio.wait([hearing], timeout=0.05)
        await connection.close()
        for _ in range(5):
            await end.publish("a", b"y")
        await gone.close()


async def take(line: AsyncIterator[Delivery], into: list[bytes]) -> None:
    """Read and acknowledge for ever."""
    async for delivery in line:
        into.append(delivery.body)
        await acknowledge(delivery)


async def acknowledge(delivery: Delivery) -> None:
    assert delivery.done is not None
    await delivery.done()


async def stream_info(peer: Client, name: str) -> Any:
    return await peer.jetstream().stream_info(f"{name}_assign")


async def until_kept(peer: Client, name: str, number: int) -> None:
    """Wait until the stream has so few messages."""

    async def is_so() -> bool:
        return int((await stream_info(peer, name)).state.messages) <= number

    await until_true(is_so)


class TestTheSharedStream:
    @pytest.fixture
    def peer(self, assign_server: NatsServer) -> InLoop:
        return InLoop(lambda: peer_of(assign_server))

    @pytest.fixture
    def end(self, assign_server: NatsServer, name: str) -> InLoop:
        return InLoop(lambda: end_of(assign_server, name, shared_stream=True))

    async def test_what_is_sent_before_a_worker_is_up_is_kept_and_two_workers_share_it(
        self, assign_server: NatsServer, name: str, peer: Client, end: End
    ) -> None:
        await end.ensure_stream()
        await peer.publish(ASSIGN, b"0")
        await peer.jetstream().publish(ASSIGN, b"1")
        for n in range(2, 200):
            await end.publish(ASSIGN, str(n).encode(), message_id=f"id {n}")
            await end.publish(ASSIGN, str(n).encode(), message_id=f"id {n}")
        found: list[list[bytes]] = [[], []]
        async with (
            end_of(assign_server, name, shared_stream=True) as one,
            end_of(assign_server, name, shared_stream=True) as two,
        ):
            lines = [each.subscribe(ASSIGN, f"{ASSIGN}.w.{n}", limit=8) for n, each in enumerate((one, two))]
            reading = [asyncio.ensure_future(take(*pair)) for pair in zip(lines, found, strict=True)]

            await until_kept(peer, name, 0)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        assert sorted(map(int, found[0] + found[1])) == list(range(200))
        assert all(found)

    async def test_the_stream_has_this_one_subject(self, name: str, peer: Client, end: End) -> None:
        line = end.subscribe(ACK)
        await end.ensure_stream()
        await end.publish(ACK, b"an ack")
        assert (await anext(line)).body == b"an ack"
        info = await stream_info(peer, name)
        assert (info.config.subjects, info.state.messages) == ([ASSIGN], 0)

    async def test_a_taken_assignment_without_an_ack_comes_back(self, assign_server: NatsServer, name: str) -> None:
        async with end_of(assign_server, name, shared_stream=True, ack_wait=1.0) as end:
            line = end.subscribe(ASSIGN)
            await end.publish(ASSIGN, b"x", message_id="x", headers={"tenant_id": "t"})
            first, again = await anext(line), await anext(line)
            assert (first.body, again.body, dict(again.headers)) == (b"x", b"x", {"tenant_id": "t"})

    async def test_what_waits_unread_is_given_back_at_once_when_its_worker_closes(
        self, assign_server: NatsServer, name: str, peer: Client, end: End
    ) -> None:
        async with end_of(assign_server, name, shared_stream=True) as leaving:
            leaving.subscribe(ASSIGN)
            await leaving.publish(ASSIGN, b"x")

            async def is_fetched() -> bool:
                info = await peer.jetstream().consumer_info(f"{name}_assign", assignments.CONSUMER)
                return bool(info.num_ack_pending == 1)

            await until_true(is_fetched)
        line = end.subscribe(ASSIGN)
        async with asyncio.timeout(assignments.ACK_WAIT_S / 2):
            assert (await anext(line)).body == b"x"

    async def test_what_waits_unread_is_in_progress(self, assign_server: NatsServer, name: str, peer: Client) -> None:
        async with end_of(assign_server, name, shared_stream=True, ack_wait=3.0) as end:
            told = await heard_by(peer, f"$JS.ACK.{name}_assign.>")
            line = end.subscribe(ASSIGN)
            await end.publish(ASSIGN, b"x")
            assert [(await told.get()).data for _ in range(2)] == [b"+WPI"] * 2
            await acknowledge(await anext(line))
            while (await told.get()).data != b"+ACK":
                pass

    async def test_a_full_stream_refuses_any_sender(self, assign_server: NatsServer, name: str, peer: Client) -> None:
        async with end_of(assign_server, name, shared_stream=True, most_assignments=2) as end:
            for _ in range(2):
                await end.publish(ASSIGN, b"x")
            with pytest.raises(StoreFullError, match="maximum messages exceeded"):
                await end.publish(ASSIGN, b"x", message_id="y")
            with pytest.raises(APIError) as refused:
                await peer.jetstream().publish(ASSIGN, b"x")
            assert refused.value.err_code == 10077
            line = end.subscribe(ASSIGN)
            await acknowledge(await anext(line))

            await until_kept(peer, name, 1)
            await end.publish(ASSIGN, b"x", message_id="y")

    async def test_another_bound_is_given_to_it(self, assign_server: NatsServer, name: str, peer: Client) -> None:
        for most in (2, 3):
            async with end_of(assign_server, name, shared_stream=True, most_assignments=most) as end:
                await end.publish(ASSIGN, b"x")
                info = await stream_info(peer, name)
                assert (info.config.max_msgs, info.state.messages) == (most, most - 1)

    async def test_a_foreign_stream_there_is_named(self, name: str, peer: Client, end: End) -> None:
        await peer.jetstream().add_stream(name="THEIRS", subjects=["caf.exec.>"])
        line = end.subscribe(ASSIGN)
        for use in (end.ensure_stream(), end.publish(ASSIGN, b"x"), anext(line)):
            with pytest.raises(SubjectTakenError, match=f"the subject {ASSIGN} belongs to the stream THEIRS"):
                await use

    async def test_a_stream_of_the_same_name_for_others_is_refused(self, name: str, peer: Client, end: End) -> None:
        await peer.jetstream().add_stream(name=f"{name}_assign", subjects=["theirs"])
        with pytest.raises(SubjectTakenError, match="is not one for assignments: subjects is"):
            await end.ensure_stream()

    async def test_a_killed_server_loses_no_assignment_and_fetching_goes_on(
        self, assign_server: NatsServer, peer: Client, end: End
    ) -> None:
        line = end.subscribe(ASSIGN)
        await end.publish(ASSIGN, b"before")
        assert (await anext(line)).body == b"before"
        kill(assign_server)
        restart(assign_server)

        async def is_stored() -> bool:
            try:
                await peer.jetstream().publish(ASSIGN, b"after", timeout=1.0, headers={"Nats-Msg-Id": "a"})
            except (nats.errors.Error, nats.js.errors.Error, OSError):
                return False
            return True

        await until_true(is_stored)
        while (await anext(line)).body != b"after":  # the first one was not acknowledged
            pass

    async def test_a_removed_consumer_is_made_again(self, name: str, peer: Client, end: End) -> None:
        line = end.subscribe(ASSIGN)
        await end.publish(ASSIGN, b"one")
        assert (await anext(line)).body == b"one"
        await peer.jetstream().delete_consumer(f"{name}_assign", assignments.CONSUMER)
        await end.publish(ASSIGN, b"two")
        while (await anext(line)).body != b"two":
            pass

    async def test_assignments_flow_without_a_request_that_has_to_be_made_again(
        self, monkeypatch: pytest.MonkeyPatch, end: End
    ) -> None:
        monkeypatch.setattr(assignments, "SILENT_S", 10 * LONGEST_S)
        line = end.subscribe(ASSIGN, limit=4)
        for n in range(40):
            await end.publish(ASSIGN, str(n).encode())
        for n in range(40):
            delivery = await anext(line)
            assert delivery.body == str(n).encode()
            await acknowledge(delivery)

    async def test_a_request_that_a_server_forgot_is_repeated(self, monkeypatch: pytest.MonkeyPatch, end: End) -> None:
        monkeypatch.setattr(assignments, "SILENT_S", 0.2)
        forgotten: list[str] = []
        publish = Connection.publish

        async def forgetful(self: Connection, subject: str, body: bytes, **named: Any) -> None:
            if ".MSG.NEXT." in subject and not forgotten:
                forgotten.append(subject)
            else:
                await publish(self, subject, body, **named)

        monkeypatch.setattr(Connection, "publish", forgetful)

        line = end.subscribe(ASSIGN)
        await end.publish(ASSIGN, b"x")
        assert (await anext(line)).body == b"x"
        assert len(forgotten) == 1

    async def test_a_peer_that_knows_only_the_documents_gives_work_to_two_workers_and_hears_each_result_once(
        self, assign_server: NatsServer, name: str, peer: Client
    ) -> None:
        async with AsyncExitStack() as stack:
            acks, results = await heard_by(peer, ACK), await heard_by(peer, RESULT)
            ends = [await stack.enter_async_context(end_of(assign_server, name, shared_stream=True)) for _ in "12"]
            await ends[0].ensure_stream()
            for n in range(20):  # before anybody is there to take it
                await peer.publish(ASSIGN, encode(work(f"a{n}")))
            clock = SystemClock()
            for n, end in enumerate(ends):
                parts: dict[str, Any] = {"store": MemoryStore(clock), "transport": end, "clock": clock}
                blocks: Any = {"test.step": Step()}
                worker = Worker(f"w{n}", settings=default_settings(), blocks=blocks, shared_subject=True, **parts)
                await worker.start()
                stack.push_async_callback(worker.stop)
            expected = sorted(f"a{n}" for n in range(20))
            for heard, status in ((acks, "accepted"), (results, "success")):
                found = [msgspec.json.decode((await heard.get()).data) for _ in range(20)]
                assert sorted(one["assignment_id"] for one in found) == expected
                assert {one["status"] for one in found} == {status}

            await until_kept(peer, name, 0)
            assert (acks.qsize(), results.qsize()) == (0, 0)


async def test_without_it_every_listener_hears_an_assignment_and_no_stream_is_made(
    name: str, peer: Client, end: End, far: End
) -> None:
    lines = [end.subscribe(ASSIGN), far.subscribe(ASSIGN)]
    await end.publish(ASSIGN, b"x")
    assert [(await anext(line)).body for line in lines] == [b"x", b"x"]
    assert not [one for one in await peer.jetstream().streams_info() if name in str(one.config.name)]


class TestTwoNames:
    async def test_two_names_on_one_server_do_not_hear_each_other(self, nats_server: NatsServer, peer: Client) -> None:
        heard = await heard_by(peer, "*.caf.exec.result.v1")
        async with AsyncExitStack() as stack:
            made = [end_of(nats_server, f"name{n}", subject_prefix=None) for n in (1, 1, 2)]
            ends = [await stack.enter_async_context(one) for one in made]
            lines = [end.subscribe(RESULT) for end in ends]
            await ends[2].publish(RESULT, b"of two")
            await ends[0].publish(RESULT, b"of one")
            assert [(await anext(line)).body for line in lines] == [b"of one", b"of one", b"of two"]
            subjects = {(await heard.get()).subject for _ in range(2)}  # of two connections, in either order
            assert subjects == {"name1.caf.exec.result.v1", "name2.caf.exec.result.v1"}

    async def test_control_with_one_prefix_they_do(self, end: End, nats_server: NatsServer) -> None:
        async with end_of(nats_server, "another") as far:
            line = far.subscribe(RESULT)
            await end.publish(RESULT, b"heard")
            assert (await anext(line)).body == b"heard"
