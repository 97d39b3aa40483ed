"""Messages as rows: what is written and what is not, who holds up whom, and what is cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.queue.port.transport import Delivery
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore, transport
from reefknot.stores.sqlite import message_rows as messages
from reefknot.stores.sqlite.transport import SqliteTransport

pytestmark = pytest.mark.real_time

LONGEST_S = 20.0


class Fleet:
    """Stores over one file, each with one end, as so many processes would have."""

    def __init__(self, path: Path, count: int) -> None:
        self.clock = VirtualClock()
        self.path = path / "state.db"
        self.stores = [SqliteStore(self.path, self.clock) for _ in range(count)]
        self.ends: list[SqliteTransport] = []

    @asynccontextmanager
    async def up(self) -> AsyncIterator[list[SqliteTransport]]:
        for store in self.stores:
            await store.start()
        self.ends = [store.transport() for store in self.stores]
        try:
            async with asyncio.timeout(LONGEST_S):
                yield self.ends
        finally:
            for end in self.ends:
                await end.close()
            for store in self.stores:
                await store.close()

    def ask(self, query: str) -> Any:
        connection = apsw.Connection(str(self.path))
        try:
            return connection.execute(query).get
        finally:
            connection.close()

    async def until(self, query: str, wanted: object) -> None:
        while self.ask(query) != wanted:  # noqa: ASYNC110 - another connection writes it
            await asyncio.sleep(0.005)

    async def cleared(self, end: SqliteTransport) -> None:
        """What an end does every second, now."""
        end._is_announced = False
        end._announce()
        assert end._announcing is not None
        await asyncio.wait([end._announcing])


async def body(line: AsyncIterator[Delivery]) -> bytes:
    return (await anext(line)).body


async def test_what_only_this_process_listens_to_is_not_written(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    async with fleet.up() as (alone,):
        line = alone.subscribe("a")
        await alone.publish("a", b"1")
        assert await body(line) == b"1"
    assert fleet.ask("SELECT count(*) FROM message") == 0


async def test_what_somebody_elsewhere_listens_to_is_written_once_and_heard_here_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    async with fleet.up() as (near, far, farther):
        lines = [end.subscribe("a") for end in (near, far, farther)]
        for end in (near, far, farther):
            await fleet.cleared(end)
        await fleet.cleared(near)
        await near.publish("a", b"1")
        assert [await body(line) for line in lines] == [b"1"] * 3
        assert fleet.ask("SELECT count(*) FROM message") == 1


async def test_an_older_list_that_arrives_late_hides_nobody_who_was_heard_meanwhile(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    async with fleet.up() as (near, far):
        own, theirs = near.subscribe("a"), far.subscribe("a")
        await fleet.cleared(near)
        looked = near._looked
        await fleet.cleared(far)
        await fleet.cleared(near)
        late: asyncio.Future[list[messages.Listener]] = asyncio.get_running_loop().create_future()
        late.set_result([])  # as a thread hands it in that was held up between its commit and its answer
        near._announced([], looked, late)
        await near.publish("a", b"1")
        assert (await body(own), await body(theirs)) == (b"1", b"1")
        await far.close()
        async with asyncio.timeout(30):
            while near._other_subjects:  # a look of its own in the same moment adds what it saw, and the next counts
                await fleet.cleared(near)


async def test_an_end_that_leaves_is_not_announced_again_by_what_was_on_its_way(tmp_path: Path) -> None:
    """An announcement that is not urgent waits for company, and may be written after the farewell."""
    fleet = Fleet(tmp_path, 1)
    async with fleet.up() as (end,):
        end.subscribe("a")
        await fleet.cleared(end)
        assert fleet.ask("SELECT count(*) FROM listener") == 1
        end._announce()
        assert end._announcing is not None
        written = end._announcing
        await end.close()
        await written
        assert fleet.ask("SELECT count(*) FROM listener") == 0


async def test_one_id_from_two_processes_is_delivered_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    async with fleet.up() as (one, two, listener):
        line = listener.subscribe("a")
        await one.publish("a", b"1", message_id="x")
        assert await body(line) == b"1"
        await two.publish("a", b"again", message_id="x")
        await two.publish("a", b"2", message_id="y")
        assert await body(line) == b"2"


async def test_a_listener_that_is_not_seen_any_more_holds_up_nobody_and_one_that_is_does(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    async with fleet.up() as (near, far):
        far.subscribe("a", limit=1)
        await fleet.cleared(far)
        assert far._services.cancel()  # its process is frozen
        message = (near._origin, "a", None, "{}", b"")
        assert await near._context.write(messages.publish_batch, message) is True
        assert await near._context.write(messages.publish_batch, message) is False
        fleet.clock.advance(messages.GONE_AFTER_MS / 1000 + 1)
        assert await near._context.write(messages.publish_batch, message) is True


async def test_messages_that_everybody_has_read_go_after_a_while_and_ids_with_them(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    window = messages.WINDOW_MS / 1000
    async with fleet.up() as (near, far):
        line = far.subscribe("a")
        await near.publish("a", b"1", message_id="x")
        assert await body(line) == b"1"
        await fleet.cleared(far)
        assert fleet.ask("SELECT count(*) FROM message") == 1, "the id is remembered for a while"
        fleet.clock.advance(window)
        await fleet.cleared(far)
        assert fleet.ask("SELECT count(*) FROM message") == 0


async def test_a_message_that_a_living_listener_has_not_read_stays_longer_but_not_for_ever(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    async with fleet.up() as (near, far):
        far.subscribe("a")
        await near.publish("a", b"1")
        await fleet.until("SELECT count(*) FROM message", 1)
        for seconds, left in ((messages.WINDOW_MS / 1000 + 1, 1), (messages.LONGEST_MS / 1000, 0)):
            fleet.clock.advance(seconds)
            await fleet.cleared(far)
            assert fleet.ask("SELECT count(*) FROM message") == left


async def test_what_is_left_of_an_earlier_boot_goes_at_once_and_its_numbers_are_not_given_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    async with fleet.up() as (end,):
        later = int(fleet.clock.now() * 1000) + 10_000_000
        connection = apsw.Connection(str(fleet.path))
        insert = "INSERT INTO message (at, origin, subject, headers, body) VALUES (?, 'gone', 'a', '{}', x'')"
        connection.execute(insert, (later,))
        connection.execute("INSERT INTO listener VALUES ('gone', 'gone', '[\"a\"]', 1, 0, ?)", (later,))
        connection.close()
        line = end.subscribe("a")
        await fleet.cleared(end)
        assert fleet.ask("SELECT count(*) FROM message") == 0
        assert fleet.ask("SELECT count(*) FROM listener WHERE origin = 'gone'") == 0
        other = fleet.stores[0].transport()
        await other.publish("a", b"new")
        assert await body(line) == b"new"
        assert fleet.ask("SELECT min(seq) FROM message") == 2
        await other.close()


async def test_many_messages_share_few_transactions(tmp_path: Path) -> None:
    """A sender does not wait for the disk, message by message."""
    fleet = Fleet(tmp_path, 2)
    async with fleet.up() as (near, far):
        line = far.subscribe("a")
        before = fleet.stores[0].batches
        for number in range(500):
            await near.publish("a", str(number).encode())
        assert [await body(line) for _ in range(500)] == [str(number).encode() for number in range(500)]
        assert fleet.stores[0].batches - before < 250


async def test_a_message_that_cannot_be_written_is_told_and_may_be_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(tmp_path, 2)
    async with fleet.up() as (near, far):
        line = far.subscribe("a")
        await near.publish("\ud800", b"no text that SQLite takes", message_id="x")
        while "a message was dropped" not in caplog.text:  # noqa: ASYNC110 - a log line sets no event
            await asyncio.sleep(0.005)
        assert "\ud800 x" not in near._seen
        await near.publish("a", b"goes on")
        assert await body(line) == b"goes on"


async def test_a_reader_that_meets_trouble_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, 2)
    monkeypatch.setattr(transport, "AGAIN_S", 0.01)
    real, failures = messages.news, [OSError("not now")]

    def news(connection: apsw.Connection, **wanted: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(connection, **wanted)

    monkeypatch.setattr(messages, "news", news)
    async with fleet.up() as (near, far):
        line = far.subscribe("a")
        await near.publish("a", b"1")
        assert await body(line) == b"1"
    assert "cannot be read" in caplog.text
