"""Looking after the file: is it whole, a copy of it, and giving space back."""

import os
from collections.abc import Callable
from pathlib import Path

import apsw
from msgspec import Struct

from reefknot.core.audit.chain import Head, Mismatch
from reefknot.engines.sqlite.audit import heads
from reefknot.engines.sqlite.schema import VERSION
from reefknot.errors import StoreUnavailableError

_PAGES_AT_ONCE = 256


class CheckReport(Struct, frozen=True):
    """What `store check` found. It is fine when both lists are empty."""

    problems: list[str]
    mismatches: list[Mismatch]
    head: Head
    version: int
    sqlite: str

    @property
    def ok(self) -> bool:
        return not self.problems and not self.mismatches


def check_file(connection: apsw.Connection) -> CheckReport:
    """SQLite's own check. The chain is walked by the log, in many short reads."""
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
    problems = [line for line in found if line != "ok"]
    return CheckReport(problems, [], heads(connection)[0], VERSION, apsw.sqlite_lib_version())


def backup(connection: apsw.Connection, target: str, progress: Callable[[int, int], None] | None) -> None:
    """Copy the store as it stands. Writers may go on meanwhile."""
    if Path(target).exists():
        raise StoreUnavailableError(f"sqlite:{target}", "it exists already", "name a file that does not exist")
    try:
        os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        problem = f"it cannot be written ({(error.strerror or str(error)).lower()})"
        way_out = "name a file in a folder that is there and that this user may write to"
        raise StoreUnavailableError(f"sqlite:{target}", problem, way_out) from error
    copy = apsw.Connection(target)
    try:
        with copy.backup("main", connection, "main") as running:
            while not running.done:
                running.step(_PAGES_AT_ONCE)
                if progress is not None:
                    progress(running.page_count - running.remaining, running.page_count)
        copy.execute("PRAGMA journal_mode = WAL")
    finally:
        copy.close()


def compact(path: str, connect: Callable[[], apsw.Connection]) -> int:
    """Rewrite the file without its holes. Answers the bytes that gave back, its write-ahead log's among them."""
    before = _size(path)
    connection = connect()
    try:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    return before - _size(path)


def _size(path: str) -> int:
    log = Path(f"{path}-wal")
    return Path(path).stat().st_size + (log.stat().st_size if log.exists() else 0)
