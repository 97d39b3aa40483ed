"""Virtual time belongs to one context; the wall time of a steady clock does not jump."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

import reefknot as rk
from reefknot import clock
from reefknot.clock import SteadyClock
from reefknot.runtime.clocks import EPOCH, VirtualClock
from tests.unit.retrying.flaky import AsyncFlaky, Flaky


@pytest.fixture
def really(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept for real, without sleeping."""
    slept: list[float] = []

    async def asleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(clock, "_real_sleep", slept.append)
    monkeypatch.setattr(clock, "_real_asleep", asleep)
    return slept


def fetch() -> Callable[[], object]:
    return rk.retry(base_delay=2, jitter="none")(Flaky(ConnectionError))


def test_inside_nothing_waits_really_and_another_thread_does(really: list[float]) -> None:
    with rk.testing.virtual_time() as virtual:
        fetch()()
        assert (really, virtual.waits) == ([], [2])
        thread = threading.Thread(target=fetch())
        thread.start()
        thread.join(5)
    assert (really, virtual.waits) == ([2], [2])


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


def test_afterwards_real_time_is_back_after_an_error_too() -> None:
    with suppress(KeyError), rk.testing.virtual_time():
        with rk.testing.no_wait() as inner:
            fetch()()
        assert inner.waits == [2]
        assert clock.now is not time.monotonic
        raise KeyError
    assert clock.now is time.monotonic
    assert clock.sleep is clock._real_sleep


def test_contexts_of_many_threads_end_in_real_time() -> None:
    at_once = threading.Barrier(8)

    def enter_and_leave() -> None:
        at_once.wait(5)
        for _ in range(200):
            with rk.testing.virtual_time():
                clock.sleep(1)

    threads = [threading.Thread(target=enter_and_leave) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert clock.now is time.monotonic


def test_wall_time_is_virtual_too(virtual_time: VirtualClock) -> None:
    before = clock.wall()
    virtual_time.advance(60)
    assert clock.wall() - before == pytest.approx(60)


def test_a_real_wait_sleeps_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    fetch()()
    clock.sleep(0.0)
    assert slept == [2]


def test_a_real_async_wait_is_asyncios() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await clock._real_asleep(0.0)
        await clock._real_asleep(2.0)
        return loop.time() - before

    assert rk.testing.run_virtual(main()) == 2.0


# ---- steady wall time ------------------------------------------------------------------------------------------------


class Jumping(VirtualClock):
    offset = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset


def test_a_jump_of_the_machines_clock_moves_nothing_and_wrapping_it_again_changes_nothing() -> None:
    machine = Jumping()
    clock = SteadyClock(machine)
    machine.offset = 86_400.0
    clock.sleep(5)
    assert SteadyClock(clock).wall() == clock.wall() == EPOCH + 5
    assert clock.now() == 1005.0
    assert SteadyClock(machine).wall() == EPOCH + 5 + 86_400, "a new one believes the machine"
    asyncio.run(clock.asleep(2))
    assert clock.now() == 1007.0

    measured = SteadyClock(Jumping(), offset=5.0)
    assert SteadyClock(measured).wall() == measured.wall() == 1005.0
    assert measured.boot == ""
