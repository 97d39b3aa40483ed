"""Workers that do not all know the same steps: when a router gives up, and when it waits for one who knows."""

from __future__ import annotations

import asyncio

from reefknot.core.messages import ResultStatus
from tests.workshop import Shop, Step, with_shop, work


def other() -> Step:
    return Step(name="test.other")


def test_a_step_that_nobody_knows_ends_at_once() -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router()
        await shop.worker("plain", other())
        await asyncio.sleep(1.5)
        result = await asyncio.wait_for(await router.submit(work("a")), 5)
        assert (result.status, result.error_code) == (ResultStatus.ERROR, "INVALID_INPUT")

    with_shop(story)


def test_what_a_worker_that_knew_the_step_took_in_waits_for_it_to_come_back() -> None:
    """Its worker vanished in the middle, and the only other one does not know the step."""

    async def story(shop: Shop) -> None:
        router = await shop.router()
        await shop.worker("plain", other())
        knows = await shop.worker("knows", Step(seconds=30), lease=5)
        await asyncio.sleep(1.5)
        answer = await router.submit(work("a"))
        await asyncio.sleep(1.5)
        shop.vanish(knows)
        await asyncio.sleep(60)
        assert not answer.done(), "the other one refused it, and that is no answer"

        await shop.worker("knows", Step())
        assert (await asyncio.wait_for(answer, 30)).status is ResultStatus.SUCCESS

    with_shop(story)


def test_a_worker_that_is_paused_counts_as_one_who_may_know_the_step() -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router()
        await shop.worker("plain", other())
        knows = await shop.worker("knows")
        await asyncio.sleep(1.5)
        knows.pause()
        await asyncio.sleep(1.5)
        answer = await router.submit(work("a"))
        await asyncio.sleep(30)
        assert not answer.done()

        knows.resume()
        assert (await asyncio.wait_for(answer, 10)).status is ResultStatus.SUCCESS

    with_shop(story)


def test_a_paused_worker_begins_nothing_and_keeps_what_it_has_queued() -> None:
    async def story(shop: Shop) -> None:
        step = Step(seconds=2)
        worker = await shop.worker("w1", step, concurrency={"cpu": 1})
        await shop.send(work("runs"), work("waits"))
        await asyncio.sleep(0.5)
        worker.pause()
        await shop.send(work("late"))
        await asyncio.sleep(30)
        assert [name for name, _ in step.began] == ["runs"]
        assert shop.ack("late").reason == "draining"

        worker.resume()
        await asyncio.sleep(5)
        assert [name for name, _ in step.began] == ["runs", "waits"]

    with_shop(story)
