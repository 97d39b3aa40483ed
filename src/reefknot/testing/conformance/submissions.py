"""Conformance stories of admission where work is kept: by count, priority, tenant and deadline; and of follow-ups."""

from functools import partial
from typing import Any

from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.queue.model.admission import Reject, RejectReason
from reefknot.queue.model.follow_ups import RefusedFollowUp
from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.model.work import ROUTER, Extra, Settled, Snooze, Waits, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import FIRST_FENCE, Enqueue, Enqueued, FollowUps, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event, event_types, story, wall_ms
from reefknot.testing.conformance.unique import UniqueContract


async def _take(store: Store, n: int) -> list[WorkItem]:
    return await store.work.claim(n, WorkClaim(owner="w"))


class SubmissionContract(UniqueContract):
    """Part of the contract of a work queue."""

    @story()
    async def test_a_full_class_refuses_and_the_others_do_not(self, store: Store) -> None:
        items = [WorkItem(f"a{number}", "t", ROUTER, pool="io") for number in range(3)]
        accepted, two = Enqueued.ACCEPTED, SubmissionRules(size=2)
        *first, third = await store.work.enqueue(items, Enqueue(rules=two))
        assert first == [accepted, accepted]
        assert isinstance(third, Reject)
        assert third.reason is RejectReason.QUEUE_FULL
        assert await store.work.get("a2") is None
        assert await store.work.enqueue([WorkItem("b", "t", ROUTER, pool="cpu")], Enqueue(rules=two)) == [accepted]
        await store.work.cancel("a0")
        assert await store.work.enqueue(items, Enqueue(rules=two)) == [Enqueued.DUPLICATE, Enqueued.DUPLICATE, accepted]

    @story()
    async def test_the_events_of_accepted_items_are_kept_and_those_of_the_others_are_not(self, store: Store) -> None:
        """Two tenants use one id, and the class has a single place: an event by id could not tell them apart."""

        def accept_events(item: WorkItem) -> list[AuditEntry]:
            return [event(f"submitted {item.id} {item.tenant_id}")]

        items = [WorkItem(f"{tenant}|a", "t", ROUTER, pool="io", tenant_id=tenant) for tenant in ("one", "two", "one")]
        answers = await store.work.enqueue(items, Enqueue(rules=SubmissionRules(size=1), accept_events=accept_events))
        assert answers[0] is Enqueued.ACCEPTED
        assert isinstance(answers[1], Reject)
        assert answers[2] is Enqueued.DUPLICATE
        assert await event_types(store) == ["submitted one|a one"]

    @story()
    async def test_a_higher_priority_displaces_the_oldest_of_the_lowest(self, store: Store) -> None:
        def drop_events(item: WorkItem) -> list[AuditEntry]:
            return [event(f"dropped {item.id} {item.state}")]

        items = [WorkItem(f"a{number}", "t", ROUTER, pool="io", priority=-number // 2) for number in range(4)]
        full = SubmissionRules(size=4)
        await store.work.enqueue(items, Enqueue(rules=full))
        high = WorkItem("high", "t", ROUTER, pool="io", priority=9)
        assert await store.work.enqueue([high], Enqueue(rules=full, drop_events=drop_events)) == [Enqueued.ACCEPTED]
        dropped = await store.work.get("a3")
        assert dropped is not None
        assert (dropped.state, dropped.reason) == (WorkState.CANCELLED, "dropped_oldest")
        assert await event_types(store) == ["dropped a3 cancelled"]
        (refused,) = await store.work.enqueue([WorkItem("b", "t", ROUTER, pool="io", priority=-9)], Enqueue(rules=full))
        assert isinstance(refused, Reject)

    @story()
    async def test_work_for_later_takes_no_place_is_not_displaced_and_has_a_bound_of_its_own(
        self, store: Store, clock: VirtualClock
    ) -> None:
        due, accepted, one = wall_ms(clock) + 9000, Enqueued.ACCEPTED, SubmissionRules(size=1)
        later = [WorkItem(f"later{n}", "t", ROUTER, pool="io", priority=-1, due_at=due) for n in range(11)]
        *first, last = await store.work.enqueue(later, Enqueue(rules=one))
        assert first == [accepted] * 10
        assert isinstance(last, Reject)
        assert (last.reason, last.depth) == (RejectReason.QUEUE_FULL, 10)
        assert await store.work.enqueue([WorkItem("now", "t", ROUTER, pool="io")], Enqueue(rules=one)) == [accepted]
        high = WorkItem("high", "t", ROUTER, pool="io", priority=9)
        assert await store.work.enqueue([high], Enqueue(rules=one)) == [accepted]
        displaced = await store.work.get("now")
        assert displaced is not None
        assert displaced.state is WorkState.CANCELLED, "not one of those that hold no place"
        assert [item.id for item in await store.work.claim(99, WorkClaim(owner="r", classes=(ROUTER,)))] == ["high"]

    @story()
    async def test_work_for_later_is_claimed_at_its_due_time_and_counts_as_submitted_then(
        self, store: Store, clock: VirtualClock
    ) -> None:
        due, one = wall_ms(clock) + 9000, SubmissionRules(size=1)
        later = WorkItem("later", "t", ROUTER, pool="io", tenant_id="acme", due_at=due, deadline_at=due + 500)
        assert await store.work.enqueue([later], Enqueue(rules=one)) == [Enqueued.ACCEPTED]
        kept = await store.work.get("later")
        assert kept is not None
        assert (kept.state, kept.reason, kept.due_at) == (WorkState.PENDING, "scheduled", due)
        assert await store.work.claim(9, WorkClaim(owner="r", classes=(ROUTER,))) == []
        clock.advance(9.1)
        (claimed,) = await store.work.claim(9, WorkClaim(owner="r", classes=(ROUTER,)))
        assert (claimed.id, claimed.deadline_at) == ("later", due + 500)
        (full,) = await store.work.enqueue(
            [WorkItem("now", "t", ROUTER, pool="io", tenant_id="acme")], Enqueue(rules=one)
        )
        assert isinstance(full, Reject), "a router holds it: it has its place"

    @story()
    async def test_a_submission_that_is_due_later_makes_room_as_well(self, store: Store, clock: VirtualClock) -> None:
        """Recalled retries are such: they hold a place, and cannot be claimed yet."""
        due = wall_ms(clock) + 9000
        later = [
            WorkItem(f"a{number}", "t", ROUTER, pool="io", priority=-1, due_at=due, admission="{}") for number in (1, 2)
        ]
        full = SubmissionRules(size=2)
        await store.work.enqueue(later, Enqueue(rules=full))
        high = WorkItem("high", "t", ROUTER, pool="io", priority=9)
        assert await store.work.enqueue([high], Enqueue(rules=full)) == [Enqueued.ACCEPTED]
        states = {item.id: item.state for item in (await store.work.search()).items}
        assert states == {"a1": WorkState.CANCELLED, "a2": WorkState.PENDING, "high": WorkState.PENDING}

    @story()
    async def test_tenants_whose_work_is_claimed_do_not_hide_that_of_another(self, store: Store) -> None:
        def of(tenant: str) -> WorkItem:
            return WorkItem(tenant, "t", ROUTER, pool="io", tenant_id=tenant)

        await store.work.enqueue([of(f"b{number:03}") for number in range(200)])
        while await store.work.claim(50, WorkClaim(owner="r", classes=(ROUTER,))):
            pass
        await store.work.enqueue([of("a"), of("b100a"), of("c")])
        claimed = await store.work.claim(9, WorkClaim(owner="r", classes=(ROUTER,)))
        assert {item.id for item in claimed} == {"a", "b100a", "c"}

    @story()
    async def test_work_that_would_wait_too_long_for_its_deadline_is_refused(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """Two slots and steps of a second: six waiting are three seconds, of ten that is too much of the deadline."""

        def arrival(name: str, seconds: float) -> WorkItem:
            return WorkItem(name, "t", ROUTER, pool="io", deadline_at=wall_ms(clock) + int(seconds * 1000))

        rules = SubmissionRules()
        assert await store.work.enqueue([arrival("first", 0.1)], Enqueue(rules=rules)) == [Enqueued.ACCEPTED]
        await store.control.report("system", "{}", keep=60, capacity=Capacity({"io": 2}, rules))
        for number in range(100):
            await store.work.assign([WorkItem(f"s{number}", "t", "io@w")], start={f"s{number}"}, owner="w")
            done = Settlement(f"s{number}", "w", FIRST_FENCE, WorkDone(), took_ms=1000.0)
            assert await store.work.settle([done]) == [True]
        await store.work.enqueue([WorkItem(f"a{number}", "t", ROUTER, pool="io") for number in range(6)])
        kept, refused = await store.work.enqueue([arrival("b", 20), arrival("c", 5)], Enqueue(rules=rules))
        assert kept is Enqueued.ACCEPTED
        assert isinstance(refused, Reject)
        assert refused.reason is RejectReason.WOULD_MISS_DEADLINE
        (again,) = await store.work.enqueue([arrival("c", 5)], Enqueue(rules=rules))
        assert again == refused, "by a read, too"
        assert await store.work.get("c") is None

    @story()
    async def test_tenants_take_turns_within_a_priority(self, store: Store, clock: VirtualClock) -> None:
        flood = [WorkItem(f"a{number}", "t", "io", tenant_id="a") for number in range(6)]
        await store.work.enqueue(flood)
        clock.advance(1)
        others = [WorkItem(f"{name}{number}", "t", "io", tenant_id=name) for name in "bc" for number in range(2)]
        await store.work.enqueue([*others, WorkItem("high", "t", "io", tenant_id="a", priority=1)])
        assert [item.id for item in await _take(store, 4)] == ["high", "a0", "b0", "c0"]
        assert [item.id for item in await _take(store, 1)] == ["a1"]
        assert [item.id for item in await _take(store, 2)] == ["b1", "c1"]
        assert [item.id for item in await _take(store, 9)] == ["a2", "a3", "a4", "a5"]

    @story()
    async def test_a_claim_of_certain_items_leaves_all_others(self, store: Store, clock: VirtualClock) -> None:
        await store.work.enqueue([WorkItem(name, "t", ROUTER) for name in "abcd"])
        await store.work.enqueue([WorkItem("late", "t", ROUTER, due_at=wall_ms(clock) + 5_000)])
        named = partial(WorkClaim, "w", [ROUTER])
        two = await store.work.claim(2, named(only={"d", "b", "c", "late", "none"}))
        assert [item.id for item in two] == ["b", "c"]
        assert [item.id for item in await store.work.claim(9, named(only={"d", "b", "late"}))] == ["d"]
        assert await store.work.claim(9, named(only=())) == []
        clock.advance(6)
        assert [item.id for item in await store.work.claim(9, named(only=["late"]))] == ["late"]
        assert [item.id for item in await store.work.claim(9, named())] == ["a"]


def _done_with(item: WorkItem, *children: WorkItem, rules: SubmissionRules | None = None) -> Settlement:
    """The report that an item is done, with these follow-ups. A refused one puts it off, with an event of its own."""

    def refused(found: RefusedFollowUp) -> tuple[Settled, tuple[AuditEntry, ...]]:
        why = "taken" if found.verdict is None else found.verdict.reason.value
        return Snooze(item.due_at + 5000, f"{found.item.id}: {why}"), (event(f"refused {found.item.id}"),)

    follow = FollowUps(children, rules or SubmissionRules(), lambda one: [event(f"submitted {one.id}")], refused)
    return Settlement(item.id, item.owner, item.fence, WorkDone("{}"), (event("done"),), follow_ups=follow)


def _child(number: int, parent: str = "p", **fields: Any) -> WorkItem:
    return WorkItem(f"{parent}:{number}", "t", ROUTER, pool="io", extra=Extra(parent=parent, depth=1), **fields)


class FollowUpContract:
    """Part of the contract of a work queue."""

    @story()
    async def test_follow_ups_are_stored_with_the_report_of_their_parent(self, store: Store) -> None:
        await store.work.enqueue([WorkItem("p", "t")])
        (item,) = await _take(store, 1)
        assert await store.work.settle([_done_with(item, _child(1, payload=b"{}"), _child(2))]) == [True]
        parent = await store.work.get("p")
        assert parent is not None
        assert (parent.state, parent.extra.children) == (WorkState.SUCCEEDED, 2)
        assert sorted(await event_types(store)) == ["done", "submitted p:1", "submitted p:2"]
        first = await store.work.get("p:1")
        assert first is not None
        assert (first.state, first.extra, first.payload) == (WorkState.PENDING, Extra(parent="p", depth=1), b"{}")
        assert {one.id for one in await _take(store, 9)} == {"p:1", "p:2"}

    @story()
    async def test_a_report_that_is_too_late_stores_no_follow_up(self, store: Store) -> None:
        await store.work.enqueue([WorkItem("p", "t")])
        (item,) = await _take(store, 1)
        late = structs.replace(item, fence=item.fence - 1)
        assert await store.work.settle([_done_with(late, _child(1))]) == [False]
        assert await store.work.get("p:1") is None
        assert await event_types(store) == []

    @story()
    async def test_if_one_follow_up_is_refused_none_is_stored_and_the_report_is_changed(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("p", "t")])
        (item,) = await _take(store, 1)
        report = _done_with(item, _child(1), _child(2), rules=SubmissionRules(size=1))
        assert await store.work.settle([report]) == [True]
        assert not report.is_kept_as_reported
        parent = await store.work.get("p")
        assert parent is not None
        assert (parent.state, parent.attempts, parent.extra.children) == (WorkState.PENDING, 0, 0)
        assert (parent.result, parent.reason) == (None, "p:2: queue_full")
        assert await store.work.named(["p:1", "p:2"]) == []
        assert await event_types(store) == ["refused p:2"]
        clock.advance(6)
        (again,) = await _take(store, 1)
        report = _done_with(again, _child(1), _child(2))
        assert await store.work.settle([report]) == [True]
        assert report.is_kept_as_reported
        assert {one.id for one in await store.work.named(["p:1", "p:2", "p:3"])} == {"p:1", "p:2"}

    @story()
    async def test_a_follow_up_that_is_there_is_passed_by_and_other_work_of_its_id_is_not(self, store: Store) -> None:
        await store.work.enqueue([WorkItem("p", "t"), WorkItem("q", "t")])
        one, two = await _take(store, 2)
        await store.work.enqueue([_child(1), WorkItem("q:1", "t", ROUTER, pool="io")])
        reports = [_done_with(one, _child(1), _child(2)), _done_with(two, _child(1, "q"))]
        assert await store.work.settle(reports) == [True, True]
        found = {item.id: item for item in await store.work.named(["p", "p:1", "p:2", "q", "q:1"])}
        assert (found["p"].state, found["p"].extra.children) == (WorkState.SUCCEEDED, 2)
        assert (found["q"].state, found["q"].reason) == (WorkState.PENDING, "q:1: taken")
        assert sorted(await event_types(store)) == ["done", "refused q:1", "submitted p:2"]

    @story()
    async def test_work_that_waits_for_other_work_is_scheduled_and_takes_no_place(
        self, store: Store, clock: VirtualClock
    ) -> None:
        waits = WorkItem("w", "t", ROUTER, pool="io", extra=Extra(after=("a", "b")))
        one = SubmissionRules(size=1)
        accepted = Enqueued.ACCEPTED
        assert await store.work.enqueue([waits], Enqueue(rules=one)) == [accepted]
        assert await store.work.enqueue([WorkItem("a", "t", ROUTER, pool="io")], Enqueue(rules=one)) == [accepted]
        (item,) = await store.work.claim(1, WorkClaim(owner="w", only=["w"], classes=(ROUTER,)))
        later = Waits(wall_ms(clock) + 2000, 1)
        assert await store.work.settle([Settlement("w", item.owner, item.fence, later)]) == [True]
        assert [taken.id for taken in await _take(store, 9)] == ["a"]
        clock.advance(2.1)
        (item,) = await _take(store, 9)
        assert (item.id, item.extra, item.snoozes, item.attempts) == ("w", Extra(after=("a", "b"), over=1), 0, 0)
