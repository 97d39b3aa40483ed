"""`fallback=`: the value that a caller gets when the retrier gives up."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, Answers, AsyncAlways, AsyncAnswers, AsyncFlaky, Flaky, async_ways, ways


def reason_of(event: rk.RetryEvent) -> str:
    return f"{event.reason} after {event.attempt}: {event.error}"


async def areason_of(event: rk.RetryEvent) -> str:
    await asyncio.sleep(0)
    return reason_of(event)


@pytest.mark.parametrize("value", [None, 0, "cached", [1], {"a": 1}])
def test_the_value_is_returned_when_all_attempts_are_spent_and_not_before(value: object, no_wait: VirtualClock) -> None:
    for call in ways(fallback=value):
        fn = Always()
        assert (call(fn) is value, fn.calls) == (True, 4)
        assert [call(Flaky()), call(Flaky(ConnectionError()))] == ["ok", "ok"]
    for acall in async_ways(fallback=value):
        assert rk.testing.run_virtual(acall(AsyncAlways())) is value
        assert rk.testing.run_virtual(acall(AsyncFlaky(ConnectionError()))) == "ok"


def test_a_function_gets_the_last_event_and_answers(no_wait: VirtualClock) -> None:
    for call in ways(fallback=reason_of, attempts=2):
        assert call(Always()) == "attempts_spent after 2: call 2"
    for fallback in (reason_of, areason_of):
        for acall in async_ways(fallback=fallback, attempts=2):
            assert rk.testing.run_virtual(acall(AsyncAlways())) == "attempts_spent after 2: call 2"


def test_an_error_that_is_not_retried_is_raised(no_wait: VirtualClock) -> None:
    """A fallback answers for what keeps failing; a bug is no outage."""
    for call in ways(fallback="fallback"):
        with pytest.raises(ValueError, match="a bug"):
            call(Flaky(ValueError("a bug")))
    for acall in async_ways(fallback="fallback"):
        with pytest.raises(ValueError, match="a bug"):
            rk.testing.run_virtual(acall(AsyncFlaky(ConnectionError(), ValueError("a bug"))))
    with pytest.raises(ConnectionError):
        rk.retry(strategy="none", fallback="fallback")(Always())()


async def test_a_call_that_is_cancelled_is_cancelled() -> None:
    async def work(hangs: float) -> None:
        await asyncio.sleep(hangs)
        raise ConnectionError

    for hangs in (30.0, 0.0):  # in its attempt, and in its wait
        task = asyncio.create_task(rk.Retrier(fallback="fallback", wait=[30]).acall(work, hangs))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(KeyboardInterrupt):
        rk.retry(fallback="fallback")(Flaky(KeyboardInterrupt()))()


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def opened() -> rk.CircuitBreaker:
    breaker = rk.CircuitBreaker("x", failures=1)
    with pytest.raises(ConnectionError):
        breaker.call(Always())
    return breaker


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attempts": 1}, "attempts_spent"),
        ({"deadline": 5, "wait": [9]}, "budget_spent"),
        ({"stop": set_event()}, "stopped"),
        ({"breaker": opened()}, "breaker_open"),
    ],
)
def test_every_reason_to_give_up_has_its_fallback(options: Any, reason: str, virtual_time: VirtualClock) -> None:
    assert rk.retry(fallback=lambda event: event.reason, **options)(Always())() == reason


def test_a_long_hint_a_stopped_wait_and_an_attempt_that_hangs_have_it_too(virtual_time: VirtualClock) -> None:
    assert rk.retry(fallback=reason_of)(Flaky(rk.RetryAfter(9999, "far")))() == "hint_too_long after 1: far"
    stop = threading.Event()
    retrier = rk.Retrier(stop=stop, wait=[30], on_retry=lambda event: stop.set(), fallback=reason_of)
    assert retrier.call(Always()) == "stopped after 1: call 1"
    sleep: Any = rk.retry(deadline=2, fallback="in time")(asyncio.sleep)
    assert rk.testing.run_virtual(sleep(60, "too late")) == "in time"


def test_an_inner_retry_that_gave_up_has_it_if_the_outer_one_retries_its_error(no_wait: VirtualClock) -> None:
    inner = rk.retry(attempts=2)(Always())
    for on in (ConnectionError, None):
        assert rk.retry(on=on, fallback="fallback")(inner)() == "fallback"
    with pytest.raises(ConnectionError):
        rk.retry(on=KeyError, fallback="fallback")(inner)()


def test_a_refused_result_is_replaced(no_wait: VirtualClock) -> None:
    for more in ({}, {"raise_result": True}):
        options: Any = {"on_result": lambda value: value == "bad", "attempts": 2, **more}
        for call in ways(fallback=lambda event: ("instead of", event.value), **options):
            assert call(Answers("bad")) == ("instead of", "bad")
        for acall in async_ways(fallback="instead", **options):
            assert rk.testing.run_virtual(acall(AsyncAnswers("bad"))) == "instead"


def test_a_result_that_is_refused_goes_to_the_caller_of_hooks_without_a_fallback(no_wait: VirtualClock) -> None:
    options: Any = {"on_result": lambda value: value == "bad", "attempts": 2, "before": print}
    assert rk.retry(**options)(Answers("bad"))() == "bad"
    assert rk.testing.run_virtual(rk.retry(**options)(AsyncAnswers("bad"))()) == "bad"
    with pytest.raises(rk.RetryError):
        rk.retry(raise_result=True, **options)(Answers("bad"))()


def test_a_fallback_that_raises_raises_to_the_caller(no_wait: VirtualClock) -> None:
    def unavailable(event: rk.RetryEvent) -> None:
        raise LookupError("nothing cached") from event.error

    def same(event: rk.RetryEvent) -> None:
        assert event.error is not None
        raise event.error

    for call in ways(fallback=unavailable):
        with pytest.raises(LookupError, match="nothing cached") as raised:
            call(Always())
        assert isinstance(raised.value.__cause__, ConnectionError)
    with pytest.raises(ConnectionError, match="call 4"):
        rk.retry(fallback="x")(Always()).using(fallback=same)()
    outcome = rk.Retrier(fallback=unavailable).run(Always())
    assert (outcome.ok, outcome.fell_back, type(outcome.error)) == (False, False, LookupError)


def test_an_outcome_shows_the_fallback_and_the_error_that_it_replaces(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(fallback="cached", attempts=2)
    for outcome in (retrier.run(Always()), rk.testing.run_virtual(retrier.arun(AsyncAlways()))):
        assert (outcome.ok, outcome.fell_back, outcome.value, outcome.unwrap()) == (False, True, "cached", "cached")
        assert (str(outcome.error), outcome.attempts, outcome.reason) == ("call 2", 2, rk.Reason.ATTEMPTS_SPENT)
        assert len(outcome.history) == 2
    assert retrier.run(Flaky()).fell_back is False
    assert retrier.run(Flaky(ValueError())).fell_back is False


def test_the_error_that_is_replaced_is_logged_counted_and_given_to_the_hook(
    caplog: pytest.LogCaptureFixture, no_wait: VirtualClock
) -> None:
    """Nothing else would show it: the caller does not get the exception."""
    events: list[rk.RetryEvent] = []
    fn = rk.retry(fallback=0, attempts=2, on_give_up=events.append, name="prices")(Always())
    assert fn() == 0
    assert caplog.messages[-1] == (
        "prices: attempt 2 failed with ConnectionError: call 2; gave up: all attempts are spent; "
        "the caller gets the fallback"
    )
    assert caplog.records[-1].levelname == "WARNING"
    assert (fn.statistics.give_ups, len(events)) == (1, 1)


def test_a_fallback_that_cannot_be_used_is_refused() -> None:
    async def later(event: rk.RetryEvent) -> int:
        return 1

    def items() -> Iterator[int]:
        yield 1

    with pytest.raises(rk.ParameterTypeError, match=r"^fallback=.*write fallback=lambda event: list\(\)"):
        rk.retry(fallback=list)
    with pytest.raises(rk.ParameterTypeError, match=r"^fallback=<function.*a plain function here"):
        rk.retry(fallback=later)(Flaky())
    with pytest.raises(rk.ParameterError, match=r"^fallback=.*a generator has no one value"):
        rk.retry(fallback=1)(items)
    with pytest.raises(rk.ParameterError, match=r"^fallback=1 .*a loop has no value"):
        rk.Retrier(fallback=1).attempts()
    with pytest.raises(rk.ParameterTypeError, match="perhaps you meant fallback="):
        rk.retry(retry_error_callback=print)  # type: ignore[call-overload]  # that is the test


# ---- functions in the wrong place ------------------------------------------------------------------------------------


def test_a_function_in_the_wrong_place_is_told_what_to_do() -> None:
    fn = Flaky()
    retrier = rk.Retrier(on=Exception, breaker=rk.CircuitBreaker("x"))
    for use in (retrier.acall, retrier.arun):
        with pytest.raises(rk.ParameterTypeError, match=r"^fn=.*use call or run for a plain one"):
            rk.testing.run_virtual(use(fn))  # type: ignore[arg-type]  # that is the test
    assert fn.calls == 2

    awaited = AsyncFlaky(ConnectionError())
    for plain in (rk.Retrier().call, rk.Retrier().run):
        with pytest.raises(rk.ParameterTypeError, match=r"^fn=.*outside of the retry: use acall"):
            plain(lambda: awaited())
    assert awaited.calls == 0


async def test_async_with_attempt_says_what_to_write() -> None:
    with pytest.raises(rk.LoopMisuseError, match="write `with attempt:`, without async"):  # noqa: PT012 - a loop
        async for attempt in rk.Retrier().attempts():
            async with attempt:  # type: ignore[attr-defined]  # that is the test
                pass
