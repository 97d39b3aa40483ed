"""Admission at the router: by count, by time, and what callers of other processes hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from reefknot.core.audit.event import Admission
from reefknot.core.messages import (
    AssignmentOptions,
    ClassHealth,
    ExecAssignment,
    ExecResult,
    Heartbeat,
    Job,
    ResultJob,
    ResultStatus,
)
from reefknot.core.overload.admission import Accept, OverloadStatus, Reject, RejectReason, Rules
from reefknot.errors import QueueFullError
from reefknot.ports.store import Store
from reefknot.ports.work_queue import Held
from reefknot.router.admission import HealthTable, RouterAdmission
from reefknot.router.client import Client
from reefknot.router.pending import ClaimedSubmission, Pending, PendingTable
from reefknot.router.service import Router
from tests.workshop import Shop, Step, with_shop, work

ONE = {"cpu": 1}
SLOTS = 4


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    async def asleep(self, seconds: float) -> None:
        self.time += seconds


class Place:
    """A router's admission, and what it looks at."""

    def __init__(self) -> None:
        self.clock = Hands()
        self.table = PendingTable()
        self.health = HealthTable()
        self.admission = RouterAdmission(Rules(size=1000), table=self.table, health=self.health, clock=self.clock)
        self.number = 0
        self.beat()

    def beat(self) -> None:
        classes = {name: ClassHealth(OverloadStatus.HEALTHY, 0, 0, SLOTS) for name in ("cpu", "io")}
        self.health.record_heartbeat(Heartbeat("w1", 0, classes), self.clock.time)

    def take_on(self, name: str = "cpu") -> Pending:
        self.number += 1
        assignment = ExecAssignment(f"a{self.number}", "r", Job("test.step"), resource_class=name)
        pending = self.table.add(ClaimedSubmission(assignment, Held(f"a{self.number}", "o", 1)), name, self.clock.time)
        self.table.sent(pending, "w1", self.clock.time)
        return pending

    def end(self, pending: Pending, seconds: float, status: ResultStatus = ResultStatus.SUCCESS) -> None:
        """After so many seconds, of which the step took as many."""
        self.clock.time += seconds
        self.beat()
        took = seconds * 1000
        result = ExecResult(pending.id, "r", status, "w1", ResultJob("test.step"), latency_ms=took)
        self.admission.ended(pending, result)
        self.table.remove(pending)

    def asks(self, deadline_ms: int | None, name: str = "cpu") -> object:
        options = AssignmentOptions(deadline_ms=deadline_ms)
        return self.admission.admit(ExecAssignment("new", "r", Job("test.step"), options=options, resource_class=name))


def busy(place: Place, ahead: int, ends: int, seconds: float) -> None:
    """So many are taken on all the time, and one ends every so many seconds."""
    line = [place.take_on() for _ in range(ahead)]
    for _ in range(ends):
        place.end(line.pop(0), seconds)
        line.append(place.take_on())


def test_who_would_wait_too_long_is_refused_and_hears_when_to_come_back() -> None:
    """One leaves every 20 ms, 24 are ahead, 4 of them in slots: 0.4 s of waiting, and 0.35 of a second are allowed."""
    place = Place()
    busy(place, 24, 40, 0.02)
    answer = place.asks(1000)
    assert isinstance(answer, Reject)
    assert answer.reason is RejectReason.WOULD_MISS_DEADLINE
    assert answer.retry_after_ms == pytest.approx(200, rel=0.05)
    assert isinstance(place.asks(1200), Accept), "who has more time may wait"
    assert isinstance(place.asks(None), Accept), "who has no deadline is only counted"


def test_ends_while_slots_are_free_tell_nothing_about_what_could_be_done() -> None:
    """One every ten seconds, and each took a moment: twenty at once are no trouble for anybody."""
    place = Place()
    for _ in range(30):
        place.clock.time += 9.99
        place.end(place.take_on(), 0.01)
    for _ in range(20):
        place.take_on()
    assert isinstance(place.asks(1000), Accept)


