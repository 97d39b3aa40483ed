"""The work table: what a call leaves behind is collected for the engine, and a roll-back undoes all of it."""

from collections import Counter
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.queue.model import admission, submission
from reefknot.queue.model.submission import in_turns
from reefknot.queue.model.work import ROUTER, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import EVERYTHING, Enqueue, Enqueued, Held, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.wakeups import CLASS_TOPIC, END_TOPIC, LEASES_TOPIC
from reefknot.stores.work_in_memory.items import Place, group_of
from reefknot.stores.work_in_memory.table import WorkTable
from reefknot.testing.conformance.harness import event, event_types
from tests.unit.stores.random_calls import ASIDE, CLASSES, Call, RandomCalls, told

NOW = Moment(5_000, 1_000_000)
MOST_ENDED = 5
SEEDS = range(150)


def offered(pool: str, wall: int) -> tuple[int, submission.SubmissionRules | None]:
    return 2, None


class Caller:
    """Calls of a table by chance: the same seed makes the same calls of tables that give the same answers."""

    def __init__(self, table: WorkTable, seed: int, *, prefix: str, now: Moment = NOW) -> None:
        self.table, self.now = table, now
        self.calls = RandomCalls(seed, lambda: self.table.items.values(), lambda: self.now.wall, prefix)
        self.may_extend = prefix != "undone"
        """Left out within what is rolled back: an extended lease stays extended."""

    def call(self, times: int) -> list[Any]:
        """The answers of so many steps, each with how the table looks afterwards."""
        return [(self.step(), self.look()) for _ in range(times)]

    def step(self) -> list[Any]:
        name, calls = self.calls.step()
        passed = int(self.calls.passed * 1000)
        self.now = Moment(self.now.steady + passed, self.now.wall + passed)
        return [self.made(one) for one in calls if name != "extend" or self.may_extend]

    def made(self, call: Call) -> Any:
        now = {} if (call.part, call.name) == ("work", "purge") else {"now": self.now}
        return getattr(self.table, "end_leases" if call.name == "end" else call.name)(*call.given, **call.named, **now)

    def look(self) -> list[Any]:
        """Everything that the table can be asked without changing it."""
        table, now = self.table, self.now
        return [
            {work_id: table.get(work_id) for work_id in sorted(table.items)},
            *(table.search(EVERYTHING, now=now, oldest_first=oldest, limit=1000) for oldest in (True, False)),
            table.search(WorkFilter(state=WorkState.PENDING, gone=("w1",)), now=now),
            table.snapshot(now=now),
            table.newest_at,
            table.owners(now=now),
            table.open_classes(),
            dict(table.service_times),
            dict(table._open),
            [table.soonest(classes, now) for classes in ((), (ROUTER,), CLASSES)],
            table.by_id(ASIDE),
            table.count(ASIDE),
            table.quarantine_stats(),
        ]


def difference_after_a_roll_back(kind: type[WorkTable], seed: int) -> bool:
    """Whether a table that was changed and rolled back can be told from one that was never changed."""
    table = kind(offered, most_ended=MOST_ENDED)
    first = Caller(table, seed, prefix="kept")
    first.call(25)
    table.take_events()
    table.take_topics()
    table.take_changes()
    never_changed = deepcopy(table)

    undone = Caller(table, seed + 1, prefix="undone", now=first.now)
    undone.call(10)
    table.roll_back()
    if table.take_events() or table.take_topics() or table.take_changes().before:
        return True

    again = [Caller(one, seed + 2, prefix="after", now=undone.now) for one in (table, never_changed)]
    seen = [[caller.look(), *caller.call(25)] for caller in again]
    return seen[0] != seen[1] or table.events != never_changed.events or table.touched != never_changed.touched


def test_a_table_that_is_rolled_back_answers_every_call_as_if_nothing_had_happened() -> None:
    assert [seed for seed in SEEDS if difference_after_a_roll_back(WorkTable, seed)] == []


class ForgetsTurns(WorkTable):
    def roll_back(self) -> None:
        last = self._last_tenant
        super().roll_back()
        self._last_tenant = last


class ForgetsPlaces(WorkTable):
    def roll_back(self) -> None:
        later = self._later.copy()
        super().roll_back()
        self._later = later


class ForgetsServiceTimes(WorkTable):
    def roll_back(self) -> None:
        times = self.service_times.copy()
        super().roll_back()
        self.service_times = times


