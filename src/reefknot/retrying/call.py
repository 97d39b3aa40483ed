"""
`CallState`: a call that failed at least once, from its first failure to its end.

    read the failure → ask the rule → decide → record → report → wait, or give the error back

`CallState.record_failure` is that sequence. The state holds what one call has spent and never an exception, so
everything that an attempt referred to is released before the wait begins.

A retry is reported by one log line, within the log budget of its name, and by a hook; the end by a note on the
exception, a hook and a debug line. Call arguments go to hooks only. A hook that raises is logged and changes nothing;
async callers await async hooks (`await_hooks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from reefknot import clock
from reefknot.core.backoff import draw
from reefknot.core.decide import (
    Again,
    AttemptRecord,
    Decision,
    History,
    Reason,
    Stop,
    ThrottleView,
    decide,
    matches_exception_lists,
)
from reefknot.core.failure import ErrorCode, Failure
from reefknot.core.policy import RetryPolicy
from reefknot.errors import BreakerOpenError, DeadlineExceededError, LimitReachedError
from reefknot.retrying.exhaustion import mark_exhausted
from reefknot.retrying.failures import failure_from, retryable_by_default
from reefknot.retrying.functions import ALWAYS_RETRIED, REQUESTED, UNREADABLE, FirstItem, RejectedResult
from reefknot.retrying.plan import NO_FALLBACK, Plan, retry_switch
from reefknot.retrying.types import FailedAttempt, RetryEvent
from reefknot.runtime import seeds
from reefknot.runtime.log import NO_LINES, budget_of, log_callback_failure, logger, printable, seconds
from reefknot.runtime.tracing import CallTrace, current_trace_id, tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from logging import Logger
    from typing import Any, TypeAlias

    from reefknot.retrying.breaker import CircuitBreaker
    from reefknot.retrying.functions import Rule, Verdict
    from reefknot.retrying.plan import Resolve
    from reefknot.retrying.types import Hook
    from reefknot.runtime.log import LogBudget

    Inputs: TypeAlias = tuple[RetryPolicy, History, Failure, float, bool | None, ThrottleView | None, bool]

WHY = {
    Reason.NOT_RETRYABLE: "not retried: this failure is not retryable",
    Reason.INNER_EXHAUSTED: "not retried: an inner retry already gave up on it",
    Reason.ATTEMPTS_SPENT: "gave up: all attempts are spent",
    Reason.STOPPED: "gave up: asked to stop",
    Reason.BREAKER_OPEN: "gave up: the circuit breaker is open",
    Reason.HINT_TOO_LONG: "gave up: the server asked for a longer wait than max_retry_after",
    Reason.BUDGET_SPENT: "gave up: another attempt would not fit into the deadline",
    Reason.THROTTLED: "gave up: the retry throttle is empty",
}

_EXHAUSTED = frozenset(
    {Reason.ATTEMPTS_SPENT, Reason.STOPPED, Reason.BUDGET_SPENT, Reason.THROTTLED, Reason.HINT_TOO_LONG}
)
"""Reasons that mark the exception, so that an outer retry does not multiply the attempts."""

DEBUG = 10
_NOTHING: dict[str, object] = {}  # keyword arguments of calls without any, such as loops


class CallState:
    """State of one call: attempts, time and waits spent so far, and its failures as data."""

    __slots__ = (
        *("_held", "_records", "args", "attempts", "awaited", "delay", "failure", "gave_up", "key", "kwargs"),
        *("observe", "plan", "reason", "redact", "resolve", "rule", "since", "started", "trace"),
    )

    plan: Plan
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    started: float | None  # when the first attempt began, or when it failed if no clock was read before
    since: int  # `exhaustions.count` when the call began
    resolve: Resolve | None
    rule: Rule | None
    key: int | None  # of this call's draws; without a seed, taken with the first one
    attempts: int
    delay: float  # seconds to wait before the next attempt
    failure: Failure | None  # the last one that was read and decided on
    reason: Reason | None  # why there is no further attempt
    gave_up: RetryEvent | None  # an end for which the caller gets the fallback instead of the error, until `fall_back`
    observe: Callable[..., object] | None  # called with each decision and all of its inputs, for an audit trail
    redact: Callable[[str], str] | None  # removes configured secrets from a message before anything else reads it
    awaited: list[tuple[str, Awaitable[object]]] | None  # awaitables that async hooks returned, for `await_hooks`
    trace: CallTrace | None  # the spans of this call; None while tracing is off
    _records: list[tuple[Failure, float, float | None, float]] | None  # None in a call that offers no way to read them
    _held: tuple[Exception, RetryPolicy]  # the last failure, during the wait of a plan whose `stop=` may end it

    @property
    def elapsed(self) -> float:
        """Seconds since `started`."""
        return 0.0 if self.started is None else clock.now() - self.started

    @property
    def records(self) -> tuple[AttemptRecord, ...]:
        """Failed attempts so far; empty in a call that keeps no records."""
        return tuple(AttemptRecord(number, *record) for number, record in enumerate(self._records or (), 1))

    def attempt_started(self) -> None:
        """Count an attempt in the throttle, begin its span, and call `before=`."""
        throttle = self.plan.throttle
        if throttle is not None:
            now = clock.now()
            if now > throttle.edge:
                throttle.roll(now)
            throttle.tick()
        if self.trace is not None:
            self.trace.attempt_started(self.attempts + 1)
        if self.plan.before is not None:
            self._call_hook(self.plan.before, "before", self._event(self.attempts + 1))

    def succeeded(self, value: object = None) -> None:
        """Refill the throttle, and report a success: to `after=`; after failures also to the log and `on_recover=`."""
        plan, throttle = self.plan, self.plan.throttle
        if throttle is not None and throttle.tokens < throttle.cap:
            throttle.feed()
        if plan.after is not None:
            shown = None if type(value) is FirstItem else value
            self._call_hook(plan.after, "after", self._event(self.attempts + 1, value=shown))
        if self.attempts:
            plan.statistics.retries += self.attempts
            is_logged = plan.log is not False and (plan.logger or _logger_of(plan)).isEnabledFor(DEBUG)
            if is_logged or plan.on_recover is not None:
                event = self._event(self.attempts + 1)
                if is_logged:
                    self._log_end(event, "recovered", f"succeeded at attempt {event.attempt}")
                if plan.on_recover is not None:
                    self._call_hook(plan.on_recover, "on_recover", event)
        if self.trace is not None:
            self.trace.succeeded(self.attempts + 1)

    def record_failure(self, error: Exception) -> float | None:
        """Process a failed attempt: the seconds to wait before the next one, or None if the caller gets the error."""
        plan = self.plan
        self.attempts = attempts = self.attempts + 1
        cls, recorded = type(error), None
        try:
            # Read the failure.
            failure = failure_from(error, self.since)
            if self.redact is not None:
                failure = replace(failure, message=self.redact(failure.message))

            # Ask the rule, unless the class says it all: a result that was refused has had a rule of its own.
            verdict: Verdict | None = None
            if cls in plan.retried or issubclass(cls, plan.retried):
                verdict = True
            elif self.rule is not None:
                verdict = self.rule(error, failure)
            if verdict is not True or cls is DeadlineExceededError:
                failure, verdict = _resolve_verdict(error, failure, verdict, plan)

            # Decide.
            now = clock.now()
            if self.started is None:
                self.started = now
            policy = plan.policy if self.resolve is None else self.resolve(failure)
            if retry_switch.is_in_use and retry_switch.most < policy.max_attempts:
                policy = policy.replace(max_attempts=retry_switch.most)
            history = History(attempts, now - self.started, self.delay)
            drawn = 0.0
            if policy.base_delay or failure.retry_after is not None:
                drawn = self._draw()
            if plan.is_bare:
                throttle, broken = None, False
                decision = decide(policy, history, failure, drawn, verdict)
            else:
                throttle = None if plan.throttle is None else plan.throttle.view(now)
                broken = plan.breaker is not None and _is_open(plan.breaker, error)
                decision = self._decision((policy, history, failure, drawn, verdict, throttle, broken), error)

            # Record.
            if self.observe is not None:
                more = {"verdict": verdict, "throttle": throttle, "breaker_open": broken}
                self.observe(decision, policy, history, failure, drawn, **more)
            delay = decision.delay if type(decision) is Again else None
            before, self.failure = self.failure, failure
            recorded = failure
            if self._records is not None:
                self._records.append((failure, history.elapsed, delay, drawn))

            # Report.
            if delay is None:
                self._give_up(decision, error, failure, policy, verdict, before=before)
            else:
                self.delay = delay
                left_out = None
                if (failure.retry_after is None and plan.result_rule is None) or self._is_logged(error):
                    left_out = (plan.log_budget or self._budget()).take(now)
                if left_out is not None or plan.is_heard:
                    self._report_retry(error, failure, policy, left_out)
        except Exception as broken_off:  # an error that cannot be read, or a rule that fails, never replaces the error
            delay = None
            self._end_undecided(error, broken_off)
        if self.trace is not None:
            is_asked = issubclass(cls, REQUESTED)
            self.trace.attempt_failed(attempts, recorded, wait=delay, reason=self.reason, is_asked=is_asked)
        return delay

    def _draw(self) -> float:
        """The random number for this failure's wait."""
        if self.key is None:
            self.key = seeds.next_key()
        return draw(seeds.process_seed if self.plan.seed is None else self.plan.seed, self.key, self.attempts - 1)

    def _end_undecided(self, error: Exception, broken_off: Exception) -> None:
        """End the call with an error about which nothing could be decided."""
        if self.reason is None:
            self._end(error, Reason.NOT_RETRYABLE)
        what = (self.plan.name or "unnamed", type(error).__name__, type(broken_off).__name__)
        logger().error("%s: no decision on a %s: %s while it was read", *what)

    def _decision(self, inputs: Inputs, error: Exception) -> Decision:
        """The decision of a plan that is not bare, and what a retry spends. `wait=` is asked if a wait may follow."""
        plan, number, wait = self.plan, self.attempts, None
        policy, _, failure, _, verdict, _, _ = inputs
        if plan.wait is not None and number < policy.max_attempts and verdict is not False:
            wait = plan.wait(number, lambda: FailedAttempt.of(self._event(number, failure, error, policy)))
        decision = decide(*inputs, stopped=plan.stop is not None and plan.stop.is_set(), wait=wait)
        if type(decision) is Again:
            if plan.throttle is not None:
                plan.throttle.spend()
            if plan.stop is not None:
                self._held = error, policy
        return decision

    def stop_waiting(self) -> Exception:
        """End the call in the middle of a wait; returns the last failure, for the caller."""
        error, policy = self._held
        assert self.failure is not None
        if self._records is not None:
            failure, elapsed, _, drawn = self._records[-1]
            self._records[-1] = failure, elapsed, None, drawn
        self._give_up(Stop(Reason.STOPPED), error, self.failure, policy, has_ended=True)
        if self.trace is not None:
            self.trace.gave_up(self.attempts, self.failure, self.reason)
        del self._held
        return error

    async def ask_rule(self, error: Exception) -> None:
        """Ask the async predicate of `on=`, so that the decision, and a breaker, find its verdict."""
        rule = self.plan.rule
        assert rule is not None
        verdict = True
        if type(error) is not RejectedResult:
            verdict = await rule(error, failure_from(error, self.since))
        self.rule = lambda error, failure: verdict

    def verdict(self, error: Exception, failure: Failure) -> Verdict:
        """The verdict of an async predicate, once `ask_rule` has asked it."""
        return False if self.rule is None else self.rule(error, failure)

    def fall_back(self) -> Any:
        """The value of `fallback=`, or what its function answers: for an async one, something to await."""
        event, self.gave_up = self.gave_up, None
        fallback = self.plan.fallback
        return fallback(event) if callable(fallback) else fallback

    async def await_hooks(self) -> None:
        """Await what async hooks returned. Their time counts against the deadline, which does not cut them short."""
        awaited, self.awaited = self.awaited, None
        for option, result in awaited or ():
            try:
                await result
            except Exception as broken:
                log_callback_failure(option, broken)

    def _call_hook(self, hook: Hook, option: str, event: RetryEvent) -> None:
        try:
            result = hook(event)
            if result is not None and hasattr(result, "__await__"):
                self.awaited = [*(self.awaited or ()), (option, result)]
        except Exception as broken:
            log_callback_failure(option, broken)

    def _is_logged(self, error: Exception) -> bool:
        """Whether a line about this error would be seen: one about a requested wait often is not."""
        return not issubclass(type(error), REQUESTED) or _logger_of(self.plan).isEnabledFor(_level_of(self.plan, error))

    def _budget(self) -> LogBudget:
        """The budget of the plan's name, kept by the plan from its first failure on."""
        plan = self.plan
        plan.log_budget = budget = NO_LINES if plan.log is False else budget_of(plan.name)
        return budget

    def _report_retry(self, error: Exception, failure: Failure, policy: RetryPolicy, left_out: int | None) -> None:
        plan = self.plan
        event = self._event(self.attempts, failure, error, policy, delay=self.delay)
        if left_out is not None:
            _log_retry(plan, error, event, left_out)
        if plan.after is not None:
            self._call_hook(plan.after, "after", event)
        if plan.on_retry is not None:
            self._call_hook(plan.on_retry, "on_retry", event)

    def _give_up(
        self,
        decision: Decision,
        error: Exception,
        failure: Failure,
        policy: RetryPolicy,
        verdict: bool | None = None,
        *,
        before: Failure | None = None,
        has_ended: bool = False,
    ) -> None:
        """Report the end; `before` is the failure before. `has_ended`: the attempt did, and now its wait does."""
        assert isinstance(decision, Stop)
        self._end(error, decision.reason)
        event = self._event(self.attempts, failure, error, policy)
        if self.reason in _EXHAUSTED:
            mark_exhausted(error)
        if failure.code is ErrorCode.cancelled_by_timeout and before is not None:
            error.add_note(f"the attempt before failed with {before}")
        _annotate(error, event, policy)
        level, why = DEBUG, WHY[decision.reason]
        if self.plan.fallback is not NO_FALLBACK and _is_given_up(decision.reason, failure, policy, verdict):
            self.gave_up = event
            level, why = _level_of(self.plan, error), f"{why}; the caller gets the fallback"
        if self.plan.log is not False and _logger_of(self.plan).isEnabledFor(level):
            self._log_end(event, "give_up", f"attempt {event.attempt} failed with {failure}; {why}", level)
        if self.plan.after is not None and not has_ended:
            self._call_hook(self.plan.after, "after", event)
        if self.plan.on_give_up is not None:
            self._call_hook(self.plan.on_give_up, "on_give_up", event)

    def _log_end(self, event: RetryEvent, decision: str, text: str, level: int = DEBUG) -> None:
        """
        Log the end of a call at debug level: the caller has the value or the exception.

        An exception that a fallback replaces is seen only here, so its line has the level of a retry.
        """
        budget = self.plan.log_budget
        left_out = (self._budget() if budget is None else budget).take(clock.now())
        if left_out is not None:
            rest = f" ({left_out} such lines left out)" if left_out else ""
            line = printable(f"{event.name}: {text}{rest}", most=500)
            _logger_of(self.plan).log(level, "%s", line, extra=_fields(event, decision))

    def _end(self, error: Exception, reason: Reason) -> None:
        """Count the end, and give it to a result that goes to the caller as it is."""
        self.reason = reason
        self.plan.statistics.give_ups += 1
        self.plan.statistics.retries += self.attempts - 1
        if type(error) is RejectedResult:
            error.records, error.reason = self.records, reason

    def _event(
        self,
        attempt: int,
        failure: Failure | None = None,
        error: Exception | None = None,
        policy: RetryPolicy | None = None,
        *,
        delay: float | None = None,
        value: object = None,
    ) -> RetryEvent:
        most = (policy or self.plan.policy).max_attempts
        name = self.plan.name or "unnamed"
        if type(error) is RejectedResult:
            value, error = error.value, None
        about_call = self.elapsed, self.reason, self.args, self.kwargs
        return RetryEvent(name, attempt, most, failure, error, delay, *about_call, value)


