"""
Functions that a caller gives: their kinds (plain, async, generator), and `on=`, the rule for what is retried.

Kinds are read from code flags, because `inspect` costs as much to import as everything else the light path loads. A
rule answers True, False, or the seconds to wait at least. A predicate that raises never changes the outcome: it is
logged, and the error it was asked about goes to the caller as it is.
"""

from __future__ import annotations

from reefknot.errors import AttemptTimeoutError, ParameterTypeError, RetryAfter, shown
from reefknot.runtime.log import log_callback_failure

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from reefknot.core.failure import Failure

    Verdict: TypeAlias = bool | float
    On: TypeAlias = (
        type[Exception] | Iterable[type[Exception]] | Callable[[Exception], Verdict] | Callable[[Exception], bool]
    )
    Rule: TypeAlias = Callable[[Exception, Failure], Verdict]

ALWAYS_RETRIED = (RetryAfter, AttemptTimeoutError)
"""Errors that `on=` cannot refuse: the work's own request for a retry, and the time limit put on an attempt."""

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


def every_leaf(group: BaseExceptionGroup[BaseException], rule: Callable[[Exception], Verdict]) -> Verdict:
    """Verdict on a group: retried only if every leaf is, after the longest wait that a leaf asks for."""
    longest: float | None = None
    for item in group.exceptions:
        if not isinstance(item, Exception):
            return False
        verdict = every_leaf(item, rule) if isinstance(item, BaseExceptionGroup) else rule(item)
        if verdict is False and isinstance(item, ALWAYS_RETRIED):
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
        if isinstance(error, classes):
            return True
        if isinstance(error, BaseExceptionGroup):
            return every_leaf(error, lambda leaf: isinstance(leaf, classes))
        return False

    return rule


def _predicate_rule(predicate: Callable[[Exception], Verdict]) -> Rule:
    def ask(error: Exception) -> Verdict:
        try:
            verdict = predicate(error)
        except Exception as broken:
            log_callback_failure("on", broken)
            return False
        if verdict is True or verdict is False:
            return verdict
        if isinstance(verdict, int | float) and not isinstance(verdict, bool) and 0 <= verdict < float("inf"):
            return float(verdict)
        log_callback_failure("on", TypeError(f"answered {shown(verdict)}; accepted are True, False or seconds ≥ 0"))
        return False

    def rule(error: Exception, failure: Failure) -> Verdict:
        return every_leaf(error, ask) if isinstance(error, BaseExceptionGroup) else ask(error)

    return rule
