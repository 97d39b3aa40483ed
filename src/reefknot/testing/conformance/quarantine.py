"""Conformance suite of the quarantine."""

from reefknot.core.work import Budget, Quarantine, WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.engines.clocks import VirtualClock
from reefknot.ports.store import Store
from reefknot.ports.work_queue import ALL, Enqueued, QuarantineFilter, QuarantineStats, Settlement
from reefknot.testing.conformance.harness import event, event_types, required, story, wall_ms

PAYLOAD = bytes(range(256))


async def quarantined(store: Store, work_id: str, *, kind: str = "t", source: str = "s", reason: str = "bad") -> None:
    """An item that ran once and was put aside."""
    await store.work.enqueue([WorkItem(work_id, kind, source=source, payload=PAYLOAD)])
    await put_aside(store, reason)


async def put_aside(store: Store, reason: str = "bad") -> None:
    (item,) = await store.work.claim(1, owner="w")
    settled = Quarantine(reason, failure='{"code": 1}')
    assert await store.work.settle([Settlement(item.id, "w", item.fence, settled)]) == [True]


class QuarantineContract:
    """Subclass it, and give it a `harness`."""

    @story()
    async def test_it_keeps_the_payload_byte_for_byte_with_reason_failure_and_history(self, store: Store) -> None:
        await quarantined(store, "a")
        item = required(await store.quarantine.show("a"))
        assert item.payload == PAYLOAD
        assert (item.reason, item.failure, item.attempts) == ("bad", '{"code": 1}', 1)
        assert [entry.what for entry in item.history] == ["quarantined"]
        assert await store.quarantine.show("b") is None

    @story()
    async def test_what_is_in_quarantine_is_not_claimed(self, store: Store, clock: VirtualClock) -> None:
        await quarantined(store, "a")
        clock.advance(1e6)
        assert await store.work.claim(1, owner="w") == []

    @story()
    async def test_a_requeued_item_keeps_its_id_and_gets_a_fresh_budget(self, store: Store) -> None:
        await quarantined(store, "a")
        which = QuarantineFilter(ids=("a",))
        assert await store.quarantine.requeue(which, who="ann", events=[event("requeued")]) == ["a"]
        (item,) = await store.work.claim(1, owner="w")
        assert (item.id, item.attempts, item.budget, item.generation) == ("a", 0, Budget(), 1)
        assert item.payload == PAYLOAD
        assert [(entry.what, entry.who) for entry in item.history][-1] == ("requeued", "ann")
        assert await event_types(store) == ["requeued"]

    @story()
    async def test_a_requeued_item_has_no_result_and_all_of_its_time_again(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t", deadline_at=wall_ms(clock) + 5000)])
        (item,) = await store.work.claim(1, owner="w")
        aside = Quarantine("bad", None, '"old"')
        await store.work.settle([Settlement("a", "w", item.fence, aside)])
        clock.advance(60)
        await store.quarantine.requeue(ALL, who="ann")
        (again,) = await store.work.claim(1, owner="w")
        assert (again.result, again.generation) == (None, 1)
        assert again.deadline_at == wall_ms(clock) + 5000
        assert again.fence > item.fence

    @story()
    async def test_a_second_quarantine_of_the_same_item_is_fine(self, store: Store) -> None:
        await quarantined(store, "a")
        await store.quarantine.requeue(ALL, who="ann")
        await put_aside(store, "bad again")
        item = required(await store.quarantine.show("a"))
        assert item.reason == "bad again"
        assert [entry.what for entry in item.history] == ["quarantined", "requeued", "quarantined"]

    @story()
    async def test_a_dry_run_names_what_it_would_do_and_does_nothing(self, store: Store) -> None:
        await quarantined(store, "a")
        events = [event("never")]
        assert await store.quarantine.requeue(ALL, who="ann", dry_run=True, events=events) == ["a"]
        assert await store.quarantine.discard(ALL, who="ann", dry_run=True, events=events) == ["a"]
        assert await store.quarantine.purge(ALL, dry_run=True, events=events) == ["a"]
        assert await store.quarantine.show("a") is not None
        assert await event_types(store) == []

    @story()
    async def test_every_filter_narrows_and_pages_join_up(self, store: Store, clock: VirtualClock) -> None:
        await quarantined(store, "a", kind="t1", source="s1", reason="bad 100% _x")
        clock.advance(10)
        await quarantined(store, "b", kind="t2", source="s1", reason="worse")
        await quarantined(store, "c", kind="t2", source="s2", reason="bad")
        aside = required(await store.quarantine.show("b"))

        async def found(which: QuarantineFilter) -> list[str]:
            return [item.id for item in await store.quarantine.find(which)]

        assert await found(QuarantineFilter(ids=("a", "c", "zz"))) == ["a", "c"]
        assert await found(QuarantineFilter(kind="t2")) == ["b", "c"]
        assert await found(QuarantineFilter(source="s1")) == ["a", "b"]
        assert await found(QuarantineFilter(reason_contains="100% _")) == ["a"]
        assert await found(QuarantineFilter(before=aside.updated_at)) == ["a"]
        page = await store.quarantine.find(limit=2)
        rest = await store.quarantine.find(after="b")
        assert [item.id for item in page + rest] == ["a", "b", "c"]
        assert all(item.payload == b"" for item in page)

    @story()
    async def test_a_discarded_item_has_ended_and_a_purged_one_is_gone(self, store: Store) -> None:
        await quarantined(store, "a")
        await quarantined(store, "b")
        assert await store.quarantine.discard(QuarantineFilter(ids=("a",)), who="ann", reason="old") == ["a"]
        assert required(await store.work.get("a")).state is WorkState.DISCARDED
        assert await store.quarantine.purge(ALL, events=[event("purged")]) == ["b"]
        assert await store.work.get("b") is None
        assert await store.quarantine.requeue(ALL, who="ann", events=[event("nothing")]) == []
        assert await event_types(store) == ["purged"]
        assert await store.work.enqueue([WorkItem("b", "t")]) == [Enqueued.ACCEPTED]

    @story()
    async def test_whatever_ended_without_success_is_retried_under_its_id(self, store: Store) -> None:
        await quarantined(store, "aside")
        await store.work.enqueue([WorkItem(name, "t") for name in ("failed", "cancelled", "done", "open")])
        claimed = {item.id: item for item in await store.work.claim(4, owner="w")}
        reports = [
            Settlement("failed", "w", claimed["failed"].fence, WorkFailed('"f"', '"r"', "attempts_spent")),
            Settlement("done", "w", claimed["done"].fence, WorkDone('"r"')),
        ]
        assert await store.work.settle(reports) == [True, True]
        assert await store.work.cancel("cancelled", reason="enough", who="ann")
        names = ["failed", "done", "open", "none", "cancelled", "aside", "failed"]
        retried = await store.work.retry(names, who="bob", why="fixed", events=[event("retried")])
        assert sorted(retried) == ["aside", "cancelled", "failed"]
        for name in retried:
            item = required(await store.work.get(name))
            assert (item.state, item.generation, item.attempts) == (WorkState.PENDING, 1, 0)
            assert (item.failure, item.result, item.reason) == (None, None, "")
            assert [(one.what, one.why, one.who) for one in item.history][-1] == ("requeued", "fixed", "bob")
        assert await store.work.retry(["failed", "done"], who="bob", events=[event("never")]) == []
        assert await event_types(store) == ["retried"]
        assert {item.id for item in await store.work.claim(9, owner="w2")} == {"aside", "cancelled", "failed"}

    @story()
    async def test_stats_count_by_kind_source_and_reason(self, store: Store) -> None:
        assert await store.quarantine.stats() == QuarantineStats(0, {}, {}, {}, None)
        await quarantined(store, "a", reason="x")
        oldest = required(await store.quarantine.show("a"))
        await quarantined(store, "b", kind="u", reason="y")
        stats = await store.quarantine.stats()
        assert stats == QuarantineStats(2, {"t": 1, "u": 1}, {"s": 2}, {"x": 1, "y": 1}, oldest.updated_at)
        await quarantined(store, "c", kind="u", reason="x")
        assert list((await store.quarantine.count()).items()) == [("u", 2), ("t", 1)]
        assert await store.quarantine.count(QuarantineFilter(reason_contains="x")) == {"t": 1, "u": 1}
        await store.quarantine.requeue(QuarantineFilter(ids=("a",)), who="ann")
        await store.quarantine.discard(QuarantineFilter(ids=("b",)), who="ann")
        stats = await store.quarantine.stats()
        assert (stats.total, stats.by_kind, stats.by_reason) == (1, {"u": 1}, {"x": 1})
        await store.quarantine.purge(ALL)
        assert await store.quarantine.stats() == QuarantineStats(0, {}, {}, {}, None)
