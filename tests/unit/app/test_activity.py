"""The activity of all systems over a store: kept over their ends, added up once, and cheap for those at rest."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from reefknot.app import activity
from reefknot.app.activity import ENDED, PREFIX, SILENT_S, Activity, fold_left, store_activity
from reefknot.audit.journal import Journal, envelope, observed
from reefknot.audit.metrics import ActivityRecord, series
from reefknot.audit.model.event import Quarantined
from reefknot.runtime.clocks import LoopClock, SystemClock, VirtualLoop
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store, StoredValue


async def work(store: Store, times: int = 1) -> None:
    await Journal(store.audit).write(*(Quarantined(**envelope(wall=1.0), reason="spent") for _ in range(times)))


async def total(store: Store) -> float:
    return (await store_activity(store)).totals.get("quarantined", 0)


async def names(store: Store) -> list[str]:
    return [one.name for one in await store.values.list(PREFIX)]


async def later_ms(store: Store) -> int:
    return store.moment().wall + int(SILENT_S * 1000) + 5000


@pytest.mark.real_time
async def test_what_systems_counted_is_there_after_their_ends_and_takes_one_value_or_none() -> None:
    store = MemoryStore(SystemClock())
    async with Activity(store, SystemClock()):
        pass
    assert await names(store) == [], "it counted nothing"
    for _ in range(3):
        async with Activity(store, SystemClock()) as one:
            await work(store, 2)
            await one.write()
            assert await total(store) % 2 == 0
    assert (await total(store), await names(store)) == (6, [ENDED])


def loop_clock() -> LoopClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return LoopClock(loop)


async def test_a_system_at_rest_writes_nothing_more() -> None:
    """An hour without work: one value, written once."""
    clock = loop_clock()
    store = MemoryStore(clock)
    async with Activity(store, clock):
        await work(store)
        await asyncio.sleep(20)
        (first,) = await store.values.list(PREFIX)
        await asyncio.sleep(3600)
        (last,) = await store.values.list(PREFIX)
    assert last.version == first.version


async def test_the_last_sample_holds_while_its_system_runs_and_is_no_value_of_now_afterwards() -> None:
    clock = loop_clock()
    store = MemoryStore(clock)
    async with Activity(store, clock) as one:
        await asyncio.sleep(300)
        status = {"activity": msgspec.to_builtins(one.status(), str_keys=True)}
        found = await store_activity(store, [status]), await store_activity(store)
        living, dead = (series(record.buckets, clock.wall())["queued"] for record in found)
    assert (living[-31:], living[:-31], dead[-30:]) == ([0.0] * 31, [None] * 59, [None] * 30)
    assert [value for value in dead if value is not None] == [0.0]


async def killed(store: Store, times: int = 1) -> Activity:
    one = Activity(store, SystemClock())
    with observed(store.audit, one.counters.observe):
        await work(store, times)
        await one.write()
    return one


@pytest.mark.real_time
async def test_a_killed_systems_record_is_added_to_the_ended_ones_after_a_while_and_a_living_ones_stays() -> None:
    store = MemoryStore(SystemClock())
    one = await killed(store, 3)
    assert await fold_left(store, store.moment().wall) == 0, "at once"
    body = json.dumps({"system_id": "s", "started_at": 1, "activity": one.status()})
    await store.control.report("s", body, keep=300)
    assert await fold_left(store, await later_ms(store)) == 0, "it lives"
    await store.control.withdraw("s")
    assert (await fold_left(store, await later_ms(store)), await total(store), await names(store)) == (1, 3, [ENDED])


class Halts(Exception): ...


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.real_time
async def test_whoever_dies_while_folding_leaves_every_count_once(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes of a fold are: close the record, add it to the sum, delete it. Any of them may be the last."""
    store = MemoryStore(SystemClock())
    await killed(store, 3)
    writes = 0

    def dying(write: Any) -> Any:
        async def written(*args: Any, **more: Any) -> Any:
            nonlocal writes
            if writes == at:
                raise Halts
            writes += 1
            return await write(*args, **more)

        return written

    with monkeypatch.context() as patched:
        patched.setattr(store.values, "put", dying(store.values.put))
        patched.setattr(store.values, "delete", dying(store.values.delete))
        with pytest.raises(Halts):
            await fold_left(store, await later_ms(store))
    between = await total(store)
    await fold_left(store, await later_ms(store))

    assert (between, await total(store), await names(store)) == (3, 3, [ENDED])


