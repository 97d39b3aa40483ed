"""`on=`: classes, predicates, classifiers, groups, and nonsense."""

import asyncio
import gc
import logging
import re
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Answers, AsyncAnswers, AsyncFlaky, Flaky


def calls_with(on: Any, error: Exception) -> int:
    """How often work that fails once is called."""
    fn = Flaky(error)
    rk.Retrier(on=on, base_delay=0, max_delay=0).run(fn)
    return fn.calls


@pytest.mark.parametrize(
    ("on", "error", "calls"),
    [
        *((on, KeyError(), 2) for on in (KeyError, LookupError, lambda error: isinstance(error, KeyError))),
        *((on, ValueError(), 2) for on in ((KeyError, ValueError), [KeyError, ValueError], {KeyError, ValueError})),
        *((KeyError, LookupError(), 1), (Exception, ZeroDivisionError(), 2), ({KeyError}, ValueError(), 1)),
        (lambda error: False, ConnectionError(), 1),
        (lambda error: re.search("5..", str(error)), KeyError("status 503"), 2),
        (lambda error: re.search("5..", str(error)), KeyError("status 404"), 1),
        (lambda error: error.args, KeyError("a"), 2),
        (lambda error: error.args, KeyError(), 1),
        *((lambda error, no=no: no, KeyError(), 1) for no in (None, 0)),
        *((lambda error, yes=yes: yes, KeyError(), 2) for yes in (True, object(), 1, -1, 0.0, timedelta(0))),
        (lambda error: rk.RetryAfter(0), KeyError(), 2),
        (None, ConnectionError(), 2),
        (None, TimeoutError(), 2),
        (None, ValueError("timeout must be positive"), 1),
        (rk.http_errors, ConnectionError(), 2),
        (rk.http_errors, ValueError(), 1),
    ],
)
def test_on_says_what_is_worth_another_try(on: Any, error: Exception, calls: int, no_wait: VirtualClock) -> None:
    assert calls_with(on, error) == calls
    by_iterator = rk.Retrier(on=(cls for cls in (KeyError, ValueError)))
    assert [by_iterator.call(Flaky(ValueError())) for _ in range(3)] == ["ok"] * 3, "it is read once and kept"


@pytest.mark.parametrize(
    ("answer", "waited"),
    [(1, 0.0), (5, 0.0), (5.0, 5.0), (timedelta(seconds=5), 5.0), (rk.RetryAfter(5), 5.0), (True, 0.0)],
)
@pytest.mark.parametrize("option", ["on", "on_result"])
def test_seconds_are_a_float_a_timedelta_or_a_retry_after_and_a_whole_number_is_true(
    option: str, answer: object, waited: float, virtual_time: VirtualClock
) -> None:
    options: Any = {option: lambda _: answer}
    work = Flaky(KeyError()) if option == "on" else Answers("bad", "bad")
    rk.Retrier(attempts=2, base_delay=0, max_delay=0, **options).run(work)
    assert waited <= virtual_time.waited <= waited * 1.1


class NoTruth:
    def __bool__(self) -> bool:
        raise ValueError("the truth of this is ambiguous")

    def __repr__(self) -> str:
        raise RuntimeError("not even that")


NONSENSE = "on= raised TypeError: .*<lambda> answered .*accepted are True, False or sec"


async def is_connection_error(error: Exception) -> bool:
    await asyncio.sleep(0)
    return isinstance(error, ConnectionError)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        *((lambda _, odd=odd: odd, NONSENSE) for odd in (-1.0, float("nan"), float("inf"), timedelta(seconds=-1))),
        (lambda _: NoTruth(), "on= raised ValueError: the truth of this is ambiguous"),
        # a coroutine is true for `if`: every error would be retried, and the predicate would never run
        (lambda error: is_connection_error(error), "an async predicate is written `async def`"),
    ],
)
def test_a_predicate_that_answers_nonsense_means_no_and_is_reported(
    answer: Any, says: str, caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    error = ConnectionError("the work's own")
    outcome = rk.Retrier(on=answer).run(Flaky(error))
    assert (outcome.error, outcome.attempts, outcome.reason) == (error, 1, rk.Reason.NOT_RETRYABLE)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert re.search(says, record.getMessage())
    gc.collect()


def test_a_predicate_that_raises_does_not_replace_the_error_and_is_reported(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    def on(error: Exception) -> bool:
        raise KeyError("in the predicate")

    error = ConnectionError("the work's own")
    with pytest.raises(ConnectionError) as raised:
        rk.retry(on=on)(Flaky(error))()
    assert raised.value is error
    assert raised.value.__context__ is None
    assert "on= raised KeyError" in caplog.records[0].getMessage()


CONTROL_FLOW = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, BaseException]
NO_CLASSES = [5, "KeyError", int, (), [], (KeyError, 5), (KeyError, "x"), KeyError(), b"x"]


@pytest.mark.parametrize(
    ("on", "says"),
    [
        *((on, "control flow") for on in [*CONTROL_FLOW, (KeyError, SystemExit)]),
        *((on, "an exception class, a tuple of them, or a function") for on in NO_CLASSES),
    ],
)
def test_what_is_no_exception_class_or_is_control_flow_is_refused(on: Any, says: str) -> None:
    with pytest.raises(rk.ParameterTypeError, match=says) as raised:
        rk.retry(on=on)
    assert raised.value.parameter == "on"


# ---- async predicates ------------------------------------------------------------------------------------------------


async def is_bad(value: object) -> float | None:
    await asyncio.sleep(0)
    return 7.0 if value == "bad" else None


async def in_an_async_loop(retrier: rk.Retrier[Any]) -> None:
    async for _ in retrier.attempts():
        break


def test_an_async_predicate_or_hook_is_refused_where_a_plain_function_is_decorated() -> None:
    hooks = [("on_give_up", is_bad), ("on_give_up", AsyncFlaky())]
    for option, function in (("on", is_connection_error), ("on_result", is_bad), *hooks):
        options: Any = {option: function}
        retrier: Any = rk.Retrier(**options)
        for use in (
            rk.retry(**options),
            retrier.call,
            retrier.run,
            lambda _, retrier=retrier: next(iter(retrier.attempts())),
            lambda _, retrier=retrier: asyncio.run(in_an_async_loop(retrier)),
        ):
            with pytest.raises(rk.ParameterTypeError, match=f"^{option}=<.*a plain function here"):
                use(Flaky())
    with pytest.raises(rk.ParameterTypeError, match=r"^on=.*a breaker awaits no predicate"):
        rk.CircuitBreaker("x", on=is_connection_error)


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (ConnectionError(), 2),
        (ValueError(), 1),
        (ExceptionGroup("both", [ConnectionError(), ConnectionError()]), 2),
        (ExceptionGroup("both", [ConnectionError(), ValueError()]), 1),
        (rk.RetryAfter(1), 2),
    ],
)
@pytest.mark.parametrize("breaker", [None, "x"])
async def test_an_async_predicate_decides_for_an_async_function_and_its_breaker(
    error: Exception, calls: int, breaker: str | None
) -> None:
    options: Any = {} if breaker is None else {"breaker": rk.CircuitBreaker(breaker, failures=3)}
    fn, again = AsyncFlaky(error), AsyncFlaky(error)
    with suppress(Exception):
        await rk.retry(on=is_connection_error, **options)(fn)()
    await rk.Retrier(on=is_connection_error, **options).arun(again)
    assert (fn.calls, again.calls) == (calls, calls)
    counts = rk.CircuitBreaker("x", failures=1)
    await rk.Retrier(on=is_connection_error, breaker=counts, attempts=1).arun(AsyncFlaky(error))
    is_an_answer = isinstance(error, rk.RetryAfter)
    assert counts.snapshot().opened == (calls == 2 and not is_an_answer), "it counts what the predicate would retry"


