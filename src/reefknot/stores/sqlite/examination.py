"""
The file of a store that is not open here: its state, a copy, and the half of `reefknot doctor` for SQLite.

A store in use is read while others write it: no check holds a lock for longer than a moment, and the check of the
content has a time limit.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, Literal

import apsw

from reefknot.errors import StoreCorruptError, StoreError, StoreLockedError, StoreUnavailableError
from reefknot.runtime.files import is_open_here, note_open
from reefknot.runtime.log import error_text
from reefknot.runtime.sqlite_files import (
    busy_handler,
    checked_version,
    close_connection,
    is_frozen,
    is_writable,
    open_read_only,
    patiently,
    plain_opener,
    translated,
)
from reefknot.stores.port.engines import Examination, FileState, Finding, Level, problem_of, size_text
from reefknot.stores.sqlite.connection import APPLICATION_ID, VERSION, check_version
from reefknot.stores.sqlite.upkeep import back_up

__all__ = ["check_unlocked", "copy", "disk_finding", "examination_of", "file_findings", "library_finding", "state"]

FREE_BYTES, FULL_BYTES = 1 << 30, 64 << 20
QUICK_CHECK = 10
"""Most damages that the quick check of a file lists."""
CHECK_S = 60.0
"""Time limit of the quick check of a file."""
OPEN_CHECK_S = 0.1
"""The same for a store that is open, whose findings a page shows."""
LOCKED_S = 2.0
"""Seconds for which a file that others have locked is waited for."""
KEEP_LOG = "copy the file and its log before another command opens them and drops the log; compare with a backup"
CHECK_STEPS = 10_000
"""Steps of SQLite's machine between two looks at the clock: well under a millisecond."""
WAL_RESET_FIXED = (3, 51, 3)
"""The first version of SQLite in which two connections that write and checkpoint at once cannot damage the file."""


def state(path: str) -> FileState:
    """The state of the file, read without changing anything; a newer version is refused."""
    connection = open_read_only(path, patience=15.0, check=lambda one: check_version(one, path))
    try:
        unused = int(connection.pragma("freelist_count")) * int(connection.pragma("page_size"))
        return FileState(check_version(connection, path), VERSION, unused)
    except apsw.Error as error:
        raise translated(error, path) from error
    finally:
        connection.close()


def copy(path: str, target: str, progress: Callable[[int, int], None]) -> FileState:
    """Copy a file of any version as of now, while others write it."""
    any_version = partial(checked_version, path=path, application_id=APPLICATION_ID, newest=None)
    connection = _open_to_copy(path, check=any_version)
    try:
        back_up(connection, target, progress)
        return FileState(any_version(connection), VERSION, 0)
    except apsw.Error as error:
        Path(target).unlink(missing_ok=True)
        raise translated(error, path) from error
    finally:
        close_connection(connection)


# ---- findings --------------------------------------------------------------------------------------------------------


def examination_of(path: str, *, is_named: bool) -> Examination:
    """All findings about a file that is not open here."""
    around = _log_findings(path) + _lock_findings(path)
    found = file_findings(path, CHECK_S, is_named=is_named) + around
    levels = {one.check: one.level for one in found}
    return Examination(found, is_ready=levels.get("schema") == "ok" and "problem" not in levels.values())


def file_findings(path: str, seconds: float, *, is_named: bool = False) -> list[Finding]:
    """Findings about the file of a store, read without changing it. The check of its content ends after `seconds`."""
    findings = [library_finding(apsw.sqlite_lib_version())]
    file = Path(path)
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        size = 0
    except OSError as error:  # a name that is too long, or a folder that this user may not enter
        return [*findings, problem_of("file", _unreadable(path, error))]
    if size == 0 or not file.is_file():
        missing = _missing(path, is_named=is_named)
        if file.is_file() and (logged := _log_state(path)[0]):
            text = f"{path} has 0 bytes, and its log {logged} bytes: its content is lost"
            missing = Finding("file", "problem", text, KEEP_LOG, "damaged")
        return [*findings, missing, disk_finding(path)]
    if is_writable(path):
        findings.append(Finding("file", "ok", f"{path}, {size} bytes"))
    else:
        text, way_out = f"{path} may be read and not written", "give this user the right to write it, and its folder"
        findings.append(Finding("file", "warning", text, way_out))
    findings.append(disk_finding(path))
    was_frozen = is_frozen(path)
    content = _content_findings(path, seconds)
    if was_frozen and not is_frozen(path):  # it was read without locks, and another process has opened it meanwhile
        content = _content_findings(path, seconds)
    return findings + content


