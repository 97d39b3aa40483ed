"""Kept before told: submissions and answers in groups, what may come in between, and the table of what waits."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.model.event import Requeued
from reefknot.errors import StoreUnavailableError
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, ExecResult, Job, ResultJob, ResultStatus
from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import Held, Settlement
from reefknot.queue.router import completion, service
from reefknot.queue.router.pending import ClaimedSubmission, Pending, PendingTable
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore
from tests.unit.queue.shops import ONE, answers, broken, sent, served, stored, told
from tests.workshop import Shop, Step, work

AWAY = StoreUnavailableError("memory:", "it is away", "wait")


async def all_of(router: service.Router, names: Sequence[str], **options: Any) -> list[ExecResult]:
    async with asyncio.timeout(60):
        futures = await asyncio.gather(*(router.submit(work(name, **options)) for name in names))
        return list(await asyncio.gather(*futures))


class Counted:
    def __init__(self, work: Any) -> None:
        self._work = work
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._work, name)


async def test_a_hundred_submissions_at_once_are_few_writes_and_no_claims(shop: Shop) -> None:
    counted: Any = Counted(shop.store.work)
    shop.store.work = counted  # type: ignore[misc]
    router = await shop.router()
    shop.store.work = counted._work  # type: ignore[misc]
    await shop.worker("w1", Step(seconds=0))
    await asyncio.sleep(1.1)
    claims = counted.calls["claim"]
    assert {one.status for one in await all_of(router, [f"a{n}" for n in range(100)])} == {ResultStatus.SUCCESS}
    assert counted.calls["enqueue"] <= 5
    assert "settle" not in counted.calls, "its worker has written the results in the same store"
    assert counted.calls["claim"] - claims <= 3, "only the look for what others handed in"


async def test_a_submission_is_this_routers_at_once_if_there_is_room_and_waits_in_the_store_else(shop: Shop) -> None:
    router = await shop.router(rules=Rules(size=10))
    await router.submit(work("a0"))
    item = await stored(shop, "a0")
    assert (item.state, item.owner, router.table.waiting) == (WorkState.RUNNING, router.owner, 1)
    await shop.worker("w1", Step(seconds=1), concurrency=ONE, rules=Rules(size=100))
    await asyncio.sleep(1.1)
    futures = [await router.submit(work(f"a{n}")) for n in range(10)]
    await asyncio.sleep(0.1)
    futures += [await router.submit(work(f"b{n}")) for n in range(5)]
    assert ((await stored(shop, "b4")).state, len(router.table)) == (WorkState.PENDING, 10)
    assert len({one.assignment_id for one in await answers(*futures)}) == 15


async def test_a_store_that_fails_is_every_callers_error_and_none_is_taken_on(shop: Shop) -> None:
    router = await shop.router()

    async def broken(*given: Any, **named: Any) -> Any:
        raise AWAY

    real, router.submissions.enqueue = router.submissions.enqueue, broken  # type: ignore[method-assign]
    refused = await asyncio.gather(*(router.submit(work(f"a{n}")) for n in range(3)), return_exceptions=True)
    assert [type(one) for one in refused] == [StoreUnavailableError] * 3
    assert (len(router.table), router._callers.elsewhere()) == (0, [])
    router.submissions.enqueue = real  # type: ignore[method-assign]
    await shop.worker("w1", Step())
    (result,) = await all_of(router, ["a0"])
    assert result.status is ResultStatus.SUCCESS


async def test_a_caller_that_goes_away_leaves_its_work_behind_and_no_trace_of_itself(shop: Shop) -> None:
    step = Step()
    router = await shop.router()
    task = asyncio.create_task(router.submit(work("a")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await shop.worker("w1", step)
    await asyncio.sleep(5)
    assert len(step.began) == 1
    assert await router.submissions.answer("a") is not None
    assert router._callers.elsewhere() == []


async def test_an_answer_that_cannot_be_kept_harms_no_other_of_its_group(shop: Shop) -> None:
    router = await shop.router()
    queue: Any = shop.store.work
    settle = queue.settle

    async def picky(settlements: Sequence[Settlement]) -> Any:
        if any(one.id == "bad" for one in settlements):
            raise ValueError("not this one")
        return await settle(settlements)

    queue.settle = picky
    futures = {name: await router.submit(work(name)) for name in ("a", "bad", "b")}
    for name in futures:
        answered(router, name)
    await asyncio.sleep(0.1)
    assert [name for name, future in futures.items() if future.done()] == ["a", "b"]
    queue.settle = settle


def answered(router: service.Router, name: str, done: completion.Acknowledge | None = None) -> None:
    """A worker over another store has answered."""
    pending = router.table.get(name)
    assert pending is not None
    result = ExecResult(name, "r", ResultStatus.SUCCESS, "w", ResultJob("test.step"), 1, 0)
    router._completion.finish_foreign(pending, result, done)


async def test_no_one_hears_of_an_answer_that_is_not_kept_and_the_transport_neither(shop: Shop) -> None:
    router = await shop.router()
    heard: list[str] = []

    async def done() -> None:
        heard.append("done")

    future = await router.submit(work("a"))
    left = broken(shop, "settle", *[AWAY] * 99)
    answered(router, "a", done)
    await asyncio.sleep(0.1)
    assert (future.done(), heard) == (False, [])
    left.clear()
    await shop.worker("w1", Step())
    (result,) = await answers(future)  # its claim runs out, and it is sent once more
    assert result.worker_id == "w1"


async def test_a_router_that_stops_keeps_the_answers_it_has_heard(shop: Shop) -> None:
    router = await shop.router()
    future = await router.submit(work("a"))
    answered(router, "a")
    await router.stop()
    shop.members.remove(router)
    assert future.result().status is ResultStatus.SUCCESS
    assert await router.submissions.answer("a") is not None


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_what_a_router_held_whose_process_is_known_to_be_gone_is_taken_on_at_once(shop: Shop) -> None:
    first = await shop.router()
    future = await first.submit(work("a"))
    await asyncio.sleep(1)
    shop.vanish(first)
    second = await served(shop, Step())
    began = asyncio.get_running_loop().time()
    assert first.owner in await shop.store.leases.owners()
    assert await shop.store.leases.end([first.owner]) == 1
    (result,) = await all_of(second, ["a"])
    assert result.status is ResultStatus.SUCCESS
    assert asyncio.get_running_loop().time() - began < 5, "no lease is waited for"
    assert not future.done()
    assert {(one.reason, one.generation) for one in await told(shop, Requeued)} == {("its router vanished", 0)}


async def test_a_router_that_has_stopped_keeps_what_it_is_given_for_the_next_one(shop: Shop) -> None:
    first = await shop.router()
    await first.stop()
    shop.members.remove(first)
    async with asyncio.timeout(5):
        await first.submit(work("a"))
    await shop.store.leases.end([first.owner])
    (result,) = await all_of(await served(shop, Step()), ["a"])
    assert result.status is ResultStatus.SUCCESS


async def test_a_late_router_cannot_answer_what_another_one_took_on(shop: Shop) -> None:
    first = await shop.router()
    future = await first.submit(work("a"))
    first.services.cancel()
    for batch in (first._callers.batch, first._completion.batch):  # it is stuck, and does not know it
        first.services.keep(f"batch {id(batch)}", batch.serve)
    await shop.store.leases.end([first.owner])
    second = await served(shop, Step())
    (result,) = await all_of(second, ["a"])
    answered(first, "a")
    await asyncio.sleep(1)
    assert future.result() == result, "its caller hears what the store has, not what the late one brought"
    assert await second.submissions.answer("a") == result


async def test_a_router_ends_although_the_store_fails_the_claim_that_is_under_way(shop: Shop) -> None:
    """Its cancellation was lost in the error of the store, and the process never ended."""
    router = await shop.router()
    asked = asyncio.Event()

    async def claim(*given: object, **more: object) -> list[object]:
        asked.set()
        await asyncio.sleep(1)
        raise AWAY

    router.submissions.claim = claim  # type: ignore[method-assign, assignment]
    router._claim_now.set()
    async with asyncio.timeout(120):
        await asked.wait()
        await router.stop()


async def test_work_that_expires_beside_a_draining_worker_is_answered(shop: Shop) -> None:
    """Its worker had accepted it, and has given it up: the router's own claim is void."""
    router = await shop.router()
    worker = await shop.worker("w1", Step(seconds=100), concurrency=ONE)
    await asyncio.sleep(1.5)
    await router.submit(work("busy"))
    late = await router.submit(work("x", deadline_ms=10_000))
    await asyncio.sleep(1)
    draining = asyncio.create_task(worker.drain(300))
    (result,) = await answers(late)
    assert (result.status, (await stored(shop, "x")).state) == (ResultStatus.TIMEOUT, WorkState.FAILED)
    draining.cancel()


