"""One id at several tenants: each has its own work and its own result, and learns nothing of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import structs

from reefknot.errors import KeyConflictError
from reefknot.queue import client
from reefknot.queue.client import Client
from reefknot.queue.model import messages
from reefknot.queue.model.admission import RejectionPolicy, Rules
from reefknot.queue.model.messages import ExecAssignment, ExecResult, ResultJob, ResultStatus, StepResult, encode
from reefknot.queue.router.completion import Acknowledge
from reefknot.queue.router.inbox import Inbox
from tests.unit.queue.shops import answers, sent, served
from tests.workshop import Shop, Step, work

TENANTS = ("acme", "bolt", None)


class Told(Step):
    async def run(self, inputs: Any, context: Any) -> StepResult:
        await super().run(inputs, context)
        return StepResult(outputs={"tenant": context.tenant_id, "value": inputs.get("value")})


def of(tenant: str | None, name: str = "x", *, request: str = "", **payload: Any) -> ExecAssignment:
    return structs.replace(work(name, payload), tenant_id=tenant, request_id=request or f"r-{tenant}")


def tenant_told(result: ExecResult) -> Any:
    return (result.output or {})["tenant"]


async def each_has_its_own(shop: Shop, tenants: tuple[str | None, ...], seconds: float) -> None:
    """The next one comes while the one before runs (a long step), or after its end (a short one)."""
    step = Told(seconds=seconds)
    await served(shop, step, wait=1.1, concurrency={"cpu": 3})
    client = Client(shop.store, shop.clock)
    handles = []
    for tenant in tenants:
        handles.append(await client.hand_in(of(tenant)))
        await asyncio.sleep(2)
    results = [await handle.result(60) for handle in handles]
    assert [tenant_told(result) for result in results] == list(tenants)
    assert [(one.assignment_id, one.tenant_id) for one in results] == [("x", tenant) for tenant in tenants]
    assert len(step.began) == 3
    again = [await (await client.hand_in(of(tenant))).result(1) for tenant in tenants]
    assert (again, len(step.began)) == (results, 3)


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("seconds", [0.01, 20.0])
@pytest.mark.parametrize("tenants", [TENANTS, TENANTS[::-1]])
async def test_each_tenant_has_its_own_result_under_a_shared_id(shop: Shop, seconds: float, tenants: Any) -> None:
    await each_has_its_own(shop, tenants, seconds)


async def test_control_ids_without_their_tenant_would_be_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (messages, client):
        monkeypatch.setattr(module, "record_id", lambda assignment_id, _: assignment_id)
    with pytest.raises(AssertionError, match=r"\['acme', 'acme', 'acme'\]"):
        await each_has_its_own(shop, TENANTS, 0.01)


async def test_another_job_under_the_id_of_another_tenant_is_no_conflict(shop: Shop) -> None:
    router = await served(shop, Told(), wait=1.1)
    futures = [await router.submit(of(tenant, value=number)) for number, tenant in enumerate(TENANTS)]
    values = [one.output for one in await answers(*futures)]
    assert values == [{"tenant": tenant, "value": number} for number, tenant in enumerate(TENANTS)]
    with pytest.raises(KeyConflictError):
        await router.submit(of("acme", value=9))


async def test_a_sink_gets_another_idempotency_key_for_each_tenant(shop: Shop) -> None:
    step = Told()
    await shop.worker("w1", step)
    await sent(shop, *map(of, TENANTS), wait=1)
    keys = {(one.idempotency_key, one.assignment_id) for one in step.contexts}
    assert keys == {("acme|x/0", "x"), ("bolt|x/0", "x"), ("x/0", "x")}


async def test_events_name_the_assignments_own_id_and_the_tenant_beside_it(shop: Shop) -> None:
    await served(shop, Told(), wait=1.1)
    await (await Client(shop.store, shop.clock).hand_in(of("acme"))).result(30)
    events = [event for event in await shop.events() if event.work_id is not None]
    assert {(event.work_id, event.tenant_id) for event in events} == {("x", "acme")}


async def test_a_tenant_cancels_its_own_and_no_other_work(shop: Shop) -> None:
    await served(shop, Told(seconds=5), wait=1.1, concurrency={"cpu": 3})
    client = Client(shop.store, shop.clock)
    handles = [await client.hand_in(of(tenant)) for tenant in TENANTS]
    await asyncio.sleep(1)
    await client.cancel("x", "enough", tenant_id="bolt")
    await client.cancel("x", tenant_id="nobody")
    results = [await handle.result(30) for handle in handles]
    assert [result.status.value for result in results] == ["success", "cancelled", "success"]
    assert results[1].error_message == "enough"
    assert [await handle.status() for handle in handles] == ["succeeded", "cancelled", "succeeded"]


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_router_cancels_what_waits_of_this_tenant_alone(shop: Shop, tenant: str | None) -> None:
    router = await shop.router()
    futures = {one: await router.submit(of(one)) for one in TENANTS}
    assert await router.cancel("x", tenant_id=tenant)
    await asyncio.sleep(1)
    assert {one for one, future in futures.items() if future.done()} == {tenant}


async def test_a_cancel_message_without_a_tenant_leaves_the_work_of_tenants_alone(shop: Shop) -> None:
    await shop.worker("w1", Told(seconds=5), concurrency={"cpu": 3})
    await shop.send(of("acme"), of(None))
    await shop.transport.publish(messages.CANCEL, encode(messages.Cancel("x")))
    await asyncio.sleep(30)
    assert {one.tenant_id: one.status.value for one in shop.results} == {"acme": "success", None: "cancelled"}


async def test_what_is_dropped_to_make_room_is_answered_under_its_own_id_and_tenant(shop: Shop) -> None:
    rules = Rules(size=1, policy=RejectionPolicy.DROP_OLDEST)
    await shop.worker("w1", Step(seconds=20), concurrency={"cpu": 1}, rules=rules)
    for one in (of("acme", "running"), of("acme"), of("bolt")):
        await sent(shop, one, wait=0.5)
    assert [ack.assignment_id for ack in shop.acks if ack.reason == "dropped_oldest"] == ["x"]
    assert [(one.assignment_id, one.tenant_id) for one in shop.results] == [("x", "acme")]


async def test_a_worker_that_leaves_gives_back_the_work_of_each_tenant(shop: Shop) -> None:
    router = await shop.router()
    first = await shop.worker("w1", Told(seconds=3), concurrency={"cpu": 1})
    await asyncio.sleep(1.1)
    futures = [await router.submit(of(tenant)) for tenant in TENANTS]
    await asyncio.sleep(1)
    await shop.worker("w2", Told(), concurrency={"cpu": 1})
    await first.drain(30)
    assert [tenant_told(one) for one in await answers(*futures)] == list(TENANTS)
    assert {ack.assignment_id for ack in shop.acks} == {"x"}


class Peer:
    """
    A worker of another make on the shared subject: it tells no tenant, neither in acks nor in results.

    Two tenants' assignments under one id are submitted to its router.
    """

    def __init__(self, shop: Shop, request: str) -> None:
        self.futures: list[asyncio.Future[ExecResult]] = []
        self._shop, self._request = shop, request
        self._bodies = shop.heard(messages.ASSIGN)

    async def submit(self) -> Peer:
        router = await self._shop.router(shared_subject=True)
        self.futures = [await router.submit(of(tenant, request=self._request)) for tenant in ("acme", "bolt")]
        return self

    async def heard(self, number: int) -> list[ExecAssignment]:
        await asyncio.sleep(0.5)
        got = [msgspec.json.decode(body, type=ExecAssignment) for body in self._bodies]
        assert len(got) == number
        return got

    async def ack(self, assignment: ExecAssignment) -> None:
        ack = messages.ExecAssignmentAck(assignment.assignment_id, messages.AckStatus.ACCEPTED)
        await self._shop.transport.publish(messages.ACK, encode(ack))

    async def answer(self, *assignments: ExecAssignment) -> None:
        for one in assignments:
            names, job, told = (one.assignment_id, one.request_id), ResultJob("test.step"), {"tenant": one.tenant_id}
            result = ExecResult(*names, ResultStatus.SUCCESS, "peer", job, output=told)
            await self._shop.transport.publish(messages.RESULT, encode(result))
            await asyncio.sleep(0.1)

    async def told(self) -> list[str]:
        return [tenant_told(one) for one in await answers(*self.futures, within=5)]


async def second_is_answered_first(shop: Shop) -> list[str]:
    peer = await Peer(shop, "").submit()
    (first,) = await peer.heard(1)
    await peer.ack(first)
    _, second = await peer.heard(2)
    await peer.ack(second)
    await peer.answer(second, second, first)  # at least once: the other one waits still
    return await peer.told()


async def test_of_two_tenants_with_one_id_the_second_is_sent_when_the_first_is_acked(shop: Shop) -> None:
    assert await second_is_answered_first(shop) == ["acme", "bolt"]


async def test_control_a_router_that_takes_any_result_of_the_id(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_id_alone(self: Inbox, result: ExecResult, done: Acknowledge | None) -> bool:
        for pending in self._table.out(result.assignment_id)[:1]:
            self._completion.finish_foreign(pending, result, done)
        return True

    monkeypatch.setattr(Inbox, "_read_result", by_id_alone)
    assert await second_is_answered_first(shop) == ["bolt", "bolt"]


async def test_a_late_result_of_one_tenant_is_not_given_to_the_other(shop: Shop) -> None:
    peer = await Peer(shop, "").submit()
    (first,) = await peer.heard(1)
    await peer.answer(first)
    _, second = await peer.heard(2)
    await peer.answer(first)
    assert [one.done() for one in peer.futures] == [True, False]
    await peer.answer(second)
    assert await peer.told() == ["acme", "bolt"]


async def test_where_the_requests_are_called_the_same_too_the_second_waits_for_the_first_result(shop: Shop) -> None:
    peer = await Peer(shop, "r").submit()
    (first,) = await peer.heard(1)
    await peer.ack(first)
    await peer.heard(1)
    await peer.answer(first)
    _, second = await peer.heard(2)
    await peer.ack(second)
    await peer.answer(second)
    assert await peer.told() == ["acme", "bolt"]


async def test_a_result_that_could_mean_two_is_given_to_none(shop: Shop) -> None:
    """One has no tenant and runs at a worker that tells neither; the store has its result all the same."""
    router = await shop.router()
    table = router.table
    for tenant in (None, "acme"):
        await router.submit(of(tenant, request="r"))
    for pending in table.all():
        table.sent(pending, "w", 0.0)
    inbox = router._inbox
    result = ExecResult("x", "r", ResultStatus.SUCCESS, "w", ResultJob("test.step"))
    assert inbox._answered(result) is None
    assert inbox._answered(structs.replace(result, tenant_id="acme")) is table.get("acme|x")
    assert inbox._answered(structs.replace(result, request_id="earlier")) is table.get("x")
