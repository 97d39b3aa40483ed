"""
The tables, and how an older file becomes a current one.

`user_version` counts the steps below. A file with a higher number was written by a newer version and is refused: it is
never downgraded and never guessed at. Steps are only ever added.
"""

import secrets
from typing import Any

import apsw

from reefknot.errors import StoreVersionError

APPLICATION_ID = 0x5EEF1207
"""Written into the file's header: this database is ours."""

_FIRST = """
CREATE TABLE counter (
    one INTEGER PRIMARY KEY CHECK (one = 1), fence INTEGER NOT NULL, keys INTEGER NOT NULL, command INTEGER NOT NULL
) STRICT;
INSERT INTO counter VALUES (1, 0, 0, 0);

-- Rows in the order of their arrival: keys are hashes, and an ending then rewrites few pages, not one for every key.
CREATE TABLE idempotency (
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, state TEXT NOT NULL, owner TEXT NOT NULL, fence INTEGER NOT NULL,
    lease_until INTEGER NOT NULL, lease_ms INTEGER NOT NULL, fingerprint TEXT NOT NULL, guard INTEGER NOT NULL,
    result TEXT, failure TEXT, metadata TEXT,
    created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
) STRICT;

CREATE TABLE work (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, ready INTEGER NOT NULL,
    id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, resource_class TEXT NOT NULL, source TEXT NOT NULL,
    tenant_id TEXT, correlation_id TEXT, trace_id TEXT, priority INTEGER NOT NULL, state TEXT NOT NULL,
    due_at INTEGER NOT NULL, deadline_at INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    generation INTEGER NOT NULL, attempts INTEGER NOT NULL, snoozes INTEGER NOT NULL, interruptions INTEGER NOT NULL,
    crashes INTEGER NOT NULL, owner TEXT NOT NULL, fence INTEGER NOT NULL,
    lease_until INTEGER NOT NULL, lease_ms INTEGER NOT NULL, reason TEXT NOT NULL, failure TEXT, result TEXT,
    budget TEXT NOT NULL, history TEXT NOT NULL, payload BLOB NOT NULL
) STRICT;
CREATE INDEX work_ready ON work (resource_class, priority DESC, due_at, seq) WHERE state = 'pending' AND ready = 1;
CREATE INDEX work_later ON work (due_at, resource_class) WHERE state = 'pending' AND ready = 0;
CREATE INDEX work_leased ON work (lease_until) WHERE state = 'running';
CREATE INDEX work_quarantined ON work (id) WHERE state = 'quarantined';

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

CREATE TABLE command (
    sequence INTEGER PRIMARY KEY, name TEXT NOT NULL, target TEXT NOT NULL, body TEXT NOT NULL, sender TEXT NOT NULL,
    at INTEGER NOT NULL, stale_at INTEGER NOT NULL
) STRICT;
"""

# Messages on their way, and who listens. Nothing that must not be lost is here alone. `at` and `seen_at` are steady.
_MESSAGES = """
CREATE TABLE message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, origin TEXT NOT NULL, subject TEXT NOT NULL,
    message_id TEXT, headers TEXT NOT NULL, body BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX message_named ON message (subject, message_id) WHERE message_id IS NOT NULL;
CREATE TABLE listener (
    name TEXT PRIMARY KEY, origin TEXT NOT NULL, subjects TEXT NOT NULL, places INTEGER NOT NULL,
    read_to INTEGER NOT NULL, seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""

STEPS = (_FIRST, _MESSAGES)
VERSION = len(STEPS)


# One statement sees one snapshot: another process may be making the tables right now.
_LOOK = (
    "SELECT (SELECT user_version FROM pragma_user_version), (SELECT application_id FROM pragma_application_id), "
    "(SELECT count(*) FROM sqlite_schema)"
)


def migrate(connection: apsw.Connection, path: str) -> int:
    """Bring the file to the current version in one transaction. Answers the version it had."""
    found = check_version(connection, path)
    if found == VERSION:
        return found
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = check_version(connection, path)  # another process may have done it meanwhile
        for step in STEPS[found:]:
            connection.execute(step)
        if found == 0:
            start = (secrets.token_hex(8), "0" * 64, "0" * 64)
            connection.execute("INSERT INTO audit_head VALUES (1, ?, 0, ?, 0, ?)", start)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}")
    except BaseException:
        if connection.in_transaction:  # an error of the disk has ended it already, and is the one to report
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    return int(found)


def check_version(connection: apsw.Connection, path: str) -> int:
    """The file's version, if this program can work with it."""
    store = f"sqlite:{path}"
    row: Any = connection.execute(_LOOK).fetchone()
    found, application_id, tables = row
    if application_id != APPLICATION_ID and (found or tables):
        raise StoreVersionError(store, "it is a database of another program", "name another file")
    if found > VERSION:
        raise StoreVersionError(
            store,
            f"it has version {found}, this program knows up to {VERSION}",
            "use a newer reefknot, or another file",
        )
    return int(found)
