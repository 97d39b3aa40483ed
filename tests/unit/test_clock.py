"""Whose clock is it? Virtual time belongs to one context."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

import reefknot as rk
from reefknot import clock as timing
from reefknot.engines.clocks import VirtualClock
from tests.unit.retrying.flaky import AsyncFlaky, Flaky


@pytest.fixture
def really(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept for real, without sleeping."""
    slept: list[float] = []

    async def asleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(timing, "_real_sleep", slept.append)
    monkeypatch.setattr(timing, "_real_asleep", asleep)
    return slept


def fetch() -> Callable[[], object]:
    return rk.retry(base_delay=2, jitter="none")(Flaky(ConnectionError))


def test_inside_nobody_waits_really(really: list[float]) -> None:
    with rk.testing.virtual_time() as clock:
        fetch()()
    assert (really, clock.waits) == ([], [2])


def test_another_thread_waits_really(really: list[float]) -> None:
    with rk.testing.virtual_time() as clock:
        thread = threading.Thread(target=fetch())
        thread.start()
        thread.join(5)
    assert (really, clock.waits) == ([2], [])


def test_a_task_that_was_started_outside_waits_really(really: list[float]) -> None:
    async def main() -> list[float]:
        go = asyncio.Event()

        async def outsider() -> None:
            await go.wait()
            await rk.retry(base_delay=2, jitter="none")(AsyncFlaky(ConnectionError))()

        task = asyncio.ensure_future(outsider())
        await asyncio.sleep(0)
        with rk.testing.virtual_time() as clock:
            go.set()
            await rk.retry(base_delay=3, jitter="none")(AsyncFlaky(ConnectionError))()
            await task
        return clock.waits

    assert asyncio.run(main()) == [3]
    assert really == [2]


def test_afterwards_real_time_is_back() -> None:
    with rk.testing.virtual_time():
        with rk.testing.no_wait() as inner:
            fetch()()
        assert inner.waits == [2]
        assert timing.now is not time.monotonic
    assert timing.now is time.monotonic
    assert timing.sleep is timing._real_sleep


def test_an_error_inside_brings_real_time_back_too() -> None:
    with pytest.raises(KeyError), rk.testing.virtual_time():
        raise KeyError
    assert timing.now is time.monotonic


def test_contexts_of_many_threads_end_in_real_time() -> None:
    at_once = threading.Barrier(8)

    def enter_and_leave() -> None:
        at_once.wait(5)
        for _ in range(200):
            with rk.testing.virtual_time():
                timing.sleep(1)

    threads = [threading.Thread(target=enter_and_leave) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert timing.now is time.monotonic


def test_wall_time_is_virtual_too(virtual_time: VirtualClock) -> None:
    before = timing.wall()
    virtual_time.advance(60)
    assert timing.wall() - before == pytest.approx(60)


def test_a_real_wait_sleeps_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    fetch()()
    timing.sleep(0.0)
    assert slept == [2]


def test_a_real_async_wait_is_asyncios() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await timing._real_asleep(0.0)
        await timing._real_asleep(2.0)
        return loop.time() - before

    assert rk.testing.run_virtual(main()) == 2.0
