"""
The tables of a store's file and their migrations.

`user_version` counts the migrations. A file with a higher number was written by a newer version and is refused: it is
never downgraded and never guessed at. Migrations are only ever added. Only a running system migrates; a command that
only reads opens the store as it is, or says what to run.
"""

import os
import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import apsw

from reefknot.errors import StoreMovedError
from reefknot.runtime.sqlite_files import (
    checked_version,
    close_connection,
    is_writable,
    migrated,
    open_read_only,
    require_readable,
)
from reefknot.stores.port import MOVE, refusal_in

query: Callable[..., Any] = apsw.Connection.execute
"""The rows of a statement, untyped: what the columns hold is known to the statement alone."""

APPLICATION_ID = 0x5EEF1210
"""Marks the file, in its header, as a store of reefknot."""

_TABLES = """
CREATE TABLE counter (
    one INTEGER PRIMARY KEY CHECK (one = 1), fence INTEGER NOT NULL, keys INTEGER NOT NULL, command INTEGER NOT NULL,
    transactions INTEGER NOT NULL, steady INTEGER NOT NULL
) STRICT;
INSERT INTO counter VALUES (1, 0, 0, 0, 0, 0);

CREATE TABLE work (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, ready INTEGER NOT NULL,
    id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, resource_class TEXT NOT NULL, source TEXT NOT NULL,
    tenant_id TEXT, correlation_id TEXT, trace_id TEXT, priority INTEGER NOT NULL, state TEXT NOT NULL,
    due_at INTEGER NOT NULL, deadline_at INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    generation INTEGER NOT NULL, attempts INTEGER NOT NULL, snoozes INTEGER NOT NULL, interruptions INTEGER NOT NULL,
    crashes INTEGER NOT NULL, owner TEXT NOT NULL, fence INTEGER NOT NULL,
    lease_until INTEGER NOT NULL, lease_ms INTEGER NOT NULL, reason TEXT NOT NULL, failure TEXT, result TEXT,
    budget TEXT NOT NULL, history TEXT NOT NULL, payload BLOB NOT NULL, admission TEXT NOT NULL, pool TEXT NOT NULL
) STRICT;
CREATE INDEX work_ready ON work (resource_class, tenant_id, priority DESC, due_at, seq)
    WHERE state = 'pending' AND ready = 1;
CREATE INDEX work_later ON work (resource_class, due_at) WHERE state = 'pending' AND ready = 0;
CREATE INDEX work_leased ON work (lease_until) WHERE state = 'running';
CREATE INDEX work_quarantined ON work (id) WHERE state = 'quarantined';
CREATE INDEX work_quarantined_since ON work (updated_at) WHERE state = 'quarantined';
CREATE INDEX work_listed ON work (state, kind);
-- A job is found by its id alone, whatever its tenant, and by its correlation or trace: see `work_rows`.
CREATE INDEX work_of_tenant ON work (substr(id, instr(id, '|') + 1)) WHERE tenant_id IS NOT NULL;
CREATE INDEX work_correlation ON work (correlation_id) WHERE correlation_id IS NOT NULL;
CREATE INDEX work_trace ON work (trace_id) WHERE trace_id IS NOT NULL;

-- The numbers of all rows of work, kept by the transactions that change them: see `WorkCounts`.
CREATE TABLE open_work (
    pool TEXT NOT NULL, stage TEXT NOT NULL, priority INTEGER NOT NULL, tenant TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (pool, stage, priority, tenant)
) STRICT, WITHOUT ROWID;
CREATE TABLE work_count (
    resource_class TEXT NOT NULL, state TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (resource_class, state)
) STRICT, WITHOUT ROWID;
CREATE TABLE quarantine_count (
    kind TEXT NOT NULL, source TEXT NOT NULL, reason TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (kind, source, reason)
) STRICT, WITHOUT ROWID;
CREATE TABLE service_time (
    pool TEXT PRIMARY KEY, known INTEGER NOT NULL, mean_ms REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Rows in the order of their arrival, found by `key_hash` in two tables: see `stores.sqlite.idempotency`. Two keys may
-- have one hash, so no index can refuse a second row of a key; a trigger does.
CREATE TABLE idempotency (
    seq INTEGER PRIMARY KEY, hash INTEGER NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL, owner TEXT NOT NULL,
    fence INTEGER NOT NULL, lease_until INTEGER NOT NULL, lease_ms INTEGER NOT NULL, fingerprint TEXT NOT NULL,
    guard INTEGER NOT NULL, result TEXT, failure TEXT, metadata TEXT,
    created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
) STRICT;
CREATE TABLE recent_key (hash INTEGER, seq INTEGER, PRIMARY KEY (hash, seq)) STRICT, WITHOUT ROWID;
CREATE TABLE older_key (hash INTEGER, seq INTEGER, PRIMARY KEY (hash, seq)) STRICT, WITHOUT ROWID;
CREATE TRIGGER idempotency_in AFTER INSERT ON idempotency BEGIN
    SELECT RAISE(ROLLBACK, 'the key has a row already') WHERE EXISTS (
        SELECT 1 FROM recent_key AS other JOIN idempotency AS found USING (seq)
        WHERE other.hash = new.hash AND found.key = new.key
        UNION ALL SELECT 1 FROM older_key AS other JOIN idempotency AS found USING (seq)
        WHERE other.hash = new.hash AND found.key = new.key);
    INSERT INTO recent_key VALUES (new.hash, new.seq);
END;
CREATE TRIGGER idempotency_out AFTER DELETE ON idempotency BEGIN
    DELETE FROM recent_key WHERE hash = old.hash AND seq = old.seq;
    DELETE FROM older_key WHERE hash = old.hash AND seq = old.seq;
END;

CREATE TABLE audit_head (
    one INTEGER PRIMARY KEY CHECK (one = 1), chain TEXT NOT NULL, sequence INTEGER NOT NULL, hash TEXT NOT NULL,
    anchor_sequence INTEGER NOT NULL, anchor_hash TEXT NOT NULL
) STRICT;
CREATE TABLE audit (
    sequence INTEGER PRIMARY KEY, hash TEXT NOT NULL, at INTEGER NOT NULL, event_type TEXT NOT NULL,
    correlation_id TEXT, trace_id TEXT, work_id TEXT, body TEXT NOT NULL
) STRICT;
CREATE INDEX audit_correlation ON audit (correlation_id) WHERE correlation_id IS NOT NULL;
CREATE INDEX audit_trace ON audit (trace_id) WHERE trace_id IS NOT NULL;
CREATE INDEX audit_work ON audit (work_id) WHERE work_id IS NOT NULL;
CREATE INDEX audit_type ON audit (event_type);
-- The latest and the earliest event of every 1024: where the events since a time begin, and those before it end.
CREATE TABLE audit_block (
    block INTEGER PRIMARY KEY, latest_at INTEGER NOT NULL, earliest_at INTEGER NOT NULL
) STRICT;

CREATE TABLE command (
    sequence INTEGER PRIMARY KEY, name TEXT NOT NULL, target TEXT NOT NULL, body TEXT NOT NULL, sender TEXT NOT NULL,
    at INTEGER NOT NULL, stale_at INTEGER NOT NULL
) STRICT;
-- The last status of each running system.
CREATE TABLE status (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL, at INTEGER NOT NULL,
    stale_at INTEGER NOT NULL, capacity TEXT NOT NULL
) STRICT;
-- Named values. No version is given twice, not even to a value that was deleted and created again.
CREATE TABLE value (version INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;

-- Undelivered messages and their listeners. Nothing that must not be lost is here alone. `recipient` is the only origin
-- that a message concerns, or empty. `at` and `seen_at` are steady.
CREATE TABLE message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, origin TEXT NOT NULL, recipient TEXT NOT NULL,
    subject TEXT NOT NULL, message_id TEXT, headers TEXT NOT NULL, body BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX message_named ON message (subject, message_id) WHERE message_id IS NOT NULL;
CREATE TABLE listener (
    name TEXT PRIMARY KEY, origin TEXT NOT NULL, subjects TEXT NOT NULL, places INTEGER NOT NULL,
    read_to INTEGER NOT NULL, seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The wall time at which a boot of the host began, as all of its processes take it: see `core.time.agreed_boot_time`.
CREATE TABLE boot (name TEXT PRIMARY KEY, began_at INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""

_EXTRA = """
ALTER TABLE work ADD COLUMN extra TEXT NOT NULL DEFAULT '{}';