def test_before_a_rush_the_steps_own_times_stand_in() -> None:
    """Each took 0.1 s in one of four slots: a hundred in line are 2.4 s."""
    place = Place()
    for _ in range(30):
        place.end(place.take_on(), 0.1)
        place.clock.time += 5
    for _ in range(100):
        place.take_on()
    place.beat()
    assert isinstance(place.asks(1000), Reject)
    assert isinstance(place.asks(10_000), Accept)


def test_the_times_of_failures_do_not_stand_in() -> None:
    place = Place()
    for _ in range(30):
        place.end(place.take_on(), 5.0, ResultStatus.TIMEOUT)
        place.clock.time += 5
    for _ in range(100):
        place.take_on()
    place.beat()
    assert isinstance(place.asks(1000), Accept)


def test_a_rush_in_one_class_refuses_nobody_in_another() -> None:
    place = Place()
    busy(place, 50, 40, 0.05)
    assert isinstance(place.asks(1000, "cpu"), Reject)
    assert isinstance(place.asks(1000, "io"), Accept)


def test_a_system_that_became_fast_again_is_believed_soon() -> None:
    place = Place()
    busy(place, 24, 40, 0.5)
    assert isinstance(place.asks(1000), Reject)
    line = place.table.all()
    for pending in line[: len(line) - SLOTS]:
        place.end(pending, 0.01)
    busy(place, SLOTS, 30, 0.005)
    for _ in range(SLOTS):
        place.take_on()
    assert isinstance(place.asks(1000), Accept)


async def ended(router: Router, name: str) -> ExecResult:
    """Looked for every 10 ms."""
    for _ in range(6000):
        found = await router.submissions.answer(name)
        if found is not None:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} has no result after a minute")


async def refused(shop: Shop, *others: str) -> tuple[ExecResult, float]:
    """Work that a busy worker refuses because of its deadline: its result, and how long that took."""
    router = await shop.router()
    await shop.worker("w1", Step(seconds=0.5), concurrency={"cpu": 1})
    await asyncio.sleep(1.5)
    for number in range(25):
        await (await router.submit(work(f"known-{number}")))
    for number in range(3):
        await router.submit(work(f"before-{number}"))
    for name in others:  # busier still, and without any idea of how long a step takes
        await shop.worker(name, Step(seconds=0.1), concurrency={"cpu": 1})
        await shop.send(*(work(f"{name}-{number}") for number in range(10)), to=name)
    await asyncio.sleep(0)
    began = shop.clock.now()
    await router.submissions.submit(
        work("short", deadline_ms=400)
    )  # as another process does it, past the router's door
    result = await ended(router, "short")
    assert [one.reason for one in shop.acks if one.assignment_id == "short"][:1] == ["would_miss_deadline"]
    return result, shop.clock.now() - began


def test_work_that_would_miss_its_deadline_with_everybody_ends_at_once_and_says_why() -> None:
    """Younger work has a better chance each time: who waits on would only be overtaken until its time is over."""

    async def story(shop: Shop) -> None:
        result, took = await refused(shop)
        assert (result.status, result.error_code) == (ResultStatus.ERROR, "SYSTEM_OVERLOAD")
        assert "would miss its deadline" in (result.error_message or "")
        assert took < 0.4
        event = [one for one in await shop.events() if one.work_id == "short"][-1]
        assert event.event_type == "routing"

    with_shop(story)


def test_as_long_as_one_worker_has_not_said_so_it_is_tried_there() -> None:
    async def story(shop: Shop) -> None:
        await refused(shop, "w2")
        told = [(one.worker_id, one.status.value) for one in shop.acks if one.assignment_id == "short"]
        assert told == [("w1", "rejected"), ("w2", "accepted")]

    with_shop(story)


