"""Conformance suite of the quarantine."""

from reefknot.queue.model.transitions import Discard, Remove, Requeue
from reefknot.queue.model.work import Budget, Quarantine, WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.queue.port.work_queue import EVERYTHING, Enqueued, QuarantineStats, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event, event_types, required, story, wall_ms

PAYLOAD = bytes(range(256))


FAILURE = '{"code": 1}'


async def quarantined(
    store: Store,
    work_id: str,
    *,
    kind: str = "t",
    resource_class: str = "cpu",
    source: str = "s",
    reason: str = "bad",
    failure: str = FAILURE,
) -> None:
    """An item that ran once and was put aside."""
    await store.work.enqueue([WorkItem(work_id, kind, resource_class, source=source, payload=PAYLOAD)])
    await put_aside(store, reason, failure)


async def put_aside(store: Store, reason: str = "bad", failure: str = FAILURE) -> None:
    (item,) = await store.work.claim(1, WorkClaim(owner="w"))
    settled = Quarantine(reason, failure=failure)
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
        assert await store.work.claim(1, WorkClaim(owner="w")) == []

    @story()
    async def test_a_requeued_item_keeps_its_id_and_gets_a_fresh_budget(self, store: Store) -> None:
        await quarantined(store, "a")
        which = WorkFilter(ids=("a",))
        assert await store.quarantine.requeue(which, who="ann", why="mended", events=[event("requeued")]) == ["a"]
        (item,) = await store.work.claim(1, WorkClaim(owner="w"))
        assert (item.id, item.attempts, item.budget, item.generation) == ("a", 0, Budget(), 1)
        assert item.payload == PAYLOAD
        last = item.history[-1]
        assert (last.what, last.who, last.why) == ("requeued", "ann", "mended")
        assert await event_types(store) == ["requeued"]

    @story()
    async def test_a_requeued_item_has_no_result_and_all_of_its_time_again(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t", deadline_at=wall_ms(clock) + 5000)])
        (item,) = await store.work.claim(1, WorkClaim(owner="w"))
        aside = Quarantine("bad", None, '"old"')
        await store.work.settle([Settlement("a", "w", item.fence, aside)])
        clock.advance(60)
        await store.quarantine.requeue(EVERYTHING, who="ann")
        (again,) = await store.work.claim(1, WorkClaim(owner="w"))
        assert (again.result, again.generation) == (None, 1)
        assert again.deadline_at == wall_ms(clock) + 5000
        assert again.fence > item.fence

    @story()
    async def test_a_second_quarantine_of_the_same_item_is_fine(self, store: Store) -> None:
        await quarantined(store, "a")
        await store.quarantine.requeue(EVERYTHING, who="ann")
        await put_aside(store, "bad again")
        item = required(await store.quarantine.show("a"))
        assert item.reason == "bad again"
        assert [entry.what for entry in item.history] == ["quarantined", "requeued", "quarantined"]

    @story()
    async def test_a_dry_run_names_what_it_would_do_and_does_nothing(self, store: Store) -> None:
        await quarantined(store, "a")
        events = [event("never")]
        assert await store.quarantine.requeue(EVERYTHING, who="ann", dry_run=True, events=events) == ["a"]
        assert await store.quarantine.discard(EVERYTHING, who="ann", dry_run=True, events=events) == ["a"]
        assert await store.quarantine.purge(EVERYTHING, dry_run=True, events=events) == ["a"]
        assert await store.quarantine.show("a") is not None
        assert await event_types(store) == []

    @story()
    async def test_a_filter_narrows_what_is_in_quarantine_and_pages_join_up(self, store: Store) -> None:
        await quarantined(store, "a", kind="t1", reason="bad 100% _x")
        await quarantined(store, "b", kind="t2", reason="worse")
        await quarantined(store, "c", kind="t2", reason="bad")
        assert [item.id for item in await store.quarantine.find(WorkFilter(reason="100% _"))] == ["a"]
        assert await store.quarantine.count(WorkFilter(error="bad")) == {"t1": 1, "t2": 1}
        page = await store.quarantine.find(limit=2)
        rest = await store.quarantine.find(after="b")
        assert [item.id for item in page + rest] == ["a", "b", "c"]
        assert all(item.payload == b"" for item in page)

    @story()
    async def test_failures_are_grouped_by_fingerprint_and_found_by_it(self, store: Store, clock: VirtualClock) -> None:
        missing = '{"code": "EXECUTION_FAILED", "failure_type": "permanent", "message": "no file \'%s\'"}'
        for name in ("a", "b", "c"):
            await quarantined(store, name, source=name, failure=missing % name)
            clock.advance(10)
        await quarantined(store, "d", reason="its owner vanished 3 times")
        first, last = [required(await store.quarantine.show(name)) for name in ("a", "c")]

        found = (await store.quarantine.groups()).groups()
        assert [(one.count, one.message) for one in found] == [(3, "no file 'c'"), (1, "its owner vanished 3 times")]
        assert (found[0].failure_type, found[0].code) == ("permanent", "EXECUTION_FAILED")
        assert (found[0].oldest_at, found[0].newest_at) == (first.updated_at, last.updated_at)
        assert found[0].sources == ("a", "b", "c")
        of_b = await store.quarantine.groups(WorkFilter(source="b"))
        assert [(one.fingerprint, one.count) for one in of_b.groups()] == [(found[0].fingerprint, 1)]

        which = WorkFilter(fingerprint=found[0].fingerprint)
        page = await store.quarantine.find(which, limit=2)
        rest = await store.quarantine.find(which, after="b")
        assert [item.id for item in page + rest] == ["a", "b", "c"]
        assert await store.quarantine.count(which) == {"t": 3}
        other = WorkFilter(fingerprint=found[1].fingerprint)
        assert [item.id for item in await store.quarantine.find(other, limit=1)] == ["d"]
        assert await store.quarantine.find(WorkFilter(fingerprint="0" * 12)) == []
        both = WorkFilter(ids=("c", "d"), fingerprint=found[0].fingerprint)
        assert await store.quarantine.discard(both, who="ann", reason="known") == ["c"]
        assert await store.quarantine.requeue(which, who="ann", dry_run=True) == ["a", "b"]
        assert await store.quarantine.requeue(which, who="ann") == ["a", "b"]
        assert await store.quarantine.purge(which, events=[event("never")]) == []
        assert [item.id for item in await store.quarantine.find()] == ["d"]
        assert await event_types(store) == []

    @story()
    async def test_a_replaced_item_keeps_its_payload_and_the_next_version_runs(self, store: Store) -> None:
        await quarantined(store, "a")
        new = bytes(reversed(PAYLOAD))
        mended = event("mended")
        assert await store.quarantine.replace("a", new, who="ann", why="a typo", events=[mended]) == "a~2"
        old = required(await store.work.get("a"))
        assert (old.state, old.payload, old.reason, old.failure) == (WorkState.DISCARDED, PAYLOAD, "bad", FAILURE)
        assert (old.history[-1].why, old.history[-1].who) == ("replaced by a~2", "ann")
        (item,) = await store.work.claim(9, WorkClaim(owner="w"))
        assert (item.id, item.kind, item.source, item.payload) == ("a~2", "t", "s", new)
        assert (item.resource_class, item.pool, item.attempts, item.generation) == ("router", "cpu", 0, 0)
        assert [(one.what, one.why, one.who) for one in item.history] == [("replaces", "a: a typo", "ann")]
        never = [event("never")]
        assert await store.quarantine.replace("a", b"again", who="ann", events=never) is None
        assert await store.quarantine.replace("unknown", b"", who="ann", events=never) is None
        aside = Quarantine("bad again")
        assert await store.work.settle([Settlement(item.id, "w", item.fence, aside)]) == [True]
        assert await store.quarantine.replace("a~2", b"third", who="ann") == "a~3"
        assert await event_types(store) == ["mended"]

    @story()
    async def test_nothing_is_replaced_where_the_next_version_is_there_already(self, store: Store) -> None:
        await quarantined(store, "a")
        await store.work.enqueue([WorkItem("a~2", "t", payload=b"another")])
        assert await store.quarantine.replace("a", b"new", who="ann", events=[event("never")]) is None
        assert required(await store.quarantine.show("a")).payload == PAYLOAD
        assert required(await store.work.get("a~2")).payload == b"another"
        assert await event_types(store) == []

    @story()
    async def test_a_job_of_a_source_returns_to_its_own_class(self, store: Store) -> None:
        await quarantined(store, "requeued", resource_class="ingest.notes")
        await quarantined(store, "replaced", resource_class="ingest.notes")
        await store.quarantine.requeue(WorkFilter(ids=("requeued",)), who="ann")
        assert await store.quarantine.replace("replaced", b"{}", who="ann") == "replaced~2"
        assert await store.work.open_classes() == ["ingest.notes"]
        assert await store.work.claim(9, WorkClaim(owner="router", classes=("router",))) == []
        found = await store.work.claim(9, WorkClaim(owner="w", classes=("ingest.notes",)))
        assert sorted(item.id for item in found) == ["replaced~2", "requeued"]

    @story()
    async def test_a_discarded_item_has_ended_and_a_purged_one_is_gone(self, store: Store) -> None:
        await quarantined(store, "a")
        await quarantined(store, "b")
        assert await store.quarantine.discard(WorkFilter(ids=("a",)), who="ann", reason="old") == ["a"]
        assert required(await store.work.get("a")).state is WorkState.DISCARDED
        assert await store.quarantine.purge(EVERYTHING, events=[event("purged")]) == ["b"]
        assert await store.work.get("b") is None
        assert await store.quarantine.requeue(EVERYTHING, who="ann", events=[event("nothing")]) == []
        assert await event_types(store) == ["purged"]
        assert await store.work.enqueue([WorkItem("b", "t")]) == [Enqueued.ACCEPTED]

    @story()
    async def test_whatever_ended_without_success_is_retried_under_its_id(self, store: Store) -> None:
        await quarantined(store, "aside")
        await store.work.enqueue([WorkItem(name, "t") for name in ("failed", "cancelled", "done", "open")])
        claimed = {item.id: item for item in await store.work.claim(4, WorkClaim(owner="w"))}
        reports = [
            Settlement("failed", "w", claimed["failed"].fence, WorkFailed('"f"', '"r"', "attempts_spent")),
            Settlement("done", "w", claimed["done"].fence, WorkDone('"r"')),
        ]
        assert await store.work.settle(reports) == [True, True]
        assert await store.work.cancel("cancelled", reason="enough", who="ann")
        names = ["failed", "done", "open", "none", "cancelled", "aside", "failed"]
        retried = await store.work.change(
            WorkFilter(ids=tuple(names)), Requeue("bob", "fixed"), events=[event("retried")]
        )
        assert sorted(retried) == ["aside", "cancelled", "failed"]
        for name in retried:
            item = required(await store.work.get(name))
            assert (item.state, item.generation, item.attempts) == (WorkState.PENDING, 1, 0)
            assert (item.failure, item.result, item.reason) == (None, None, "")
            assert [(one.what, one.why, one.who) for one in item.history][-1] == ("requeued", "fixed", "bob")
        assert (
            await store.work.change(WorkFilter(ids=("failed", "done")), Requeue("bob"), events=[event("never")]) == []
        )
        assert await event_types(store) == ["retried"]
        assert {item.id for item in await store.work.claim(9, WorkClaim(owner="w2"))} == {
            "aside",
            "cancelled",
            "failed",
        }

    @story()
    async def test_a_change_leaves_alone_what_is_not_meant_and_what_its_transition_does_not_take(
        self, store: Store
    ) -> None:
        await quarantined(store, "a-aside")
        await store.work.enqueue([WorkItem(name, "t") for name in ("b-failed", "c-open")])
        claimed = {item.id: item for item in await store.work.claim(2, WorkClaim(owner="w"))}
        failed = Settlement("b-failed", "w", claimed["b-failed"].fence, WorkFailed('"f"'))
        assert await store.work.settle([failed]) == [True]
        never = [event("never")]
        assert await store.work.change(WorkFilter(ids=()), Requeue("ann"), events=never) == []
        assert await store.work.change(WorkFilter(state=WorkState.FAILED), Discard("ann"), events=never) == []
        assert await store.work.change(WorkFilter(state=WorkState.RUNNING), Requeue("ann"), events=never) == []
        assert await store.work.change(WorkFilter(ids=("b-failed", "c-open")), Remove(), events=never) == []
        assert await store.work.change(EVERYTHING, Requeue("ann"), dry_run=True) == ["a-aside", "b-failed"]
        assert await store.work.change(EVERYTHING, Remove(), dry_run=True) == ["a-aside"]
        assert await store.work.change(WorkFilter(kind="t"), Discard("ann")) == ["a-aside"]
        states = [(item.id, item.state.value) for item in await store.work.by_id()]
        assert states == [("a-aside", "discarded"), ("b-failed", "failed"), ("c-open", "running")]
        assert await event_types(store) == []

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
        assert await store.quarantine.count(WorkFilter(reason="x")) == {"t": 1, "u": 1}
        await store.quarantine.requeue(WorkFilter(ids=("a",)), who="ann")
        await store.quarantine.discard(WorkFilter(ids=("b",)), who="ann")
        stats = await store.quarantine.stats()
        assert (stats.total, stats.by_kind, stats.by_reason) == (1, {"u": 1}, {"x": 1})
        await store.quarantine.purge(EVERYTHING)
        assert await store.quarantine.stats() == QuarantineStats(0, {}, {}, {}, None)
