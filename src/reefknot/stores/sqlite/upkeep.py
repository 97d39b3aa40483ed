"""
Maintenance of a store's file: integrity check, backup, compaction, and removal of what is past its retention.

Retention goes in small steps. A read finds a page of rows that may go; a short transaction checks them again and
removes them: a key that was claimed again in the meantime stays. So neither writers nor the write-ahead log wait for a
table of any size. Live rows are never removed: held keys, work that has not ended, the quarantine.
"""

import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import apsw
from msgspec import json

from reefknot.core.time import Moment
from reefknot.errors import StorePermissionError, StoreUnavailableError
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.runtime.sqlite_files import SNAPSHOT_S, copy_database, immediate
from reefknot.stores.port.engines import CheckReport
from reefknot.stores.sqlite.audit import heads
from reefknot.stores.sqlite.connection import add_key_hash, query
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import Transaction, each, recount, wrong_counts

KEYS_PER_READ = 20_000
_LOST_KEYS = """
SELECT max(seq), count(*) FILTER (WHERE hash <> key_hash(key) OR 1 <>
        (SELECT count(*) FROM recent_key WHERE hash = row.hash AND seq = row.seq)
        + (SELECT count(*) FROM older_key WHERE hash = row.hash AND seq = row.seq))
FROM (SELECT seq, hash, key FROM idempotency WHERE seq > ? ORDER BY seq LIMIT ?) AS row
"""
_LEFT_OVER_KEYS = (
    "SELECT (SELECT count(*) FROM recent_key) + (SELECT count(*) FROM older_key) - (SELECT count(*) FROM idempotency)"
)
_CHECK_STEPS = 10_000
"""Steps of SQLite's machine between two looks at the clock: well under a millisecond."""


def check_file(connection: apsw.Connection) -> CheckReport:
    """
    SQLite's integrity check, that each idempotency key is found, and that jobs are counted right.

    The audit log verifies its chain.

    Writers continue meanwhile. Each statement sees a snapshot of its own, and none is held for long.
    """
    problems = _damages(connection)
    if not problems:  # of a damaged file nothing more can be said
        add_key_hash(connection)
        lost, after = 0, 0
        while after is not None:
            after, number = query(connection, _LOST_KEYS, (after, KEYS_PER_READ)).fetchone()
            lost += number
        left_over = query(connection, _LEFT_OVER_KEYS).get
        if lost:
            problems.append(f"{lost} idempotency keys are in the file but are not found by their hash")
        elif left_over:
            problems.append(f"{left_over} hashes of idempotency keys lead to no key")
        for table in wrong_counts(connection):
            problems.append(f"the numbers in {table} are not those of the jobs; `reefknot store compact` counts again")
    version: Any = connection.pragma("user_version")
    return CheckReport(problems, [], heads(connection)[0], version, apsw.sqlite_lib_version())


def _damages(connection: apsw.Connection) -> list[str]:
    """
    Findings of SQLite's integrity check.

    If it takes longer than a snapshot may be held, a copy is checked, which is much faster to make. Without room for a
    copy, table by table: then pages that belong to no table are not checked.
    """
    until = monotonic() + SNAPSHOT_S
    connection.set_progress_handler(lambda: monotonic() > until, _CHECK_STEPS)
    try:
        found = _integrity(connection)
    except apsw.InterruptError:
        connection.set_progress_handler(None)
        found = _integrity_of_a_copy(connection)
    finally:
        connection.set_progress_handler(None)
    return [line for line in dict.fromkeys(found) if line != "ok"]


