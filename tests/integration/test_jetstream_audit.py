"""The audit log on JetStream with several processes: their chains, their packs, tampering and retention."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.model.chain import Head, link
from reefknot.audit.port import AuditEntry, AuditQuery, pages_of, start_of_newest
from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreFullError, StoreUnavailableError
from reefknot.queue.model.work import WorkItem
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import audit_log, commits, events
from reefknot.stores.jetstream.audit_log import JetStreamAuditLog
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.events import Pack
from reefknot.stores.jetstream.reads import StreamMessage, last_message, scan
from reefknot.stores.jetstream.requests import UnansweredError
from reefknot.stores.jetstream.store import JetStreamStore
from reefknot.stores.opening import open_store
from reefknot.testing.conformance.harness import event, event_types
from tests.nats_servers import kill, restart
from tests.stories import LONGEST_S, InLoop

pytestmark = pytest.mark.real_time

Open = Callable[[], Awaitable[JetStreamStore]]


@asynccontextmanager
async def opening(server: NatsServer, **options: Any) -> AsyncIterator[Open]:
    """A function that opens a store over the same streams, as one more process would."""
    name, opened = new_id(), []

    async def another() -> JetStreamStore:
        store = await JetStreamStore.open(server.url, VirtualClock(), name=name, has_server_time=False, **options)
        opened.append(store)
        return store

    try:
        yield another
    finally:
        for store in opened:
            await store.close()


@pytest.fixture
def another(nats_server: NatsServer) -> InLoop:
    return InLoop(lambda: opening(nats_server))


@pytest.fixture
def store(nats_server: NatsServer) -> InLoop:
    """A store over streams of its own."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[JetStreamStore]:
        async with opening(nats_server) as another:
            yield await another()

    return InLoop(opened)


async def kinds_in_order(store: JetStreamStore) -> list[str]:
    """The types of all events, whose positions ascend."""
    kept = await store.audit.read()
    assert all(one.sequence < other.sequence for one, other in pairwise(kept))
    return [one.entry.event_type for one in kept]


async def packs(store: JetStreamStore) -> list[StreamMessage]:
    return await scan(store.connection, store.names.state, [store.names.packs])


async def test_two_writers_have_a_chain_each_in_one_log(another: Open) -> None:
    one, two = await another(), await another()
    for number in range(5):
        first = await one.audit.append([event(f"a{number}"), event(f"b{number}")])
        second = await two.audit.append([event(f"c{number}")])
    expected = [f"{name}{number}" for number in range(5) for name in "abc"]
    for store in (one, two, await another()):
        assert await kinds_in_order(store) == expected
        assert await store.audit.heads() == [first, second]
        assert await store.audit.verify() == []
        assert await store.audit.verify(first) == await store.audit.verify(second) == []
    assert first.chain != second.chain
    assert (first.sequence, second.sequence) == (10, 5)
    assert (await one.audit.head(), await two.audit.head()) == (first, second)


async def test_many_writers_at_once_lose_and_repeat_nothing(another: Open) -> None:
    stores = [await another() for _ in range(4)]
    await asyncio.gather(*(one.audit.append([event("a"), event("b")]) for one in stores for _ in range(100)))
    reader = await another()
    assert len(await reader.audit.read()) == 800
    assert [one.sequence for one in await reader.audit.heads()] == [200] * 4
    assert await reader.audit.verify() == []


async def test_a_reader_that_never_wrote_sees_the_head_of_the_last_writer_and_leaves_no_trace(another: Open) -> None:
    writer, reader = await another(), await another()
    assert (await reader.audit.head()).sequence == 0
    assert await reader.audit.heads() == []
    assert await reader.audit.read() == []
    waiting = asyncio.create_task(reader.audit.wait(0, LONGEST_S))
    head = await writer.audit.append([event("a")])
    assert await waiting
    assert await reader.audit.head() == head
    assert await event_types(reader) == ["a"]
    of_reader = [reader.names.chain(reader._writer.head.chain), reader.names.writer(reader._writer.head.chain)]
    assert [await last_message(reader.connection, reader.names.state, one) for one in of_reader] == [None, None]


