"""
What happened, told: one log line a retry, the note on the final exception, and hooks.

Log lines are bounded per retrier: a burst of ten, then one a second; the next line says how many were left out. Call
arguments never appear. A hook that raises is reported and changes nothing.

The story of a call that failed at least once.

    read the failure → ask the judge → decide → record → tell → wait, or give the error back

A `Run` holds what one call spent. It never holds an exception: what an attempt had in its hands is free again before
the wait begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from reefknot import clock as timing
from reefknot.core.failure import ErrorCode, Failure
from reefknot.core.redaction import redact
from reefknot.core.retry.backoff import draw
from reefknot.core.retry.decide import Again, AttemptRecord, History, Reason, Stop, decide
from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import BreakerOpenError, DeadlineExceededError
from reefknot.retrying import plan as exhaustion
from reefknot.retrying.failures import EXHAUSTED_MARK, by_nature, read_failure
from reefknot.retrying.plan import ALWAYS_HEARD, Plan
from reefknot.runtime import seeds as chance
from reefknot.runtime.log import LINES_AT_ONCE, LogBudget, logger, printable, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from reefknot.retrying.plan import Judge


class RetryEvent(Struct, frozen=True):
    """What a hook is given. `delay` is the wait that follows, None at the end; `reason` is why it ended, if it did."""

    name: str
    attempt: int
    max_attempts: int
    failure: Failure | None
    error: Exception | None
    delay: float | None
    elapsed: float
    reason: Reason | None


Hook = Callable[[RetryEvent], object]


def retrying(event: RetryEvent, lines: LogBudget, now: float) -> None:
    """The one line a retry logs. It takes from the retrier's budget, and sets the time before which it stays quiet."""
    left = min(LINES_AT_ONCE, lines.left + max(0.0, now - lines.at)) - 1.0
    lines.at, lines.left = now, left
    if left < 1.0:
        lines.quiet_until = now + 1.0 - left
    left_out, lines.left_out = lines.left_out, 0
    logger().warning(
        "%s: attempt %d of %d failed with %s; trying again in %s s%s",
        printable(event.name, most=100),
        event.attempt,
        event.max_attempts,
        printable(str(event.failure), most=300),
        seconds(event.delay or 0.0),
        f" ({left_out} such lines left out)" if left_out else "",
        extra={"retry_attempt": event.attempt, "retry_delay": event.delay},
    )


def call_hook(hook: Hook | None, which: str, event: RetryEvent) -> None:
    if hook is None:
        return
    try:
        hook(event)
    except Exception as broken:
        broken_callback(which, broken)


def broken_callback(which: str, broken: Exception) -> None:
    """A hook or predicate of the caller's failed; the work goes on as if it had not been there."""
    try:
        said = printable(redact(str(broken)), most=300)
    except Exception:
        said = "which cannot be shown"
    logger().error("%s= raised %s: %s; the outcome is unchanged", which, type(broken).__name__, said)


WHY = {
    Reason.NOT_RETRYABLE: "not retried: this failure is not one to retry",
    Reason.INNER_EXHAUSTED: "not retried: an inner retry already gave up on it",
    Reason.ATTEMPTS_SPENT: "gave up: all attempts are spent",
    Reason.BREAKER_OPEN: "gave up: the circuit breaker is open",
    Reason.HINT_TOO_LONG: "gave up: the server asked for a longer wait than max_retry_after",
    Reason.BUDGET_SPENT: "gave up: another attempt would not fit into the deadline",
    Reason.THROTTLED: "gave up: the retry throttle is empty",
}


def annotate(error: Exception, event: RetryEvent, policy: RetryPolicy) -> None:
    """The note on the exception that goes to the caller. A note of the same retrier is replaced, not piled up."""
    assert event.reason is not None
    head = f"reefknot[{event.name}]"
    hint = event.failure.retry_after if event.failure is not None else None
    asked = f"; the server asked for {hint:g} s" if hint is not None and event.reason is not Reason.BREAKER_OPEN else ""
    count = "1 attempt" if event.attempt == 1 else f"{event.attempt} attempts"
    note = f"{head}: {WHY[event.reason]}{asked} ({count}, {seconds(event.elapsed)} s; policy: {policy.describe()})"
    try:
        notes = getattr(error, "__notes__", None)
        if notes:
            notes[:] = [line for line in notes if not line.startswith(head + ":")]
        error.add_note(note)
    except Exception:  # an exception that refuses notes still goes to the caller unharmed
        return


_TELLS_OUTER_ONES = frozenset({Reason.ATTEMPTS_SPENT, Reason.BUDGET_SPENT, Reason.THROTTLED, Reason.HINT_TOO_LONG})


