"""
The retry decision: `decide` returns `Again(delay)` or `Stop(reason)`; `Outcome` is how the work ended.

`decide` is the only place that decides. It neither sleeps nor schedules: the library waits in process, a worker writes
a due time, and both obey the same answer. Every input is an argument, so a decision can be repeated.

The history of an outcome holds failures, never live exceptions: it keeps no object of an attempt alive.
"""

from enum import StrEnum
from typing import Generic, TypeVar

from msgspec import Struct

from reefknot.core.backoff import delay_before
from reefknot.core.failure import ErrorCode, Failure
from reefknot.core.policy import RetryPolicy, RetryStrategy

_NEVER = RetryStrategy.NO_RETRY
_OUT_OF_TIME = ErrorCode.cancelled_by_timeout

DECIDER_VERSION = 1
"""Increased whenever the same inputs may give another answer; events carry it."""


class Reason(StrEnum):
    """Why there is no further attempt."""

    NOT_RETRYABLE = "not_retryable"
    INNER_EXHAUSTED = "inner_exhausted"
    ATTEMPTS_SPENT = "attempts_spent"
    STOPPED = "stopped"
    BREAKER_OPEN = "breaker_open"
    HINT_TOO_LONG = "hint_too_long"
    BUDGET_SPENT = "budget_spent"
    THROTTLED = "throttled"


REFUSED = frozenset(
    {Reason.NOT_RETRYABLE, Reason.INNER_EXHAUSTED, Reason.STOPPED, Reason.BREAKER_OPEN, Reason.THROTTLED}
)
"""Reasons to refuse a retry although the policy's attempts and time are not spent."""


DECIDING_FIELD: dict[str, str] = {
    "again": "base_delay",
    Reason.NOT_RETRYABLE: "retryable",
    Reason.ATTEMPTS_SPENT: "max_attempts",
    Reason.BUDGET_SPENT: "time_budget",
    Reason.HINT_TOO_LONG: "max_retry_after",
}
"""
The field of a policy that decides each answer (`again` or a reason). Throttle, breakers and callers are not part of a
policy.
"""


class Again(Struct, frozen=True, gc=False):
    """Another attempt, after `delay` seconds."""

    delay: float


class Stop(Struct, frozen=True, gc=False):
    """No further attempt."""

    reason: Reason


Decision = Again | Stop
_AT_ONCE = Again(0.0)


class History(Struct, frozen=True, gc=False):
    """The executions so far, the seconds since the first began, and the last wait."""

    attempts: int
    elapsed: float = 0.0
    previous_delay: float = 0.0

    @property
    def retries(self) -> int:
        return self.attempts - 1


class ThrottleView(Struct, frozen=True, gc=False):
    """The state of a retry throttle when the decision was taken."""

    acting: bool
    tokens: float


def decide(
    policy: RetryPolicy,
    history: History,
    failure: Failure,
    draw: float,
    verdict: bool | None = None,
    throttle: ThrottleView | None = None,
    breaker_open: bool = False,
    stopped: bool = False,
    wait: float | None = None,
) -> Decision:
    """
    The decision after a failed execution: whether there is another one, and when.

    `verdict` is the answer of the caller's predicate or class list. With None, the policy's own exception lists decide.
    `stopped` says that the caller asked to stop; `wait` is the caller's own choice of a wait, in place of the policy's
    backoff and below the same cap. The order of the checks is the order of the reasons.
    """
    if failure.code is _OUT_OF_TIME:
        return Stop(Reason.BUDGET_SPENT)
    if failure.exhausted:
        return Stop(Reason.INNER_EXHAUSTED)
    if not policy.retryable or policy.strategy is _NEVER:
        return Stop(Reason.NOT_RETRYABLE)
    if verdict is None and (policy.retryable_exceptions or policy.non_retryable_exceptions):
        verdict = matches_exception_lists(failure.exceptions, policy)
    if verdict is False:
        return Stop(Reason.NOT_RETRYABLE)
    if history.attempts >= policy.max_attempts:
        return Stop(Reason.ATTEMPTS_SPENT)
    if stopped:
        return Stop(Reason.STOPPED)
    if breaker_open:
        return Stop(Reason.BREAKER_OPEN)

    if wait is not None:
        delay = min(wait, policy.max_delay)
    elif policy.base_delay or policy.whole_seconds:
        delay = delay_before(history.attempts - 1, policy, draw, history.previous_delay)
    else:
        delay = 0.0
    hint = failure.retry_after
    if hint is not None:
        if not hint <= max(policy.max_retry_after, policy.max_delay):  # nan is refused too
            return Stop(Reason.HINT_TOO_LONG)
        if hint > 0.0:
            delay = max(delay, hint) + draw * min(1.0, 0.1 * hint)

    if history.elapsed + delay >= policy.time_budget:
        return Stop(Reason.BUDGET_SPENT)
    if throttle is not None and throttle.acting and throttle.tokens < 1.0:
        return Stop(Reason.THROTTLED)
    return Again(delay) if delay else _AT_ONCE


def matches_exception_lists(exceptions: tuple[str, ...], policy: RetryPolicy) -> bool:
    """
    Whether the policy's exception lists allow a retry: the most specific class that either list names decides.

    A tie is retryable. A list of retryable classes without a match means no; two empty lists mean yes.
    """
    for name in exceptions:
        bare = name.rpartition(".")[2]
        if name in policy.retryable_exceptions or bare in policy.retryable_exceptions:
            return True
        if name in policy.non_retryable_exceptions or bare in policy.non_retryable_exceptions:
            return False
    return not policy.retryable_exceptions


T = TypeVar("T")


class AttemptRecord(Struct, frozen=True):
    """A failed execution and the wait that followed; None when it was the last."""

    number: int
    failure: Failure
    elapsed: float
    delay: float | None
    draw: float


class Outcome(Struct, Generic[T], frozen=True):
    """The result of `Retrier.run`: value or error, attempts, history, time, reason."""

    ok: bool
    value: T | None
    error: Exception | None
    attempts: int
    history: tuple[AttemptRecord, ...]
    elapsed: float
    reason: Reason | None
    """Why there was no further attempt; None after a success."""
    fell_back: bool = False
    """Whether the value is that of `fallback=`; `error` is then the last one, and `ok` is False."""

    def unwrap(self) -> T:
        """The value, that of the fallback too; or the error raised."""
        if self.error is not None and not self.fell_back:
            raise self.error
        return self.value  # type: ignore[return-value]  # ok: the value is whatever the work returned, None included
