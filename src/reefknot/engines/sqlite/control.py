"""The control channel of a SQLite store: commands between the processes that share the file."""

from collections.abc import Sequence
from math import inf
from typing import Any

import apsw

from reefknot.core.time import milliseconds
from reefknot.engines.sqlite.reads import StoreContext
from reefknot.engines.sqlite.transaction import Transaction
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.control import EVERYONE, Command, StatusReport

_POLL = (
    "SELECT sequence, name, target, body, sender, at FROM command "
    "WHERE sequence > ? AND target IN (?, ?) AND stale_at > ? ORDER BY sequence LIMIT ?"
)
_REPORTS = "SELECT sequence, name, body, at FROM status WHERE stale_at > ? ORDER BY sequence"
_RENEW = "UPDATE status SET body = ?2, at = ?3, stale_at = ?4 WHERE name = ?1 RETURNING sequence"
_FIRST_REPORT = "INSERT INTO status (name, body, at, stale_at) VALUES (?1, ?2, ?3, ?4) RETURNING sequence"


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
        sequence: int = await self._context.write(_post_batch, (name, target, body, sender, milliseconds(keep), events))
        return sequence

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        now = self._context.now()

        def unread(connection: apsw.Connection) -> list[Command]:
            rows: Any = connection.execute(_POLL, (after, target, EVERYONE, now.wall, limit))
            return [Command(*row) for row in rows]

        return await self._context.read(unread)

    async def latest(self) -> int:
        return await self._context.read(_latest)

    async def wait(self, timeout: float, *, after: int) -> int:
        return await self._context.watch(
            self.latest, "control", pause=lambda latest: inf if latest <= after else 0.0, timeout=timeout
        )

    async def report(self, name: str, body: str, *, keep: float) -> int:
        sequence: int = await self._context.write(_report_batch, (name, body, milliseconds(keep)))
        return sequence

    async def withdraw(self, name: str) -> None:
        await self._context.write(_withdraw_batch, name)

    async def reports(self) -> list[StatusReport]:
        now = self._context.now()

        def fresh(connection: apsw.Connection) -> list[StatusReport]:
            rows: Any = connection.execute(_REPORTS, (now.wall,))
            return [StatusReport(*row) for row in rows]

        return await self._context.read(fresh)


def _latest(connection: apsw.Connection) -> int:
    number: Any = connection.execute("SELECT command FROM counter").get
    return int(number)


def _post_batch(transaction: Transaction, wanted: list[Any]) -> list[int]:
    now = transaction.now
    transaction.connection.execute("DELETE FROM command WHERE stale_at <= ?", (now.wall,))
    answers = []
    for name, target, body, sender, keep_ms, events in wanted:
        transaction.counters.command += 1
        sequence = transaction.counters.command
        row = (sequence, name, target, body, sender, now.wall, now.wall + keep_ms)
        transaction.connection.execute("INSERT INTO command VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        transaction.add_events(events)
        answers.append(sequence)
    transaction.touched.add("control")
    return answers


def _report_batch(transaction: Transaction, wanted: list[tuple[str, str, int]]) -> list[int]:
    """Write them without touching a topic: nobody waits for a status."""
    connection, now = transaction.connection, transaction.now.wall
    connection.execute("DELETE FROM status WHERE stale_at <= ?", (now,))
    answers: list[Any] = []
    for name, body, keep_ms in wanted:
        row = (name, body, now, now + keep_ms)
        known = connection.execute(_RENEW, row).get
        answers.append(connection.execute(_FIRST_REPORT, row).get if known is None else known)
    return answers


def _withdraw_batch(transaction: Transaction, wanted: list[str]) -> list[None]:
    transaction.connection.executemany("DELETE FROM status WHERE name = ?", [(name,) for name in wanted])
    return [None] * len(wanted)
