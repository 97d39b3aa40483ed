"""`on=`: classes, predicates, classifiers, groups, and nonsense."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from typing import Any

import pytest

import reefknot as rk
from reefknot.engines.clocks import VirtualClock
from tests.unit.retrying.flaky import Flaky


def calls_with(on: Any, error: Exception) -> int:
    """How often work that fails once is called."""
    fn = Flaky(error)
    rk.Retrier(on=on, base_delay=0, max_delay=0).run(fn)
    return fn.calls


@pytest.mark.parametrize(
    ("on", "error", "calls"),
    [
        (KeyError, KeyError(), 2),
        (LookupError, KeyError(), 2),
        (KeyError, LookupError(), 1),
        (Exception, ZeroDivisionError(), 2),
        ((KeyError, ValueError), ValueError(), 2),
        ([KeyError, ValueError], ValueError(), 2),
        ({KeyError}, ValueError(), 1),
        (lambda error: isinstance(error, KeyError), KeyError(), 2),
        (lambda error: True, KeyError(), 2),
        (lambda error: False, ConnectionError(), 1),
        (lambda error: 0, KeyError(), 2),
        (lambda error: 0.0, KeyError(), 2),
        (None, ConnectionError(), 2),
        (None, TimeoutError(), 2),
        (None, ValueError("timeout must be positive"), 1),
        (rk.http_errors, ConnectionError(), 2),
        (rk.http_errors, ValueError(), 1),
    ],
)
def test_on_says_what_is_worth_another_try(on: Any, error: Exception, calls: int, no_wait: VirtualClock) -> None:
    assert calls_with(on, error) == calls


def test_an_iterator_of_classes_is_read_once_and_kept(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(on=(cls for cls in (KeyError, ValueError)))
    for _ in range(3):
        assert retrier.call(Flaky(ValueError())) == "ok"


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize("answer", [None, "yes", -1, float("nan"), float("inf"), [], object(), BadRepr()])
def test_a_predicate_that_answers_nonsense_means_no_and_is_reported(
    answer: object, caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    error = ConnectionError("the work's own")
    outcome = rk.Retrier(on=lambda _: answer).run(Flaky(error))  # type: ignore[arg-type]  # that is the test
    assert (outcome.error, outcome.attempts, outcome.reason) == (error, 1, rk.Reason.NOT_RETRYABLE)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "accepted are True, False or seconds" in record.getMessage()


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


@pytest.mark.parametrize(
    "on",
    [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, BaseException, (KeyError, SystemExit)],
)
def test_control_flow_in_on_is_refused(on: Any) -> None:
    with pytest.raises(rk.ParameterTypeError, match="control flow"):
        rk.retry(on=on)


@pytest.mark.parametrize("on", [5, "KeyError", int, (), [], (KeyError, 5), (KeyError, "x"), KeyError(), b"x"])
def test_what_is_no_exception_class_is_refused(on: Any) -> None:
    with pytest.raises(rk.ParameterTypeError, match="an exception class, a tuple of them, or a function") as raised:
        rk.retry(on=on)
    assert raised.value.parameter == "on"


def test_an_async_predicate_is_refused_at_decoration() -> None:
    async def on(error: Exception) -> bool:
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(rk.ParameterTypeError, match="not awaited"):
            rk.retry(on=on)  # type: ignore[arg-type]  # that is the test
        gc.collect()


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
    rk.Retrier(on=lambda leaf: seconds[type(leaf)], base_delay=0, max_delay=0).run(
        Flaky(group(ValueError(), KeyError()))
    )
    assert 50 <= virtual_time.waits[1] <= 51


def test_an_exception_group_of_a_task_group_is_retried() -> None:
    calls = 0

    async def part() -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise ConnectionError("a part")

    @rk.retry(on=ConnectionError)
    async def whole() -> str:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(part())
            parts.create_task(part())
        return "ok"

    assert rk.testing.run_virtual(whole()) == "ok"
    assert calls == 4
