"""Classes of work: a step brings its own, whoever submits it, and a class that no worker has is told."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from reefknot.app.system import System
from reefknot.queue.connect import client_of
from reefknot.queue.model.messages import ExecAssignment, Job, ResultStatus
from reefknot.queue.worker.settings import OTHER_POOL, default_settings
from reefknot.steps.python import BlockRegistry, block
from tests.workshop import Shop, with_shop

MOST = {"cpu": 2}


def own_step() -> Any:
    """A step with a class of its own, which takes a second."""
    registry = BlockRegistry()

    @block("mail.send", resource_class="emails", into=registry)
    async def send(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(1)
        return {"sent": True}

    return registry.blocks()


async def ran_in(shop: Shop, name: str) -> str:
    item = await shop.store.work.get(name)
    assert item is not None
    return item.resource_class


def with_system(story: Callable[[Shop, System], Awaitable[None]], **settings: Any) -> None:
    """Run a story over a system with the step `mail.send`, in virtual time."""

    async def whole(shop: Shop) -> None:
        blocks = own_step()
        system = System(shop.store, shop.clock, settings=default_settings(**settings), blocks=blocks, seed=1)
        await system.start()
        try:
            await asyncio.sleep(1.5)
            await story(shop, system)
        finally:
            await system.stop()

    with_shop(whole)


@pytest.mark.parametrize(("concurrency", "slots"), [(MOST, OTHER_POOL), ({"cpu": 2, "emails": 9}, 9)])
def test_a_worker_with_a_step_has_its_class_with_four_or_the_configured_slots(concurrency: Any, slots: int) -> None:
    async def story(shop: Shop, system: System) -> None:
        (worker,) = system.workers
        assert {name: pool.slots for name, pool in worker.pools.items()} == {"cpu": 2, "emails": slots}
        assert system.snapshot()["step_classes"] == {"mail.send": "emails"}

    with_system(story, concurrency=concurrency)


def test_a_submission_goes_to_the_class_of_its_step_unless_it_names_one() -> None:
    async def story(shop: Shop, system: System) -> None:
        handles = [await system.client.submit("mail.send", assignment_id=f"m-{n}") for n in range(8)]
        item = await shop.store.work.get("m-0")
        assert item is not None
        assert item.pool == "emails", "it takes a place of its own class from the beginning"
        began = shop.clock.now()
        assert {one.status for one in [await handle.result() for handle in handles]} == {ResultStatus.SUCCESS}
        assert 1.9 < shop.clock.now() - began < 3.0, "four at once, and cpu has two"
        assert {await ran_in(shop, f"m-{n}") for n in range(8)} == {"emails@worker-1"}

        named = await system.client.submit("mail.send", assignment_id="named", resource_class="cpu")
        assert (await named.result()).status is ResultStatus.SUCCESS
        assert await ran_in(shop, "named") == "cpu@worker-1"

    with_system(story, concurrency=MOST)


async def test_earlier_submissions_go_there_too_without_a_warning(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reefknot")
    client = client_of(shop.store, shop.clock, 100)
    handle = await client.submit("mail.send", assignment_id="early")
    await client.submit("mail.send", resource_class="emials")
    assert caplog.messages == []
    system = System(shop.store, shop.clock, settings=default_settings(concurrency=MOST), blocks=own_step(), seed=1)
    await system.start()
    assert (await handle.result()).status is ResultStatus.SUCCESS
    assert await ran_in(shop, "early") == "emails@worker-1"
    await system.stop()


async def test_an_assignment_of_another_router_goes_to_the_class_of_its_step(shop: Shop) -> None:
    worker = await shop.worker("w1", *own_step().values(), concurrency=MOST)
    await shop.send(ExecAssignment("a", "r-a", Job("mail.send")))
    await asyncio.sleep(0.5)
    assert (worker.pools["emails"].active, worker.pools["cpu"].active) == (1, 0)
    await asyncio.sleep(1)
    assert shop.result("a").status is ResultStatus.SUCCESS


def test_a_class_that_no_worker_has_is_warned_of_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    async def story(shop: Shop, system: System) -> None:
        for n in range(3):
            await system.client.submit("mail.send", assignment_id=f"m-{n}", resource_class="email")
        await system.client.submit("mail.send", assignment_id="fine", resource_class="emails")
        await asyncio.sleep(60)
        item = await shop.store.work.get("m-0")
        assert item is not None
        assert item.state == "quarantined", "nobody came, and its caller is told"

    with caplog.at_level(logging.WARNING, "reefknot"):
        with_system(story, concurrency=MOST)
    (line,) = [one for one in caplog.messages if "no running worker has the class" in one]
    assert "m-0: no running worker has the class 'email'; did you mean 'emails'?; there are: cpu, emails" in line
