"""
Tests that are coroutines: `tests/conftest.py` runs each in virtual time, or in real time where it is marked so.

A fixture that needs a running loop returns `InLoop`; its value is opened when the test begins, and closed when it ends.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, NamedTuple

from reefknot.testing import run_virtual

LONGEST_S = 60
"""A test in real time that waits for something that never comes fails instead of hanging."""


class InLoop(NamedTuple):
    """The value of a fixture that is opened in the loop of its test."""

    open: Callable[[], AbstractAsyncContextManager[Any]]


def run_story(test: Callable[..., Any], given: Mapping[str, Any], *, is_real_time: bool) -> None:
    """Run a test that is a coroutine, with its fixtures."""

    async def story() -> None:
        async with AsyncExitStack() as stack:
            opened = {
                name: await stack.enter_async_context(value.open()) if isinstance(value, InLoop) else value
                for name, value in given.items()
                if name in inspect.signature(test).parameters
            }
            await test(**opened)

    async def bounded() -> None:
        async with asyncio.timeout(LONGEST_S):
            await story()

    if is_real_time:
        asyncio.run(bounded())
    else:
        run_virtual(story())
