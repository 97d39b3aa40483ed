"""
SQLite files of reefknot: how they are made and opened, who waits for whom, and SQLite's errors as reefknot's.

WAL with `synchronous=FULL`: what was acknowledged survives a power cut. A connection belongs to one thread and is never
used across a fork. Local disks only: WAL needs shared memory.
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import apsw

from reefknot.errors import (
    ReefknotError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePermissionError,
    StoreReplacedError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.runtime.files import make_store_private, note_open
from reefknot.runtime.log import logger

T = TypeVar("T")

Opener = Callable[[str, int], apsw.Connection]
"""Makes a connection from (path, flags). Fault tests put a recording or failing VFS in here."""

LARGEST_IDLE_LOG = 16 << 20
"""Size in bytes that the log keeps when it restarts. It may grow beyond while a reader holds an old snapshot."""
SNAPSHOT_S = 2.0
"""Longest time in seconds for which a read holds one snapshot, because the log cannot restart until it is released.
Longer reads go in pages. A copy of the file is the exception: it is one snapshot."""
_TAKEN = (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)
"""Others have the file. Protocol: SQLite lost a race too often."""
_READ_WRITE = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


def plain_opener(path: str, flags: int) -> apsw.Connection:
    """A connection through SQLite's own VFS."""
    return apsw.Connection(path, flags=flags, statementcachesize=1000)


def open_connection(
    path: str, *, patience: float, opener: Opener = plain_opener, synchronous: str = "FULL", create: bool = True
) -> apsw.Connection:
    """A connection with the store's settings. With `create`, the file and its folder are made when they are missing."""
    return patiently(lambda: _opened(path, patience, opener, synchronous, create=create), path, patience)


