"""Functions that a caller gives: arity at decoration, hooks around each attempt, waits by the error; and durations."""

import asyncio
import functools
import operator
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

import reefknot as rk
from reefknot.core.decide import Reason
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, Answers, AsyncFlaky, Flaky

# ---- arity -----------------------------------------------------------------------------------------------------------


class Methods:
    def none(self) -> bool:
        return True

    def one(self, subject: object) -> bool:
        return True

    def two(self, subject: object, other: object) -> bool:
        return True

    @staticmethod
    def static(subject: object) -> bool:
        return True

    @classmethod
    def of_class(cls, subject: object) -> bool:
        return True


class Called:
    def __call__(self, subject: object) -> bool:
        return True


class CalledWithNothing:
    def __call__(self) -> bool:
        return True


def keyword_only(subject: object, *, other: object) -> bool:
    return True


def two(subject: object, other: object) -> bool:
    return True


@functools.wraps(two)
def wrapper_of_two(*args: object) -> bool:
    return True


FITTING: list[Callable[..., Any]] = [
    *(lambda subject: True, lambda *subjects: True, lambda subject, other=1: True, lambda subject=None: True),
    *(Methods().one, Methods.static, Methods().static, Methods.of_class, Called(), wrapper_of_two),
    *(functools.partial(two, 1), functools.partial(two, other=1), functools.partial(Methods().two, 1)),
    *(functools.partial(functools.partial(two, other=1)), [].append, print, operator.itemgetter(0)),
    mock.Mock(return_value=True),
]
NOT_FITTING: list[tuple[Callable[..., Any], str]] = [
    (lambda: True, "takes no argument$"),
    (lambda one, two: True, "takes 2 arguments$"),
    (lambda one, two, *more: True, "takes at least 2 arguments$"),
    (lambda one, two, three=1: True, "takes 2 to 3 arguments$"),
    (Methods().none, "Methods.none takes no argument$"),
    (Methods().two, "Methods.two takes 2 arguments$"),
    (Methods.one, "Methods.one takes 2 arguments$"),
    (CalledWithNothing(), "CalledWithNothing takes no argument$"),
    (functools.partial(two), "takes 2 arguments$"),
    (functools.partial(two, 1, 2), "takes no argument$"),
    (functools.partial(two, subject=1), "takes a keyword that is not given here$"),
    (keyword_only, "takes a keyword that is not given here$"),
    (list.append, "append takes 2 arguments$"),
]
OPTIONS = ["on", "on_result", "wait", "before", "after", "on_retry", "on_give_up", "on_recover", "fallback"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_function_is_accepted_where_it_takes_one_argument_and_refused_at_decoration_otherwise(option: str) -> None:
    for fn in FITTING:
        options: Any = {option: fn}
        rk.retry(**options)(Flaky())
    for fn, says in NOT_FITTING:
        options = {option: fn}
        matching = rf"^{option}=.* {option}=lambda \w+: …; .*{says}"
        for use in (rk.retry, rk.Retrier, rk.Retrier().using, rk.retry(Flaky()).using):
            with pytest.raises(rk.ParameterTypeError, match=matching) as raised:
                use(**options)
            assert raised.value.parameter == option
    with pytest.raises(rk.ParameterTypeError, match=r"^on=.*takes no argument"):
        rk.CircuitBreaker("x", on=lambda: True)  # type: ignore[arg-type]  # that is the test


# ---- before and after ------------------------------------------------------------------------------------------------


def seen_by(events: list[tuple[Any, ...]], name: str) -> Callable[[rk.RetryEvent], None]:
    def hook(event: rk.RetryEvent) -> None:
        events.append((name, event.attempt, type(event.error).__name__, event.value, event.delay, event.reason))

    return hook


def hooks(events: list[tuple[Any, ...]]) -> dict[str, Any]:
    names = ("before", "after", "on_retry", "on_recover", "on_give_up")
    return {name: seen_by(events, name) for name in names}


NONE = "NoneType"
BEGUN, FAILED = (NONE, None, None, None), ("ConnectionError", None, 3.0, None)
RECOVERED = [
    *(("before", 1, *BEGUN), ("after", 1, *FAILED), ("on_retry", 1, *FAILED)),
    *(("before", 2, *BEGUN), ("after", 2, NONE, "ok", None, None), ("on_recover", 2, *BEGUN)),
]
REFUSED = ("ValueError", None, None, Reason.NOT_RETRYABLE)
GIVEN_UP = [("before", 1, *BEGUN), ("after", 1, *REFUSED), ("on_give_up", 1, *REFUSED)]


@pytest.mark.parametrize("more", [{}, {"in_thread": True}, {"throttle": True}, {"deadline": 60}])
@pytest.mark.parametrize(("error", "expected"), [(ConnectionError(), RECOVERED), (ValueError(), GIVEN_UP)])
def test_hooks_are_called_around_every_attempt(
    more: Any, error: Exception, expected: object, virtual_time: VirtualClock
) -> None:
    ways: list[Callable[[rk.Retrier], object]] = [
        lambda retrier: rk.retry(policy=retrier)(Flaky(error))(),
        lambda retrier: retrier.call(Flaky(error)),
        lambda retrier: retrier.run(Flaky(error)),
        lambda retrier: asyncio.run(retrier.arun(AsyncFlaky(error))),
    ]
    for way in ways[: 3 if "in_thread" in more else 4]:
        events: list[tuple[Any, ...]] = []
        with suppress(ValueError):
            way(rk.Retrier(wait=[3], **hooks(events), **more))
        assert events == expected


def test_hooks_are_called_around_the_block_of_a_loop_and_after_sees_a_refused_result(
    virtual_time: VirtualClock,
) -> None:
    events: list[tuple[Any, ...]] = []
    fn = Flaky(ConnectionError())
    for attempt in rk.Retrier(wait=[3], **hooks(events)).attempts():
        with attempt:
            attempt.value = fn()
    assert events == RECOVERED
    events.clear()
    rk.retry(on_result=lambda v: v == "bad", wait=[3], after=seen_by(events, "after"))(Answers("bad", "good"))()
    assert events == [("after", 1, NONE, "bad", 3.0, None), ("after", 2, NONE, "good", None, None)]


async def test_after_is_called_once_for_an_attempt_whose_wait_is_stopped() -> None:
    events: list[tuple[Any, ...]] = []
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(1, stop.set)
    after = seen_by(events, "after")
    await rk.Retrier(wait=[3], stop=stop, after=after).arun(AsyncFlaky(ConnectionError()))
    assert events == [("after", 1, "ConnectionError", None, 3.0, None)]


def test_a_hook_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture, no_wait: VirtualClock) -> None:
    def hook(event: rk.RetryEvent) -> None:
        raise KeyError("in the hook")

    assert rk.retry(before=hook, after=hook)(Flaky(ConnectionError()))() == "ok"
    assert [line.split(" raised ")[0] for line in caplog.messages if "raised" in line] == ["before=", "after="] * 2


