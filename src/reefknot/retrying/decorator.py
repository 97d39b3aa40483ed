"""
`@retry`, and `using` to override options for one call.

The decorated function is a plain function with the wrapped one's name, signature and type, so methods, static methods
and class methods work as before, and a first-try success costs next to nothing.
"""

from __future__ import annotations

from functools import partial, update_wrapper

from reefknot.core.policy import RetryPolicy
from reefknot.errors import ParameterTypeError
from reefknot.retrying.functions import is_async, name_of, what_to_pass
from reefknot.retrying.plan import LIBRARY_DEFAULT, Plan, meant_instead_of
from reefknot.retrying.wrappers import wrapped

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, ParamSpec, TypeVar, Unpack, overload

    from reefknot.retrying.retrier import Retrier
    from reefknot.retrying.types import Decorator, FallbackDecorator, RetryEvent, Retrying, RetryKeywords

    P = ParamSpec("P")
    R = TypeVar("R")
    S = TypeVar("S")
    G = TypeVar("G")
    F = TypeVar("F", bound=Callable[..., Any])

_CHANGED = "__reefknot_changed__"
"""Attribute of a decorated function: a function of options that gives it under other ones."""

if TYPE_CHECKING:

    @overload
    def retry(fn: staticmethod[P, R], /) -> staticmethod[P, R]: ...  # type: ignore[overload-overlap]  # the narrower first
    @overload
    def retry(fn: classmethod[S, P, R], /) -> classmethod[S, P, R]: ...
    @overload
    def retry(fn: Callable[P, R], /) -> Retrying[P, R]: ...
    @overload
    def retry(*, policy: RetryPolicy | None = None, **options: Unpack[RetryKeywords]) -> Decorator: ...
    @overload
    def retry(*, policy: Retrier[G], **options: Unpack[RetryKeywords]) -> FallbackDecorator[G]: ...
    @overload
    def retry(
        *,
        fallback: Callable[[RetryEvent], Awaitable[G]],
        policy: RetryPolicy | Retrier[Any] | None = None,
        **options: Unpack[RetryKeywords],
    ) -> FallbackDecorator[G]: ...
    @overload
    def retry(
        *,
        fallback: Callable[[RetryEvent], G],
        policy: RetryPolicy | Retrier[Any] | None = None,
        **options: Unpack[RetryKeywords],
    ) -> FallbackDecorator[G]: ...
    @overload
    def retry(
        *, fallback: G, policy: RetryPolicy | Retrier[Any] | None = None, **options: Unpack[RetryKeywords]
    ) -> FallbackDecorator[G]: ...
    def retry(fn: Any = None, /, *, policy: RetryPolicy | Retrier[Any] | None = None, **options: Any) -> Any: ...

else:  # `overload` would import typing

    def retry(fn=None, /, *, policy=None, **options):
        """
        Retry a function: `@retry`, or `@retry(on=ConnectionError, attempts=5, deadline=10)`.

        Without a policy: four attempts, 0.1 s doubling up to 30 s, full jitter. Options override `policy=`; seconds are
        numbers or timedelta; functions are `async def` where the retried one is, if they like:

            on               exception classes, or a function of the exception: a truth value, or seconds as float,
                             timedelta or RetryAfter (default: connection errors, timeouts, HTTP 408, 429 and 5xx)
            on_result        function of the result: true to try again, false, or seconds likewise
            raise_result     raise RetryError with a last result that was refused, instead of returning it
            attempts         executions, the first included (4)
            deadline         seconds for all attempts and waits (None: no limit)
            attempt_timeout  seconds for one attempt; for a plain function with in_thread (None)
            base_delay       seconds before the first retry (0.1)
            max_delay        longest wait in seconds (30)
            multiplier       growth of the wait (2)
            strategy         "exponential", "linear", "fixed", "immediate" or "none"
            jitter           "full", "none", "equal", "proportional" or "decorrelated"
            jitter_factor    spread of "proportional" (0.1)
            wait             seconds before each retry, or a function of the attempt's number, which also has the
                             error: `attempt.error`; instead of all these
            max_retry_after  longest Retry-After that is honoured, in seconds (300)
            stop             event that ends waits and attempts when it is set
            throttle         RetryThrottle, or the name of a destination that shares one
            breaker          CircuitBreaker
            limit            Limit that each attempt waits for; the wait is no attempt, and ends by the deadline
            before           called with a RetryEvent before each attempt
            after            called with a RetryEvent after each attempt, with its outcome
            on_retry         called with a RetryEvent before each wait
            on_give_up       called when the error goes to the caller
            on_recover       called after a success that needed a retry
            fallback         value, or function of a RetryEvent, that the caller gets instead of the last error
            in_thread        run each attempt of a plain function in a thread, so that time limits apply
            name             name in notes, log lines and events (the function's)
            seed             makes jitter reproducible
            log              False, a level, or a logger (True: warnings to the logger "reefknot")
        """
        if isinstance(fn, type) or not (fn is None or callable(fn) or isinstance(fn, staticmethod | classmethod)):
            raise _misplaced(fn)
        plan = _starting_plan(policy).with_options(options)
        return decorated(plan, fn) if fn is not None else lambda function: decorated(plan, function)


