"""The loop around a block of code."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import reefknot as rk
from reefknot import clock
from reefknot.retrying.attempts import Attempt
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, Flaky

FAST = rk.RetryPolicy(4, 1, jitter="none")


def loop(retrier: rk.Retrier, body: Callable[[], object]) -> Attempt:
    for attempt in retrier.attempts():
        with attempt:
            attempt.value = body()
    return attempt


async def aloop(retrier: rk.Retrier, body: Callable[[Attempt], Awaitable[object]]) -> Attempt:
    async for attempt in retrier.attempts():
        with attempt:
            attempt.value = await body(attempt)
    return attempt


def test_a_block_is_run_until_it_works(virtual_time: VirtualClock) -> None:
    fn = Flaky(ConnectionError("one"), TimeoutError("two"))
    numbers, seen = [], []
    for attempt in rk.Retrier(FAST).attempts():
        with attempt:
            numbers.append(attempt.number)
            seen.append([str(record.failure) for record in attempt.history])
            attempt.value = fn()
    assert attempt.value == "ok"
    assert numbers == [1, 2, 3]
    assert seen == [[], ["ConnectionError: one"], ["ConnectionError: one", "TimeoutError: two"]]
    assert virtual_time.waits == [1, 2]


def test_the_last_failure_leaves_the_block_as_it_is(virtual_time: VirtualClock) -> None:
    fn = Always()
    with pytest.raises(ConnectionError, match="call 2") as raised:
        loop(rk.Retrier(FAST, attempts=2), fn)
    assert fn.calls == 2
    assert "all attempts are spent" in raised.value.__notes__[0]
    assert raised.value.__context__ is None


def test_break_continue_and_an_error_caught_outside_the_block_end_the_loop() -> None:
    turns = 0
    for attempt in rk.Retrier().attempts():
        with attempt:
            turns += 1
            continue
    for attempt in rk.Retrier().attempts():
        with attempt:
            turns += 1
            break
    for attempt in rk.Retrier().attempts():
        turns += 1
        try:
            with attempt:
                raise KeyError
        except KeyError:
            pass
    assert turns == 3


async def test_a_body_without_the_block_is_misuse_and_does_not_loop_for_ever() -> None:
    turns = 0

    def plain() -> None:
        nonlocal turns
        for _ in rk.Retrier().attempts():
            turns += 1

    with pytest.raises(rk.LoopMisuseError, match="inside `with attempt:`"):
        plain()
    with pytest.raises(rk.LoopMisuseError, match="inside `with attempt:`"):  # noqa: PT012 - a loop is a block
        async for _ in rk.Retrier().attempts():
            turns += 1
    assert turns == 2


def test_an_attempt_entered_twice_and_a_loop_run_twice_are_misuse() -> None:
    attempts = rk.Retrier().attempts()
    for attempt in attempts:
        with attempt:
            pass
        with pytest.raises(rk.LoopMisuseError, match="already used"):
            attempt.__enter__()
    with pytest.raises(rk.LoopMisuseError, match="call attempts"):
        next(iter(attempts))


def test_a_deadline_refuses_a_wait_and_counts_from_the_first_turn_not_from_making_the_loop(
    virtual_time: VirtualClock,
) -> None:
    with pytest.raises(ConnectionError, match="call 2"):
        loop(rk.Retrier(FAST, deadline=2), Always())
    assert virtual_time.waits == [1]

    fn = Flaky(ConnectionError)
    made = rk.Retrier(FAST, deadline=5).attempts()
    virtual_time.advance(60)
    for attempt in made:
        with attempt:
            fn()
    assert fn.calls == 2
    for in_thread in (False, True):
        with pytest.raises(rk.ParameterError, match="async for"):
            next(iter(rk.Retrier(attempt_timeout=1, in_thread=in_thread).attempts()))


async def test_async_for_waits_without_blocking_and_keeps_time_limits() -> None:
    began = []

    async def body(attempt: Attempt) -> str:
        began.append(clock.now())
        if attempt.number < 3:
            await asyncio.sleep(60)
        return "ok"

    attempt = await aloop(rk.Retrier(FAST, on=ConnectionError, attempt_timeout=5), body)
    assert (attempt.value, clock.now(), began) == ("ok", 13.0, [0.0, 6.0, 13.0])


async def fail_and_hang(attempt: Attempt) -> None:
    if attempt.number == 1:
        raise ConnectionError("the first")
    await asyncio.sleep(60)


async def test_async_for_holds_its_deadline() -> None:
    with pytest.raises(rk.DeadlineExceededError) as raised:
        await aloop(rk.Retrier(FAST, deadline=5), fail_and_hang)
    assert "ConnectionError: the first" in raised.value.__notes__[0]
    assert clock.now() == 5.0


async def test_an_outer_cancellation_ends_async_for_at_once_also_while_it_waits() -> None:
    async def fail(attempt: Attempt) -> None:
        turns.append(attempt.number)
        raise ConnectionError

    turns: list[int] = []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(aloop(rk.Retrier(FAST, base_delay=20, max_delay=20), fail), 3)
    assert (clock.now(), turns) == (3.0, [1])


def test_the_loop_asks_and_feeds_its_breaker(virtual_time: VirtualClock) -> None:
    retrier = rk.Retrier(FAST, breaker=rk.CircuitBreaker("billing", failures=2))
    fn = Always()
    for error in (ConnectionError, rk.BreakerOpenError):
        with pytest.raises(error) as raised:
            loop(retrier, fn)
        assert fn.calls == 2
        assert "the circuit breaker is open" in raised.value.__notes__[0]
