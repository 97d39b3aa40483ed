"""A worker's life: cancelled, drained, restarted, crashed, taken over, expired, and what it says meanwhile."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from reefknot.audit.model import event as events
from reefknot.audit.model.chain import Head
from reefknot.audit.model.event import Completed, Requeued, TimeoutOccurred
from reefknot.audit.port import AuditEntry
from reefknot.errors import ParameterError, StoreFullError
from reefknot.queue.model.admission import OverloadStatus, Rules
from reefknot.queue.model.messages import CANCEL, AckStatus, Cancel, ExecResult, ResultStatus, encode
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.router.service import Router
from reefknot.queue.worker import closing, service
from reefknot.stores.memory.store import MemoryAuditLog
from tests.unit.queue.shops import ONE, ran, sent, stored, told
from tests.workshop import DENIED, OK, REFUSED, Shop, Step, work


async def cancel(shop: Shop, name: str, reason: str | None = None) -> None:
    await shop.transport.publish(CANCEL, encode(Cancel(name, reason)))
    await asyncio.sleep(0.001)


async def test_an_assignment_is_acked_run_and_answered(shop: Shop) -> None:
    step = Step()
    await ran(shop, step, wait=1)
    assert shop.ack("a").message == "Assignment queued"
    result = shop.result("a")
    assert (result.status, result.retries_used, result.output) == (ResultStatus.SUCCESS, 0, {"done": True})
    assert (result.queue_depth, result.overload_status, result.worker_id) == (0, OverloadStatus.HEALTHY, "w1")
    assert step.contexts[0].idempotency_key == "a/0"
    item = await stored(shop, "a")
    assert item.state is WorkState.SUCCEEDED
    assert msgspec.json.decode(item.result or "")["assignment_id"] == "a"


async def test_a_name_that_is_no_word_of_a_subject_is_refused(shop: Shop) -> None:
    for name in ("", "a b", "a.b", "a*", "a>", "a@b", "a#b", "a/b", "a\n"):
        with pytest.raises(ParameterError, match="worker_id"):
            await shop.worker(name)


async def test_queued_work_is_cancelled_and_never_runs(shop: Shop) -> None:
    step = Step(seconds=5)
    await shop.worker("w1", step, concurrency=ONE)
    await shop.send(work("a"), work("b"))
    await cancel(shop, "b", "changed my mind")
    await cancel(shop, "b")
    await asyncio.sleep(10)
    result = shop.result("b")
    assert (result.status, result.error_code) == (ResultStatus.CANCELLED, "CANCELLED_BY_USER")
    assert (result.error_message, step.times("b")) == ("changed my mind", [])
    (event,) = await told(shop, events.OperatorAction)
    assert (event.actor, event.work_id, event.action) == ("w1", "b", "cancel")


async def test_running_work_is_cancelled_where_it_is(shop: Shop) -> None:
    worker = await ran(shop, Step(seconds=50), wait=1)
    await cancel(shop, "a")
    assert worker.pools["cpu"].active == 0
    await asyncio.sleep(100)
    assert shop.result("a").error_code == "CANCELLED_BY_USER"
    assert shop.seconds("a") == pytest.approx(1.0, abs=0.1)
    (ended,) = await told(shop, Completed)
    assert (ended.status, ended.attempts, round(ended.attempt_seconds, 1)) == ("cancelled", 1, 1.0)


async def test_work_that_waits_for_its_retry_is_cancelled(shop: Shop) -> None:
    step = Step(REFUSED)
    await ran(shop, step, work("a", retry={"max_attempts": 5, "backoff_ms": 20_000}), wait=0.05)
    await cancel(shop, "a")
    await asyncio.sleep(100)
    result = shop.result("a")
    assert (result.status, result.retries_used, len(step.began)) == (ResultStatus.CANCELLED, 0, 1)


async def test_what_has_ended_is_not_cancelled_and_a_broken_message_harms_nobody(shop: Shop) -> None:
    await shop.worker("w1", Step())
    await shop.transport.publish(CANCEL, b"not json")
    await sent(shop, work("a"), wait=1)
    await cancel(shop, "a")
    await cancel(shop, "nobody")
    assert [one.status for one in shop.results] == [ResultStatus.SUCCESS]


async def test_a_report_that_is_on_its_way_is_finished_before_stopping(shop: Shop) -> None:
    """An effect that happened is not run again because the worker stopped in that moment."""
    step = Step(seconds=1)
    worker = await shop.worker("w1", step)
    slow = shop.store.work.settle

    async def settle(settlements):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.5)
        return await slow(settlements)

    shop.store.work.settle = settle  # type: ignore[method-assign]
    await sent(shop, work("a"), wait=1.2)
    await worker.stop()
    assert ((await stored(shop, "a")).state, len(step.began)) == (WorkState.SUCCEEDED, 1)


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_a_delayed_retry_comes_back_after_a_restart_under_the_same_id(shop: Shop) -> None:
    step, retry = Step(REFUSED, OK), {"max_attempts": 3, "backoff_ms": 20_000}
    shop.vanish(await ran(shop, step, work("a", retry=retry, timeout_ms=100_000), wait=0.1))
    await asyncio.sleep(1)
    assert (await shop.worker("w1", step)).pools["cpu"].queue.depth == 1
    await asyncio.sleep(30)
    result = shop.result("a")
    assert (result.status, result.retries_used) == (ResultStatus.SUCCESS, 1)


async def test_running_work_comes_back_by_its_lease_and_counts_as_a_crash(shop: Shop) -> None:
    step = Step(seconds=3)
    shop.vanish(await ran(shop, step, wait=1, lease=6))
    assert (await shop.worker("w1", step, lease=6)).pools["cpu"].queue.depth == 1
    await asyncio.sleep(20)
    item = await stored(shop, "a")
    assert (item.state, item.attempts, item.crashes) == (WorkState.SUCCEEDED, 1, 1)
    assert shop.result("a").retries_used == 0
    assert [event.reason for event in await told(shop, events.Requeued)] == ["its worker vanished"]


async def test_the_third_crash_quarantines_and_still_answers(shop: Shop) -> None:
    step = Step(seconds=50)
    worker = await shop.worker("w1", step, lease=2)
    await shop.send(work("a"))
    for _ in range(3):
        await asyncio.sleep(1)
        shop.vanish(worker)
        worker = await shop.worker("w1", step, lease=2)
        await asyncio.sleep(4)
    await asyncio.sleep(5)
    result = shop.result("a")
    assert (result.status, result.error_code) == (ResultStatus.ERROR, "INTERNAL_ERROR")
    assert result.error_message == "quarantined: its owner vanished 3 times"
    assert len(await shop.events(events.Quarantined)) == 1
    assert (await shop.store.quarantine.show("a")) is not None
    await shop.send(work("a"))
    assert [one.error_code for one in shop.results] == ["INTERNAL_ERROR"] * 2


@pytest.mark.parametrize("moment", [0.001, 1.0])
async def test_a_repeat_while_it_waits_or_runs_is_accepted_and_changes_nothing(shop: Shop, moment: float) -> None:
    step = Step(seconds=2)
    worker = await ran(shop, step, work("a"), work("b"), wait=moment, concurrency=ONE, rules=Rules(size=1))
    for _ in range(3):
        await shop.send(work("a"), work("b"))
    assert {one.status.value for one in shop.acks} == {"accepted"}, "the queue is full, and they are in it"
    assert worker.pools["cpu"].queue.depth == 1
    await asyncio.sleep(10)
    assert (sorted(one.assignment_id for one in shop.results), worker.pools["cpu"].depth()) == (["a", "b"], 0)


async def test_work_that_a_gone_worker_left_waiting_is_taken_over_by_the_one_that_is_sent_it(shop: Shop) -> None:
    step = Step(seconds=1)
    shop.vanish(await ran(shop, step, work("a"), work("b"), wait=0.1, concurrency=ONE, lease=4))
    await shop.worker("w2", step, concurrency=ONE, lease=4)
    await sent(shop, work("a"), work("b"), wait=20, to="w2")
    assert {one.assignment_id: one.worker_id for one in shop.results} == {"a": "w2", "b": "w2"}
    assert len(step.times("b")) == 1


@pytest.mark.parametrize("careless", [False, True], ids=["left alone", "control: a worker that takes all it finds"])
async def test_a_submission_is_no_left_work(shop: Shop, monkeypatch: pytest.MonkeyPatch, careless: bool) -> None:
    """Of another request; it even looks like accepted work of a worker."""
    if careless:
        monkeypatch.setattr(closing, "is_workers", lambda item: True)
    await shop.store.work.enqueue([WorkItem("x", "test.step", resource_class="router", payload=encode(work("x")))])
    await ran(shop, work("x"), wait=3)
    item = await stored(shop, "x")
    taken, left = ("cpu@w1", WorkState.SUCCEEDED, 1), ("router", WorkState.PENDING, 0)
    assert (item.resource_class, item.state, item.attempts) == (taken if careless else left)


async def test_work_that_another_worker_finishes_is_answered_by_both_alike(shop: Shop) -> None:
    step = Step(seconds=3)
    await shop.worker("w1", step)
    await shop.worker("w2", step)
    await shop.send(work("a"))
    await sent(shop, work("a"), wait=10, to="w2")
    assert len(step.began) == 1
    assert len(shop.results) >= 1
    assert len({encode(one) for one in shop.results}) == 1


async def test_work_requeued_from_quarantine_is_found_without_anybody_sending_it(shop: Shop) -> None:
    step = Step(DENIED)
    await ran(shop, step, wait=1, quarantine_failed=True)
    assert shop.result("a").error_code == "PERMISSION_DENIED"
    step.outcomes = (OK,)
    assert await shop.store.quarantine.requeue(WorkFilter(ids=("a",)), who="me") == ["a"]
    await asyncio.sleep(3)
    assert [one.status.value for one in shop.results] == ["error", "success"]
    assert step.contexts[-1].idempotency_key == "a/1"


async def test_work_that_expires_in_the_queue_says_so_without_waiting_for_a_slot(shop: Shop) -> None:
    step = Step(seconds=60)
    await ran(shop, step, work("a"), work("b", deadline_ms=2000), wait=4, concurrency=ONE)
    result = shop.result("b")
    assert (result.status, result.error_code, result.retries_used) == (ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT", 0)
    assert "not run" in (result.error_message or "")
    assert step.times("b") == []
    assert [event.work_id for event in await told(shop, TimeoutOccurred)] == ["b"]


async def test_a_retry_that_expires_in_the_queue_counts_only_the_attempts_that_were_made(shop: Shop) -> None:
    """It fails once; then another step has the only slot until the deadline is over."""
    step = Step(REFUSED, seconds=0)
    await shop.worker("w1", step, Step(seconds=60, name="own.long"), concurrency=ONE)
    await sent(shop, work("a", deadline_ms=3000, retry={"max_attempts": 5, "backoff_ms": 1000}), wait=0.1)
    await sent(shop, work("b", job="own.long"), wait=100)
    result = shop.result("a")
    assert (result.status, result.retries_used, len(step.times("a"))) == (ResultStatus.TIMEOUT, 0, 1)
    item = await stored(shop, "a")
    assert (item.attempts, item.reason) == (1, "expired while queued")
    (late,) = (one for one in await told(shop, TimeoutOccurred) if one.work_id == "a")
    assert (late.attempt_number, late.timeout_seconds) == (1, 3.0)
    assert [one.attempts for one in await told(shop, Completed) if one.work_id == "a"] == [1]


async def test_priorities_go_first_and_from_overloaded_on_the_newest(shop: Shop) -> None:
    step = Step(seconds=1)
    await shop.worker("w1", step, concurrency=ONE, rules=Rules(size=10))
    await shop.send(work("first"))
    await sent(shop, *(work(f"n{n}") for n in range(9)), work("urgent", priority="high"), wait=60)
    order = [name for name, _ in step.began]
    assert order[:3] == ["first", "urgent", "n8"], "8 of 10 are left behind urgent: the newest"
    assert order[3:] == [f"n{n}" for n in range(8)], "7 of 10: the oldest again"


async def test_a_heartbeat_tells_every_class_and_who_it_is(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=5))
    await shop.send(work("a"))
    beat = worker.heartbeat()
    assert (beat.worker_id, beat.incarnation[:3]) == ("w1", "w1#")
    slots = {name: (one.active, one.capacity) for name, one in beat.classes.items()}
    assert slots == {"cpu": (1, 4), "gpu": (0, 1), "io": (0, 8)}


async def test_the_snapshot_counts_what_retries_cost(shop: Shop) -> None:
    worker = await ran(shop, Step(REFUSED, REFUSED, OK), work("a"), work("b", retry_count=1), wait=10)
    counts = worker.snapshot().retries
    assert (counts.retries, counts.executions, counts.recovered, counts.given_up) == (3, 5, 1, 1)
    assert (counts.retries_by_code, counts.retries_by_block) == ({"NETWORK_ERROR": 3}, {"test.step": 3})
    assert counts.retry_success_rate == 0.5
    delays = [event.delay_seconds for event in await told(shop, events.RetryAttempt)]
    assert counts.mean_backoff_s == pytest.approx(sum(delays) / 3)


async def test_a_queue_that_fills_and_empties_is_told_to_routers_at_once_and_to_people_later(shop: Shop) -> None:
    """Three waves, each over within half a second, into a queue of two; people hear of what has lasted."""
    worker = await shop.worker("w1", Step(seconds=0.2), concurrency=ONE, rules=Rules(size=2))
    steering, seen = [], []
    for wave in range(3):
        await shop.send(*(work(f"{wave}-{number}") for number in range(3)))
        for _ in range(10):
            steering.append(worker.heartbeat().classes["cpu"].status)
            seen.append(worker.snapshot().classes["cpu"].status)
            await asyncio.sleep(0.1)
    assert steering.count(OverloadStatus.HEALTHY) > 10, "a router may send again at once"
    assert set(seen) == {OverloadStatus.CRITICAL}, "and no one reads the same change six times"
    for _ in range(8):
        await asyncio.sleep(1)
        seen.append(worker.snapshot().classes["cpu"].status)
    assert seen[-1] is OverloadStatus.HEALTHY, "it lasted"


async def test_the_oldest_of_a_worker_has_waited_as_long_as_the_store_says(shop: Shop) -> None:
    """Since it was requeued, for a job that was in quarantine for an hour."""
    worker = await ran(shop, Step(DENIED), wait=3600, quarantine_failed=True)
    worker.pause()
    assert await shop.store.quarantine.requeue(WorkFilter(ids=("a",)), who="me") == ["a"]
    item = await stored(shop, "a")
    pool = worker.pools["cpu"]
    pool.put(pool.queued(item))
    await asyncio.sleep(12)
    pool.put(pool.queued(item))  # as after a restart
    assert (await shop.store.work.snapshot()).oldest_due_ms / 1000 == 12
    assert worker.snapshot().classes["cpu"].oldest_age_s == pytest.approx(12, abs=0.01)


async def test_a_level_that_is_not_healthy_comes_with_its_reason_until_it_is_left(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=0.2), concurrency=ONE, rules=Rules(size=2))
    assert worker.level_reasons() == {}
    await shop.send(*(work(str(number)) for number in range(3)))
    assert worker.level_reasons() == {"cpu": "2 of 2 places in the queue are taken"}
    await asyncio.sleep(1)
    left = "0 of 2 places in the queue are taken; it was critical a moment ago"
    assert worker.level_reasons() == {"cpu": left}
    assert [await asyncio.sleep(1, worker.level_reasons()) for _ in range(9)][-1] == {}


RETRY = {"max_attempts": 3, "backoff_ms": 20_000}


async def jobs(shop: Shop, number: int) -> list[asyncio.Future[ExecResult]]:
    """So many jobs, half a second after they were submitted; the workers have been heard of before."""
    router = next((one for one in shop.members if isinstance(one, Router)), None) or await shop.router()
    await asyncio.sleep(2)
    futures = [await router.submit(work(f"j{n}")) for n in range(number)]
    await asyncio.sleep(0.5)
    return futures


async def two_workers_and_ten_jobs(shop: Shop) -> tuple[service.Worker, list[asyncio.Future[ExecResult]]]:
    """Each worker runs one at a time, 1.5 s each, and has four more queued."""
    await shop.router()
    first, _ = [await shop.worker(name, Step(seconds=1.5), concurrency=ONE) for name in ("w1", "w2")]
    return first, await jobs(shop, 10)


async def test_what_a_drained_worker_has_queued_is_done_by_the_others(shop: Shop) -> None:
    first, futures = await two_workers_and_ten_jobs(shop)
    assert first.pools["cpu"].queue.depth == 4
    assert await first.drain(30) == 0
    await asyncio.sleep(15)
    assert [one.result().status for one in futures] == [ResultStatus.SUCCESS] * 10
    assert {(await stored(shop, f"j{n}")).attempts for n in range(10)} == {1}
    known = [event.work_id for event in await told(shop, Requeued) if event.reason == "its worker is draining"]
    assert len(known) == len(set(known)) == 4


@pytest.mark.parametrize(("at_once", "events"), [(3, 4), (10, 0)], ids=["", "control: all in one write"])
async def test_a_worker_that_leaves_writes_no_more_events_at_once_than_a_log_takes(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, at_once: int, events: int
) -> None:
    append = MemoryAuditLog.append

    async def append_three(log: MemoryAuditLog, entries: Sequence[AuditEntry]) -> Head:
        if len(entries) > 3:
            raise StoreFullError("memory", "three events are the most", "make it in smaller parts")
        return await append(log, entries)

    monkeypatch.setattr(MemoryAuditLog, "append", append_three)
    monkeypatch.setattr(closing, "OFFERED_AT_ONCE", at_once)
    first, _ = await two_workers_and_ten_jobs(shop)
    await first.drain(30)
    assert len([event for event in await told(shop, Requeued) if event.reason == "its worker is draining"]) == events


async def test_a_worker_that_keeps_its_queue_would_be_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without offer and recall the same work never ends, while the other worker has nothing to do."""
    monkeypatch.setattr(closing.Drain, "offer", lambda self: asyncio.sleep(0, 0))
    monkeypatch.setattr(Router, "_recall_once", lambda self: asyncio.sleep(0))
    first, futures = await two_workers_and_ten_jobs(shop)
    await first.drain(30)
    await asyncio.sleep(60)
    assert sum(one.done() for one in futures) == 6


