"""The store in scope."""

import asyncio

import pytest

from reefknot.errors import NoStoreError
from reefknot.idempotency.decorator import in_scope, store_in_scope
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store


async def test_the_innermost_open_store_is_in_scope_also_for_tasks_started_inside() -> None:
    async def seen() -> object:
        return store_in_scope()

    async with open_store("memory:") as outer:
        assert store_in_scope() is outer
        async with open_store("memory:") as inner:
            assert store_in_scope() is inner
            assert await asyncio.create_task(seen()) is inner
        with pytest.raises(ZeroDivisionError):
            async with open_store("memory:"):
                raise ZeroDivisionError
    with pytest.raises(NoStoreError):
        store_in_scope()


async def test_a_store_is_in_scope_of_its_task_and_of_no_other_and_may_be_left_in_another() -> None:
    opened, looked = asyncio.Event(), asyncio.Event()

    async def opening() -> None:
        async with open_store("memory:"):
            opened.set()
            await looked.wait()

    task = asyncio.create_task(opening())
    await opened.wait()
    with pytest.raises(NoStoreError):
        store_in_scope()
    looked.set()
    await task

    scope = in_scope(MemoryStore(VirtualClock()))

    async def enter() -> None:
        scope.__enter__()

    await asyncio.create_task(enter())
    scope.__exit__(None, None, None)
    with pytest.raises(NoStoreError):
        store_in_scope()
