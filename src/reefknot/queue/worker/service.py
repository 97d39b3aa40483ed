"""
A worker: takes assignments in, runs them as steps, publishes results, and reports its health.

    intake ──▶ queue ──▶ slot: one attempt ──▶ settle ──▶ publish the result
                 ▲                          └─▶ due again: the place is kept, the slot is free

Everything it accepted is in its store. A worker that restarts under its id finds its work there; the work of a worker
that is gone is taken over by the worker that it is sent to next.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal
from reefknot.clock import SteadyClock
from reefknot.core import checks
from reefknot.core.clock import Clock
from reefknot.core.redaction import Redactor
from reefknot.errors import ParameterError, StoreError
from reefknot.queue.execution.slots import Isolation, return_claimed
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.messages import (
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
from reefknot.queue.model.results import waits_for
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.pauses import Pauses
from reefknot.queue.port.transport import Delivery, Transport
from reefknot.queue.port.work_queue import Held, WorkFilter
from reefknot.queue.worker.attempt import StepRunner
from reefknot.queue.worker.closing import Closing, Drain
from reefknot.queue.worker.context import WorkerContext
from reefknot.queue.worker.intake import Intake
from reefknot.queue.worker.limited import GrantedStarts
from reefknot.queue.worker.pool import Pool, Queued
from reefknot.queue.worker.records import RetryCounts
from reefknot.queue.worker.settings import WorkerSettings
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.log import logger
from reefknot.runtime.redactor import add_secrets, remove_secrets
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import BoundedTasks, Service, Services
from reefknot.runtime.timeouts import STORE_S, Timeouts
from reefknot.steps.port import Block, own_classes
from reefknot.stores.port import Store

PAGE = 500
MOST_DOWN = 1000
"""Destinations that a starting worker takes for down, because work waits for them; at most."""
AT_ONCE = 64
ROUTER_SILENT_S = 7.0
"""Silence after which a worker no longer counts on a router; a router tells of itself every five seconds."""
"""Refusals, cancellations and acks handled at once, in addition to the intake's batches."""

_cancels = msgspec.json.Decoder(Cancel)
_fleets = msgspec.json.Decoder(Fleet)


