"""Bulk statements: several rows in one statement, and all of them arrive."""

from collections.abc import Iterator

import apsw
import pytest

from reefknot.stores.sqlite.transaction import SIZES, BulkStatement

INSERT = BulkStatement("INSERT OR ROLLBACK INTO t (name, value) VALUES {}", width=2)
UPDATE = BulkStatement("UPDATE t SET value = new.column2 FROM (VALUES {}) AS new WHERE name = new.column1", width=2)


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    opened = apsw.Connection(":memory:")
    opened.execute("CREATE TABLE t (name TEXT NOT NULL UNIQUE, value INTEGER)")
    yield opened
    opened.close()


def rows(number: int, value: int) -> list[tuple[str, int]]:
    return [(f"{n:03}", value + n) for n in range(number)]


@pytest.mark.parametrize("number", [0, 1, *range(SIZES[1] - 1, SIZES[1] + 2), *range(SIZES[0] - 1, SIZES[0] + 2), 171])
def test_every_row_is_written_once_whatever_their_number(connection: apsw.Connection, number: int) -> None:
    INSERT.run(connection, rows(number, 0))
    UPDATE.run(connection, rows(number, 1000))

    assert connection.execute("SELECT * FROM t ORDER BY name").fetchall() == rows(number, 1000)


def test_a_batch_of_64_takes_two_statements(connection: apsw.Connection) -> None:
    seen: list[str] = []
    connection.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: seen.append(event["sql"]))
    INSERT.run(connection, rows(64, 0))
    assert len(seen) == 2


def test_a_row_that_cannot_be_written_leaves_nothing_of_its_transaction(connection: apsw.Connection) -> None:
    """With plain `INSERT` the rows of the statements before would stay, and the transaction would go on."""
    connection.execute("BEGIN IMMEDIATE")
    INSERT.run(connection, rows(1, 0))
    with pytest.raises(apsw.ConstraintError):
        INSERT.run(connection, rows(40, 0))
    assert connection.get_autocommit()
    assert connection.execute("SELECT count(*) FROM t").get == 0
