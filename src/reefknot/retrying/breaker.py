"""
`CircuitBreaker`: as a decorator, as `with breaker.guard():`, or as `breaker=` of a retrier.

Only failures that say something about the destination count (connection errors, timeouts, HTTP 408, 429, 5xx, or what
`on=` names); a bug in the caller's own code does not open the breaker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reefknot import clock
from reefknot.core.breaker import Breaker, BreakerSnapshot, BreakerState, Permit, Refused
from reefknot.errors import (
    AttemptTimeoutError,
    BreakerOpenError,
    DeadlineExceededError,
    LimitReachedError,
    ParameterTypeError,
)
from reefknot.retrying.failures import failure_from, retryable_by_default
from reefknot.retrying.functions import RejectedResult, is_async, rule_for

if TYPE_CHECKING:
    from reefknot.core.checks import Seconds
    from reefknot.retrying.functions import On, Rule

P = ParamSpec("P")
R = TypeVar("R")


class CircuitBreaker:
    """
    `rk.CircuitBreaker("billing")`: after five failures in a row no call goes out for 30 s, then one probe at a time.

    A refused call raises `BreakerOpenError` with `retry_after`. One object may be shared by threads and tasks.
    """

    def __init__(self, name: str, *, failures: int = 5, cooldown: Seconds = 30.0, on: On | None = None) -> None:
        self._breaker = Breaker(name, failures=failures, cooldown=cooldown)
        self._rule = rule_for(on)
        if is_async(self._rule):
            raise ParameterTypeError("on", on, "exception classes, or a plain function: a breaker awaits no predicate")
        self._lock = Lock()

    @property
    def name(self) -> str:
        return self._breaker.name

    @property
    def state(self) -> BreakerState:
        return self._breaker.state(clock.now())

    def snapshot(self) -> BreakerSnapshot:
        with self._lock:
            return self._breaker.snapshot(clock.now())

    def admit(self) -> Permit:
        """A permit for one call, or `BreakerOpenError`. The outcome of every permit must be reported."""
        with self._lock:
            answer = self._breaker.admit(clock.now())
        if isinstance(answer, Refused):
            raise BreakerOpenError(name=self.name, retry_after=answer.retry_after)
        return answer

    def report(self, permit: Permit, error: BaseException | None, rule: Rule | None = None) -> None:
        """
        Report how the permitted call ended.

        An error that does not count means that the destination answered; after control flow, and where a limit let no
        call begin, the outcome is unknown.
        """
        failed = isinstance(error, Exception) and not issubclass(type(error), LimitReachedError)
        counts = failed and isinstance(error, Exception) and self._counts(error, rule)
        with self._lock:
            if counts:
                self._breaker.failed(permit, clock.now())
            elif error is None or failed:
                self._breaker.succeeded(permit)
            else:
                self._breaker.released(permit)

    def _counts(self, error: Exception, rule: Rule | None) -> bool:
        """
        Whether a failure counts: by the breaker's `on=`, else by the retrier's rule; our own timeouts always count.
        """
        if issubclass(type(error), (AttemptTimeoutError, DeadlineExceededError)):
            return True
        if type(error) is RejectedResult:  # the destination answered
            return False
        return (self._rule or rule or retryable_by_default)(error, failure_from(error)) is not False

    def guard(self, rule: Rule | None = None) -> Guard:
        """`with breaker.guard():` around one call; in async code too."""
        return Guard(self, rule)

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        with Guard(self):
            return fn(*args, **kwargs)

    async def acall(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        with Guard(self):
            return await fn(*args, **kwargs)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, `def` or `async def`."""
        if not callable(fn):
            raise ParameterTypeError("fn", fn, "a function")
        return guarded(self, fn)

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.name!r} {self.state.value}>"


class Guard:
    """Context manager of one call: entering asks for a permit, leaving reports the outcome."""

    __slots__ = ("_breaker", "_permit", "_rule")

    def __init__(self, breaker: CircuitBreaker, rule: Rule | None = None) -> None:
        self._breaker = breaker
        self._rule = rule
        self._permit: Permit | None = None

    def __enter__(self) -> None:
        self._permit = self._breaker.admit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._permit is not None
        self._breaker.report(self._permit, error, self._rule)


def guarded(breaker: CircuitBreaker, fn: Callable[P, R], rule: Rule | None = None) -> Callable[P, R]:
    """`fn` behind the breaker; without `on=` of its own, the breaker counts what `rule` would retry."""
    if is_async(fn):

        @wraps(fn)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            with Guard(breaker, rule):
                return await fn(*args, **kwargs)  # type: ignore[misc]  # is_async says it is awaitable

        return acall  # type: ignore[return-value]  # the same kind of function as fn

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with Guard(breaker, rule):
            return fn(*args, **kwargs)

    return call
