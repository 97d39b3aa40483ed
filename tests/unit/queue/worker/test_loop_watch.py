"""The thread that watches an event loop: when it asks, what it reports, and for how long it holds work."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from reefknot.errors import StoreUnavailableError
from reefknot.idempotency.model import Claim
from reefknot.idempotency.once import Renewal, extend_keys
from reefknot.queue.model.messages import StepResult
from reefknot.queue.port.work_queue import Held
from reefknot.queue.worker import records, service
from reefknot.queue.worker.loop_watch import BLOCKED_S, LOOK_S, LoopWatch
from reefknot.runtime.clocks import clock_of_this_loop
from reefknot.stores.memory import MemoryStore
from tests.unit.queue.shops import ran, sent
from tests.workshop import Shop, Step, work


class Extended:
    """Leases that remember what was extended."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def owners(self, *, silent_for: float = 0.0, classes: Sequence[str] = ()) -> list[str]:
        return []

    async def end(self, owners: object) -> int:
        return 0

    def give_back(self, held: object) -> None: ...

    def extend(self, held: object, *, lease: float) -> None:
        assert isinstance(held, list)
        self.calls.append(sorted(one.id for one in held if isinstance(one, Held)))


@contextmanager
def watching(worker: service.Worker, leases: Extended) -> Iterator[LoopWatch]:
    """A watch whose thread is left out: the test looks itself, at times of its own."""
    watch = LoopWatch([worker], leases)
    watch._loop, watch._watched = asyncio.get_running_loop(), 0
    yield watch


def test_a_block_is_reported_within_two_seconds() -> None:
    """It may begin right after an answer: then comes a question, the wait for its answer, and the next look."""
    assert LOOK_S + BLOCKED_S + LOOK_S < 2


async def test_a_loop_is_asked_while_a_step_runs_and_told_once(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reefknot")
    worker, leases = await shop.worker("w1", Step(seconds=5)), Extended()
    with watching(worker, leases) as watch:
        watch.look(0.0)
        watch.look(10.0)
        assert leases.calls == [], "nothing runs"
        await sent(shop, work("a"), work("b"), wait=0.1)
        watch.look(20.0)
        watch.look(20.0 + BLOCKED_S / 2)
        assert leases.calls == []
        for at in (21.0, 21.4, 30.0, 41.0, 42.0):
            watch.look(at)
        assert leases.calls == [["a", "b"], ["a", "b"]], "at once, and every third of a lease"
        assert caplog.text.count("the event loop is blocked") == 1
        assert "test.step (a), test.step (b)" in caplog.text
        await asyncio.sleep(0.1)
        watch.look(43.0)
        watch.look(43.1)
        assert len(leases.calls) == 2, "it has answered, and was asked anew"


async def test_all_work_is_held_as_long_as_the_time_of_an_attempt_lasts(shop: Shop) -> None:
    worker = await ran(shop, Step(seconds=25), work("short", timeout_ms=60_000), work("long"), wait=0.1)
    assert sorted(one.id for one in worker.held()) == ["long", "short"]
    key = next(key for key in worker.steps.running if key[0] == "short")
    step = worker.steps.running[key]
    worker.steps.running[key] = records.RunningStep(step.assignment, step.task, shop.clock.now())
    held = sorted(one.id for one in worker.held())
    assert held == ["long", "short"], "its own time is over, but while the other blocks it cannot report"
    await asyncio.sleep(60)
    assert worker.held() == []


class ExtendedKeys:
    """An idempotency store of which only `extend` is used here; it fails at first."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def extend(self, claims: Sequence[Claim], *, lease: float) -> None:
        self.calls += [(one.key, lease) for one in claims]
        if len(self.calls) == 1:
            raise StoreUnavailableError("test", "the disk is on fire", "wait")


async def test_the_keys_that_steps_of_this_loop_hold_are_held_too(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "reefknot")
    worker, leases, keys = await shop.worker("w1", Step(seconds=5)), Extended(), ExtendedKeys()
    with watching(worker, leases) as watch:
        await sent(shop, work("a"), wait=0.1)
        with Renewal(cast(Any, keys), Claim("order-7", "me", 1), 30):
            for at in (20.0, 21.0, 25.0, 30.9, 31.0, 41.0):
                watch.look(at)
        assert keys.calls == [("order-7", 30)] * 3, "at once, and every third of its lease, whether that failed or not"
        assert leases.calls == [["a"], ["a"]], "a key whose store fails takes nothing from the work"
        watch.look(60.0)
        assert len(keys.calls) == 3, "it is not held any more"
    assert "key order-7 is held by a blocked event loop, and its lease could not be renewed" in caplog.text


async def test_keys_of_other_loops_are_their_own_business() -> None:
    keys, other = ExtendedKeys(), asyncio.new_event_loop()
    with Renewal(cast(Any, keys), Claim("order-7", "me", 1), 30):
        extend_keys(other, 20.0)
        assert keys.calls == []
        extend_keys(asyncio.get_running_loop(), 20.0)
        assert len(keys.calls) == 1
    other.close()


class Blocking(Step):
    """A step that does not give way."""

    async def run(self, inputs: object, context: object) -> StepResult:
        self.began.append(("", time.monotonic()))
        time.sleep(3.5)  # noqa: ASYNC251 - that is the point
        return StepResult()


@pytest.mark.real_time
async def test_a_memory_store_keeps_the_work_of_a_blocked_loop_too(caplog: pytest.LogCaptureFixture) -> None:
    """In real time, with leases of a second: two workers, and the thread of the watch."""
    caplog.set_level(logging.WARNING, "reefknot")
    clock = clock_of_this_loop()
    store, step = MemoryStore(clock), Blocking()
    shop = Shop(store, clock)
    workers = [await shop.worker(name, step, lease=1.0) for name in ("w1", "w2")]
    with LoopWatch(workers, store.leases):
        await asyncio.sleep(0)
        await shop.send(work("a"))
        async with asyncio.timeout(30):
            ended = await store.work.ended("a", 30)
    assert ended is not None
    assert (ended.state.value, ended.crashes, len(step.began)) == ("succeeded", 0, 1)
    await shop.close()
    await store.close()
    assert "test.step (a), at test_loop_watch.py:" in caplog.text
