"""
A block on PostgreSQL, through a sync or an async connection of psycopg.

psycopg's own `transaction()` is the frame: it begins and commits, or makes a savepoint inside of the caller's
transaction, and it refuses a `commit()` in the middle. The key is taken by an insert. While another transaction holds
the key, that insert waits for its end, bounded by a statement timeout that is put back right after.

A serialization failure or a deadlock is raised as psycopg raises it, everything undone: run the block again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from reefknot.engines.ledger.claims import Found, Steps, Table
from reefknot.errors import (
    IdempotencyError,
    KeyInProgressError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
    shown,
)

LONGEST_WAIT_MS = 2**31 - 1
SLACK_S = 0.05
"""The server's timer and ours do not start at the same moment."""

_PREPARE = (
    "SELECT current_setting('statement_timeout'), set_config('statement_timeout', %s, true), to_regclass(%s)::text"
)
_PUT_BACK = "SELECT set_config('statement_timeout', %s, true)"
_ONE_CREATOR = "SELECT pg_advisory_xact_lock(1919249510, hashtext(%s))"  # the number only has to be ours


class _UndoneError(Exception):
    """What psycopg is told when it shall roll back."""


class PostgresTransaction:
    """One block's transaction, or its savepoint inside of the caller's."""

    def __init__(self, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], table: Table, wait: float) -> None:
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
            self._say(error, key)
        self._frame = frame

    def take(self, key: str, fingerprint: str) -> Steps[Found | None]:
        began = time.monotonic()
        try:
            earlier = yield from self._prepare()
            found = yield from self._insert_or_find(key, fingerprint)
            yield self._run(_PUT_BACK, (earlier,))
        except psycopg.Error as error:
            waited = time.monotonic() - began >= self._wait - SLACK_S
            self._say(error, key, waited=waited)
        return found

    def _prepare(self) -> Steps[str]:
        """Bound the wait, and make the table if it is not there. Gives the timeout that was set before."""
        wait_ms = str(min(LONGEST_WAIT_MS, max(1, round(self._wait * 1000))))  # 0 would mean: for ever
        ((earlier, _, there),) = yield self._run(_PREPARE, (wait_ms, self._table.quoted))
        if there is None:
            # Two that create one table at once fail on the catalogue, whatever IF NOT EXISTS says.
            yield self._run(_ONE_CREATOR, (self._table.quoted,))
            yield self._run(self._table.create("timestamptz", "now()"))
        return str(earlier)

    def _insert_or_find(self, key: str, fingerprint: str) -> Steps[Found | None]:
        while True:
            if (yield self._run(self._table.take("%s"), (key, fingerprint))):
                return None
            rows = yield self._run(self._table.find("%s"), (key,))
            if rows:  # else it was removed between the two
                return Found(*rows[0])

    def keep(self, key: str, result: str) -> Steps[None]:
        if self._conn.info.transaction_status is TransactionStatus.IDLE:
            raise _ended_inside(key)
        try:
            if not (yield self._run(self._table.keep("%s"), (result, key))):
                raise _ended_inside(key)
            yield self._leave(None)
        except psycopg.Error as error:
            self._say(error, key, committing=True)

    def undo(self) -> Steps[None]:
        if self._frame is None:
            return
        with suppress(psycopg.Error, _UndoneError):  # a connection that is gone has rolled back
            yield self._leave(_UndoneError())

    def _leave(self, error: BaseException | None) -> Callable[[], Any]:
        frame, self._frame = self._frame, None
        leave = frame.__aexit__ if self.needs_await else frame.__exit__
        return lambda: leave(None if error is None else type(error), error, None)

    def _run(self, sql: str, values: Sequence[object] = ()) -> Callable[[], Any]:
        """A step that runs one statement. With a cursor of our own: the caller's factories make rows of any shape."""
        conn = self._conn
        if isinstance(conn, psycopg.AsyncConnection):
            return partial(_fetch_async, conn, sql, values)
        return partial(_fetch, conn, sql, values)

    def _say(self, error: psycopg.Error, key: str, *, waited: bool = False, committing: bool = False) -> NoReturn:
        ours = self._translated(error, key, waited=waited, committing=committing)
        if ours is error:
            raise error
        raise ours from error

    def _translated(self, error: psycopg.Error, key: str, *, waited: bool, committing: bool) -> Exception:
        """The same fact as an error of ours, with the way out in it; what we have no word for stays as it is."""
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


def _ended_inside(key: str) -> IdempotencyError:
    return IdempotencyError(
        f"the block of key {shown(key)} ended its own transaction; what it committed is not undone. "
        "Leave the end of the transaction to the block"
    )
