"""Conformance stories of admission where work is kept: by count, priority, tenant and deadline."""

from functools import partial

from reefknot.core.overload.admission import Reject, RejectReason
from reefknot.core.overload.submission import Capacity, SubmissionRules
from reefknot.core.work import ROUTER, WorkDone, WorkItem, WorkState
from reefknot.engines.clocks import VirtualClock
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.store import Store
from reefknot.ports.work_queue import FIRST_FENCE, Enqueued, Settlement
from reefknot.testing.conformance.harness import event, event_types, story, wall_ms


async def _take(store: Store, n: int) -> list[WorkItem]:
    return await store.work.claim(n, owner="w")


class SubmissionContract:
    """Part of the contract of a work queue."""

    @story()
    async def test_a_full_class_refuses_and_the_others_do_not(self, store: Store) -> None:
        items = [WorkItem(f"a{number}", "t", ROUTER, pool="io") for number in range(3)]
        accepted, two = Enqueued.ACCEPTED, SubmissionRules(size=2)
        *first, third = await store.work.enqueue(items, rules=two)
        assert first == [accepted, accepted]
        assert isinstance(third, Reject)
        assert third.reason is RejectReason.QUEUE_FULL
        assert await store.work.get("a2") is None
        assert await store.work.enqueue([WorkItem("b", "t", ROUTER, pool="cpu")], rules=two) == [accepted]
        await store.work.cancel("a0")
        assert await store.work.enqueue(items, rules=two) == [Enqueued.DUPLICATE, Enqueued.DUPLICATE, accepted]

    @story()
    async def test_the_events_of_accepted_items_are_kept_and_those_of_the_others_are_not(self, store: Store) -> None:
        """Two tenants use one id, and the class has a single place: an event by id could not tell them apart."""

        def accept_events(item: WorkItem) -> list[AuditEntry]:
            return [event(f"submitted {item.id} {item.tenant_id}")]

        items = [WorkItem(f"{tenant}|a", "t", ROUTER, pool="io", tenant_id=tenant) for tenant in ("one", "two", "one")]
        answers = await store.work.enqueue(items, rules=SubmissionRules(size=1), accept_events=accept_events)
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
        await store.work.enqueue(items, rules=full)
        high = WorkItem("high", "t", ROUTER, pool="io", priority=9)
        assert await store.work.enqueue([high], rules=full, drop_events=drop_events) == [Enqueued.ACCEPTED]
        dropped = await store.work.get("a3")
        assert dropped is not None
        assert (dropped.state, dropped.reason) == (WorkState.CANCELLED, "dropped_oldest")
        assert await event_types(store) == ["dropped a3 cancelled"]
        (refused,) = await store.work.enqueue([WorkItem("b", "t", ROUTER, pool="io", priority=-9)], rules=full)
        assert isinstance(refused, Reject)

    @story()
    async def test_a_submission_that_is_due_later_makes_room_as_well(self, store: Store, clock: VirtualClock) -> None:
        """Recalled retries are such: they hold a place, and nobody can claim them yet."""
        due = wall_ms(clock) + 9000
        later = [WorkItem(f"a{number}", "t", ROUTER, pool="io", priority=-1, due_at=due) for number in (1, 2)]
        full = SubmissionRules(size=2)
        await store.work.enqueue(later, rules=full)
        high = WorkItem("high", "t", ROUTER, pool="io", priority=9)
        assert await store.work.enqueue([high], rules=full) == [Enqueued.ACCEPTED]
        states = {item.id: item.state for item in await store.work.find()}
        assert states == {"a1": WorkState.CANCELLED, "a2": WorkState.PENDING, "high": WorkState.PENDING}

    @story()
    async def test_work_that_would_wait_too_long_for_its_deadline_is_refused(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """Two slots and steps of a second: six waiting are three seconds, of ten that is too much of the deadline."""

        def arrival(name: str, seconds: float) -> WorkItem:
            return WorkItem(name, "t", ROUTER, pool="io", deadline_at=wall_ms(clock) + int(seconds * 1000))

        rules = SubmissionRules()
        assert await store.work.enqueue([arrival("first", 0.1)], rules=rules) == [Enqueued.ACCEPTED]
        await store.control.report("system", "{}", keep=60, capacity=Capacity({"io": 2}, rules))
        for number in range(100):
            await store.work.assign([WorkItem(f"s{number}", "t", "io@w")], start={f"s{number}"}, owner="w")
            done = Settlement(f"s{number}", "w", FIRST_FENCE, WorkDone(), took_ms=1000.0)
            assert await store.work.settle([done]) == [True]
        await store.work.enqueue([WorkItem(f"a{number}", "t", ROUTER, pool="io") for number in range(6)])
        kept, refused = await store.work.enqueue([arrival("b", 20), arrival("c", 5)], rules=rules)
        assert kept is Enqueued.ACCEPTED
        assert isinstance(refused, Reject)
        assert refused.reason is RejectReason.WOULD_MISS_DEADLINE
        (again,) = await store.work.enqueue([arrival("c", 5)], rules=rules)
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
        named = partial(store.work.claim, owner="w", classes=[ROUTER])
        assert [item.id for item in await named(2, only={"d", "b", "c", "late", "none"})] == ["b", "c"]
        assert [item.id for item in await named(9, only={"d", "b", "late"})] == ["d"]
        assert await named(9, only=()) == []
        clock.advance(6)
        assert [item.id for item in await named(9, only=["late"])] == ["late"]
        assert [item.id for item in await named(9)] == ["a"]
