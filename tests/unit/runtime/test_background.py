"""Work that goes on after its caller has left."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from reefknot.runtime import tasks as background
from reefknot.testing import run_virtual


def test_it_is_held_until_it_ends_and_no_longer() -> None:
    async def forever(wakes: asyncio.Event) -> None:
        await wakes.wait()

    async def main() -> None:
        wakes = asyncio.Event()
        task = weakref.ref(background.start(forever(wakes), "waiting"))
        await asyncio.sleep(0)
        gc.collect()
        assert task() is not None
        assert background._going == {task()}
        wakes.set()
        await asyncio.sleep(0.1)
        assert not background._going

    run_virtual(main())


def test_its_failure_is_logged_and_its_cancellation_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise OSError("disk full")

    async def main() -> None:
        background.start(fails(), "recording a result")
        background.start(asyncio.sleep(100), "waiting").cancel()
        await asyncio.sleep(0.1)

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert [record.message for record in caplog.records] == [
        "recording a result failed after its caller had left: OSError: disk full"
    ]
