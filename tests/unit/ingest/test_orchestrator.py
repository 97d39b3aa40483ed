"""The orchestrator: pages, cursors, retries, quarantine, limits, shutdown."""

import asyncio
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import msgspec
import pytest
from msgspec import structs

from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, SourceError, StoreUnavailableError
from reefknot.ingest.jobs import IngestionJob
from reefknot.ingest.orchestrator import IngestionOrchestrator
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, Page
from reefknot.ingest.sync import SyncSummary
from reefknot.queue.model.transitions import Requeue
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import WorkFilter
from tests.unit.ingest.world import Crowd, FunctionConnector, MemorySink, World, document, numbered, page


async def three_pages(request: FetchRequest) -> Page:
    return numbered(request, last=2)


async def test_a_sync_keeps_page_after_page_and_the_cursor_behind_each(world: World) -> None:
    await world.start(world.source(three_pages))
    item = await world.run()
    assert item.state is WorkState.SUCCEEDED
    assert msgspec.json.decode(item.result or "", type=SyncSummary) == SyncSummary(3, 3, 3)
    assert (await world.sink.position("notes")).cursor == "3"
    assert sorted(name for _, name in world.sink.documents) == ["a0", "a1", "a2"]


async def test_a_retry_continues_behind_the_last_page_and_its_delay_is_honoured(world: World) -> None:
    """A peer fetched everything again, and forgot a delay that ended on the same day."""
    asked: list[tuple[float, str]] = []

    async def fetch(request: FetchRequest) -> Page:
        asked.append((asyncio.get_running_loop().time(), request.cursor))
        if len(asked) == 2:
            raise ConnectionError("connection refused")
        return await three_pages(request)

    await world.start(world.source(fetch))
    assert (await world.run(seconds=300)).state is WorkState.SUCCEEDED
    assert [cursor for _, cursor in asked] == ["", "1", "1", "2"]
    assert 24 <= asked[2][0] - asked[1][0] <= 37, "30 s, more or less 20 %"


async def test_an_item_that_cannot_be_read_gets_a_job_of_its_own_and_the_sync_goes_on(world: World) -> None:
    is_mended = False

    async def fetch(request: FetchRequest) -> Page:
        if is_mended:
            return page("bad")
        return page("good", failures=(ItemFailure("bad", "1", PermissionError("permission denied")),))

    async def item(location: str) -> Document | None:
        if is_mended:
            return document(location)
        raise PermissionError("permission denied")

    await world.start(world.source(fetch, item=item))
    await world.synced()
    aside = await world.aside()
    assert aside.id.startswith("notes/bad@")
    assert ("notes", "good") in world.sink.documents
    is_mended = True
    await world.synced()
    assert await world.state(aside.id) is WorkState.SUCCEEDED, "the sync could read it, so nobody has to look at it"


async def test_an_item_of_the_connector_before_is_not_given_to_the_new_one(world: World) -> None:
    """A place in a folder says nothing to a mailbox. What was asked for by a sync, any connector can do."""

    async def never(location: str) -> Document | None:
        raise AssertionError(location)

    await world.start(world.source(three_pages, connector="imap_mailbox", item=never))
    await world.jobs.enqueue(IngestionJob("old", "local_files", "notes", trigger="item", item="a/b.txt"))
    await world.job("sync", connector="local_files")
    await asyncio.sleep(1)
    item = await world.item("old")
    assert item.state is WorkState.QUARANTINED
    assert "the connector of notes is imap_mailbox now; discard it" in item.reason
    assert await world.state("sync") is WorkState.SUCCEEDED


async def test_a_source_goes_on_only_from_a_cursor_of_its_own_connector(world: World) -> None:
    first = await world.start(world.source(three_pages))
    await world.job("sync")
    await asyncio.sleep(1)
    await first.stop()
    await world.start(world.source(three_pages, connector="imap_mailbox"))
    await world.job("next", connector="imap_mailbox")
    await asyncio.sleep(60)
    assert await world.state("next") is WorkState.PENDING


