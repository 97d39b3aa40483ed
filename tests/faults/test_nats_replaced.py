"""
A store on NATS that is deleted, made again, restored or replaced while it is in use: every part ends with 69 at once,
and nothing is acknowledged into a store that no part reads. A restarted server is none of these.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import nats
import pytest
from nats.aio.msg import Msg

import reefknot as rk
from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreError, StoreReplacedError
from reefknot.stores.jetstream.store import LOOK_S
from reefknot.stores.jetstream.streams import Names, state_stream
from reefknot.stores.opening import open_store
from tests.faults.nats_system import Parts, kill_and_restart, servers_in_memory
from tests.warm_commands import run_warm

pytestmark = pytest.mark.slow

SOON_S = 2.0
"""Within which a part ends."""
BUSY_S = 2.0
"""More than that, on a machine that does other things."""
PARTS = ("router-1", "worker-1", "up-1")


# ---- what happens to a store -----------------------------------------------------------------------------------------


class Stream:
    """The stream of a store, as an operator of the server handles it."""

    def __init__(self, server: NatsServer, name: str) -> None:
        self.server, self.names = server, Names(name)
        self.backup: tuple[dict[str, Any], list[bytes]] = {}, []
        self._copy = server.folder.parent / f"{server.folder.name}-copy"

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        client = await nats.connect(self.server.url)
        try:
            yield client
        finally:
            await client.close()

    async def _ask(self, client: Any, api: str, body: Any = None) -> dict[str, Any]:
        data = b"" if body is None else msgspec.json.encode(body)
        found: dict[str, Any] = msgspec.json.decode((await client.request(f"$JS.API.{api}", data, timeout=10)).data)
        assert "error" not in found, found
        return found

    async def save(self) -> None:
        """As `nats stream backup` does."""
        chunks, is_over = list[bytes](), asyncio.Event()
        async with self._client() as client:

            async def hear(message: Msg) -> None:
                if not message.data:
                    is_over.set()
                    return
                chunks.append(message.data)
                await client.publish(message.reply, b"")

            inbox = client.new_inbox()
            await client.subscribe(inbox, cb=hear)
            asked = {"deliver_subject": inbox, "no_consumers": True}
            answer = await self._ask(client, f"STREAM.SNAPSHOT.{self.names.state}", asked)
            async with asyncio.timeout(10):
                await is_over.wait()
        self.backup = answer, chunks

    async def delete(self) -> None:
        async with self._client() as client:
            await self._ask(client, f"STREAM.DELETE.{self.names.state}")

    async def make(self) -> None:
        async with self._client() as client:
            await self._ask(client, f"STREAM.CREATE.{self.names.state}", state_stream(self.names, 1))

    async def restore(self) -> None:
        """As `nats stream restore` does."""
        answer, chunks = self.backup
        async with self._client() as client:
            asked = {"config": answer["config"], "state": answer["state"]}
            to = (await self._ask(client, f"STREAM.RESTORE.{self.names.state}", asked))["deliver_subject"]
            for chunk in [*chunks, b""]:
                await client.request(to, chunk, timeout=10)

    async def last(self) -> int:
        async with self._client() as client:
            return int((await self._ask(client, f"STREAM.INFO.{self.names.state}"))["state"]["last_seq"])

    async def stop_server(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        await asyncio.to_thread(self.server.wait_until_ended, 10.0)

    async def start_server(self) -> None:
        self.server.start()
        await asyncio.to_thread(self.server.wait_until_ready)

    async def copy_files(self) -> None:
        await self.stop_server()
        shutil.copytree(self.server.folder / "jetstream", self._copy)
        await self.start_server()

    async def set_files_back(self) -> None:
        await self.stop_server()
        shutil.rmtree(self.server.folder / "jetstream")
        shutil.copytree(self._copy, self.server.folder / "jetstream")
        await self.start_server()


async def nothing(_: Stream) -> None:
    """Nothing is kept of it."""


async def made_again(stream: Stream) -> None:
    await stream.delete()
    await stream.make()


async def restored(stream: Stream) -> None:
    await stream.delete()
    await stream.restore()


async def replaced(stream: Stream) -> None:
    """By the store of another server, which has the same name."""
    with servers_in_memory() as (other,):
        async with (
            open_store(f"{other.url}/{stream.names.name}") as store,
            rk.connect(f"{other.url}/{stream.names.name}") as client,
        ):
            await client.submit("own.other", {}, assignment_id="of-the-other")
            assert store.failure is None
        theirs = Stream(other, stream.names.name)
        await theirs.save()
    stream.backup = theirs.backup
    await restored(stream)


Act = Callable[[Stream], Awaitable[None]]
FAULTS: dict[str, tuple[Act, Act]] = {
    "deleted": (nothing, Stream.delete),
    "made again": (nothing, made_again),
    "restored": (Stream.save, restored),
    "replaced": (nothing, replaced),
    "set back": (Stream.copy_files, Stream.set_files_back),
}
"""What is kept at first, and what then happens."""


# ---- who works with it -----------------------------------------------------------------------------------------------


@dataclass
class Callers:
    """Clients of this process, and what they hear."""

    acknowledged: dict[str, float] = field(default_factory=dict)
    """By id: when the answer came, in monotonic time."""
    ended: dict[str, float] = field(default_factory=dict)
    """By caller: when it had its error."""
    has_started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the system of this process runs."""

    async def submit(self, client: Any) -> None:
        """Submit one after the other until the store refuses."""
        for number in count(1):
            try:
                inputs = {"seconds": 0.0, "fails": False}
                handle = await client.submit("own.note", inputs, assignment_id=f"w{number}")
                self.acknowledged[handle.assignment_id] = time.monotonic()
            except StoreReplacedError:
                self.ended["submits"] = time.monotonic()
                return
            except StoreError:  # the server is away
                continue
            finally:
                await asyncio.sleep(0.01)

    async def wait(self, client: Any) -> None:
        """Wait for a result that never comes."""
        handle = await client.submit("own.unknown", {}, assignment_id="waits", delay=3600)
        try:
            await handle.result(3600)
        except StoreReplacedError:
            self.ended["waits"] = time.monotonic()

    async def heard(self) -> None:
        """A bounded wait for all of them to have their errors."""
        late = time.monotonic() + SOON_S + BUSY_S
        while len(self.ended) < 3:
            assert time.monotonic() < late, f"only {sorted(self.ended)} have heard of it"
            await asyncio.sleep(0.02)

    async def run_system(self, url: str) -> None:
        try:
            async with rk.system(url) as client:
                self.has_started.set()
                await client.job("waits").result(3600)
        except StoreReplacedError:
            self.ended["system"] = time.monotonic()


