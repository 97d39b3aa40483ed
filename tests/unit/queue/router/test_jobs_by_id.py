"""A job by its id, submitted by another client: its end, cancelled, run again; many at once; jobs of sources."""

import asyncio
import math
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import make_dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pydantic
import pytest

import reefknot as rk
from reefknot import errors
from reefknot.audit.model.event import OperatorAction, Requeued
from reefknot.console.nats_servers import NatsServer
from reefknot.ingest.jobs import IngestionJob, JobQueue, class_of
from reefknot.queue.client import Client, Handle
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.model.work import WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.retrying.types import RetryKeywords
from tests.rows import for_each_row
from tests.unit.queue.shops import served, stored, told
from tests.workshop import DENIED, OK, Shop, Step, with_shop, work


def other(shop: Shop) -> Client:
    """A client that knows nothing but the store, as one of another process."""
    return Client(shop.store, shop.clock)


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_a_job_is_found_by_its_id_from_its_beginning_to_its_end(shop: Shop) -> None:
    job = other(shop).job("a")
    assert await job.status() == "unknown"
    await other(shop).submit("test.step", {"seconds": 5}, assignment_id="a")
    assert await job.status() == "pending"
    with pytest.raises(errors.ResultPendingError, match="no result after 0 s"):
        await job.wait(0)
    await served(shop, Step(), wait=3)
    assert await job.status() == "running"
    assert await job.wait(timedelta(minutes=1)) == "succeeded"
    result = await other(shop).job("a").result()
    assert (result.status, result.output) == (ResultStatus.SUCCESS, {"done": True})


async def test_a_job_that_failed_is_an_end_for_wait_and_runs_again_when_asked(shop: Shop) -> None:
    step = Step(DENIED, DENIED)
    await served(shop, step)
    await other(shop).submit("test.step", assignment_id="a")
    job = other(shop).job("a")
    assert await job.wait() == "failed"
    assert (await job.result()).status is ResultStatus.ERROR
    step.outcomes = (OK,)
    await job.retry("the right is there now")
    assert await job.wait() == "succeeded"
    (action,), (again,) = await told(shop, OperatorAction), await told(shop, Requeued)
    assert (action.work_id, action.action, action.actor) == ("a", "retry", "caller")
    assert again.reason == "retried by caller: the right is there now"
    with pytest.raises(errors.OperationError, match="a is succeeded: only one that failed"):
        await job.retry()
    assert len(await told(shop, OperatorAction)) == 1, "what was refused is not audited as done"


async def test_a_job_with_a_deadline_that_no_one_ends_is_ended_by_the_one_who_waits(shop: Shop) -> None:
    await other(shop).submit("test.step", assignment_id="a", deadline=timedelta(seconds=20))
    began = shop.clock.now()
    assert await other(shop).job("a").wait() == "failed"
    assert 20 <= shop.clock.now() - began <= 22
    assert (await other(shop).job("a").result()).status is ResultStatus.TIMEOUT


async def test_a_job_for_later_is_waited_for_until_it_is_due(shop: Shop) -> None:
    await served(shop, Step())
    await other(shop).submit("test.step", assignment_id="a", delay=timedelta(minutes=3))
    assert await other(shop).job("a").wait() == "succeeded"


async def test_the_same_id_of_another_tenant_is_another_job(shop: Shop) -> None:
    async def nobody(_: object) -> bool:
        return False

    client = Client(shop.store, shop.clock, has_router=nobody)
    await client.submit("test.step", assignment_id="a", tenant_id="acme")
    assert [await client.job("a", one).status() for one in ("acme", None, "evil")] == ["pending", "unknown", "unknown"]
    await client.job("a", "acme").cancel("not needed")
    assert await client.job("a", "acme").wait() == "cancelled"


@pytest.mark.parametrize("call", ["result", "wait", "cancel", "retry"])
async def test_an_id_that_no_job_has_is_told_at_once(shop: Shop, call: str) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(errors.UnknownJobError, match=r"no job has the id 'nothing'.*give tenant_id=") as caught:
        await getattr(other(shop).job("nothing"), call)()
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, rk.ReefknotError)
    assert (caught.value.assignment_id, caught.value.tenant_id) == ("nothing", None)
    with pytest.raises(errors.UnknownJobError, match="no job of tenant 'acme' has the id 'nothing'"):
        await getattr(other(shop).job("nothing", tenant_id="acme"), call)()
    assert asyncio.get_running_loop().time() - began < 1


