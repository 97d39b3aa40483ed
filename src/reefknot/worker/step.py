"""
One attempt of one assignment.

    is there time left → may the destination be called → run the block → read what went wrong → decide → report

It answers with what to settle, which events go with it, and the result to publish, if this was the end. It waits for
nothing but the block: a retry is a due time, not a sleep.
"""

import asyncio
from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import (
    BreakerEvent,
    DecisionRecord,
    Event,
    FailureRecord,
    Quarantined,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    TimeoutOccurred,
    timestamp,
)
from reefknot.core.canonical import canonical
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure
from reefknot.core.messages import (
    ExecAssignment,
    ExecResult,
    StepResult,
    StepStatus,
)
from reefknot.core.overload.admission import Degradation
from reefknot.core.overload.breaker import Permit, Refused
from reefknot.core.retry.book import Request
from reefknot.core.retry.builtin import BASELINE_RETRIES, baseline
from reefknot.core.retry.classify import classify, status_in
from reefknot.core.retry.decide import Again, History, Reason, Stop, decide
from reefknot.core.retry.draw import draw, key_number
from reefknot.core.retry.policy import RetryPolicy
from reefknot.core.work import Quarantine, Settled, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem
from reefknot.execution import chance
from reefknot.execution.journal import event_id
from reefknot.execution.reading import read_failure
from reefknot.ports.block import Block, BlockContext
from reefknot.ports.clock import Clock
from reefknot.worker.destinations import Destination, Destinations
from reefknot.worker.results import result_of
from reefknot.worker.settings import WorkerSettings

_REFUSED = frozenset({Reason.NOT_RETRYABLE, Reason.INNER_EXHAUSTED, Reason.THROTTLED, Reason.BREAKER_OPEN})


class Report(Struct, frozen=True):
    """What one attempt came to."""

    settled: Settled
    events: tuple[Event, ...] = ()
    result: ExecResult | None = None
    """There only when the assignment has ended."""


