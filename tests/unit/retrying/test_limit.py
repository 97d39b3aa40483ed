"""`rk.Limit`: waits in virtual time, one limit for all of a name, and none of its waits is an attempt."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import trio

import reefknot as rk
from reefknot import clock
from reefknot.retrying import limit as module
from reefknot.testing import run_virtual, virtual_time


@pytest.fixture(autouse=True)
def _no_limits_yet() -> Iterator[None]:
    module._shared.clear()
    yield
    module._shared.clear()


def test_a_burst_begins_at_once_and_the_rest_as_the_rate_allows() -> None:
    with virtual_time() as time:
        limit = rk.Limit("billing", rate="10/s", burst=3)
        began = []
        for _ in range(6):
            with limit:
                began.append(round(time.now() - 1000.0, 6))

    assert began == [0, 0, 0, 0.1, 0.2, 0.3]


def test_a_second_has_the_rate_and_its_burst_however_long_nothing_was_called() -> None:
    with virtual_time() as time:
        limit = rk.Limit("billing", rate="5/s")  # and so a burst of 5
        time.advance(3600)
        began = []
        for _ in range(20):
            limit.acquire()
            limit.release()
            began.append(time.now())

    assert max(sum(at <= one < at + 0.99 for one in began) for at in began) == 5 + 4


def test_the_same_name_is_the_same_limit_and_other_numbers_are_refused() -> None:
    with virtual_time() as time:
        first, second = rk.Limit("billing", rate="1/s"), rk.Limit("billing", rate="1/s")
        first.acquire()
        second.acquire()
        assert time.waited == 1.0
    assert rk.Limit("billing") is not first
    with pytest.raises(rk.ParameterError, match="billing has 1/s, burst 1"):
        rk.Limit("billing", rate="2/s")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "at least one of rate and running"),
        ({"rate": "10"}, "such as 10/s"),
        ({"rate": "10/d"}, "such as 10/s"),
        ({"rate": "0/s"}, "such as 10/s"),
        ({"rate": 10}, "such as 10/s"),
        ({"rate": "1000000/s"}, "at most 100000/s"),
        ({"burst": 3, "running": 1}, "only together with rate"),
        ({"rate": "1/s", "burst": 0}, "a whole number"),
        ({"running": 0}, "a whole number"),
        ({"running": 1.5}, "a whole number"),
        ({"running": 1, "timeout": -1}, "a number of seconds"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(rk.ParameterError, match=named):
        rk.Limit("x", **given)


def test_a_wait_that_is_too_long_is_refused_before_it_begins_and_takes_no_moment() -> None:
    with virtual_time() as time:
        limit = rk.Limit("billing", rate="1/s")
        assert limit.try_acquire()
        assert not limit.try_acquire()
        with pytest.raises(rk.LimitReachedError, match="billing") as caught:
            limit.acquire(timeout=0.5)
        assert caught.value.retry_after == 1.0
        assert time.waited == 0
        assert limit.try_acquire(timeout=1)
        assert time.waited == 1.0


def test_async_calls_wait_side_by_side_in_the_order_they_came() -> None:
    limit = rk.Limit("billing", rate="10/s", burst=1)
    began: list[tuple[int, float]] = []

    @limit
    async def call(number: int) -> None:
        began.append((number, round(clock.now(), 6)))

    async def main() -> None:
        await asyncio.gather(*(call(number) for number in range(5)))

    run_virtual(main())
    start = began[0][1]
    assert [(number, round(at - start, 3)) for number, at in began] == [(n, n / 10) for n in range(5)]


def test_no_more_run_at_the_same_time_than_may() -> None:
    limit = rk.Limit("billing", running=2)
    running, most = 0, 0

    async def call() -> None:
        nonlocal running, most
        async with limit:
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1

    async def main() -> float:
        began = clock.now()
        await asyncio.gather(*(call() for _ in range(6)))
        return clock.now() - began

    assert run_virtual(main()) == pytest.approx(3, abs=0.2)
    assert most == 2


def test_a_call_that_is_cancelled_while_it_waits_spends_nothing() -> None:
    async def main() -> float:
        limit = rk.Limit("billing", rate="1/s", running=5)
        await limit.aacquire()
        waiting = asyncio.create_task(limit.aacquire())
        await asyncio.sleep(0.5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        began = clock.now()
        await limit.aacquire()
        assert module._shared["billing"].running == 2
        return clock.now() - began

    assert run_virtual(main()) == pytest.approx(0.5)


def test_trio_waits_too() -> None:
    limit = rk.Limit("billing", rate="1000/s", burst=1)
    done = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(call, number)

    async def call(number: int) -> None:
        async with limit:
            done.append(number)

    trio.run(main)
    assert sorted(done) == [0, 1, 2, 3, 4]


def test_threads_share_it() -> None:
    limit, go = rk.Limit("billing", running=3), Event()
    running: list[int] = []
    most: list[int] = []

    def call() -> None:
        with limit:
            running.append(1)
            most.append(len(running))
            if len(most) == 3:
                go.set()
            go.wait(10)
            running.pop()

    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(call) for _ in range(12)]:
            one.result(30)
    assert max(most) == 3


def test_each_attempt_of_a_retry_waits_and_no_wait_is_an_attempt() -> None:
    with virtual_time() as time:
        began: list[float] = []

        @rk.retry(attempts=3, base_delay=0, limit=rk.Limit("billing", rate="1/s"), on=ConnectionError)
        def call() -> str:
            began.append(time.now() - 1000.0)
            if len(began) < 3:
                raise ConnectionError
            return "paid"

        assert call() == "paid"
    assert began == [0, 1, 2]


def test_a_wait_that_outlives_the_deadline_ends_the_call() -> None:
    with virtual_time() as time:
        limit = rk.Limit("billing", rate="1/min")
        outcomes = [
            rk.Retrier(attempts=5, deadline=10, limit=limit, on=Exception).run(lambda: "paid") for _ in range(2)
        ]
        assert time.waited == 0
    assert outcomes[0].ok
    assert outcomes[1].reason is rk.Reason.BUDGET_SPENT
    assert isinstance(outcomes[1].error, rk.LimitReachedError)


def test_the_time_of_an_attempt_begins_after_its_wait() -> None:
    async def main() -> str:
        limit = rk.Limit("billing", rate="1/s")

        @rk.retry(attempts=1, attempt_timeout=0.5, limit=limit)
        async def call() -> str:
            await asyncio.sleep(0.4)
            return "paid"

        await call()
        return await call()

    assert run_virtual(main()) == "paid"


def test_a_call_that_a_limit_did_not_let_begin_says_nothing_to_the_breaker() -> None:
    with virtual_time():
        breaker, limit = rk.CircuitBreaker("billing", failures=1, on=Exception), rk.Limit("billing", rate="1/min")
        retrier = rk.Retrier(attempts=1, deadline=1, breaker=breaker, limit=limit)
        assert retrier.call(lambda: 1) == 1
        with pytest.raises(rk.LimitReachedError):
            retrier.call(lambda: 1)
        assert breaker.state is rk.BreakerState.CLOSED


def test_a_loop_says_where_its_limit_goes() -> None:
    with pytest.raises(rk.ParameterError, match="with limit"):
        rk.Retrier(limit=rk.Limit("billing", rate="1/s")).attempts()
