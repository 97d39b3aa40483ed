"""Workers that do not all know the same steps and classes: when a router gives up, and when it waits."""

import asyncio
import shlex
from collections.abc import Callable

import pytest
from msgspec import structs

from reefknot.audit.model.event import Quarantined, Routing
from reefknot.errors import QueueFullError
from reefknot.queue.model import admission, results
from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, Job, ResultStatus
from reefknot.queue.model.work import WorkState
from reefknot.queue.router.dispatch import NO_CLASS
from reefknot.queue.router.settings import PATIENCE_S
from reefknot.runtime.processes import process_mark
from tests.unit.queue.shops import ONE, answers, gone_process, made, ran, sent, served, stored, told
from tests.workshop import Shop, Step, work


def other() -> Step:
    return Step(name="test.other")


async def test_a_type_that_no_worker_knows_is_quarantined_with_its_answer_after_the_patience(shop: Shop) -> None:
    router = await shop.router(patience=20)
    await asyncio.sleep(60)
    began = shop.clock.now()
    answer = await router.submit(work("a"))
    await asyncio.sleep(60)
    assert not answer.done(), "without any worker it waits"
    await shop.worker("plain", other())
    await asyncio.sleep(19)
    assert not answer.done()
    (result,) = await answers(answer, within=5)
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "INVALID_INPUT")
    assert result.error_message == (
        "job.type: 'test.step' is not known here; known: test.other. No worker that knows it came within 20 s, so "
        "it is in quarantine. Start a worker with the module of this step (--module), then: reefknot quarantine "
        "requeue a"
    )
    assert shop.clock.now() - began < 90
    item = await stored(shop, "a")
    assert (item.state, item.reason, item.attempts) == (WorkState.QUARANTINED, results.UNKNOWN_TYPE, 0)
    assert [event.reason for event in await told(shop, Quarantined)] == [results.UNKNOWN_TYPE]


async def test_the_command_that_brings_it_back_can_be_pasted_into_a_shell(shop: Shop) -> None:
    router = await shop.router(patience=1)
    await shop.worker("plain", other())
    assignment = structs.replace(work("x; touch pwned"), tenant_id="$(id)")
    result = await asyncio.wait_for(await router.submit(assignment), 10)
    command = str(result.error_message).rpartition("then: ")[2]
    assert shlex.split(command)[3:] == ["x; touch pwned", "--tenant", "$(id)"]
    assert command.endswith(" 'x; touch pwned' --tenant '$(id)'")


async def test_a_worker_that_comes_late_and_knows_the_type_takes_it(shop: Shop) -> None:
    router = await shop.router()
    await shop.worker("plain", other())
    answer = await router.submit(work("a"))
    await asyncio.sleep(25)
    await shop.worker("more", other())
    await asyncio.sleep(3)
    await shop.worker("knows")
    assert (await asyncio.wait_for(answer, 5)).status is ResultStatus.SUCCESS


async def silent(shop: Shop, process: str) -> None:
    """A worker that is not heard of any more, of this process."""
    worker = made(shop, "knows", process=process)
    await worker.start()
    await asyncio.sleep(1.5)
    shop.vanish(worker)
    await asyncio.sleep(5)


async def test_a_silent_worker_whose_process_exists_may_know_the_type(shop: Shop) -> None:
    """A step may block its event loop, however long: the router has forgotten nobody who lives."""
    router = await shop.router(patience=5)
    await shop.worker("plain", other())
    await silent(shop, process_mark())
    answer = await router.submit(work("a"))
    await asyncio.sleep(330)
    assert not answer.done()
    await shop.worker("knows")
    assert (await asyncio.wait_for(answer, 5)).status is ResultStatus.SUCCESS


@pytest.mark.parametrize("whose", [gone_process, lambda: "othermachine.1.1", str])
async def test_a_silent_worker_whose_process_is_gone_is_not_waited_for(shop: Shop, whose: Callable[[], str]) -> None:
    """The control; so it is for one of another machine, of which nothing but its silence is known."""
    router = await shop.router(patience=5)
    await shop.worker("plain", other())
    await silent(shop, whose())
    (result,) = await answers(await router.submit(work("a")), within=15)
    assert result.error_code == "INVALID_INPUT"


@pytest.mark.parametrize("has_it", [True, False], ids=["it had taken the job in, and vanished", "it is paused"])
async def test_a_worker_that_knows_the_step_is_waited_for(shop: Shop, has_it: bool) -> None:
    """The only other one does not know it: that one refuses it, and that is no answer."""
    router = await shop.router()
    await shop.worker("plain", other())
    knows = await shop.worker("knows", Step(seconds=30 if has_it else 0.01), lease=5)
    await asyncio.sleep(1.5)
    if not has_it:
        knows.pause()
        await asyncio.sleep(1.5)
    answer = await router.submit(work("a"))
    await asyncio.sleep(1.5)
    if has_it:
        shop.vanish(knows)
    await asyncio.sleep(60)
    assert not answer.done()
    if has_it:
        await shop.worker("knows", Step())
    else:
        knows.resume()
    assert (await asyncio.wait_for(answer, 30)).status is ResultStatus.SUCCESS


async def test_a_paused_worker_begins_nothing_and_keeps_what_it_has_queued(shop: Shop) -> None:
    step = Step(seconds=2)
    worker = await ran(shop, step, work("runs"), work("waits"), wait=0.5, concurrency={"cpu": 1})
    worker.pause()
    await sent(shop, work("late"), wait=30)
    assert [name for name, _ in step.began] == ["runs"]
    assert shop.ack("late").reason == "draining"
    worker.resume()
    await asyncio.sleep(5)
    assert [name for name, _ in step.began] == ["runs", "waits"]


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
    router = await shop.router(patience=5, rules=admission.Rules(size=3))
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
