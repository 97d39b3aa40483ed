"""A crew runs a bounded number at once, outlives failures, and ends them all when told."""

import asyncio
import logging

import pytest

from reefknot.runtime.tasks import Crew
from reefknot.testing import run_virtual


def test_never_more_than_it_may_at_once() -> None:
    async def main() -> tuple[int, float]:
        crew, now, most = Crew("c", 3), 0, 0

        async def work() -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(1)
            now -= 1

        for _ in range(7):
            await crew.run("x", work)
        return most, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (3, 2.0), "the seventh begins when the third group does"


def test_a_failure_is_a_log_line_and_frees_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[int]:
        crew, done = Crew("w1", 1), []

        async def broken() -> None:
            raise ValueError("no luck")

        async def fine(number: int) -> None:
            done.append(number)

        await crew.run("a step failed", broken)
        await crew.run("x", fine, 5)
        await crew.run("x", fine, 6)
        await asyncio.sleep(1)
        return done

    with caplog.at_level(logging.ERROR, "reefknot"):
        assert run_virtual(main()) == [5, 6]
    assert [record.getMessage() for record in caplog.records] == ["w1: a step failed (ValueError: no luck)"]


def test_stopping_ends_what_runs_and_what_ends_a_task_is_not_swallowed() -> None:
    async def main() -> list[str]:
        crew, said = Crew("c", 5), []

        async def work() -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                said.append("ended")
                raise

        await crew.run("x", work)
        await asyncio.sleep(1)
        await crew.stop()
        with pytest.raises(asyncio.CancelledError):
            await crew.survive("x", _cancelled)
        return said

    async def _cancelled() -> None:
        raise asyncio.CancelledError

    assert run_virtual(main()) == ["ended"]
