"""
`IngestionOrchestrator`: claims the due jobs of sources, and runs each as one attempt.

    due → claim → fetch a page → keep documents and cursor → settle

How many jobs of a source may run is asked before the claim: the health of the source (see `source_health` in the core),
its own limit, its connector's, and that of the whole orchestrator. So the jobs of a source that rests or cools are not
touched, and spend nothing. Leases are renewed until a report is kept; those of a process that dies come back as
crashes. Any number of orchestrators may share a store.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from math import isinf
from typing import Any, Protocol, Self, cast

from msgspec import Struct

from reefknot.audit.journal import Journal
from reefknot.clock import SteadyClock
from reefknot.core import checks
from reefknot.core.clock import Clock
from reefknot.core.failure import Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.core.redaction import Redactor
from reefknot.errors import ParameterError
from reefknot.ingest.attempt import JobReport, JobRunner
from reefknot.ingest.jobs import JobQueue, class_of
from reefknot.ingest.port import DocumentSink
from reefknot.ingest.sources import IngestionSource, SourceRecords, request_sync, with_health
from reefknot.ingest.sync import IngestionContext, SyncLimits, SyncSummary
from reefknot.ingest.telemetry import TelemetryRecorder
from reefknot.ingest.watches import SourceWatches
from reefknot.policy.model.book import Book
from reefknot.policy.model.defaults import builtin_book
from reefknot.queue.execution.settling import EndedAttempt, Settling
from reefknot.queue.execution.slots import IDLE_S, STORE_PAUSE_S, Isolation, Slots, return_claimed
from reefknot.queue.execution.tracing import source_trace
from reefknot.queue.model.source_health import HealthRules, free_places, probe_released
from reefknot.queue.model.work import Quarantine, Snooze, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Held, Settlement
from reefknot.runtime.log import RepeatedErrors, error_text, logger
from reefknot.runtime.processes import process_mark
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import STORE_S, Timeouts

PERIOD_S = 1.0
"""How often telemetry is written and the records of sources are read while jobs run."""


class ConnectorPolicies(Protocol):
    """The policies of connectors, as `RetryPolicyRegistry` has them."""

    def get_policy(self, job_type: Any) -> "ResolvesPolicy": ...


class ResolvesPolicy(Protocol):
    """A connector's policy in its own words, which the engine's words can be asked of."""

    def resolved(self, failure_type: FailureType = ...) -> RetryPolicy: ...


class IngestionSettings(Struct, frozen=True):
    """Limits of one orchestrator."""

    max_concurrency: int = 4
    connectors: Mapping[str, int] = {}
    """The number of jobs at once, by connector; those that are not named have only the limit of all."""
    health: HealthRules = HealthRules()
    lease: float = 60.0
    drain: float = 30.0
    limits: SyncLimits = SyncLimits()
    watch: bool = True
    """Whether sources with `on_change` are watched here."""


class IngestionOrchestrator:
    """Runs the jobs of sources."""

    def __init__(
        self,
        *,
        job_queue: JobQueue,
        sources: Iterable[IngestionSource] = (),
        documents: DocumentSink | None = None,
        retry_policy_registry: ConnectorPolicies | None = None,
        telemetry: TelemetryRecorder | None = None,
        book: Book | None = None,
        settings: IngestionSettings | None = None,
        clock: Clock | None = None,
        isolation: Isolation | None = None,
        secrets: tuple[str, ...] = (),
        seed: int | None = None,
        name: str = "ingestion",
    ) -> None:
        """
        Build an orchestrator over the store of `job_queue`; `start` runs it.

        Policies come from the registry, if there is one, else from the book. The orchestrators and workers of one
        process share one `isolation`.
        """
        store = job_queue.store
        self.jobs = job_queue
        self.sources = {one.name: one for one in sources}
        if documents is None and self.sources:
            raise ParameterError("documents", documents, "a sink for the documents of the sources")
        self.settings = settings or IngestionSettings()
        self.telemetry = telemetry or TelemetryRecorder(store.values)
        self.records = SourceRecords(store)
        self.name = name
        self._documents = documents
        self._store = store
        self._errors = RepeatedErrors()
        self._registry = retry_policy_registry
        self._book = book or builtin_book()
        self._context = context = IngestionContext(
            name=name,
            owner=f"{name}#{new_id()}@{process_mark()}",
            lease=self.settings.lease,
            work=store.work,
            journal=Journal(store.audit, redactor=Redactor(secrets)),
            clock=SteadyClock(clock or store.clock),
            timeouts=Timeouts(),
            seed=seed,
            jobs=job_queue,
            documents=cast(DocumentSink, documents),  # without one there are no sources, and no jobs
            policy=self.policy,
            rules=self.settings.health,
            records=self.records,
            telemetry=self.telemetry,
            limits=self.settings.limits,
        )
        self._clock = context.clock
        self.runner = JobRunner(context)
        self._reports = Settling(context)
        self._wake = asyncio.Event()
        isolation = isolation or Isolation()
        self.pools = {one: self._pool(source, isolation) for one, source in self.sources.items()}
        """By source."""
        self.services = Services(name)

    def _pool(self, source: IngestionSource, isolation: Isolation) -> Slots:
        return Slots(
            class_of(source.name),
            self._context,
            self._run,
            self._reports,
            slots=source.max_concurrency,
            isolation=isolation,
            wake=self._wake,
        )

    def policy(self, source: IngestionSource, failure: Failure) -> RetryPolicy:
        """The policy for a failure of a source."""
        if self._registry is not None:
            return self._registry.get_policy(source.connector).resolved(failure.failure_type)
        name = source.name if source.name in self._book.sources else None
        return self._book.resolve(f"connector:{source.connector}", failure, source=name)

    def reload(self, book: Book) -> None:
        """Follow another book from the next failure on."""
        self._book = book

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Run jobs from now on, until `stop`."""
        with self._context.timeouts.timeout(STORE_S):
            await self.records.refresh()
            if self._documents is not None:
                self.runner.place = await self._documents.identity()
        for name in self.sources:
            if self._is_left_alone(name):
                logger().warning("source %s is left alone here; source list says why, and what to do", name)
        self.services.keep("claims", self._serve)
        self.services.keep("leases", self._renew_leases)
        self.services.keep("records", self._look_around)
        if self.settings.watch:
            request = partial(self.request_sync, trigger="change")
            watches = SourceWatches(self.jobs, self.records, request, self._clock)
            watches.start(self.services, [one for one in self.sources.values() if one.on_change])

    async def stop(self, drain: "checks.Seconds | None" = None) -> int:
        """
        Begin nothing more, let jobs end their pages for `drain` seconds, and give the rest back.

        Returns how many jobs went back; that spends none of their attempts.
        """
        self.runner.is_stopping = True
        pools = list(self.pools.values())
        for pool in pools:
            pool.paused = True
        seconds = self.settings.drain if drain is None else checks.seconds("drain", drain, or_zero=True)
        if self.running and seconds > 0:
            await asyncio.wait(self.running, timeout=seconds)
        await self.services.stop()
        await self._reports.finished()
        held = [name for name, pool in self.pools.items() if pool.claimed]
        try:
            back = await return_claimed(self._context, self._reports, pools)
        except Exception as error:  # their leases run out
            text = "%s: claimed jobs were not returned and wait for the end of their leases (%s)"
            logger().error(text, self.name, error_text(error))
            back = 0
        for name in held:
            await self._release_probe(name)
        await self._flush_telemetry()
        return back

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def report_error(self) -> Exception | None:
        """The error for which the store refused a report more than once, until it keeps one again."""
        return self._reports.error

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """The attempts that run here."""
        return [task for pool in self.pools.values() for task in pool.running.values()]

    def claims(self) -> list[Held]:
        """Everything that was claimed and whose report is not kept yet."""
        return [held for pool in self.pools.values() for held in pool.claimed.values()]

    def abandon(self) -> list[asyncio.Task[None]]:
        """End at once, and leave what runs to its leases: the store is away. Returns the tasks that are ending."""
        running = self.running
        for pool in self.pools.values():
            pool.cancel_all()
        return [*running, *self.services.cancel()]

    def wake(self) -> None:
        """Look for due jobs now."""
        for pool in self.pools.values():
            pool.wake()

    def on_page(self, hear: Callable[[IngestionSource, SyncSummary], None]) -> None:
        """Call `hear` after every page of a sync."""
        self.runner.page_kept = hear

    def on_sync(self, hear: Callable[[IngestionSource, SyncSummary], None]) -> None:
        """Call `hear` after every sync that changed something."""
        self.runner.synced = hear

    async def request_sync(self, source: str, *, trigger: str, job_id: str = "", who: str = "") -> str | None:
        """Ask for a sync of a source now; see `sources.request_sync`."""
        job_id = job_id or f"{source}@{new_id()}"
        connector = self.sources[source].connector
        found = await request_sync(self.jobs, self.records, source, connector, job_id=job_id, trigger=trigger, who=who)
        self.pools[source].wake()
        return found

    # ---- claims -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Claim and begin jobs for as long as the orchestrator runs."""
        while True:
            self._wake.clear()
            try:
                if not await self._claim_some():
                    await self._rest()
            except Exception as error:
                self._errors.log(f"{self.name}: jobs cannot be claimed", error, self._clock.now())
                await asyncio.sleep(STORE_PAUSE_S)

    def _taken(self) -> Counter[str]:
        """The number of jobs that were claimed or run, by source."""
        return +Counter({name: pool.taken for name, pool in self.pools.items()})

    def _free(self, name: str, taken: Counter[str]) -> int:
        """The number of jobs of a source that may begin now."""
        source, pool, settings = self.sources[name], self.pools[name], self.settings
        if pool.paused or self._is_left_alone(name):
            return 0
        free = settings.max_concurrency - taken.total()
        limit = settings.connectors.get(source.connector)
        if limit is not None:
            of_connector = [number for one, number in taken.items() if self.sources[one].connector == source.connector]
            free = min(free, limit - sum(of_connector))
        health, now = self.records.known(name).health, int(self._clock.wall() * 1000)
        places = free_places(health, now, running=taken[name], limit=source.max_concurrency)
        return pool.may_claim(max(0, min(free, places)))

    def _is_left_alone(self, name: str) -> bool:
        """Whether the cursor of a source is in another sink, or another connector's: then nothing can go on here."""
        record = self.records.known(name)
        is_local = isinf(self._store.reached_for)
        return record.is_of_other(self.sources[name].connector) or bool(
            record.elsewhere(self.runner.place, is_local=is_local)
        )

    async def _claim_some(self) -> int:
        """Claim and begin what is due and allowed, source by source. Returns how many jobs there were."""
        taken, got = self._taken(), 0
        with_work = [name for name, pool in self.pools.items() if pool.store_has_work]
        for name in sorted(with_work, key=taken.__getitem__):  # the idle ones first
            pool, free = self.pools[name], self._free(name, taken)
            if free > 0:
                items = await pool.claim(free)
                pool.store_has_work = len(items) == free
                if pool.admitted(items):
                    pool.begin(items)
                    got += len(items)
                taken = self._taken()
        return got

    async def _rest(self) -> None:
        """Wait until a job ends, a source may be claimed from again, or the store has something new."""
        now = int(self._clock.wall() * 1000)
        classes, pause, taken = [], IDLE_S, self._taken()
        for name in self.sources:
            if self._free(name, taken) > 0:
                classes.append(class_of(name))
            opens_at = self.records.known(name).health.opens_at(now)
            if opens_at is not None:
                pause = min(pause, max(0.001, (opens_at - now) / 1000))
        woken: asyncio.Task[Any] = asyncio.ensure_future(self._wake.wait())
        waits: list[asyncio.Task[Any]] = [woken]
        if classes:
            waits.append(asyncio.ensure_future(self._store.work.wait(pause, classes=classes)))
        try:
            done, _ = await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        has_news = any(one.result() for one in done if one is not woken)
        if has_news or (classes and not done):
            await self._look_at_store()

    async def _look_at_store(self) -> None:
        """Find the sources that have open jobs, and hear what other processes did to sources meanwhile."""
        with self._context.timeouts.timeout(STORE_S):
            await self.records.refresh()
            with_work = await self._store.work.open_classes()
        for pool in self.pools.values():
            pool.store_has_work = pool.store_has_work or pool.queue_name in with_work

    async def _release_probe(self, name: str) -> None:
        with suppress(Exception):  # a probe that is never released is lost after a while
            async with asyncio.timeout(STORE_S):
                await self.records.change(name, with_health(probe_released))

    # ---- attempts ---------------------------------------------------------------------------------------------------

    async def _run(self, item: WorkItem) -> bool:
        """Make one attempt of a claimed job, and report it. No service time is known of jobs of sources."""
        trace = source_trace(item)
        try:
            report = await self.runner.attempt(item, self.sources[item.source], trace)
        except Exception as error:  # a defect of ours: the job waits, and the orchestrator goes on
            text = "%s: internal error in an attempt of %s; the job is put off (%s)"
            logger().error(text, self.name, item.id, error_text(error))
            due_at = int((self._clock.wall() + IDLE_S) * 1000)
            report = JobReport(Snooze(due_at, f"the orchestrator failed: {error_text(error)}"))
        finally:
            if trace is not None:
                trace.attempt_ended()
        settled, end_trace = report.settled, None
        if trace is not None and isinstance(settled, WorkDone):
            end_trace = trace.succeeded
        elif trace is not None and isinstance(settled, Quarantine):
            end_trace = partial(trace.ended, "quarantined", error=settled.reason)
        entries = tuple(self._context.journal.entries(report.events)) if report.events else ()
        settlement = Settlement(item.id, item.owner, item.fence, settled, entries)
        self._reports.report(EndedAttempt(item, settlement, self.pools[item.source], end_trace=end_trace))
        return False

    # ---- periodic ---------------------------------------------------------------------------------------------------

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease / 3)
            for pool in self.pools.values():
                try:
                    await pool.renew()
                except Exception as error:
                    self._errors.log(f"{self.name}: leases could not be renewed", error, self._clock.now())

    async def _look_around(self) -> None:
        """Read what other processes change too: the records of sources, and the jobs that run here. Write telemetry."""
        while True:
            await asyncio.sleep(PERIOD_S if self.claims() else IDLE_S)
            before = [self.records.known(name) for name in self.sources]
            try:
                with self._context.timeouts.timeout(STORE_S):
                    await self.records.refresh()
                    for pool in self.pools.values():
                        held = list(pool.claimed.values())
                        pool.stop_lost([one for one in held if not await self._is_held(one)])
            except Exception as error:
                self._errors.log(f"{self.name}: the records of sources cannot be read", error, self._clock.now())
                continue
            if before != [self.records.known(name) for name in self.sources]:
                self._wake.set()
            await self._flush_telemetry()

    async def _is_held(self, claim: Held) -> bool:
        item = await self._store.work.get(claim.id)
        return item is not None and item.state is WorkState.RUNNING and item.fence == claim.fence

    async def _flush_telemetry(self) -> None:
        try:
            with self._context.timeouts.timeout(STORE_S):
                await self.telemetry.flush()
        except Exception as error:
            self._errors.log(f"{self.name}: telemetry could not be written", error, self._clock.now())
