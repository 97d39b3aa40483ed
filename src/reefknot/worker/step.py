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

from reefknot.core.audit.event import DecisionRecord, Event, FailureRecord
from reefknot.core.canonical import canonical
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.messages import ExecAssignment, ExecResult, StepResult, StepStatus
from reefknot.core.overload.admission import Degradation
from reefknot.core.overload.breaker import Permit, Refused
from reefknot.core.redaction import Redactor
from reefknot.core.retry.book import Request
from reefknot.core.retry.builtin import BASELINE_RETRIES, as_the_baseline_sees, baseline
from reefknot.core.retry.classify import classify, status_in
from reefknot.core.retry.decide import Again, History, Reason, Stop, decide
from reefknot.core.retry.draw import draw, key_number
from reefknot.core.retry.policy import RetryPolicy
from reefknot.core.work import Quarantine, Settled, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem
from reefknot.execution import chance
from reefknot.execution.reading import read_failure
from reefknot.ports.block import Block, BlockContext
from reefknot.ports.clock import Clock
from reefknot.worker import step_events as tell
from reefknot.worker.counters import Counters
from reefknot.worker.destinations import Destination, Destinations
from reefknot.worker.results import EXPIRED, EXPIRED_MESSAGE, result_of, sendable
from reefknot.worker.settings import WorkerSettings

SHORTEST_S = 0.001


class Report(Struct, frozen=True):
    """What one attempt came to."""

    settled: Settled
    events: tuple[Event, ...] = ()
    result: ExecResult | None = None
    """There only when the assignment has ended."""


class Attempt(Struct, frozen=True):
    """What is known while one runs. `began` is wall time; `elapsed` counts from the first attempt's beginning."""

    item: WorkItem
    assignment: ExecAssignment
    change: Degradation
    target: str
    began: float

    @property
    def number(self) -> int:
        return self.item.attempts + 1

    def elapsed(self, wall: float) -> float:
        first = self.item.budget.first_attempt_at
        return max(0.0, wall - (self.began if first is None else first / 1000))


