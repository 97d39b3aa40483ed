"""Several processes open a store that is not there yet: one makes it, all of them get it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.assembly import open_store
from reefknot.core.work import WorkState
from reefknot.engines.sqlite.connection import open_connection
from reefknot.engines.sqlite.schema import APPLICATION_ID, VERSION, check_version, migrate
from reefknot.errors import StoreUnavailableError
from tests.faults.points import either

ROOT = Path(__file__).parents[2]
PROCESSES = 8


def test_processes_that_open_a_new_store_at_once_all_get_it(tmp_path: Path) -> None:
    rounds = either(12, 200)
    command = [sys.executable, "-m", "tests.faults.opening", str(tmp_path), str(rounds), str(PROCESSES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said == [[None] * PROCESSES] * rounds

    async def count(path: Path) -> int:
        async with open_store(f"sqlite:{path}") as store:
            return (await store.work.counts())[WorkState.PENDING]

    assert asyncio.run(count(tmp_path / "0.db")) == PROCESSES


class Overtaken(apsw.Connection):
    """Another process makes the tables right after this one has read the pragma `after`."""

    after = ""

    def pragma(self, name: str, *given: Any, **named: Any) -> Any:
        answer = super().pragma(name, *given, **named)
        if name == self.after:
            self.after = ""
            other = open_connection(self.filename, patience=1)
            migrate(other, self.filename)
            other.close()
        return answer


def overtaken(path: Path, after: str) -> Overtaken:
    open_connection(str(path), patience=1).close()
    connection = Overtaken(str(path))
    connection.after = after
    return connection


@pytest.mark.parametrize("after", ["user_version", "application_id"])
def test_tables_that_appear_while_one_looks_are_not_taken_for_another_programs(tmp_path: Path, after: str) -> None:
    connection = overtaken(tmp_path / "state.db", after)
    assert migrate(connection, "state.db") == VERSION
    assert check_version(connection, "state.db") == VERSION
    connection.close()


def test_version_and_tables_that_are_read_apart_look_like_another_programs(tmp_path: Path) -> None:
    """The control: the same moment, without the snapshot."""
    connection = overtaken(tmp_path / "state.db", "application_id")
    ours = connection.pragma("application_id") == APPLICATION_ID
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    assert not ours
    assert tables
    connection.close()


class Contended(apsw.Connection):
    """SQLite refuses to change the journal's mode a few times, as it does while another process does the same."""

    refusals = 3

    def execute(self, statements: str, *given: Any, **named: Any) -> Any:
        if "journal_mode" in statements and self.refusals:
            self.refusals -= 1
            raise apsw.BusyError("database is locked")
        return super().execute(statements, *given, **named)


class Stubborn(Contended):
    refusals = 1 << 30


def test_a_refused_change_of_the_journal_is_asked_for_again_within_the_stores_patience(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    connection = open_connection(path, patience=5, opener=lambda path, flags: Contended(path, flags=flags))
    assert connection.pragma("journal_mode") == "wal"
    connection.close()
    with pytest.raises(StoreUnavailableError, match="another process kept it locked"):
        open_connection(path, patience=0.01, opener=lambda path, flags: Stubborn(path, flags=flags))
