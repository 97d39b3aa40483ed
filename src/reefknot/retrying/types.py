"""
Types of the retry interface: the event of a hook, the options, and a decorated function as a type checker sees it.

`RetryKeywords` is a typed dictionary, which distinguishes "not given" from "given as None".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from logging import Logger, LoggerAdapter
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Never,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from msgspec import Struct

from reefknot.core.decide import Reason
from reefknot.core.failure import Failure

if TYPE_CHECKING:
    from reefknot.core.checks import Seconds
    from reefknot.core.policy import Jitter, JitterName, RetryStrategy, StrategyName
    from reefknot.core.throttle import RetryThrottle
    from reefknot.retrying.breaker import CircuitBreaker
    from reefknot.retrying.functions import On, OnResult, RetryStatistics
    from reefknot.retrying.limit import Limit


class RetryEvent(Struct, frozen=True):
    """
    Argument of a hook. `delay` is the wait that follows, None at the end; `reason` says why it ended, if it did.

    `args` and `kwargs` are those of the call, `self` first in a method. No log line shows them, nor does the event's
    own text.
    """

    name: str
    attempt: int
    max_attempts: int
    failure: Failure | None
    error: Exception | None
    delay: float | None
    elapsed: float
    reason: Reason | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    value: Any = None
    """The result that `on_result=` refused, or in `after=` the result of the attempt; `error` is None then."""

    def __repr__(self) -> str:
        shown = ("name", "attempt", "max_attempts", "failure", "error", "delay", "elapsed", "reason")
        return f"RetryEvent({', '.join(f'{field}={getattr(self, field)!r}' for field in shown)})"


class FailedAttempt(int):
    """
    Argument of `wait=`: the number of the attempt that failed, which also has its `error`, `value` and `event`.

    `wait=lambda attempt: 2 * attempt`, or `wait=lambda attempt: attempt.error.retry_in`.
    """

    event: RetryEvent

    @classmethod
    def of(cls, event: RetryEvent) -> FailedAttempt:
        attempt = cls(event.attempt)
        attempt.event = event
        return attempt

    @property
    def error(self) -> Any:
        """The exception, of any class; None when `on_result=` refused a result."""
        return self.event.error

    @property
    def value(self) -> Any:
        """The result that `on_result=` refused."""
        return self.event.value


Wait: TypeAlias = "Sequence[Seconds] | Callable[[FailedAttempt], Seconds | None]"
"""Seconds before each retry, or a function of the attempt that failed; None leaves the wait to the policy."""
Hook = Callable[[RetryEvent], object]
"""A function of the event; an async one where the call is async, and awaited there."""


class StopEvent(Protocol):
    """An event of threading, asyncio, Trio or anyio."""

    def is_set(self) -> bool: ...

    @property
    def wait(self) -> Callable[..., Any]: ...


class PolicyFields(TypedDict, total=False):
    """Options that change the policy, by the decorator's names. An option that is not given is inherited."""

    attempts: int
    deadline: Seconds | None
    base_delay: Seconds
    max_delay: Seconds
    multiplier: float
    jitter: JitterName | Jitter
    jitter_factor: float
    strategy: StrategyName | RetryStrategy
    attempt_timeout: Seconds | None
    max_retry_after: Seconds


class RetryKeywords(PolicyFields, total=False):
    """Keyword options of `retry`, `Retrier`, `Retrier.using` and `using`."""

    on: On | None
    on_result: OnResult | None
    raise_result: bool
    wait: Wait | None
    stop: StopEvent | None
    throttle: RetryThrottle | str | bool
    breaker: CircuitBreaker | None
    limit: Limit | None
    before: Hook | None
    after: Hook | None
    on_retry: Hook | None
    on_give_up: Hook | None
    on_recover: Hook | None
    in_thread: bool
    name: str
    seed: int
    log: bool | int | str | Logger | LoggerAdapter[Any]


MYPY = False  # mypy reads it as True
P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F")
F_co = TypeVar("F_co", covariant=True)


