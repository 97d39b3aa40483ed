"""
A block on SQLite, whichever driver speaks to it.

SQLite has one writer. `BEGIN IMMEDIATE` takes that place before the key is looked at, so what is seen is the latest,
and nobody else can take the key until this block ends. Waiting is done in short naps with the driver's own busy timeout
set aside: a driver that waits inside of one call would hold up the event loop, and with it the task it waits for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from reefknot.engines.ledger.claims import Found, Nap, Steps, Table
from reefknot.errors import (
    IdempotencyError,
    KeyInProgressError,
    StoreCorruptError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
    shown,
)

if TYPE_CHECKING:
    import sqlite3

    import apsw


class ApswHandle:
    """A connection of `apsw`. It never begins a transaction by itself."""

    error: type[Exception]

    def __init__(self, conn: apsw.Connection) -> None:
        import apsw  # only the driver that is in use is loaded

        self.error = apsw.Error
        self._conn = conn

    def run(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        cursor = self._conn.cursor()
        cursor.row_trace = _as_it_comes  # the connection's own may make rows that we cannot read
        try:
            return list(cursor.execute(sql, tuple(values)))
        finally:
            cursor.close()

    def in_transaction(self) -> bool:
        return self._conn.in_transaction

    def code(self, error: Exception) -> int:
        return getattr(error, "extendedresult", 0)


def _as_it_comes(cursor: apsw.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row


class Sqlite3Handle:
    """
    A connection of the standard library's `sqlite3`.

    Its isolation levels differ in who begins a transaction: the module before a write (the default), nobody (`None`, or
    `autocommit=True`), or the module at all times (`autocommit=False`). `in_transaction` tells, and the ledger begins
    by an explicit statement that all of them obey. Under `autocommit=False` a transaction is always open: a block joins
    it, and the caller's `commit()` keeps both.
    """

    error: type[Exception]

    def __init__(self, conn: sqlite3.Connection) -> None:
        import sqlite3

        self.error = sqlite3.Error
        self._conn = conn

    def run(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        cursor = self._conn.cursor()
        cursor.row_factory = None  # the caller's own makes rows that we cannot read
        try:
            return cursor.execute(sql, tuple(values)).fetchall()
        finally:
            cursor.close()

    def in_transaction(self) -> bool:
        return self._conn.in_transaction

    def code(self, error: Exception) -> int:
        return getattr(error, "sqlite_errorcode", 0)


SHORTEST_NAP = 0.0005
LONGEST_NAP = 0.01


class Code(IntEnum):
    """SQLite's own codes. The lowest byte says the kind."""

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


_NOW = "(strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))"


