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

from reefknot.audit.journal import Journal, event_id
from reefknot.clock import SteadyClock
from reefknot.core.messages import (
    ASSIGN,
    CANCEL,
    FLEET,
    PART_NAME,
    Cancel,
    ClassHealth,
    Fleet,
    Heartbeat,
    assign_subject,
    can_name_a_part,
)
from reefknot.core.overload.admission import OverloadStatus
from reefknot.core.redaction import Redactor
from reefknot.core.work import WorkItem, WorkState
from reefknot.errors import ParameterError
from reefknot.ports.block import Block
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.ports.transport import Delivery, Transport
from reefknot.runtime.tasks import BoundedTasks
from reefknot.runtime.timeouts import STORE_S, Timeouts
from reefknot.worker.attempt import Steps
from reefknot.worker.closing import Endings, Outbox, Runner
from reefknot.worker.drain import Handover
from reefknot.worker.intake import Door, Intake, Taken
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.records import RetryCounts
from reefknot.worker.settings import WorkerSettings

PAGE = 500
AT_ONCE = 64
"""What goes beside the groups at the door: refusals, cancellations, acks on their way."""

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
    leaving: bool
    """What it has queued is for others; a worker that only pauses keeps it."""
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
        process: str = "",
    ) -> None:
        """`process` marks whose work this is: others then see at once that it is gone, and need not wait for leases."""
        clock = SteadyClock(clock)
        redactor = Redactor(secrets)
        self.worker_id = _checked(worker_id)
        self.settings = settings
        self._store = store
        self._transport = transport
        self._clock = clock
        self._subjects = (assign_subject(worker_id), *((ASSIGN,) if shared_subject else ()))
        self._owner = f"{worker_id}#{event_id()}{process and '@'}{process}"
        self.journal = Journal(store.audit, redactor=redactor)
        self._limits = Timeouts()
        self.outbox = Outbox(transport, self._limits)
        self.steps = Steps(
            worker_id, settings, blocks=blocks, clock=clock, limits=self._limits, seed=seed, redactor=redactor
        )
        self.pools: dict[str, Pool] = {}
        common: dict[str, Any] = {"work": store.work, "journal": self.journal, "clock": clock, "limits": self._limits}
        shared = {**common, "steps": self.steps, "outbox": self.outbox}
        self.endings = Endings(owner=self._owner, v2=settings.queue_v2, pools=self.pools, **shared)
        self.runner = Runner(worker_id, pool_of=self._pool_of, endings=self.endings, lease=settings.lease, **shared)
        self.pools.update((name, self._pool(name)) for name in settings.concurrency)
        self.intake = Intake(worker_id, settings, pools=self.pools, known=blocks, drops=self.endings, **common)
        self.handover = Handover(
            pools=self.pools, refusal=self.intake.given_back, v2=settings.queue_v2, outbox=self.outbox, **common
        )
        self._crew = BoundedTasks(worker_id, AT_ONCE)
        self._door = Door(self.intake, self._crew, self._tell)
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
            limits=self._limits,
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
            (self._door.listen(subjects), "ear at the door"),
            (self._door.serve(), "door"),
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
        """
        Take nothing new, leave what is queued to the others, finish what runs, and hand back what is not done in time.

        Answers how many running steps went back.
        """
        self.pause()
        self.handover.begin()
        pools = list(self.pools.values())
        running = [task for pool in pools for task in pool.running.values()]
        await self._leave_queued(pools)
        if running:
            await asyncio.wait(running, timeout=self.settings.drain if seconds is None else seconds)
        back = await self.runner.hand_back(pools)
        await self._leave_queued(pools)
        return back

    async def _leave_queued(self, pools: list[Pool]) -> None:
        """First everybody hears that nothing can be sent here."""
        await self._crew.run_logged("a heartbeat was not sent", self.outbox.heartbeat, self.heartbeat())
        await self._crew.run_logged("queued work could not be left to others", self._leave_now, pools)

    async def _leave_now(self, pools: list[Pool]) -> None:
        """Whatever the store makes of it, the end of a worker does not wait for long: what is kept is found again."""
        async with asyncio.timeout(STORE_S):
            await self.runner.empty_hands(pools)
            await self.handover.give()

    def pause(self) -> None:
        """Take nothing new and begin nothing; what runs may finish, and what is queued keeps its place."""
        self.intake.draining = True
        for pool in self.pools.values():
            pool.paused = True

    def resume(self) -> None:
        """The end of a pause, or of a drain: what nobody else took meanwhile is this worker's again."""
        self.intake.draining = self.handover.on = False
        for pool in self.pools.values():
            pool.paused = False
            pool.wake()
        again = asyncio.get_running_loop().create_task(self._find_again(), name=f"{self.worker_id} recovery")
        self._tasks = [*(task for task in self._tasks if not task.done()), again]

    async def _find_again(self) -> None:
        await self._crew.run_logged("queued work could not be found again", self._recover, WorkState.PENDING)

    async def stop(self) -> None:
        """End at once; what runs goes back to the queue and spends nothing."""
        self.intake.draining = True
        for pool in self.pools.values():
            pool.paused = True
        if self._tasks:  # so that nobody is sent here meanwhile
            await self._crew.run_logged("a last heartbeat was not sent", self.outbox.heartbeat, self.heartbeat())
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
        draining, leaving = self.intake.draining, self.handover.on
        return WorkerSnapshot(self.worker_id, draining, leaving, classes, self.steps.counters.snapshot())

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def _tell(self, taken: Taken, delivery: Delivery) -> None:
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
                await self._crew.start("a cancellation failed", self._cancel, delivery)
            else:
                await self._crew.run_logged("a message could not be read", self._hear_fleet, delivery)

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
            await self._crew.run_logged("a heartbeat was not sent", self.outbox.heartbeat, self.heartbeat())
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
                await self._crew.run_logged("leases could not be renewed", self._renew_pool, pool)

    async def _renew_pool(self, pool: Pool) -> None:
        for lost in await pool.renew():
            pool.call_off(lost)

    async def _sweep(self) -> None:
        """What is due by the clock alone: expiry, what crashed too often, what another worker left behind."""
        while True:
            await asyncio.sleep(self.settings.heartbeat)
            now = self._clock.now()
            for pool in self.pools.values():
                for late in pool.queue.expired(now):
                    await self._crew.run_logged(
                        "an expired assignment could not be ended", self.endings.expire, late, pool
                    )
            if self.handover.has_more:
                await self._leave_queued(list(self.pools.values()))
            await self._crew.run_logged("quarantined work could not be told", self.endings.tell_crashed)
            await self._crew.run_logged("looking after left work failed", self.endings.watch)


def _checked(worker_id: str) -> str:
    if not can_name_a_part(worker_id):
        raise ParameterError("worker_id", worker_id, PART_NAME)
    return worker_id
