"""Interleavings that once lost a caller, a slot or half a minute: each ends as it should."""

import asyncio
from typing import Any

import pytest

from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.model.work import WorkState
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore
from tests.unit.queue.shops import sent, served, stored
from tests.workshop import Shop, Step, work

ONE = {"cpu": 1}


async def test_work_that_expires_beside_a_draining_worker_is_answered(shop: Shop) -> None:
    """Its worker had accepted it, and has given it up: the router's own claim is void."""
    router = await shop.router()
    worker = await shop.worker("w1", Step(seconds=100), concurrency=ONE)
    await asyncio.sleep(1.5)
    await router.submit(work("busy"))
    late = await router.submit(work("x", deadline_ms=10_000))
    await asyncio.sleep(1)
    draining = asyncio.create_task(worker.drain(300))
    await asyncio.sleep(60)
    assert late.result().status.value == "timeout"
    assert (await stored(shop, "x")).state is WorkState.FAILED
    draining.cancel()


async def test_a_worker_whose_heartbeats_were_held_up_takes_its_recalled_work_again(shop: Shop) -> None:
    """Nothing waits for a worker that believes to have the work while the store has it for the routers."""
    router, step = await shop.router(), Step(seconds=10)
    worker = await shop.worker("w1", step, concurrency=ONE)
    await asyncio.sleep(1.5)
    futures = [await router.submit(work(f"x{n}")) for n in range(3)]
    heartbeat: Any = worker._send_heartbeat

    async def silent() -> None: ...

    worker._send_heartbeat = silent  # type: ignore[method-assign]
    await asyncio.sleep(7)
    worker._send_heartbeat = heartbeat  # type: ignore[method-assign]
    await asyncio.sleep(30)
    assert all(one.done() for one in futures)
    assert [round(at - step.began[0][1]) for _, at in step.began] == [0, 10, 20]


async def test_a_slot_whose_task_is_cancelled_before_it_began_is_free_again(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    pool = worker.pools["cpu"]
    await shop.send(work("x"))
    while not pool.running:  # noqa: ASYNC110 - in the very turn in which it is there
        await asyncio.sleep(0)
    pool.cancel("x")
    await asyncio.sleep(1)
    assert (pool.active, pool.claimed) == (0, {})
    await sent(shop, work("y"), wait=5)
    assert (await stored(shop, "y")).state is WorkState.SUCCEEDED


async def test_two_callers_of_one_id_at_a_full_router_hear_the_same(shop: Shop) -> None:
    router = await served(shop, Step(seconds=5), wait=1.5)
    await router.submit(work("x"))
    router._callers._callers.clear()
    await shop.store.control.report("full", "{}", keep=60, capacity=Capacity({}, SubmissionRules(size=1)))
    first, second = await asyncio.gather(router.submit(work("x")), router.submit(work("x")))
    await asyncio.sleep(60)
    assert first.result() == second.result()


async def test_the_queue_of_a_drained_worker_is_done_by_another_although_the_router_restarted(shop: Shop) -> None:
    first = await shop.router()
    worker = await shop.worker("w1", Step(seconds=50), concurrency=ONE)
    other = await shop.worker("w2", Step(seconds=1))
    other.pause()
    await asyncio.sleep(1.5)
    await first.submit(work("busy"))
    await first.submit(work("x"))
    await asyncio.sleep(1)
    shop.members.remove(first)
    await first.stop()
    await shop.router("second")
    other.resume()
    await asyncio.sleep(2)
    await worker.drain(1)
    await asyncio.sleep(20)
    item = await stored(shop, "x")
    assert (item.state, item.resource_class) == (WorkState.SUCCEEDED, "cpu@w2")


async def test_a_pool_may_have_an_at_sign_in_its_name(shop: Shop) -> None:
    from msgspec import structs

    router = await served(shop, Step(seconds=9), wait=1.5, concurrency={"gpu@eu": 1})
    future = await router.submit(structs.replace(work("x"), resource_class="gpu@eu"))
    await asyncio.sleep(20)
    assert future.result().status.value == "success"


@pytest.mark.real_time
async def test_a_store_that_closes_ends_those_who_wait_and_leaves_no_file_open(tmp_path: Any) -> None:
    store = await SqliteStore(tmp_path / "s.db", SystemClock()).start()
    waiting = asyncio.create_task(store.work.ended("nobody", 30))
    await asyncio.sleep(0.05)
    await store.close()
    async with asyncio.timeout(3):
        with pytest.raises(Exception, match="closed"):
            await waiting
    assert store._watcher._connection is None