def test_the_items_of_a_generator_are_no_value_of_its_attempt(no_wait: VirtualClock) -> None:
    events: list[tuple[Any, ...]] = []

    @rk.retry(after=seen_by(events, "after"))
    def items() -> Any:
        yield 1

    assert list(items()) == [1]
    assert events == [("after", 1, NONE, None, None, None)]


# ---- waits by the error ----------------------------------------------------------------------------------------------


class BusyError(ConnectionError):
    retry_in: Any = 12


def test_a_wait_may_follow_from_the_error_or_from_a_refused_result(virtual_time: VirtualClock) -> None:
    rk.Retrier(wait=lambda attempt: attempt.error.retry_in, attempts=2).run(Always(BusyError))
    rk.Retrier(wait=lambda attempt: timedelta(seconds=attempt * 2), attempts=3).run(Always())
    rk.Retrier(wait=lambda attempt: len(attempt.event.args[0]), attempts=2).run(Always(), "four")
    rk.retry(on_result=lambda v: v["in"], wait=lambda attempt: attempt.value["in"])(Answers({"in": 9}, {"in": 0}))()
    assert virtual_time.waits == [12.0, 2.0, 4.0, 4.0, 9.0]


def test_a_wait_of_none_is_the_policys_own_and_a_truth_value_is_reported(
    caplog: pytest.LogCaptureFixture, virtual_time: VirtualClock
) -> None:
    wait: Any = lambda attempt: getattr(attempt.error, "retry_in", None)  # noqa: E731 - as one writes it
    rk.Retrier(wait=wait, attempts=2, base_delay=3, jitter="none").run(Always())
    assert "raised" not in caplog.text
    rk.Retrier(wait=lambda attempt: True, attempts=2, base_delay=3, jitter="none").run(Always())
    assert "wait= raised TypeError: answered True; accepted are seconds, 0 or more, a timedelta" in caplog.text
    assert virtual_time.waits == [3.0, 3.0]


