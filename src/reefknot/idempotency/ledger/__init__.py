"""
Mode `txn`: the idempotency record is kept in the caller's own database, and commits with the effect.

    async with rk.ledger(conn).once(key) as claim:
        if claim.done:
            return claim.result
        conn.execute("UPDATE account SET …")
        claim.result = {"paid": 20}

Effect and record are one transaction, so in this mode the effect happens exactly once per key, whatever crashes. That
holds only for what the block does on this very connection: an e-mail that it sends is not undone.

Works on `sqlite3`, `apsw` and `psycopg` connections. A driver is recognised by its class, without importing it.
"""

from __future__ import annotations

from typing import Any

from reefknot.core import checks
from reefknot.errors import ParameterTypeError, StoreUnavailableError
from reefknot.idempotency.ledger.claims import (
    DEFAULT_TABLE,
    Ledger,
    LedgerBlock,
    LedgerClaim,
    LedgerTable,
    LedgerTransaction,
)
from reefknot.runtime import open_files

__all__ = ["Ledger", "LedgerBlock", "LedgerClaim", "ledger"]

_ACCEPTED = "a connection of sqlite3, apsw or psycopg (psycopg's may be async)"


def ledger(conn: Any, *, table: str = DEFAULT_TABLE, wait: checks.Seconds = 30.0) -> Ledger:
    """
    The ledger in the database of `conn`. Its table is created when it is first needed.

    `wait` bounds, in seconds, how long a later caller of a key waits for the first one; then `KeyInProgressError`.
    `table` may be qualified: `billing.ledger`.
    """
    checked_table = LedgerTable.named(table)
    seconds = checks.seconds("wait", wait, or_zero=True, most=checks.LARGEST_FLOAT)

    def transaction() -> LedgerTransaction:
        return _transaction(conn, checked_table, seconds)

    transaction()  # a connection that cannot be used is refused here, not in the middle of the work
    return Ledger(conn, transaction)


def _transaction(conn: Any, table: LedgerTable, wait: float) -> LedgerTransaction:
    match _driver(conn):
        case "sqlite3" | "apsw" as driver:
            from reefknot.idempotency.ledger.sqlite import SqliteDriver, SqliteTransaction

            if driver == "sqlite3":
                _refuse_store_file(conn)
            return SqliteTransaction(SqliteDriver(conn, driver), table, wait)
        case "psycopg":
            from reefknot.idempotency.ledger.postgres import PostgresTransaction

            return PostgresTransaction(conn, table, wait)
        case _:
            raise ParameterTypeError("conn", conn, _ACCEPTED)


def _refuse_store_file(conn: Any) -> None:
    for file in open_files.connection_files(conn):
        if open_files.open_in_store(file):
            raise StoreUnavailableError(
                f"sqlite:{file}",
                "a store of this process has it open; closing one of the two SQLite libraries would drop the other's "
                "locks",
                "give the ledger a database of its own, or a connection of apsw",
            )


def _driver(conn: object) -> str:
    """The name of the driver of this connection (or of a subclass); empty for an unknown driver."""
    for cls in type(conn).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in ("sqlite3", "apsw") and cls.__name__ == "Connection":
            return package
        if package == "psycopg" and cls.__name__ in ("Connection", "AsyncConnection"):
            return package
    return ""
