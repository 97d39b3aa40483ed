"""Time timeouts that share one timer."""

import asyncio
from math import inf
from typing import Any

import pytest

from reefknot.runtime.timeouts import Timeouts
from reefknot.testing import run_virtual


async def after(timeouts: Timeouts, limit: float, takes: float) -> tuple[str, float]:
    """What came of a sleep under a limit, and when."""
    loop = asyncio.get_running_loop()
    try:
        with timeouts.timeout(limit) as held:
            await asyncio.sleep(takes)
    except TimeoutError:
        assert held.expired
        return "cut off", round(loop.time(), 6)
    assert not held.expired
    return "done", round(loop.time(), 6)


def timed(*works: tuple[float, float]) -> list[tuple[str, float]]:
    async def main() -> list[tuple[str, float]]:
        timeouts, began = Timeouts(), asyncio.get_running_loop().time()
        found = await asyncio.gather(*(after(timeouts, limit, takes) for limit, takes in works))
        return [(what, round(at - began, 6)) for what, at in found]

    return run_virtual(main())


def test_each_is_cut_off_at_its_own_time_whatever_the_order_they_came_in() -> None:
    works = (30.0, 1.0), (2.0, 9.0), (1.0, 9.0), (5.0, 4.0), (inf, 6.0), (3.0, 9.0)

    ended = ("done", 1.0), ("cut off", 2.0), ("cut off", 1.0), ("done", 4.0), ("done", 6.0), ("cut off", 3.0)
    assert timed(*works) == list(ended)


async def test_a_limit_that_comes_after_others_have_ended_still_holds() -> None:
    timeouts = Timeouts()
    found = [await after(timeouts, *one) for one in ((10.0, 1.0), (0.5, 5.0), (20.0, 30.0))]
    assert [what for what, _ in found] == ["done", "cut off", "cut off"]


async def test_many_timeouts_that_end_in_time_set_one_timer() -> None:
    loop: Any = asyncio.get_running_loop()
    timeouts, before = Timeouts(), len(loop._scheduled)
    for _ in range(1000):
        with timeouts.timeout(30.0):
            pass

    assert (len(loop._scheduled) - before) == 1


async def _cancelled_inside(timeouts: Timeouts) -> None:
    with timeouts.timeout(5.0):
        await asyncio.sleep(60)


@pytest.mark.parametrize("at", [1.0, 5.0])
async def test_a_task_that_is_cancelled_from_outside_is_not_timed_out(at: float) -> None:
    """5 s is the moment at which the limit expires, too."""
    task = asyncio.create_task(_cancelled_inside(Timeouts()))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(at, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_limits_nest_and_an_error_of_the_work_is_the_works_own() -> None:
    timeouts, task = Timeouts(), asyncio.current_task()
    assert task is not None
    with pytest.raises(TimeoutError), timeouts.timeout(9.0), timeouts.timeout(1.0):
        await asyncio.sleep(60)
    await asyncio.sleep(1)  # the outer one's time is not over, and nothing is left of the inner one's
    assert task.cancelling() == 0
    with pytest.raises(TimeoutError, match="mine"), timeouts.timeout(5.0) as limit:
        raise TimeoutError("mine")
    assert not limit.expired