async def test_a_retry_that_waits_goes_over_with_its_due_time_and_its_attempts(shop: Shop) -> None:
    router = await shop.router()
    step = Step(REFUSED, OK)
    first = await shop.worker("w1", step)
    await asyncio.sleep(1.5)
    future = await router.submit(work("a", retry=RETRY, timeout_ms=100_000))
    await asyncio.sleep(1)
    before = await stored(shop, "a")
    assert (before.attempts, before.state) == (1, WorkState.PENDING)
    second = await shop.worker("w2", step)
    await asyncio.sleep(1.5)
    await first.drain(5)
    await asyncio.sleep(1)
    after = await stored(shop, "a")
    assert (after.attempts, after.due_at, after.resource_class) == (1, before.due_at, "cpu@w2")
    assert second.pools["cpu"].queue.later == 1
    assert (await future).retries_used == 1
    assert step.times("a")[1] * 1000 >= before.due_at - shop.clock.wall() * 1000 + shop.clock.now() * 1000 - 1


@pytest.mark.parametrize("comes_back", ["restart", "resume"])
async def test_without_another_worker_it_is_there_when_the_worker_comes_back(shop: Shop, comes_back: str) -> None:
    await shop.router()
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    futures = await jobs(shop, 4)
    await worker.drain(30)
    await asyncio.sleep(20)
    assert (sum(one.done() for one in futures), worker.pools["cpu"].depth()) == (1, 0)
    if comes_back == "resume":
        worker.resume()
    else:
        await worker.stop()
        shop.members.remove(worker)
        await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await asyncio.sleep(4)
    assert [one.result().status for one in futures] == [ResultStatus.SUCCESS] * 4


