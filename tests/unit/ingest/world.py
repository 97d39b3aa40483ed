"""A world for ingestion in virtual time: a store in memory, a sink that counts, and connectors made of functions."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import pytest
from msgspec import structs

from reefknot.ingest.jobs import IngestionJob, JobQueue
from reefknot.ingest.orchestrator import IngestionOrchestrator, IngestionSettings
from reefknot.ingest.port import Document, FetchRequest, KnownItems, Page, Position
from reefknot.ingest.sources import IngestionSource
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.runtime.clocks import LoopClock, VirtualLoop, run_in_virtual_loop
from reefknot.stores.memory import MemoryStore
from tests.stories import InLoop
from tests.unit.ingest.connectors.memory_sink import MemorySink as SinkOfOneSource

Fetch = Callable[[FetchRequest], Awaitable[Page]]


class FunctionConnector:
    """A connector whose pages come from a function."""

    def __init__(self, fetch: Fetch, item: Callable[[str], Awaitable[Document | None]] | None = None) -> None:
        self._fetch = fetch
        self._item = item

    async def fetch(self, request: FetchRequest) -> Page:
        return await self._fetch(request)

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        assert self._item is not None
        return await self._item(location)

    async def test(self) -> str:
        return "fine"

    async def close(self) -> None:
        return


class MemorySink:
    """A sink in memory, of every source. `pages` are the kept ones, in their order."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        self.sources: defaultdict[str, SinkOfOneSource] = defaultdict(SinkOfOneSource)
        self.pages: list[Page] = []

    @property
    def documents(self) -> dict[tuple[str, str], Document]:
        return {(name, one): found for name, kept in self.sources.items() for one, found in kept.documents.items()}

    async def identity(self) -> str:
        return self.place

    async def position(self, source: str) -> Position:
        return self.sources[source].place

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        await asyncio.sleep(0)
        position = await self.sources[source].keep(source, page, after=after)
        self.pages.append(page)
        return position

    async def put(self, source: str, documents: Sequence[Document], *, deleted: Sequence[str] = ()) -> None:
        await self.sources[source].put(source, documents, deleted=deleted)

    def known(self, source: str) -> KnownItems:
        return self.sources[source]

    async def close(self) -> None:
        return


class World:
    """A store, a sink, and the orchestrators over them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock = LoopClock(loop)
        self.store = MemoryStore(self.clock)
        self.jobs = JobQueue(self.store)
        self.sink = MemorySink()
        self.orchestrators: list[IngestionOrchestrator] = []

    def source(self, fetch: Fetch, name: str = "notes", connector: str = "local_files", **more: Any) -> IngestionSource:
        item = more.pop("item", None)
        return IngestionSource(name, connector, lambda: FunctionConnector(fetch, item), **more)

    async def start(self, *sources: IngestionSource, **more: Any) -> IngestionOrchestrator:
        limits = {name: more.pop(name) for name in IngestionSettings.__struct_fields__ if name in more}
        settings = structs.replace(IngestionSettings(), **limits)
        made = IngestionOrchestrator(
            job_queue=self.jobs,
            sources=sources,
            documents=self.sink,
            settings=settings,
            clock=self.clock,
            seed=1,
            **more,
        )
        await made.start()
        self.orchestrators.append(made)
        return made

    async def synced(self, source: str = "notes", *, seconds: float = 1.0, **more: Any) -> str:
        """Ask for a sync of a source, and let some time pass."""
        more = {"trigger": "manual", **more}
        name = await self.orchestrators[-1].request_sync(source, **more)
        await asyncio.sleep(seconds)
        assert name is not None
        return name

    async def aside(self) -> WorkItem:
        """The one job in quarantine."""
        (found,) = await self.store.quarantine.find()
        return found

    async def states(self, *job_ids: str) -> list[WorkState]:
        return [await self.state(one) for one in job_ids]

    async def run(self, name: str = "sync", *others: str, seconds: float = 1.0) -> WorkItem:
        """Hand in a sync, or jobs beside each other with payloads of their own. The first one, after some time."""
        await self.job(name, **({"n": name} if others else {}))
        for other in others:
            await self.job(other, n=other)
        await asyncio.sleep(seconds)
        return await self.item(name)

    async def job(self, name: str, source: str = "notes", connector: str = "local_files", **payload: Any) -> str:
        await self.jobs.enqueue(IngestionJob(name, connector, source, payload))
        return name

    async def item(self, job_id: str) -> WorkItem:
        item = await self.jobs.get(job_id)
        assert item is not None, job_id
        return item

    async def state(self, job_id: str) -> WorkState:
        return (await self.item(job_id)).state


@asynccontextmanager
async def new_world() -> AsyncIterator[World]:
    """A world that stops what was started in it."""
    made = World()
    try:
        yield made
    finally:
        for one in made.orchestrators:
            await one.stop(0)
        await made.store.close()


@pytest.fixture
def world() -> InLoop:
    return InLoop(new_world)


def in_world(story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run a story in a new world, in virtual time."""

    async def run() -> None:
        async with new_world() as made:
            await story(made)

    run_in_virtual_loop(run(), VirtualLoop())


class Crowd:
    """A connector that counts how many of its fetches run at the same time."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.running = self.most = 0

    async def fetch(self, request: FetchRequest) -> Page:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return page()


def failing(error: BaseException) -> Fetch:
    """A fetch that always fails so."""

    async def fetch(request: FetchRequest) -> Page:
        raise error

    return fetch


def document(name: str, text: str = "") -> Document:
    return Document(name, name, "1", title=name, text=text or name)


def numbered(request: FetchRequest, last: float = inf) -> Page:
    """The next page of a source of numbered documents, one for each page."""
    number = int(request.cursor or "0")
    return page(f"a{number}", cursor=str(number + 1), is_last=number >= last)


def page(*names: str, cursor: str = "", is_last: bool = True, **more: Any) -> Page:
    return Page(cursor, tuple(document(name) for name in names), is_last=is_last, **more)
