"""
Reads beside the writer.

One thread with a connection of its own: in WAL mode a reader never waits for the writer, nor the writer for it. Every
read is bounded in time.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import apsw

from reefknot.engines.sqlite.connection import LIFE, translated
from reefknot.errors import StoreUnavailableError

R = TypeVar("R")


class Reader:
    """Runs read-only functions of a connection. `inline`: no thread, for simulations in virtual time."""

    def __init__(
        self, open_it: Callable[[], apsw.Connection], *, path: str, patience: float, inline: bool = False
    ) -> None:
        self._open_it = open_it
        self._path = path
        self._patience = patience
        self._pool = None if inline else ThreadPoolExecutor(1, thread_name_prefix="reefknot-reader")
        self._connection: apsw.Connection | None = None
        self._closed = False
        self._life = LIFE.number

    async def read(self, function: Callable[[apsw.Connection], R], *, patience: float | None = None) -> R:
        """What the function finds. Each of its statements sees a snapshot."""
        patience = self._patience if patience is None else patience
        if self._closed or self._life != LIFE.number:
            raise StoreUnavailableError(f"sqlite:{self._path}", "it is closed, or was opened before a fork", "open it")
        if self._pool is None:
            return self._now(function)
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._now, function)
        try:
            async with asyncio.timeout(patience):
                return await running
        except TimeoutError as error:
            if self._connection is not None:
                self._connection.interrupt()
            problem = f"a read has not finished within {patience:g} s"
            raise StoreUnavailableError(f"sqlite:{self._path}", problem, "ask for less, or try again") from error

    def _now(self, function: Callable[[apsw.Connection], R]) -> R:
        try:
            if self._connection is None:
                self._connection = self._open_it()
                self._connection.execute("PRAGMA query_only = ON")
            return function(self._connection)
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            raise translated(error, self._path) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pool is None:
            self._let_go()
        elif self._life == LIFE.number:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._let_go)
            self._pool.shutdown(wait=False)

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
