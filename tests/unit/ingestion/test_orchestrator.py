"""The orchestrator: pages, cursors, retries, quarantine, limits, shutdown."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from reefknot.core.failure import FailureType
from reefknot.core.work import WorkState
from reefknot.errors import ParameterError, SourceError
from reefknot.ingestion.attempt import SyncSummary
from reefknot.ingestion.orchestrator import IngestionOrchestrator
from reefknot.ports.connector import Document, FetchRequest, ItemFailure, Page
from tests.unit.ingestion.world import MemorySink, World, document, in_world, page


async def three_pages(request: FetchRequest) -> Page:
    number = int(request.cursor or "0")
    return page(f"a{number}", cursor=str(number + 1), is_last=number >= 2)


def test_a_sync_keeps_page_after_page_and_the_cursor_behind_each() -> None:
    async def story(world: World) -> None:
        await world.start(world.source(three_pages))
        await world.job("sync")
        await asyncio.sleep(1)
        item = await world.item("sync")
        assert item.state is WorkState.SUCCEEDED
        assert msgspec.json.decode(item.result or "", type=SyncSummary) == SyncSummary(3, 3, 3)
        assert (await world.sink.position("notes")).cursor == "3"
        assert sorted(name for _, name in world.sink.documents) == ["a0", "a1", "a2"]

    in_world(story)


def test_a_retry_continues_behind_the_last_page_and_its_delay_is_honoured() -> None:
    """A peer fetched everything again, and forgot a delay that ended on the same day."""

    async def story(world: World) -> None:
        asked: list[tuple[float, str]] = []

        async def fetch(request: FetchRequest) -> Page:
            asked.append((asyncio.get_running_loop().time(), request.cursor))
            if len(asked) == 2:
                raise ConnectionError("connection refused")
            return await three_pages(request)

        await world.start(world.source(fetch))
        await world.job("sync")
        await asyncio.sleep(300)
        assert await world.state("sync") is WorkState.SUCCEEDED
        assert [cursor for _, cursor in asked] == ["", "1", "1", "2"]
        assert 24 <= asked[2][0] - asked[1][0] <= 37, "30 s, more or less 20 %"

    in_world(story)


def test_a_permanent_failure_goes_to_quarantine_at_once() -> None:
    async def story(world: World) -> None:
        calls = 0

        async def fetch(request: FetchRequest) -> Page:
            nonlocal calls
            calls += 1
            raise SourceError("the folder does not exist; create it", FailureType.PERMANENT)

        await world.start(world.source(fetch))
        await world.job("sync")
        await asyncio.sleep(1)
        item = await world.item("sync")
        assert (item.state, calls, item.attempts) == (WorkState.QUARANTINED, 1, 1)
        assert "the folder does not exist; create it" in item.reason

    in_world(story)


def test_a_job_that_keeps_failing_alone_spends_its_budget_and_is_quarantined() -> None:
    async def story(world: World) -> None:
        calls = 0

        async def fetch(request: FetchRequest) -> Page:
            nonlocal calls
            calls += 1
            raise ConnectionError("connection refused")

        await world.start(world.source(fetch))
        await world.job("sync")
        await asyncio.sleep(3600)
        assert (await world.state("sync"), calls) == (WorkState.QUARANTINED, 4), "1 + 3 retries"

    in_world(story)


def test_an_item_that_cannot_be_read_gets_a_job_of_its_own_and_the_sync_goes_on() -> None:
    async def story(world: World) -> None:
        is_mended = False

        async def fetch(request: FetchRequest) -> Page:
            if is_mended:
                return page("bad")
            return page("good", failures=(ItemFailure("bad", "1", PermissionError("permission denied")),))

        async def item(location: str) -> Document | None:
            if is_mended:
                return document(location)
            raise PermissionError("permission denied")

        orchestrator = await world.start(world.source(fetch, item=item))
        await orchestrator.request_sync("notes", trigger="manual")
        await asyncio.sleep(1)
        (aside,) = await world.store.quarantine.find()
        assert aside.id.startswith("notes/bad@")
        assert ("notes", "good") in world.sink.documents
        is_mended = True
        await orchestrator.request_sync("notes", trigger="manual")
        await asyncio.sleep(1)
        assert await world.state(aside.id) is WorkState.SUCCEEDED, "the sync could read it, so nobody has to look at it"

    in_world(story)


@pytest.mark.parametrize(("total", "of_source", "most"), [(4, 2, 2), (3, 10, 3), (10, 4, 4)])
def test_no_more_jobs_run_at_once_than_the_limits_allow(total: int, of_source: int, most: int) -> None:
    async def story(world: World) -> None:
        running = peak = 0

        async def fetch(request: FetchRequest) -> Page:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(1)
            running -= 1
            return page()

        await world.start(world.source(fetch, max_concurrency=of_source), max_concurrency=total)
        for n in range(20):
            await world.job(f"job-{n}", n=n)
        await asyncio.sleep(60)
        assert {await world.state(f"job-{n}") for n in range(20)} == {WorkState.SUCCEEDED}
        assert peak == most

    in_world(story)


def test_a_connector_has_a_limit_over_all_of_its_sources() -> None:
    async def story(world: World) -> None:
        running = peak = 0

        async def fetch(request: FetchRequest) -> Page:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(1)
            running -= 1
            return page()

        sources = [world.source(fetch, f"s{n}", "imap_mailbox") for n in range(4)]
        await world.start(*sources, max_concurrency=8, connectors={"imap_mailbox": 3})
        for n in range(16):
            await world.job(f"job-{n}", f"s{n % 4}", "imap_mailbox", n=n)
        await asyncio.sleep(60)
        assert {await world.state(f"job-{n}") for n in range(16)} == {WorkState.SUCCEEDED}
        assert peak == 3

    in_world(story)


def test_a_shutdown_ends_the_page_and_gives_the_job_back_without_an_attempt() -> None:
    async def story(world: World) -> None:
        async def fetch(request: FetchRequest) -> Page:
            await asyncio.sleep(10)
            return await three_pages(request)

        orchestrator = await world.start(world.source(fetch))
        await world.job("sync")
        await asyncio.sleep(15)
        await orchestrator.stop(20)
        item = await world.item("sync")
        assert (item.state, item.attempts, item.interruptions) == (WorkState.PENDING, 0, 1)
        assert (await world.sink.position("notes")).cursor == "2", "the page under way was kept"
        await world.start(world.source(fetch))
        await asyncio.sleep(20)
        assert await world.state("sync") is WorkState.SUCCEEDED
        assert len(world.sink.pages) == 3

    in_world(story)


def test_a_shutdown_without_patience_gives_the_job_back_in_the_middle_of_a_page() -> None:
    async def story(world: World) -> None:
        async def fetch(request: FetchRequest) -> Page:
            await asyncio.sleep(100)
            return page()

        orchestrator = await world.start(world.source(fetch))
        await world.job("sync")
        await asyncio.sleep(1)
        assert await orchestrator.stop(1) == 1
        item = await world.item("sync")
        assert (item.state, item.attempts, item.interruptions) == (WorkState.PENDING, 0, 1)

    in_world(story)


def test_a_page_that_takes_too_long_is_a_transient_failure() -> None:
    async def story(world: World) -> None:
        async def fetch(request: FetchRequest) -> Page:
            await asyncio.sleep(1000)
            return page()

        await world.start(world.source(fetch, page_timeout=5.0))
        await world.job("sync")
        await asyncio.sleep(10)
        item = await world.item("sync")
        assert item.budget.failure_type == "transient"
        assert "within 5 s" in (item.failure or "")

    in_world(story)


def test_two_orchestrators_never_run_a_job_at_the_same_time() -> None:
    async def story(world: World) -> None:
        running: set[object] = set()
        ran: list[object] = []

        async def fetch(request: FetchRequest) -> Page:
            name = request.payload["n"]
            assert name not in running
            running.add(name)
            ran.append(name)
            await asyncio.sleep(0.1)
            running.discard(name)
            return page()

        for _ in range(2):
            await world.start(world.source(fetch, max_concurrency=4))
        for n in range(100):
            await world.job(f"job-{n}", n=n)
        await asyncio.sleep(60)
        assert sorted(ran, key=int) == list(range(100))  # type: ignore[arg-type]

    in_world(story)


def test_a_lost_lease_counts_as_a_crash_and_the_third_one_is_quarantined() -> None:
    async def story(world: World) -> None:
        async def fetch(request: FetchRequest) -> Page:
            await asyncio.sleep(10_000)
            return page()

        await world.job("sync")
        for n in range(1, 5):
            orchestrator = await world.start(world.source(fetch, page_timeout=20_000.0))
            await asyncio.sleep(70)
            if n < 4:
                assert (await world.item("sync")).crashes == n - 1
            for task in (*orchestrator._tasks, *orchestrator.running.values()):  # as kill -9
                task.cancel()
            world.orchestrators.clear()
            await asyncio.sleep(61)
        item = await world.item("sync")
        assert (item.state, item.crashes, item.attempts) == (WorkState.QUARANTINED, 3, 0)

    in_world(story)


def test_a_payload_that_no_job_has_is_quarantined_and_harms_nobody_else() -> None:
    async def story(world: World) -> None:
        await world.start(world.source(three_pages))
        odd = msgspec.structs.replace((await _item_of(world)), id="odd", payload=b"\xff{")
        await world.store.work.enqueue([odd])
        await asyncio.sleep(2)
        assert (await world.state("odd"), await world.state("sync")) == (WorkState.QUARANTINED, WorkState.SUCCEEDED)

    async def _item_of(world: World):  # type: ignore[no-untyped-def]
        await world.job("sync")
        return await world.item("sync")

    in_world(story)


def test_a_source_whose_documents_are_elsewhere_is_left_alone() -> None:
    """Its cursor is there too: here it would be read from the beginning, and half of it would be kept."""

    async def story(world: World) -> None:
        world.sink.place = "here"
        await world.start(world.source(three_pages))
        await world.job("first")
        await asyncio.sleep(1)
        assert await world.state("first") is WorkState.SUCCEEDED
        await world.orchestrators.pop().stop(0)

        here, world.sink = world.sink, MemorySink("elsewhere")
        await world.start(world.source(three_pages))
        await world.job("second")
        await asyncio.sleep(60)
        assert await world.state("second") is WorkState.PENDING
        assert world.sink.pages == []
        await world.orchestrators.pop().stop(0)

        world.sink = here
        await world.start(world.source(three_pages))
        await asyncio.sleep(1)
        assert await world.state("second") is WorkState.SUCCEEDED

    in_world(story)


def test_an_orchestrator_without_sources_needs_no_sink_and_one_with_sources_does() -> None:
    async def story(world: World) -> None:
        async with IngestionOrchestrator(job_queue=world.jobs):
            await asyncio.sleep(10)
        with pytest.raises(ParameterError, match="documents"):
            IngestionOrchestrator(job_queue=world.jobs, sources=[world.source(three_pages)])

    in_world(story)