def patiently(attempt: Callable[[], T], path: str, patience: float) -> T:
    """
    The result of `attempt`, which is tried again for `patience` seconds while others have the file.

    While several connections make, recover or leave one file, SQLite may report that it is busy without asking the busy
    handler.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return attempt()
        except _TAKEN as error:
            if time.monotonic() > until:
                raise translated(error, path) from error
            pause()
        except (apsw.Error, OSError) as error:
            raise translated(error, path) from error


def _opened(path: str, patience: float, opener: Opener, synchronous: str, *, create: bool) -> apsw.Connection:
    if create:
        _make_file(path)
    connection = opener(path, _READ_WRITE if create else apsw.SQLITE_OPEN_READWRITE)
    note_open(connection, path)
    try:
        connection.set_busy_handler(busy_handler(patience))
        _enable_wal(connection, path)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA journal_size_limit = {LARGEST_IDLE_LOG}")
        connection.execute("PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -24000")
    except BaseException:
        close_connection(connection)  # left open, it would share the log of a file that is put in the place of this one
        raise
    return connection


def open_read_only(path: str, *, patience: float, check: Callable[[apsw.Connection], object]) -> apsw.Connection:
    """
    A connection to a file that may not be written: no file is made or changed.

    `check` raises when the file is not the right one.

    While another process has the file open, and after a crash, the log and its index exist and are read as they are.
    A log without its index, as in a copy, is read into memory. Without a log no process has the file open; SQLite
    would create one, and opening the file as immutable prevents that. See `is_frozen`.
    """

    def attempt() -> apsw.Connection:
        query = "" if not is_frozen(path) else "&vfs=unix-none" if _has_log(path) else "&immutable=1"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(f"file:{quote(path)}?mode=ro{query}", flags=flags)
        if not query:
            note_open(connection, path)
        try:
            connection.set_busy_handler(busy_handler(patience))
            connection.execute("PRAGMA temp_store = MEMORY; PRAGMA query_only = ON")
            if "unix-none" in query:
                # Without locks, SQLite takes itself for the last one to leave, and removes a log that it cannot read.
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # the index of the log is then kept in memory
            check(connection)
        except BaseException:
            close_connection(connection)
            raise
        return connection

    return patiently(attempt, path, patience)


def is_frozen(path: str) -> bool:
    """Whether no process has the file open, as far as its folder tells: then it is read without locks."""
    real = os.path.realpath(path)
    return not (os.path.exists(f"{real}-wal") and os.path.exists(f"{real}-shm"))


def _has_log(path: str) -> bool:
    log = f"{os.path.realpath(path)}-wal"
    return os.path.exists(log) and os.path.getsize(log) > 0


def is_writable(path: str) -> bool:
    """Whether this user may write the file and its folder, in which SQLite keeps the log."""
    real = os.path.realpath(path)
    return os.access(real, os.W_OK) and os.access(os.path.dirname(real), os.W_OK | os.X_OK)


def empty_log(connection: apsw.Connection) -> None:
    """
    Move what is in the log into the file, so that the log restarts.

    After a failed fsync, the system may show pages of the log that the disk never got. The next process to open the
    file would take them for written and append to them, and a power cut would lose everything appended.
    """
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def close_connection(connection: apsw.Connection) -> None:
    """Close. What the disk refuses now is done by the next one to open the file: all acknowledged rows are in it."""
    with suppress(apsw.Error):
        connection.close()


def _enable_wal(connection: apsw.Connection, path: str) -> None:
    """Turn WAL on and check that it is: where that fails, SQLite silently goes on in a mode that is less durable."""
    mode = connection.execute("PRAGMA journal_mode = WAL").get
    if mode != "wal":
        raise StoreUnavailableError(
            f"sqlite:{path}",
            f"its write-ahead log cannot be turned on (the journal stays {mode!r})",
            "make room on the disk, use a local one, and open the store again",
        )


def _make_file(path: str) -> None:
    """Create the file for this user alone, or make it so: others must not read payloads and results."""
    file = Path(path)
    left = [name for name in (f"{path}-wal", f"{path}-shm") if os.path.exists(name)]  # made after the file, always
    if file.exists():
        make_store_private(path)
    elif left:
        raise StoreReplacedError(
            f"sqlite:{path}",
            f"the file was deleted or moved, but {' and '.join(left)} remain, and a process may have it open",
            "put the file back; or stop what runs on it and remove the rest, to begin a new store",
        )
    else:
        made = [folder for folder in file.parents if not folder.exists()]
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        for folder in made:
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the entry of a new folder durable. SQLite does the same for its files' own folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:
        return  # not every file system can; SQLite does not insist on it either
    finally:
        os.close(opened)


def busy_handler(patience: float) -> Callable[[int], bool]:
    """Waits for other processes in pauses of `_pause`, for `patience` seconds in all."""
    began = 0.0

    def wait(earlier: int) -> bool:
        nonlocal began
        now = time.monotonic()
        if earlier == 0:
            began = now
        if now - began > patience:
            return False
        pause()
        return True

    return wait


def pause() -> None:
    """Sleep up to 1 ms, at random. With SQLite's own pauses, which grow to 100 ms, some processes starve."""
    time.sleep(random.uniform(0.0002, 0.001))


