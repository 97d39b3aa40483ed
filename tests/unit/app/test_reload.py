"""Reload of policies inside a system: which book a job follows, and what a reload leaves alone."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reefknot.app.reload import PolicyReload
from reefknot.app.system import System, running_system, worker_settings
from reefknot.audit import copies, journal
from reefknot.audit.model.event import OperatorAction, decode
from reefknot.core.failure import ErrorCode
from reefknot.policy.check import other_changes
from reefknot.policy.model.book import BookHistory
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model.messages import ExecAssignment, ExecResult, Job, StepResult, StepStatus
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.opening import open_store

pytestmark = pytest.mark.real_time
FILE = """\
worker:
  retries: {{v2: {{enabled: true, default_policy: {{max_attempts: {retries}, base_delay_ms: 5, jitter_type: none}}}}}}
  queue: {{v2: {{enabled: true, max_queue_size: {size}}}}}
"""


class Gated:
    """A step that waits for its gate, then fails."""

    type = "own.gated"

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "nowhere"

    async def run(self, inputs: Mapping[str, Any], context: object) -> StepResult:
        self.begun.set()
        await self.gate.wait()
        return StepResult(StepStatus.ERROR, ErrorCode.network_error, error_message="connection refused")

    async def close(self) -> None:
        return


def written(folder: Path, *, retries: int, size: int = 100) -> Settings:
    (folder / "reefknot.yaml").write_text(FILE.format(retries=retries, size=size))
    return load_settings(None, environ={}, cwd=folder)


async def retries_around_a_reload(folder: Path) -> tuple[int, int]:
    """The retries of a job that has begun while the file changes from 1 retry to 3, and of a later one."""
    settings = written(folder, retries=1)
    step, clock = Gated(), SystemClock()
    async with open_store("memory:") as store, copies.kept_events(store, settings) as books, asyncio.timeout(60):
        reload = PolicyReload(
            settings, lambda: written(folder, retries=3), books=books, journal=journal.Journal(store.audit), clock=clock
        )
        system = System(store, clock, settings=worker_settings(settings), blocks={step.type: step}, reload=reload)
        await system.start()
        try:
            old = await system.submit(assignment("old"))
            await step.begun.wait()
            task = system.reload("somebody")
            assert task is not None
            assert (await task).changed
            new = await system.submit(assignment("new"))
            step.gate.set()
            return retries_of(await old), retries_of(await new)
        finally:
            await system.stop()


def assignment(name: str) -> ExecAssignment:
    return ExecAssignment(assignment_id=name, request_id=name, job=Job("own.gated", {}))


def retries_of(result: ExecResult) -> int:
    assert isinstance(result.retries_used, int)
    return result.retries_used


def test_a_job_follows_the_book_it_began_under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is the control."""
    assert asyncio.run(retries_around_a_reload(tmp_path)) == (1, 3)
    monkeypatch.setattr(BookHistory, "at", lambda history, _: history._books[-1][1])
    assert asyncio.run(retries_around_a_reload(tmp_path)) == (3, 3)


def test_only_sections_with_other_changes_than_policies_wait_for_the_next_start(tmp_path: Path) -> None:
    first, second, third = (written(tmp_path, retries=n, size=size) for n, size in ((1, 100), (2, 100), (2, 7)))
    assert other_changes(first.tree.value, second.tree.value) == []
    assert other_changes(first.tree.value, third.tree.value) == ["worker"]
    sources = {"sources": {"a": {"connector": "x", "retry": {}}}}
    assert other_changes({"engine": "memory:"}, sources) == ["engine", "sources"]


async def test_a_configuration_that_cannot_be_read_is_refused_audited_and_changes_nothing(tmp_path: Path) -> None:
    settings = written(tmp_path, retries=1)

    def unreadable() -> Settings:
        raise OSError("the disk is gone")

    async with running_system("memory:", settings, drain=0, reread=unreadable) as system:
        task = system.reload("somebody")
        assert task is not None
        outcome = await task
        assert (outcome.changed, outcome.problems) == (False, ("OSError: the disk is gone",))
        assert outcome.book_hash == settings.book.hash
        assert system.snapshot()["reload"]["problems"] == ("OSError: the disk is gone",)
        (event,) = [one for one in map(decode, await bodies(system)) if isinstance(one, OperatorAction)]
    assert (event.actor, event.action) == ("somebody", "policy.reload_refused")


async def bodies(system: System) -> list[bytes]:
    return [kept.entry.body for kept in await system.store.audit.read()]


async def test_a_signal_after_a_command_leaves_the_answer_to_the_command_in_the_status(tmp_path: Path) -> None:
    settings = written(tmp_path, retries=1)
    async with running_system("memory:", settings, drain=0, reread=lambda: settings) as system:
        for sequence, answered in ((0, 0), (7, 7), (0, 7), (9, 9), (8, 9)):
            task = system.reload("somebody", sequence)
            assert task is not None
            await task
            assert system.snapshot()["reload"]["sequence"] == answered
    async with running_system("memory:", settings, drain=0) as without:
        assert without.reload("somebody") is None, "it has no configuration to read"
        assert without.snapshot()["reload"] is None
