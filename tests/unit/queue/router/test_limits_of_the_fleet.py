"""Limits of the fleet in virtual time: the router counts every start, retries included, and holds what has to wait."""

from collections import Counter

from msgspec import structs

from reefknot.core.limits import LimitRule, limit_rule
from reefknot.queue.model.messages import ResultStatus
from tests.workshop import NO_BREAKER, OK, REFUSED, Shop, Step, work


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
            running[context.tenant_id] += 1
            most[context.tenant_id] = max(most[context.tenant_id], running[context.tenant_id])
            try:
                return await super().run(inputs, context)
            finally:
                running[context.tenant_id] -= 1

    step = Counting(seconds=0.5)
    await shop.worker("w1", step)
    await shop.worker("w2", step)
    router = await shop.router(limits=rules(tenant={"running": 2}))
    results = []
    for tenant in ("a", "b", None):
        for n in range(8):
            results.append(await router.submit(structs.replace(work(f"{tenant}{n}"), tenant_id=tenant)))
    for one in results:
        assert (await one).status is ResultStatus.SUCCESS

    assert most["a"] == most["b"] == 2
    assert most[None] > 2
