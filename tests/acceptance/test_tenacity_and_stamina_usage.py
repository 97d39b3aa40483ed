"""
Uses of tenacity and stamina, from their documentation, each with the counterpart that the guide names.

A case is a row of the guide. Ours runs as it stands there, as options or as the expression that it is. `MISSING` has
those without a counterpart.
"""

import asyncio
import inspect
import logging
import random
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import reefknot as rk

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from-tenacity-stamina-backoff.md"

MISSING = {
    "@retry for ever": "every retry is bounded",
    "stop=stop_after_attempt(5) & stop_after_delay(10)": "limits hold together",
    "a generator that fails after its first item": "restarting it would give items twice",
    "attempt.next_wait": "the wait depends on the failure",
}
SECOND = {
    *("raise TryAgain", 'fn.statistics["idle_for"] of the last call', "fn.retry.sleep = lambda seconds: None"),
    *("for attempt in Retrying(): with attempt: …", "attempt.retry_state.set_result(value)", "wait_jitter=1"),
    *("async for attempt in AsyncRetrying(): with attempt: …", "stamina.set_active(False)"),
    *("stamina.set_testing(True, attempts=2)", "stamina.instrumentation.set_on_retry_hooks([count])"),
}
"""Rows in which ours is the second piece of code."""


class BusyError(OSError):
    retry_in = 12.0


