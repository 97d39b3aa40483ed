"""A store of an older version: every assignment in it becomes one record, and ends as it would have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.json import decode

from reefknot.app.system import System
from reefknot.audit.port import AuditQuery
from reefknot.core.failure import ErrorCode
from reefknot.idempotency.model import Claimed, Hit
from reefknot.queue.model.messages import (
    ExecAssignment,
    ExecResult,
    Job,
    ResultStatus,
    StepResult,
    encode,
    resource_class,
)
from reefknot.queue.model.results import assignment_of, unrun_result
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, record_id, visible_state
from reefknot.queue.port.work_queue import ALL, WorkClaim
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.worker.records import AcceptedWork
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import clock_of_this_loop
from reefknot.steps.port import BlockContext
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.connection import MIGRATIONS, VERSION, add_key_hash

SAMPLE = Path(__file__).parent / "stores" / "version_2.sql"
TEXT = 'ünïcode "quoted" \\ \n'
S = WorkState
STATES = {
    "finished": ("cpu@worker-1", S.SUCCEEDED, 1),
    "quarantined": ("cpu@worker-1", S.QUARANTINED, 1),
    "retrying": ("cpu@worker-1", S.PENDING, 1),
    "running": ("cpu@worker-1", S.RUNNING, 0),
    "queued": ("cpu@worker-1", S.PENDING, 0),
    "submitted": ("router", S.PENDING, 0),
    "cancelled": ("router", S.CANCELLED, 0),
}
TENANT = "t-1"
OPEN = ("retrying", "running", "queued", "submitted")


class Step:
    """The step of the old system, which works by now."""

    type = "demo.step"

    def __init__(self) -> None:
        self.ran: list[str] = []

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "here"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        self.ran.append(context.assignment_id)
        return StepResult(outputs={"by": "this version", "text": inputs["text"], "n": inputs["n"]})

    async def close(self) -> None: ...


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "state.db"
    connection = apsw.Connection(str(made))
    connection.execute(SAMPLE.read_text())
    assert connection.pragma("user_version") == 2
    connection.close()
    return made


async def everything(store: Store) -> dict[str, WorkItem]:
    """The records by the ids of their assignments."""
    found = [await store.work.get(item.id) for item in await store.work.find()]
    return {item.assignment_id: item for item in found if item is not None}


async def outcome(system: System, name: str, seconds: float = 30) -> ExecResult | None:
    return await system.router.submissions.result(record_id(name, TENANT), seconds)


def test_each_assignment_of_an_older_store_has_one_record_under_its_own_id(path: Path) -> None:
    async def main() -> None:
        async with open_store(f"sqlite:{path}") as store:
            items = await everything(store)
            found = {name: (one.resource_class, one.state, one.attempts) for name, one in items.items()}
            assert found == STATES
            for name, item in items.items():
                assignment = AcceptedWork.read(item).assignment
                assert (assignment.assignment_id, assignment.request_id) == (name, f"r-{name}")
                assert (assignment.job.payload or {})["text"] == TEXT
                assert (assignment.tenant_id, item.tenant_id) == (TENANT, TENANT)
                assert item.id == assignment.record_id
            assert await store.audit.verify() == []
            now = store.moment()
            counted = Counter((one.resource_class, visible_state(one, now)) for one in items.values())
            snapshot = (await store.work.snapshot()).counts
            assert {(name, state): n for name, by in snapshot.items() for state, n in by.items()} == counted
            assert (await store.quarantine.stats()).total == 1
            assert len(await store.audit.read(AuditQuery(since=1))) == (await store.audit.head()).sequence
            newest = (await store.audit.read(AuditQuery(newest_first=True, limit=1)))[0].entry.at
            assert len(await store.audit.read(AuditQuery(until=newest + 1))) == (await store.audit.head()).sequence
        connection = apsw.Connection(str(path))
        assert connection.pragma("user_version") == VERSION
        connection.close()

    asyncio.run(main())


def old_result(path: Path, name: str) -> str:
    connection = apsw.Connection(str(path))
    found: Any = connection.execute("SELECT result FROM work WHERE id = ?", (f"\x1froute/{name}",)).get
    connection.close()
    return str(found)


def assignment(name: str, does: str) -> ExecAssignment:
    return ExecAssignment(name, f"r-{name}", Job("demo.step", {"does": does, "n": 1.5, "text": TEXT}), tenant_id=TENANT)


async def system_over(store: Store, step: Step) -> System:
    settings = default_settings(lease=1.0, heartbeat=0.2, concurrency={"cpu": 1}, quarantine_failed=True)
    system = System(
        store, clock_of_this_loop(), settings=settings, routing=RouterSettings(lease=1.0), blocks={"demo.step": step}
    )
    await system.start()
    return system


def test_what_was_open_is_finished_and_what_had_ended_keeps_its_result(path: Path) -> None:
    told = {name: old_result(path, name) for name in ("finished", "quarantined")}

    async def main() -> None:
        step = Step()
        async with open_store(f"sqlite:{path}") as store:
            system = await system_over(store, step)
            results = {name: await outcome(system, name) for name in STATES}
            for name in OPEN:
                assert _output(results[name]) == {"by": "this version", "text": TEXT, "n": 1.5}, name
            assert sorted(step.ran) == sorted(OPEN), "each once"
            finished, failed, cancelled = (results[name] for name in ("finished", "quarantined", "cancelled"))
            assert _output(finished) == {"by": "version 2", "n": 1.5}
            assert {"finished": finished, "quarantined": failed} == {name: _read(text) for name, text in told.items()}
            assert cancelled is not None
            assert (cancelled.status, cancelled.error_message) == (ResultStatus.CANCELLED, "no need")
            assert (await (await system.submit(assignment("finished", "works")))) == finished, "the same id again"
            items = await everything(store)
            assert (items["retrying"].attempts, items["running"].crashes) == (2, 1)
            assert await store.quarantine.requeue(ALL, who="ann") == [record_id("quarantined", TENANT)]
            again = await outcome(system, "quarantined")
            assert _output(again)["by"] == "this version"
            assert await store.audit.verify() == []
            await system.stop()

    asyncio.run(main())


def test_a_result_that_its_caller_was_told_stays_although_a_worker_still_had_the_work(path: Path) -> None:
    """The router had given up on it: expired, or cancelled there."""
    late = unrun_result(assignment("queued", "works"), ResultStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, "too late")
    connection = apsw.Connection(str(path))
    ended = "UPDATE work SET state = 'failed', owner = '', lease_until = 0, result = ? WHERE id = ?"
    connection.execute(ended, (encode(late).decode(), "\x1froute/queued"))
    connection.close()

    async def main() -> None:
        step = Step()
        async with open_store(f"sqlite:{path}") as store:
            system = await system_over(store, step)
            assert await outcome(system, "queued", 5) == late
            await outcome(system, "submitted")
            await asyncio.sleep(0.5)
            assert await system.router.submissions.answer(late.record_id) == late
            await system.stop()
        assert "queued" not in step.ran

    asyncio.run(main())


def test_the_keys_of_an_older_store_are_found_and_their_effects_do_not_run_again(path: Path) -> None:
    connection = apsw.Connection(str(path))
    row = (
        "INSERT INTO idempotency VALUES (NULL, ?, 'done', 'me', 1, 0, 60000, '', 0, ?, NULL, NULL, 1, 1, 9000000000000)"
    )
    connection.executemany(row, [(f"order-{number} {TEXT}", f"{number}") for number in range(50)])
    connection.execute("UPDATE counter SET keys = 50, fence = 1")
    connection.close()

    async def main() -> None:
        async with open_store(f"sqlite:{path}") as store:
            for number in range(50):
                answer = await store.idempotency.claim(f"order-{number} {TEXT}", owner="late")
                assert isinstance(answer, Hit)
                assert answer.record.result == f"{number}"
            assert isinstance(await store.idempotency.claim("order-50", owner="me"), Claimed)
            assert isinstance(store, SqliteStore)
            assert (await store.check()).problems == []

    asyncio.run(main())


def test_a_store_of_version_4_takes_values_and_keeps_its_work(path: Path) -> None:
    with apsw.Connection(str(path)) as connection:
        add_key_hash(connection)
        for migration in MIGRATIONS[2:4]:
            connection.execute(migration)
        connection.execute("PRAGMA user_version = 4")

    async def main() -> None:
        for number in range(2):
            async with open_store(f"sqlite:{path}") as store:
                assert (await everything(store)).keys() == STATES.keys()
                assert [one.body for one in await store.values.list()] == ["{}"] * number
                await store.values.put("a", "{}", version=0)
                assert isinstance(store, SqliteStore)
                assert (await store.check()).problems == []

    asyncio.run(main())


# ---- from version 3: pools and counters -----------------------------------------------------------------------------

SUBMISSIONS = {
    "by class": ExecAssignment("", "", Job("http.request"), resource_class="gpu"),
    "by class with an at sign": ExecAssignment("", "", Job("demo.step"), resource_class="a@b"),
    "by an empty class": ExecAssignment("", "", Job("fs.blob_put"), resource_class=""),
    "by resources": ExecAssignment("", "", Job("demo.step", resources={"class": "io"})),
    "by resources without a class": ExecAssignment("", "", Job("demo.step", resources={"cpus": 4})),
    "by resources of an odd kind": ExecAssignment("", "", Job("ai.embed", resources={"class": 5})),
    "by empty resources": ExecAssignment("", "", Job("media.cut", resources={"class": ""})),
    **{
        f"by its type {name}": ExecAssignment("", "", Job(name))
        for name in (
            *("http", "http.request", "HTTP.request", "httpx.get", "fs_blob_put", "fs_blob_get", "fs.blob_get"),
            *("ai", "ai.embed", "media.cut", "sql", "demo.step"),
        )
    },
}
FRESH = """
SELECT pool, CASE WHEN resource_class = 'router' THEN 'submitted' WHEN state = 'pending' THEN 'queued'
    ELSE 'running' END, priority, ifnull(tenant_id, ''), count(*)