def _missing(path: str, *, is_named: bool) -> Finding:
    """The finding about a file that is missing. Of one that was named it is a problem: it may be a slip in the name."""
    text = f"there is no store at {path}"
    if is_named:
        return Finding("file", "problem", text, "check the name in --engine", "unreachable")
    return Finding("file", "warning", f"{text} yet", "`reefknot submit`, `up` and `worker start` make one")


def _lock_findings(path: str) -> list[Finding]:
    """A finding when a process keeps the file locked, so that no other can write it; readers do not notice."""
    if not os.path.isfile(path) or is_frozen(path) or not is_writable(path):
        return []
    try:
        check_unlocked(path, LOCKED_S)
    except StoreLockedError as error:
        return [problem_of("lock", error)]
    except StoreError:
        pass  # the other checks report it in more detail
    return []


def _log_findings(path: str) -> list[Finding]:
    """A finding when the log holds bytes that SQLite ignores, as if they had never been written."""
    size, state = _log_state(path)
    text = f"{path}-wal has {size} bytes and no valid frame, so nothing in it is read"
    if state == "uncommitted":
        return [Finding("log", "warning", f"{text}: a write that never ended, or damage", KEEP_LOG)]
    return [Finding("log", "problem", text, KEEP_LOG, "damaged")] if state else []


def _content_findings(path: str, seconds: float) -> list[Finding]:
    try:
        connection = open_read_only(path, patience=LOCKED_S, check=lambda one: check_version(one, path))
        try:
            return _content(connection, path, seconds)
        finally:
            connection.close()
    except StoreCorruptError as error:
        return [problem_of("content", error)]
    except StoreError as error:
        return [problem_of("schema", error)]
    except apsw.Error as error:
        found = translated(error, path)
        return [problem_of("content", found if isinstance(found, StoreError) else _unreadable(path, found))]


def library_finding(version: str) -> Finding:
    """The version of SQLite that reefknot is linked with, and whether it has the race that damages files."""
    found = tuple(int(part) for part in version.split(".") if part.isdecimal())
    if found >= WAL_RESET_FIXED:
        return Finding("library", "ok", f"SQLite {version}")
    fixed = ".".join(map(str, WAL_RESET_FIXED))
    text = f"SQLite {version}: two processes that write at once may, very rarely, damage the file (fixed in {fixed})"
    return Finding("library", "warning", text, "pip install --upgrade apsw")


def _unreadable(path: str, error: Exception) -> StoreError:
    return StoreUnavailableError(
        path, f"it cannot be read ({error_text(error)})", "check its name, its folders and its disk"
    )


def _content(connection: Any, path: str, seconds: float) -> list[Finding]:
    found = check_version(connection, path)
    if found == VERSION:
        schema = Finding("schema", "ok", f"version {found}")
    else:
        text = f"version {found}; this program writes {VERSION}"
        schema = Finding("schema", "warning", text, "`reefknot store migrate`, which keeps a copy of the file as it is")
    durability = Finding("durability", "ok", "WAL, every commit synced: what is acknowledged survives a power cut")
    mode = connection.pragma("journal_mode")
    if mode != "wal" and not (is_frozen(path) and _has_wal_mode(path)):
        text = f"the journal mode is {mode}, not wal"
        durability = Finding("durability", "warning", text, "the next process that opens the store sets it back")
    return [schema, durability, _quick_check(connection, seconds)]


