"""
A connection of the standard library's `sqlite3`.

Its isolation levels differ in who begins a transaction: the module before a write (the default), nobody (`None`, or
`autocommit=True`), or the module at all times (`autocommit=False`). `in_transaction` tells, and we begin by an explicit
statement that all of them obey. Under `autocommit=False` a transaction is always open: a block joins it, and the
caller's `commit()` keeps both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any


class Sqlite3Handle:
    error: type[Exception] = sqlite3.Error

    def __init__(self, conn: sqlite3.Connection) -> None:
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