def _misplaced(value: object) -> ParameterTypeError:
    """The error for an argument that is no function, with the parameter that it belongs to."""
    accepted, meant = what_to_pass(value), meant_instead_of(value)
    return ParameterTypeError("fn", value, f"{accepted}; for this: retry({meant})" if meant else accepted)


def _starting_plan(policy: object) -> Plan:
    if policy is None:
        return Plan(LIBRARY_DEFAULT)
    if isinstance(policy, RetryPolicy):
        return Plan(policy)
    plan = getattr(policy, "plan", None)
    if isinstance(plan, Plan):
        return plan
    raise ParameterTypeError("policy", policy, "a RetryPolicy or a Retrier")


def decorated(plan: Plan, fn: Any) -> Any:
    """`fn` under the plan, with its own name, signature and kind."""
    if isinstance(fn, staticmethod):
        return staticmethod(decorated(plan, fn.__func__))
    if isinstance(fn, classmethod):
        return classmethod(decorated(plan, fn.__func__))
    if not callable(fn) or isinstance(fn, type):
        raise ParameterTypeError("fn", fn, what_to_pass(fn))
    return _wrapper(plan.counted_alone(), fn)


def _wrapper(plan: Plan, fn: Any) -> Any:
    if not plan.name:
        plan = plan.with_options({"name": name_of(fn)})
    wrapper: Any = update_wrapper(wrapped(plan, fn), fn)

    def changed(**options: Unpack[RetryKeywords]) -> Any:
        return _wrapper(plan.with_options(options), fn)

    def overridden(**options: Unpack[RetryKeywords]) -> Any:
        return _with_its_instance(changed(**options), fn)

    wrapper.using = overridden
    wrapper.statistics = plan.statistics
    setattr(wrapper, _CHANGED, changed)
    return wrapper


def _with_its_instance(call: Any, fn: Any) -> Any:
    """
    `call`, refusing to run a method without its instance.

    `client.get.using` is an attribute of the function, which does not know of `client`: a call of its result with the
    method's own arguments would take the first of them for `self`.
    """
    code = getattr(fn, "__code__", None)
    owner = name_of(fn).rpartition(".")[0]
    first = code.co_varnames[0] if code is not None and code.co_argcount else ""
    if first not in ("self", "cls") or not owner or owner.endswith("<locals>"):
        return call

    def check(args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get(first)
        if not _has_method(given if isinstance(given, type) else type(given), fn):
            kind, bound = ("an instance of ", "obj") if first == "self" else ("", owner.rpartition(".")[2])
            example = f"rk.using({bound}.{fn.__name__}, …)(…)"
            raise ParameterTypeError(first, given, f"{kind}{owner}; `.using` does not bind a method: write {example}")

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return call(*args, **kwargs)

    async def achecked(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return await call(*args, **kwargs)

    guarded: Any = update_wrapper(achecked if is_async(call) else checked, call)
    guarded.__wrapped__ = fn
    return guarded


def _has_method(cls: type, fn: object) -> bool:
    """Whether `fn` is a method of the class, under whatever name and decorators."""
    for one in cls.__mro__:
        for value in vars(one).values():
            value = getattr(value, "__func__", value)
            for _ in range(16):
                if value is fn:
                    return True
                value = getattr(value, "__wrapped__", None)
                if value is None:
                    break
    return False


if TYPE_CHECKING:

    @overload
    def using(fn: F, /, **options: Unpack[RetryKeywords]) -> F: ...
    @overload
    def using(fn: Callable[P, Any], /, *, fallback: object, **options: Unpack[RetryKeywords]) -> Callable[P, Any]: ...
    def using(fn: Any, /, **options: Any) -> Any: ...

else:  # `overload` would import typing

    def using(fn, /, **options):
        """
        A decorated function or bound method with other options: `using(client.fetch, attempts=2)(url)`.

        Type and binding are kept.
        """
        if isinstance(fn, partial):
            return partial(using(fn.func, **options), *fn.args, **fn.keywords)
        owner = getattr(fn, "__self__", None)
        function = getattr(fn, "__func__", fn)
        if not hasattr(function, _CHANGED):
            raise ParameterTypeError("fn", fn, "a function or method that is decorated with retry")
        changed = getattr(function, _CHANGED)(**options)
        return changed if owner is None else changed.__get__(owner)