def test_the_router_refuses_what_would_miss_its_deadline_and_the_refusal_is_on_record() -> None:
    async def story(shop: Shop) -> None:
        router = await shop.router()
        await shop.worker("w1", Step(seconds=0.1), concurrency={"cpu": 1})
        await asyncio.sleep(1.5)
        for number in range(25):
            await (await router.submit(work(f"known-{number}")))
        for number in range(20):
            await router.submit(work(f"before-{number}"))
        with pytest.raises(QueueFullError) as told:
            await router.submit(work("late", deadline_ms=1000))
        assert 0.5 <= told.value.retry_after <= 1.5
        assert str(told.value).startswith("would miss deadline: ")
        events = [event for event in await shop.events() if event.work_id == "late"]
        assert [(event.event_type, getattr(event, "reason", "")) for event in events] == [
            ("admission", "would_miss_deadline")
        ]

    with_shop(story)


# ---- callers of other processes -------------------------------------------------------------------------------------


class Told:
    """What routers say, and how often they were asked."""

    def __init__(self, *routers: Any) -> None:
        self.routers = routers
        self.asked = 0

    async def __call__(self, store: Store) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        return [msgspec.to_builtins(router.snapshot()) for router in self.routers]


async def busy_router(shop: Shop, *, line: int) -> Any:
    """One step a second, and so many in the line."""
    router = await shop.router(router_id=f"r{line}")
    client = Client(shop.store, shop.clock)
    if not [one for one in shop.members if hasattr(one, "pools")]:
        await shop.worker("w1", Step(seconds=1), concurrency=ONE)
    for number in range(30 + line):
        await client.submit("test.step", assignment_id=f"{line}-{number}")
    await asyncio.sleep(31)
    return router


def test_who_would_miss_its_deadline_is_refused_on_record_and_hears_when_to_come_back() -> None:
    async def story(shop: Shop) -> None:
        router = await busy_router(shop, line=20)
        client = Client(shop.store, shop.clock, snapshots=Told(router))
        with pytest.raises(QueueFullError, match="would miss deadline") as told:
            await client.submit("test.step", deadline=10, assignment_id="hopeless")
        assert 5 < told.value.retry_after < 15
        assert await shop.store.work.get("hopeless") is None
        (event,) = [one for one in await shop.events(Admission) if one.work_id == "hopeless"]
        assert isinstance(event, Admission)
        assert (event.status, event.reason) == ("rejected", "would_miss_deadline")

    with_shop(story)


def test_who_has_time_or_no_deadline_or_is_there_already_comes_in() -> None:
    async def story(shop: Shop) -> None:
        router = await busy_router(shop, line=20)
        client = Client(shop.store, shop.clock, snapshots=Told(router))
        await client.submit("test.step", deadline=500)
        await client.submit("test.step")
        await client.submit("test.step", deadline=10, assignment_id="20-0")
        await client.submit("test.step", deadline=10, resource_class="io")

    with_shop(story)


def test_without_word_from_a_router_nobody_is_refused_for_time() -> None:
    async def story(shop: Shop) -> None:
        await busy_router(shop, line=20)
        for told in (None, Told()):
            await Client(shop.store, shop.clock, snapshots=told).submit("test.step", deadline=10)

    with_shop(story)


def test_one_router_that_could_make_it_is_enough() -> None:
    async def story(shop: Shop) -> None:
        router = await busy_router(shop, line=20)
        idle = await shop.router(router_id="idle")
        client = Client(shop.store, shop.clock, snapshots=Told(router, idle))
        await client.submit("test.step", deadline=10)

    with_shop(story)


def test_routers_are_asked_once_a_second_and_only_for_who_has_a_deadline() -> None:
    async def story(shop: Shop) -> None:
        told = Told(await shop.router())
        client = Client(shop.store, shop.clock, snapshots=told)
        await client.submit("test.step")
        assert told.asked == 0
        for _ in range(5):
            await client.submit("test.step", deadline=10)
        assert told.asked == 1
        await asyncio.sleep(1)
        await client.submit("test.step", deadline=10)
        assert told.asked == 2

    with_shop(story)
