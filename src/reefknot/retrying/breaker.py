"""
A circuit breaker one can hold in the hand: as a decorator, `with breaker.guard():`, or `breaker=` of a retrier.

It counts what says something about the destination (connection errors, time-outs, HTTP 408, 429, 5xx, or what `on=`
names); a bug in the caller's own code opens nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reefknot import clock as timing
from reefknot.core.overload.breaker import Breaker, BreakerSnapshot, BreakerState, Permit, Refused
from reefknot.errors import AttemptTimeoutError, BreakerOpenError, DeadlineExceededError, ParameterTypeError
from reefknot.retrying.failures import by_nature, read_failure
from reefknot.retrying.plan import is_async, judge_for

if TYPE_CHECKING:
    from reefknot.retrying.plan import Judge, On

P = ParamSpec("P")
R = TypeVar("R")


class CircuitBreaker:
    """
    `rk.CircuitBreaker("billing")`: after five failures in a row no call goes out for 30 s, then one probe at a time.

    A refused call raises `BreakerOpenError` with `retry_after`. One object may be shared by threads and tasks.
    """

    def __init__(self, name: str, *, failures: int = 5, cooldown: float = 30.0, on: On | None = None) -> None:
        self._breaker = Breaker(name, failures=failures, cooldown=cooldown)
        self._judge = judge_for(on)
        self._lock = Lock()

    @property
    def name(self) -> str:
        return self._breaker.name

    @property
    def state(self) -> BreakerState:
        return self._breaker.state(timing.now())

    def snapshot(self) -> BreakerSnapshot:
        with self._lock:
            return self._breaker.snapshot(timing.now())

    def admit(self) -> Permit:
        """A permit for one call, or `BreakerOpenError`. Every permit must be reported on."""
        with self._lock:
            answer = self._breaker.admit(timing.now())
        if isinstance(answer, Refused):
            raise BreakerOpenError(name=self.name, retry_after=answer.retry_after)
        return answer

    def report(self, permit: Permit, error: BaseException | None, judge: Judge | None = None) -> None:
        """
        How the permitted call ended.

        An error that does not count means that the destination answered; control flow means that nobody knows.
        """
        blamed = isinstance(error, Exception) and self._counts(error, judge)
        with self._lock:
            if blamed:
                self._breaker.failed(permit, timing.now())
            elif error is None or isinstance(error, Exception):
                self._breaker.succeeded(permit)
            else:
                self._breaker.released(permit)

    def _counts(self, error: Exception, judge: Judge | None) -> bool:
        """What `on=` of the breaker says stands; else the retrier's; running out of our own time always counts."""
        if isinstance(error, AttemptTimeoutError | DeadlineExceededError):
            return True
        return (self._judge or judge or by_nature)(error, read_failure(error)) is not False

    def guard(self, judge: Judge | None = None) -> Guard:
        """`with breaker.guard():` around one call; in async code too."""
        return Guard(self, judge)

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        with Guard(self):
            return fn(*args, **kwargs)

    async def acall(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        with Guard(self):
            return await fn(*args, **kwargs)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """As a decorator, of `def` and `async def` alike."""
        if not callable(fn):
            raise ParameterTypeError("fn", fn, "a function")
        return guarded(self, fn)

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.name!r} {self.state.value}>"


class Guard:
    """One permitted call. Entering asks, leaving reports."""

    __slots__ = ("_breaker", "_judge", "_permit")

    def __init__(self, breaker: CircuitBreaker, judge: Judge | None = None) -> None:
        self._breaker = breaker
        self._judge = judge
        self._permit: Permit | None = None

    def __enter__(self) -> None:
        self._permit = self._breaker.admit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._permit is not None
        self._breaker.report(self._permit, error, self._judge)


def guarded(breaker: CircuitBreaker, fn: Callable[P, R], judge: Judge | None = None) -> Callable[P, R]:
    """`fn` behind the breaker; failures are those that `judge` calls worth another try."""
    if is_async(fn):

        @wraps(fn)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            with Guard(breaker, judge):
                return await fn(*args, **kwargs)  # type: ignore[misc]  # is_async says it is awaitable

        return acall  # type: ignore[return-value]  # the same kind of function as fn

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with Guard(breaker, judge):
            return fn(*args, **kwargs)

    return call
