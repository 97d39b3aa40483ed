"""Work that no worker here could take: it goes to quarantine after a while and says why, or waits for a reason."""

import asyncio

import pytest

from reefknot.audit.model.event import Routing
from reefknot.errors import QueueFullError
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, Job, ResultStatus
from reefknot.queue.model.work import WorkState
from reefknot.queue.router.dispatch import NO_CLASS
from reefknot.queue.router.settings import PATIENCE_S
from tests.unit.queue.shops import answers, served, stored, told
from tests.workshop import Shop, Step, work

ONE = {"cpu": 1}


def of_class(name: str, assignment_id: str = "a", deadline_ms: int | None = None) -> ExecAssignment:
    options = AssignmentOptions(deadline_ms=deadline_ms)
    return ExecAssignment(assignment_id, "r", Job("test.step"), resource_class=name, options=options)


async def test_a_class_that_no_worker_has_goes_to_quarantine_with_its_answer(shop: Shop) -> None:
    router = await shop.router(patience=7)
    await shop.worker("w1", Step(), concurrency={"cpu": 1, "io": 1})
    await asyncio.sleep(1.1)
    began = asyncio.get_running_loop().time()
    (result,) = await answers(await router.submit(of_class("tpu")), within=10)
    assert asyncio.get_running_loop().time() - began == pytest.approx(7, abs=0.5)
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "RESOURCE_UNAVAILABLE")
    for word in ("'tpu'", "cpu, io", "worker.queue.v2.resource_pools", "then: reefknot quarantine requeue a"):
        assert word in (result.error_message or "")
    (event,) = [one for one in await told(shop, Routing) if one.work_id == "a"]
    assert (event.worker_id, event.inputs["resource_class"], event.inputs["classes"]) == (None, "tpu", ["cpu", "io"])
    item = await stored(shop, "a")
    assert (item.state, item.reason, item.attempts, len(router.table)) == (WorkState.QUARANTINED, NO_CLASS, 0, 0)


async def test_a_worker_that_restarts_without_the_class_leaves_its_queue_to_others(shop: Shop) -> None:
    router = await shop.router(patience=60)
    first = await shop.worker("w1", Step(seconds=30), concurrency={"cpu": 1, "tpu": 1})
    await asyncio.sleep(1.1)
    futures = [await router.submit(of_class("tpu", name)) for name in ("a", "b")]
    await asyncio.sleep(1)
    shop.members.remove(first)
    await first.stop()
    await shop.worker("w1", Step(), concurrency=ONE)
    await asyncio.sleep(20)
    assert not any(one.done() for one in futures)
    await shop.worker("w2", Step(), concurrency={"tpu": 1})
    assert [(one.status, one.worker_id) for one in await answers(*futures)] == [(ResultStatus.SUCCESS, "w2")] * 2


async def test_everybody_is_waited_for_as_long_as_the_first_one_was(shop: Shop) -> None:
    router = await shop.router(patience=5)
    await shop.worker("w1", Step(), concurrency=ONE)
    first = await router.submit(of_class("tpu", "a"))
    await asyncio.sleep(4)
    second = await router.submit(of_class("tpu", "b"))
    await asyncio.sleep(2)
    assert (first.done(), second.done()) == (True, False)
    await asyncio.sleep(4)
    assert second.done()


async def test_a_worker_of_the_class_that_comes_in_time_gets_it(shop: Shop) -> None:
    router = await shop.router(patience=5)
    await shop.worker("w1", Step(), concurrency=ONE)
    future = await router.submit(of_class("tpu"))
    await asyncio.sleep(4)
    await shop.worker("w2", Step(), concurrency={"tpu": 1})
    (result,) = await answers(future, within=5)
    assert result.worker_id == "w2"


async def test_a_worker_of_the_class_that_was_there_is_waited_for_until_it_is_forgotten(shop: Shop) -> None:
    """By what it had accepted, and by what comes later."""
    router = await shop.router(patience=7)
    await shop.worker("w1", Step(), concurrency=ONE)
    other = await shop.worker("w2", Step(seconds=60), concurrency={"tpu": 1})
    await asyncio.sleep(2)
    futures = [await router.submit(of_class("tpu", "accepted"))]
    await asyncio.sleep(1)
    shop.vanish(other)
    await asyncio.sleep(5)
    futures.append(await router.submit(of_class("tpu", "later")))
    await asyncio.sleep(200)
    assert not any(one.done() for one in futures), "it may come back"
    assert {one.error_code for one in await answers(*futures, within=200)} == {"RESOURCE_UNAVAILABLE"}


async def test_without_any_worker_work_waits_and_the_next_caller_hears_that_the_queue_is_full(shop: Shop) -> None:
    router = await shop.router(patience=5, rules=Rules(size=3))
    futures = [await router.submit(of_class("tpu", f"a{n}")) for n in range(3)]
    await asyncio.sleep(100)
    assert not any(one.done() for one in futures)
    with pytest.raises(QueueFullError) as full:
        await router.submit(of_class("tpu", "more"))
    assert full.value.limit == 3


async def test_with_the_shared_subject_nobody_knows_who_listens_and_it_is_sent(shop: Shop) -> None:
    router = await shop.router(patience=2, shared_subject=True)
    await shop.worker("w1", Step(), concurrency=ONE)
    await asyncio.sleep(1.1)
    future = await router.submit(of_class("tpu"))
    await asyncio.sleep(8)
    assert not future.done()


async def test_a_deadline_that_is_shorter_than_the_patience_comes_first(shop: Shop) -> None:
    router = await served(shop, Step(), concurrency=ONE)
    (result,) = await answers(await router.submit(of_class("tpu", deadline_ms=2000)), within=PATIENCE_S / 2)
    assert result.status is ResultStatus.TIMEOUT


async def test_a_worker_that_began_again_is_asked_for_a_step_that_it_did_not_know(shop: Shop) -> None:
    router = await shop.router()
    first = await shop.worker("w1", Step(name="other"), concurrency=ONE)
    busy = await shop.worker("w2", Step(), concurrency=ONE)
    await asyncio.sleep(1.1)
    shop.vanish(busy)  # it is not known to be gone yet: the work waits for it
    future = await router.submit(work("a"))
    await asyncio.sleep(1.5)
    shop.vanish(first)
    await shop.worker("w1", Step(), concurrency=ONE)
    (result,) = await answers(future, within=30)
    assert (result.status, result.worker_id) == (ResultStatus.SUCCESS, "w1")
