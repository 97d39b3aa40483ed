"""On a real PostgreSQL: a connection for reading writes nothing and makes no file, whatever the statement says."""

import asyncio
import time
from collections.abc import Iterator

import psycopg
import pytest

from reefknot.queue.model.messages import StepResult
from reefknot.steps import sql_postgres
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_rows import SqlConnection, SqlSettings
from tests.integration.postgres import Server
from tests.integration.stepping import step
from tests.security.sql_corpus import POSTGRES, POSTGRES_CORPUS

STATE = (
    "SELECT * FROM people",
    "SELECT last_value, is_called FROM counting",
    "SELECT count(*) FROM pg_largeobject_metadata",
)


@pytest.fixture(scope="module")
def dsn(postgres: Server) -> Iterator[str]:
    """A schema of its own, whose owner is no superuser and may do everything in it."""
    admin = f"host={postgres.folder} user=postgres dbname=postgres"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("CREATE SCHEMA corpus AUTHORIZATION reader")
        connection.execute("SET ROLE reader")
        connection.execute("SET search_path TO corpus")
        connection.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("INSERT INTO people VALUES (1, 'Ada')")
        connection.execute("CREATE INDEX by_name ON people (name)")
        connection.execute("CREATE VIEW everyone AS SELECT * FROM people")
        connection.execute("CREATE SEQUENCE counting")
        connection.execute("RESET ROLE")
        connection.execute(
            "CREATE FUNCTION leak(people) RETURNS text SECURITY DEFINER LANGUAGE sql"
            " AS $$SELECT pg_read_file('/etc/passwd')$$"
        )
    yield f"host={postgres.folder} user=reader dbname=postgres options='-c search_path=corpus'"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("DROP SCHEMA corpus CASCADE")
        connection.execute("DROP ROLE reader")


def asked(connection: SqlConnection, queries: list[str], seconds: float = 10.0) -> dict[str, StepResult]:
    async def main() -> dict[str, StepResult]:
        block = SqlQuery(SqlSettings({"reads": connection}))
        try:
            return {query: await step(block, seconds, connection="reads", query=query) for query in queries}
        finally:
            await block.close()

    return asyncio.run(main())


def state(dsn: str) -> object:
    """What is in the schema and in its table, and the large objects."""
    objects = "SELECT relname, relkind FROM pg_class WHERE relnamespace = 'corpus'::regnamespace ORDER BY relname"
    columns = "SELECT attname FROM pg_attribute WHERE attrelid = 'corpus.people'::regclass AND attnum > 0"
    with psycopg.connect(dsn) as connection:
        return [connection.execute(query.encode()).fetchall() for query in (objects, columns, *STATE)]


def test_no_statement_of_the_corpus_writes_or_makes_a_file(postgres: Server, dsn: str) -> None:
    out = postgres.folder / "out"  # where the server may write
    queries = [one.replace("{out}", str(out)) for one in POSTGRES_CORPUS]
    before = state(dsn)
    answers = asked(SqlConnection(dsn), queries)
    assert len(set(POSTGRES_CORPUS)) >= 300
    assert state(dsn) == before
    assert not out.exists()
    assert [query for query, answer in answers.items() if answer.ok] == []


def test_without_the_list_of_functions_some_of_the_corpus_would_run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: among them a function that reads a file of the server, written like a column."""

    async def allow(*asked: object) -> None:
        """Let every function pass."""

    monkeypatch.setattr(sql_postgres, "_check_functions", allow)
    answers = asked(SqlConnection(dsn), [*POSTGRES])
    ran = [query for query, answer in answers.items() if answer.ok]

    assert "SELECT people.leak FROM people" in ran
    assert "SELECT pg_notify('a', 'b')" in ran
    assert len(ran) > 10


def test_a_read_only_transaction_alone_would_let_a_superuser_make_files(postgres: Server, dsn: str) -> None:
    """The control: why a superuser is not let near it."""
    out = postgres.folder / "out-of-the-control"
    with psycopg.connect(dsn.replace("user=reader", "user=postgres")) as connection:
        connection.read_only = True
        connection.execute(f"COPY (SELECT 1) TO '{out}'".encode())
    assert out.exists()
    out.unlink()


def test_what_only_reads_is_not_refused(dsn: str) -> None:
    """The other control: the corpus is not refused because everything is."""
    queries = [
        *("SELECT * FROM people", "(SELECT count(*) AS n FROM everyone)", "VALUES (1, 2)", "TABLE people"),
        *(
            "WITH a AS (SELECT 1 AS b) SELECT b FROM a",
            "SHOW search_path",
            "EXPLAIN SELECT 1",
            "SELECT now()::text AS t",
        ),
        *("SELECT 'DELETE FROM people; set_config' AS text", "-- first\n/* then */ SELECT 1 AS a;"),
        *('SELECT "name" FROM "people"', "SELECT relname FROM pg_stat_user_tables WHERE relname = 'people'"),
    ]
    answers = asked(SqlConnection(dsn), queries)

    assert {query: answer.error_message for query, answer in answers.items() if not answer.ok} == {}


def test_the_server_does_not_go_on_with_it(dsn: str) -> None:
    asked(SqlConnection(dsn, functions=("pg_catalog.pg_sleep",)), ["SELECT pg_sleep(61)::text AS a"], 0.2)
    until = time.monotonic() + 5
    with psycopg.connect(dsn, autocommit=True) as connection:
        while time.monotonic() < until:
            running = connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%SELECT pg_sleep(61)::text%' "
                " AND pid <> pg_backend_pid()"
            ).fetchall()
            if not running:
                return
    pytest.fail("the statement is still running")
