"""Intake: acks word for word, refusals with reasons, what a full queue drops, and arrivals in bursts."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reefknot.audit.journal import Journal
from reefknot.audit.model.event import Admission, Dropped
from reefknot.errors import StoreFullError, StoreUnavailableError
from reefknot.queue.model import messages
from reefknot.queue.model.admission import Oldest, OverloadStatus, RejectionPolicy, Rules
from reefknot.queue.model.messages import ACK, RESULT, AckStatus, ExecAssignmentAck, ResultStatus, encode
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.port.work_queue import Enqueue, Enqueued
from reefknot.queue.router.submissions import Submissions
from reefknot.queue.worker.intake import Intake
from reefknot.queue.worker.pool import BoundedQueue
from tests.unit.queue.shops import ONE, broken, ran, sent, stored, told
from tests.workshop import REFUSED, Shop, Step, with_shop, work


async def busy(shop: Shop, size: int, waiting: int, **changes: Any) -> Any:
    """A worker whose one slot is taken and with so many waiting."""
    changes = {"rules": Rules(size=size), "concurrency": ONE, **changes}
    worker = await shop.worker("w1", Step(seconds=1000), **changes)
    await shop.send(work("run"))
    await shop.send(*(work(f"q{n}") for n in range(waiting)))
    return worker


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (RejectionPolicy.REJECT_NEW, "Queue full, rejecting assignment"),
        (RejectionPolicy.DEFER, "Queue at capacity, cannot defer"),
        (RejectionPolicy.DEGRADE, "Queue at capacity, cannot degrade"),
    ],
)
async def test_a_full_queue_refuses_with_reason_and_time(shop: Shop, policy: RejectionPolicy, message: str) -> None:
    await busy(shop, 3, 3, rules=Rules(size=3, policy=policy))
    await shop.send(work("late"))
    level = OverloadStatus.CRITICAL
    refused = ExecAssignmentAck("late", AckStatus.REJECTED, message, level, 3, "w1", "queue_full", 1000)
    assert shop.ack("late") == refused
    assert await shop.store.work.get("late") is None
    events = [event for event in await told(shop, Admission) if event.work_id == "late"]
    assert [(event.status, event.reason) for event in events] == [("rejected", "queue_full")]


async def test_deferred_work_takes_a_place_and_runs_when_its_time_comes(shop: Shop) -> None:
    """750 of 1000: 15 s."""
    pool = (await busy(shop, 1000, 0, rules=Rules(size=1000, policy=RejectionPolicy.DEFER))).pools["cpu"]
    pool.depth = lambda: 750
    await shop.send(work("d"))
    assert shop.ack("d").message == "Assignment deferred for 15000ms"
    assert (await stored(shop, "d")).due_at / 1000 - shop.clock.wall() == pytest.approx(15, abs=0.01)
    assert (pool.queue.depth, pool.queue.ready) == (1, 0)


async def test_work_that_would_miss_its_deadline_is_refused_once_service_times_are_known(shop: Shop) -> None:
    await ran(shop, Step(), *(work(f"known{n}", {"seconds": 1}) for n in range(20)), wait=30, concurrency=ONE)
    await shop.send(*(work(f"q{n}", {"seconds": 100}) for n in range(11)))
    await shop.send(work("late", deadline_ms=15_000), work("fine", deadline_ms=60_000))
    late = shop.ack("late")
    assert (late.reason, late.overload_status) == ("would_miss_deadline", OverloadStatus.HEALTHY), "that is by depth"
    assert shop.ack("fine").status is AckStatus.ACCEPTED


@pytest.mark.parametrize(
    ("body", "status", "reason", "words"),
    [
        (b"not json", "error", "invalid", "not JSON"),
        (b'{"assignment_id":"a"}', "rejected", "invalid", "request_id: missing"),
        (encode(work("a", deadline_ms=0)), "rejected", "invalid", "options.deadline_ms: 0"),
        (encode(work("a", job="none.such")), "rejected", "unknown_job_type", "known: test.step"),
        (encode(work("a")).replace(b'"type"', b'"payload_ref":"s3://x","type"'), "rejected", "invalid", "payload_ref"),
        (encode(work("a")).replace(b'"job"', b'"resource_class":"tpu","job"'), "rejected", "invalid", "'tpu'"),
        (b'{"assignment_id":"a","p":"' + b"x" * 10_000_000 + b'"}', "rejected", "invalid", "at most 1048576"),
    ],
)
async def test_bad_input_gets_an_answer_that_names_the_field_and_the_worker_goes_on(
    shop: Shop, body: bytes, status: str, reason: str, words: str
) -> None:
    await shop.worker("w1", Step())
    await sent(shop, body, work("good"), wait=1)
    bad = shop.acks[0]
    assert (bad.status.value, bad.reason) == (status, reason)
    assert words in (bad.message or "")
    assert (bad.overload_status, bad.queue_depth) == (OverloadStatus.HEALTHY, 0), "in version 2 they are always sent"
    assert shop.result("good").status is ResultStatus.SUCCESS
    assert reason in [event.reason for event in await told(shop, Admission)]


async def test_a_store_that_fails_means_no_ack_and_no_place(shop: Shop) -> None:
    worker = await shop.worker("w1", Step())
    broken(shop, "assign", OSError("disk"))
    await shop.send(work("a"))
    assert (shop.acks, worker.pools["cpu"].reserved, worker.pools["cpu"].depth()) == ([], 0, 0)
    await shop.send(work("a"))
    assert shop.ack("a").status is AckStatus.ACCEPTED


@pytest.mark.parametrize("when", ["queued", "running", "ended", "refused by a full queue"])
async def test_the_same_id_with_another_job_is_invalid_and_with_the_same_accepted(shop: Shop, when: str) -> None:
    step = Step(seconds=2)
    await shop.worker("w1", step, concurrency=ONE, rules=Rules(size=2))
    await shop.send(*([work("first")] if when == "queued" else []), work("a", {"n": 1}))
    if when == "ended":
        await asyncio.sleep(10)
    if when == "refused by a full queue":
        await shop.send(*(work(f"b{n}") for n in range(9)))
    await sent(shop, work("a", {"n": 2}), wait=0.01)
    ack = shop.ack("a")
    assert (ack.status, ack.reason) == (AckStatus.REJECTED, "invalid")
    assert (ack.message or "").startswith("assignment_id: it was used with another job")
    await sent(shop, work("a", {"n": 1}, priority=5), wait=0.01)
    assert shop.ack("a").status is AckStatus.ACCEPTED
    await asyncio.sleep(60)
    assert {one.status for one in shop.results if one.assignment_id == "a"} == {ResultStatus.SUCCESS}
    assert len(step.times("a")) == 1


async def test_what_is_here_is_accepted_again_while_the_store_is_away(shop: Shop) -> None:
    await shop.worker("w1", Step(seconds=5))
    await shop.send(work("a"))
    left = broken(shop, "get", *[StoreUnavailableError("it", "is away", "wait")] * 9)
    await shop.send(work("a"))
    left.clear()
    assert [one.status for one in shop.acks] == [AckStatus.ACCEPTED] * 2


async def test_the_baseline_has_no_bound_and_not_one_new_field(shop: Shop) -> None:
    heard = shop.heard(ACK, RESULT)
    await shop.worker("w1", Step(seconds=0.1), concurrency=ONE, rules=Rules(size=2), queue_v2=False)
    await sent(shop, *(work(f"a{n}") for n in range(50)), b"x", work("b", job="none"), wait=60)
    fields = {name for body in heard for name in json.loads(body)}
    assert fields == {
        *("assignment_id", "status", "message"),
        *("request_id", "provider_id", "job", "latency_ms", "cost", "timestamp", "retries_used", "output"),
    }
    assert (sum(one.status is AckStatus.ACCEPTED for one in shop.acks), len(shop.results)) == (50, 50)
    assert [one.assignment_id for one in shop.results] == [f"a{n}" for n in range(50)], "oldest first, always"


async def test_the_baselines_heartbeat_does_not_tell_how_full_it_is(shop: Shop) -> None:
    said = (await busy(shop, 2, 50, queue_v2=False)).heartbeat().classes["cpu"]
    assert (said.status, said.queue_depth, said.active) == (OverloadStatus.HEALTHY, 0, 1)


RETRY = {"max_attempts": 3, "backoff_ms": 20_000}


async def a_retry_and_younger_work(shop: Shop, **rules: Any) -> None:
    """`old` failed once and waits for its retry; `a` and `b` came after it; the queue is full."""
    chosen = Rules(size=3, policy=RejectionPolicy.DROP_OLDEST, **rules)
    await ran(shop, Step(REFUSED), work("old", retry=RETRY, timeout_ms=100_000), wait=1, concurrency=ONE, rules=chosen)
    await shop.send(work("running", {"seconds": 60}, timeout_ms=100_000))
    await sent(shop, work("a"), work("b"), wait=1)


async def test_work_that_waits_for_its_retry_is_dropped_before_younger_work_with_its_event(shop: Shop) -> None:
    await a_retry_and_younger_work(shop)
    await shop.send(work("new"))
    assert shop.ack("new").message == "Assignment queued (dropped oldest)"
    (ack,) = (one for one in shop.acks if one.reason == "dropped_oldest")
    assert (ack.assignment_id, ack.status, ack.worker_id) == ("old", AckStatus.REJECTED, "w1")
    result = shop.result("old")
    assert (result.status, result.error_code, result.request_id) == (ResultStatus.ERROR, "SYSTEM_OVERLOAD", "r-old")
    assert (result.overload_status, result.queue_depth) == (OverloadStatus.CRITICAL, 0)
    (event,) = await told(shop, Dropped)
    assert (event.work_id, event.correlation_id, event.resource_class) == ("old", "r-old", "cpu")


async def test_a_queue_that_looks_at_its_line_alone_is_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the first in the line is younger than the one that waits for its retry."""

    def first_in_line(self: BoundedQueue, now: float) -> Oldest | None:
        first = next(iter(self._ready.values()), None)
        return None if first is None else Oldest(first.id, first.priority, int((now - first.since) * 1000))

    monkeypatch.setattr(BoundedQueue, "oldest", first_in_line)
    await a_retry_and_younger_work(shop)
    await shop.send(work("new"))
    assert [ack.assignment_id for ack in shop.acks if ack.reason == "dropped_oldest"] == ["a"]