# ---- durations -------------------------------------------------------------------------------------------------------

TWO = timedelta(seconds=2)


def test_a_timedelta_is_accepted_wherever_seconds_are() -> None:
    policy = rk.RetryPolicy(base_delay=TWO, max_delay=TWO, deadline=TWO, attempt_timeout=TWO, max_retry_after=TWO)
    assert policy == rk.RetryPolicy(base_delay=2, max_delay=2, deadline=2, attempt_timeout=2, max_retry_after=2)
    assert rk.RetryPolicy(time_budget=TWO).time_budget == 2.0
    assert type(policy.base_delay) is float
    options: Any = {"base_delay": TWO, "max_delay": TWO, "deadline": TWO, "max_retry_after": TWO, "wait": [TWO, 1]}
    made = rk.Retrier(**options).policy
    assert (made.base_delay, made.max_delay, made.time_budget, made.max_retry_after) == (2, 2, 2, 2)
    assert rk.Retrier(attempt_timeout=TWO).policy.attempt_timeout == 2.0
    assert rk.RetryAfter(TWO).retry_after == 2.0
    assert str(rk.RetryAfter(TWO)) == "asked to try again after 2 s"
    breaker = rk.CircuitBreaker("x", failures=1, cooldown=TWO)
    with pytest.raises(ConnectionError):
        breaker.call(Always())
    assert 0 < breaker.snapshot().retry_after <= 2
    assert rk.RetryThrottle(window=TWO).window == 2.0
    rk.RetryManager(lease=TWO, wait_for_result=TWO)
    rk.FanOut(rk.LogSink(), seconds=TWO)
    limits: Any = {"timeout": TWO, "attempt_timeout": TWO}
    rk.block("timedelta.step", **limits)
    with rk.testing.virtual_time() as clock:
        clock.advance(TWO)
        assert clock.now() == 1002.0


@pytest.mark.parametrize("wrong", [timedelta(seconds=-1), timedelta.max])
def test_a_timedelta_out_of_range_is_refused_by_name(wrong: timedelta) -> None:
    uses: dict[str, Callable[[], object]] = {
        "base_delay": lambda: rk.retry(base_delay=wrong),
        "max_delay": lambda: rk.RetryPolicy(max_delay=wrong),
        r"wait\[0\]": lambda: rk.retry(wait=[wrong]),
        "lease": lambda: rk.idempotent(key=str, lease=wrong),
    }
    for name, use in uses.items():
        with pytest.raises(rk.ParameterError, match=f"^{name}="):
            use()
    with pytest.raises(rk.ParameterError, match=r"^deadline="):
        rk.retry(deadline=timedelta(0))
    with pytest.raises(rk.ParameterTypeError, match=r"^wait=.*wait=\[2\]"):
        rk.retry(wait=TWO)  # type: ignore[call-overload]  # that is the test


async def test_a_store_and_its_keys_take_timedeltas() -> None:
    async with rk.open_store("memory:", retention=TWO, audit_retention=TWO, work_retention=TWO):
        calls = []

        @rk.idempotent(key=lambda number: number, lease=TWO, wait=TWO)
        async def work(number: int) -> int:
            calls.append(number)
            return number

        await work(1)
        await work(1)
        first = len(calls)
        await asyncio.sleep(3)
        await work(1)
        found = first, len(calls)

    assert found == (1, 2)
