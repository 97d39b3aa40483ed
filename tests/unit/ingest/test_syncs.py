"""Syncs: no item is forgotten, progress renews the budget, limits and outages spend nothing, a stalled sync ends."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec import structs

from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest import sync
from reefknot.ingest.port import Document, FetchRequest, ItemFailure, Page
from reefknot.ingest.sources import remembered_jobs
from reefknot.ingest.sync import ProgressWatch, SyncLimits
from reefknot.queue.model.source_health import HealthRules, SourceCondition
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import WorkFilter
from tests.unit.ingest.connectors.memory_sink import MemorySink
from tests.unit.ingest.world import Fetch, World, document, failing, numbered, page

HOUR = 3600.0


class Shoal:
    """A source of numbered items, in pages of 100, of which some cannot be read for now."""

    def __init__(self, items: int, *, bad: Callable[[int], bool], error: Exception | None = None) -> None:
        self.items = items
        self.bad = bad
        self.error = error or TimeoutError("timed out")
        self.pages = 0

    async def fetch(self, request: FetchRequest) -> Page:
        self.pages += 1
        start = int(request.cursor or "0")
        numbers = range(start, min(start + 100, self.items))
        good = tuple(document(f"i{n}") for n in numbers if not self.bad(n))
        failures = tuple(ItemFailure(f"i{n}", "1", self.error) for n in numbers if self.bad(n))
        end = min(start + 100, self.items)
        return Page("" if end == self.items else str(end), good, (), failures, is_last=end == self.items)

    async def item(self, location: str) -> Document | None:
        if self.bad(int(location[1:])):
            raise self.error
        return document(location)


# ---- nothing is forgotten --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1500, 3000])
async def test_of_many_items_that_fail_in_one_sync_every_one_comes_back(world: World, number: int) -> None:
    shoal = Shoal(number + 500, bad=lambda n: n < number)
    orchestrator = await world.start(world.source(shoal.fetch, item=shoal.item))
    first = await world.synced(trigger="schedule", seconds=30)
    stopped = await world.item(first)
    assert (stopped.state, stopped.attempts) == (WorkState.PENDING, 0)
    assert "1000 items of notes could not be read, and more fail" in stopped.reason
    assert (await world.sink.position("notes")).cursor == "1000", "it has not passed what it cannot remember"
    assert orchestrator.records.known("notes").full_since
    shoal.bad = lambda n: False
    await asyncio.sleep(6 * HOUR)
    assert await world.state(first) is WorkState.SUCCEEDED
    assert len(world.sink.documents) == number + 500
    assert not orchestrator.records.known("notes").full_since


async def test_a_sync_that_goes_on_regardless_would_forget_items(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with room for no more jobs, and a cursor that moves on, 500 of 1,500 are gone for good."""

    async def only_so_many(self: sync.JobExecution, failures: object) -> list[object]:
        found: list[object] = await missing(self, failures)  # type: ignore[arg-type, assignment]
        room = 1000 - await remembered_jobs(self._jobs.store, "notes")
        return found[: max(0, room)]

    missing = sync.JobExecution._missing_jobs
    monkeypatch.setattr(sync.JobExecution, "_missing_jobs", only_so_many)
    shoal = Shoal(2000, bad=lambda n: n < 1500)
    await world.start(world.source(shoal.fetch, item=shoal.item))
    await world.synced(trigger="schedule", seconds=30)
    shoal.bad = lambda n: False
    await asyncio.sleep(6 * HOUR)
    assert len(world.sink.documents) < 1510


async def test_a_sync_that_has_stopped_asks_its_source_nothing_until_there_is_room(world: World) -> None:
    denied = PermissionError("permission denied")
    shoal = Shoal(400, bad=lambda n: True, error=denied)
    await world.start(world.source(shoal.fetch, item=shoal.item), limits=SyncLimits(100))
    job = await world.synced(trigger="schedule", seconds=30)
    pages, aside = shoal.pages, await world.store.quarantine.count()
    assert sum(aside.values()) == 100
    await asyncio.sleep(HOUR)
    assert shoal.pages == pages
    shoal.bad = lambda n: False
    again = await world.synced(seconds=60)
    assert again != job
    assert await world.state(again) is WorkState.SUCCEEDED, "a person's request looks whether the cause is mended"
    await world.jobs.requeue([one.id for one in await world.store.quarantine.find(limit=200)], who="ann", why="ok")
    await asyncio.sleep(60)
    assert len(world.sink.documents) == 400


async def test_items_that_have_jobs_already_stop_no_sync(world: World) -> None:
    shoal = Shoal(300, bad=lambda n: n < 100, error=PermissionError("permission denied"))
    await world.start(world.source(shoal.fetch, item=shoal.item), limits=SyncLimits(100))
    for _ in range(3):
        assert await world.state(await world.synced(seconds=30)) is WorkState.SUCCEEDED
    assert len(world.sink.documents) == 200
    assert await remembered_jobs(world.store, "notes") == 100


