"""Every option of a retry under Trio, and under anyio on both loops: what an event loop may change, and must not."""

import gc
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
import trio

import reefknot as rk
from tests.unit.retrying.flaky import AsyncAlways, AsyncAnswers, AsyncFlaky
from tests.unit.retrying.test_trio import every_loop, in_trio, time_of

Fallback = Callable[[rk.RetryEvent], object]


async def a_minute(error: object) -> timedelta:
    """An async predicate that takes a second for its answer."""
    await anyio.sleep(1)
    return timedelta(seconds=60)


async def reason_of(event: rk.RetryEvent) -> object:
    await anyio.sleep(1)
    return event.reason


@pytest.mark.parametrize("fallback", [lambda event: event.reason, reason_of], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attempts": 2, "base_delay": 0}, rk.Reason.ATTEMPTS_SPENT),
        ({"deadline": timedelta(seconds=3), "wait": [4]}, rk.Reason.BUDGET_SPENT),
        ({"attempts": 9, "base_delay": 0, "breaker": 2}, rk.Reason.BREAKER_OPEN),
    ],
    ids=["attempts", "deadline", "breaker"],
)
@every_loop
async def test_a_fallback_answers_for_every_reason_to_give_up(
    fallback: Fallback, options: dict[str, Any], reason: rk.Reason
) -> None:
    given = dict(options)
    if "breaker" in given:
        given["breaker"] = rk.CircuitBreaker("billing", failures=given["breaker"])
    assert await rk.retry(fallback=fallback, **given)(AsyncAlways())() is reason


@every_loop
async def test_a_fallback_answers_for_an_attempt_that_hangs_and_for_a_stop() -> None:
    stop = anyio.Event()
    stopped = rk.retry(stop=stop, wait=[30], fallback="stopped")(AsyncAlways())
    hangs: Any = rk.retry(attempt_timeout=timedelta(seconds=5), attempts=2, fallback="slow")(anyio.sleep)
    got: list[object] = [await hangs(3600)]

    async def call() -> None:
        got.append(await stopped())

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.sleep(1)
        stop.set()
    assert got == ["slow", "stopped"]


@pytest.mark.parametrize("is_async", [False, True])
@every_loop
async def test_predicates_refuse_errors_and_results(is_async: bool) -> None:
    def has(word: str) -> Any:
        async def predicate(given: object) -> bool:
            await anyio.sleep(1)
            return word in str(given)

        return predicate if is_async else lambda given: word in str(given)

    options: Any = {"on": has("busy"), "attempts": 3, "base_delay": 0}
    broken = AsyncFlaky(RuntimeError("broken"))
    assert await rk.retry(**options)(AsyncFlaky(RuntimeError("busy")))() == "ok"
    outcome = await rk.Retrier(**options).arun(broken)
    assert (outcome.reason, broken.calls) == (rk.Reason.NOT_RETRYABLE, 1)

    pending: Any = {"on_result": has("pending"), "attempts": 3, "base_delay": 0}
    assert await rk.retry(**pending)(AsyncAnswers("pending", "pending", "done"))() == "done"
    with pytest.raises(rk.RetryError) as raised:
        await rk.retry(raise_result=True, **pending)(AsyncAnswers("pending"))()
    assert (raised.value.value, len(raised.value.attempts)) == ("pending", 3)


@every_loop
async def test_an_async_predicate_answers_with_the_seconds_to_wait() -> None:
    took = await time_of(rk.Retrier(on=a_minute, attempts=2, jitter="none").arun(AsyncAlways()))
    assert 62 <= took < 69, "the predicate is asked twice, for a second each; a hint is spread"


class BusyError(ConnectionError):
    """A refusal that says when to come again."""

    free_in = timedelta(seconds=7)


@pytest.mark.parametrize(
    ("wait", "took"),
    [
        (lambda attempt: attempt.error.free_in, 14),
        (lambda attempt: attempt * 10, 30),
        ([timedelta(seconds=1), timedelta(minutes=0.25)], 16),
    ],
)
@every_loop
async def test_a_wait_is_a_function_of_the_error_or_a_list_of_timedeltas(wait: Any, took: float) -> None:
    assert round(await time_of(rk.Retrier(wait=wait, attempts=3).arun(AsyncAlways(BusyError))), 1) == took


