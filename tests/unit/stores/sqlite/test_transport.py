"""Messages as rows: what is written and what is not, who holds up whom, and what is cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.core.time import Moment
from reefknot.queue.model.messages import ACK, RESULT
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.transport import Delivery
from reefknot.queue.port.work_queue import FIRST_FENCE, Enqueue, Settlement
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore, transport
from reefknot.stores.sqlite import message_rows as messages
from reefknot.stores.sqlite.transaction import RecordCaches, Transaction
from tests.stories import InLoop
from tests.unit.stores.sqlite.stores_on_a_file import by_hand

pytestmark = pytest.mark.real_time
LONGEST_S = 20.0


class Fleet:
    """Stores over one file, each with one end, as so many processes would have."""

    def __init__(self, path: Path, count: int) -> None:
        self.clock = VirtualClock()
        self.path = path
        self.stores = [SqliteStore(self.path, self.clock) for _ in range(count)]
        self.ends: list[transport.SqliteTransport] = []

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Fleet]:
        for store in self.stores:
            await store.start()
        self.ends = [store.transport() for store in self.stores]
        try:
            async with asyncio.timeout(LONGEST_S):
                yield self
        finally:
            for end in self.ends:
                await end.close()
            for store in self.stores:
                await store.close()

    def ask(self, query: str) -> Any:
        return by_hand(self.path, query)

    async def cleared(self, *ends: transport.SqliteTransport) -> None:
        for end in ends:
            end._is_announced = False
            end._announce()
            assert end._announcing is not None
            await asyncio.wait([end._announcing])


@pytest.fixture
def fleet(request: pytest.FixtureRequest, path: Path) -> InLoop:
    """Two ends, or as many as the test's parameter `fleet` says."""
    return InLoop(Fleet(path, getattr(request, "param", 2)).up)


