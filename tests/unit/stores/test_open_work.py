"""The counters that admission reads: after every change they equal a fresh count, in both engines."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.queue.model import admission, submission
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.transaction import COLUMNS, COUNTED, WorkCounts, wrong_counts
from reefknot.stores.work_in_memory.items import group_of
from tests.unit.stores.random_calls import RULES, STEPS, Call, RandomCalls

KEPT = "SELECT pool, stage, priority, tenant, number FROM open_work ORDER BY 1, 2, 3, 4"
FRESH = f"{COUNTED['open_work']} ORDER BY 1, 2, 3, 4"


class Twins:
    """The same story in a memory store and in a file: the same answers, and the same counts after every step."""

    def __init__(self, path: Path, memory: MemoryStore, sqlite: Store) -> None:
        self.memory, self.sqlite = memory, sqlite
        self.file = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        self.happened: Counter[str] = Counter()

    async def make(self, call: Call) -> None:
        first, second = [await made(store, call) for store in (self.memory, self.sqlite)]
        assert first == second, call
        if call.name == "settle":
            self.happened.update(type(one.settled).__name__ for one in call.given[0])
        if call.name == "enqueue":
            self.happened["refused"] += any(isinstance(one, admission.Reject) for one in first)
        if call.name == "change":
            self.happened[type(call.given[1]).__name__] += bool(first)
        if call.name == "purge":
            self.happened["work purge"] += bool(first)

    def check(self, step: str) -> None:
        fresh = list(self.file.execute(FRESH))
        assert list(self.file.execute(KEPT)) == fresh, f"SQLite counts differently after {step}"
        assert wrong_counts(self.file) == [], f"they differ after {step}"
        queue = self.memory.work.table
        counted = Counter(one for item in queue.items.values() if (one := group_of(item)) is not None)
        assert dict(queue._open) == dict(counted), f"memory counts differently after {step}"
        assert sorted((*key, number) for key, number in counted.items()) == fresh, f"they differ after {step}"


async def made(store: Store, call: Call) -> Any:
    return await getattr(getattr(store, call.part), call.name)(*call.given, **call.named)


async def story(path: Path, seed: int) -> Counter[str]:
    clock = VirtualClock()
    memory, sqlite = MemoryStore(clock), await SqliteStore(path, clock, inline=True).start()
    twins, items = Twins(path, memory, sqlite), memory.work.table.items
    calls = RandomCalls(seed, items.values, lambda: int(clock.wall() * 1000))
    for store in (memory, sqlite):
        await store.control.report("s", "{}", keep=1e6, capacity=submission.Capacity({"io": 2}, RULES))
    for _ in range(150):
        step, given = calls.step()
        twins.happened[step] += 1
        clock.advance(calls.passed)
        for call in given:
            if call.name != "extend":  # memory notes such a lease beside the item, and a file in it
                await twins.make(call)
        twins.check(step)
    twins.happened["displaced"] += sum(one.reason == "dropped_oldest" for one in items.values())
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
    wanted = {*STEPS, *settled, "refused", "displaced", "Requeue", "Discard", "Remove", "work purge"}
    assert wanted - set(happened) == set(), "a story in which nothing happens holds every count"


@pytest.mark.parametrize("left_out", [1, -1])
def test_a_store_that_miscounts_is_caught(tmp_path: Path, left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    add = WorkCounts.add

    def add_some(counts: WorkCounts, items: Iterable[WorkItem], number: int = 1) -> set[tuple[str, WorkState]]:
        return add(WorkCounts() if number == left_out else counts, items, number)

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
