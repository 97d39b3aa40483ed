"""The counters that admission reads: after every change they equal a fresh count, in both engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

from reefknot.queue.model import work as core
from reefknot.queue.model.admission import Reject
from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.model.work import (
    ROUTER,
    Interrupted,
    Quarantine,
    Settled,
    Snooze,
    TryAgain,
    WorkCancelled,
    WorkDone,
    WorkFailed,
    WorkItem,
    WorkRejected,
    WorkState,
)
from reefknot.queue.port.work_queue import ALL, Enqueue, Enqueued, Held, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.transaction import COLUMNS, COUNTED, WorkCounts, wrong_counts
from reefknot.stores.table.items import group_of

KEPT = "SELECT pool, stage, priority, tenant, number FROM open_work ORDER BY 1, 2, 3, 4"
FRESH = f"{COUNTED['open_work']} ORDER BY 1, 2, 3, 4"
CLASSES = ["io@w1", "io@w2", "cpu@w1"]
RULES = SubmissionRules(size=12)
LEASE_S = 10.0
STEPS = 150
Counts = list[tuple[str, str, int, str, int]]


class Twins:
    """The same story in a memory store and in a file: the same answers, and the same counts after every step."""

    def __init__(self, path: Path, memory: MemoryStore, sqlite: Store, clock: VirtualClock, seed: int) -> None:
        self.memory, self.sqlite, self.clock = memory, sqlite, clock
        self.file = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        self.rng = Random(seed)
        self.number = 0
        self.happened: Counter[str] = Counter()

    async def both(self, call: Callable[[Store], Awaitable[Any]]) -> Any:
        first, second = await call(self.memory), await call(self.sqlite)
        assert first == second
        return first

    def items(self, *states: WorkState) -> list[WorkItem]:
        every = self.memory.work.table.items.values()
        return sorted((one for one in every if one.state in states), key=lambda one: one.id)

    def some(self, *states: WorkState) -> list[WorkItem]:
        found = self.items(*states)
        return self.rng.sample(found, min(len(found), self.rng.randint(1, 3)))

    def now(self) -> int:
        return int(self.clock.wall() * 1000)

    def new(self, resource_class: str, **fields: Any) -> WorkItem:
        self.number += 1
        return WorkItem(
            f"a{self.number:03}",
            "t",
            resource_class,
            priority=self.rng.randint(-1, 1),
            tenant_id=self.rng.choice([None, "", "x", "y"]),
            due_at=self.now() + self.rng.choice([0, 0, 0, 3000]),
            **fields,
        )

    # ---- the steps --------------------------------------------------------------------------------------------------

    async def enqueue(self) -> None:
        number, owner = self.rng.randint(1, 6), self.rng.choice(["", "", "router-1"])
        items = [self.new(ROUTER, pool=self.rng.choice(["io", "cpu"])) for _ in range(number)]
        again = self.items(*WorkState)[:1]
        answers = await self.both(
            lambda store: store.work.enqueue([*items, *again], Enqueue(rules=RULES, owner=owner, lease=LEASE_S))
        )
        self.happened["refused"] += any(isinstance(one, Reject) for one in answers)
        assert answers[len(items) :] == [Enqueued.DUPLICATE] * len(again)

    async def enqueue_plain(self) -> None:
        items = [self.new(self.rng.choice(["io", *CLASSES]))]
        await self.both(lambda store: store.work.enqueue(items))

    async def assign(self) -> None:
        open_ones = [one for one in self.items(WorkState.PENDING, WorkState.RUNNING) if core.is_unassigned(one)]
        chosen = self.rng.sample(open_ones, min(len(open_ones), 3))
        items = [WorkItem(one.id, "t", f"{one.pool}@w1", due_at=self.now()) for one in chosen]
        items.append(self.new("cpu@w1"))
        start = {one.id for one in items if self.rng.random() < 0.5}
        await self.both(lambda store: store.work.assign(items, start=start, owner="w1", lease=LEASE_S))

    async def claim(self) -> None:
        classes = self.rng.choice([(ROUTER,), ("io@w1", "cpu@w1"), ("io",), ()])
        n, newest = self.rng.randint(0, 4), self.rng.random() < 0.3
        await self.both(
            lambda store: store.work.claim(
                n, WorkClaim(owner="w1", classes=classes, lease=LEASE_S, newest_first=newest)
            )
        )

    async def settle(self) -> None:
        def how() -> Settled:
            due = self.now() + self.rng.choice([0, 2000])
            ways: list[Settled] = [
                *(WorkDone("1"), WorkFailed("f", None, "r"), WorkRejected("{}", "r"), WorkCancelled("{}", "r")),
                *(TryAgain(due, "f", "transient", 5), Snooze(due, "later"), Interrupted(), Quarantine("r", "f")),
            ]
            return self.rng.choice(ways)

        done = [
            Settlement(one.id, one.owner, one.fence, how(), took_ms=self.rng.choice([None, 5.0, 900.0]))
            for one in self.some(WorkState.RUNNING)
        ]
        self.happened.update(type(one.settled).__name__ for one in done)
        await self.both(lambda store: store.work.settle(done))
        await self.both(lambda store: store.work.settle(done))  # nobody holds these any more

    async def cancel(self) -> None:
        for one in self.some(*WorkState):
            work_id = one.id
            await self.both(lambda store, work_id=work_id: store.work.cancel(work_id))  # type: ignore[misc]

    async def transfer(self) -> None:
        for one in self.some(WorkState.PENDING):
            work_id, to = one.id, self.rng.choice(CLASSES)
            await self.both(lambda store, work_id=work_id, to=to: store.work.transfer(work_id, to))  # type: ignore[misc]

    async def recall(self) -> None:
        chosen = self.rng.sample(CLASSES, 2)
        await self.both(lambda store: store.work.recall(chosen))

    async def renew(self) -> None:
        held = [Held(one.id, one.owner, one.fence) for one in self.some(WorkState.RUNNING)]
        await self.both(lambda store: store.work.renew(held, lease=LEASE_S))

    async def end_leases(self) -> None:
        await self.both(lambda store: store.leases.end({"router-1"}))

    async def lease_runs_out(self) -> None:
        self.clock.advance(LEASE_S + 1)
        await self.both(lambda store: store.work.claim(0, WorkClaim(owner="w2")))

    async def requeue(self) -> None:
        self.happened["out of quarantine"] += bool(await self.both(lambda store: store.quarantine.requeue(ALL, who="")))

    async def discard(self) -> None:
        await self.both(lambda store: store.quarantine.discard(ALL, who=""))

    async def purge_quarantine(self) -> None:
        await self.both(lambda store: store.quarantine.purge(ALL))

    async def purge(self) -> None:
        before = self.now() - self.rng.choice([0, 20_000])
        self.happened["purged"] += await self.both(lambda store: store.work.purge(before)) > 0

    async def time_passes(self) -> None:
        self.clock.advance(self.rng.choice([0.5, 2.0, 5.0]))

    # ---- the counts -------------------------------------------------------------------------------------------------

    def check(self, step: str) -> None:
        fresh = list(self.file.execute(FRESH))
        assert list(self.file.execute(KEPT)) == fresh, f"SQLite counts differently after {step}"
        assert wrong_counts(self.file) == [], f"they differ after {step}"
        queue = self.memory.work.table
        counted = Counter(one for item in queue.items.values() if (one := group_of(item)) is not None)
        assert dict(queue._open) == dict(counted), f"memory counts differently after {step}"
        assert sorted((*key, number) for key, number in counted.items()) == fresh, f"they differ after {step}"


ALWAYS = ("enqueue", "assign", "claim", "settle")
NOW_AND_THEN = (
    *("enqueue_plain", "cancel", "transfer", "recall", "renew", "end_leases", "lease_runs_out"),
    *("requeue", "discard", "purge_quarantine", "purge", "time_passes"),
)


async def story(path: Path, seed: int) -> Counter[str]:
    clock = VirtualClock()
    sqlite = await SqliteStore(path, clock, inline=True).start()
    twins = Twins(path, MemoryStore(clock), sqlite, clock, seed)
    await twins.both(lambda store: store.control.report("s", "{}", keep=1e6, capacity=Capacity({"io": 2}, RULES)))
    for _ in range(STEPS):
        step = twins.rng.choice([*ALWAYS, *ALWAYS, *NOW_AND_THEN])
        twins.happened[step] += 1
        await getattr(twins, step)()
        twins.check(step)
    dropped = [one for one in twins.items(WorkState.CANCELLED) if one.reason == "dropped_oldest"]
    twins.happened["displaced"] += len(dropped)
    twins.file.close()
    await sqlite.close()
    return twins.happened


def test_the_counters_of_both_engines_equal_a_fresh_count_after_every_kind_of_change(tmp_path: Path) -> None:
    happened: Counter[str] = Counter()
    for seed in range(12):
        happened += asyncio.run(story(tmp_path / f"{seed}.db", seed))
    settled = (
        *("WorkDone", "WorkFailed", "WorkRejected", "WorkCancelled"),
        *("TryAgain", "Snooze", "Interrupted", "Quarantine"),
    )
    wanted = {*ALWAYS, *NOW_AND_THEN, *settled, "refused", "displaced", "out of quarantine", "purged"}
    assert wanted - set(happened) == set(), "a story in which nothing happens holds every count"


@pytest.mark.parametrize("left_out", [1, -1])
def test_a_store_that_miscounts_is_caught(tmp_path: Path, left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    add = WorkCounts.add

    def add_some(counts: WorkCounts, items: Iterable[WorkItem], number: int = 1) -> None:
        if number != left_out:
            add(counts, items, number)

    monkeypatch.setattr(WorkCounts, "add", add_some)
    with pytest.raises(AssertionError, match="differ"):
        asyncio.run(story(tmp_path / "0.db", 0))


@pytest.mark.real_time
async def test_jobs_that_are_changed_by_hand_are_counted_again_by_compact(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = await SqliteStore(path, VirtualClock(), inline=True).start()
    await store.work.enqueue([WorkItem(f"a{number}", "t", "io") for number in range(3)])
    with apsw.Connection(str(path)) as connection:
        connection.execute("DELETE FROM work WHERE id = 'a1'")
        connection.execute("UPDATE work SET state = 'quarantined', ready = 0 WHERE id = 'a2'")
    assert wrong_counts(connection) == list(COLUMNS)
    report = await store.check()
    assert [problem.split("`")[0] for problem in report.problems] == [
        f"the numbers in {table} are not those of the jobs; " for table in COLUMNS
    ]
    await store.compact()
    assert (await store.check()).ok
    with apsw.Connection(str(path)) as connection:
        assert list(connection.execute(KEPT)) == list(connection.execute(FRESH)) == [("io", "queued", 0, "", 1)]
    await store.close()
