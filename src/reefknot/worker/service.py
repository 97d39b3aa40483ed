"""
A worker: takes assignments in, runs them as steps, reports back, and says how it is.

    intake ──▶ queue ──▶ slot: one attempt ──▶ settle ──▶ publish the result
                 ▲                          └─▶ due again: the place is kept, the slot is free

Everything it accepted is in its store. A worker that comes back under its id finds its work there; what a vanished one
left behind is taken over by whoever is sent it next.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.messages import (
    ASSIGN,
    CANCEL,
    FLEET,
    Cancel,
    ClassHealth,
    Fleet,
    Heartbeat,
    assign_subject,
)
from reefknot.core.overload.level import OverloadStatus
from reefknot.core.redaction import Redactor
from reefknot.core.work import WorkItem, WorkState
from reefknot.errors import ParameterError
from reefknot.execution.crew import Crew
from reefknot.execution.journal import Journal, event_id
from reefknot.execution.steady import SteadyClock
from reefknot.ports.block import Block
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.ports.transport import Delivery, Transport
from reefknot.worker.counters import RetryCounts
from reefknot.worker.endings import Endings
from reefknot.worker.intake import Intake
from reefknot.worker.outbox import Outbox
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.runner import Runner
from reefknot.worker.settings import WorkerSettings
from reefknot.worker.step import Steps

PAGE = 500
AT_ONCE = 64
"""Assignments that are being kept at the same time: a store that commits in groups takes them together."""

_cancels = msgspec.json.Decoder(Cancel)
_fleets = msgspec.json.Decoder(Fleet)


class ClassSnapshot(Struct, frozen=True):
    """One resource class of a worker at one moment."""

    status: OverloadStatus
    depth: int
    size: int | None
    active: int
    capacity: int
    oldest_age_s: float


class WorkerSnapshot(Struct, frozen=True):
    """A worker at one moment."""

    worker_id: str
    draining: bool
    classes: dict[str, ClassSnapshot]
    retries: RetryCounts


class Worker:
    """One worker over a store and a transport."""

    def __init__(
        self,
        worker_id: str,
        *,
        settings: WorkerSettings,
        store: Store,
        transport: Transport,
        blocks: Mapping[str, Block],
        clock: Clock,
        secrets: tuple[str, ...] = (),
        seed: int | None = None,
        shared_subject: bool = False,
    ) -> None:
        if not worker_id.isprintable() or not worker_id or set(worker_id) & set(" .*>@#/"):
            raise ParameterError("worker_id", worker_id, "printable text without blanks and without . * > @ # /")
        clock = SteadyClock(clock)
        redactor = Redactor(secrets)
        self.worker_id = worker_id
        self.settings = settings
        self._store = store
        self._transport = transport
        self._clock = clock
        self._subjects = (assign_subject(worker_id), *((ASSIGN,) if shared_subject else ()))
        self._owner = f"{worker_id}#{event_id()}"
        self.journal = Journal(store.audit, redactor=redactor)
        self.outbox = Outbox(transport)
        self.steps = Steps(worker_id, settings, blocks=blocks, clock=clock, seed=seed, redactor=redactor)
        self.pools: dict[str, Pool] = {}
        shared: dict[str, Any] = {
            "steps": self.steps,
            "work": store.work,
            "journal": self.journal,
            "outbox": self.outbox,
            "clock": clock,
        }
        self.endings = Endings(owner=self._owner, v2=settings.queue_v2, pools=self.pools, **shared)
        self.runner = Runner(worker_id, pool_of=self._pool_of, endings=self.endings, lease=settings.lease, **shared)
        self.pools.update((name, self._pool(name)) for name in settings.concurrency)
        self.intake = Intake(
            worker_id,
            settings,
            pools=self.pools,
            known=blocks,
            work=store.work,
            journal=self.journal,
            clock=clock,
            drops=self.endings,
        )
        self._crew = Crew(worker_id, AT_ONCE)
        self._tasks: list[asyncio.Task[Any]] = []

    def _pool(self, name: str) -> Pool:
        return Pool(
            name,
            queue_name=f"{name}@{self.worker_id}",
            owner=self._owner,
            slots=self.settings.slots_for(name),
            rules=self.settings.rules_for(name),
            bounded=self.settings.queue_v2,
            work=self._store.work,
            clock=self._clock,
            lease=self.settings.lease,
            run=self.runner.run,
            crash_events=self.endings.crash_events,
        )

    def _pool_of(self, queue_name: str) -> Pool:
        return self.pools[queue_name.partition("@")[0]]

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find what was accepted before, then listen."""
        for state in (WorkState.PENDING, WorkState.RUNNING):
            await self._recover(state)
        subjects = self._transport.subscribe(*self._subjects)
        told = self._transport.subscribe(CANCEL, FLEET)
        loops = [(pool.serve(), pool.name) for pool in self.pools.values()]
        loops += [
            (self._listen(subjects), "intake"),
            (self._hear(told), "ear"),
            (self._beat(), "heartbeat"),
            (self._renew(), "leases"),
            (self._sweep(), "sweep"),
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work, name=f"{self.worker_id} {name}") for work, name in loops]

    async def _recover(self, state: WorkState) -> None:
        """Places for what an earlier life under this id accepted. What it ran comes back when its lease ends."""
        names = {pool.queue_name: pool for pool in self.pools.values()}
        after = ""
        while True:
            items = await self._store.work.find(state=state, after=after, limit=PAGE)
            for item in items:
                pool = names.get(item.resource_class)
                if pool is not None:
                    pool.put(self._recovered(item))
            if len(items) < PAGE:
                return
            after = items[-1].id

    def _recovered(self, item: WorkItem) -> Queued:
        place = self.endings.place(item)
        if item.state is not WorkState.RUNNING:
            return place
        left = item.lease_until / 1000 - self._clock.now()
        due = self._clock.now() + min(max(0.0, left), item.lease_ms / 1000) + 0.001
        return Queued(place.id, place.priority, place.since, due)

    async def drain(self, seconds: float | None = None) -> int:
        """Take nothing new, finish what runs, and hand back what did not finish in time. Answers how many went back."""
        self.intake.draining = True
        pools = list(self.pools.values())
        for pool in pools:
            pool.paused = True
        running = [task for pool in pools for task in pool.running.values()]
        if running:
            await asyncio.wait(running, timeout=self.settings.drain if seconds is None else seconds)
        return await self.runner.hand_back(pools)

    async def stop(self) -> None:
        """End at once; what runs goes back to the queue and spends nothing."""
        self.intake.draining = True
        for pool in self.pools.values():
            pool.paused = True
        if self._tasks:  # so that nobody is sent here meanwhile
            await self._crew.survive("a last heartbeat was not sent", self.outbox.heartbeat, self.heartbeat())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._crew.stop()
        await self.runner.hand_back(list(self.pools.values()))

    def snapshot(self) -> WorkerSnapshot:
        now = self._clock.now()
        classes = {
            name: ClassSnapshot(
                pool.status(), pool.depth(), pool.queue.size, pool.active, pool.slots, pool.queue.oldest_age(now)
            )
            for name, pool in self.pools.items()
        }
        return WorkerSnapshot(self.worker_id, self.intake.draining, classes, self.steps.counters.snapshot())

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def _listen(self, deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            await self._crew.run("an assignment could not be taken in", self._take, delivery)

    async def _take(self, delivery: Delivery) -> None:
        taken = await self.intake.take(delivery.body, delivery.headers)
        if taken.dropped is not None:
            await self.outbox.ack(taken.dropped)
            await self.endings.say(taken.dropped.assignment_id)
        await self.outbox.ack(taken.ack)
        if taken.known_in is not None:
            await self.endings.known_already(taken.ack.assignment_id, self.pools[taken.known_in])
        if delivery.done is not None:
            await delivery.done()

    async def _hear(self, deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            if delivery.subject == CANCEL:
                await self._crew.run("a cancellation failed", self._cancel, delivery)
            else:
                await self._crew.survive("a message could not be read", self._hear_fleet, delivery)

    async def _cancel(self, delivery: Delivery) -> None:
        await self.endings.cancel(_cancels.decode(delivery.body))
        if delivery.done is not None:
            await delivery.done()

    async def _hear_fleet(self, delivery: Delivery) -> None:
        self.steps.destinations.fleet_of(_fleets.decode(delivery.body).workers)
        if delivery.done is not None:
            await delivery.done()

    # ---- by the clock -----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._crew.survive("a heartbeat was not sent", self.outbox.heartbeat, self.heartbeat())
            await asyncio.sleep(self.settings.heartbeat)

    def heartbeat(self) -> Heartbeat:
        """How it is, class by class. The baseline does not tell how full it is."""
        v2 = self.settings.queue_v2
        classes = {
            name: ClassHealth(pool.status(), pool.depth() if v2 else 0, pool.active, pool.slots)
            for name, pool in self.pools.items()
        }
        wall = int(self._clock.wall() * 1000)
        return Heartbeat(self.worker_id, wall, classes, self.intake.draining, self._owner)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease / 3)
            for pool in self.pools.values():
                await self._crew.survive("leases could not be renewed", self._renew_pool, pool)

    async def _renew_pool(self, pool: Pool) -> None:
        for lost in await pool.renew():
            task = pool.running.get(lost)
            if task is not None:
                task.cancel()

    async def _sweep(self) -> None:
        """What is due by the clock alone: expiry, what crashed too often, what another worker left behind."""
        while True:
            await asyncio.sleep(self.settings.heartbeat)
            now = self._clock.now()
            for pool in self.pools.values():
                for late in pool.queue.expired(now):
                    await self._crew.survive(
                        "an expired assignment could not be ended", self.endings.expire, late, pool
                    )
            await self._crew.survive("quarantined work could not be told", self.endings.tell_crashed)
            await self._crew.survive("looking after left work failed", self.endings.watch)
