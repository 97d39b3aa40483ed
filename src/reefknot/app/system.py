"""
Router and workers on one store: the whole system in one process, or its parts in several.

All parts on one store exchange messages, whichever process they are in. Commands from other processes arrive through
the store's control part; each system also keeps its status there, so that `worker list` and `router status` work from
anywhere. Workers on one store have different names, and the work of a system that is gone is taken over.
"""

import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import msgspec

from reefknot.app.activity import Activity
from reefknot.app.alert_watch import running_activity
from reefknot.app.blocks import blocks_for, check_steps, start_preparing
from reefknot.app.commands import Commands
from reefknot.app.reload import PolicyReload, ReloadOutcome
from reefknot.audit.copies import kept_events
from reefknot.audit.journal import Journal
from reefknot.audit.port import end_of
from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.redaction import Redactor
from reefknot.errors import NameTakenError, StoreMovedError, StoreUnavailableError
from reefknot.ingest.assembly import running_ingestion, sync_entries
from reefknot.ingest.configured_schedules import running_schedules
from reefknot.ingest.orchestrator import IngestionOrchestrator
from reefknot.policy.settings import Settings
from reefknot.queue import presence
from reefknot.queue.connect import client_of, system_scope
from reefknot.queue.execution.slots import Isolation
from reefknot.queue.model.messages import ExecAssignment, ExecResult
from reefknot.queue.model.submission import Capacity
from reefknot.queue.pauses import PauseWatch
from reefknot.queue.port.work_queue import Held
from reefknot.queue.presence import STATUS_EVERY_S, look_for_orphans
from reefknot.queue.router.service import Router, submit_read
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.router.settings import settings_from as router_settings
from reefknot.queue.router.submissions import Submissions
from reefknot.queue.worker.loop_watch import LoopWatch
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import WorkerSettings, settings_from
from reefknot.runtime.log import RepeatedErrors, logger, printable
from reefknot.runtime.processes import process_mark
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import AWAY_S, STORE_S, ended, unless_away
from reefknot.steps.port import Block, destinations_of, own_classes
from reefknot.steps.threads import function_threads
from reefknot.stores.opening import open_store, options_of
from reefknot.stores.port import Store, refuse_moved
from reefknot.stores.port.engines import engine_of

ROUTER_NAME = "router"
STORE_PAUSE_S = 0.25
FAILED_STOP_S = 3.0
"""Longest orderly stop of a system whose store has failed."""
STARTING_TRIES = 4
FREE_NAMES_TRIED = 10
Stopped = Callable[["System"], Coroutine[Any, Any, None]]