def ends(number: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fleet", [number], indirect=True, ids=[""])


MESSAGES = "SELECT count(*) FROM message"


async def body(line: AsyncIterator[Delivery]) -> bytes:
    return (await anext(line)).body


@ends(1)
async def test_what_only_this_process_listens_to_is_not_written(fleet: Fleet) -> None:
    (alone,) = fleet.ends
    line = alone.subscribe("a")
    await alone.publish("a", b"1")
    assert await body(line) == b"1"
    await alone.close()
    assert fleet.ask(MESSAGES) == 0


@ends(3)
async def test_what_is_listened_to_elsewhere_is_written_once_and_heard_here_too(fleet: Fleet) -> None:
    lines = [end.subscribe("a") for end in fleet.ends]
    await fleet.cleared(*fleet.ends, fleet.ends[0])
    await fleet.ends[0].publish("a", b"1")
    assert [await body(line) for line in lines] == [b"1"] * 3
    assert fleet.ask(MESSAGES) == 1


@pytest.mark.parametrize(
    ("subject", "is_walk"),
    [("a", False), pytest.param("far", True, id="control: a message for the one that is behind")],
)
@ends(1)
async def test_a_message_costs_no_more_because_others_have_much_to_read(
    fleet: Fleet, subject: str, *, is_walk: bool
) -> None:
    """Every idle process is behind by what the others have sent each other since it last looked."""
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    connection = apsw.Connection(str(fleet.path))
    row = "('far', 'elsewhere', '[\"far\"]', 10, 0, 0)"
    connection.execute(f"INSERT INTO listener VALUES {row}; UPDATE listener SET seen_at = 5000")
    rows = [(0, "x", "", "other", str(number), "{}", b"") for number in range(5000)]
    with connection:
        connection.executemany("INSERT INTO message VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", rows)
    connection.set_progress_handler(count, 10)
    try:
        transaction = Transaction(connection, Moment(wall=5000, steady=5000), RecordCaches())
        assert messages.publish_batch(transaction, [("here", "", subject, "new", "{}", b"")]) == [True]
    finally:
        connection.close()
    assert (steps > 1000) is is_walk, steps


async def test_an_older_list_that_arrives_late_hides_no_one_who_was_heard_meanwhile(fleet: Fleet) -> None:
    near, far = fleet.ends
    own, theirs = near.subscribe("a"), far.subscribe("a")
    await fleet.cleared(near)
    looked = near._looked
    await fleet.cleared(far, near)
    late: asyncio.Future[list[messages.Listener]] = asyncio.get_running_loop().create_future()
    late.set_result([])  # as a thread hands it in that was held up between its commit and its answer
    near._announced([], looked, late)
    await near.publish("a", b"1")
    assert (await body(own), await body(theirs)) == (b"1", b"1")
    await far.close()
    async with asyncio.timeout(30):
        while near._other_subjects:  # a look of its own in the same moment adds what it saw, and the next counts
            await fleet.cleared(near)


@ends(1)
async def test_an_end_that_leaves_is_not_announced_again_by_what_was_on_its_way(fleet: Fleet) -> None:
    """An announcement that is not urgent waits for company, and may be written after the farewell."""
    (end,) = fleet.ends
    end.subscribe("a")
    await fleet.cleared(end)
    assert fleet.ask("SELECT count(*) FROM listener") == 1
    end._announce()
    assert end._announcing is not None
    written = end._announcing
    await end.close()
    await written
    assert fleet.ask("SELECT count(*) FROM listener") == 0


@ends(3)
async def test_one_id_from_two_processes_is_delivered_once(fleet: Fleet) -> None:
    one, two, listener = fleet.ends
    line = listener.subscribe("a")
    await one.publish("a", b"1", message_id="x")
    assert await body(line) == b"1"
    await two.publish("a", b"again", message_id="x")
    await two.publish("a", b"2", message_id="y")
    assert await body(line) == b"2"


async def test_a_listener_that_is_not_seen_any_more_holds_up_no_one_and_one_that_is_does(fleet: Fleet) -> None:
    near, far = fleet.ends
    far.subscribe("a", limit=1)
    await fleet.cleared(far)
    assert far._services.cancel()  # its process is frozen
    message = (near._origin, "", "a", None, "{}", b"")
    assert [await near._context.write(messages.publish_batch, message) for _ in range(2)] == [True, False]
    fleet.clock.advance(messages.GONE_AFTER_MS / 1000 + 1)
    assert await near._context.write(messages.publish_batch, message) is True


async def test_messages_that_everybody_has_read_go_after_a_while_and_ids_with_them(fleet: Fleet) -> None:
    near, far = fleet.ends
    line = far.subscribe("a")
    await near.publish("a", b"1", message_id="x")
    assert await body(line) == b"1"
    for seconds, left in ((0.0, 1), (messages.WINDOW_MS / 1000, 0)):  # the id is remembered for a while
        fleet.clock.advance(seconds)
        await fleet.cleared(far)
        assert fleet.ask(MESSAGES) == left


async def test_a_message_that_a_living_listener_has_not_read_stays_longer_but_not_for_ever(fleet: Fleet) -> None:
    near, far = fleet.ends
    far.subscribe("a")
    await near.publish("a", b"1")
    while fleet.ask(MESSAGES) != 1:  # noqa: ASYNC110 - another connection writes it
        await asyncio.sleep(0.005)
    for seconds, left in ((messages.WINDOW_MS / 1000 + 1, 1), (messages.LONGEST_MS / 1000, 0)):
        fleet.clock.advance(seconds)
        await fleet.cleared(far)
        assert fleet.ask(MESSAGES) == left


@ends(1)
async def test_what_is_left_of_an_earlier_boot_goes_at_once_and_its_numbers_are_not_given_again(fleet: Fleet) -> None:
    (end,), later = fleet.ends, int(fleet.clock.now() * 1000) + 10_000_000
    fleet.ask(
        "INSERT INTO message (at, origin, recipient, subject, headers, body) "
        f"VALUES ({later}, 'gone', '', 'a', '{{}}', x'');"
        f"INSERT INTO listener VALUES ('gone', 'gone', '[\"a\"]', 1, 0, {later})"
    )
    line = end.subscribe("a")
    await fleet.cleared(end)
    assert fleet.ask(MESSAGES) == 0
    assert fleet.ask("SELECT count(*) FROM listener WHERE origin = 'gone'") == 0
    other = fleet.stores[0].transport()
    await other.publish("a", b"new")
    assert await body(line) == b"new"
    assert fleet.ask("SELECT min(seq) FROM message") == 2
    await other.close()


async def test_a_result_is_sent_in_the_transaction_that_keeps_it_and_never_without(fleet: Fleet) -> None:
    """Its ack, which waits for a transaction, comes before it. The control: what is lost, and what has no room."""
    near, far = fleet.ends
    work, line = fleet.stores[0].work, far.subscribe(ACK, RESULT, limit=2)
    await fleet.cleared(far, near)
    items = [WorkItem(name, "assignment", "cpu") for name in "abcd"]
    await work.enqueue(items, Enqueue(owner="w"))

    def report(name: str, fence: int = FIRST_FENCE) -> Settlement:
        notice = near.notice(RESULT, name.encode(), message_id=f"{name}/0", to=far._origin)
        return Settlement(name, "w", fence, WorkDone("{}"), notice=notice)

    reports = [report("a"), report("b", fence=7), report("c")]
    await near.publish(ACK, b"ack", to=far._origin)
    before = fleet.stores[0].batches
    assert await work.settle(reports) == [True, False, True]
    assert fleet.stores[0].batches == before + 1
    assert [one.notice is not None and one.notice.is_sent for one in reports] == [True, False, False]
    assert [await body(line), await body(line)] == [b"ack", b"a"]
    assert near.notice(RESULT, b"", message_id="d/0", to=near._origin) is None, "it is heard here"


async def test_many_messages_share_few_transactions(fleet: Fleet) -> None:
    """A sender does not wait for the disk, message by message."""
    near, far = fleet.ends
    line, before = far.subscribe("a"), fleet.stores[0].batches
    for number in range(500):
        await near.publish("a", str(number).encode())
    assert [await body(line) for _ in range(500)] == [str(number).encode() for number in range(500)]
    assert fleet.stores[0].batches - before < 250


async def test_an_unwritable_message_is_told_and_forgotten(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    near, far = fleet.ends
    line = far.subscribe("a")
    await near.publish("\ud800", b"no text that SQLite takes", message_id="x")
    while "could not be written to the store" not in caplog.text:  # noqa: ASYNC110 - a log line sets no event
        await asyncio.sleep(0.005)
    assert "\ud800 x" not in near._seen
    await near.publish("a", b"goes on")
    assert await body(line) == b"goes on"


async def test_a_reader_that_meets_trouble_says_so_and_goes_on(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "AGAIN_S", 0.01)
    real, failures = messages.news, [OSError("not now")]

    def news(connection: apsw.Connection, **wanted: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(connection, **wanted)

    monkeypatch.setattr(messages, "news", news)
    near, far = fleet.ends
    line = far.subscribe("a")
    await near.publish("a", b"1")
    assert await body(line) == b"1"
    assert "cannot be read" in caplog.text
