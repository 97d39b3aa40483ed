"""Time that passes when nobody waits for it."""

import asyncio
import gc
import signal
import threading
import time

import pytest

from reefknot.errors import VirtualDeadlockError
from reefknot.runtime import clocks as virtual
from reefknot.runtime.clocks import EPOCH, LoopClock, SkippingClock, VirtualClock, VirtualLoop
from reefknot.testing import run_virtual

DAY = 86400.0


async def now() -> float:
    return asyncio.get_running_loop().time()


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_a_sleep_moves_a_virtual_clock_and_a_skipping_one_only_counts_it() -> None:
    clock = VirtualClock(start=5)
    clock.sleep(2)
    clock.advance(3)
    clock.sleep(0.5)
    assert (clock.now(), clock.wall(), clock.waits, clock.waited) == (10.5, EPOCH + 5.5, [2, 0.5], 2.5)

    clock = SkippingClock(start=5)
    clock.sleep(100)
    assert (clock.now(), clock.waited) == (5, 100)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_time_only_moves_forward_by_finite_steps(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite steps"):
        VirtualClock().advance(seconds)


@pytest.mark.real_time
async def test_an_async_sleep_lets_others_run() -> None:
    seen = ["before"]
    asyncio.get_running_loop().call_soon(seen.append, "another")
    await VirtualClock().asleep(3600)

    assert [*seen, "after"] == ["before", "another", "after"]


# ---- the loop --------------------------------------------------------------------------------------------------------


async def test_a_day_takes_milliseconds_and_ten_years_at_once_pass_too() -> None:
    began = time.perf_counter()
    for _ in range(24):
        await asyncio.sleep(3600)
    assert await now() == pytest.approx(DAY)
    assert time.perf_counter() - began < 60, "a machine may be slow, and a day is a day"
    await asyncio.sleep(3650 * DAY)
    assert await now() == pytest.approx(3651 * DAY)


async def test_a_thousand_tasks_wait_side_by_side_and_wake_in_order() -> None:
    woken: list[int] = []

    async def sleeper(n: int) -> None:
        await asyncio.sleep((n * 7919) % 1000)
        woken.append((n * 7919) % 1000)

    await asyncio.gather(*(sleeper(n) for n in range(1000)))

    assert (woken, await now()) == (list(range(1000)), 999.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(DAY), 10)
    assert await now() == 1009.0


async def test_a_clock_of_the_loop_reads_and_moves_its_time() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    clock = LoopClock(loop)
    clock.sleep(5)
    clock.sleep(-1)
    await clock.asleep(2)

    assert (clock.now(), clock.wall(), loop.time()) == (7.0, EPOCH + 7.0, 7.0)


async def test_real_sockets_still_work() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello\n")
    got = await reader.readline()
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()

    assert got == b"HELLO\n"


async def test_a_thread_that_is_at_work_is_waited_for_and_no_time_limit_passes_meanwhile() -> None:
    assert await asyncio.to_thread(_slowly, 7) == 7
    async with asyncio.timeout(0.001):
        assert await asyncio.to_thread(_slowly, 8) == 8


def _slowly(value: int) -> int:
    threading.Event().wait(0.02)
    return value


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that other tests left behind may still live; a loop would wait for them to wake it."""
    monkeypatch.setattr(virtual, "PATIENCE", 0.06)


@pytest.mark.usefixtures("impatient")
def test_a_loop_in_which_nothing_can_happen_says_so_and_names_what_waits() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(10)
        task = asyncio.create_task(never(), name="the-stuck-one")
        await task

    with pytest.raises(VirtualDeadlockError, match="the-stuck-one at") as raised:
        run_virtual(main())
    assert "main" in raised.value.waiting


@pytest.mark.usefixtures("impatient")
def test_a_deadlock_still_lets_tasks_clean_up() -> None:
    ended: list[str] = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cleaned up")

    with pytest.raises(VirtualDeadlockError):
        run_virtual(main())
    gc.collect()
    assert ended == ["cleaned up"]


@pytest.mark.usefixtures("impatient")
def test_an_idle_thread_makes_a_deadlock_slow_to_tell_but_not_silent() -> None:
    over = threading.Event()
    idle = threading.Thread(target=over.wait, args=(10,))
    idle.start()
    try:
        with pytest.raises(VirtualDeadlockError):
            run_virtual(asyncio.Event().wait())
    finally:
        over.set()
        idle.join(5)


async def test_a_loop_that_a_thread_or_a_signal_may_wake_is_not_stuck() -> None:
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    threading.Thread(target=loop.call_soon_threadsafe, args=(woken.set,)).start()
    await woken.wait()
    told = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, told.set)
    timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGUSR1,))
    timer.start()
    timer.join()
    await told.wait()