async def test_an_async_predicate_that_raises_does_not_replace_the_error(caplog: pytest.LogCaptureFixture) -> None:
    async def on(error: Exception) -> bool:
        raise KeyError("in the predicate")

    outcome = await rk.Retrier(on=on).arun(AsyncFlaky(ConnectionError("mine")))
    assert (str(outcome.error), outcome.attempts) == ("mine", 1)
    assert "on= raised KeyError" in caplog.text


async def test_an_async_predicate_judges_results() -> None:
    answers = AsyncAnswers("bad", "bad", "good")
    value = await rk.retry(on_result=is_bad, base_delay=0, max_delay=0)(answers)()
    assert (value, answers.calls) == ("good", 3)
    assert 14 <= asyncio.get_running_loop().time() <= 15.5


def test_a_predicate_about_errors_is_not_asked_about_a_refused_result(no_wait: VirtualClock) -> None:
    asked: list[Exception] = []
    rk.Retrier(on=asked.append, on_result=lambda value: value == "bad").run(Answers("bad", "good"))
    assert asked == []


# ---- groups ----------------------------------------------------------------------------------------------------------


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("several", list(errors))


@pytest.mark.parametrize("on", [None, ConnectionError, lambda error: isinstance(error, ConnectionError)])
@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (group(ConnectionError()), 2),
        (group(ConnectionError(), ConnectionResetError()), 2),
        (group(ConnectionError(), ValueError()), 1),
        (group(ConnectionError(), group(ConnectionError())), 2),
        (group(ConnectionError(), group(ConnectionError(), ValueError())), 1),
        (group(ConnectionError(), rk.RetryAfter(0)), 2),
    ],
)
def test_a_group_is_retried_only_if_every_leaf_would_be(
    on: Any, error: Exception, calls: int, no_wait: VirtualClock
) -> None:
    assert calls_with(on, error) == calls


def test_a_predicate_is_asked_for_leaves_never_for_the_group(no_wait: VirtualClock) -> None:
    asked: list[type[Exception]] = []

    def on(error: Exception) -> bool:
        asked.append(type(error))
        return True

    rk.Retrier(on=on).run(Flaky(group(KeyError(), group(ValueError()))))
    assert asked == [KeyError, ValueError]


def test_the_longest_wait_that_a_leaf_asks_for_stands(virtual_time: VirtualClock) -> None:
    error = group(rk.RetryAfter(5), rk.RetryAfter(30), ConnectionError())
    rk.Retrier(on=ConnectionError, base_delay=0, max_delay=0).run(Flaky(error))
    assert 30 <= virtual_time.waits[0] <= 31

    seconds = {KeyError: 7.0, ValueError: 50.0}
    by_leaf = rk.Retrier(on=lambda leaf: seconds[type(leaf)], base_delay=0, max_delay=0)
    by_leaf.run(Flaky(group(ValueError(), KeyError())))
    assert 50 <= virtual_time.waits[1] <= 51


async def test_an_exception_group_of_a_task_group_is_retried() -> None:
    part = AsyncFlaky(ConnectionError("a part"), ConnectionError("a part"))

    @rk.retry(on=ConnectionError)
    async def whole() -> str:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(part())
            parts.create_task(part())
        return "ok"

    assert await whole() == "ok"
    assert part.calls == 4
