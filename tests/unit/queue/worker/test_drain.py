"""A worker that is drained leaves what it has queued to the others, and loses nothing when there is nobody else."""

import asyncio

import pytest

from reefknot.audit.model.event import Requeued
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.messages import AckStatus, ExecResult, ResultStatus
from reefknot.queue.model.work import WorkState
from reefknot.queue.router.service import Router
from reefknot.queue.worker.closing import Drain
from reefknot.queue.worker.service import Worker
from tests.unit.queue.shops import ran, sent, stored, told
from tests.workshop import OK, REFUSED, Shop, Step, work

ONE = {"cpu": 1}
RETRY = {"max_attempts": 3, "backoff_ms": 20_000}


async def jobs(shop: Shop, number: int) -> list[asyncio.Future[ExecResult]]:
    """So many jobs, half a second after they were submitted; the workers have been heard of before."""
    router = next((one for one in shop.members if isinstance(one, Router)), None) or await shop.router()
    await asyncio.sleep(2)
    futures = [await router.submit(work(f"j{n}")) for n in range(number)]
    await asyncio.sleep(0.5)
    return futures


async def two_workers_and_ten_jobs(shop: Shop) -> tuple[Worker, list[asyncio.Future[ExecResult]]]:
    """Each worker runs one at a time, 1.5 s each, and has four more queued."""
    await shop.router()
    first, _ = [await shop.worker(name, Step(seconds=1.5), concurrency=ONE) for name in ("w1", "w2")]
    return first, await jobs(shop, 10)


async def test_what_a_drained_worker_has_queued_is_done_by_the_others(shop: Shop) -> None:
    first, futures = await two_workers_and_ten_jobs(shop)
    assert first.pools["cpu"].queue.depth == 4
    assert await first.drain(30) == 0
    await asyncio.sleep(15)
    assert [one.result().status for one in futures] == [ResultStatus.SUCCESS] * 10
    assert {(await stored(shop, f"j{n}")).attempts for n in range(10)} == {1}
    known = [event.work_id for event in await told(shop, Requeued) if event.reason == "its worker is draining"]
    assert len(known) == len(set(known)) == 4