async def acknowledged_and_unread(url: str, callers: Callers, since: float) -> list[str]:
    """What was acknowledged after this time and is not in the store."""
    async with open_store(url) as store:
        late = [name for name, at in callers.acknowledged.items() if at > since]
        return [name for name in late if await store.work.get(name) is None]


@asynccontextmanager
async def in_use(folder: Path, server: NatsServer, flaw: str = "none") -> AsyncIterator[tuple[Parts, Stream, Callers]]:
    """A store with all kinds of parts and clients."""
    name = f"s{uuid4().hex[:8]}"
    parts, callers = Parts(folder, f"{server.url}/{name}"), Callers()
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(parts.start(one, flaw=flaw) for one in ("router-1", "worker-1")))
        await asyncio.gather(*(parts.start(one, flaw=flaw) for one in ("up-1", "dashboard-1")))
        async with rk.connect(parts.url) as client:
            running = (callers.submit(client), callers.wait(client), callers.run_system(parts.url))
            tasks += [asyncio.create_task(one) for one in running]
            async with asyncio.timeout(60):
                await callers.has_started.wait()
                while len(callers.acknowledged) < 20:  # noqa: ASYNC110 - other tasks are waited for
                    await asyncio.sleep(0.02)
            yield parts, Stream(server, name), callers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        parts.stop()


async def until_further(stream: Stream, by: int = 50) -> None:
    """A bounded wait for so many changes more."""
    goal = await stream.last() + by
    async with asyncio.timeout(60):
        while await stream.last() < goal:  # noqa: ASYNC110 - other processes are waited for
            await asyncio.sleep(0.05)