async def test_the_baseline_says_nothing_and_the_router_brings_its_queue_back(shop: Shop) -> None:
    """A rejected ack without a reason would end the work: the baseline has no word for it."""
    await shop.router()
    first = await shop.worker("w1", Step(seconds=1), concurrency=ONE, queue_v2=False)
    futures = await jobs(shop, 3)
    assert [(await stored(shop, f"j{n}")).resource_class for n in range(3)] == ["cpu@w1"] * 3
    await shop.worker("w2", Step(seconds=1), concurrency=ONE, queue_v2=False)
    await first.drain(10)
    await asyncio.sleep(15)
    assert [one.result().status for one in futures] == [ResultStatus.SUCCESS] * 3
    assert {ack.status for ack in shop.acks} == {AckStatus.ACCEPTED}
    assert [(await stored(shop, f"j{n}")).resource_class for n in (1, 2)] == ["cpu@w2"] * 2


async def test_only_a_worker_with_room_takes_over_what_was_left(shop: Shop) -> None:
    first = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    second = await shop.worker("w2", Step(seconds=100), concurrency=ONE, rules=Rules(size=2))
    await shop.send(*(work(f"j{n}") for n in range(4)))
    await first.drain(10)
    await shop.send(*(work(name) for name in ("b", "c")), to="w2")
    await shop.send(work("j1"), to="w2")
    assert ((await stored(shop, "j1")).resource_class, second.pools["cpu"].depth()) == ("cpu@w2", 2)
    await shop.send(work("j2"), to="w2")
    assert (shop.ack("j2").status, shop.ack("j2").reason) == ("rejected", "queue_full")
    assert (await stored(shop, "j2")).resource_class == "cpu@w1"


