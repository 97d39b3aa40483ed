"""
Files that this process has open through either of two SQLite libraries.

Stores bring a SQLite library of their own; the standard library's `sqlite3` is another. POSIX locks belong to a
process: when one library closes a file, the locks that the other holds on it are silently dropped, and two processes
may write at once. So a file that a store has open must not be opened through `sqlite3` in the same process, nor the
other way round. This module detects that; it opens nothing.

`OpenedFile` tells a file that was opened from another one that has its name now.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from reefknot.runtime.forks import FORKS

_DESCRIPTORS = "/proc/self/fd"
_stores: Counter[tuple[int, int]] = Counter()
FORKS.in_child(_stores.clear)


Identity = tuple[int, int]
"""Device and inode of a file. While it is open somewhere, no other file can have the same ones."""


def store_opened(path: str) -> Identity | None:
    """Record that a store of this process has opened `path`. The result is for `store_closed`."""
    found = _identity(path)
    if found is not None:
        _stores[found] += 1
    return found


def store_closed(opened: Identity | None) -> None:
    """Record that a store of this process has closed what it had opened, whatever has that name by now."""
    if opened is not None and _stores[opened]:
        _stores[opened] -= 1


def open_in_store(path: str) -> bool:
    """Whether a store of this process has the file open, under whatever name."""
    found = _identity(path)
    return found is not None and _stores[found] > 0


def open_in_sqlite3(path: str) -> bool:
    """
    Whether this process has the file open through the standard library's `sqlite3`.

    Cheap in the usual case: connections are searched for only when the file is open in this process, and not by a
    store.
    """
    found = _identity(path)
    if found is None or "_sqlite3" not in sys.modules or _stores[found] or not _is_open_here(found):
        return False
    import sqlite3

    # Not `isinstance`, which asks an object for its `__class__`: lazy ones, such as the settings of Django, then load.
    connections = [one for one in gc.get_objects() if issubclass(type(one), sqlite3.Connection)]
    return any(_identity(file) == found for one in connections for file in connection_files(one))


def connection_files(connection: Any) -> list[str]:
    """Files of a `sqlite3` connection; none when it is closed, or belongs to another thread."""
    with suppress(Exception):
        cursor = connection.cursor()
        cursor.row_factory = None
        return [os.fsdecode(row[2]) for row in cursor.execute("PRAGMA database_list") if row[2]]
    return []


def _is_open_here(wanted: tuple[int, int]) -> bool:
    try:
        descriptors = os.listdir(_DESCRIPTORS)
    except OSError:  # not on this system: then connections are searched for
        return True
    for descriptor in descriptors:
        with suppress(OSError, ValueError):
            state = os.fstat(int(descriptor))
            if (state.st_dev, state.st_ino) == wanted:
                return True
    return False


class OpenedFile:
    """
    A store's file and its write-ahead log, as they were when they were opened.

    Whether both are in place costs two calls of the system. A file that is `frozen` must not have been written either.
    """

    def __init__(self, path: str, *, frozen: bool = False) -> None:
        self._paths = (os.fsencode(path), os.fsencode(f"{os.path.realpath(path)}-wal"))
        self._find = _written if frozen else _place()
        self._opened = self._state()

    @property
    def in_place(self) -> bool:
        return self._state() == self._opened

    @property
    def is_missing(self) -> bool:
        return _identity(self._paths[0]) is None

    def _state(self) -> list[object]:
        return [self._find(path) for path in self._paths]


def _written(path: str | bytes) -> tuple[int, ...] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


@cache
def _place() -> Callable[[bytes], object]:
    """Tells a file from any other. `os.stat` asks for its times too, and a commit that notes them takes 30 µs more."""
    import ctypes

    statx: Any = getattr(ctypes.CDLL(None), "statx", None) if sys.platform == "linux" else None
    if statx is None:
        return _identity
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    answer, from_here, inode = ctypes.c_char * 256, -100, 0x100

    def place(path: bytes) -> object:
        found = answer()
        failed = statx(from_here, path, 0, inode, found)
        return _identity(path) if failed else (found[32:40], found[136:144])

    return place


def _identity(path: str | bytes) -> Identity | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino
