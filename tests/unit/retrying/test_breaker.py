"""The circuit breaker: on its own, and as `breaker=`."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncAlways, AsyncFlaky, Flaky

CLOSED, OPEN, HALF_OPEN = rk.BreakerState.CLOSED, rk.BreakerState.OPEN, rk.BreakerState.HALF_OPEN


def opened(failures: int = 2, cooldown: float = 30) -> rk.CircuitBreaker:
    breaker = rk.CircuitBreaker("billing", failures=failures, cooldown=cooldown)
    for _ in range(failures):
        with pytest.raises(ConnectionError):
            breaker.call(Always())
    assert breaker.state is OPEN
    return breaker


# ---- on its own ------------------------------------------------------------------------------------------------------


def test_an_open_breaker_refuses_without_calling_says_when_and_shows_its_state(virtual_time: VirtualClock) -> None:
    breaker, fn = opened(), Flaky()
    virtual_time.advance(10)
    with pytest.raises(rk.BreakerOpenError, match="'billing' is open") as raised:
        breaker.call(fn)
    assert (raised.value.name, raised.value.retry_after, fn.calls) == ("billing", 20, 0)

    breaker = opened()
    seen = breaker.snapshot()
    assert (seen.name, seen.state, seen.opened, seen.retry_after) == ("billing", OPEN, 1, 30)
    assert repr(breaker) == "<CircuitBreaker 'billing' open>"
    with pytest.raises(rk.ParameterTypeError, match="a function"):
        breaker(5)  # type: ignore[arg-type]  # that is the test


def test_call_decorator_and_guard_all_count(virtual_time: VirtualClock) -> None:
    breaker = rk.CircuitBreaker("billing", failures=3)

    def in_guard() -> None:
        with breaker.guard():
            raise ConnectionError

    ways: tuple[Callable[[], object], ...] = (lambda: breaker.call(Always()), breaker(Always()), in_guard)
    for error in (ConnectionError, rk.BreakerOpenError):
        for way in ways:
            with pytest.raises(error):
                way()


async def test_acall_and_an_async_decorated_function_count() -> None:
    breaker = rk.CircuitBreaker("billing", failures=2)
    for fn, error in ((AsyncAlways(), ConnectionError), (AsyncFlaky(), rk.BreakerOpenError)):
        with pytest.raises(error):
            await breaker.acall(fn)
        with pytest.raises(error):
            await breaker(fn)()
    await asyncio.sleep(30)
    assert await breaker.acall(AsyncFlaky()) == "ok"


def test_half_open_lets_one_probe_through_and_its_success_closes_it(virtual_time: VirtualClock) -> None:
    breaker = opened()
    virtual_time.advance(30)
    assert breaker.state is HALF_OPEN

    def probe() -> str:
        with pytest.raises(rk.BreakerOpenError):
            breaker.call(Flaky())
        return "probed"

    assert breaker.call(probe) == "probed"
    assert breaker.state is CLOSED


@pytest.mark.parametrize(
    ("on", "error", "state"),
    [(None, ValueError, CLOSED), (KeyError, ConnectionError, CLOSED), (KeyError, KeyError, OPEN)],
)
def test_a_bug_of_ones_own_opens_nothing_and_what_counts_can_be_said(
    on: type[Exception] | None, error: type[Exception], state: rk.BreakerState, virtual_time: VirtualClock
) -> None:
    breaker = rk.CircuitBreaker("billing", failures=2, on=on)
    for _ in range(2):
        with pytest.raises(error, match="call"):
            breaker.call(Always(error))
    assert breaker.state is state


async def test_a_cancelled_probe_is_released_and_the_next_one_may_go() -> None:
    breaker = rk.CircuitBreaker("billing", failures=1, cooldown=30)
    with pytest.raises(ConnectionError):
        await breaker.acall(AsyncAlways())
    await asyncio.sleep(30)
    probe = asyncio.ensure_future(breaker.acall(asyncio.sleep, 3600))
    await asyncio.sleep(0)
    with pytest.raises(rk.BreakerOpenError):
        await breaker.acall(AsyncFlaky())
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    assert breaker.state is HALF_OPEN
    assert await breaker.acall(AsyncFlaky()) == "ok"


def test_threads_share_one_breaker_and_exactly_one_probes(virtual_time: VirtualClock) -> None:
    """Eight threads ask at once when the cool-down is over."""
    breaker = opened(failures=1)
    virtual_time.advance(30)
    at_once = threading.Barrier(8)
    answers: list[str] = []

    def ask() -> None:
        with rk.testing.virtual_time(start=virtual_time.now()):
            at_once.wait(5)
            try:
                breaker.admit()
                answers.append("probe")
            except rk.BreakerOpenError:
                answers.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(answers) == ["probe"] + ["refused"] * 7


# ---- as breaker= -----------------------------------------------------------------------------------------------------


def test_a_retry_stops_when_its_breaker_opens(virtual_time: VirtualClock) -> None:
    breaker = rk.CircuitBreaker("billing", failures=2)
    fn = Always()
    with pytest.raises(ConnectionError, match="call 2") as raised:
        rk.retry(attempts=9, breaker=breaker)(fn)()
    assert fn.calls == 2
    assert "the circuit breaker is open" in raised.value.__notes__[0]


def test_a_retry_whose_breaker_is_open_does_not_call_and_says_why(virtual_time: VirtualClock) -> None:
    @rk.retry(breaker=opened())
    def items() -> Iterator[int]:
        yield 1

    fn = Flaky()
    outcome = rk.Retrier(breaker=opened(), on=ConnectionError).run(fn)
    assert isinstance(outcome.error, rk.BreakerOpenError)
    assert (outcome.reason, outcome.attempts, fn.calls) == (rk.Reason.BREAKER_OPEN, 1, 0)
    assert virtual_time.waits == []
    with pytest.raises(rk.BreakerOpenError):
        list(items())


async def by_loop(retrier: rk.Retrier) -> None:
    async for attempt in retrier.attempts():
        with attempt:
            await asyncio.sleep(3600)


async def by_arun(retrier: rk.Retrier) -> None:
    (await retrier.arun(asyncio.sleep, 3600)).unwrap()


@pytest.mark.parametrize(
    "way",
    [
        by_loop,
        by_arun,
        lambda one: one.acall(asyncio.sleep, 3600),
        lambda one: rk.retry(policy=one)(asyncio.sleep)(3600),
    ],
    ids=["loop", "arun", "acall", "decorator"],
)
async def test_an_async_attempt_that_runs_out_of_time_counts_against_the_breaker(way: Callable[..., Any]) -> None:
    """Whatever on= names: nobody answered. A guard inside the time limit would only see a cancellation."""
    breaker = rk.CircuitBreaker("slow", failures=2)
    with pytest.raises(rk.AttemptTimeoutError):
        await way(rk.Retrier(on=ConnectionError, attempts=9, attempt_timeout=5, breaker=breaker))
    assert breaker.state is OPEN


async def test_an_outer_cancellation_counts_neither_way() -> None:
    breaker = rk.CircuitBreaker("slow", failures=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rk.retry(breaker=breaker)(asyncio.sleep)(3600), 1)

    assert breaker.state is CLOSED


@pytest.mark.parametrize(
    ("retriers", "breakers", "error", "state"),
    [
        (KeyError, None, KeyError, OPEN),
        (KeyError, None, ConnectionError, CLOSED),
        (KeyError, ConnectionError, KeyError, CLOSED),
        (KeyError, ConnectionError, ConnectionError, OPEN),
        (None, None, ValueError, CLOSED),
    ],
)
def test_the_retriers_on_says_what_counts_unless_the_breaker_does(
    retriers: type[Exception] | None,
    breakers: type[Exception] | None,
    error: type[Exception],
    state: rk.BreakerState,
    virtual_time: VirtualClock,
) -> None:
    breaker = rk.CircuitBreaker("x", failures=1, on=breakers)
    rk.Retrier(on=retriers, breaker=breaker, attempts=1).run(Always(error))
    assert breaker.state is state