class ForgetsTheOrderOfEnds(WorkTable):
    def _put_back(self, item: WorkItem) -> None:
        super()._put_back(item)
        if item.id in self._ended:
            self._ended[item.id] = self._ends


class ForgetsExtendedLeases(WorkTable):
    def _put_back(self, item: WorkItem) -> None:
        super()._put_back(item)
        self._extended.pop(item.id, None)


@pytest.mark.parametrize(
    "broken", [ForgetsTurns, ForgetsPlaces, ForgetsServiceTimes, ForgetsTheOrderOfEnds, ForgetsExtendedLeases]
)
def test_a_roll_back_that_forgets_something_is_noticed(broken: type[WorkTable]) -> None:
    """The controls."""
    assert any(difference_after_a_roll_back(broken, seed) for seed in SEEDS)


def test_the_changes_name_every_item_as_it_was_before() -> None:
    for seed in SEEDS[:50]:
        table = WorkTable(offered, most_ended=MOST_ENDED)
        caller = Caller(table, seed, prefix="a")
        caller.call(20)
        table.take_changes()
        before = dict(table.items)
        caller.call(8)
        changed = {one for one in before.keys() | table.items.keys() if before.get(one) != table.items.get(one)}
        changes = table.take_changes()
        assert changed <= changes.before.keys()
        assert all(item == before.get(work_id) for work_id, item in changes.before.items())
        assert table.take_changes().before == {}
        assert Counter(one for item in table.items.values() if (one := group_of(item))) == table._open


def test_pools_are_noted_when_their_admission_or_their_service_time_changes() -> None:
    table = WorkTable(offered)
    table.enqueue([WorkItem("plain", "t", ROUTER, pool="cpu")], now=NOW)
    assert table.take_changes().pools_entered == set()
    small = submission.SubmissionRules(size=1, preempt=False)
    answers = table.enqueue([WorkItem(one, "t", ROUTER, pool="io") for one in "ab"], Enqueue(rules=small), now=NOW)
    assert isinstance(answers[1], admission.Reject)
    table.enqueue([WorkItem("refused", "t", ROUTER, pool="cpu")], Enqueue(rules=small), now=NOW)
    (item,) = table.claim(1, WorkClaim(owner="me", only={"a"}), now=NOW)
    table.settle([Settlement(item.id, "me", item.fence, WorkDone(), took_ms=7.0)], now=NOW)
    assert table.pools_served == {"io"}
    changes = table.take_changes()
    assert (changes.pools_entered, changes.pools_served) == ({"io"}, {"io"})
    assert table.service_times == {"io": submission.ServiceTime().after(7.0)}
    assert table.pools_served == set()


def test_events_and_topics_are_collected_in_order_until_they_are_taken() -> None:
    table = WorkTable(offered)
    table.enqueue([WorkItem("a", "t")], Enqueue(accept_events=told), now=NOW, events=[event("admitted")])
    (item,) = table.claim(1, WorkClaim(owner="me"), now=NOW)
    done = Settlement("a", "me", item.fence, WorkDone(), (event("done"),))
    table.settle([done, done], now=NOW)
    assert [one.event_type for one in table.take_events()] == ["told", "admitted", "done"]
    assert table.take_topics() == {CLASS_TOPIC + "cpu", END_TOPIC + "a"}
    table.enqueue([WorkItem("b", "t")], Enqueue(owner="me"), now=NOW)
    table.end_leases({"me"}, now=NOW)
    assert table.take_topics() == {LEASES_TOPIC}
    assert table.take_events() == []


def test_items_come_in_the_order_of_arrival_or_in_the_order_that_is_given() -> None:
    table = WorkTable(offered)
    for work_id, order in (("late", 20), ("early", 10), ("latest", None)):
        table.put(WorkItem(work_id, "t"), NOW, order=order)
    listed = table.search(EVERYTHING, now=NOW, oldest_first=True).items
    assert [item.id for item in listed] == ["early", "late", "latest"]
    table.put(table.items["latest"], NOW, order=5)
    assert [item.id for item in table.claim(9, WorkClaim(owner="me"), now=NOW)] == ["latest", "early", "late"]