class Wrapper(Protocol):
    """Attributes that a decorated function takes over."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]


class Overridable(Protocol[P, R_co]):
    """A function whose options can be overridden for one call; with a fallback it gives that value, too."""

    @overload
    def using(self, **options: Unpack[RetryKeywords]) -> Retrying[P, R_co]:
        """This function under other options. For a method: `Class.method.using(…)(instance, …)`, or `rk.using`."""

    @overload
    def using(
        self: Overridable[P, Coroutine[Any, Any, R]],
        *,
        fallback: Callable[[RetryEvent], Awaitable[F]],
        **options: Unpack[RetryKeywords],
    ) -> Retrying[P, Coroutine[Any, Any, R | F]]: ...
    @overload
    def using(
        self: Overridable[P, Coroutine[Any, Any, R]],
        *,
        fallback: Callable[[RetryEvent], F],
        **options: Unpack[RetryKeywords],
    ) -> Retrying[P, Coroutine[Any, Any, R | F]]: ...
    @overload
    def using(
        self: Overridable[P, Coroutine[Any, Any, R]], *, fallback: F, **options: Unpack[RetryKeywords]
    ) -> Retrying[P, Coroutine[Any, Any, R | F]]: ...
    @overload
    def using(
        self, *, fallback: Callable[[RetryEvent], F], **options: Unpack[RetryKeywords]
    ) -> Retrying[P, R_co | F]: ...
    @overload
    def using(self, *, fallback: F, **options: Unpack[RetryKeywords]) -> Retrying[P, R_co | F]: ...


class Retrying(Wrapper, Overridable[P, R_co], Protocol[P, R_co]):
    """A decorated function: called as before, with `using` to override options for one call."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @property
    def statistics(self) -> RetryStatistics:
        """Calls, retries and give-ups so far."""

    # What `Class.name` and `instance.name` are. Whether a class method or a static method was meant shows in the first
    # parameter: it is the class, or nothing that the instance would fit. Mypy does not look at it here, so for mypy
    # both readings are allowed, the likelier one first.
    if MYPY:

        @overload
        def __get__(self: Retrying[Concatenate[S, Q], R_co], instance: None, owner: type) -> OfClass[P, Q, R_co]: ...
        @overload
        def __get__(
            self: Retrying[Concatenate[S, Q], R_co], instance: object, owner: type | None = None
        ) -> OfInstance[P, Q, R_co]: ...

    else:

        @overload
        def __get__(
            self: Retrying[Concatenate[type[S], Q], R_co], instance: None, owner: type[S]
        ) -> Callable[Q, R_co]: ...
        @overload
        def __get__(self, instance: None, owner: type) -> Retrying[P, R_co]: ...
        @overload
        def __get__(
            self: Retrying[Concatenate[type[S], Q], R_co], instance: S, owner: type | None = None
        ) -> Callable[Q, R_co]: ...
        @overload
        def __get__(
            self: Retrying[Concatenate[S, Q], R_co], instance: S, owner: type | None = None
        ) -> Callable[Q, R_co]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None) -> Retrying[P, R_co]: ...


class OfClass(Wrapper, Overridable[P, R_co], Protocol[P, Q, R_co]):
    """`Class.name`: a function or static method; or a class method, bound."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...


class OfInstance(Wrapper, Protocol[P, Q, R_co]):
    """`instance.name`: a bound method; or a static method."""

    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class FallbackDecorator(Protocol[F_co]):
    """The result of `retry(fallback=…)`: a decorator whose function gives its own value, or that of the fallback."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the narrower first
        self, fn: staticmethod[P, Coroutine[Any, Any, R]]
    ) -> staticmethod[P, Coroutine[Any, Any, R | F_co]]: ...
    @overload
    def __call__(self, fn: staticmethod[P, R]) -> staticmethod[P, R | F_co]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, fn: classmethod[S, P, Coroutine[Any, Any, R]]
    ) -> classmethod[S, P, Coroutine[Any, Any, R | F_co]]: ...
    @overload
    def __call__(self, fn: classmethod[S, P, R]) -> classmethod[S, P, R | F_co]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]]) -> Retrying[P, Coroutine[Any, Any, R | F_co]]: ...
    @overload
    def __call__(self, fn: Callable[P, R]) -> Retrying[P, R | F_co]: ...


# Mypy gives up on `retry(**options)` with a `dict[str, Any]`, which may hold a fallback, unless all that it may return
# is of one class. A function with the fallback Never gives its own value alone.
Decorator: TypeAlias = FallbackDecorator[Never]
"""The result of `retry(…)` without a fallback: a decorator that keeps the type of the function."""