def begin_call(
    plan: Plan,
    started: float | None,
    since: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = _NOTHING,
    keeps_records: bool = False,
) -> CallState:
    """
    The state of a call that begins: a function, because an `__init__` costs more to enter than to run.

    Who calls a decorated function gets its value or an error, and records only with the error of a refused result.
    """
    call = CallState()
    call.plan, call.args, call.kwargs = plan, args, kwargs
    call.started, call.since = started, since
    call.resolve = None if plan.resolver is None else plan.resolver()
    call.key = None if plan.next_key is None else plan.next_key()
    call.attempts, call.delay = 0, 0.0
    call.failure = call.reason = call.gave_up = call.observe = call.redact = call.awaited = None
    call.trace = None if tracing.tracer is None else CallTrace(tracing.tracer, plan.name or "unnamed")
    call._records = [] if keeps_records or plan.result_rule is not None else None
    call.rule = _not_asked if plan.has_async_rule else plan.rule
    has_lists = plan.policy.retryable_exceptions or plan.policy.non_retryable_exceptions  # which decide without a rule
    if call.rule is None and plan.resolver is None and not has_lists:
        call.rule = retryable_by_default
    return call


def _not_asked(error: Exception, failure: Failure) -> bool:
    """The rule of a call whose predicate is async, until `ask_rule` has asked it."""
    return False


