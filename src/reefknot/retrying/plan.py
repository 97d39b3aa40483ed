"""
How many retries gave up in this process.

The number tells a fresh mark on an exception from an old one: an exception object may be raised again and again.

What kind of function is it?

Told by code flags, because `inspect` costs as much to import as everything else the library loads.

`on=`: which failures are worth another try, as the caller put it.

A judge answers True, False, or a number of seconds to wait at least. It never changes the outcome by failing: a
predicate that raises is reported, and the error it was asked about goes to the caller as it is.

What a retrier was asked to do, checked once and frozen.

Everything a call needs is here and nothing of any call: a thousand tasks share one plan.
"""

from __future__ import annotations

from itertools import count

from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import AttemptTimeoutError, ParameterError, ParameterTypeError, RetryAfter, shown
from reefknot.runtime.log import LogBudget

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from reefknot.core.failure import Failure

    Answer: TypeAlias = bool | float
    On: TypeAlias = (
        type[Exception] | Iterable[type[Exception]] | Callable[[Exception], Answer] | Callable[[Exception], bool]
    )
    Judge: TypeAlias = Callable[[Exception, Failure], Answer]
    from collections.abc import Callable
    from typing import Any

    from reefknot.core.failure import Failure
    from reefknot.core.retry.throttle import RetryThrottle
    from reefknot.retrying.breaker import CircuitBreaker
    from reefknot.retrying.call import Hook
    from reefknot.retrying.types import Options

so_far = 0


COROUTINE, GENERATOR, ASYNC_GENERATOR = 0x80, 0x20, 0x200


def flags_of(fn: object) -> int:
    """The code flags of the function that a call of `fn` ends up in; 0 when there is none to see."""
    for _ in range(16):
        if hasattr(fn, "func") and hasattr(fn, "keywords"):
            fn = fn.func
        elif hasattr(fn, "__func__"):
            fn = fn.__func__
        else:
            break
    code = getattr(fn, "__code__", None)
    if code is None and not isinstance(fn, type):
        code = getattr(getattr(type(fn), "__call__", None), "__code__", None)  # noqa: B004 - the attribute, not the question
    return int(getattr(code, "co_flags", 0))


def is_async(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine, as far as its code or a marker tells."""
    # inspect's marker is a bare object; a mock, which has every attribute, answers with another mock.
    return bool(flags_of(fn) & COROUTINE) or type(getattr(fn, "_is_coroutine_mark", None)) is object


def name_of(fn: object) -> str:
    """What to call a function in notes and log lines."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def what_to_pass(fn: object) -> str:
    """What belongs where `fn` was given; a coroutine object is closed, so that it does not complain later."""
    if hasattr(fn, "cr_frame") and hasattr(fn, "close"):
        fn.close()
        return "a function to call for every attempt; a coroutine object can run only once, so pass the function itself"
    return "a function to call for every attempt"


ALWAYS_HEARD = (RetryAfter, AttemptTimeoutError)
"""Retried whatever `on=` says: your own request for it, and the time limit that you put on an attempt."""

_ACCEPTED = (
    "an exception class, a tuple of them, or a function that takes the exception and answers True, False or seconds"
)


def judge_for(on: On | None) -> Judge | None:
    """The judge that `on=` asks for. None means that nobody was asked."""
    if on is None:
        return None
    if isinstance(on, type):
        return _by_class((_class(on),))
    if callable(on):
        if is_async(on):
            raise ParameterTypeError("on", on, f"{_ACCEPTED}; it is not awaited, so an async function cannot answer")
        return _by_predicate(on)
    if isinstance(on, str) or not hasattr(on, "__iter__"):
        raise ParameterTypeError("on", on, _ACCEPTED)
    classes = tuple(_class(item) for item in on)
    if not classes:
        raise ParameterTypeError("on", on, _ACCEPTED)
    return _by_class(classes)


def every_leaf(group: BaseExceptionGroup[BaseException], judge: Callable[[Exception], Answer]) -> Answer:
    """A group is worth another try only if every leaf is; the longest wait asked for stands."""
    longest: float | None = None
    for item in group.exceptions:
        if not isinstance(item, Exception):
            return False
        answer = every_leaf(item, judge) if isinstance(item, BaseExceptionGroup) else judge(item)
        if answer is False and isinstance(item, ALWAYS_HEARD):
            answer = True
        if answer is False:
            return False
        if answer is not True:
            longest = max(longest or 0.0, answer)
    return True if longest is None else longest


def _class(item: object) -> type[Exception]:
    if not (isinstance(item, type) and issubclass(item, BaseException)):
        raise ParameterTypeError("on", item, _ACCEPTED)
    if item is BaseException:
        raise ParameterTypeError("on", item, f"{_ACCEPTED}; Exception for all of them: control flow is never retried")
    if not issubclass(item, Exception):
        raise ParameterTypeError("on", item, f"{_ACCEPTED}; {item.__name__} is control flow and is never retried")
    return item


def _by_class(classes: tuple[type[Exception], ...]) -> Judge:
    def judge(error: Exception, failure: Failure) -> Answer:
        if isinstance(error, classes):
            return True
        if isinstance(error, BaseExceptionGroup):
            return every_leaf(error, lambda leaf: isinstance(leaf, classes))
        return False

    return judge


def _report(broken: Exception) -> None:
    from reefknot.retrying.call import broken_callback

    broken_callback("on", broken)


def _by_predicate(predicate: Callable[[Exception], Answer]) -> Judge:
    def ask(error: Exception) -> Answer:
        try:
            answer = predicate(error)
        except Exception as broken:
            _report(broken)
            return False
        if answer is True or answer is False:
            return answer
        if isinstance(answer, int | float) and not isinstance(answer, bool) and 0 <= answer < float("inf"):
            return float(answer)
        _report(TypeError(f"answered {shown(answer)}; accepted are True, False or seconds, 0 or more"))
        return False

    def judge(error: Exception, failure: Failure) -> Answer:
        if isinstance(error, BaseExceptionGroup):
            return every_leaf(error, ask)
        return ask(error)

    return judge


LIBRARY_DEFAULT = RetryPolicy(4, 0.1, max_delay=30.0, jitter="full")
"""What `@retry` does when nothing is said."""

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
    from reefknot.retrying.breaker import CircuitBreaker

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
