"""Limits of the fleet in virtual time: the router counts every start, retries included, and holds what has to wait."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from msgspec import structs

from reefknot.core.limits import LimitRule, limit_rule
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.pauses import Pause, Pauses
from reefknot.queue.router.limits import RouterLimits
from reefknot.queue.router.service import Router
from reefknot.queue.worker.service import Worker
from tests.workshop import NO_BREAKER, OK, REFUSED, Shop, Step, with_shop, work


def rules(**named: dict[str, object]) -> tuple[LimitRule, ...]:
    return tuple(limit_rule(name.replace("_", "."), **given) for name, given in named.items())  # type: ignore[arg-type]


def most_in_a_second(times: list[float]) -> int:
    return max(sum(at <= other < at + 1.0 for other in times) for at in times)


async def test_no_second_has_more_starts_than_the_rate_and_the_burst(shop: Shop) -> None:
    step = Step(name="billing.charge")
    await shop.worker("w1", step)
    await shop.worker("w2", step)
    router = await shop.router(limits=rules(billing_charge={"rate": "50/s", "burst": 10}))

    results = [await router.submit(work(f"a{n}", job="billing.charge")) for n in range(300)]
    ended = [await one for one in results]

    assert {one.status for one in ended} == {ResultStatus.SUCCESS}
    times = [at for _, at in step.began]
    assert most_in_a_second(times) <= 60
    assert times[-1] - times[0] <= (300 - 10) / 50 / 0.95


async def test_a_retry_is_a_start_of_its_own(shop: Shop) -> None:
    step = Step(REFUSED, REFUSED, OK, name="billing.charge")
    await shop.worker("w1", step, breaker=NO_BREAKER)
    router = await shop.router(limits=rules(billing_charge={"rate": "10/s", "burst": 1}))

    results = [await router.submit(work(f"a{n}", job="billing.charge")) for n in range(10)]
    ended = [await one for one in results]

    assert {one.status for one in ended} == {ResultStatus.SUCCESS}
    assert [one.retries_used for one in ended] == [2] * 10
    assert most_in_a_second([at for _, at in step.began]) <= 11


async def test_no_more_run_than_may(shop: Shop) -> None:
    running, most = Counter[str](), Counter[str]()

    class Counting(Step):
        async def run(self, inputs, context):  # type: ignore[no-untyped-def]
            tenant = context.tenant_id or ""
            running[tenant] += 1
            most[tenant] = max(most[tenant], running[tenant])
            try:
                return await super().run(inputs, context)
            finally:
                running[tenant] -= 1

    step = Counting(seconds=0.5)
    await shop.worker("w1", step)
    await shop.worker("w2", step)
    router = await shop.router(limits=rules(tenant={"running": 2}))
    results = []
    for tenant in ("a", "b", ""):
        for n in range(8):
            assignment = structs.replace(work(f"{tenant}{n}"), tenant_id=tenant or None)
            results.append(await router.submit(assignment))
    for one in results:
        assert (await one).status is ResultStatus.SUCCESS

    assert most["a"] == most["b"] == 2
    assert most[""] > 2


async def test_a_limited_tenant_does_not_slow_the_others(shop: Shop) -> None:
    """The time of every job of one tenant, with and without ten thousand places' worth of a limited one's jobs."""
    assert await p99_of_others(shop, limited=400) <= 1.2 * await p99_of_others(shop, limited=0)


async def p99_of_others(shop: Shop, *, limited: int) -> float:
    step = Step(name="test.step", seconds=0.02)
    members: list[Worker | Router] = [await shop.worker(f"w{n}-{limited}", step) for n in range(2)]
    router = await shop.router(limits=rules(**{"tenant:slow": {"rate": "5/s", "burst": 1, "running": 2}}))
    members.append(router)
    for number in range(limited):
        await router.submit(structs.replace(work(f"slow-{number}"), tenant_id="slow"))
    took = []
    for number in range(200):
        began = asyncio.get_running_loop().time()
        await (await router.submit(structs.replace(work(f"{limited}-{number}"), tenant_id="other")))
        took.append(asyncio.get_running_loop().time() - began)
    for member in members:
        shop.members.remove(member)
        await member.stop()
    return sorted(took)[int(0.99 * len(took))]


async def test_what_waits_keeps_its_place_and_no_look_is_audited(shop: Shop) -> None:
    step = Step(name="billing.charge")
    await shop.worker("w1", step)
    router = await shop.router(limits=rules(billing_charge={"rate": "2/s", "burst": 1}))
    results = [await router.submit(work(f"a{n}", job="billing.charge")) for n in range(10)]
    for one in results:
        await one

    assert [name for name, _ in step.began] == [f"a{n}" for n in range(10)]
    kinds = Counter(type(event).__name__ for event in await shop.events())
    assert kinds["Routing"] == 10, kinds
    assert kinds["Requeued"] == 0, kinds


async def test_the_time_at_the_limit_is_not_the_jobs_time(shop: Shop) -> None:
    await waits_longer_than_its_time(shop)


def test_the_time_at_the_limit_is_not_the_jobs_time_in_a_file(tmp_path: Path) -> None:
    with_shop(waits_longer_than_its_time, str(tmp_path / "state.db"))


async def waits_longer_than_its_time(shop: Shop) -> None:
    """Each has a second for all of its attempts, and waits longer than that for its second one."""
    step = Step(REFUSED, OK, name="billing.charge")
    await shop.worker("w1", step, breaker=NO_BREAKER)
    router = await shop.router(limits=rules(billing_charge={"rate": "1/s", "burst": 1}))
    results = [await router.submit(work(f"a{n}", job="billing.charge", timeout_ms=1000)) for n in range(4)]

    assert [(await one).status for one in results] == [ResultStatus.SUCCESS] * 4


async def test_a_deadline_ends_the_wait(shop: Shop) -> None:
    await shop.worker("w1", Step(name="billing.charge"))
    router = await shop.router(limits=rules(billing_charge={"rate": "1/h", "burst": 1}))
    results = [await router.submit(work(f"a{n}", job="billing.charge", deadline_ms=5000)) for n in range(2)]

    assert [(await one).status for one in results] == [ResultStatus.SUCCESS, ResultStatus.TIMEOUT]


async def test_a_router_that_takes_over_gives_no_second_burst_and_counts_what_runs(shop: Shop) -> None:
    step = Step(name="billing.charge", seconds=3)
    for name in ("w1", "w2", "w3"):
        await shop.worker(name, step)
    limits = rules(billing_charge={"rate": "1/s", "burst": 5, "running": 4})
    first = await shop.router(limits=limits)
    for number in range(10):
        await first.submit(work(f"a{number}", job="billing.charge"))
    await asyncio.sleep(1.5)
    assert len(step.began) == 4
    shop.vanish(first)
    second = await shop.router("router-2", limits=limits)
    await asyncio.sleep(0.01)
    for number in range(10):
        await second.submit(work(f"b{number}", job="billing.charge"))
    await asyncio.sleep(0.5)
    assert len(step.began) == 4, "they run at the worker"
    await asyncio.sleep(60)

    times = [at for _, at in step.began]
    assert len(times) == 20
    assert most_in_a_second(times) <= 6
    assert all(sum(at <= other < at + 2.99 for other in times) <= 4 for at in times)
    assert second.limits.snapshot(asyncio.get_running_loop().time())[0]["held"] == {}


async def test_control_a_router_that_forgets_what_runs_lets_too_much_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forgotten(*_: object) -> None: ...

    monkeypatch.setattr(RouterLimits, "_count_running", forgotten)
    step = Step(name="billing.charge", seconds=3)
    for name in ("w1", "w2", "w3"):
        await shop.worker(name, step)
    limits = rules(billing_charge={"running": 4})
    first = await shop.router(limits=limits)
    for number in range(20):
        await first.submit(work(f"a{number}", job="billing.charge"))
    await asyncio.sleep(1)
    shop.vanish(first)
    second = await shop.router("router-2", limits=limits)
    for number in range(10):
        await second.submit(work(f"b{number}", job="billing.charge"))
    await asyncio.sleep(60)
    times = [at for _, at in step.began]
    assert any(sum(at <= other < at + 2.99 for other in times) > 4 for at in times)


async def test_a_worker_that_stood_still_allows_no_more_starts(shop: Shop) -> None:
    """What it was granted begins late, all at once; meanwhile the others begin no more than is left."""
    quick, late = Step(name="billing.charge"), Step(name="billing.charge")
    await shop.worker("w1", quick)
    stuck = await shop.worker("w2", late)
    router = await shop.router(limits=rules(billing_charge={"rate": "20/s", "burst": 10}))
    for pool in stuck.pools.values():
        pool.paused = True  # it takes work in, and begins none
    results = [await router.submit(work(f"a{n}", job="billing.charge")) for n in range(100)]
    await asyncio.sleep(2)
    for pool in stuck.pools.values():
        pool.paused = False
        pool.wake()
    for one in results:
        await one

    assert late.began
    assert most_in_a_second([at for _, at in quick.began + late.began]) <= 30


async def test_nothing_of_a_paused_type_begins_and_its_retries_wait_too(shop: Shop) -> None:
    pauses = Pauses()
    step, other = Step(REFUSED, OK, name="billing.charge"), Step(name="mail.send")
    await shop.worker("w1", step, other, pauses=pauses)
    router = await shop.router(pauses=pauses)
    failing = await router.submit(work("failing", job="billing.charge"))
    await asyncio.sleep(0.02)
    pauses.replace([Pause("type", "billing.*")])
    results = [await router.submit(work(f"a{n}", job="billing.charge")) for n in range(3)]
    await (await router.submit(work("mail", job="mail.send")))
    await asyncio.sleep(30)
    assert [name for name, _ in step.began] == ["failing"]
    assert not failing.done()

    pauses.replace([])
    for one in (failing, *results):
        assert (await one).status is ResultStatus.SUCCESS


async def test_a_pause_ends_at_its_time(shop: Shop) -> None:
    ends = int((shop.clock.wall() + 10) * 1000)
    step = Step()
    await shop.worker("w1", step)
    router = await shop.router(pauses=Pauses([Pause("tenant", "acme", until=ends)]))
    began = asyncio.get_running_loop().time()
    await (await router.submit(structs.replace(work("a"), tenant_id="acme")))
    assert asyncio.get_running_loop().time() - began == pytest.approx(10, abs=0.1)


async def test_other_limits_take_effect_at_once(shop: Shop) -> None:
    step = Step(name="billing.charge")
    await shop.worker("w1", step)
    router = await shop.router(limits=rules(billing_charge={"rate": "1/h", "burst": 1}))
    results = [await router.submit(work(f"a{n}", job="billing.charge")) for n in range(30)]
    await asyncio.sleep(5)
    assert len(step.began) == 1
    router.limits.follow([])
    await asyncio.sleep(1)
    assert all(one.done() for one in results)
