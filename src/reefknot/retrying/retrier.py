"""
`Retrier`: one plan, and every way to run work under it.

A retrier keeps nothing per call: any number of threads and tasks may share it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from sys import _getframe
from typing import TYPE_CHECKING, Any, Generic, Never, ParamSpec, Self, TypeVar, Unpack, overload

from reefknot import clock
from reefknot.core.decide import Outcome
from reefknot.core.failure import Failure
from reefknot.core.policy import RetryPolicy
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.retrying.attempts import Attempts
from reefknot.retrying.call import CallState, begin_call
from reefknot.retrying.exhaustion import exhaustions
from reefknot.retrying.functions import RejectedResult, is_async, name_of, what_to_pass
from reefknot.retrying.plan import LIBRARY_DEFAULT, NO_FALLBACK, Plan, meant_instead_of
from reefknot.retrying.types import RetryEvent, RetryKeywords
from reefknot.retrying.wrappers import (
    afall_back,
    aresume,
    checking_result,
    execute,
    refuse_in_plain_code,
    result_error,
    wrapped,
)

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G")
if TYPE_CHECKING:
    import typing_extensions  # type checkers bring it along; nothing of it is loaded

    F = typing_extensions.TypeVar("F", default=Never)
else:
    F = TypeVar("F")


class Retrier(Generic[F]):
    """
    Runs work under a policy: `call`, `acall`, `run`, `arun`, `attempts`; as a decorator, `@retry(policy=retrier)`.

    Without `on=`, connection errors, timeouts and HTTP 408, 429, 5xx are retried. `F` is the type of `fallback=`, which
    callers may get in place of the value.
    """

    __slots__ = ("plan",)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Retrier[Never], policy: RetryPolicy | None = None, **options: Unpack[RetryKeywords]
        ) -> None: ...
        @overload
        def __init__(
            self: Retrier[G],
            policy: RetryPolicy | None = None,
            *,
            fallback: Callable[[RetryEvent], Awaitable[G]],
            **options: Unpack[RetryKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: Retrier[G],
            policy: RetryPolicy | None = None,
            *,
            fallback: Callable[[RetryEvent], G],
            **options: Unpack[RetryKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: Retrier[G], policy: RetryPolicy | None = None, *, fallback: G, **options: Unpack[RetryKeywords]
        ) -> None: ...

    def __init__(self, policy: RetryPolicy | None = None, **options: Any) -> None:
        if policy is not None and not isinstance(policy, RetryPolicy):
            meant = meant_instead_of(policy)
            raise ParameterTypeError("policy", policy, f"a RetryPolicy{meant and f'; for this: Retrier({meant})'}")
        self.plan = Plan(policy or LIBRARY_DEFAULT).with_options(options)  # type: ignore[arg-type]  # which checks them

    @classmethod
    def following(cls, resolve: Callable[[Failure], RetryPolicy], policy: RetryPolicy, name: str = "") -> Self:
        """A retrier whose policy depends on the failure; `policy` applies before the first one."""
        return cls.following_latest(lambda: resolve, policy, name)

    @classmethod
    def following_latest(
        cls, resolver: Callable[[], Callable[[Failure], RetryPolicy]], policy: RetryPolicy, name: str = ""
    ) -> Self:
        """`following`, with `resolver` called once per call: a call keeps its policy book, the next has the latest."""
        retrier = cls.__new__(cls)
        retrier.plan = Plan(policy, name=name, resolver=resolver)
        return retrier

    @property
    def policy(self) -> RetryPolicy:
        return self.plan.policy

    if TYPE_CHECKING:

        @overload
        def using(self, **options: Unpack[RetryKeywords]) -> Self: ...
        @overload
        def using(
            self, *, fallback: Callable[[RetryEvent], Awaitable[G]], **options: Unpack[RetryKeywords]
        ) -> Retrier[G]: ...
        @overload
        def using(self, *, fallback: Callable[[RetryEvent], G], **options: Unpack[RetryKeywords]) -> Retrier[G]: ...
        @overload
        def using(self, *, fallback: G, **options: Unpack[RetryKeywords]) -> Retrier[G]: ...

    def using(self, **options: Any) -> Any:
        """This retrier with the given options changed."""
        other = type(self).__new__(type(self))
        other.plan = self.plan.with_options(options)  # type: ignore[arg-type]  # which checks them
        return other

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | F:
        """Return the value of `fn(*args, **kwargs)`, or raise its last error."""
        value: R = wrapped(self._named(fn), _plain(fn))(*args, **kwargs)
        return _not_to_await(fn, value)

    async def acall(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R | F:
        """`call`, awaited."""
        try:
            value: R = await wrapped(self._named(fn), _awaited(fn))(*args, **kwargs)
        except _PlainResult:
            raise _not_async(fn) from None
        return value

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Outcome[R | F]:
        """Return the outcome as data: the last error is in it, not raised."""
        plan = self._named(_plain(fn))
        refuse_in_plain_code(plan)
        call = begin_call(plan, clock.now(), exhaustions.count, args, kwargs, keeps_records=True)
        try:
            value = execute(call, fn, args, kwargs)
        except Exception as error:
            if call.gave_up is None:
                return _outcome(call, None, error)
            last = error
        else:
            return _outcome(call, _not_to_await(fn, value))
        try:
            return _fallen_back(call, call.fall_back(), last)
        except Exception as error:
            return _outcome(call, None, error)

    async def arun(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Outcome[R | F]:
        """`run`, awaited."""
        plan = self._named(fn)
        awaited = checking_result(plan, _awaited(fn))
        call = begin_call(plan, clock.now(), exhaustions.count, args, kwargs, keeps_records=True)
        try:
            value = await aresume(call, awaited, args, kwargs)
        except _PlainResult:
            raise _not_async(fn) from None
        except Exception as error:
            if call.gave_up is None:
                return _outcome(call, None, error)
            last = error
        else:
            return _outcome(call, value)
        try:
            return _fallen_back(call, await afall_back(call), last)
        except Exception as error:
            return _outcome(call, None, error)

    def attempts(self) -> Attempts:
        """
        A retry loop around a block of code; see `reefknot.retrying.attempts`.

        Without a name of its own, the loop has the name of the function that it is in.
        """
        if self.plan.fallback is not NO_FALLBACK:
            raise ParameterError("fallback", self.plan.fallback, "for `call` and `run`; a loop has no value to replace")
        if self.plan.name:
            return Attempts(self.plan)
        frame = _getframe(1)
        inside = frame.f_code.co_qualname
        name = str(frame.f_globals.get("__name__", "")) if inside == "<module>" else inside
        return Attempts(self.plan.with_options({"name": name}))

    def _named(self, fn: object) -> Plan:
        if self.plan.name or not callable(fn):
            return self.plan
        return self.plan.with_options({"name": name_of(fn)})

    def __repr__(self) -> str:
        return f"<Retrier {self.plan.name or 'unnamed'}: {self.plan.policy.describe()}>"


def _plain(fn: Callable[P, R]) -> Callable[P, R]:
    if not callable(fn):
        raise ParameterTypeError("fn", fn, what_to_pass(fn))
    if is_async(fn):
        raise ParameterTypeError("fn", fn, "a plain function; use acall, arun or `async for` for an async one")
    return fn


def _awaited(fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """`fn` as an async function; a plain one that returns an awaitable is wrapped."""
    if not callable(fn):
        raise ParameterTypeError("fn", fn, what_to_pass(fn))
    if is_async(fn):
        return fn

    async def shim(*args: P.args, **kwargs: P.kwargs) -> R:
        made = fn(*args, **kwargs)
        if not hasattr(made, "__await__"):
            raise _PlainResult
        return await made

    return shim


class _PlainResult(BaseException):
    """
    A function given to `acall` returned something that cannot be awaited. This is a mistake in the call, so no rule of
    `on=` sees it.
    """


def _not_async(fn: object) -> ParameterTypeError:
    accepted = "an async function, or one that gives something to await; use call or run for a plain one"
    return ParameterTypeError("fn", fn, f"{accepted}, or `await asyncio.to_thread(retrier.call, fn)` where a loop runs")


def _not_to_await(fn: object, value: R) -> R:
    """The value of a plain call. A coroutine in its place would run later, without any retry, so it is refused."""
    if type(value).__name__ != "coroutine":
        return value
    value.close()  # type: ignore[attr-defined]  # or it warns later
    accepted = "a plain function; this one gives a coroutine, which would run outside of the retry: use acall or arun"
    raise ParameterTypeError("fn", fn, accepted)


def _outcome(call: CallState, value: R | None, error: Exception | None = None) -> Outcome[R]:
    if type(error) is RejectedResult:
        given_back = result_error(call.plan, error) if call.plan.raise_result else None
        return Outcome(False, error.value, given_back, call.attempts, call.records, call.elapsed, call.reason)
    attempts = call.attempts if call.reason is not None else call.attempts + 1
    return Outcome(error is None, value, error, attempts, call.records, call.elapsed, call.reason)


def _fallen_back(call: CallState, value: R, error: Exception) -> Outcome[R]:
    last = None if type(error) is RejectedResult else error
    return Outcome(False, value, last, call.attempts, call.records, call.elapsed, call.reason, True)
