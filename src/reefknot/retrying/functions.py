"""
Functions that a caller gives: their kinds (plain, async, generator), their arity, counters, and the rules of `on=`,
`on_result=` and `wait=`.

Kinds and arity are read from code objects, because `inspect` costs as much to import as everything else the light path
loads. A predicate's answer is taken as `if` would take it: `None`, `[]` and `0` mean no, a match or a non-empty list
means yes. A `float`, a `timedelta` or a `RetryAfter` is a least wait; a whole number is a truth value, because a count
is one. A predicate that raises never changes the outcome: it is logged, and the error or the result it was asked about
goes to the caller as it is.
"""

from __future__ import annotations

from math import inf

from reefknot.core.checks import in_seconds, is_number
from reefknot.errors import AttemptTimeoutError, ParameterError, ParameterTypeError, RetryAfter, shown
from reefknot.runtime.log import log_callback_failure

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sized
    from datetime import timedelta
    from re import Match
    from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

    from reefknot.core.decide import AttemptRecord, Reason
    from reefknot.core.failure import Failure

    T = TypeVar("T")

    class SupportsBool(Protocol):
        """A value with a truth of its own, such as a `bool` or a number."""

        def __bool__(self) -> bool: ...

    Verdict: TypeAlias = bool | float
    """The answer of a rule: whether to try again, or the seconds to wait at least, as a float."""
    Answer: TypeAlias = SupportsBool | Sized | Match[Any] | timedelta | RetryAfter | None
    """The answer of a caller's predicate: any truth value; a float, a timedelta or a RetryAfter is a wait."""
    On: TypeAlias = (
        type[Exception]
        | Iterable[type[Exception]]
        | Callable[[Exception], Answer]
        | Callable[[Exception], Awaitable[Answer]]
    )
    OnResult: TypeAlias = Callable[[Any], Answer] | Callable[[Any], Awaitable[Answer]]
    Rule: TypeAlias = Callable[[Exception, Failure], Any]
    """Answers with a `Verdict`; an async rule with a coroutine that does."""
    ResultRule: TypeAlias = Callable[[Any], Any]
    WaitRule: TypeAlias = Callable[[int, Callable[[], Any]], float | None]
    """Asked with the attempt's number, and a function that makes the argument of the caller's own function."""


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


class FirstItem(tuple):  # type: ignore[type-arg]  # of three: typing would be imported for it
    """Result of an attempt of a generator: the generator, whether it goes on, and its first item."""

    __slots__ = ()


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
_ACCEPTED_RESULT = "a function that takes the result and answers True to try again, False, or seconds"
_VARARGS = 0x04
COROUTINE, GENERATOR, ASYNC_GENERATOR = 0x80, 0x20, 0x200


def code_flags(fn: object) -> int:
    """Code flags of the function that a call of `fn` ends up in; 0 when it has no code to inspect."""
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
    return bool(code_flags(fn) & COROUTINE) or type(getattr(fn, "_is_coroutine_marker", None)) is object


def checked_arity(option: str, fn: Any, accepted: str, takes: str, given: int = 1) -> Any:
    """`fn`, or an error if it cannot be called with `given` arguments; `takes` shows a function that can."""
    counts = _argument_counts(fn)
    if counts is None or counts[0] <= given <= counts[1]:
        return fn
    least, most = counts
    if least == inf:
        arguments = "a keyword that is not given here"
    elif least == most:
        arguments = "no argument" if most == 0 else f"{least:g} argument{'s' * (least > 1)}"
    else:
        arguments = f"at least {least:g} arguments" if most == inf else f"{least:g} to {most:g} arguments"
    raise ParameterTypeError(option, fn, f"{accepted}: {takes}; {name_of(fn)} takes {arguments}")


def _argument_counts(fn: Any) -> tuple[float, float] | None:
    """The least and the most positional arguments that `fn` takes; None when that cannot be seen."""
    bound = 0
    for _ in range(16):
        if hasattr(fn, "func") and hasattr(fn, "keywords"):  # a partial
            if fn.keywords:
                break
            bound, fn = bound + len(fn.args), fn.func
        elif hasattr(fn, "__func__") and hasattr(fn, "__self__"):
            bound, fn = bound + 1, fn.__func__
        else:
            break
    code = getattr(fn, "__code__", None)
    if code is None or not hasattr(code, "co_argcount"):
        return _signature_counts(fn, bound)
    if code.co_kwonlyargcount > len(getattr(fn, "__kwdefaults__", None) or ()):
        return inf, inf
    least = code.co_argcount - len(getattr(fn, "__defaults__", None) or ())
    return max(0, least - bound), inf if code.co_flags & _VARARGS else max(0, code.co_argcount - bound)


def _signature_counts(fn: Any, bound: int) -> tuple[float, float] | None:
    """`_argument_counts` of what has no code of its own: a builtin, a class, an object with `__call__`."""
    from inspect import Parameter, signature

    try:
        parameters = signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    least = most = 0.0
    for one in parameters:
        match one.kind:
            case Parameter.POSITIONAL_ONLY | Parameter.POSITIONAL_OR_KEYWORD:
                least, most = least + (one.default is Parameter.empty), most + 1
            case Parameter.VAR_POSITIONAL:
                most = inf
            case Parameter.KEYWORD_ONLY if one.default is Parameter.empty:
                return inf, inf
            case _:
                continue
    return max(0, least - bound), max(0.0, most - bound)


