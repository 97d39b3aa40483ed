"""`sql.query` on a file of SQLite and on a real PostgreSQL."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps import sql_text
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_rows import Access, SqlConnection, SqlSettings
from tests.integration.postgres import Server
from tests.integration.stepping import refused, run, step
from tests.pace import within
from tests.warm_commands import run_cold

pytestmark = pytest.mark.real_time

SETUP = "CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT NOT NULL)"
PEOPLE = "INSERT INTO people VALUES (1, 'Ada'), (2, 'Bob')"
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) AS n FROM r"


@pytest.fixture(scope="session")  # a worker may come back to this module
def server(postgres: Server) -> str:
    """One database, with a role that may read and write, and is no superuser."""
    dsn = f"host={postgres.folder} user=postgres dbname=blocks"
    with psycopg.connect(f"host={postgres.folder} user=postgres dbname=postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE blocks TEMPLATE template0")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE clerk LOGIN")
        connection.execute("GRANT ALL ON SCHEMA public TO clerk")
    return dsn


@pytest.fixture
def clerk(server: str) -> str:
    """The connection of the role."""
    return server.replace("user=postgres", "user=clerk")


@contextmanager
def people(url: str, *more: str) -> Iterator[psycopg.Connection[Any]]:
    """The table of people, and what is in it."""
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            for statement in (SETUP, *more):
                connection.execute(statement.encode())
            yield connection
        finally:
            connection.execute("DROP TABLE IF EXISTS people")


@pytest.fixture(params=["sqlite", "postgres"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlSettings]:
    """The same two people in either database, reachable by `reads` and `writes`."""
    if request.param == "sqlite":
        url = f"sqlite:{tmp_path / 'people.db'}"
        lite = apsw.Connection(str(tmp_path / "people.db"))
        lite.execute(f"{SETUP}; {PEOPLE}")
        lite.close()
        yield made(url)
        return
    url = request.getfixturevalue("clerk")
    with people(url, PEOPLE):
        yield made(url)


def made(url: str, **more: Any) -> SqlSettings:
    both = {"reads": SqlConnection(url), "writes": SqlConnection(url, Access.WRITE)}
    return SqlSettings(both, **more)


def mark(settings: SqlSettings) -> str:
    """How a parameter is written."""
    return "?" if settings.connections["reads"].sqlite_path else "%s"


def named(settings: SqlSettings, name: str) -> str:
    return f":{name}" if settings.connections["reads"].sqlite_path else f"%({name})s"


def ask(settings: SqlSettings, query: str, params: Any = None, *, connection: str = "reads") -> StepResult:
    return run(SqlQuery(settings), connection=connection, query=query, params=params)


def names(settings: SqlSettings) -> list[str]:
    rows = ask(settings, "SELECT name FROM people ORDER BY id").outputs["rows"]
    return [row["name"] for row in rows]


def test_rows_come_as_mappings(settings: SqlSettings) -> None:
    result = ask(settings, "SELECT id, name FROM people ORDER BY id;")
    rows = [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}]
    assert result.outputs == {"rows": rows, "row_count": 2, "affected_rows": 0}


def test_parameters_are_bound_and_never_text(settings: SqlSettings) -> None:
    hostile = "x'; DROP TABLE people; --"
    assert ask(settings, f"SELECT id FROM people WHERE name = {mark(settings)}", [hostile]).outputs["rows"] == []
    by_name = ask(settings, f"SELECT id FROM people WHERE name = {named(settings, 'who')}", {"who": "Bob"})
    assert by_name.outputs["rows"] == [{"id": 2}]
    assert names(settings) == ["Ada", "Bob"]


def test_a_connection_for_writing_writes_and_counts(settings: SqlSettings) -> None:
    one = mark(settings)
    added = ask(settings, f"INSERT INTO people VALUES ({one}, {one}) RETURNING id", [3, "Cy"], connection="writes")
    changed = ask(settings, "UPDATE people SET name = 'D'", connection="writes")
    assert added.outputs == {"rows": [{"id": 3}], "row_count": 1, "affected_rows": 1}
    assert changed.outputs == {"rows": [], "row_count": 0, "affected_rows": 3}
    assert names(settings) == ["D", "D", "D"]


@pytest.mark.parametrize(
    "query",
    [
        *("INSERT INTO people VALUES (9, 'x')", "DELETE FROM people", "UPDATE people SET name = 'x'"),
        *("DROP TABLE people", "CREATE TABLE other (a INTEGER)", "CREATE TEMP TABLE other (a INTEGER)"),
    ],
)
def test_a_connection_for_reading_writes_nothing(settings: SqlSettings, query: str) -> None:
    assert ask(settings, query).error_code is ErrorCode.permission_denied
    assert names(settings) == ["Ada", "Bob"]


@pytest.mark.parametrize("connection", ["reads", "writes"])
def test_one_statement_only_and_nothing_of_two(settings: SqlSettings, connection: str) -> None:
    result = ask(settings, "SELECT 1 AS a; DELETE FROM people", connection=connection)
    other = ask(settings, "DELETE FROM people; SELECT 1 AS a", connection=connection)
    assert result.error_code in (ErrorCode.invalid_input, ErrorCode.permission_denied)
    assert other.error_code in (ErrorCode.invalid_input, ErrorCode.permission_denied)
    assert names(settings) == ["Ada", "Bob"]


@pytest.mark.parametrize("params", [[], [1], [1, 2, 3]])
def test_a_wrong_number_of_parameters_is_named(settings: SqlSettings, params: list[int]) -> None:
    one = mark(settings)
    refused(ask(settings, f"SELECT {one} AS a, {one} AS b", params), ErrorCode.invalid_input, "params: ")


def test_a_parameter_that_is_missing_by_name_is_named(settings: SqlSettings) -> None:
    result = ask(settings, f"SELECT {named(settings, 'who')} AS a", {"whom": 1})
    refused(result, ErrorCode.invalid_input, "params: ")
    assert "who" in result.error_message


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("SELEKT 1", None),
        ("SELECT * FROM nowhere", ErrorCode.invalid_input),
        ("SELECT nothing FROM people", ErrorCode.invalid_input),
        ("SELECT 1 AS a, 2 AS a", ErrorCode.invalid_input),
    ],
)
def test_a_mistake_in_the_query_is_not_retried(settings: SqlSettings, query: str, code: ErrorCode | None) -> None:
    result = ask(settings, query)
    assert result.error_code in ({code} if code else {ErrorCode.invalid_input, ErrorCode.permission_denied})
    assert result.error_message.startswith("query: ")


def test_a_broken_constraint_is_invalid_input(settings: SqlSettings) -> None:
    assert ask(settings, PEOPLE, connection="writes").error_code is ErrorCode.invalid_input


def test_an_endless_query_stops_in_time(settings: SqlSettings) -> None:
    result = within(1.3, lambda: run(SqlQuery(settings), 0.3, connection="reads", query=ENDLESS))
    refused(result, ErrorCode.resource_unavailable)


def test_an_attempt_without_a_limit_has_none(settings: SqlSettings) -> None:
    assert run(SqlQuery(settings), float("inf"), connection="reads", query="SELECT 1 AS a").ok


def test_its_own_time_limit_holds(settings: SqlSettings) -> None:
    result = run(SqlQuery(settings), 30, connection="reads", query=ENDLESS, timeout_ms=100)
    refused(result, ErrorCode.resource_unavailable)


@pytest.mark.parametrize("connection", ["reads", "writes"])
def test_rows_without_end_are_an_error_that_says_so(settings: SqlSettings, connection: str) -> None:
    endless = ENDLESS.replace("count(*) AS n", "n")
    few = made(settings.connections["reads"].url, max_rows=50)
    if connection == "writes":
        endless = f"SELECT n FROM ({endless}) AS r2"
    refused(ask(few, endless, connection=connection), ErrorCode.execution_failed, "more than 50 rows")


def test_too_many_bytes_are_an_error_and_undo_the_statement(settings: SqlSettings) -> None:
    small = made(settings.connections["reads"].url, max_bytes=100)
    query = f"UPDATE people SET name = {mark(settings)} RETURNING name"
    result = ask(small, query, ["x" * 200], connection="writes")
    refused(result, ErrorCode.execution_failed, "more than 100 bytes")
    assert names(settings) == ["Ada", "Bob"]


@pytest.mark.parametrize(
    ("inputs", "code", "words"),
    [
        ({"query": "SELECT 1"}, ErrorCode.missing_required_field, "connection: missing"),
        ({"connection": "reads"}, ErrorCode.missing_required_field, "query: missing"),
        ({"connection": "x", "query": "SELECT 1"}, ErrorCode.invalid_input, "connection: 'x' is not accepted; acc"),
        ({"connection": "reads", "query": " "}, ErrorCode.invalid_input, "query: ' '"),
        ({"connection": "reads", "query": "SELECT '\0'"}, ErrorCode.invalid_input, "query: "),
        ({"connection": "reads", "query": "SELECT 1", "params": 1}, ErrorCode.invalid_input, "params: 1 is not"),
        ({"connection": "reads", "query": "SELECT 1", "params": [[]]}, ErrorCode.invalid_input, "params[0]: []"),
        ({"connection": "reads", "query": "SELECT 1", "params": [2**70]}, ErrorCode.invalid_input, "params[0]: "),
        ({"connection": "reads", "query": "SELECT 1", "params": [0] * 1001}, ErrorCode.invalid_input, "at most 1000"),
        ({"connection": "reads", "query": "SELECT 1", "limit": 1}, ErrorCode.invalid_input, "limit: no such input"),
    ],
)
def test_bad_inputs_are_refused_by_name(settings: SqlSettings, inputs: Any, code: ErrorCode, words: str) -> None:
    refused(run(SqlQuery(settings), **inputs), code, words)


def test_a_url_is_taken_only_when_it_is_listed_and_then_for_reading(settings: SqlSettings) -> None:
    url = settings.connections["reads"].url
    listed = SqlSettings(allow={url: SqlConnection(url)})
    assert ask(SqlSettings(), "SELECT 1 AS a", connection=url).error_code is ErrorCode.permission_denied
    assert ask(listed, "SELECT 1 AS a", connection=url).outputs["rows"] == [{"a": 1}]
    assert ask(listed, "DELETE FROM people", connection=url).error_code is ErrorCode.permission_denied


def test_a_password_in_a_refused_url_is_not_repeated() -> None:
    result = run(SqlQuery(), connection="postgresql://me:hunter2@db/x", query="SELECT 1")
    refused(result, ErrorCode.permission_denied)
    assert "hunter2" not in result.error_message


def test_the_destination_is_the_connection(settings: SqlSettings) -> None:
    assert SqlQuery(settings).destination({"connection": "reads"}) == "sql:reads"
    assert SqlQuery(settings).destination({"connection": ["x"]}) == "sql"


@pytest.fixture
def lite(tmp_path: Path) -> SqlSettings:
    connection = apsw.Connection(str(tmp_path / "x.db"))
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    return made(f"sqlite:{tmp_path / 'x.db'}")


def test_a_locked_file_is_unavailable_and_may_be_tried_again(lite: SqlSettings) -> None:
    other = apsw.Connection(str(lite.connections["reads"].sqlite_path))
    other.execute("BEGIN EXCLUSIVE")
    result = run(SqlQuery(lite), 3.0, connection="writes", query="INSERT INTO t VALUES (1)")
    other.close()
    refused(result, ErrorCode.resource_unavailable)
    assert result.metadata == {"sqlite": "BusyError"}


def test_a_file_that_is_not_there_is_not_found_for_reading(tmp_path: Path) -> None:
    settings = made(f"sqlite:{tmp_path / 'none.db'}")
    assert ask(settings, "SELECT 1").error_code is ErrorCode.execution_failed
    assert list(tmp_path.iterdir()) == []
    assert ask(settings, "CREATE TABLE t (a)", connection="writes").ok


def test_a_file_that_is_no_database_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("this is a text, and a long one at that " * 50)
    assert ask(made(f"sqlite:{tmp_path / 'x.db'}"), "SELECT * FROM t").error_code is ErrorCode.execution_failed


async def test_a_cancelled_step_ends_its_statement(lite: SqlSettings) -> None:
    """Its thread is free again at once, although the attempt had a minute."""

    def busy() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("reefknot-sqlite")]

    block = SqlQuery(lite)
    running = asyncio.create_task(step(block, 60.0, connection="reads", query=ENDLESS))
    while not busy():  # noqa: ASYNC110 - a thread has no event to wait for
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await block.close()
    for thread in busy():
        thread.join(30)
        assert not thread.is_alive(), "the statement would go on for ever"


def test_a_superuser_is_not_let_near_a_connection_for_reading(server: str) -> None:
    refused(ask(made(server), "SELECT 1 AS a"), ErrorCode.permission_denied, "superuser")


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_of_a_question_on_a_connection_for_writing_is_left_at_the_limit(
    clerk: str, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Far behind the limit there is a row that fails: who gets that far has read them all. The control does."""
    if not streams:
        monkeypatch.setattr(sql_text.SqlText, "bounded", lambda self, most: None)
    query = "WITH n AS (SELECT generate_series(1, 2000000) AS i) SELECT 1 / (1000000 - i) AS a FROM n"
    result = ask(made(clerk, max_rows=50), query, connection="writes")
    assert ("more than 50 rows" in result.error_message) is streams
    assert ("division by zero" in result.error_message) is not streams


