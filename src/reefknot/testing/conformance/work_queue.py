"""Conformance suite of the work queue."""

import asyncio
from collections.abc import Sequence

from reefknot.audit.port import AuditEntry
from reefknot.queue.model.work import (
    ROUTER,
    Budget,
    Interrupted,
    Quarantine,
    Returned,
    Settled,
    Snooze,
    TryAgain,
    WorkDone,
    WorkFailed,
    WorkItem,
    WorkState,
)
from reefknot.queue.port.work_queue import FIRST_FENCE, Enqueue, Enqueued, Held, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event, event_types, required, story, wall_ms
from reefknot.testing.conformance.listings import ListingContract
from reefknot.testing.conformance.submissions import FollowUpContract, SubmissionContract

LONGEST_S = 20.0


def report(item: WorkItem, settled: Settled, *events: AuditEntry) -> Settlement:
    """The settlement of a claimed item by its owner."""
    return Settlement(item.id, item.owner, item.fence, settled, events)


async def take(store: Store, n: int = 1, *, classes: Sequence[str] = (), lease: float = 60.0) -> list[WorkItem]:
    return await store.work.claim(n, WorkClaim(owner="w", classes=classes, lease=lease))


class WorkQueueContract(SubmissionContract, FollowUpContract, ListingContract):
    """Subclass it, and give it a `harness`."""

    @story()
    async def test_what_was_accepted_is_claimed_once_and_as_it_came(self, store: Store) -> None:
        given = WorkItem(
            "a", "http.request", "io", "src", "ten", "cor", "tra", 3, deadline_at=5, payload=bytes(range(256))
        )
        assert await store.work.enqueue([given], events=[event("admission")]) == [Enqueued.ACCEPTED]
        (item,) = await take(store)
        assert item.payload == given.payload
        same = ("id", "kind", "resource_class", "source", "tenant_id", "correlation_id", "trace_id", "deadline_at")
        assert all(getattr(item, name) == getattr(given, name) for name in (*same, "priority"))
        assert (item.state, item.owner, item.attempts) == (WorkState.RUNNING, "w", 0)
        assert await take(store) == []
        assert await event_types(store) == ["admission"]

    @story()
    async def test_the_same_id_again_is_a_duplicate_in_whatever_state_it_is(self, store: Store) -> None:
        twice = [WorkItem("a", "t"), WorkItem("a", "t")]
        assert await store.work.enqueue(twice) == [Enqueued.ACCEPTED, Enqueued.DUPLICATE]
        (item,) = await take(store)
        assert await store.work.enqueue(twice[:1], events=[event("never")]) == [Enqueued.DUPLICATE]
        await store.work.settle([report(item, WorkDone())])
        assert await store.work.enqueue(twice[:1]) == [Enqueued.DUPLICATE]
        assert await take(store) == []
        assert await event_types(store) == []

    @story()
    async def test_events_of_items_that_were_not_accepted_are_not_kept(self, store: Store) -> None:
        def of(name: str) -> AuditEntry:
            return AuditEntry(b"{}", f"admission of {name}", 1, work_id=name)

        await store.work.enqueue([WorkItem("a", "t")])
        items = [WorkItem("a", "t"), WorkItem("b", "t")]
        events = [of("a"), of("b"), of("c"), event("of all")]
        assert await store.work.enqueue(items, events=events) == [Enqueued.DUPLICATE, Enqueued.ACCEPTED]
        assert await event_types(store) == ["admission of b", "admission of c", "of all"]

    @story()
    async def test_what_is_handed_in_with_an_owner_is_its_at_once_and_fenced_like_a_claim(
        self, store: Store, clock: VirtualClock
    ) -> None:
        waiting = [WorkItem("w", "t", "io")]
        assert await store.work.enqueue(waiting) == [Enqueued.ACCEPTED]
        own = [WorkItem("a", "t", "io", payload=b"p"), WorkItem("b", "t", "io")]
        taken = [Enqueued.ACCEPTED, Enqueued.ACCEPTED]
        assert await store.work.enqueue(own, Enqueue(owner="o", lease=10)) == taken
        assert await store.work.enqueue(own, Enqueue(owner="x")) == [Enqueued.DUPLICATE, Enqueued.DUPLICATE]
        assert [item.id for item in await take(store, 9, classes=("io",))] == ["w"]
        found = required(await store.work.get("a"))
        assert (found.state, found.owner, found.payload) == (WorkState.RUNNING, "o", b"p")
        assert await store.work.settle([Settlement("a", "x", FIRST_FENCE, WorkDone())]) == [False]
        assert await store.work.settle([Settlement("a", "o", FIRST_FENCE, WorkDone())]) == [True]
        assert await store.work.renew([Held("b", "o", FIRST_FENCE)], lease=20) == [True]
        clock.advance(19)
        assert await take(store) == []
        clock.advance(2)
        (late,) = await take(store)
        assert (late.id, late.crashes, late.fence > FIRST_FENCE) == ("b", 1, True)

    @story()
    async def test_higher_priority_comes_first_and_then_the_oldest(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("old", "t"), WorkItem("high", "t", "io", priority=5)])
        clock.advance(1)
        await store.work.enqueue([WorkItem("young", "t", "io"), WorkItem("low", "t", priority=-1)])
        assert [item.id for item in await take(store, 3)] == ["high", "old", "young"]
        assert [item.id for item in await take(store, 3)] == ["low"]

    @story()
    async def test_on_request_the_newest_of_a_priority_comes_first(self, store: Store, clock: VirtualClock) -> None:
        for name in ("a", "b", "c"):
            await store.work.enqueue([WorkItem(name, "t")])
            clock.advance(1)
        await store.work.enqueue([WorkItem("high", "t", "io", priority=1)])
        taken = await store.work.claim(3, WorkClaim(owner="w", newest_first=True))
        assert [item.id for item in taken] == ["high", "c", "b"]
        assert [item.id for item in await take(store, 3)] == ["a"]

    @story()
    async def test_only_the_classes_that_were_named_are_claimed(self, store: Store) -> None:
        await store.work.enqueue([WorkItem(name, "t", name) for name in ("cpu", "gpu", "io")])
        assert await take(store, 9, classes=["none"]) == []
        assert [item.id for item in await take(store, 9, classes=["io", "cpu", "io"])] == ["cpu", "io"]
        assert await take(store, 0) == []

    @story()
    async def test_work_is_not_claimed_before_it_is_due(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue(
            [WorkItem("later", "t", priority=9, due_at=wall_ms(clock) + 5000), WorkItem("now", "t")]
        )
        assert [item.id for item in await take(store, 9)] == ["now"]
        clock.advance(4.9)
        assert await take(store) == []
        clock.advance(0.2)
        assert [item.id for item in await take(store)] == ["later"]

    @story()
    async def test_a_retry_spends_an_attempt_and_waits_for_its_time(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t", payload=b"p")])
        (item,) = await take(store)
        again = TryAgain(wall_ms(clock) + 60_000, '{"code": 3001}', "transient", delay_ms=60_000, reason="network")
        assert await store.work.settle([report(item, again, event("retry_attempt"))]) == [True]
        assert await take(store) == []
        clock.advance(60)
        (second,) = await take(store)
        assert (second.attempts, second.failure, second.payload) == (1, '{"code": 3001}', b"p")
        assert second.fence > item.fence
        budget = second.budget
        assert (budget.attempts, budget.failure_type, budget.total_delay_ms) == (1, "transient", 60_000)
        assert budget.trigger == "network"
        await store.work.settle([report(second, WorkDone("7"))])
        ended = required(await store.work.get("a"))
        assert (ended.state, ended.attempts, ended.result) == (WorkState.SUCCEEDED, 2, "7")
        assert ended.budget == Budget()

    @story()
    async def test_snoozes_and_shutdowns_spend_no_attempts(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        (item,) = await take(store)
        await store.work.settle([report(item, Snooze(wall_ms(clock) + 1000, "source cools"))])
        clock.advance(1)
        (item,) = await take(store)
        await store.work.settle([report(item, Interrupted())])
        (item,) = await take(store)
        assert (item.attempts, item.snoozes, item.interruptions, item.crashes) == (0, 1, 1, 0)

    @story()
    async def test_failures_for_good_and_quarantine_end_it_with_what_is_known(self, store: Store) -> None:
        await store.work.enqueue([WorkItem("a", "t"), WorkItem("b", "t")])
        first, second = await take(store, 2)
        await store.work.settle(
            [
                report(first, WorkFailed('"f"', '"r"', "refused"), event("failed")),
                report(second, Quarantine("poison", '"f"', '"r"'), event("quarantined")),
            ]
        )
        for work_id, state, reason in (("a", WorkState.FAILED, "refused"), ("b", WorkState.QUARANTINED, "poison")):
            item = required(await store.work.get(work_id))
            assert (item.state, item.reason, item.failure, item.result) == (state, reason, '"f"', '"r"')
            assert (item.attempts, item.owner) == (1, "")
        assert await event_types(store) == ["failed", "quarantined"]

    @story()
    async def test_a_lease_that_ran_out_comes_back_as_a_crash_and_the_late_owner_is_refused(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        (zombie,) = await take(store, lease=5)
        clock.advance(5)
        (heir,) = await store.work.claim(1, WorkClaim(owner="heir"))
        assert (heir.crashes, heir.attempts) == (1, 0)
        assert heir.fence > zombie.fence
        late = [report(zombie, WorkDone('"late"'), event("late"))]
        assert await store.work.settle(late) == [False]
        assert await store.work.renew([Held("a", "w", zombie.fence)]) == [False]
        assert await store.work.settle([report(heir, WorkDone('"heir"'))]) == [True]
        assert required(await store.work.get("a")).result == '"heir"'
        assert await event_types(store) == []

    @story()
    async def test_a_renewed_lease_does_not_run_out(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        (item,) = await take(store, lease=5)
        clock.advance(4)
        assert await store.work.renew([Held("a", "w", item.fence), Held("zz", "w", 1)], lease=5) == [True, False]
        clock.advance(4)
        assert await take(store) == []
        assert await store.work.settle([report(item, WorkDone())]) == [True]

    @story()
    async def test_the_time_budget_counts_from_the_first_start_whatever_crashed_and_however_long_it_ran(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        clock.advance(7)
        (item,) = await take(store, lease=5)
        for _ in range(3):
            clock.advance(4)
            assert await store.work.renew([Held("a", "w", item.fence)], lease=5) == [True]
        clock.advance(5)
        (heir,) = await store.work.claim(1, WorkClaim(owner="heir", lease=5))
        clock.advance(5)
        (second,) = await store.work.claim(1, WorkClaim(owner="second"))
        assert heir.budget.first_attempt_at == second.budget.first_attempt_at == item.updated_at
        assert item.updated_at - item.created_at == 7000

    @story()
    async def test_the_third_crash_puts_it_into_quarantine_with_an_event(
        self, store: Store, clock: VirtualClock
    ) -> None:
        def crash_events(item: WorkItem) -> list[AuditEntry]:
            return [event(f"crash {item.crashes} {item.state}")]

        await store.work.enqueue([WorkItem("a", "t")])
        for crash in range(3):
            taken = await store.work.claim(1, WorkClaim(owner=f"w{crash}", lease=5, crash_events=crash_events))
            assert len(taken) == 1
            clock.advance(5)
        assert await store.work.claim(1, WorkClaim(owner="w", crash_events=crash_events)) == []
        assert required(await store.work.get("a")).state is WorkState.QUARANTINED
        assert await event_types(store) == ["crash 1 pending", "crash 2 pending", "crash 3 quarantined"]

    @story()
    async def test_a_claim_brings_back_crashed_work_of_its_own_classes_only(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "k", "io"), WorkItem("b", "k", "cpu")])
        await take(store, 2, lease=1)
        clock.advance(2)
        assert await take(store, 0, classes=["io"]) == []
        assert required(await store.work.get("a")).state is WorkState.PENDING
        assert required(await store.work.get("b")).state is WorkState.RUNNING
        assert [item.id for item in await take(store, 9)] == ["a", "b"]

    @story()
    async def test_pending_work_goes_over_to_another_class_and_only_its_claimers_find_it(
        self, store: Store, clock: VirtualClock
    ) -> None:
        later = wall_ms(clock) + 5000
        await store.work.enqueue([WorkItem("a", "k", "io"), WorkItem("b", "k", "io", due_at=later)])
        assert await store.work.transfer("a", "cpu")
        assert await store.work.transfer("a", "cpu")
        assert await store.work.transfer("b", "cpu")
        assert await take(store, 9, classes=["io"]) == []
        assert [item.id for item in await take(store, 9, classes=["cpu"])] == ["a"]
        assert not await store.work.transfer("a", "io")
        assert not await store.work.transfer("none", "io")
        clock.advance(5)
        assert await take(store, 9, classes=["io"]) == []
        assert [item.id for item in await take(store, 9, classes=["cpu"])] == ["b"]
        await store.work.enqueue([WorkItem("c", "k", "io", due_at=later + 60_000), WorkItem("d", "k", "io")])
        assert [await store.work.transfer(one, "io", due_at=at) for one, at in (("c", later), ("d", later * 2))]
        assert [item.id for item in await take(store, 9, classes=["io"])] == ["c"]

    @story()
    async def test_pending_and_running_work_can_be_cancelled_and_ended_work_cannot(self, store: Store) -> None:
        await store.work.enqueue([WorkItem("a", "t"), WorkItem("b", "t")])
        (running,) = await take(store)
        for work_id in ("a", "b"):
            assert await store.work.cancel(work_id, reason="enough", who="ann", events=[event("cancelled")])
            assert not await store.work.cancel(work_id, events=[event("never")])
            assert required(await store.work.get(work_id)).state is WorkState.CANCELLED
        assert not await store.work.cancel("zz")
        assert await store.work.settle([report(running, WorkDone())]) == [False]
        assert await take(store) == []
        assert await event_types(store) == ["cancelled"] * 2

    @story()
    async def test_concurrent_claims_never_get_the_same_item(self, store: Store) -> None:
        await store.work.enqueue([WorkItem(f"{number:03}", "t") for number in range(100)])
        taken = await asyncio.gather(*(store.work.claim(7, WorkClaim(owner=f"w{number}")) for number in range(20)))
        ids = [item.id for batch in taken for item in batch]
        assert sorted(ids) == [f"{number:03}" for number in range(100)]

    @story()
    async def test_the_snapshot_counts_by_class_and_tells_how_long_the_oldest_waits(
        self, store: Store, clock: VirtualClock
    ) -> None:
        later = WorkItem("later", "t", "io", due_at=wall_ms(clock) + 10_000)
        await store.work.enqueue([WorkItem("a", "t", "io"), WorkItem("b", "t"), later])
        clock.advance(2)
        await take(store, classes=["cpu"])
        snapshot = await store.work.snapshot()
        assert snapshot.counts == {"io": {WorkState.PENDING: 2}, "cpu": {WorkState.RUNNING: 1}}
        assert snapshot.oldest_due_ms == 2000
        clock.advance(20)
        assert (await store.work.snapshot()).oldest_due_ms == 22_000
        (first,) = await take(store, classes=["io"])
        assert (await store.work.snapshot()).oldest_due_ms == 12_000, "that of the one that was not promoted"
        await store.work.settle([report(first, WorkDone())])
        await take(store, classes=["io"])
        snapshot = await store.work.snapshot()
        running = {WorkState.RUNNING: 1}
        assert snapshot.counts == {"io": {**running, WorkState.SUCCEEDED: 1}, "cpu": running}
        assert snapshot.oldest_due_ms == 0

    @story()
    async def test_purging_removes_what_ended_long_ago_and_nothing_else(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem(name, "t") for name in ("done", "aside", "pending")])
        done, aside = await take(store, 2)
        await store.work.settle([report(done, WorkDone()), report(aside, Quarantine("bad"))])
        assert await store.work.purge(wall_ms(clock)) == 0
        clock.advance(1)
        assert await store.work.purge(wall_ms(clock)) == 1
        assert [item.id for item in (await store.work.search()).items] == ["pending", "aside"]

    @story()
    async def test_who_waits_for_work_is_woken_when_there_is_some(self, store: Store) -> None:
        assert not await store.work.wait(0.01)
        waiting = asyncio.create_task(store.work.wait(15, classes=["io"]))
        await asyncio.sleep(0)
        await store.work.enqueue([WorkItem("a", "t", "io")])
        assert await waiting
        assert await store.work.wait(0)
        assert not await store.work.wait(0.01, classes=["cpu"])

    @story()
    async def test_an_assigned_submission_is_the_same_record_in_the_workers_class(
        self, store: Store, clock: VirtualClock
    ) -> None:
        submission = WorkItem("a", "t", ROUTER, correlation_id="r", deadline_at=wall_ms(clock) + 9_000, payload=b"p")
        await store.work.enqueue([submission], Enqueue(owner="router", lease=30))
        for_worker = WorkItem("a", "t", "cpu@w", correlation_id="r", admission='{"queue_depth":1}', payload=b"p")
        kept = required(*await store.work.assign([for_worker], events=[event("admitted")]))
        assert (kept.resource_class, kept.state, kept.owner) == ("cpu@w", WorkState.PENDING, "")
        assert (kept.deadline_at, kept.admission) == (submission.deadline_at, '{"queue_depth":1}')
        late = Settlement("a", "router", FIRST_FENCE, WorkDone("{}"))
        assert await store.work.settle([late]) == [False], "its router's claim is void"
        assert await take(store, classes=[ROUTER]) == []
        (item,) = await take(store, classes=["cpu@w"])
        assert (item.id, item.payload, item.admission) == ("a", b"p", '{"queue_depth":1}')
        assert await store.work.settle([report(item, WorkDone('"result"'))]) == [True]
        found = required(await store.work.get("a"))
        assert (found.state, found.result) == (WorkState.SUCCEEDED, '"result"')
        assert [one.id for one in (await store.work.search()).items] == ["a"]
        assert await event_types(store) == ["admitted"]

    @story()
    async def test_what_is_assigned_with_a_start_is_its_owners_at_once(self, store: Store) -> None:
        await store.work.enqueue([WorkItem("a", "t", ROUTER, correlation_id="r")])
        items = [
            WorkItem("a", "t", "cpu@w", correlation_id="r"),
            WorkItem("b", "t", "cpu@w"),
            WorkItem("c", "t", "cpu@w"),
        ]
        kept = await store.work.assign(items, start={"a", "b"}, owner="w#1", lease=10)
        assert [one and one.state for one in kept] == [WorkState.RUNNING, WorkState.RUNNING, WorkState.PENDING]
        assert [item.id for item in await take(store, 9)] == ["c"]
        held = [one for one in kept if one is not None and one.owner == "w#1"]
        assert await store.work.settle([report(one, WorkDone()) for one in held]) == [True, True]

    @story()
    async def test_an_id_that_a_worker_has_or_that_has_ended_is_not_assigned_again(self, store: Store) -> None:
        def of(name: str) -> AuditEntry:
            return AuditEntry(b"{}", f"admission of {name}", 1, work_id=name)

        await store.work.enqueue([WorkItem("ended", "t", ROUTER), WorkItem("other", "t", ROUTER, correlation_id="r")])
        await store.work.cancel("ended")
        await store.work.assign([WorkItem("here", "t", "cpu@w")])
        names = ("ended", "other", "here", "new")
        again = [WorkItem(name, "t", "cpu@x") for name in names]
        kept = await store.work.assign(again, events=[of(name) for name in names])
        assert [one is not None for one in kept] == [False, False, False, True]
        assert await event_types(store) == ["admission of new"]
        where = {item.id: item.resource_class for item in (await store.work.search()).items}
        assert where == {"ended": ROUTER, "other": ROUTER, "here": "cpu@w", "new": "cpu@x"}

    @story()
    async def test_who_waits_for_an_end_is_given_the_item_as_it_ended(self, store: Store) -> None:
        await store.work.enqueue([WorkItem(name, "t", payload=b"p") for name in ("a", "b", "c")])
        assert await store.work.ended("a", 0.01) is None
        waiting = [asyncio.create_task(store.work.ended(name, 15)) for name in ("a", "a", "b", "c")]
        await asyncio.sleep(0)
        a, b = await take(store, 2)
        await store.work.settle([report(a, WorkDone('"A"')), report(b, Quarantine("bad"))])
        await store.work.cancel("c")
        items = await asyncio.gather(*waiting)
        assert [one and (one.id, one.state.value) for one in items] == [
            ("a", "succeeded"),
            ("a", "succeeded"),
            ("b", "quarantined"),
            ("c", "cancelled"),
        ]
        assert required(await store.work.ended("a", 0)).result == '"A"'

    @story()
    async def test_recalled_work_of_a_gone_worker_is_a_submission_again(
        self, store: Store, clock: VirtualClock
    ) -> None:
        queued = [WorkItem("due", "t", "cpu@gone", payload=b"p"), WorkItem("here", "t", "cpu@here")]
        later = WorkItem("later", "t", "io@gone", due_at=wall_ms(clock) + 5_000)
        await store.work.assign([*queued, later])
        crashed = WorkItem("crashed", "t", "cpu@gone")
        await store.work.assign([crashed], start={"crashed"}, owner="gone#1", lease=10)
        running = WorkItem("running", "t", "cpu@gone")
        await store.work.assign([running], start={"running"}, owner="gone#1", lease=100)
        assert await store.work.open_classes() == ["cpu@gone", "cpu@here", "io@gone"]
        clock.advance(20)
        assert await store.work.recall(["cpu@gone", "io@gone"], crash_events=lambda item: [event("lost")]) == 3
        where = {item.id: item.resource_class for item in (await store.work.search()).items}
        assert where == {"due": ROUTER, "here": "cpu@here", "later": ROUTER, "crashed": ROUTER, "running": "cpu@gone"}
        assert await event_types(store) == ["lost"]
        claimed = {item.id: item for item in await take(store, 9, classes=[ROUTER])}
        assert claimed.keys() == {"due", "later", "crashed"}
        assert (claimed["crashed"].crashes, claimed["due"].crashes) == (1, 0)
        assert all(item.admission for item in claimed.values()), "a worker had accepted them"
        again = WorkItem("crashed", "t", "cpu@here")
        kept = required(*await store.work.assign([again]))
        assert kept.crashes == 1, "a poison is not forgotten when its worker changes"

    @story()
    async def test_a_suspect_is_claimed_by_itself_in_its_turn(self, store: Store, clock: VirtualClock) -> None:
        isolated = WorkClaim(owner="w", classes=["cpu@w"], isolate=True)
        for name in "abc":
            await store.work.assign([WorkItem(name, "t", "cpu@w")], start=set("bc"), owner="gone", lease=1)
        clock.advance(10)
        await store.work.assign([WorkItem("d", "t", "cpu@w")])
        turns = [await store.work.claim(9, isolated) for _ in range(5)]
        assert [[item.id for item in turn] for turn in turns] == [["a"], ["b"], ["c"], ["d"], []]
        suspect = required(await store.work.get("b"))
        assert await store.work.settle([report(suspect, Returned("not known"))]) == [True]
        again = required(*await store.work.assign([WorkItem("b", "t", "cpu@w")], start={"b"}, owner="w"))
        assert (again.state, again.crashes) == (WorkState.PENDING, 1), "it has to run alone, so it is not started"
        assert [item.id for item in await take(store, 9)] == ["b"], "who does not ask for it gets no isolation"

    @story()
    async def test_what_a_worker_cannot_run_is_a_submission_again_and_spends_nothing(self, store: Store) -> None:
        await store.work.assign([WorkItem("a", "t", "cpu@w", payload=b"p")], start={"a"}, owner="w")
        item = required(await store.work.get("a"))
        assert await store.work.settle([report(item, Returned("not known"))]) == [True]
        back = required(*await take(store, classes=[ROUTER]))
        assert (back.attempts, back.interruptions, back.crashes, back.payload) == (0, 0, 0, b"p")
        assert back.admission, "a worker had accepted it"

    @story()
    async def test_a_lease_is_extended_without_the_loop(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t"), WorkItem("b", "t")])
        a, b = [Held(item.id, item.owner, item.fence) for item in await take(store, 2, lease=10)]
        clock.advance(9)
        await asyncio.to_thread(store.leases.extend, [a, Held("b", "other", b.fence + 1), Held("no", "w", 1)], lease=20)
        clock.advance(9)
        async with asyncio.timeout(LONGEST_S):  # a mirror hears it, after what happened before
            while required(await store.work.get("a")).lease_ms != 20_000:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert [item.id for item in await take(store, 2)] == ["b"], "one that is not its owner's is left as it was"
        assert await store.work.renew([a, b], lease=10) == [True, False]
        clock.advance(9)
        assert await store.work.settle([Settlement("a", "w", a.fence, WorkDone())]) == [True]

    @story()
    async def test_work_is_given_back_without_the_loop_and_counts_as_interrupted(self, store: Store) -> None:
        await store.work.assign([WorkItem(name, "t", "cpu@w") for name in "abc"], start=set("abc"), owner="w")
        a, b, c = [required(await store.work.get(name)) for name in "abc"]
        assert await store.work.settle([report(c, WorkDone())]) == [True]
        held = [Held(a.id, "w", a.fence), Held(b.id, "other", b.fence), Held(c.id, "w", c.fence), Held("no", "w", 1)]
        await asyncio.to_thread(store.leases.give_back, held)
        async with asyncio.timeout(LONGEST_S):
            while required(await store.work.get("a")).state is WorkState.RUNNING:  # noqa: ASYNC110 - a mirror hears it
                await asyncio.sleep(0.001)
        back, kept, done = [required(await store.work.get(name)) for name in "abc"]
        assert (back.state, back.reason, back.owner) == (WorkState.PENDING, "shutdown", "")
        assert (back.interruptions, back.crashes, back.attempts) == (1, 0, 0)
        assert (kept.state, done.state) == (WorkState.RUNNING, WorkState.SUCCEEDED), "not its owner's, or over"
        assert [item.id for item in await take(store, 9, classes=["cpu@w"])] == ["a"]

    @story()
    async def test_a_router_that_vanishes_is_not_charged_to_the_work(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem("a", "t", ROUTER)])
        for _ in range(5):
            (item,) = await take(store, classes=[ROUTER], lease=10)
            assert (item.crashes, item.budget) == (0, Budget())
            clock.advance(20)
