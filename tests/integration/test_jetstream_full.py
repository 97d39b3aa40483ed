"""
A store on NATS that is full: a change that does not fit is refused as a whole, by a bound of the stream itself.

The limits of an account or a server do not do that: the control shows what they leave.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreError, StoreFullError, StoreUnavailableError, StoreVersionError
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Held, Settlement, WorkClaim
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import JetStreamStore, options_from_url, work
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.streams import stream_info
from tests.acceptance.test_nats_commands import other_server

pytestmark = pytest.mark.real_time

JOBS = 10
RESULT = '"' + "r" * 100 + '"'


def limited(folder: Path, limits: str) -> str:
    """The configuration of a server with one account, which has these limits."""
    return f"""
        jetstream {{ store_dir: "{folder / "server" / "data"}" }}
        accounts {{ A: {{ jetstream: {{ {limits} }}, users: [{{user: u, password: p}}] }} }}
    """


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[JetStreamStore]:
    store = await JetStreamStore(options_from_url(url, **options), SystemClock()).start()
    try:
        yield store
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


async def test_what_a_bounded_stream_has_no_room_for_is_refused_as_a_whole(nats_server: NatsServer) -> None:
    """Wherever the bound falls within a batch: the jobs are running, or have succeeded, and none is gone."""
    refused = 0
    async with opened(f"{nats_server.url}/{new_id()}", max_bytes=1 << 30) as store:
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


async def test_control_an_account_that_is_full_keeps_a_part_of_a_batch(tmp_path: Path) -> None:
    """Why there is a bound. If this fails, the server has been mended, and the guide has a warning too many."""
    stream = {"name": "s", "subjects": ["s.>"], "storage": "file", "allow_atomic": True}
    with other_server(tmp_path / "server", limited(tmp_path, "max_file: 20000")) as url:
        connection = Connection(options_from_url(url.replace("nats://", "nats://u:p@")))
        await connection.open()
        try:
            await connection.api("STREAM.CREATE.s", stream)
            with pytest.raises(StoreError):  # noqa: PT012 - whichever batch it is
                for number in range(4):
                    await connection.store([(f"s.{number}.{place}", b"x" * 100, {}) for place in range(30)])
            assert int((await stream_info(connection, "s")).state["messages"]) % 30 != 0
        finally:
            await connection.close()


async def test_an_operator_may_bound_a_store_that_was_made_without_a_bound(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/{new_id()}"
    async with opened(url) as store:
        assert (await stream_info(store.connection, store.names.state)).config["max_bytes"] == -1
        await update(store.connection, store.names.state, max_bytes=10 << 20, discard="new")
    async with opened(url) as store:
        await update(store.connection, store.names.state, discard="old")
    with pytest.raises(StoreVersionError, match="max_bytes is 10485760, and discard is not new"):
        async with opened(url):
            pass


async def test_a_bound_beyond_the_limit_of_the_account_is_refused_when_the_store_is_made(tmp_path: Path) -> None:
    with other_server(tmp_path / "server", limited(tmp_path, "max_file: 3MB")) as url:
        mine = url.replace("nats://", "nats://u:p@")
        with pytest.raises(StoreUnavailableError, match=r"_state cannot be made .*nats\.max_bytes"):
            async with opened(mine, max_bytes=4 << 20):
                pass
        async with opened(f"{mine}/small", max_bytes=1 << 19):
            pass


@pytest.mark.parametrize("most", [300, 1000], ids=["", "control: a change for all of them"])
async def test_reports_of_more_work_than_a_batch_has_room_for_are_kept(
    monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, most: int
) -> None:
    """A worker with many slots renews all its leases at once, and may report as many ends."""
    async with opened(f"{nats_server.url}/{new_id()}") as store:
        for start in range(0, 1000, 500):
            await store.work.enqueue([WorkItem(f"a{start + number}", "t", "io") for number in range(500)])
        monkeypatch.setattr(work, "MOST_HELD", 300)
        terms = WorkClaim(owner="w", classes=["io"])
        held = [Held.of(one) for _ in range(2) for one in await store.work.claim(1000, terms)]
        monkeypatch.setattr(work, "MOST_HELD", most)
        assert len(held) == 1000
        ends = [Settlement(one.id, "w", one.fence, WorkDone("1")) for one in held]
        if most > 300:
            with pytest.raises(StoreFullError):
                await store.work.renew(held)
            with pytest.raises(StoreFullError):
                await store.work.settle(ends)
        else:
            assert await store.work.renew(held) == [True] * 1000
            assert await store.work.settle(ends) == [True] * 1000
