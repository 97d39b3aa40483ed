"""
The queue of a worker on NATS, of which it reads the records only once: its worker is killed or frozen, and it is found
again, given to another, or taken up by the one that wakes up.
"""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.stores.opening import open_store
from tests.faults import nats_system
from tests.faults.nats_system import CONFIG, Evidence, judge, waited_too_long
from tests.faults.test_nats_parts import PATIENCE_S, under_load

pytestmark = pytest.mark.slow

RETRY_S = 6.0
ONE_SLOT = "    resource_pools: {cpu: {max_concurrency: 1}}\n"


async def queue_of(url: str, state: WorkState = WorkState.PENDING) -> list[WorkItem]:
    """What waits at workers."""
    async with open_store(url) as store:
        found = (await store.work.search(WorkFilter(state=state), limit=100)).items
    return [one for one in found if one.resource_class != ROUTER]


async def until_queued(url: str, number: int, *, retries: int = 0) -> list[WorkItem]:
    """A bounded wait for a queue of this size, and for so many in it that have failed before."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await queue_of(url)
            if len(found) >= number and sum(one.attempts > 0 for one in found) >= retries:
                return found
            await asyncio.sleep(0.1)


# ---- a worker that comes back without a router -----------------------------------------------------------------------


async def came_back(folder: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> tuple[Evidence, list[str]]:
    """What a worker does with the queue of its earlier process, and what of it began before it was due."""
    monkeypatch.setattr(nats_system, "CONFIG", CONFIG.replace("base_delay_ms: 800", f"base_delay_ms: {RETRY_S:.0f}000"))
    async with under_load(folder, server, "router-1", "worker-1", per_second=0.0) as (parts, load):
        asking = [asyncio.create_task(load.ask(f"retried{n}", fails=True)) for n in range(5)]
        asking += [asyncio.create_task(load.ask(f"long{n}", seconds=1.0)) for n in range(40)]
        queued = {one.id: one for one in await until_queued(parts.url, 15, retries=3)}
        parts.kill("router-1")
        parts.kill("worker-1")
        retries = {name: one.due_at / 1000 for name, one in queued.items() if one.attempts}
        await parts.start("worker-1")
        early: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while waiting := {name for name in retries if parts.effects()[name] < 2}:
                early += [name for name in retries if name not in waiting and time.time() < retries[name]]
                await asyncio.sleep(0.02)
        await parts.start("router-1")
        await asyncio.gather(*asking)
    return load.found, early


def test_a_worker_that_is_started_again_finds_its_queue_and_its_retries_without_a_router(
    tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, early = asyncio.run(came_back(tmp_path, server, monkeypatch))
    assert judge(found) == []
    assert early == []
    assert waited_too_long(found) == []


# ---- a worker that does not ------------------------------------------------------------------------------------------


async def left(folder: Path, server: NatsServer) -> tuple[Evidence, float]:
    async with under_load(folder, server, "router-1", "worker-1", "worker-2", per_second=0.0) as (parts, load):
        asking = [asyncio.create_task(load.ask(f"long{n}", seconds=0.5)) for n in range(60)]
        await until_queued(parts.url, 10)
        parts.kill("worker-1")
        began = time.monotonic()
        await asyncio.gather(*asking)
        return load.found, time.monotonic() - began


def test_the_queue_of_a_dead_worker_goes_to_the_other_one(tmp_path: Path, server: NatsServer) -> None:
    found, took = asyncio.run(left(tmp_path, server))
    assert judge(found) == []
    assert took < 30.0


# ---- a worker that sleeps while its queue is taken from it -----------------------------------------------------------


async def woken(folder: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> tuple[Evidence, float]:
    """What is left when the only worker slept until the router had its queue, and how long the rest took."""
    monkeypatch.setattr(nats_system, "CONFIG", CONFIG.replace("lease_seconds: 5", "lease_seconds: 60"))
    async with under_load(folder, server, "router-1", "worker-1", per_second=0.0) as (parts, load):
        asking = [asyncio.create_task(load.ask(f"long{n}", seconds=0.5)) for n in range(60)]
        await until_queued(parts.url, 10)
        parts.send("worker-1", signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            while await queue_of(parts.url):  # noqa: ASYNC110 - other processes are waited for
                await asyncio.sleep(0.2)
        parts.send("worker-1", signal.SIGCONT)
        began = time.monotonic()
        await asyncio.gather(*asking)
        return load.found, time.monotonic() - began


def test_a_worker_that_wakes_up_takes_what_was_taken_from_it_when_it_is_sent_again(
    tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, took = asyncio.run(woken(tmp_path, server, monkeypatch))
    print(f"{took:.1f} s")
    assert judge(found) == []
    assert took < 30.0
