"""
`SqliteDocuments`: the documents of all sources in one SQLite file, with full-text search.

A page, its deletions and its cursor are one transaction that begins with the write lock and compares the position
first. Several processes may have the file open; one that waits for the lock too long gets `StoreLockedError`.

Within a source one document has a location: who takes the location of another one replaces it, unless the other moves
in the same page.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import apsw
from msgspec.structs import replace

from reefknot.core.clock import Clock
from reefknot.errors import (
    ParameterError,
    StalePositionError,
    StorePermissionError,
    StoreReplacedError,
    StoreUnavailableError,
)
from reefknot.ingest.document_rows import (
    COLUMNS,
    LARGEST_ANSWER,
    MIGRATIONS,
    OLD_OF_SOURCE,
    delete,
    document_of,
    found_by,
    given,
    read_changes,
    rows_of,
    stored,
    stored_cursor,
    write,
)
from reefknot.ingest.model import parse_search
from reefknot.ingest.port import Document, DocumentChanges, KnownItem, Page, Position, SearchHit, SourceCounts
from reefknot.runtime import open_files
from reefknot.runtime.forks import FORKS, opened_before_fork
from reefknot.runtime.sqlite_files import (
    Opener,
    checked_version,
    close_connection,
    empty_log,
    immediate,
    is_fatal,
    is_frozen,
    migrated,
    open_connection,
    open_read_only,
    patiently,
    plain_opener,
    require_readable,
    translated,
)
from reefknot.runtime.timeouts import STORE_S

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

APPLICATION_ID = 0x5EEF1211
"""Marks the file, in its header, as reefknot's documents."""
SEARCH_S = 10.0
"""Longest time of a search: words that end in * may stand for all words of all documents."""
MIGRATION_S = 3600.0
MOST_ROWS = 10_000
"""Rows of one answer."""
MOST_ALIKE = 100
FORGOTTEN_AT_ONCE = 500

VERSION = len(MIGRATIONS)
READABLE_FROM = VERSION
"""The oldest version whose tables are read as they are."""

_MOVE = """
INSERT INTO positions (source, cursor, sequence, kept_at) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET cursor = excluded.cursor, sequence = excluded.sequence, kept_at = excluded.kept_at
"""
_FORGET = """
INSERT INTO positions (source, cursor, sequence) VALUES (?, '', 1)
ON CONFLICT DO UPDATE SET cursor = '', sequence = sequence + 1, kept_at = NULL
"""
_KNOWN = "SELECT id, location, version, fingerprint FROM documents WHERE source = ?"


