"""Background tasks: bounded, held until they end, failures logged."""

import asyncio
import gc
import weakref

import pytest

from reefknot.runtime import tasks
from reefknot.runtime.tasks import BoundedTasks, Services, run_in_background


async def test_never_more_than_it_may_at_once() -> None:
    bounded, now, most = BoundedTasks("c", 3), 0, 0

    async def work() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1

    for _ in range(7):
        await bounded.start("x", work)

    assert (most, asyncio.get_running_loop().time()) == (3, 2.0), "the seventh begins when the third group does"


async def test_a_failure_is_a_log_line_and_frees_its_place(caplog: pytest.LogCaptureFixture) -> None:
    bounded, done = BoundedTasks("w1", 1), []

    async def broken() -> None:
        raise ValueError("no luck")

    async def fine(number: int) -> None:
        done.append(number)

    await bounded.start("a step failed", broken)
    await bounded.start("x", fine, 5)
    await bounded.start("x", fine, 6)
    await asyncio.sleep(1)
    assert done == [5, 6]
    assert [record.getMessage() for record in caplog.records] == ["w1: a step failed (ValueError: no luck)"]


async def test_stopping_ends_what_runs_and_what_ends_a_task_is_not_swallowed() -> None:
    async def _cancelled() -> None:
        raise asyncio.CancelledError

    bounded, said = BoundedTasks("c", 5), []

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            said.append("ended")
            raise

    await bounded.start("x", work)
    await asyncio.sleep(1)
    await bounded.stop()
    with pytest.raises(asyncio.CancelledError):
        await bounded.run_logged("x", _cancelled)

    assert said == ["ended"]


async def test_a_background_task_is_held_until_it_ends_and_no_longer() -> None:
    async def forever(wakes: asyncio.Event) -> None:
        await wakes.wait()

    wakes = asyncio.Event()
    task = weakref.ref(run_in_background(forever(wakes), "waiting"))
    await asyncio.sleep(0)
    gc.collect()
    assert task() is not None
    assert tasks._background == {task()}
    wakes.set()
    await asyncio.sleep(0.1)
    assert not tasks._background


async def test_a_failed_background_task_is_logged_and_a_cancelled_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise OSError("disk full")

    run_in_background(fails(), "recording a result")
    run_in_background(asyncio.sleep(100), "waiting").cancel()
    await asyncio.sleep(0.1)
    assert caplog.messages == ["recording a result failed in the background: OSError: disk full"]


async def test_a_service_that_has_just_returned_is_run_again_by_the_next_caller() -> None:
    """The loop tells of the end of a task one turn later; whoever comes in between must not rely on the old one."""
    runs: list[str] = []

    async def service() -> None:
        runs.append("run")

    services = Services("part")
    services.keep("look", service)
    await asyncio.sleep(0)  # it has returned, and the loop has told no one yet
    assert services.names == frozenset()
    services.keep("look", service)
    assert services.names == {"look"}
    await asyncio.sleep(0.1)
    assert runs == ["run", "run"]
    assert services.names == frozenset()