async def test_the_oldest_is_protected_by_its_age_wherever_it_waits(shop: Shop) -> None:
    await a_retry_and_younger_work(shop, max_drop_age_ms=1500)
    await shop.send(work("new"))
    assert (shop.ack("new").status, shop.ack("new").reason) == ("rejected", "queue_full")
    assert not [ack for ack in shop.acks if ack.reason == "dropped_oldest"]


AWAY = StoreUnavailableError("of work", "it is away", "wait")


@pytest.mark.parametrize("error", [AWAY, TimeoutError(), StoreFullError("of work", "it is full", "make room")])
async def test_work_that_cannot_be_kept_is_refused_with_a_time_to_come_back(shop: Shop, error: Exception) -> None:
    worker = await shop.worker("w1")
    broken(shop, "assign", error)
    await shop.send(work("a"))
    message, healthy = "Failed to queue assignment", OverloadStatus.HEALTHY
    refused = ExecAssignmentAck("a", AckStatus.REJECTED, message, healthy, 0, "w1", "overloaded", 1000)
    assert (shop.ack("a"), worker.pools["cpu"].reserved) == (refused, 0)
    assert [one.status for one in await told(shop, Admission) if one.work_id == "a"] == ["rejected"]
    await shop.send(work("a"))
    assert shop.ack("a").status is AckStatus.ACCEPTED