class Handle(Protocol):
    """A driver's connection, as far as we need it."""

    error: type[Exception]

    def run(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...

    def in_transaction(self) -> bool: ...

    def code(self, error: Exception) -> int:
        """SQLite's extended code; 0 when there is none."""
        ...


class SqliteTransaction:
    """One block's transaction, or its savepoint inside of the caller's."""

    needs_await = False

    def __init__(self, handle: Handle, table: Table, wait: float) -> None:
        self._handle = handle
        self._table = table
        self._wait = wait
        self._joined = False
        self._begun = False

    def begin(self, key: str) -> Steps[None]:
        self._joined = self._handle.in_transaction()
        try:
            if not self._joined:
                yield from self._patiently("BEGIN IMMEDIATE")
            # Also in a transaction of our own: at the end it tells whether the block ended the transaction by itself.
            self._handle.run("SAVEPOINT reefknot_once")
            self._begun = True
        except self._handle.error as error:
            self._say(error, key)

    def take(self, key: str, fingerprint: str) -> Steps[Found | None]:
        # The write comes first: in a transaction that has not read yet, a read would fix a state that may be old.
        try:
            if (yield from self._insert(key, fingerprint)):
                return None
            ((theirs, result),) = self._handle.run(self._table.find("?"), (key,))
        except self._handle.error as error:
            self._say(error, key)
        return Found(_as_text(theirs), None if result is None else _as_text(result))

    def _insert(self, key: str, fingerprint: str) -> Steps[bool]:
        try:
            return bool((yield from self._patiently(self._table.take("?"), (key, fingerprint))))
        except self._handle.error as error:
            if self._handle.code(error) & 0xFF != Code.ERROR:
                raise
        self._handle.run(self._table.create("TEXT", _NOW))  # most likely it is not there yet
        return bool((yield from self._patiently(self._table.take("?"), (key, fingerprint))))

    def keep(self, key: str, result: str) -> Steps[None]:
        if not self._handle.in_transaction() or not self._released():
            raise _ended_inside(key)
        try:
            if not self._handle.run(self._table.keep("?"), (result, key)):
                raise _ended_inside(key)
            if not self._joined:
                yield from self._patiently("COMMIT")  # a reader may hold it up when the journal is no WAL
        except self._handle.error as error:
            self._say(error, key, committing=True)

    def _released(self) -> bool:
        try:
            self._handle.run("RELEASE reefknot_once")
        except self._handle.error:
            return False
        return True

    def undo(self) -> Steps[None]:
        yield from ()
        try:
            if not self._handle.in_transaction():
                return
            if self._joined and self._begun:
                self._handle.run("ROLLBACK TO reefknot_once")
                self._handle.run("RELEASE reefknot_once")
            elif not self._joined:
                self._handle.run("ROLLBACK")
        except self._handle.error:
            return  # SQLite rolled back by itself, or the savepoint is gone with the transaction it was in

    def _patiently(self, sql: str, values: Sequence[object] = ()) -> Steps[list[tuple[Any, ...]]]:
        """Again while somebody else has the lock, until the wait is over; then the driver's own error."""
        until = time.monotonic() + self._wait
        nap = SHORTEST_NAP
        while True:
            try:
                return self._at_once(sql, values)
            except self._handle.error as error:
                code = self._handle.code(error)
                if (
                    code & 0xFF not in (Code.BUSY, Code.LOCKED)
                    or code == Code.BUSY_SNAPSHOT
                    or time.monotonic() >= until
                ):
                    raise
            yield Nap(min(random.uniform(nap / 2, nap), max(0.0, until - time.monotonic())))
            nap = min(LONGEST_NAP, nap * 2)

    def _at_once(self, sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Without the driver's busy timeout. A busy handler shows as a timeout of 0, and is left alone."""
        timeout = int(self._handle.run("PRAGMA busy_timeout")[0][0])
        if not timeout:
            return self._handle.run(sql, values)
        self._handle.run("PRAGMA busy_timeout = 0")
        try:
            return self._handle.run(sql, values)
        finally:
            self._handle.run(f"PRAGMA busy_timeout = {timeout}")

    def _say(self, error: Exception, key: str, *, committing: bool = False) -> NoReturn:
        ours = self._translated(error, key, committing=committing)
        if ours is error:
            raise error
        raise ours from error

    def _translated(self, error: Exception, key: str, *, committing: bool) -> Exception:
        """The same fact as an error of ours, with the way out in it; what we have no word for stays as it is."""
        code = self._handle.code(error)
        store = f"ledger {self._table.quoted}"
        match code & 0xFF:
            case _ if code == Code.BUSY_SNAPSHOT:
                return StoreUnavailableError(
                    store,
                    "the open transaction has read a state that is no longer the latest",
                    "roll it back and run it again, from its start; begin it with BEGIN IMMEDIATE to avoid this",
                )
            case Code.BUSY | Code.LOCKED if committing:
                return StoreUnavailableError(
                    store, "readers kept it from committing, so it was rolled back", "run the block again"
                )
            case Code.BUSY | Code.LOCKED:
                return KeyInProgressError(
                    key, owner="another transaction that holds this database's write lock", retry_after=0.0
                )
            case Code.FULL:
                return StoreFullError(store, "the disk is full", "make room, then run the block again")
            case Code.CORRUPT | Code.NOTADB:
                return StoreCorruptError(store, f"the file is damaged or no database ({error})", "restore a backup")
            case Code.READONLY | Code.CANTOPEN:
                return StoreUnavailableError(
                    store,
                    f"it may not be written ({error})",
                    "give this user the right to write the file and its folder",
                )
            case Code.IOERR:
                return StoreUnavailableError(
                    store,
                    f"the disk reported an error ({error}); whether the last write was kept is not known",
                    "check the disk, open a new connection, and run the block again with the same key",
                )
            case Code.ERROR:
                return StoreVersionError(
                    store, f"the table is not a ledger ({error})", "name another one: ledger(conn, table=...)"
                )
            case _:
                return error


def _ended_inside(key: str) -> IdempotencyError:
    return IdempotencyError(
        f"the block of key {shown(key)} ended its own transaction (commit, rollback, `with conn:` or executescript); "
        "what it committed is not undone. Leave the end of the transaction to the block"
    )


def _as_text(value: str | bytes) -> str:
    """A connection may be set to give text as bytes."""
    return value.decode() if isinstance(value, bytes) else value
