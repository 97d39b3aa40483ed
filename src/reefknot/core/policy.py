"""
The retry policy: how many executions, how long in all, how far apart.

A policy is checked when it is made and never changes. It counts executions: `max_attempts` includes the first one.
Seconds are given as numbers or as `timedelta` and kept as floats; "no limit" is infinity. Some fields have a second
spelling, which is accepted and not kept.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from math import inf

from reefknot.core import checks
from reefknot.errors import ParameterError, ParameterTypeError

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, Literal, Self, TypeAlias

    from reefknot.core.checks import Seconds

    JitterName = Literal["none", "full", "equal", "proportional", "decorrelated"]
    StrategyName = Literal[
        "exponential_backoff",
        "linear_backoff",
        "fixed_delay",
        "immediate",
        "no_retry",
        "exponential",
        "linear",
        "fixed",
        "none",
    ]
    ExceptionRule = type[BaseException] | str
    CustomStrategy: TypeAlias = "Callable[[int, RetryPolicy], float]"

LONGEST_WAIT = 1e8
MOST_ATTEMPTS = 1_000_000_000


class RetryStrategy(StrEnum):
    """The growth of the delay, before jitter, from retry to retry."""

    EXPONENTIAL_BACKOFF = "exponential_backoff"
    LINEAR_BACKOFF = "linear_backoff"
    FIXED_DELAY = "fixed_delay"
    IMMEDIATE = "immediate"
    NO_RETRY = "no_retry"


class Jitter(StrEnum):
    """The way in which a random draw spreads a delay."""

    NONE = "none"
    FULL = "full"
    EQUAL = "equal"
    PROPORTIONAL = "proportional"
    DECORRELATED = "decorrelated"


SHORT_STRATEGIES = {
    "exponential": RetryStrategy.EXPONENTIAL_BACKOFF,
    "linear": RetryStrategy.LINEAR_BACKOFF,
    "fixed": RetryStrategy.FIXED_DELAY,
    "none": RetryStrategy.NO_RETRY,
}

CUSTOM_STRATEGIES: dict[str, CustomStrategy] = {}
"""Strategies of other packages, by name. Only `backoff.register_strategy` adds to it, after trying the function out."""


FIELDS = (
    "strategy",
    "max_attempts",
    "base_delay",
    "max_delay",
    "multiplier",
    "jitter",
    "jitter_factor",
    "time_budget",
    "attempt_timeout",
    "max_retry_after",
    "retryable",
    "whole_seconds",
    "retryable_exceptions",
    "non_retryable_exceptions",
)
ALIASES = {
    "backoff_multiplier": "multiplier",
    "jitter_enabled": "jitter",
    "attempts": "max_attempts",
    "deadline": "time_budget",
}
"""Second spellings of fields, which are accepted and can be read; `FIELDS` are what is kept."""


class _Default(int):
    """
    The default of a parameter that was not given: a plain number, but distinguishable from the same number given
    explicitly.
    """

    __slots__ = ()


_ATTEMPTS = _Default(3)


class RetryPolicy:
    """
    A retry policy: attempts, delays, jitter and limits, checked and immutable.

    `RetryPolicy()` is three executions, 1 s doubling up to 30 s, ±10 %. `attempts`, `deadline`, `backoff_multiplier`
    and `jitter_enabled` are other spellings. Of `retryable_exceptions` and `non_retryable_exceptions` the most
    specific class listed decides.
    """

    __slots__ = FIELDS

    strategy: RetryStrategy | str
    """A `str` that is no `RetryStrategy` names a strategy of another package."""
    max_attempts: int
    base_delay: float
    max_delay: float
    multiplier: float
    jitter: Jitter
    jitter_factor: float
    time_budget: float
    attempt_timeout: float
    max_retry_after: float
    retryable: bool
    whole_seconds: bool
    """Waits are rounded down to whole seconds, at least one, as connectors do."""
    retryable_exceptions: tuple[str, ...]
    non_retryable_exceptions: tuple[str, ...]

    def __init__(
        self,
        max_attempts: int = _ATTEMPTS,
        base_delay: Seconds = 1.0,
        *,
        attempts: int | None = None,
        max_delay: Seconds = 30.0,
        multiplier: float | None = None,
        backoff_multiplier: float | None = None,
        jitter: JitterName | Jitter | None = None,
        jitter_enabled: bool | None = None,
        jitter_factor: float = 0.1,
        strategy: StrategyName | RetryStrategy | str = RetryStrategy.EXPONENTIAL_BACKOFF,
        time_budget: Seconds | None = None,
        deadline: Seconds | None = None,
        attempt_timeout: Seconds | None = None,
        max_retry_after: Seconds = 300.0,
        retryable: bool = True,
        whole_seconds: bool = False,
        retryable_exceptions: Iterable[ExceptionRule] = (),
        non_retryable_exceptions: Iterable[ExceptionRule] = (),
    ) -> None:
        put = object.__setattr__
        put(self, "strategy", _strategy(strategy))
        put(self, "max_attempts", _attempts(max_attempts, attempts))
        put(self, "base_delay", _seconds("base_delay", base_delay))
        put(self, "max_delay", _seconds("max_delay", max_delay))
        put(self, "multiplier", _multiplier(multiplier, backoff_multiplier))
        put(self, "jitter", _jitter(jitter, jitter_enabled))
        put(self, "jitter_factor", checks.number("jitter_factor", jitter_factor, most=1.0))
        put(self, "time_budget", _time_budget(time_budget, deadline))
        put(self, "attempt_timeout", _limit("attempt_timeout", attempt_timeout))
        put(self, "max_retry_after", _seconds("max_retry_after", max_retry_after))
        put(self, "retryable", checks.flag("retryable", retryable))
        put(self, "whole_seconds", checks.flag("whole_seconds", whole_seconds))
        put(self, "retryable_exceptions", _rules("retryable_exceptions", retryable_exceptions))
        put(self, "non_retryable_exceptions", _rules("non_retryable_exceptions", non_retryable_exceptions))
        if self.base_delay > self.max_delay:
            raise ParameterError("base_delay", base_delay, f"at most max_delay, which is {self.max_delay:g} s")

    @property
    def retries(self) -> int:
        """Executions after the first."""
        return self.max_attempts - 1

    @property
    def attempts(self) -> int:
        """Executions, the first included: `max_attempts`."""
        return self.max_attempts

    @property
    def deadline(self) -> float:
        """Seconds for all attempts and waits, `inf` for no limit: `time_budget`."""
        return self.time_budget

    @property
    def backoff_multiplier(self) -> float:
        """Growth of the delay: `multiplier`."""
        return self.multiplier

    @property
    def jitter_enabled(self) -> bool:
        """Whether delays are spread: `jitter` is not "none"."""
        return self.jitter is not Jitter.NONE

    def replace(self, **changes: Any) -> Self:
        """A policy that differs in the given fields; the result is checked like any other."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        for other in ALIASES.keys() & changes:
            kept.pop(ALIASES[other], None)
        return type(self)(**(kept | changes))

    def describe(self) -> str:
        """The policy in one line, as notes and tables show it."""
        count = (
            "1 attempt" if self.max_attempts == 1 else f"{self.max_attempts} attempts (1 + {_retries(self.retries)})"
        )
        match self.strategy:
            case RetryStrategy.NO_RETRY:
                return "never retried"
            case RetryStrategy.IMMEDIATE:
                waits = "no wait between"
            case RetryStrategy.FIXED_DELAY:
                waits = f"{self.base_delay:g} s apart"
            case RetryStrategy.LINEAR_BACKOFF:
                waits = f"{self.base_delay:g} s more each time, at most {self.max_delay:g} s"
            case custom if custom in CUSTOM_STRATEGIES:
                waits = f"as {custom} says, at most {self.max_delay:g} s"
            case _:
                waits = f"{self.base_delay:g} s x{self.multiplier:g} each time, at most {self.max_delay:g} s"
        share = f" ±{self.jitter_factor:.0%}" if self.jitter is Jitter.PROPORTIONAL else ""
        budget = "" if self.time_budget == inf else f", {self.time_budget:g} s in all"
        return f"{count}, {waits}, jitter {self.jitter.value}{share}{budget}"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a policy does not change; use replace({name}=…)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a policy does not change")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"RetryPolicy({', '.join(f'{name}={_plain(getattr(self, name))!r}' for name in FIELDS)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), {name: getattr(self, name) for name in FIELDS})

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in FIELDS)


