"""Who is there over a store, who is gone for good, and what that means for the work they held."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reefknot.app.system import System
from reefknot.audit.journal import Journal
from reefknot.audit.model.event import WorkerGone, decode
from reefknot.audit.port import AuditQuery
from reefknot.errors import NameTakenError
from reefknot.queue.model.work import ROUTER, WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.queue.presence import (
    SILENT_UNTIL_GONE_S,
    forget_replaced,
    gone_parts,
    living_systems,
    recall_left,
    record_gone,
    refuse_taken_names,
    release_dead_leases,
)
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.processes import process_mark
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store

ELSEWHERE = "0123456789ab.1.1"


def gone_process() -> str:
    """The mark of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    marked = process_mark(process.pid)
    process.communicate(b"")
    return marked


async def reported(store: Store, *, keep: float = 300, worker: str = "worker-1", **changes: Any) -> str:
    """A system whose status is in the store, with these changes. Returns its id."""
    system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=(worker,))
    await store.control.report(system.system_id, json.dumps({**system.snapshot(), **changes}), keep=keep)
    return system.system_id


@pytest.mark.real_time
async def test_a_system_lives_until_it_withdraws_or_is_silent_or_its_process_is_gone() -> None:
    async with open_store("memory:") as store:
        here = await reported(store)
        ended = await reported(store)
        elsewhere = await reported(store, process=ELSEWHERE)
        await reported(store, process=gone_process())
        await reported(store, keep=0)
        assert {one["system_id"] for one in await living_systems(store)} == {here, ended, elsewhere}
        await store.control.withdraw(ended)
        assert {one["system_id"] for one in await living_systems(store)} == {here, elsewhere}


@pytest.mark.real_time
async def test_of_two_systems_with_one_name_the_one_that_reported_later_gives_way() -> None:
    async with open_store("memory:") as store:
        await reported(store, process=gone_process())
        first = await reported(store, started_at=2)
        later = await reported(store, started_at=1)
        other = await reported(store, worker="worker-2")
        for fine in (first, other, "none that reported"):
            await refuse_taken_names(store, fine)
        with pytest.raises(NameTakenError, match="worker worker-1 is running already"):
            await refuse_taken_names(store, later)
        await store.control.withdraw(first)
        await refuse_taken_names(store, later)


@pytest.mark.parametrize("url", ["memory:", "sqlite:"])
@pytest.mark.parametrize("gone", [True, False])
def test_what_a_gone_process_held_can_be_claimed_at_once_and_what_a_living_one_holds_cannot(
    tmp_path: Any, url: str, gone: bool
) -> None:
    owner = f"worker-1#5@{gone_process() if gone else process_mark()}"

    async def main() -> tuple[int, list[int]]:
        async with open_store(url if url == "memory:" else f"sqlite:{tmp_path / 'state.db'}") as store:
            await store.work.enqueue([WorkItem("a", "x", "c")])
            await store.work.claim(1, WorkClaim(owner=owner, classes=("c",), lease=600))
            ended = await release_dead_leases(store)
            again = await store.work.claim(1, WorkClaim(owner="other", classes=("c",)))
            return ended, [item.crashes for item in again]

    assert asyncio.run(main()) == ((1, [1]) if gone else (0, []))


@pytest.mark.parametrize("url", ["memory:", "sqlite:"])
def test_who_was_taken_for_gone_may_still_report_until_somebody_else_has_claimed(tmp_path: Any, url: str) -> None:
    """The fence decides, not the lease: a mistake costs a second run at most, never a second result."""

    async def main() -> list[bool]:
        async with open_store(url if url == "memory:" else f"sqlite:{tmp_path / 'state.db'}") as store:
            await store.work.enqueue([WorkItem(name, "x", "c") for name in "ab"])
            held = await store.work.claim(2, WorkClaim(owner="me", classes=("c",), lease=600))
            assert await store.leases.end(["me"]) == 2
            reports = [Settlement(one.id, one.owner, one.fence, WorkDone("1")) for one in held]
            first = await store.work.settle(reports[:1])
            await store.work.claim(1, WorkClaim(owner="other", classes=("c",)))
            return first + await store.work.settle(reports[1:])

    assert asyncio.run(main()) == [True, False]


ROUTERS: dict[str, dict[str, Any]] = {
    "a router": {},
    "no router": {"router": None},
    "a router for its own work": {"own_work_only": True},
}


@pytest.mark.parametrize("url", ["memory:", "sqlite:"])
@pytest.mark.parametrize("there", ROUTERS)
def test_queued_work_of_a_dead_system_comes_back_while_there_is_a_router_for_it(
    tmp_path: Any, url: str, there: str
) -> None:
    """The control is the work of a system that lives."""

    async def main() -> dict[str, str]:
        async with open_store(url if url == "memory:" else f"sqlite:{tmp_path / 'state.db'}") as store:
            names = "dead", "lives"
            await store.work.enqueue([WorkItem(name, "x", f"cpu@{name}") for name in names])
            await reported(store, worker="dead", process=gone_process())
            await reported(store, worker="lives", **ROUTERS[there])
            await recall_left(store, store.work.recall)
            items = [await store.work.get(name) for name in names]
            return {item.id: item.resource_class for item in items if item is not None}

    back = ROUTER if there == "a router" else "cpu@dead"
    assert asyncio.run(main()) == {"dead": back, "lives": "cpu@lives"}


# ---- systems that are gone -------------------------------------------------------------------------------------------


async def gone_events(store: Store) -> list[WorkerGone]:
    found = [decode(one.entry.body) for one in await store.audit.read(AuditQuery(event_type="worker_gone"))]
    return [one for one in found if isinstance(one, WorkerGone)]


@pytest.mark.parametrize("engine", ["memory:", "sqlite:"])
@pytest.mark.real_time
async def test_a_dead_system_is_recorded_once_however_many_notice_it(engine: str, tmp_path: Path) -> None:
    async with open_store(engine if engine == "memory:" else f"sqlite:{tmp_path / 'a.db'}") as store:
        await reported(store, worker="worker-2")
        ended = await reported(store, worker="worker-3")
        await store.control.withdraw(ended)
        await reported(store, process=gone_process(), holds={"worker-1": ["order-7"]}, pid=7, host="h")
        assert await gone_events(store) == []
        await asyncio.gather(*(record_gone(store, Journal(store.audit)) for _ in range(3)))
        await record_gone(store, Journal(store.audit))
        events = await gone_events(store)
        assert {(one.part, one.worker_id, one.process, one.host) for one in events} == {
            ("worker", "worker-1", 7, "h"),
            ("router", "router", 7, "h"),
        }
        assert len(events) == 2
        (worker,) = [one for one in events if one.part == "worker"]
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
        await asyncio.sleep(SILENT_UNTIL_GONE_S)
        await record_gone(store, Journal(store.audit))
        assert len(await gone_events(store)) == 2
        await reported(store, process=ELSEWHERE, system_id=system)
        assert await shown() == []


@pytest.mark.real_time
async def test_the_last_words_go_once_every_part_runs_again_and_not_before() -> None:
    async with open_store("memory:") as store:
        await reported(store, process=gone_process())
        await reported(store, router=None)
        await record_gone(store, Journal(store.audit))
        await forget_replaced(store)
        assert [one.name for one in await gone_parts(store, await living_systems(store))] == ["router"]
        again = await reported(store, worker="worker-2")
        await forget_replaced(store)
        await store.control.withdraw(again)
        assert await gone_parts(store, await living_systems(store)) == []