class SqliteDocuments:
    """A store of documents. Call `await documents.start()` before its first use."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock,
        *,
        patience: float = 15.0,
        create: bool = True,
        read_only: bool = False,
        migrates: bool = True,
        inline: bool = False,
        opener: Opener = plain_opener,
    ) -> None:
        """
        Prepare; nothing is opened yet.

        `create=False` refuses a file that is not there, `migrates=False` one that has to be migrated first. `read_only`
        is for a file that may not be written: none is made or changed, nor is any file next to it. `inline` works in
        the caller's thread, for virtual time.
        """
        self.path = str(Path(path).absolute())
        self._clock = clock
        self._patience = patience
        self._open = partial(open_connection, self.path, patience=patience, opener=opener)
        self._create = create
        self._read_only = read_only
        self._migrates = migrates
        self._thread = None if inline else _DaemonThread("documents")
        self._generation = FORKS.generation
        self._connection: apsw.Connection | None = None
        self._file: open_files.OpenedFile | None = None
        self._identity: open_files.Identity | None = None
        self._until = 0.0
        self._is_closed = False

    async def start(self) -> "SqliteDocuments":
        """Open the file and create or migrate its tables. A newer version, or another program's file, is refused."""
        if open_files.open_in_sqlite3(self.path):
            raise StoreUnavailableError(
                f"sqlite:{self.path}",
                "this process has it open through sqlite3 as well; closing one of the two SQLite libraries would drop "
                "the other's locks",
                "close the sqlite3 connection first, or read the file from another process",
            )
        try:
            await self._run(lambda connection: None, seconds=MIGRATION_S)
        except BaseException:
            if self._thread is not None:
                self._thread.end()
            raise
        return self

    async def close(self) -> None:
        """Finish writes, then close. A second call does nothing."""
        if self._is_closed or self._generation != FORKS.generation:  # in a fork it is the parent's
            return
        self._is_closed = True
        if self._thread is None:
            self._disconnect()
            return
        closing = self._thread.submit(self._disconnect)
        self._thread.end()
        async with asyncio.timeout(STORE_S):
            await asyncio.wrap_future(closing)

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def identity(self) -> str:
        found = await self._run(lambda connection: connection.execute("SELECT identity FROM place").get)
        return f"{found} {self.path}"

    async def position(self, source: str) -> Position:
        """The position of a source; that of a new one is the beginning."""
        return await self._run(lambda connection: _position(connection, stored(source)))

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        """Keep documents, deletions and cursor of a page in one transaction. Returns the new position."""
        cursor = stored_cursor(source, page.cursor)
        rows, gone = rows_of(page.documents, page.deleted)
        moved = Position(page.cursor, after.sequence + 1)

        def work(connection: apsw.Connection) -> Position:
            with immediate(connection):
                if _position(connection, stored(source)) != after:
                    raise StalePositionError(source)
                write(connection, stored(source), rows, gone=gone, now=self._now())
                connection.execute(_MOVE, (stored(source), cursor, moved.sequence, self._now()))
            return moved

        return await self._run(work, writes=True)

    async def put(self, source: str, documents: Sequence[Document], *, deleted: Sequence[str] = ()) -> None:
        """Keep documents that were fetched by themselves; the position stays."""
        rows, gone = rows_of(documents, deleted)

        def work(connection: apsw.Connection) -> None:
            with immediate(connection):
                write(connection, stored(source), rows, gone=gone, now=self._now())

        await self._run(work, writes=True)

    async def forget(self, source: str, *, documents: bool = False) -> int:
        """Forget the cursor, so that the next sync reads everything; with `documents` those too. Returns how many."""

        def work(connection: apsw.Connection) -> int:
            with immediate(connection):
                # Each time: a page that is kept in between may lose documents to the next few.
                connection.execute(_FORGET, (stored(source),))
                if not documents:
                    return 0
                few: Any = connection.execute(
                    f"{OLD_OF_SOURCE} LIMIT ?", (stored(source), FORGOTTEN_AT_ONCE)
                ).fetchall()
                delete(connection, stored(source), few, now=self._now())
                return len(few)

        number = 0
        while forgotten := await self._run(work, writes=True):
            number += forgotten
        return number

    def _now(self) -> int:
        return round(self._clock.wall() * 1000)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def known(self, source: str) -> "SourceItems":
        """The documents that are kept of a source, for its connector."""
        return SourceItems(self._run, stored(source))

    async def search(self, words: str, *, source: str | None = None, limit: int = 20) -> list[SearchHit]:
        """The documents that a search finds, the best ones first; without words the newest ones first."""
        query = parse_search(words)
        if source is not None:
            if query.sources and source not in query.sources:
                return []
            query = replace(query, sources=(source,))
        work = partial(found_by, query=query, limit=_bounded(limit))
        return await self._run(work, seconds=SEARCH_S, too_long="use fewer words that end in *, or longer ones")

    async def changes(
        self, *, after: str | int = 0, source: str | None = None, limit: int = 1000, text: bool = True
    ) -> DocumentChanges:
        """The changes behind a cursor or sequence, each document once with its latest change."""
        name, limit = None if source is None else stored(source), _bounded(limit)

        def work(connection: apsw.Connection) -> DocumentChanges:
            self._check_file()  # one that was replaced has no more changes, and its consumer would wait for ever
            return read_changes(connection, after, source=name, limit=limit, text=text)

        return await self._run(work)

    async def get(self, source: str, document_id: str) -> Document | None:
        """A document with its content."""
        statement = f"SELECT {COLUMNS} FROM documents WHERE source = ? AND id = ?"  # noqa: S608 - our own words
        found = await self._documents(statement, (stored(source), stored(document_id)))
        return found[0] if found else None

    async def page(self, source: str, *, after: str = "", limit: int = 100) -> list[Document]:
        """Documents with their content in the order of their ids; fewer when they are large, none at the end."""
        statement = f"SELECT {COLUMNS} FROM documents WHERE source = ? AND id > ? ORDER BY id LIMIT ?"  # noqa: S608
        return await self._documents(statement, (stored(source), stored(after), _bounded(limit)))

    async def problems(self, source: str, *, limit: int = 100) -> list[Document]:
        """The documents with a problem, without their content."""
        columns = COLUMNS.replace("text", "''", 1)
        statement = f"SELECT {columns} FROM documents WHERE source = ? AND problem <> '' ORDER BY id LIMIT ?"  # noqa: S608
        return await self._documents(statement, (stored(source), _bounded(limit)))

    async def counts(self) -> dict[str, SourceCounts]:
        """The counts of every source that has a position or documents."""
        statement = "SELECT source, documents, problems, kept_at FROM positions WHERE documents > 0 OR kept_at NOT NULL"

        def work(connection: apsw.Connection) -> dict[str, SourceCounts]:
            rows: Any = connection.execute(statement)
            return {given(source): SourceCounts(*counts) for source, *counts in rows}

        return await self._run(work)

    async def _documents(self, statement: str, values: tuple[Any, ...]) -> list[Document]:
        def work(connection: apsw.Connection) -> list[Document]:
            found: list[Document] = []
            size = 0
            rows: Any = connection.execute(statement, values)
            for row in rows:
                found.append(document_of(*row))
                size += len(found[-1].text)
                if size > LARGEST_ANSWER:
                    break
            rows.close()
            return found

        return await self._run(work)

    # ---- the connection and its thread -----------------------------------------------------------------------------

    async def _run(self, work: Work[T], *, writes: bool = False, seconds: float | None = None, too_long: str = "") -> T:
        """
        The result of `work` on the connection, within a time limit; there may be others before it.

        Reading that is late or not wanted any more is interrupted: SQLite asks the progress handler between its own
        steps, and one step over the index of words may take minutes.
        """
        if self._generation != FORKS.generation:
            raise opened_before_fork(f"sqlite:{self.path}")
        if self._is_closed:
            raise StoreUnavailableError(f"sqlite:{self.path}", "it is closed", "open it again")
        if writes and self._read_only:
            way_out = "give this user the right to write the file and its folder"
            problem = "it may not be written, and is open for reading only"
            raise StorePermissionError(f"sqlite:{self.path}", problem, way_out)
        if self._thread is None:
            return self._carried_out(work, writes=writes)
        seconds = 2 * STORE_S if seconds is None else seconds
        begun = self._thread.submit(partial(self._carried_out, work, writes=writes))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(begun)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not writes:
                self._thread.while_running(begun, self._interrupt)
            if isinstance(error, asyncio.CancelledError):
                raise
            if too_long:
                problem = f"the search needed more than {seconds:g} s, and was ended"
                raise StoreUnavailableError(f"sqlite:{self.path}", problem, too_long) from None
            problem = f"the disk has not answered for {seconds:g} s; whether the last write was kept is not known"
            raise StoreUnavailableError(f"sqlite:{self.path}", problem, "check the disk, then start again") from None

    def _interrupt(self) -> None:
        if self._connection is not None:
            self._connection.interrupt()

    def _carried_out(self, work: Work[T], *, writes: bool) -> T:
        try:
            self._until = time.monotonic() + STORE_S
            connection = self._connected()
            if writes:
                self._check_file()
            done = work(connection)
            if self._read_only:
                self._check_unwritten()
            return done
        except apsw.InterruptError:
            problem = f"it needed more than {STORE_S:g} s; nothing was changed"
            raise StoreUnavailableError(f"sqlite:{self.path}", problem, "ask for less, or try again") from None
        except (apsw.ConstraintError, apsw.MismatchError) as error:  # the values are at fault, not the store
            accepted = f"what its columns can hold ({error}); correct the connector"
            raise ParameterError("documents", "a page", accepted) from error
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            if is_fatal(
                error
            ):  # after a failed fsync nothing more is written here: the next change opens the file again
                self._disconnect()
            raise translated(error, self.path) from error

    def _connected(self) -> apsw.Connection:
        if self._connection is None:
            frozen = self._read_only and is_frozen(self.path)
            before = open_files.OpenedFile(self.path, frozen=frozen) if self._read_only else None
            self._connection = patiently(self._connect, self.path, self._patience)
            self._connection.set_progress_handler(lambda: time.monotonic() > self._until, 100_000)
            self._file = before or open_files.OpenedFile(self.path)
            self._identity = open_files.store_opened(self.path)
        return self._connection

    def _connect(self) -> apsw.Connection:
        if self._read_only:
            return open_read_only(self.path, patience=self._patience, check=partial(_check_tables, path=self.path))
        connection = self._open(create=self._create and self._file is None)
        try:
            if not self._migrates and connection.pragma("user_version"):
                _check_tables(connection, self.path, may_write=True)
                return connection
            empty_log(connection)
            migrated(connection, self.path, application_id=APPLICATION_ID, migrations=MIGRATIONS)
        except BaseException:
            close_connection(connection)
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            close_connection(self._connection)
            open_files.store_closed(self._identity)
            self._connection = None

    def _check_file(self) -> None:
        """Raise when the file that is open is not the one that has its name: what is written would be lost."""
        if self._file is not None and not self._file.in_place:
            problem = "the file of the documents was deleted, moved or replaced while it was open"
            way_out = (
                f"put it back; or stop reefknot, remove {self.path}-wal and {self.path}-shm if they are left, and "
                "start it again: sources are then read from the beginning"
            )
            raise StoreReplacedError(f"sqlite:{self.path}", problem, way_out)

    def _check_unwritten(self) -> None:
        """Raise when the file was written or left while it was read: a file without its log is read without locks."""
        if self._file is not None and not self._file.in_place:
            self._disconnect()
            problem = "the file of the documents was written, closed or replaced by another process while it was read"
            raise StoreReplacedError(f"sqlite:{self.path}", problem, "try again")


