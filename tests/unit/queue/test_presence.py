"""Who is there over a store, who is gone for good, and what that means for the work they held."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from reefknot.app.system import System
from reefknot.audit.journal import Journal
from reefknot.audit.model.event import WorkerGone, decode
from reefknot.audit.port import AuditQuery
from reefknot.errors import NameTakenError
from reefknot.queue import presence
from reefknot.queue.model.work import ROUTER, WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.queue.presence import forget_replaced, gone_parts, living_systems, record_gone
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.processes import process_mark
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.stories import InLoop
from tests.unit.queue.shops import gone_process

ELSEWHERE = "0123456789ab.1.1"


async def reported(store: Store, *, keep: float = 300, worker: str = "worker-1", **changes: Any) -> str:
    """A system whose status is in the store, with these changes. Returns its id."""
    system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=(worker,))
    await store.control.report(system.system_id, json.dumps({**system.snapshot(), **changes}), keep=keep)
    return system.system_id


@pytest.mark.real_time
async def test_a_system_lives_until_it_withdraws_or_is_silent_or_its_process_is_gone(store: Store) -> None:
    here, ended = await reported(store), await reported(store)
    elsewhere = await reported(store, process=ELSEWHERE)
    await reported(store, process=gone_process())
    await reported(store, keep=0)
    assert {one["system_id"] for one in await living_systems(store)} == {here, ended, elsewhere}
    await store.control.withdraw(ended)
    assert {one["system_id"] for one in await living_systems(store)} == {here, elsewhere}


@pytest.mark.real_time
async def test_of_two_systems_with_one_name_the_one_that_reported_later_gives_way(store: Store) -> None:
    await reported(store, process=gone_process())
    first, later = await reported(store, started_at=2), await reported(store, started_at=1)
    other = await reported(store, worker="worker-2")
    for fine in (first, other, "none that reported"):
        await presence.refuse_taken_names(store, fine)
    with pytest.raises(NameTakenError, match="worker worker-1 is running already"):
        await presence.refuse_taken_names(store, later)
    await store.control.withdraw(first)
    await presence.refuse_taken_names(store, later)


@pytest.fixture(params=["memory:", "sqlite:"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> InLoop:
    return InLoop(lambda: open_store(request.param if request.param == "memory:" else f"sqlite:{tmp_path / 's.db'}"))


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.real_time
async def test_what_a_gone_process_held_can_be_claimed_and_no_other_work(store: Store, gone: bool) -> None:
    owner = f"worker-1#5@{gone_process() if gone else process_mark()}"
    await store.work.enqueue([WorkItem("a", "x", "c")])
    await store.work.claim(1, WorkClaim(owner=owner, classes=("c",), lease=600))
    ended = await presence.release_dead_leases(store)
    again = await store.work.claim(1, WorkClaim(owner="other", classes=("c",)))
    assert (ended, [item.crashes for item in again]) == ((1, [1]) if gone else (0, []))


@pytest.mark.real_time
async def test_who_was_taken_for_gone_may_still_report_until_another_one_has_claimed(store: Store) -> None:
    """The fence decides, not the lease: a mistake costs a second run at most, never a second result."""
    await store.work.enqueue([WorkItem(name, "x", "c") for name in "ab"])
    held = await store.work.claim(2, WorkClaim(owner="me", classes=("c",), lease=600))
    assert await store.leases.end(["me"]) == 2
    first, second = (Settlement(one.id, one.owner, one.fence, WorkDone("1")) for one in held)
    assert await store.work.settle([first]) == [True]
    await store.work.claim(1, WorkClaim(owner="other", classes=("c",)))
    assert await store.work.settle([second]) == [False]


@pytest.mark.parametrize(
    ("there", "comes_back"),
    [
        pytest.param({}, True, id="a router"),
        pytest.param({"router": None}, False, id="no router"),
        pytest.param({"own_work_only": True}, False, id="a router for its own work"),
    ],
)
@pytest.mark.real_time
async def test_queued_work_of_a_dead_system_comes_back_to_a_router(store: Store, there: Any, comes_back: bool) -> None:
    """The control is the work of a system that lives."""
    await store.work.enqueue([WorkItem(name, "x", f"cpu@{name}") for name in ("dead", "lives")])
    await reported(store, worker="dead", process=gone_process())
    await reported(store, worker="lives", **there)
    await presence.recall_left(store, store.work.recall)
    classes = {item.id: item.resource_class for item in (await store.work.search()).items}
    assert classes == {"dead": ROUTER if comes_back else "cpu@dead", "lives": "cpu@lives"}


async def gone_events(store: Store) -> list[WorkerGone]:
    found = [decode(one.entry.body) for one in await store.audit.read(AuditQuery(event_type="worker_gone"))]
    return [one for one in found if isinstance(one, WorkerGone)]


@pytest.mark.real_time
async def test_a_dead_system_is_recorded_once_however_many_notice_it(store: Store) -> None:
    await reported(store, worker="worker-2")
    await store.control.withdraw(await reported(store, worker="worker-3"))
    await reported(store, process=gone_process(), holds={"worker-1": ["order-7"]}, pid=7, host="h")
    assert await gone_events(store) == []
    await asyncio.gather(*(record_gone(store, Journal(store.audit)) for _ in range(3)))
    await record_gone(store, Journal(store.audit))
    router, worker = sorted(await gone_events(store), key=lambda one: one.part)
    assert (router.part, router.worker_id, router.process, router.host) == ("router", "router", 7, "h")
    assert (worker.part, worker.worker_id, worker.process, worker.host) == ("worker", "worker-1", 7, "h")
    assert worker.held == {"running": 0, "queued": 0, "jobs": ["order-7"]}


async def test_a_system_elsewhere_is_gone_once_it_is_silent_and_not_when_it_comes_back() -> None:
    async with open_store("memory:") as store:
        system = await reported(store, process=ELSEWHERE, keep=5)

        async def shown() -> list[str]:
            return [one.name for one in await gone_parts(store, await living_systems(store))]

        assert await shown() == []
        await asyncio.sleep(6)
        assert await shown() == ["router", "worker-1"] or await shown() == ["worker-1", "router"]
        await record_gone(store, Journal(store.audit))
        assert await gone_events(store) == [], "it may only be slow"
        await asyncio.sleep(presence.SILENT_UNTIL_GONE_S)
        await record_gone(store, Journal(store.audit))
        assert len(await gone_events(store)) == 2
        await reported(store, process=ELSEWHERE, system_id=system)
        assert await shown() == []


@pytest.mark.real_time
async def test_the_last_words_go_once_every_part_runs_again_and_not_before(store: Store) -> None:
    await reported(store, process=gone_process())
    await reported(store, router=None)
    await record_gone(store, Journal(store.audit))
    await forget_replaced(store)
    assert [one.name for one in await gone_parts(store, await living_systems(store))] == ["router"]
    again = await reported(store, worker="worker-2")
    await forget_replaced(store)
    await store.control.withdraw(again)
    assert await gone_parts(store, await living_systems(store)) == []
