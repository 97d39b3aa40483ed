"""What a worker believes about how long a step takes: admission by time is only as good as this."""

import asyncio
from typing import Any, cast

import pytest

from reefknot.queue.model.admission import KNOWN_AFTER, Arrival
from reefknot.queue.port.work_queue import Held
from reefknot.queue.worker.service import Worker
from tests.unit.queue.shops import sent
from tests.workshop import Shop, Step, work

ONE = {"cpu": 1}


class SlowStore:
    """Every report takes its time, as a commit does."""

    def __init__(self, work_queue: Any, seconds: float, *, claims: float) -> None:
        self._work = work_queue
        self._seconds = seconds
        self._claims = claims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    async def settle(self, settlements: Any) -> Any:
        await asyncio.sleep(self._seconds)
        return await self._work.settle(settlements)

    async def claim(self, n: int, claim: Any) -> Any:
        await asyncio.sleep(self._claims)
        return await self._work.claim(n, claim)


def mean_ms(worker: Worker) -> float:
    return worker.pools["cpu"].view(Arrival(), draining=False).mean_service_ms


async def test_the_time_that_a_claim_takes_is_part_of_a_steps_time_until_claims_are_made_ahead(shop: Shop) -> None:
    """A slot that waits for the store cannot run anything else. Reports go there beside the next claim."""
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency=ONE)
    slow: Any = SlowStore(shop.store.work, 0.05, claims=0.05)
    shop.use_queue(worker, slow)
    await sent(shop, *(work(f"a{n}") for n in range(60)), wait=0.16 * KNOWN_AFTER)
    assert 145 <= mean_ms(worker) <= 160
    await asyncio.sleep(0.11 * (60 - KNOWN_AFTER))
    assert len(shop.results) == 60, "no slot waits for a claim any more"
    assert mean_ms(worker) <= 130, "it follows, slowly"


@pytest.mark.parametrize(("claim_s", "ahead"), [(0.0, 0), (0.001, 0), (0.01, 1), (0.03, 2), (0.5, 4)])
async def test_as_many_are_claimed_ahead_as_end_during_a_claim(shop: Shop, claim_s: float, ahead: int) -> None:
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency={"cpu": 4})
    shop.use_queue(worker, cast(Any, SlowStore(shop.store.work, 0.0, claims=claim_s)))
    await sent(shop, *(work(f"a{n}") for n in range(100)), wait=60)
    assert worker.pools["cpu"].ahead() == ahead


async def test_reports_that_the_store_is_slow_to_take_are_part_of_a_steps_time(shop: Shop) -> None:
    """Only so many may be on their way; then a slot waits for them, and says so."""
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency=ONE)
    slow: Any = SlowStore(shop.store.work, 1.0, claims=0.0)
    shop.use_queue(worker, slow)
    await shop.send(*(work(f"a{n}") for n in range(60)))
    most = 0
    for _ in range(7000):
        await asyncio.sleep(0.01)
        most = max(most, len(worker.pools["cpu"].claimed))
    assert len(shop.results) == 60
    assert most == 2, "one in the slot, one on its way"
    assert mean_ms(worker) >= 900


async def test_work_that_came_too_late_does_not_talk_the_time_down(shop: Shop) -> None:
    """Else a full queue of it would let in more that comes too late."""
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency=ONE)
    await shop.send(*(work(f"a{n}") for n in range(30)))
    await shop.send(*(work(f"late{n}", deadline_ms=7000) for n in range(30)))
    await shop.send(work("longer", {"seconds": 0.1}))
    before = mean_ms(worker)
    await asyncio.sleep(20)
    known = worker.pools["cpu"].view(Arrival(), draining=False).service_times_known
    assert before < 0.001
    assert 99 <= mean_ms(worker) <= 110
    assert known == 61
    await sent(shop, work("block", {"seconds": 3.0}), *(work(f"x{n}", deadline_ms=400) for n in range(10)), wait=5)
    assert {one.status.value for one in shop.results if one.assignment_id.startswith("x")} == {"timeout"}
    assert worker.pools["cpu"].view(Arrival(), draining=False).service_times_known == known + 1, "only the one that ran"


async def test_a_slot_whose_report_is_on_its_way_is_not_free_for_an_arrival(shop: Shop) -> None:
    """The work may come back for another attempt, and then needs its place."""
    pool = (await shop.worker("w1", Step(), concurrency=ONE)).pools["cpu"]
    pool.reserved = 1
    assert pool.depth() == 0, "the free slot takes it at once"
    pool.claimed["reported"] = Held("reported", "w1", 1)
    assert pool.depth() == 1
    pool.claimed.clear()
    pool.reserved = 0
