"""Workers over stores of their own: the router keeps what they answer, and holds on to its claim until then."""

import asyncio
from typing import Any, cast

import pytest

from reefknot.audit.model.event import Requeued
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ACK, ASSIGN, Heartbeat, ResultStatus, StepResult
from reefknot.queue.model.work import ROUTER, WorkState
from reefknot.queue.router.health import HealthTable
from reefknot.queue.worker.service import Worker
from reefknot.runtime.clocks import LoopClock, VirtualLoop
from reefknot.stores.memory import MemoryStore
from tests.unit.queue.shops import answers, broken, made, stored
from tests.workshop import DENIED, OK, Shop, Step, work


class AheadClock(LoopClock):
    """The clock of another host, whose wall time is wrong."""

    ahead = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead


async def foreign(shop: Shop, name: str, step: Step, *, ahead: float = 0.0) -> Worker:
    """A worker that shares nothing with the router but the transport; its wall clock is so many seconds ahead."""
    clock = AheadClock(cast(VirtualLoop, asyncio.get_running_loop()))
    clock.ahead = ahead
    worker = made(shop, name, step, store=MemoryStore(clock, chain=name), clock=clock, seed=1)
    await worker.start()
    await asyncio.sleep(1.1)
    return worker


@pytest.mark.parametrize("outcome", [OK, DENIED])
async def test_the_result_is_kept_in_the_routers_store(shop: Shop, outcome: StepResult) -> None:
    status, state = ResultStatus.ERROR, WorkState.FAILED
    if outcome.ok:
        status, state = ResultStatus.SUCCESS, WorkState.SUCCEEDED
    router = await shop.router()
    await foreign(shop, "far", Step(outcome))
    (result,) = await answers(await router.submit(work("a", deadline_ms=10_000)))
    assert (result.status, result.worker_id) == (status, "far")
    item = await stored(shop, "a")
    assert (item.resource_class, item.state) == (ROUTER, state)
    assert await (await Client(shop.store, shop.clock).hand_in(work("a"))).result(1) == result


async def test_a_result_that_cannot_be_kept_is_told_to_no_one_and_comes_again(shop: Shop) -> None:
    router = await shop.router(lease=4)
    step = Step()
    await foreign(shop, "far", step)
    left = broken(shop, "settle", *[ConnectionError("not now")] * 99)
    future = await router.submit(work("a"))
    await asyncio.sleep(2)
    assert not future.done()
    left.clear()
    (result,) = await answers(future)
    assert (result.status, len(step.began)) == (ResultStatus.SUCCESS, 1)


async def test_work_that_takes_longer_than_the_routers_lease_is_run_once_and_answered(shop: Shop) -> None:
    """Nothing in the router's store says that a worker has it: only its claim does, and that is renewed."""
    router = await shop.router(lease=4)
    step = Step(seconds=30)
    for name in ("far-1", "far-2"):
        await foreign(shop, name, step)
    (result,) = await answers(await router.submit(work("a", timeout_ms=100_000)))
    assert (result.status, len(step.began)) == (ResultStatus.SUCCESS, 1)
    item = await stored(shop, "a")
    assert (item.state, item.crashes) == (WorkState.SUCCEEDED, 0)
    assert await shop.events(Requeued) == []


async def test_what_a_vanished_router_had_sent_is_answered_by_the_next_one(shop: Shop) -> None:
    first = await shop.router(lease=4)
    step = Step(seconds=2)
    await foreign(shop, "far", step)
    await first.submit(work("a"))
    await asyncio.sleep(1)
    shop.vanish(first)
    await shop.router(lease=4)
    assert (await (await Client(shop.store, shop.clock).hand_in(work("a"))).result(60)).status is ResultStatus.SUCCESS
    assert len(step.began) == 1


async def test_work_of_a_foreign_worker_is_cancelled_where_it_runs(shop: Shop) -> None:
    router = await shop.router()
    await foreign(shop, "far", Step(seconds=60))
    future = await router.submit(work("a"))
    await asyncio.sleep(1)
    assert await router.cancel("a", "no need")
    (result,) = await answers(future, within=10)
    assert result.status is ResultStatus.CANCELLED
    assert await router.submissions.answer("a") == result
    item = await stored(shop, "a")
    assert (item.state, item.reason) == (WorkState.CANCELLED, "no need")


DAY = 86_400.0


def delay_assignments(shop: Shop, seconds: float) -> None:
    """Let messages to workers take so long."""
    transport: Any = shop.transport
    publish = transport.publish

    async def late(*given: Any, **more: Any) -> None:
        await asyncio.sleep(seconds)
        await publish(*given, **more)

    async def delayed(subject: str, body: bytes, **more: Any) -> None:
        if subject.startswith(ASSIGN) and subject != ACK:
            tasks.append(asyncio.create_task(late(subject, body, **more)))
        else:
            await publish(subject, body, **more)

    tasks: list[asyncio.Task[None]] = []
    transport.publish = delayed


async def deadline_at_the_worker(shop: Shop, ahead: float) -> float:
    """When an assignment with 5 s, which is 3 s on its way to a worker on another host, ends there, from its start."""
    router = await shop.router()
    far = await foreign(shop, "far", Step(seconds=600), ahead=ahead)
    delay_assignments(shop, 3)
    began = shop.clock.wall()
    future = await router.submit(work("a", deadline_ms=5000))
    await asyncio.sleep(4)
    item = await far._store.work.get("a")
    assert item is not None
    assert item.deadline_at is not None
    assert (await future).status is ResultStatus.TIMEOUT
    return item.deadline_at / 1000 - ahead - began


@pytest.mark.parametrize("ahead", [0.0, -60.0, DAY, -DAY])
async def test_a_deadline_holds_on_a_host_with_another_clock_and_counts_the_way_there(shop: Shop, ahead: float) -> None:
    assert await deadline_at_the_worker(shop, ahead) == pytest.approx(5.0, abs=0.2)


async def test_control_without_the_difference_time_is_given_twice(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.queue.router.health.HealthTable.ahead_ms", lambda self, worker_id: None)
    assert await deadline_at_the_worker(shop, DAY) > 7.5


def test_the_clock_of_a_worker_is_measured_by_its_least_delayed_heartbeat_until_it_restarts() -> None:
    health = HealthTable()
    assert health.ahead_ms("w") is None
    beats = (1_000, 1_300, "a", -300), (2_000, 2_100, "a", -100), (3_000, 3_900, "a", -100), (500, 4_000, "b", -3_500)
    for timestamp, wall_ms, incarnation, ahead_ms in beats:
        health.record_clock(Heartbeat("w", timestamp, {}, incarnation=incarnation), wall_ms)
        assert health.ahead_ms("w") == ahead_ms
    health.forget(0.0)
    assert health.ahead_ms("w") is None
