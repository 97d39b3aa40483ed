"""A router's life: who gets it, who gets it instead, what callers are told, and what survives a restart."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from msgspec import structs

from reefknot.audit.model.event import OperatorAction, Routing, TimeoutOccurred
from reefknot.errors import ParameterError
from reefknot.queue.client import Client
from reefknot.queue.model import messages
from reefknot.queue.model.admission import KNOWN_AFTER, OverloadStatus, Rules
from reefknot.queue.model.messages import (
    ACK,
    HEARTBEAT,
    RESULT,
    ClassHealth,
    ExecResult,
    Heartbeat,
    ResultJob,
    ResultStatus,
)
from reefknot.queue.model.routing import MOST_TOGETHER, RUN_S
from reefknot.queue.router import service
from reefknot.queue.router.health import MOST_SHOWN, MOST_WORKERS, HealthTable
from tests.unit.queue.shops import ONE, answers, served
from tests.workshop import OK, REFUSED, Shop, Step, work

ENDED = ExecResult("a", "r", ResultStatus.SUCCESS, "w", ResultJob("step"))


async def beat(shop: Shop, name: str) -> None:
    said = Heartbeat(name, 0, {"cpu": ClassHealth(OverloadStatus.HEALTHY, 0, 0, 4)}, incarnation=name)
    await shop.transport.publish(HEARTBEAT, messages.encode(said))
    await asyncio.sleep(0.001)


async def test_a_caller_gets_its_result(shop: Shop) -> None:
    router = await served(shop, Step(REFUSED, OK))
    (result,) = await answers(await router.submit(work("a")))
    assert (result.status, result.retries_used, result.worker_id) == (ResultStatus.SUCCESS, 1, "w1")
    assert await router.submissions.answer("a") == result
    assert (router.snapshot().pending, router.snapshot().waiting) == (0, 0)


async def test_several_workers_share_the_work(shop: Shop) -> None:
    router = await shop.router()
    for name in ("w1", "w2", "w3"):
        await shop.worker(name, Step(seconds=0.5))
    await asyncio.sleep(1.1)
    results = await answers(*[await router.submit(work(f"a{n}")) for n in range(60)])
    by_worker = [sum(one.worker_id == name for one in results) for name in ("w1", "w2", "w3")]
    assert sum(by_worker) == 60
    assert min(by_worker) >= 15
    assert router.health.live(asyncio.get_running_loop().time()) == 3


@pytest.mark.parametrize(
    ("seconds", "longest"), [(0.0001, RUN_S / 0.01), pytest.param(0.003, 0, id="control: steps that are not short")]
)
async def test_short_work_stays_with_a_worker_for_a_moment_and_goes_on_to_the_next(
    shop: Shop, seconds: float, longest: float
) -> None:
    """One caller, one assignment after the other."""
    router = await shop.router()
    for name in ("w1", "w2", "w3"):
        await shop.worker(name, Step(seconds=seconds))
    await asyncio.sleep(1.1)
    await answers(*[await router.submit(work(f"known{n}")) for n in range(KNOWN_AFTER)])
    took = set[str | None]()
    for number in range(150):
        (result,) = await answers(await router.submit(work(f"a{number}")))
        took.add(result.worker_id)
        await asyncio.sleep(0.01)
    before = [(one.inputs or {}).get("together", 0) for one in await shop.events(Routing)]  # type: ignore[union-attr]
    assert took == {"w1", "w2", "w3"}
    assert longest / 2 <= max(before) <= longest


async def test_an_assignment_that_cannot_be_used_is_the_callers_mistake(shop: Shop) -> None:
    router = await shop.router()
    with pytest.raises(ParameterError, match=r"options\.deadline_ms"):
        await router.submit(work("a", deadline_ms=0))
    with pytest.raises(ParameterError, match="at most 1048576"):
        await router.submit(work("a", {"x": "y" * 2_000_000}))


async def test_refused_work_goes_elsewhere_or_waits(shop: Shop) -> None:
    router = await shop.router()
    for name in ("w1", "w2"):
        await shop.worker(name, Step(seconds=1), concurrency=ONE, rules=Rules(size=2))
    await asyncio.sleep(1.1)
    results = await answers(*[await router.submit(work(f"a{n}")) for n in range(40)], within=120)
    assert {one.status for one in results} == {ResultStatus.SUCCESS}
    assert any("refused" in (event.reason or "") for event in await shop.events(Routing))  # type: ignore[union-attr]


async def test_a_class_without_workers_does_not_hold_up_the_others(shop: Shop) -> None:
    router = await served(shop, Step(), concurrency=ONE)
    stuck = structs.replace(work("gpu", deadline_ms=5000, priority="high"), resource_class="gpu")
    waiting = await router.submit(stuck)
    assert len(await answers(*[await router.submit(work(f"a{n}")) for n in range(5)], within=3)) == 5
    (late,) = await answers(waiting)
    assert (late.status, late.error_code) == (ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT")
    assert [event.work_id for event in await shop.events(TimeoutOccurred)] == ["gpu"]


async def test_a_result_that_was_lost_on_its_way_comes_from_the_store_within_two_seconds(shop: Shop) -> None:
    router = await served(shop, Step(), wait=1.1)
    real = shop.transport.publish

    async def lost(subject: str, body: bytes, **named: Any) -> None:
        if subject != RESULT:
            await real(subject, body, **named)

    shop.transport.publish = lost  # type: ignore[method-assign]
    (result,) = await answers(await router.submit(work("a")), within=2.1)
    assert result.status is ResultStatus.SUCCESS
    shop.transport.publish = real  # type: ignore[method-assign]
    assert router.snapshot().pending == 1, "its caller is answered by the store; the router has not heard of it"
    await asyncio.sleep(60)
    assert router.snapshot().pending == 0


async def test_the_deadline_counts_from_the_router_on(shop: Shop) -> None:
    future = await (await shop.router()).submit(work("a", deadline_ms=10_000))
    await asyncio.sleep(6)
    await shop.worker("w1", Step(seconds=60))
    (result,) = await answers(future)
    assert result.status is ResultStatus.TIMEOUT
    assert asyncio.get_running_loop().time() == pytest.approx(10.0, abs=0.2)


async def test_the_number_of_live_workers_is_broadcast(shop: Shop) -> None:
    told = shop.heard(messages.FLEET)
    await shop.router()
    first = await shop.worker("w1", Step())
    second = await shop.worker("w2", Step())
    await asyncio.sleep(3)
    assert told[-1] == b'{"workers":2}'
    assert [one.steps.outages.destinations.share for one in (first, second)] == [2, 2]
    shop.vanish(second)
    await asyncio.sleep(5)
    assert told[-1] == b'{"workers":1}'


@pytest.mark.parametrize("where", ["submitted", "waiting", "queued", "running", "gone"])
async def test_work_is_called_off_wherever_it_is_and_its_caller_hears_so_once(shop: Shop, where: str) -> None:
    step = Step(seconds=30)
    router = await shop.router()
    if where in ("queued", "running", "gone"):
        worker = await shop.worker("w1", step, concurrency=ONE, lease=5)
        await asyncio.sleep(1.1)
        if where != "running":
            await router.submit(work("other"))
    future = await router.submit(work("a"))
    if where != "submitted":
        await asyncio.sleep(0.5)
    if where == "gone":
        shop.vanish(worker)
    assert await router.cancel("a", "not needed")
    (result,) = await answers(future)
    assert (result.status, result.error_code) == (ResultStatus.CANCELLED, "CANCELLED_BY_USER")
    assert result.error_message == "not needed"
    assert len([one for one in await shop.events(OperatorAction) if one.work_id == "a"]) == 1
    if where == "gone":
        await shop.worker("w1", step, concurrency=ONE, lease=5)
        await asyncio.sleep(120)
    assert len(step.times("a")) == (where == "running")
    assert not await router.cancel("a")
    assert not await router.cancel("nobody")


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize(("how", "within"), [("stops", 14), ("vanishes", 45)])
async def test_a_router_that_comes_back_adopts_its_work_and_results(shop: Shop, how: str, within: float) -> None:
    step = Step(seconds=3)
    first = await served(shop, step, wait=1.1)
    await first.submit(work("a"))
    await asyncio.sleep(1)
    if how == "stops":
        await first.stop()
        shop.members.remove(first)
    else:
        shop.vanish(first)
    await asyncio.sleep(10)
    (result,) = await answers(await (await shop.router()).submit(work("a")))
    assert (result.status, len(step.began)) == (ResultStatus.SUCCESS, 1)
    assert asyncio.get_running_loop().time() < within


async def test_two_routers_share_a_store_and_every_caller_hears(shop: Shop) -> None:
    routers = [await shop.router(router_id=name) for name in ("r1", "r2")]
    await shop.worker("w1", Step(seconds=0.1))
    results = await answers(*[await routers[n % 2].submit(work(f"a{n}")) for n in range(40)])
    assert {result.status for result in results} == {ResultStatus.SUCCESS}


def test_a_worker_that_resumes_has_not_restarted() -> None:
    table, said = HealthTable(), {"io": ClassHealth(OverloadStatus.HEALTHY, 0, 0, 1)}
    beats = [("1", False, ""), ("1", True, ""), ("1", False, "resumed"), ("2", False, "restarted"), ("2", False, "")]
    for second, (incarnation, draining, told) in enumerate(beats):
        beat = Heartbeat("w", 0, said, draining=draining, incarnation=incarnation)
        assert table.record_heartbeat(beat, float(second)) == told


def test_work_counts_as_short_when_enough_of_it_was_timed() -> None:
    table, said = HealthTable(), {"io": ClassHealth(OverloadStatus.HEALTHY, 0, 0, 1)}
    table.record_heartbeat(Heartbeat("w", 0, said), 0.0)

    def timed(latency_ms: float, number: int) -> int:
        for _ in range(number):
            table.record_result("w", "io", structs.replace(ENDED, latency_ms=latency_ms), 0.0)
        return table.together("io")

    assert (timed(0.01, KNOWN_AFTER - 1), timed(0, 9)) == (1, 1), "what did not run tells nothing"
    assert timed(0.01, 1) == MOST_TOGETHER
    assert timed(1.25, 500) == 4
    assert timed(6.0, 500) == 1
    table.record_result("w", "of no worker", structs.replace(ENDED, latency_ms=1.0), 0.0)
    assert list(table._attempts) == ["io"]


async def test_heartbeats_of_150_000_invented_workers_leave_a_small_status_with_the_real_one_in_it(shop: Shop) -> None:
    router = await shop.router()
    health, said = router.health, {"cpu": ClassHealth(OverloadStatus.HEALTHY, 0, 0, 4)}
    for number in range(150_000):
        beat = Heartbeat(f"invented-{number}", 0, said, incarnation="x", store="another")
        health.record_clock(beat, 0)
        health.record_heartbeat(beat, shop.clock.now())
    await shop.worker("real", Step())
    await asyncio.sleep(1.5)
    snapshot = router.snapshot()
    assert "real" in snapshot.workers["cpu"], "the real one takes the place of one that is not"
    assert sum(map(len, snapshot.workers.values())) == MOST_SHOWN
    assert snapshot.workers_left_out > 9_000
    assert len(msgspec.json.encode(snapshot)) < 256 << 10
    assert len(health._ahead_ms) <= MOST_WORKERS
    assert not health.record_heartbeat(Heartbeat("w" * 300, 0, said), shop.clock.now())
    assert "w" * 300 not in health._entries["cpu"]


def test_workers_that_are_gone_are_forgotten_and_tables_have_bounds() -> None:
    table = HealthTable()
    said = {f"c{n}": ClassHealth(OverloadStatus.HEALTHY, 0, 0, 1) for n in range(100)}
    table.record_heartbeat(Heartbeat("w", 0, said, draining=True, incarnation="1"), 0.0)
    assert len(table._entries) == 64
    assert table.record_heartbeat(Heartbeat("w", 0, said, incarnation="2"), 1.0) == "restarted"
    assert not table.record_heartbeat(Heartbeat("w", 0, said, draining=True, incarnation="2"), 2.0)
    assert table.of_class("c1", {}) == []
    assert (table.gone(5.0), table.gone(5.1), table.live(5.0)) == (set(), {"w"}, 1)
    table.forget(100.0)
    assert table._entries
    table.forget(303.0)
    assert (table._entries, table.draining) == ({}, set())


async def old_worker(shop: Shop, status: str, message: str | None = None) -> None:
    """Knows the shared subject and the old fields, and sends no heartbeat."""
    async for delivery in shop.transport.subscribe(messages.ASSIGN):
        given = json.loads(delivery.body)
        name, job = {"assignment_id": given["assignment_id"]}, {"type": given["job"]["type"]}
        ack = {**name, "status": status, "message": message}
        await shop.transport.publish(ACK, json.dumps(ack).encode())
        if status == "accepted":
            result = {**name, "request_id": given["request_id"], "status": "success", "provider_id": "old", "job": job}
            await shop.transport.publish(RESULT, json.dumps({**result, "latency_ms": 5, "cost": 0}).encode())


async def test_an_old_worker_is_reached_over_the_shared_subject(shop: Shop) -> None:
    peer = asyncio.create_task(old_worker(shop, "accepted"))
    (result,) = await answers(await (await shop.router(shared_subject=True)).submit(work("a")), within=5)
    assert (result.status, result.provider_id) == (ResultStatus.SUCCESS, "old")
    peer.cancel()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Queue full, rejecting assignment", "SYSTEM_OVERLOAD"),
        ("Queue at capacity, cannot defer", "SYSTEM_OVERLOAD"),
        ("Failed to queue assignment", "SYSTEM_OVERLOAD"),
        ("job.type: 'x' is not known here", "INVALID_INPUT"),
        (None, "INVALID_INPUT"),
    ],
)
async def test_a_refusal_without_a_reason_ends_it_as_its_words_say(shop: Shop, message: str | None, code: str) -> None:
    peer = asyncio.create_task(old_worker(shop, "rejected", message))
    (result,) = await answers(await (await shop.router(shared_subject=True)).submit(work("a")), within=5)
    assert (result.status, result.error_code) == (ResultStatus.ERROR, code)
    peer.cancel()


async def test_what_the_baseline_cannot_run_is_the_callers_mistake_and_no_overload(shop: Shop) -> None:
    router = await served(shop, Step(), wait=1.1, queue_v2=False)
    by_reference = structs.replace(work("b"), job=messages.Job("test.step", payload_ref="s3://x"))
    for result in await answers(*[await router.submit(one) for one in (work("a", job="none.such"), by_reference)]):
        assert (result.status, result.error_code) == (ResultStatus.ERROR, "INVALID_INPUT")


async def test_without_the_shared_subject_work_waits_for_a_worker_that_tells_of_itself(shop: Shop) -> None:
    """The control of the two before."""
    peer = asyncio.create_task(old_worker(shop, "accepted"))
    future = await (await shop.router()).submit(work("a"))
    await asyncio.sleep(20)
    assert not future.done()
    peer.cancel()


async def test_an_assignment_that_never_arrived_is_sent_again(shop: Shop) -> None:
    router = await shop.router()
    await beat(shop, "deaf")
    future = await router.submit(work("a"))
    await asyncio.sleep(1)
    await shop.worker("w1", Step())
    (result,) = await answers(future)
    assert result.worker_id == "w1"


async def test_nonsense_on_the_routers_subjects_harms_nobody(shop: Shop) -> None:
    router = await shop.router()
    for subject in (ACK, RESULT, HEARTBEAT):
        for body in (b"", b"{}", b"[1]", b'{"assignment_id":"x","status":"accepted"}', b"\xff"):
            await shop.transport.publish(subject, body)
    await shop.worker("w1", Step())
    (result,) = await answers(await router.submit(work("a")))
    assert result.status is ResultStatus.SUCCESS


async def test_every_caller_whose_work_is_elsewhere_hears_however_many_there_are(shop: Shop) -> None:
    """Another router looks after all of it: this one only has the callers, more of them than it looks at in a go."""
    names = [f"a{n}" for n in range(service.BATCH + 50)]
    first = await shop.router("first")
    for name in names:
        await Client(shop.store, shop.clock).hand_in(work(name))
    await asyncio.sleep(1)
    second = await shop.router("second")
    futures = [await second.submit(work(name)) for name in names]
    for name in names[service.BATCH :]:
        await first.cancel(name)
    assert {one.status for one in await answers(*futures[service.BATCH :], within=30)} == {ResultStatus.CANCELLED}
