"""Whatever an exception is like, it is retried as its class says, and the caller gets that very object back."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import reefknot as rk
from reefknot.retrying import call
from reefknot.retrying.failures import classify_failure, failure_from, read_hints
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.odd_errors import TOLD, all_odd, deep_group, raising

ODD = all_odd()
Run = Callable[[Callable[[], None]], object]


def by_loop(work: Callable[[], None]) -> None:
    for attempt in rk.Retrier(base_delay=0).attempts():
        with attempt:
            work()


def by_async(work: Callable[[], None]) -> None:
    @rk.retry(base_delay=0, deadline=60)
    async def run() -> None:
        work()

    async def error_of() -> BaseException | None:
        try:
            await run()
        except BaseException as error:  # the loop itself cannot show all of them
            return error
        return None

    error = asyncio.run(error_of())
    if error is not None:
        raise error


def by_generator(work: Callable[[], None]) -> None:
    @rk.retry(base_delay=0)
    def run() -> Iterator[None]:
        work()
        yield

    next(run())


def by_outcome(work: Callable[[], None]) -> None:
    error = rk.Retrier(base_delay=0).run(work).error
    if error is not None:
        raise error


def by_stop(work: Callable[[], None]) -> None:
    """Asked to stop before the first wait ends."""
    asked = threading.Event()
    rk.retry(wait=[1], stop=asked, on_retry=lambda event: asked.set())(work)()


WAYS: dict[str, Run] = {
    "plain": lambda work: rk.retry(base_delay=0)(work)(),
    "timed": lambda work: rk.retry(base_delay=0, deadline=60)(work)(),
    "throttled": lambda work: rk.retry(base_delay=0, throttle=rk.RetryThrottle())(work)(),
    "breaker": lambda work: rk.retry(base_delay=0, breaker=rk.CircuitBreaker("odd"))(work)(),
    "class": lambda work: rk.retry(on=(ConnectionError, KeyError), base_delay=0)(work)(),
    "predicate": lambda work: rk.retry(on=rk.http_errors, base_delay=0)(work)(),
    "hooks": lambda work: rk.retry(base_delay=0, on_retry=print, on_give_up=print)(work)(),
    "nested": lambda work: rk.retry(base_delay=0)(rk.retry(base_delay=0, attempts=2)(work))(),
    "result": lambda work: rk.retry(base_delay=0, on_result=lambda value: False)(work)(),
    "waits": lambda work: rk.retry(wait=[0], stop=threading.Event(), log="info")(work)(),
    "stopped": by_stop,
    "thread": lambda work: rk.retry(base_delay=0, in_thread=True)(work)(),
    "loop": by_loop,
    "async": by_async,
    "generator": by_generator,
    "outcome": by_outcome,
}


def replaced(way: Run, names: list[str]) -> list[str]:
    """The odd exceptions in whose place the caller got another one, or none."""
    wrong = []
    for name in names:
        given = ODD[name]()

        def work(given: Exception = given) -> None:
            raise given

        try:
            way(work)
            wrong.append(f"{name}: nothing was raised")
        except BaseException as error:
            if error is not given:
                wrong.append(f"{name}: {type(error).__name__}")
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_the_callers_own_exception_comes_back(way: str, no_wait: VirtualClock) -> None:
    names = list(ODD) if way in ("plain", "class", "breaker") else list(ODD)[:: 1 if way == "outcome" else 7]
    assert replaced(WAYS[way], names) == []


def test_without_the_net_some_are_replaced(no_wait: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a defect in reading reaches the caller."""

    def broken(*_: object) -> Any:
        raise RecursionError

    def unheld(_: object, error: Exception, broken_off: Exception) -> None:
        raise broken_off

    monkeypatch.setattr(call, "failure_from", broken)
    assert replaced(WAYS["plain"], ["deep"]) == [], "the net holds whatever reading does"
    monkeypatch.setattr(call.CallState, "_end_undecided", unheld)
    assert replaced(WAYS["plain"], ["deep"]) == ["deep: RecursionError"]


def test_an_odd_exception_is_retried_as_its_class_says(no_wait: VirtualClock) -> None:
    once = []
    for name, make in ODD.items():
        if name.startswith(("own group", "retry_after = value", "retry-after", "x-ratelimit", "status", "code =")):
            continue  # these say something: not to retry, or to wait for long
        calls = 0

        def work(make: Callable[[], Exception] = make) -> None:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise make()

        try:
            rk.retry(base_delay=0)(work)()
        except Exception:
            once.append(name)
    assert once == []


def test_odd_exceptions_are_read_without_an_error_and_one_odd_attribute_hides_no_other() -> None:
    error = raising("response", RuntimeError())
    error.status_code = 503  # type: ignore[attr-defined]
    error.retry_after = 7  # type: ignore[attr-defined]
    failure = failure_from(error)
    assert (failure.http_status, failure.retry_after, failure.message) == (503, 7.0, TOLD)

    for name, make in ODD.items():
        if "__" not in name and name not in ("Deaf", "Mute", "Endless"):
            read_hints(make())
        classify_failure("", make())


def test_a_deep_group_is_retried_only_if_its_leaf_is(no_wait: VirtualClock) -> None:
    for leaf, attempts in ((ConnectionError(TOLD), 4), (KeyError(TOLD), 1)):
        given = deep_group(3_000, leaf)
        outcome = rk.Retrier(base_delay=0).run(_raiser(given))
        assert (outcome.attempts, outcome.error) == (attempts, given)
        del outcome, given
    gc.collect()


def _raiser(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work