def continued(work: Coroutine[Any, Any, T] | Generator[Any, Any, T], item: Any) -> Generator[Any, Any, T]:
    """Delegate, like `yield from`, to a coroutine or generator whose first item was taken already."""
    try:
        while True:
            try:
                sent = yield item
            except GeneratorExit:
                work.close()
                raise
            except BaseException as thrown:
                item = work.throw(thrown)
            else:
                item = work.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result


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
        checked_arity("on", on, _ACCEPTED, "on=lambda error: …")
        return _async_predicate_rule(on) if is_async(on) else _predicate_rule(on)
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
    if not callable(on_result) or isinstance(on_result, type):
        raise ParameterTypeError("on_result", on_result, _ACCEPTED_RESULT)
    checked_arity("on_result", on_result, _ACCEPTED_RESULT, "on_result=lambda value: …")
    if is_async(on_result):

        async def arule(value: Any) -> Verdict:
            return await _aask(on_result, "on_result", value)

        arule.__wrapped__ = on_result  # type: ignore[attr-defined]  # for the error that shows it
        return arule
    return lambda value: _ask(on_result, "on_result", value)


def rejected(verdict: Verdict, value: Any) -> RejectedResult | None:
    """The result as a failed attempt if the verdict of `on_result=` refuses it, else None."""
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
        checked_arity("wait", wait, accepted, "wait=lambda attempt: …")
        return lambda attempt, failed: _asked_wait(wait, failed())
    one = in_seconds(wait)
    if is_number(one):
        raise ParameterTypeError("wait", wait, f"{accepted}; for the same wait each time: wait=[{one:g}]")
    if isinstance(wait, str | bytes) or not hasattr(wait, "__iter__"):
        raise ParameterTypeError("wait", wait, accepted)
    waits: list[float] = []
    for index, item in enumerate(wait):
        seconds = in_seconds(item)
        if not is_number(seconds):
            raise ParameterTypeError(f"wait[{index}]", item, accepted)
        if not 0 <= seconds <= longest:
            raise ParameterError(f"wait[{index}]", item, accepted)
        waits.append(float(seconds))
    if not waits:
        raise ParameterError("wait", wait, f"{accepted}; an empty sequence says nothing")
    return lambda attempt, failed: waits[min(attempt, len(waits)) - 1]


def _asked_wait(wait: Callable[[Any], Any], attempt: Any) -> float | None:
    """The seconds that the caller's function returns; None, also when it fails, means the policy's own wait."""
    try:
        answer = wait(attempt)
    except Exception as broken:
        log_callback_failure("wait", broken)
        return None
    seconds = in_seconds(answer)
    if is_number(seconds) and 0 <= seconds < inf:
        return float(seconds)
    if answer is not None:
        accepted = "seconds, 0 or more, a timedelta, or None for the policy's own wait"
        log_callback_failure("wait", TypeError(f"answered {shown(answer)}; accepted are {accepted}"))
    return None


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

    rule.classes = classes  # type: ignore[attr-defined]  # for the plan, which need not ask about them
    return rule


def _predicate_rule(predicate: Callable[[Exception], object]) -> Rule:
    def ask(error: Exception) -> Verdict:
        return _ask(predicate, "on", error)

    def rule(error: Exception, failure: Failure) -> Verdict:
        return every_leaf(error, ask) if is_group(error) else ask(error)

    return rule


def _async_predicate_rule(predicate: Callable[[Exception], Any]) -> Rule:
    async def rule(error: Exception, failure: Failure) -> Verdict:
        if not is_group(error):
            return await _aask(predicate, "on", error)
        leaves = [leaf for leaf in leaves_of(error) if issubclass(type(leaf), Exception)]
        verdicts = {id(leaf): await _aask(predicate, "on", leaf) for leaf in leaves}
        return every_leaf(error, lambda leaf: verdicts[id(leaf)])

    rule.__wrapped__ = predicate  # type: ignore[attr-defined]  # for the error that shows it
    return rule


def _ask(predicate: Callable[[Any], Any], option: str, subject: Any) -> Verdict:
    """Verdict of a caller's predicate; False when it raises or answers nonsense."""
    try:
        return _verdict(predicate(subject), f"{name_of(predicate)} ")
    except Exception as broken:
        log_callback_failure(option, broken)
        return False


async def _aask(predicate: Callable[[Any], Any], option: str, subject: Any) -> Verdict:
    """`_ask`, awaited."""
    try:
        return _verdict(await predicate(subject), f"{name_of(predicate)} ")
    except Exception as broken:
        log_callback_failure(option, broken)
        return False


def _verdict(answer: Any, who: str) -> Verdict:
    """The answer of a predicate as a truth value, or as the seconds to wait at least."""
    if isinstance(answer, bool):
        return answer
    seconds = answer.retry_after if isinstance(answer, RetryAfter) else in_seconds(answer)
    if isinstance(seconds, float):
        if 0 <= seconds < inf:
            return float(seconds)
        raise TypeError(f"{who}answered {shown(answer)}; accepted are True, False or seconds, 0 or more and finite")
    if hasattr(answer, "__await__"):
        if hasattr(answer, "close"):
            answer.close()
        raise TypeError(f"{who}answered with something to await; an async predicate is written `async def`")
    return bool(answer)