class Steps:
    """Runs attempts under one worker's settings."""

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        blocks: Mapping[str, Block],
        clock: Clock,
        *,
        seed: int | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._blocks = blocks
        self._clock = clock
        self._seed = seed
        self._redactor = redactor or Redactor()
        self.destinations = Destinations(settings.throttle)
        self.counters = Counters()

    async def attempt(self, item: WorkItem, assignment: ExecAssignment, change: Degradation) -> Report:
        """One execution, and what follows from it."""
        wall = self._clock.wall()
        block = self._blocks.get(assignment.job.type)
        attempt = Attempt(
            item, assignment, change, f"block:{assignment.job.type if block is None else block.type}", wall
        )
        if item.deadline_at is not None and wall * 1000 >= item.deadline_at:
            return self._expired(attempt)
        if block is None:
            return self._not_known(attempt)
        place = self._place(block, assignment)
        permit = self._permit(place, change)
        if isinstance(permit, Refused):
            return self._left_alone(attempt, permit)
        try:
            step = await self._run(block, attempt)
        except BaseException:  # called off, or the worker ends: that tells nothing about the destination
            if isinstance(permit, Permit):
                place.breaker.released(permit)
            raise
        self.counters.executions += 1
        failure = None if step.ok else _failure_of(step)
        if failure is not None and not self._settings.retries_v2:
            failure = as_the_baseline_sees(failure)
        events = self._told_breaker(place, permit, step, failure)
        place.counted(self._clock.now(), ok=step.ok)
        if failure is None:
            return self._succeeded(attempt, step, events)
        return self._failed(attempt, step, failure, place, events)

    # ---- before -----------------------------------------------------------------------------------------------------

    def _place(self, block: Block, assignment: ExecAssignment) -> Destination:
        try:
            name = block.destination(assignment.job.payload)
        except Exception:  # inputs that make no sense; the block itself will say so
            name = f"{block.type}: unknown"
        return self.destinations.at(name)

    def _expired(self, attempt: Attempt) -> Report:
        self.counters.expired += 1
        item = attempt.item
        message = EXPIRED_MESSAGE if item.failure is None else f"{EXPIRED_MESSAGE} again; before that: {_last(item)}"
        step = StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)
        event = tell.expired(attempt.assignment, self._clock.wall(), item.attempts)
        failure = classify(message, code=ErrorCode.cancelled_by_timeout)
        return self._ended(attempt, step, WorkFailed(_failure_text(failure), None, EXPIRED), (event,), ran=False)

    def _not_known(self, attempt: Attempt) -> Report:
        """Accepted by an earlier life of this worker that knew more steps."""
        message = f"job.type: {attempt.assignment.job.type!r} is not known here any more"
        step = StepResult(StepStatus.ERROR, ErrorCode.invalid_input, error_message=message)
        return self._stopped(attempt, step, attempt.item.attempts, breaker_open=False)

    def _permit(self, place: Destination, change: Degradation) -> Permit | Refused | None:
        """Baseline and heavy degradation do not ask the breaker, nor do calls to a place that hardly gets any."""
        now = self._clock.now()
        if not self._settings.retries_v2 or change.skip_circuit_breaker or not place.busy(now):
            return None
        return place.breaker.admit(now)

    def _left_alone(self, attempt: Attempt, refused: Refused) -> Report:
        """The destination rests. If there is time for it the work waits too, and spends nothing."""
        item, wall = attempt.item, self._clock.wall()
        first = item.budget.first_attempt_at or item.created_at
        policy = self._policy(attempt, None)
        waited = max(0.0, wall - first / 1000)
        if waited + refused.retry_after < policy.time_budget and self._fits(item, refused.retry_after):
            due = int((wall + refused.retry_after) * 1000) + 1
            return Report(Snooze(due, "the circuit breaker of its destination is open"))
        message = "the circuit breaker of its destination is open for longer than the assignment has"
        step = StepResult(StepStatus.ERROR, ErrorCode.resource_unavailable, error_message=message)
        return self._stopped(attempt, step, item.attempts, breaker_open=True)

    def _stopped(self, attempt: Attempt, step: StepResult, attempts: int, *, breaker_open: bool) -> Report:
        """The end of an assignment whose block was not called this time."""
        failure = _failure_of(step)
        policy = self._policy(attempt, failure)
        history = History(max(1, attempts), attempt.elapsed(self._clock.wall()))
        decision = decide(policy, history, failure, 0.0, breaker_open=breaker_open)
        record = DecisionRecord.of(decision, policy, history, failure, 0.0, breaker_open=breaker_open)
        reason = decision.reason if isinstance(decision, Stop) else Reason.NOT_RETRYABLE
        event = tell.the_end(attempt.assignment, self._clock.wall(), attempts, reason, record)
        return self._gave_up(attempt, step, failure, reason, (event,), ran=False)

    def _policy(self, attempt: Attempt, failure: Failure | None) -> RetryPolicy:
        assignment, change = attempt.assignment, attempt.change
        timeout = assignment.timeout_ms / 1000 * change.timeout_factor
        retries = 0 if change.skip_retries else assignment.retries
        if not self._settings.retries_v2:
            cancelled = failure is not None and failure.category is ErrorCategory.CANCELLATION
            return baseline(BASELINE_RETRIES if retries is None else retries, timeout=timeout, retryable=not cancelled)
        retry = assignment.options.retry
        backoff = None if retry is None or retry.backoff_ms is None else retry.backoff_ms / 1000
        request = Request(retries=retries, base_delay=backoff, time_budget=timeout)
        return self._settings.book.resolve(attempt.target, failure, request=request)

    def _seconds(self, attempt: Attempt) -> tuple[float, bool]:
        """What this attempt may take, and whether that is all that is left of the assignment's time."""
        policy, wall = self._policy(attempt, None), self._clock.wall()
        left = policy.time_budget - attempt.elapsed(wall)
        if attempt.item.deadline_at is not None:
            left = min(left, attempt.item.deadline_at / 1000 - wall)
        return max(SHORTEST_S, min(policy.attempt_timeout, left)), left <= policy.attempt_timeout

    # ---- the execution ----------------------------------------------------------------------------------------------

    async def _run(self, block: Block, attempt: Attempt) -> StepResult:
        assignment, item = attempt.assignment, attempt.item
        seconds, whole = self._seconds(attempt)
        context = BlockContext(
            assignment.assignment_id,
            attempt.number,
            f"{assignment.assignment_id}/{item.generation}",
            seconds,
            assignment.tenant_id,
            assignment.trace_id,
        )
        began = self._clock.now()
        try:
            async with asyncio.timeout(None if seconds == inf else seconds) as limit:
                step = sendable(await block.run(assignment.job.payload, context))
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                step = _cut_off(attempt, seconds, whole)
            else:
                step = _from_error(error)
        latency = (self._clock.now() - began) * 1000
        message = self._redactor(step.error_message) if step.error_message else ""
        return msgspec.structs.replace(step, latency_ms=latency, error_message=message)

    def _told_breaker(
        self, place: Destination, permit: Permit | Refused | None, step: StepResult, failure: Failure | None
    ) -> list[Event]:
        """Who answers, however unkindly, is there: only what may pass by itself counts against a destination."""
        if not isinstance(permit, Permit):
            return []
        now = self._clock.now()
        before = place.breaker.state(now)
        if failure is None or not (failure.failure_type is FailureType.TRANSIENT or step.status is StepStatus.TIMEOUT):
            place.breaker.succeeded(permit)
        else:
            place.breaker.failed(permit, now)
        after = place.breaker.state(now)
        return [] if before is after else [tell.breaker(place.breaker.name, after.value, self._clock.wall())]

    # ---- after ------------------------------------------------------------------------------------------------------

    def _succeeded(self, attempt: Attempt, step: StepResult, events: list[Event]) -> Report:
        if attempt.item.attempts:
            wall = self._clock.wall()
            events.append(tell.recovered(attempt.assignment, wall, attempt.number, attempt.elapsed(wall)))
        return self._ended(attempt, step, WorkDone(), tuple(events))

    def _failed(
        self, attempt: Attempt, step: StepResult, failure: Failure, place: Destination, events: list[Event]
    ) -> Report:
        assignment, wall = attempt.assignment, self._clock.wall()
        policy = self._policy(attempt, failure)
        if attempt.item.deadline_at is not None:  # both clocks hold: the budget ends where the deadline is
            left = attempt.item.deadline_at / 1000 - wall + attempt.elapsed(wall)
            policy = policy.replace(time_budget=max(SHORTEST_S, min(policy.time_budget, left)))
        history = History(attempt.number, attempt.elapsed(wall), _last_wait(attempt.item))
        seed = chance.process_seed if self._seed is None else self._seed
        chosen = draw(seed, key_number(assignment.assignment_id), attempt.item.attempts)
        throttle = place.throttle if self._settings.retries_v2 else None
        view = None if throttle is None else throttle.view(self._clock.now())
        decision = decide(policy, history, failure, chosen, throttle=view)
        record = DecisionRecord.of(decision, policy, history, failure, chosen, throttle=view)
        if isinstance(decision, Again):
            if throttle is not None:
                throttle.spend()
            self.counters.retry(failure.code.wire, assignment.job.type, decision.delay)
            events.append(tell.again(assignment, wall, attempt.number, record))
            due, began = int((wall + decision.delay) * 1000), int(attempt.began * 1000)
            delay_ms = int(decision.delay * 1000)
            kind = failure.failure_type.value
            return Report(TryAgain(due, _failure_text(failure), kind, delay_ms, began_at=began), tuple(events))
        events.append(tell.the_end(assignment, wall, attempt.number, decision.reason, record))
        self.counters.throttled += decision.reason is Reason.THROTTLED
        return self._gave_up(attempt, step, failure, decision.reason, tuple(events))

    def _fits(self, item: WorkItem, delay: float) -> bool:
        """Whether the wait ends before the assignment's own deadline."""
        return item.deadline_at is None or self._clock.wall() + delay < item.deadline_at / 1000

    def _gave_up(
        self,
        attempt: Attempt,
        step: StepResult,
        failure: Failure,
        reason: Reason,
        events: tuple[Event, ...],
        *,
        ran: bool = True,
    ) -> Report:
        if reason is Reason.BUDGET_SPENT:
            self.counters.budget_exhaustions += 1
            step = msgspec.structs.replace(step, status=StepStatus.TIMEOUT)
        text = _failure_text(failure)
        settled: WorkFailed | Quarantine = WorkFailed(text, None, reason.value)
        if self._settings.quarantine_failed:
            settled = Quarantine(reason.value, text)
            events = (*events, tell.quarantined(attempt.assignment, self._clock.wall(), reason.value, failure))
        return self._ended(attempt, step, settled, events, ran=ran)

    def _ended(
        self,
        attempt: Attempt,
        step: StepResult,
        settled: WorkDone | WorkFailed | Quarantine,
        events: tuple[Event, ...],
        *,
        ran: bool = True,
    ) -> Report:
        """`ran` is False when the end came before this attempt's block was called: then the last one was a retry."""
        retries = attempt.item.attempts if ran else max(0, attempt.item.attempts - 1)
        self.counters.ended(ok=step.ok, retried=retries > 0)
        return Report(settled, events, self.result(attempt.assignment, step, retries_used=retries))

    def result(self, assignment: ExecAssignment, step: StepResult, *, retries_used: int) -> ExecResult:
        """The step's result as the wire carries it."""
        return result_of(
            assignment,
            step,
            worker_id=self._worker_id,
            v2=self._settings.queue_v2,
            wall=self._clock.wall(),
            retries_used=retries_used,
        )


