"""
`on=`: which failures are worth another try, as the caller put it.

A judge answers True, False, or a number of seconds to wait at least. It never changes the outcome by failing: a
predicate that raises is reported, and the error it was asked about goes to the caller as it is.
"""

from __future__ import annotations

from reefknot.errors import AttemptTimeoutError, ParameterTypeError, RetryAfter, shown
from reefknot.execution.kinds import is_async

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
    from reefknot.execution.report import broken_callback

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