def _is_given_up(reason: Reason, failure: Failure, policy: RetryPolicy, verdict: bool | None) -> bool:
    """Whether the end is that of a retry, which a fallback is for; an error that is not retried goes to the caller."""
    if reason is not Reason.INNER_EXHAUSTED:
        return reason is not Reason.NOT_RETRYABLE
    return matches_exception_lists(failure.exceptions, policy) if verdict is None else verdict


def _resolve_verdict(
    error: Exception, failure: Failure, verdict: Verdict | None, plan: Plan
) -> tuple[Failure, bool | None]:
    """
    Turn what the rule answered into a plain verdict, and what else it says into the failure.

    Our own deadline ends the call, seconds become a hint, and errors that are always retried override "no".
    """
    cls = type(error)
    if issubclass(cls, DeadlineExceededError) and not failure.exhausted:
        return replace(failure, code=ErrorCode.cancelled_by_timeout), None
    if plan.limit is not None and issubclass(cls, LimitReachedError):
        return replace(failure, code=ErrorCode.cancelled_by_timeout), None  # no time was left to wait for the limit
    if isinstance(verdict, float):
        return replace(failure, retry_after=max(verdict, failure.retry_after or 0.0)), True
    if issubclass(cls, ALWAYS_RETRIED):
        return failure, True
    if plan.breaker is not None and issubclass(cls, BreakerOpenError):
        return failure, True  # the breaker is the reason to stop, not the kind of error it raises
    assert verdict is None or isinstance(verdict, bool)
    return failure, verdict