@contextmanager
def immediate(connection: apsw.Connection) -> Iterator[None]:
    """A transaction that begins with the write lock, is committed at the end of the scope, and undone by an error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        # An error of the disk has ended the transaction already, and is the one to report.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


# One statement sees one snapshot: another process may be creating the tables right now.
_IDENTITY = (
    "SELECT (SELECT user_version FROM pragma_user_version), (SELECT application_id FROM pragma_application_id), "
    "(SELECT count(*) FROM sqlite_schema)"
)


UNRELEASED = frozenset({0x5EEF1207, 0x5EEF1208})
"""Marks of stores and documents that were written before version 0.1.0, in other tables."""


def checked_version(connection: apsw.Connection, path: str, *, application_id: int, newest: int | None) -> int:
    """
    The file's version. `StoreVersionError` when it is above `newest`, or the file is another program's.

    With None any version will do: a copy needs none that this program knows.
    """
    store = f"sqlite:{path}"
    rows: Any = connection.execute(_IDENTITY).fetchall()  # read to its end: an open statement keeps the connection busy
    ((found, marked, tables),) = rows
    if marked in UNRELEASED:
        way_out = "finish its work with the version that wrote it, then name another file"
        raise StoreVersionError(store, "it was written by a reefknot before 0.1.0, whose files are not read", way_out)
    if marked != application_id and (found or tables):
        raise StoreVersionError(store, "it is a database of another program", "name another file")
    if newest is not None and found > newest:
        copy = _copy_to_go_back_to(path, newest)
        other = f"stop the system and go back to {copy}, which the upgrade kept" if copy else "another file"
        text = f"it has version {found}, this program knows up to {newest}"
        raise StoreVersionError(store, text, f"use a newer reefknot, or {other}")
    return int(found)


def _copy_to_go_back_to(path: str, newest: int) -> str:
    """The latest copy of a file that a migration has kept and whose version is known; "" when there is none."""
    copies = [f"{path}.v{version}{more}.bak" for version in range(1, newest + 1) for more in _COPY_NUMBERS]
    return max((one for one in copies if os.path.exists(one)), key=os.path.getmtime, default="")


# ---- migrations ------------------------------------------------------------------------------------------------------

MOST_COPIES = 5
"""The copies of one version that migrations keep next to a file."""
_COPY_NUMBERS = ("", *(f".{number}" for number in range(2, MOST_COPIES + 1)))
_PAGES_PER_STEP = 2048
_SPARE_BYTES = 4 << 20
"""Room that is left for the migration itself."""


def migrated(
    connection: apsw.Connection,
    path: str,
    *,
    application_id: int,
    migrations: Sequence[str],
    finish: Callable[[int], None] = lambda found: None,
) -> int:
    """
    Bring a file to the version of the last of these migrations, in one transaction. Returns the version it had.

    Before anything is changed, the file is copied to `NAME.vN.bak`: an upgrade is undone by moving that copy back.
    `finish` is called with the version, before the end of the transaction.
    """
    newest = len(migrations)
    check = partial(checked_version, connection, path, application_id=application_id, newest=newest)
    if check() == newest:
        return newest
    with immediate(connection):
        found = check()  # another process may have done it meanwhile
        copy = kept_copy(path, found, newest) if 0 < found < newest else ""
        for migration in migrations[found:]:
            connection.execute(migration)
        finish(found)
        connection.execute(f"PRAGMA application_id = {application_id}; PRAGMA user_version = {newest}")
    if copy:
        logger().warning("%s: migrated from version %d to %d; the file as it was: %s", path, found, newest, copy)
    return found


def require_readable(found: int, path: str, *, readable_from: int, newest: int, may_write: bool) -> None:
    """Refuse a file that has to be migrated before it is read. What only looks does not migrate."""
    if readable_from <= found <= newest:
        return
    problem, way_out = f"it has version {found}, which is read after a migration to {newest}", MIGRATE
    if not may_write:
        problem += ", and it may not be written"
        way_out = "copy it to a folder that may be written, run `reefknot store migrate` there, and read the copy"
    raise StoreVersionError(f"sqlite:{path}", problem, way_out)


MIGRATE = (
    "migrate it with `reefknot store migrate`, which keeps a copy of it, or by starting the system; or use the version "
    "of reefknot that wrote it"
)


def kept_copy(path: str, version: int, newest: int) -> str:
    """
    Copy a file to `NAME.vN.bak`, and return that name. The caller holds the write lock.

    An existing copy stays, because it may be the one to go back to. The next one is `NAME.vN.2.bak`, and so on.
    """
    store, to = f"sqlite:{path}", f"before its migration from version {version} to {newest}"
    names = [f"{path}.v{version}{more}.bak" for more in _COPY_NUMBERS]
    target = next((name for name in names if not os.path.exists(name)), None)
    if target is None:
        problem = f"no copy of it is made {to}: there are {MOST_COPIES} of that version already, up to {names[-1]}"
        raise StoreUnavailableError(store, problem, "move those away that are not needed any more, and start again")
    log = f"{path}-wal"
    needed = os.path.getsize(path) + (os.path.getsize(log) if os.path.exists(log) else 0) + _SPARE_BYTES
    free = shutil.disk_usage(os.path.dirname(path) or ".").free
    full = StoreFullError(
        store, f"there is no room for a copy of it {to} ({needed} bytes, {free} free)", "make room, and start again"
    )
    if free < needed:
        raise full
    partial_copy = f"{target}.partial"
    Path(partial_copy).unlink(missing_ok=True)  # a process that was killed has left it
    source = plain_opener(path, apsw.SQLITE_OPEN_READONLY)  # the other connection has a write under way
    try:
        copy_database(source, partial_copy)
        os.rename(partial_copy, target)
        sync_folder(Path(path).parent)
    except apsw.FullError as error:
        raise full from error
    finally:
        close_connection(source)
        Path(partial_copy).unlink(missing_ok=True)
    return target


def copy_database(source: apsw.Connection, target: str, progress: Callable[[int, int], None] | None = None) -> None:
    """
    Copy a database as of now, its log included, to a new file. Writers may go on meanwhile.

    The source is read as one snapshot: otherwise SQLite would restart the copy after each write of another process, and
    never finish while a system is busy.
    """
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    copy = apsw.Connection(target)
    try:
        source.execute("BEGIN; SELECT count(*) FROM sqlite_schema").fetchall()
        with copy.backup("main", source, "main") as running:
            while not running.done:
                running.step(_PAGES_PER_STEP)
                if progress is not None:
                    progress(running.page_count - running.remaining, running.page_count)
    finally:
        if source.in_transaction:
            source.execute("COMMIT")
        copy.close()


def translated(error: BaseException, path: str) -> ReefknotError:
    """The error as one of reefknot's, with what to do about it."""
    store = f"sqlite:{path}"
    unavailable = partial(StoreUnavailableError, store)
    match error:
        case ReefknotError():
            return error
        case apsw.FullError():
            way_out = "make room, then try again; nothing of this write was kept"
            return StoreFullError(store, "the disk is full", way_out)
        case apsw.CorruptError() | apsw.NotADBError() | UnicodeDecodeError():
            problem = f"the file is damaged or no database ({error})"
            return StoreCorruptError(store, problem, "restore a backup, or move the file away")
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            problem = "another process kept it locked for too long"
            return StoreLockedError(store, problem, "try again, or stop the other process")
        case apsw.ReadOnlyError() | apsw.PermissionsError() | PermissionError():
            return StorePermissionError(store, "it may not be written", _GRANT)
        case apsw.CantOpenError() if _is_forbidden(path):
            return StorePermissionError(store, "it may not be opened: permission denied", _GRANT)
        case apsw.CantOpenError() | OSError():
            way_out = "check that the folder exists and that this user may write there"
            return unavailable(f"it cannot be opened ({error})", way_out)
        case apsw.IOError():
            problem = f"the disk reported an error ({error}); whether the last write was kept is not known"
            return unavailable(problem, "check the disk, then open the store again")
        case _:
            return StoreError(store, f"{type(error).__name__}: {error}", "this is a defect; please report it")


_GRANT = "give this user the right to write the file and its folder"


def _is_forbidden(path: str) -> bool:
    """Whether this user may not use the file, or the nearest folder above it that exists. SQLite does not say why."""
    file = Path(path)
    if os.path.exists(file) and not os.access(file, os.R_OK | os.W_OK):
        return True
    folder = next((one for one in file.absolute().parents if one.is_dir()), None)
    return folder is not None and not os.access(folder, os.W_OK | os.X_OK)


def is_fatal(error: BaseException) -> bool:
    """Whether nothing more may be written through this connection. A failed fsync must not be tried again."""
    fatal = apsw.IOError | apsw.CorruptError | apsw.NotADBError | StoreVersionError | StoreReplacedError
    return isinstance(error, fatal)