@pytest.mark.parametrize(("total", "of_source", "most"), [(4, 2, 2), (3, 10, 3), (10, 4, 4)])
async def test_no_more_jobs_run_at_once_than_the_limits_allow(
    world: World, total: int, of_source: int, most: int
) -> None:
    crowd, names = Crowd(), [f"job-{n}" for n in range(20)]
    await world.start(world.source(crowd.fetch, max_concurrency=of_source), max_concurrency=total)
    await world.run(*names, seconds=60)
    assert set(await world.states(*names)) == {WorkState.SUCCEEDED}
    assert crowd.most == most


async def test_a_connector_has_a_limit_over_all_of_its_sources(world: World) -> None:
    crowd, names = Crowd(), [f"job-{n}" for n in range(16)]
    sources = [world.source(crowd.fetch, f"s{n}", "imap_mailbox") for n in range(4)]
    await world.start(*sources, max_concurrency=8, connectors={"imap_mailbox": 3})
    for n, name in enumerate(names):
        await world.job(name, f"s{n % 4}", "imap_mailbox", n=n)
    await asyncio.sleep(60)
    assert set(await world.states(*names)) == {WorkState.SUCCEEDED}
    assert crowd.most == 3


async def test_a_shutdown_ends_the_page_and_gives_the_job_back_without_an_attempt(world: World) -> None:
    async def fetch(request: FetchRequest) -> Page:
        await asyncio.sleep(10)
        return await three_pages(request)

    orchestrator = await world.start(world.source(fetch))
    await world.run(seconds=15)
    await orchestrator.stop(20)
    item = await world.item("sync")
    assert (item.state, item.attempts, item.interruptions) == (WorkState.PENDING, 0, 1)
    assert (await world.sink.position("notes")).cursor == "2", "the page under way was kept"
    await world.start(world.source(fetch))
    await asyncio.sleep(20)
    assert await world.state("sync") is WorkState.SUCCEEDED
    assert len(world.sink.pages) == 3


async def test_a_shutdown_without_patience_gives_the_job_back_in_the_middle_of_a_page(world: World) -> None:
    orchestrator = await world.start(world.source(Crowd(100).fetch))
    await world.run()
    assert await orchestrator.stop(1) == 1
    item = await world.item("sync")
    assert (item.state, item.attempts, item.interruptions) == (WorkState.PENDING, 0, 1)


async def test_a_page_that_takes_too_long_is_a_transient_failure(world: World) -> None:
    await world.start(world.source(Crowd(1000).fetch, page_timeout=5.0))
    item = await world.run(seconds=10)
    assert item.budget.failure_type == "transient"
    assert "within 5 s" in (item.failure or "")


async def test_a_lost_lease_counts_as_a_crash_and_the_third_one_is_quarantined(world: World) -> None:
    await world.job("sync")
    for n in range(1, 5):
        orchestrator = await world.start(world.source(Crowd(10_000).fetch, page_timeout=20_000.0))
        await asyncio.sleep(70)
        if n < 4:
            assert (await world.item("sync")).crashes == n - 1
        orchestrator.abandon()  # as kill -9: nothing more is reported
        world.orchestrators.clear()
        await asyncio.sleep(61)
    item = await world.item("sync")
    assert (item.state, item.crashes, item.attempts) == (WorkState.QUARANTINED, 3, 0)


async def test_a_payload_that_no_job_has_is_quarantined_and_harms_nobody_else(world: World) -> None:
    await world.start(world.source(three_pages))
    odd = structs.replace(await world.run(seconds=0), id="odd", payload=b"\xff{")
    await world.store.work.enqueue([odd])
    await asyncio.sleep(2)
    assert await world.states("odd", "sync") == [WorkState.QUARANTINED, WorkState.SUCCEEDED]


async def test_a_source_whose_documents_are_elsewhere_is_left_alone(world: World) -> None:
    """Its cursor is there too: here it would be read from the beginning, and half of it would be kept."""
    world.sink.place = "here"
    await world.start(world.source(three_pages))
    assert (await world.run("first")).state is WorkState.SUCCEEDED
    await world.orchestrators.pop().stop(0)

    here, world.sink = world.sink, MemorySink("elsewhere")
    await world.start(world.source(three_pages))
    assert (await world.run("second", seconds=60)).state is WorkState.PENDING
    assert world.sink.pages == []
    await world.orchestrators.pop().stop(0)

    world.sink = here
    await world.start(world.source(three_pages))
    await asyncio.sleep(1)
    assert await world.state("second") is WorkState.SUCCEEDED