def _is_open(breaker: CircuitBreaker, error: Exception) -> bool:
    return issubclass(type(error), BreakerOpenError) or breaker.state.value == "open"


def _annotate(error: Exception, event: RetryEvent, policy: RetryPolicy) -> None:
    """Add the note for the caller. A note of the same retrier is replaced: an exception object may be raised again."""
    assert event.reason is not None
    head = f"reefknot[{event.name}]"
    hint = event.failure.retry_after if event.failure is not None else None
    asked = f"; the server asked for {hint:g} s" if hint is not None and event.reason is not Reason.BREAKER_OPEN else ""
    count = "1 attempt" if event.attempt == 1 else f"{event.attempt} attempts"
    most = retry_switch.most
    off = "; retries are turned off" if retry_switch.is_off else f"; at most {most}" if most <= event.attempt else ""
    spent = f"{count}, {seconds(event.elapsed)} s"
    note = f"{head}: {WHY[event.reason]}{asked}{off} ({spent}; policy: {policy.describe()})"
    try:
        notes = getattr(error, "__notes__", None)
        if notes:
            notes[:] = [line for line in notes if not line.startswith(head + ":")]
        error.add_note(note)
    except UNREADABLE:  # an exception that refuses notes still goes to the caller unharmed
        return


def _logger_of(plan: Plan) -> Logger:
    if plan.logger is None:
        plan.logger = logger() if isinstance(plan.log, int) else plan.log
    return plan.logger


