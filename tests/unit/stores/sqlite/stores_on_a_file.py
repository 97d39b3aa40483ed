"""Stores on a file of the test, and what other programs do to that file."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import apsw

from reefknot.idempotency.model import Claimed, Done
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore


@asynccontextmanager
async def opened(path: Path, clock: VirtualClock | None = None, **options: Any) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore(path, clock or VirtualClock(), **options).start()
    try:
        yield store
    finally:
        await store.close()


def by_hand(path: Path, statements: str) -> Any:
    """The first value of what another program reads from the file or does to it."""
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(statements).get
    finally:
        connection.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@asynccontextmanager
async def waits_for_the_lock(store: SqliteStore, path: Path) -> AsyncIterator[asyncio.Task[Any]]:
    """A claim that cannot be written inside, while another process has the lock, and that is granted afterwards."""
    with locked(path):
        waiting = asyncio.create_task(store.idempotency.claim("k", owner="me"))
        yield waiting
        assert not waiting.done()
    assert isinstance(await waiting, Claimed)


async def ended(store: SqliteStore, *keys: str) -> None:
    for key in keys:
        answer = await store.idempotency.claim(key, owner=key)
        assert isinstance(answer, Claimed)
        await store.idempotency.finish(answer.claim, Done("1"))
