"""Work that a worker had accepted, and that is gone: somebody does it, or its caller hears why not."""

import asyncio
from typing import Any

import pytest

from reefknot.audit.model.event import Requeued, TimeoutOccurred
from reefknot.errors import ResultPendingError
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ExecResult, ResultStatus
from reefknot.queue.model.results import EXPIRED_MESSAGE, OVERDUE_MESSAGE, answer_of
from reefknot.queue.router.service import Router
from tests.unit.queue.shops import ONE, served, stored, told
from tests.workshop import Shop, Step, work

LONG: dict[str, Any] = {"timeout_ms": 10_000_000}


async def accepted_and_gone(shop: Shop, *, router_too: bool, queued: bool = False, **options: Any) -> Router:
    """`a` is with a worker that vanishes, in its slot or in its queue; perhaps its router does, too."""
    first = await shop.router("first")
    worker = await shop.worker("w1", Step(seconds=600), concurrency=ONE)
    await asyncio.sleep(1.1)
    if queued:
        await first.submit(work("before", **LONG))
        await asyncio.sleep(0.1)
    await first.submit(work("a", **options))
    await asyncio.sleep(1)
    shop.vanish(worker)
    if not router_too:
        return first
    shop.vanish(first)
    await asyncio.sleep(1)
    return await shop.router("second")


async def result(shop: Shop, within: float, **options: Any) -> ExecResult:
    return await (await Client(shop.store, shop.clock).hand_in(work("a", **options))).result(within)


@pytest.mark.parametrize("router_too", [False, True])
@pytest.mark.parametrize("queued", [False, True])
async def test_another_worker_does_it(shop: Shop, router_too: bool, queued: bool) -> None:
    await accepted_and_gone(shop, router_too=router_too, queued=queued, **LONG)
    step = Step()
    await shop.worker("w2", step)
    assert (await result(shop, 200, **LONG)).worker_id == "w2"
    assert len(step.times("a")) == 1
    requeued = [one for one in await told(shop, Requeued) if one.work_id == "a"]
    assert ("its worker is gone" in [one.reason for one in requeued]) is not router_too
    assert {one.generation for one in requeued} <= {0}, "no person has run it again"


SECOND = 1.0
BY = 4.0
"""The deadline of the tests below, in seconds."""
WHO = ["its worker", "its router", "both"]


async def answered_after(shop: Shop, who: str, *, queued: bool = False) -> tuple[ExecResult, float]:
    """`a` has a deadline of 4 s, and these vanish while a worker has it. Its result, and when the client gets it."""
    router = await shop.router("first")
    worker = await shop.worker("w1", Step(seconds=600), concurrency=ONE)
    await asyncio.sleep(1.1)
    client = Client(shop.store, shop.clock)
    if queued:
        await client.hand_in(work("before", **LONG))
        await asyncio.sleep(0.1)
    began = shop.clock.now()
    handle = await client.hand_in(work("a", deadline_ms=int(BY * 1000)))
    await asyncio.sleep(1)
    for member, gone in ((worker, ("its worker", "both")), (router, ("its router", "both"))):
        if who in gone:
            shop.vanish(member)
    return await handle.result(), shop.clock.now() - began


@pytest.mark.parametrize("who", [*WHO, "nobody"])
@pytest.mark.parametrize("queued", [False, True])
async def test_a_deadline_is_answered_within_a_second_whoever_is_gone(shop: Shop, who: str, queued: bool) -> None:
    found, took = await answered_after(shop, who, queued=queued)
    assert (found.status, found.error_code) == (ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT")
    assert BY - 0.01 <= took <= BY + SECOND
    assert answer_of(await stored(shop, "a")) == found, "everybody hears the same"
    assert len(await shop.events(TimeoutOccurred)) == 1


@pytest.mark.parametrize("who", ["its worker", "both"])
async def test_those_who_only_wait_would_be_caught(shop: Shop, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.queue.router.dispatch.LATE_S", 30.0)
    monkeypatch.setattr("reefknot.queue.router.submissions.CALLER_LATE_S", 30.0)
    with pytest.raises(ResultPendingError):
        await answered_after(shop, who)


async def test_the_router_ends_what_a_worker_that_is_gone_had_and_no_client_asks_for(shop: Shop) -> None:
    router = await served(shop, Step(seconds=600), wait=1.1)
    began = shop.clock.now()
    future = await router.submit(work("a", deadline_ms=4000))
    await asyncio.sleep(1)
    shop.vanish(shop.members[-1])
    found = await future
    assert (found.status, found.error_message) == (ResultStatus.TIMEOUT, OVERDUE_MESSAGE)
    assert BY - 0.01 <= shop.clock.now() - began <= BY + SECOND


async def test_a_caller_without_a_router_hears_that_nobody_took_it(shop: Shop) -> None:
    began = shop.clock.now()
    handle = await Client(shop.store, shop.clock).hand_in(work("a", deadline_ms=4000))
    assert (await handle.result(100)).error_message == EXPIRED_MESSAGE
    assert shop.clock.now() - began <= BY + SECOND
    with pytest.raises(ResultPendingError):
        await (await Client(shop.store, shop.clock).hand_in(work("b", deadline_ms=4000))).result(2)


@pytest.mark.parametrize("router_too", [False, True])
@pytest.mark.parametrize("waited", [1, 40, 100])
async def test_it_can_be_cancelled(shop: Shop, router_too: bool, waited: float) -> None:
    await accepted_and_gone(shop, router_too=router_too, **LONG)
    await asyncio.sleep(waited)
    await Client(shop.store, shop.clock).cancel("a", "enough")
    found = await result(shop, 200, **LONG)
    assert (found.status, found.error_message) == (ResultStatus.CANCELLED, "enough")
