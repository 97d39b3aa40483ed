"""A worker that vanishes in the middle of an attempt: its work is run again, and its time was spent."""

import asyncio

from reefknot.queue.model.messages import ResultStatus
from tests.unit.queue.shops import ran, sent
from tests.workshop import OK, REFUSED, Shop, Step, work

LEASE = 3.0


async def test_the_time_budget_does_not_begin_anew_when_the_first_attempt_was_never_reported(shop: Shop) -> None:
    """Ten seconds for all attempts; four are gone with the worker that had the first one."""
    first = await ran(shop, Step(seconds=60), work("a", timeout_ms=10_000, retry_count=100), wait=1, lease=LEASE)
    shop.vanish(first)
    step = Step(REFUSED, seconds=0.1)
    await shop.worker("w1", step, lease=LEASE)
    await asyncio.sleep(60)
    result = shop.result("a")
    assert result.status is ResultStatus.TIMEOUT
    assert "refused" in (result.error_message or "")
    last = step.times("a")[-1]
    assert 3.0 <= step.times("a")[0] <= 4.5
    assert last < 10.1, "not ten seconds from the second start"


async def test_an_attempt_that_was_lost_is_made_up_for_although_its_time_is_over(shop: Shop) -> None:
    """A crash in between runs it again; but what fails then is not tried once more."""
    first = await shop.worker("w1", Step(seconds=60), lease=LEASE)
    await sent(shop, work("good", timeout_ms=1000), work("bad", timeout_ms=1000, retry_count=100), wait=0.5)
    shop.vanish(first)
    step = Step(OK, seconds=0.5)
    failing = Step(REFUSED, seconds=0.5)

    class Both(Step):
        async def run(self, inputs, context):  # type: ignore[no-untyped-def]
            return await (failing if context.assignment_id == "bad" else step).run(inputs, context)

    await shop.worker("w1", Both(), lease=LEASE)
    await asyncio.sleep(60)
    assert shop.result("good").status is ResultStatus.SUCCESS
    assert shop.result("bad").status is ResultStatus.TIMEOUT
    assert (len(step.began), len(failing.began)) == (1, 1)
    assert step.contexts[0].seconds <= 1.0


async def test_a_deadline_holds_whatever_crashed(shop: Shop) -> None:
    first = await ran(shop, Step(seconds=60), work("a", deadline_ms=2000), wait=0.5, lease=LEASE)
    shop.vanish(first)
    step = Step()
    await shop.worker("w1", step, lease=LEASE)
    await asyncio.sleep(60)
    assert shop.result("a").status is ResultStatus.TIMEOUT
    assert step.began == []
