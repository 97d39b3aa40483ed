"""Many small writes as one: what goes together, what a failure does, and what an end leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from reefknot.runtime.tasks import Batcher
from reefknot.testing import run_virtual


class Pen:
    """Writes slowly, and fails when it is told to."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.batches: list[list[int]] = []
        self.fails = False

    async def write(self, items: list[int]) -> None:
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise OSError("no ink")
        self.batches.append(items)


def with_batcher(story: Callable[[Batcher[int], Pen], Awaitable[None]], *, most: int = 5) -> None:
    async def main() -> None:
        pen = Pen()
        batcher: Batcher[int] = Batcher("it could not be written", pen.write, most=most)
        serving = asyncio.create_task(batcher.serve())
        try:
            await story(batcher, pen)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    run_virtual(main())


def test_a_lone_one_is_written_at_once_and_what_comes_meanwhile_goes_together() -> None:
    async def story(batcher: Batcher[int], pen: Pen) -> None:
        batcher.put(1)
        await asyncio.sleep(0.5)
        for number in (2, 3, 4):
            batcher.put(number)
        assert len(batcher) == 4
        await asyncio.sleep(0.6)
        assert pen.batches == [[1]]
        await asyncio.sleep(1)
        assert pen.batches == [[1], [2, 3, 4]]
        assert len(batcher) == 0

    with_batcher(story)


def test_a_write_is_bounded_and_the_order_is_kept() -> None:
    async def story(batcher: Batcher[int], pen: Pen) -> None:
        for number in range(12):
            batcher.put(number)
        await asyncio.sleep(4)
        assert [len(batch) for batch in pen.batches] == [5, 5, 2]
        assert [number for batch in pen.batches for number in batch] == list(range(12))

    with_batcher(story)


def test_who_feeds_without_end_waits_for_room() -> None:
    async def story(batcher: Batcher[int], pen: Pen) -> None:
        most = 0
        for number in range(40):
            await batcher.room()
            batcher.put(number)
            most = max(most, len(batcher))
        assert most <= 10, "one write under way, and one that waits"
        assert asyncio.get_running_loop().time() >= 6

    with_batcher(story)


def test_a_failed_write_is_told_and_the_next_one_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def story(batcher: Batcher[int], pen: Pen) -> None:
        pen.fails = True
        batcher.put(1)
        await asyncio.sleep(1.5)
        pen.fails = False
        batcher.put(2)
        await asyncio.sleep(1.5)
        assert pen.batches == [[2]]

    with_batcher(story)
    assert "it could not be written" in caplog.text
    assert "no ink" in caplog.text


async def test_what_was_begun_is_finished_and_the_rest_can_be_written_afterwards() -> None:
    pen = Pen()
    batcher: Batcher[int] = Batcher("it could not be written", pen.write, most=5)
    serving = asyncio.create_task(batcher.serve())
    batcher.put(1)
    await asyncio.sleep(0.5)
    batcher.put(2)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert pen.batches == [[1]]
    await batcher.finish()
    assert pen.batches == [[1], [2]]
