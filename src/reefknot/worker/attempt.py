"""
One attempt of one assignment.

    is there time left → may the destination be called → run the block → read what went wrong → decide → report

It answers with what to settle, which events go with it, and the result to publish, if this was the end. It waits for
nothing but the block: a retry is a due time, not a sleep.
"""

import asyncio
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import DecisionRecord, Event
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.messages import ExecAssignment, ExecResult, StepRequest, StepResult, StepStatus
from reefknot.core.overload.admission import OverloadStatus
from reefknot.core.overload.breaker import Permit, Refused
from reefknot.core.redaction import Redactor
from reefknot.core.retry.backoff import draw, key_number
from reefknot.core.retry.book import Request
from reefknot.core.retry.classify import classify
from reefknot.core.retry.decide import Again, History, Reason, Stop, decide
from reefknot.core.retry.defaults import BASELINE_RETRIES, baseline, without_retry_after
from reefknot.core.retry.policy import RetryPolicy
from reefknot.core.work import Quarantine, Settled, Snooze, TryAgain, WorkDone, WorkFailed, WorkItem
from reefknot.idempotency.scope import unknown_keys
from reefknot.ports.block import Block, BlockContext
from reefknot.ports.clock import Clock
from reefknot.runtime import seeds as chance
from reefknot.runtime.timeouts import Timeouts
from reefknot.worker import records as tell
from reefknot.worker.destinations import Destination, Destinations
from reefknot.worker.failures import CutOff, Ran, cut_off, failure_of, failure_text, from_error, last_error
from reefknot.worker.records import EXPIRED, EXPIRED_MESSAGE, Counters, Envelope, StepLog, result_of, sendable
from reefknot.worker.settings import WorkerSettings

