"""
`Plan`: the options of a retrier, checked once and frozen.

A plan holds everything that calls share and nothing of any one call: a thousand tasks may use the same plan.
"""

from __future__ import annotations

from contextvars import ContextVar
from itertools import count
from math import inf
from os import environ

from reefknot.core.policy import MOST_ATTEMPTS, RetryPolicy
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.retrying.functions import (
    RejectedResult,
    RetryStatistics,
    checked_arity,
    is_async,
    result_rule_for,
    rule_for,
    wait_rule_for,
)

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token
    from logging import Logger
    from typing import Any, TypeAlias, TypeVar

    from reefknot.core.failure import Failure
    from reefknot.core.throttle import RetryThrottle
    from reefknot.retrying.breaker import CircuitBreaker
    from reefknot.retrying.functions import ResultRule, Rule, WaitRule
    from reefknot.retrying.limit import Limit
    from reefknot.retrying.types import Hook, RetryKeywords, StopEvent
    from reefknot.runtime.log import LogBudget

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
    (
        *(
            "on",
            "on_result",
            "raise_result",
            "wait",
            "stop",
            "throttle",
            "breaker",
            "limit",
            "before",
            "after",
            "on_retry",
        ),
        *("on_give_up", "on_recover", "fallback", "in_thread", "name", "seed", "log"),
    )
)
HOOKS = ("before", "after", "on_retry", "on_give_up", "on_recover")
_RULES = {"on": "rule", "on_result": "result_rule"}
"""Slots of options that are kept as the rule which they describe."""
NO_FALLBACK: object = object()
"""The fallback of a plan that has none: None is a value that a caller may want back."""
_POLICY_NAMES = {"attempts": "max_attempts", "deadline": "time_budget"}

_MEANT = {
    **dict.fromkeys(
        ("max_attempts", "tries", "max_tries", "retries", "max_retries", "stop_after_attempt"), "attempts="
    ),
    **dict.fromkeys(("time_budget", "max_time", "stop_after_delay", "total_timeout"), "deadline="),
    "timeout": "deadline= for the whole call, or attempt_timeout= for one attempt",
    **dict.fromkeys(("delay", "wait_initial", "interval", "initial_delay"), "base_delay="),
    **dict.fromkeys(("wait_max", "max_wait", "max_value"), "max_delay="),
    **dict.fromkeys(("backoff", "backoff_multiplier", "wait_exp_base", "factor"), "multiplier="),
    **dict.fromkeys(("jitter_enabled", "wait_jitter"), "jitter="),
    **dict.fromkeys(("retry", "exception", "exceptions", "retry_on", "retry_if_exception", "giveup"), "on="),
    **dict.fromkeys(("retry_if_result", "predicate"), "on_result="),
    **dict.fromkeys(("before_sleep", "on_backoff"), "on_retry="),
    **dict.fromkeys(("retry_error_callback", "default", "on_failure"), "fallback="),
    "on_giveup": "on_give_up=",
    "on_success": "on_recover=",
    **dict.fromkeys(("before_attempt", "on_attempt"), "before="),
    "after_attempt": "after=",
    **dict.fromkeys(("logger", "before_log", "after_log"), "log="),
    "reraise": "nothing: the original error is always raised",
}
"""Names that other libraries and `RetryPolicy` use, and the option of ours that is meant."""

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

_shared_throttles: dict[str, RetryThrottle] = {}
_MAX_SHARED = 10_000


def _off_by_environment() -> bool:
    given = environ.get("REEFKNOT_RETRY", "on").strip().lower()
    if given not in ("on", "off", "1", "0", "true", "false", "yes", "no", ""):
        raise ParameterError("REEFKNOT_RETRY", given, "on or off")
    return given in ("off", "0", "false", "no")


class RetrySwitch:
    """Turns retries off: `REEFKNOT_RETRY=off` for the process, `rk.testing.no_retry()` for the code inside it."""

    __slots__ = ("_most", "is_in_use")

    def __init__(self, *, off: bool) -> None:
        self._most = ContextVar("reefknot_most_attempts", default=1 if off else MOST_ATTEMPTS)
        self.is_in_use = off
        """Whether retries were ever turned off: until then, no context is looked at."""

    @property
    def most(self) -> int:
        """Attempts that a call of this context has at most."""
        return self._most.get()

    @property
    def is_off(self) -> bool:
        """Whether every call of this context has one attempt."""
        return self.most == 1

    def limit(self, attempts: int) -> Token[int]:
        """Limit the attempts of every call in this context; returns the value for `restore`."""
        self.is_in_use = True
        return self._most.set(attempts)

    def restore(self, before: Token[int]) -> None:
        self._most.reset(before)