@pytest.mark.parametrize("state", ["succeeded", "discarded", "cancelled"])
async def test_an_item_whose_job_has_ended_is_remembered_again_when_it_fails_in_a_full_sync(
    world: World, state: str
) -> None:
    shoal = Shoal(1, bad=lambda n: True, error=PermissionError("permission denied"))
    await world.start(world.source(shoal.fetch, item=shoal.item))
    await world.synced(seconds=5)
    aside = await world.aside()
    if state == "discarded":
        await world.store.quarantine.discard(WorkFilter(source="notes"), who="ann", reason="no")
    else:
        shoal.bad = lambda n: state != "succeeded"
        await world.jobs.requeue([aside.id], who="ann", why="again")
        if state == "cancelled":
            await world.jobs.cancel(aside.id)
        await asyncio.sleep(5)
    assert (await world.state(aside.id)).value == state
    world.sink.sources["notes"] = MemorySink()
    shoal.bad = lambda n: True
    await world.synced(seconds=5)
    assert (await world.aside()).id != aside.id


# ---- limits and progress ---------------------------------------------------------------------------------------------


async def test_a_sync_that_meets_the_rate_limit_again_and_again_spends_no_attempt(world: World) -> None:
    asked = 0

    async def fetch(request: FetchRequest) -> Page:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise SourceError("rate limit", FailureType.RATE_LIMITED, retry_after=1800)
        return numbered(request, last=7)

    await world.start(world.source(fetch, connector="github_repository"))
    await world.job("sync", connector="github_repository")
    await asyncio.sleep(6 * HOUR)
    item = await world.item("sync")
    assert (item.state, item.attempts, item.snoozes) == (WorkState.SUCCEEDED, 1, 8)
    assert len(world.sink.documents) == 8


async def test_an_attempt_that_kept_a_page_renews_the_budget_and_one_that_did_not_spends_it(world: World) -> None:
    asked = 0

    async def fetch(request: FetchRequest) -> Page:
        nonlocal asked
        asked += 1
        if asked % 2 == 0 or request.cursor == "15":
            raise ValueError("odd")
        return numbered(request)

    await world.start(world.source(fetch))
    item = await world.run(seconds=6 * HOUR)
    assert len(world.sink.documents) == 15, "14 failures with progress between them"
    assert item.state is WorkState.QUARANTINED
    assert asked == 30 + 3, "then three retries without any"


async def test_progress_is_known_after_a_restart(world: World) -> None:
    fails = True

    async def fetch(request: FetchRequest) -> Page:
        if fails:
            raise ValueError("odd")
        await asyncio.sleep(10)
        return numbered(request)

    orchestrator = await world.start(world.source(fetch))
    assert (await world.run(seconds=60)).attempts == 2
    fails = False
    await asyncio.sleep(200)
    await orchestrator.stop(20)
    fails = True
    await world.start(world.source(fetch))
    await asyncio.sleep(5)
    assert (await world.item("sync")).attempts == 1


# ---- outages ---------------------------------------------------------------------------------------------------------


async def test_a_source_that_is_down_rests_and_its_one_sync_is_not_quarantined(world: World) -> None:
    calls: list[float] = []
    is_down = True

    async def fetch(request: FetchRequest) -> Page:
        calls.append(asyncio.get_running_loop().time())
        if is_down:
            raise ConnectionRefusedError("connection refused")
        return page("a")

    orchestrator = await world.start(world.source(fetch))
    job = await orchestrator.request_sync("notes", trigger="schedule", job_id="notes@1")
    assert job is not None
    for n in range(2, 12 * 4):
        await asyncio.sleep(HOUR / 4)
        assert await orchestrator.request_sync("notes", trigger="schedule", job_id=f"notes@{n}") == job
    item = await world.item(job)
    assert (item.state, item.attempts) == (WorkState.PENDING, 2), "the first two failures, before it rests"
    assert "does not answer" in item.reason
    health = orchestrator.records.known("notes").health
    assert health.condition(world.store.moment().wall) is SourceCondition.RESTING
    assert len(calls) < 60
    waits = [after - before for before, after in pairwise(calls[2:])]
    assert waits == sorted(waits), "the pauses grow"
    assert waits[-1] == pytest.approx(900, abs=10)
    is_down = False
    await asyncio.sleep(1000)
    assert await world.state(job) is WorkState.SUCCEEDED, "one probe wakes it"


UNREACHED = SourceError("no connection", FailureType.TRANSIENT, unreachable=True)


@pytest.mark.parametrize(("error", "rests"), [(TimeoutError("this one is slow"), False), (UNREACHED, True)])
async def test_failures_of_its_items_do_not_let_a_source_rest_unless_nothing_was_reached(
    world: World, error: Exception, rests: bool
) -> None:
    shoal = Shoal(1, bad=lambda n: True, error=error)
    orchestrator = await world.start(world.source(shoal.fetch, item=shoal.item))
    await world.synced(trigger="schedule", seconds=HOUR)
    assert bool(orchestrator.records.known("notes").health.rests) is rests