def _restore(cls: type[RetryPolicy], fields: dict[str, Any]) -> RetryPolicy:
    return cls(**fields)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _retries(count: int) -> str:
    return "1 retry" if count == 1 else f"{count} retries"


def _attempts(value: object, other: object) -> int:
    name, given = ("max_attempts", value) if other is None else ("attempts", other)
    if other is not None and value is not _ATTEMPTS and value != other:
        raise ParameterError("attempts", other, "another spelling of max_attempts; give one of them")
    return int(checks.whole_number(name, given, most=MOST_ATTEMPTS, note=" (executions, the first included)"))


def _time_budget(value: object, other: object) -> float:
    if value is not None and other is not None and value != other:
        raise ParameterError("deadline", other, "another spelling of time_budget; give one of them")
    return _limit("time_budget", value) if other is None else _limit("deadline", other)


def _seconds(name: str, value: object) -> float:
    return checks.seconds(name, value, or_zero=True, most=LONGEST_WAIT)


def _limit(name: str, value: object) -> float:
    limit = checks.seconds_or_none(name, None if value == inf else value, meaning="for no limit")
    return inf if limit is None else limit


def _multiplier(value: float | None, other: float | None) -> float:
    name, given = ("backoff_multiplier", other) if value is None else ("multiplier", value)
    if value is not None and other is not None and value != other:
        raise ParameterError("backoff_multiplier", other, "another spelling of multiplier; give one of them")
    if given is None:
        return 2.0
    return checks.number(name, given, least=1.0, most=1000.0)


