"""
The story of a call that failed at least once.

    read the failure → ask the judge → decide → record → tell → wait, or give the error back

A `Run` holds what one call spent. It never holds an exception: what an attempt had in its hands is free again before
the wait begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from reefknot.core.failure import ErrorCode, Failure
from reefknot.core.outcome import AttemptRecord
from reefknot.core.retry.decide import Again, History, Reason, Stop, decide
from reefknot.core.retry.draw import draw
from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import BreakerOpenError, DeadlineExceededError
from reefknot.execution import chance, exhaustion, report, timing
from reefknot.execution.judge import ALWAYS_HEARD
from reefknot.execution.nature import by_nature
from reefknot.execution.plan import Plan
from reefknot.execution.reading import EXHAUSTED_MARK, read_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from reefknot.execution.judge import Judge

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
            report.call_hook(self.plan.on_recover, "on_recover", self._event(self.attempts + 1))

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
            report.retrying(event, self.plan.lines, log_at)
        report.call_hook(self.plan.on_retry, "on_retry", event)

    def _give_up(self, reason: Reason, error: Exception, failure: Failure, policy: RetryPolicy) -> None:
        self.reason = reason
        event = self._event(self.attempts, failure, error, policy)
        if reason in _TELLS_OUTER_ONES:
            exhaustion.so_far += 1
            _mark(error, exhaustion.so_far)
        if failure.code is ErrorCode.cancelled_by_timeout and len(self._records) > 1:
            error.add_note(f"the attempt before failed with {self._records[-2][0]}")
        report.annotate(error, event, policy)
        report.call_hook(self.plan.on_give_up, "on_give_up", event)

    def _event(
        self,
        attempt: int,
        failure: Failure | None = None,
        error: Exception | None = None,
        policy: RetryPolicy | None = None,
    ) -> report.RetryEvent:
        most = (policy or self.plan.policy).max_attempts
        delay = self.delay if failure is not None and self.reason is None else None
        name = self.plan.name or "unnamed"
        return report.RetryEvent(name, attempt, most, failure, error, delay, self.elapsed, self.reason)


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