@pytest.mark.parametrize(
    ("policy", "queued", "said"),
    [
        (RejectionPolicy.REJECT_NEW, 6, "Failed to queue assignment"),
        (RejectionPolicy.DEFER, 6, "Failed to queue deferred assignment"),
        (RejectionPolicy.DEGRADE, 6, "Failed to queue degraded assignment"),
        (RejectionPolicy.DROP_OLDEST, 10, "Failed to queue assignment after dropping oldest"),
    ],
)
async def test_each_policy_has_words_of_its_own(shop: Shop, policy: RejectionPolicy, queued: int, said: str) -> None:
    await shop.worker("w1", Step(seconds=60), concurrency=ONE, rules=Rules(size=10, policy=policy))
    await shop.send(work("running"))
    await shop.send(*(work(f"j{n}") for n in range(queued)))
    broken(shop, "assign", AWAY)
    await shop.send(work("new"))
    assert (shop.ack("new").status, shop.ack("new").message) == (AckStatus.REJECTED, said)
    dropped = [ack.assignment_id for ack in shop.acks if ack.reason == "dropped_oldest"]
    assert dropped == (["j0"] if policy is RejectionPolicy.DROP_OLDEST else [])


async def test_a_victim_that_could_not_be_dropped_keeps_its_place(shop: Shop) -> None:
    rules = Rules(size=2, policy=RejectionPolicy.DROP_OLDEST)
    worker = await shop.worker("w1", Step(seconds=1), concurrency=ONE, rules=rules)
    await shop.send(work("running"), work("a"), work("b"))
    broken(shop, "cancel", AWAY)
    await shop.send(work("new"))
    assert (shop.ack("new").message, worker.pools["cpu"].depth()) == ("Failed to queue assignment", 2)
    await asyncio.sleep(5)
    assert sorted(one.assignment_id for one in shop.results) == ["a", "b", "running"]