def _level_of(plan: Plan, error: Exception) -> int:
    """The level that `log=` names, else a warning; a wait that was asked for is no failure, and only informs."""
    if isinstance(plan.log, int) and not isinstance(plan.log, bool):
        return plan.log
    return 20 if issubclass(type(error), REQUESTED) else 30


def _log_retry(plan: Plan, error: Exception, event: RetryEvent, left_out: int) -> None:
    verb = "asked to try again:" if issubclass(type(error), REQUESTED) else "failed with"
    _logger_of(plan).log(
        _level_of(plan, error),
        "%s: attempt %d of %d %s %s; trying again in %s s%s",
        printable(event.name, most=100),
        event.attempt,
        event.max_attempts,
        verb,
        printable(str(event.failure), most=300),
        seconds(event.delay or 0.0),
        f" ({left_out} such lines left out)" if left_out else "",
        extra=_fields(event, "retry"),
    )


def _fields(event: RetryEvent, decision: str) -> dict[str, object]:
    """The fields of a log line, under the names that lines about jobs have too."""
    failure = event.failure
    return {
        "decision": decision,
        "operation": printable(event.name, most=100),
        "attempt": event.attempt,
        "max_attempts": event.max_attempts,
        "wait_s": event.delay,
        "reason": None if event.reason is None else event.reason.value,
        "error_code": None if failure is None else failure.code.wire,
        "failure_type": None if failure is None else failure.failure_type.value,
        "trace_id": current_trace_id(),
    }
