"""Workers that cannot take any more, and come back: the real router and workers, in virtual time."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from reefknot.audit.port import AuditQuery
from reefknot.errors import QueueFullError
from reefknot.queue.model import routing
from reefknot.queue.model.admission import OverloadStatus, Rules
from reefknot.queue.model.messages import ExecAssignment, ExecResult, Heartbeat, Job, StepResult, assign_subject, encode
from reefknot.queue.router.health import HealthTable
from reefknot.queue.router.service import Router
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import clock_of_this_loop
from reefknot.steps.port import BlockContext
from reefknot.stores.memory.store import MemoryTransport
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store

SIZE, SLOTS, STEP_S, PER_SECOND = 10, 2, 0.05, 20.0


class Step:
    """Takes a moment, or as long as its worker is sick."""

    type = "demo.step"

    def __init__(self) -> None:
        self.well = asyncio.Event()
        self.well.set()

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "here"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        await asyncio.sleep(STEP_S)
        await self.well.wait()
        return StepResult()

    async def close(self) -> None: ...


class Sent(MemoryTransport):
    """Remembers who was sent what, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[float, str]] = []

    async def publish(self, subject: str, body: bytes, **named: Any) -> None:
        if ".w." in subject and b'"far' not in body:
            self.sent.append((asyncio.get_running_loop().time(), subject.rpartition(".")[2]))
        await super().publish(subject, body, **named)

    def to(self, worker_id: str, begin: float, end: float) -> list[float]:
        return [at for at, name in self.sent if name == worker_id and begin <= at < end]


class Fleet:
    """A router and its workers."""

    def __init__(self, store: Store, names: tuple[str, ...]) -> None:
        clock, self.store, self.transport = clock_of_this_loop(), store, Sent()
        settings = default_settings(rules=Rules(size=SIZE), concurrency={"cpu": SLOTS})
        bounds = RouterSettings(rules=Rules(size=SIZE))
        self.steps = {name: Step() for name in names}
        common: dict[str, Any] = {"store": store, "transport": self.transport, "clock": clock, "seed": 7}
        self.router = Router(settings=bounds, **common)
        self.workers = {
            name: Worker(name, settings=settings, blocks={"demo.step": step}, **common)
            for name, step in self.steps.items()
        }
        self.answers: list[asyncio.Future[ExecResult]] = []
        self.refused: list[QueueFullError] = []

    async def make_critical(self, name: str) -> None:
        """Somebody else floods it while it does not get on."""
        self.steps[name].well.clear()
        for number in range(2 * (SIZE + SLOTS)):
            far = ExecAssignment(f"far-{name}-{number}", "r", Job("demo.step"), resource_class="cpu")
            await self.transport.publish(assign_subject(name), encode(far))
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        assert self.workers[name].pools["cpu"].status() is OverloadStatus.CRITICAL

    async def load(self, seconds: float) -> None:
        for _ in range(round(seconds * PER_SECOND)):
            await self.submit()
            await asyncio.sleep(1 / PER_SECOND)

    async def submit(self) -> None:
        number = len(self.answers) + len(self.refused)
        try:
            asked = ExecAssignment(f"a{number}", f"r{number}", Job("demo.step"), resource_class="cpu")
            self.answers.append(await self.router.submit(asked))
        except QueueFullError as full:
            self.refused.append(full)


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[Fleet]:
    async with open_store("memory:") as store:
        one = Fleet(store, names)
        await one.router.start()
        for worker in one.workers.values():
            await worker.start()
        await asyncio.sleep(1.5)
        try:
            yield one
        finally:
            for worker in one.workers.values():
                await worker.stop()
            await one.router.stop()


class Share(msgspec.Struct):
    """What a sick worker got."""

    while_sick: list[float]
    """When it was sent something, from the beginning of its sickness on."""
    before: float
    after: float
    """Its part of the work in five seconds, before, and from the ninth second after its recovery on."""


