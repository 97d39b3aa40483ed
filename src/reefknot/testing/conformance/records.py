"""Conformance suite of moves: all records of a store read, and records of another store kept as they are."""

from collections.abc import AsyncIterator
from typing import TypeVar

from msgspec import structs

from reefknot.core.clock import Clock
from reefknot.idempotency.model import Claim, Claimed, Done, KeyRecord, KeyState, Uncertain
from reefknot.queue.model.notes import CHECKPOINT, LINES, Noted
from reefknot.queue.model.work import Budget, Extra, HistoryEntry, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueued, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event_types, required, story, wall_ms

R = TypeVar("R")
LARGE = 1_300_000
"""More than one message of a server holds, and more than one page."""
ODD = 'ünïcode "quoted" \\ \n\t\x01 🪢 *.> %|'


async def all_of(pages: AsyncIterator[list[R]]) -> list[R]:
    """The records of all pages."""
    return [one async for page in pages for one in page]


def odd_items(clock: Clock) -> list[WorkItem]:
    """An item in each state, with odd ids and payloads, in the order of their arrival."""
    now, history = (
        round(clock.wall() * 1000),
        (HistoryEntry(3, "requeued", "because", "ann", 7), HistoryEntry(4, "crashed")),
    )
    item = WorkItem("a", "t", pool="cpu", created_at=now - 90, updated_at=now - 80, due_at=now - 70)
    return [
        structs.replace(item, id="acme|" + ODD, tenant_id="acme", payload=bytes(range(256)), priority=7),
        structs.replace(item, id="later", due_at=now + 60_000, deadline_at=now + 90_000, admission='{"a": 1}'),
        structs.replace(item, id="large", payload=b"\x00\xff" * (LARGE // 2), resource_class="io@w", pool="io"),
        structs.replace(
            item, id="left", state=WorkState.RUNNING, owner="w@gone", fence=41, lease_ms=60_000, attempts=2, crashes=1
        ),
        structs.replace(
            item, id="tried", attempts=2, budget=Budget(2, "timeout", 1, 2, 300, "t", 0.2, 5), failure="{}"
        ),
        structs.replace(item, id="done", state=WorkState.SUCCEEDED, result='"' + "ä" * LARGE + '"', attempts=1),
        structs.replace(item, id="failed", state=WorkState.FAILED, failure='{"code": 1}', reason=ODD),
        structs.replace(item, id="cancelled", state=WorkState.CANCELLED, generation=3, result="null"),
        structs.replace(item, id="aside", state=WorkState.QUARANTINED, history=history, reason="bad", payload=b"p"),
        structs.replace(item, id="discarded", state=WorkState.DISCARDED, history=history),
        structs.replace(item, id="0", created_at=now - 10, source="mail", correlation_id=ODD, trace_id="t"),
    ]


def odd_keys(clock: Clock) -> list[KeyRecord]:
    """A key in each state, and a guarded one that its owner has left."""
    now = round(clock.wall() * 1000)
    key = KeyRecord(
        ODD, KeyState.DONE, "o", 5, 0, 60_000, "f", False, '"r"', None, "{}", now - 9, now - 8, now + 50_000
    )
    return [
        key,
        structs.replace(key, key="large", result='"' + "ä" * LARGE + '"', fence=2**53),
        structs.replace(key, key="failed", state=KeyState.FAILED, result=None, failure="{}"),
        structs.replace(key, key="free", state=KeyState.RELEASED, result=None),
        structs.replace(key, key="unknown", state=KeyState.UNKNOWN, result=None, guard=True),
        structs.replace(key, key="left", state=KeyState.IN_PROGRESS, result=None, fence=77),
        structs.replace(key, key="guarded", state=KeyState.IN_PROGRESS, result=None, guard=True),
    ]


class RecordsContract:
    """Subclass it, and give it a `harness`."""

    @story()
    async def test_work_of_another_store_is_kept_as_it_is_and_read_in_its_order(
        self, store: Store, clock: VirtualClock
    ) -> None:
        items = odd_items(clock)
        assert await store.work.adopt(items[:4]) == 4
        assert await store.work.adopt(items[4:]) == len(items) - 4
        assert await all_of(store.work.records()) == items
        assert [await store.work.get(one.id) for one in items] == items
        assert await event_types(store) == []

    @story()
    async def test_the_notes_of_a_step_come_with_its_work(self, store: Store, clock: VirtualClock) -> None:
        noted = structs.replace(odd_items(clock)[3], extra=Extra(notes=Noted(checkpoints=2)))
        parts = {CHECKPOINT: b"[7]", LINES: b'{"lines":[]}'}
        assert await store.work.adopt([noted], {noted.id: parts, "other": {CHECKPOINT: b"0"}}) == 1
        assert (await all_of(store.work.records()), await store.work.notes(noted.id)) == ([noted], parts)
        assert await store.work.adopt([noted], {noted.id: {CHECKPOINT: b"8"}}) == 0
        assert await store.work.notes(noted.id) == parts

    @story()
    async def test_what_is_there_already_is_left_as_it_is(self, store: Store, clock: VirtualClock) -> None:
        items, keys = odd_items(clock), odd_keys(clock)
        assert (await store.work.adopt(items[:2]), await store.idempotency.adopt(keys[:2])) == (2, 2)
        others = [structs.replace(one, attempts=9) for one in items]
        changed = [structs.replace(one, fingerprint="other") for one in keys]
        assert await store.work.adopt(others) == len(items) - 2
        assert await store.idempotency.adopt(changed) == len(keys) - 2
        assert await all_of(store.work.records()) == items[:2] + others[2:]
        kept = {one.key: one for one in await all_of(store.idempotency.records())}
        assert kept == {one.key: one for one in keys[:2] + changed[2:]}
        assert (await store.work.adopt([]), await store.idempotency.adopt([])) == (0, 0)

    @story()
    async def test_adopted_work_is_claimed_in_its_order_with_a_higher_fence_and_its_lost_owner_counts_as_a_crash(
        self, store: Store, clock: VirtualClock
    ) -> None:
        items = odd_items(clock)
        await store.work.adopt(items)
        assert await store.work.enqueue([WorkItem("left", "t"), WorkItem("done", "t")]) == [Enqueued.DUPLICATE] * 2
        taken = {one.id: one for one in await store.work.claim(9, WorkClaim(owner="w2", classes=["cpu"]))}
        assert set(taken) == {"acme|" + ODD, "left", "tried", "0"}, "neither what is due later nor what has ended"
        assert next(iter(taken)) == "acme|" + ODD, "its priority is the highest"
        left = taken["left"]
        assert (left.fence, left.crashes, left.history[-1].what, left.payload) == (42, 2, "crashed", b"")
        old = Settlement("left", "w@gone", 41, WorkDone("1"))
        new = Settlement("left", "w2", 42, WorkDone("2"))
        assert await store.work.settle([old, new]) == [False, True]
        assert required(await store.work.get("left")).result == "2"
        clock.advance(61)
        assert [
            one.id for one in await store.work.claim(9, WorkClaim(owner="w2", classes=["cpu"], only=["later"]))
        ] == ["later"]

    @story()
    async def test_adopted_work_is_counted_and_listed_and_its_quarantine_can_be_requeued(
        self, store: Store, clock: VirtualClock
    ) -> None:
        items = odd_items(clock)
        await store.work.adopt(items)
        counts = (await store.work.snapshot()).counts
        assert counts["io@w"] == {WorkState.PENDING: 1}
        assert counts["cpu"][WorkState.PENDING] == 5, "one of them was left by its owner"
        assert (await store.work.search(limit=1)).items[0].id == "0", "the newest"
        assert [one.id for one in await store.quarantine.find()] == ["aside"]
        assert (await store.work.quarantine_stats()).by_reason == {"bad": 1}
        assert await store.quarantine.requeue(WorkFilter(ids=("aside",)), who="ann") == ["aside"]
        assert required(await store.work.get("aside")).generation == 1

    @story(retention=100.0)
    async def test_keys_of_another_store_are_kept_for_the_rest_of_their_lives(
        self, store: Store, clock: VirtualClock
    ) -> None:
        keys = odd_keys(clock)
        assert await store.idempotency.adopt(keys) == len(keys)
        assert {one.key: one for one in await all_of(store.idempotency.records())} == {one.key: one for one in keys}
        assert {state: number for state, number in (await store.idempotency.counts()).items() if number} == {
            KeyState.DONE: 2,
            KeyState.FAILED: 1,
            KeyState.RELEASED: 1,
            KeyState.UNKNOWN: 1,
            KeyState.IN_PROGRESS: 2,
        }
        assert await store.idempotency.get("large") == keys[1]
        clock.advance(50.001)
        assert await store.idempotency.get(ODD) is None, "its life did not begin again"
        assert await store.idempotency.get("unknown") == keys[4]

    @story()
    async def test_later_fences_are_higher_and_an_effect_that_was_recorded_is_not_repeated(
        self, store: Store, clock: VirtualClock
    ) -> None:
        keys = {one.key: one for one in odd_keys(clock)}
        await store.idempotency.adopt(list(keys.values()))
        again = await store.idempotency.claim("left", owner="new")
        assert isinstance(again, Claimed)
        assert again.taken_over
        other = await store.idempotency.claim("other", owner="new")
        assert isinstance(other, Claimed)
        highest = wall_ms(clock) * 1000
        assert min(again.record.fence, other.record.fence) > min(highest, 77)
        assert other.record.fence >= highest, "as the fences of a store on a server"
        assert (await store.idempotency.finish(again.claim, Done("1"))).result == "1"
        assert (await store.idempotency.claim(ODD, owner="new", fingerprint="f")).record == keys[ODD]
        for name in ("unknown", "guarded"):
            assert isinstance(await store.idempotency.claim(name, owner="new"), Uncertain)
        assert Claim("left", "o", 77) != again.claim

    @story()
    async def test_records_are_read_page_by_page_to_the_last(self, store: Store, clock: VirtualClock) -> None:
        now = wall_ms(clock)
        items = [WorkItem(f"{n:05}", "t", pool="cpu", due_at=1, created_at=now, updated_at=now) for n in range(1203)]
        key = odd_keys(clock)[0]
        keys = [structs.replace(key, key=f"{n}") for n in range(1203)]
        assert (await store.work.adopt(items), await store.idempotency.adopt(keys)) == (1203, 1203)
        pages = [page async for page in store.work.records()]
        assert [one for page in pages for one in page] == items
        assert max(map(len, pages)) < 1203
        assert {one.key for one in await all_of(store.idempotency.records())} == {one.key for one in keys}

    @story()
    async def test_an_empty_store_has_no_records_and_room(self, store: Store) -> None:
        assert [page async for page in store.work.records() if page] == []
        assert [page async for page in store.idempotency.records() if page] == []
        room = await store.room()
        assert room is None or room > 0
