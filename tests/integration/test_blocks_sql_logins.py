"""A connection for reading is confined by its login: a real PostgreSQL, logins of every kind, texts in texts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps import sql_postgres, sql_text
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_rows import Access, SqlConnection, SqlSettings
from tests.integration.postgres import Server
from tests.integration.stepping import run
from tests.warm_commands import run_cold, run_warm

SECRET = "the-secret-of-the-server"
SETUP = """
CREATE ROLE l_reader; CREATE ROLE l_boss SUPERUSER; CREATE ROLE l_writer; CREATE ROLE l_files;
GRANT pg_read_server_files TO l_files;

CREATE ROLE l_weak LOGIN; CREATE ROLE l_bare LOGIN NOINHERIT; CREATE ROLE l_inherits LOGIN;
CREATE ROLE l_super LOGIN SUPERUSER; CREATE ROLE l_createrole LOGIN CREATEROLE;
CREATE ROLE l_createdb LOGIN CREATEDB; CREATE ROLE l_replication LOGIN REPLICATION;
CREATE ROLE l_read_files LOGIN; CREATE ROLE l_write_files LOGIN; CREATE ROLE l_programs LOGIN;
CREATE ROLE l_by_detour LOGIN; CREATE ROLE l_of_boss LOGIN; CREATE ROLE l_more LOGIN NOINHERIT;
CREATE ROLE l_owner LOGIN;

GRANT l_reader TO l_bare, l_inherits, l_owner, l_super;
GRANT l_reader, l_writer TO l_more;
GRANT pg_read_server_files TO l_read_files;
GRANT pg_write_server_files TO l_write_files;
GRANT pg_execute_server_program TO l_programs;
GRANT l_files TO l_by_detour;
GRANT l_boss TO l_of_boss;

