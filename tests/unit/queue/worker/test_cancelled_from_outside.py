"""A step that cancels other tasks of the loop: its neighbours go back and run again, and the worker stays whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reefknot.queue.model.messages import ResultStatus, StepResult
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker.pool import Pool
from reefknot.queue.worker.service import Worker
from reefknot.runtime.tasks import Services
from tests.unit.queue.shops import sent, stored
from tests.workshop import OK, Shop, Step, work


def cancel_all(but: set[asyncio.Task[Any]]) -> None:
    for task in asyncio.all_tasks() - but:
        task.cancel()


class Vandal(Step):
    """A step that cancels every task of the worker but its own, each time it runs."""

    def __init__(self, spared: set[asyncio.Task[Any]], *, itself: bool = False) -> None:
        super().__init__(name="vandal")
        self._spared = spared
        self._itself = itself

    async def run(self, inputs: Any, context: Any) -> StepResult:
        self.began.append((context.assignment_id, asyncio.get_running_loop().time()))
        mine = asyncio.current_task()
        assert mine is not None
        cancel_all(self._spared if self._itself else self._spared | {mine})
        await asyncio.sleep(0)
        return OK


async def vandalised(shop: Shop, *, itself: bool = False) -> tuple[Worker, Step]:
    """Three neighbours of ten seconds each, and one step that cancels everything of the worker after a second."""
    spared = asyncio.all_tasks()
    step = Step(seconds=10)
    worker = await shop.worker("w1", step, Vandal(spared, itself=itself), concurrency={"cpu": 4})
    await sent(shop, *(work(f"n{n}") for n in range(3)), wait=1)
    await shop.send(work("bad", job="vandal"))
    return worker, step


async def test_neighbours_of_a_step_that_cancels_tasks_go_back_and_succeed_as_an_interruption(shop: Shop) -> None:
    worker, step = await vandalised(shop)
    await asyncio.sleep(0.5)
    items = [await shop.store.work.get(f"n{n}") for n in range(3)]
    assert [(one.state, one.attempts, one.interruptions, one.crashes) for one in items if one is not None] == [
        (WorkState.RUNNING, 0, 1, 0)
    ] * 3
    assert len(worker.pools["cpu"].running) == 3
    await asyncio.sleep(15)
    ends = {one.assignment_id: one.status for one in shop.results}
    assert ends == dict.fromkeys(("n0", "n1", "n2", "bad"), ResultStatus.SUCCESS)
    assert len(step.times("n0")) == 2


async def test_the_worker_goes_on_with_all_slots_and_all_services(shop: Shop) -> None:
    worker, _ = await vandalised(shop)
    await asyncio.sleep(30)
    assert len(worker.services.names) == 2 * len(worker.pools) + 6
    await sent(shop, *(work(f"later-{n}") for n in range(4)), wait=1)
    assert len(worker.pools["cpu"].running) == 4
    await asyncio.sleep(200)  # longer than a lease
    assert [shop.result(f"later-{n}").status for n in range(4)] == [ResultStatus.SUCCESS] * 4
    assert worker.claims() == []


async def test_a_step_that_cancels_itself_too_becomes_suspect_and_does_not_run_for_ever(shop: Shop) -> None:
    await vandalised(shop, itself=True)
    await asyncio.sleep(1000)
    bad = await stored(shop, "bad")
    assert (bad.state, bad.crashes) == (WorkState.QUARANTINED, 3)
    assert {shop.result(f"n{n}").status for n in range(3)} == {ResultStatus.SUCCESS}


async def test_without_handing_back_they_would_stay_running(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the slots forget their work, and the services of the worker stay cancelled."""
    monkeypatch.setattr(Pool, "_left", lambda self, held, task, **_: self.settled(held.id, held.fence))
    monkeypatch.setattr(Services, "_ended", lambda *_: None)
    await vandalised(shop)
    await asyncio.sleep(1000)
    item = await stored(shop, "n0")
    assert item.state is WorkState.RUNNING
    shop.members.clear()
