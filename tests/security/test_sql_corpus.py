"""A connection for reading writes nothing and makes no file, whatever the statement says."""

import asyncio
import hashlib
from pathlib import Path

import apsw
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_rows import SqlConnection, SqlSettings
from reefknot.steps.sql_sqlite import SqliteRequest, SqliteStatement
from tests.integration.stepping import step
from tests.pace import within
from tests.security.sql_corpus import SQLITE_CORPUS

HARMLESS = frozenset((ErrorCode.permission_denied, ErrorCode.invalid_input, ErrorCode.execution_failed))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "people.db"
    connection = apsw.Connection(str(path))
    connection.execute(
        "CREATE TABLE people (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT); INSERT INTO people VALUES (1, 'Ada');"
        "CREATE INDEX by_name ON people (name); CREATE VIEW everyone AS SELECT * FROM people;"
        "CREATE TRIGGER adding INSTEAD OF INSERT ON everyone BEGIN INSERT INTO people VALUES (NULL, 'x'); END"
    )
    connection.close()
    return path


def asked(database: Path, queries: list[str], seconds: float = 10.0) -> dict[str, StepResult]:
    async def main() -> dict[str, StepResult]:
        block = SqlQuery(SqlSettings({"reads": SqlConnection(f"sqlite:{database}")}))
        try:
            return {query: await step(block, seconds, connection="reads", query=query) for query in queries}
        finally:
            await block.close()

    return asyncio.run(main())


def fingerprint(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_no_statement_of_the_corpus_writes_or_makes_a_file(database: Path) -> None:
    queries = [one.replace("{out}", str(database.parent / "out.db")) for one in SQLITE_CORPUS]
    before = fingerprint(database.parent)
    answers = asked(database, queries)
    assert len(set(SQLITE_CORPUS)) >= 300
    assert fingerprint(database.parent) == before
    assert {query: answer for query, answer in answers.items() if answer.ok} == {}
    assert {answer.error_code for answer in answers.values()} <= HARMLESS


def test_read_only_alone_would_let_files_be_made(database: Path) -> None:
    """The control: why there is an authorizer as well."""
    out = database.parent / "out.db"
    connection = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    connection.execute(f"VACUUM INTO '{out}'")
    connection.close()
    assert out.exists()


def test_each_of_the_two_locks_holds_alone(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an authorizer that allows everything the file is still read-only."""
    monkeypatch.setattr(SqliteStatement, "_allowed", lambda *asked: True)
    before = fingerprint(database.parent)
    queries = ("DELETE FROM people", "CREATE TABLE other (a)", "PRAGMA user_version = 7")
    replies = [SqliteStatement(SqliteRequest(str(database), query)).reply() for query in queries]
    assert {reply.refused for reply in replies} == {ErrorCode.permission_denied}
    assert fingerprint(database.parent) == before


def test_what_only_reads_is_not_refused(database: Path) -> None:
    """The other control: the corpus is not refused because everything is."""
    queries = [
        *("SELECT * FROM people", "SELECT count(*) AS n FROM everyone", "SELECT upper(name) AS n FROM people"),
        *("WITH a AS (SELECT 1 AS b) SELECT b FROM a", "PRAGMA table_info(people)", "SELECT json('[1]') AS j"),
        *("SELECT 'DELETE FROM people' AS text", "SELECT 1 AS a; -- and nothing more", "EXPLAIN SELECT 1"),
        "VALUES (1, 2)",
        "SELECT trim('xay', 'xy') AS b, ltrim('xax', 'x') AS c, rtrim('xax', 'x') AS d, trim(NULL, 'x') AS e",
    ]
    answers = asked(database, queries)

    assert [query for query, answer in answers.items() if not answer.ok] == []
    assert answers[queries[-1]].outputs["rows"] == [{"b": "a", "c": "ax", "d": "xa", "e": None}]


R = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"
ENDLESS = (
    *(f"{R} SELECT count(*) AS n FROM r", f"{R} SELECT n FROM r ORDER BY random()"),
    *(f"{R} SELECT sum(a.n * b.n) AS n FROM r AS a, r AS b", f"{R} SELECT count(DISTINCT n % 7) AS n FROM r"),
    f"{R} SELECT max(n) OVER (ORDER BY n) AS n FROM r WHERE n < 0",
    f"{R} SELECT group_concat(n) AS n FROM r WHERE n < 0",
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION SELECT n + 1 FROM r) SELECT count(*) AS n FROM r",
    f"{R} SELECT 1 AS a WHERE EXISTS (SELECT 1 FROM r WHERE n < 0)",
)
LARGE = (
    *("SELECT zeroblob(2000000000) AS a", "SELECT randomblob(1000000000) AS a", "SELECT hex(zeroblob(900000)) AS a"),
    "SELECT printf('%.*c', 2000000000, 'x') AS a",
    "SELECT replace(printf('%.*c', 100000, 'x'), 'x', printf('%.*c', 100000, 'y')) AS a",
    f"{R} SELECT group_concat(printf('%.*c', 1000, 'x')) AS a FROM r",
    f"{R} SELECT json_group_array(printf('%.*c', 1000, 'x')) AS a FROM r",
    "SELECT length(trim(printf('%.*c', 400000, 'b'), printf('%.*c', 400000, 'a') || 'c')) AS a",
    "SELECT printf('%.*c', 900000, 'a') LIKE '%a%a%a%a%a%a%a%a%b' AS a",
    *("SELECT " + "(" * 5000 + "1" + ")" * 5000, "SELECT " + "+".join(["1"] * 5000)),
    " UNION ALL ".join(["SELECT 1 AS a"] * 600),
    "SELECT 1 AS a WHERE 'x' LIKE '" + "%a" * 5000 + "'",
)


@pytest.mark.parametrize("query", ENDLESS)
def test_an_endless_query_stops_in_time(database: Path, query: str) -> None:
    (answer,) = within(1.2, lambda: asked(database, [query], 0.2)).values()
    assert answer.error_code is ErrorCode.resource_unavailable


@pytest.mark.parametrize("query", LARGE, ids=lambda query: query[:40])
def test_a_large_value_or_statement_ends_soon(database: Path, query: str) -> None:
    (answer,) = within(1.8, lambda: asked(database, [query], 0.8)).values()
    assert answer.ok or answer.error_code in {*HARMLESS, ErrorCode.resource_unavailable}
