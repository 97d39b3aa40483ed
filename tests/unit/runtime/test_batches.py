"""Many small writes as one: what goes together, what a failure does, and what an end leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from reefknot.runtime.tasks import Batcher
from tests.stories import InLoop


class Pen(Batcher[int]):
    """A batcher that writes slowly, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__("it could not be written", self.write, most=5)
        self.batches: list[list[int]] = []
        self.fails = False

    async def write(self, items: list[int]) -> None:
        await asyncio.sleep(1)
        if self.fails:
            raise OSError("no ink")
        self.batches.append(items)


@asynccontextmanager
async def serving() -> AsyncIterator[Pen]:
    pen = Pen()
    task = asyncio.create_task(pen.serve())
    try:
        yield pen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def pen() -> InLoop:
    return InLoop(serving)


async def test_a_lone_one_is_written_at_once_and_what_comes_meanwhile_goes_together(pen: Pen) -> None:
    pen.put(1)
    await asyncio.sleep(0.5)
    for number in (2, 3, 4):
        pen.put(number)
    assert len(pen) == 4
    await asyncio.sleep(0.6)
    assert pen.batches == [[1]]
    await asyncio.sleep(1)
    assert pen.batches == [[1], [2, 3, 4]]
    assert len(pen) == 0


async def test_a_write_is_bounded_and_the_order_is_kept(pen: Pen) -> None:
    for number in range(12):
        pen.put(number)
    await asyncio.sleep(4)
    assert [len(batch) for batch in pen.batches] == [5, 5, 2]
    assert [number for batch in pen.batches for number in batch] == list(range(12))


async def test_who_feeds_without_end_waits_for_room(pen: Pen) -> None:
    most = 0
    for number in range(40):
        await pen.room()
        pen.put(number)
        most = max(most, len(pen))
    assert most <= 10, "one write under way, and one that waits"
    assert asyncio.get_running_loop().time() >= 6


async def test_a_failed_write_is_told_and_the_next_one_goes_on(pen: Pen, caplog: pytest.LogCaptureFixture) -> None:
    pen.fails = True
    pen.put(1)
    await asyncio.sleep(1.5)
    pen.fails = False
    pen.put(2)
    await asyncio.sleep(1.5)
    assert pen.batches == [[2]]
    assert "it could not be written" in caplog.text
    assert "no ink" in caplog.text


async def test_what_was_begun_is_finished_and_the_rest_can_be_written_afterwards() -> None:
    async with serving() as pen:
        pen.put(1)
        await asyncio.sleep(0.5)
        pen.put(2)
    assert pen.batches == [[1]]
    await pen.finish()
    assert pen.batches == [[1], [2]]
