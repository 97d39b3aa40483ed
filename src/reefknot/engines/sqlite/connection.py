"""
Opening the file, and saying in our words what SQLite says in its own.

WAL with `synchronous=FULL`: what was acknowledged survives a power cut. A connection belongs to one thread and is never
used across a fork. Local disks only: WAL needs shared memory.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import apsw

from reefknot.errors import (
    ReefknotError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)

Opener = Callable[[str, int], apsw.Connection]
"""How a connection comes to be: (path, flags). Fault tests put a recording or failing VFS in here."""

_READ_WRITE = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
LONGEST_NAP = 0.001


class Life:
    """Which life of this process it is: every fork begins another one. Asking the system each time costs more."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def forked(self) -> None:
        self.number += 1


LIFE = Life()
os.register_at_fork(after_in_child=LIFE.forked)


def plain_opener(path: str, flags: int) -> apsw.Connection:
    """SQLite's own VFS."""
    return apsw.Connection(path, flags=flags)


def open_connection(
    path: str, *, patience: float, opener: Opener = plain_opener, synchronous: str = "FULL"
) -> apsw.Connection:
    """A connection with our settings; the file and its folder are made when they are missing."""
    try:
        _make_file(path)
        connection = opener(path, _READ_WRITE)
        connection.set_busy_handler(_busy_handler(patience))
        _write_ahead(connection, path, patience)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -8000")
    except (apsw.Error, OSError) as error:
        raise translated(error, path) from error
    return connection


def _write_ahead(connection: apsw.Connection, path: str, patience: float) -> None:
    """Turn WAL on, and see that it is: where that fails, SQLite goes on in a mode that keeps less, without a word."""
    until = time.monotonic() + patience
    mode = None
    while mode is None:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").get
        except (apsw.BusyError, apsw.ProtocolError):
            # Two processes make the file at once; SQLite does not ask the busy handler here.
            if time.monotonic() > until:
                raise
            time.sleep(random.uniform(0.0002, LONGEST_NAP))
    if mode != "wal":
        connection.close()
        raise StoreUnavailableError(
            f"sqlite:{path}",
            f"its write-ahead log cannot be turned on (the journal stays {mode!r})",
            "make room on the disk, use a local one, and open the store again",
        )


def _make_file(path: str) -> None:
    """Ours alone: payloads and results are nobody else's to read."""
    file = Path(path)
    if not file.exists():
        made = [folder for folder in file.parents if not folder.exists()]
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        for folder in made:
            _sync_names(folder.parent)


def _sync_names(folder: Path) -> None:
    """A power cut must not take a new folder with all that is in it. SQLite does the same for its files' own folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:
        return  # not every file system can; SQLite does not insist either
    finally:
        os.close(opened)


def _busy_handler(patience: float) -> Callable[[int], bool]:
    """Short naps of random length. With SQLite's own, which grow to 100 ms, and with 4 ms, some processes starve."""
    began = 0.0

    def wait(earlier: int) -> bool:
        nonlocal began
        now = time.monotonic()
        if earlier == 0:
            began = now
        if now - began > patience:
            return False
        time.sleep(random.uniform(0.0002, LONGEST_NAP))
        return True

    return wait


def translated(error: BaseException, path: str) -> ReefknotError:
    """The same fact as an error of ours, with the way out in it."""
    store = f"sqlite:{path}"
    match error:
        case ReefknotError():
            return error
        case apsw.FullError():
            return StoreFullError(
                store, "the disk is full", "make room, then try again; nothing of this write was kept"
            )
        case apsw.CorruptError() | apsw.NotADBError() | UnicodeDecodeError():
            return StoreCorruptError(
                store, f"the file is damaged or no database ({error})", "restore a backup, or move the file away"
            )
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():  # the last: SQLite lost a race too often
            return StoreUnavailableError(
                store, "another process kept it locked for too long", "try again, or stop the other process"
            )
        case apsw.ReadOnlyError() | apsw.PermissionsError() | PermissionError():
            return StoreUnavailableError(
                store, "it may not be written", "give this user the right to write the file and its folder"
            )
        case apsw.CantOpenError() | OSError():
            return StoreUnavailableError(
                store,
                f"it cannot be opened ({error})",
                "check that the folder exists and that this user may write there",
            )
        case apsw.IOError():
            return StoreUnavailableError(
                store,
                f"the disk reported an error ({error}); whether the last write was kept is not known",
                "check the disk, then open the store again",
            )
        case _:
            return StoreError(store, f"{type(error).__name__}: {error}", "this is a defect; please report it")


def is_fatal(error: BaseException) -> bool:
    """Must nothing more be written through this connection? A failed fsync must not be tried again."""
    return isinstance(error, apsw.IOError | apsw.CorruptError | apsw.NotADBError | StoreVersionError)