async def test_a_job_of_a_source_ends_and_has_no_result_of_a_step(shop: Shop) -> None:
    item = WorkItem("sync-1", "full_sync", class_of("notes"), source="notes", payload=b"{}")
    await shop.store.work.enqueue([item])
    await shop.store.work.cancel("sync-1", who="ann")
    job = other(shop).job("sync-1")
    assert await job.wait() == "cancelled"
    with pytest.raises(errors.OperationError, match="is a job of a source"):
        await job.result()


async def test_what_is_no_id_is_refused_before_any_read(shop: Shop) -> None:
    with pytest.raises(errors.ParameterTypeError, match="assignment_id=7 is not accepted: the id of a job"):
        other(shop).job(cast(Any, 7))
    with pytest.raises(errors.ParameterTypeError, match="tenant_id=7 is not accepted: the name of a tenant, or None"):
        other(shop).job("a", tenant_id=cast(Any, 7))


class OrderModel(pydantic.BaseModel):
    number: int = 7


OrderData = make_dataclass("OrderData", [("number", int)])
OrderStruct = msgspec.defstruct("OrderStruct", [("number", int)])


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (OrderModel(), '; for a pydantic model pass model.model_dump(mode="json")'),
        (OrderData(7), "; for a dataclass pass dataclasses.asdict(value)"),
        (OrderStruct(7), "; for a msgspec.Struct pass msgspec.to_builtins(value)"),
        (OrderData, ""),
        ([7], ""),
    ],
)
async def test_a_model_as_inputs_is_refused_with_the_call_that_converts_it(shop: Shop, given: Any, advice: str) -> None:
    with pytest.raises(errors.ParameterTypeError) as caught:
        await other(shop).submit("test.step", given)
    assert str(caught.value).endswith(f"a mapping of names to JSON values, or None{advice}")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"deadlin": 5}, "deadlin=5 is not accepted: no such option; did you mean 'deadline'?; accepted: "),
    ({"time_out": 5}, "did you mean 'timeout'?"),
    ({"countdown": 5}, "countdown=5 is not accepted: no such option; did you mean 'delay'?"),
    ({"task_id": "a"}, "did you mean 'assignment_id'?"),
    ({"nonsense": 5}, "nonsense=5 is not accepted: no such option; accepted: "),
    ({"deadline": timedelta(0)}, "deadline=0.0 is not accepted: a number of seconds above 0"),
    ({"deadline": math.nan}, "deadline=nan is not accepted: a number of seconds above 0"),
    ({"timeout": "5"}, "timeout='5' is not accepted: a number of seconds above 0"),
    ({"delay": timedelta(days=-1)}, "delay=-86400.0 is not accepted"),
    ({"delay": -1}, "delay=-1"),
    ({"delay": "10m"}, "delay='10m'"),
    ({"delay": 1e12}, "delay=1"),
    ({"at": timedelta(1)}, "a datetime; without a zone it is local"),
    ({"at": 5}, "a datetime; without a zone it is local"),
    ({"delay": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)}, "not together with delay"),
    ({"inputs": object()}, "inputs=<object object at 0x"),
    ({"inputs": [1]}, "inputs=[1] is not accepted: a mapping"),
    ({"inputs": "text"}, "inputs='text' is not accepted: a mapping"),
    ({"inputs": []}, "inputs=[] is not accepted: a mapping"),
    ({"inputs": {"x": "y" * 2_000_000}}, "at most 1048576"),
    ({"inputs": {"timeout_ms": 0}}, "inputs.timeout_ms=0 is not accepted: a whole number from 1"),
    ({"retries": -1}, "retries=-1 is not accepted: a whole number from 0 to 100"),
    ({"retries": "x"}, "retries='x' is not accepted: Expected `int | null`, got `str`"),
    ({"priority": "urgent"}, "priority='urgent' is not accepted: a whole number, or one of low"),
    ({"assignment_id": ""}, "assignment_id='' is not accepted: printable text"),
    ({"tenant_id": "a\nb"}, "tenant_id='a\\nb' is not accepted: printable text of at most 256"),
    ({"trace_id": "x" * 999}, "trace_id='xxx"),
    ({"resource_class": 5}, "resource_class=5 is not accepted"),
    ({"job_type": 5}, "job_type=5 is not accepted: Expected `str`, got `int`"),
    ({"job_type": ""}, "job_type='' is not accepted: printable text of 1 to 256 characters"),
]


