"""
`PostgresTransaction`: a ledger block on PostgreSQL, through a sync or an async connection of psycopg.

psycopg's own `transaction()` begins and commits, or makes a savepoint inside of the caller's transaction, and refuses a
`commit()` in the middle. The key is claimed by an insert. While another transaction holds the key, that insert waits
for its end, bounded by a statement timeout that is put back right after.

A serialization failure or a deadlock is raised as psycopg raises it, everything undone: run the block again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from reefknot.engines.ledger.claims import LedgerTable, Steps, StoredKey, ended_inside, raise_translated
from reefknot.errors import (
    IdempotencyError,
    KeyInProgressError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)

MAX_WAIT_MS = 2**31 - 1
SLACK_S = 0.05
"""The server's timer and this process's do not start at the same moment."""

_PREPARE = (
    "SELECT current_setting('statement_timeout'), set_config('statement_timeout', %s, true), to_regclass(%s)::text"
)
_RESTORE_TIMEOUT = "SELECT set_config('statement_timeout', %s, true)"
_LOCK_CREATION = "SELECT pg_advisory_xact_lock(1919249510, hashtext(%s))"  # any number that only the ledger uses


class _RollBackError(Exception):
    """Passed to psycopg's `transaction()` to make it roll back."""


class PostgresTransaction:
    """A block's transaction on PostgreSQL, or its savepoint inside of the caller's."""

    def __init__(
        self, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], table: LedgerTable, wait: float
    ) -> None:
        self._conn = conn
        self._table = table
        self._wait = wait
        self._frame: Any = None
        self.needs_await = isinstance(conn, psycopg.AsyncConnection)

    def begin(self, key: str) -> Steps[None]:
        if self._conn.info.transaction_status is TransactionStatus.INERROR:
            raise IdempotencyError("the transaction that is open has failed; roll it back before the block")
        frame: Any = self._conn.transaction()
        enter = frame.__aenter__ if self.needs_await else frame.__enter__
        try:
            yield enter
        except psycopg.Error as error:
            raise_translated(error, self._translated(error, key))
        self._frame = frame

    def claim(self, key: str, fingerprint: str) -> Steps[StoredKey | None]:
        began = time.monotonic()
        try:
            earlier = yield from self._prepare()
            found = yield from self._insert_or_find(key, fingerprint)
            yield self._run(_RESTORE_TIMEOUT, (earlier,))
        except psycopg.Error as error:
            waited = time.monotonic() - began >= self._wait - SLACK_S
            raise_translated(error, self._translated(error, key, waited=waited))
        return found

    def _prepare(self) -> Steps[str]:
        """Bound the wait, and create the table if it is missing. Returns the statement timeout that was set before."""
        wait_ms = str(min(MAX_WAIT_MS, max(1, round(self._wait * 1000))))  # 0 would mean no limit
        ((earlier, _, there),) = yield self._run(_PREPARE, (wait_ms, self._table.quoted))
        if there is None:
            # Two transactions that create one table at once fail on the catalogue, in spite of IF NOT EXISTS.
            yield self._run(_LOCK_CREATION, (self._table.quoted,))
            yield self._run(self._table.create("timestamptz", "now()"))
        return str(earlier)

    def _insert_or_find(self, key: str, fingerprint: str) -> Steps[StoredKey | None]:
        while True:
            if (yield self._run(self._table.claim("%s"), (key, fingerprint))):
                return None
            rows = yield self._run(self._table.find("%s"), (key,))
            if rows:  # else the row was removed between the two statements
                return StoredKey(*rows[0])

    def record(self, key: str, result: str) -> Steps[None]:
        if self._conn.info.transaction_status is TransactionStatus.IDLE:
            raise ended_inside(key)
        try:
            if not (yield self._run(self._table.record("%s"), (result, key))):
                raise ended_inside(key)
            yield self._leave(None)
        except psycopg.Error as error:
            raise_translated(error, self._translated(error, key, committing=True))

    def roll_back(self) -> Steps[None]:
        if self._frame is None:
            return
        with suppress(psycopg.Error, _RollBackError):  # a connection that is lost has rolled back
            yield self._leave(_RollBackError())

    def _leave(self, error: BaseException | None) -> Callable[[], Any]:
        frame, self._frame = self._frame, None
        leave = frame.__aexit__ if self.needs_await else frame.__exit__
        return lambda: leave(None if error is None else type(error), error, None)

    def _run(self, sql: str, values: Sequence[object] = ()) -> Callable[[], Any]:
        """A step that runs one statement, with a cursor of its own: the caller's factories make rows of any shape."""
        conn = self._conn
        if isinstance(conn, psycopg.AsyncConnection):
            return partial(_fetch_async, conn, sql, values)
        return partial(_fetch, conn, sql, values)

    def _translated(
        self, error: psycopg.Error, key: str, *, waited: bool = False, committing: bool = False
    ) -> Exception:
        """The error as one of reefknot's, with what to do about it; an unknown one stays as it is."""
        state = error.sqlstate or ""
        store = f"ledger {self._table.quoted}"
        if state == "55P03" or (state == "57014" and waited):
            return KeyInProgressError(key, owner="another transaction", retry_after=0.0)
        if state == "53100":
            return StoreFullError(store, "the server's disk is full", "make room, then run the block again")
        if state in ("42501", "25006"):
            return StoreUnavailableError(
                store, f"it may not be written ({error})", "grant this role the right to write"
            )
        if state == "42703":
            return StoreVersionError(
                store, f"the table is not a ledger ({error})", "name another one: ledger(conn, table=...)"
            )
        if self._conn.closed or state.startswith(("08", "57P")):
            unknown = "; whether it was committed is not known" if committing else ""
            return StoreUnavailableError(
                store,
                f"the connection is lost ({error}){unknown}",
                "connect again, and run the block again with the same key: it happens once",
            )
        return error


def _fetch(conn: psycopg.Connection[Any], sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    with psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        cursor.execute(sql.encode(), values)
        return cursor.fetchall() if cursor.description else []


async def _fetch_async(conn: psycopg.AsyncConnection[Any], sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    async with psycopg.AsyncCursor(conn, row_factory=tuple_row) as cursor:
        await cursor.execute(sql.encode(), values)
        return await cursor.fetchall() if cursor.description else []