CREATE SCHEMA logins;
GRANT USAGE ON SCHEMA logins TO PUBLIC;
CREATE TABLE logins.open (id INTEGER, name TEXT);
INSERT INTO logins.open VALUES (1, 'Ada');
GRANT SELECT ON logins.open TO l_reader, l_weak;
CREATE TABLE logins.closed (id INTEGER);
GRANT SELECT ON logins.closed TO l_owner, l_writer;
CREATE FUNCTION logins.twice(n INTEGER) RETURNS INTEGER IMMUTABLE LANGUAGE sql AS 'SELECT 2 * n';
CREATE FUNCTION logins.lower(n INTEGER) RETURNS INTEGER IMMUTABLE LANGUAGE sql AS 'SELECT n - 1';
"""
REFUSED = {
    **dict.fromkeys([("l_super", ""), ("l_super", "l_reader")], "is a superuser"),
    ("l_createrole", ""): "may create roles (CREATEROLE)",
    ("l_createdb", ""): "may create databases (CREATEDB)",
    ("l_replication", ""): "may replicate (REPLICATION)",
    ("l_write_files", ""): "is a member of pg_write_server_files",
    ("l_programs", ""): "is a member of pg_execute_server_program",
    **dict.fromkeys([("l_read_files", ""), ("l_by_detour", "")], "is a member of pg_read_server_files"),
    ("l_of_boss", ""): "is a member of l_boss",
    ("l_more", ""): "is a member of l_reader, l_writer",
    ("l_more", "l_reader"): "is a member of l_writer",
    ("l_owner", "l_reader"): "owns or was granted objects that role: l_reader does not take away",
}
ACCEPTED = [("l_weak", ""), ("l_bare", "l_reader"), ("l_inherits", ""), ("l_inherits", "l_reader")]


@pytest.fixture(scope="session")
def logins(postgres: Server) -> str:
    """A database with one login of each kind, and a file of the server that none of them should read."""
    admin = f"host={postgres.folder} user=postgres dbname=postgres"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE logins TEMPLATE template0")
    admin = admin.replace("dbname=postgres", "dbname=logins")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(SETUP.encode())
        connection.execute(f"COPY (SELECT '{SECRET}') TO '{postgres.folder}/secret'".encode())
    return admin


def as_login(logins: str, name: str) -> str:
    return logins.replace("user=postgres", f"user={name}")


def ask(connection: SqlConnection, query: str, **limits: Any) -> StepResult:
    return run(SqlQuery(SqlSettings({"it": connection}, **limits)), connection="it", query=query)


@pytest.mark.parametrize(("login", "role"), REFUSED)
def test_a_login_that_may_do_more_than_read_is_refused_by_its_privilege(logins: str, login: str, role: str) -> None:
    result = ask(SqlConnection(as_login(logins, login), role=role), "SELECT 1 AS a")
    assert result.error_code is ErrorCode.permission_denied
    assert f"its login {login} " in result.error_message
    assert REFUSED[login, role] in result.error_message


@pytest.mark.parametrize(("login", "role"), ACCEPTED)
def test_a_weak_login_reads(logins: str, login: str, role: str) -> None:
    connection = SqlConnection(as_login(logins, login), role=role)
    assert ask(connection, "SELECT name FROM logins.open").outputs["rows"] == [{"name": "Ada"}]
    assert ask(connection, "SELECT id FROM logins.closed").error_code is ErrorCode.permission_denied


def test_the_url_of_an_assignment_is_checked_like_a_name(logins: str) -> None:
    url = as_login(logins, "l_createdb")
    result = run(SqlQuery(SqlSettings(allow={url: SqlConnection(url)})), connection=url, query="SELECT 1 AS a")
    assert "CREATEDB" in result.error_message


def test_a_connection_for_writing_keeps_its_login(logins: str) -> None:
    connection = SqlConnection(as_login(logins, "l_createdb"), Access.WRITE)
    assert ask(connection, "SELECT 1 AS a").ok


CONFIGURATION = """\
worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}
blocks: {sql: {connections: {report: {url: "URL"}}}}
"""


def command(folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "reefknot.yaml").write_text(CONFIGURATION.replace("URL", url))
    job = {"type": "sql.query", "payload": {"connection": "report", "query": "SELECT 1 AS a"}}
    (folder / "work.jsonl").write_text(json.dumps({"assignment_id": "a", "request_id": "r", "job": job}) + "\n")
    return run_warm(*words, cwd=folder, env=os.environ)


@pytest.mark.parametrize("words", [("run", "work.jsonl"), ("up", "--for", "0.1"), ("worker", "start")])
def test_a_worker_with_a_strong_login_does_not_start(logins: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = command(tmp_path, logins, *words)
    assert done.returncode == 78, done
    assert "reefknot.yaml:2:" in done.stderr
    assert "blocks.sql.connections.report: its login postgres is a superuser" in done.stderr


def test_a_worker_with_a_weak_login_starts(logins: str, tmp_path: Path) -> None:
    """The control: it is not refused because every server is."""
    done = command(tmp_path, as_login(logins, "l_weak"), "run", "work.jsonl")
    assert done.returncode == 0, done


def test_a_server_that_is_not_there_yet_does_not_keep_a_worker_from_starting(tmp_path: Path) -> None:
    done = command(tmp_path, f"host={tmp_path} dbname=x", "up", "--for", "0.1")
    assert done.returncode == 0, done
    assert "blocks.sql.connections.report: its login could not be checked now" in done.stderr


def hidden(folder: Path) -> str:
    """A statement that undoes its role, and then has a function run a text that reads a file of the server."""
    text = f"SELECT to_tsvector('simple', pg_read_file($s${folder}/secret$s$))"
    return f"SELECT set_config('role', 'none', true) AS a, (SELECT max(word) FROM ts_stat($x${text}$x$)) AS b"


def test_a_role_alone_would_let_a_hidden_text_read_files(logins: str, postgres: Server) -> None:
    """The control: a superuser became less, in a read-only transaction, and a statement undoes it."""
    with psycopg.connect(logins) as connection:
        connection.execute("SET ROLE l_reader")
        connection.commit()
        connection.read_only = True
        words = str(connection.execute(hidden(postgres.folder).encode()).fetchall())
    assert SECRET in words


def test_the_login_holds_without_that_list(logins: str, postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two is enough for this text."""

    async def allow(*asked: object) -> None:
        """Let every function pass."""

    query = hidden(postgres.folder)
    weak = SqlConnection(as_login(logins, "l_weak"))
    listed = ask(weak, query.replace("set_config", "concat"))
    monkeypatch.setattr(sql_postgres, "_check_functions", allow)
    unlisted = ask(weak, query)

    assert "the function pg_catalog.ts_stat is not allowed" in listed.error_message
    assert "permission denied for function pg_read_file" in unlisted.error_message


