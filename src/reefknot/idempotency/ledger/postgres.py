"""
`PostgresTransaction`: a ledger block on PostgreSQL, through a sync or an async connection of psycopg.

psycopg's own `transaction()` begins and commits, or makes a savepoint inside of the caller's transaction, and refuses a
`commit()` in the middle. The key is claimed by an insert. While another transaction holds the key, that insert waits
for its end, bounded by a statement timeout that is put back right after.

A serialization failure or a deadlock is raised as psycopg raises it, everything undone: run the block again.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from reefknot.errors import (
    IdempotencyError,
    KeyInProgressError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.idempotency.ledger.claims import LedgerTable, Sleep, StoredKey, ended_inside, translating

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
        self.sleep: Sleep = asyncio.sleep

    async def begin(self, key: str) -> None:
        if self._conn.info.transaction_status is TransactionStatus.INERROR:
            raise IdempotencyError("the transaction that is open has failed; roll it back before the block")
        frame: Any = self._conn.transaction()
        with translating(psycopg.Error, partial(self._translated, key)):
            if self.needs_await:
                await frame.__aenter__()
            else:
                frame.__enter__()
        self._frame = frame

    async def claim(self, key: str, fingerprint: str) -> StoredKey | None:
        with translating(psycopg.Error, partial(self._translated, key, waiting_since=time.monotonic())):
            earlier = await self._prepare()
            found = await self._insert_or_find(key, fingerprint)
            await self._run(_RESTORE_TIMEOUT, earlier)
        return found

    async def _prepare(self) -> str:
        """Bound the wait, and create the table if it is missing. Returns the statement timeout that was set before."""
        wait_ms = str(min(MAX_WAIT_MS, max(1, round(self._wait * 1000))))  # 0 would mean no limit
        ((earlier, _, there),) = await self._run(_PREPARE, wait_ms, self._table.quoted)
        if there is None:
            # Two transactions that create one table at once fail on the catalogue, in spite of IF NOT EXISTS.
            await self._run(_LOCK_CREATION, self._table.quoted)
            await self._run(self._table.create("timestamptz", "now()"))
        return str(earlier)

    async def _insert_or_find(self, key: str, fingerprint: str) -> StoredKey | None:
        while True:
            if await self._run(self._table.claim("%s"), key, fingerprint):
                return None
            rows = await self._run(self._table.find("%s"), key)
            if rows:  # else the row was removed between the two statements
                return StoredKey(*rows[0])

    async def record(self, key: str, result: str) -> None:
        if self._conn.info.transaction_status is TransactionStatus.IDLE:
            raise ended_inside(key)
        with translating(psycopg.Error, partial(self._translated, key, committing=True)):
            if not await self._run(self._table.record("%s"), result, key):
                raise ended_inside(key)
            await self._leave(None)

    async def roll_back(self) -> None:
        if self._frame is not None:
            with suppress(psycopg.Error, _RollBackError):  # a connection that is lost has rolled back
                await self._leave(_RollBackError())

    async def _leave(self, error: BaseException | None) -> None:
        frame, self._frame = self._frame, None
        ended = (None if error is None else type(error), error, None)
        if self.needs_await:
            await frame.__aexit__(*ended)
        else:
            frame.__exit__(*ended)

    async def _run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of one statement, from a cursor of its own: the caller's factories make rows of any shape."""
        if isinstance(self._conn, psycopg.AsyncConnection):
            async with psycopg.AsyncCursor(self._conn, row_factory=tuple_row) as waiting:
                await waiting.execute(sql.encode(), values)
                return await waiting.fetchall() if waiting.description else []
        with psycopg.Cursor(self._conn, row_factory=tuple_row) as cursor:
            cursor.execute(sql.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def _translated(
        self, key: str, error: psycopg.Error, *, waiting_since: float | None = None, committing: bool = False
    ) -> Exception:
        """The error as one of reefknot's, with what to do about it; an unknown one stays as it is."""
        state = error.sqlstate or ""
        store = f"ledger {self._table.quoted}"
        waited = waiting_since is not None and time.monotonic() - waiting_since >= self._wait - SLACK_S
        if state == "55P03" or (state == "57014" and waited):
            return KeyInProgressError(key, owner="another transaction", retry_after=0.0)
        if state == "53100":
            return StoreFullError(store, "the server's disk is full", "make room, then run the block again")
        if state in ("42501", "25006"):
            problem = f"it may not be written ({error})"
            return StoreUnavailableError(store, problem, "grant this role the right to write")
        if state == "42703":
            problem = f"the table is not a ledger ({error})"
            return StoreVersionError(store, problem, "name another one: ledger(conn, table=...)")
        if self._conn.closed or state.startswith(("08", "57P")):
            unknown = "; whether it was committed is not known" if committing else ""
            way_out = "connect again, and run the block again with the same key: it happens once"
            return StoreUnavailableError(store, f"the connection is lost ({error}){unknown}", way_out)
        return error