def test_an_item_that_is_removed_is_neither_counted_nor_claimed() -> None:
    table = WorkTable(offered)
    table.enqueue([WorkItem(one, "t") for one in "ab"], now=NOW)
    (running,) = table.claim(1, WorkClaim(owner="me"), now=NOW)
    table.remove(running.id)
    table.remove("b")
    assert table.owners(now=NOW) == table.open_classes() == []
    assert not table._open
    later = Moment(NOW.steady + 100_000, NOW.wall + 100_000)
    assert table.claim(9, WorkClaim(owner="me"), now=later) == []
    table.put(structs.replace(WorkItem("b", "t"), priority=5), NOW)
    assert [item.id for item in table.claim(9, WorkClaim(owner="me"), now=later)] == ["b"], "once: it had a place"


async def test_a_call_of_the_memory_engine_that_fails_half_way_leaves_nothing_behind() -> None:
    def fails_for(work_id: str, item: WorkItem) -> list[AuditEntry]:
        if item.id == work_id:
            raise LookupError(work_id)
        return told(item)

    store = MemoryStore(VirtualClock())
    items = [WorkItem(one, "t") for one in "abc"]
    with pytest.raises(LookupError):
        await store.work.enqueue(items, Enqueue(accept_events=partial(fails_for, "b")))
    assert (await store.work.search()).items == []
    assert await event_types(store) == []
    assert await store.work.enqueue(items, Enqueue(accept_events=told)) == [Enqueued.ACCEPTED] * 3
    assert await event_types(store) == ["told"] * 3


class Counting(WorkTable):
    """A table that counts the places and leases that it looks at."""

    looks = 0

    def _is_ready(self, name: str, place: Place) -> bool:
        self.looks += 1
        return super()._is_ready(name, place)

    def _lease_end(self, item: WorkItem) -> int:
        self.looks += 1
        return super()._lease_end(item)


@pytest.mark.parametrize("newest_first", [False, True], ids=["oldest first", "newest first"])
@pytest.mark.parametrize("tenants", [1, 3])
def test_a_claim_costs_no_more_when_more_is_waiting(tenants: int, newest_first: bool) -> None:
    """Ten claims of ten, each with its renewal, its look for the next one and its end, beside 20,000 that wait."""
    looks = {}
    for waiting in (200, 20_000):
        table, now = Counting(lambda pool, wall: (0, None)), Moment(1_000_000, 1_000_000)
        table.enqueue(
            [WorkItem(f"w{n}", "t", "cpu", tenant_id=f"t{n % tenants}", priority=n % 2) for n in range(waiting)],
            now=now,
        )
        table.looks = 0
        for _ in range(10):
            held = [
                Held.of(one)
                for one in table.claim(10, WorkClaim("me", classes=("cpu",), newest_first=newest_first), now=now)
            ]
            assert len(held) == 10
            table.renew(held, now=now)
            assert table.soonest(("cpu",), now) == 0.0
            table.settle([Settlement(one.id, one.owner, one.fence, WorkDone('"done"')) for one in held[:5]], now=now)
        looks[waiting] = table.looks

    assert looks[20_000] <= looks[200] < 600


def test_claims_of_either_order_take_what_a_sort_of_all_places_would_give() -> None:
    """By priority, tenants in turns, then by age from either end; classes are one queue."""
    rng = Random(7)
    for newest_first in (False, True):
        table, now = WorkTable(lambda pool, wall: (0, None)), Moment(1_000_000, 1_000_000)
        items = [
            WorkItem(
                f"w{n}",
                "t",
                rng.choice("ab"),
                tenant_id=rng.choice("xyz"),
                priority=rng.randrange(3),
                due_at=999_000 + rng.randrange(99),
            )
            for n in range(300)
        ]
        table.enqueue(items, now=now)
        left, last = {item.id: (table.items[item.id], order) for order, item in enumerate(items)}, ""
        while left:
            sign = -1 if newest_first else 1
            queues: dict[str, list[tuple[int, int, int]]] = {}
            for item, order in left.values():
                queues.setdefault(item.tenant_id or "", []).append((item.priority, item.due_at, order))
            for queue in queues.values():
                queue.sort(key=lambda one: (-one[0], sign * one[1], sign * one[2]))
            wanted = in_turns(queues, 7, last)
            taken = table.claim(7, WorkClaim("me", classes=("a", "b"), newest_first=newest_first), now=now)
            assert [one.id for one in taken] == [items[order].id for _, (_, _, order) in wanted]
            last = wanted[-1][0]
            for one in taken:
                del left[one.id]