async def test_an_event_is_a_cloud_event_with_its_body_byte_for_byte(store: JetStreamStore) -> None:
    body = '{"event_type":"a","text":"naïve 🪢"}'.encode()
    entry = AuditEntry(body, "a", 1_700_000_000_123, "c1", "t1", "order 7")
    odd = AuditEntry(b" not json", "odd.type", 10**18, "", None, "")
    head = await store.audit.append([entry, odd])
    assert [one.entry for one in await store.audit.read()] == [entry, odd]
    (found,) = await packs(store)
    assert body in found.body
    assert found.subject == f"{store.names.name}.audit.{head.chain}.1._"
    origin = {"specversion": "1.0", "id": f"{head.chain}/1", "source": f"reefknot/{store.names.name}"}
    what = {"type": "reefknot.a", "time": "2023-11-14T22:13:20.123Z", "subject": "order 7"}
    ids = {"correlationid": "c1", "traceid": "t1", "chain": head.chain, "chainsequence": "1", "chainhash": None}
    body_of = {"datacontenttype": "application/json", "data": None}
    first, second = json.loads(found.body)
    assert {**first, "data": None, "chainhash": None} == origin | what | ids | body_of
    assert (second["chainsequence"], second["chainhash"]) == ("2", head.hash)
    assert await store.audit.verify() == []


async def test_the_newest_of_a_rare_kind_are_found(monkeypatch: pytest.MonkeyPatch, store: JetStreamStore) -> None:
    """Windows of a few messages, of which most are none of the log, so that they have to grow and be cut."""
    monkeypatch.setattr(audit_log, "MOST_PACKS_AT_ONCE", 3)
    monkeypatch.setattr(audit_log, "FULL_WINDOW", 4)
    kinds = ["rare" if number % 50 == 3 else "common" for number in range(300)]
    all_of_them = [event(kind, work_id=f"w{number % 9}") for number, kind in enumerate(kinds)]
    at = 0
    for size in (1, 2, 40, 7, 1, 1, 90, 3, 5, 100, 50):
        await store.audit.append(all_of_them[at : at + size])
        for number in range(size % 30):
            await store.control.report(f"s{number % 3}", "{}", keep=60.0)
        at += size
    assert at == 300
    everything = await store.audit.read(AuditQuery(limit=1000))
    assert [one.entry for one in everything] == all_of_them
    place = [one.sequence for one in everything]
    for query in (
        AuditQuery(event_type="rare", newest_first=True, limit=4),
        AuditQuery(event_type="rare", newest_first=True),
        AuditQuery(work_id="w5", newest_first=True, before=place[200], after=place[20], limit=11),
        AuditQuery(work_id="w5", event_type="common", after=place[20], limit=11),
        AuditQuery(newest_first=True, before=place[100], limit=30),
        AuditQuery(newest_first=True, before=place[43], after=place[2], limit=100),
        AuditQuery(after=place[60], before=place[64]),
        AuditQuery(newest_first=True, limit=1),
    ):
        matching = [one for one in everything if query.matches(one.entry) and one.sequence > query.after]
        matching = [one for one in matching if query.before is None or one.sequence < query.before]
        expected = matching[:: -1 if query.newest_first else 1][: query.limit]
        assert await store.audit.read(query) == expected
    page_of = [one async for page in pages_of(store.audit, AuditQuery(work_id="w1")) for one in page]
    assert page_of == [one for one in everything if one.entry.work_id == "w1"]
    assert await start_of_newest(store.audit, 30) == place[270]
    assert (await start_of_newest(store.audit, 300), await start_of_newest(store.audit, 299)) == (0, place[1])
    chain = (await store.audit.head()).chain
    assert [one.sequence for one in await store.audit.read_chain(chain, after=20, limit=40)] == list(range(21, 61))
    assert [one.sequence for one in await store.audit.read_chain(chain, after=60, limit=500)] == list(range(61, 301))


