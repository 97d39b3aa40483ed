"""
A store in one SQLite file.

Several processes may open it. Leases are measured with the machine's steady clock, which all of them share: a wall
clock that jumps moves none of them. Due times and retention are wall time as each process believed it when it opened
the store. After a restart of the machine every lease is over.
"""

import os
from collections.abc import Callable
from pathlib import Path

import apsw
from msgspec import structs

from reefknot.core.time import Moment, Timeline
from reefknot.engines.sqlite import upkeep as maintenance
from reefknot.engines.sqlite.audit import SqliteAuditLog
from reefknot.engines.sqlite.connection import Opener, migrate, open_connection, plain_opener
from reefknot.engines.sqlite.control import SqliteControl
from reefknot.engines.sqlite.idempotency import SqliteIdempotencyStore
from reefknot.engines.sqlite.quarantine import SqliteQuarantine
from reefknot.engines.sqlite.reads import Link, Reader, Wake
from reefknot.engines.sqlite.transport import SqliteTransport
from reefknot.engines.sqlite.upkeep import CheckReport, TidierLock
from reefknot.engines.sqlite.work import SqliteLeases, SqliteWorkQueue
from reefknot.engines.sqlite.writer import Writer
from reefknot.errors import StoreUnavailableError
from reefknot.ports.clock import Clock
from reefknot.runtime import open_files

LONG = 3600.0
"""Seconds for what walks through the whole file."""


class SqliteStore:
    """All parts over one file. Make it with `await SqliteStore.open(…)`."""

    durable = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock,
        *,
        retention: float = 7 * 86400.0,
        largest_result: int = 1 << 20,
        most_keys: int | None = None,
        patience: float = 15.0,
        inline: bool = False,
        opener: Opener = plain_opener,
        synchronous: str = "FULL",
    ) -> None:
        self.path = str(Path(path).absolute())
        timeline = Timeline(steady=clock.now(), wall=clock.wall())

        def now() -> Moment:
            return timeline.at(clock.now())

        def connect() -> apsw.Connection:
            return open_connection(self.path, patience=patience, opener=opener, synchronous=synchronous)

        def connect_first() -> apsw.Connection:
            connection = connect()
            try:
                migrate(connection, self.path)
                _end_leases_of_an_earlier_boot(connection, lambda: now().steady)
            except BaseException:
                connection.close()
                raise
            return connection

        self._connect = connect
        self._wake = Wake(connect)
        self._writer = Writer(
            connect_first, now, path=self.path, patience=patience, committed=self._wake.fire, inline=inline
        )
        self._reader = Reader(connect, path=self.path, patience=patience, inline=inline)
        self._tidier = TidierLock(self.path)
        self._is_open = False
        link = Link(self._writer, self._reader, self._wake, now)
        self._link = link
        self.audit = SqliteAuditLog(link)
        self.idempotency = SqliteIdempotencyStore(
            link, self.audit, retention=retention, largest_result=largest_result, most_keys=most_keys
        )
        self.work = SqliteWorkQueue(link)
        self.quarantine = SqliteQuarantine(link)
        self.control = SqliteControl(link)
        self.leases = SqliteLeases(link)

    async def start(self) -> "SqliteStore":
        """Open the file, make or migrate its tables. A file of a newer version is refused."""
        if open_files.open_in_sqlite3(self.path):
            raise StoreUnavailableError(
                f"sqlite:{self.path}",
                "this process has it open through sqlite3 as well; closing one of the two SQLite libraries would drop "
                "the other's locks",
                "close the sqlite3 connection first, or look at the file from another process",
            )
        await self._writer.start()
        if not self._is_open:
            self._is_open = True
            open_files.store_opened(self.path)
        return self

    def transport(self) -> SqliteTransport:
        return SqliteTransport(self._link, self._connect, self._wake.nudge)

    async def close(self) -> None:
        self._wake.close()
        await self._writer.close()
        await self._reader.close()
        self._tidier.release()
        if self._is_open:
            self._is_open = False
            open_files.store_closed(self.path)

    @property
    def batches(self) -> int:
        """How many transactions were written so far."""
        return self._writer.batches

    def become_tidier(self) -> bool:
        """Be the one process of this host that removes what is past its retention. False when another one is."""
        return self._tidier.acquire()

    async def check(self) -> CheckReport:
        """Is the file whole, and does the chain of events hold?"""
        report = await self._link.read(maintenance.check_file, patience=LONG)
        return report if report.problems else structs.replace(report, mismatches=await self.audit.verify())

    async def backup(
        self, target: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """A copy of this moment as a store of its own. The target must not exist."""
        await self._link.read(lambda connection: maintenance.backup(connection, str(target), progress), patience=LONG)

    async def compact(self) -> int:
        """Give unused space back. Answers the bytes the file shrank by. Writers wait meanwhile."""
        return await self._link.read(lambda _: maintenance.compact(self.path, self._connect), patience=LONG)


def _end_leases_of_an_earlier_boot(connection: apsw.Connection, steady: Callable[[], int]) -> None:
    """No lease can end later than now plus its own length, unless the steady clock began anew: then it is over."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        now = steady()  # read under the lock: somebody may have claimed while we waited for it, and lives
        for table, state in (("idempotency", "in_progress"), ("work", "running")):
            statement = f"UPDATE {table} SET lease_until = 0 WHERE state = ? AND lease_until > ? + lease_ms"  # noqa: S608
            connection.execute(statement, (state, now))
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
