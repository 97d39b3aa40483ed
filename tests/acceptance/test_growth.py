"""A store that has grown answers as fast as a small one: counted in steps of SQLite, the same on every machine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import time
from typing import Any
from unittest.mock import patch

import apsw
import pytest

from bench.tables import growth
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore

SMALL, LARGE = 1_000, 20_000
STEPS = 50
"""Steps between two calls of the counter."""
ALLOWANCE = 20
"""Counts that a deeper tree may cost; a walk through the larger store costs some thousand."""

Make = Callable[[SqliteStore, list[str], list[str]], dict[str, growth.Call]]


_FILLED: dict[Path, float] = {}
"""When a store was filled: calls ask for what happened since shortly before, however long ago that is by now."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made: dict[int, Path] = {}
    for size in (SMALL, LARGE):
        made[size] = tmp_path_factory.mktemp("stores") / f"{size}.db"
        asyncio.run(growth.made(made[size]))
        growth.fill(made[size], size)
        _FILLED[made[size]] = time()
    return made


class Steps:
    """A handler that counts how often SQLite came by."""

    seen = 0

    def __call__(self) -> bool:
        self.seen += 1
        return False


def counted(path: Path, name: str, make: Make) -> int:
    """How often SQLite came by while this call ran, after one that opened and cached."""
    steps = Steps()

    async def main() -> None:
        store = await SqliteStore(path, SystemClock(), inline=True).start()
        ended, quarantined = await growth.found(store)
        with patch.object(growth, "time", lambda: _FILLED[path]):
            call = make(store, ended, quarantined)[name]
        await call()
        for connection in (store._reader._connection, store._writer._connection):
            if connection is not None:
                connection.set_progress_handler(steps, STEPS)
        await call()
        await store.close()

    asyncio.run(main())
    return steps.seen


def all_calls(store: SqliteStore, ended: list[str], quarantined: list[str]) -> dict[str, growth.Call]:
    return {**growth.reading(store, ended, quarantined), **growth.writing(store, quarantined)}


def names() -> list[str]:
    nothing: Any = SqliteStore("/nowhere/state.db", SystemClock(), inline=True)
    return list(all_calls(nothing, [""], [""]))


@pytest.mark.parametrize("name", names())
def test_a_call_takes_as_many_steps_in_a_grown_store(stores: dict[int, Path], name: str) -> None:
    small, large = (counted(stores[size], name, all_calls) for size in (SMALL, LARGE))
    assert large <= small * growth.FLAT + ALLOWANCE


def test_opening_a_grown_store_takes_no_more_steps(stores: dict[int, Path]) -> None:
    def opening(path: Path) -> int:
        steps = Steps()

        def opener(name: str, flags: int) -> apsw.Connection:
            connection = apsw.Connection(name, flags=flags)
            connection.set_progress_handler(steps, STEPS)
            return connection

        async def main() -> None:
            await (await SqliteStore(path, SystemClock(), inline=True, opener=opener).start()).close()

        asyncio.run(main())
        return steps.seen

    assert opening(stores[LARGE]) <= opening(stores[SMALL]) + ALLOWANCE


WALKS = {
    "a state as a parameter, which no partial index serves": "SELECT count(*) FROM work WHERE +state = 'running'",
    "a count of what is pending": "SELECT count(*) FROM work WHERE state = 'pending'",
    "events by time, through all of them": "SELECT max(sequence) FROM audit WHERE at >= 9e15",
}


@pytest.mark.parametrize("statement", WALKS.values(), ids=WALKS.keys())
def test_a_walk_through_the_rows_is_noticed(stores: dict[int, Path], statement: str) -> None:
    """The control: statements as they were before there were counters and indexes."""

    def walking(store: SqliteStore, _ended: list[str], _quarantined: list[str]) -> dict[str, growth.Call]:
        def walk() -> Awaitable[object]:
            return store._context.read(lambda connection: connection.execute(statement).get)

        return {"walk": walk}

    small, large = (counted(stores[size], "walk", walking) for size in (SMALL, LARGE))

    assert large > small * growth.FLAT + ALLOWANCE
