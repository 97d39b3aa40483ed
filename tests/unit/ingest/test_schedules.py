"""Three processes follow one timetable, and each due time is submitted once, whatever happens to them."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from reefknot.core.time import Moment
from reefknot.errors import QueueFullError, StoreCorruptError, StoreUnavailableError
from reefknot.ingest import schedules
from reefknot.ingest.schedules import PREFIX, ScheduledEntry, Scheduler, ScheduleState, submission_id, time_of
from reefknot.queue.model.schedules import Timetable, parse
from reefknot.runtime.clocks import clock_of_this_loop
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing import run_virtual
from reefknot.testing.conformance.harness import event, event_types

DAY_S = 86_400.0


class Crash(BaseException):
    """The end of a process between two of its steps."""


class Submitted:
    """What was submitted, as a store sees it that refuses a second submission of the same id."""

    def __init__(self, *, has_ids: bool = True) -> None:
        self.kept: list[datetime] = []
        self.ids: set[str] = set()
        self.has_ids = has_ids

    async def __call__(self, due_at: datetime) -> None:
        await asyncio.sleep(0.02)
        name = submission_id("job", due_at) if self.has_ids else f"{len(self.ids)}"
        if name not in self.ids:
            self.ids.add(name)
            self.kept.append(due_at)


class ProcessView:
    """The store as one process sees it, by a clock of its own, that may end this process when it moves a due time."""

    def __init__(self, store: Store, *, skew_s: float = 0.0, dice: Random | None = None) -> None:
        self._store = store
        self.skew_ms = round(skew_s * 1000)
        self._dice = dice
        self.crashed = asyncio.Event()
        self.values: Any = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def moment(self) -> Moment:
        now = self._store.moment()
        return Moment(now.steady, now.wall + self.skew_ms)

    async def get(self, name: str) -> Any:
        return await self._store.values.get(name)

    async def put(self, name: str, body: str, *, version: int, events: Any = ()) -> Any:
        if self._dice is not None and version and self._dice.random() < 0.2:
            self.crashed.set()
            await asyncio.get_running_loop().create_future()
        return await self._store.values.put(name, body, version=version, events=events)


async def run_process(store: Store, entry: ScheduledEntry, dice: Random) -> None:
    """One process after the other: each runs until it crashes, and the next comes some minutes later."""
    while True:
        view: Any = ProcessView(store, skew_s=dice.uniform(-20, 20), dice=dice)
        scheduler = Scheduler(view, [entry])
        scheduler.start()
        try:
            await view.crashed.wait()
        finally:
            await scheduler.stop()
        await asyncio.sleep(dice.expovariate(1 / 600))


async def month_of_crashes(
    store: Store, timetable: Timetable, submit: Callable[[datetime], Awaitable[None]], seed: int, *, days: int = 30
) -> None:
    """Days of three processes, whose clocks differ and that crash between submission and move."""
    entry, dice = ScheduledEntry("job", timetable, submit), Random(seed)
    running = [asyncio.create_task(run_process(store, entry, Random(dice.random()))) for _ in range(3)]
    await asyncio.sleep(days * DAY_S)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def stop_later(scheduler: Scheduler, seconds: float) -> None:
    scheduler.start()
    await asyncio.sleep(seconds)
    await scheduler.stop()


def memory() -> MemoryStore:
    return MemoryStore(clock_of_this_loop())


# ---- once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "timetable"), [("memory", parse("1h")), ("sqlite", parse(cron="0 * * * *"))])
async def test_each_due_time_of_a_month_is_submitted_once_by_three_processes_that_crash(
    engine: str, timetable: Timetable, tmp_path: Path
) -> None:
    clock = clock_of_this_loop()
    store: Any = MemoryStore(clock)
    if engine == "sqlite":
        store = await SqliteStore(tmp_path / "state.db", clock, inline=True, synchronous="OFF").start()
    submitted = Submitted()
    await month_of_crashes(store, timetable, submitted, seed=7)
    await store.close()
    kept = submitted.kept
    assert max(Counter(kept).values()) == 1
    assert {later - earlier for earlier, later in pairwise(kept)} == {timedelta(hours=1)}
    assert len(kept) >= 30 * 24 - 1


async def test_without_ids_of_their_own_due_times_would_be_submitted_again() -> None:
    """The control: the same month with submissions that nothing recognises."""
    submitted = Submitted(has_ids=False)
    await month_of_crashes(memory(), parse("1h"), submitted, seed=7, days=5)

    assert max(Counter(submitted.kept).values()) > 1


async def test_a_move_before_the_submission_would_lose_due_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the order: whoever crashes between the two has submitted nothing, and nobody else does."""

    async def moved_first(self: Any, entry: Any, found: Any, state: ScheduleState, version: int) -> None:
        settled = replace(state, last_due=found.latest)
        if await schedules._put(self._store, entry.name, settled, version):
            await asyncio.sleep(0.02)
            if dice.random() > 0.2:
                await entry.submit(found.latest)

    dice = Random(3)
    monkeypatch.setattr(Scheduler, "_settle", moved_first)
    submitted = Submitted()
    await month_of_crashes(memory(), parse("1h"), submitted, seed=7, days=5)

    assert len(submitted.kept) < 5 * 24 - 1