async def test_a_drained_worker_does_not_take_its_own_queue_back_when_it_is_asked(shop: Shop) -> None:
    """The router did not hear that it was given up, and asks again."""
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await shop.send(work("a"), work("b"))
    await worker.drain(10)
    await shop.send(work("b"))
    assert (shop.ack("b").status, shop.ack("b").reason) == (AckStatus.REJECTED, "draining")
    await shop.send(work("a"))
    assert shop.ack("a").status is AckStatus.ACCEPTED
    assert [one.assignment_id for one in shop.results] == ["a", "a"]


async def test_what_comes_in_or_fails_while_it_drains_is_left_to_the_others_too(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(REFUSED, seconds=1), concurrency=ONE)
    await sent(shop, work("a", retry=RETRY, timeout_ms=100_000), wait=0.5)
    await worker.drain(30)
    assert (shop.ack("a").status, shop.ack("a").reason) == (AckStatus.REJECTED, "draining")
    assert ((await stored(shop, "a")).attempts, worker.pools["cpu"].queue.depth) == (1, 0)


async def test_a_pause_keeps_every_place_and_counts_all_of_them(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await shop.send(work("a"), work("b"), work("c"))
    worker.pause()
    await asyncio.sleep(5)
    assert ([one.assignment_id for one in shop.results], worker.pools["cpu"].depth()) == (["a"], 2)
    assert {ack.status for ack in shop.acks} == {AckStatus.ACCEPTED}
    assert not worker.snapshot().leaving


async def test_what_was_claimed_ahead_goes_back_before_the_running_step_ends(shop: Shop) -> None:
    worker = await ran(shop, Step(seconds=0.0001), *(work(f"j{n}") for n in range(30)), wait=1, concurrency=ONE)
    assert worker.pools["cpu"].ahead() > 0
    await shop.send(work("long", {"seconds": 5}), work("b"), work("c"))
    assert len(worker.pools["cpu"].prefetched) > 0
    draining = asyncio.create_task(worker.drain(30))
    await asyncio.sleep(1)
    for name in ("b", "c"):
        assert shop.ack(name).reason == "draining"
        item = await stored(shop, name)
        assert (item.state, item.attempts) == (WorkState.PENDING, 0)
    await draining
    assert shop.result("long").status is ResultStatus.SUCCESS


async def test_a_store_that_does_not_answer_holds_no_drain_up_for_ever(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    await shop.send(work("a"), work("b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.store.work, "search", lambda *_, **__: asyncio.sleep(1e6))
        began = shop.clock.now()
        await worker.drain(5)
        assert shop.clock.now() - began < 65
    worker.resume()
    await asyncio.sleep(3)
    assert shop.result("b").status is ResultStatus.SUCCESS
