"""
`Plan`: the options of a retrier, checked once and frozen.

A plan holds everything that calls share and nothing of any one call: a thousand tasks may use the same plan.
"""

from __future__ import annotations

from itertools import count
from math import inf

from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.retrying.functions import is_async, rule_for
from reefknot.runtime.log import LogBudget

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias, TypeVar

    from reefknot.core.failure import Failure
    from reefknot.core.retry.throttle import RetryThrottle
    from reefknot.retrying.breaker import CircuitBreaker
    from reefknot.retrying.functions import Rule
    from reefknot.retrying.types import Hook, RetryKeywords

    Resolve: TypeAlias = Callable[[Failure], RetryPolicy]
    T = TypeVar("T")

LIBRARY_DEFAULT = RetryPolicy(4, 0.1, max_delay=30.0, jitter="full")
"""Policy of `@retry` without options."""

POLICY_FIELDS = frozenset(
    (
        *("attempts", "deadline", "base_delay", "max_delay", "multiplier", "jitter", "jitter_factor", "strategy"),
        *("attempt_timeout", "max_retry_after"),
    )
)
OTHER_FIELDS = frozenset(
    ("on", "throttle", "breaker", "on_retry", "on_give_up", "on_recover", "in_thread", "name", "seed")
)
_POLICY_NAMES = {"attempts": "max_attempts", "deadline": "time_budget"}

_shared_throttles: dict[str, RetryThrottle] = {}
_MAX_SHARED = 10_000


class Exhaustions:
    """
    Number of retries that gave up in this process.

    A retry that gives up marks its exception with this number. An exception object may be raised again and again: only
    a mark that is newer than the start of a call belongs to that call.
    """

    __slots__ = ("count",)  # every call reads it

    def __init__(self) -> None:
        self.count = 0


exhaustions = Exhaustions()


class Plan:
    """A frozen description of one retrier."""

    __slots__ = (
        *("breaker", "in_thread", "log_budget", "name", "next_key", "on_give_up", "on_recover", "on_retry"),
        *("policy", "resolver", "rule", "seed", "throttle"),
    )

    def __init__(self, policy: RetryPolicy, *, name: str = "", resolver: Callable[[], Resolve] | None = None) -> None:
        self.policy = policy
        self.name = name
        self.resolver = resolver
        """For a policy that depends on the failure: called once per call, so that a call keeps its policy book."""
        self.rule: Rule | None = None
        self.throttle: RetryThrottle | None = None
        self.breaker: CircuitBreaker | None = None
        self.on_retry: Hook | None = None
        self.on_give_up: Hook | None = None
        self.on_recover: Hook | None = None
        self.in_thread = False
        self.seed: int | None = None
        self.next_key: Callable[[], int] | None = None
        """A retrier with a seed counts its own calls: no other call in the process changes its draws."""
        self.log_budget = LogBudget()

    @property
    def limited(self) -> bool:
        """Whether an attempt may have to be cut short."""
        return self.policy.time_budget != inf or self.policy.attempt_timeout != inf

    @property
    def timed(self) -> bool:
        """Whether the elapsed time of a call matters."""
        return self.limited or self.on_retry is not None or self.on_give_up is not None or self.on_recover is not None

    def with_options(self, given: RetryKeywords) -> Plan:
        """This plan with the given options changed; the log budget is shared, or it would bound nothing."""
        options: dict[str, Any] = dict(given)
        fields = {_POLICY_NAMES.get(key, key): options.pop(key) for key in list(options) if key in POLICY_FIELDS}
        plan = Plan.__new__(Plan)
        for slot in Plan.__slots__:
            setattr(plan, slot, getattr(self, slot))
        if fields:
            plan.policy = _changed(self.policy, fields)
            plan.resolver = _overridden(self.resolver, fields)
        for key, value in options.items():
            plan._set(key, value)
        return plan

    def _set(self, key: str, value: object) -> None:
        match key:
            case "on":
                self.rule = rule_for(value)  # type: ignore[arg-type]  # which checks it
            case "throttle":
                self.throttle = _throttle(value)
            case "breaker":
                self.breaker = _breaker(value)
            case "on_retry" | "on_give_up" | "on_recover":
                setattr(self, key, _hook(key, value))
            case "in_thread":
                self.in_thread = _typed(key, value, bool, "True or False")
            case "name":
                self.name = _typed(key, value, str, "a text")
            case "seed":
                self.seed, self.next_key = _typed(key, value, int, "a whole number"), count(1).__next__
            case _:
                accepted = ", ".join(sorted(POLICY_FIELDS | OTHER_FIELDS))
                raise ParameterTypeError(key, value, f"no such option; accepted are {accepted}")


def _changed(policy: RetryPolicy, fields: dict[str, Any]) -> RetryPolicy:
    """`policy` with other fields; an error names the option as the caller wrote it."""
    try:
        return policy.replace(**fields)
    except ParameterError as error:
        for option, field in _POLICY_NAMES.items():
            if error.parameter == field:
                raise type(error)(option, fields[field], error.accepted) from None
        raise


def _overridden(resolver: Callable[[], Resolve] | None, fields: dict[str, Any]) -> Callable[[], Resolve] | None:
    if resolver is None:
        return None

    def overridden() -> Resolve:
        resolve = resolver()
        return lambda failure: resolve(failure).replace(**fields)

    return overridden


def _throttle(value: object) -> RetryThrottle | None:
    if value is False or value is None:
        return None
    from reefknot.core.retry.throttle import RetryThrottle

    if value is True:
        return RetryThrottle()
    if isinstance(value, RetryThrottle):
        return value
    if isinstance(value, str) and value:
        if value not in _shared_throttles and len(_shared_throttles) >= _MAX_SHARED:
            raise ParameterError("throttle", value, f"at most {_MAX_SHARED} destinations by name in one process")
        return _shared_throttles.setdefault(value, RetryThrottle())
    raise ParameterTypeError(
        "throttle", value, "True, False, a RetryThrottle, or the name of a destination that shares one"
    )


def _breaker(value: object) -> CircuitBreaker | None:
    if value is None:
        return None
    from reefknot.retrying.breaker import CircuitBreaker

    return _typed("breaker", value, CircuitBreaker, "a CircuitBreaker, or None")


def _hook(name: str, value: object) -> Hook | None:
    if value is None:
        return None
    if not callable(value):
        raise ParameterTypeError(name, value, "a function that takes one event, or None")
    if is_async(value):
        raise ParameterTypeError(name, value, "a plain function; hooks are not awaited")
    hook: Hook = value
    return hook


def _typed(name: str, value: object, kind: type[T], accepted: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ParameterTypeError(name, value, accepted)
    return value