class Run:
    """One call on its way through failures."""

    __slots__ = (
        "_records",
        "attempts",
        "delay",
        "judge",
        "key",
        "observe",
        "plan",
        "reason",
        "redact",
        "resolve",
        "since",
        "started",
    )

    def __init__(self, plan: Plan, started: float | None, since: int) -> None:
        self.plan = plan
        self.started = started
        self.since = since
        self.resolve = None if plan.resolver is None else plan.resolver()
        self.key = chance.next_key() if plan.next_key is None else plan.next_key()
        self.attempts = 0
        self.delay = 0.0
        self.reason: Reason | None = None
        self.observe: Callable[..., object] | None = None
        """Given each decision with all of its inputs, by whoever puts them on record."""
        self.redact: Callable[[str], str] | None = None
        """Takes configured secrets out of a failure's text, before anything is decided or told."""
        self._records: list[tuple[Failure, float, float | None, float]] = []
        self.judge = plan.judge or _default_judge(plan)

    @property
    def elapsed(self) -> float:
        """Seconds since the first execution began, or since its failure when nobody looked at the clock before."""
        return 0.0 if self.started is None else timing.now() - self.started

    @property
    def records(self) -> tuple[AttemptRecord, ...]:
        """The history, as data."""
        return tuple(AttemptRecord(number, *record) for number, record in enumerate(self._records, 1))

    def stops(self, error: Exception) -> bool:
        """Take in a failed execution. True: give the error to the caller. False: wait `delay`, then try again."""
        plan = self.plan
        self.attempts = attempts = self.attempts + 1
        failure = read_failure(error, self.since)
        if self.redact is not None:
            failure = replace(failure, message=self.redact(failure.message))
        verdict: bool | None = None
        if self.judge is not None:
            verdict = self.judge(error, failure)  # type: ignore[assignment]  # seconds are told from bools below
        if verdict is not True or type(error) is DeadlineExceededError:
            failure, verdict = _heard(error, failure, verdict, plan)
        policy = plan.policy if self.resolve is None else self.resolve(failure)
        now = timing.now()
        if self.started is None:
            self.started = now
        elapsed = now - self.started
        chosen = 0.0
        if policy.base_delay or failure.retry_after is not None:
            chosen = draw(chance.process_seed if plan.seed is None else plan.seed, self.key, attempts - 1)
        history = History(attempts, elapsed, self.delay)
        view = None if plan.throttle is None else plan.throttle.view(now)
        alone = plan.breaker is not None and _left_alone(plan, error)
        decision = decide(policy, history, failure, chosen, verdict=verdict, throttle=view, breaker_open=alone)
        if self.observe is not None:
            self.observe(decision, policy, history, failure, chosen, verdict=verdict, throttle=view, breaker_open=alone)
        if type(decision) is Again:
            self.delay = decision.delay
            self._records.append((failure, elapsed, decision.delay, chosen))
            if plan.throttle is not None:
                plan.throttle.spend()
            lines = plan.lines
            quiet = lines.at <= now < lines.quiet_until
            if quiet:
                lines.left_out += 1
            if not quiet or plan.on_retry is not None:
                self._tell(error, failure, policy, None if quiet else now)
            return False
        assert isinstance(decision, Stop)
        self._records.append((failure, elapsed, None, chosen))
        self._give_up(decision.reason, error, failure, policy)
        return True

    def succeeded(self) -> None:
        """An execution succeeded."""
        throttle = self.plan.throttle
        if throttle is not None and throttle.tokens < throttle.cap:
            throttle.feed()
        if self.attempts and self.plan.on_recover is not None:
            call_hook(self.plan.on_recover, "on_recover", self._event(self.attempts + 1))

    def began(self) -> None:
        """An execution begins; the throttle counts it."""
        throttle = self.plan.throttle
        if throttle is not None:
            now = timing.now()
            if now > throttle.edge:
                throttle.roll(now)
            throttle.tick()

    def _tell(self, error: Exception, failure: Failure, policy: RetryPolicy, log_at: float | None) -> None:
        """Log and hook of a retry. `log_at` is the time of the line, None where the line is left out."""
        event = self._event(self.attempts, failure, error, policy)
        if log_at is not None:
            retrying(event, self.plan.lines, log_at)
        call_hook(self.plan.on_retry, "on_retry", event)

    def _give_up(self, reason: Reason, error: Exception, failure: Failure, policy: RetryPolicy) -> None:
        self.reason = reason
        event = self._event(self.attempts, failure, error, policy)
        if reason in _TELLS_OUTER_ONES:
            exhaustion.so_far += 1
            _mark(error, exhaustion.so_far)
        if failure.code is ErrorCode.cancelled_by_timeout and len(self._records) > 1:
            error.add_note(f"the attempt before failed with {self._records[-2][0]}")
        annotate(error, event, policy)
        call_hook(self.plan.on_give_up, "on_give_up", event)

    def _event(
        self,
        attempt: int,
        failure: Failure | None = None,
        error: Exception | None = None,
        policy: RetryPolicy | None = None,
    ) -> RetryEvent:
        most = (policy or self.plan.policy).max_attempts
        delay = self.delay if failure is not None and self.reason is None else None
        name = self.plan.name or "unnamed"
        return RetryEvent(name, attempt, most, failure, error, delay, self.elapsed, self.reason)


def _heard(error: Exception, failure: Failure, answer: object, plan: Plan) -> tuple[Failure, bool | None]:
    """What is not a plain yes: our own deadline, seconds to wait, or a refusal that our own errors overrule."""
    if isinstance(error, DeadlineExceededError) and not failure.exhausted:
        return replace(failure, code=ErrorCode.cancelled_by_timeout), None
    if isinstance(answer, float):
        return replace(failure, retry_after=max(answer, failure.retry_after or 0.0)), True
    if isinstance(error, ALWAYS_HEARD):
        return failure, True
    if plan.breaker is not None and isinstance(error, BreakerOpenError):
        return failure, True  # the breaker is the reason to stop, not the kind of error it raises
    assert answer is None or isinstance(answer, bool)
    return failure, answer


def _left_alone(plan: Plan, error: Exception) -> bool:
    assert plan.breaker is not None
    return isinstance(error, BreakerOpenError) or plan.breaker.state.value == "open"


def _default_judge(plan: Plan) -> Judge | None:
    """Nobody is asked where a policy brings lists of its own or depends on the failure."""
    policy = plan.policy
    if plan.resolver is not None or policy.retryable_exceptions or policy.non_retryable_exceptions:
        return None
    return by_nature


def _mark(error: Exception, number: int) -> None:
    try:
        setattr(error, EXHAUSTED_MARK, number)
    except Exception:  # an exception that refuses attributes is simply not marked
        return