async def test_an_orchestrator_without_sources_needs_no_sink_and_one_with_sources_does(world: World) -> None:
    async with IngestionOrchestrator(job_queue=world.jobs):
        await asyncio.sleep(10)
    with pytest.raises(ParameterError, match="documents"):
        IngestionOrchestrator(job_queue=world.jobs, sources=[world.source(three_pages)])


EXITS = BaseExceptionGroup("several", [SystemExit()])


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), EXITS],
    ids=lambda error: type(error).__name__,
)
async def test_a_connector_that_raises_control_flow_fails_its_job_and_holds_no_slot(
    world: World, error: BaseException
) -> None:
    async def fetch(request: FetchRequest) -> Page:
        if request.payload["n"] == "bad":
            raise error
        return page()

    orchestrator = await world.start(world.source(fetch, max_concurrency=1))
    await world.run("bad", "good", "better", seconds=60)
    states = [WorkState.QUARANTINED, WorkState.SUCCEEDED, WorkState.SUCCEEDED]
    assert await world.states("bad", "good", "better") == states
    assert (orchestrator.claims(), orchestrator.running) == ([], [])


async def test_a_store_that_fails_between_claim_and_start_costs_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator = await world.start(world.source(three_pages))

    async def refuse(*given: object, **more: object) -> object:
        raise StoreUnavailableError("x", "locked", "wait")

    monkeypatch.setattr(orchestrator.records, "change", refuse)
    item = await world.run()
    assert (item.state, item.crashes) == (WorkState.SUCCEEDED, 0)


async def test_jobs_that_ignore_their_cancellation_do_not_keep_other_leases_from_being_renewed(world: World) -> None:
    running: list[object] = []
    most = 0

    async def fetch(request: FetchRequest) -> Page:
        nonlocal most
        name = request.payload["n"]
        running.append(name)
        most = max(most, running.count(name))
        try:
            while True:
                try:
                    await asyncio.sleep(300 if name == "good" else 600)
                    return page()
                except asyncio.CancelledError:
                    if name == "good":
                        raise
        finally:
            running.remove(name)

    for _ in range(2):
        await world.start(world.source(fetch, max_concurrency=3, page_timeout=10_000.0))
    await world.run("stubborn", "deaf", "good", seconds=5)
    for name in ("stubborn", "deaf"):
        await world.jobs.cancel(name)
    await asyncio.sleep(400)
    item = await world.item("good")
    assert (item.state, item.crashes, most) == (WorkState.SUCCEEDED, 0, 1)


async def test_a_cancelled_job_stops_within_seconds_and_may_clean_up(world: World) -> None:
    """Not only when its lease is renewed, every 20 s."""
    stopped_after = inf
    cleaned_up = False

    async def fetch(request: FetchRequest) -> Page:
        nonlocal stopped_after, cleaned_up
        try:
            await asyncio.sleep(500)
        finally:
            stopped_after = asyncio.get_running_loop().time() - cancelled_at
            await asyncio.sleep(5)
            cleaned_up = True
        return page()

    await world.start(world.source(fetch, page_timeout=1000.0))
    await world.run(seconds=5)
    cancelled_at = asyncio.get_running_loop().time()
    await world.jobs.cancel("sync")
    await asyncio.sleep(10)
    assert stopped_after <= 2
    assert cleaned_up
    assert (await world.state("sync"), world.sink.documents) == (WorkState.CANCELLED, {})
    assert await world.store.work.change(WorkFilter(ids=("sync",)), Requeue("ann", "after all")) == ["sync"]
    await asyncio.sleep(510)
    assert await world.state("sync") is WorkState.SUCCEEDED


