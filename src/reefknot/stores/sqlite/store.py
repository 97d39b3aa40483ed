"""
`SqliteStore`: all parts of a store in one SQLite file, which several processes may open.

Leases are measured with the machine's steady clock, which all processes share: a wall clock that jumps moves none of
them. Due times, deadlines and retention are in the wall time that all processes of the host with the open store agree
on: a process that opens it after the clock was set adopts the agreed time. After a restart of the machine every lease
has ended.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import apsw
from msgspec import structs

from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.time import Moment, Timeline, agreed_boot_time
from reefknot.errors import (
    ReefknotError,
    StorePermissionError,
    StoreReplacedError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.idempotency.model import KEY_RETENTION_S
from reefknot.queue.port.quarantine import QuarantineStore
from reefknot.runtime import open_files
from reefknot.runtime.forks import FORKS
from reefknot.runtime.sqlite_files import (
    MIGRATE,
    Opener,
    close_connection,
    empty_log,
    immediate,
    is_frozen,
    open_connection,
    open_read_only,
    patiently,
    plain_opener,
)
from reefknot.stores.port.engines import CheckReport
from reefknot.stores.sqlite.audit import SqliteAuditLog
from reefknot.stores.sqlite.connection import VERSION, check_readable, migrate
from reefknot.stores.sqlite.control import SqliteControl, SqliteValues
from reefknot.stores.sqlite.idempotency import SqliteIdempotencyStore
from reefknot.stores.sqlite.reads import ChangeWatcher, Reader, StoreContext
from reefknot.stores.sqlite.transport import SqliteTransport
from reefknot.stores.sqlite.upkeep import RetentionLock, back_up, check_file, compact, newest_record_at
from reefknot.stores.sqlite.wait_table import WaitTable
from reefknot.stores.sqlite.work import SqliteLeases, SqliteWorkQueue
from reefknot.stores.sqlite.writer import Writer

_IN_USE = "SELECT EXISTS (SELECT 1 FROM open_work) OR EXISTS (SELECT 1 FROM status WHERE stale_at > ?)"
"""Whether there is open work or a living system: both are measured by the agreed time."""
_END_EARLIER = "UPDATE {} SET lease_until = 0 WHERE state = '{}' AND lease_until > ? + lease_ms"
WHOLE_FILE_PATIENCE_S = 3600.0
"""Limit for reads that go through the whole file."""


class SqliteStore:
    """A durable store. Call `await store.start()` before its first use."""

    durable = True
    expires_by_itself = False
    reached_for = inf

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock,
        *,
        retention: float = KEY_RETENTION_S,
        largest_result: int = 1 << 20,
        most_keys: int | None = None,
        patience: float = 15.0,
        inline: bool = False,
        opener: Opener = plain_opener,
        synchronous: str = "FULL",
        read_only: bool = False,
    ) -> None:
        """`read_only` opens a file as it is: of the current version, or of an older one that reads know."""
        self.path = str(Path(path).absolute())
        self.identity = f"sqlite:{os.path.realpath(self.path)}"
        self.read_only = read_only
        self._inline = inline
        self._machine_clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self._file: open_files.OpenedFile | None = None
        self._version = VERSION
        self._patience = patience
        self._open = partial(open_connection, self.path, patience=patience, opener=opener, synchronous=synchronous)
        files: dict[str, Any] = {"path": self.path, "check_file": self._check_file}
        self._table = WaitTable(self.path)
        self._watcher = ChangeWatcher(
            self._connect,
            own_transactions=lambda: self._writer.transactions,
            is_writing=lambda: self._writer.is_busy,
            table=self._table,
            **files,
        )
        files |= {"patience": patience, "inline": inline}
        first = partial(patiently, self._connect_first, self.path, patience)
        self._writer = Writer(first, self._now, on_commit=self._watcher.changed, table=self._table, **files)
        self._reader = Reader(self._connect, **files)
        self._retention_lock = RetentionLock(self.path)
        self._opened: open_files.Identity | None = None
        submit = self._refuse_write if read_only else self._writer.submit
        self._context = context = StoreContext(submit, self._reader, self._watcher, self._now, self._table)
        self.audit = SqliteAuditLog(context)
        self.idempotency = SqliteIdempotencyStore(
            context,
            self.audit,
            retention=retention,
            largest_result=largest_result,
            most_keys=most_keys,
            connect=self._connect,
        )
        self.work = SqliteWorkQueue(context)
        self.quarantine = QuarantineStore(self.work)
        self.control = SqliteControl(context)
        self.leases = SqliteLeases(context, self._connect)
        self.values = SqliteValues(context)
        FORKS.in_child(self._let_go)

    def _now(self) -> Moment:
        return self._timeline.at(self._machine_clock.now())

    def _connect(self) -> apsw.Connection:
        """A further connection, which never creates a file: that would be another store than the open one."""
        if self.read_only:
            check = partial(check_readable, path=self.path)
            return open_read_only(self.path, patience=self._patience, check=check)
        return self._open(create=self._file is None)

    def _connect_first(self) -> apsw.Connection:
        """The writer's connection, over tables of the current version."""
        connection = self._open()
        try:
            empty_log(connection)
            migrate(connection, self.path)
            _end_leases_of_an_earlier_boot(connection, lambda: self._now().steady)
            _agree_on_time(connection, self._boot, self._timeline, self._machine_clock)
            self._file = open_files.OpenedFile(self.path)
        except BaseException:
            close_connection(connection)
            raise
        return connection

    @property
    def _boot(self) -> str:
        return getattr(self._machine_clock, "boot", "")

    def _check_file(self) -> None:
        """Raise if the open file is no longer the one under its name: writes would be lost."""
        if self._file is None or self._file.in_place:
            return
        problem = "its file was deleted or moved while it was open"
        if self.read_only:
            problem = "its file was written while it was open for reading only, without locks"
        elif not self._file.is_missing:
            problem = "its file, or its write-ahead log, was replaced while it was open"
        way_out = "restore the file if what it held is needed, then start again"
        raise StoreReplacedError(f"sqlite:{self.path}", problem, "try again" if self.read_only else way_out)

    def _refuse_write(self, *_: object, **__: object) -> NoReturn:
        if self._version != VERSION:
            problem = f"it has version {self._version}, this program writes {VERSION}, and it is open for reading only"
            raise StoreVersionError(f"sqlite:{self.path}", problem, MIGRATE)
        raise StorePermissionError(
            f"sqlite:{self.path}",
            "it may not be written, and is open for reading only",
            "give this user the right to write the file and its folder",
        )

    async def start(self) -> "SqliteStore":
        """Open the file, and unless it is read-only create or migrate its tables. A newer version is refused."""
        if open_files.open_in_sqlite3(self.path):
            raise StoreUnavailableError(
                f"sqlite:{self.path}",
                "this process has it open through sqlite3 as well; closing one of the two SQLite libraries would drop "
                "the other's locks",
                "close the sqlite3 connection first, or look at the file from another process",
            )
        if self.read_only:
            self._file = open_files.OpenedFile(self.path, frozen=is_frozen(self.path))
            await self._context.read(self._read_first)
        else:
            await self._writer.start()
            if not self._inline:
                self._table.open()
        if self._opened is None:
            self._opened = open_files.store_opened(self.path)
        return self

    def _read_first(self, connection: apsw.Connection) -> None:
        """Adopt the agreed time, and note the version of a file that is read as it is."""
        self._version = check_readable(connection, self.path)
        known: Any = connection.execute("SELECT began_at FROM boot WHERE name = ?", (self._boot,)).get
        if known is not None:
            self._timeline.offset = known / 1000

    @property
    def clock(self) -> SteadyClock:
        """The clock of this store's records. All processes of one host that have the store open agree on it."""
        return SteadyClock(self._machine_clock, offset=self._timeline.offset)

    def moment(self) -> Moment:
        return self._timeline.at(self._machine_clock.now())

    async def newest_record_at(self) -> int | None:
        return await self._context.read(newest_record_at)

    async def room(self) -> int:
        return shutil.disk_usage(Path(self.path).parent).free

    def transport(self, *, keeps_shared: bool = False) -> SqliteTransport:
        return SqliteTransport(self._context, self._connect, self._watcher.wake)

    async def close(self) -> None:
        self._watcher.close()
        await self._writer.close()
        await self._reader.close()
        self._table.close()
        self._retention_lock.release()
        opened, self._opened = self._opened, None
        open_files.store_closed(opened)

    def _let_go(self) -> None:
        """In a fork: leave everything to the parent. Calls are refused by the writer and the reader."""
        self._watcher.let_go()
        self._table.let_go()
        self._retention_lock.release()

    @property
    def failure(self) -> ReefknotError | None:
        """The disk error after which nothing more is written; None while the store works."""
        return self._writer.failure

    @property
    def batches(self) -> int:
        """Batches of requests written so far, each in one transaction."""
        return self._writer.batches

    def acquire_retention_lock(self) -> bool:
        """Become the one process of this host that applies retention. False when another one is."""
        return self._retention_lock.acquire()

    async def check(self) -> CheckReport:
        """Check SQLite's structures and, when those are whole, the chain of events and how each is filed."""
        report = await self._context.read(check_file, patience=WHOLE_FILE_PATIENCE_S)
        if report.problems:
            return report
        return structs.replace(report, mismatches=[*await self.audit.verify(), *await self.audit.index_mismatches()])

    async def backup(
        self, target: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Copy the store as of now to a new file, which is a store of its own. The target must not exist."""
        await self._context.read(
            lambda connection: back_up(connection, str(target), progress), patience=WHOLE_FILE_PATIENCE_S
        )

    async def compact(self) -> int:
        """Return unused space to the disk. Returns the bytes the file shrank by. Writers wait in the meantime."""
        if self.read_only:
            self._refuse_write()
        return await self._context.read(lambda _: compact(self.path, self._connect), patience=WHOLE_FILE_PATIENCE_S)


def _end_leases_of_an_earlier_boot(connection: apsw.Connection, steady: Callable[[], int]) -> None:
    """
    End leases that end later than now plus their length: they were measured by the steady clock of an earlier boot.

    No key has such a lease if the last change of a key is not in the future: a lease begins with a change.
    """
    with immediate(connection):
        now = steady()  # read under the lock: while this waited for it, another process may have claimed
        connection.execute(_END_EARLIER.format("work INDEXED BY work_leased", "running"), (now,))
        changed_at: Any = connection.execute("SELECT steady FROM counter").get
        if changed_at > now:
            connection.execute(_END_EARLIER.format("idempotency", "in_progress"), (now,))
            connection.execute("UPDATE counter SET steady = ?", (now,))


def _agree_on_time(connection: apsw.Connection, boot: str, timeline: Timeline, clock: Clock) -> None:
    """Adopt the wall time that the processes of this boot agreed on, or set it as the first process."""
    if not boot:
        return
    with immediate(connection):
        known: Any = connection.execute("SELECT began_at FROM boot WHERE name = ?", (boot,)).get
        now_ms = 0 if known is None else known + int(clock.now() * 1000)
        in_use: Any = connection.execute(_IN_USE, (now_ms,)).get
        agreed = agreed_boot_time(known, round(timeline.offset * 1000), in_use=bool(in_use))
        if agreed != known:
            connection.execute("DELETE FROM boot")
            connection.execute("INSERT INTO boot VALUES (?, ?)", (boot, agreed))
    timeline.offset = agreed / 1000