retry_switch = RetrySwitch(off=_off_by_environment())


class Plan:
    """A frozen description of one retrier."""

    __slots__ = (
        *(
            "after",
            "before",
            "breaker",
            "fallback",
            "has_async_rule",
            "in_thread",
            "is_bare",
            "is_heard",
            "limit",
            "log",
        ),
        *("log_budget", "logger", "name", "next_key", "on_give_up", "on_recover", "on_retry", "policy"),
        *(
            "raise_result",
            "resolver",
            "result_rule",
            "retried",
            "rule",
            "seed",
            "statistics",
            "stop",
            "throttle",
            "wait",
        ),
    )

    def __init__(self, policy: RetryPolicy, *, name: str = "", resolver: Callable[[], Resolve] | None = None) -> None:
        self.policy = policy
        self.name = name
        self.resolver = resolver
        """For a policy that depends on the failure: called once per call, so that a call keeps its policy book."""
        self.rule: Rule | None = None
        self.retried: tuple[type[Exception], ...] = (RejectedResult,)
        """Classes whose errors are retried without a question to the rule."""
        self.has_async_rule = False
        """Whether the predicate of `on=` has to be awaited."""
        self.result_rule: ResultRule | None = None
        self.raise_result = False
        self.wait: WaitRule | None = None
        self.stop: StopEvent | None = None
        self.throttle: RetryThrottle | None = None
        self.breaker: CircuitBreaker | None = None
        self.limit: Limit | None = None
        self.before: Hook | None = None
        self.after: Hook | None = None
        self.on_retry: Hook | None = None
        self.on_give_up: Hook | None = None
        self.on_recover: Hook | None = None
        self.fallback: object = NO_FALLBACK
        """A value, or a function of the event, whose answer the caller gets instead of the last error."""
        self.in_thread = False
        self.seed: int | None = None
        self.next_key: Callable[[], int] | None = None
        """A retrier with a seed counts its own calls: no other call in the process changes its draws."""
        self.log: bool | int | Logger = True
        self.log_budget: LogBudget | None = None
        """The log budget of this name, made when the first line is due; an empty one for `log=False`."""
        self.logger: Logger | None = None  # that of `log`, found when it is first asked for
        self.statistics = RetryStatistics()
        self.is_bare = True
        """Whether a decision needs nothing but the policy: no throttle, breaker, event or wait of the caller's."""
        self.is_heard = False  # whether a hook is called with each retry

    @property
    def limited(self) -> bool:
        """Whether an attempt may have to be cut short."""
        return self.policy.time_budget != inf or self.policy.attempt_timeout != inf

    @property
    def timed(self) -> bool:
        """Whether the elapsed time of a call matters."""
        return self.limited or self.on_retry is not None or self.on_give_up is not None or self.on_recover is not None

    @property
    def is_watched(self) -> bool:
        """Whether a call needs its state from the first attempt on, and a first-try success is not a short cut."""
        has_hook = self.before is not None or self.after is not None
        return has_hook or self.fallback is not NO_FALLBACK or self.has_async_rule or self.limit is not None

    @property
    def async_option(self) -> str | None:
        """Name of a predicate, hook or fallback that has to be awaited; None when all are plain functions."""
        return next((name for name in (*_RULES, "fallback", *HOOKS) if is_async(self.function_of(name))), None)

    def function_of(self, option: str) -> object:
        """The function that the caller gave as this option, for an error that shows it."""
        given = getattr(self, _RULES.get(option, option))
        return getattr(given, "__wrapped__", given) if option in _RULES else given

    def with_options(self, given: RetryKeywords) -> Plan:
        """This plan with the given options changed."""
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
        plan.is_bare = all(one is None for one in (plan.throttle, plan.breaker, plan.stop, plan.wait))
        plan.is_heard = plan.on_retry is not None or plan.after is not None
        if plan.name != self.name or plan.log is not self.log:
            plan.log_budget = plan.logger = None
        return plan

    def counted_alone(self) -> Plan:
        """This plan with counters of its own, for another function."""
        plan = self.with_options({})
        plan.statistics = RetryStatistics()
        return plan

    def _set(self, key: str, value: object) -> None:
        match key:
            case "on":
                self.rule = rule_for(value)  # type: ignore[arg-type]  # which checks it
                self.has_async_rule = is_async(self.rule)
                self.retried = (*getattr(self.rule, "classes", ()), RejectedResult)
            case "on_result":
                self.result_rule = result_rule_for(value)
            case "wait":
                _refuse_foreign(key, value, "wait=[1, 2, 5], base_delay= or strategy=")
                self.wait = wait_rule_for(value, self.policy.max_delay)
            case "stop":
                _refuse_foreign(key, value, "attempts= or deadline=")
                self.stop = _stop(value)
            case "log":
                self.log = _log(value)
            case "throttle":
                self.throttle = _throttle(value)
            case "breaker":
                self.breaker = _breaker(value)
            case "limit":
                self.limit = _limit(value)
            case "before" | "after" | "on_retry" | "on_give_up" | "on_recover":
                setattr(self, key, _hook(key, value))
            case "fallback":
                self.fallback = _fallback(value)
            case "in_thread" | "raise_result":
                setattr(self, key, _typed(key, value, bool, "True or False"))
            case "name":
                self.name = _typed(key, value, str, "a text")
            case "seed":
                self.seed, self.next_key = _typed(key, value, int, "a whole number"), count(1).__next__
            case _:
                raise ParameterTypeError(key, value, _no_such_option(key))


