"""
What a retrier was asked to do, checked once and frozen.

Everything a call needs is here and nothing of any call: a thousand tasks share one plan.
"""

from __future__ import annotations

from itertools import count

from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.execution.judge import judge_for
from reefknot.execution.kinds import is_async

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from reefknot.core.failure import Failure
    from reefknot.core.retry.throttle import RetryThrottle
    from reefknot.execution.breaker import CircuitBreaker
    from reefknot.execution.judge import Judge
    from reefknot.execution.options import Options
    from reefknot.execution.report import Hook

LIBRARY_DEFAULT = RetryPolicy(4, 0.1, max_delay=30.0, jitter="full")
"""What `@retry` does when nothing is said."""

LINES_AT_ONCE = 10.0
"""Log lines a retrier may write in one go; after that, one a second."""

_throttles: dict[str, RetryThrottle] = {}
_MOST_SHARED = 10_000


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


class LogBudget:
    """The log lines a retrier may still write. A plan made from another one shares it, or it would bound nothing."""

    __slots__ = ("at", "left", "left_out", "quiet_until")

    def __init__(self) -> None:
        self.at = 0.0
        self.left = LINES_AT_ONCE
        self.left_out = 0
        self.quiet_until = 0.0


class Plan:
    """A frozen description of one retrier."""

    __slots__ = (
        "breaker",
        "in_thread",
        "judge",
        "lines",
        "name",
        "next_key",
        "on_give_up",
        "on_recover",
        "on_retry",
        "policy",
        "resolver",
        "seed",
        "throttle",
    )

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        name: str = "",
        judge: Judge | None = None,
        resolve: Callable[[Failure], RetryPolicy] | None = None,
        resolver: Callable[[], Callable[[Failure], RetryPolicy]] | None = None,
    ) -> None:
        self.policy = policy
        self.name = name
        self.judge = judge
        self.resolver = resolver if resolve is None else lambda: resolve
        """Where the policy depends on the failure: asked once a call for who answers, so that a call keeps its book."""
        self.throttle: RetryThrottle | None = None
        self.breaker: CircuitBreaker | None = None
        self.on_retry: Hook | None = None
        self.on_give_up: Hook | None = None
        self.on_recover: Hook | None = None
        self.in_thread = False
        self.seed: int | None = None
        self.next_key: Callable[[], int] | None = None
        """With a seed of its own a retrier counts its own calls: nothing else in the process moves its draws."""
        self.lines = LogBudget()

    @property
    def limited(self) -> bool:
        """Whether an attempt may have to be cut short."""
        return self.policy.time_budget != _INF or self.policy.attempt_timeout != _INF

    @property
    def timed(self) -> bool:
        """Whether somebody will ask how long it took."""
        return self.limited or self.on_retry is not None or self.on_give_up is not None or self.on_recover is not None

    def with_options(self, given: Options) -> Plan:
        """A plan that differs in what was said."""
        said: dict[str, Any] = dict(given)
        fields = {_POLICY_NAMES.get(key, key): said.pop(key) for key in list(said) if key in POLICY_FIELDS}
        plan = Plan(_changed(self.policy, fields), name=self.name, judge=self.judge, resolver=self._overridden(fields))
        plan.throttle, plan.breaker, plan.in_thread = self.throttle, self.breaker, self.in_thread
        plan.seed, plan.next_key = self.seed, self.next_key
        plan.on_retry, plan.on_give_up, plan.on_recover = self.on_retry, self.on_give_up, self.on_recover
        plan.lines = self.lines
        for key, value in said.items():
            match key:
                case "on":
                    plan.judge = judge_for(value)
                case "throttle":
                    plan.throttle = _throttle(value)
                case "breaker":
                    plan.breaker = _breaker(value)
                case "on_retry" | "on_give_up" | "on_recover":
                    setattr(plan, key, _hook(key, value))
                case "in_thread":
                    plan.in_thread = _truth(key, value)
                case "name":
                    plan.name = _text(key, value)
                case "seed":
                    plan.seed, plan.next_key = _whole(key, value), count(1).__next__
                case _:
                    accepted = ", ".join(sorted(POLICY_FIELDS | OTHER_FIELDS))
                    raise ParameterTypeError(key, value, f"no such option; accepted are {accepted}")
        return plan

    def _overridden(self, fields: dict[str, Any]) -> Callable[[], Callable[[Failure], RetryPolicy]] | None:
        resolver = self.resolver
        if resolver is None or not fields:
            return resolver

        def changed() -> Callable[[Failure], RetryPolicy]:
            resolve = resolver()
            return lambda failure: resolve(failure).replace(**fields)

        return changed


_INF = float("inf")


def _changed(policy: RetryPolicy, fields: dict[str, Any]) -> RetryPolicy:
    if not fields:
        return policy
    try:
        return policy.replace(**fields)
    except ParameterError as error:
        raise _in_callers_words(error, fields) from None


def _in_callers_words(error: ParameterError, fields: dict[str, Any]) -> ParameterError:
    for said, kept in _POLICY_NAMES.items():
        if error.parameter == kept:
            return type(error)(said, fields[kept], error.accepted)
    return error


def _throttle(value: object) -> RetryThrottle | None:
    if value is False or value is None:
        return None
    from reefknot.core.retry.throttle import RetryThrottle

    if value is True:
        return RetryThrottle()
    if isinstance(value, RetryThrottle):
        return value
    if isinstance(value, str) and value:
        if value not in _throttles and len(_throttles) >= _MOST_SHARED:
            raise ParameterError("throttle", value, f"at most {_MOST_SHARED} destinations by name in one process")
        return _throttles.setdefault(value, RetryThrottle())
    raise ParameterTypeError(
        "throttle", value, "True, False, a RetryThrottle, or the name of a destination to share one by"
    )


def _breaker(value: object) -> CircuitBreaker | None:
    if value is None:
        return None
    from reefknot.execution.breaker import CircuitBreaker

    if isinstance(value, CircuitBreaker):
        return value
    raise ParameterTypeError("breaker", value, "a CircuitBreaker, or None")


def _hook(name: str, value: object) -> Hook | None:
    if value is None:
        return None
    if not callable(value):
        raise ParameterTypeError(name, value, "a function that takes one event, or None")
    if is_async(value):
        raise ParameterTypeError(name, value, "a plain function; hooks are not awaited")
    hook: Hook = value
    return hook


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterTypeError(name, value, "True or False")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ParameterTypeError(name, value, "a text")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterTypeError(name, value, "a whole number")
    return value