class System:
    """A router, workers, or both, over one store."""

    leads = False
    """Whether this system looks after what concerns all of the store: orphans, alerts, and submissions."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        settings: WorkerSettings,
        blocks: Mapping[str, Block],
        workers: Sequence[str] = ("worker-1",),
        router: str | None = ROUTER_NAME,
        routing: RouterSettings | None = None,
        hears_shared: bool = False,
        seed: int | None = None,
        secrets: tuple[str, ...] = (),
        reload: PolicyReload | None = None,
        own_work_only: bool = False,
        activity: Activity | None = None,
    ) -> None:
        """
        Build the parts over an open store; `start` runs them.

        `workers` are their names; `router` is the router's name, None for no router. `routing` are the router's
        settings; without them its queue has the workers' bounds. With `hears_shared` the workers also take what comes
        over the shared subject. With `own_work_only` the system runs what is submitted through it, and leaves all other
        work of the store to others. With an `activity`, the status has what it counts.
        """
        self._clock = clock = SteadyClock(clock)
        self.store = store
        self.settings = settings
        self.system_id = new_id()
        self._blocks = blocks
        self._started_at = int(clock.wall() * 1000)
        self._process = process_mark()
        self._transport = store.transport(keeps_shared=hears_shared)
        shared: dict[str, Any] = {"store": store, "transport": self._transport, "clock": clock}
        self._pauses = PauseWatch(store, clock)
        shared |= {"seed": seed, "process": self._process, "secrets": secrets, "pauses": self._pauses.pauses}
        self.routing = routing or RouterSettings(rules=settings.rules)
        self._own_work_only = own_work_only
        own: Any = {"destination_of": destinations_of(blocks), "own_workers": workers if own_work_only else ()}
        self._router = None if router is None else Router(settings=self.routing, router_id=router, **shared, **own)
        shared |= {"has_own_router": own_work_only}
        self.isolation = Isolation(lambda: function_threads().overdue)
        shared |= {"settings": settings, "blocks": blocks, "shared_subject": hears_shared, "isolation": self.isolation}
        self.workers = [Worker(name, **shared) for name in workers]
        self.client = client_of(store, clock, self.routing.rules.size)
        journal = Journal(store.audit, redactor=Redactor(secrets))
        submissions = Submissions(store.work, clock, rules=self.routing.submission_rules, journal=journal)
        self._recall = None if own_work_only else submissions.recall
        self._scope = ExitStack()  # open while the system runs: its steps connect to it
        self._errors = RepeatedErrors()
        self.started_after = 0
        """The last event of the log before this system started."""
        self._services = Services("system")
        self._commands = Commands(store, clock, self.workers, self._pauses.look, router=router, reload=self.reload)
        self.ingestion: IngestionOrchestrator | None = None
        """The orchestrator that runs with the workers, if there is one."""
        self._activity = activity
        if activity is not None:
            activity.workers = self.workers
        self._reload = reload
        self._reloading: set[asyncio.Task[ReloadOutcome]] = set()

    @property
    def router(self) -> Router:
        """The router of a system that has one."""
        if self._router is None:
            raise LookupError("this system has no router")
        return self._router

    async def start(self) -> None:
        """Start the parts. A name that another living system has is refused before anything else is done."""
        await self._commands.start()
        await self._pauses.read()
        self.started_after = (await end_of(self.store.audit)).sequence
        await self._claim_names()
        await self._look_for_lead()
        self._scope.enter_context(system_scope(self.client))
        if (classes := self._looked_after()) is not None:
            await presence.release_dead_leases(self.store, classes)
        if self._router is not None:
            await self._router.start()
        for worker in self.workers:
            await worker.start()
        try:
            await self._transport.ready()
        except BaseException:
            await self.stop()
            raise
        self._services.keep("control", self._commands.obey)
        self._services.keep("pauses", self._pauses.follow)
        self._services.keep("status", self._show)
        self._services.keep("lead", self._keep_lead)
        self._services.keep("orphans", partial(look_for_orphans, self.store, self._recall, self._looked_after))

    async def _keep_lead(self) -> None:
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            try:
                await self._look_for_lead()
            except Exception as error:
                self._errors.log("which system leads is not known", error, self._clock.now())

    async def _look_for_lead(self) -> None:
        """Find out whether this system leads. A worker by itself reads nothing for that while it hears of a router."""
        if self._own_work_only:
            return
        if self._router is None and any(worker.hears_router for worker in self.workers):
            self.leads = False
        else:
            first = presence.leading(await presence.living_systems(self.store))
            self.leads = first is None or first["system_id"] == self.system_id
        if self._activity is not None:
            self._activity.leads = self.leads
        if self._router is not None:
            self._router.leads = self.leads

    def _looked_after(self) -> tuple[str, ...] | None:
        """
        The classes whose orphans this system looks for: all, the queues of its own workers, or none.

        One that only does its own work may continue that of one which died, where no other system runs.
        """
        if self._own_work_only or (self.leads and self._router is not None):
            return ()
        own = [pool.queue_name for worker in self.workers for pool in worker.pools.values()]
        return tuple(own) or None

    async def _claim_names(self) -> None:
        """Report this system's names, or do not start; then check that no other system has them."""
        for left in reversed(range(STARTING_TRIES)):
            try:
                await self._report()
                break
            except StoreUnavailableError:
                if not left:
                    await self._transport.close()
                    raise
                await asyncio.sleep(STORE_PAUSE_S)
        try:
            await presence.refuse_taken_names(self.store, self.system_id)
            await refuse_moved(self.store)  # a move leaves its mark, and then looks for reports
        except (NameTakenError, StoreMovedError):
            await self._withdraw_status()
            await self._transport.close()
            raise

    async def stop(self, drain: float = 0.0) -> int:
        """
        End. With `drain`, running steps get that many seconds; returns how many went back to the queue.

        Nothing can be returned to a store that stays unreachable: that work comes back when its leases expire.
        """
        self._scope.close()
        tasks = (*self._services.cancel(), *self._commands.draining.values(), *self._reloading)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        drained_at = asyncio.get_running_loop().time() + drain

        def is_away() -> bool:
            may_run = asyncio.get_running_loop().time() < drained_at and any(one.runs_steps for one in self.workers)
            return self.store.reached_for == 0 and not may_run

        back = await unless_away(self._stop_parts(drain), is_away, AWAY_S)
        if back is None:
            logger().warning("the store cannot be reached: running work comes back when its leases expire")
            router = [] if self._router is None else self._router.services.cancel()
            await ended(*router, *(task for worker in self.workers for task in worker.abandon()))
        await self._transport.close()
        for block in {id(block): block for block in self._blocks.values()}.values():
            await block.close()
        if back is not None:
            await self._withdraw_status()
        return back or 0

    async def _stop_parts(self, drain: float) -> int:
        back = sum(await asyncio.gather(*(worker.drain(drain) for worker in self.workers)))
        for worker in self.workers:
            await worker.stop()
        if self._router is not None:
            await self._router.stop()
        return back

    def give_back_now(self) -> None:
        """Return the claims of the workers, for a process that ends at once. Blocks its thread, not the loop."""
        held = [one for worker in self.workers for one in worker.claims()] + self.ingestion_claims()
        if held:
            self.store.leases.give_back(held)

    def ingestion_claims(self) -> list[Held]:
        """The jobs of sources that run in this system."""
        return [] if self.ingestion is None else self.ingestion.claims()

    def store_failed(self) -> Coroutine[Any, Any, NoReturn]:
        """Raise the error after which the store takes no more writes; the system could do nothing more."""
        return presence.store_failed(self.store)

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Submit what `read_assignment` has returned, which needs no second check; the future is its result."""
        return await submit_read(self.router, assignment)

    def has_step(self, job_type: str) -> bool:
        """Whether this system can run steps of this type."""
        return job_type in self._blocks

    @property
    def step_types(self) -> list[str]:
        """The types of the steps that this system can run."""
        return sorted(self._blocks)

    def snapshot(self) -> dict[str, Any]:
        """The state of the router and of every worker, as JSON can carry it."""
        return {
            "system_id": self.system_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "process": self._process,
            "started_at": self._started_at,
            "at": int(self._clock.wall() * 1000),
            "router": self._router and presence.finite(msgspec.to_builtins(self._router.snapshot())),
            "workers": [msgspec.to_builtins(worker.snapshot()) for worker in self.workers],
            "holds": {one.worker_id: [held.id for held in one.claims()[: presence.MOST_HELD]] for one in self.workers},
            "blocks": self.step_types,
            "step_classes": own_classes(self._blocks.values()),
            "sources": [] if self.ingestion is None else sorted(self.ingestion.sources),
            "own_work_only": self._own_work_only,
            "retries_v2": self.settings.retries_v2,
            "queue_v2": self.settings.queue_v2,
            "reload": msgspec.to_builtins(self._reload.latest) if self._reload else None,
            "activity": self._activity and self._activity.status(),
        }

    # ---- for others -------------------------------------------------------------------------------------------------

    async def _show(self) -> None:
        while True:
            await self._report_status()
            await asyncio.sleep(STATUS_EVERY_S)

    def _capacity(self) -> Capacity:
        slots: Counter[str] = Counter()
        for worker in self.workers:
            for name, pool in worker.pools.items():
                slots[name] += 0 if pool.paused else pool.slots
        return Capacity(dict(slots), None if self._router is None else self.routing.submission_rules)

    async def _report_status(self) -> None:
        try:
            await self._report()
        except Exception as error:
            self._errors.log("the system's status was not written", error, self._clock.now())

    async def _report(self) -> None:
        body = json.dumps(self.snapshot(), default=str)
        async with asyncio.timeout(STORE_S):
            await self.store.control.report(
                self.system_id, body, keep=presence.STATUS_KEPT_S, capacity=self._capacity()
            )

    async def _withdraw_status(self) -> None:
        try:
            async with asyncio.timeout(STORE_S):
                await presence.forget_replaced(self.store)
                await self.store.control.withdraw(self.system_id)
        except Exception as error:
            logger().error("the system's status was not withdrawn (%s)", printable(str(error), most=300))

    def reload(self, actor: str, sequence: int = 0) -> asyncio.Task[ReloadOutcome] | None:
        """Read the configuration again, in the background. None when this system was not started from one."""
        if self._reload is None:
            logger().error("this system was not started from a configuration that can be read again")
            return None
        followers = [worker.steps.reload for worker in self.workers]
        followers += [] if self.ingestion is None else [self.ingestion.reload]
        limits = None if self._router is None else self._router.limits.follow
        reloading = self._reload.once(followers, limits, actor=actor, sequence=sequence)
        task = asyncio.get_running_loop().create_task(reloading, name="reload")
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)
        return task


def worker_settings(settings: Settings) -> WorkerSettings:
    """The checked configuration in the worker's words."""
    gates = {"retries_gate": settings.retries_gate, "queue_gate": settings.queue_gate}
    return settings_from(settings.configuration, settings.book, **gates)


