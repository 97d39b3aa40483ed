"""`FunctionThreads`: plain functions that never end take no thread from the others, and no shutdown waits for them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.steps import threads
from reefknot.steps.port import BlockContext
from reefknot.steps.python import PythonBlock
from reefknot.steps.threads import FunctionsOverdueError, FunctionThreads


@pytest.fixture
def ends() -> Iterator[threading.Event]:
    """An event for functions to wait for, set at the end of the test."""
    ends = threading.Event()
    yield ends
    ends.set()


async def left_behind(pool: FunctionThreads, name: str, ends: threading.Event, number: int) -> None:
    """Start so many calls that do not end, and cancel them once they run."""
    begun = threading.Semaphore(0)

    def stuck() -> None:
        begun.release()
        ends.wait()

    calls = [asyncio.create_task(pool.run(name, stuck)) for _ in range(number)]
    await asyncio.sleep(0)
    for _ in calls:
        assert await asyncio.to_thread(begun.acquire, timeout=10)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.real_time
async def test_functions_that_never_end_stop_neither_other_blocks_nor_grow_without_bound(
    ends: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FunctionThreads(most=8, most_overdue=4)
    await left_behind(pool, "stuck", ends, 4)
    assert await pool.run("fine", lambda: 7) == 7
    with pytest.raises(FunctionsOverdueError, match="4 functions of the block stuck still run"):
        await pool.run("stuck", lambda: 8)
    assert "4 plain functions run on although their attempts have ended" in caplog.text


@pytest.mark.real_time
async def test_without_a_bound_for_each_block_the_others_wait(ends: threading.Event) -> None:
    """The control: one block takes every thread."""
    pool = FunctionThreads(most=4, most_overdue=1000)
    await left_behind(pool, "stuck", ends, 4)
    waits = asyncio.create_task(pool.run("fine", lambda: 7))
    done, _ = await asyncio.wait([waits], timeout=0.05)
    assert not done
    ends.set()
    assert await waits == 7


@pytest.mark.real_time
async def test_a_block_may_run_again_once_its_functions_have_returned(ends: threading.Event) -> None:
    pool = FunctionThreads(most=4, most_overdue=1)
    await left_behind(pool, "stuck", ends, 1)
    ends.set()
    while pool._overdue["stuck"]:  # noqa: ASYNC110 - a thread has no event to wait for
        await asyncio.sleep(0.001)
    assert await pool.run("stuck", lambda: 7) == 7


@pytest.mark.real_time
async def test_a_call_that_is_cancelled_before_its_thread_is_free_is_never_made(ends: threading.Event) -> None:
    pool = FunctionThreads(most=1)
    first = asyncio.create_task(pool.run("a", ends.wait))
    called: list[int] = []
    second = asyncio.create_task(pool.run("a", lambda: called.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    ends.set()
    assert await first is True
    assert await pool.run("a", lambda: 3) == 3
    assert called == []


# ---- a loop that is blocked ----------------------------------------------------------------------------------------


async def beside_a_block(function: Callable[[], Any], *, within: float, blocked: float) -> Any:
    """The answer of a function whose time is over when the loop, blocked by another task, goes on."""
    pool, begun, is_blocked = FunctionThreads(), threading.Event(), threading.Event()

    def observed() -> Any:
        begun.set()
        is_blocked.wait(10)
        return function()

    async def limited() -> Any:
        async with asyncio.timeout(within):
            return await pool.run("own.step", observed, within=within)

    call = asyncio.create_task(limited())
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 10)
    is_blocked.set()
    time.sleep(blocked)  # noqa: ASYNC251 - that is the point
    return await call


def fails() -> None:
    raise ConnectionError("down")


class Awaited:
    """What a plain function returns that leaves the work to whoever awaits it."""

    def __await__(self) -> Iterator[None]:
        yield


@pytest.mark.real_time
async def test_what_a_function_returned_or_raised_in_time_counts_although_the_loop_was_blocked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await beside_a_block(lambda: 7, within=0.5, blocked=1.0) == 7
    with pytest.raises(ConnectionError, match="down"):
        await beside_a_block(fails, within=0.5, blocked=1.0)
    assert "never retrieved" not in caplog.text


@pytest.mark.real_time
@pytest.mark.parametrize(("function", "blocked"), [(lambda: time.sleep(0.7), 1.5), (Awaited, 1.0)])
async def test_what_returned_too_late_or_has_to_be_awaited_is_timed_out_whenever_the_loop_hears_of_it(
    function: Callable[[], Any], blocked: float
) -> None:
    """The control: its result is there as well when the loop goes on."""
    with pytest.raises(TimeoutError):
        await beside_a_block(function, within=0.5, blocked=blocked)


@pytest.mark.real_time
async def test_exceptions_come_back_and_one_that_a_future_cannot_carry_is_named() -> None:
    def stops() -> None:
        raise StopIteration(5)

    pool = FunctionThreads()
    with pytest.raises(ConnectionError, match="down"):
        await pool.run("a", fails)
    with pytest.raises(RuntimeError, match=r"StopIteration\(5\)"):
        await pool.run("a", stops)


@pytest.mark.real_time
async def test_a_thread_without_work_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.001)
    pool = FunctionThreads()
    assert await pool.run("a", lambda: 1) == 1
    while pool._threads:  # noqa: ASYNC110 - a thread has no event to wait for
        await asyncio.sleep(0.001)
    assert await pool.run("a", lambda: 2) == 2


def test_a_step_of_a_block_that_left_too_many_behind_fails_and_may_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FunctionThreads(most_overdue=0)
    monkeypatch.setattr("reefknot.steps.python.function_threads", lambda: pool)
    block = PythonBlock("own.stuck", lambda inputs, context: None)
    result = asyncio.run(block.run({}, BlockContext("a", 1, "a/0", 1.0, None, None)))
    assert result.error_code is ErrorCode.resource_unavailable
    assert "the block own.stuck" in result.error_message