async def sickness() -> Share:
    now = asyncio.get_running_loop().time
    async with fleet("w1", "w2") as both:
        began = now()
        await both.load(5)
        before = len(both.transport.to("w1", began, now())) / (5 * PER_SECOND)
        await asyncio.sleep(1.0)  # nothing of ours is at the one that falls sick: no late answer tells of its recovery
        await both.make_critical("w1")
        sick = now()
        await both.load(20)
        while_sick = [at - sick for at in both.transport.to("w1", sick, now())]
        both.steps["w1"].well.set()
        await both.load(9)
        looked = now()
        await both.load(5)
        after = len(both.transport.to("w1", looked, now())) / (5 * PER_SECOND)
        results = await asyncio.wait_for(asyncio.gather(*both.answers), 60)
        assert all(one.status == "success" for one in results)
        assert both.refused == []
    return Share(while_sick, before, after)


def let_acks_alone_tell_of_recovery(patch: pytest.MonkeyPatch) -> None:
    """The broken variant: nobody is probed, and neither heartbeats nor results say that a worker is well again."""
    patch.setattr(routing, "PROBE_EVERY_S", float("inf"))
    heard = HealthTable.record_heartbeat

    def never_better(self: HealthTable, beat: Heartbeat, now: float) -> str:
        classes = {}
        for name, said in beat.classes.items():
            known = self._entries.get(name, {}).get(beat.worker_id)
            worst = max(said.status, said.status if known is None else known.status, key=lambda one: one.severity)
            classes[name] = msgspec.structs.replace(said, status=worst)
        return heard(self, msgspec.structs.replace(beat, classes=classes), now)

    patch.setattr(HealthTable, "record_heartbeat", never_better)
    patch.setattr(HealthTable, "record_result", lambda *given: None)


async def test_a_critical_worker_gets_nothing_but_a_probe_every_two_seconds_and_its_full_share_within_ten() -> None:
    share = await sickness()
    assert 0.4 <= share.before <= 0.6
    assert share.while_sick[0] <= 2.0, "probed soon"
    pauses = [later - earlier for earlier, later in zip(share.while_sick, share.while_sick[1:], strict=False)]
    assert len(pauses) >= 5
    assert min(pauses) >= 2.0 - 1e-6
    assert max(pauses) <= 3.0, "and again and again"
    assert share.after >= 0.9 * share.before


async def test_without_probes_and_beats_a_critical_worker_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: this is what the harness must be able to see."""
    let_acks_alone_tell_of_recovery(monkeypatch)
    assert (await sickness()).after == 0.0


async def test_with_all_workers_critical_the_caller_is_told_when_to_come_back_and_nothing_accepted_is_lost() -> None:
    async with fleet("w1", "w2") as both:
        await both.make_critical("w1")
        await both.make_critical("w2")
        await both.load(3)
        assert both.refused, "the router's own queue is full, and says so"
        assert all(0.1 <= one.retry_after <= 30 for one in both.refused)
        assert len(both.answers) <= SIZE + 4, "as many as have a place, and a few that were sent as probes"
        events = await both.store.audit.read(AuditQuery(event_type="admission"))
        told = [json.loads(one.entry.body) for one in events if b'"resource_class":"router"' in one.entry.body]
        counted = sum(sum(one["inputs"]["refused"].values()) for one in told)
        assert 3 <= len(told) <= 5, "one event a second"
        assert 0.5 * len(both.refused) < counted <= len(both.refused), "the rest goes with the next one"
        for step in both.steps.values():
            step.well.set()
        results = await asyncio.wait_for(asyncio.gather(*both.answers), 60)
        assert {one.status.value for one in results} == {"success"}


async def test_with_one_worker_that_can_take_work_nobody_is_told_to_come_back() -> None:
    """The control of the test before."""
    async with fleet("w1", "w2") as both:
        await both.make_critical("w1")
        await both.load(3)
        assert both.refused == []
        both.steps["w1"].well.set()
        await asyncio.wait_for(asyncio.gather(*both.answers), 60)
