"""
Files as reefknot writes them: for this user alone, and whole or not at all.

Payloads, results and events may hold what others must not read, whatever the umask says. A file that another user made
beforehand, with `touch` or a redirection, loses the rights of others when it is opened. Only regular files of this user
are changed: never a device, never another user's file.

A whole file is written without a name, or where that is not possible under a spare one, then renamed, so that half of
one is never seen. A spare file is locked while it is written, and the system drops the lock when its process dies. A
process that can lock one may therefore remove it: it is what a killed process left.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from errno import EEXIST
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from reefknot.errors import StoreUnavailableError
from reefknot.runtime.forks import FORKS

PRIVATE = 0o600
_GROUP_SHARES = 0o060
_SQLITE = b"SQLite format 3\0"


# ---- files that are open here ----------------------------------------------------------------------------------------

_open_here: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_opening = threading.Lock()
_left_in_use: set[str] = set()
"""Files that a thread of the parent was using when this process was forked."""


def note_open(connection: Any, path: str) -> None:
    """Note that this connection has a store open, for as long as it lives. Refused for one that a fork left in use."""
    if path in _left_in_use:
        problem = "this process is a fork of one that was using it, and has inherited its locks"
        raise StoreUnavailableError(f"sqlite:{path}", problem, "fork before it is used, or start a process of its own")
    with _opening:
        _open_here[connection] = path


def is_open_here(about: os.stat_result) -> bool:
    """
    Whether a file belongs to a store that this process has open. Such a file must not be opened by other means.

    When a process closes any descriptor of a file, POSIX takes all its locks on that file, also those of SQLite. The
    next process to leave the store would then remove its log.
    """
    with _opening:
        paths = set(_open_here.values())
    for name in (f"{path}{end}" for path in paths for end in ("", "-wal", "-shm", "-wait")):
        with suppress(OSError):
            if os.path.samestat(os.stat(name), about):
                return True
    return False


def _let_go_of_inherited() -> None:
    """
    In a fork, close the connections of the parent: SQLite would take the parent's locks for those of this process.

    Nothing of the file is written or removed by that. What was in the middle of a statement or of a transaction cannot
    be closed, and its file cannot be opened again.
    """
    global _opening
    _opening = threading.Lock()
    inherited = dict(_open_here)
    if inherited:
        import apsw
    for connection, path in inherited.items():
        try:
            is_busy = connection.in_transaction
            if not is_busy:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close()
        except apsw.ConnectionClosedError:
            continue
        except apsw.Error:
            is_busy = True
        if is_busy:
            FORKS.keep(connection)
            _left_in_use.add(path)


FORKS.in_child(_let_go_of_inherited)


# ---- private files -------------------------------------------------------------------------------------------------


def is_special(path: str | None) -> bool:
    """Whether something is at this path that is no regular file: a read of a pipe may never end."""
    return path is not None and os.path.exists(path) and not os.path.isfile(path)


def private_opener(name: str, flags: int) -> int:
    """The `opener` of `open` for a file that only its owner may read and write."""
    handle = os.open(name, flags | getattr(os, "O_CLOEXEC", 0), PRIVATE)
    try:
        make_private(handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_private(file: int | str) -> None:
    """Take the rights of group and others from a file, given by its handle or its path."""
    _restrict(file, os.stat(file), PRIVATE)


def make_store_private(path: str) -> None:
    """
    Remove the permissions of other users from a store and from the files that SQLite keeps next to it.

    A store that its group may read and write is shared on purpose, and stays shared with the group.
    """
    for name in (path, f"{path}-wal", f"{path}-shm"):
        try:
            state = os.stat(name)
        except FileNotFoundError:
            continue
        is_shared = state.st_size > 0 and state.st_mode & _GROUP_SHARES == _GROUP_SHARES
        _restrict(name, state, PRIVATE | _GROUP_SHARES if is_shared else PRIVATE)


def _restrict(file: int | str, state: os.stat_result, allowed: int) -> None:
    is_own = stat.S_ISREG(state.st_mode) and (not hasattr(os, "geteuid") or state.st_uid == os.geteuid())
    if is_own and state.st_mode & 0o777 & ~allowed:
        os.chmod(file, state.st_mode & allowed)


# ---- whole files ---------------------------------------------------------------------------------------------------


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """
    A file that appears when it is complete, readable by its owner only. Removes what killed processes left of it.

    A database is never replaced: it may be a store.
    """
    _refuse_database(path)
    _remove_left_of(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    nameless = _nameless_file(path.parent)
    try:
        with open(fresh, "xb", opener=private_opener) if nameless is None else os.fdopen(nameless, "wb") as stream:
            is_ours(stream.fileno())
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
            if nameless is not None:
                # With a folder, which a full path ignores: only then Python follows the link to the file.
                os.link(f"{_DESCRIPTORS}/{nameless}", fresh, src_dir_fd=nameless, follow_symlinks=True)
            os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


_DESCRIPTORS = "/proc/self/fd"


def _nameless_file(folder: Path) -> int | None:
    """A file in this folder that has no name yet, so that a process that is killed leaves nothing; None where the
    system has no such files."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_DESCRIPTORS):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, PRIVATE)
    except OSError:  # the file system has none, or the folder cannot be written: then making one by name says why
        return None


def _refuse_database(path: Path) -> None:
    if not path.is_file():  # a pipe is not opened: it may have no other end
        return
    is_open = is_open_here(path.stat())
    with nullcontext() if is_open else open(path, "rb") as file:
        if file is None or file.read(len(_SQLITE)) == _SQLITE:
            raise FileExistsError(EEXIST, "is a database, which is not replaced; name another file", str(path))


@contextmanager
def output_file(name: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The file of that name, or of its link, which appears when it is complete. A pipe or a device is written as is."""
    path = Path(os.path.realpath(name))
    is_file = not path.exists() or path.is_file()
    with whole_file(path) if is_file else open(name, "wb") as stream:
        yield stream


def is_ours(descriptor: int) -> bool:
    """Lock a spare file that was just made. False when another process has removed it before it was locked."""
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.fstat(descriptor).st_nlink > 0


def remove_left(folder: int, names: Iterable[str]) -> int:
    """Remove those of these spare files in an open folder that no process is writing. Returns how many there were."""
    removed = 0
    for name in names:
        with suppress(OSError):  # written by a process that lives, gone meanwhile, or not ours
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
                removed += 1
            finally:
                os.close(descriptor)
    return removed


def _remove_left_of(path: Path) -> None:
    spare = re.compile(rf"\.{re.escape(path.name)}\.[0-9]{{1,10}}")  # a full file of a log has a longer number
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_left(folder, [name for name in os.listdir(folder) if spare.fullmatch(name)])
        finally:
            os.close(folder)