def _jitter(value: Any, enabled: object) -> Jitter:
    if enabled is not None:
        on = checks.flag("jitter_enabled", enabled)
        if value is None:
            return Jitter.PROPORTIONAL if on else Jitter.NONE
        if on is (value == Jitter.NONE):
            raise ParameterError(
                "jitter_enabled", enabled, f"what agrees with jitter={_plain(value)!r}; give one of them"
            )
    return Jitter.PROPORTIONAL if value is None else checks.choice("jitter", value, Jitter)


def _strategy(value: Any) -> RetryStrategy | str:
    if isinstance(value, str) and value in SHORT_STRATEGIES:
        return SHORT_STRATEGIES[value]
    try:
        return RetryStrategy(value)
    except ValueError:
        if isinstance(value, str) and value in CUSTOM_STRATEGIES:
            return str(value)
        raise ParameterError("strategy", value, f"one of {', '.join([*RetryStrategy, *CUSTOM_STRATEGIES])}") from None


def _rules(name: str, value: Iterable[ExceptionRule]) -> tuple[str, ...]:
    accepted = "a list of exception classes or their names"
    if isinstance(value, str | type) or not hasattr(value, "__iter__"):
        raise ParameterTypeError(name, value, accepted)
    return tuple(rule_name(name, rule) for rule in value)


def rule_name(parameter: str, rule: object) -> str:
    """The qualified name of a class; a name as it was given. A bare name matches a class of that name in any module."""
    if isinstance(rule, str) and rule:
        return rule
    if isinstance(rule, type) and issubclass(rule, BaseException):
        return class_name(rule)
    raise ParameterTypeError(parameter, rule, "exception classes or their names")


def class_name(cls: type) -> str:
    """The qualified name of a class in failures and rules: `builtins.TimeoutError`, `httpx.ReadTimeout`."""
    return f"{cls.__module__}.{cls.__qualname__}"