async def test_the_packs_of_a_batch_are_bounded_and_say_what_they_are_about(
    monkeypatch: pytest.MonkeyPatch, store: JetStreamStore
) -> None:
    monkeypatch.setattr(events, "MOST_EVENTS", 3)
    await store.audit.append([event(f"e{number}", work_id="order 7") for number in range(7)])
    await store.audit.append([event("a", work_id="x"), event("b", work_id="y")])
    await store.audit.append([event("operator_action", work_id="x")])
    head = await store.audit.append([event("of x", work_id="x")])
    stem = f"{store.names.name}.audit.{head.chain}"
    about = ["1.=b3JkZXIgNw", "4.=b3JkZXIgNw", "7.=b3JkZXIgNw", "8._", "10.@rare", "11.x"]
    assert [one.subject for one in await packs(store)] == [f"{stem}.{one}" for one in about]
    of_x = await store.audit.read(AuditQuery(work_id="x"))
    assert [one.entry.event_type for one in of_x] == ["a", "operator_action", "of x"]
    assert [one.entry.event_type for one in await store.audit.read(AuditQuery(event_type="operator_action"))] == [
        "operator_action"
    ]
    assert await store.audit.verify(head) == []


async def test_packs_from_outside_of_the_time_that_is_asked_for_are_not_read(
    monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer
) -> None:
    """The control is a store whose clock is not the server's: there every pack is read."""
    monkeypatch.setattr(audit_log, "APART_MS", 0)
    monkeypatch.setattr(audit_log, "DELAYED_MS", 0)
    name = new_id()
    async with open_store(f"{nats_server.url}/{name}", tidy=False) as store:
        assert isinstance(store, JetStreamStore)
        stored: list[int] = []
        while len(set(stored)) < 12:
            await store.audit.append([event("e", at=store.moment().wall)])
            stored = [one.stored_at for one in await packs(store)]
        times = sorted(set(stored))
        virtual = await JetStreamStore.open(nats_server.url, VirtualClock(), name=name, has_server_time=False)
        query = AuditQuery(since=times[4], until=times[8])
        for reader, expected in ((store, [at for at in stored if times[4] <= at <= times[8]]), (virtual, stored)):
            opened: list[int] = []

            class Counted(Pack):
                def __init__(self, message: StreamMessage, opened: list[int] = opened) -> None:
                    opened.append(message.stored_at)
                    super().__init__(message)

            with monkeypatch.context() as patched:
                patched.setattr(audit_log, "Pack", Counted)
                await reader.audit.read(query)
            assert opened == expected
        monkeypatch.undo()  # with what clocks may be apart, all find the same
        found = await virtual.audit.read(query)
        for reader in (store, virtual):
            assert await reader.audit.read(query) == found
            assert (await reader.audit.read(structs.replace(query, newest_first=True)))[::-1] == found
        await virtual.close()


async def test_the_events_of_a_batch_outlive_a_process_that_dies_right_after_it(another: Open) -> None:
    """Nothing is left to do for them: the control is the connection, which is gone before anything else is sent."""
    victim = await another()
    await victim.audit.append([event("a"), event("b")])
    head = await victim.audit.append([event("last")])
    await victim.connection.close()
    reader = await another()
    assert await event_types(reader) == ["a", "b", "last"]
    assert await reader.audit.head() == head
    assert await reader.audit.verify(head) == []


@pytest.mark.parametrize("is_sent", [True, False], ids=["stored", "lost"])
async def test_a_lost_answer_counts_once(store: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_sent: bool) -> None:
    send: Any = Connection.store
    asked = []

    async def unanswered(self: Connection, messages: Any) -> int:
        asked.append(len(messages))
        if len(asked) == 1 and not is_sent:
            raise UnansweredError("nats", "no answer", "wait")
        stored = int(await send(self, messages))
        if len(asked) == 1:
            raise UnansweredError("nats", "no answer", "wait")
        return stored

    monkeypatch.setattr(Connection, "store", unanswered)
    await store.audit.append([event("a"), event("b")])
    assert await event_types(store) == ["a", "b"]
    await store.audit.append([event("c")])
    assert await event_types(store) == ["a", "b", "c"]
    assert await store.audit.verify() == []
    assert asked == [1, 1, 1]


