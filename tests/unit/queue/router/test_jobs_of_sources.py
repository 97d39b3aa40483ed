"""Jobs of sources wait beside assignments: no router and no worker touches them, and they take nobody's place."""

import asyncio

import pytest

from reefknot.errors import KeyConflictError
from reefknot.ingest.jobs import IngestionJob, JobQueue, class_of
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.model.work import WorkDone, WorkState
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from tests.unit.queue.shops import served
from tests.workshop import Shop, Step, work

MANY = 3000


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_thousands_of_waiting_jobs_take_no_place_of_submissions_and_load_no_worker(shop: Shop) -> None:
    jobs = JobQueue(shop.store)
    for source in ("notes", "me@gone-worker"):
        await jobs.enqueue(*(IngestionJob(f"{source}/{n}", "own_sea", source) for n in range(MANY // 2)))
    await shop.router()
    worker = await shop.worker("w1", Step())
    before = worker.snapshot()
    client = Client(shop.store, shop.clock, size=3)
    handles = [await client.hand_in(work(f"a{n}")) for n in range(3)]
    async with asyncio.timeout(60):
        results = [await one.result(timeout=30) for one in handles]
    assert {one.status for one in results} == {ResultStatus.SUCCESS}
    await asyncio.sleep(300)  # long enough for a router to bring back the work of workers that are gone
    after = worker.snapshot()
    assert after.classes == before.classes
    assert {one.overload_status for one in results} <= {None, "healthy"}
    counts = (await shop.store.work.snapshot()).counts
    assert {name: counts[name] for name in counts if name.startswith("ingest.")} == {
        class_of(source): {WorkState.PENDING: MANY // 2} for source in ("notes", "me@gone-worker")
    }


async def test_an_assignment_under_the_id_of_a_job_of_a_source_is_refused(shop: Shop) -> None:
    await JobQueue(shop.store).enqueue(IngestionJob("notes@first", "test.step", "notes"))
    router = await served(shop, Step())
    client = Client(shop.store, shop.clock)
    for _ in range(2):  # while it waits, and after its end
        with pytest.raises(KeyConflictError, match="another job"):
            await client.hand_in(work("notes@first"))
        with pytest.raises(KeyConflictError, match="another job"):
            await (await router.submit(work("notes@first")))
        for item in await shop.store.work.claim(1, WorkClaim(owner="o", classes=(class_of("notes"),))):
            done = Settlement(item.id, "o", item.fence, WorkDone('{"pages": 1}'))
            assert await shop.store.work.settle([done]) == [True]


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_job_of_a_source_is_cancelled_in_the_store_although_routers_run(shop: Shop, is_running: bool) -> None:
    jobs = JobQueue(shop.store)
    await jobs.enqueue(IngestionJob("sync", "own_sea", "notes"))
    if is_running:
        assert await shop.store.work.claim(1, WorkClaim(owner="o", classes=(class_of("notes"),)))
    await shop.router()
    assert await Client(shop.store, shop.clock).cancel("sync", "enough", who="ann")
    item = await jobs.get("sync")
    assert item is not None
    assert (item.state, item.reason, item.history[-1].who) == (WorkState.CANCELLED, "enough", "ann")