FROM work WHERE state IN ('pending', 'running') GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""


@pytest.fixture
def version_3(path: Path) -> Path:
    """The same store as version 3 left it, with more submissions that wait, and work at two more workers."""
    with apsw.Connection(str(path)) as connection:
        connection.execute(MIGRATIONS[2])
        connection.execute("PRAGMA user_version = 3")
        columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(work)") if name != "seq"]

        def copy(name: str, **changes: Any) -> None:
            """The row `submitted` once more, with other values."""
            given = {"id": name, **changes}
            chosen = ", ".join(f":{one}" if one in given else one for one in columns)
            statement = f"INSERT INTO work ({', '.join(columns)}) SELECT {chosen} FROM work WHERE id = 'submitted'"
            connection.execute(statement, given)

        for number, (name, one) in enumerate(SUBMISSIONS.items()):
            body = encode(ExecAssignment(name, "r", one.job, resource_class=one.resource_class))
            copy(
                name, kind=one.job.type, payload=body, priority=number % 3 - 1, tenant_id=["t-1", None, ""][number % 3]
            )
        copy("damaged", payload=b"{broken")
        copy("at a worker", resource_class="io@worker-2")
        copy("at a worker of an odd class", resource_class="a@b@worker-2")
        copy("in a class", resource_class="gpu")
        copy("running in a class", resource_class="gpu", state="running", lease_until=1)
    return path