@asynccontextmanager
async def running_system(
    url: str,
    settings: Settings,
    *,
    workers: Sequence[str] | int = ("worker-1",),
    router: str | None = ROUTER_NAME,
    modules: Sequence[str] | Mapping[str, Block] = (),
    drain: float = 5.0,
    seed: int | None = None,
    secrets: tuple[str, ...] = (),
    reread: Callable[[], Settings] | None = None,
    own_work_only: bool = False,
    stopped: Stopped | None = None,
    ingestion: bool = False,
    checks_steps: bool | None = None,
) -> AsyncIterator[System]:
    """
    A system that runs for as long as the block lasts.

    `workers` are names, or how many: then the names are free. `router` is its name, "" for a free one, None for none.
    `modules` are the names of modules with steps, or the steps themselves. `reread` reads the configuration again, for
    reloads of policies. With `own_work_only`, no name is free for which the store has queued work. With `ingestion`,
    the configured sources are synced as well. `stopped` is awaited after an orderly stop, drain included, while the
    store is still open. `checks_steps` says whether to check and warn about the steps; None: where there are workers.
    """
    blocks = modules if isinstance(modules, Mapping) else blocks_for(settings, modules, store=url)
    if workers if checks_steps is None else checks_steps:
        await check_steps(settings, blocks.values())
    options, working = options_of(settings), worker_settings(settings)
    # Without peers, every worker would receive every assignment.
    hears_shared = engine_of(url).hears_peers and settings.configuration.router.shared_subject == "ours"
    async with open_store(url, **options) as store, AsyncExitStack() as opened:
        opened.callback(start_preparing(settings, blocks.values() if workers and not own_work_only else ()).cancel)
        books = await opened.enter_async_context(kept_events(store, settings, secrets=secrets))
        clock = SteadyClock(store.clock)
        journal = Journal(store.audit, redactor=Redactor(secrets))
        watched = None if own_work_only else settings
        activity = await opened.enter_async_context(running_activity(store, clock, journal, watched=watched))
        build = partial(
            System,
            store,
            clock,
            settings=working,
            blocks=blocks,
            routing=router_settings(settings.configuration, working.rules, settings.limits),
            hears_shared=bool(workers) and hears_shared and not own_work_only,
            seed=seed,
            secrets=secrets,
            reload=reread and PolicyReload(settings, reread, books=books, journal=journal, clock=clock),
            own_work_only=own_work_only,
            activity=activity,
        )
        system = await _started(build, store, workers, router, own_work_only=own_work_only)
        with LoopWatch(system.workers, store.leases, others=system.ingestion_claims):
            async with _stopped_at_the_end(system, drain, stopped), AsyncExitStack() as parts:
                if ingestion:
                    how: Any = {"isolation": system.isolation, "secrets": secrets, "drain": drain, "seed": seed}
                    system.ingestion = await parts.enter_async_context(running_ingestion(store, settings, url, **how))
                if router is not None and not own_work_only:
                    syncs = [] if system.ingestion is None else sync_entries(settings, system.ingestion)
                    await parts.enter_async_context(running_schedules(store, settings, system.client, syncs))
                yield system


