"""
`@retry`, and `using` to override options for one call.

The decorated function is a plain function with the wrapped one's name, signature and type, so methods, static methods
and class methods work as before, and a first-try success costs next to nothing.
"""

from __future__ import annotations

from functools import partial, update_wrapper

from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import ParameterTypeError
from reefknot.retrying.functions import name_of, what_to_pass
from reefknot.retrying.plan import LIBRARY_DEFAULT, Plan
from reefknot.retrying.wrappers import wrapped

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar, Unpack, overload

    from reefknot.retrying.retrier import Retrier
    from reefknot.retrying.types import Decorator, Retrying, RetryKeywords

    P = ParamSpec("P")
    R = TypeVar("R")
    S = TypeVar("S")
    F = TypeVar("F", bound=Callable[..., Any])

_PLAN = "__reefknot_plan__"

if TYPE_CHECKING:

    @overload
    def retry(fn: staticmethod[P, R], /) -> staticmethod[P, R]: ...  # type: ignore[overload-overlap]  # the narrower first
    @overload
    def retry(fn: classmethod[S, P, R], /) -> classmethod[S, P, R]: ...
    @overload
    def retry(fn: Callable[P, R], /) -> Retrying[P, R]: ...
    @overload
    def retry(*, policy: RetryPolicy | Retrier | None = None, **options: Unpack[RetryKeywords]) -> Decorator: ...
    def retry(
        fn: Any = None, /, *, policy: RetryPolicy | Retrier | None = None, **options: Unpack[RetryKeywords]
    ) -> Any: ...

else:  # `overload` would import typing

    def retry(fn=None, /, *, policy=None, **options):
        """
        Retry a function: `@retry`, or `@retry(on=ConnectionError, attempts=5, deadline=10)`.

        Without a policy: four attempts, 0.1 s doubling up to 30 s, full jitter. Without `on=`: connection errors,
        timeouts, HTTP 408, 429 and 5xx. Further options override `policy=`.
        """
        plan = _starting_plan(policy).with_options(options)
        return decorated(plan, fn) if fn is not None else lambda function: decorated(plan, function)


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
    if not plan.name:
        plan = plan.with_options({"name": name_of(fn)})
    wrapper: Any = update_wrapper(wrapped(plan, fn), fn)

    def overridden(**options: Unpack[RetryKeywords]) -> Any:
        return decorated(plan.with_options(options), fn)

    wrapper.using = overridden
    setattr(wrapper, _PLAN, plan)
    return wrapper


def using(fn: F, /, **options: Unpack[RetryKeywords]) -> F:
    """
    A decorated function or bound method with other options: `using(client.fetch, attempts=2)(url)`.

    Type and binding are kept.
    """
    changed: Any
    if isinstance(fn, partial):
        changed = partial(using(fn.func, **options), *fn.args, **fn.keywords)
        return changed  # type: ignore[no-any-return]  # of the kind of fn
    owner = getattr(fn, "__self__", None)
    function: Any = getattr(fn, "__func__", fn)
    if not hasattr(function, _PLAN):
        raise ParameterTypeError("fn", fn, "a function or method that is decorated with retry")
    changed = function.using(**options)
    return changed if owner is None else changed.__get__(owner)  # type: ignore[no-any-return]  # of the kind of fn
