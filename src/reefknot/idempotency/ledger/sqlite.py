"""
`SqliteTransaction`: a ledger block on SQLite, through `sqlite3` or `apsw`.

SQLite has one writer. `BEGIN IMMEDIATE` takes the write lock before the key is looked at, so what is seen is the latest
state, and no other transaction can claim the key until this block ends. Waiting for the lock is done in short pauses
with the driver's own busy timeout switched off: a driver that waits inside of one call would block the event loop, and
with it the task it waits for.
"""

from __future__ import annotations

import asyncio
import random
import time
from enum import IntEnum
from functools import partial
from typing import Any

from reefknot.errors import (
    KeyInProgressError,
    StoreCorruptError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.idempotency.ledger.claims import LedgerTable, Sleep, StoredKey, ended_inside, translating

MIN_PAUSE_S = 0.0005
MAX_PAUSE_S = 0.01

_NOW = "(strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))"


class Code(IntEnum):
    """SQLite's result codes. The lowest byte is the primary code."""

    ERROR = 1
    BUSY = 5
    LOCKED = 6
    READONLY = 8
    IOERR = 10
    CORRUPT = 11
    FULL = 13
    CANTOPEN = 14
    NOTADB = 26
    BUSY_SNAPSHOT = 517


class SqliteDriver:
    """
    A connection of `apsw` or of the standard library's `sqlite3`; only the driver in use is imported.

    `apsw` never begins a transaction by itself. The isolation levels of `sqlite3` differ in that: the module begins one
    before a write (the default), never (`None`, or `autocommit=True`), or keeps one open at all times
    (`autocommit=False`). `in_transaction` tells, and the ledger begins by an explicit statement that all of them obey.
    Under `autocommit=False` a block joins the open transaction, and the caller's `commit()` keeps both.
    """

    error: type[Exception]

    def __init__(self, conn: Any, name: str) -> None:
        self._conn = conn
        if name == "apsw":
            import apsw

            self.error, self._code = apsw.Error, "extendedresult"
            self._row_hook: tuple[str, Any] = ("row_trace", _unchanged)
        else:
            import sqlite3

            self.error, self._code, self._row_hook = sqlite3.Error, "sqlite_errorcode", ("row_factory", None)

    def run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a statement, as plain tuples: the caller's own factories make rows of any shape."""
        cursor = self._conn.cursor()
        setattr(cursor, *self._row_hook)
        try:
            return list(cursor.execute(sql, values))
        finally:
            cursor.close()

    def in_transaction(self) -> bool:
        return bool(self._conn.in_transaction)

    def code(self, error: Exception) -> int:
        """SQLite's extended result code, 0 without one."""
        return getattr(error, self._code, 0)


def _unchanged(cursor: Any, row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row


_BY = " (commit, rollback, `with conn:` or executescript)"


class SqliteTransaction:
    """A block's transaction on SQLite, or its savepoint inside of the caller's."""

    needs_await = False

    def __init__(self, driver: SqliteDriver, table: LedgerTable, wait: float) -> None:
        self._driver = driver
        self._table = table
        self._wait = wait
        self._joined = False
        self._begun = False
        self.sleep: Sleep = asyncio.sleep

    async def begin(self, key: str) -> None:
        self._joined = self._driver.in_transaction()
        with translating(self._driver.error, partial(self._translated, key)):
            if not self._joined:
                await self._wait_for_lock("BEGIN IMMEDIATE")
            # Also in a transaction of our own: at the end it shows whether the body ended the transaction by itself.
            self._driver.run("SAVEPOINT reefknot_once")
            self._begun = True

    async def claim(self, key: str, fingerprint: str) -> StoredKey | None:
        # The write comes first: in a transaction that has not read yet, a read would pin a state that may be old.
        with translating(self._driver.error, partial(self._translated, key)):
            if await self._insert(key, fingerprint):
                return None
            ((theirs, result),) = self._driver.run(self._table.find("?"), key)
        return StoredKey(_as_text(theirs), None if result is None else _as_text(result))

    async def _insert(self, key: str, fingerprint: str) -> bool:
        try:
            return bool(await self._wait_for_lock(self._table.claim("?"), key, fingerprint))
        except self._driver.error as error:
            if self._driver.code(error) & 0xFF != Code.ERROR:
                raise
        self._driver.run(self._table.create("TEXT", _NOW))  # most likely the table is not there yet
        return bool(await self._wait_for_lock(self._table.claim("?"), key, fingerprint))

    async def record(self, key: str, result: str) -> None:
        if not self._driver.in_transaction() or not self._release():
            raise ended_inside(key, _BY)
        with translating(self._driver.error, partial(self._translated, key, committing=True)):
            if not self._driver.run(self._table.record("?"), result, key):
                raise ended_inside(key, _BY)
            if not self._joined:
                await self._wait_for_lock("COMMIT")  # a reader may delay it when the journal is no WAL

    def _release(self) -> bool:
        """Release the savepoint. False when it is gone, because the body ended the transaction."""
        try:
            self._driver.run("RELEASE reefknot_once")
        except self._driver.error:
            return False
        return True

    async def roll_back(self) -> None:
        try:
            if not self._driver.in_transaction():
                return
            if self._joined and self._begun:
                self._driver.run("ROLLBACK TO reefknot_once")
                self._driver.run("RELEASE reefknot_once")
            elif not self._joined:
                self._driver.run("ROLLBACK")
        except self._driver.error:
            return  # SQLite rolled back by itself, or the savepoint is gone with the transaction it was in

    async def _wait_for_lock(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement, again while another connection has the lock; after the wait, the driver's own error."""
        until = time.monotonic() + self._wait
        pause = MIN_PAUSE_S
        while True:
            try:
                return self._run_without_timeout(sql, *values)
            except self._driver.error as error:
                code = self._driver.code(error)
                is_locked = code & 0xFF in (Code.BUSY, Code.LOCKED) and code != Code.BUSY_SNAPSHOT
                if not is_locked or time.monotonic() >= until:
                    raise
            await self.sleep(min(random.uniform(pause / 2, pause), max(0.0, until - time.monotonic())))
            pause = min(MAX_PAUSE_S, pause * 2)

    def _run_without_timeout(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement without the driver's busy timeout. A busy handler shows as a timeout of 0, and stays."""
        timeout = int(self._driver.run("PRAGMA busy_timeout")[0][0])
        if not timeout:
            return self._driver.run(sql, *values)
        self._driver.run("PRAGMA busy_timeout = 0")
        try:
            return self._driver.run(sql, *values)
        finally:
            self._driver.run(f"PRAGMA busy_timeout = {timeout}")

    def _translated(self, key: str, error: Exception, *, committing: bool = False) -> Exception:
        """The error as one of reefknot's, with what to do about it; an unknown one stays as it is."""
        code = self._driver.code(error)
        store = f"ledger {self._table.quoted}"
        unavailable = partial(StoreUnavailableError, store)
        match code & 0xFF:
            case _ if code == Code.BUSY_SNAPSHOT:
                return unavailable(
                    "the open transaction has read a state that is no longer the latest",
                    "roll it back and run it again, from its start; begin it with BEGIN IMMEDIATE to avoid this",
                )
            case Code.BUSY | Code.LOCKED if committing:
                return unavailable("readers kept it from committing, so it was rolled back", "run the block again")
            case Code.BUSY | Code.LOCKED:
                owner = "another transaction that holds this database's write lock"
                return KeyInProgressError(key, owner=owner, retry_after=0.0)
            case Code.FULL:
                return StoreFullError(store, "the disk is full", "make room, then run the block again")
            case Code.CORRUPT | Code.NOTADB:
                return StoreCorruptError(store, f"the file is damaged or no database ({error})", "restore a backup")
            case Code.READONLY | Code.CANTOPEN:
                way_out = "give this user the right to write the file and its folder"
                return unavailable(f"it may not be written ({error})", way_out)
            case Code.IOERR:
                return unavailable(
                    f"the disk reported an error ({error}); whether the last write was kept is not known",
                    "check the disk, open a new connection, and run the block again with the same key",
                )
            case Code.ERROR:
                problem = f"the table is not a ledger ({error})"
                return StoreVersionError(store, problem, "name another one: ledger(conn, table=...)")
            case _:
                return error


def _as_text(value: str | bytes) -> str:
    """A connection may be set to give text as bytes."""
    return value.decode() if isinstance(value, bytes) else value
