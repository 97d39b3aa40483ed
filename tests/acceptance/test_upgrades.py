"""
An upgrade, a look by a newer version at a system that runs, and the way back, with a made-up newer version.

Looking never migrates, a backup is the file as it is, and a migration keeps the file as it was.
"""

from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.ingest.documents import VERSION as DOCUMENTS_VERSION
from reefknot.stores.sqlite.connection import VERSION
from tests.acceptance.folder import Folder, until

NEWER = ("-m", "tests.acceptance.newer")
LOOKS = (
    *("job list", "job show done", "quarantine list", "audit tail", "audit verify", "worker list", "router status"),
    *("idempotency stats", "store check", "doctor"),
)


def newer(folder: Folder, *words: str) -> tuple[int, str, str]:
    return folder.ends(folder.start(*words, program=NEWER))


def version_of(path: Path) -> int:
    """The version in a file, read from its bytes or its log, and nothing changed."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    try:
        found: Any = connection.pragma("user_version")
        return int(found)
    finally:
        connection.close()


def rows_of(path: Path) -> dict[str, list[Any]]:
    """Everything in a file that a backup has to have, in the order of its rows."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        tables: Any = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in tables}
    finally:
        connection.close()


def copies(folder: Folder) -> list[str]:
    return sorted(one.name for one in folder.store.parent.iterdir() if ".bak" in one.name)


def run_one(folder: Folder, name: str) -> None:
    """Run one job to its end with this version."""
    line = {"assignment_id": name, "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    folder.write_lines("work.jsonl", line)
    done = folder("run", "work.jsonl")
    assert done.code == 0, done.err


@pytest.fixture
def used(folder: Folder) -> Folder:
    run_one(folder, "done")
    return folder


def test_a_look_by_a_newer_version_leaves_the_running_system_as_it_is(used: Folder) -> None:
    system = used.up()
    used.set_variable("READS_OLDER", "1")
    for line in LOOKS:
        code, out, err = newer(used, *line.split())
        assert code == 0, (line, out, err)
    assert version_of(used.store) == VERSION
    code, _, err = newer(used, "job", "cancel", "nothing")
    assert code in (1, 78), err
    used.nap("after", 0)
    until(lambda: used.state("after") == "succeeded")
    assert system.poll() is None, "the older system goes on"
    assert copies(used) == []


def test_the_control_a_look_that_migrates_locks_the_older_version_out(used: Folder) -> None:
    used.set_variable("LOOKS_MIGRATE", "1")
    assert newer(used, "job", "list")[0] == 0
    assert (version_of(used.store), used("job", "list").code) == (VERSION + 1, 78)


def test_a_look_that_cannot_read_an_older_store_says_what_to_run_and_changes_nothing(used: Folder) -> None:
    before = {one.name: one.read_bytes() for one in used.store.parent.iterdir()}
    for line in (*LOOKS, "job cancel done", "submit --type own.nap", "store compact"):
        code, _, err = newer(used, *line.split())
        if line != "doctor":
            assert code == 78, (line, err)
            assert f"it has version {VERSION}" in err
            assert "reefknot store migrate" in err
    assert {one.name: one.read_bytes() for one in used.store.parent.iterdir()} == before
    code, out, _ = newer(used, "doctor")
    assert code == 0
    assert "store migrate" in out


def test_a_backup_of_an_older_and_of_a_newer_store_is_the_store_as_it_is(used: Folder) -> None:
    code, _, err = newer(used, "store", "backup", "old.db")
    assert code == 0, err
    assert f"version {VERSION}" in err
    assert version_of(used.path / "old.db") == version_of(used.store) == VERSION
    assert rows_of(used.path / "old.db") == rows_of(used.store)

    assert newer(used, "store", "migrate")[0] == 0
    done = used("store", "backup", "new.db")
    assert done.code == 0, done.err
    assert version_of(used.path / "new.db") == VERSION + 1
    assert rows_of(used.path / "new.db") == rows_of(used.store)
    assert used("job", "list").code == 78, "this version does not read a newer one"


def test_an_upgrade_keeps_the_file_as_it_was_and_a_rollback_is_a_move(used: Folder) -> None:
    """The old system was killed, so that its last writes are in the log beside the file."""
    system = used.up()
    used.nap("last", 0)
    until(lambda: used.state("last") == "succeeded")
    used.kill(system)
    store = used.store
    assert (store.parent / "state.db-wal").stat().st_size > 0

    code, _, err = newer(used, "up", "--for", "0.1")
    assert code == 0, err
    line = next(line for line in err.splitlines() if "migrated" in line)
    assert f"migrated from version {VERSION} to {VERSION + 1}" in line
    assert f"state.db.v{VERSION}.bak" in line
    assert copies(used) == [f"state.db.v{VERSION}.bak"]
    assert newer(used, "job", "show", "last")[0] == 0
    refused = used("up", "--for", "0.1")
    assert refused.code == 78, "the older version does not touch it"

    for name in ("state.db", "state.db-wal", "state.db-shm"):  # the rollback, as the runbook says
        (store.parent / name).unlink(missing_ok=True)
    (store.parent / f"state.db.v{VERSION}.bak").rename(store)
    assert used.state("last") == "succeeded", "what was in the log is in the copy"
    assert used("audit", "verify").code == 0
    run_one(used, "again")


def test_a_second_upgrade_keeps_both_copies_and_a_sixth_is_refused_by_name(used: Folder) -> None:
    store, kept = used.store, used.store.parent / f"state.db.v{VERSION}.bak"
    for number in range(1, 7):
        code, _, err = newer(used, "store", "migrate")
        if number == 6:
            break
        assert code == 0, err
        newest = kept if number == 1 else kept.with_name(f"state.db.v{VERSION}.{number}.bak")
        assert newest.exists()
        assert store.with_name("state.db-wal").exists() is False
        store.write_bytes(newest.read_bytes())  # back, by a copy: the one to go back to stays
        run_one(used, f"job-{number}")
    assert code == 69
    assert "5 of that version already" in err
    assert version_of(store) == VERSION
    assert {tuple(row) for row in rows_of(kept)["work"]} < {tuple(row) for row in rows_of(store)["work"]}


def test_the_documents_are_kept_as_they_were_and_a_look_does_not_migrate_them(folder: Folder) -> None:
    assert folder("source", "add", "notes", "--connector", "local_files", "--path", "files").code == 0
    assert folder("source", "run", "notes").code == 0
    documents = folder.path / ".reefknot" / "documents.db"
    code, _, err = newer(folder, "source", "search", "ahoy")
    assert code == 78, err
    assert version_of(documents) == DOCUMENTS_VERSION
    code, _, err = newer(folder, "store", "migrate")
    assert code == 0, err
    assert f"documents.db: migrated from version {DOCUMENTS_VERSION} to {DOCUMENTS_VERSION + 1}" in err
    assert newer(folder, "source", "search", "ahoy")[0] == 0
    assert version_of(documents) == DOCUMENTS_VERSION + 1
    assert f"documents.db.v{DOCUMENTS_VERSION}.bak" in copies(folder)
    assert version_of(documents.with_name(f"documents.db.v{DOCUMENTS_VERSION}.bak")) == DOCUMENTS_VERSION