def _cut_off(attempt: Attempt, seconds: float, whole: bool) -> StepResult:
    """One attempt's own limit can be retried; the end of all time cannot, and names the error before it."""
    if not whole:
        code = _timeout_code(attempt.target)
        return StepResult(StepStatus.TIMEOUT, code, error_message=f"the attempt did not finish within {seconds:.3g} s")
    last = "" if attempt.item.failure is None else f"; before that: {_last(attempt.item)}"
    message = f"the time for all attempts was over after {seconds:.3g} s of attempt {attempt.number}{last}"
    return StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)


def _from_error(error: Exception) -> StepResult:
    failure = read_failure(error)
    metadata: dict[str, Any] = {} if failure.http_status is None else {"http_status_code": failure.http_status}
    if failure.retry_after is not None:
        metadata["retry_after"] = failure.retry_after
    return StepResult(StepStatus.ERROR, failure.code, {}, str(failure), metadata)


def _last_wait(item: WorkItem) -> float:
    """The wait before this attempt, as it was kept."""
    last = item.budget.last_attempt_at
    return 0.0 if last is None else max(0.0, (item.due_at - last) / 1000)


def _timeout_code(target: str) -> ErrorCode:
    """The network's, or a resource that did not answer."""
    family = target.partition(":")[2].partition(".")[0]
    return ErrorCode.resource_unavailable if family in ("fs", "sql") else ErrorCode.connection_timeout


def _failure_of(step: StepResult) -> Failure:
    hint = step.metadata.get("retry_after")
    known = isinstance(hint, int | float) and not isinstance(hint, bool)
    return classify(
        step.error_message,
        code=step.error_code,
        http_status=step.http_status if step.http_status is not None else status_in(step.error_message),
        retry_after=float(hint) if known else None,  # type: ignore[arg-type]
        limit_reached=bool(step.metadata.get("limit_reached")),
    )


def _failure_text(failure: Failure) -> str:
    return canonical(msgspec.to_builtins(FailureRecord.of(failure))).decode()


def _last(item: WorkItem) -> str:
    """The last real error, for a message."""
    record = msgspec.json.decode(item.failure or "{}", type=FailureRecord)
    return str(record.failure())
