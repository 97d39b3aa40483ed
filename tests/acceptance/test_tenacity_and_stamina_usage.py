"""
Uses of tenacity and stamina, from their documentation, each with the counterpart that the guide names.

A case is a row of the guide: their words, ours, and a check that runs ours as it stands in the row. `MISSING` has the
rows without a counterpart.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import random
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    library: str
    theirs: str
    ours: str
    check: Callable[[Any], None]


CASES: list[Case] = []


def case(library: str, theirs: str, ours: str) -> Callable[[Callable[[Any], None]], None]:
    """A case. Its check gets a function that evaluates `ours`: as options, or as the expression that it is."""

    def register(check: Callable[[Any], None]) -> None:
        CASES.append(Case(library, theirs, ours, check))

    return register


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


NAMES: dict[str, Any] = {
    "rk": rk,
    "re": re,
    "random": random,
    "timedelta": timedelta,
    "httpx": SimpleNamespace(HTTPError=HTTPError),
    "is_none": is_none,
    "is_busy": is_busy,
    "ais_busy": ais_busy,
    "acached": acached,
    "raise_own": raise_own,
}


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


def calls(options: str, *answers: object, **names: object) -> int:
    """How often a function with these answers is called under the options of a row."""
    fn = Answer(*answers)
    ended(under(options, fn, **names))
    return fn.calls


# ---- tenacity: stopping ----------------------------------------------------------------------------------------------


@case("tenacity", "@retry until it succeeds", "on=Exception")
def _(ours: str) -> None:
    assert under(ours, Answer(OSError(), KeyError(), "value"))() == "value"


@case("tenacity", "stop=stop_after_attempt(7)", "attempts=7")
def _(ours: str) -> None:
    assert calls(ours, OSError()) == 7


@case("tenacity", "stop=stop_after_delay(10)", "deadline=10")
def _(ours: str) -> None:
    assert sum(waits(f"wait=[3], attempts=99, {ours}")) == 9


@case("tenacity", "stop=stop_before_delay(10)", "deadline=10")
def _(ours: str) -> None:
    assert sum(waits(f"wait=[9, 2], attempts=99, {ours}")) == 9


@case("tenacity", "stop=stop_after_delay(10) | stop_after_attempt(5)", "deadline=10, attempts=5")
def _(ours: str) -> None:
    assert len(waits(f"wait=[4], {ours}")) == 2
    assert len(waits(f"wait=[1], {ours}")) == 4


@case("tenacity", "stop=stop_when_event_set(event)", "stop=event")
def _(ours: str) -> None:
    event = threading.Event()
    event.set()
    assert calls(ours, OSError(), event=event) == 1


@case("tenacity", "sleep=sleep_using_event(event)", "stop=event")
def _(ours: str) -> None:
    event = threading.Event()
    assert calls(f"wait=[30], on_retry=lambda _: event.set(), {ours}", OSError(), event=event) == 1


@case("tenacity", "stop=lambda state: closing()", "on=lambda error: not closing()")
def _(ours: str) -> None:
    assert calls(ours, OSError(), closing=itertools.chain([False], itertools.repeat(True)).__next__) == 2


# ---- tenacity: waiting -----------------------------------------------------------------------------------------------


@case("tenacity", "wait=wait_none()", 'strategy="immediate"')
def _(ours: str) -> None:
    assert waits(ours) == []
    assert calls(ours, OSError()) == 4


@case("tenacity", "wait=wait_fixed(2)", "wait=[2]")
def _(ours: str) -> None:
    assert waits(ours) == [2, 2, 2]


@case("tenacity", "wait=wait_fixed(timedelta(seconds=2))", "wait=[timedelta(seconds=2)]")
def _(ours: str) -> None:
    assert waits(ours) == [2, 2, 2]


@case("tenacity", "wait=wait_random(min=1, max=2)", "wait=lambda attempt: random.uniform(1, 2)")
def _(ours: str) -> None:
    assert all(1 <= wait <= 2 for wait in waits(ours))


@case("tenacity", "wait=wait_exponential(multiplier=1, max=10)", 'base_delay=1, max_delay=10, jitter="none"')
def _(ours: str) -> None:
    assert waits(ours, attempts=7) == [1, 2, 4, 8, 10, 10]


@case("tenacity", "wait=wait_exponential(min=4, max=10)", "wait=lambda attempt: max(4, min(2 ** (attempt - 1), 10))")
def _(ours: str) -> None:
    assert waits(ours, attempts=7) == [4, 4, 4, 8, 10, 10]


@case("tenacity", "wait=wait_fixed(3) + wait_random(0, 2)", "wait=lambda attempt: 3 + random.uniform(0, 2)")
def _(ours: str) -> None:
    assert all(3 <= wait <= 5 for wait in waits(ours))


@case("tenacity", "wait=wait_random_exponential(multiplier=1, max=60)", "base_delay=1, max_delay=60")
def _(ours: str) -> None:
    assert all(wait <= limit for wait, limit in zip(waits(ours, attempts=9), (1, 2, 4, 8, 16, 32, 60, 60), strict=True))


@case(
    "tenacity",
    "wait=wait_exponential_jitter(initial=1, max=20, jitter=1)",
    "wait=lambda attempt: min(2 ** (attempt - 1) + random.random(), 20)",
)
def _(ours: str) -> None:
    assert all(low <= wait <= low + 1 for wait, low in zip(waits(ours), (1, 2, 4), strict=True))


@case("tenacity", "wait=wait_incrementing(start=1, increment=2)", "wait=lambda attempt: 2 * attempt - 1")
def _(ours: str) -> None:
    assert waits(ours) == [1, 3, 5]


@case("tenacity", "wait=wait_chain(wait_fixed(3), wait_fixed(3), wait_fixed(7))", "wait=[3, 3, 7]")
def _(ours: str) -> None:
    assert waits(ours, attempts=6) == [3, 3, 7, 7, 7]


@case("tenacity", "wait=wait_exception(lambda error: error.retry_in)", "wait=lambda attempt: attempt.error.retry_in")
def _(ours: str) -> None:
    assert waits(ours, BusyError()) == [12, 12, 12]


@case("tenacity", "wait=lambda state: 2 * state.attempt_number", "wait=lambda attempt: 2 * attempt")
def _(ours: str) -> None:
    assert waits(ours) == [2, 4, 6]


# ---- tenacity: whether to retry --------------------------------------------------------------------------------------


@case("tenacity", "retry=retry_if_exception_type(OSError)", "on=OSError")
def _(ours: str) -> None:
    assert (calls(ours, OSError()), calls(ours, KeyError())) == (4, 1)


@case("tenacity", "retry=retry_if_exception_type((OSError, KeyError))", "on=(OSError, KeyError)")
def _(ours: str) -> None:
    assert (calls(ours, OSError()), calls(ours, KeyError()), calls(ours, ValueError())) == (4, 4, 1)


@case("tenacity", "retry=retry_if_not_exception_type(KeyError)", "on=lambda error: not isinstance(error, KeyError)")
def _(ours: str) -> None:
    assert (calls(ours, OSError()), calls(ours, KeyError())) == (4, 1)


@case("tenacity", "retry=retry_if_exception(is_busy)", "on=is_busy")
def _(ours: str) -> None:
    assert (calls(ours, OSError("busy")), calls(ours, OSError("no"))) == (4, 1)


@case("tenacity", 'retry=retry_if_exception_message(match="busy")', 'on=lambda error: re.match("busy", str(error))')
def _(ours: str) -> None:
    assert (calls(ours, OSError("busy: 5")), calls(ours, OSError("no"))) == (4, 1)


@case("tenacity", 'retry=retry_if_not_exception_message(message="no")', 'on=lambda error: str(error) != "no"')
def _(ours: str) -> None:
    assert (calls(ours, OSError("busy")), calls(ours, OSError("no"))) == (4, 1)


@case(
    "tenacity", "retry=retry_if_exception_cause_type(OSError)", "on=lambda error: isinstance(error.__cause__, OSError)"
)
def _(ours: str) -> None:
    caused = ValueError()
    caused.__cause__ = OSError()
    assert (calls(ours, caused), calls(ours, ValueError())) == (4, 1)


@case("tenacity", "retry=retry_if_result(is_none)", "on_result=is_none")
def _(ours: str) -> None:
    assert calls(ours, None, None, 1) == 3


@case("tenacity", "retry=retry_if_not_result(bool)", "on_result=lambda value: not value")
def _(ours: str) -> None:
    assert calls(ours, [], 0, [1]) == 3


@case("tenacity", "retry=retry_if_result(is_none) | retry_if_exception_type()", "on=Exception, on_result=is_none")
def _(ours: str) -> None:
    assert calls(ours, None, KeyError(), 1) == 3


@case(
    "tenacity",
    "retry=retry_all(retry_if_exception_type(OSError), retry_if_exception(is_busy))",
    "on=lambda error: isinstance(error, OSError) and is_busy(error)",
)
def _(ours: str) -> None:
    assert (calls(ours, OSError("busy")), calls(ours, OSError("no")), calls(ours, KeyError("busy"))) == (4, 1, 1)


@case(
    "tenacity",
    "retry=retry_unless_exception_type(KeyError)",
    "on=lambda error: not isinstance(error, KeyError), on_result=lambda value: True",
)
def _(ours: str) -> None:
    assert calls(ours, 1, OSError(), KeyError(), 4) == 3


@case("tenacity", "retry=retry_never", 'strategy="none"')
def _(ours: str) -> None:
    assert calls(ours, OSError()) == 1


@case("tenacity", "raise TryAgain", "rk.RetryAfter(0)")
def _(ours: str) -> None:
    assert calls("on=KeyError", evaluated(ours), "value") == 2


# ---- tenacity: error handling ----------------------------------------------------------------------------------------


@case("tenacity", "reraise=True", "")
def _(ours: str) -> None:
    error = OSError()
    assert ended(under(ours, Answer(error))) is error


@case("tenacity", "retry_error_cls=OwnError", "fallback=raise_own")
def _(ours: str) -> None:
    error = ended(under(ours, Answer(OSError("last"))))
    assert (type(error), str(error and error.__cause__)) == (OwnError, "last")


@case("tenacity", 'retry_error_callback=lambda state: "cached"', 'fallback="cached"')
def _(ours: str) -> None:
    assert under(ours, Answer(OSError()))() == "cached"


@case("tenacity", "retry_error_callback=lambda state: state.args[0]", "fallback=lambda event: event.args[0]")
def _(ours: str) -> None:
    assert under(ours, Answer(OSError()))("given") == "given"


@case("tenacity", "retry_error_callback=lambda state: state.outcome.result()", "on_result=is_none")
def _(ours: str) -> None:
    assert under(ours, Answer(None))() is None


@case("tenacity", "RetryError of a refused result", "on_result=is_none, raise_result=True")
def _(ours: str) -> None:
    assert isinstance(ended(under(ours, Answer(None))), rk.RetryError)


# ---- tenacity: hooks, logs, statistics -------------------------------------------------------------------------------


@case("tenacity", "before=before_log(logger, DEBUG)", "before=lambda event: logger.debug(event.attempt)")
def _(ours: str) -> None:
    seen: list[object] = []
    under(ours, Answer(OSError(), 1), logger=SimpleNamespace(debug=seen.append))()
    assert seen == [1, 2]


@case("tenacity", "after=after_log(logger, DEBUG)", "after=lambda event: logger.debug(event.error or event.value)")
def _(ours: str) -> None:
    seen: list[object] = []
    error = OSError()
    under(ours, Answer(error, 1), logger=SimpleNamespace(debug=seen.append))()
    assert seen == [error, 1]


@case("tenacity", "before_sleep=before_sleep_log(logger, INFO)", "log=logger")
def _(ours: str) -> None:
    logger, seen = logging.getLogger("usage"), list[logging.LogRecord]()
    logger.addFilter(seen.append)  # type: ignore[arg-type]  # None: nothing goes on
    under(ours, Answer(OSError(), 1), logger=logger)()
    logger.filters.clear()
    assert re.search("attempt 1 of 4 failed with OSError; trying again in", seen[0].getMessage())


@case("tenacity", "before_sleep=lambda state: state.args[0].renew()", "on_retry=lambda event: event.args[0].renew()")
def _(ours: str) -> None:
    seen: list[int] = []
    under(ours, Answer(OSError(), 1))(SimpleNamespace(renew=lambda: seen.append(1)))
    assert seen == [1]


@case(
    "tenacity",
    "before_sleep=lambda state: show(state.seconds_since_start, state.next_action.sleep)",
    "on_retry=lambda event: show(event.elapsed, event.delay)",
)
def _(ours: str) -> None:
    seen: list[tuple[float, float]] = []
    under(f"wait=[2, 3], {ours}", Answer(OSError()), show=lambda *given: seen.append(given)).using(fallback=None)()
    assert seen == [(0, 2), (2, 3), (5, 3)]


@case("tenacity", "fn.statistics", "fn.statistics.retries")
def _(ours: str) -> None:
    fn = under("attempts=3", Answer(OSError(), OSError(), 1))
    fn()
    assert evaluated(ours, fn=fn) == 2


@case("tenacity", 'fn.statistics["idle_for"] of the last call', "sum(failed.delay or 0 for failed in outcome.history)")
def _(ours: str) -> None:
    outcome = rk.Retrier(wait=[2, 3], attempts=3).run(Answer(ConnectionError()))
    assert evaluated(ours, outcome=outcome) == 5


# ---- tenacity: arguments at run time, blocks, async ------------------------------------------------------------------


@case("tenacity", "fn.retry_with(stop=stop_after_attempt(4))()", "fn.using(attempts=4)()")
def _(ours: str) -> None:
    work = Answer(OSError())
    ended(lambda: evaluated(ours, fn=under("attempts=2", work)))
    assert work.calls == 4


@case("tenacity", "Retrying(stop=stop_after_attempt(3))(fn, 7)", "rk.Retrier(attempts=3).call(fn, 7)")
def _(ours: str) -> None:
    assert evaluated(ours, fn=Answer(ConnectionError(), "value")) == "value"


@case("tenacity", "retrying.copy(wait=wait_fixed(2))", "retrier.using(wait=[2])")
def _(ours: str) -> None:
    with rk.testing.virtual_time() as clock:
        evaluated(ours, retrier=rk.Retrier(attempts=2)).run(Answer(ConnectionError()))
    assert clock.waits == [2]


@case("tenacity", "fn.retry.sleep = lambda seconds: None", "rk.testing.no_wait()")
def _(ours: str) -> None:
    with rk.testing.virtual_time() as outer, evaluated(ours) as skipped:
        ended(under("wait=[30]", Answer(OSError())))
    assert (outer.waited, skipped.waits) == (0, [30, 30, 30])


@case("tenacity", "for attempt in Retrying(): with attempt: …", "rk.Retrier(on=OSError).attempts()")
def _(ours: str) -> None:
    fn = Answer(OSError(), "value")
    for attempt in evaluated(ours):
        with attempt:
            attempt.value = fn()
    assert (attempt.value, attempt.number) == ("value", 2)


@case("tenacity", "attempt.retry_state.set_result(value)", "rk.Retrier(on_result=is_none).attempts()")
def _(ours: str) -> None:
    fn = Answer(None, "value")
    for attempt in evaluated(ours):
        with attempt:
            attempt.value = fn()
    assert (attempt.value, attempt.number) == ("value", 2)


@case("tenacity", "async for attempt in AsyncRetrying(): with attempt: …", "rk.Retrier(on=OSError).attempts()")
def _(ours: str) -> None:
    async def main() -> object:
        fn = Answer(OSError(), "value")
        async for attempt in evaluated(ours):
            with attempt:
                attempt.value = await fn.later()
        return attempt.value

    assert rk.testing.run_virtual(main()) == "value"


@case("tenacity", "retry=tenacity.asyncio.retry_if_exception(ais_busy)", "on=ais_busy")
def _(ours: str) -> None:
    fn = Answer(OSError("busy"), OSError("no"))
    with pytest.raises(OSError, match="no"):
        rk.testing.run_virtual(under(ours, fn.later)())
    assert fn.calls == 2


@case("tenacity", "retry_error_callback=acached", "fallback=acached")
def _(ours: str) -> None:
    assert rk.testing.run_virtual(under(ours, Answer(OSError()).later)()) == "cached"


@case("tenacity", "@retry(sleep=trio.sleep) on an async def", "wait=[0.001]")
def _(ours: str) -> None:
    assert trio.run(under(ours, Answer(OSError(), "value").later)) == "value"


@case("tenacity", "@retry on a @tornado.gen.coroutine", "await rk.Retrier(on=OSError).acall(fn)")
def _(ours: str) -> None:
    work = Answer(OSError(), "value")
    assert evaluated(ours, fn=lambda: asyncio.ensure_future(work.later())) == "value"


# ---- stamina ---------------------------------------------------------------------------------------------------------


@case("stamina", "@stamina.retry(on=httpx.HTTPError, attempts=3)", "on=httpx.HTTPError, attempts=3")
def _(ours: str) -> None:
    assert calls(ours, HTTPError("refused")) == 3

    def get(url: str, *, size: int = 1) -> bytes:
        return b""

    assert inspect.signature(under(ours, get)) == inspect.signature(get)


@case("stamina", "timeout=timedelta(seconds=10)", "deadline=timedelta(seconds=10)")
def _(ours: str) -> None:
    assert len(waits(f"attempts=99, wait=[3], {ours}")) == 3


@case(
    "stamina",
    "wait_initial=0.1, wait_max=5, wait_exp_base=2, wait_jitter=0",
    'base_delay=0.1, max_delay=5, multiplier=2, jitter="none"',
)
def _(ours: str) -> None:
    assert waits(ours, attempts=8) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5]


@case("stamina", "wait_jitter=1", "wait=lambda attempt: min(0.1 * 2 ** (attempt - 1) + random.random(), 5)")
def _(ours: str) -> None:
    assert all(low <= wait <= low + 1 for wait, low in zip(waits(ours), (0.1, 0.2, 0.4), strict=True))


@case("stamina", "on=lambda error: error.retry_in", "on=lambda error: error.retry_in")
def _(ours: str) -> None:
    assert all(12 <= wait <= 13 for wait in waits(ours, BusyError()))


@case(
    "stamina", "RetryingCaller(attempts=5).on(ValueError)(fn, 7)", "rk.Retrier(attempts=5, on=ValueError).call(fn, 7)"
)
def _(ours: str) -> None:
    assert evaluated(ours, fn=Answer(ValueError(), "value")) == "value"


@case("stamina", "stamina.set_active(False)", "rk.testing.no_retry()")
def _(ours: str) -> None:
    with evaluated(ours):
        assert calls("attempts=5", OSError()) == 1
    assert calls("attempts=5", OSError()) == 5


@case("stamina", "stamina.set_testing(True, attempts=2)", "rk.testing.no_retry(attempts=2), rk.testing.no_wait()")
def _(ours: str) -> None:
    few, fast = evaluated(ours)
    with few, fast:
        assert calls("attempts=5, wait=[30]", OSError()) == 2


@case("stamina", "stamina.instrumentation.set_on_retry_hooks([count])", "policy=counted")
def _(ours: str) -> None:
    seen: list[rk.RetryEvent] = []
    counted = rk.Retrier(on=OSError, on_retry=seen.append, name="usage")
    rk.retry(**evaluated(f"dict({ours})", counted=counted))(Answer(OSError("why"), 1))("given", size=1)
    (event,) = seen
    assert (event.name, event.args, event.kwargs, event.attempt) == ("usage", ("given",), {"size": 1}, 1)
    assert (str(event.error), event.delay is not None) == ("why", True)


@case("stamina", "for attempt in stamina.retry_context(on=OSError): …", "rk.Retrier(on=OSError).attempts()")
def _(ours: str) -> None:
    fn = Answer(OSError(), "value")
    for attempt in evaluated(ours):
        with attempt:
            attempt.value = fn()
    assert (attempt.value, attempt.number) == ("value", 2)


@case("stamina", "async for attempt in stamina.retry_context(on=OSError): …", "rk.Retrier(on=OSError).attempts()")
def _(ours: str) -> None:
    async def main() -> list[int]:
        fn, numbers = Answer(OSError(), "value"), []
        async for attempt in evaluated(ours):
            with attempt:
                numbers.append(attempt.number)
                await fn.later()
        return numbers

    assert rk.testing.run_virtual(main()) == [1, 2]


@case(
    "stamina",
    "await AsyncRetryingCaller(attempts=5)(ValueError, fn, 7)",
    "await rk.Retrier(attempts=5, on=ValueError).acall(fn, 7)",
)
def _(ours: str) -> None:
    assert evaluated(ours, fn=Answer(ValueError(), "value").later) == "value"


@case("stamina", "stamina.instrumentation.set_on_retry_hooks([])", "log=False")
def _(ours: str) -> None:
    logger, seen = logging.getLogger("reefknot"), list[logging.LogRecord]()
    logger.addFilter(seen.append)  # type: ignore[arg-type]  # None: nothing goes on
    for options in ("log=True", ours):
        under(options, Answer(OSError(), 1))()
    logger.filters.clear()
    assert [record.levelname for record in seen] == ["WARNING"]


@case(
    "stamina",
    "details.name, details.args, details.retry_num, details.wait_for, details.caused_by",
    "event.name, event.args, event.attempt, event.delay, event.error",
)
def _(ours: str) -> None:
    seen: list[rk.RetryEvent] = []
    error = OSError()
    rk.retry(on=OSError, on_retry=seen.append, wait=[2], name="usage")(Answer(error, 1))("given")
    assert evaluated(ours, event=seen[0]) == ("usage", ("given",), 1, 2.0, error)


@case("stamina", "stamina.is_active()", "rk.Retrier(on=OSError).run(fn).attempts")
def _(ours: str) -> None:
    with rk.testing.no_retry():
        assert evaluated(ours, fn=Answer(OSError())) == 1
    assert evaluated(ours, fn=Answer(OSError())) == 4


# ---- the rows and the guide ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.library}: {one.theirs}")
def test_the_counterpart_does_what_the_row_says(one: Case) -> None:
    one.check(one.ours)


def test_every_row_is_in_the_guide_as_it_is_run() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\|", "\0")  # a bar inside of a cell
    rows = [line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| ")]
    left = {theirs.replace("`", "").replace("\0", "|"): ours for theirs, ours in rows}
    for _, theirs, ours, _ in CASES:
        assert f"`{ours}`" in left[theirs] or not ours, theirs
    for theirs, why in MISSING.items():
        assert left[theirs].startswith(f"not supported: {why}"), theirs


def test_of_all_uses_four_have_no_counterpart() -> None:
    assert (len(CASES), len(MISSING)) == (74, 4)
