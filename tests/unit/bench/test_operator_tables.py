"""The store of the operators' bench holds what its questions look for, and every question is answered."""

import asyncio
from pathlib import Path

from bench.operators import filled, percentiles, questions
from reefknot.audit.model.event import EVENT_TYPES, decode
from reefknot.console.operations.jobs import JobQuery, job_story, list_jobs
from reefknot.console.operations.operator import Operator
from reefknot.console.operations.quarantine import quarantine_stats
from reefknot.core.redaction import Redactor
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore

ITEMS, EVENTS = 200, 2000


def test_a_filled_store_answers_every_question_with_its_jobs_and_their_events(tmp_path: Path) -> None:
    async def work() -> None:
        store = await SqliteStore(await filled(tmp_path, items=ITEMS, events=EVENTS), SystemClock()).start()
        operator = Operator(store, Redactor(), "bench")
        try:
            for name, ask in questions(ITEMS).items():
                assert await ask(operator), name
            found = await list_jobs(operator, JobQuery(limit=ITEMS))
            assert len(found["jobs"]) == sum(found["states"].values()) == ITEMS
            assert found["states"]["quarantined"] == (await quarantine_stats(operator))["total"] == ITEMS // 20
            assert len((await list_jobs(operator, JobQuery(tenant="tenant-rare")))["jobs"]) == 10
            story = await job_story(operator, "job-100")
            assert ([one["number"] for one in story["attempts"]], len(story["events"])) == ([1, 2, 3, 4], 10)
            kept = await store.audit.read()
            assert {type(decode(one.entry.body)) for one in kept} < set(EVENT_TYPES)
            (p50, p95) = await percentiles(lambda: list_jobs(operator, JobQuery()), 3)
            assert 0 < p50 <= p95
        finally:
            await store.close()

    asyncio.run(work())