-- A job is found by its key of unique work, whether it is open, and else by the time until which it holds the key.
CREATE INDEX work_unique ON work (
    json_extract(extra, '$.unique'), ifnull(tenant_id, ''), state,
    created_at + ifnull(json_extract(extra, '$.unique_ms'), 0)
) WHERE extra <> '{}';

-- The parts of what a step says of itself: its checkpoint, its lines of log. They go with the row of its job.
CREATE TABLE work_note (
    id TEXT NOT NULL, part TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (id, part)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER work_out AFTER DELETE ON work WHEN old.extra <> '{}' BEGIN
    DELETE FROM work_note WHERE id = old.id;
END;
"""

MIGRATIONS = (_TABLES, _EXTRA)
VERSION = len(MIGRATIONS)
READABLE_FROM = 2
"""The oldest version whose tables are read as they are."""

HASH_BITS = 48


def key_hash(key: str) -> int:
    """
    The number by which an idempotency key is found. It is long enough that keys with one hash cannot be found in
    number.
    """
    return int.from_bytes(blake2b(key.encode(), digest_size=HASH_BITS // 8).digest())


def add_key_hash(connection: apsw.Connection) -> None:
    """Let statements of this connection call `key_hash`."""

    def hashed(*values: Any) -> int:
        return key_hash(str(values[0]))

    connection.create_scalar_function("key_hash", hashed, 1, deterministic=True)


def moved(connection: apsw.Connection) -> StoreMovedError | None:
    """The refusal to work on a store that has the mark of a move: a client that has it open may not know of that."""
    return refusal_in(query(connection, "SELECT body FROM value WHERE name = ?", (MOVE,)).get)


def migrate(connection: apsw.Connection, path: str) -> int:
    """Bring the file to the current version in one transaction, after a copy of it. Returns the version it had."""

    def finish(found: int) -> None:
        if found == 0:
            start = (secrets.token_hex(8), "0" * 64, "0" * 64)
            connection.execute("INSERT INTO audit_head VALUES (1, ?, 0, ?, 0, ?)", start)

    return migrated(connection, path, application_id=APPLICATION_ID, migrations=MIGRATIONS, finish=finish)


def check_version(connection: apsw.Connection, path: str) -> int:
    """The file's version. `StoreVersionError` when it is newer than this program, or no store at all."""
    return checked_version(connection, path, application_id=APPLICATION_ID, newest=VERSION)


def check_readable(connection: apsw.Connection, path: str) -> int:
    """The version of a file that is read as it is. `StoreVersionError` when it has to be migrated first."""
    found, may_write = check_version(connection, path), is_writable(path)
    require_readable(found, path, readable_from=READABLE_FROM, newest=VERSION, may_write=may_write)
    return found


def is_older(path: str, *, patience: float = 15.0) -> bool:
    """Whether a store has an older version, which reads know: it is only read then. One that they do not is refused."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return False
    connection = open_read_only(path, patience=patience, check=lambda one: check_version(one, path))
    try:
        is_current = check_version(connection, path) in (0, VERSION)
        return not is_current and check_readable(connection, path) != VERSION
    finally:
        close_connection(connection)
