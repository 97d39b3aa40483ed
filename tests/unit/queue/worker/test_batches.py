"""Batches: assignments are kept, claimed and settled together, none loses by it; how long a step is taken to last."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from reefknot.audit.model.event import Admission
from reefknot.queue.model.admission import KNOWN_AFTER, Arrival
from reefknot.queue.model.messages import CANCEL, AckStatus, Cancel, ResultStatus, encode
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import Held
from reefknot.queue.worker import pool as pool_module
from reefknot.queue.worker.service import Worker
from tests.unit.queue.shops import ONE, ran, sent, stored
from tests.workshop import Shop, Step, work


class Slow:
    """A store's queue whose writes and claims take their time, as a commit does."""

    def __init__(self, work_queue: Any, *, writes: float = 0.0, claims: float = 0.0) -> None:
        self._work = work_queue
        self._writes, self._claims = writes, claims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    async def settle(self, settlements: Any) -> Any:
        await asyncio.sleep(self._writes)
        return await self._work.settle(settlements)

    async def claim(self, n: int, claim: Any) -> Any:
        await asyncio.sleep(self._claims)
        return await self._work.claim(n, claim)


class Counting(Slow):
    """A store's queue that counts calls, and can be away."""

    def __init__(self, work_queue: Any) -> None:
        super().__init__(work_queue, writes=0.01)
        self.calls: list[tuple[str, int]] = []
        self.refuses: Callable[[str, Any], bool] = lambda name, given: False

    def count(self, name: str, given: Any) -> None:
        self.calls.append((name, len(given)))
        if self.refuses(name, given):
            raise ConnectionError("not now")

    async def assign(self, items: Any, **named: Any) -> Any:
        self.count("assign", items)
        await asyncio.sleep(0.01)
        return await self._work.assign(items, **named)

    async def claim(self, n: int, claim: Any) -> Any:
        found = await super().claim(n, claim)
        if found:
            self.count("claim", found)
        return found

    async def settle(self, settlements: Any) -> Any:
        self.count("settle", settlements)
        return await super().settle(settlements)

    def sizes(self, name: str) -> list[int]:
        return [size for what, size in self.calls if what == name]


def counted(worker: Worker, shop: Shop) -> Counting:
    queue = Counting(shop.store.work)
    shop.use_queue(worker, queue)
    return queue


async def test_what_arrives_together_is_kept_in_one_step(shop: Shop) -> None:
    queue = counted(await shop.worker("w1", Step()), shop)
    await sent(shop, *(work(f"a{n}") for n in range(50)), wait=10)
    assert (queue.sizes("assign"), [one.status for one in shop.results]) == ([50], [ResultStatus.SUCCESS] * 50)
    assert [event.work_id for event in await shop.events(Admission)] == [f"a{n}" for n in range(50)]


async def test_the_same_one_twice_in_a_group_is_kept_once_and_told_twice(shop: Shop) -> None:
    step = Step()
    await ran(shop, step, work("a"), work("b"), work("a"), wait=1)
    assert ([ack.assignment_id for ack in shop.acks], len(step.began)) == (["a", "b", "a"], 2)
    assert len(await shop.events(Admission)) == 2


async def test_one_that_the_store_knows_already_leaves_no_second_event_in_its_group(shop: Shop) -> None:
    await ran(shop, Step(), work("old"), wait=1)
    await sent(shop, work("new"), work("old"), wait=1)
    assert sorted(one.assignment_id for one in shop.results) == ["new", "old", "old"]
    assert [event.work_id for event in await shop.events(Admission)] == ["old", "new"]


async def test_one_that_the_store_does_not_take_harms_no_other_of_its_group(shop: Shop) -> None:
    worker = await shop.worker("w1", Step())
    queue = counted(worker, shop)
    queue.refuses = lambda name, given: name == "assign" and any(one.id == "bad" for one in given)
    await sent(shop, work("a"), work("bad"), work("b"), wait=5)
    assert sorted(one.assignment_id for one in shop.results) == ["a", "b"]
    assert {ack.assignment_id: ack.status for ack in shop.acks} == {"a": AckStatus.ACCEPTED, "b": AckStatus.ACCEPTED}
    assert (worker.pools["cpu"].reserved, worker.pools["cpu"].depth()) == (0, 0)


