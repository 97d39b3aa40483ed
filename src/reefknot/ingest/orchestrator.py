"""
`IngestionOrchestrator`: claims the due jobs of sources, and runs each as one attempt.

    due → claim → fetch a page → keep documents and cursor → settle

How many jobs of a source may run is asked before the claim: the health of the source (see `source_health` in the core),
its own limit, its connector's, and that of the whole orchestrator. So the jobs of a source that rests or cools are not
touched, and spend nothing. Leases are renewed until a report is kept; those of a process that dies come back as
crashes. Any number of orchestrators may share a store.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from math import isinf
from typing import Any, Protocol, Self, cast

from msgspec import Struct, structs

from reefknot.audit.assignments import vanished_events
from reefknot.audit.journal import Journal
from reefknot.audit.port import AuditEntry
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
from reefknot.ingest.sources import IngestionSource, SourceRecord, SourceRecords, request_sync, with_health
from reefknot.ingest.sync import IngestionContext, SyncLimits, SyncSummary
from reefknot.ingest.telemetry import TelemetryRecorder
from reefknot.ingest.watches import SourceWatches
from reefknot.policy.model.book import Book
from reefknot.policy.model.defaults import builtin_book
from reefknot.queue.execution.isolation import AGAIN_S, RUNS_ALONE, Isolation
from reefknot.queue.execution.settling import Claims, Settling
from reefknot.queue.execution.tracing import WorkTrace, source_trace
from reefknot.queue.model.source_health import HealthRules, free_places, probe_begun, probe_released
from reefknot.queue.model.work import Interrupted, Quarantine, Snooze, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import Held, Settlement, WorkClaim
from reefknot.runtime.log import RepeatedErrors, error_text, logger
from reefknot.runtime.processes import process_mark
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import STORE_S, Timeouts

IDLE_S = 5.0
"""How long an idle orchestrator waits before it looks around although nothing woke it."""
PERIOD_S = 1.0
"""How often telemetry is written and the records of sources are read while jobs run."""
STORE_PAUSE_S = 1.0


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


class _EndedJob(Struct, frozen=True):
    """A job whose attempt is over."""

    settlement: Settlement
    trace: WorkTrace | None = None


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
        self._owner = f"{name}#{new_id()}@{process_mark()}"
        self._documents = documents
        self._place = ""
        self._store = store
        self._clock = SteadyClock(clock or store.clock)
        self._timeouts = Timeouts()
        self._journal = Journal(store.audit, redactor=Redactor(secrets))
        self._errors = RepeatedErrors()
        self._registry = retry_policy_registry
        self._book = book or builtin_book()
        self.runner = JobRunner(self._context(seed))
        self._claims = Claims(store.work, self.settings.lease)
        self._reports = self._settling()
        self.running: dict[str, asyncio.Task[None]] = {}
        self.claimed: dict[str, Held] = {}
        """Everything that was claimed and whose report is not kept yet."""
        self._source_of: dict[str, str] = {}
        """The source of every claimed job."""
        self.paused = False
        self.starting = 0
        self.is_claiming = False
        self._isolation = isolation or Isolation()
        self._isolation.pools.append(self)
        self._wake = asyncio.Event()
        self._may_have_work = set(self.sources)
        """Sources whose last claim brought all that it asked for, or that the store told of since."""
        self._watches = SourceWatches(
            self.jobs, self.records, partial(self.request_sync, trigger="change"), self._clock
        )
        self.services = Services(self.name)

    def _context(self, seed: int | None) -> IngestionContext:
        return IngestionContext(
            self.jobs,
            cast(DocumentSink, self._documents),  # without one there are no sources, and no jobs
            self.policy,
            self.settings.health,
            self.records,
            self.telemetry,
            self._journal,
            self._clock,
            self._timeouts,
            self.settings.limits,
            seed,
        )

    def _settling(self) -> Settling[_EndedJob]:
        return Settling(
            self.name,
            self._store.work,
            clock=self._clock,
            timeouts=self._timeouts,
            lease=self.settings.lease,
            settled=self._settled,
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
        with self._timeouts.timeout(STORE_S):
            await self.records.refresh()
            if self._documents is not None:
                self._place = await self._documents.identity()
        for name in self.sources:
            if self._is_left_alone(name):
                logger().warning("source %s is left alone here; source list says why, and what to do", name)
        self.services.keep("claims", self._serve)
        self.services.keep("leases", self._renew_leases)
        self.services.keep("records", self._look_around)
        if self.settings.watch:
            self._watches.start(self.services, [one for one in self.sources.values() if one.on_change])

    async def stop(self, drain: "checks.Seconds | None" = None) -> int:
        """
        Begin nothing more, let jobs end their pages for `drain` seconds, and give the rest back.

        Returns how many jobs went back; that spends none of their attempts.
        """
        self.paused = self.runner.is_stopping = True
        seconds = self.settings.drain if drain is None else checks.seconds("drain", drain, or_zero=True)
        if self.running and seconds > 0:
            await asyncio.wait(list(self.running.values()), timeout=seconds)
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.services.cancel(), *self.running.values(), return_exceptions=True)
        await self._reports.finished()
        held, back = list(self.claimed.values()), 0
        if held:
            try:
                back = sum(await self._claims.give_back(held))
            except Exception as error:  # their leases run out
                logger().error("%s: jobs could not be given back (%s)", self.name, error_text(error))
            self.claimed.clear()
            self._source_of.clear()
            for name in self.sources:
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

    def wake(self) -> None:
        """Look again for something to claim."""
        self._wake.set()

    def claims(self) -> list[Held]:
        """Everything that was claimed and whose report is not kept yet."""
        return list(self.claimed.values())

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
        self.wake()
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

    def _free(self, name: str) -> int:
        """The number of jobs of a source that may begin now."""
        source, settings = self.sources[name], self.settings
        if self.paused or self._is_left_alone(name):
            return 0
        free = settings.max_concurrency - len(self.claimed)
        running = list(self._source_of.values())
        limit = settings.connectors.get(source.connector)
        if limit is not None:
            free = min(free, limit - sum(1 for one in running if self.sources[one].connector == source.connector))
        now = int(self._clock.wall() * 1000)
        health = self.records.known(name).health
        places = free_places(health, now, running=running.count(name), limit=source.max_concurrency)
        return max(0, self._isolation.may_claim(self, min(free, places)))

    def _is_left_alone(self, name: str) -> bool:
        """Whether the cursor of a source is in another sink, or another connector's: then nothing can go on here."""
        record = self.records.known(name)
        is_local = isinf(self._store.reached_for)
        return record.is_of_other(self.sources[name].connector) or bool(
            record.elsewhere(self._place, is_local=is_local)
        )

    async def _claim_some(self) -> int:
        """Claim what is due and allowed, source by source. Returns how many jobs were claimed."""
        running, got = list(self._source_of.values()), 0
        for name in sorted(self._may_have_work, key=running.count):  # the idle ones first
            free = self._free(name)
            if free > 0:
                claimed = await self._claim(name, free)
                got += claimed
                if claimed < free:
                    self._may_have_work.discard(name)
        return got

    async def _claim(self, name: str, free: int) -> int:
        self.is_claiming = True
        try:
            items = await self._claims.finish(self._claim_from(name, free), Held.of)
        finally:
            self.is_claiming = False
            self._isolation.ended(self)
        if not items:
            return 0
        if not self._isolation.admits(self, items, self._clock.now(), name=self.name):
            self._put_off(items[0])
            return 0
        for item in items:
            self._hold(item)
        await self._note_beginning(name)
        for item in items:
            self._begin(item, self.sources[name])
        return len(items)

    async def _claim_from(self, name: str, free: int) -> list[WorkItem]:
        claim = WorkClaim(
            self._owner,
            classes=(class_of(name),),
            lease=self.settings.lease,
            isolate=True,
            crash_events=self._crash_events,
        )
        with self._timeouts.timeout(STORE_S):
            return await self._store.work.claim(free, claim)

    def _put_off(self, item: WorkItem) -> None:
        """Give a suspect back until it can run alone."""
        self._hold(item)
        due_at = int((self._clock.wall() + AGAIN_S) * 1000)
        self._reports.report(_EndedJob(Settlement(item.id, item.owner, item.fence, Snooze(due_at, RUNS_ALONE))))

    def _crash_events(self, item: WorkItem) -> Iterable[AuditEntry]:
        """The events of a job whose orchestrator vanished. Called where the store runs, perhaps in another thread."""
        return self._journal.entries(vanished_events(item, self._clock.wall()))

    async def _rest(self) -> None:
        """Wait until a job ends, a source may be claimed from again, or the store has something new."""
        now = int(self._clock.wall() * 1000)
        classes, pause = [], IDLE_S
        for name in self.sources:
            if self._free(name) > 0:
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
        with self._timeouts.timeout(STORE_S):
            await self.records.refresh()
            with_work = await self._store.work.open_classes()
        self._may_have_work.update(name for name in self.sources if class_of(name) in with_work)

    async def _note_beginning(self, name: str) -> None:
        """Record that a job begins: as a probe, if the source needs one, at this place, and by which connector."""
        now, connector = int(self._clock.wall() * 1000), self.sources[name].connector

        def begun(record: SourceRecord) -> SourceRecord:
            health = probe_begun(record.health, now)
            return structs.replace(record, health=health, documents=self._place, connector=connector)

        try:
            with self._timeouts.timeout(STORE_S):
                await self.records.change(name, begun)
        except Exception as error:  # the job runs all the same
            self._errors.log(f"{self.name}: the record of source {name} was not written", error, self._clock.now())

    async def _release_probe(self, name: str) -> None:
        with suppress(Exception):  # a probe that is never released is lost after a while
            async with asyncio.timeout(STORE_S):
                await self.records.change(name, with_health(probe_released))

    # ---- attempts ---------------------------------------------------------------------------------------------------

    def _hold(self, item: WorkItem) -> None:
        """Know a claim, so that its lease is renewed, and it is given back at the end, until its report is kept."""
        self.claimed[item.id] = Held.of(item)
        self._source_of[item.id] = item.source

    def _begin(self, item: WorkItem, source: IngestionSource) -> None:
        task = asyncio.get_running_loop().create_task(self._run(item, source), name=f"job {item.id}")
        self.running[item.id] = task
        task.add_done_callback(lambda done: self._ended(done, item))

    def _ended(self, task: asyncio.Task[None], item: WorkItem) -> None:
        """Give a job back whose attempt was cut off without a report: its lease was lost, or its task cancelled."""
        if self.running.get(item.id) is task:
            del self.running[item.id]
        if not self.paused and (task.cancelled() or task.exception() is not None):
            self._reports.report(_EndedJob(Settlement(item.id, item.owner, item.fence, Interrupted())))

    async def _run(self, item: WorkItem, source: IngestionSource) -> None:
        """Make one attempt of a claimed job, and report it."""
        trace = source_trace(item)
        try:
            report = await self.runner.attempt(item, source, trace)
        except Exception as error:  # a defect of ours: the job waits, and the orchestrator goes on
            logger().error("%s: attempting %s failed inside (%s)", self.name, item.id, error_text(error))
            due_at = int((self._clock.wall() + IDLE_S) * 1000)
            report = JobReport(Snooze(due_at, f"the orchestrator failed: {error_text(error)}"))
        finally:
            if trace is not None:
                trace.attempt_ended()
        entries = tuple(self._journal.entries(report.events)) if report.events else ()
        settlement = Settlement(item.id, item.owner, item.fence, report.settled, entries)
        self._reports.report(_EndedJob(settlement, trace))

    def _settled(self, ended: _EndedJob, kept: bool) -> None:
        if kept and ended.trace is not None:
            settled = ended.settlement.settled
            if isinstance(settled, WorkDone):
                ended.trace.succeeded()
            elif isinstance(settled, Quarantine):
                ended.trace.ended("quarantined", error=settled.reason)
        self._forget(ended.settlement.id, ended.settlement.fence)

    def _forget(self, job_id: str, fence: int) -> None:
        held = self.claimed.get(job_id)
        if held is not None and held.fence == fence:
            del self.claimed[job_id], self._source_of[job_id]
        self._isolation.ended(self)
        self._wake.set()

    # ---- periodic ---------------------------------------------------------------------------------------------------

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease / 3)
            try:
                lost = await self._claims.renew(self.claims())
            except Exception as error:
                self._errors.log(f"{self.name}: leases could not be renewed", error, self._clock.now())
            else:
                self._stop_lost(lost)

    def _stop_lost(self, lost: Iterable[Held]) -> None:
        """Stop jobs that a person has cancelled, or that somebody else has by now."""
        for one in lost:
            task = self.running.get(one.id)
            if task is not None and self.claimed.get(one.id) == one and not task.cancelling():  # once: it may clean up
                task.cancel()

    async def _look_around(self) -> None:
        """Read what other processes change too: the records of sources, and the jobs that run here. Write telemetry."""
        while True:
            await asyncio.sleep(PERIOD_S if self.claimed else IDLE_S)
            before = [self.records.known(name) for name in self.sources]
            try:
                with self._timeouts.timeout(STORE_S):
                    await self.records.refresh()
                    self._stop_lost([one for one in self.claims() if not await self._is_held(one)])
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
            with self._timeouts.timeout(STORE_S):
                await self.telemetry.flush()
        except Exception as error:
            self._errors.log(f"{self.name}: telemetry could not be written", error, self._clock.now())