def test_functions_of_the_configuration_may_be_called_and_no_others(logins: str) -> None:
    url = as_login(logins, "l_weak")
    query = "SELECT logins.twice(4) AS a"
    assert "logins.twice is not allowed" in ask(SqlConnection(url), query).error_message
    assert ask(SqlConnection(url, functions=("twice",)), query).outputs["rows"] == [{"a": 8}]
    assert ask(SqlConnection(url, functions=("logins.twice",)), query).outputs["rows"] == [{"a": 8}]
    assert not ask(SqlConnection(url, functions=("other.twice",)), query).ok


def test_a_function_under_the_name_of_a_safe_one_is_another_function(logins: str) -> None:
    url = as_login(logins, "l_weak")
    assert ask(SqlConnection(url), "SELECT lower('A') AS a").outputs["rows"] == [{"a": "a"}]
    assert "logins.lower is not allowed" in ask(SqlConnection(url), "SELECT logins.lower(4) AS a").error_message
    path = f"{url} options='-c search_path=logins'"
    assert "logins.lower is not allowed" in ask(SqlConnection(path), "SELECT lower(4) AS a").error_message


def test_every_safe_function_that_runs_no_text_is_one_of_the_server(logins: str) -> None:
    """And none of those that are known to reach further is among them."""
    with psycopg.connect(logins) as connection:
        known = {name for (name,) in connection.execute("SELECT proname FROM pg_proc").fetchall()}
    assert sorted(sql_text.SAFE_FUNCTIONS - known) == []
    far = ("pg_read", "pg_ls", "lo_", "_to_xml", "pg_advisory", "dblink", "pg_sleep", "pg_stat_", "binary_upgrade")
    assert [name for name in sql_text.SAFE_FUNCTIONS if any(part in name for part in far)] == []
    assert not {"ts_stat", "ts_rewrite", "set_config", "pg_notify", "nextval", "setval"} & sql_text.SAFE_FUNCTIONS


@pytest.fixture
def listener(logins: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(logins, autocommit=True) as connection:
        connection.execute("LISTEN news")
        yield connection


@pytest.mark.parametrize("access", list(Access))
def test_what_a_reading_login_did_is_undone(logins: str, listener: psycopg.Connection[Any], access: Access) -> None:
    """Even a listed function sends no message. The control, a connection for writing, does."""
    connection = SqlConnection(as_login(logins, "l_weak"), access, functions=("pg_notify",))
    assert ask(connection, "SELECT pg_notify('news', 'ahoy')").ok
    heard = [one.payload for one in listener.notifies(timeout=1.0, stop_after=1)]
    assert heard == ([] if access is Access.READ else ["ahoy"])


VALUE = "repeat('x', 40000000)"
PEAK = """
import sys
from pathlib import Path
from tests.integration.test_blocks_sql_logins import ask
from reefknot.steps.sql_rows import Access, SqlConnection
from reefknot.steps.sql_text import SqlText

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

url, access, bounded, query = sys.argv[1:]
if bounded == "False":
    SqlText.bounded = lambda self, most: self.text
connection = SqlConnection(url, Access(access))
assert ask(connection, "SELECT 1 AS a").ok
before = peak()
result = ask(connection, query)
assert "more than 1048576 bytes" in result.error_message, result
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("access", "query", "bounded"),
    [
        ("read", f"SELECT {VALUE} AS a", True),
        ("read", f"WITH a AS (SELECT {VALUE} AS b) SELECT b FROM a -- done", True),
        ("write", f"SELECT {VALUE} AS a;", True),
        ("write", f"INSERT INTO scratch VALUES (1) RETURNING {VALUE}", True),
        ("write", f"WITH a AS (INSERT INTO scratch VALUES (1) RETURNING a) SELECT {VALUE} FROM a", True),
        ("read", f"SELECT {VALUE} AS a", False),
    ],
)
def test_a_value_of_40_mb_does_not_reach_the_worker(logins: str, access: str, query: str, bounded: bool) -> None:
    """A process that grows by less than 20 MB. The control, without a bound at the server, by 40 and more."""
    url = logins if access == "write" else as_login(logins, "l_weak")
    with psycopg.connect(logins, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS scratch (a INTEGER)")
    done = run_cold(sys.executable, "-c", PEAK, url, access, str(bounded), query, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 20_000) is bounded, done.stdout