READER = """
import sys
from pathlib import Path
from tests.integration.stepping import run
from tests.integration.test_blocks_sql import ask, made
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_text import SqlText

def peak():  # getrusage would tell that of the process we were forked from
    said = Path("/proc/self/status").read_text()
    return int(said.partition("VmHWM:")[2].split()[0])

url, streams = sys.argv[1:]
if streams == "False":
    SqlText.bounded = lambda self, most: None
few = made(url, max_rows=50)
ask(few, "SELECT 1 AS a", connection="writes")
before = peak()
made_up = "SELECT i, repeat('x', 500) FROM generate_series(10, 200000) AS i"
query = f"INSERT INTO people {made_up} RETURNING name"
result = run(SqlQuery(few), 120.0, connection="writes", query=query)  # a busy machine writes 100 MB in its own time
assert "more than 50 rows" in result.error_message, result
print(peak() - before)
"""


@pytest.mark.parametrize("streams", [True, False])
def test_what_a_statement_returns_is_not_read_whole_before_the_limit_acts(clerk: str, streams: bool) -> None:
    """100 MB of it, and a process that grows by less than half of that. The control holds them all."""
    with people(clerk) as connection:
        done = run_cold(sys.executable, "-c", READER, clerk, str(streams), timeout=300)
        assert done.returncode == 0, done.stderr
        assert connection.execute("SELECT count(*) FROM people").fetchone() == (0,), "it is undone"
    assert (int(done.stdout) < 50_000) is streams