async def _started(
    build: Callable[..., System], store: Store, workers: Sequence[str] | int, router: str | None, *, own_work_only: bool
) -> System:
    """A system that has started, under names that are free where none were given."""
    tries = FREE_NAMES_TRIED
    while True:
        names, name = await presence.chosen_names(store, workers, router, own_work_only=own_work_only)
        system = build(workers=names, router=name)
        try:
            await system.start()
            return system
        except NameTakenError:  # a system that started in the same moment was faster
            tries -= 1
            if not tries or not (router == "" or isinstance(workers, int)):
                raise


@asynccontextmanager
async def _stopped_at_the_end(system: System, drain: float, stopped: Stopped | None) -> AsyncIterator[None]:
    try:
        yield
    finally:
        failure = await _stop(system, drain)
    if failure is not None:
        raise failure
    if stopped is not None:
        store = system.store
        try:
            await unless_away(stopped(system), lambda: store.reached_for == 0, AWAY_S)
        except StoreUnavailableError:
            if store.reached_for > 0:  # else the error is in the log already
                raise


async def _stop(system: System, drain: float) -> BaseException | None:
    """
    Stop in order while the store works. Returns the store's failure, if any.

    Nothing can be returned to a store that has failed: the next process finds the work as after a crash.
    """
    if system.store.failure is not None:
        drain = 0.0
    stopping = asyncio.ensure_future(system.stop(drain))
    failed = asyncio.ensure_future(system.store_failed())
    try:
        await asyncio.wait([stopping, failed], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await asyncio.wait([stopping], timeout=FAILED_STOP_S)
        if stopping.done():
            await stopping
        return failed.exception() if failed.done() else system.store.failure
    finally:
        stopping.cancel()
        failed.cancel()
        await asyncio.wait([stopping, failed], timeout=FAILED_STOP_S)
