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

from reefknot.app import open_store
from reefknot.app.stores import clock_of_this_loop
from reefknot.app.system import System
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import ExecAssignment, ExecResult, Job, ResultStatus, StepResult, encode
from reefknot.core.results import unrun_result
from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.sqlite.connection import VERSION
from reefknot.ports.audit_log import AuditQuery
from reefknot.ports.block import BlockContext
from reefknot.ports.quarantine import ALL
from reefknot.ports.store import Store
from reefknot.router.settings import RouterSettings
from reefknot.worker.records import AcceptedWork
from reefknot.worker.settings import default_settings

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
    found = {item.id: await store.work.get(item.id) for item in await store.work.find()}
    return {name: item for name, item in found.items() if item is not None}


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
                assert (assignment.tenant_id, item.tenant_id) == ("t-1", "t-1")
            assert await store.audit.verify() == []
            counted = Counter((one.resource_class, one.state) for one in items.values())
            snapshot = (await store.work.snapshot()).counts
            assert {(name, state): n for name, by in snapshot.items() for state, n in by.items()} == counted
            assert (await store.quarantine.stats()).total == 1
            assert len(await store.audit.read(AuditQuery(since=1))) == (await store.audit.head()).sequence
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
    return ExecAssignment(name, f"r-{name}", Job("demo.step", {"does": does, "n": 1.5, "text": TEXT}), tenant_id="t-1")


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
            results = {name: await system.router.submissions.result(name, 30) for name in STATES}
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
            assert await store.quarantine.requeue(ALL, who="ann") == ["quarantined"]
            again = await system.router.submissions.result("quarantined", 30)
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
            assert await system.router.submissions.result("queued", 5) == late
            await system.router.submissions.result("submitted", 30)
            await asyncio.sleep(0.5)
            assert await system.router.submissions.answer("queued") == late
            await system.stop()
        assert "queued" not in step.ran

    asyncio.run(main())


def _output(result: ExecResult | None) -> dict[str, Any]:
    assert result is not None
    assert result.status is ResultStatus.SUCCESS, result
    return dict(result.output or {})


def _read(text: str) -> ExecResult:
    return decode(text, type=ExecResult)
