"""A world for ingestion in virtual time: a store in memory, a sink that counts, and connectors made of functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from reefknot.errors import StalePositionError
from reefknot.ingest.jobs import IngestionJob, JobQueue
from reefknot.ingest.orchestrator import IngestionOrchestrator, IngestionSettings
from reefknot.ingest.port import Document, FetchRequest, KnownItem, KnownItems, Page, Position
from reefknot.ingest.sources import IngestionSource
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.runtime.clocks import LoopClock, VirtualLoop, run_in_virtual_loop
from reefknot.stores.memory import MemoryStore
from tests.stories import InLoop

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
    """A sink in memory. `pages` are the kept ones, in their order."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        self.documents: dict[tuple[str, str], Document] = {}
        self.positions: dict[str, Position] = {}
        self.pages: list[Page] = []

    async def identity(self) -> str:
        return self.place

    async def position(self, source: str) -> Position:
        return self.positions.get(source, Position())

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        await asyncio.sleep(0)
        if self.positions.get(source, Position()).sequence != after.sequence:
            raise StalePositionError(source)
        self.pages.append(page)
        await self.put(source, page.documents, deleted=page.deleted)
        self.positions[source] = Position(page.cursor, after.sequence + 1)
        return self.positions[source]

    async def put(self, source: str, documents: Sequence[Document], *, deleted: Sequence[str] = ()) -> None:
        self.documents |= {(source, one.id): one for one in documents}
        for one in deleted:
            self.documents.pop((source, one), None)

    def known(self, source: str) -> KnownItems:
        return _Known(self, source)

    async def close(self) -> None:
        return


class _Known:
    def __init__(self, sink: MemorySink, source: str) -> None:
        self._sink, self._source = sink, source

    def _items(self) -> list[KnownItem]:
        kept = [one for (source, _), one in self._sink.documents.items() if source == self._source]
        items = [KnownItem(one.id, one.location, one.version, one.fingerprint) for one in kept]
        return sorted(items, key=lambda one: one.location)

    async def at(self, locations: Sequence[str]) -> dict[str, KnownItem]:
        return {one.location: one for one in self._items() if one.location in locations}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        return [one for one in self._items() if one.fingerprint == fingerprint]

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        found = [one for one in self._items() if one.location > location and one.location.startswith(prefix)]
        return found[:limit]


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


def page(*names: str, cursor: str = "", is_last: bool = True, **more: Any) -> Page:
    return Page(cursor, tuple(document(name) for name in names), is_last=is_last, **more)
