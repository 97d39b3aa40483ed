"""Conformance suite: the contract of an audit log."""

import asyncio

from msgspec import structs

from reefknot.audit.model.chain import Head, Link, verify
from reefknot.audit.port import AuditQuery, MultiChainLog
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event, event_types, story


class AuditLogContract:
    """Tests that every audit log has to pass. A subclass provides the fixture `harness`."""

    @story()
    async def test_events_come_back_in_the_order_they_came_with_their_bodies_byte_for_byte(self, store: Store) -> None:
        body = '{"text":"naïve 🪢"}'.encode()
        await store.audit.append([structs.replace(event("a"), body=body), event("b")])
        await store.audit.append([event("c")])
        kept = await store.audit.read()
        assert [one.entry.event_type for one in kept] == ["a", "b", "c"]
        numbers = [one.sequence for one in kept]
        assert numbers == (sorted(set(numbers)) if isinstance(store.audit, MultiChainLog) else [1, 2, 3])
        assert kept[0].entry.body == body

    @story()
    async def test_events_for_soon_are_stored_by_themselves_and_wake_whoever_waits(self, store: Store) -> None:
        await store.audit.append([event("a")])
        (first,) = await store.audit.read()
        waiting = asyncio.ensure_future(store.audit.wait(first.sequence, 30.0))
        await asyncio.sleep(0)
        head = await store.audit.append_soon([event("b"), event("c")])
        assert await waiting
        assert (head, await event_types(store)) == (await store.audit.head(), ["a", "b", "c"])
        assert await store.audit.verify() == []

    @story()
    async def test_the_stored_hashes_are_those_of_the_chain(self, store: Store) -> None:
        head = await store.audit.append([event(f"e{number}") for number in range(20)])
        kept = await store.audit.read()
        links = [Link(number, one.hash, one.entry.body) for number, one in enumerate(kept, 1)]
        assert verify(links, head) == []
        assert head == await store.audit.head()
        assert await store.audit.verify() == []
        assert await store.audit.verify(head) == []

    @story()
    async def test_a_head_exported_from_elsewhere_or_from_the_future_is_a_mismatch(self, store: Store) -> None:
        head = await store.audit.append([event("a"), event("b")])
        assert await store.audit.verify(Head(head.chain, head.sequence + 1, "f" * 64))
        assert await store.audit.verify(Head(head.chain, head.sequence, "f" * 64))

    @story()
    async def test_an_older_head_still_holds_after_more_was_written(self, store: Store) -> None:
        old = await store.audit.append([event("a")])
        await store.audit.append([event("b")])
        assert await store.audit.verify(old) == []

    @story()
    async def test_every_filter_narrows_and_pages_join_up(self, store: Store) -> None:
        await store.audit.append(
            [
                event("a", at=10, correlation_id="c1", trace_id="t1", work_id="w1"),
                event("b", at=20, correlation_id="c1", trace_id="t2", work_id="w2"),
                event("a", at=30, correlation_id="c2", trace_id="t2", work_id="w2"),
            ]
        )

        places = [0, *(one.sequence for one in await store.audit.read())]

        async def found(query: AuditQuery) -> list[int]:
            """The numbers of the events that are found; `after` and `before` are such numbers."""
            before = None if query.before is None else places[query.before]
            query = structs.replace(query, after=places[query.after], before=before)
            return [places.index(one.sequence) for one in await store.audit.read(query)]

        assert await found(AuditQuery(event_type="a")) == [1, 3]
        assert await found(AuditQuery(correlation_id="c1")) == [1, 2]
        assert await found(AuditQuery(trace_id="t2")) == [2, 3]
        assert await found(AuditQuery(work_id="w1")) == [1]
        assert await found(AuditQuery(since=20, until=30)) == [2]
        assert await found(AuditQuery(after=1, limit=1)) == [2]
        assert await found(AuditQuery(event_type="a", work_id="w2")) == [3]
        assert await found(AuditQuery(newest_first=True)) == [3, 2, 1]
        assert await found(AuditQuery(newest_first=True, limit=2)) == [3, 2]
        assert await found(AuditQuery(newest_first=True, before=3, limit=1)) == [2]
        assert await found(AuditQuery(newest_first=True, event_type="a", since=10)) == [3, 1]
        assert await found(AuditQuery(before=3, after=1)) == [2]
        assert await found(AuditQuery(since=31)) == []

    @story()
    async def test_trimming_forgets_the_old_leaves_an_anchor_and_keeps_the_chain_whole(self, store: Store) -> None:
        for events in ([event("a", at=10)], [event("b", at=20), event("late", at=5), event("c", at=30)]):
            await store.audit.append(events)
        assert await store.audit.trim(20) == 1
        assert await event_types(store) == ["b", "late", "c", "anchor"]
        assert await store.audit.verify() == []
        assert await store.audit.trim(20) == 0

    @story()
    async def test_concurrent_writers_share_one_chain(self, store: Store) -> None:
        await asyncio.gather(*(store.audit.append([event("a"), event("b")]) for _ in range(50)))
        assert (await store.audit.head()).sequence == 100
        assert await store.audit.verify() == []
        assert await event_types(store) == ["a", "b"] * 50

    @story()
    async def test_who_waits_for_the_next_event_is_woken_by_it(self, store: Store) -> None:
        assert not await store.audit.wait(0, 0.01)
        waiting = asyncio.create_task(store.audit.wait(0, 15))
        await asyncio.sleep(0)
        await store.audit.append([event("a")])
        assert await waiting
        assert await store.audit.wait(0, 0)
