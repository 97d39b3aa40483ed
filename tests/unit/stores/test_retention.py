"""`RetentionJob`: removes what is past its retention, and nothing that lives."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.audit.retention import KEEP_EVENTS_S, KEEP_WORK_S, Retention, RetentionNote, retention_given
from reefknot.errors import ParameterError
from reefknot.idempotency.model import Claimed, Done
from reefknot.queue.model.work import Quarantine, Settled, WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock, clock_of_this_loop
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import _retention_job
from reefknot.stores.port import Store
from reefknot.stores.retention import EVERY_S, SHORTEST_WAIT_S, Removed, RetentionJob
from reefknot.testing.conformance.harness import event
from tests.unit.stores.sqlite.stores_on_a_file import opened as open_sqlite

DAY = 86_400.0


async def filled(store: Store) -> None:
    """A key, an ended and a running and a quarantined piece of work, and two events, all of this moment."""
    at = int(store.clock.wall() * 1000)
    answer = await store.idempotency.claim("ended", owner="a")
    assert isinstance(answer, Claimed)
    await store.idempotency.finish(answer.claim, Done("1"))
    await store.idempotency.claim("guarded", owner="b", lease=1, guard=True)
    await store.work.enqueue([WorkItem(name, "t") for name in ("done", "running", "stuck", "waiting")])
    by_id = {one.id: one for one in await store.work.claim(3, WorkClaim(owner="me", lease=1e6))}
    ends: dict[str, Settled] = {"done": WorkDone("1"), "stuck": Quarantine("no")}
    await store.work.settle([Settlement(name, "me", by_id[name].fence, how) for name, how in ends.items()])
    await store.audit.append([event("a", at=at), event("b", at=at)])


async def test_a_round_removes_what_is_past_its_retention_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reefknot")
    clock = VirtualClock()
    store = MemoryStore(clock, retention=DAY)
    job = RetentionJob(store, clock, given=Retention(events=10 * DAY, work=5 * DAY))
    await filled(store)
    assert await job.once() == Removed()
    for days, removed in ((2, Removed(keys=1)), (4, Removed(work=1)), (5, Removed(events=2)), (0, Removed())):
        clock.advance(days * DAY)
        assert await job.once() == removed
    assert [one.id for one in (await store.work.search()).items] == ["waiting", "stuck", "running"]
    assert await store.idempotency.get("guarded") is not None
    assert await store.audit.verify() == []
    lines = [record.message for record in caplog.records if "retention" in record.message]
    assert (lines[0], len(lines)) == ("retention removed 1 keys, 0 ended work items, 0 events", 3)


async def test_for_ever_is_for_ever() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock, retention=DAY)
    await filled(store)
    clock.advance(10_000 * DAY)
    assert await RetentionJob(store, clock, given=Retention(None, None)).once() == Removed(keys=1)
    assert await RetentionJob(store, clock).once() == Removed(work=1, events=2)


class JumpingClock(VirtualClock):
    jump = 0.0

    def wall(self) -> float:
        return super().wall() + self.jump


async def test_a_wall_clock_that_jumps_makes_nothing_older() -> None:
    clock = JumpingClock()
    store = MemoryStore(clock, retention=DAY)
    job = RetentionJob(store, clock)
    await filled(store)
    clock.jump = 1000 * DAY
    assert await job.once() == Removed()
    assert await RetentionJob(store, clock).once() == Removed(work=1, events=2)  # who opens it now believes the clock


class Counting:
    """A store's parts that only count how often they were asked to tidy."""

    expires_by_itself = False

    def __init__(self, broken: bool = False, newest: int | None = None) -> None:
        self.rounds = 0
        self.broken = broken
        self.newest = newest
        self.idempotency = self.work = self.audit = self

    async def newest_record_at(self) -> int | None:
        return self.newest

    async def purge(self, before: int = 0) -> int:
        self.rounds += not before
        if self.broken:
            raise OSError("the disk is gone")
        return 0

    async def trim(self, before: int, *, rule: str) -> int:
        return 0


def started(store: Any, **options: Any) -> RetentionJob:
    job = RetentionJob(store, clock_of_this_loop(), **options)
    job.start()
    return job


async def test_a_round_runs_about_every_ten_minutes_also_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    store = Counting()
    job = started(store)
    await asyncio.sleep(EVERY_S - 1)
    assert store.rounds == 0
    await asyncio.sleep(EVERY_S)
    assert store.rounds == 1
    store.broken = True
    await asyncio.sleep(3 * EVERY_S)
    store.broken = False
    before = store.rounds
    await asyncio.sleep(10 * EVERY_S)
    assert 7 <= store.rounds - before <= 10
    await job.close()
    ended = store.rounds
    await asyncio.sleep(10 * EVERY_S)
    assert store.rounds == ended
    assert "the retention round failed (the disk is gone)" in caplog.text


async def test_a_process_that_may_not_run_rounds_runs_none() -> None:
    store = Counting()
    job = started(store, may_run=lambda: False)
    await asyncio.sleep(5 * EVERY_S)
    await job.close()
    assert store.rounds == 0


@pytest.mark.real_time
async def test_one_process_of_a_host_runs_retention(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "s.db") as other:
        async with open_sqlite(tmp_path / "s.db") as one:
            assert [store.acquire_retention_lock() for store in (one, one, other)] == [True, True, False]
        assert other.acquire_retention_lock()


