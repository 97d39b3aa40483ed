"""A worker whose store fails says so in the documents' words, at once, and the work goes elsewhere."""

import asyncio
from typing import Any

import pytest

from reefknot.audit.model.event import Admission
from reefknot.errors import StoreFullError, StoreUnavailableError
from reefknot.queue.model.admission import OverloadStatus, RejectionPolicy, Rules
from reefknot.queue.model.messages import AckStatus, ExecAssignmentAck, ResultStatus
from reefknot.queue.worker.intake import Intake
from tests.unit.queue.shops import broken, sent, told
from tests.workshop import Shop, Step, work

ONE = {"cpu": 1}
AWAY = StoreUnavailableError("of work", "it is away", "wait")


@pytest.mark.parametrize("error", [AWAY, TimeoutError(), StoreFullError("of work", "it is full", "make room")])
async def test_work_that_cannot_be_kept_is_refused_with_a_time_to_come_back(shop: Shop, error: Exception) -> None:
    worker = await shop.worker("w1")
    broken(shop, "assign", error)
    await shop.send(work("a"))
    message, healthy = "Failed to queue assignment", OverloadStatus.HEALTHY
    refused = ExecAssignmentAck("a", AckStatus.REJECTED, message, healthy, 0, "w1", "overloaded", 1000)
    assert shop.ack("a") == refused
    assert worker.pools["cpu"].reserved == 0
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
    assert shop.ack("new").message == "Failed to queue assignment"
    assert worker.pools["cpu"].depth() == 2
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
    assert {one.status for one in results} == {ResultStatus.SUCCESS}
    assert {one.worker_id for one in results} == {"w2"}
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
    assert {one.status for one in shop.results} == {ResultStatus.SUCCESS}
    assert worker.pools["cpu"].depth() == 0