async def test_one_report_that_the_store_does_not_take_harms_nobody_else_and_comes_later(shop: Shop) -> None:
    worker = await shop.worker("w1", Step())
    queue, until = counted(worker, shop), asyncio.get_running_loop().time() + 3
    queue.refuses = lambda name, given: (
        name == "settle" and any(one.id == "bad" for one in given) and asyncio.get_running_loop().time() < until
    )
    await sent(shop, work("a"), work("bad"), work("b"), wait=1)
    assert sorted(one.assignment_id for one in shop.results) == ["a", "b"]
    await asyncio.sleep(5)
    assert sorted(one.assignment_id for one in shop.results) == ["a", "b", "bad"]
    assert worker.pools["cpu"].claimed == {}


async def warm(shop: Shop, number: int = 25) -> None:
    """So that it is known how short a step is."""
    await sent(shop, *(work(f"warm{n}") for n in range(number)), wait=5)
    shop.results.clear()


async def test_short_steps_are_claimed_ahead_and_still_run_in_so_many_slots(shop: Shop) -> None:
    now: list[int] = []

    class Watching(Step):
        async def run(self, inputs: Any, context: Any) -> Any:
            now.append(now[-1] + 1 if now else 1)
            try:
                return await super().run(inputs, context)
            finally:
                now.append(now[-1] - 1)

    worker = await shop.worker("w1", Watching(seconds=0.001), concurrency={"cpu": 2})
    await warm(shop)
    queue = counted(worker, shop)
    await sent(shop, *(work(f"a{n}") for n in range(100)), wait=5)
    assert (len(shop.results), max(now)) == (100, 2)
    assert 2 < max(queue.sizes("claim")) <= 2 + 10, "what two slots run in five milliseconds"
    assert max(queue.sizes("settle")) > 2


async def test_long_steps_are_never_claimed_ahead(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=0.02), concurrency={"cpu": 2})
    await warm(shop)
    queue = counted(worker, shop)
    await sent(shop, *(work(f"a{n}") for n in range(20)), wait=5)
    assert len(shop.results) == 20
    assert max(queue.sizes("claim")) == 2


async def one_prefetched(shop: Shop, step: Step, **changes: Any) -> Worker:
    """`slow` is in the only slot, `next` is claimed and waits for it."""
    worker = await shop.worker("w1", step, concurrency={"cpu": 1}, **changes)
    await warm(shop)
    await shop.send(work("slow", {"seconds": 5.0}), work("next"))
    pool = worker.pools["cpu"]
    assert (list(pool.running), list(pool.prefetched), pool.depth()) == (["slow"], ["next"], 1)
    return worker


async def test_prefetched_work_can_be_cancelled(shop: Shop) -> None:
    step = Step(seconds=0.0005)
    worker = await one_prefetched(shop, step)
    await shop.transport.publish(CANCEL, encode(Cancel("next", "no need")))
    await asyncio.sleep(0.1)
    assert shop.result("next").status is ResultStatus.CANCELLED
    assert (worker.pools["cpu"].depth(), list(worker.pools["cpu"].claimed)) == (0, ["slow"])
    await asyncio.sleep(10)
    assert (step.times("next"), shop.result("slow").status) == ([], ResultStatus.SUCCESS)


async def test_prefetched_work_goes_back_when_the_worker_ends_and_spends_nothing(shop: Shop) -> None:
    step = Step(seconds=0.0005)
    worker = await one_prefetched(shop, step)
    shop.members.remove(worker)
    await worker.stop()
    item = await stored(shop, "next")
    assert (item.state, item.attempts, item.crashes) == (WorkState.PENDING, 0, 0)
    await shop.worker("w1", step)
    await asyncio.sleep(10)
    assert len(step.times("next")) == 1


