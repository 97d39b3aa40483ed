"""Work that a worker had accepted, and that is gone: somebody does it, or its caller hears why not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reefknot.core.messages import ExecAssignment, ExecResult, Job, ResultStatus
from reefknot.router.client import Client
from reefknot.router.service import Router
from tests.workshop import Shop, Step, with_shop, work

ONE = {"cpu": 1}
LONG: dict[str, Any] = {"timeout_ms": 10_000_000}


async def accepted_and_gone(shop: Shop, *, router_too: bool, queued: bool = False, **options: Any) -> Router:
    """`a` is with a worker that vanishes, in its slot or in its queue; perhaps its router does, too."""
    first = await shop.router("first")
    worker = await shop.worker("w1", Step(seconds=600), concurrency=ONE)
    await asyncio.sleep(1.1)
    if queued:
        await first.submit(work("before", **LONG))
        await asyncio.sleep(0.1)
    await first.submit(work("a", **options))
    await asyncio.sleep(1)
    shop.vanish(worker)
    if not router_too:
        return first
    shop.vanish(first)
    await asyncio.sleep(1)
    return await shop.router("second")


async def result(shop: Shop, within: float, **options: Any) -> ExecResult:
    handle = await Client(shop.store, shop.clock).hand_in(work("a", **options))
    return await handle.result(within)


@pytest.mark.parametrize("router_too", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_another_worker_does_it(router_too: bool, queued: bool) -> None:
    async def story(shop: Shop) -> None:
        await accepted_and_gone(shop, router_too=router_too, queued=queued, **LONG)
        step = Step()
        await shop.worker("w2", step)
        assert (await result(shop, 200, **LONG)).worker_id == "w2"
        assert len(step.times("a")) == 1

    with_shop(story)


@pytest.mark.parametrize("router_too", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_its_caller_hears_that_its_time_is_over(router_too: bool, queued: bool) -> None:
    async def story(shop: Shop) -> None:
        router = await accepted_and_gone(shop, router_too=router_too, queued=queued, deadline_ms=5000)
        found = await result(shop, 200, deadline_ms=5000)
        assert (found.status, found.error_code) == (ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT")
        async with asyncio.timeout(10):
            assert await (await router.submit(work("a", deadline_ms=5000))) == found

    with_shop(story)


@pytest.mark.parametrize("router_too", [False, True])
@pytest.mark.parametrize("waited", [1, 40, 100])
def test_it_can_be_cancelled(router_too: bool, waited: float) -> None:
    async def story(shop: Shop) -> None:
        await accepted_and_gone(shop, router_too=router_too, **LONG)
        await asyncio.sleep(waited)
        await Client(shop.store, shop.clock).cancel("a", "enough")
        found = await result(shop, 200, **LONG)
        assert (found.status, found.error_message) == (ResultStatus.CANCELLED, "enough")

    with_shop(story)


def test_a_class_that_no_worker_has_any_more_ends_it_after_the_patience() -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router(patience=7)
        worker = await shop.worker("w1", Step(seconds=60), concurrency={"gpu": 1})
        await shop.worker("w2", Step(), concurrency=ONE)
        await asyncio.sleep(1.1)
        future = await router.submit(ExecAssignment("a", "r", Job("test.step"), resource_class="gpu"))
        await asyncio.sleep(1)
        shop.vanish(worker)
        async with asyncio.timeout(400):
            assert (await future).error_code == "RESOURCE_UNAVAILABLE"

    with_shop(story)
