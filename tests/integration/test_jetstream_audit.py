"""The audit log on JetStream with several processes: their chains, their deaths, tampering and retention."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reefknot.audit.model.chain import Head
from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreFullError, StoreUnavailableError
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import audit, audit_log
from reefknot.stores.jetstream.audit import AuditWriter
from reefknot.stores.jetstream.audit_log import JetStreamAuditLog
from reefknot.stores.jetstream.connection import UnansweredError
from reefknot.stores.jetstream.reads import last_message, message_at
from reefknot.stores.jetstream.store import JetStreamStore
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


async def stop_copying(store: JetStreamStore) -> None:
    """End the task that copies events, as the death of the process would."""
    await store._writer.services.stop()


async def died(store: JetStreamStore) -> None:
    """End a store as a kill would: nothing is copied, its outbox stays."""
    await stop_copying(store)
    store._writer._has_outbox = False
    await store.close()


async def positions(store: JetStreamStore) -> list[tuple[int, str]]:
    return [(one.sequence, one.entry.event_type) for one in await store.audit.read()]


async def test_two_writers_have_a_chain_each_in_one_log(another: Open) -> None:
    one, two = await another(), await another()
    for number in range(5):
        first = await one.audit.append([event(f"a{number}"), event(f"b{number}")])
        await one.audit.read()
        second = await two.audit.append([event(f"c{number}")])
        await two.audit.read()
    expected = [f"{name}{number}" for number in range(5) for name in "abc"]
    for store in (one, two, await another()):
        assert await positions(store) == list(enumerate(expected, 1))
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
    for store in stores:
        assert await store._writer.copied(LONGEST_S)
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
    outbox = reader.names.outbox(reader._writer.writer)
    assert await last_message(reader.connection, reader.names.state, outbox) is None


async def test_an_event_is_a_cloud_event_with_its_body_byte_for_byte(store: JetStreamStore) -> None:
    body = '{"event_type":"a","text":"naïve 🪢"}'.encode()
    entry = AuditEntry(body, "a", 1_700_000_000_123, "c1", "t1", "order 7")
    odd = AuditEntry(b" not json", "odd.type", 10**18, "", None, "")
    head = await store.audit.append([entry, odd])
    assert [one.entry for one in await store.audit.read()] == [entry, odd]
    found = await message_at(store.connection, store.names.audit, 1)
    assert found is not None
    assert body in found.body
    origin = {"specversion": "1.0", "id": f"{head.chain}/1", "source": f"reefknot/{store.names.name}"}
    what = {"type": "reefknot.a", "time": "2023-11-14T22:13:20.123Z", "subject": "order 7"}
    ids = {"correlationid": "c1", "traceid": "t1", "chain": head.chain, "chainsequence": "1", "chainhash": None}
    body_of = {"datacontenttype": "application/json", "data": None}
    assert {**json.loads(found.body), "data": None, "chainhash": None} == origin | what | ids | body_of
    assert await store.audit.verify() == []


async def test_the_newest_of_a_rare_kind_are_found(monkeypatch: pytest.MonkeyPatch, store: JetStreamStore) -> None:
    """Windows of a few positions, so that they have to grow and be cut."""
    monkeypatch.setattr(audit_log, "PAGE", 7)
    kinds = ["rare" if number % 50 == 3 else "common" for number in range(300)]
    await store.audit.append([event(kind, work_id=f"w{number % 9}") for number, kind in enumerate(kinds)])
    everything = await store.audit.read(AuditQuery(limit=1000))
    assert len(everything) == 300
    for query in (
        AuditQuery(event_type="rare", newest_first=True, limit=4),
        AuditQuery(event_type="rare", newest_first=True),
        AuditQuery(work_id="w5", newest_first=True, before=200, after=20, limit=11),
        AuditQuery(work_id="w5", event_type="common", after=20, limit=11),
        AuditQuery(newest_first=True, before=100, limit=30),
    ):
        matching = [one for one in everything if query.matches(one.entry) and one.sequence > query.after]
        matching = [one for one in matching if query.before is None or one.sequence < query.before]
        expected = matching[:: -1 if query.newest_first else 1][: query.limit]
        assert await store.audit.read(query) == expected


async def test_events_of_a_process_that_died_before_their_copy_are_copied_by_another(another: Open) -> None:
    victim = await another()
    await victim.audit.append([event("copied")])
    await victim.audit.read()
    await stop_copying(victim)
    await victim.audit.append([event("left"), event("behind")])
    head = await victim.audit.append([event("last")])
    await died(victim)
    reader = await another()
    outbox = await last_message(reader.connection, reader.names.state, reader.names.outbox(head.chain))
    assert outbox is not None
    assert "Nats-TTL" not in outbox.headers, "the next process may come much later"
    assert await event_types(reader) == ["copied", "left", "behind", "last"]
    assert await reader.audit.head() == head
    assert await reader.audit.verify(head) == []


async def test_without_recovery_they_are_missing(monkeypatch: pytest.MonkeyPatch, another: Open) -> None:
    """The control: the events are in the outbox alone."""

    async def nothing(self: AuditWriter, *, is_patient: bool = False) -> None: ...

    victim = await another()
    await stop_copying(victim)
    head = await victim.audit.append([event("left")])
    await died(victim)
    monkeypatch.setattr(AuditWriter, "recover", nothing)
    reader = await another()
    assert await reader.audit.read() == []
    assert await reader.audit.verify(head) != []


async def test_a_writer_whose_events_another_process_has_copied_goes_on_behind_them(another: Open) -> None:
    slow, other = await another(), await another()
    await stop_copying(slow)
    await slow.audit.append([event("a"), event("b")])
    assert await event_types(other) == ["a", "b"]
    await slow._writer.start()
    head = await slow.audit.append([event("c")])
    assert await event_types(slow) == ["a", "b", "c"]
    assert await other.audit.verify(head) == []


@pytest.mark.parametrize("is_sent", [True, False], ids=["stored", "lost"])
async def test_a_lost_answer_counts_once(store: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_sent: bool) -> None:
    send = audit._Uncopied.send
    asked = []

    async def unanswered(self: audit._Uncopied, events: Any) -> None:
        asked.append(len(events))
        if len(asked) > 1:
            return await send(self, events)
        before = self.position
        if is_sent:
            await send(self, events)
        self.position = before
        raise UnansweredError("nats", "no answer", "wait")

    monkeypatch.setattr(audit._Uncopied, "send", unanswered)
    await store.audit.append([event("a"), event("b")])
    assert await event_types(store) == ["a", "b"]
    await store.audit.append([event("c")])
    assert await event_types(store) == ["a", "b", "c"]
    assert await store.audit.verify() == []
    assert asked == ([2, 1] if is_sent else [2, 2, 1])


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
        assert await store._writer.copied(LONGEST_S)
        assert await event_types(newcomer) == ["changed"]


async def test_events_that_retention_removed_are_not_taken_for_uncopied_ones(another: Open) -> None:
    """The outbox of a dead process still has them, and the audit stream does not."""
    victim, keeper = await another(), await another()
    await victim.audit.append([event("old", at=10)])
    await victim.audit.read()
    await died(victim)
    await keeper.audit.append([event("older", at=5), event("young", at=50)])
    assert await keeper.audit.trim(20) == 2
    assert await keeper.audit.trim(40) == 0
    reader = await another()
    assert await event_types(reader) == ["young", "anchor", "anchor"]
    await keeper.audit.append([event("late", at=100)])
    assert await keeper.audit.trim(10**15) == 4, "the anchors too: nothing tells of the dead process any more"
    reader = await another()
    assert "old" not in await event_types(reader)
    assert await reader.audit.verify() == []


async def test_an_outbox_goes_with_its_process_or_a_day_after(monkeypatch: pytest.MonkeyPatch, another: Open) -> None:
    orderly, victim, other = await another(), await another(), await another()

    async def has_outbox(store: JetStreamStore) -> bool:
        subject = other.names.outbox(store._writer.writer)
        found = await last_message(other.connection, other.names.state, subject)
        return found is not None and bool(found.body)

    for store in (orderly, victim):
        await store.audit.append([event("a")])
        assert await has_outbox(store)
    await orderly.close()
    await died(victim)
    assert (await has_outbox(orderly), await has_outbox(victim)) == (False, True)
    await other.audit.verify()
    assert await has_outbox(victim)
    monkeypatch.setattr(audit, "OUTBOX_KEPT_MS", -1)
    await other.audit.verify()
    assert not await has_outbox(victim)
    assert await event_types(other) == ["a", "a"]


async def test_changes_wait_while_too_much_is_uncopied_and_what_is_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: JetStreamStore
) -> None:
    await stop_copying(store)
    monkeypatch.setattr(audit, "MOST_UNCOPIED_BYTES", 100)
    await store.audit.append([event("a", correlation_id="c" * 200)])
    blocked = asyncio.create_task(store.audit.append([event("b")]))
    done, _ = await asyncio.wait([blocked], timeout=0.2)
    assert not done
    await store._writer.start()
    await blocked
    monkeypatch.undo()
    with pytest.raises(StoreFullError, match="bytes"):
        await store.audit.append([event("huge", correlation_id="c" * 2_000_000)])
    head = await store.audit.append([event("c", correlation_id="c" * 300_000)])
    assert await event_types(store) == ["a", "b", "c"]
    assert await store.audit.verify(head) == []


async def test_a_read_says_when_events_cannot_be_copied(monkeypatch: pytest.MonkeyPatch, store: JetStreamStore) -> None:
    await stop_copying(store)
    await store.audit.append([event("a")])
    monkeypatch.setattr(audit_log, "OWN_COPIES_S", 0.05)
    with pytest.raises(StoreUnavailableError, match="were not copied"):
        await store.audit.read()


Tamper = Callable[[JetStreamStore], Awaitable[object]]


async def _untouched(store: JetStreamStore) -> None: ...


async def _delete(store: JetStreamStore, position: int) -> None:
    await store.connection.api(f"STREAM.MSG.DELETE.{store.names.audit}", {"seq": position})


async def _publish(store: JetStreamStore, subject: str, body: bytes) -> None:
    store.connection.check((await store.connection.request(subject, body)).data)


async def _replace(store: JetStreamStore, position: int, **changes: Any) -> None:
    """Put a changed copy of an event to the end: a stream cannot be edited in place."""
    found = await message_at(store.connection, store.names.audit, position)
    assert found is not None
    await _publish(store, changes.pop("onto", found.subject), json.dumps(json.loads(found.body) | changes).encode())


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (_untouched, ""),
        (lambda store: _delete(store, 3), "expected number 2"),
        (lambda store: _delete(store, 1), "expected number 1"),
        (lambda store: _delete(store, 6), "cut off: the head is at 3"),
        (lambda store: _replace(store, 2, data={"event_type": "x"}), "expected number 4"),
        (lambda store: _replace(store, 5, chainsequence="4", data={"event_type": "x"}), "does not fit the body"),
        (lambda store: _replace(store, 5, onto=f"{store.names.name}.audit.other.x._"), "misplaced"),
        (lambda store: _publish(store, f"{store.names.name}.audit.other.x._", b"junk"), "no event of this log"),
    ],
    ids=["nothing", "removed", "beginning cut", "end cut", "repeated with other words", "added", "misplaced", "junk"],
)
async def test_verification_finds_what_a_raw_client_did(another: Open, tamper: Tamper, problem: str) -> None:
    one, two = await another(), await another()
    for number in range(3):
        heads = [await store.audit.append([event(f"e{number}")]) for store in (one, two)]
        for store in (one, two):
            await store.audit.read()
    for store in (one, two):  # and their outboxes, from which a cut end would be copied again
        await store.close()
    reader = await another()
    await tamper(reader)
    reports = await reader.audit.verify_chains(heads)
    found = [each.problem for report in reports for each in report.mismatches]
    assert any(problem in each for each in found) if problem else found == []


async def test_a_message_that_is_no_event_shows_in_the_log_and_stops_nobody(store: JetStreamStore) -> None:
    head = await store.audit.append([event("a")])
    await store.audit.read()
    await _publish(store, store.names.event(head.chain, "x", None), b"junk")
    await store.audit.append([event("b")])
    assert await event_types(store) == ["a", "unreadable", "b"]
    (found,) = await store.audit.verify()
    assert found.sequence == 2


async def _three_chains(another: Open) -> list[JetStreamStore]:
    """Events of three processes, one every ten milliseconds: 0 1 2 0 1 2 0 1 2."""
    stores = [await another() for _ in range(3)]
    for at in range(9):
        await stores[at % 3].audit.append([event(f"e{at}", at=10 * at)])
        await stores[at % 3].audit.read()
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
    await quiet.audit.read()
    await busy.audit.append([event("b1", at=5)])
    assert await busy.audit.trim(2) == 1
    written_at = (await busy.audit.read())[-1].entry.at
    await busy.audit.append([event("b2", at=written_at + 1)])
    await busy.audit.read()
    head = await quiet.audit.append([event("q2", at=written_at + 10)])
    await quiet.audit.read()
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
    await stores[0].connection.api(f"STREAM.PURGE.{stores[0].names.audit}", {"seq": 5})
    found = [one.problem for one in await stores[0].audit.verify()]
    assert len(found) >= 3
    assert await stores[0].audit.verify(head) != []