async def test_a_foreign_message_where_a_chain_goes_on_ends_the_chain_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, store: JetStreamStore
) -> None:
    monkeypatch.setattr(commits, "MOST_TRIES", 8)
    head = await store.audit.append([event("a")])
    await _publish(store, store.names.pack(head.chain, 2, "x"), b"junk")
    again = await store.audit.append([event("b")])
    assert (again.chain != head.chain, again.sequence) == (True, 1)
    assert await kinds_in_order(store) == ["a", "unreadable", "b"]
    assert len(await store.audit.verify(head)) == 1


async def test_values_survive_a_dead_server_and_a_change_waits_for_it(own_nats_server: NatsServer) -> None:
    async with opening(own_nats_server) as another:
        store = await another()
        kept, gone = [await store.values.put(name, "{}", version=0) for name in ("kept", "gone")]
        assert kept is not None
        assert gone is not None
        assert await store.values.delete("gone", version=gone.version)
        kill(own_nats_server)
        waiting = asyncio.create_task(store.values.put("kept", "[]", version=kept.version, events=[event("changed")]))
        restart(own_nats_server)
        changed = await waiting
        newcomer = await another()
        for one in (store, newcomer):
            assert list(await one.values.list()) == [changed]
            assert await one.values.get("kept") == changed
        assert await event_types(newcomer) == ["changed"]


async def test_the_marker_of_a_batch_without_events_goes_by_itself(store: JetStreamStore) -> None:
    await store.values.put("a", "{}", version=0)
    marker = store.names.writer(store._writer.head.chain)
    assert await last_message(store.connection, store.names.state, marker) is None, "one record needs none"
    await store.work.enqueue([WorkItem(one, "t") for one in "ab"])
    found = await last_message(store.connection, store.names.state, marker)
    assert found is not None
    assert found.headers["Nats-TTL"] == f"{commits.MARKER_S}s"


async def test_what_is_too_large_for_a_message_is_refused(store: JetStreamStore) -> None:
    with pytest.raises(StoreFullError, match="an event has 2000"):
        await store.audit.append([event("huge", correlation_id="c" * 2_000_000)])
    large = [event("large", correlation_id="c" * 300_000) for _ in range(20)]
    head = await store.audit.append(large)
    assert len(await packs(store)) == 10
    assert await kinds_in_order(store) == ["large"] * 20
    assert await store.audit.verify(head) == []
    with pytest.raises(StoreFullError, match="need 20 messages"):
        await store.audit.append(large * 2)
    assert await store.audit.append([event("next")]) == await store.audit.head()
    assert await store.audit.verify() == []


Tamper = Callable[[JetStreamStore], Awaitable[object]]


async def _untouched(store: JetStreamStore) -> None: ...


async def _delete(store: JetStreamStore, number: int) -> None:
    found = (await packs(store))[number - 1]
    await store.connection.api(f"STREAM.MSG.DELETE.{store.names.state}", {"seq": found.sequence})


async def _publish(store: JetStreamStore, subject: str, body: bytes) -> None:
    store.connection.check((await store.connection.request(subject, body)).data)


async def _replace(store: JetStreamStore, number: int, *, onto: str = "", **changes: Any) -> None:
    """Put a changed copy of a pack to the end: a stream cannot be edited in place."""
    found = (await packs(store))[number - 1]
    body = json.dumps([json.loads(found.body)[0] | changes], separators=(",", ":"), ensure_ascii=False).encode()
    await _publish(store, f"{store.names.name}.audit.{onto}" if onto else found.subject, body)


