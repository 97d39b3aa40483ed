"""
One SQLite file, one SQLite library in a process.

Stores bring a SQLite library of their own; the standard library's `sqlite3` is another. POSIX locks belong to a
process: when one library closes a file, the locks that the other one holds on it are gone without a word, and two
processes may write at once. So a file that a store has open is not to be opened through `sqlite3` here, nor the other
way round. What can be seen of that is seen here. It opens nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

_PROC = "/proc/self/fd"
_stores: Counter[tuple[int, int]] = Counter()


def store_opened(path: str) -> None:
    """A store has this file open."""
    found = _identity(path)
    if found is not None:
        _stores[found] += 1


def store_closed(path: str) -> None:
    """One store fewer has it."""
    found = _identity(path)
    if found is not None and _stores[found]:
        _stores[found] -= 1


def is_a_stores(path: str) -> bool:
    """Does a store of this process have the file open, under whatever name?"""
    found = _identity(path)
    return found is not None and _stores[found] > 0


def is_sqlite3s(path: str) -> bool:
    """
    Does this process have the file open through the standard library's `sqlite3`?

    Cheap in the usual case: only when the file is open here already, and not by a store, are connections looked for.
    """
    found = _identity(path)
    if found is None or "_sqlite3" not in sys.modules or _stores[found] or not _is_open_here(found):
        return False
    import sqlite3

    connections = [one for one in gc.get_objects() if isinstance(one, sqlite3.Connection)]
    return any(_identity(file) == found for one in connections for file in files_of(one))


def files_of(connection: Any) -> list[str]:
    """The files of a `sqlite3` connection; none when it is closed, or belongs to another thread."""
    with suppress(Exception):
        cursor = connection.cursor()
        cursor.row_factory = None
        return [os.fsdecode(row[2]) for row in cursor.execute("PRAGMA database_list") if row[2]]
    return []


def _is_open_here(wanted: tuple[int, int]) -> bool:
    try:
        handles = os.listdir(_PROC)
    except OSError:  # a system without it: then connections are looked for
        return True
    for handle in handles:
        with suppress(OSError, ValueError):
            state = os.fstat(int(handle))
            if (state.st_dev, state.st_ino) == wanted:
                return True
    return False


def _identity(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino
