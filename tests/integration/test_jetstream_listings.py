"""Lists of work on a NATS server: the newest first, whoever submitted them, without reading all that ever ended."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.queue.model.work import ROUTER, Quarantine, WorkDone, WorkItem, WorkState, worker_class
from reefknot.queue.port.work_queue import EVERYTHING, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import JetStreamStore, reads, work
from reefknot.testing.conformance.listings import listed
from tests.integration.test_jetstream_full import opened
from tests.stories import InLoop

pytestmark = pytest.mark.real_time

CHUNK, CHUNKS = 50, 30


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and store have the same clock here, and all of a story happens within the usual tolerance."""
    monkeypatch.setattr(work, "SKEW_MS", 0)


@pytest.fixture
def store(nats_server: NatsServer) -> InLoop:
    return InLoop(lambda: opened(f"{nats_server.url}/{new_id()}"))


async def submitted(store: JetStreamStore, names: Sequence[str]) -> None:
    await store.work.enqueue([WorkItem(name, "t", "io") for name in names])


async def done(store: JetStreamStore, number: int) -> None:
    items = await store.work.claim(number, WorkClaim(owner="w", classes=["io"]))
    assert len(items) == number
    await store.work.settle([Settlement(one.id, "w", one.fence, WorkDone("1")) for one in items])


async def test_jobs_of_several_processes_are_listed_in_the_order_of_their_submission(nats_server: NatsServer) -> None:
    """A process that finds no open work knows nothing of earlier arrivals."""
    url = f"{nats_server.url}/{new_id()}"
    for job in ("z-first", "b", "a-last"):
        async with opened(url) as store:
            await submitted(store, [job])
            await done(store, 1)
    async with opened(url) as store:
        assert await listed(store) == ["a-last", "b", "z-first"]
        assert await listed(store, oldest=True) == ["z-first", "b", "a-last"]
        assert await listed(store, after="b") == ["z-first"]


async def test_a_page_of_the_newest_reads_few_ended_jobs(
    monkeypatch: pytest.MonkeyPatch, store: JetStreamStore
) -> None:
    read: list[int] = []
    scan = reads.scan

    async def counted(*words: Any, **more: Any) -> list[reads.StreamMessage]:
        found = await scan(*words, **more)
        read.append(len(found))
        return found

    monkeypatch.setattr(reads, "scan", counted)
    for chunk in range(CHUNKS):
        await submitted(store, [f"{chunk:02}-{number:02}" for number in range(CHUNK)])
        await done(store, CHUNK)
    newest = [f"{chunk:02}-{number:02}" for chunk in reversed(range(CHUNKS)) for number in reversed(range(CHUNK))]
    for state in (None, WorkState.SUCCEEDED):
        read.clear()
        assert await listed(store, limit=20, state=state) == newest[:20]
        assert 20 <= sum(read) < CHUNK * CHUNKS / 2, read
    read.clear()
    assert await listed(store, limit=20, state=WorkState.FAILED) == []
    pages, after = [], ""
    while page := await listed(store, limit=400, after=after):
        pages += page
        after = page[-1]
    assert pages == newest


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: the last to end for the newest"])
async def test_a_young_job_that_ended_before_many_older_ones_is_listed_first(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    newest = reads.newest

    async def first_window(*words: Any, **more: Any) -> AsyncIterator[tuple[list[reads.StreamMessage], int]]:
        async for found, _ in newest(*words, **more):
            yield found, 0
            return

    if is_control:
        monkeypatch.setattr(work, "newest", first_window)
    await submitted(store, [f"old-{number:03}" for number in range(200)])
    await asyncio.sleep(0.01)  # another millisecond
    await store.work.enqueue([WorkItem("young", "t", "cpu")])
    (item,) = await store.work.claim(1, WorkClaim(owner="w", classes=["cpu"]))
    await store.work.settle([Settlement("young", "w", item.fence, WorkDone("1"))])
    for _ in range(10):
        await done(store, 20)
    assert ((await listed(store, limit=3))[0] == "young") is not is_control


async def test_requeued_work_is_counted_once_a_moment_later(store: JetStreamStore) -> None:
    """The server counts the trace that a record leaves where it was, until that is gone."""
    await submitted(store, ["a"])
    (item,) = await store.work.claim(1, WorkClaim(owner="w", classes=["io"]))
    await store.work.settle([Settlement("a", "w", item.fence, Quarantine("bad"))])
    assert (await store.work.snapshot()).counts == {"io": {WorkState.QUARANTINED: 1}}
    await store.quarantine.requeue(EVERYTHING, who="me")
    async with asyncio.timeout(20):
        while (await store.work.snapshot()).counts != {"io": {WorkState.PENDING: 1}}:  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.1)


async def test_the_quarantine_of_an_idle_class_is_counted_and_read_once(
    monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer
) -> None:
    """Its class has no open work and was never answered: only its items tell its name."""
    url, read = f"{nats_server.url}/{new_id()}", list[str]()
    async with opened(url) as store:
        for name in ("a", "b"):
            await store.work.enqueue([WorkItem(name, "t", "idle")])
            (item,) = await store.work.claim(1, WorkClaim(owner="w", classes=["idle"]))
            await store.work.settle([Settlement(name, "w", item.fence, Quarantine("bad"))])
    async with opened(url) as store:
        store.work.table.service_times.clear()

        async def counted(*words: Any, **more: Any) -> None:
            read.append("all")
            await reads.scan_each(*words, **more)

        monkeypatch.setattr(work, "scan_each", counted)
        for _ in range(3):
            assert (await store.work.snapshot()).counts == {"idle": {WorkState.QUARANTINED: 2}}
        assert read == ["all"], "from then on its class is known"
        await store.quarantine.requeue(EVERYTHING, who="ann")
        assert (await store.work.snapshot()).counts["idle"][WorkState.PENDING] == 2


OWN = worker_class("cpu", "worker-1")


async def seen_in_all(store: JetStreamStore) -> tuple[object, ...]:
    """What a look at the alerts asks of all open work."""
    submissions = await store.work.search(WorkFilter(classes=(ROUTER,)))
    snapshot = await store.work.snapshot()
    return await store.leases.owners(), [one.id for one in submissions.items], snapshot.counts


@pytest.mark.parametrize("is_worker", [True, False], ids=["", "control: a process without a queue mirrors"])
async def test_a_worker_answers_questions_about_all_work_without_a_mirror(
    monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, is_worker: bool
) -> None:
    """Pages are short here, and an answer holds for no other question."""
    monkeypatch.setattr(work, "MOST_READ", 2)
    monkeypatch.setattr(work, "READ_AGAIN_S", 0.0)
    monkeypatch.setattr(work, "READ_SHARE", 0)
    url = f"{nats_server.url}/{new_id()}"
    async with opened(url) as others, opened(url) as store:
        await store.work.claim(1, WorkClaim(owner="w", classes=[OWN if is_worker else "io"]))
        await others.work.enqueue([WorkItem(f"a{number}", "t", ROUTER, pool="cpu") for number in range(5)])
        await submitted(others, ["b", "c"])
        await others.work.claim(1, WorkClaim(owner="other", classes=["io"]))
        names = [f"a{number}" for number in reversed(range(5))]
        counts = {ROUTER: {WorkState.PENDING: 5}, "io": {WorkState.RUNNING: 1, WorkState.PENDING: 1}}
        assert await seen_in_all(store) == (["other"], names, counts)

        await store.work.assign([WorkItem("d", "t", OWN, pool="cpu")])
        assert (await store.work.snapshot()).counts == {**counts, OWN: {WorkState.PENDING: 1}}
        assert store.state.mirrors_all is not is_worker


class MovedClock:
    """A clock that a test moves on."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.ahead = 0.0

    def now(self) -> float:
        return float(self._clock.now()) + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


@pytest.mark.parametrize("share", [20, 0], ids=["", "control: however long it takes"])
async def test_a_read_of_all_work_that_takes_long_answers_for_longer(
    monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, share: int
) -> None:
    """Reading a hundred thousand records takes a second: every five seconds that was a third of a worker's time."""
    monkeypatch.setattr(work, "READ_SHARE", share)
    async with opened(f"{nats_server.url}/{new_id()}") as store:
        clock, number = MovedClock(store.state.clock), list[float]()
        monkeypatch.setattr(store.state, "clock", clock)

        async def slow(*words: Any, **more: Any) -> AsyncIterator[Any]:
            number.append(clock.now())
            async for page in reads.stored_now(*words, **more):
                yield page
            clock.ahead += 1.0

        monkeypatch.setattr(work, "stored_now", slow)
        await store.work.claim(1, WorkClaim(owner="w", classes=[OWN]))
        for _ in range(6):
            await store.work.snapshot()
            clock.ahead += 5.0
        assert len(number) == (2 if share else 6)


async def test_a_read_of_what_is_stored_ends_although_more_is_stored_all_the_time(store: JetStreamStore) -> None:
    await submitted(store, ["a", "b", "c"])
    state, found = store.state, list[str]()
    async for page in reads.stored_now(store.state.connection, state.names.state, [state.names.all_work()], most=1):
        found += [one.subject.rpartition(".")[2] for one in page]
        await submitted(store, [f"more-{len(found)}"])
    assert found == ["a", "b", "c"]