def _integrity(connection: apsw.Connection, table: str = "") -> list[str]:
    asked = f"('{table}')" if table else ""
    return [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check{asked}")]


def _integrity_of_a_copy(connection: apsw.Connection) -> list[str]:
    file = Path(connection.filename)
    for left in file.parent.glob(f"{glob.escape(file.name)}.check*"):  # by a process that was killed
        left.unlink(missing_ok=True)
    target = f"{file}.check"
    try:
        if shutil.disk_usage(file.parent).free < 2 * _size(str(file)):
            raise OSError(errno.ENOSPC, "no room for a copy")
        copy_database(connection, target)
        copy = apsw.Connection(target)
        try:
            return _integrity(copy)
        finally:
            copy.close()
    except (OSError, apsw.FullError, apsw.CantOpenError, apsw.ReadOnlyError):
        tables: Any = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall()
        return [line for (name,) in tables for line in _integrity(connection, name)]
    finally:
        Path(target).unlink(missing_ok=True)


def back_up(connection: apsw.Connection, target: str, progress: Callable[[int, int], None] | None) -> None:
    """Copy the store as of now to a new file. Writers may go on; their log grows until the copy is made."""
    if Path(target).exists():
        raise StoreUnavailableError(f"sqlite:{target}", "it exists already", "name a file that does not exist")
    try:
        copy_database(connection, target, progress)
    except OSError as error:
        problem = f"it cannot be written ({(error.strerror or str(error)).lower()})"
        way_out = "name a file in a folder that is there and that this user may write to"
        kind = StorePermissionError if isinstance(error, PermissionError) else StoreUnavailableError
        raise kind(f"sqlite:{target}", problem, way_out) from error


def compact(path: str, connect: Callable[[], apsw.Connection]) -> int:
    """Count all jobs again, and rewrite the file without unused pages. Returns the bytes saved, with the log's."""
    before = _size(path)
    connection = connect()
    try:
        with immediate(connection):
            recount(connection)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    return before - _size(path)


def _size(path: str) -> int:
    log = Path(f"{path}-wal")
    return Path(path).stat().st_size + (log.stat().st_size if log.exists() else 0)


ROWS_PER_READ = 5000
ROWS_PER_DELETE = 500

SPENT = (
    "state IN ('done', 'failed', 'released', 'in_progress') AND expires_at <= ?1 "
    "AND (state <> 'in_progress' OR (guard = 0 AND lease_until <= ?2))"
)
"""Condition for a key that may go, by wall time (?1) and steady time (?2)."""
ENDED = "state IN ('succeeded', 'failed', 'cancelled', 'discarded') AND updated_at < ?1"
"""Condition for work that may go, by wall time (?1)."""

_PAGE = (
    "SELECT max(seq), json_group_array(seq) FILTER (WHERE {1}) FROM "
    "(SELECT * FROM {0} WHERE seq > ?3 ORDER BY seq LIMIT ?4)"
)
_REMOVE = "DELETE FROM {0} WHERE seq IN (SELECT value FROM json_each(?3)) AND {1} RETURNING {2}"
_REMOVED = {"idempotency": "key", "work": "id, resource_class, state"}


async def purge_keys(context: StoreContext) -> int:
    """Remove keys past their retention. Returns how many."""
    return await _purge(context, "idempotency", SPENT, context.now())


async def purge_work(context: StoreContext, before: int) -> int:
    """Remove work that ended before this time (ms UTC). Returns how many."""
    return await _purge(context, "work", ENDED, Moment(steady=0, wall=before))


async def _purge(context: StoreContext, table: str, condition: str, moment: Moment) -> int:
    gone, after = 0, 0
    while True:
        last, found = await context.read(partial(_page, table=table, condition=condition, moment=moment, after=after))
        for first in range(0, len(found), ROWS_PER_DELETE):
            gone += await context.write(
                _remove_batch, (table, condition, moment, found[first : first + ROWS_PER_DELETE])
            )
        if last is None:
            return gone
        after = last


def _page(
    connection: apsw.Connection, table: str, condition: str, moment: Moment, after: int
) -> tuple[int | None, list[int]]:
    values = (moment.wall, moment.steady, after, ROWS_PER_READ)
    last, found = query(connection, _PAGE.format(table, condition), values).fetchone()
    return last, json.decode(found, type=list[int])


@each
def _remove_batch(transaction: Transaction, table: str, condition: str, moment: Moment, rows: list[int]) -> int:
    values = (moment.wall, moment.steady, json.encode(rows).decode())
    found = query(transaction.connection, _REMOVE.format(table, condition, _REMOVED[table]), values).fetchall()
    if table == "work":
        transaction.counts.add([WorkItem(row[0], "", row[1], state=WorkState(row[2])) for row in found], -1)
    return _forget(transaction, table, [row[0] for row in found])


def make_room(transaction: Transaction, *, keep: list[str]) -> int:
    """Remove some keys past their retention inside this transaction, none of `keep`. Returns how many."""
    now = transaction.now
    statement = (
        f"DELETE FROM idempotency WHERE seq IN (SELECT seq FROM idempotency WHERE {SPENT} "  # noqa: S608 - constant text
        "AND key NOT IN (SELECT value FROM json_each(?3)) LIMIT ?4) RETURNING key"
    )
    values = (now.wall, now.steady, json.encode(keep).decode(), ROWS_PER_DELETE)
    removed = query(transaction.connection, statement, values)
    return _forget(transaction, "idempotency", [key for (key,) in removed])


def _forget(transaction: Transaction, table: str, removed: list[str]) -> int:
    """Bring cache and counters in line with the rows that were removed. Returns their number."""
    cache: Any = transaction.cache.keys if table == "idempotency" else transaction.cache.items
    cache.drop(removed)
    if table == "idempotency":
        transaction.counters.keys -= len(removed)
    return len(removed)


_NEWEST = (
    "SELECT max(at) FROM (SELECT max(at) AS at FROM (SELECT at FROM audit ORDER BY sequence DESC LIMIT ?1) "
    "UNION ALL SELECT max(updated_at) FROM (SELECT updated_at FROM work ORDER BY seq DESC LIMIT ?1) "
    "UNION ALL SELECT max(updated_at) FROM (SELECT updated_at FROM idempotency ORDER BY seq DESC LIMIT ?1))"
)


def newest_record_at(connection: apsw.Connection) -> int | None:
    """The time of the newest event, key or work item (ms UTC), searched among the last ones."""
    found: Any = connection.execute(_NEWEST, (ROWS_PER_READ,)).get
    return None if found is None else int(found)


class RetentionLock:
    """
    A lock on a file next to the database, held by the one process of this host that applies retention.

    The operating system releases the lock when its process ends, however that happens.
    """

    def __init__(self, path: str) -> None:
        self._path = f"{path}-retention.lock"
        self._file: int | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting. True also when this store has it already."""
        if self._file is not None:
            return True
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