async def test_when_the_store_is_away_a_whole_group_is_answered_and_goes_to_another_worker(shop: Shop) -> None:
    router = await shop.router()
    worker = await shop.worker("w1", Step())
    await asyncio.sleep(1.5)

    class Away:
        async def assign(self, *given: Any, **named: Any) -> Any:
            raise AWAY

        def __getattr__(self, name: str) -> Any:
            return getattr(shop.store.work, name)

    shop.use_queue(worker, Away())
    futures = [await router.submit(work(f"j{n}")) for n in range(5)]
    await shop.worker("w2", Step())
    began = shop.clock.now()
    results = await asyncio.gather(*futures)
    assert ({one.status for one in results}, {one.worker_id for one in results}) == ({ResultStatus.SUCCESS}, {"w2"})
    assert shop.clock.now() - began < 5, "nobody waits ten seconds for an ack that does not come"


async def test_a_worker_that_says_nothing_would_be_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the refusal no ack comes at all."""

    def says_nothing(self: Intake, *given: Any) -> Any:
        raise AWAY

    monkeypatch.setattr(Intake, "_not_kept", says_nothing)
    await shop.worker("w1")
    broken(shop, "assign", AWAY)
    await shop.send(work("a"))
    assert shop.acks == []


async def test_the_baseline_refuses_nothing_and_is_asked_again(shop: Shop) -> None:
    await shop.worker("w1", queue_v2=False)
    broken(shop, "assign", AWAY)
    await shop.send(work("a"))
    assert shop.acks == []
    await shop.send(work("a"))
    assert [ack.status for ack in shop.acks] == [AckStatus.ACCEPTED]


async def test_work_that_the_store_kept_although_it_failed_is_run_once(shop: Shop) -> None:
    """The write was done, only its answer was lost."""
    step = Step()
    worker = await shop.worker("w1", step)
    await asyncio.sleep(1)
    real = shop.store.work.assign

    async def keeps_and_fails(*given: Any, **named: Any) -> Any:
        shop.store.work.assign = real  # type: ignore[method-assign]
        await real(*given, **named)
        raise AWAY

    shop.store.work.assign = keeps_and_fails  # type: ignore[method-assign]
    await shop.send(work("a"))
    assert shop.ack("a").status is AckStatus.REJECTED
    await sent(shop, work("a"), wait=3)
    assert (len(step.began), shop.ack("a").status) == (1, AckStatus.ACCEPTED)
    assert ({one.status for one in shop.results}, worker.pools["cpu"].depth()) == ({ResultStatus.SUCCESS}, 0)


WAYS = ("shared", "own")
Burst = list[tuple[int, int]]
"""Priorities, and milliseconds before the next one."""
bursts = st.lists(st.tuples(st.sampled_from([0, 0, 0, -10, 10]), st.sampled_from([0, 0, 0, 1, 3, 30])), max_size=25)


class Slow:
    """A store's queue whose every call takes a moment, as that of a server does; the write of `late` takes longer."""

    def __init__(self, queue: Any, late: str = "") -> None:
        self._queue = queue
        self._late = late

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._queue, name)

        async def slowly(*given: Any, **named: Any) -> Any:
            is_late = name == "assign" and any(item.assignment_id == self._late for item in given[0])
            await asyncio.sleep(0.05 if is_late else 0.004)
            return await found(*given, **named)

        return slowly if name in ("assign", "get", "cancel") else found


