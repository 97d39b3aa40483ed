"""Statements of SQLite run in processes of their own: killed when they do not end, bounded in memory and on disk."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.steps import sql_process, sql_sqlite
from reefknot.steps.sql import SqlQuery
from reefknot.steps.sql_process import Helper, SqliteQueries
from reefknot.steps.sql_rows import Access, SqlConnection, SqlSettings
from reefknot.steps.sql_sqlite import SqliteRequest
from tests.integration.stepping import run, step
from tests.pace import within
from tests.warm_commands import run_cold

pytestmark = pytest.mark.real_time

QUADRATIC = "SELECT instr(printf('%.*c', 900000, 'a'), printf('%.*c', 450000, 'a') || 'b') AS a"
"""Seconds to a minute, without one moment in which SQLite could be interrupted."""
R = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"
FEW = R.replace("FROM r)", "FROM r LIMIT 300000)")
SORT = f"{R} SELECT n, randomblob(1000) AS b FROM r ORDER BY b"
ENDLESS = f"{R} SELECT count(*) AS n FROM r"


@pytest.fixture
def settings(tmp_path: Path) -> SqlSettings:
    connection = apsw.Connection(str(tmp_path / "x.db"))
    connection.execute("CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    connection.close()
    url = f"sqlite:{tmp_path / 'x.db'}"
    return SqlSettings({"reads": SqlConnection(url), "writes": SqlConnection(url, Access.WRITE)})


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while not is_gone(pid):  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(0.01)


def test_eight_statements_that_cannot_be_interrupted_do_not_stop_the_others(settings: SqlSettings) -> None:
    async def main() -> tuple[list[StepResult], StepResult]:
        block = SqlQuery(settings)
        try:
            hostile = [step(block, 0.5, connection="reads", query=QUADRATIC) for _ in range(8)]
            other = step(block, 20.0, connection="reads", query="SELECT a FROM t")
            *ended, answer = await asyncio.gather(*hostile, other)
            return ended, answer
        finally:
            await block.close()

    ended, answer = within(6.0, lambda: asyncio.run(main()))

    assert {one.error_code for one in ended} == {ErrorCode.resource_unavailable}
    assert answer.outputs["rows"] == [{"a": 1}]


def test_without_a_process_such_a_statement_would_go_on(settings: SqlSettings) -> None:
    """The control: its time limit, asked for between the steps of a statement, comes when the function is done."""
    query = QUADRATIC.replace("450000", "30000")
    request = SqliteRequest(str(settings.connections["reads"].sqlite_path), query, seconds=0.01)
    began = time.monotonic()
    sql_sqlite.SqliteStatement(request).reply()
    assert time.monotonic() - began > 0.1


def test_a_run_with_such_statements_ends_in_time(settings: SqlSettings, tmp_path: Path) -> None:
    """From outside: nine assignments on the command line, eight of which would take a minute each."""
    (tmp_path / "reefknot.yaml").write_text(
        "worker: {retries: {v2: {enabled: true, default_policy: {max_attempts: 1}}}, queue: {v2: {enabled: true}}}\n"
        "blocks: {sql: {connections: {reads: 'sqlite:x.db'}}}\n"
    )
    payloads = [{"connection": "reads", "query": QUADRATIC, "timeout_ms": 500}] * 8
    payloads.append({"connection": "reads", "query": "SELECT a FROM t"})
    jobs = [{"type": "sql.query", "payload": payload} for payload in payloads]
    lines = [{"assignment_id": f"a{n}", "request_id": "r", "job": job} for n, job in enumerate(jobs)]
    (tmp_path / "work.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("-m", "reefknot", "run", "work.jsonl", "--results", "results.jsonl")
    done = run_cold(sys.executable, *command, cwd=tmp_path, timeout=50)
    assert done.returncode == 1, done
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {one["assignment_id"] for one in results if one["status"] == "success"} == {"a8"}
    assert len(results) == 9


@pytest.mark.parametrize("query", [ENDLESS, QUADRATIC])
async def test_a_cancelled_statement_leaves_no_process(settings: SqlSettings, query: str) -> None:
    queries = SqliteQueries()
    connection = settings.connections["reads"]
    running = asyncio.create_task(queries.run(connection, query, None, limits=settings, seconds=60.0))
    while not queries._busy:  # noqa: ASYNC110 - a thread has no event to wait for
        await asyncio.sleep(0.01)
    (helper,) = queries._busy
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(helper.pid)
    assert queries._idle == []
    queries.close()


async def test_a_process_is_used_again_and_ends_with_the_block(settings: SqlSettings) -> None:
    queries = SqliteQueries()
    seen = set()
    for _ in range(3):
        await queries.run(settings.connections["reads"], "SELECT 1", None, limits=settings, seconds=10.0)
        (helper,) = queries._idle
        seen.add(helper.pid)
    queries.close()
    assert len(seen) == 1
    assert is_gone(*seen)


WORKER = """
import asyncio, sys
from reefknot.steps.sql_process import SqliteQueries
from reefknot.steps.sql_rows import SqlConnection, SqlSettings