async def test_prefetched_work_of_a_paused_worker_goes_back_and_is_run_after_the_pause(shop: Shop) -> None:
    """Nobody is at it for as long as the pause lasts: to others it has to look like what it is."""
    step = Step(seconds=0.0005)
    worker = await one_prefetched(shop, step)
    worker.pause()
    await asyncio.sleep(3)
    item = await stored(shop, "next")
    assert (item.state, item.attempts, item.interruptions) == (WorkState.PENDING, 0, 1)
    await asyncio.sleep(10)
    assert step.times("next") == []
    worker.resume()
    await asyncio.sleep(1)
    assert len(step.times("next")) == 1


async def test_a_slot_whose_step_is_cancelled_runs_what_is_prefetched(shop: Shop) -> None:
    await one_prefetched(shop, Step(seconds=0.0005))
    await shop.transport.publish(CANCEL, encode(Cancel("slow")))
    await asyncio.sleep(0.1)
    assert shop.result("slow").status is ResultStatus.CANCELLED
    assert shop.result("next").status is ResultStatus.SUCCESS


async def test_prefetched_work_whose_lease_was_lost_is_not_run(shop: Shop) -> None:
    step = Step(seconds=0.0005)
    worker = await one_prefetched(shop, step, lease=3.0)
    await shop.store.work.cancel("next")
    await asyncio.sleep(2.5)
    assert not worker.pools["cpu"].prefetched
    await asyncio.sleep(10)
    assert step.times("next") == []


async def test_nothing_is_claimed_ahead_before_steps_were_timed(shop: Shop) -> None:
    """After a crash it is one at a time again: whoever is claimed with a poison one counts a crash with it."""
    worker = await shop.worker("w1", Step(seconds=0.0005), concurrency={"cpu": 1})
    assert worker.pools["cpu"].ahead() == 0
    await warm(shop)
    assert 0 < worker.pools["cpu"].ahead() <= pool_module.MOST_AHEAD


def mean_ms(worker: Worker) -> float:
    return worker.pools["cpu"].view(Arrival(), draining=False).mean_service_ms


async def test_the_time_that_a_claim_takes_is_part_of_a_steps_time_until_claims_are_made_ahead(shop: Shop) -> None:
    """A slot that waits for the store cannot run anything else. Reports go there beside the next claim."""
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency=ONE)
    shop.use_queue(worker, Slow(shop.store.work, writes=0.05, claims=0.05))
    await sent(shop, *(work(f"a{n}") for n in range(60)), wait=0.16 * KNOWN_AFTER)
    assert 145 <= mean_ms(worker) <= 160
    await asyncio.sleep(0.11 * (60 - KNOWN_AFTER))
    assert len(shop.results) == 60, "no slot waits for a claim any more"
    assert mean_ms(worker) <= 130, "it follows, slowly"


@pytest.mark.parametrize(("claim_s", "ahead"), [(0.0, 0), (0.001, 0), (0.01, 1), (0.03, 2), (0.5, 4)])
async def test_as_many_are_claimed_ahead_as_end_during_a_claim(shop: Shop, claim_s: float, ahead: int) -> None:
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency={"cpu": 4})
    shop.use_queue(worker, Slow(shop.store.work, claims=claim_s))
    await sent(shop, *(work(f"a{n}") for n in range(100)), wait=60)
    assert worker.pools["cpu"].ahead() == ahead


async def test_reports_that_the_store_is_slow_to_take_are_part_of_a_steps_time(shop: Shop) -> None:
    """Only so many may be on their way; then a slot waits for them, and says so."""
    worker = await shop.worker("w1", Step(seconds=0.1), concurrency=ONE)
    shop.use_queue(worker, Slow(shop.store.work, writes=1.0))
    await shop.send(*(work(f"a{n}") for n in range(60)))
    most = 0
    for _ in range(7000):
        await asyncio.sleep(0.01)
        most = max(most, len(worker.pools["cpu"].claimed))
    assert (len(shop.results), most) == (60, 2), "one in the slot, one on its way"
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