async def test_a_worker_that_keeps_its_queue_would_be_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without offer and recall the same work never ends, while the other worker has nothing to do."""
    monkeypatch.setattr(Drain, "offer", lambda self: asyncio.sleep(0, 0))
    monkeypatch.setattr(Router, "_recall_once", lambda self: asyncio.sleep(0))
    first, futures = await two_workers_and_ten_jobs(shop)
    await first.drain(30)
    await asyncio.sleep(60)
    assert sum(one.done() for one in futures) == 6


async def test_a_retry_that_waits_goes_over_with_its_due_time_and_its_attempts(shop: Shop) -> None:
    router = await shop.router()
    step = Step(REFUSED, OK)
    first = await shop.worker("w1", step)
    await asyncio.sleep(1.5)
    future = await router.submit(work("a", retry=RETRY, timeout_ms=100_000))
    await asyncio.sleep(1)
    before = await stored(shop, "a")
    assert (before.attempts, before.state) == (1, WorkState.PENDING)
    second = await shop.worker("w2", step)
    await asyncio.sleep(1.5)
    await first.drain(5)
    await asyncio.sleep(1)
    after = await stored(shop, "a")
    assert (after.attempts, after.due_at, after.resource_class) == (1, before.due_at, "cpu@w2")
    assert second.pools["cpu"].queue.later == 1
    assert (await future).retries_used == 1
    began = step.times("a")
    assert began[1] * 1000 >= before.due_at - shop.clock.wall() * 1000 + shop.clock.now() * 1000 - 1


@pytest.mark.parametrize("comes_back", ["restart", "resume"])
async def test_without_another_worker_it_is_there_when_the_worker_comes_back(shop: Shop, comes_back: str) -> None:
    await shop.router()
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    futures = await jobs(shop, 4)
    await worker.drain(30)
    await asyncio.sleep(20)
    assert sum(one.done() for one in futures) == 1
    assert worker.pools["cpu"].depth() == 0
    if comes_back == "resume":
        worker.resume()
    else:
        await worker.stop()
        shop.members.remove(worker)
        await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await asyncio.sleep(4)
    assert [one.result().status for one in futures] == [ResultStatus.SUCCESS] * 4


async def test_the_baseline_says_nothing_and_the_router_brings_its_queue_back(shop: Shop) -> None:
    """A rejected ack without a reason would end the work: the baseline has no word for it."""
    await shop.router()
    first = await shop.worker("w1", Step(seconds=1), concurrency=ONE, queue_v2=False)
    futures = await jobs(shop, 3)
    assert [(await stored(shop, f"j{n}")).resource_class for n in range(3)] == ["cpu@w1"] * 3
    await shop.worker("w2", Step(seconds=1), concurrency=ONE, queue_v2=False)
    await first.drain(10)
    await asyncio.sleep(15)
    assert [one.result().status for one in futures] == [ResultStatus.SUCCESS] * 3
    assert {ack.status for ack in shop.acks} == {AckStatus.ACCEPTED}
    assert [(await stored(shop, f"j{n}")).resource_class for n in (1, 2)] == ["cpu@w2"] * 2


async def test_only_a_worker_with_room_takes_over_what_was_left(shop: Shop) -> None:
    first = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    second = await shop.worker("w2", Step(seconds=100), concurrency=ONE, rules=Rules(size=2))
    await shop.send(*(work(f"j{n}") for n in range(4)))
    await first.drain(10)
    await shop.send(*(work(name) for name in ("b", "c")), to="w2")
    await shop.send(work("j1"), to="w2")
    assert ((await stored(shop, "j1")).resource_class, second.pools["cpu"].depth()) == ("cpu@w2", 2)
    await shop.send(work("j2"), to="w2")
    assert (shop.ack("j2").status, shop.ack("j2").reason) == ("rejected", "queue_full")
    assert (await stored(shop, "j2")).resource_class == "cpu@w1"


async def test_a_drained_worker_does_not_take_its_own_queue_back_when_it_is_asked(shop: Shop) -> None:
    """The router did not hear that it was given up, and asks again."""
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await shop.send(work("a"), work("b"))
    await worker.drain(10)
    await shop.send(work("b"))
    assert (shop.ack("b").status, shop.ack("b").reason) == (AckStatus.REJECTED, "draining")
    await shop.send(work("a"))
    assert shop.ack("a").status is AckStatus.ACCEPTED
    assert [one.assignment_id for one in shop.results] == ["a", "a"]


async def test_what_comes_in_or_fails_while_it_drains_is_left_to_the_others_too(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(REFUSED, seconds=1), concurrency=ONE)
    await sent(shop, work("a", retry=RETRY, timeout_ms=100_000), wait=0.5)
    await worker.drain(30)
    assert (shop.ack("a").status, shop.ack("a").reason) == (AckStatus.REJECTED, "draining")
    assert ((await stored(shop, "a")).attempts, worker.pools["cpu"].queue.depth) == (1, 0)


async def test_a_pause_keeps_every_place_and_counts_all_of_them(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await shop.send(work("a"), work("b"), work("c"))
    worker.pause()
    await asyncio.sleep(5)
    assert [one.assignment_id for one in shop.results] == ["a"]
    assert worker.pools["cpu"].depth() == 2
    assert {ack.status for ack in shop.acks} == {AckStatus.ACCEPTED}
    assert not worker.snapshot().leaving


async def test_what_was_claimed_ahead_goes_back_before_the_running_step_ends(shop: Shop) -> None:
    worker = await ran(shop, Step(seconds=0.0001), *(work(f"j{n}") for n in range(30)), wait=1, concurrency=ONE)
    assert worker.pools["cpu"].ahead() > 0
    await shop.send(work("long", {"seconds": 5}), work("b"), work("c"))
    assert len(worker.pools["cpu"].prefetched) > 0
    draining = asyncio.create_task(worker.drain(30))
    await asyncio.sleep(1)
    for name in ("b", "c"):
        assert shop.ack(name).reason == "draining"
        item = await stored(shop, name)
        assert (item.state, item.attempts) == (WorkState.PENDING, 0)
    await draining
    assert shop.result("long").status is ResultStatus.SUCCESS


async def test_a_store_that_does_not_answer_holds_no_drain_up_for_ever(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await shop.send(work("a"), work("b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.store.work, "find", lambda **_: asyncio.sleep(1e6, []))
        began = shop.clock.now()
        await worker.drain(5)
        assert shop.clock.now() - began < 65
    worker.resume()
    await asyncio.sleep(3)
    assert shop.result("b").status is ResultStatus.SUCCESS
