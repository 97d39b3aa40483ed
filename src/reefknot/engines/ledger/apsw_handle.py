"""A connection of `apsw`. It never begins a transaction by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw


class ApswHandle:
    error: type[Exception] = apsw.Error

    def __init__(self, conn: apsw.Connection) -> None:
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
