"""What is wrong with a NATS server or its streams is said by name, with what to do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nats
import pytest
from msgspec import json
from nats.aio.transport import TcpTransport

from reefknot.console.nats_servers import NatsServer, running_nats
from reefknot.errors import ParameterError, StorePermissionError, StoreUnavailableError, StoreVersionError
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import JetStreamStore, connection, options_from_url, streams
from reefknot.stores.jetstream.connection import Connection, RefusedError, UnansweredError
from reefknot.stores.jetstream.streams import NO_LEADER
from reefknot.stores.opening import open_store
from reefknot.testing.conformance.harness import event

pytestmark = pytest.mark.real_time

HASTY = 0.5


async def open_and_close(url: str, **options: Any) -> None:
    store = await JetStreamStore(options_from_url(url, **{"patience": HASTY, **options}), SystemClock()).start()
    await store.close()


async def test_where_no_server_is() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreUnavailableError, match=r"nats://127\.0\.0\.1:\d+: the server cannot be reached .*check"):
        await open_and_close(f"nats://127.0.0.1:{port}")


async def test_a_wrong_token_is_refused_and_never_shown(tmp_path: Path) -> None:
    with running_nats(tmp_path, token="right-token") as (server,):
        with pytest.raises(StorePermissionError, match="the server refuses this user") as caught:
            await open_and_close(_plain(server), token="wrong-token")
        assert "wrong-token" not in str(caught.value)
        await open_and_close(_plain(server), token="right-token")


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_msgs": 100}, "max_msgs is 100, not -1"),
        ({"subjects": ["NAME.work.>", "elsewhere.>"]}, "subjects is"),
        ({"subject_delete_marker_ttl": 1_000_000_000, "allow_rollup_hdrs": True}, "subject_delete_marker_ttl"),
    ],
    ids=["a bound", "a subject that is not ours", "markers"],
)
async def test_a_stream_that_somebody_changed_is_named_with_the_difference(
    nats_server: NatsServer, changes: dict[str, Any], words: str
) -> None:
    name = new_id()
    if "subjects" in changes:
        changes = {"subjects": [one.replace("NAME", name) for one in changes["subjects"]]}
    await open_and_close(f"{nats_server.url}/{name}")
    await _edit(nats_server.url, f"{name}_state", **changes)
    with pytest.raises(StoreVersionError, match=rf"the stream {name}_state was changed: .*{words}"):
        await open_and_close(f"{nats_server.url}/{name}")


async def test_a_stream_of_an_earlier_version_gets_the_subjects_that_it_lacks(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/earlier"
    older = [f"earlier.{branch}.>" for branch in ("work", "blob", "key", "command", "status", "pool", "outbox")]
    await open_and_close(url)
    await _edit(nats_server.url, "earlier_state", subjects=older)
    async with open_store(url) as store:
        assert await store.values.put("a", "{}", version=0) is not None
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


async def test_a_server_that_is_too_old_is_refused(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OLDEST_SERVER", (99, 0, 0))
    with pytest.raises(StoreVersionError, match=r"has version \d+\.\d+\.\d+, and 99\.0\.0 or later is needed; update"):
        await open_and_close(nats_server.url)


@pytest.mark.parametrize("url", ["nats://", "nats://h:0", "nats://h:99999", "nats://h/a.b", "nats://h/a b", "nats:h"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ParameterError):
        options_from_url(url)


def test_a_password_in_an_address_is_not_shown() -> None:
    assert options_from_url("nats://me:secret@h:4222,me:secret@i:4222/x").shown == "nats://h:4222,i:4222/x"


def _plain(server: NatsServer) -> str:
    return f"nats://{server.url.rpartition('@')[2].removeprefix('nats://')}"


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

    options = SimpleNamespace(patience=0.0)
    await streams._patient_info(cast(Connection, SimpleNamespace(api=api, options=options)), "s_state")
    assert answers == []
