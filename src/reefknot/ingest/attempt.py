"""
An attempt of one ingestion job: execute it once (see `sync`), and decide what follows a failure.

    claimed → execute → settle

`JobRunner.attempt` returns what to settle, with its events. It waits for nothing but the connector and the sink: a
retry is a due time. A job that ends early continues behind the last page that was kept, in any process.

Only failures of the job itself spend its attempts. A limit of the source's rate spends none, nor does an outage of the
source; and a sync that kept a page since its last failure has its full number of attempts again.
"""

import asyncio
from collections.abc import Callable
from socket import gaierror
from typing import Any

import msgspec
from msgspec import Struct, structs

from reefknot.audit.assignments import job_completed_event
from reefknot.audit.model.event import DecisionRecord, Event
from reefknot.core.backoff import draw, key_number
from reefknot.core.classify import classify
from reefknot.core.decide import Again, Decision, History, Reason, Stop, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.errors import SourceError, StalePositionError, StoreError
from reefknot.ingest.jobs import IngestionJob
from reefknot.ingest.sources import IngestionSource, SourceRecord, condition_event, remembered_jobs, with_health
from reefknot.ingest.sync import IngestionContext, JobExecution, MemoryFullError, StoppingError, SyncSummary
from reefknot.queue.execution.decision_log import ERROR, INFO, DecisionLog
from reefknot.queue.execution.events import end_event, quarantined_event, recovered_event, retry_event, snooze_event
from reefknot.queue.execution.failures import failure_json, failure_with_place, is_ctrl_c, is_stopped, traceback_text
from reefknot.queue.execution.tracing import WorkTrace
from reefknot.queue.model.source_health import (
    NO_ANSWER,
    SourceHealth,
    after_answer,
    after_outage,
    cooled,
    outage_is_too_long,
    probe_begun,
    probe_released,
    spends_attempt,
)
from reefknot.queue.model.work import (
    Interrupted,
    Quarantine,
    Settled,
    Snooze,
    TryAgain,
    WorkDone,
    WorkItem,
    attempts_since_progress,
    requeued_at,
)
from reefknot.runtime import seeds
from reefknot.runtime.log import RepeatedErrors, error_text, logger, printable, seconds
from reefknot.runtime.redactor import redact
from reefknot.runtime.timeouts import STORE_S

STORE_PAUSE_S = 5.0
"""How long a job waits after a store has failed."""
FULL_PAUSE_S = 60.0
"""How long a sync waits before it looks again whether more failed items can be remembered."""
ROOM_AGAIN = 0.9
"""The part of the bound of remembered items below which a sync that has stopped there goes on."""


class JobReport(Struct, frozen=True):
    """The report of one attempt to the store, and its events."""

    settled: Settled
    events: tuple[Event, ...] = ()


