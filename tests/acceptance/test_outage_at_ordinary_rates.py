"""
An outage at an ordinary rate: 503 for three minutes, at 0.2 to 50 calls a second, under the recommended file.

At most 20 calls reach the destination while it is down, nothing is quarantined, and everything is done within a minute
of its return. The control is the same story without the breaker, which loses jobs and keeps calling.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

import reefknot
from reefknot.audit.model.event import BreakerEvent, Quarantined
from reefknot.audit.model.replay import replay
from reefknot.audit.port import AuditQuery
from reefknot.core.classify import classify
from reefknot.core.failure import ErrorCode
from reefknot.policy.settings import load_settings
from reefknot.queue.model.admission import Rules
from reefknot.queue.model.destination_health import DestinationRules
from reefknot.queue.model.messages import ResultStatus, StepResult
from reefknot.queue.model.results import waits_for
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker.settings import WorkerSettings, settings_from
from reefknot.steps.port import BlockContext
from tests.workshop import OK, Shop, Step, http, with_shop, work

SAMPLES = Path(reefknot.__file__).parent / "console" / "cli" / "samples"
DOWN_S = 180.0
WELL_S = 10.0
"""Seconds of health before the outage."""
OFTEN_S = float(os.environ.get("OUTAGE_SECONDS", "15"))
"""The outage at fifty calls a second, which `make soak` lets last for three minutes as well."""
ROOM = Rules(size=20_000)


class Service:
    """The block `http.request` against a modelled server, which answers 503 from `down` to `up`."""

    type = "http.request"

    def __init__(self, *, seconds: float = 0.02, down: float = DOWN_S) -> None:
        self.seconds = seconds
        self.down, self.up = WELL_S, WELL_S + down
        self.calls: list[tuple[float, str]] = []

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "api.example:443"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        now = asyncio.get_running_loop().time()
        self.calls.append((now, context.assignment_id))
        await asyncio.sleep(self.seconds)
        return http(503) if self.down <= now < self.up else OK

    async def close(self) -> None: ...

    def while_down(self) -> list[tuple[float, str]]:
        return [one for one in self.calls if self.down <= one[0] < self.up]


class Both(Service):
    """A service that is never down, and jobs that fail whatever it does."""

    def __init__(self) -> None:
        super().__init__(down=0.0)
        self.bad = Step(http(503), name="http.request")

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        return await (self.bad.run if inputs.get("bad") else super().run)(inputs, context)


class Outcome(Struct, frozen=True):
    """The figures of one outage."""

    calls: int
    """Those that reached the destination while it was down."""
    quarantined: int
    unfinished: int
    """Jobs without a success a minute after the return."""
    results: Counter[ResultStatus]
    differences: int


def recommended(name: str = "reefknot.yaml", **changes: Any) -> WorkerSettings:
    loaded = load_settings(str(SAMPLES / name), environ={}, cwd=SAMPLES)
    return settings_from(loaded.configuration, loaded.book, rules=ROOM, **changes)


async def submit(shop: Shop, per_second: float, *, until: float, workers: Sequence[str] = ("w1",)) -> int:
    """Jobs at an even rate until then, each worker in turn. Returns how many."""
    number = 0
    while number / per_second < until:
        await asyncio.sleep(max(0.0, number / per_second - asyncio.get_running_loop().time()))
        await shop.send(
            work(f"j{number}", {"url": "https://api.example/"}, job="http.request"), to=workers[number % len(workers)]
        )
        number += 1
    return number


async def outcome(shop: Shop, service: Service, jobs: int) -> Outcome:
    stored = await shop.store.audit.read(AuditQuery(limit=200_000))
    results = Counter(one.status for one in shop.results)
    calls, quarantined = len(service.while_down()), len(await shop.events(Quarantined))
    differences = len(replay(one.entry.body for one in stored).differences)
    return Outcome(calls, quarantined, jobs - results[ResultStatus.SUCCESS], results, differences)


def outage(
    per_second: float, *, down: float = DOWN_S, workers: Sequence[str] = ("w1",), seconds: float = 0.02, **changes: Any
) -> Outcome:
    """The whole story: health, the outage, and a minute after it; jobs come all the time."""
    seen: list[Outcome] = []

    async def story(shop: Shop) -> None:
        service = Service(seconds=seconds, down=down)
        for name in workers:
            made = await shop.worker(name, service, settings=recommended(**changes))
            made.steps.outages.destinations.fleet_of(len(workers))
        jobs = await submit(shop, per_second, until=service.up, workers=workers)
        await asyncio.sleep(max(0.0, service.up + 60 - asyncio.get_running_loop().time()))
        seen.append(await outcome(shop, service, jobs))

    with_shop(story)
    return seen[0]


@pytest.mark.parametrize(("per_second", "down"), [(0.2, DOWN_S), (1.0, DOWN_S), (5.0, DOWN_S), (50.0, OFTEN_S)])
def test_three_minutes_of_503_cost_few_calls_and_no_job(per_second: float, down: float) -> None:
    seen = outage(per_second, down=down)
    assert (seen.quarantined, seen.unfinished, seen.differences) == (0, 0, 0), seen
    assert seen.calls <= 20, seen


def test_a_service_that_hangs_until_the_time_of_an_attempt_is_over_counts_as_down_too() -> None:
    seen = outage(1.0, seconds=11.0)
    assert seen.quarantined == 0, seen
    assert seen.calls <= 30, "those that were under way when the breaker opened come on top"


@pytest.mark.parametrize("name", ["reefknot.yaml", "reefknot-full.yaml"])
def test_both_recommended_files_outlast_the_restart_of_a_dependency(name: str) -> None:
    """One job alone, which no breaker helps: its own retries reach over a minute and a half."""
    book = recommended(name).book
    for target, least in (("block:http", 90), ("block:sql", 60), ("block:my.step", 90)):
        policy = book.resolve(target, classify("connection refused", code=ErrorCode.network_error))
        waits = [min(policy.max_delay, policy.base_delay * policy.multiplier**k) for k in range(policy.retries)]
        assert sum(waits) > least, target
        assert policy.time_budget >= sum(waits), target


def test_without_the_breaker_the_same_outage_quarantines_jobs_and_calls_all_the_time() -> None:
    """The control."""
    seen = outage(1.0, breaker=DestinationRules(enabled=False))
    assert seen.quarantined > 50, seen
    assert seen.calls > 500, seen


def test_two_workers_make_at_most_twenty_calls_each_and_fewer_together_than_two_alone() -> None:
    seen = outage(1.0, workers=("w1", "w2"))
    assert (seen.quarantined, seen.unfinished, seen.differences) == (0, 0, 0), seen
    assert seen.calls <= 30, "five failures each instead of ten, and the probes of both"


async def test_a_waiting_job_says_for_what_since_when_and_when_the_next_probe_is(shop: Shop) -> None:
    service = Service(down=600.0)
    worker = await shop.worker("w1", service, settings=recommended())
    await submit(shop, 1.0, until=60.0)
    (place,) = worker.troubled_destinations()
    assert (place["name"], place["breaker"], place["probe_in_s"] > 0) == ("api.example:443", "open", True)
    item = await shop.store.work.get("j50")
    assert item is not None
    assert (item.state, item.attempts, item.snoozes > 0) == (WorkState.PENDING, 0, True)
    waits, wall = waits_for(item), shop.clock.wall() * 1000
    assert waits is not None
    assert waits.destination == "api.example:443"
    assert wall - 11_000 < waits.since < wall - 9_000
    assert wall < waits.next_probe_at < wall + 60_500
    events: list[Any] = await shop.events(BreakerEvent)
    mine = [one for one in events if one.work_id == "j50"]
    assert [(one.state, one.wait_seconds is not None) for one in mine] == [("open", True)], "once, when it began"


async def test_the_events_of_a_breaker_tell_that_it_opened_was_probed_and_closed(shop: Shop) -> None:
    service = Service(down=20.0)
    await shop.worker("w1", service, settings=recommended())
    await submit(shop, 1.0, until=80.0)
    events: list[Any] = await shop.events(BreakerEvent)
    changes = [one for one in events if one.wait_seconds is None]
    states = [one.state for one in changes]
    assert states[:3] == ["open", "half_open", "open"], states
    assert states[-2:] == ["half_open", "closed"], states
    rests = [round(one.probe_seconds) for one in changes if one.probe_seconds is not None]
    assert rests == [1, 2, 4, 8, 16]


async def test_a_worker_that_restarts_in_an_outage_makes_no_burst(shop: Shop) -> None:
    service = Service(down=600.0)
    first = await shop.worker("w1", service, settings=recommended())
    await submit(shop, 5.0, until=60.0)
    before = len(service.calls)
    shop.members.remove(first)
    await first.stop()
    again = await shop.worker("w1", service, settings=recommended())
    for number in range(100):
        await shop.send(work(f"n{number}", {"url": "https://api.example/"}, job="http.request"))
        await asyncio.sleep(0.2)
    assert len(service.calls) - before <= 2, "a probe or two, in twenty seconds with a hundred new jobs"
    assert [one["breaker"] for one in again.troubled_destinations()] == ["open"]


async def test_a_jobs_own_deadline_and_the_longest_outage_end_its_wait(shop: Shop) -> None:
    service = Service(down=100_000.0)
    rules = DestinationRules(max_outage=600.0)
    await shop.worker("w1", service, settings=recommended(breaker=rules))
    await submit(shop, 1.0, until=30.0)
    late = work("late", {"url": "https://api.example/"}, job="http.request", deadline_ms=20_000)
    await shop.send(late)
    await asyncio.sleep(30)
    assert shop.result("late").status is not ResultStatus.SUCCESS
    assert len(shop.results) == 11, "ten from before the outage, and that one"
    await asyncio.sleep(800)
    ends = [one for one in shop.results if one.assignment_id == "j29"]
    assert "max_outage_seconds" in (ends[0].error_message or "")
    assert len(await shop.events(Quarantined)) == 21


async def test_one_job_that_fails_alone_spends_its_own_budget_while_others_succeed(shop: Shop) -> None:
    service = Both()
    await shop.worker("w1", service, settings=recommended())
    await shop.send(work("poison", {"bad": True}, job="http.request"))
    await submit(shop, 1.0, until=300.0)
    await asyncio.sleep(600)
    assert len(service.bad.times("poison")) == 9
    (aside,) = await shop.events(Quarantined)
    assert aside.work_id == "poison"
    assert await shop.events(BreakerEvent) == []


async def test_three_bad_jobs_that_fail_together_do_not_keep_good_ones_from_their_destination(shop: Shop) -> None:
    """They open the breaker now and then; each probe is another job's, and a good one closes it."""
    await shop.worker("w1", Both(), settings=recommended())
    await shop.send(*(work(f"poison-{n}", {"bad": True}, job="http.request") for n in range(3)))
    await submit(shop, 0.05, until=600.0)
    await asyncio.sleep(1200)
    results = Counter(one.status for one in shop.results)
    assert results[ResultStatus.SUCCESS] == 30
    assert {one.work_id for one in await shop.events(Quarantined)} == {"poison-0", "poison-1", "poison-2"}