SHORTEST_S = 0.001
UNKNOWN_OUTCOME = "the outcome of a guarded key is unknown"


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
    request: StepRequest
    """What the assignment asks for, and what degradation left of it."""
    target: str
    began: float
    queue_depth: int = 0
    overload_status: OverloadStatus = OverloadStatus.HEALTHY
    """How the queue was when it came in."""

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
        limits: Timeouts | None = None,
        seed: int | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._blocks = blocks
        self._clock = clock
        self._limits = limits or Timeouts()
        self._seed = seed
        self._redactor = redactor or Redactor()
        self._log = StepLog(worker_id, self._redactor)
        self.destinations = Destinations(settings.throttle)
        self.counters = Counters()

    async def attempt(self, item: WorkItem, envelope: Envelope) -> Report:
        """One execution, and what follows from it."""
        wall, assignment = self._clock.wall(), envelope.assignment
        request = StepRequest.of(assignment)
        if envelope.skip_retries or envelope.timeout_factor != 1.0:
            factor = envelope.timeout_factor
            request = request.degraded(skip_retries=envelope.skip_retries, timeout_factor=factor)
        block = self._blocks.get(request.type)
        target = f"block:{request.type if block is None else block.type}"
        attempt = Attempt(item, assignment, request, target, wall, envelope.queue_depth, envelope.overload_status)
        if item.deadline_at is not None and wall * 1000 >= item.deadline_at:
            return self._expired(attempt)
        if block is None:
            return self._not_known(attempt)
        place = self._place(block, request)
        permit = self._permit(place, skip=envelope.skip_circuit_breaker)
        if isinstance(permit, Refused):
            return self._left_alone(attempt, place, permit)
        try:
            ran = await self._run(block, attempt)
        except BaseException:  # called off, or the worker ends: that tells nothing about the destination
            if isinstance(permit, Permit):
                place.breaker.released(permit)
            raise
        self.counters.executions += 1
        step = ran.step
        failure = None if step.ok else failure_of(step)
        if failure is not None and not self._settings.retries_v2:
            failure = without_retry_after(failure)
        events = self._told_breaker(place, permit, step, failure)
        place.counted(self._clock.now(), ok=step.ok)
        if failure is None:
            return self._succeeded(attempt, step, events)
        return self._failed(attempt, ran, failure, place, events)

    # ---- before -----------------------------------------------------------------------------------------------------

    def _place(self, block: Block, request: StepRequest) -> Destination:
        try:
            name = block.destination(request.inputs)
        except Exception:  # inputs that make no sense; the block itself will say so
            name = f"{block.type}: unknown"
        return self.destinations.at(name)

    def _expired(self, attempt: Attempt) -> Report:
        self.counters.expired += 1
        item = attempt.item
        message = (
            EXPIRED_MESSAGE if item.failure is None else f"{EXPIRED_MESSAGE} again; before that: {last_error(item)}"
        )
        step = StepResult(StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout, error_message=message)
        event = tell.expired(attempt.assignment, self._clock.wall(), item.attempts)
        failure = classify(message, code=ErrorCode.cancelled_by_timeout)
        return self._ended(attempt, step, WorkFailed(failure_text(failure), None, EXPIRED), (event,), ran=False)

    def _not_known(self, attempt: Attempt) -> Report:
        """Accepted by an earlier life of this worker that knew more steps."""
        message = f"job.type: {attempt.assignment.job.type!r} is not known here any more"
        step = StepResult(StepStatus.ERROR, ErrorCode.invalid_input, error_message=message)
        return self._stopped(attempt, step, attempt.item.attempts, breaker_open=False)

    def _permit(self, place: Destination, *, skip: bool) -> Permit | Refused | None:
        """Baseline and heavy degradation do not ask the breaker, nor do calls to a place that hardly gets any."""
        now = self._clock.now()
        if not self._settings.retries_v2 or skip or not place.busy(now):
            return None
        return place.breaker.admit(now)

    def _left_alone(self, attempt: Attempt, place: Destination, refused: Refused) -> Report:
        """The destination rests. If there is time for it the work waits too, and spends nothing."""
        item, wall = attempt.item, self._clock.wall()
        first = item.budget.first_attempt_at or item.created_at
        policy = self._policy(attempt, None)
        waited = max(0.0, wall - first / 1000)
        if waited + refused.retry_after < policy.time_budget and self._fits(item, refused.retry_after):
            due = int((wall + refused.retry_after) * 1000) + 1
            event = tell.put_off(attempt.assignment, wall, place.breaker.name, refused.retry_after)
            return Report(Snooze(due, "the circuit breaker of its destination is open"), (event,))
        message = "the circuit breaker of its destination is open for longer than the assignment has"
        step = StepResult(StepStatus.ERROR, ErrorCode.resource_unavailable, error_message=message)
        return self._stopped(attempt, step, item.attempts, breaker_open=True)

    def _stopped(self, attempt: Attempt, step: StepResult, attempts: int, *, breaker_open: bool) -> Report:
        """The end of an assignment whose block was not called this time."""
        failure = failure_of(step)
        policy = self._policy(attempt, failure)
        history = History(max(1, attempts), attempt.elapsed(self._clock.wall()))
        decision = decide(policy, history, failure, 0.0, breaker_open=breaker_open)
        record = DecisionRecord.of(decision, policy, history, failure, 0.0, breaker_open=breaker_open)
        reason = decision.reason if isinstance(decision, Stop) else Reason.NOT_RETRYABLE
        event = tell.the_end(attempt.assignment, self._clock.wall(), attempts, reason, record)
        return self._gave_up(attempt, step, failure, reason, (event,), ran=False)

    def _policy(self, attempt: Attempt, failure: Failure | None) -> RetryPolicy:
        timeout, retries = attempt.request.timeout_ms / 1000, attempt.request.retry_count
        if not self._settings.retries_v2:
            cancelled = failure is not None and failure.category is ErrorCategory.CANCELLATION
            return baseline(BASELINE_RETRIES if retries is None else retries, timeout=timeout, retryable=not cancelled)
        retry = attempt.assignment.options.retry
        backoff = None if retry is None or retry.backoff_ms is None else retry.backoff_ms / 1000
        request = Request(retries=retries, base_delay=backoff, time_budget=timeout)
        return self._settings.book.resolve(attempt.target, failure, request=request)

    def _seconds(self, attempt: Attempt) -> tuple[float, bool]:
        """What this attempt may take, and whether that is all that is left of the assignment's time."""
        policy, wall = self._policy(attempt, None), self._clock.wall()
        left = policy.time_budget - attempt.elapsed(wall)
        if left <= 0 and attempt.item.crashes:  # an attempt that was lost with its worker is made up for; no more
            left = policy.time_budget
        if attempt.item.deadline_at is not None:
            left = min(left, attempt.item.deadline_at / 1000 - wall)
        return max(SHORTEST_S, min(policy.attempt_timeout, left)), left <= policy.attempt_timeout

    # ---- the execution ----------------------------------------------------------------------------------------------

    async def _run(self, block: Block, attempt: Attempt) -> Ran:
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
        began, limit = self._clock.now(), self._limits.timeout(seconds)
        keys: list[str] = []
        unknown_keys.set(keys)
        try:
            with limit:
                ran = Ran(sendable(await block.run(attempt.request.inputs, context)))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _called_off():
                raise
            if isinstance(error, TimeoutError) and limit.expired:
                ran = Ran(cut_off(attempt.item, attempt.target, seconds, whole=whole), CutOff(seconds, whole))
            else:
                ran = from_error(error, lambda step: self._hope(attempt, step))
        latency = (self._clock.now() - began) * 1000
        return self._told_of(ran, _unknown_key(ran, keys), latency)

    def _told_of(self, ran: Ran, unknown: str, latency: float) -> Ran:
        """As it may be told: how long it took, without secrets, and with the key that somebody has to look at."""
        step = ran.step
        message = self._redactor(step.error_message) if step.error_message else ""
        if not unknown:
            step = msgspec.structs.replace(step, latency_ms=latency, error_message=message)
            return Ran(step, ran.cut_off, ran.verdict)
        unknown = self._redactor(unknown)
        step = msgspec.structs.replace(
            step,
            status=StepStatus.ERROR,
            error_code=ErrorCode.execution_failed,
            error_message=f"nobody knows whether the effect of the guarded key {unknown} happened: {message}",
            latency_ms=latency,
        )
        return Ran(step, ran.cut_off, verdict=False, unknown=unknown)

    def _hope(self, attempt: Attempt, step: StepResult) -> tuple[bool, int]:
        policy = self._policy(attempt, failure_of(step))
        return policy.retryable, policy.max_attempts

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

    def _failed(self, attempt: Attempt, ran: Ran, failure: Failure, place: Destination, events: list[Event]) -> Report:
        assignment, wall = attempt.assignment, self._clock.wall()
        if ran.cut_off is not None:
            events.append(tell.cut_off(assignment, wall, attempt.number, ran.cut_off))
        policy = self._policy(attempt, failure)
        if attempt.item.deadline_at is not None:  # both clocks hold: the budget ends where the deadline is
            left = attempt.item.deadline_at / 1000 - wall + attempt.elapsed(wall)
            policy = policy.replace(time_budget=max(SHORTEST_S, min(policy.time_budget, left)))
        history = History(attempt.number, attempt.elapsed(wall), _last_wait(attempt.item))
        seed = chance.process_seed if self._seed is None else self._seed
        chosen = draw(seed, key_number(assignment.assignment_id), attempt.item.attempts)
        throttle = place.throttle if self._settings.retries_v2 else None
        view = None if throttle is None else place.view(self._clock.now())
        decision = decide(policy, history, failure, chosen, verdict=ran.verdict, throttle=view)
        record = DecisionRecord.of(decision, policy, history, failure, chosen, verdict=ran.verdict, throttle=view)
        self._log.decided(assignment, decision, policy, failure, attempts=attempt.number, now=self._clock.now())
        if isinstance(decision, Again):
            if throttle is not None:
                throttle.spend()
            self.counters.retry(failure.code.wire, assignment.job.type, decision.delay)
            events.append(tell.again(assignment, wall, attempt.number, record))
            due, began = int((wall + decision.delay) * 1000), int(attempt.began * 1000)
            delay_ms = int(decision.delay * 1000)
            kind = failure.failure_type.value
            return Report(TryAgain(due, failure_text(failure), kind, delay_ms, began_at=began), tuple(events))
        events.append(tell.the_end(assignment, wall, attempt.number, decision.reason, record))
        self.counters.throttled += decision.reason is Reason.THROTTLED
        return self._gave_up(attempt, ran.step, failure, decision.reason, tuple(events), unknown=ran.unknown)

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
        unknown: str = "",
    ) -> Report:
        if reason is Reason.BUDGET_SPENT:
            self.counters.budget_exhaustions += 1
            step = msgspec.structs.replace(step, status=StepStatus.TIMEOUT)
        text = failure_text(failure)
        settled: WorkFailed | Quarantine = WorkFailed(text, None, reason.value)
        if unknown or self._settings.quarantine_failed:
            why = f"{UNKNOWN_OUTCOME}: {unknown}" if unknown else reason.value
            settled = Quarantine(why, text)
            events = (*events, tell.quarantined(attempt.assignment, self._clock.wall(), why, failure))
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
        step = msgspec.structs.replace(
            step,
            retries_used=retries,
            queue_depth_at_queue=attempt.queue_depth,
            overload_status_at_queue=attempt.overload_status,
        )
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


def _called_off() -> bool:
    """Whether somebody stops this slot. A block may raise the same by itself, and then only its step has failed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _unknown_key(ran: Ran, keys: list[str]) -> str:
    """The guarded key that a failed attempt left behind without an answer."""
    return "" if ran.step.ok else ran.unknown or (keys[0] if keys else "")


def _last_wait(item: WorkItem) -> float:
    """The wait before this attempt, as it was kept."""
    last = item.budget.last_attempt_at
    return 0.0 if last is None else max(0.0, (item.due_at - last) / 1000)
