"""
Kills an orchestrator at a call to its source or its stores, lets another one carry on, and prints what both left.

A plan is the number of the call at which the process ends (null: run to the end and count), among all of them
or those of one name, whether before or after it, and the wrong way that is tried, if any. Nothing in the product knows
of this.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.jobs import IngestionJob, JobQueue
from reefknot.ingest.orchestrator import IngestionOrchestrator, IngestionSettings
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, KnownItems, Page, Position
from reefknot.ingest.sources import IngestionSource
from reefknot.queue.model.work import is_over
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans

PAGES, PER_PAGE = 4, 5
BAD = "item-7"
JOBS = ("sync", "bad", "fine")
WATCHED = ("claim", "settle", "renew", "enqueue", "open_classes")


class Fuse:
    """Counts calls, and ends the process at one of them; with `of`, only calls of that name count."""

    def __init__(self, at: int | None, when: str, of: str = "") -> None:
        self.names: list[str] = []
        self._at = at
        self._when = when
        self._of = of

    async def around(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.names.append(name)
        here = self._of in ("", name) and self._at == (self.names.count(name) if self._of else len(self.names))
        if here and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return await call()
        finally:
            if here:
                os.kill(os.getpid(), signal.SIGKILL)


class Fused:
    """An object whose coroutine methods of some names go through a fuse."""

    def __init__(self, inside: Any, fuse: Fuse, names: tuple[str, ...]) -> None:
        self._inside, self._fuse, self._names = inside, fuse, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inside, name)
        if name not in self._names:
            return found
        return lambda *args, **more: self._fuse.around(name, lambda: found(*args, **more))


class CursorFirst:
    """The wrong way: the cursor moves first, and the documents come in a second step."""

    def __init__(self, inside: SqliteDocuments, fuse: Fuse) -> None:
        self._inside, self._fuse = inside, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        empty = structs.replace(page, documents=(), deleted=())
        position = await self._inside.keep(source, empty, after=after)
        await self._fuse.around("put", lambda: self._inside.put(source, page.documents, deleted=page.deleted))
        return position


class Numbers:
    """A source of twenty items, one of which cannot be read."""

    async def fetch(self, request: FetchRequest) -> Page:
        if request.payload:
            if request.payload["kind"] == "bad":
                raise SourceError("there is no such mailbox", FailureType.PERMANENT)
            return Page("", (Document("own", "own", "1"),))
        number = int(request.cursor or "0")
        if number >= PAGES:
            return Page(str(number))
        names = [f"item-{number * PER_PAGE + n}" for n in range(PER_PAGE)]
        documents = tuple(Document(name, name, "1", text=f"text of {name}") for name in names if name != BAD)
        failures = tuple(ItemFailure(name, "1", PermissionError("denied")) for name in names if name == BAD)
        return Page(str(number + 1), documents, failures=failures, is_last=number + 1 >= PAGES)

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        raise PermissionError(f"{location}: permission denied")

    async def test(self) -> str:
        return "numbers"

    async def close(self) -> None:
        return


async def life(folder: Path, plan: Plan, fuse: Fuse, say: Say) -> None:
    async with open_store(f"sqlite:{folder / 'state.db'}") as store:
        documents: Any = await SqliteDocuments(folder / "documents.db", SystemClock()).start()
        jobs = JobQueue(store)
        given = {"sync": {}, "bad": {"kind": "bad"}, "fine": {"kind": "fine"}}
        await jobs.enqueue(*(IngestionJob(name, "numbers", "numbers", given[name]) for name in JOBS))
        say(["enqueued"])
        sink: Any = Fused(documents, fuse, ("keep", "put", "position"))
        if plan["flaw"] == "cursor first":
            sink = CursorFirst(documents, fuse)
        orchestrator = IngestionOrchestrator(
            job_queue=JobQueue(_fused_store(store, fuse)),
            sources=[IngestionSource("numbers", "numbers", lambda: Fused(Numbers(), fuse, ("fetch", "fetch_item")))],
            documents=sink,
            settings=IngestionSettings(lease=2.0),
        )
        await orchestrator.start()
        async with asyncio.timeout(60):
            await _all_ended(store, jobs)
        await orchestrator.stop()
        say(["calls", fuse.names])
        say(["found", await _found(store, documents)])
        await documents.close()


def _fused_store(store: Store, fuse: Fuse) -> Any:
    class FusedStore:
        work = Fused(store.work, fuse, WATCHED)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    return FusedStore()


async def _all_ended(store: Store, jobs: JobQueue) -> None:
    """Wait until nothing is open; a job of its own for the bad item is made on the way."""
    while True:
        items = [await jobs.get(name) for name in JOBS]
        if all(item is not None and is_over(item) for item in items) and not await jobs.list("numbers", limit=1):
            return
        await asyncio.sleep(0.01)


async def _found(store: Store, documents: SqliteDocuments) -> dict[str, Any]:
    kept = await documents.page("numbers", limit=1000)
    ended = [item for name in JOBS if (item := await store.work.get(name)) is not None]
    aside = await store.quarantine.find()
    return {
        "documents": sorted(one.id for one in kept),
        "states": {item.id: item.state.value for item in ended},
        "attempts": {item.id: item.attempts for item in ended},
        "quarantined": sorted(item.id for item in aside),
    }


async def seen_after_death(folder: Path, say: Say) -> None:
    """The documents and the cursor as the dead process left them."""
    path = folder / "documents.db"
    if not path.exists():
        say(["left", {"documents": [], "cursor": ""}])
        return
    documents = await SqliteDocuments(path, SystemClock()).start()
    kept = await documents.page("numbers", limit=1000)
    say(["left", {"documents": [one.id for one in kept], "cursor": (await documents.position("numbers")).cursor}])
    await documents.close()


def one(folder: Path, plan: Plan) -> Life:
    """A life that may be cut short, a look at what it left, and a life after it."""
    works: dict[str, Callable[[Say], Any]] = {
        "first": lambda say: life(folder, plan, Fuse(plan["at"], plan["when"], plan["of"]), say),
        "left": lambda say: seen_after_death(folder, say),
        "second": lambda say: life(folder, {**plan, "flaw": ""}, Fuse(None, ""), say),
    }
    evidence: Life = {"plan": plan}
    for name, work in works.items():
        fork = Fork(work)
        evidence |= {name: fork.heard(), f"{name}_ended": fork.ended()}
    return evidence


if __name__ == "__main__":
    carry_out_plans(one)
