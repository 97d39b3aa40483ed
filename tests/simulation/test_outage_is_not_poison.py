"""
An outage is not poison: a source is down for a day of virtual time, with 10,000 good jobs and 10 bad ones waiting.

No good job may end in quarantine because its source was away; all bad ones must be found; and the backlog must drain
without passing the limit of the source. Without the breaker of the source the same day must end badly.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from msgspec import Struct

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.jobs import IngestionJob
from reefknot.ingest.port import FetchRequest, Page
from reefknot.queue.model.source_health import HealthRules
from reefknot.queue.model.work import WorkState
from tests.unit.ingest.world import World, in_world, page

GOOD = 10_000
HOUR = 3600.0
DOWN_FROM, DOWN_UNTIL = 5.0, 5.0 + 24 * HOUR
LIMIT = 4
"""Calls that the source serves at once; it refuses the fifth."""


class Day(Struct):
    """What became of the jobs, and what the source saw."""

    states: Counter[tuple[str, WorkState]]
    calls_while_down: int
    most_at_once: int
    drained_s: float
    refused: int


def run_day(*, good: int, rules: HealthRules, connector: str = "imap_mailbox", orchestrators: int = 2) -> Day:
    day = Day(Counter(), 0, 0, 0.0, 0)
    running = 0

    async def fetch(request: FetchRequest) -> Page:
        nonlocal running
        running += 1
        day.most_at_once = max(day.most_at_once, running)
        try:
            return await answer(request.payload)
        finally:
            running -= 1

    async def answer(payload: Any) -> Page:
        now = asyncio.get_running_loop().time()
        if DOWN_FROM <= now < DOWN_UNTIL:
            day.calls_while_down += 1
            await asyncio.sleep(0.1)
            raise ConnectionRefusedError("connection refused")
        if running > LIMIT:
            day.refused += 1
            raise SourceError("too many connections", FailureType.RATE_LIMITED)
        await asyncio.sleep(1.0)
        if payload["kind"] == "broken":
            raise SourceError("this mailbox does not exist", FailureType.PERMANENT)
        if payload["kind"] == "hangs":
            raise TimeoutError("timed out")
        return page()

    async def story(world: World) -> None:
        sources = [world.source(fetch, connector=connector, max_concurrency=LIMIT // orchestrators)]
        for _ in range(orchestrators):
            await world.start(*sources, health=rules)
        jobs = [
            IngestionJob(f"bad-{n}", connector, "notes", {"kind": "broken" if n % 2 else "hangs"}) for n in range(10)
        ]
        for n in range(good):
            jobs.insert(n + n * len(jobs) % 7, IngestionJob(f"good-{n}", connector, "notes", {"kind": "good"}))
        await world.jobs.enqueue(*jobs)
        while True:
            await asyncio.sleep(HOUR)
            now = asyncio.get_running_loop().time()
            if not await world.jobs.list("notes", limit=1) or now > DOWN_UNTIL + 96 * HOUR:
                break
        day.drained_s = asyncio.get_running_loop().time() - DOWN_UNTIL
        for job in jobs:
            day.states[job.job_id.partition("-")[0], await world.state(job.job_id)] += 1

    in_world(story)
    return day


@pytest.mark.slow
def test_a_day_without_the_source_quarantines_no_good_job_and_finds_all_bad_ones() -> None:
    day = run_day(good=GOOD, rules=HealthRules())

    assert day.states == {("good", WorkState.SUCCEEDED): GOOD, ("bad", WorkState.QUARANTINED): 10}
    assert (day.most_at_once, day.refused) == (LIMIT, 0), "the backlog drained without passing the limit"
    assert day.calls_while_down < 250, "a source that is down is asked again now and then, not all the time"
    assert day.drained_s < 12 * HOUR


def test_without_the_breaker_the_same_day_quarantines_good_jobs() -> None:
    day = run_day(good=300, rules=HealthRules(enabled=False))

    assert day.states["good", WorkState.QUARANTINED] > 250


def test_a_connector_with_few_retries_survives_the_day_too() -> None:
    day = run_day(good=300, rules=HealthRules(), connector="local_files")

    assert day.states == {("good", WorkState.SUCCEEDED): 300, ("bad", WorkState.QUARANTINED): 10}