async def _forge(store: JetStreamStore, number: int) -> None:
    """Put another event in the place of the last one of a chain, with a hash that fits."""
    found = (await packs(store))[number - 1]
    event = json.loads(found.body)[0]
    before = next(one for one in await store.audit.heads() if one.chain == event["chain"])
    (kept,) = await store.audit.read_chain(before.chain, after=before.sequence - 2, limit=1)
    head, _ = link(Head(before.chain, before.sequence - 1, kept.hash), b'{"event_type":"x"}')
    await _replace(store, number, data={"event_type": "x"}, type="reefknot.x", chainhash=head.hash)


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (_untouched, ""),
        (lambda store: _delete(store, 3), "expected number 2"),
        (lambda store: _delete(store, 1), "expected number 1"),
        (lambda store: _delete(store, 6), "cut off: the head is at 3"),
        (lambda store: _replace(store, 4), "expected number 2"),
        (lambda store: _replace(store, 2, data={"event_type": "x"}), "expected number 1"),
        (lambda store: _replace(store, 5, data={"event_type": "x"}), "does not fit the body"),
        (lambda store: _replace(store, 5, chainsequence="4"), "misplaced"),
        (lambda store: _replace(store, 5, source="elsewhere"), "misplaced"),
        (lambda store: _replace(store, 5, onto="other.3._"), "misplaced"),
        (lambda store: _replace(store, 5, onto="other.1.x"), "misplaced"),
        (lambda store: _publish(store, f"{store.names.name}.audit.other.1._", b"junk"), "no pack of events"),
        (lambda store: _publish(store, f"{store.names.name}.audit.other.1._", b"[]"), "no pack of events"),
        (lambda store: _forge(store, 6), "the hash is not the one of the head"),
    ],
    ids=[
        *("nothing", "removed", "beginning cut", "end cut", "put behind", "beginning replaced", "other words"),
        *("other number", "other source", "of another chain", "another chain's beginning", "junk", "empty", "forged"),
    ],
)
async def test_verification_finds_what_a_raw_client_did(another: Open, tamper: Tamper, problem: str) -> None:
    one, two = await another(), await another()
    for number in range(3):
        heads = [await store.audit.append([event(f"e{number}")]) for store in (one, two)]
    reader = await another()
    await tamper(reader)
    reports = await reader.audit.verify_chains(heads)
    found = [each.problem for report in reports for each in report.mismatches]
    assert any(problem in each for each in found) if problem else found == [], found


async def test_a_message_that_is_no_event_shows_in_the_log_and_stops_nothing(store: JetStreamStore) -> None:
    head = await store.audit.append([event("a")])
    await _publish(store, f"{store.names.name}.audit.{head.chain}.x", b"junk")
    await store.audit.append([event("b")])
    assert await event_types(store) == ["a", "unreadable", "b"]
    (found,) = await store.audit.verify()
    assert found.sequence == 2


async def test_an_event_that_is_damaged_hides_none_of_its_pack(store: JetStreamStore) -> None:
    head = await store.audit.append([event("a"), event("b"), event("c")])
    (found,) = await packs(store)
    first, second, third = json.loads(found.body)
    await _publish(store, found.subject, json.dumps([first, second | {"time": 7}, third]).encode())
    assert await event_types(store) == ["a", "unreadable", "c"]
    assert [one.sequence for one in await store.audit.read_chain(head.chain)] == [1, 2, 3]
    assert any("is no pack of events of this log" in one.problem for one in await store.audit.verify())


async def _three_chains(another: Open) -> list[JetStreamStore]:
    """Events of three processes, one every ten milliseconds: 0 1 2 0 1 2 0 1 2."""
    stores = [await another() for _ in range(3)]
    for at in range(9):
        await stores[at % 3].audit.append([event(f"e{at}", at=10 * at)])
    return stores


async def test_retention_anchors_every_chain_whose_beginning_goes(another: Open) -> None:
    stores = await _three_chains(another)
    heads = [await store.audit.head() for store in stores]
    assert await stores[0].audit.trim(50) == 5
    assert await event_types(stores[1]) == ["e5", "e6", "e7", "e8", "anchor", "anchor", "anchor"]
    assert await stores[1].audit.trim(70) == 2
    types = ["e7", "e8", "anchor", "anchor", "anchor", "anchor", "anchor"]
    assert await event_types(stores[0]) == types
    reader = await another()
    assert await reader.audit.verify() == []
    assert [one.mismatches for one in await reader.audit.verify_chains(heads)] == [[], [], []]
    assert {one.chain for one in await reader.audit.heads()} == {one.chain for one in heads}