class Answer:
    """Fails or answers as it is told, one a call; the last again and again."""

    __name__ = __qualname__ = "answer"

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.calls = 0
        self.at: list[float] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        answer = self.answers[min(self.calls, len(self.answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def later(self, *args: object, **kwargs: object) -> object:
        return self()


def is_none(value: object) -> bool:
    return value is None


def is_busy(error: Exception) -> bool:
    return "busy" in str(error)


async def ais_busy(error: Exception) -> bool:
    return is_busy(error)


async def acached(event: rk.RetryEvent) -> str:
    return "cached"


class OwnError(Exception):
    pass


def raise_own(event: rk.RetryEvent) -> None:
    raise OwnError(event.attempt) from event.error


class HTTPError(Exception):
    """The base class of httpx's errors, which is not installed here."""


FUNCTIONS: list[Any] = [timedelta, is_none, is_busy, ais_busy, acached, raise_own]
NAMES: dict[str, Any] = {one.__name__: one for one in FUNCTIONS}
NAMES |= {"rk": rk, "re": re, "random": random, "httpx": SimpleNamespace(HTTPError=HTTPError)}


def evaluated(text: str, **names: object) -> Any:
    """The value of an expression of the guide; one that awaits is run in virtual time."""
    if not text.startswith("await "):
        return eval(text, {**NAMES, **names})
    space: dict[str, Any] = {**NAMES, **names}
    exec(f"async def main():\n    return {text}", space)
    return rk.testing.run_virtual(space["main"]())


def under(options: str, fn: Callable[..., Any], **names: object) -> Any:
    """`fn`, decorated with the options of a row. Without `on=`, everything is retried, as tenacity does."""
    given = {"on": Exception, "log": False, "attempts": 4, **evaluated(f"dict({options})", **names)}
    return rk.retry(**given)(fn)


def ended(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.fixture(autouse=True)
def clock() -> Iterator[Any]:
    with rk.testing.virtual_time() as clock:
        yield clock


def waits(options: str, error: Exception | None = None, attempts: int = 4, **names: object) -> list[float]:
    """The waits under the options of a row."""
    with rk.testing.virtual_time() as clock:
        given = f"attempts={attempts}, {options}" if "attempts=" not in options else options
        ended(under(given, Answer(error or OSError()), **names))
    return clock.waits


def calls_of(options: str, *answers: object, **names: object) -> int:
    """How often a function with these answers is called under the options of a row."""
    fn = Answer(*answers)
    ended(under(options, fn, **names))
    return fn.calls


def each(*errors: Exception, calls: list[int]) -> tuple[Callable[[str], object], object]:
    """How often a function is called that always fails with the error, for each of these errors."""
    return lambda ours: [calls_of(ours, error) for error in errors], calls


def within(*bounds: tuple[float, float], error: Exception | None = None) -> tuple[Callable[[str], object], object]:
    """Waits within these bounds: none is outside."""
    found: Callable[[str], object] = lambda ours: outside(waits(ours, error, attempts=len(bounds) + 1), *bounds)  # noqa: E731 - typed
    return found, []


def outside(found: list[float], *bounds: tuple[float, float]) -> list[float]:
    """The waits that are not within their bounds."""
    return [wait for wait, (low, high) in zip(found, bounds, strict=True) if not low <= wait <= high]


def told(options: str) -> list[object]:
    """What a logger is told of a function that fails once."""
    seen: list[object] = []
    under(options, Answer(OS, 1), logger=SimpleNamespace(debug=seen.append))()
    return seen


def looped(attempts: str, refused: object) -> tuple[object, int]:
    """The value and the number of the attempt that ends a loop, after one that is refused."""
    fn = Answer(refused, "value")
    for attempt in evaluated(attempts):
        with attempt:
            attempt.value = fn()
    return attempt.value, attempt.number


def looped_async(attempts: str) -> tuple[object, int]:
    async def main() -> tuple[object, int]:
        fn = Answer(OSError(), "value")
        async for attempt in evaluated(attempts):
            with attempt:
                attempt.value = await fn.later()
        return attempt.value, attempt.number

    return rk.testing.run_virtual(main())


def calls_of_call(expression: str) -> int:
    """How often a function is called by an expression that calls it."""
    work = Answer(OSError())
    ended(lambda: evaluated(expression, fn=under("attempts=2", work)))
    return work.calls


def retries_of(expression: str) -> object:
    fn = under("attempts=3", Answer(OSError(), OSError(), 1))
    fn()
    return evaluated(expression, fn=fn)


OS, BUSY, NO = OSError(), OSError("busy"), OSError("no")
CAUSED = ValueError()
CAUSED.__cause__ = OSError()
ROWS: dict[str, tuple[Callable[[str], object], object]] = {
    "@retry until it succeeds": (lambda ours: under(ours, Answer(OSError(), KeyError(), "value"))(), "value"),
    "stop=stop_after_attempt(7)": (lambda ours: calls_of(ours, OS), 7),
    "stop=stop_after_delay(10)": (lambda ours: sum(waits(f"wait=[3], attempts=99, {ours}")), 9),
    "stop=stop_before_delay(10)": (lambda ours: sum(waits(f"wait=[9, 2], attempts=99, {ours}")), 9),
    "stop=stop_after_delay(10) | stop_after_attempt(5)": (
        lambda ours: [len(waits(f"wait=[{wait}], {ours}")) for wait in (4, 1)],
        [2, 4],
    ),
    "stop=lambda state: closing()": (lambda ours: calls_of(ours, OS, closing=iter((False, True)).__next__), 2),
    # waiting
    "wait=wait_none()": (lambda ours: (waits(ours), calls_of(ours, OS)), ([], 4)),
    "wait=wait_fixed(2)": (waits, [2, 2, 2]),
    "wait=wait_fixed(timedelta(seconds=2))": (waits, [2, 2, 2]),
    "wait=wait_random(min=1, max=2)": within((1, 2), (1, 2), (1, 2)),
    "wait=wait_exponential(multiplier=1, max=10)": (lambda ours: waits(ours, attempts=7), [1, 2, 4, 8, 10, 10]),
    "wait=wait_exponential(min=4, max=10)": (lambda ours: waits(ours, attempts=7), [4, 4, 4, 8, 10, 10]),
    "wait=wait_fixed(3) + wait_random(0, 2)": within((3, 5), (3, 5), (3, 5)),
    "wait=wait_random_exponential(multiplier=1, max=60)": within(*((0, most) for most in (1, 2, 4, 8, 16, 32, 60, 60))),
    "wait=wait_exponential_jitter(initial=1, max=20, jitter=1)": within((1, 2), (2, 3), (4, 5)),
    "wait=wait_incrementing(start=1, increment=2)": (waits, [1, 3, 5]),
    "wait=wait_chain(wait_fixed(3), wait_fixed(3), wait_fixed(7))": (
        lambda ours: waits(ours, attempts=6),
        [3, 3, 7, 7, 7],
    ),
    "wait=wait_exception(lambda error: error.retry_in)": (lambda ours: waits(ours, BusyError()), [12, 12, 12]),
    "wait=lambda state: 2 * state.attempt_number": (waits, [2, 4, 6]),
    # whether to retry
    "retry=retry_if_exception_type(OSError)": each(OS, KeyError(), calls=[4, 1]),
    "retry=retry_if_exception_type((OSError, KeyError))": each(OS, KeyError(), ValueError(), calls=[4, 4, 1]),
    "retry=retry_if_not_exception_type(KeyError)": each(OS, KeyError(), calls=[4, 1]),
    "retry=retry_if_exception(is_busy)": each(BUSY, NO, calls=[4, 1]),
    'retry=retry_if_exception_message(match="busy")': each(OSError("busy: 5"), NO, calls=[4, 1]),
    'retry=retry_if_not_exception_message(message="no")': each(BUSY, NO, calls=[4, 1]),
    "retry=retry_if_exception_cause_type(OSError)": each(CAUSED, ValueError(), calls=[4, 1]),
    "retry=retry_if_result(is_none)": (lambda ours: calls_of(ours, None, None, 1), 3),
    "retry=retry_if_not_result(bool)": (lambda ours: calls_of(ours, [], 0, [1]), 3),
    "retry=retry_if_result(is_none) | retry_if_exception_type()": (lambda ours: calls_of(ours, None, KeyError(), 1), 3),
    "retry=retry_all(retry_if_exception_type(OSError), retry_if_exception(is_busy))": each(
        *(BUSY, NO, KeyError("busy")), calls=[4, 1, 1]
    ),
    "retry=retry_unless_exception_type(KeyError)": (lambda ours: calls_of(ours, 1, OSError(), KeyError(), 4), 3),
    "retry=retry_never": (lambda ours: calls_of(ours, OS), 1),
    "raise TryAgain": (lambda ours: calls_of("on=KeyError", evaluated(ours), "value"), 2),
    # error handling
    "reraise=True": (lambda _: ended(under("", Answer(OS))), OS),
    'retry_error_callback=lambda state: "cached"': (lambda ours: under(ours, Answer(OS))(), "cached"),
    "retry_error_callback=lambda state: state.args[0]": (lambda ours: under(ours, Answer(OS))("given"), "given"),
    "retry_error_callback=lambda state: state.outcome.result()": (lambda ours: under(ours, Answer(None))(), None),
    "RetryError of a refused result": (lambda ours: type(ended(under(ours, Answer(None)))), rk.RetryError),
    # hooks, logs, statistics
    "before=before_log(logger, DEBUG)": (told, [1, 2]),
    "after=after_log(logger, DEBUG)": (told, [OS, 1]),
    "fn.statistics": (retries_of, 2),
    'fn.statistics["idle_for"] of the last call': (
        lambda ours: evaluated(ours, outcome=rk.Retrier(wait=[2, 3], attempts=3).run(Answer(ConnectionError()))),
        5,
    ),
    # arguments at run time, blocks, async
    "fn.retry_with(stop=stop_after_attempt(4))()": (calls_of_call, 4),
    "Retrying(stop=stop_after_attempt(3))(fn, 7)": (
        lambda ours: evaluated(ours, fn=Answer(ConnectionError(), "value")),
        "value",
    ),
    "for attempt in Retrying(): with attempt: …": (lambda ours: looped(ours, OS), ("value", 2)),
    "attempt.retry_state.set_result(value)": (lambda ours: looped(ours, None), ("value", 2)),
    "async for attempt in AsyncRetrying(): with attempt: …": (looped_async, ("value", 2)),
    "retry_error_callback=acached": (lambda ours: rk.testing.run_virtual(under(ours, Answer(OS).later)()), "cached"),
    "@retry(sleep=trio.sleep) on an async def": (
        lambda ours: trio.run(under(ours, Answer(OSError(), "value").later)),
        "value",
    ),
    # stamina
    "timeout=timedelta(seconds=10)": (lambda ours: len(waits(f"attempts=99, wait=[3], {ours}")), 3),
    "wait_initial=0.1, wait_max=5, wait_exp_base=2, wait_jitter=0": (
        lambda ours: waits(ours, attempts=8),
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5],
    ),
    "wait_jitter=1": within((0.1, 1.1), (0.2, 1.2), (0.4, 1.4)),
    "on=lambda error: error.retry_in": within((12, 13), (12, 13), (12, 13), error=BusyError()),
    "RetryingCaller(attempts=5).on(ValueError)(fn, 7)": (
        lambda ours: evaluated(ours, fn=Answer(ValueError(), "value")),
        "value",
    ),
    "await AsyncRetryingCaller(attempts=5)(ValueError, fn, 7)": (
        lambda ours: evaluated(ours, fn=Answer(ValueError(), "value").later),
        "value",
    ),
    "for attempt in stamina.retry_context(on=OSError): …": (lambda ours: looped(ours, OS), ("value", 2)),
    "async for attempt in stamina.retry_context(on=OSError): …": (looped_async, ("value", 2)),
}
"""By their words: what is looked at when ours runs, and what it has to be."""


def case(theirs: str) -> Callable[[Callable[[str], None]], None]:
    """A row with a check of its own."""

    def register(check: Callable[[str], None]) -> None:
        ROWS[theirs] = check, None

    return register


@case("stop=stop_when_event_set(event)")
def _(ours: str) -> None:
    event = threading.Event()
    event.set()
    assert calls_of(ours, OSError(), event=event) == 1


@case("sleep=sleep_using_event(event)")
def _(ours: str) -> None:
    event = threading.Event()
    assert calls_of(f"wait=[30], on_retry=lambda _: event.set(), {ours}", OSError(), event=event) == 1


@case("retry_error_cls=OwnError")
def _(ours: str) -> None:
    error = ended(under(ours, Answer(OSError("last"))))
    assert (type(error), str(error and error.__cause__)) == (OwnError, "last")


@case("before_sleep=before_sleep_log(logger, INFO)")
def _(ours: str) -> None:
    logger, seen = logging.getLogger("usage"), list[logging.LogRecord]()
    logger.addFilter(seen.append)  # type: ignore[arg-type]  # None: nothing goes on
    under(ours, Answer(OSError(), 1), logger=logger)()
    logger.filters.clear()
    assert re.search("attempt 1 of 4 failed with OSError; trying again in", seen[0].getMessage())


@case("before_sleep=lambda state: state.args[0].renew()")
def _(ours: str) -> None:
    seen: list[int] = []
    under(ours, Answer(OSError(), 1))(SimpleNamespace(renew=lambda: seen.append(1)))
    assert seen == [1]


@case("before_sleep=lambda state: show(state.seconds_since_start, state.next_action.sleep)")
def _(ours: str) -> None:
    seen: list[tuple[float, float]] = []
    under(f"wait=[2, 3], {ours}", Answer(OSError()), show=lambda *given: seen.append(given)).using(fallback=None)()
    assert seen == [(0, 2), (2, 3), (5, 3)]


@case("retrying.copy(wait=wait_fixed(2))")
def _(ours: str) -> None:
    with rk.testing.virtual_time() as clock:
        evaluated(ours, retrier=rk.Retrier(attempts=2)).run(Answer(ConnectionError()))
    assert clock.waits == [2]


@case("fn.retry.sleep = lambda seconds: None")
def _(ours: str) -> None:
    with rk.testing.virtual_time() as outer, evaluated(ours) as skipped:
        ended(under("wait=[30]", Answer(OSError())))
    assert (outer.waited, skipped.waits) == (0, [30, 30, 30])


@case("retry=tenacity.asyncio.retry_if_exception(ais_busy)")
def _(ours: str) -> None:
    fn = Answer(OSError("busy"), OSError("no"))
    with pytest.raises(OSError, match="no"):
        rk.testing.run_virtual(under(ours, fn.later)())
    assert fn.calls == 2


@case("@retry on a @tornado.gen.coroutine")
def _(ours: str) -> None:
    work = Answer(OSError(), "value")
    assert evaluated(ours, fn=lambda: asyncio.ensure_future(work.later())) == "value"


@case("@stamina.retry(on=httpx.HTTPError, attempts=3)")
def _(ours: str) -> None:
    assert calls_of(ours, HTTPError("refused")) == 3

    def get(url: str, *, size: int = 1) -> bytes:
        return b""

    assert inspect.signature(under(ours, get)) == inspect.signature(get)


@case("stamina.set_active(False)")
def _(ours: str) -> None:
    with evaluated(ours):
        assert calls_of("attempts=5", OSError()) == 1
    assert calls_of("attempts=5", OSError()) == 5


@case("stamina.set_testing(True, attempts=2)")
def _(ours: str) -> None:
    few, fast = evaluated(ours)
    with few, fast:
        assert calls_of("attempts=5, wait=[30]", OSError()) == 2


@case("stamina.instrumentation.set_on_retry_hooks([count])")
def _(ours: str) -> None:
    seen: list[rk.RetryEvent] = []
    counted = rk.Retrier(on=OSError, on_retry=seen.append, name="usage")
    rk.retry(**evaluated(f"dict({ours})", counted=counted))(Answer(OSError("why"), 1))("given", size=1)
    (event,) = seen
    assert (event.name, event.args, event.kwargs, event.attempt) == ("usage", ("given",), {"size": 1}, 1)
    assert (str(event.error), event.delay is not None) == ("why", True)


@case("stamina.instrumentation.set_on_retry_hooks([])")
def _(ours: str) -> None:
    logger, seen = logging.getLogger("reefknot"), list[logging.LogRecord]()
    logger.addFilter(seen.append)  # type: ignore[arg-type]  # None: nothing goes on
    for options in ("log=True", ours):
        under(options, Answer(OSError(), 1))()
    logger.filters.clear()
    assert [record.levelname for record in seen] == ["WARNING"]


@case("details.name, details.args, details.retry_num, details.wait_for, details.caused_by")
def _(ours: str) -> None:
    seen: list[rk.RetryEvent] = []
    error = OSError()
    rk.retry(on=OSError, on_retry=seen.append, wait=[2], name="usage")(Answer(error, 1))("given")
    assert evaluated(ours, event=seen[0]) == ("usage", ("given",), 1, 2.0, error)


@case("stamina.is_active()")
def _(ours: str) -> None:
    with rk.testing.no_retry():
        assert evaluated(ours, fn=Answer(OSError())) == 1
    assert evaluated(ours, fn=Answer(OSError())) == 4


def guide() -> dict[str, str]:
    """The cells of the guide: ours by theirs."""
    page = PAGE.read_text(encoding="utf-8").replace("\\|", "\0")  # a bar inside of a cell
    cells = [line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| ")]
    return {theirs.replace("`", "").replace("\0", "|"): ours for theirs, ours in cells}


GUIDE = guide()


@pytest.mark.parametrize("theirs", ROWS)
def test_the_counterpart_does_what_the_row_says(theirs: str) -> None:
    pieces = re.findall("`([^`]+)`", GUIDE[theirs]) or [""]
    found, expected = ROWS[theirs]
    assert found(pieces[theirs in SECOND]) == expected


def test_of_all_uses_four_have_no_counterpart() -> None:
    assert (len(ROWS), len(MISSING)) == (74, 4)
    for theirs, why in MISSING.items():
        assert GUIDE[theirs].startswith(f"not supported: {why}"), theirs
