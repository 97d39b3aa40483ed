"""Several processes open a store that is not there yet: one makes it, all of them get it."""

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

import apsw
import pytest

from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.work import WorkState
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.sqlite_files import open_connection
from reefknot.stores.opening import open_store
from reefknot.stores.sqlite.connection import APPLICATION_ID, VERSION, check_version, migrate
from reefknot.stores.sqlite.store import SqliteStore
from tests.faults.carrying_out import carried_out
from tests.faults.points import either

PROCESSES = 8
MOST_STEPS = 100

T = TypeVar("T")


def test_processes_that_open_a_new_store_at_once_all_get_it(tmp_path: Path) -> None:
    rounds = either(6, 200)
    plans = [{"file": str(tmp_path / f"{number}.db"), "processes": PROCESSES} for number in range(rounds)]
    lives = carried_out(tmp_path, plans, program="tests.faults.opening", within=600)
    assert lives == [{"said": [[]] * PROCESSES, "ended": [0] * PROCESSES}] * rounds

    async def pending(path: Path) -> int:
        async with open_store(f"sqlite:{path}") as store:
            return sum(one.get(WorkState.PENDING, 0) for one in (await store.work.snapshot()).counts.values())

    assert asyncio.run(pending(tmp_path / "0.db")) == PROCESSES


def overtaken(path: Path, look: Callable[[apsw.Connection], T], at: int) -> T | None:
    """What `look` gives when another process makes the tables after so many of its steps; None: it has fewer."""
    connection = open_connection(str(path), patience=1)
    steps = count(1)
    done = False

    def step() -> bool:
        nonlocal done
        if next(steps) == at:
            done = True
            other = open_connection(str(path), patience=1)
            migrate(other, str(path))
            other.close()
        return False

    connection.set_progress_handler(step, 1)
    try:
        found = look(connection)
    finally:
        connection.set_progress_handler(None)
        connection.close()
    return found if done else None


def apart(connection: apsw.Connection) -> tuple[bool, bool]:
    """The broken variant: mark and tables are read one after the other."""
    ours = connection.execute("PRAGMA application_id").get == APPLICATION_ID
    return ours, bool(connection.execute("SELECT count(*) FROM sqlite_schema").get)


def test_tables_that_appear_while_one_looks_are_not_taken_for_another_programs(tmp_path: Path) -> None:
    def look(connection: apsw.Connection) -> int:
        return check_version(connection, "state.db")

    seen = [overtaken(tmp_path / f"{at}.db", look, at) for at in range(1, MOST_STEPS)]
    assert seen[-1] is None, "every step has been tried"
    assert {0, VERSION} >= set(seen) - {None}
    assert seen[0] is not None


def test_mark_and_tables_that_are_read_apart_look_like_another_programs(tmp_path: Path) -> None:
    """The control: at some step there are tables without our mark."""
    seen = [overtaken(tmp_path / f"{at}.db", apart, at) for at in range(1, MOST_STEPS)]
    assert (False, True) in seen


class Contention:
    """Refuses one statement of the opening, as SQLite may while others make the file; the next tries get through."""

    def __init__(self, error: type[apsw.Error], at: int) -> None:
        self.error, self.at, self.statements = error, at, 0

    def opener(self, path: str, flags: int) -> apsw.Connection:
        connection = apsw.Connection(path, flags=flags)
        connection.exec_trace = self._before
        return connection

    def _before(self, _cursor: apsw.Cursor, _statement: str, _values: object) -> bool:
        self.statements += 1
        if self.statements == self.at:
            raise self.error("database is locked")
        return True


@pytest.mark.real_time
@pytest.mark.parametrize("error", [apsw.BusyError, apsw.LockedError, apsw.ProtocolError])
async def test_a_store_opens_whichever_statement_meets_others_on_the_file(
    tmp_path: Path, error: type[apsw.Error]
) -> None:
    async def statements(at: int) -> int:
        contention = Contention(error, at)
        store = await SqliteStore(tmp_path / f"{at}.db", SystemClock(), opener=contention.opener).start()
        await store.close()
        return contention.statements

    undisturbed = await statements(0)
    assert undisturbed > 20
    for at in range(1, undisturbed + 1):
        assert await statements(at) > undisturbed


def test_a_file_that_stays_taken_is_reported_when_the_patience_ends(tmp_path: Path) -> None:
    class Stubborn(Contention):
        def _before(self, _cursor: apsw.Cursor, _statement: str, _values: object) -> bool:
            raise self.error("database is locked")

    stubborn = Stubborn(apsw.BusyError, 0)
    with pytest.raises(StoreUnavailableError, match="another process kept it locked"):
        open_connection(str(tmp_path / "state.db"), patience=0.01, opener=stubborn.opener)