async def story(folder: Path, server: NatsServer, fault: str) -> None:
    keep, act = FAULTS[fault]
    async with in_use(folder, server) as (parts, stream, callers):
        await keep(stream)
        await until_further(stream)
        if fault == "set back":  # one that knows of nothing later would rightly go on
            await asyncio.sleep(3 * LOOK_S)
        await act(stream)
        since = time.monotonic()
        codes = await asyncio.gather(*(parts.ended(name, SOON_S + BUSY_S) for name in PARTS))
        assert codes == [69, 69, 69]
        await callers.heard()
        print(fault, {name: round(at - since, 2) for name, at in callers.ended.items()})
        words = "deleted" if fault == "deleted" else "set back" if fault == "set back" else "made again, or restored"
        for name in PARTS:
            assert f"was {words}" in parts.log(name), parts.log(name)
        assert parts.is_running("dashboard-1")
        assert await acknowledged_and_unread(parts.url, callers, since) == []
        await work_again(parts)
        if fault not in ("deleted", "made again"):
            assert "restored" in doctor(parts)


async def work_again(parts: Parts) -> None:
    """Started again, they go on with what is there."""
    await asyncio.gather(parts.start("router-1"), parts.start("worker-1"))
    async with rk.connect(parts.url) as client:
        done = await client.run("own.note", {"seconds": 0.0, "fails": False})
    assert done.status == "success"


def doctor(parts: Parts) -> str:
    return run_warm("doctor", "--engine", parts.url, cwd=parts.folder, env=dict(os.environ)).stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_every_part_of_a_store_that_is_gone_ends_with_69(tmp_path: Path, fault: str) -> None:
    with servers_in_memory() as (server,):
        asyncio.run(story(tmp_path, server, fault))


async def unwatched(folder: Path, server: NatsServer) -> list[str]:
    """The parts that end although no process looks: the broken variant."""
    async with in_use(folder, server, flaw="nobody watches the store") as (parts, stream, _):
        await made_again(stream)
        ended = []
        for name in PARTS:
            with suppress(TimeoutError):
                await parts.ended(name, SOON_S / len(PARTS))
                ended.append(name)
        return ended


def test_the_broken_variant_stays(tmp_path: Path, server: NatsServer) -> None:
    assert asyncio.run(unwatched(tmp_path, server)) == []


async def restarted(folder: Path, server: NatsServer) -> None:
    """The same server, killed and started again, frozen, and its stream edited and saved: nothing is gone."""
    async with in_use(folder, server) as (parts, stream, callers):
        for away_s in (0.0, 1.5):
            await kill_and_restart(server, away_s=away_s)
            await until_further(stream)
        await stream.save()
        server_id = server.pid
        os.kill(server_id, signal.SIGSTOP)
        await asyncio.sleep(2.5)
        os.kill(server_id, signal.SIGCONT)
        known = len(callers.acknowledged)
        async with asyncio.timeout(60):
            while len(callers.acknowledged) < known + 20:  # noqa: ASYNC110 - other tasks are waited for
                await asyncio.sleep(0.05)
        assert [name for name in (*PARTS, "dashboard-1") if not parts.is_running(name)] == []
        assert callers.ended == {}


def test_a_server_that_restarts_freezes_or_is_backed_up_ends_no_part(tmp_path: Path, server: NatsServer) -> None:
    asyncio.run(restarted(tmp_path, server))


async def refused(folder: Path, server: NatsServer) -> tuple[int, str, int, str]:
    """A submission while a process that looks at nothing works with the deleted store, and one after its end."""
    async with in_use(folder, server, flaw="nobody watches the store") as (parts, stream, callers):
        await stream.delete()
        words = ("submit", "--type", "own.note", "--engine", parts.url)
        early = await asyncio.to_thread(run_warm, *words, cwd=folder, env=dict(os.environ))
        parts.stop()
        await callers.heard()
        late = await asyncio.to_thread(run_warm, *words, cwd=folder, env=dict(os.environ))
    return early.returncode, early.stderr, late.returncode, late.stderr


def test_no_store_is_made_while_a_process_works_with_the_deleted_one(tmp_path: Path, server: NatsServer) -> None:
    early, said, late, said_late = asyncio.run(refused(tmp_path, server))
    assert early == 69, said
    assert "was deleted, and a process still works with it (pid " in said
    assert late == 0, said_late
    assert "there was no store at" in said_late
    assert "a new one was made" in said_late