def test_the_submissions_of_version_3_get_the_pool_that_they_would_have_been_submitted_to(version_3: Path) -> None:
    async def main() -> None:
        async with open_store(f"sqlite:{version_3}") as store:
            items = await everything(store)
            waiting = {name: one for name, one in items.items() if one.resource_class == ROUTER and name != "damaged"}
            assert waiting.keys() >= SUBMISSIONS.keys() | {"submitted"}
            expected = {name: resource_class(assignment_of(one)) for name, one in waiting.items()}
            assert {name: one.pool for name, one in waiting.items()} == expected
            others = {name: one.pool for name, one in items.items() if name not in waiting}
            assert others["at a worker"] == "io"
            assert others["at a worker of an odd class"] == "a@b"
            assert others["in a class"] == "gpu"
            assert others["damaged"] == ROUTER

    asyncio.run(main())


@pytest.mark.parametrize("version", [2, 3])
def test_the_open_work_of_an_older_store_is_counted(version: int, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue("path" if version == 2 else "version_3")

    async def main() -> None:
        async with open_store(f"sqlite:{path}") as store:
            await store.work.claim(3, WorkClaim(owner="o", classes=(ROUTER,)))
            await store.work.cancel(record_id("submitted", "t-1"))
        with apsw.Connection(str(path)) as connection:
            kept = connection.execute("SELECT pool, stage, priority, tenant, number FROM open_work ORDER BY 1, 2, 3, 4")
            counted = list(kept)
            assert counted == list(connection.execute(FRESH))
            assert sum(number for *_, number in counted) == (len(OPEN) - 1 if version == 2 else len(SUBMISSIONS) + 8)

    asyncio.run(main())


def test_every_waiting_submission_of_version_3_can_be_claimed_also_of_a_tenant_without_a_name(version_3: Path) -> None:
    async def main() -> None:
        async with open_store(f"sqlite:{version_3}") as store:
            claimed = await store.work.claim(1000, WorkClaim(owner="o", classes=(ROUTER,)))
            assert {one.assignment_id for one in claimed} == {*SUBMISSIONS, "submitted", "damaged"}

    asyncio.run(main())


def test_ids_of_an_older_store_become_those_of_their_tenants_whatever_they_look_like(path: Path) -> None:
    """A new id may be what another record is called before it gets its own."""
    given = {
        "finished": ("x", "a"),
        "quarantined": ("a|x", None),
        "retrying": ("other", "b"),
        "running": ("plain", None),
        "queued": ("b|other", "50%|off"),
    }
    connection = apsw.Connection(str(path))
    connection.execute("DELETE FROM work WHERE resource_class = 'router'")
    for old, (name, tenant) in given.items():
        connection.execute("UPDATE work SET id = ?, tenant_id = ? WHERE id = ?", (name, tenant, old))
    connection.close()

    async def main() -> None:
        async with open_store(f"sqlite:{path}") as store:
            found = {item.id for item in await store.work.find()}
        assert found == {"a|x", "|a|x", "b|other", "plain", "50%25%7Coff|b|other"}
        assert found == {record_id(name, tenant) for name, tenant in given.values()}

    asyncio.run(main())


def _output(result: ExecResult | None) -> dict[str, Any]:
    assert result is not None
    assert result.status is ResultStatus.SUCCESS, result
    return dict(result.output or {})


def _read(text: str) -> ExecResult:
    return decode(text, type=ExecResult)
