"""Workers over stores of their own: the router keeps what they answer, and holds on to its claim until then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reefknot.core.audit.event import Requeued
from reefknot.core.messages import ResultStatus
from reefknot.core.work import ROUTER, WorkItem, WorkState
from reefknot.engines.memory import MemoryStore
from reefknot.router.client import Client
from reefknot.worker.service import Worker
from reefknot.worker.settings import default_settings
from tests.workshop import DENIED, Shop, Step, with_shop, work


async def foreign(shop: Shop, name: str, step: Step, **changes: Any) -> Worker:
    """A worker that shares nothing with the router but the transport."""
    made = Worker(
        name,
        settings=default_settings(**changes),
        store=MemoryStore(shop.clock, chain=name),
        transport=shop.transport,
        blocks={"test.step": step},
        clock=shop.clock,
        seed=1,
    )
    shop.members.append(made)
    await made.start()
    return made


async def stored(shop: Shop, name: str) -> WorkItem:
    item = await shop.store.work.get(name)
    assert item is not None
    return item


@pytest.mark.parametrize(
    ("step", "status", "state"),
    [
        (Step(), ResultStatus.SUCCESS, WorkState.SUCCEEDED),
        (Step(DENIED), ResultStatus.ERROR, WorkState.FAILED),
    ],
)
def test_the_result_is_kept_in_the_routers_store_for_everybody_who_asks(
    step: Step, status: ResultStatus, state: WorkState
) -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router()
        await foreign(shop, "far", step)
        await asyncio.sleep(1.1)
        result = await (await router.submit(work("a")))
        assert (result.status, result.worker_id) == (status, "far")
        item = await stored(shop, "a")
        assert (item.resource_class, item.state) == (ROUTER, state)
        assert await (await Client(shop.store, shop.clock).hand_in(work("a"))).result(1) == result

    with_shop(story)


def test_a_result_that_cannot_be_kept_is_told_to_nobody_and_comes_again() -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router(lease=4)
        step = Step()
        await foreign(shop, "far", step)
        await asyncio.sleep(1.1)
        queue: Any = shop.store.work
        real = queue.settle

        async def away(settlements: Any) -> Any:
            raise ConnectionError("not now")

        queue.settle = away
        future = await router.submit(work("a"))
        await asyncio.sleep(2)
        assert not future.done()
        queue.settle = real
        async with asyncio.timeout(60):
            assert (await future).status is ResultStatus.SUCCESS
        assert len(step.began) == 1

    with_shop(story)


def test_work_that_takes_longer_than_the_routers_lease_is_run_once_and_answered() -> None:
    """Nothing in the router's store says that a worker has it: only its claim does, and that is renewed."""

    async def story(shop: Shop) -> None:
        router = await shop.router(lease=4)
        step = Step(seconds=30)
        await foreign(shop, "far-1", step)
        await foreign(shop, "far-2", step)
        await asyncio.sleep(1.1)
        future = await router.submit(work("a", timeout_ms=100_000))
        async with asyncio.timeout(60):
            result = await future
        assert result.status is ResultStatus.SUCCESS
        assert len(step.began) == 1
        item = await stored(shop, "a")
        assert (item.state, item.crashes) == (WorkState.SUCCEEDED, 0)
        assert await shop.events(Requeued) == []

    with_shop(story)


def test_what_a_vanished_router_had_sent_is_answered_by_the_next_one() -> None:
    async def story(shop: Shop) -> None:
        first = await shop.router(lease=4)
        step = Step(seconds=2)
        await foreign(shop, "far", step)
        await asyncio.sleep(1.1)
        await first.submit(work("a"))
        await asyncio.sleep(1)
        shop.vanish(first)
        await shop.router(lease=4)
        handle = await Client(shop.store, shop.clock).hand_in(work("a"))
        assert (await handle.result(60)).status is ResultStatus.SUCCESS
        assert len(step.began) == 1

    with_shop(story)


def test_work_of_a_foreign_worker_is_cancelled_where_it_runs() -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router()
        await foreign(shop, "far", Step(seconds=60))
        await asyncio.sleep(1.1)
        future = await router.submit(work("a"))
        await asyncio.sleep(1)
        assert await router.cancel("a", "no need")
        async with asyncio.timeout(10):
            assert (await future).status is ResultStatus.CANCELLED
        assert (await router.submissions.answer("a")) == await future

    with_shop(story)