@every_loop
async def test_a_breaker_lets_one_probe_through_and_a_cancelled_probe_does_not_keep_its_place() -> None:
    with rk.testing.virtual_time() as clock:
        breaker = rk.CircuitBreaker("billing", failures=1, cooldown=timedelta(seconds=30))
        with pytest.raises(ConnectionError):
            await rk.retry(breaker=breaker)(AsyncAlways())()
        assert breaker.state == "open"
        clock.advance(30)
        with anyio.move_on_after(0.01) as scope:
            await rk.retry(breaker=breaker)(anyio.sleep_forever)()
        assert scope.cancelled_caught
        assert await rk.retry(breaker=breaker)(AsyncFlaky())() == "ok", "the next one is the probe"


# ---- loops -----------------------------------------------------------------------------------------------------------


async def loop(retrier: rk.Retrier, body: Callable[[], Awaitable[object]]) -> None:
    async for attempt in retrier.attempts():
        with attempt:
            await body()


@every_loop
async def test_a_loop_waits_refuses_results_and_ends_with_its_deadline() -> None:
    began = anyio.current_time()
    async for attempt in rk.Retrier(wait=[timedelta(seconds=2)], on_result=lambda value: value < 3).attempts():
        with attempt:
            attempt.value = attempt.number
    assert attempt.value == 3
    assert anyio.current_time() - began == pytest.approx(4, abs=0.1)
    with pytest.raises(rk.DeadlineExceededError):
        await loop(rk.Retrier(deadline=3), anyio.sleep_forever)


@every_loop
async def test_a_loop_ends_at_an_open_breaker_and_at_a_stop() -> None:
    breaker, fn = rk.CircuitBreaker("billing", failures=2), AsyncAlways()
    with pytest.raises(ConnectionError):
        await loop(rk.Retrier(attempts=9, wait=[1], breaker=breaker), fn)
    assert (fn.calls, breaker.state) == (2, "open")

    stop = anyio.Event()

    async def fail_and_stop() -> None:
        stop.set()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await loop(rk.Retrier(stop=stop, wait=[30]), fail_and_stop)


async def leave_by_return() -> None:
    async for attempt in rk.Retrier().attempts():
        with attempt:
            return


@every_loop
async def test_a_loop_may_be_left_at_any_time() -> None:
    """Warnings are errors here, and Trio warns of an async generator that is left to the garbage collector."""
    await leave_by_return()
    gc.collect()
    async for attempt in rk.Retrier().attempts():
        with attempt:
            break
    gc.collect()
    with pytest.raises(ConnectionError):
        await loop(rk.Retrier(attempts=1), AsyncAlways())
    gc.collect()
    for retrier, body in ((rk.Retrier(), anyio.sleep_forever), (rk.Retrier(wait=[30]), AsyncAlways())):
        with anyio.move_on_after(1):
            await loop(retrier, body)
        gc.collect()


# ---- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["before", "after", "on_retry", "on", "on_result", "fallback", "stop", "breaker"])
@every_loop
async def test_a_scope_cancels_whatever_a_retry_awaits_and_there_is_no_further_attempt(option: str) -> None:
    fn: Any = AsyncAlways() if option != "on_result" else AsyncAnswers(None)

    async def forever(given: object) -> None:
        await anyio.sleep_forever()

    given: Any = {"stop": anyio.Event, "breaker": lambda: rk.CircuitBreaker("billing")}
    options: Any = {option: given[option]() if option in given else forever}
    began = anyio.current_time()
    with anyio.move_on_after(5) as scope:
        await rk.retry(wait=[30], attempts=1 if option == "fallback" else 4, **options)(fn)()
    assert scope.cancelled_caught
    assert anyio.current_time() - began == pytest.approx(5, abs=0.1)
    assert fn.calls == (0 if option == "before" else 1)


def test_a_deadline_of_trio_around_all_attempts_is_the_callers_error() -> None:
    async def main() -> None:
        with pytest.raises(trio.TooSlowError), trio.fail_after(5):
            await rk.retry(wait=[2], attempts=9, fallback="never")(AsyncAlways())()

    in_trio(main)


def test_a_nursery_that_is_cancelled_ends_the_waits_of_all_its_retries() -> None:
    calls = [AsyncAlways() for _ in range(20)]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for fn in calls:
                nursery.start_soon(rk.retry(wait=[30])(fn))
            await trio.sleep(1)
            nursery.cancel_scope.cancel()

    in_trio(main)
    assert {fn.calls for fn in calls} == {1}
