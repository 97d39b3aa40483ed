"""A memory store is bounded: what has ended, and what is audited, and ids of messages go when there is too much."""

import pytest

from reefknot.audit.model.chain import ANCHOR
from reefknot.queue.model.work import WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueued, Held, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores import memory
from reefknot.stores.memory import MemoryStore
from reefknot.stores.memory import store as parts
from reefknot.stores.memory.store import REMEMBERED_IDS, MemoryTransport
from reefknot.testing.conformance.harness import event

MOST = 20


async def after_many(number: int) -> MemoryStore:
    """A store with one item that waits, and many that have ended, one in ten of them badly."""
    store = MemoryStore(VirtualClock())
    await store.work.enqueue([WorkItem("waits", "t", resource_class="other")])
    for count in range(number):
        await store.work.enqueue([WorkItem(f"{count}", "t", payload=b"x" * 100)], events=[event("admitted")])
        (item,) = await store.work.claim(1, WorkClaim(owner="me", classes=("cpu",)))
        end = WorkDone('"fine"') if count % 10 else WorkFailed("{}", None, "failed")
        assert await store.work.settle([Settlement(item.id, "me", item.fence, end)]) == [True]
    return store


async def test_the_items_that_ended_first_go_and_open_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control: without the bound every item stays."""
    assert len(await (await after_many(5 * MOST)).work.find(limit=1000)) == 5 * MOST + 1
    monkeypatch.setattr(memory, "MOST_ENDED", MOST)
    store = await after_many(5 * MOST)
    kept = {item.id: item.state for item in await store.work.find(limit=1000)}
    assert kept.keys() == {"waits", *(f"{number}" for number in range(4 * MOST, 5 * MOST))}
    assert kept[f"{5 * MOST - 1}"] is WorkState.SUCCEEDED
    (answer,) = await store.work.enqueue([WorkItem("0", "t")])
    assert answer is Enqueued.ACCEPTED, "an id that was forgotten is a new one"


async def test_extended_leases_of_unknown_and_ended_work_are_not_kept() -> None:
    store = await after_many(1)
    (item,) = await store.work.claim(1, WorkClaim(owner="me", classes=("other",)))
    ours = Held(item.id, "me", item.fence)
    store.leases.extend([Held("0", "me", 1), Held("unknown", "me", 1), ours], lease=60)
    assert list(store.work.table._extended) == ["waits"]
    assert await store.work.settle([Settlement(item.id, "me", item.fence, WorkDone())]) == [True]
    assert not store.work.table._extended


async def test_the_oldest_events_go_and_the_chain_that_is_left_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_EVENTS", MOST)
    store = await after_many(5 * MOST)
    kept = await store.audit.read()
    assert len(kept) <= MOST
    assert kept[-1].sequence >= 5 * MOST
    assert any(one.entry.event_type == ANCHOR for one in kept)
    assert await store.audit.verify() == []


async def test_ids_are_remembered_for_a_while_and_not_for_ever() -> None:
    transport = MemoryTransport()
    for number in range(REMEMBERED_IDS + 1):
        await transport.publish("a", b"", message_id=str(number))
    line = transport.subscribe("a")
    await transport.publish("a", b"first again", message_id="0")
    await transport.publish("a", b"last again", message_id=str(REMEMBERED_IDS))
    await transport.publish("a", b"end")
    assert [(await anext(line)).body for _ in range(2)] == [b"first again", b"end"]


async def test_closing_ends_every_listener_after_what_it_has_not_read_even_on_a_full_line() -> None:
    transport = MemoryTransport()
    empty, full = transport.subscribe("a"), transport.subscribe("b", limit=1)
    await transport.publish("b", b"x")
    await transport.close()
    await transport.close()
    assert [delivery.body for line in (empty, full) async for delivery in line] == [b"x"]
