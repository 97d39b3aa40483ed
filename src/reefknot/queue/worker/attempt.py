"""
An attempt of one assignment: the worker's use of the retry decision.

    time left? → breaker → run the block → classify the failure → decide → report

`StepRunner.attempt` returns what to settle, its events, and the result if this was the end. It waits for nothing but
the block: a retry is a due time, not a sleep.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

import msgspec

from reefknot.audit.journal import about_item
from reefknot.audit.model.event import DecisionRecord, Event, Requeued
from reefknot.core.backoff import draw, key_number
from reefknot.core.breaker import Permit, Refused
from reefknot.core.classify import classify
from reefknot.core.decide import Again, History, Reason, Stop, decide
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure
from reefknot.core.policy import RetryPolicy
from reefknot.errors import KeyInProgressError, shown
from reefknot.idempotency.waiting import AttemptKeys, HeldKey, KeyWaits, attempt_keys
from reefknot.policy.model.book import Book, BookHistory, Request
from reefknot.policy.model.defaults import BASELINE_RETRIES, baseline, without_retry_after
from reefknot.queue.execution.decision_log import DecisionLog
from reefknot.queue.execution.events import (
    end_event,
    expired_event,
    quarantined_event,
    recovered_event,
    retry_event,
    timeout_event,
)
from reefknot.queue.execution.failures import (
    OverdueWatch,
    StepOutcome,
    TimedOut,
    asked_rule,
    ended_step,
    failure_json,
    failure_of_outcome,
    failure_of_step,
    is_ctrl_c,
    is_stopped,
    last_error,
    outcome_of,
    redacted,
    timeout_result,
    unknown_key,
)
from reefknot.queue.execution.settling import AwaitedResults
from reefknot.queue.execution.tracing import WorkTrace
from reefknot.queue.model.messages import (
    DEFAULT_TIMEOUT_MS,
    ExecAssignment,
    ExecResult,
    StepRequest,
    StepResult,
    StepStatus,
)
from reefknot.queue.model.results import EXPIRED_MESSAGE, UNKNOWN_OUTCOME
from reefknot.queue.model.submission import EXPIRED
from reefknot.queue.model.work import Quarantine, Returned, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem
from reefknot.queue.worker.context import WorkerContext
from reefknot.queue.worker.destinations import Destination, Outages
from reefknot.queue.worker.limited import GrantedStarts
from reefknot.queue.worker.notes import AttemptNotes
from reefknot.queue.worker.records import (
    AcceptedWork,
    AttemptInputs,
    AttemptReport,
    Counters,
    RunningStep,
    result_of,
    sendable,
    with_follow_ups,
)
from reefknot.runtime import seeds
from reefknot.steps.port import Block, own_policies, own_rules

SHORTEST_S = 0.001
KEY_PAUSE_S = 1.0
"""Pause of work whose key has another owner, after an attempt has waited for it."""


ReportOverdue = Callable[[Callable[[], AttemptReport]], None]
"""Reports the attempt of a step that goes on after its time; the function that it is given decides what follows."""


class StepRunner:
    """Runs attempts under one worker's settings."""

    def __init__(self, context: WorkerContext, blocks: Mapping[str, Block], starts: GrantedStarts) -> None:
        self._context, self.starts = context, starts
        self._settings = context.settings
        self._blocks = blocks
        self._own = own_policies(blocks.values())
        self._rules = own_rules(blocks.values()) if context.settings.retries_v2 else {}
        self._books = BookHistory(context.settings.book.with_blocks(self._own))
        self._clock, self._redactor = context.clock, context.redactor
        self.log = DecisionLog(context.worker_id, context.redactor, context.clock)
        self.outages = Outages(context, blocks, self.log)
        self._key_waits = KeyWaits()
        self.counters = Counters()
        self.running: dict[tuple[str, int], RunningStep] = {}
        """By record and fence."""

    def reload(self, book: Book) -> None:
        """Follow another book in work that begins from now on. Work that has begun keeps the book it began under."""
        self._books.add(book.with_blocks(self._own), since=int(self._clock.wall() * 1000) + 1)

    async def attempt(
        self,
        item: WorkItem,
        work: AcceptedWork,
        trace: WorkTrace | None,
        task: asyncio.Task[Any] | None,
        overdue: ReportOverdue,
        notes: AttemptNotes,
    ) -> AttemptReport | None:
        """
        Execute once in this task, and decide what follows.

        A step that goes on after its time, because it ignores its cancellation, is left to `overdue`; its attempt then
        returns None when it ends.
        """
        wall, assignment, admitted = self._clock.wall(), work.assignment, work.admitted
        block = self._blocks.get(assignment.job.type)
        target = f"block:{assignment.job.type if block is None else block.type}"
        first = item.budget.first_attempt_at
        book = self._books.at(int(wall * 1000) if first is None else first)
        request = StepRequest.of(assignment, _default_ms(book, target))
        if admitted.skip_retries or admitted.timeout_factor != 1.0:
            factor = admitted.timeout_factor
            request = request.degraded(skip_retries=admitted.skip_retries, timeout_factor=factor)
        attempt = AttemptInputs(item, assignment, request, target, wall, book, notes, *admitted.met, trace)
        if item.deadline_at is not None and wall * 1000 >= item.deadline_at:
            return self._expired(attempt)
        if (held_up := self.starts.held_up(item, work)) is not None:
            return held_up
        if block is None:
            return self._not_known(attempt)
        destination = self.outages.destination(block, request)
        limit = TimedOut(*self._seconds(attempt))
        if too_late := self._too_late(limit, destination):
            return self._expired(attempt, too_late)
        permit, events = self.outages.permit(attempt, destination, skip=admitted.skip_circuit_breaker)
        if isinstance(permit, Refused):
            waits = self.outages.wait(attempt, destination, permit.retry_after, events)
            return waits or self._is_down(attempt, destination, events)

        def make_report() -> AttemptReport:
            ran = redacted(self._timed_out(attempt, limit), "", limit.seconds * 1000, self._redactor)
            return self._judged(attempt, ran, destination, permit, events)

        watch: OverdueWatch | None = None
        began = self._clock.now()

        def time_is_over() -> None:
            nonlocal watch
            report = partial(overdue, make_report)
            watch = OverdueWatch(self.log, self._clock, assignment, block, limit.seconds, began, task, report)

        try:
            ran = await self._run(block, attempt, limit, began, task, time_is_over)
        except BaseException:  # cancelled, or the worker ends: that tells nothing about the destination
            if permit is not None and (watch is None or not watch.is_reported):
                destination.release(permit)
            raise
        finally:
            if watch is not None:
                watch.ended()
            self.running.pop((item.id, item.fence), None)
        is_reported = watch is not None and watch.is_reported
        return None if is_reported else self._judged(attempt, ran, destination, permit, events)

    def _judged(
        self,
        attempt: AttemptInputs,
        ran: StepOutcome,
        destination: Destination,
        permit: Permit | None,
        events: list[Event],
    ) -> AttemptReport:
        """The report of an execution, and what follows from it."""
        self.counters.executions += 1
        put_off = self._waits_for_key(attempt, ran.held)
        if put_off is not None:
            if permit is not None:
                destination.release(permit)
            return put_off
        step = ran.step
        failure = None if step.ok else failure_of_outcome(ran)
        if failure is not None and not self._settings.retries_v2:
            failure = without_retry_after(failure)
        is_outage = False
        if permit is not None:
            is_outage, changes = self.outages.report(attempt, destination, permit, ran, failure)
            events += changes
        now, seconds = self._clock.now(), step.latency_ms / 1000
        destination.counted(now, ok=step.ok)
        is_cut = ran.timed_out is not None and ran.timed_out.whole
        tells = not is_cut or seconds > destination.usual(now) > 0
        if tells:
            destination.answered(now, seconds)
        report = (
            self._succeeded(attempt, step, events)
            if failure is None
            else self._failed(attempt, ran, failure, destination, events, is_outage=is_outage)
        )
        return report.after(ran, step.latency_ms if tells else None)

    # ---- before -----------------------------------------------------------------------------------------------------

    def _too_late(self, limit: TimedOut, destination: Destination) -> str:
        """Why the attempt cannot end in time, judged by the destination's usual service time; empty when it can."""
        usual = destination.usual(self._clock.now()) if limit.whole and self._settings.retries_v2 else 0.0
        if limit.seconds >= usual:
            return ""
        return f"{limit.seconds:.3g} s were left, and {destination.name} takes about {usual:.3g} s; it was not run"

    def _expired(self, attempt: AttemptInputs, message: str = "") -> AttemptReport:
        self.counters.expired += 1
        item = attempt.item
        if item.failure is not None:
            message = f"{message or f'{EXPIRED_MESSAGE} again'}; before that: {last_error(item)}"
        message = message or EXPIRED_MESSAGE
        step = StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)
        event = expired_event(attempt.assignment, self._clock.wall(), item.attempts, attempt.request.timeout_ms)
        self.log.ended(attempt.assignment, message, attempts=item.attempts)
        failure = failure_json(classify(message, code=ErrorCode.cancelled_by_timeout))
        return self._ended(attempt, step, WorkFailed(failure, None, EXPIRED, ran=False), (event,), ran=False)

    def _not_known(self, attempt: AttemptInputs) -> AttemptReport:
        """The return of a step that an earlier incarnation of this worker knew, and this one does not."""
        reason = f"job.type: {attempt.assignment.job.type!r} is not known to {self._context.worker_id} any more"
        about = about_item(attempt.item, self._clock.wall())
        return AttemptReport(Returned(reason), (Requeued(**about, reason=reason, generation=attempt.item.generation),))

    def _is_down(self, attempt: AttemptInputs, destination: Destination, events: list[Event]) -> AttemptReport:
        """The end of an assignment that cannot wait any longer for its destination."""
        message, attempts = self.outages.ended(attempt, destination), attempt.item.attempts
        step = StepResult(StepStatus.ERROR, ErrorCode.resource_unavailable, error_message=message)
        failure = failure_of_step(step)
        policy = self._policy(attempt, failure)
        history = History(max(1, attempts), attempt.elapsed(self._clock.wall()))
        decision = decide(policy, history, failure, 0.0, breaker_open=True)
        record = DecisionRecord.of(decision, policy, history, failure, 0.0, breaker_open=True)
        assert isinstance(decision, Stop)
        reason, is_aside = decision.reason, self._sets_aside("")
        self.log.decided(attempt.assignment, decision, policy, failure, attempts=attempts, quarantined=is_aside)
        event = end_event(attempt.assignment, self._clock.wall(), attempts, reason, record)
        return self._gave_up(attempt, step, failure, reason, (*events, event), ran=False)

    def _policy(self, attempt: AttemptInputs, failure: Failure | None, verdict: bool | None = None) -> RetryPolicy:
        timeout, retries = attempt.request.timeout_ms / 1000, attempt.request.retry_count
        if not self._settings.retries_v2:
            cancelled = failure is not None and failure.category is ErrorCategory.CANCELLATION
            return baseline(BASELINE_RETRIES if retries is None else retries, timeout=timeout, retryable=not cancelled)
        retry = attempt.assignment.options.retry
        backoff = None if retry is None or retry.backoff_ms is None else retry.backoff_ms / 1000
        limit_ms = attempt.assignment.options.attempt_timeout_ms
        limit = None if limit_ms is None else limit_ms / 1000
        request = Request(retries=retries, base_delay=backoff, time_budget=timeout, attempt_timeout=limit)
        rule = None if verdict is None else self._rules.get(attempt.target)
        retryable = None if rule is None or verdict is None else rule.retryable(verdict)
        return attempt.book.resolve(attempt.target, failure, request=request, retryable=retryable)

    def _seconds(self, attempt: AttemptInputs) -> tuple[float, bool]:
        """Seconds this attempt may take, and whether that is all that is left of the assignment's time."""
        policy, wall = self._policy(attempt, None), self._clock.wall()
        left = policy.time_budget - attempt.elapsed(wall)
        if attempt.item.crashes and (left <= 0 or not attempt.item.attempts):
            left = policy.time_budget - attempt.spent  # what was lost with its worker, or in a wait, is made up for
        if attempt.item.deadline_at is not None:
            left = min(left, attempt.item.deadline_at / 1000 - wall)
        return max(SHORTEST_S, min(policy.attempt_timeout, left)), left <= policy.attempt_timeout

    # ---- the execution ----------------------------------------------------------------------------------------------

    async def _run(
        self,
        block: Block,
        attempt: AttemptInputs,
        limit: TimedOut,
        began: float,
        task: asyncio.Task[Any] | None,
        time_is_over: Callable[[], None],
    ) -> StepOutcome:
        assignment, item, seconds = attempt.assignment, attempt.item, limit.seconds
        self.starts.begin(assignment)
        if attempt.trace is not None:
            attempt.trace.attempt_started(attempt.number, attempt.began)
        context = attempt.context(seconds, AwaitedResults(self._context.work, item))
        timeout = self._context.timeouts.timeout(seconds, time_is_over, task=task)
        keys = AttemptKeys(timeout.end)
        attempt_keys.set(keys)
        rule, answer = self._rules.get(attempt.target), None
        self.running[item.id, item.fence] = RunningStep(assignment, task, began + seconds)
        try:
            with timeout:
                try:
                    step = sendable(await block.run(attempt.request.inputs, context))
                    ran = with_follow_ups(attempt, step, context, self._blocks, self._clock.wall())
                except Exception as error:  # asked here, where the time limit holds for it as well
                    answer = None if rule is None else await asked_rule(rule.ask, error)
                    raise
        except BaseException as error:
            kind = type(error)
            if issubclass(kind, KeyboardInterrupt) and is_ctrl_c(error):
                raise
            if issubclass(kind, asyncio.CancelledError | GeneratorExit) and is_stopped(kind, task):
                raise
            if issubclass(kind, TimeoutError) and timeout.expired:
                ran = self._timed_out(attempt, limit)
            else:
                ran = outcome_of(error, lambda step: self._retry_rank(attempt, step), answer)
                if issubclass(kind, KeyInProgressError) and keys.held:
                    ran = msgspec.structs.replace(ran, held=keys.held[-1])
        latency = (self._clock.now() - began) * 1000
        if ran.step.ok:
            return StepOutcome(msgspec.structs.replace(ran.step, latency_ms=latency), follow_ups=ran.follow_ups)
        return redacted(ran, unknown_key(ran, keys.unknown), latency, self._redactor)

    def _timed_out(self, attempt: AttemptInputs, limit: TimedOut) -> StepOutcome:
        return StepOutcome(timeout_result(attempt.item, attempt.target, limit.seconds, whole=limit.whole), limit)

    def _waits_for_key(self, attempt: AttemptInputs, held: HeldKey | None) -> AttemptReport | None:
        """
        Snooze of an attempt that spent its time waiting for a key of another owner; that time is not counted.

        None when there is no such key, or the caller of the key would not wait any longer.
        """
        if held is None and not self._key_waits:
            return None
        item, now, wall = attempt.item, self._clock.now(), self._clock.wall()
        since = self._key_waits.pop(item.id, now - (wall - attempt.began))
        if held is None or now + KEY_PAUSE_S - since >= held.wait or not self._fits(item, KEY_PAUSE_S):
            return None
        self._key_waits.goes_on(item.id, since)
        reason = self._redactor(f"key {shown(held.key)} is in progress at {held.owner}")
        due = wall + KEY_PAUSE_S
        return AttemptReport(Snooze(int(due * 1000), reason, int((due - attempt.began) * 1000)))

    def _retry_rank(self, attempt: AttemptInputs, step: StepResult) -> tuple[bool, int]:
        policy = self._policy(attempt, failure_of_step(step))
        return policy.retryable, policy.max_attempts

    # ---- after ------------------------------------------------------------------------------------------------------

    def _succeeded(self, attempt: AttemptInputs, step: StepResult, events: list[Event]) -> AttemptReport:
        if attempt.item.attempts:
            wall = self._clock.wall()
            budget = attempt.item.budget
            history = History(attempt.item.attempts, attempt.elapsed(wall), budget.last_delay)
            events.append(recovered_event(attempt.assignment, wall, history))
            self.log.recovered(attempt.assignment, attempts=attempt.number, elapsed=history.elapsed)
        if attempt.trace is not None:
            attempt.trace.attempt_succeeded()
        return self._ended(attempt, step, WorkDone(), tuple(events))

    def _failed(
        self,
        attempt: AttemptInputs,
        ran: StepOutcome,
        failure: Failure,
        destination: Destination,
        events: list[Event],
        *,
        is_outage: bool,
    ) -> AttemptReport:
        assignment, wall = attempt.assignment, self._clock.wall()
        if is_outage and self._may_run_again(attempt, ran, failure):
            if attempt.trace is not None:
                attempt.trace.attempt_failed(failure, Again(destination.wait(self._clock.now())[0]))
            waits = self.outages.wait_after(attempt, destination, events, failure_json(failure, ran.traceback))
            return waits or self._is_down(attempt, destination, events)
        if ran.timed_out is not None:
            events.append(timeout_event(assignment, wall, attempt.number, ran.timed_out))
        policy = self._policy(attempt, failure, ran.verdict)
        if attempt.item.deadline_at is not None:  # both clocks hold: the budget ends where the deadline is
            left = attempt.item.deadline_at / 1000 - wall + attempt.elapsed(wall)
            policy = policy.replace(time_budget=max(SHORTEST_S, min(policy.time_budget, left)))
        history = attempt.history(wall)
        seed = seeds.process_seed if self._context.seed is None else self._context.seed
        chosen = draw(seed, key_number(assignment.assignment_id), attempt.item.attempts)
        throttle = destination.throttle if self._settings.retries_v2 else None
        view = None if throttle is None else destination.view(self._clock.now())
        decision = decide(policy, history, failure, chosen, verdict=ran.verdict, throttle=view)
        record = DecisionRecord.of(decision, policy, history, failure, chosen, verdict=ran.verdict, throttle=view)
        is_aside = isinstance(decision, Stop) and self._sets_aside(ran.unknown)
        counted, trace = history.attempts, ran.traceback
        self.log.decided(assignment, decision, policy, failure, attempts=counted, traceback=trace, quarantined=is_aside)
        if attempt.trace is not None:
            attempt.trace.attempt_failed(failure, decision)
        if isinstance(decision, Again):
            if throttle is not None:
                throttle.spend()
            self.counters.retry(failure.code.wire, assignment.job.type, decision.delay)
            events.append(retry_event(assignment, wall, attempt.number, record, began=attempt.began))
            due, began = int((wall + decision.delay) * 1000), int(attempt.began * 1000)
            delay_ms, kind, made = int(decision.delay * 1000), failure.failure_type.value, attempt.notes.checkpoints
            kept = failure_json(failure, ran.traceback)
            again = TryAgain(due, kept, kind, delay_ms, began_at=began, delay=decision.delay, progress=made)
            return AttemptReport(again, tuple(events))
        events.append(end_event(assignment, wall, attempt.number, decision.reason, record, began=attempt.began))
        self.counters.throttled += decision.reason is Reason.THROTTLED
        step = ended_step(ran.step, decision.reason, policy, failure)
        return self._gave_up(
            attempt, step, failure, decision.reason, tuple(events), unknown=ran.unknown, traceback=ran.traceback
        )

    def _may_run_again(self, attempt: AttemptInputs, ran: StepOutcome, failure: Failure) -> bool:
        """Whether such a failure is retried at all, however many there were before."""
        policy = self._policy(attempt, failure, ran.verdict)
        decision = decide(policy, History(1), failure, 0.0, verdict=ran.verdict)
        return isinstance(decision, Again)

    def _sets_aside(self, unknown: str) -> bool:
        """Whether what ends without success waits for a person; always, with the outcome of a guarded key unknown."""
        return bool(unknown) or self._settings.quarantine_failed

    def _fits(self, item: WorkItem, delay: float) -> bool:
        """Whether the wait ends before the assignment's own deadline."""
        return item.deadline_at is None or self._clock.wall() + delay < item.deadline_at / 1000

    def _gave_up(
        self,
        attempt: AttemptInputs,
        step: StepResult,
        failure: Failure,
        reason: Reason,
        events: tuple[Event, ...],
        *,
        ran: bool = True,
        unknown: str = "",
        traceback: str = "",
    ) -> AttemptReport:
        if reason is Reason.BUDGET_SPENT:
            self.counters.budget_exhaustions += 1
            code = ErrorCode.cancelled_by_timeout
            step = msgspec.structs.replace(step, status=StepStatus.TIMEOUT, error_code=code)
        text = failure_json(failure, traceback)
        settled: WorkFailed | Quarantine = WorkFailed(text, None, reason.value)
        if self._sets_aside(unknown):
            why = f"{UNKNOWN_OUTCOME}: {unknown}" if unknown else reason.value
            settled = Quarantine(why, text)
            events = (*events, quarantined_event(attempt.assignment, self._clock.wall(), why, failure, key=unknown))
        return self._ended(attempt, step, settled, events, ran=ran)

    def _ended(
        self,
        attempt: AttemptInputs,
        step: StepResult,
        settled: WorkDone | WorkFailed | Quarantine,
        events: tuple[Event, ...],
        *,
        ran: bool = True,
    ) -> AttemptReport:
        """`ran` is False when the end came before this attempt's block was called: then the last one was a retry."""
        retries = attempt.item.attempts if ran else max(0, attempt.item.attempts - 1)
        self.counters.ended(ok=step.ok, retried=retries > 0)
        step = msgspec.structs.replace(
            step,
            retries_used=retries,
            queue_depth_at_queue=attempt.queue_depth,
            overload_status_at_queue=attempt.overload_status,
        )
        return AttemptReport(settled, events, self.result(attempt.assignment, step, retries_used=retries))

    def result(self, assignment: ExecAssignment, step: StepResult, *, retries_used: int) -> ExecResult:
        """The step's result as the wire carries it."""
        return result_of(
            assignment,
            step,
            worker_id=self._context.worker_id,
            v2=self._settings.queue_v2,
            wall=self._clock.wall(),
            retries_used=retries_used,
        )


def _default_ms(book: Book, target: str) -> int:
    """The time for all executions of a step whose request sets none."""
    budget = book.resolve(target).time_budget
    return DEFAULT_TIMEOUT_MS if budget == inf else max(1, int(budget * 1000))