@pytest.mark.parametrize(
    ("query", "rows", "affected"),
    [
        ("WITH n AS (SELECT 7 AS i) INSERT INTO people SELECT i, 'x' FROM n", [], 1),
        ("WITH n AS (SELECT 7 AS i) INSERT INTO people SELECT i, 'x' FROM n RETURNING id", [{"id": 7}], 1),
        ("WITH d AS (DELETE FROM people RETURNING id) SELECT count(*) AS n FROM d", [{"n": 2}], 1),
        ("UPDATE people SET name = 'returning' WHERE id = 1", [], 1),
        ("UPDATE people SET name = 'y' WHERE id = 99 RETURNING id", [], 0),
        ("UPDATE people SET name = 'y' RETURNING id", [{"id": 1}, {"id": 2}], 2),
    ],
)
def test_statements_that_write_are_counted(clerk: str, query: str, rows: list[dict[str, Any]], affected: int) -> None:
    with people(clerk, PEOPLE):
        result = ask(made(clerk), query, connection="writes")
    assert result.outputs == {"rows": rows, "row_count": len(rows), "affected_rows": affected}, result.error_message


def test_values_of_every_kind_come_as_json_and_a_percent_sign_is_itself_without_parameters(clerk: str) -> None:
    kinds = """1.50::numeric n, '{1,2}'::int[] l, '{"a": 1}'::jsonb j, DATE '2026-01-02' d, '\\xff'::bytea b"""
    row = {"n": "1.50", "l": [1, 2], "j": {"a": 1}, "d": "2026-01-02", "b": "/w==", "p": True}
    assert ask(made(clerk), f"SELECT {kinds}, 'ab' LIKE 'a%' AS p").outputs["rows"] == [row]


def test_a_server_that_is_not_there_is_a_network_error(tmp_path: Path) -> None:
    assert ask(made(f"host={tmp_path} dbname=x"), "SELECT 1").error_code is ErrorCode.network_error


def test_options_of_the_url_still_hold(clerk: str) -> None:
    settings = made(f"{clerk} options='-c search_path=elsewhere'")
    for name, value in (("search_path", "elsewhere"), ("default_transaction_read_only", "on")):
        assert ask(settings, f"SHOW {name}").outputs["rows"] == [{name: value}]


def test_a_lock_that_is_held_is_waited_for_only_so_long(server: str, clerk: str) -> None:
    with psycopg.connect(server) as holder:
        holder.execute("CREATE TABLE IF NOT EXISTS held (a INTEGER)")
        holder.execute("GRANT ALL ON held TO clerk")
        holder.commit()
        holder.execute("LOCK TABLE held")
        result = run(SqlQuery(made(clerk)), 0.3, connection="writes", query="INSERT INTO held VALUES (1)")
    refused(result, ErrorCode.resource_unavailable)