async def test_a_job_waits_for_a_source_no_longer_than_the_longest_outage_and_then_goes_on_after_a_requeue(
    world: World,
) -> None:
    rules = HealthRules(max_outage_ms=int(6 * HOUR * 1000))
    fetch = failing(ConnectionRefusedError("connection refused"))
    orchestrator = await world.start(world.source(fetch), health=rules)
    for n in range(24 * 4):
        await orchestrator.request_sync("notes", trigger="schedule", job_id=f"notes@{n}")
        await asyncio.sleep(HOUR / 4)
    item = await world.item("notes@0")
    aside = [one for one in item.history if one.what == "quarantined"]
    assert 3 <= len(aside) <= 4, "once in six hours, and not at each due time"
    assert "the source did not answer: for more than 6 h: connection refused" in aside[0].why


# ---- syncs that never end --------------------------------------------------------------------------------------------


def endless(*given: Page) -> Fetch:
    """A fetch that gives these pages in turns for ever, each with another cursor."""

    async def fetch(request: FetchRequest) -> Page:
        number = int(request.cursor or "0")
        return structs.replace(given[number % len(given)], cursor=str(number + 1), is_last=False)

    return fetch


async def two_cursors(request: FetchRequest) -> Page:
    return page(cursor="b" if request.cursor == "a" else "a", is_last=False, seen=5)


ENDLESS: dict[str, Fetch] = {
    "the same document": endless(page("a", seen=1)),
    "two in turns": endless(page("a"), page("b")),
    "empty pages": endless(page()),
    "the same deletion": endless(page(deleted=("gone",))),
    "the same failure": endless(page(failures=(ItemFailure("bad", "1", PermissionError("denied")),), seen=0)),
    "two cursors": two_cursors,
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_connector_that_never_ends_is_stopped_for_good(world: World, name: str) -> None:
    async def denied(location: str) -> Document | None:
        raise PermissionError("permission denied")

    orchestrator = await world.start(world.source(ENDLESS[name], item=denied))
    item = await world.item(await world.synced(trigger="schedule", job_id="notes@1", seconds=60))
    assert item.state is WorkState.QUARANTINED
    assert "not_retryable: the connector local_files makes no progress: 100 pages in a row" in item.reason
    assert 100 <= len(world.sink.pages) <= 110
    assert await orchestrator.request_sync("notes", trigger="schedule", job_id="notes@2") is None


async def test_slow_pages_without_progress_end_a_sync_by_time(world: World) -> None:
    async def slow(request: FetchRequest) -> Page:
        await asyncio.sleep(60)
        return await ENDLESS["empty pages"](request)

    await world.start(world.source(slow))
    assert (await world.run(seconds=590)).state is WorkState.RUNNING
    await asyncio.sleep(70)
    assert "10 pages in a row, within 600 s, without anything that is new" in (await world.item("sync")).reason


async def test_a_large_source_in_which_little_changes_is_read_to_its_end(world: World) -> None:
    """2,000 pages with nothing but unchanged items, another 500 that only look for deletions, slower than the limit."""

    async def fetch(request: FetchRequest) -> Page:
        await asyncio.sleep(1)
        number = int(request.cursor or "0") + 1
        looked = {"seen": 100} if number <= 2000 else {"checked": 100}
        return page(cursor=str(number), is_last=number == 2500, **looked)

    await world.start(world.source(fetch))
    assert (await world.run(seconds=HOUR)).state is WorkState.SUCCEEDED


def test_unchanged_pages_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "MOST_UNCHANGED_PAGES", 50)
    watch = ProgressWatch(0.0, stalled_after=600.0)
    ends = [watch.page(page(cursor=str(n), is_last=False, seen=1), 1.0, new_items=0) for n in range(150)]
    assert [bool(one) for one in ends] == [False] * 149 + [True]


def test_what_is_recognised_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "MOST_SEEN", 10)
    watch = ProgressWatch(0.0, stalled_after=600.0)
    for n in range(100):
        assert not watch.page(page(f"d{n}", cursor=str(n), is_last=False), 1.0, new_items=0)
        assert len(watch._met) <= 12


# ---- reschedule ------------------------------------------------------------------------------------------------------


async def test_a_job_that_is_due_later_can_be_rescheduled_and_keeps_its_budget(world: World) -> None:
    calls: list[float] = []

    async def fetch(request: FetchRequest) -> Page:
        calls.append(asyncio.get_running_loop().time())
        if len(calls) == 1:
            raise ValueError("odd")
        return page()

    await world.start(world.source(fetch))
    await world.job("job", n=1)
    await asyncio.sleep(1)
    budget = (await world.item("job")).budget
    assert await world.jobs.reschedule("job", 5)
    item = await world.item("job")
    assert (item.state, item.attempts, item.budget) == (WorkState.PENDING, 1, budget)
    await asyncio.sleep(10)
    assert await world.state("job") is WorkState.SUCCEEDED
    assert calls[1] - calls[0] == pytest.approx(6, abs=1)
    assert not await world.jobs.reschedule("job", 5), "it has ended"
    assert not await world.jobs.reschedule("none", 5)


def test_structs_of_limits_have_the_documented_defaults() -> None:
    assert structs.asdict(SyncLimits()) == {"max_failed_items": 1000, "stalled_after": 600.0}