async def test_a_connector_that_makes_no_progress_or_returns_no_page_is_stopped(world: World) -> None:
    async def stuck(request: FetchRequest) -> Page:
        return page(cursor=request.cursor, is_last=False)

    async def garbage(request: FetchRequest) -> Page:
        return None  # type: ignore[return-value]

    await world.start(world.source(stuck, "stuck"), world.source(garbage, "garbage"))
    for name in ("stuck", "garbage"):
        await world.job(name, name)
    await asyncio.sleep(5)
    assert "makes no progress" in (await world.item("stuck")).reason
    assert "instead of a Page" in (await world.item("garbage")).reason


async def test_many_requests_at_once_are_one_sync(world: World) -> None:
    asked: list[str] = []

    async def fetch(request: FetchRequest) -> Page:
        asked.append(request.cursor)
        await asyncio.sleep(1)
        return page()

    made = [await world.start(world.source(fetch)) for _ in range(2)]
    wanted = [made[n % 2].request_sync("notes", trigger="schedule", job_id=f"notes@{n}") for n in range(20)]
    ids = await asyncio.gather(*wanted)
    await asyncio.sleep(10)
    assert len(set(ids)) == len(asked) == 1


async def test_a_sync_that_spent_its_retries_is_requeued_by_the_schedule_and_a_permanent_one_waits_for_a_person(
    world: World,
) -> None:
    error: list[Exception] = [SourceError("gone", FailureType.PERMANENT)]

    async def fetch(request: FetchRequest) -> Page:
        raise error[0]

    orchestrator = await world.start(world.source(fetch))
    first = await world.synced(trigger="schedule", job_id="notes@1")
    assert await orchestrator.request_sync("notes", trigger="schedule", job_id="notes@2") is None
    assert await orchestrator.request_sync("notes", trigger="manual") == first
    error[0] = ValueError("odd")
    await asyncio.sleep(3600)
    error[0] = ValueError("odd")
    assert await world.state("notes@1") is WorkState.QUARANTINED
    await world.jobs.requeue(["notes@1"], who="ann", why="again")
    await asyncio.sleep(3600)
    assert (await world.item("notes@1")).reason.startswith("attempts_spent")
    assert await orchestrator.request_sync("notes", trigger="schedule", job_id="notes@3") == first


async def test_a_change_during_a_sync_is_followed_by_another_sync(world: World) -> None:
    version, seen = 1, []

    async def fetch(request: FetchRequest) -> Page:
        seen.append(version)
        await asyncio.sleep(10)
        return page()

    class Watching(FunctionConnector):
        async def watch(self) -> AsyncIterator[None]:
            nonlocal version
            yield
            await asyncio.sleep(5)
            version = 2
            yield
            await asyncio.sleep(10_000)

    source = world.source(fetch, on_change=True)
    await world.start(structs.replace(source, open=lambda: Watching(fetch)))
    await asyncio.sleep(60)
    assert seen == [1, 2]


async def test_a_folder_that_can_be_read_again_leaves_quarantine_though_nothing_in_it_changed(world: World) -> None:
    is_closed = True

    async def fetch(request: FetchRequest) -> Page:
        denied = ItemFailure("sub/", "1", PermissionError("permission denied"))
        return page(failures=(denied,) if is_closed else ())

    async def item(location: str) -> Document | None:
        if is_closed:
            raise PermissionError("permission denied")
        return None

    await world.start(world.source(fetch, item=item))
    await world.synced()
    aside = await world.aside()
    await world.synced()
    assert await world.state(aside.id) is WorkState.QUARANTINED, "it failed again"
    is_closed = False
    await world.synced()
    assert await world.state(aside.id) is WorkState.SUCCEEDED


async def test_an_orchestrator_ends_although_the_store_fails_what_is_claimed_at_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator = await world.start(world.source(three_pages))
    asked, claim = asyncio.Event(), world.store.work.claim

    async def slowly(*given: Any, **more: Any) -> list[WorkItem]:
        asked.set()
        await asyncio.sleep(1)
        return await claim(*given, **more)

    async def refuse(held: object) -> list[bool]:
        raise StoreUnavailableError("x", "the disk reported an error", "check the disk")

    monkeypatch.setattr(world.store.work, "claim", slowly)
    monkeypatch.setattr(world.store.work, "settle", refuse)
    await world.job("sync")
    async with asyncio.timeout(60):
        await asked.wait()
    async with asyncio.timeout(60):
        await orchestrator.stop(0)
