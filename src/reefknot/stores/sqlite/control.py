"""The commands, statuses and named values of a SQLite store: what the processes that share the file exchange."""

from collections.abc import Sequence
from math import inf

import apsw
from msgspec import json

from reefknot.audit.port import AuditEntry
from reefknot.core.time import milliseconds
from reefknot.queue.model.submission import Capacity
from reefknot.queue.port.control import EVERYONE, NO_CAPACITY, SILENT_KEPT_S, Command, StatusReport
from reefknot.stores.port import StoredValue, checked_body, checked_name
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import Transaction, each
from reefknot.stores.sqlite.wait_table import CONTROL_TOPIC

_POLL = (
    "SELECT sequence, name, target, body, sender, at FROM command "
    "WHERE sequence > ? AND target IN (?, ?) AND stale_at > ? ORDER BY sequence LIMIT ?"
)
_REPORTS = "SELECT sequence, name, body, at FROM status WHERE stale_at > ? ORDER BY sequence"
_SILENT = "SELECT sequence, name, body, at FROM status WHERE stale_at <= ? AND stale_at > ? ORDER BY sequence"
_FORGET = "DELETE FROM status WHERE stale_at <= ?1 OR (name = ?2 AND stale_at <= ?3)"
_RENEW = "UPDATE status SET body = ?2, at = ?3, stale_at = ?4, capacity = ?5 WHERE name = ?1 RETURNING sequence"
_FIRST_REPORT = "INSERT INTO status (name, body, at, stale_at, capacity) VALUES (?1, ?2, ?3, ?4, ?5) RETURNING sequence"


class SqliteControl:
    """The commands and statuses of a SQLite store."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def post(
        self,
        name: str,
        *,
        target: str = EVERYONE,
        body: str = "{}",
        sender: str = "",
        keep: float = 300.0,
        events: Sequence[AuditEntry] = (),
    ) -> int:
        return await self._context.write(_post, (name, target, body, sender, milliseconds(keep), events))

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        values = (after, target, EVERYONE, self._context.now().wall, limit)
        return await self._context.read(lambda connection: [Command(*row) for row in query(connection, _POLL, values)])

    async def latest(self) -> int:
        return await self._context.look(lambda connection: int(query(connection, "SELECT command FROM counter").get))

    async def wait(self, timeout: float, *, after: int) -> int:
        return await self._context.watch(
            self.latest, CONTROL_TOPIC, pause=lambda latest: inf if latest <= after else 0.0, timeout=timeout
        )

    async def report(self, name: str, body: str, *, keep: float, capacity: Capacity = NO_CAPACITY) -> int:
        return await self._context.write(_report, (name, body, milliseconds(keep), json.encode(capacity).decode()))

    async def withdraw(self, name: str) -> None:
        await self._context.write(_withdraw, (name,))

    async def reports(self, *, silent: bool = False) -> list[StatusReport]:
        wall = self._context.now().wall
        sql, values = (_SILENT, (wall, wall - milliseconds(SILENT_KEPT_S))) if silent else (_REPORTS, (wall,))
        return await self._context.read(
            lambda connection: [StatusReport(*row) for row in query(connection, sql, values)]
        )


@each
def _post(
    transaction: Transaction, name: str, target: str, body: str, sender: str, keep_ms: int, events: Sequence[AuditEntry]
) -> int:
    now, counters = transaction.now.wall, transaction.counters
    transaction.connection.execute("DELETE FROM command WHERE stale_at <= ?", (now,))
    counters.command += 1
    row = (counters.command, name, target, body, sender, now, now + keep_ms)
    transaction.connection.execute("INSERT INTO command VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    transaction.add_events(events)
    transaction.touched.add(CONTROL_TOPIC)
    return counters.command


@each
def _report(transaction: Transaction, name: str, body: str, keep_ms: int, capacity: str) -> int:
    """Write a status without touching a topic: statuses have no waiters."""
    connection, now = transaction.connection, transaction.now.wall
    connection.execute(_FORGET, (now - milliseconds(SILENT_KEPT_S), name, now))
    row = (name, body, now, now + keep_ms, capacity)
    known = query(connection, _RENEW, row).get
    return int(query(connection, _FIRST_REPORT, row).get if known is None else known)


@each
def _withdraw(transaction: Transaction, name: str) -> None:
    transaction.connection.execute("DELETE FROM status WHERE name = ?", (name,))


class SqliteValues:
    """The named values of a SQLite store."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def get(self, name: str) -> StoredValue | None:
        checked_name(name)
        return await self._context.read(lambda connection: _value(connection, name))

    async def put(self, name: str, body: str, *, version: int, events: Sequence[AuditEntry] = ()) -> StoredValue | None:
        return await self._context.write(_put, (checked_name(name), checked_body(body), version, events))

    async def delete(self, name: str, *, version: int, events: Sequence[AuditEntry] = ()) -> bool:
        return await self._context.write(_delete, (checked_name(name), version, events))

    async def list(self, prefix: str = "") -> Sequence[StoredValue]:
        return await self._context.read(
            lambda connection: [StoredValue(*row) for row in query(connection, _LIST, (prefix,))]
        )


_DELETE = "DELETE FROM value WHERE name = ? AND version = ? RETURNING 1"
_GET = "SELECT name, body, version FROM value WHERE name = ?"
_LIST = "SELECT name, body, version FROM value WHERE substr(name, 1, length(?1)) = ?1 ORDER BY name"


def _value(connection: apsw.Connection, name: str) -> StoredValue | None:
    row = query(connection, _GET, (name,)).fetchone()
    return None if row is None else StoredValue(*row)


@each
def _put(
    transaction: Transaction, name: str, body: str, version: int, events: Sequence[AuditEntry]
) -> StoredValue | None:
    """Replace the row, so that the new one has a version that was never used."""
    connection = transaction.connection
    known = _value(connection, name)
    if version != (0 if known is None else known.version):
        return None
    connection.execute("DELETE FROM value WHERE name = ?", (name,))
    given = query(connection, "INSERT INTO value (name, body) VALUES (?, ?) RETURNING version", (name, body)).get
    transaction.add_events(events)
    return StoredValue(name, body, given)


@each
def _delete(transaction: Transaction, name: str, version: int, events: Sequence[AuditEntry]) -> bool:
    gone = query(transaction.connection, _DELETE, (name, version))
    if gone.get is None:
        return False
    transaction.add_events(events)
    return True
