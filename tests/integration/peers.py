"""
A peer that knows only the documents: a client of NATS that sends and hears their JSON, and nothing of reefknot's.

Its loop runs in a thread, so that a test can type commands and wait for messages in turn.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from reefknot.console.nats_servers import NatsServer
from reefknot.runtime.seeds import new_id
from tests.acceptance.folder import Folder
from tests.nats_servers import round_trip
from tests.unit.console.cli.running import Commands

ASSIGN, ACK, RESULT = "caf.exec.assign.v1", "caf.exec.assign.v1.ack", "caf.exec.result.v1"
CANCEL, HEARTBEAT = "caf.exec.cancel.v1", "caf.worker.heartbeat.v1"
PATIENCE_S = 60.0
BEAT_EVERY_S = 0.5

R = TypeVar("R")
Fields = dict[str, Any]


class Heard(NamedTuple):
    """A message as it came over the wire."""

    subject: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def fields(self) -> Fields:
        found = json.loads(self.data)
        assert isinstance(found, dict)
        return found


class Peer:
    """A client that hears everything on the documented subjects. Made by `peer_on`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: str, store: str) -> None:
        self.server = server
        self.store_name = store
        self._loop = loop
        self._client = Client()
        self._beating: dict[str, str] = {}
        self._heartbeats: asyncio.Task[None] | None = None
        self._heard: list[Heard] = []
        self._arrival = threading.Condition()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def open(self) -> None:
        self._client = await nats.connect(self.server)
        for subject in ("caf.exec.>", "caf.worker.>"):
            await self._client.subscribe(subject, cb=self._hear)
        await round_trip(self._client)
        self._heartbeats = asyncio.ensure_future(self._send_heartbeats())

    async def _hear(self, message: Msg) -> None:
        with self._arrival:
            self._heard.append(Heard(message.subject, message.data, dict(message.headers or {})))
            self._arrival.notify_all()

    async def close(self) -> None:
        """Leave, and remove the store's streams: the shared subject can be in one stream alone."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        js = self._client.jetstream()
        for info in await js.streams_info():
            if str(info.config.name).startswith(f"{self.store_name}_"):
                await js.delete_stream(str(info.config.name))
        await self._client.close()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, subject: str, message: Fields | bytes, *, headers: dict[str, str] | None = None) -> None:
        """Publish by core NATS."""
        self.run(self._publish(subject, [message], headers))

    def send_all(self, subject: str, messages: Iterable[Fields]) -> None:
        """Publish many by core NATS, one right after the other."""
        self.run(self._publish(subject, messages))

    async def _publish(self, subject: str, messages: Iterable[Fields | bytes], headers: Any = None) -> None:
        for message in messages:
            await self._client.publish(subject, _body(message), headers=headers)
        await round_trip(self._client)

    def store(self, subject: str, message: Fields | bytes) -> int:
        """Publish to the stream of a subject; returns the sequence in the stream's acknowledgement."""
        return self.run(self._client.jetstream().publish(subject, _body(message))).seq

    def beat(self, worker_id: str, status: str) -> None:
        """Let a worker of this name send heartbeats from now on, with this status of its class `cpu`."""
        self._beating[worker_id] = status
        self.run(self._send_heartbeat(worker_id, status))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_EVERY_S)
            for worker_id, status in list(self._beating.items()):
                await self._send_heartbeat(worker_id, status)

    async def _send_heartbeat(self, worker_id: str, status: str) -> None:
        health = {"status": status, "queue_depth": 0, "active": 0, "capacity": 4}
        beat = {"worker_id": worker_id, "timestamp": int(time.time() * 1000), "classes": {"cpu": health}}
        await self._publish(HEARTBEAT, [beat])

    def waiting_in(self, stream: str) -> int:
        """The number of messages that a stream keeps."""
        return int(self.run(self._client.jetstream().stream_info(stream)).state.messages)

    def streams(self) -> list[str]:
        """The names of all streams of the server."""
        return [str(info.config.name) for info in self.run(self._client.jetstream().streams_info())]

    def make_stream(self, name: str, subjects: list[str]) -> None:
        """Make a stream of a peer. One whose name begins with the store's is removed at the end."""
        self.run(self._client.jetstream().add_stream(name=name, subjects=subjects))

    # ---- hearing -----------------------------------------------------------------------------------------------------

    def heard(self, subject: str, **fields: Any) -> list[Heard]:
        """The messages so far on a subject, with these values in their fields."""
        with self._arrival:
            found = [one for one in self._heard if one.subject == subject]
        return [one for one in found if not fields or _has(one, fields)]

    def wait_for(self, subject: str, *, number: int = 1, **fields: Any) -> Heard:
        """The message of this number on a subject, with these values, as soon as it has come."""
        return self.until(lambda: self.heard(subject, **fields)[number - 1 : number], f"{number} {subject} {fields}")[0]

    def until(self, look: Callable[[], R], what: str = "") -> R:
        """The first answer that is true, looked for with every message."""
        ends = time.monotonic() + PATIENCE_S
        with self._arrival:
            while not (found := look()):
                last = [one.data[:200] for one in self._heard if one.subject != HEARTBEAT][-5:]
                assert self._arrival.wait(ends - time.monotonic()), f"it did not come: {what}; the last were {last}"
            return found

    def ack(self, name: str, number: int = 1) -> Fields:
        return self.wait_for(ACK, number=number, assignment_id=name).fields

    def result(self, name: str) -> Fields:
        return self.wait_for(RESULT, assignment_id=name).fields


def _body(message: Fields | bytes) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def _has(message: Heard, fields: Fields) -> bool:
    try:
        found = json.loads(message.data)
    except ValueError:
        return False
    return isinstance(found, dict) and fields.items() <= found.items()


@contextmanager
def peer_on(url: str, store: str) -> Iterator[Peer]:
    """A peer on a server; at the end the store of this name is removed there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="peer")
    thread.start()
    peer = Peer(loop, url, store)
    try:
        peer.run(peer.open())
        try:
            yield peer
        finally:
            peer.run(peer.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def assignment(name: str, job: str, payload: Fields | None = None, **fields: Any) -> Fields:
    """An assignment with the fields that are required, and others."""
    return {"assignment_id": name, "request_id": f"r-{name}", "job": {"type": job, "payload": payload or {}}, **fields}


@pytest.fixture
def peer(nats_server: NatsServer) -> Iterator[Peer]:
    """A peer beside a store of a name of its own."""
    with peer_on(nats_server.url, new_id()) as found:
        yield found


@pytest.fixture
def folder(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Folder]:
    """A folder whose commands use the store that the peer is beside."""
    engine = f"{peer.server}/{peer.store_name}"
    made = Folder(tmp_path, Commands(tmp_path, monkeypatch, capsys), engine=engine)
    made.set_variable("REEFKNOT__NATS__SUBJECT_PREFIX", '""')  # the documented subjects, though the store has a name
    yield made
    made.end()
