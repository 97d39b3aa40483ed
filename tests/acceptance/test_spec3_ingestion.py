"""Spec 3 at work: its test plan for the orchestrator, its two log lines, and its telemetry."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import reefknot as rk
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.port import FetchRequest, Page
from reefknot.ingest.telemetry import TelemetryRecorder
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.work import Budget, WorkState
from tests.unit.ingest.world import World, in_world, page

HOUR = 3600.0


class Source:
    """A source that fails a number of times, then works. `calls` are the times of all executions."""

    def __init__(self, *errors: Exception, then: Exception | None = None) -> None:
        self._errors = list(errors)
        self._then = then
        self.calls: list[float] = []

    async def __call__(self, request: FetchRequest) -> Page:
        self.calls.append(asyncio.get_running_loop().time())
        error = self._errors.pop(0) if self._errors else self._then
        if error is not None:
            raise error
        return page()

    @property
    def waits(self) -> list[float]:
        return [after - before for before, after in zip(self.calls, self.calls[1:], strict=False)]


def refused() -> Exception:
    return ConnectionRefusedError("connection refused")


# ---- integration tests: test_connector_specific_retries, test_rate_limit_retry, test_permanent_failure_no_retry ------


@pytest.mark.parametrize(
    ("connector", "executions", "first"),
    [
        ("local_files", 4, (24, 36)),
        ("obsidian_vault", 4, (24, 36)),
        ("imap_mailbox", 8, (84, 156)),
        ("github_repository", 6, (225, 375)),
        ("my.own", 4, (48, 72)),
    ],
)
async def test_every_connector_has_a_policy_of_its_own(
    world: World, connector: str, executions: int, first: tuple[int, int]
) -> None:
    source = Source(then=refused())
    await world.start(world.source(source, connector=connector))
    await world.job("job", connector=connector, n=1)
    await asyncio.sleep(6 * HOUR)
    assert (await world.state("job"), len(source.calls)) == (WorkState.QUARANTINED, executions)
    assert first[0] <= source.waits[0] <= first[1] + 1


@pytest.mark.parametrize(("connector", "delay"), [("imap_mailbox", 600), ("github_repository", 900)])
async def test_rate_limited_failures_wait_longer_and_the_whole_source_cools(
    world: World, connector: str, delay: int
) -> None:
    source = Source(SourceError("too many requests", FailureType.RATE_LIMITED))
    orchestrator = await world.start(world.source(source, connector=connector, max_concurrency=1))
    for n in range(4):
        await world.job(f"job-{n}", connector=connector, n=n)
    await asyncio.sleep(60)
    assert len(source.calls) == 1, "one limit cools the source, not every job in turn"
    health = orchestrator.records.known("notes").health
    assert health.condition(world.store.moment().wall) is SourceCondition.COOLING
    await asyncio.sleep(2 * HOUR)
    assert {await world.state(f"job-{n}") for n in range(4)} == {WorkState.SUCCEEDED}
    assert 0.7 * delay <= source.waits[0] <= 1.3 * delay
    items = [await world.item(f"job-{n}") for n in range(4)]
    assert [item.attempts for item in items] == [1, 1, 1, 1], "a limit spends nothing, of no job"
    assert sorted(item.snoozes for item in items) == [0, 0, 0, 1], "the job that met the limit was put off"


@pytest.mark.parametrize("kind", [FailureType.RATE_LIMITED, FailureType.TRANSIENT])
async def test_a_server_that_asks_for_longer_than_we_wait_cools_the_source_and_spends_no_attempt(
    world: World, kind: FailureType
) -> None:
    source = Source(SourceError("come back later", kind, retry_after=5 * HOUR))
    await world.start(world.source(source, connector="github_repository"))
    await world.job("job", connector="github_repository", n=1)
    await asyncio.sleep(6 * HOUR)
    item = await world.item("job")
    assert (item.state, item.attempts, item.snoozes) == (WorkState.SUCCEEDED, 1, 1)
    assert 5 * HOUR <= source.waits[0] <= 5 * HOUR + 10


async def test_permanent_failures_are_not_retried(world: World) -> None:
    source = Source(then=PermissionError("permission denied"))
    await world.start(world.source(source))
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    assert (await world.state("job"), len(source.calls)) == (WorkState.QUARANTINED, 1)


async def test_a_registry_of_the_program_decides_instead_of_the_book(world: World) -> None:
    registry = rk.RetryPolicyRegistry()
    registry.set_policy(rk.ConnectorPolicy(connector_type="local_files", max_attempts=1, base_delay_seconds=7))
    source = Source(then=refused())
    await world.start(world.source(source), retry_policy_registry=registry)
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    assert len(source.calls) == 2
    assert 5 <= source.waits[0] <= 10


# ---- test_retry_budget_cleanup, test_concurrent_retry_scheduling -----------------------------------------------------


async def test_the_budget_is_in_the_job_and_survives_a_restart_and_ends_with_the_job(world: World) -> None:
    source = Source(refused(), refused())
    orchestrator = await world.start(world.source(source))
    await world.job("job", n=1)
    await asyncio.sleep(1)
    await orchestrator.stop()
    budget = (await world.item("job")).budget
    assert (budget.attempts, budget.failure_type, budget.trigger) == (1, "transient", "retry")
    assert budget.first_attempt_at is not None
    assert 24_000 <= budget.total_delay_ms <= 36_000
    await world.start(world.source(source))
    await asyncio.sleep(HOUR)
    item = await world.item("job")
    assert (item.state, item.attempts, item.budget) == (WorkState.SUCCEEDED, 3, Budget())


async def test_a_requeue_keeps_the_id_begins_a_fresh_budget_and_may_be_quarantined_again(world: World) -> None:
    source = Source(then=refused())
    await world.start(world.source(source))
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    payload = (await world.item("job")).payload
    assert await world.jobs.requeue(["job"], who="ann", why="the disk is back") == ["job"]
    await asyncio.sleep(HOUR)
    item = await world.item("job")
    assert (item.state, item.attempts, item.generation) == (WorkState.QUARANTINED, 4, 1)
    assert item.budget == Budget(), "cleared with the quarantine"
    assert (len(source.calls), item.payload) == (8, payload)
    assert [one.what for one in item.history].count("quarantined") == 2


async def test_many_jobs_fail_side_by_side_and_each_has_a_budget_of_its_own(world: World) -> None:
    failed: dict[Any, int] = {}

    async def fetch(request: FetchRequest) -> Page:
        name = request.payload["n"]
        failed[name] = failed.get(name, 0) + 1
        if failed[name] <= name % 4:
            raise ValueError("odd")
        return page()

    await world.start(world.source(fetch, max_concurrency=8), max_concurrency=8)
    for n in range(200):
        await world.job(f"job-{n}", n=n)
    await asyncio.sleep(2 * HOUR)
    items = [await world.item(f"job-{n}") for n in range(200)]
    assert {item.state for item in items} == {WorkState.SUCCEEDED}
    assert [item.attempts for item in items] == [n % 4 + 1 for n in range(200)]


# ---- the two log lines -----------------------------------------------------------------------------------------------


def test_the_two_log_lines_have_the_keys_of_the_document(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        await world.start(world.source(Source(then=refused())))
        await world.job("job", n=1)
        await asyncio.sleep(HOUR)

    with caplog.at_level(logging.INFO, logger="reefknot"):
        in_world(story)
    retries = [one.__dict__ for one in caplog.records if one.message == "Scheduling retry"]
    job: dict[str, object] = {"ingestion_job_id": "job", "job_type": "local_files", "max_attempts": 3}
    assert [one["attempt"] for one in retries] == [1, 2, 3]
    for one in retries:
        assert one.items() >= (job | {"levelname": "INFO", "failure_type": "transient"}).items()
        assert isinstance(one["delay_seconds"], int)
    (end,) = [one for one in caplog.records if one.message == "Retry budget exhausted, quarantining job"]
    assert end.__dict__.items() >= (job | {"attempts": 3}).items()


# ---- test_retry_telemetry --------------------------------------------------------------------------------------------


async def test_the_telemetry_has_the_schema_of_the_document_and_survives_restarts(world: World) -> None:
    orchestrator = await world.start(world.source(Source(refused(), ValueError("odd"))))
    await world.job("job-1", n=1)
    await asyncio.sleep(HOUR)
    await orchestrator.stop()
    await world.start(world.source(Source(PermissionError("denied"))))
    await world.job("job-2", n=2)
    await asyncio.sleep(HOUR)
    found = await TelemetryRecorder(world.store.values).retry_metrics()
    assert found == {
        "retry_metrics": {
            "local_files": {
                "total_retries": 2,
                "successful_retries": 1,
                "failed_retries": 1,
                "avg_attempts_until_success": 3.0,
                "by_failure_type": {"transient": 1, "rate_limited": 0, "permanent": 0, "unknown": 1},
            }
        }
    }


async def test_a_failing_telemetry_or_audit_stops_neither_retry_nor_quarantine(world: World) -> None:
    """A peer's job hung for ever because its metrics raised."""

    class Broken(TelemetryRecorder):
        async def flush(self) -> None:
            raise OSError("no space left on device")

    source = Source(refused(), then=PermissionError("denied"))
    await world.start(world.source(source), telemetry=Broken())
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    assert (await world.state("job"), len(source.calls)) == (WorkState.QUARANTINED, 2)


def test_the_names_of_the_documents_are_public() -> None:
    recorder = rk.TelemetryRecorder()
    recorder.record("job", duration=0.0, status="retry_scheduled", metadata={"job_type": "local_files", "attempt": 1})
    assert {rk.IngestionOrchestrator, rk.IngestionJob, rk.JobQueue, rk.JobType, rk.QuarantineStore, rk.RetryBudget}