class Seen:
    """What a burst has come to."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.accepted: list[str] = []
        self.rejected: list[str] = []
        self.dropped: list[str] = []


def after(burst: Burst, way: str, rules: Rules, *, slots: int = 1, late: str = "") -> Seen:
    """Send a burst to a worker whose slots are all taken, and look at every ack."""
    seen = Seen()

    async def story(shop: Shop) -> None:
        worker = await shop.worker("w1", Step(seconds=3600), rules=rules, concurrency={"cpu": slots})
        pool = worker.pools["cpu"]
        shop.use_queue(worker, Slow(shop.store.work, late))
        await sent(shop, *(work(f"runs-{n}") for n in range(slots)), wait=1)
        assert pool.active == slots
        release = pool.release

        def looked(priority: int) -> None:
            seen.depths.append(pool.depth())
            release(priority)

        pool.release = looked  # type: ignore[method-assign]
        submissions = Submissions(shop.store.work, shop.clock, rules=SubmissionRules(1000), journal=Journal(None))
        for number, (priority, pause) in enumerate(burst):
            one = work(f"a{number}", priority=priority)
            if way == "own":
                item = submissions.item(one, encode(one))
                assert await shop.store.work.enqueue([item], Enqueue(owner="router")) == [Enqueued.ACCEPTED]
            await shop.transport.publish(messages.assign_subject("w1"), encode(one))
            await asyncio.sleep(pause / 1000)
        await asyncio.sleep(2)
        assert pool.reserved == 0
        assert not pool.entering
        acks = [ack for ack in shop.acks if not ack.assignment_id.startswith("runs")]
        seen.depths += [pool.depth(), *(ack.queue_depth for ack in acks if isinstance(ack.queue_depth, int))]
        seen.dropped = [event.work_id or "" for event in await shop.events(Dropped)]
        first: dict[str, Any] = {}
        for ack in acks:
            first.setdefault(ack.assignment_id, ack)
        seen.accepted = [name for name, ack in first.items() if ack.status is AckStatus.ACCEPTED]
        seen.rejected = [name for name, ack in first.items() if ack.status is AckStatus.REJECTED]
        assert {*pool.queue._ready, *pool.queue._later} == set(seen.accepted) - set(seen.dropped)
        assert {one.assignment_id for one in shop.results} == set(seen.dropped)

    with_shop(story)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_ten_at_once_at_a_queue_of_three_that_drops_the_oldest_drop_seven_and_reject_none(way: str) -> None:
    seen = after([(0, 0)] * 10, way, Rules(size=3, policy=RejectionPolicy.DROP_OLDEST))
    assert (len(seen.accepted), seen.rejected, len(seen.dropped)) == (10, [], 7)
    assert seen.dropped == [f"a{n}" for n in range(7)]
    assert max(seen.depths) == 3


def test_an_arrival_is_as_old_as_its_admission_however_long_its_write_takes() -> None:
    burst, rules = [(0, 15)] * 6 + [(0, 60), (0, 0)], Rules(size=3, policy=RejectionPolicy.DROP_OLDEST)
    seen = after(burst, "shared", rules, late="a4")
    assert seen.dropped == [f"a{n}" for n in range(5)], "a4 was admitted before a5, and written after it"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", list(RejectionPolicy))
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(burst=bursts, size=st.integers(1, 4))
def test_depth_and_policy_hold_for_any_burst(way: str, policy: RejectionPolicy, burst: Burst, size: int) -> None:
    seen = after(burst, way, Rules(size=size, policy=policy))
    assert max(seen.depths) <= size
    assert len(seen.accepted) + len(seen.rejected) == len(burst)
    assert len(seen.accepted) - len(seen.dropped) == min(size, len(burst)), "no place stays empty while one is refused"
    priorities = {f"a{number}": priority for number, (priority, _) in enumerate(burst)}
    kept = [priorities[name] for name in set(seen.accepted) - set(seen.dropped)]
    gone = [priorities[name] for name in [*seen.dropped, *seen.rejected]]
    assert not gone or max(gone) <= min(kept), "what matters more has the place"


def test_control_a_pool_that_does_not_wait_for_what_is_being_written_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.queue.worker.admission._makes_room_later", lambda pool, arrival: False)
    assert after([(0, 0)] * 10, "shared", Rules(size=3, policy=RejectionPolicy.DROP_OLDEST)).rejected