async def main():
    queries = SqliteQueries()
    limits = SqlSettings()
    asking = queries.run(SqlConnection(sys.argv[1]), sys.argv[2], None, limits=limits, seconds=float("inf"))
    task = asyncio.create_task(asking)
    while not queries._busy:
        await asyncio.sleep(0.01)
    print(next(iter(queries._busy)).pid, flush=True)
    await task

asyncio.run(main())
"""


def test_a_statement_ends_when_its_worker_is_killed(settings: SqlSettings) -> None:
    command = [sys.executable, "-c", WORKER, settings.connections["reads"].url, ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        worker.kill()
    asyncio.run(gone(pid))


async def test_a_killed_write_is_undone_before_a_reader(settings: SqlSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of its changes it leaves a journal that a connection for reading cannot roll back."""
    path = str(settings.connections["reads"].sqlite_path)
    connection = apsw.Connection(path)
    connection.execute(f"CREATE TABLE big AS {R} SELECT n, randomblob(1000) AS b FROM r LIMIT 20000")
    connection.close()
    slow = QUADRATIC.removeprefix("SELECT ").removesuffix(" AS a").replace("450000", "450000 - n % 2")  # for each row
    query = f"UPDATE big SET b = CASE WHEN n < 19000 THEN zeroblob(1000) ELSE {slow} END"
    journals = []
    recover = SqliteQueries._recover

    def recovering(self: SqliteQueries, request: SqliteRequest) -> None:
        found = os.path.exists(f"{path}-journal")
        recover(self, request)
        journals.append(found)  # last: whoever waits for it reads a file that is whole again

    monkeypatch.setattr(SqliteQueries, "_recover", recovering)

    block = SqlQuery(settings)
    try:
        killed = await step(block, 3.0, connection="writes", query=query)
        assert killed.error_code is ErrorCode.resource_unavailable
        while not journals:  # noqa: ASYNC110 - a thread has no event to wait for
            await asyncio.sleep(0.01)
        count = "SELECT count(*) AS n FROM big WHERE b = zeroblob(1000)"
        assert (await step(block, connection="reads", query=count)).outputs["rows"] == [{"n": 0}]
    finally:
        await block.close()
    assert journals == [True]


def written(pid: int) -> int:
    """The bytes that a process wrote to anything."""
    said = Path(f"/proc/{pid}/io").read_text()
    return int(said.partition("wchar:")[2].split()[0])


def test_a_sort_without_end_is_refused_with_nothing_written(settings: SqlSettings) -> None:
    helper = Helper()
    try:
        reply = helper.ask(SqliteRequest(str(settings.connections["reads"].sqlite_path), SORT, seconds=120.0))
        spilled = written(helper.pid)
    finally:
        helper.end()

    assert reply is not None
    assert reply.refused is ErrorCode.execution_failed
    assert reply.message == "query: it needs more than 256 MiB to sort or to hold its values; ask for less"
    assert spilled < 1_000_000


FILES = """
import apsw, sys
from pathlib import Path
connection = apsw.Connection(sys.argv[1])
connection.execute(sys.argv[2]).fetchall()
print(Path("/proc/self/io").read_text().partition("wchar:")[2].split()[0])
"""


def test_a_sort_would_go_to_files(settings: SqlSettings) -> None:
    """The control: what SQLite does unless it is told otherwise."""
    few = SORT.replace(R, FEW.replace("300000", "50000"))
    done = run_cold(sys.executable, "-c", FILES, str(settings.connections["reads"].sqlite_path), few, check=True)
    assert int(done.stdout) > 40_000_000


@pytest.mark.parametrize(
    "query",
    [
        "SELECT zeroblob(1000000000) AS a",
        "SELECT hex(randomblob(600000)) AS a",
        "SELECT replace(printf('%.*c', 10000, 'x'), 'x', printf('%.*c', 1000, 'y')) AS a",
        f"{FEW} SELECT group_concat(n) AS a FROM r",
        f'{R} SELECT n AS "{"x" * 90_000}" FROM r',
    ],
    ids=lambda query: query[-40:],
)
def test_values_and_names_are_bounded(settings: SqlSettings, query: str) -> None:
    assert run(SqlQuery(settings), 30.0, connection="reads", query=query).error_code is ErrorCode.execution_failed


def test_a_process_that_dies_is_a_retryable_failure(settings: SqlSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_process, "_PROGRAM", "import os; os.abort()")
    result = run(SqlQuery(settings), connection="reads", query="SELECT 1 AS a")
    assert result.error_code is ErrorCode.resource_unavailable


def test_a_process_knows_no_secret_of_the_worker(settings: SqlSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    helper = Helper()
    try:
        assert helper.ask(SqliteRequest(str(settings.connections["reads"].sqlite_path), "SELECT 1")) is not None
        assert b"hunter2" not in Path(f"/proc/{helper.pid}/environ").read_bytes()
    finally:
        helper.end()


def test_texts_that_are_no_utf8_are_failures_of_their_statement(settings: SqlSettings) -> None:
    refused = run(SqlQuery(settings), connection="reads", query="SELECT ? AS a", params=["\ud800"])
    unread = run(SqlQuery(settings), connection="reads", query="SELECT CAST(x'ff' AS TEXT) AS a")
    assert refused.error_code is ErrorCode.invalid_input
    assert unread.error_code is ErrorCode.execution_failed