def _no_such_option(name: str) -> str:
    """Error text for an unknown option: the one that was probably meant, and all that are accepted."""
    options = sorted(POLICY_FIELDS | OTHER_FIELDS)
    meant = _MEANT.get(name)
    if meant is None:
        from difflib import get_close_matches

        meant = "".join(f"{one}=" for one in get_close_matches(name, options, n=1))
    asked = f"; perhaps you meant {meant}" if meant else ""
    return f"no such option{asked}; accepted are {', '.join(options)}"


def meant_instead_of(value: object) -> str:
    """Error text for an argument without a name: the parameter that a value of this kind belongs to."""
    if isinstance(value, RetryPolicy | Plan) or isinstance(getattr(value, "plan", None), Plan):
        return "policy=…"
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"on={value.__name__}"
    if isinstance(value, tuple | list | set):
        return "on=(…)"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"attempts={value}"
    return f"name={value!r}" if isinstance(value, str) and len(value) < 60 else ""


def _refuse_foreign(name: str, value: object, ours: str) -> None:
    """Refuse a rule object of tenacity, which would be taken for a function or an event and mean something else."""
    if type(value).__module__.partition(".")[0] == "tenacity":
        raise ParameterTypeError(name, value, f"not a rule of tenacity; here it is {ours}")


def _stop(value: object) -> StopEvent | None:
    if value is None:
        return None
    if not (callable(getattr(value, "is_set", None)) and callable(getattr(value, "wait", None))):
        meant = "; for a number of attempts: attempts=" if isinstance(value, int) else ""
        raise ParameterTypeError("stop", value, f"an event (threading, asyncio, Trio or anyio), or None{meant}")
    event: StopEvent = value  # type: ignore[assignment]  # by its shape
    return event


def _log(value: object) -> bool | int | Logger:
    accepted = 'True, False, a level ("info", logging.INFO), or a logger'
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str):
        if value.lower() not in _LEVELS:
            raise ParameterError("log", value, f"{accepted}; levels are {', '.join(_LEVELS)}")
        return _LEVELS[value.lower()]
    if callable(getattr(value, "log", None)) and callable(getattr(value, "isEnabledFor", None)):
        logger: Logger = value  # type: ignore[assignment]  # by its shape: an adapter will do
        return logger
    raise ParameterTypeError("log", value, accepted)


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
    from reefknot.core.throttle import RetryThrottle

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


def _limit(value: object) -> Limit | None:
    if value is None:
        return None
    from reefknot.retrying.limit import Limit

    return _typed("limit", value, Limit, "a Limit, or None")


def _hook(name: str, value: object) -> Hook | None:
    if value is None:
        return None
    if not callable(value):
        raise ParameterTypeError(name, value, "a function that takes one event, or None")
    hook: Hook = checked_arity(name, value, "a function that takes one event", f"{name}=lambda event: …")
    return hook


def _fallback(value: object) -> object:
    accepted = "a value, or a function that takes one event and gives the value"
    if isinstance(value, type):
        made = f"fallback=lambda event: {value.__name__}()"
        raise ParameterTypeError("fallback", value, f"{accepted}; a class is called with no event: write {made}")
    return checked_arity("fallback", value, accepted, "fallback=lambda event: …") if callable(value) else value


def _typed(name: str, value: object, kind: type[T], accepted: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ParameterTypeError(name, value, accepted)
    return value