async def test_a_clock_that_jumps_back_repeats_nothing_and_one_that_jumps_ahead_catches_up_once() -> None:
    store, submitted = memory(), Submitted()
    view: Any = ProcessView(store)
    scheduler = Scheduler(view, [ScheduledEntry("job", parse("1h"), submitted)])
    scheduler.start()
    for jump_h in (0, -3, 5, -2, 0):
        view.skew_ms += jump_h * 3_600_000
        await asyncio.sleep(3 * 3600 + 1)
    await scheduler.stop()
    kept = submitted.kept
    assert kept == sorted(set(kept))
    gaps = [round((later - earlier).total_seconds() / 3600) for earlier, later in pairwise(kept)]
    assert gaps.count(1) == len(gaps) - 1, gaps
    assert max(gaps) == 5, "the jump ahead"


# ---- what is missed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missed", "caught_up"), [("once", 1), ("skip", 0)])
async def test_due_times_while_nothing_ran_are_caught_up_once_or_not(missed: Any, caught_up: int) -> None:
    store, submitted = memory(), Submitted()
    scheduler = Scheduler(store, [ScheduledEntry("job", parse("1h", missed=missed), submitted)])
    await stop_later(scheduler, 2 * 3600)
    before = len(submitted.kept)
    await asyncio.sleep(10 * 3600 + 1800)
    await stop_later(scheduler, 1)
    state, _ = await schedules.read_state(store, "job")
    assert state is not None

    assert (before, len(submitted.kept) - before, state.missed) == (2, caught_up, 10 - caught_up)


async def test_the_last_runs_are_remembered_and_the_missed_ones_can_be_run() -> None:
    """Thirty hours without any system: the last twenty due times are known, and each of them is one job afterwards."""
    store, submitted = memory(), Submitted()
    entry = ScheduledEntry("job", parse("1h", missed="once"), submitted)
    await stop_later(Scheduler(store, [entry]), 2 * 3600)
    await asyncio.sleep(30 * 3600 + 1800)
    await stop_later(Scheduler(store, [entry]), 1)
    state, _ = await schedules.read_state(store, "job")
    assert state is not None
    assert [one.at is None for one in state.runs] == [True] * 19 + [False]
    assert [(later.due - earlier.due).total_seconds() for earlier, later in pairwise(state.runs)] == [3600] * 19

    before = len(submitted.kept)
    names = await schedules.run_missed(store, entry)
    assert names == [submission_id("job", one.due) for one in state.runs[:-1]]
    assert (len(submitted.kept) - before, await schedules.run_missed(store, entry)) == (19, [])
    after, _ = await schedules.read_state(store, "job")
    assert after is not None
    assert [one.due for one in after.runs if one.at is not None] == [one.due for one in state.runs]
    assert (after.submitted, after.last_due) == (state.submitted, state.last_due)


async def test_a_new_entry_waits_for_its_next_due_time_and_one_by_hand_for_ever() -> None:
    store, by_hand, daily = memory(), Submitted(), Submitted()
    entries = [ScheduledEntry("hand", parse(), by_hand), ScheduledEntry("daily", parse(cron="0 0 * * *"), daily)]
    await stop_later(Scheduler(store, entries), DAY_S)

    assert (by_hand.kept, daily.kept) == ([], [datetime(2023, 11, 15, tzinfo=UTC)])


# ---- refusals and outages --------------------------------------------------------------------------------------------


