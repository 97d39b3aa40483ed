"""The loop around a block of code."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

import reefknot as rk
from reefknot import clock
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, Flaky

FAST = rk.RetryPolicy(4, 1, jitter="none")


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

    def loop() -> None:
        for attempt in rk.Retrier(FAST, attempts=2).attempts():
            with attempt:
                fn()

    with pytest.raises(ConnectionError, match="call 2") as raised:
        loop()
    assert fn.calls == 2
    assert "all attempts are spent" in raised.value.__notes__[0]
    assert raised.value.__context__ is None


def test_control_flow_leaves_the_block_at_once() -> None:
    fn = Flaky(KeyboardInterrupt)

    def loop() -> None:
        for attempt in rk.Retrier(on=lambda error: True).attempts():
            with attempt:
                fn()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert fn.calls == 1


def test_break_and_continue_inside_the_block_end_the_loop() -> None:
    turns = 0
    for attempt in rk.Retrier().attempts():
        with attempt:
            turns += 1
            continue
    for attempt in rk.Retrier().attempts():
        with attempt:
            turns += 1
            break
    assert turns == 2


def test_an_error_caught_outside_the_block_ends_the_loop() -> None:
    turns = 0
    for attempt in rk.Retrier().attempts():
        turns += 1
        try:
            with attempt:
                raise KeyError
        except KeyError:
            pass
    assert turns == 1


def test_a_body_without_the_block_is_misuse_and_does_not_loop_for_ever() -> None:
    turns = 0

    def loop() -> None:
        nonlocal turns
        for _ in rk.Retrier().attempts():
            turns += 1

    with pytest.raises(rk.LoopMisuseError, match="inside `with attempt:`"):
        loop()
    assert turns == 1


def test_an_attempt_entered_twice_is_misuse() -> None:
    for attempt in rk.Retrier().attempts():
        with attempt:
            pass
        with pytest.raises(rk.LoopMisuseError, match="already used"):
            attempt.__enter__()


def test_a_loop_run_twice_is_misuse() -> None:
    loop = rk.Retrier().attempts()
    for attempt in loop:
        with attempt:
            pass
    with pytest.raises(rk.LoopMisuseError, match="call attempts"):
        next(iter(loop))


def test_a_deadline_refuses_a_wait_in_the_loop(virtual_time: VirtualClock) -> None:
    fn = Always()

    def loop() -> None:
        for attempt in rk.Retrier(FAST, deadline=2).attempts():
            with attempt:
                fn()

    with pytest.raises(ConnectionError, match="call 2"):
        loop()
    assert virtual_time.waits == [1]


def test_the_deadline_counts_from_the_first_turn_not_from_making_the_loop(virtual_time: VirtualClock) -> None:
    fn = Flaky(ConnectionError)
    loop = rk.Retrier(FAST, deadline=5).attempts()
    virtual_time.advance(60)
    for attempt in loop:
        with attempt:
            fn()
    assert fn.calls == 2


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_attempt_timeout_in_a_plain_loop_is_refused(in_thread: bool) -> None:
    with pytest.raises(rk.ParameterError, match="async for"):
        next(iter(rk.Retrier(attempt_timeout=1, in_thread=in_thread).attempts()))


async def test_async_for_waits_without_blocking_and_keeps_time_limits() -> None:
    began = []
    async for attempt in rk.Retrier(FAST, on=ConnectionError, attempt_timeout=5).attempts():
        with attempt:
            began.append(clock.now())
            if attempt.number < 3:
                await asyncio.sleep(60)
            attempt.value = "ok"

    assert (attempt.value, clock.now(), began) == ("ok", 13.0, [0.0, 6.0, 13.0])


async def test_async_for_holds_its_deadline() -> None:
    async def loop() -> None:
        async for attempt in rk.Retrier(FAST, deadline=5).attempts():
            with attempt:
                if attempt.number == 1:
                    raise ConnectionError("the first")
                await asyncio.sleep(60)

    with pytest.raises(rk.DeadlineExceededError) as raised:
        await loop()
    assert "ConnectionError: the first" in raised.value.__notes__[0]

    assert clock.now() == 5.0


def test_a_deadline_in_async_for_leaves_no_reference_cycle() -> None:
    gone: list[weakref.ref[BaseException]] = []

    async def main() -> None:
        try:
            async for attempt in rk.Retrier(deadline=5).attempts():
                with attempt:
                    await asyncio.sleep(60)
        except rk.DeadlineExceededError as error:
            gone.append(weakref.ref(error))

    gc.collect()
    gc.disable()
    try:
        rk.testing.run_virtual(main())
        assert [ref() for ref in gone] == [None]
    finally:
        gc.enable()


async def test_an_outer_cancellation_ends_async_for_at_once_also_while_it_waits() -> None:
    turns = 0

    async def loop() -> None:
        nonlocal turns
        async for attempt in rk.Retrier(FAST, base_delay=20, max_delay=20).attempts():
            with attempt:
                turns += 1
                raise ConnectionError

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loop(), 3)

    assert (clock.now(), turns) == (3.0, 1)


def test_misuse_is_told_in_async_for_too() -> None:
    async def main() -> None:
        async for _ in rk.Retrier().attempts():
            pass

    with pytest.raises(rk.LoopMisuseError, match="inside `with attempt:`"):
        rk.testing.run_virtual(main())


def test_the_loop_asks_and_feeds_its_breaker(virtual_time: VirtualClock) -> None:
    breaker = rk.CircuitBreaker("billing", failures=2)
    fn = Always()

    def loop() -> None:
        for attempt in rk.Retrier(FAST, breaker=breaker).attempts():
            with attempt:
                fn()

    with pytest.raises(ConnectionError) as raised:
        loop()
    assert fn.calls == 2
    assert "the circuit breaker is open" in raised.value.__notes__[0]

    with pytest.raises(rk.BreakerOpenError) as refused:
        loop()
    assert fn.calls == 2
    assert "the circuit breaker is open" in refused.value.__notes__[0]