@pytest.mark.parametrize("by", ["submit", "run", "submit_many"])
async def test_a_wrong_argument_is_named_as_the_caller_calls_it_with_its_value(shop: Shop, by: str) -> None:
    for options, words in WRONG:
        item: Any = {"job_type": "test.step", **options}
        given = {"items": [("test.step", {}), item]} if by == "submit_many" else item
        with pytest.raises(errors.ParameterError) as caught:
            await getattr(other(shop), by)(**given)
        assert words in str(caught.value), options
        assert by != "submit_many" or str(caught.value).startswith("items[1].")
        assert "no such option" not in words or isinstance(caught.value, errors.ParameterTypeError)
    assert (await shop.store.work.search()).items == [], "nothing was stored"


async def test_durations_are_accepted_as_timedelta(shop: Shop) -> None:
    minute, hour = timedelta(minutes=1), timedelta(hours=1)
    handle = await other(shop).submit(
        "test.step", deadline=hour, timeout=minute, attempt_timeout=timedelta(milliseconds=1500), delay=hour
    )
    item = await stored(shop, handle.assignment_id)
    assert (item.due_at - item.created_at, (item.deadline_at or 0) - item.due_at) == (3_600_000, 3_600_000)
    assert b'"timeout_ms":60000' in item.payload
    assert b'"attempt_timeout_ms":1500' in item.payload
    with pytest.raises(errors.ResultPendingError):
        await handle.result(timedelta(seconds=1))


@asynccontextmanager
async def opened(engine: str, tmp_path: Path, server: NatsServer | None, size: int = 200) -> Any:
    url = {"memory": "memory:", "sqlite": f"sqlite:{tmp_path / 's.db'}"}.get(engine)
    if server is not None:
        url = f"{server.url}/{tmp_path.name.replace('_', '-')[-24:]}"
    async with rk.connect(url, size=size) as client:
        yield client


