"""One SQLite file, one SQLite library in a process."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import reefknot as rk
from reefknot.errors import StoreUnavailableError
from reefknot.runtime import open_files

ELSEWHERE = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
    print("two writers")
except sqlite3.OperationalError as error:
    print(error)
"""


def another_process(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_control_a_second_library_that_closes_the_file_takes_the_locks_away(tmp_path: Path) -> None:
    """Why it is refused. If this fails one day, the refusals below can go."""
    path = tmp_path / "state.db"
    ours = apsw.Connection(str(path))
    ours.execute("PRAGMA journal_mode = WAL").fetchall()
    ours.execute("CREATE TABLE t (x)")
    ours.execute("BEGIN IMMEDIATE")
    assert another_process(path) == "database is locked"
    theirs = sqlite3.connect(path)
    theirs.execute("SELECT * FROM t").fetchall()
    theirs.close()

    assert another_process(path) == "two writers"
    ours.close()


@pytest.mark.real_time
async def test_a_ledger_in_the_file_of_an_open_store_is_refused_for_sqlite3_and_taken_for_apsw(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    conn = sqlite3.connect(tmp_path / "own.db")
    alias = tmp_path / "alias.db"
    async with rk.open_store(f"sqlite:{path}"):
        rk.ledger(conn)  # a file of its own
        alias.symlink_to(path)
        same = sqlite3.connect(alias)
        try:
            with pytest.raises(StoreUnavailableError, match="would drop the other's locks; give the ledger a"):
                rk.ledger(same)
        finally:
            same.close()
        rk.ledger(apsw.Connection(str(path)))
    after = sqlite3.connect(path)
    rk.ledger(after)  # the store is closed: one library again
    after.close()
    conn.close()


@pytest.mark.real_time
async def test_a_store_on_a_file_that_sqlite3_has_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with rk.open_store(f"sqlite:{path}"):
        pass
    theirs = sqlite3.connect(path)
    theirs.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    with pytest.raises(StoreUnavailableError, match="open through sqlite3 as well"):
        async with rk.open_store(f"sqlite:{path}"):
            pass
    theirs.close()
    other = sqlite3.connect(tmp_path / "other.db")
    async with rk.open_store(f"sqlite:{path}"), rk.open_store(f"sqlite:{path}"):  # two stores share a library
        assert open_files.open_in_store(str(path))
    other.close()


def test_a_file_that_something_else_has_open_or_that_is_not_there_is_nobodys(tmp_path: Path) -> None:
    path, nowhere = tmp_path / "state.db", str(tmp_path / "no.db")
    path.touch()
    handle = os.open(path, os.O_RDONLY)
    sqlite3.connect(path).close()
    assert not open_files.open_in_sqlite3(str(path))
    os.close(handle)

    open_files.store_closed(open_files.store_opened(nowhere))
    assert not open_files.open_in_store(nowhere)
    assert not open_files.open_in_sqlite3(nowhere)


def test_where_open_files_cannot_be_listed_connections_are_looked_for_and_no_lazy_object_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Django's settings before they are configured: to ask for their class is an error."""

    class Lazy:
        @property  # type: ignore[misc]  # that is what lazy objects do
        def __class__(self) -> type:
            raise RuntimeError("settings are not configured")

    monkeypatch.setattr(open_files, "_DESCRIPTORS", str(tmp_path / "nowhere"))
    lazy = Lazy()
    lazy.__dict__["self"] = lazy  # else the garbage collector need not know it
    theirs = sqlite3.connect(tmp_path / "state.db")
    theirs.execute("CREATE TABLE t (x)")

    assert open_files.open_in_sqlite3(str(tmp_path / "state.db"))
    theirs.close()
    assert not open_files.open_in_sqlite3(str(tmp_path / "state.db"))
    del lazy.__dict__["self"]


@pytest.mark.parametrize("find", [open_files._place(), open_files._identity], ids=["asked for little", "asked for all"])
def test_a_file_is_told_from_one_that_has_its_name_now(tmp_path: Path, find: Callable[[bytes], object]) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    name = os.fsencode(path)
    assert find(name) is None
    path.write_text("one")
    first = find(name)
    path.write_text("two")
    assert find(name) == first
    other.write_text("one")
    other.rename(path)
    assert find(name) not in (None, first)