class Refusing(Submitted):
    """Refuses until it is told otherwise."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error
        self.asked = 0

    async def __call__(self, due_at: datetime) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        await super().__call__(due_at)


@pytest.mark.parametrize("missed", ["once", "skip"])
def test_a_full_queue_is_asked_again_until_the_next_due_time_takes_its_place(
    missed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> tuple[list[str], ScheduleState, int]:
        store, refusing = memory(), Refusing(QueueFullError(depth=5, limit=5, retry_after=7.0))
        scheduler = Scheduler(store, [ScheduledEntry("job", parse("1h", missed=missed), refusing)])
        scheduler.start()
        await asyncio.sleep(2.5 * 3600)
        during, _ = await schedules.read_state(store, "job")
        assert during is not None
        refusing.error = None
        await asyncio.sleep(60)
        await scheduler.stop()
        after, _ = await schedules.read_state(store, "job")
        assert after is not None
        assert (after.missed, after.last_error) == (1, "")
        return [one.strftime("%H:%M") for one in refusing.kept], during, refusing.asked

    kept, during, asked = run_virtual(main())
    assert kept == ["00:00"], "the epoch of virtual time is 22:13: 23:00 was refused for an hour"
    assert "queue is full: 5 of 5 places taken" in during.last_error
    assert 150 < asked < 400, "every half minute"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == "schedule job: due times passed over: 1"
    assert len(lines) < 120, "one a minute"


async def test_a_store_that_is_away_holds_up_one_due_time_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store, submitted = memory(), Submitted()
    scheduler = Scheduler(store, [ScheduledEntry("job", parse("1h"), submitted)])
    scheduler.start()
    await asyncio.sleep(1)

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("memory:", "it is away", "wait")

    with monkeypatch.context() as patch:
        patch.setattr(store.values, "get", away)
        await asyncio.sleep(3600)
        assert submitted.kept == []
    await asyncio.sleep(60)
    await scheduler.stop()

    assert len(submitted.kept) == 1


async def test_a_state_that_cannot_be_read_is_told_and_nothing_is_submitted(caplog: pytest.LogCaptureFixture) -> None:
    store, submitted = memory(), Submitted()
    await store.values.put(f"{PREFIX}job", '{"last_due": 5', version=0)
    await stop_later(Scheduler(store, [ScheduledEntry("job", parse("1h"), submitted)]), 3 * 3600)
    with pytest.raises(StoreCorruptError, match="the state of schedule job cannot be read"):
        await schedules.read_state(store, "job")

    assert submitted.kept == []
    assert "the state of schedule job cannot be read" in caplog.text


# ---- operators -------------------------------------------------------------------------------------------------------


async def test_a_paused_entry_submits_nothing_and_goes_on_after_what_it_passed_over() -> None:
    store, submitted = memory(), Submitted()
    schedulers = [Scheduler(store, [ScheduledEntry("job", parse("1h"), submitted)]) for _ in range(2)]
    for one in schedulers:
        one.start()
    await asyncio.sleep(2 * 3600)
    before = len(submitted.kept)
    state = await schedules.pause(store, "job", who="ann", why="stocktaking", events=[event("paused")])
    assert (state.paused, state.paused_by, state.why) == (True, "ann", "stocktaking")
    await asyncio.sleep(5 * 3600)
    during = len(submitted.kept)
    await schedules.resume(store, "job", events=[event("resumed")])
    await asyncio.sleep(2 * 3600)
    for one in schedulers:
        await one.stop()

    assert (before, during, len(submitted.kept), await event_types(store)) == (2, 2, 4, ["paused", "resumed"])


async def test_an_entry_is_run_by_hand_beside_its_timetable() -> None:
    store, submitted = memory(), Submitted()
    entry = ScheduledEntry("job", parse(), submitted)
    name = await schedules.run_now(store, entry, events=[event("run")])
    assert name == "job@2023-11-14T22:13:20Z"
    assert submitted.ids == {name}
    state, _ = await schedules.read_state(store, "job")
    assert state is not None
    assert state.submitted == submitted.kept[0]
    assert await event_types(store) == ["run"]
    assert time_of(store) > submitted.kept[0]


async def test_a_state_that_others_change_all_the_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()

    async def beaten(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(store.values, "put", beaten)
    with pytest.raises(StoreUnavailableError, match="others changed schedule job 100 times"):
        await schedules.pause(store, "job", who="ann")