@pytest.fixture(params=["memory", "sqlite", "nats"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    server = request.getfixturevalue("nats_server") if request.param == "nats" else None
    return lambda: opened(request.param, tmp_path, server)


@pytest.mark.real_time
async def test_many_are_stored_in_one_step_with_an_answer_for_each(engine: Callable[[], Any]) -> None:
    async with engine() as client:
        await client.submit("test.step", {"n": 1}, assignment_id="there")
        await client.submit("test.step", {"n": 2}, assignment_id="taken")
        items: list[rk.SubmitItem | tuple[str, dict[str, Any]]] = [
            ("test.step", {"n": 0}),
            {"job_type": "test.step", "inputs": {"n": 1}, "assignment_id": "there"},
            {"job_type": "test.step", "inputs": {"n": 3}, "assignment_id": "taken"},
            {"job_type": "test.step", "assignment_id": "new", "tenant_id": "acme", "deadline": timedelta(minutes=5)},
            {"job_type": "test.step", "assignment_id": "twice"},
            {"job_type": "test.step", "assignment_id": "twice"},
            {"job_type": "test.step", "at": None, "delay": 600},
        ]
        answers = await client.submit_many(items)
        kept = [one for one in answers if isinstance(one, Handle)]
        assert isinstance(answers[2], errors.KeyConflictError)
        assert [one.is_new for one in kept] == [True, False, True, True, False, True]
        assert (answers[3].assignment_id, answers[3].tenant_id) == ("new", "acme")
        assert [await one.status() for one in kept] == ["pending"] * 6
        assert sum(sum(one.values()) for one in (await client.store.work.snapshot()).counts.values()) == 6
        assert await client.submit_many([]) == []

        full = await client.submit_many([("test.step", {"n": n}) for n in range(300)])
        assert [isinstance(one, Handle) for one in full] == [True] * 96 + [False] * 204, "half of 200 places: a share"
        assert all(isinstance(one, errors.QueueFullError) and one.retry_after > 0 for one in full[96:])
        assert {await one.status() for one in full[:96]} == {"pending"}


TWICE = [{"job_type": "a.b", "inputs": {"n": n}, "assignment_id": "x"} for n in (1, 2)]


@for_each_row(
    ("items", "told"),
    [
        ([{"job_type": "a.b", "deadline": "5"}], "items[1].deadline='5' is not accepted: a number of sec"),
        ([("a.b", [1])], "items[1].inputs=[1] is not accepted: a mapping"),
        ([("", {})], "items[1].job_type='' is not accepted"),
        ([{"inputs": {}}], "items[1].job_type=None is not accepted: the type of a step; it is missing"),
        ([{"job_type": "a.b", "input": {}}], "items[1].input={} is not accepted: no such option; did you m"),
        (["a.b"], "items[1]='a.b' is not accepted: a mapping with the arguments of submit, or a pair"),
        ([("a.b",)], "items[1]=('a.b',) is not accepted"),
        ([("a.b", {"x": {1}})], "items[1].inputs.x is not JSON"),
        (TWICE, "items[2].assignment_id='x' is not accepted: an id of its own; items[1] has it with another job"),
        ([("a.b", {})] * 10_000, "items='more than 10000' is not accepted: at most 10000"),
        ({"job_type": "a.b"}, "items={'job_type': 'a.b'} is not accepted: a list of mappings"),
        (5, "items=5 is not accepted: a list of mappings"),
        ("a.b", "items='a.b' is not accepted"),
    ],
)
def test_an_item_that_is_written_wrongly_is_named_and_none_is_stored(items: Any, told: str) -> None:
    """A list has a good item before it."""

    async def story(shop: Shop) -> None:
        with pytest.raises((errors.ParameterError, errors.NotJsonError)) as caught:
            await other(shop).submit_many([("a.b", {}), *items] if isinstance(items, list) else items)
        assert str(caught.value).startswith(told)
        assert (await shop.store.work.search()).items == []

    with_shop(story)


@pytest.mark.real_time
async def test_on_nats_what_is_no_one_batch_is_refused_whole(nats_server: NatsServer, tmp_path: Path) -> None:
    async with opened("nats", tmp_path, nats_server, size=100_000) as client:
        with pytest.raises(rk.StoreFullError, match="make it in smaller parts"):
            await client.submit_many([("test.step", {"n": n}) for n in range(1000)])
        assert (await client.store.work.search()).items == [], "nothing was stored"
        assert len(await client.submit_many([("test.step", {"n": n}) for n in range(90)])) == 90


@pytest.mark.parametrize(("attempts", "accepted"), [(None, 180), (200, 300)])
async def test_a_caller_that_waits_for_room_needs_attempts_too(shop: Shop, attempts: int | None, accepted: int) -> None:
    """A queue that moves asks for waits of a tenth of a second: the usual four attempts are over long before 20 s."""
    client = Client(shop.store, shop.clock, size=200)
    limits: RetryKeywords = {"on": errors.QueueFullError, "deadline": 20, "log": False}
    if attempts is not None:
        limits["attempts"] = attempts

    @rk.retry(**limits)
    async def submit(number: int) -> Handle:
        return await client.submit("test.step", {"n": number})

    submitting = [asyncio.create_task(submit(number)) for number in range(300)]
    await asyncio.sleep(0.5 if attempts else 4)
    await served(shop, Step(seconds=0.001))
    answers = await asyncio.gather(*submitting, return_exceptions=True)
    assert len([one for one in answers if isinstance(one, Handle)]) == accepted
    refused = [one for one in answers if isinstance(one, errors.QueueFullError)]
    assert len(refused) == 300 - accepted
    assert all("all attempts are spent" in one.__notes__[0] for one in refused)


MANY = 3000


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_thousands_of_waiting_jobs_take_no_place_of_submissions_and_load_no_worker(shop: Shop) -> None:
    jobs = JobQueue(shop.store)
    for source in ("notes", "me@gone-worker"):
        await jobs.enqueue(*(IngestionJob(f"{source}/{n}", "own_sea", source) for n in range(MANY // 2)))
    await shop.router()
    worker = await shop.worker("w1", Step())
    before, client = worker.snapshot(), Client(shop.store, shop.clock, size=3)
    handles = [await client.hand_in(work(f"a{n}")) for n in range(3)]
    async with asyncio.timeout(60):
        results = [await one.result(timeout=30) for one in handles]
    assert {one.status for one in results} == {ResultStatus.SUCCESS}
    await asyncio.sleep(300)  # long enough for a router to bring back the work of workers that are gone
    assert worker.snapshot().classes == before.classes
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
        with pytest.raises(errors.KeyConflictError, match="another job"):
            await client.hand_in(work("notes@first"))
        with pytest.raises(errors.KeyConflictError, match="another job"):
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
