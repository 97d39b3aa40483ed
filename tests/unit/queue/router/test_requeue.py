"""A person requeues what failed: the new result takes the old one's place, for everybody who asks."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from reefknot.queue.client import Client
from reefknot.queue.model.messages import RESULT, ExecResult, ResultStatus, encode
from reefknot.queue.model.transitions import Requeue
from reefknot.queue.port.work_queue import EVERYTHING, WorkFilter
from reefknot.queue.router import service, submissions
from tests.unit.queue.shops import answers, served
from tests.workshop import DENIED, OK, Shop, Step, work


async def failed_once(shop: Shop, step: Step, **options: Any) -> Client:
    """One assignment in quarantine, with its failure answered; the next attempt would succeed."""
    await served(shop, step, quarantine_failed=True)
    client = Client(shop.store, shop.clock)
    assert (await (await client.hand_in(work("a", **options))).result()).status is ResultStatus.ERROR
    step.outcomes = (OK,)
    return client


async def requeued(shop: Shop, client: Client) -> ExecResult:
    """The result that a caller gets after a person has requeued it."""
    assert await shop.store.quarantine.requeue(EVERYTHING, who="ann") == ["a"]
    return await (await client.hand_in(work("a"))).result(timeout=60)


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_callers_get_the_new_result_and_there_is_no_old_one_any_more(shop: Shop) -> None:
    step = Step(DENIED, seconds=2)
    client = await failed_once(shop, step)
    assert await shop.store.quarantine.requeue(EVERYTHING, who="ann") == ["a"]
    handle = await client.hand_in(work("a"))
    assert await handle.status() in ("pending", "running")
    early, late = asyncio.create_task(handle.result(timeout=30)), await handle.result(timeout=30)
    assert (late.status, (await early).status) == (ResultStatus.SUCCESS, ResultStatus.SUCCESS)
    assert (len(step.began), await handle.status()) == (2, "succeeded")


async def test_who_submits_the_same_again_to_a_router_waits_for_the_new_result(shop: Shop) -> None:
    await failed_once(shop, Step(DENIED, seconds=2))
    (router,) = [one for one in shop.members if isinstance(one, service.Router)]
    await shop.store.quarantine.requeue(EVERYTHING, who="ann")
    (result,) = await answers(await router.submit(work("a")), within=30)
    assert result.status is ResultStatus.SUCCESS


async def test_it_fails_again_and_that_is_the_result_then(shop: Shop) -> None:
    step = Step(DENIED)
    client = await failed_once(shop, step)
    step.outcomes = (DENIED,)
    assert (await requeued(shop, client)).status is ResultStatus.ERROR
    assert len(step.began) == 2
    assert [item.id for item in await shop.store.quarantine.find()] == ["a"]


async def test_it_has_all_of_its_deadline_again(shop: Shop) -> None:
    client = await failed_once(shop, Step(DENIED), deadline_ms=5000)
    await asyncio.sleep(600)
    assert (await requeued(shop, client)).status is ResultStatus.SUCCESS


async def test_its_worker_is_gone_and_another_one_does_it(shop: Shop) -> None:
    step = Step(DENIED)
    client = await failed_once(shop, step)
    (worker,) = [one for one in shop.members if not isinstance(one, service.Router)]
    shop.vanish(worker)
    await shop.worker("w2", step)
    await asyncio.sleep(5)
    result = await requeued(shop, client)
    assert (result.status, result.worker_id) == (ResultStatus.SUCCESS, "w2")


async def retried(shop: Shop) -> asyncio.Future[object]:
    """A job that failed and was retried; its worker does not begin it, and the old result is sent once more."""
    router = await shop.router()
    worker = await shop.worker("w1", Step(ValueError("no")))
    await asyncio.sleep(1.5)
    failed = await asyncio.wait_for(await router.submit(work("a")), 30)
    assert failed.status is ResultStatus.ERROR
    worker.pause()
    await asyncio.sleep(1.5)
    assert await shop.store.work.recall(["cpu@w1"]) == 0
    assert await shop.store.work.change(WorkFilter(ids=("a",)), Requeue("ann")) == ["a"]
    assert await shop.store.work.recall(["cpu@w1"]) == 1
    answer: asyncio.Future[object] = await router.submit(work("a"))  # type: ignore[assignment]
    await asyncio.sleep(1)
    assert router.table.get("a") is not None
    await shop.transport.publish(RESULT, encode(structs.replace(failed, worker_id="w1")))
    await asyncio.sleep(1)
    worker.resume()
    return answer


@pytest.mark.parametrize("careless", [False, True], ids=["no one", "control: without the look at its time"])
async def test_a_late_result_of_an_earlier_generation_answers_no_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, careless: bool
) -> None:
    if careless:
        monkeypatch.setattr(submissions, "requeued_at", lambda item: 0)
    assert (await retried(shop)).done() is careless