class ClassSnapshot(Struct, frozen=True):
    """A resource class of a worker at one moment."""

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
    """A worker over a store and a transport."""

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
        isolation: Isolation | None = None,
        has_own_router: bool = False,
        pauses: Pauses | None = None,
    ) -> None:
        """
        Build a worker; `start` runs it.

        `process` marks whose work this is: others then see at once that it is gone, and need not wait for leases. The
        workers of a process share one `isolation`. One that `has_own_router` tells all others that it accepts nothing.
        Due retries of what is among the `pauses` go back to the router.
        """
        clock = SteadyClock(clock)
        redactor = Redactor(secrets)
        self._hidden: frozenset[str] = frozenset()
        self.worker_id = _checked(worker_id)
        self.settings = settings
        self._store = store
        self._has_own_router = has_own_router
        self._transport = transport
        self._clock = clock
        self._hears_shared = shared_subject
        self._router_heard_at = -inf
        self._context = context = WorkerContext(
            name=worker_id,
            owner=f"{worker_id}#{new_id()}{process and '@'}{process}",
            lease=settings.lease,
            settings=settings,
            work=store.work,
            transport=transport,
            journal=Journal(store.audit, redactor=redactor),
            clock=clock,
            timeouts=Timeouts(),
            redactor=redactor,
            seed=seed,
        )
        self._background = BoundedTasks(worker_id, AT_ONCE)
        self.steps = StepRunner(context, blocks, GrantedStarts(context, pauses))
        self.pools: dict[str, Pool] = {}
        self.closing = Closing(context, self.pools, self.steps)
        self._isolation = isolation = isolation or Isolation()
        for name in dict.fromkeys((*settings.concurrency, *own_classes(blocks.values()).values())):
            run, reports, events = self.closing.run, self.closing.reports, self.closing.crash_events
            self.pools[name] = Pool(name, context, run, reports, events, isolation=isolation)
        self.intake = Intake(context, self.pools, self.closing, known=blocks, tasks=self._background)
        self.leaving = Drain(context, self.pools, self.intake.drain_ack)
        self.services = Services(worker_id)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find what was accepted before, then listen. What steps log and record is free of this worker's secrets."""
        require_asyncio("Worker")
        if not self._hidden:
            self._hidden = self._context.redactor.secrets
            add_secrets(self._hidden)
        for state in (WorkState.PENDING, WorkState.RUNNING):
            await self._recover(state)
        loops: list[tuple[Service, str]] = [(pool.serve, f"pool {pool.name}") for pool in self.pools.values()]
        loops += [(pool.watch_store, f"watch {pool.name}") for pool in self.pools.values()]
        loops += [
            (lambda: self.intake.listen(self._transport.subscribe(assign_subject(self.worker_id))), "assignments"),
            (self.intake.serve, "intake"),
            (lambda: self._listen(self._transport.subscribe(CANCEL, FLEET)), "cancel and fleet"),
            (self._send_heartbeats, "heartbeat"),
            (self._renew_leases, "leases"),
            (self._sweep, "sweep"),
        ]
        if self._hears_shared:
            room = self.intake.shared_room
            room.watch()
            shared = partial(self._transport.subscribe, ASSIGN, room=room)
            loops.append((lambda: self._listen_to_shared(shared()), "shared assignments"))
        for service, name in loops:
            self.services.keep(name, service)

    async def _recover(self, state: WorkState) -> None:
        """Rebuild the queue of an earlier incarnation. What it was running comes back when its lease ends."""
        names = {pool.queue_name: pool for pool in self.pools.values()}
        waiting: dict[str, str] = {}
        which, after = WorkFilter(state=state, classes=tuple(names)), ""
        while True:
            page = await self._store.work.search(which, after=after, limit=PAGE)
            for item in page.items:
                pool = names[item.resource_class]
                pool.put(self._recovered(item, pool))
                waits = waits_for(item)
                if waits is not None and len(waiting) < MOST_DOWN:
                    waiting.setdefault(waits.destination, item.id)
            if not (after := page.after):
                break
        for work_id in waiting.values():
            one = await self._store.work.get(work_id)
            if one is not None:
                self.steps.outages.resume(one)

    def _recovered(self, item: WorkItem, pool: Pool) -> Queued:
        place = pool.queued(item)
        if item.state is not WorkState.RUNNING:
            return place
        left = (item.lease_until - self._store.moment().steady) / 1000
        due = self._clock.now() + min(max(0.0, left), item.lease_ms / 1000) + 0.001
        return msgspec.structs.replace(place, due=due, expires=inf)

    async def drain(self, seconds: "checks.Seconds | None" = None) -> int:
        """
        Accept nothing new, offer queued work to the others, finish what runs, and hand back what is not done in time.

        Returns how many running steps went back.
        """
        longest = self.settings.drain if seconds is None else checks.seconds("seconds", seconds, or_zero=True)
        self.pause()
        self.leaving.begin()
        pools = list(self.pools.values())
        running = [task for pool in pools for task in pool.running.values()]
        await self._offer_queued(pools)
        if running:
            await asyncio.wait(running, timeout=longest)
        back = await return_claimed(self._context, self.closing.reports, pools)
        await self._offer_queued(pools)
        return back

    async def _offer_queued(self, pools: list[Pool]) -> None:
        """First the routers hear that nothing can be sent here."""
        await self._send_heartbeat()
        await self._background.run_logged("queued work could not be offered to others", self._offer_now, pools)

    async def _offer_now(self, pools: list[Pool]) -> None:
        """Bounded, whatever the store does: what is kept is found again."""
        async with asyncio.timeout(STORE_S):
            await self.closing.release_prefetched(pools)
            await self.leaving.offer()

    def pause(self) -> None:
        """Accept nothing new and begin nothing; running steps may finish, and the queue is kept."""
        self.intake.draining = True
        for pool in self.pools.values():
            pool.paused = True

    def resume(self) -> None:
        """End a pause or a drain: queued work that no other worker has taken meanwhile is this worker's again."""
        self.intake.draining = self.leaving.is_on = False
        for pool in self.pools.values():
            pool.paused = False
            pool.wake()
        what = "queued work could not be recovered"
        self.services.keep("recovery", partial(self._background.run_logged, what, self._recover_queue))

    async def _recover_queue(self) -> None:
        await self._send_heartbeat()  # routers may send again what this worker refused
        await self._recover(WorkState.PENDING)

    async def stop(self) -> None:
        """End at once; running work goes back to the queue and spends nothing."""
        self.pause()
        if self.services.names:  # so that nothing is sent here meanwhile
            await self._send_heartbeat()
        await self.services.stop()
        await self._background.stop()
        await return_claimed(self._context, self.closing.reports, list(self.pools.values()))
        hidden, self._hidden = self._hidden, frozenset()
        remove_secrets(hidden)

    @property
    def runs_steps(self) -> bool:
        return any(pool.running for pool in self.pools.values())

    def abandon(self) -> list[asyncio.Task[None]]:
        """End at once, and leave what runs to its leases: the store is away. Returns the tasks that are ending."""
        steps = [task for pool in self.pools.values() for task in pool.running.values()]
        for pool in self.pools.values():
            pool.cancel_all()
        return [*steps, *self.services.cancel()]

    def snapshot(self) -> WorkerSnapshot:
        now = self._clock.now()
        classes = {
            name: ClassSnapshot(
                pool.held_status(), pool.depth(), pool.queue.size, pool.active, pool.slots, pool.queue.oldest_age(now)
            )
            for name, pool in self.pools.items()
        }
        draining, leaving = self.intake.draining, self.leaving.is_on
        return WorkerSnapshot(self.worker_id, draining, leaving, classes, self.steps.counters.snapshot())

    def level_reasons(self) -> dict[str, str]:
        """The reasons of the levels of the classes that are not healthy."""
        reasons = {name: pool.level_reason() for name, pool in self.pools.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def troubled_destinations(self) -> list[dict[str, Any]]:
        """The destinations of this worker's steps whose breaker is not closed, or whose retries are throttled."""
        safe, troubled = self._context.redactor, self.steps.outages.destinations.troubled(self._clock.now())
        return [{"worker_id": self.worker_id, **one, "name": safe(one["name"])} for one in troubled]

    # ---- messages ---------------------------------------------------------------------------------------------------

    async def _listen_to_shared(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Take what comes over the shared subject. Where it belongs to others, the worker goes on without it."""
        try:
            await self.intake.listen(deliveries)
        except StoreError as error:
            logger().warning(
                "%s: assignments to %s are not heard: %s. This worker goes on with its own subject; %s",
                self.worker_id,
                ASSIGN,
                error.problem,
                error.way_out,
            )

    async def _listen(self, deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            if delivery.subject == CANCEL:
                await self._background.start("a job was not cancelled", self._cancel, delivery)
            else:
                await self._background.run_logged("a fleet message is unreadable", self._share_throttle, delivery)

    async def _cancel(self, delivery: Delivery) -> None:
        await self.closing.cancel(_cancels.decode(delivery.body))
        if delivery.done is not None:
            await delivery.done()

    @property
    def hears_router(self) -> bool:
        """Whether a router's message to its fleet came lately."""
        return self._clock.now() - self._router_heard_at < ROUTER_SILENT_S

    async def _share_throttle(self, delivery: Delivery) -> None:
        self._router_heard_at = self._clock.now()
        self.steps.outages.destinations.fleet_of(_fleets.decode(delivery.body).workers)
        if delivery.done is not None:
            await delivery.done()

    def heartbeat(self) -> Heartbeat:
        """Status, depth, active steps and capacity of each class. The baseline does not tell its depth."""
        v2 = self.settings.queue_v2
        classes = {
            name: ClassHealth(pool.status(), pool.depth() if v2 else 0, pool.active, pool.slots)
            for name, pool in self.pools.items()
        }
        wall = int(self._clock.wall() * 1000)
        draining, leaving = self.intake.draining or self._has_own_router, self.leaving.is_on
        identity = self._store.identity
        return Heartbeat(self.worker_id, wall, classes, draining, self._context.owner, identity, leaving)

    async def _send_heartbeat(self) -> None:
        await self._background.run_logged("a heartbeat was not sent", self._context.send_heartbeat, self.heartbeat())

    # ---- periodic ---------------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        """At intervals, and at once when isolation begins: nothing more should be sent here then."""
        while True:
            await self._send_heartbeat()
            await self._isolation.wait(self.settings.heartbeat)

    def claims(self) -> list[Held]:
        """Everything that was claimed and whose report is not kept yet."""
        return [held for pool in self.pools.values() for held in list(pool.claimed.values())]

    def held(self) -> list[Held]:
        """
        The claims to hold while the event loop is blocked: all, until the time of the last attempt is over.

        A neighbour of the step that blocks cannot report either, though its own time may be over.
        """
        return self.claims() if self.is_in_time() else []

    def is_in_time(self) -> bool:
        """Whether the time of an attempt that runs here is not over yet."""
        now = self._clock.now()
        return any(now < step.ends for step in list(self.steps.running.values()))

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease / 3)
            for pool in self.pools.values():
                await self._background.run_logged("leases could not be renewed", pool.renew)

    async def _sweep(self) -> None:
        """End what has expired, publish what crashed too often, take over what another worker left behind."""
        run_logged = self._background.run_logged
        while True:
            await asyncio.sleep(self.settings.heartbeat)
            now = self._clock.now()
            for pool in self.pools.values():
                for late in pool.queue.expired(now):
                    await run_logged("an expired assignment could not be ended", self.closing.expire, late, pool)
            if self.intake.draining:  # what is claimed and not begun waits: others see it as pending
                pools = list(self.pools.values())
                await run_logged("claimed work could not be given back", self.closing.release_prefetched, pools)
            if self.leaving.has_more:
                await self._offer_queued(list(self.pools.values()))
            await run_logged("results of quarantined work could not be sent", self.closing.publish_crashed)
            await run_logged("work of other workers could not be checked", self.closing.recheck_foreign)


def _checked(worker_id: str) -> str:
    if not can_name_a_part(worker_id):
        raise ParameterError("worker_id", worker_id, PART_NAME)
    return worker_id
