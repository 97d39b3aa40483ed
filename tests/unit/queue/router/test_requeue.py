"""A person requeues what failed: the new result takes the old one's place, for everybody who asks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reefknot.queue.client import Client
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.port.work_queue import ALL
from tests.unit.queue.shops import served
from tests.workshop import DENIED, OK, Shop, Step, work


async def failed_once(shop: Shop, step: Step, **options: Any) -> None:
    """One assignment in quarantine, with its failure answered."""
    await served(shop, step, quarantine_failed=True)
    client = Client(shop.store, shop.clock)
    result = await (await client.hand_in(work("a", **options))).result()
    assert result.status is ResultStatus.ERROR
    step.outcomes = (OK,)


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_callers_get_the_new_result_and_there_is_no_old_one_any_more(shop: Shop) -> None:
    step = Step(DENIED, seconds=2)
    await failed_once(shop, step)
    client = Client(shop.store, shop.clock)
    assert await shop.store.quarantine.requeue(ALL, who="ann") == ["a"]
    handle = await client.hand_in(work("a"))
    assert await handle.status() in ("pending", "running")
    early, late = asyncio.create_task(handle.result(timeout=30)), await handle.result(timeout=30)
    assert (late.status, (await early).status) == (ResultStatus.SUCCESS, ResultStatus.SUCCESS)
    assert len(step.began) == 2
    assert await handle.status() == "succeeded"


async def test_who_submits_the_same_again_to_a_router_waits_for_the_new_result(shop: Shop) -> None:
    await failed_once(shop, Step(DENIED, seconds=2))
    (router,) = [one for one in shop.members if hasattr(one, "submissions")]
    await shop.store.quarantine.requeue(ALL, who="ann")
    async with asyncio.timeout(30):
        result = await (await router.submit(work("a")))  # type: ignore[union-attr]
    assert result.status is ResultStatus.SUCCESS


async def test_it_fails_again_and_that_is_the_result_then(shop: Shop) -> None:
    step = Step(DENIED)
    await failed_once(shop, step)
    step.outcomes = (DENIED,)
    client = Client(shop.store, shop.clock)
    await shop.store.quarantine.requeue(ALL, who="ann")
    result = await (await client.hand_in(work("a"))).result(timeout=30)
    assert result.status is ResultStatus.ERROR
    assert len(step.began) == 2
    assert [item.id for item in await shop.store.quarantine.find()] == ["a"]


async def test_its_deadline_begins_anew(shop: Shop) -> None:
    await failed_once(shop, Step(DENIED), deadline_ms=5000)
    await asyncio.sleep(600)
    await shop.store.quarantine.requeue(ALL, who="ann")
    client = Client(shop.store, shop.clock)
    result = await (await client.hand_in(work("a"))).result(timeout=30)
    assert result.status is ResultStatus.SUCCESS


async def test_its_worker_is_gone_and_another_one_does_it(shop: Shop) -> None:
    step = Step(DENIED)
    await failed_once(shop, step)
    (worker,) = [one for one in shop.members if hasattr(one, "pools")]
    shop.vanish(worker)
    await shop.worker("w2", step)
    await asyncio.sleep(5)
    await shop.store.quarantine.requeue(ALL, who="ann")
    client = Client(shop.store, shop.clock)
    result = await (await client.hand_in(work("a"))).result(timeout=60)
    assert (result.status, result.worker_id) == (ResultStatus.SUCCESS, "w2")
