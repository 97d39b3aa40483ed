"""
Functions that a caller gives: their kinds (plain, async, generator), counters, and the rules of `on=`, `on_result=`
and `wait=`.

Kinds are read from code flags, because `inspect` costs as much to import as everything else the light path loads. A
rule answers True, False, or the seconds to wait at least. A predicate that raises never changes the outcome: it is
logged, and the error or the result it was asked about goes to the caller as it is.
"""

from __future__ import annotations

from reefknot.errors import AttemptTimeoutError, ParameterError, ParameterTypeError, RetryAfter, shown
from reefknot.runtime.log import log_callback_failure

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, TypeAlias, TypeGuard

    from reefknot.core.failure import Failure
    from reefknot.core.retry.decide import AttemptRecord, Reason

    Verdict: TypeAlias = bool | float
    On: TypeAlias = (
        type[Exception] | Iterable[type[Exception]] | Callable[[Exception], Verdict] | Callable[[Exception], bool]
    )
    Rule: TypeAlias = Callable[[Exception, Failure], Verdict]
    ResultRule: TypeAlias = Callable[[Any], Verdict]
    Wait: TypeAlias = Sequence[float] | Callable[[int], float]
    WaitRule: TypeAlias = Callable[[int], float | None]


class RetryStatistics:
    """
    Counters of a decorated function: calls, retries, and calls whose last failure went to the caller.

    They are plain numbers: no thread is switched within `x += 1` of an attribute, so no lock is needed. An interpreter
    without a global lock may lose a count when two threads meet.
    """

    __slots__ = ("calls", "give_ups", "retries")

    def __init__(self) -> None:
        self.calls = 0
        self.retries = 0
        self.give_ups = 0

    def __repr__(self) -> str:
        return f"RetryStatistics(calls={self.calls}, retries={self.retries}, give_ups={self.give_ups})"


class RejectedResult(Exception):  # noqa: N818 - never reaches a caller: it is the result, on its way to the decision
    """A result that `on_result=` does not accept, as a failed attempt. The text leaves the result out."""

    def __init__(self, value: Any, retry_after: float | None) -> None:
        super().__init__("on_result asks for another attempt")
        self.value = value
        self.retry_after = retry_after
        self.records: tuple[AttemptRecord, ...] = ()
        self.reason: Reason | None = None
        """Set with `records` when there is no further attempt."""


ALWAYS_RETRIED = (RetryAfter, AttemptTimeoutError, RejectedResult)
"""
Errors that `on=` cannot refuse: the work's own request for a retry, the time limit put on an attempt, and a result that
`on_result=` refused.
"""
REQUESTED = (RetryAfter, RejectedResult)
"""Attempts that did not fail: the work, or the rule about its result, asked for another one."""

UNREADABLE = (Exception, GeneratorExit, SystemExit)
"""Raised by an attribute of an odd exception when it is read: it then says nothing. Ctrl-C is another matter."""
MOST_PARTS = 10_000
"""Bounds what is read of an exception group."""

_ACCEPTED = (
    "an exception class, a tuple of them, or a function that takes the exception and answers True, False or seconds"
)
COROUTINE, GENERATOR, ASYNC_GENERATOR = 0x80, 0x20, 0x200


def code_flags(fn: object) -> int:
    """Code flags of the function that a call of `fn` ends up in; 0 when there is none to see."""
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
    return bool(code_flags(fn) & COROUTINE) or type(getattr(fn, "_is_coroutine_mark", None)) is object


def name_of(fn: object) -> str:
    """Name of a function in notes and log lines."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def what_to_pass(fn: object) -> str:
    """Error text: what to pass instead of `fn`. Closes a coroutine object, so that it does not warn later."""
    if hasattr(fn, "cr_frame") and hasattr(fn, "close"):
        fn.close()
        return "a function to call for every attempt; a coroutine object can run only once, so pass the function itself"
    return "a function to call for every attempt"


def rule_for(on: On | None) -> Rule | None:
    """The rule that `on=` describes; None when it is not given."""
    if on is None:
        return None
    if isinstance(on, type):
        return _class_rule((_exception_class(on),))
    if callable(on):
        if is_async(on):
            raise ParameterTypeError("on", on, f"{_ACCEPTED}; it is not awaited, so an async function cannot answer")
        return _predicate_rule(on)
    if isinstance(on, str) or not hasattr(on, "__iter__"):
        raise ParameterTypeError("on", on, _ACCEPTED)
    classes = tuple(_exception_class(item) for item in on)
    if not classes:
        raise ParameterTypeError("on", on, _ACCEPTED)
    return _class_rule(classes)


def is_group(error: BaseException) -> TypeGuard[BaseExceptionGroup[BaseException]]:
    """Whether this is an exception group. `isinstance` also reads `__class__`, which an odd exception may refuse."""
    return issubclass(type(error), BaseExceptionGroup)


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or the leaves of a group in order, however deep it is; `MOST_PARTS` are read at most."""
    todo = [error]
    for _ in range(MOST_PARTS):
        if not todo:
            return
        part = todo.pop()
        if is_group(part):
            todo.extend(reversed(part.exceptions))
        else:
            yield part