def opened(path: Path, clock: VirtualClock, work: Callable[[Store], Any], **options: Any) -> None:
    async def main() -> None:
        async with rk.open_store(f"sqlite:{path}", clock=clock, retention=DAY, **options) as store:
            await work(store)

    asyncio.run(main())


def rounds(path: Path, clock: VirtualClock, **options: Any) -> list[str]:
    """The types of the events after a process has had the store open for so long that it ran a round."""
    found: list[str] = []

    async def once(store: Store) -> None:
        await _retention_job(store, store.clock, retention_given(**{"events": ..., "work": ..., **options})).once()
        found.extend(one.entry.event_type for one in await store.audit.read())

    opened(path, clock, once, tidy=False)
    return found


async def test_a_process_that_runs_removes_something_only_when_it_has_had_the_store_open_for_a_while() -> None:
    store, note = Counting(), RetentionNote(None)
    note.write(last_round_at=1.0)
    job = started(store, note=note)
    await asyncio.sleep(SHORTEST_WAIT_S - 1)
    assert store.rounds == 0
    await asyncio.sleep(SHORTEST_WAIT_S)
    assert store.rounds == 1
    await job.close()


@pytest.mark.parametrize("ahead", [0.9, 1.1, 30.0])
async def test_nothing_is_removed_while_the_clock_is_far_ahead(ahead: float, caplog: pytest.LogCaptureFixture) -> None:
    store = Counting(newest=int((clock_of_this_loop().wall() - ahead * DAY) * 1000))
    job = started(store)
    await asyncio.sleep(3 * EVERY_S)
    assert bool(store.rounds) is (ahead < 1)
    await job.close()
    assert ("more than a day past the newest record" in caplog.text) is (ahead > 1)


async def test_records_that_a_process_with_a_wrong_clock_writes_itself_say_nothing_for_a_day() -> None:
    store = Counting(newest=int((clock_of_this_loop().wall() - 30 * DAY) * 1000))
    job = started(store)
    await asyncio.sleep(60)
    store.newest = None  # it is of now
    await asyncio.sleep(DAY - 120)
    assert store.rounds == 0
    await asyncio.sleep(2 * EVERY_S)
    assert store.rounds > 0, "somebody would have noticed by now"
    await job.close()


def test_a_noted_retention_binds_processes_without_a_setting(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.db", VirtualClock()
    opened(path, clock, filled, audit_retention=None, work_retention=1000 * DAY)
    clock.advance(KEEP_EVENTS_S + KEEP_WORK_S)
    assert rounds(path, clock) == ["a", "b"]
    assert rounds(path, clock, events=DAY) == ["anchor"], "now a process says otherwise"


def test_control_without_the_note_the_events_would_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.stores.opening.RetentionNote", lambda path: RetentionNote(None))
    path, clock = tmp_path / "state.db", VirtualClock()
    opened(path, clock, filled, audit_retention=None)
    clock.advance(KEEP_EVENTS_S + EVERY_S)
    assert rounds(path, clock) == ["anchor"]


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
async def test_the_newest_record_is_an_event_a_key_or_work(tmp_path: Path, engine: str) -> None:
    async def story(store: Any) -> None:
        assert await store.newest_record_at() is None
        calls: list[Callable[[], Any]] = [
            lambda: store.idempotency.claim("k", owner="a"),
            lambda: store.work.enqueue([WorkItem("w", "t")]),
            lambda: store.audit.append([event("a", at=int(clock.wall() * 1000))]),
        ]
        for call in calls:
            clock.advance(5)
            await call()
            assert await store.newest_record_at() == int(clock.wall() * 1000)

    clock = VirtualClock()
    if engine == "memory":
        await story(MemoryStore(clock))
    else:
        async with open_sqlite(tmp_path / "s.db", clock, inline=True) as store:
            await story(store)


def test_a_note_that_cannot_be_read_or_written_says_nothing(tmp_path: Path) -> None:
    here, nowhere = str(tmp_path / "state.db"), RetentionNote(str(tmp_path / "no" / "state.db"))
    (tmp_path / "state.db-retention").write_bytes(b"nonsense")
    assert RetentionNote(here).read().retention is None
    RetentionNote(here).write(retention=Retention(1.0, None))
    assert RetentionNote(here).read().retention == Retention(1.0, None)
    nowhere.write(last_round_at=3.0)
    assert nowhere.read().last_round_at == 3.0


@pytest.mark.parametrize("name", ["audit_retention", "work_retention"])
def test_an_invalid_retention_is_refused_before_anything_is_opened(tmp_path: Path, name: str) -> None:
    wrong: tuple[Any, ...] = (0, -1, float("inf"), float("nan"), True, "7d")
    for given in wrong:
        with pytest.raises(ParameterError, match=f"{name}=.*seconds above 0, or None for ever"):
            opened(tmp_path / "state.db", VirtualClock(), filled, **{name: given})
    assert not (tmp_path / "state.db").exists()


async def test_in_a_virtual_loop_nothing_is_removed(tmp_path: Path) -> None:
    async with rk.open_store("memory:") as store:
        await store.audit.append([event("a", at=0)])
        await asyncio.sleep(KEEP_EVENTS_S + EVERY_S)
        assert len(await store.audit.read()) == 1
