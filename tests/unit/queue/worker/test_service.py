"""A worker's life: cancelled, drained, restarted, crashed, taken over, expired, and what it says meanwhile."""

import asyncio

import msgspec
import pytest

from reefknot.audit.model import event as events
from reefknot.audit.model.event import Completed, TimeoutOccurred
from reefknot.errors import ParameterError
from reefknot.queue.model.admission import OverloadStatus, Rules
from reefknot.queue.model.messages import CANCEL, Cancel, ResultStatus, encode
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import QuarantineFilter
from reefknot.queue.worker import closing
from tests.unit.queue.shops import ran, sent, stored, told
from tests.workshop import DENIED, OK, REFUSED, Shop, Step, work

ONE = {"cpu": 1}


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
    assert (result.status, result.retries_used) == (ResultStatus.CANCELLED, 0)
    assert len(step.began) == 1


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
    second = await shop.worker("w1", step)
    assert second.pools["cpu"].queue.depth == 1
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
    assert sorted(one.assignment_id for one in shop.results) == ["a", "b"]
    assert worker.pools["cpu"].depth() == 0


async def test_work_that_a_gone_worker_left_waiting_is_taken_over_by_the_one_that_is_sent_it(shop: Shop) -> None:
    step = Step(seconds=1)
    shop.vanish(await ran(shop, step, work("a"), work("b"), wait=0.1, concurrency=ONE, lease=4))
    await shop.worker("w2", step, concurrency=ONE, lease=4)
    await sent(shop, work("a"), work("b"), wait=20, to="w2")
    assert {one.assignment_id: one.worker_id for one in shop.results} == {"a": "w2", "b": "w2"}
    assert len(step.times("b")) == 1


@pytest.mark.parametrize("careless", [False, True], ids=["left alone", "control: a worker that takes all it finds"])
async def test_a_submission_is_never_taken_for_left_work(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, careless: bool
) -> None:
    """Of another request; it even looks like accepted work of a worker."""
    if careless:
        monkeypatch.setattr(closing, "is_workers", lambda item: True)
    await shop.store.work.enqueue([WorkItem("x", "test.step", resource_class="router", payload=encode(work("x")))])
    await shop.worker("w1")
    await sent(shop, work("x"), wait=3)
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
    assert await shop.store.quarantine.requeue(QuarantineFilter(ids=("a",)), who="me") == ["a"]
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
    assert await shop.store.quarantine.requeue(QuarantineFilter(ids=("a",)), who="me") == ["a"]
    item = await stored(shop, "a")
    pool = worker.pools["cpu"]
    pool.put(pool.queued(item))
    await asyncio.sleep(12)
    pool.put(pool.queued(item))  # as after a restart
    oldest = (await shop.store.work.snapshot()).oldest_due_ms / 1000
    assert oldest == 12
    assert worker.snapshot().classes["cpu"].oldest_age_s == pytest.approx(12, abs=0.01)


async def test_a_level_that_is_not_healthy_comes_with_its_reason_until_it_is_left(shop: Shop) -> None:
    worker = await shop.worker("w1", Step(seconds=0.2), concurrency=ONE, rules=Rules(size=2))
    assert worker.level_reasons() == {}
    await shop.send(*(work(str(number)) for number in range(3)))
    assert worker.level_reasons() == {"cpu": "2 of 2 places in the queue are taken"}
    await asyncio.sleep(1)
    left = "0 of 2 places in the queue are taken; it was critical a moment ago"
    assert worker.level_reasons() == {"cpu": left}
    seen = [await asyncio.sleep(1, worker.level_reasons()) for _ in range(9)]
    assert seen[-1] == {}