async def test_a_worker_with_late_heartbeats_takes_recalled_work(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a worker that believes to have the work while the store has it for the routers."""
    step = Step(seconds=10)
    router = await served(shop, step, wait=1.5, concurrency=ONE)
    (worker,) = [one for one in shop.members if not isinstance(one, service.Router)]
    futures = [await router.submit(work(f"x{n}")) for n in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_send_heartbeat", lambda: asyncio.sleep(0))
        await asyncio.sleep(7)
    await asyncio.sleep(30)
    assert all(one.done() for one in futures)
    assert [round(at - step.began[0][1]) for _, at in step.began] == [0, 10, 20]


async def test_a_slot_whose_task_is_cancelled_before_it_began_is_free_again(shop: Shop) -> None:
    pool = (await shop.worker("w1", Step(seconds=1), concurrency=ONE)).pools["cpu"]
    await shop.send(work("x"))
    while not pool.running:  # noqa: ASYNC110 - in the very turn in which it is there
        await asyncio.sleep(0)
    pool.cancel("x")
    await asyncio.sleep(1)
    assert (pool.active, pool.claimed) == (0, {})
    await sent(shop, work("y"), wait=5)
    assert (await stored(shop, "y")).state is WorkState.SUCCEEDED


async def test_two_callers_of_one_id_at_a_full_router_hear_the_same(shop: Shop) -> None:
    router = await served(shop, Step(seconds=5), wait=1.5)
    await router.submit(work("x"))
    router._callers._callers.clear()
    await shop.store.control.report("full", "{}", keep=60, capacity=Capacity({}, SubmissionRules(size=1)))
    first, second = await answers(*await asyncio.gather(router.submit(work("x")), router.submit(work("x"))))
    assert first == second


async def test_the_queue_of_a_drained_worker_is_done_by_another_although_the_router_restarted(shop: Shop) -> None:
    first = await served(shop, Step(seconds=50), concurrency=ONE)
    worker: Any = shop.members[-1]
    other = await shop.worker("w2", Step(seconds=1))
    other.pause()
    await asyncio.sleep(1.5)
    for name in ("busy", "x"):
        await first.submit(work(name))
    await asyncio.sleep(1)
    shop.members.remove(first)
    await first.stop()
    await shop.router("second")
    other.resume()
    await asyncio.sleep(2)
    await worker.drain(1)
    await asyncio.sleep(20)
    item = await stored(shop, "x")
    assert (item.state, item.resource_class) == (WorkState.SUCCEEDED, "cpu@w2")


async def test_a_pool_may_have_an_at_sign_in_its_name(shop: Shop) -> None:
    router = await served(shop, Step(seconds=9), wait=1.5, concurrency={"gpu@eu": 1})
    (result,) = await answers(await router.submit(structs.replace(work("x"), resource_class="gpu@eu")), within=20)
    assert result.status is ResultStatus.SUCCESS


@pytest.mark.real_time
async def test_a_store_that_closes_ends_those_who_wait_and_leaves_no_file_open(tmp_path: Any) -> None:
    store = await SqliteStore(tmp_path / "s.db", SystemClock()).start()
    waiting = asyncio.create_task(store.work.ended("nobody", 30))
    await asyncio.sleep(0.05)
    await store.close()
    async with asyncio.timeout(3):
        with pytest.raises(Exception, match="closed"):
            await waiting
    assert store._watcher._connection is None


def taken(name: str, priority: int = 0, deadline_at: int | None = None, tenant: str | None = None) -> ClaimedSubmission:
    assignment = ExecAssignment(name, "r", Job("t"), options=AssignmentOptions(priority=priority), tenant_id=tenant)
    return ClaimedSubmission(assignment, Held(name, "o", 1), deadline_at)


def line(table: PendingTable, name: str = "cpu") -> list[str]:
    """Everybody who stands there, in order; the line is empty afterwards."""
    found: list[str] = []
    for one, stand in table.lines():
        while one == name and (pending := stand.next()) is not None:
            found.append(pending.assignment.assignment_id)
    return found


def put(table: PendingTable, name: str, now: float = 0.0, priority: int = 0, deadline_at: int | None = None) -> Pending:
    return table.add(taken(name, priority, deadline_at), "cpu", now)


@pytest.fixture
def table() -> PendingTable:
    return PendingTable()


def test_a_line_goes_by_priority_and_then_by_age(table: PendingTable) -> None:
    for name, now, priority in (("young", 2.0, 0), ("old", 1.0, 0), ("urgent", 3.0, 9), ("last", 0.0, -5)):
        put(table, name, now, priority)
    assert line(table) == ["urgent", "old", "young", "last"]


def test_what_a_worker_holds_is_counted_until_it_ends_or_goes_elsewhere(table: PendingTable) -> None:
    one, two, three = (put(table, name) for name in ("one", "two", "three"))
    for pending in (one, two, three):
        table.sent(pending, "w", 0.0)
    held = []
    for change in (
        lambda: table.acked(one),
        lambda: table.remove(one),
        lambda: table.remove(one),
        lambda: table.back(two),
        lambda: table.sent(three, "v", 1.0),
        lambda: table.refused(three, "v", 9.0, "full"),
    ):
        change()
        held.append((table.under_way["w", "cpu"], table.under_way["v", "cpu"]))
    assert held == [(3, 0), (2, 0), (2, 0), (1, 0), (0, 1), (0, 0)]
    assert not table.under_way, "what is zero is forgotten"


def tenants(table: PendingTable, *names: str, priority: int = 0) -> dict[str, Pending]:
    """One after the other; the first letter is the tenant."""
    ages = enumerate(names, start=len(table))
    return {name: table.add(taken(name, priority, tenant=name[0]), "cpu", float(age)) for age, name in ages}


def test_within_a_priority_tenants_take_turns_each_by_age(table: PendingTable) -> None:
    tenants(table, "a1", "a2", "a3", "a4", "b1", "b2", "c1")
    tenants(table, "a5", "b3", "a6", priority=1)
    assert line(table) == ["a5", "b3", "a6", "a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_tenant_without_anything_left_stands_behind_the_others_when_it_comes_again(table: PendingTable) -> None:
    tenants(table, "a1", "b1", "b2", "b3")
    stand = dict(table.lines())["cpu"]
    assert [one.assignment.assignment_id for _ in range(2) if (one := stand.next())] == ["a1", "b1"]
    tenants(table, "a2", "a3")
    assert line(table) == ["b2", "a2", "b3", "a3"]


def test_entries_that_were_removed_cost_a_tenant_no_turn(table: PendingTable) -> None:
    one = tenants(table, "a1", "a2", "a3", "a4", "b1", "b2")
    for name in ("a1", "a2"):
        table.remove(one[name])
    assert line(table) == ["a3", "b1", "a4", "b2"]


def test_who_comes_back_stands_where_its_age_puts_it_and_only_once(table: PendingTable) -> None:
    first, second = put(table, "first", 1.0), put(table, "second", 2.0)
    table.sent(first, "w", 3.0)
    assert (table.waiting, table.waits(first), table.waits(second)) == (1, False, True)
    table.back(first)
    table.back(first)
    assert (table.waiting, line(table)) == (2, ["first", "second"])


def test_who_has_ended_does_not_come_back_and_who_was_called_off_is_noted(table: PendingTable) -> None:
    one, other = put(table, "one"), put(table, "other")
    table.sent(one, "w", 1.0)
    assert [table.remove(one) for _ in range(2)] == [True, False]
    table.back(one)
    assert (table.waiting, len(table), line(table)) == (1, 1, ["other"])
    assert not table.unacked
    table.sent(other, "w", 0.0)
    other.cancel_reason = "enough"
    table.back(other)
    assert table.cancelled == [other]


def test_deadlines_are_looked_at_when_they_are_over_wherever_their_assignments_are(table: PendingTable) -> None:
    here, gone, sent = (put(table, name, deadline_at=100) for name in ("here", "gone", "sent"))
    away, late = put(table, "away"), put(table, "late", deadline_at=300)
    table.remove(gone)
    table.sent(sent, "w", 0.0)
    assert [table.overdue(at) for at in (99, 100, 100)] == [[], [here, sent], []], "once"
    table.back(sent)
    assert table.overdue(150) == [], "it was looked at"
    table.check_deadline_at(sent, 200)
    assert table.overdue(300) == [sent, late]
    assert table.waits(away)


def test_those_who_ended_are_not_kept_for_their_deadlines_or_their_places(table: PendingTable) -> None:
    stays = put(table, "stays", deadline_at=10**15)
    for number in range(20_000):
        table.remove(put(table, f"a{number}", deadline_at=10**14))
    assert len(table._looks) < 3000
    assert sum(one._entries for one in table._lines.values()) < 3000
    assert line(table) == ["stays"]
    assert table.waits(stays)


def test_classes_without_work_are_forgotten(table: PendingTable) -> None:
    for number in range(100):
        table.remove(table.add(taken(f"a{number}"), f"class-{number}", 0.0))
    assert (list(table.lines()), len(table._lines), len(table.of_class)) == ([], 0, 0)
