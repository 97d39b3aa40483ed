"""Workers that do not all know the same steps: when a router gives up, and when it waits for one who knows."""

import asyncio
import shlex
from collections.abc import Callable

import pytest
from msgspec import structs

from reefknot.audit.model.event import Quarantined
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.model.results import UNKNOWN_TYPE
from reefknot.queue.model.work import WorkState
from reefknot.runtime.processes import process_mark
from tests.unit.queue.shops import answers, gone_process, made, ran, sent, stored, told
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
    assert (item.state, item.reason, item.attempts) == (WorkState.QUARANTINED, UNKNOWN_TYPE, 0)
    assert [event.reason for event in await told(shop, Quarantined)] == [UNKNOWN_TYPE]


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
