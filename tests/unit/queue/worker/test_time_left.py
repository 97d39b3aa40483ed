"""
Attempts and the time that is left for them: none is begun in vain, and our own deadline is not the destination's fault.

Each promise has a control: the same story with the rule patched away, in which the promise is broken.
"""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from reefknot.audit.model.event import BreakerEvent
from reefknot.queue.execution.failures import TimedOut
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.messages import ExecAssignment, ResultStatus
from reefknot.queue.model.results import answer_of
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker import attempt, destinations, service, settings
from reefknot.queue.worker.destinations import HALF_LIFE_S, Destination
from tests.unit.queue.shops import ran, sent, told
from tests.workshop import NO_BREAKER, OK, REFUSED, Shop, Step, work

NO_THROTTLE = settings.ThrottleSettings(enabled=False)
OPENS_AFTER = 20
"""Well above the ten failures in a row that open a breaker."""


@pytest.fixture
def cut_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time-out is taken for one of the full attempt limit."""

    def full(seconds: float, whole: bool) -> TimedOut:
        return TimedOut(seconds, whole=False)

    monkeypatch.setattr(attempt, "TimedOut", full)


@pytest.fixture
def nothing_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Destination, "usual", lambda self, now: 0.0)


def place_of(worker: service.Worker, name: str = "somewhere") -> Destination:
    return worker.steps.outages.destinations.at(name)


async def hurried(shop: Shop) -> service.Worker:
    """A busy destination that answers in 1 ms; then one after the other that hangs until its own 50 ms are over."""
    busy: Any = {"concurrency": {"cpu": 4}, "throttle": NO_THROTTLE, "rules": Rules(size=100_000)}
    worker = await ran(shop, Step(seconds=0.001), *(work(f"quick-{n}") for n in range(120)), wait=1, **busy)
    for number in range(2 * OPENS_AFTER):
        await sent(shop, work(f"cut-{number}", {"seconds": 60}, timeout_ms=50, retry_count=0), wait=0.06)
    return worker


async def test_attempts_that_were_cut_short_by_their_own_deadline_do_not_open_the_breaker(shop: Shop) -> None:
    worker = await hurried(shop)
    cut = [one.status for one in shop.results if one.assignment_id.startswith("cut-")]
    assert cut == [ResultStatus.TIMEOUT] * 2 * OPENS_AFTER
    assert place_of(worker).busy(shop.clock.now())
    assert place_of(worker).health.failed_at == ()
    usual = place_of(worker).usual(shop.clock.now())
    assert 0.04 < usual <= 0.05, "those that took more than usual say so, else it would be asked in vain for ever"
    await sent(shop, work("next"), wait=1)
    assert shop.result("next").status is ResultStatus.SUCCESS
    assert await shop.events(BreakerEvent) == []


@pytest.mark.usefixtures("cut_ones_count")
async def test_if_they_counted_the_breaker_would_open(shop: Shop) -> None:
    await hurried(shop)
    assert (await told(shop, BreakerEvent))[0].state == "open"


async def cut_at_a_tenth(shop: Shop) -> tuple[Destination, int, float]:
    """Ten answers of a second, then ten attempts that are cut after 0.1 s; and what the store had learnt before."""
    worker = await shop.worker("w1", Step(seconds=1), concurrency={"cpu": 10})
    await sent(shop, *(work(f"known-{n}") for n in range(10)), wait=1.5)
    place = place_of(worker)
    assert place.usual(shop.clock.now() - 0.5) == pytest.approx(1, abs=0.01)
    known, mean = service_time(shop)
    assert known == 10
    await sent(shop, *(work(f"cut-{n}", timeout_ms=100, retry_count=0) for n in range(10)), wait=0.2)
    assert {shop.result(f"cut-{n}").status for n in range(10)} == {ResultStatus.TIMEOUT}
    return place, known, mean


def service_time(shop: Shop) -> tuple[int, float]:
    """What the store tells admission about the steps of the class."""
    work_queue: Any = shop.store.work
    found = work_queue.table.service_times["cpu"]
    return found.known, found.mean_ms


@pytest.mark.parametrize("counts", [False, True], ids=["it does not count", "control: it does"])
async def test_a_cut_attempt_does_not_pull_the_usual_time_down(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, counts: bool
) -> None:
    """Nor what admission believes. Begun at all only because the check before it is switched off here."""
    if counts:
        request.getfixturevalue("cut_ones_count")
    monkeypatch.setattr(attempt.StepRunner, "_too_late", lambda *_: "")
    place, known, mean = await cut_at_a_tenth(shop)
    if counts:
        assert place._mean_s < 0.5
        assert (service_time(shop)[0] > known, service_time(shop)[1] < mean) == (True, True)
    else:
        assert (round(place._mean_s, 2), place._answers) == (1.0, 10)
        assert service_time(shop) == (known, mean)


async def a_second_each(shop: Shop, *outcomes: Any) -> Step:
    step = Step(*outcomes, seconds=1)
    await shop.worker("w1", step, concurrency={"cpu": 10}, breaker=NO_BREAKER)
    await sent(shop, *(work(f"known-{n}", retry_count=0) for n in range(10)), wait=1.1)
    return step


async def test_no_attempt_is_begun_with_less_time_than_usual_and_the_result_says_so(shop: Shop) -> None:
    step = await a_second_each(shop)
    await sent(shop, work("late", timeout_ms=500), work("soon", deadline_ms=500), work("fits", timeout_ms=2000), wait=2)
    assert (step.times("late"), step.times("soon"), len(step.times("fits"))) == ([], [], 1)
    for name in ("late", "soon"):
        result = shop.result(name)
        assert (result.status, result.error_code) == (ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT")
        message = result.error_message or ""
        assert message.startswith(("0.5 s were left", "0.499 s were left")), message
        assert "somewhere takes about" in message
        assert message.endswith("it was not run")
    assert shop.result("fits").status is ResultStatus.SUCCESS


async def test_a_retry_that_would_not_fit_is_not_begun_and_the_result_tells_the_failure_before(shop: Shop) -> None:
    step = await a_second_each(shop, REFUSED)
    await sent(shop, work("a", timeout_ms=1800, retry={"max_attempts": 5, "backoff_ms": 1}), wait=5)
    result = shop.result("a")
    assert len(step.times("a")) == 1
    assert result.status is ResultStatus.TIMEOUT
    assert "it was not run; before that: " in (result.error_message or "")
    assert "refused" in (result.error_message or "")


@pytest.mark.usefixtures("nothing_is_usual")
async def test_without_a_usual_time_both_would_be_begun_in_vain(shop: Shop) -> None:
    step = await a_second_each(shop)
    await sent(shop, work("late", timeout_ms=500), work("soon", deadline_ms=500), wait=2)
    assert (len(step.times("late")), len(step.times("soon"))) == (1, 1)
    assert {shop.result(name).status for name in ("late", "soon")} == {ResultStatus.TIMEOUT}


@pytest.mark.parametrize(
    ("half_life", "seconds", "is_asked"),
    [(HALF_LIFE_S, 7.0, True), (HALF_LIFE_S, 5.0, False), pytest.param(1e12, 3600.0, False, id="control: never fades")],
)
async def test_a_slow_destination_is_asked_again_after_some_seconds_without_an_answer(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, half_life: float, seconds: float, is_asked: bool
) -> None:
    """
    It took a second each, and is quick by now.

    The usual second counts half every five seconds: 0.4 s are enough again after seven.
    """
    monkeypatch.setattr(destinations, "HALF_LIFE_S", half_life)
    step = await a_second_each(shop)
    step.seconds = 0.01
    await asyncio.sleep(seconds)
    await sent(shop, work("again", timeout_ms=400), wait=1)
    assert bool(step.times("again")) is is_asked
    assert (shop.result("again").status is ResultStatus.SUCCESS) is is_asked


@pytest.mark.parametrize("shop", ["memory", "sqlite"], indirect=True)
async def test_a_deadline_that_passes_in_a_queue_is_the_same_end_at_a_router_and_at_a_worker(shop: Shop) -> None:
    early = await (await shop.router()).submit(work("at-router", deadline_ms=500, priority=0))
    await asyncio.sleep(3)
    await ran(shop, Step(seconds=30), work("long"), work("at-worker", deadline_ms=500), wait=3, concurrency={"cpu": 1})
    assert early is not None
    items = [await shop.store.work.get(name) for name in ("at-router", "at-worker")]
    assert [one.state for one in items if one is not None] == [WorkState.FAILED] * 2
    answers = [answer_of(one) for one in items if one is not None]
    assert [(one.status, one.error_code) for one in answers if one is not None] == [
        (ResultStatus.TIMEOUT, "CANCELLED_BY_TIMEOUT")
    ] * 2


@pytest.mark.parametrize("others", ["b", "a"], ids=["another one has called", "control: it speaks for the destination"])
async def test_the_failures_of_one_tenant_do_not_keep_another_away(shop: Shop, others: str) -> None:
    """Sixty failures of tenant `a` at a busy destination at which `others` has just succeeded; then a call of `b`."""
    step, failing = Step(OK, seconds=0.001), Step(REFUSED, name="failing", seconds=0.001)
    await shop.worker("w1", step, failing, concurrency={"cpu": 4}, throttle=NO_THROTTLE, rules=Rules(size=100_000))

    def of(tenant: str, name: str, **given: Any) -> ExecAssignment:
        return structs.replace(work(name, retry_count=0, **given), tenant_id=tenant)

    await sent(shop, *(of(others, f"well-{n}") for n in range(120)), wait=1)
    await sent(shop, *(of("a", f"fails-{n}", job="failing") for n in range(60)), wait=1)
    await sent(shop, of("b", "other"), wait=0.5)
    states = [event.state for event in await told(shop, BreakerEvent)]
    assert (states[:1], len(step.times("other"))) == (([], 1) if others == "b" else (["open"], 0))


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
    step, failing = Step(OK, seconds=0.5), Step(REFUSED, seconds=0.5)

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
    shop.vanish(await ran(shop, Step(seconds=60), work("a", deadline_ms=2000), wait=0.5, lease=LEASE))
    step = Step()
    await shop.worker("w1", step, lease=LEASE)
    await asyncio.sleep(60)
    assert shop.result("a").status is ResultStatus.TIMEOUT
    assert step.began == []