async def test_an_anchor_that_goes_is_written_again_while_its_chain_has_events(another: Open) -> None:
    quiet, busy = await another(), await another()
    await quiet.audit.append([event("q1", at=1)])
    await busy.audit.append([event("b1", at=5)])
    assert await busy.audit.trim(2) == 1
    written_at = (await busy.audit.read())[-1].entry.at
    await busy.audit.append([event("b2", at=written_at + 1)])
    head = await quiet.audit.append([event("q2", at=written_at + 10)])
    assert await event_types(busy) == ["b1", "anchor", "b2", "q2"]
    assert await busy.audit.trim(written_at + 5) == 3
    assert await event_types(busy) == ["q2", "anchor", "anchor"]
    reader = await another()
    assert await reader.audit.verify() == []
    assert await reader.audit.verify(head) == []


async def test_retention_with_many_chains_goes_in_steps(monkeypatch: pytest.MonkeyPatch, another: Open) -> None:
    monkeypatch.setattr(audit_log, "MOST_CHAINS_AT_ONCE", 2)
    stores = await _three_chains(another)
    assert await stores[0].audit.trim(70) == 7
    assert await stores[0].audit.verify() == []
    assert (await event_types(stores[0]))[:2] == ["e7", "e8"]


async def test_retention_that_died_before_its_purge_goes_on(monkeypatch: pytest.MonkeyPatch, another: Open) -> None:
    async def fails(self: JetStreamAuditLog, until: int) -> None:
        raise StoreUnavailableError("nats", "died", "open again")

    stores = await _three_chains(another)
    with monkeypatch.context() as patch:
        patch.setattr(JetStreamAuditLog, "_purge", fails)
        with pytest.raises(StoreUnavailableError):
            await stores[0].audit.trim(50)
    assert await stores[1].audit.verify() == []
    assert len(await event_types(stores[1])) == 12
    assert await stores[1].audit.trim(50) == 0
    assert len(await event_types(stores[1])) == 7
    assert await stores[1].audit.verify() == []


async def test_processes_that_trim_at_once_remove_everything_once(another: Open) -> None:
    stores = await _three_chains(another)
    gone = await asyncio.gather(*(store.audit.trim(70) for store in stores))
    assert sum(gone) == 7
    assert await stores[0].audit.verify() == []


async def test_a_removal_without_retention_shows(another: Open) -> None:
    """The control of the anchors: a purge by hand."""
    stores = await _three_chains(another)
    head: Head = await stores[0].audit.head()
    sixth = (await packs(stores[0]))[5]
    gone = {"filter": stores[0].names.packs, "seq": sixth.sequence}
    await stores[0].connection.api(f"STREAM.PURGE.{stores[0].names.state}", gone)
    found = [one.problem for one in await stores[0].audit.verify()]
    assert len(found) >= 3
    assert await stores[0].audit.verify(head) != []


async def test_retention_removes_whole_packs_and_no_records(another: Open) -> None:
    one, two = await another(), await another()
    await one.audit.append([event("a", at=10), event("b", at=20)])
    await one.work.enqueue([WorkItem("job", "t")])
    await two.audit.append([event("c", at=15), event("d", at=90)])
    assert await one.audit.trim(15) == 0, "its newest event is not from before"
    assert await one.audit.removed_up_to() == 0
    first, second, *_ = await one.audit.read()
    assert await one.audit.trim(50) == 2
    assert await one.audit.removed_up_to() == second.sequence == first.sequence + 1
    assert (await event_types(two))[:2] == ["c", "d"]
    assert await two.audit.verify() == []
    reader = await another()
    assert (await reader.work.get("job")) is not None
    assert await reader.audit.verify() == []
