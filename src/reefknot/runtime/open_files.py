"""
Files that this process has open through either of two SQLite libraries.

Stores bring a SQLite library of their own; the standard library's `sqlite3` is another. POSIX locks belong to a
process: when one library closes a file, the locks that the other holds on it are silently dropped, and two processes
may write at once. So a file that a store has open must not be opened through `sqlite3` in the same process, nor the
other way round. This module detects that; it opens nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

_DESCRIPTORS = "/proc/self/fd"
_stores: Counter[tuple[int, int]] = Counter()


def store_opened(path: str) -> None:
    """Record that a store of this process has opened `path`."""
    found = _identity(path)
    if found is not None:
        _stores[found] += 1


def store_closed(path: str) -> None:
    """Record that a store of this process has closed `path`."""
    found = _identity(path)
    if found is not None and _stores[found]:
        _stores[found] -= 1


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

    connections = [one for one in gc.get_objects() if isinstance(one, sqlite3.Connection)]
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


def _identity(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino
