"""A job that a person runs again, and a result of its earlier generation that arrives late."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from reefknot.queue.model.messages import RESULT, ResultStatus, encode
from reefknot.queue.model.work import WorkItem, requeued_at
from reefknot.queue.router import submissions
from tests.workshop import Shop, Step, work


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
    assert await shop.store.work.retry(["a"], who="ann") == ["a"]
    assert await shop.store.work.recall(["cpu@w1"]) == 1
    answer: asyncio.Future[object] = await router.submit(work("a"))  # type: ignore[assignment]
    await asyncio.sleep(1)
    assert router.table.get("a") is not None
    await shop.transport.publish(RESULT, encode(structs.replace(failed, worker_id="w1")))
    await asyncio.sleep(1)
    worker.resume()
    return answer


async def test_a_late_result_of_an_earlier_generation_answers_nobody(shop: Shop) -> None:
    answer = await retried(shop)
    assert not answer.done()


async def test_without_the_look_at_its_time_it_would(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""

    def never(item: WorkItem) -> int:
        return 0

    assert requeued_at is not never
    monkeypatch.setattr(submissions, "requeued_at", never)
    answer = await retried(shop)
    assert answer.done()
