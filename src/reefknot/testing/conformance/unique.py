"""Conformance stories of unique work: one job for each key of a tenant, decided where work is kept."""

import asyncio

from reefknot.audit.port import AuditEntry
from reefknot.queue.model.admission import Reject
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.transitions import Remove, Requeue
from reefknot.queue.model.work import ROUTER, Extra, Quarantine, Settled, WorkDone, WorkItem
from reefknot.queue.port.work_queue import Enqueue, Enqueued, Outcome, Settlement, Taken, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import event, event_types, story

ACCEPTED = Enqueued.ACCEPTED


def keyed(work_id: str, key: str = "key", *, for_s: int = 0, tenant: str | None = None, priority: int = 0) -> WorkItem:
    """A submission with a key."""
    extra = Extra(unique=key, unique_ms=for_s * 1000)
    name = f"{tenant}|{work_id}" if tenant else work_id
    return WorkItem(name, "t", ROUTER, pool="io", tenant_id=tenant, priority=priority, extra=extra)


async def submitted(store: Store, *items: WorkItem, size: int = 100) -> list[Outcome]:
    return await store.work.enqueue(items, Enqueue(rules=SubmissionRules(size=size)))


async def ended(store: Store, settled: Settled) -> None:
    """Claim one item, and end it like this."""
    (item,) = await store.work.claim(1, WorkClaim(owner="w"))
    assert await store.work.settle([Settlement(item.id, item.owner, item.fence, settled)]) == [True]


class UniqueContract:
    """Part of the contract of a work queue."""

    @story()
    async def test_open_work_holds_its_key(self, store: Store) -> None:
        assert await submitted(store, keyed("a")) == [ACCEPTED]
        assert await submitted(store, keyed("b"), keyed("c", "other")) == [Taken("a"), ACCEPTED]
        assert await store.work.get("b") is None
        assert await submitted(store, keyed("a")) == [Enqueued.DUPLICATE]
        await store.work.claim(2, WorkClaim(owner="w"))
        assert await submitted(store, keyed("b")) == [Taken("a")]

    @story()
    async def test_work_that_has_ended_frees_its_key(self, store: Store) -> None:
        for number, settled in enumerate((WorkDone("1"), None)):
            assert await submitted(store, keyed(f"a{number}")) == [ACCEPTED]
            if settled is None:
                await store.work.cancel(f"a{number}")
            else:
                await ended(store, settled)
        assert await submitted(store, keyed("b"), keyed("c")) == [ACCEPTED, Taken("b")]

    @story()
    async def test_recent_work_holds_its_key_for_its_time_however_it_ended(
        self, store: Store, clock: VirtualClock
    ) -> None:
        assert await submitted(store, keyed("a", for_s=60), keyed("b", "other", for_s=60)) == [ACCEPTED, ACCEPTED]
        await ended(store, WorkDone("1"))
        await store.work.cancel("b")
        clock.sleep(59)
        assert await submitted(store, keyed("c"), keyed("d", "other")) == [Taken("a"), Taken("b")]
        clock.sleep(1)
        assert await submitted(store, keyed("c"), keyed("d", "other")) == [ACCEPTED, ACCEPTED]

    @story()
    async def test_quarantined_work_holds_its_key_until_it_is_requeued_and_ends(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await submitted(store, keyed("a", for_s=1))
        await ended(store, Quarantine("poison", None, None))
        clock.sleep(3600)
        assert await submitted(store, keyed("b")) == [Taken("a")]
        assert await store.work.change(WorkFilter(ids=("a",)), Requeue("me")) == ["a"]
        assert await submitted(store, keyed("b")) == [Taken("a")]
        await ended(store, WorkDone("1"))
        assert await submitted(store, keyed("b")) == [ACCEPTED]

    @story()
    async def test_work_that_runs_again_takes_its_key_back(self, store: Store) -> None:
        await submitted(store, keyed("a"))
        await store.work.cancel("a")
        assert await store.work.change(WorkFilter(ids=("a",)), Requeue("me")) == ["a"]
        assert await submitted(store, keyed("b")) == [Taken("a")]

    @story()
    async def test_every_tenant_has_its_own_keys(self, store: Store) -> None:
        items = [keyed("a", tenant="one"), keyed("a", tenant="two"), keyed("a"), keyed("b", tenant="one")]
        assert await submitted(store, *items) == [ACCEPTED, ACCEPTED, ACCEPTED, Taken("one|a")]
        assert await submitted(store, keyed("c", tenant="two"), keyed("c")) == [Taken("two|a"), Taken("a")]

    @story()
    async def test_a_refused_item_holds_no_key_and_a_taken_one_has_no_event(self, store: Store) -> None:
        def accept_events(item: WorkItem) -> list[AuditEntry]:
            return [event(f"submitted {item.id}")]

        terms = Enqueue(rules=SubmissionRules(size=1), accept_events=accept_events)
        first, taken, refused, again = await store.work.enqueue(
            [keyed("a"), keyed("b"), keyed("c", "other"), keyed("d", "other")], terms
        )
        assert (first, taken) == (ACCEPTED, Taken("a"))
        assert isinstance(refused, Reject)
        assert isinstance(again, Reject)
        assert await store.work.enqueue([keyed("e")], terms) == [Taken("a")]
        await store.work.cancel("a")
        assert await store.work.enqueue([keyed("d", "other")], terms) == [ACCEPTED]
        assert await event_types(store) == ["submitted a", "submitted d"]

    @story()
    async def test_displaced_work_frees_its_key(self, store: Store) -> None:
        first, higher = keyed("a", priority=-1), keyed("b", "other", priority=5)
        assert await submitted(store, first, higher, keyed("c", priority=6), size=1) == [ACCEPTED, ACCEPTED, ACCEPTED]
        assert await submitted(store, keyed("d", priority=7)) == [Taken("c")]

    @story()
    async def test_of_many_at_once_one_is_kept(self, store: Store) -> None:
        answers = await asyncio.gather(*(submitted(store, keyed(f"a{number}")) for number in range(16)))
        assert [answer for (answer,) in answers].count(ACCEPTED) == 1
        assert len({answer.id for (answer,) in answers if isinstance(answer, Taken)}) == 1

    @story()
    async def test_work_of_another_store_brings_its_key(self, store: Store, clock: VirtualClock) -> None:
        now = store.moment().wall
        recent = WorkItem("a", "t", ROUTER, pool="io", created_at=now, extra=Extra(unique="key", unique_ms=60_000))
        assert await store.work.adopt([recent]) == 1
        assert await submitted(store, keyed("b")) == [Taken("a")]
        await store.work.cancel("a")
        clock.sleep(30)
        assert await submitted(store, keyed("b")) == [Taken("a")]

    @story()
    async def test_removed_work_frees_its_key(self, store: Store) -> None:
        await submitted(store, keyed("a", for_s=3600))
        await ended(store, Quarantine("poison", None, None))
        assert await store.work.change(WorkFilter(ids=("a",)), Remove()) == ["a"]
        assert await submitted(store, keyed("b")) == [ACCEPTED]