class _DaemonThread:
    """A thread that carries out one call after the other. The exit of the process does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """The result of `work`, to come."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=self._serve, args=(self._calls,), name=self._name, daemon=True).start()
        call: Future[T] = Future()
        self._calls.put((call, work))
        return call

    def end(self) -> None:
        """Let the thread end behind what was submitted. The next call gets a new one."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def while_running(self, call: Future[Any], act: Callable[[], None]) -> None:
        """Do something while this call runs; nothing when it does not."""
        with self._lock:
            if self._running is call:
                act()

    def _serve(self, calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
        while (one := calls.get()) is not None:
            call, work = one
            if not call.set_running_or_notify_cancel():
                continue
            with self._lock:
                self._running = call
            try:
                result = work()
            except BaseException as error:
                self._finish()
                call.set_exception(error)
            else:
                self._finish()
                call.set_result(result)
            del one, call, work

    def _finish(self) -> None:
        with self._lock:
            self._running = None


class SourceItems:
    """The documents that are kept of one source, without their content."""

    def __init__(self, run: Callable[[Work[Any]], Any], source: str) -> None:
        self._run = run
        self._source = source

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        """The items at these locations, by location."""
        found: list[KnownItem] = []
        for first in range(0, len(locations), MOST_ROWS):
            wanted = json.dumps([stored(one) for one in locations[first : first + MOST_ROWS]])
            found += await self._items("AND location IN (SELECT value FROM json_each(?))", wanted)
        return {item.location: item for item in found}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        """The items with this content, at most 100."""
        if not fingerprint:
            return []
        # The + keeps SQLite from reading the whole source in the order of locations: an index has the fingerprint.
        condition = "AND fingerprint = ? AND fingerprint <> '' ORDER BY +location LIMIT ?"
        return await self._items(condition, stored(fingerprint), MOST_ALIKE)

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        """The next items behind a location in the order of their locations; with a `prefix` only those beneath it."""
        beneath, place = stored(prefix), stored(location)
        condition = "AND location > ? AND location >= ? AND location < ? ORDER BY location LIMIT ?"
        return await self._items(condition, place, beneath, f"{beneath}\U0010ffff", _bounded(limit))

    async def _items(self, condition: str, *values: Any) -> list[KnownItem]:
        def work(connection: apsw.Connection) -> list[KnownItem]:
            rows: Any = connection.execute(f"{_KNOWN} {condition}", (self._source, *values))
            return [KnownItem(*map(given, row)) for row in rows]

        found: list[KnownItem] = await self._run(work)
        return found


def _check_tables(connection: apsw.Connection, path: str, *, may_write: bool = False) -> None:
    """Refuse a file that would have to be migrated first: what looks at it does not."""
    found = checked_version(connection, path, application_id=APPLICATION_ID, newest=VERSION)
    require_readable(found, path, readable_from=READABLE_FROM, newest=VERSION, may_write=may_write)


def _position(connection: apsw.Connection, source: str) -> Position:
    row: Any = connection.execute("SELECT cursor, sequence FROM positions WHERE source = ?", (source,)).fetchone()
    return Position(given(row[0]), row[1]) if row else Position()


def _bounded(limit: int) -> int:
    if not 1 <= limit <= MOST_ROWS:
        raise ParameterError("limit", limit, f"a number from 1 to {MOST_ROWS}")
    return limit