def result_rule_for(on_result: object) -> ResultRule | None:
    """The rule that `on_result=` describes; None when it is not given."""
    if on_result is None:
        return None
    accepted = "a function that takes the result and answers True to try again, False, or seconds"
    if not callable(on_result) or isinstance(on_result, type):
        raise ParameterTypeError("on_result", on_result, accepted)
    if is_async(on_result):
        raise ParameterTypeError("on_result", on_result, f"{accepted}; an async function would not be awaited")
    return lambda value: _ask(on_result, "on_result", value)


def rejected(rule: ResultRule, value: Any) -> RejectedResult | None:
    """The result as a failed attempt if the rule refuses it, else None."""
    verdict = rule(value)
    if verdict is False:
        return None
    return RejectedResult(value, None if verdict is True else verdict)


def wait_rule_for(wait: object, longest: float) -> WaitRule | None:
    """The wait after attempt 1, 2, … that `wait=` describes; None when it is not given."""
    accepted = f"a sequence of seconds from 0 to max_delay, which is {longest:g}, or a function of the attempt's number"
    if wait is None:
        return None
    if callable(wait) and not isinstance(wait, type):
        if is_async(wait):
            raise ParameterTypeError("wait", wait, f"{accepted}; an async function would not be awaited")
        return lambda attempt: _asked_wait(wait, attempt)
    if _is_number(wait):
        raise ParameterTypeError("wait", wait, f"{accepted}; for the same wait each time: wait=[{wait:g}]")
    if isinstance(wait, str | bytes) or not hasattr(wait, "__iter__"):
        raise ParameterTypeError("wait", wait, accepted)
    waits = tuple(wait)
    if not waits:
        raise ParameterError("wait", wait, f"{accepted}; an empty sequence says nothing")
    for index, item in enumerate(waits):
        if not _is_number(item):
            raise ParameterTypeError(f"wait[{index}]", item, accepted)
        if not 0 <= item <= longest:
            raise ParameterError(f"wait[{index}]", item, accepted)
    return lambda attempt: float(waits[min(attempt, len(waits)) - 1])


def _asked_wait(wait: Callable[[int], Any], attempt: int) -> float | None:
    """Seconds that the caller's function answers; None when it raises or answers no number: the policy's own follow."""
    try:
        seconds = wait(attempt)
    except Exception as broken:
        log_callback_failure("wait", broken)
        return None
    if _is_number(seconds) and 0 <= seconds < float("inf"):
        return float(seconds)
    log_callback_failure("wait", TypeError(f"answered {shown(seconds)}; accepted are seconds, 0 or more"))
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def every_leaf(group: BaseExceptionGroup[BaseException], rule: Callable[[Exception], Verdict]) -> Verdict:
    """Verdict on a group: retried only if every leaf is, after the longest wait that a leaf asks for."""
    longest: float | None = None
    for item in leaves_of(group):
        if not issubclass(type(item), Exception):
            return False
        verdict = rule(item)  # type: ignore[arg-type]  # it is an Exception: see above
        if verdict is False and issubclass(type(item), ALWAYS_RETRIED):
            verdict = True
        if verdict is False:
            return False
        if verdict is not True:
            longest = max(longest or 0.0, verdict)
    return True if longest is None else longest


def _exception_class(item: object) -> type[Exception]:
    if not (isinstance(item, type) and issubclass(item, BaseException)):
        raise ParameterTypeError("on", item, _ACCEPTED)
    if item is BaseException:
        raise ParameterTypeError("on", item, f"{_ACCEPTED}; Exception for all of them: control flow is never retried")
    if not issubclass(item, Exception):
        raise ParameterTypeError("on", item, f"{_ACCEPTED}; {item.__name__} is control flow and is never retried")
    return item


def _class_rule(classes: tuple[type[Exception], ...]) -> Rule:
    def rule(error: Exception, failure: Failure) -> Verdict:
        if issubclass(type(error), classes):
            return True
        if is_group(error):
            return every_leaf(error, lambda leaf: issubclass(type(leaf), classes))
        return False

    return rule


def _predicate_rule(predicate: Callable[[Exception], Verdict]) -> Rule:
    def ask(error: Exception) -> Verdict:
        return _ask(predicate, "on", error)

    def rule(error: Exception, failure: Failure) -> Verdict:
        return every_leaf(error, ask) if is_group(error) else ask(error)

    return rule


def _ask(predicate: Callable[[Any], Any], option: str, subject: Any) -> Verdict:
    """Answer of a caller's predicate; False when it raises or answers nonsense."""
    try:
        verdict = predicate(subject)
    except Exception as broken:
        log_callback_failure(option, broken)
        return False
    if isinstance(verdict, bool):
        return verdict
    if _is_number(verdict) and 0 <= verdict < float("inf"):
        return float(verdict)
    log_callback_failure(option, TypeError(f"answered {shown(verdict)}; accepted are True, False or seconds ≥ 0"))
    return False
