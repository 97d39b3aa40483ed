"""
What `retry`, `Retrier` and `using` take by keyword, as types.

Nothing here runs. A typed dictionary tells "not said" from "said: none".

What a decorated function looks like to a type checker. Nothing here is on the path of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

if TYPE_CHECKING:
    from reefknot.core.retry.policy import Jitter, JitterName, RetryStrategy, StrategyName
    from reefknot.core.retry.throttle import RetryThrottle
    from reefknot.retrying.breaker import CircuitBreaker
    from reefknot.retrying.call import Hook
    from reefknot.retrying.plan import On


class PolicyFields(TypedDict, total=False):
    """What can be said about the policy, in the decorator's words. Not said is inherited."""

    attempts: int
    deadline: float | None
    base_delay: float
    max_delay: float
    multiplier: float
    jitter: JitterName | Jitter
    jitter_factor: float
    strategy: StrategyName | RetryStrategy
    attempt_timeout: float | None
    max_retry_after: float


class Options(PolicyFields, total=False):
    """All that `retry`, `Retrier.using` and `using` take by keyword."""

    on: On | None
    throttle: RetryThrottle | str | bool
    breaker: CircuitBreaker | None
    on_retry: Hook | None
    on_give_up: Hook | None
    on_recover: Hook | None
    in_thread: bool
    name: str
    seed: int


MYPY = False  # mypy takes it for True
P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


class Retrying(Protocol[P, R_co]):
    """A decorated function: called as before, with `using` for one request's override."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def using(self, **options: Unpack[Options]) -> Retrying[P, R_co]:
        """The same function under other settings. Of a method: `Class.method.using(…)(instance, …)`, or `rk.using`."""

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


class OfClass(Protocol[P, Q, R_co]):
    """`Class.name`: a function or static method; or a class method, bound."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...
    def using(self, **options: Unpack[Options]) -> Retrying[P, R_co]: ...


class OfInstance(Protocol[P, Q, R_co]):
    """`instance.name`: a bound method; or a static method."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Decorator(Protocol):
    """What `retry(…)` gives: it keeps the type of what it is put on."""

    @overload
    def __call__(self, fn: staticmethod[P, R]) -> staticmethod[P, R]: ...  # type: ignore[overload-overlap]  # the narrower first
    @overload
    def __call__(self, fn: classmethod[S, P, R]) -> classmethod[S, P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R]) -> Retrying[P, R]: ...