@pytest.mark.real_time
async def test_without_the_names_of_the_folded_records_the_sum_would_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a sum that forgets which records it has counts one twice whose folder died before deleting it."""
    store = MemoryStore(SystemClock())
    await killed(store, 3)
    encoded = activity._encoded
    forgets = lambda record: encoded(msgspec.structs.replace(record, folded=()))  # noqa: E731 - it is one line
    monkeypatch.setattr(activity, "_encoded", forgets)

    async def halts(*_: Any, **__: Any) -> bool:
        raise Halts

    with monkeypatch.context() as patched:
        patched.setattr(store.values, "delete", halts)
        with pytest.raises(Halts):
            await fold_left(store, await later_ms(store))
    await fold_left(store, await later_ms(store))
    assert await total(store) == 6


@pytest.mark.real_time
async def test_two_systems_that_fold_at_once_add_a_record_once() -> None:
    store = MemoryStore(SystemClock())
    for _ in range(5):
        await killed(store)
    now = await later_ms(store)
    await asyncio.gather(*(fold_left(store, now) for _ in range(4)))
    await fold_left(store, now)
    assert (await total(store), await names(store)) == (5, [ENDED])


@pytest.mark.real_time
async def test_a_late_folder_does_not_add_what_others_added_deleted_and_forgot() -> None:
    """It saw the closed record before; since then the sum has got it, it is gone, and the sum names it no more."""
    store = MemoryStore(SystemClock())
    first = await killed(store, 3)
    (value,) = await store.values.list(PREFIX)
    seen = (first.record_id, msgspec.json.decode(value.body, type=ActivityRecord), value.version)
    await fold_left(store, await later_ms(store))
    await killed(store)
    await fold_left(store, await later_ms(store))
    found = await store.values.get(ENDED)
    assert found is not None
    assert first.record_id not in found.body
    await activity._fold(store, [seen])
    assert await total(store) == 4


@pytest.mark.real_time
async def test_a_system_that_was_taken_for_dead_goes_on_under_a_new_id_and_loses_nothing() -> None:
    store = MemoryStore(SystemClock())
    async with Activity(store, SystemClock()) as one:
        await work(store, 2)
        await one.write()
        await fold_left(store, await later_ms(store))
        seen = [await total(store)]
        await work(store, 5)
        await one.write()
        await one.write()
        seen.append(await total(store))
    assert [*seen, await total(store)] == [2, 7, 7]


@pytest.mark.real_time
async def test_a_write_whose_answer_was_lost_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    async with Activity(store, SystemClock()) as one:
        await work(store, 2)
        put = store.values.put

        async def lost(*args: Any, **more: Any) -> StoredValue | None:
            await put(*args, **more)
            raise TimeoutError

        with monkeypatch.context() as patched:
            patched.setattr(store.values, "put", lost)
            with pytest.raises(TimeoutError):
                await one.write()
        await work(store)
        await one.write()
        await one.write()
    assert await total(store) == 3


@pytest.mark.real_time
async def test_a_record_that_cannot_be_read_stops_nothing() -> None:
    store = MemoryStore(SystemClock())
    await store.values.put(f"{PREFIX}broken", "no json", version=0)
    await store.values.put(ENDED, "[]", version=0)
    await killed(store, 2)
    await fold_left(store, await later_ms(store))
    assert await total(store) == 2


async def test_the_last_day_is_the_same_from_every_process_and_over_restarts() -> None:
    """Ten systems one after the other, an hour apart, and one that only looks."""
    clock = loop_clock()
    store = MemoryStore(clock)
    for _ in range(10):
        async with Activity(store, clock):
            await work(store, 3)
            await asyncio.sleep(3600)
    found = await store_activity(store)
    day = series(found.coarse["24h"], clock.wall(), steps=96, step_s=900)
    assert (sum(day["quarantined"]), sum(bool(one) for one in day["quarantined"])) == (30, 10)
    assert sum(series(found.coarse["2h"], clock.wall(), steps=60, step_s=120)["quarantined"]) in (3, 6)
