"""Admission of submissions, as callers of a client and of a router meet it: by count, by time, by tenant."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.model.event import Admission, Dropped
from reefknot.errors import QueueFullError
from reefknot.queue.client import Client
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.messages import ExecAssignment, ExecResult, ResultStatus
from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.model.work import ROUTER, WorkState
from reefknot.queue.router.service import Router
from reefknot.queue.router.settings import LEASE_S, RENEWALS
from tests.unit.queue.shops import ONE, answers, served, stored, told
from tests.workshop import Shop, Step, work

ALL_OF_IT = SubmissionRules()


async def offers(shop: Shop, rules: SubmissionRules | None = ALL_OF_IT, **slots: int) -> None:
    """Publish what a system of these slots publishes every second."""
    await shop.store.control.report("system", "{}", keep=3600, capacity=Capacity(slots, rules))


async def busy(shop: Shop, line: int, *, seconds: float = 1.0) -> Client:
    """A worker with one slot and steps of so many seconds that are known, and so many in the line."""
    await served(shop, Step(seconds=seconds), wait=1.5, concurrency=ONE)
    client = Client(shop.store, shop.clock)
    for number in range(30):
        await client.run("test.step", assignment_id=f"known-{number}")
    await offers(shop, cpu=1, io=1)
    for number in range(line):
        await client.submit("test.step", assignment_id=f"before-{number}")
    await asyncio.sleep(0.5)
    return client


async def admissions(shop: Shop, *names: str) -> list[Any]:
    """Those of routers and clients; of these jobs, if any are named."""
    await asyncio.sleep(0.01)  # a refusal is written soon, not before the caller hears of it
    events = [event for event in await told(shop, Admission) if event.resource_class == ROUTER]
    return [event for event in events if event.work_id in names or not names]


async def refused_by(client: Client, **given: Any) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        await client.submit("test.step", **given)
    return caught.value


async def test_who_would_miss_its_deadline_is_refused_on_record_and_hears_when_to_come_back(shop: Shop) -> None:
    """Twenty of a second each are before it, and of ten seconds 3.5 may pass."""
    full = await refused_by(await busy(shop, 20), deadline=10, assignment_id="hopeless")
    assert str(full).startswith("would miss deadline")
    assert 5 < full.retry_after < 15
    assert await shop.store.work.get("hopeless") is None
    (event,) = await admissions(shop, "hopeless")
    assert (event.status, event.reason) == ("rejected", "would_miss_deadline")
    assert event.queue_depth == full.depth == 20


async def test_a_routers_own_caller_is_refused_in_the_same_way(shop: Shop) -> None:
    await busy(shop, 20)
    router = next(one for one in shop.members if isinstance(one, Router))
    with pytest.raises(QueueFullError) as full:
        await router.submit(work("late", deadline_ms=10_000))
    assert 5 < full.value.retry_after < 15
    assert str(full.value).startswith("would miss deadline: ")
    assert await shop.store.work.get("late") is None
    assert (router.table.get("late"), router._callers.elsewhere()) == (None, [])
    assert [one.reason for one in await admissions(shop, "late")] == ["would_miss_deadline"]


async def test_who_has_time_or_no_deadline_or_is_there_already_or_is_of_another_class_comes_in(shop: Shop) -> None:
    client = await busy(shop, 20)
    await client.submit("test.step", deadline=500)
    await client.submit("test.step")
    others: tuple[dict[str, Any], ...] = ({"resource_class": "io"}, {"priority": 10}, {"tenant_id": "another"})
    for given in ({"assignment_id": "before-3"}, *others):
        await client.submit("test.step", deadline=10, **given)
    await refused_by(client, deadline=10)  # the control
    assert [one.reason for one in await admissions(shop)] == ["would_miss_deadline"]


async def test_without_a_worker_none_is_refused_for_time(shop: Shop) -> None:
    """Nothing is known about what is possible: no capacity was published, or it has gone stale."""
    client = Client(shop.store, shop.clock)
    for number in range(500):
        await client.submit("test.step", assignment_id=f"before-{number}")
    await client.submit("test.step", deadline=0.1)
    await shop.store.control.report("system", "{}", keep=5, capacity=Capacity({"cpu": 1}))
    await refused_by(client, deadline=0.1)
    await asyncio.sleep(5.1)
    await client.submit("test.step", deadline=0.1)
    await offers(shop, None, io=9)
    await client.submit("test.step", deadline=0.1)


async def test_before_the_first_answers_the_queue_opens_cautiously(shop: Shop) -> None:
    """A step is taken for 0.2 s: ten before it are two seconds with one slot, and a tenth of that with ten."""
    client = Client(shop.store, shop.clock)
    for number in range(10):
        await client.submit("test.step", assignment_id=f"before-{number}")
    await offers(shop, cpu=1)
    await refused_by(client, deadline=2)
    await offers(shop, cpu=10)
    await client.submit("test.step", deadline=2)


async def test_a_system_that_became_fast_again_is_believed_soon(shop: Shop) -> None:
    """The mean follows within some twenty answers, of which none takes long any more."""
    client = await busy(shop, 20)
    await refused_by(client, deadline=10)
    (worker,) = [one for one in shop.members if not isinstance(one, Router)]
    step: Any = worker.steps._blocks["test.step"]
    step.seconds = 0.01
    await asyncio.sleep(3)
    for number in range(20):
        await client.submit("test.step", assignment_id=f"again-{number}")
    await client.submit("test.step", deadline=10)


async def test_the_rules_that_a_router_has_published_come_before_those_of_the_client(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, size=1000)
    await offers(shop, SubmissionRules(size=3))
    for _ in range(3):
        await client.submit("test.step")
    full = await refused_by(client)
    assert (full.depth, full.retry_after) == (3, 1.0)
    await client.submit("test.step", resource_class="io")
    await shop.store.control.withdraw("system")
    await client.submit("test.step")


async def test_the_first_refusal_is_on_record_at_once_and_then_their_number_once_a_second(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, size=1)
    await client.submit("test.step")
    await client.submit("test.step", resource_class="io")

    async def refused(number: int, **given: Any) -> None:
        for _ in range(number):
            await refused_by(client, **given)

    await refused(1)
    assert [one.inputs for one in await admissions(shop)] == [{"refused": {"queue_full cpu": 1}}]
    await refused(500)
    await refused(7, resource_class="io")
    assert len(await admissions(shop)) == 1
    await asyncio.sleep(1)
    await refused(1, resource_class="io")
    await refused(50)
    _, last = await admissions(shop)
    assert last.inputs == {"refused": {"queue_full cpu": 500, "queue_full io": 8}}
    assert (last.status, last.reason, last.resource_class) == ("rejected", "queue_full", "router")


async def test_a_refusal_writes_no_row_and_a_duplicate_of_a_kept_one_comes_in_although_it_is_full(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, size=1)
    await client.submit("test.step", assignment_id="kept")
    await refused_by(client, assignment_id="refused")
    assert await (await client.submit("test.step", assignment_id="kept")).status() == "pending"
    assert [item.id for item in (await shop.store.work.search()).items] == ["kept"]


async def displaced(shop: Shop) -> tuple[Router, ExecResult, float]:
    """A submission that this router holds, displaced by one of another process: its result, and when that came."""
    router = await shop.router(rules=Rules(size=2))
    low = [await router.submit(work(f"low-{n}", priority=-10)) for n in range(2)]
    assert None not in [router.table.get(f"low-{n}") for n in range(2)]
    began = shop.clock.now()
    await Client(shop.store, shop.clock, size=2).submit("test.step", priority=20, assignment_id="high")
    (result,) = await answers(low[0], within=120)
    return router, result, shop.clock.now() - began


async def test_a_displaced_submission_ends_as_dropped_and_its_router_hears_by_its_renewal(shop: Shop) -> None:
    """Its caller within two seconds."""
    router, result, took = await displaced(shop)
    assert took <= 2.1
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "SYSTEM_OVERLOAD")
    assert "dropped from a full queue" in (result.error_message or "")
    assert [event.work_id for event in await told(shop, Dropped)] == ["low-0"]
    assert (await stored(shop, "low-1")).state in (WorkState.PENDING, WorkState.RUNNING)
    await asyncio.sleep(LEASE_S / RENEWALS - took + 1.1)
    assert router.table.get("low-0") is None, "and it holds no place there any more"


async def test_a_client_hears_at_once_that_its_submission_was_displaced(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, size=1)
    low = await client.submit("test.step", priority=-10)
    began, waiting = shop.clock.now(), asyncio.create_task(low.result(60))
    await asyncio.sleep(0.1)
    await client.submit("test.step")
    assert (await waiting).error_code == "SYSTEM_OVERLOAD"
    assert shop.clock.now() - began < 0.2


def of(tenant: str, name: str, **options: Any) -> ExecAssignment:
    return structs.replace(work(name, **options), tenant_id=tenant)


async def flooded(shop: Shop, other: str) -> tuple[int, list[float]]:
    """`a` sends five times what is possible, `other` one a second: its refusals, and how long its work waited."""
    step = Step(seconds=0.1)
    await shop.router(rules=Rules(size=20))
    await shop.worker("w1", step, concurrency=ONE)
    await asyncio.sleep(1.5)
    await offers(shop, SubmissionRules(size=20), cpu=1)
    client = Client(shop.store, shop.clock)
    refused: Counter[str] = Counter()
    asked: dict[str, float] = {}

    async def submit(tenant: str, name: str) -> None:
        try:
            await client.hand_in(of(tenant, name))
        except QueueFullError:
            refused[name[0]] += 1

    for number in range(100):
        for burst in range(5):
            await submit("a", f"a-{number}-{burst}")
        if number % 10 == 5:
            asked[f"other-{number}"] = shop.clock.now()
            await submit(other, f"other-{number}")
        await asyncio.sleep(0.1)
    await asyncio.sleep(10)
    assert refused["a"] > 300
    return refused["o"], [at[0] - asked[name] for name in asked if (at := step.times(name))]


async def test_a_tenant_that_floods_takes_no_place_and_no_turn_from_another(shop: Shop) -> None:
    """`b` is never refused, and waits for the step that runs and one more of `a`."""
    refusals, waits = await flooded(shop, "b")
    assert (refusals, len(waits), max(waits) < 0.25) == (0, 10, True)


async def test_control_under_the_floods_own_name_nearly_all_of_it_is_refused(shop: Shop) -> None:
    refusals, waits = await flooded(shop, "a")
    assert (refusals >= 8, all(wait > 2 for wait in waits)) == (True, True)


async def ended(router: Router, name: str) -> ExecResult:
    """Looked for every 10 ms."""
    async with asyncio.timeout(60):
        while (found := await router.submissions.answer(name)) is None:  # noqa: ASYNC110 - the store tells no one
            await asyncio.sleep(0.01)
        return found


async def refused(shop: Shop, *others: str) -> tuple[ExecResult, float]:
    """Work that a busy worker refuses because of its deadline: its result, and how long that took."""
    router = await served(shop, Step(seconds=0.5), wait=1.5, concurrency=ONE)
    for number in range(25):
        await (await router.submit(work(f"known-{number}")))
    for number in range(3):
        await router.submit(work(f"before-{number}"))
    for name in others:  # busier still, and without any idea of how long a step takes
        await shop.worker(name, Step(seconds=0.1), concurrency=ONE)
        await shop.send(*(work(f"{name}-{number}") for number in range(10)), to=name)
    await asyncio.sleep(0)
    began = shop.clock.now()
    await router.submissions.submit(work("short", deadline_ms=400))  # no capacity is published: the store lets it in
    result = await ended(router, "short")
    assert [one.reason for one in shop.acks if one.assignment_id == "short"][:1] == ["would_miss_deadline"]
    return result, shop.clock.now() - began


async def test_work_that_would_miss_its_deadline_with_everybody_ends_at_once_and_says_why(shop: Shop) -> None:
    """Younger work has a better chance each time: who waits on would only be overtaken until its time is over."""
    result, took = await refused(shop)
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "SYSTEM_OVERLOAD")
    assert "would miss its deadline" in (result.error_message or "")
    assert took < 0.4
    assert [one.event_type for one in await shop.events() if one.work_id == "short"][-2:] == ["routing", "completed"]


async def test_as_long_as_one_worker_has_not_said_so_it_is_tried_there(shop: Shop) -> None:
    await refused(shop, "w2")
    acks = [(one.worker_id, one.status.value) for one in shop.acks if one.assignment_id == "short"]
    assert acks == [("w1", "rejected"), ("w2", "accepted")]