class JobRunner:
    """Runs attempts of ingestion jobs."""

    def __init__(self, context: IngestionContext) -> None:
        self._context = context
        self._records = context.records
        self._clock = context.clock
        self._timeouts = context.timeouts
        self._log = DecisionLog("", redact, context.clock)
        self._errors = RepeatedErrors()
        self.is_stopping = False
        self.place = ""
        """The place of the documents (`DocumentSink.identity`)."""
        self.page_kept: Callable[[IngestionSource, SyncSummary], None] = lambda source, summary: None
        """Called after every page of a sync, for a progress bar."""
        self.synced: Callable[[IngestionSource, SyncSummary], None] = lambda source, summary: None
        """Called after every sync that changed something."""

    async def attempt(self, item: WorkItem, source: IngestionSource, trace: WorkTrace | None = None) -> JobReport:
        """Execute once, and decide what follows."""
        await self._note_beginning(source)
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
        run = JobExecution(self._context, job, source)
        run.is_stopping = lambda: self.is_stopping
        run.page_kept = lambda summary: self.page_kept(source, summary)
        run.answered = lambda: self._answered(source, run)
        try:
            if job.is_sync and await self._is_full(item, job, source):
                raise MemoryFullError
            summary = await run.run()
        except StoppingError:
            return await self._put_back(source, run, Interrupted())
        except MemoryFullError:
            return await self._stopped(source, run)
        except StalePositionError as error:  # two syncs met; the other one is ahead
            return await self._put_back(source, run, Snooze(self._due_in(1.0), str(error)))
        except StoreError as error:  # ours, not the source's
            why = f"documents cannot be kept: {error}"
            return await self._put_back(source, run, Snooze(self._due_in(STORE_PAUSE_S), why))
        except BaseException as error:
            if _is_stopped(error):
                raise
            return await self._failed(item, source, error, began, trace, run, of_source=_is_of_source(job, error))
        if trace is not None:
            trace.attempt_succeeded()
        return await self._succeeded(item, source, summary, began, is_sync=job.is_sync)

    async def _note_beginning(self, source: IngestionSource) -> None:
        """Record that a job begins: as a probe, if the source needs one, at this place, and by which connector."""
        now = int(self._clock.wall() * 1000)

        def begun(record: SourceRecord) -> SourceRecord:
            health = probe_begun(record.health, now)
            return structs.replace(record, health=health, documents=self.place, connector=source.connector)

        try:
            with self._timeouts.timeout(STORE_S):
                await self._records.change(source.name, begun)
        except Exception as error:  # the job runs all the same
            what = f"{self._context.name}: the record of source {source.name} was not written"
            self._errors.log(what, error, self._clock.now())

    def _due_in(self, seconds: float) -> int:
        return int((self._clock.wall() + seconds) * 1000)

    # ---- a source that cannot remember more items --------------------------------------------------------------------

    async def _is_full(self, item: WorkItem, job: IngestionJob, source: IngestionSource) -> bool:
        """
        Whether the sync of this source has stopped at the bound of remembered items, and there is no room yet.

        A sync that a person has just asked for reads on: the cause may be mended.
        """
        if not self._records.known(source.name).full_since or (job.trigger == "manual" and not item.snoozes):
            return False
        with self._timeouts.timeout(STORE_S):
            remembered = await remembered_jobs(self._context.jobs.store, source.name) - 1  # without this one
        return remembered > ROOM_AGAIN * self._context.limits.max_failed_items

    async def _stopped(self, source: IngestionSource, run: JobExecution) -> JobReport:
        """The report of a sync that stops before items that it can neither read nor remember."""
        now, most = int(self._clock.wall() * 1000), self._context.limits.max_failed_items
        why = f"{most} items of {source.name} could not be read, and more fail: the sync stops before those"
        since = self._records.known(source.name).full_since
        if not since:
            text = "%s; it goes on by itself when some are read. To do: reefknot quarantine list --source %s"
            logger().warning(text, why, source.name)
        limit = source.max_concurrency
        answered = (lambda one: after_answer(one, now, limit=limit)) if run.pages else probe_released
        await self._change_health(source, answered, full_since=since or now)
        return JobReport(Snooze(now + int(FULL_PAUSE_S * 1000), why))

    # ---- after ------------------------------------------------------------------------------------------------------

    async def _succeeded(
        self, item: WorkItem, source: IngestionSource, summary: SyncSummary, began: float, *, is_sync: bool
    ) -> JobReport:
        wall, limit = self._clock.wall(), 0 if is_sync else source.max_concurrency  # all of it was read: it is back
        now = int(wall * 1000)
        events: list[Event] = []
        if item.attempts:
            history = History(item.attempts, _elapsed(item, began, wall), item.budget.last_delay)
            events.append(recovered_event(item, wall, history))
            self._log.recovered(item, attempts=item.attempts + 1, elapsed=history.elapsed)
        self._record(item, "succeeded", wall - began)
        if is_sync and (summary.kept or summary.deleted or summary.failed):
            self.synced(source, summary)
        more: dict[str, Any] = {"synced_at": now, "full_since": 0} if is_sync else {}
        await self._change_health(source, lambda health: after_answer(health, now, limit=limit), **more)
        result = msgspec.json.encode(summary)
        events.append(job_completed_event(item, result, wall))
        return JobReport(WorkDone(result.decode()), tuple(events))

    async def _failed(
        self,
        item: WorkItem,
        source: IngestionSource,
        error: BaseException,
        began: float,
        trace: WorkTrace | None,
        run: JobExecution,
        *,
        of_source: bool,
    ) -> JobReport:
        """Decide about a failure: again, later without an attempt, or quarantine. Control flow is never retried."""
        wall, failure = self._clock.wall(), failure_with_place(error)
        text = failure_json(failure, redact(traceback_text(error)))
        self._record(item, "failed", wall - began, failure_type=failure.failure_type.value)
        policy = self._context.policy(source, failure)
        is_limited = failure.failure_type is FailureType.RATE_LIMITED
        before = 0 if is_limited else attempts_since_progress(item, run.progress)  # a limit spends no attempt
        history = History(before + 1, _elapsed(item, began, wall), item.budget.last_delay if before else 0.0)
        seed = seeds.process_seed if self._context.seed is None else self._context.seed
        chosen = draw(seed, key_number(item.id), item.attempts)
        verdict = None if issubclass(type(error), Exception) else False
        decision = decide(policy, history, failure, chosen, verdict=verdict)
        if trace is not None:
            trace.attempt_failed(failure, decision)
        if run.pages:
            await self._answered(source, run)
        put_off = await self._report_to_source(item, source, failure, decision, policy, of_source=of_source)
        if put_off is not None:
            return await self._put_off(item, source, put_off, failure, decision, policy)
        record = DecisionRecord.of(decision, policy, history, failure, chosen, verdict=verdict)
        if isinstance(decision, Again):
            return self._again(item, failure, decision, policy, record, text, began, attempts=before + 1, run=run)
        return self._given_up(item, failure, decision, policy, record, text, began, attempts=before + 1)

    async def _report_to_source(
        self,
        item: WorkItem,
        source: IngestionSource,
        failure: Failure,
        decision: Decision,
        policy: RetryPolicy,
        *,
        of_source: bool,
    ) -> Snooze | None:
        """Draw from a failure what it says about the source. A snooze: it is the source's fault, and not the job's."""
        now, kind, first = int(self._clock.wall() * 1000), failure.failure_type, item.budget.first_attempt_at
        is_asked_for_long = decision == Stop(Reason.HINT_TOO_LONG)
        if is_asked_for_long or (kind is FailureType.RATE_LIMITED and isinstance(decision, Again)):
            asked = failure.retry_after or 0.0
            until = now + int((decision.delay if isinstance(decision, Again) else max(asked, policy.base_delay)) * 1000)
            reason = f"it asked to wait: {failure.message}"
            health = await self._change_health(source, lambda one: cooled(one, until, now, reason), cause=reason)
            why = f"the source cools: {failure.message}"
            return Snooze(health.cools_until, why, waited_ms=health.cools_until - now, failure_type=kind.value)
        if kind is FailureType.TRANSIENT:
            before, rules = self._records.known(source.name).health, self._context.rules
            health = await self._change_health(
                source,
                lambda one: after_outage(one, item.id, now, rules, first_attempt_at=first, of_source=of_source),
                cause=failure.message,
            )
            is_down = health.rests > 0 if of_source else not spends_attempt(before, first)
            return self._until_source_is_back(health, now, failure, of_source=of_source) if is_down else None
        if kind is FailureType.PERMANENT:  # an answer: the source works
            await self._answered(source)
        else:
            await self._change_health(source, probe_released)
        return None

    def _until_source_is_back(self, health: SourceHealth, now: int, failure: Failure, *, of_source: bool) -> Snooze:
        """
        A snooze until the source is back: an outage spends no attempts.

        It ends behind the next probe, so that another job gets its turn as a probe: this one may be the only bad one. A
        failure of the source itself is no job's fault, and any job may probe it.
        """
        rest = max(1000, (health.rests_until or now) - now)
        return Snooze(now + (rest if of_source else 2 * rest), f"the source does not answer: {failure.message}")

    async def _put_off(
        self,
        item: WorkItem,
        source: IngestionSource,
        put_off: Snooze,
        failure: Failure,
        decision: Decision,
        policy: RetryPolicy,
    ) -> JobReport:
        """The report of a job that waits for its source and spends nothing, unless it has waited for too long."""
        wall, rules = self._clock.wall(), self._context.rules
        health, since = self._records.known(source.name).health, requeued_at(item) or item.created_at
        if outage_is_too_long(health, since, int(wall * 1000), rules):
            hours = rules.max_outage_ms / 3_600_000
            return await self._quarantined(item, source, f"{NO_ANSWER}: for more than {hours:g} h: {failure.message}")
        wait = max(0.0, put_off.due_at / 1000 - wall)
        if failure.failure_type is FailureType.RATE_LIMITED and isinstance(decision, Again):
            self._scheduled(item, failure, Again(wait), policy, attempts=item.attempts)
        else:
            self._log.put_off(item, put_off.reason, wait)
        return JobReport(put_off, (snooze_event(item, wall, f"source:{source.name}", wait),))

    def _scheduled(
        self, item: WorkItem, failure: Failure, decision: Again, policy: RetryPolicy, *, attempts: int
    ) -> None:
        """Log and count a retry that is scheduled; `attempts` have been spent."""
        kind, delay = failure.failure_type.value, int(decision.delay)
        counted = {"job_type": item.kind, "attempt": attempts, "delay_seconds": delay, "failure_type": kind}
        about = {"ingestion_job_id": item.assignment_id, "source": item.source}
        fields = {**about, "max_attempts": policy.retries, **counted}
        named = "Scheduling retry", fields
        self._log.decided(item, decision, policy, failure, attempts=attempts, named=named, level=INFO)
        self._context.telemetry.record(item.id, duration=0.0, status="retry_scheduled", metadata=counted)

    def _again(
        self,
        item: WorkItem,
        failure: Failure,
        decision: Again,
        policy: RetryPolicy,
        record: DecisionRecord,
        text: str,
        began: float,
        *,
        attempts: int,
        run: JobExecution,
    ) -> JobReport:
        wall, delay = self._clock.wall(), decision.delay
        self._scheduled(item, failure, decision, policy, attempts=attempts)
        again = TryAgain(
            int((wall + delay) * 1000),
            text,
            failure.failure_type.value,
            int(delay * 1000),
            reason="retry",
            began_at=int(began * 1000),
            delay=delay,
            progress=run.progress,
        )
        return JobReport(again, (retry_event(item, wall, attempts, record, began=began),))

    def _given_up(
        self,
        item: WorkItem,
        failure: Failure,
        decision: Stop,
        policy: RetryPolicy,
        record: DecisionRecord,
        text: str,
        began: float,
        *,
        attempts: int,
    ) -> JobReport:
        wall, reason = self._clock.wall(), decision.reason
        fields = {
            "ingestion_job_id": item.assignment_id,
            "source": item.source,
            "job_type": item.kind,
            "attempts": attempts - 1,
            "max_attempts": policy.retries if policy.retryable else 0,
        }
        named = "Retry budget exhausted, quarantining job", fields
        self._log.decided(item, decision, policy, failure, attempts=attempts, quarantined=True, named=named)
        kind = failure.failure_type.value
        metadata = {"job_type": item.kind, "attempt": attempts, "failure_type": kind}
        self._context.telemetry.record(item.id, status="quarantined", metadata=metadata)
        why = f"{reason.value}: {failure.message}"
        events = (
            end_event(item, wall, attempts, reason, record, began=began),
            quarantined_event(item, wall, reason.value, failure),
        )
        return JobReport(Quarantine(why, text), events)

    async def _quarantined(self, item: WorkItem, source: IngestionSource, reason: str) -> JobReport:
        """The quarantine of a job that cannot be run at all."""
        failure = classify(reason, code=ErrorCode.internal_error)
        event = quarantined_event(item, self._clock.wall(), reason, failure)
        self._log.ended(item, reason, attempts=item.attempts, level=ERROR)
        await self._change_health(source, probe_released)
        return JobReport(Quarantine(reason, failure_json(failure)), (event,))

    async def _put_back(self, source: IngestionSource, run: JobExecution, settled: Settled) -> JobReport:
        """The report of an attempt whose end tells nothing about its source."""
        await (self._answered(source, run) if run.pages else self._change_health(source, probe_released))
        return JobReport(settled)

    async def _answered(self, source: IngestionSource, run: JobExecution | None = None) -> None:
        """Note that the source has answered: with pages of this execution, or with a refusal of one job."""
        now, limit = int(self._clock.wall() * 1000), source.max_concurrency
        goes_on = run is not None and self._records.known(source.name).full_since
        more: dict[str, Any] = {"full_since": 0} if goes_on else {}
        await self._change_health(source, lambda one: after_answer(one, now, limit=limit), **more)

    # ---- records ----------------------------------------------------------------------------------------------------

    def _record(self, item: WorkItem, status: str, duration: float, **more: Any) -> None:
        metadata = {"job_type": item.kind, "attempt": item.attempts + 1, **more}
        cause = item.budget.failure_type or (FailureType.UNKNOWN.value if item.attempts else None)
        if cause is not None:
            metadata["caused_by"] = cause
        self._context.telemetry.record(item.id, duration=duration, status=status, metadata=metadata)

    async def _change_health(
        self, source: IngestionSource, change: Callable[[SourceHealth], SourceHealth], *, cause: str = "", **more: Any
    ) -> SourceHealth:
        """
        Change the health of a source, and `more` of its record, with an event when its condition changes for a cause.

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
            opens_at = after.opens_at(now)
            wait = seconds(0.0 if opens_at is None else (opens_at - now) / 1000)
            then = f": {printable(redact(cause), most=300)}; its jobs go on in {wait} s" if opens_at and cause else ""
            logger().info("source %s is %s%s", name, after.condition(now).value, then)
        try:
            with self._timeouts.timeout(STORE_S):
                entries = self._context.journal.entries(events)
                return (await self._records.change(name, with_health(change, **more), events=entries)).health
        except Exception as error:
            logger().error("source %s: its health was not stored (%s)", name, error_text(error))
            return after


def _is_stopped(error: BaseException) -> bool:
    """Whether the attempt is stopped from outside. A connector may raise the same: then the job failed."""
    kind = type(error)
    if issubclass(kind, KeyboardInterrupt):
        return is_ctrl_c(error)
    return issubclass(kind, asyncio.CancelledError | GeneratorExit) and is_stopped(kind, asyncio.current_task())


def _is_of_source(job: IngestionJob, error: BaseException) -> bool:
    """
    Whether a failure, if it is transient, is one of the source itself, and not of one item or one request.

    The failures of a sync are: those of items are in its pages. An item's own failure is, where nothing was reached.
    """
    if job.item:
        kind = type(error)
        return issubclass(kind, ConnectionRefusedError | gaierror) or bool(
            issubclass(kind, SourceError) and getattr(error, "unreachable", False)
        )
    return job.is_sync


def _elapsed(item: WorkItem, began: float, wall: float) -> float:
    first = item.budget.first_attempt_at
    return max(0.0, wall - (began if first is None else first / 1000))
