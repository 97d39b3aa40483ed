"""Work that was running when its worker vanished: it runs alone in its process, whatever else waits there."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from reefknot.queue.execution.slots import AGAIN_S, LONGEST_WAIT_S, RUNS_ALONE, Isolation
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.messages import HEARTBEAT, AckStatus, ClassHealth, Heartbeat, ResultStatus, StepResult
from reefknot.queue.model.work import WorkState
from reefknot.steps.port import BlockContext
from tests.unit.queue.shops import answers, made, sent, stored
from tests.workshop import Shop, Step, work

STEP_S = 2.0


class Watched(Step):
    """A step that knows which others run beside it."""

    def __init__(self, name: str, running: set[str], seconds: float = STEP_S) -> None:
        super().__init__(name=name, seconds=seconds)
        self.running = running
        self.met: dict[str, set[str]] = {}

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        name = context.assignment_id
        self.met[name] = set(self.running)
        for one in self.running:
            self.met.setdefault(one, set()).add(name)
        self.running.add(name)
        try:
            return await super().run(inputs, context)
        finally:
            self.running.discard(name)


async def suspects(shop: Shop, *names: str) -> None:
    """Let these run in a worker that vanishes."""
    lost = await shop.worker("w1", Step(seconds=60), Step(name="http.step", seconds=60), lease=3)
    await sent(shop, *(work(name, job=_kind(name)) for name in names), wait=0.5)
    assert sum(pool.active for pool in lost.pools.values()) == len(names)
    shop.vanish(lost)
    await asyncio.sleep(4)


def ended(shop: Shop) -> list[str]:
    return [one.assignment_id for one in shop.results]


def _kind(name: str) -> str:
    return "http.step" if name.startswith("io") else "test.step"


on_each_store = pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)


@on_each_store
async def test_suspects_of_all_classes_run_alone_and_everything_else_goes_on_between_them(shop: Shop) -> None:
    names = ("a", "b", "io-1", "io-2")
    await suspects(shop, *names)
    running: set[str] = set()
    cpu, io = Watched("test.step", running), Watched("http.step", running)
    worker = await shop.worker("w1", cpu, io, lease=60)
    await sent(shop, *(work(name, job=_kind(name)) for name in ("new-1", "new-2", "io-new")), wait=60)
    met = {**cpu.met, **io.met}
    assert [met[name] for name in names] == [set()] * 4
    assert met["new-1"] | met["new-2"], "what is no suspect runs side by side"
    assert [one.status for one in shop.results] == [ResultStatus.SUCCESS] * 7
    assert worker.snapshot().retries.succeeded == 7


@on_each_store
async def test_workers_of_one_process_share_their_isolation(shop: Shop) -> None:
    await suspects(shop, "a", "b")
    step, isolation = Watched("test.step", set()), Isolation()
    for name in ("w1", "w2"):
        await made(shop, name, step, isolation=isolation).start()
    await sent(shop, work("other"), wait=30, to="w2")
    assert step.met == {"a": set(), "b": set(), "other": set()}


@on_each_store
async def test_a_suspect_that_waits_for_the_others_is_not_held(shop: Shop) -> None:
    """Should the process die now, it was not the suspect: it is pending, and spends nothing."""
    await suspects(shop, "a")
    running: set[str] = set()
    worker = await shop.worker("w2", Watched("test.step", running, seconds=29))
    await shop.send(work("long", {"seconds": 20}), to="w2")
    assert await shop.store.work.recall(["cpu@w1"]) == 1
    await sent(shop, work("a"), wait=5, to="w2")
    item = await stored(shop, "a")
    assert (item.state, item.reason, item.crashes, item.attempts) == (WorkState.PENDING, RUNS_ALONE, 1, 0)
    await sent(shop, work("late", {"seconds": 1}), wait=5, to="w2")
    assert running == {"long"}, "nothing begins meanwhile"
    await asyncio.sleep(12)
    assert running == {"a"}, "and it has all of its time, however long it had to wait"
    worker.pause()
    await asyncio.sleep(60)
    worker.resume()
    await asyncio.sleep(5)
    assert set(ended(shop)) == {"long", "a", "late"}


async def test_a_paused_worker_that_waits_for_a_suspect_does_not_stop_the_others(shop: Shop) -> None:
    await suspects(shop, "a")
    isolation, step = Isolation(), Step(seconds=10)
    first, second = (made(shop, name, step, isolation=isolation) for name in ("w1", "w2"))
    await second.start()
    await shop.send(work("long"), to="w2")
    await first.start()
    await asyncio.sleep(3)
    first.pause()
    await sent(shop, work("other"), wait=15, to="w2")
    assert set(ended(shop)) == {"long", "other"}
    first.resume()
    await asyncio.sleep(15)
    assert set(ended(shop)) == {"long", "other", "a"}


@on_each_store
async def test_no_suspect_begins_while_a_function_runs_on_and_everything_else_does(shop: Shop) -> None:
    await suspects(shop, "a")
    step, overdue = Watched("test.step", set()), [2]
    worker = made(shop, "w1", step, isolation=Isolation(lambda: overdue[0]))
    await worker.start()
    await asyncio.sleep(1)
    await sent(shop, work("new"), wait=20)
    item = await stored(shop, "a")
    assert (item.state, item.reason, item.crashes) == (WorkState.PENDING, RUNS_ALONE, 1)
    assert ended(shop) == ["new"]
    assert worker.heartbeat().classes["cpu"].status is OverloadStatus.HEALTHY, "nothing is held up"
    overdue[0] = 0
    await asyncio.sleep(AGAIN_S + STEP_S + 1)
    assert ended(shop) == ["new", "a"]
    assert step.met["a"] == set()


async def test_a_function_that_begins_to_run_on_while_a_suspect_waits_ends_the_wait(shop: Shop) -> None:
    await suspects(shop, "a")
    running: set[str] = set()
    step, overdue = Watched("test.step", running, seconds=10), [0]
    await made(shop, "w2", step, isolation=Isolation(lambda: overdue[0])).start()
    await shop.send(work("long"), to="w2")
    assert await shop.store.work.recall(["cpu@w1"]) == 1
    await sent(shop, work("a"), wait=5, to="w2")
    await sent(shop, work("late", {"seconds": 1}), wait=2, to="w2")
    assert running == {"long"}, "the suspect has the process for itself next"
    overdue[0] = 1
    await asyncio.sleep(10)
    assert set(ended(shop)) == {"long", "late"}
    overdue[0] = 0
    await asyncio.sleep(15)
    assert step.met["a"] == set()
    assert len(shop.results) == 3


async def test_a_function_that_never_returns_holds_a_suspect_for_a_bounded_time(shop: Shop) -> None:
    await suspects(shop, "a")
    await made(shop, "w1", Step(seconds=STEP_S), isolation=Isolation(lambda: 1)).start()
    await asyncio.sleep(LONGEST_WAIT_S - 10)
    assert shop.results == []
    await asyncio.sleep(30)
    assert [one.status for one in shop.results] == [ResultStatus.SUCCESS]


@on_each_store
async def test_new_work_goes_to_a_worker_that_runs_no_suspects(shop: Shop) -> None:
    async def workers(name: str, within: float) -> set[str | None]:
        futures = [await router.submit(work(f"{name}-{number}")) for number in range(8)]
        return {one.worker_id for one in await answers(*futures, within=within)}

    await suspects(shop, "a", "b")
    router = await shop.router()
    slow = Step(seconds=10)
    await shop.worker("w2", Step(seconds=0.1))
    await asyncio.sleep(2)
    await shop.worker("w1", slow)
    await asyncio.sleep(0.1)
    for burst in range(15):
        assert await workers(f"new-{burst}", 1) == {"w2"}
        await asyncio.sleep(0.7)
    assert [name for name, _ in slow.began] == ["a", "b"]
    await asyncio.sleep(15)
    assert await workers("later", 15) == {"w1", "w2"}, "afterwards it has its share again"


@on_each_store
async def test_work_for_the_only_worker_waits_for_its_suspects_and_runs_then(shop: Shop) -> None:
    await suspects(shop, "a", "b")
    router = await shop.router()
    step = Watched("test.step", set(), seconds=10)
    await shop.worker("w1", step)
    await asyncio.sleep(0.1)
    futures = [await router.submit(work(f"new-{number}", {"seconds": 1})) for number in range(30)]
    assert {one.status for one in await answers(*futures)} == {ResultStatus.SUCCESS}
    assert (step.met["a"], step.met["b"]) == (set(), set())


async def test_a_worker_that_runs_a_suspect_reports_no_free_slot(shop: Shop) -> None:
    await suspects(shop, "a")
    beats = shop.heard(HEARTBEAT)
    worker = await shop.worker("w1", Step(seconds=10), heartbeat=5)
    await asyncio.sleep(0.1)
    told = msgspec.json.decode(beats[-1], type=Heartbeat)
    assert told.classes["cpu"].status is OverloadStatus.OVERLOADED, "routers hear it at once"
    assert (told.draining, told.leaving) == (False, False)
    await shop.send(work("new"))
    assert (shop.ack("new").status, shop.ack("new").queue_depth) == (AckStatus.ACCEPTED, 1)
    assert worker.heartbeat().classes["cpu"].queue_depth == 1
    await asyncio.sleep(10.5)
    assert worker.heartbeat().classes["cpu"] == ClassHealth(OverloadStatus.HEALTHY, 0, 1, worker.pools["cpu"].slots)
