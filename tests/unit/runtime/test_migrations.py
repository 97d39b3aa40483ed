"""Migrations of a file: a copy of it as it was is there before anything is changed, or nothing is changed."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

from reefknot.errors import StoreFullError, StoreVersionError
from reefknot.runtime import sqlite_files
from reefknot.runtime.sqlite_files import UNRELEASED, migrated, open_connection, require_readable

APPLICATION = 0x123
FIRST = "CREATE TABLE one (value TEXT) STRICT;"
SECOND = "CREATE TABLE two (value TEXT) STRICT;"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def opened(path: Path, *migrations: str) -> apsw.Connection:
    connection = open_connection(str(path), patience=1.0)
    try:
        migrated(connection, str(path), application_id=APPLICATION, migrations=migrations)
    except BaseException:
        connection.close()
        raise
    return connection


def values(path: Path) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return [value for (value,) in connection.execute("SELECT value FROM one")]
    finally:
        connection.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of version 1 whose last row is only in the log."""
    path = tmp_path / "a file.db"
    connection = opened(path, FIRST)
    connection.execute("INSERT INTO one VALUES ('kept')")
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.close()
    assert Path(f"{path}-wal").stat().st_size
    return path


def test_the_copy_has_what_is_only_in_the_log_and_is_for_its_owner_alone(file: Path) -> None:
    copy = Path(f"{file}.v1.bak")
    Path(f"{copy}.partial").write_bytes(b"half of it, which a killed migration left")
    opened(file, FIRST, SECOND).close()
    assert values(copy) == ["kept"]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert not Path(f"{copy}.partial").exists()


def test_a_new_file_has_no_copy(tmp_path: Path) -> None:
    opened(tmp_path / "new.db", FIRST, SECOND).close()
    assert [one.name for one in tmp_path.iterdir()] == ["new.db"]


def test_without_room_for_the_copy_the_migration_is_refused_by_name_and_nothing_is_changed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, (1 << 40) - 4096, 4096))
    with pytest.raises(StoreFullError, match=r"no room for a copy of it before its migration from version 1 to 2"):
        opened(file, FIRST, SECOND)
    assert not Path(f"{file}.v1.bak").exists()
    opened(file, FIRST).close()


def test_a_disk_that_fills_up_while_the_copy_is_made_leaves_no_half_of_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: apsw.Connection, target: str) -> None:
        Path(target).write_bytes(b"half of it")
        raise apsw.FullError

    monkeypatch.setattr(sqlite_files, "copy_database", full)
    with pytest.raises(StoreFullError):
        opened(file, FIRST, SECOND)
    assert not list(file.parent.glob("*.bak*"))
    opened(file, FIRST).close()


def test_a_migration_that_fails_leaves_the_file_as_it_was_and_only_known_versions_are_read(file: Path) -> None:
    with pytest.raises(apsw.SQLError):
        opened(file, FIRST, "CREATE TABLE nonsense (")
    opened(file, FIRST).close()
    assert values(file) == ["kept"]

    require_readable(1, str(file), readable_from=1, newest=2, may_write=True)
    with pytest.raises(StoreVersionError, match="reefknot store migrate"):
        require_readable(1, str(file), readable_from=2, newest=2, may_write=True)


def test_a_file_from_before_the_first_release_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with apsw.Connection(str(path)) as connection:
        connection.execute(f"{FIRST} PRAGMA application_id = {min(UNRELEASED)}; PRAGMA user_version = 7")
    with pytest.raises(StoreVersionError, match=r"written by a reefknot before 0\.1\.0"):
        opened(path, FIRST)
    with apsw.Connection(str(path)) as connection:
        assert (connection.pragma("user_version"), values(path)) == (7, [])
