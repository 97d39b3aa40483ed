"""
An attempt of one ingestion job: fetch page after page, keep each with its cursor, and decide what follows a failure.

    claimed → fetch a page → keep documents and cursor → … → settle

`JobRunner.attempt` returns what to settle, with its events. It waits for nothing but the connector and the sink: a
retry is a due time. A job that ends early continues behind the last page that was kept, whoever runs it next.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from reefknot.audit.assignments import job_completed_event
from reefknot.audit.journal import Journal
from reefknot.core.audit.event import DecisionRecord, Event
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.overload.source_health import (
    HealthRules,
    SourceHealth,
    after_answer,
    after_outage,
    cooled,
    probe_released,
    spends_attempt,
)
from reefknot.core.retry.backoff import draw, key_number
from reefknot.core.retry.classify import classify
from reefknot.core.retry.decide import Again, Decision, History, Reason, Stop, decide
from reefknot.core.retry.policy import RetryPolicy
from reefknot.core.work import Interrupted, Quarantine, Settled, Snooze, TryAgain, WorkDone, WorkItem
from reefknot.errors import SourceError, StalePositionError, StoreError
from reefknot.execution.decision_log import ERROR, DecisionLog
from reefknot.execution.events import end_event, quarantined_event, recovered_event, retry_event, snooze_event
from reefknot.execution.failures import failure_json, failure_with_place, is_ctrl_c, is_stopped, traceback_text
from reefknot.execution.tracing import WorkTrace, spanned
from reefknot.ingestion.jobs import IngestionJob, JobQueue, item_job_id, location_in
from reefknot.ingestion.pages import checked_document, checked_page
from reefknot.ingestion.sources import IngestionSource, SourceRecords, condition_event, with_health
from reefknot.ingestion.telemetry import TelemetryRecorder
from reefknot.ports.clock import Clock
from reefknot.ports.connector import Connector, FetchRequest, ItemFailure, Page
from reefknot.ports.documents import DocumentSink, Position
from reefknot.ports.work_queue import QuarantineFilter
from reefknot.runtime import seeds
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.redaction import redact
from reefknot.runtime.timeouts import STORE_S, Timeouts

MOST_IDLE_PAGES = 100
"""Empty pages in a row that move no cursor: a connector that makes no progress is stopped."""
MOST_FAILED_ITEMS = 1000
"""Items of one sync that get a job of their own; of more there is only the number."""
MOST_LOCATIONS = 10_000
"""Locations of one sync that are remembered to its end."""
CLOSE_S = 30.0
"""Time to close a connector."""
STORE_PAUSE_S = 5.0
"""How long a job waits after a store has failed."""

T = TypeVar("T")
PolicyOf = Callable[[IngestionSource, Failure], RetryPolicy]
"""The policy for a failure of a source."""


class IngestionContext(Struct, frozen=True):
    """The parts that all jobs of one orchestrator share."""

    jobs: JobQueue
    documents: DocumentSink
    policy: PolicyOf
    rules: HealthRules
    records: SourceRecords
    telemetry: TelemetryRecorder
    journal: Journal
    clock: Clock
    timeouts: Timeouts
    seed: int | None = None


class SyncSummary(Struct, frozen=True):
    """The result of a job: what was looked at, kept, deleted, and could not be read."""

    pages: int = 0
    seen: int = 0
    kept: int = 0
    deleted: int = 0
    failed: int = 0
    problems: int = 0

    def with_page(self, page: Page) -> "SyncSummary":
        kept = len(page.documents)
        return SyncSummary(
            self.pages + 1,
            self.seen + max(page.seen, kept + len(page.failures)),
            self.kept + kept,
            self.deleted + len(page.deleted),
            self.failed + len(page.failures),
            self.problems + sum(1 for one in page.documents if one.problem),
        )


class JobReport(Struct, frozen=True):
    """The report of one attempt to the store, and its events."""

    settled: Settled
    events: tuple[Event, ...] = ()


class StoppingError(Exception):
    """The orchestrator ends: the job goes back to the queue behind the last page that was kept."""


class JobRunner:
    """Runs attempts of ingestion jobs."""

    def __init__(self, context: IngestionContext) -> None:
        self._context = context
        self._jobs = context.jobs
        self._documents = context.documents
        self._records = context.records
        self._clock = context.clock
        self._timeouts = context.timeouts
        self._log = DecisionLog("", redact, context.clock)
        self.is_stopping = False
        self.page_kept: Callable[[IngestionSource, SyncSummary], None] = lambda source, summary: None
        """Called after every page of a sync, for a progress bar."""
        self.synced: Callable[[IngestionSource, SyncSummary], None] = lambda source, summary: None
        """Called after every sync that changed something."""

    async def attempt(self, item: WorkItem, source: IngestionSource, trace: WorkTrace | None = None) -> JobReport:
        """Execute once, and decide what follows."""
        began = self._clock.wall()
        try:
            job = IngestionJob.of(item)
        except msgspec.DecodeError as error:
            return await self._quarantined(item, source, f"the payload is not one of an ingestion job: {error}")
        if job.item and item.kind != source.connector:
            text = f"{job.item} is an item of {item.kind}, and the connector of {source.name} is {source.connector} now"
            return await self._quarantined(item, source, f"{text}; discard it")
        if trace is not None:
            trace.attempt_started(item.attempts + 1, began)
        try:
            summary = await self._execute(job, source)
        except StoppingError:
            return await self._put_back(source, Interrupted())
        except StalePositionError as error:  # two syncs met; the other one is ahead
            due = int((self._clock.wall() + 1.0) * 1000)
            return await self._put_back(source, Snooze(due, str(error)))
        except StoreError as error:  # ours, not the source's
            due = int((self._clock.wall() + STORE_PAUSE_S) * 1000)
            return await self._put_back(source, Snooze(due, f"documents cannot be kept: {error}"))
        except BaseException as error:
            if _is_stopped(error):
                raise
            return await self._failed(item, source, error, began, trace)
        if trace is not None:
            trace.attempt_succeeded()
        return await self._succeeded(item, source, summary, began, is_sync=job.is_sync)

    # ---- the execution ----------------------------------------------------------------------------------------------

    async def _execute(self, job: IngestionJob, source: IngestionSource) -> SyncSummary:
        connector = source.open()
        try:
            if job.item:
                return await self._fetch_item(job, source, connector)
            return await self._sync(job, source, connector)
        finally:
            try:
                with self._timeouts.timeout(CLOSE_S):
                    await connector.close()
            except Exception as error:
                logger().warning("%s: its connector could not be closed (%s)", source.name, error_text(error))

    async def _sync(self, job: IngestionJob, source: IngestionSource, connector: Connector) -> SyncSummary:
        """Fetch and keep page after page. A job with a payload of its own does not move the cursor of its source."""
        position = await self._position(source) if job.is_sync else Position()
        is_anew = job.is_sync and await self._begins_anew(source)
        cursor = "" if is_anew else position.cursor
        known, summary = self._documents.known(source.name), SyncSummary()
        kept: set[str] = set()
        failed: set[str] = set()
        idle = 0
        while idle < MOST_IDLE_PAGES:
            if self.is_stopping:
                raise StoppingError
            request = FetchRequest(cursor, known, source.page_size, job.payload)
            page = await self._fetch(connector, request, source)
            await self._submit_failed(source, page.failures, summary.failed)  # first: the cursor passes them by
            idle = idle + 1 if page.cursor == cursor and not page.documents and not page.deleted else 0
            position = await self._keep(job, source, page, position)
            cursor = position.cursor
            if is_anew:
                is_anew = await self._has_begun(source)
            summary = summary.with_page(page)
            if len(kept) < MOST_LOCATIONS:
                kept.update(one.location for one in page.documents)
            if len(failed) < MOST_LOCATIONS:
                failed.update(one.location for one in page.failures)
            self.page_kept(source, summary)
            if page.is_last:
                if job.is_sync:
                    await self._requeue_recovered(source, kept, failed)
                if summary.kept or summary.deleted or summary.failed:
                    self.synced(source, summary)
                return summary
        message = (
            f"the connector {source.connector} makes no progress: {idle} empty pages with the same cursor; correct it"
        )
        raise SourceError(message, FailureType.PERMANENT)

    async def _position(self, source: IngestionSource) -> Position:
        with self._timeouts.timeout(STORE_S):
            return await self._documents.position(source.name)

    async def _begins_anew(self, source: IngestionSource) -> bool:
        """Whether somebody has asked for all of the source; see `SourceRecord.begin_anew`."""
        with self._timeouts.timeout(STORE_S):
            return (await self._records.read(source.name)).begin_anew

    async def _has_begun(self, source: IngestionSource) -> bool:
        """Note that the first page of a sync from the beginning is kept: what follows goes on behind it."""
        with self._timeouts.timeout(STORE_S):
            changed = await self._records.change(source.name, lambda one: structs.replace(one, begin_anew=False))
        return changed.begin_anew

    async def _fetch(self, connector: Connector, request: FetchRequest, source: IngestionSource) -> Page:
        with spanned("reefknot.page", {"reefknot.source": source.name}):
            page = await self._within(source, "page", connector.fetch(request))
            return checked_page(page, source.connector, request.limit)

    async def _within(self, source: IngestionSource, noun: str, answer: Awaitable[T]) -> T:
        """The answer of a connector, within the time limit of its source."""
        limit = self._timeouts.timeout(source.page_timeout)
        try:
            with limit:
                return await answer
        except TimeoutError:
            if not limit.expired:
                raise
            message = (
                f"the {noun} did not arrive within {source.page_timeout:g} s; "
                "timeout_seconds of the source is the limit"
            )
            raise SourceError(message, FailureType.TRANSIENT) from None

    async def _keep(self, job: IngestionJob, source: IngestionSource, page: Page, after: Position) -> Position:
        with self._timeouts.timeout(STORE_S):
            if job.is_sync:
                return await self._documents.keep(source.name, page, after=after)
            await self._documents.put(source.name, page.documents, deleted=page.deleted)
            return Position(page.cursor, after.sequence + 1)

    async def _fetch_item(self, job: IngestionJob, source: IngestionSource, connector: Connector) -> SyncSummary:
        known = self._documents.known(source.name)
        found = await self._within(source, "item", connector.fetch_item(job.item, known))
        document = None if found is None else checked_document(found, source.connector)
        with self._timeouts.timeout(STORE_S):
            if document is not None:
                await self._documents.put(source.name, [document])
                return SyncSummary(seen=1, kept=1, problems=int(bool(document.problem)))
            gone = [one.id for one in (await known.at([job.item])).values()]
            await self._documents.put(source.name, [], deleted=gone)
            return SyncSummary(seen=1, deleted=len(gone))

    async def _submit_failed(self, source: IngestionSource, failures: Sequence[ItemFailure], before: int) -> None:
        """Give every item that could not be read a job of its own: the sync goes on without it."""
        jobs = [
            IngestionJob(
                item_job_id(source.name, one.location, one.version),
                source.connector,
                source.name,
                trigger="item",
                item=one.location,
            )
            for one in failures[: max(0, MOST_FAILED_ITEMS - before)]
        ]
        if jobs:
            with self._timeouts.timeout(STORE_S):
                await self._jobs.enqueue(*jobs)
        if before < MOST_FAILED_ITEMS <= before + len(failures):
            text = "%s: more than %d items could not be read; the others are counted and get no job of their own"
            logger().warning(text, source.name, MOST_FAILED_ITEMS)

    async def _requeue_recovered(self, source: IngestionSource, kept: set[str], failed: set[str]) -> None:
        """
        Take items out of quarantine that this sync could read: their jobs find nothing wrong any more.

        A folder is no document; one that did not fail this time can be read.
        """
        with self._timeouts.timeout(STORE_S):
            found = await self._jobs.store.quarantine.find(
                QuarantineFilter(source=source.name), limit=MOST_FAILED_ITEMS
            )
            names = [one.assignment_id for one in found]
            places = {one: location_in(one, source.name) for one in names}
            ids = [one for one, at in places.items() if at in kept or (at.endswith("/") and at not in failed)]
            if ids:
                await self._jobs.requeue(ids, who="ingestion", why="the item can be read now")

    # ---- after ------------------------------------------------------------------------------------------------------

    async def _succeeded(
        self, item: WorkItem, source: IngestionSource, summary: SyncSummary, began: float, *, is_sync: bool
    ) -> JobReport:
        wall, limit = self._clock.wall(), source.max_concurrency
        now = int(wall * 1000)
        events: list[Event] = []
        if item.attempts:
            history = History(item.attempts, _elapsed(item, began, wall), item.budget.last_delay)
            events.append(recovered_event(item, wall, history))
            self._log.recovered(item, attempts=item.attempts + 1, elapsed=history.elapsed)
        self._record(item, "succeeded", wall - began)
        more = {"synced_at": now} if is_sync else {}
        await self._change_health(source, lambda health: after_answer(health, now, limit=limit), **more)
        result = msgspec.json.encode(summary)
        events.append(job_completed_event(item, result, wall))
        return JobReport(WorkDone(result.decode()), tuple(events))

    async def _failed(
        self, item: WorkItem, source: IngestionSource, error: BaseException, began: float, trace: WorkTrace | None
    ) -> JobReport:
        """Decide about a failure: again, later without an attempt, or quarantine. Control flow is never retried."""
        wall, failure = self._clock.wall(), failure_with_place(error)
        text = failure_json(failure, redact(traceback_text(error)))
        self._record(item, "failed", wall - began, failure_type=failure.failure_type.value)
        policy = self._context.policy(source, failure)
        history = History(item.attempts + 1, _elapsed(item, began, wall), item.budget.last_delay)
        seed = seeds.process_seed if self._context.seed is None else self._context.seed
        chosen = draw(seed, key_number(item.id), item.attempts)
        verdict = None if issubclass(type(error), Exception) else False
        decision = decide(policy, history, failure, chosen, verdict=verdict)
        if trace is not None:
            trace.attempt_failed(failure, decision)
        put_off = await self._report_to_source(item, source, failure, decision, policy)
        if put_off is not None:
            wait = max(0.0, put_off.due_at / 1000 - wall)
            self._log.put_off(item, put_off.reason, wait)
            return JobReport(put_off, (snooze_event(item, wall, f"source:{source.name}", wait),))
        record = DecisionRecord.of(decision, policy, history, failure, chosen, verdict=verdict)
        if isinstance(decision, Again):
            return self._again(item, failure, decision, policy, record, text, began)
        return self._given_up(item, failure, decision, policy, record, text, began)

    async def _report_to_source(
        self, item: WorkItem, source: IngestionSource, failure: Failure, decision: Decision, policy: RetryPolicy
    ) -> Snooze | None:
        """Draw from a failure what it says about the source. A snooze: it is the source's fault, and not the job's."""
        now, kind, first = int(self._clock.wall() * 1000), failure.failure_type, item.budget.first_attempt_at
        is_asked_for_long = decision == Stop(Reason.HINT_TOO_LONG)
        if kind is FailureType.RATE_LIMITED or is_asked_for_long:
            asked = failure.retry_after or 0.0
            until = now + int((decision.delay if isinstance(decision, Again) else max(asked, policy.base_delay)) * 1000)
            reason = f"it asked to wait: {failure.message}"
            health = await self._change_health(source, lambda one: cooled(one, until, now, reason))
            return Snooze(health.cools_until, f"the source cools: {failure.message}") if is_asked_for_long else None
        if kind is FailureType.TRANSIENT:
            before, rules = self._records.known(source.name).health, self._context.rules
            health = await self._change_health(
                source, lambda one: after_outage(one, item.id, now, rules, first_attempt_at=first)
            )
            return None if spends_attempt(before, first) else self._until_source_is_back(health, now, failure)
        if kind is FailureType.PERMANENT:  # an answer: the source works
            limit = source.max_concurrency
            await self._change_health(source, lambda one: after_answer(one, now, limit=limit))
        else:
            await self._change_health(source, probe_released)
        return None

    def _until_source_is_back(self, health: SourceHealth, now: int, failure: Failure) -> Snooze:
        """
        A snooze until the source is back: an outage spends no attempts.

        It ends behind the next probe, so that another job gets its turn as a probe: this one may be the only bad one.
        """
        rest = max(1000, (health.rests_until or now) - now)
        return Snooze(now + 2 * rest, f"the source does not answer: {failure.message}")

    def _again(
        self,
        item: WorkItem,
        failure: Failure,
        decision: Again,
        policy: RetryPolicy,
        record: DecisionRecord,
        text: str,
        began: float,
    ) -> JobReport:
        wall, delay, retry = self._clock.wall(), decision.delay, item.attempts + 1
        kind = failure.failure_type.value
        fields = {
            "ingestion_job_id": item.assignment_id,
            "job_type": item.kind,
            "attempt": retry,
            "max_attempts": policy.retries,
            "delay_seconds": int(delay),
            "failure_type": kind,
        }
        self._log.decided(item, decision, policy, failure, attempts=retry, named=("Scheduling retry", fields))
        self._context.telemetry.record(
            item.id,
            duration=0.0,
            status="retry_scheduled",
            metadata={"job_type": item.kind, "attempt": retry, "delay_seconds": int(delay), "failure_type": kind},
        )
        again = TryAgain(
            int((wall + delay) * 1000),
            text,
            kind,
            int(delay * 1000),
            reason="retry",
            began_at=int(began * 1000),
            delay=delay,
        )
        return JobReport(again, (retry_event(item, wall, retry, record, began=began),))

    def _given_up(
        self,
        item: WorkItem,
        failure: Failure,
        decision: Stop,
        policy: RetryPolicy,
        record: DecisionRecord,
        text: str,
        began: float,
    ) -> JobReport:
        wall, reason = self._clock.wall(), decision.reason
        fields = {
            "ingestion_job_id": item.assignment_id,
            "job_type": item.kind,
            "attempts": item.attempts,
            "max_attempts": policy.retries if policy.retryable else 0,
        }
        named = "Retry budget exhausted, quarantining job", fields
        self._log.decided(item, decision, policy, failure, attempts=item.attempts + 1, quarantined=True, named=named)
        kind = failure.failure_type.value
        metadata = {"job_type": item.kind, "attempt": item.attempts + 1, "failure_type": kind}
        self._context.telemetry.record(item.id, status="quarantined", metadata=metadata)
        why = f"{reason.value}: {failure.message}"
        events = (
            end_event(item, wall, item.attempts + 1, reason, record, began=began),
            quarantined_event(item, wall, why, failure),
        )
        return JobReport(Quarantine(why, text), events)

    async def _quarantined(self, item: WorkItem, source: IngestionSource, reason: str) -> JobReport:
        """The quarantine of a job that cannot be run at all."""
        failure = classify(reason, code=ErrorCode.internal_error)
        event = quarantined_event(item, self._clock.wall(), reason, failure)
        self._log.ended(item, reason, attempts=item.attempts, level=ERROR)
        await self._change_health(source, probe_released)
        return JobReport(Quarantine(reason, failure_json(failure)), (event,))

    async def _put_back(self, source: IngestionSource, settled: Settled) -> JobReport:
        """The report of an attempt that tells nothing about its source."""
        await self._change_health(source, probe_released)
        return JobReport(settled)

    # ---- records ----------------------------------------------------------------------------------------------------

    def _record(self, item: WorkItem, status: str, duration: float, **more: Any) -> None:
        metadata = {"job_type": item.kind, "attempt": item.attempts + 1, **more}
        if item.attempts:
            metadata["caused_by"] = item.budget.failure_type or FailureType.UNKNOWN.value
        self._context.telemetry.record(item.id, duration=duration, status=status, metadata=metadata)

    async def _change_health(
        self, source: IngestionSource, change: Callable[[SourceHealth], SourceHealth], **more: Any
    ) -> SourceHealth:
        """
        Change the health of a source, and `more` of its record, with an event when its condition changes.

        A failure here harms no job.
        """
        now, name = int(self._clock.wall() * 1000), source.name
        before = self._records.known(name)
        after = change(before.health)
        if after == before.health and not more:
            return after
        events: list[Event] = []
        if after.condition(now) is not before.health.condition(now):
            events.append(condition_event(name, structs.replace(before, health=after), now))
            logger().info("source %s is %s", name, after.condition(now).value)
        try:
            with self._timeouts.timeout(STORE_S):
                entries = self._context.journal.entries(events)
                return (await self._records.change(name, with_health(change, **more), events=entries)).health
        except Exception as error:
            logger().error("the health of source %s was not written (%s)", name, error_text(error))
            return after


def _is_stopped(error: BaseException) -> bool:
    """Whether the attempt is stopped from outside. A connector may raise the same: then the job failed."""
    kind = type(error)
    if issubclass(kind, KeyboardInterrupt):
        return is_ctrl_c(error)
    return issubclass(kind, asyncio.CancelledError | GeneratorExit) and is_stopped(kind, asyncio.current_task())


def _elapsed(item: WorkItem, began: float, wall: float) -> float:
    first = item.budget.first_attempt_at
    return max(0.0, wall - (began if first is None else first / 1000))