def _has_wal_mode(path: str) -> bool:
    """
    Whether the header of a file that no process has open says WAL; a connection to such a file does not show it.

    For a file that is open here, closing this second descriptor would release the locks that SQLite holds on it.
    """
    if is_open_here(os.stat(path)):
        return True  # as its connection has set it
    with open(path, "rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _quick_check(connection: Any, seconds: float) -> Finding:
    """The quick check of a file. It reads while others write, and ends after `seconds`."""
    until = monotonic() + seconds
    connection.set_progress_handler(lambda: monotonic() > until, CHECK_STEPS)
    damages: list[str] = []
    try:
        damages.extend(row[0] for row in connection.execute(f"PRAGMA quick_check({QUICK_CHECK})"))
    except apsw.InterruptError:
        if not damages:
            text = f"no damage found in {seconds:g} s, then stopped; `reefknot store check` runs to the end"
            return Finding("content", "ok", text)
    if damages != ["ok"]:
        way_out = "restore a backup next to it and compare both, before anything else is written"
        return Finding("content", "problem", "; ".join(damages), way_out, "damaged")
    return Finding("content", "ok", "the quick check found no damage; `reefknot store check` checks everything")


def disk_finding(path: str) -> Finding:
    """The finding about the room on the disk of a store, which need not be there."""
    try:
        free = shutil.disk_usage(next(one for one in Path(path).absolute().parents if one.is_dir())).free
    except OSError as error:
        return Finding("disk", "warning", f"free space is not known ({error_text(error)})", "look at the disk")
    level: Level = "problem" if free < FULL_BYTES else "warning" if free < FREE_BYTES else "ok"
    way_out = "" if level == "ok" else "make room: a full disk refuses new work"
    return Finding("disk", level, f"{size_text(free)} free", way_out)


# ---- the log of a file, and connections that leave it as it is -------------------------------------------------------

_LogState = Literal["", "damaged", "uncommitted"]
_LOG_HEADER = 32
_FRAME_HEADER = 24
_LOOKS = 3
_LOOK_AGAIN_S = 0.05


def _log_state(path: str) -> tuple[int, _LogState]:
    """
    The size of a file's log in bytes, and why SQLite finds nothing in it; "" when there is something, or no log at all.

    "damaged": its header, which is synced before anything else is written, is not valid. "uncommitted": its first
    transaction is not whole, as after a crash in the middle of it. The next process that writes the file drops such a
    log.
    """
    name = f"{os.path.realpath(path)}-wal"
    size = 0
    state: _LogState = ""
    with suppress(OSError):
        for look in range(_LOOKS if os.path.isfile(name) else 0):  # a pipe is not opened: it may have no other end
            if look:
                sleep(_LOOK_AGAIN_S)  # another process may be restarting the log right now
            with open(name, "rb") as log:
                size = os.fstat(log.fileno()).st_size
                state = _first_commit(log) if size > _LOG_HEADER else ""
            if not state:
                break
    return size, state


def _first_commit(log: IO[bytes]) -> _LogState:
    """The state of a log, read up to its first commit. The format: https://www.sqlite.org/fileformat2.html#walformat"""
    header = log.read(_LOG_HEADER)
    magic, _, page = struct.unpack(">3I", header[:12])
    order = {0x377F0682: "<", 0x377F0683: ">"}.get(magic)
    total = (0, 0) if order is None else _checksum(header[:24], (0, 0), order)
    if order is None or total != struct.unpack(">2I", header[24:]) or not 512 <= page <= 65536:
        return "damaged"
    while len(frame := log.read(_FRAME_HEADER + page)) == _FRAME_HEADER + page:
        total = _checksum(frame[:8] + frame[_FRAME_HEADER:], total, order)
        if frame[8:16] != header[16:24] or total != struct.unpack(">2I", frame[16:_FRAME_HEADER]):
            break
        if frame[4:8] != bytes(4):  # the size of the database, in the last frame of a transaction
            return ""
    return "uncommitted"


def _checksum(data: bytes, total: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = total
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def _open_to_copy(path: str, *, check: Callable[[apsw.Connection], object], patience: float = 15.0) -> apsw.Connection:
    """
    A connection that only reads a file which others may write meanwhile; nothing is made of its log at the end.

    `check` raises when the file is not the right one.
    """
    if not is_writable(path):
        return open_read_only(path, patience=patience, check=check)

    def attempt() -> apsw.Connection:
        connection = plain_opener(path, apsw.SQLITE_OPEN_READWRITE)
        note_open(connection, path)
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.set_busy_handler(busy_handler(patience))
            connection.execute("PRAGMA query_only = ON")
            check(connection)
        except BaseException:
            close_connection(connection)
            raise
        return connection

    return patiently(attempt, path, patience)


def check_unlocked(path: str, seconds: float) -> None:
    """
    Raise `StoreLockedError` when the file stays locked for this long: no other process can write it then.

    The lock is taken and given back, and nothing is written. The log stays as it is, even when no other process has the
    file open. An empty file is not opened: SQLite would remove its log.
    """
    if os.path.getsize(path) == 0:
        return

    def attempt() -> None:
        connection = plain_opener(path, apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.set_busy_handler(busy_handler(seconds))
            connection.execute("BEGIN IMMEDIATE; ROLLBACK").fetchall()
        finally:
            close_connection(connection)

    patiently(attempt, path, seconds)