class Steps:
    """Runs attempts under one worker's settings."""

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        blocks: Mapping[str, Block],
        clock: Clock,
        seed: int | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._blocks = blocks
        self._clock = clock
        self._seed = seed
        self.destinations = Destinations(settings.throttle)

    async def attempt(self, item: WorkItem, assignment: ExecAssignment, change: Degradation) -> Report:
        """One execution, and what follows from it."""
        now_ms = self._clock.wall() * 1000
        if item.deadline_at is not None and now_ms >= item.deadline_at:
            return self._expired(item, assignment)
        block = self._blocks[assignment.job.type]
        policy = self._policy(assignment, None, change)
        place = self.destinations.at(block.destination(assignment.job.payload))
        permit = self._permit(place, change)
        if isinstance(permit, Refused):
            return self._left_alone(item, assignment, policy, permit)
        step = await self._run(block, item, assignment, self._seconds(item, policy))
        events = self._told_breaker(place, permit, step)
        place.counted(self._clock.now(), ok=step.ok)
        if step.ok:
            return self._succeeded(item, assignment, step, events)
        return self._failed(item, assignment, step, place, change, events)

    # ---- before -----------------------------------------------------------------------------------------------------

    def _expired(self, item: WorkItem, assignment: ExecAssignment) -> Report:
        message = "the deadline passed while the assignment was queued; it was not run"
        step = StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)
        event = TimeoutOccurred(
            **self._about(assignment),
            attempt_number=item.attempts,
            timeout_seconds=(assignment.options.deadline_ms or 0) / 1000,
            whole=True,
        )
        failure = classify(message, code=ErrorCode.cancelled_by_timeout)
        settled = WorkFailed(_failure_text(failure), None, "expired while queued")
        return self._ended(item, assignment, step, settled, (event,))

    def _permit(self, place: Destination, change: Degradation) -> Permit | Refused | None:
        """Baseline and heavy degradation do not ask the breaker, nor do calls to a place that hardly gets any."""
        now = self._clock.now()
        if not self._settings.retries_v2 or change.skip_circuit_breaker or not place.busy(now):
            return None
        return place.breaker.admit(now)

    def _left_alone(self, item: WorkItem, assignment: ExecAssignment, policy: RetryPolicy, refused: Refused) -> Report:
        """The destination rests. If there is time for it the work waits too, and spends nothing."""
        if self._elapsed(item) + refused.retry_after < policy.time_budget:
            due = int(self._clock.wall() * 1000 + refused.retry_after * 1000) + 1
            return Report(Snooze(due, "the circuit breaker of its destination is open"))
        message = "the circuit breaker of its destination is open for longer than the assignment has"
        step = StepResult(StepStatus.ERROR, ErrorCode.resource_unavailable, error_message=message)
        failure = classify(message, code=ErrorCode.resource_unavailable)
        return self._ended(item, assignment, step, WorkFailed(_failure_text(failure), None, "breaker_open"), ())

    def _policy(self, assignment: ExecAssignment, failure: Failure | None, change: Degradation) -> RetryPolicy:
        timeout = assignment.timeout_ms / 1000 * change.timeout_factor
        retries = 0 if change.skip_retries else assignment.retries
        if not self._settings.retries_v2:
            cancelled = failure is not None and failure.category is ErrorCategory.CANCELLATION
            return baseline(BASELINE_RETRIES if retries is None else retries, timeout=timeout, retryable=not cancelled)
        retry = assignment.options.retry
        backoff = None if retry is None or retry.backoff_ms is None else retry.backoff_ms / 1000
        request = Request(retries=retries, base_delay=backoff, time_budget=timeout)
        return self._settings.book.resolve(f"block:{assignment.job.type}", failure, request=request)

    def _elapsed(self, item: WorkItem) -> float:
        """Seconds since the first execution began."""
        first = item.budget.first_attempt_at
        return 0.0 if first is None else max(0.0, self._clock.wall() - first / 1000)

    def _seconds(self, item: WorkItem, policy: RetryPolicy) -> float:
        """What this attempt may take: its own limit, what is left of the budget, what is left of the deadline."""
        left = policy.time_budget - self._elapsed(item)
        if item.deadline_at is not None:
            left = min(left, item.deadline_at / 1000 - self._clock.wall())
        return max(0.001, min(policy.attempt_timeout, left))

    # ---- the execution ----------------------------------------------------------------------------------------------

    async def _run(self, block: Block, item: WorkItem, assignment: ExecAssignment, seconds: float) -> StepResult:
        context = BlockContext(
            assignment.assignment_id,
            item.attempts + 1,
            f"{assignment.assignment_id}/{item.generation}",
            seconds,
            assignment.tenant_id,
            assignment.trace_id,
        )
        began = self._clock.now()
        try:
            async with asyncio.timeout(None if seconds == inf else seconds) as limit:
                step = await block.run(assignment.job.payload, context)
        except TimeoutError as error:
            if not limit.expired():
                return self._from_error(error, began)
            step = StepResult(
                StepStatus.TIMEOUT,
                _timeout_code(assignment.job.type),
                error_message=f"the attempt did not finish within {seconds:.3g} s",
            )
        except Exception as error:
            return self._from_error(error, began)
        return msgspec.structs.replace(step, latency_ms=(self._clock.now() - began) * 1000)

    def _from_error(self, error: Exception, began: float) -> StepResult:
        failure = read_failure(error)
        metadata: dict[str, Any] = {} if failure.http_status is None else {"http_status_code": failure.http_status}
        if failure.retry_after is not None:
            metadata["retry_after"] = failure.retry_after
        latency = (self._clock.now() - began) * 1000
        return StepResult(StepStatus.ERROR, failure.code, {}, str(failure), metadata, latency)

    def _told_breaker(self, place: Destination, permit: Permit | Refused | None, step: StepResult) -> list[Event]:
        if not isinstance(permit, Permit):
            return []
        before = place.breaker.state(self._clock.now())
        if step.ok or step.error_code.category not in (ErrorCategory.NETWORK, ErrorCategory.SYSTEM):
            place.breaker.succeeded(permit)
        else:
            place.breaker.failed(permit, self._clock.now())
        after = place.breaker.state(self._clock.now())
        if before is after:
            return []
        return [
            BreakerEvent(timestamp=self._now_text(), event_id=event_id(), name=place.breaker.name, state=after.value)
        ]

    # ---- after ------------------------------------------------------------------------------------------------------

    def _succeeded(self, item: WorkItem, assignment: ExecAssignment, step: StepResult, events: list[Event]) -> Report:
        if item.attempts:
            events.append(
                RetryRecovered(
                    **self._about(assignment),
                    operation=assignment.job.type,
                    total_attempts=item.attempts + 1,
                    elapsed_seconds=self._elapsed(item),
                )
            )
        return self._ended(item, assignment, step, WorkDone(), tuple(events))

    def _failed(
        self,
        item: WorkItem,
        assignment: ExecAssignment,
        step: StepResult,
        place: Destination,
        change: Degradation,
        events: list[Event],
    ) -> Report:
        failure = _failure_of(step)
        policy = self._policy(assignment, failure, change)
        attempts = item.attempts + 1
        history = History(attempts, self._elapsed(item), _last_wait(item))
        seed = chance.process_seed if self._seed is None else self._seed
        chosen = draw(seed, key_number(assignment.assignment_id), attempts - 1)
        throttle = place.throttle if self._settings.retries_v2 else None
        view = None if throttle is None else throttle.view(self._clock.now())
        decision = decide(policy, history, failure, chosen, throttle=view)
        record = DecisionRecord.of(decision, policy, history, failure, chosen, throttle=view)
        if isinstance(decision, Again) and self._fits(item, decision.delay):
            if throttle is not None:
                throttle.spend()
            events.append(self._attempt_event(assignment, attempts, policy, record))
            return self._again(decision, failure, tuple(events))
        reason = decision.reason if isinstance(decision, Stop) else Reason.BUDGET_SPENT
        events.append(self._end_event(assignment, attempts, reason, record))
        return self._gave_up(item, assignment, step, failure, reason, tuple(events))

    def _fits(self, item: WorkItem, delay: float) -> bool:
        """Whether the wait ends before the assignment's own deadline."""
        return item.deadline_at is None or self._clock.wall() + delay < item.deadline_at / 1000

    def _again(self, decision: Again, failure: Failure, events: tuple[Event, ...]) -> Report:
        due = int((self._clock.wall() + decision.delay) * 1000)
        settled = TryAgain(due, _failure_text(failure), failure.failure_type.value, int(decision.delay * 1000))
        return Report(settled, events)

    def _gave_up(
        self,
        item: WorkItem,
        assignment: ExecAssignment,
        step: StepResult,
        failure: Failure,
        reason: Reason,
        events: tuple[Event, ...],
    ) -> Report:
        if reason is Reason.BUDGET_SPENT:
            step = msgspec.structs.replace(step, status=StepStatus.TIMEOUT)
        text = _failure_text(failure)
        settled: Settled = WorkFailed(text, None, reason.value)
        if self._settings.quarantine_failed:
            settled = Quarantine(reason.value, text)
            events = (*events, self._quarantined(assignment, reason.value, failure))
        return self._ended(item, assignment, step, settled, events)

    def _ended(
        self,
        item: WorkItem,
        assignment: ExecAssignment,
        step: StepResult,
        settled: WorkDone | WorkFailed | Quarantine | Settled,
        events: tuple[Event, ...],
    ) -> Report:
        result = self.result(assignment, step, retries_used=item.attempts)
        text = msgspec.json.encode(result).decode()
        if isinstance(settled, WorkDone | WorkFailed | Quarantine):
            settled = msgspec.structs.replace(settled, result=text)
        return Report(settled, events, result)

    def result(self, assignment: ExecAssignment, step: StepResult, *, retries_used: int) -> ExecResult:
        """The step's result as the wire carries it."""
        known_as = self._worker_id if self._settings.queue_v2 else None
        provider = (assignment.executor and assignment.executor.provider_id) or self._worker_id
        return result_of(
            assignment,
            step,
            provider_id=provider,
            worker_id=known_as,
            wall=self._clock.wall(),
            retries_used=retries_used,
        )

    # ---- events -----------------------------------------------------------------------------------------------------

    def _now_text(self) -> str:
        return timestamp(self._clock.wall())

    def _about(self, assignment: ExecAssignment) -> dict[str, Any]:
        return {
            "timestamp": self._now_text(),
            "event_id": event_id(),
            "tenant_id": assignment.tenant_id,
            "trace_id": assignment.trace_id,
            "correlation_id": assignment.request_id,
            "work_id": assignment.assignment_id,
        }

    def _attempt_event(
        self, assignment: ExecAssignment, attempts: int, policy: RetryPolicy, record: DecisionRecord
    ) -> RetryAttempt:
        return RetryAttempt(
            **self._about(assignment),
            operation=assignment.job.type,
            attempt_number=attempts,
            max_attempts=policy.max_attempts,
            delay_seconds=record.delay or 0.0,
            exception_type=record.failure.code,
            exception_message=record.failure.message,
            decision=record,
        )

    def _end_event(
        self, assignment: ExecAssignment, attempts: int, reason: Reason, record: DecisionRecord
    ) -> RetryExhausted | RetryRefused:
        kind = RetryRefused if reason in _REFUSED else RetryExhausted
        return kind(
            **self._about(assignment),
            operation=assignment.job.type,
            total_attempts=attempts,
            final_exception_type=record.failure.code,
            final_exception_message=record.failure.message,
            reason=reason,
            decision=record,
        )

    def _quarantined(self, assignment: ExecAssignment, reason: str, failure: Failure) -> Quarantined:
        return Quarantined(**self._about(assignment), reason=reason, failure=FailureRecord.of(failure))


def _last_wait(item: WorkItem) -> float:
    """The wait before this attempt, as it was kept."""
    last = item.budget.last_attempt_at
    return 0.0 if last is None else max(0.0, (item.due_at - last) / 1000)


def _timeout_code(job_type: str) -> ErrorCode:
    """One attempt's own timeout can be retried: the network's, or a resource that did not answer."""
    family = job_type.partition(".")[0]
    return ErrorCode.resource_unavailable if family in ("fs", "sql") else ErrorCode.connection_timeout


def _failure_of(step: StepResult) -> Failure:
    hint = step.metadata.get("retry_after")
    return classify(
        step.error_message,
        code=step.error_code,
        http_status=step.http_status if step.http_status is not None else status_in(step.error_message),
        retry_after=float(hint) if isinstance(hint, int | float) and not isinstance(hint, bool) else None,
        limit_reached=bool(step.metadata.get("limit_reached")),
    )


def _failure_text(failure: Failure) -> str:
    return canonical(msgspec.to_builtins(FailureRecord.of(failure))).decode()
