"""What is wrong with a NATS server or its streams is said by name, with what to do."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import nats
import pytest
from msgspec import json
from nats.aio.transport import TcpTransport

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import ParameterError, StorePermissionError, StoreUnavailableError, StoreVersionError
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.jetstream import JetStreamStore, options_from_url, streams
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.requests import RefusedError, UnansweredError
from reefknot.stores.jetstream.wire import NO_LEADER
from reefknot.stores.opening import open_store
from reefknot.testing.conformance.harness import event

pytestmark = pytest.mark.real_time

HASTY = 0.5


async def open_and_close(url: str, **options: Any) -> None:
    store = await JetStreamStore(options_from_url(url, **{"patience": HASTY, **options}), SystemClock()).start()
    await store.close()


async def test_a_reconnection_that_misses_its_cancellation_ends_with_its_connection(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` of Python 3.11 does where a socket is open in the moment of the cancellation."""
    connect, is_waiting = TcpTransport.connect, asyncio.Event()

    async def opened_all_the_same(self: TcpTransport, *given: Any, **more: Any) -> None:
        is_waiting.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await connect(self, *given, **more)

    opened = Connection(options_from_url(nats_server.url))
    await opened.open()
    with monkeypatch.context() as patched:
        patched.setattr(TcpTransport, "connect", opened_all_the_same)
        await opened.client.force_reconnect()
        await is_waiting.wait()
        await opened.close()
    assert [one for one in asyncio.all_tasks() if "_attempt_reconnect" in repr(one.get_coro())] == []


async def test_a_stream_with_a_subject_that_is_not_ours_is_named(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/foreign"
    await open_and_close(url)
    await _edit(nats_server.url, "foreign_state", subjects=["foreign.work.>", "elsewhere.>"])
    with pytest.raises(StoreVersionError, match="the stream foreign_state was changed: subjects is"):
        await open_and_close(url)


async def test_a_stream_of_an_earlier_version_gets_the_subjects_that_it_lacks(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/earlier"
    older = [
        f"earlier.{branch}.>"
        for branch in ("work", "blob", "key", "command", "status", "pool", "writer", "trim", "audit")
    ]
    await open_and_close(url)
    await _edit(nats_server.url, "earlier_state", subjects=older)
    async with open_store(url) as store:
        assert await store.values.put("a", "{}", version=0) is not None
    await open_and_close(url)


async def test_a_store_of_an_earlier_design_is_refused_by_name(nats_server: NatsServer) -> None:
    """With both of its streams, with that of its events alone, and not with a foreign one in its place."""
    url = f"{nats_server.url}/before"
    way_out = "delete the streams before_state and before_audit"
    older = [f"before.{branch}.>" for branch in ("work", "blob", "key", "command", "status", "value", "pool", "outbox")]
    await _request(nats_server.url, "STREAM.CREATE.before_state", {"name": "before_state", "subjects": older})
    await _request(
        nats_server.url, "STREAM.CREATE.before_audit", {"name": "before_audit", "subjects": ["before.audit.>"]}
    )
    for stream in ("before_state", "before_audit"):
        with pytest.raises(StoreVersionError, match=f"its stream {stream} was made by an earlier design") as refused:
            await open_and_close(url)
        assert way_out in refused.value.way_out
        await _request(nats_server.url, f"STREAM.DELETE.{stream}", None)
    await open_and_close(url)


async def test_a_store_that_is_open_for_reading_only_makes_and_changes_nothing(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/reading"
    with pytest.raises(StoreUnavailableError, match="there is no store named reading"):
        await open_and_close(url, read_only=True)
    await open_and_close(url)
    async with open_store(url, read_only=True) as store:
        refused: list[Awaitable[object]] = [
            store.values.put("a", "{}", version=0),
            store.control.report("s", "{}", keep=1.0),
            store.audit.append([event("a"), event("b")]),
        ]
        for write in refused:
            with pytest.raises(StorePermissionError, match="it is open for reading only"):
                await write
        assert await store.values.get("a") is None
        assert await store.audit.read() == []

    await _edit(nats_server.url, "reading_state", subjects=["reading.work.>"])
    with pytest.raises(StoreVersionError, match="the stream reading_state was changed: subjects is"):
        await open_and_close(url, read_only=True)
    await open_and_close(url)


async def test_a_description_of_a_stream_is_an_operators_choice(nats_server: NatsServer) -> None:
    await open_and_close(f"{nats_server.url}/description")
    await _edit(nats_server.url, "description_state", description="orders")
    await open_and_close(f"{nats_server.url}/description")


async def test_more_replicas_than_servers_cannot_be_had(nats_server: NatsServer) -> None:
    with pytest.raises(StoreUnavailableError, match="as many servers as replicas"):
        await open_and_close(f"{nats_server.url}/three", replicas=3)


async def test_subjects_that_another_stream_has_are_named(nats_server: NatsServer) -> None:
    await _request(nats_server.url, "STREAM.CREATE.elsewhere", {"name": "elsewhere", "subjects": ["taken.work.>"]})
    with pytest.raises(StoreVersionError, match="another stream has subjects of taken_state"):
        await open_and_close(f"{nats_server.url}/taken")


@pytest.mark.parametrize("url", ["nats://", "nats://h:0", "nats://h:99999", "nats://h/a.b", "nats://h/a b", "nats:h"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ParameterError):
        options_from_url(url)


def test_a_password_in_an_address_is_not_shown() -> None:
    assert options_from_url("nats://me:secret@h:4222,me:secret@i:4222/x").shown == "nats://h:4222,i:4222/x"


async def _request(url: str, name: str, body: object = None) -> dict[str, Any]:
    """The answer of the server's API."""
    client = await nats.connect(url)
    try:
        answer = (await client.request(f"$JS.API.{name}", json.encode(body) if body else b"", timeout=5)).data
        assert b'"error"' not in answer, answer
        return json.decode(answer, type=dict[str, Any])
    finally:
        await client.close()


async def _edit(url: str, stream: str, **changes: Any) -> None:
    config = (await _request(url, f"STREAM.INFO.{stream}"))["config"]
    await _request(url, f"STREAM.UPDATE.{stream}", config | changes)


@pytest.mark.parametrize("silence", [UnansweredError("s", "no answer", "wait"), RefusedError("s", NO_LEADER, "none")])
async def test_an_opening_store_waits_for_an_election(silence: StoreUnavailableError) -> None:
    answers: list[Any] = [silence, silence, b'{"config": {}, "state": {}, "ts": "2026-01-01T00:00:00Z"}']

    async def api(name: str, timeout: float) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    async def wait_until_up(timeout: float) -> bool:
        return True

    facts = {"failure": None, "is_closed": False, "is_up": True, "cluster": "three"}
    connection = SimpleNamespace(api=api, wait_until_up=wait_until_up, **facts)
    await streams.patient_info(cast(Connection, connection), "s_state")
    assert answers == []
