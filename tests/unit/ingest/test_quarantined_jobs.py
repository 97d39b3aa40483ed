"""Jobs of sources that a person requeues, edits or cancels."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.jobs import MOST_AT_ONCE, IngestionJob, class_of, item_job_id
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, Page
from reefknot.queue.model.transitions import replaced_reason
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueue, Outcome
from tests.unit.ingest.world import World, document, page


class Shoal:
    """A source that fails for good until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False
        self.payloads: list[object] = []

    async def fetch(self, request: FetchRequest) -> Page:
        self.payloads.append(request.payload)
        if not self.is_mended:
            raise SourceError("the folder does not exist; create it", FailureType.PERMANENT)
        return page("a")


async def test_a_job_with_an_edited_payload_asks_its_connector_for_that(world: World) -> None:
    shoal = Shoal()
    await world.start(world.source(shoal.fetch))
    await world.job("import", folder="Wokr")
    await asyncio.sleep(1)
    shoal.is_mended = True
    body = msgspec.json.decode((await world.item("import")).payload) | {"payload": {"folder": "Work"}}
    edited = msgspec.json.encode(body)
    assert await world.store.quarantine.replace("import", edited, who="ann", why="a typo") == "import~2"
    await asyncio.sleep(1)
    assert await world.state("import~2") is WorkState.SUCCEEDED
    assert shoal.payloads == [{"folder": "Wokr"}, {"folder": "Work"}]
    old = await world.item("import")
    assert (old.state, old.history[-1].why) == (WorkState.DISCARDED, replaced_reason("import"))
    assert IngestionJob.of(old).payload == {"folder": "Wokr"}


async def test_names_with_the_marks_of_tenants_and_workers_are_names_like_any_other(world: World) -> None:
    """A mailbox is called after its address; a file may have a bar in its name."""
    is_mended = False

    async def fetch(request: FetchRequest) -> Page:
        if is_mended:
            return page("a|b.md")
        return page("a", failures=(ItemFailure("a|b.md", "1", ValueError("no")),))

    async def item(location: str) -> Document | None:
        if is_mended:
            return document(location)
        raise SourceError("it cannot be parsed", FailureType.PERMANENT)

    source = "me@home"
    await world.start(world.source(fetch, source, item=item))
    await world.job("sync", source)
    await asyncio.sleep(1)
    name = item_job_id(source, "a|b.md", "1")
    (aside,) = await world.store.quarantine.find()
    assert (aside.assignment_id, aside.tenant_id, aside.resource_class) == (name, None, class_of(source))
    assert "@" not in class_of(source)
    assert IngestionJob.of(await world.item(name)).job_id == name
    is_mended = True
    await world.job("again", source)
    await asyncio.sleep(1)
    assert await world.state(name) is WorkState.SUCCEEDED, "the sync could read it, and so took it out"


async def test_many_jobs_are_kept_in_steps_that_every_store_takes(world: World) -> None:
    sizes: list[int] = []
    enqueue = world.store.work.enqueue

    async def counted(items: Sequence[WorkItem], *terms: Enqueue, **more: Any) -> list[Outcome]:
        sizes.append(len(items))
        return await enqueue(items, *terms, **more)

    world.store.work.enqueue = counted  # type: ignore[method-assign]
    jobs = [IngestionJob(f"j{n}", "own_sea", "notes") for n in range(950)]
    assert await world.jobs.enqueue(*jobs[:1]) == [True]
    told = AuditEntry(b"{}", "asked", 0)
    assert await world.jobs.enqueue(*jobs, events=[told]) == [False] + [True] * 949
    assert max(sizes) == MOST_AT_ONCE
    kept = [one.entry.event_type for one in await world.store.audit.read(AuditQuery(limit=2000))]
    assert (kept.count("asked"), kept.count("submitted")) == (1, 950)
