"""
A store on NATS that is full: a change that does not fit is refused as a whole, and nothing of it is stored.

A bound of the stream itself does that. The limits of an account or a server do not: the control shows what they leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreError, StoreFullError, StoreUnavailableError, StoreVersionError
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import JetStreamStore, options_from_url
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.streams import stream_info
from tests.acceptance.test_nats_commands import other_server

JOBS = 10
RESULT = '"' + "r" * 100 + '"'


def limited(folder: Path, limits: str) -> str:
    """The configuration of a server with one account, which has these limits."""
    return f"""
        jetstream {{ store_dir: "{folder / "server" / "data"}" }}
        accounts {{ A: {{ jetstream: {{ {limits} }}, users: [{{user: u, password: p}}] }} }}
    """


async def with_store(url: str, story: Callable[[JetStreamStore], Awaitable[None]], **options: Any) -> None:
    store = await JetStreamStore(options_from_url(url, **options), SystemClock()).start()
    try:
        await story(store)
    finally:
        await store.close()


async def update(connection: Connection, stream: str, **changes: Any) -> None:
    found = (await stream_info(connection, stream)).config
    await connection.api(f"STREAM.UPDATE.{stream}", found | changes)


async def size(store: JetStreamStore) -> int:
    return int((await stream_info(store.connection, store.names.state)).state["bytes"])


async def claimed(store: JetStreamStore, prefix: str) -> list[Settlement]:
    """Reports of some jobs that are running, not yet made."""
    await store.work.enqueue([WorkItem(f"{prefix}{number}", "t", "io") for number in range(JOBS)])
    items = await store.work.claim(JOBS, WorkClaim(owner="w", classes=["io"]))
    return [Settlement(one.id, "w", one.fence, WorkDone(RESULT)) for one in items]


async def states(store: JetStreamStore, prefix: str) -> set[WorkState | None]:
    """The states of these jobs, as another process finds them."""
    found = [(await store.state.read_work(f"{prefix}{number}"))[0] for number in range(JOBS)]
    return {None if one is None else one.item.state for one in found}


def test_what_a_bounded_stream_has_no_room_for_is_refused_as_a_whole(nats_server: NatsServer) -> None:
    """Wherever the bound falls within a batch: the jobs are running, or have succeeded, and none is gone."""

    async def story(store: JetStreamStore) -> None:
        refused = 0
        for left in range(0, 12_000, 700):
            prefix = f"left-{left}-"
            reports = await claimed(store, prefix)
            before = await size(store)
            await update(store.connection, store.names.state, max_bytes=before + left)
            try:
                await store.work.settle(reports)
            except StoreFullError:
                refused += 1
                assert await states(store, prefix) == {WorkState.RUNNING}
                assert await size(store) <= before
                await update(store.connection, store.names.state, max_bytes=1 << 30)
                assert await store.work.settle(reports) == [True] * JOBS, "as soon as there is room"
            assert await states(store, prefix) == {WorkState.SUCCEEDED}
            await update(store.connection, store.names.state, max_bytes=1 << 30)
        assert 3 < refused < 17, "some fitted and some did not"

    asyncio.run(with_store(f"{nats_server.url}/{new_id()}", story, max_bytes=1 << 30))


def test_control_an_account_that_is_full_keeps_a_part_of_a_batch(tmp_path: Path) -> None:
    """Why there is a bound. If this fails, the server has been mended, and the guide has a warning too many."""
    stream = {"name": "s", "subjects": ["s.>"], "storage": "file", "allow_atomic": True}

    async def story(connection: Connection) -> int:
        await connection.api("STREAM.CREATE.s", stream)
        with suppress(StoreError):
            for number in range(4):
                await connection.store([(f"s.{number}.{place}", b"x" * 100, {}) for place in range(30)])
            raise AssertionError("it is not full")
        return int((await stream_info(connection, "s")).state["messages"])

    async def main(url: str) -> int:
        connection = Connection(options_from_url(url))
        await connection.open()
        try:
            return await story(connection)
        finally:
            await connection.close()

    with other_server(tmp_path / "server", limited(tmp_path, "max_file: 20000")) as url:
        assert asyncio.run(main(url.replace("nats://", "nats://u:p@"))) % 30 != 0


def test_an_operator_may_bound_a_store_that_was_made_without_a_bound(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/{new_id()}"

    async def bounded(store: JetStreamStore) -> None:
        for name in (store.names.state, store.names.audit):
            assert (await stream_info(store.connection, name)).config["max_bytes"] == -1
            await update(store.connection, name, max_bytes=10 << 20, discard="new")

    async def spoilt(store: JetStreamStore) -> None:
        await update(store.connection, store.names.audit, discard="old")

    async def nothing(store: JetStreamStore) -> None: ...

    asyncio.run(with_store(url, bounded))
    asyncio.run(with_store(url, spoilt))
    with pytest.raises(StoreVersionError, match="max_bytes is 10485760, and discard is not new"):
        asyncio.run(with_store(url, nothing))


def test_a_bound_beyond_the_limit_of_the_account_is_refused_when_the_store_is_made(tmp_path: Path) -> None:
    async def nothing(store: JetStreamStore) -> None: ...

    with other_server(tmp_path / "server", limited(tmp_path, "max_file: 3MB")) as url:
        mine = url.replace("nats://", "nats://u:p@")
        with pytest.raises(StoreUnavailableError, match=r"_audit cannot be made .*nats\.max_bytes"):
            asyncio.run(with_store(mine, nothing, max_bytes=2 << 20))
        asyncio.run(with_store(f"{mine}/small", nothing, max_bytes=1 << 19))
