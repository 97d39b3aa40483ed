"""
Two orchestrator processes over one store, one of which is killed now and then; prints what the source saw.

A plan is the number of jobs, how often a process is killed, the store's address where it is not a file of its own, and
the wrong way that is tried, if any. A job that runs holds a file of its own, so two that run at the same time meet
there, whichever processes they are in.
"""

import asyncio
import fcntl
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.jobs import IngestionJob, JobQueue
from reefknot.ingest.orchestrator import IngestionOrchestrator, IngestionSettings
from reefknot.ingest.port import Document, FetchRequest, KnownItems, Page
from reefknot.ingest.sources import IngestionSource
from reefknot.queue.presence import look_for_orphans
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.opening import open_store
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans

JOB_S = 0.15


class Guarded:
    """A source whose jobs must not overlap; `flock` files are freed by the kernel when their process dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def fetch(self, request: FetchRequest) -> Page:
        name = str(request.payload["n"])
        with open(self._folder / f"{name}.lock", "w") as held:  # noqa: ASYNC230 - a lock of a moment
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                (self._folder / f"{name}.overlap").touch()
            await asyncio.sleep(JOB_S)
        return Page("", (Document(name, name, "1"),))

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        return None

    async def test(self) -> str:
        return "guarded"

    async def close(self) -> None:
        return


def url_of(folder: Path, plan: Plan) -> str:
    return plan["url"] or f"sqlite:{folder / 'state.db'}"


async def orchestrate(folder: Path, plan: Plan, _: Say) -> None:
    """Run until no job is open."""
    async with open_store(url_of(folder, plan)) as store:
        documents = await SqliteDocuments(folder / "documents.db", SystemClock()).start()
        orchestrator = IngestionOrchestrator(
            job_queue=JobQueue(store),
            sources=[IngestionSource("guarded", "guarded", lambda: Guarded(folder), max_concurrency=4)],
            documents=documents,
            settings=IngestionSettings(lease=0.05 if plan["flaw"] else 5.0),
        )
        if plan["flaw"] == "no renewal":
            orchestrator._renew_leases = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        async with orchestrator:
            looking = asyncio.create_task(look_for_orphans(store, None))
            while await orchestrator.jobs.list("guarded", limit=1):  # noqa: ASYNC110 - another process may end the last
                await asyncio.sleep(0.02)
            looking.cancel()
        await documents.close()


async def prepare(folder: Path, plan: Plan) -> None:
    async with open_store(url_of(folder, plan)) as store:
        names = [IngestionJob(f"job-{n}", "guarded", "guarded", {"n": n}) for n in range(plan["jobs"])]
        await JobQueue(store).enqueue(*names)


async def found(folder: Path, plan: Plan) -> dict[str, Any]:
    async with open_store(url_of(folder, plan)) as store:
        items = [await store.work.get(f"job-{n}") for n in range(plan["jobs"])]
        states = [None if item is None else item.state.value for item in items]
    documents = await SqliteDocuments(folder / "documents.db", SystemClock()).start()
    kept = await documents.page("guarded", limit=10_000)
    await documents.close()
    overlaps = sorted(name for name in os.listdir(folder) if name.endswith(".overlap"))
    return {"states": states, "documents": len(kept), "overlaps": overlaps}


def one(folder: Path, plan: Plan) -> Life:
    asyncio.run(prepare(folder, plan))
    life = partial(orchestrate, folder, plan)
    forks = [Fork(life), Fork(life)]
    for _ in range(plan["kills"]):
        time.sleep(0.5)
        victim = forks.pop(0)
        os.kill(victim.pid, signal.SIGKILL)
        victim.ended()
        forks.append(Fork(life))
    said = [words for fork in forks for words in fork.heard()]
    for fork in forks:
        fork.ended()
    return {"plan": plan, "said": said, **asyncio.run(found(folder, plan))}


if __name__ == "__main__":
    carry_out_plans(one)
