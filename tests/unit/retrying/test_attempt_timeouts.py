"""Time limits of attempts: cancelled in async code, abandoned in threads, and told from a cancellation from outside."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest

import reefknot as rk
from reefknot import clock
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.timeouts import Timeout
from tests.unit.retrying.flaky import AsyncAlways, AsyncFlaky, AsyncHanging, Flaky


def always(error: Exception) -> bool:
    return True


async def hang() -> None:
    await asyncio.Event().wait()


async def test_a_deadline_ends_an_attempt_that_is_running_and_tells_the_failure_before_it() -> None:
    fails = AsyncFlaky(ConnectionError("refused by 10.0.0.1"))

    @rk.retry(deadline=10, base_delay=1, jitter="none")
    async def fetch() -> None:
        await fails()
        await asyncio.sleep(60)

    with pytest.raises(rk.DeadlineExceededError) as raised:
        await fetch()
    assert any("ConnectionError: refused by 10.0.0.1" in note for note in raised.value.__notes__)
    assert clock.now() == pytest.approx(10)


@pytest.mark.parametrize("on", [None, TimeoutError, always])
async def test_a_deadline_that_passed_gets_no_further_attempt_whatever_is_worth_it(on: Any) -> None:
    fn = AsyncHanging()
    with pytest.raises(rk.DeadlineExceededError) as raised:
        await rk.retry(on=on, deadline=2, base_delay=0, max_delay=0, attempts=10)(fn)()
    assert fn.calls == 1
    assert "would not fit into the deadline" in raised.value.__notes__[-1]


async def test_the_first_stretch_before_an_await_counts_too() -> None:
    """An attempt that computes for 4 of its 5 seconds has 1 left to wait in."""

    @rk.retry(attempts=1, deadline=5)
    async def fetch() -> None:
        clock.sleep(4)
        await asyncio.sleep(60)

    with pytest.raises(rk.DeadlineExceededError):
        await fetch()

    assert clock.now() == pytest.approx(5)


async def test_an_await_that_never_suspends_arms_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []
    loop = asyncio.get_running_loop()
    real = loop.call_later

    def call_later(delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        armed.append(delay)
        return real(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", call_later)
    limited = rk.retry(deadline=7)
    assert await limited(AsyncFlaky())() == "ok"
    assert armed == []
    await limited(asyncio.sleep)(0)
    assert len(armed) == 1


@pytest.mark.parametrize("kind", [AsyncAlways, AsyncHanging])
async def test_wait_for_ends_a_retry_that_is_waiting_and_an_attempt_that_is_running(kind: type[AsyncFlaky]) -> None:
    fn, retrier = kind(), rk.Retrier(on=always, attempts=9, deadline=1000, wait=[100], max_delay=100)
    with pytest.raises(TimeoutError) as raised:
        await asyncio.wait_for(retrier.acall(fn), 3)
    assert not isinstance(raised.value, rk.ReefknotError)
    assert (clock.now(), fn.calls) == (3, 1)


@pytest.mark.parametrize("outer_first", [True, False])
async def test_when_our_limit_and_an_outer_cancellation_meet_the_outer_one_wins(outer_first: bool) -> None:
    fn = AsyncHanging()
    task = asyncio.ensure_future(rk.retry(on=always, attempt_timeout=5, attempts=4)(fn)())
    for _ in range(0 if outer_first else 2):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_at(5.0, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (task.cancelled(), fn.calls) == (True, 1)


async def test_an_outer_time_limit_at_the_same_moment_is_the_outer_ones() -> None:
    """asyncio.timeout and ours both fire at 5 s: asyncio's own bookkeeping still comes out right."""
    with pytest.raises(TimeoutError) as raised:
        async with asyncio.timeout(5):
            await rk.retry(on=always, attempt_timeout=5)(hang)()
    assert not isinstance(raised.value, rk.ReefknotError)
    task = asyncio.current_task()
    assert task is not None

    assert task.cancelling() == 0


async def cancels_itself() -> None:
    await asyncio.sleep(1)
    raise asyncio.CancelledError("its own")


async def finishes_anyway() -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "finished anyway"
    return "never"


async def fails_on_the_way_out() -> None:
    try:
        await asyncio.sleep(60)
    finally:
        raise ValueError("on the way out")


@pytest.mark.parametrize(
    ("work", "ending"),
    [
        (hang, "AttemptTimeoutError"),
        (cancels_itself, "CancelledError: its own"),  # the limit did not expire, whatever the type says
        (finishes_anyway, "finished anyway"),
        (fails_on_the_way_out, "ValueError: on the way out"),
    ],
)
async def test_a_limited_attempt_ends_as_its_work_does_and_leaves_no_cancellation_behind(
    work: Callable[[], Awaitable[object]], ending: str
) -> None:
    try:
        ended = str(await rk.retry(on=always, attempts=1, attempt_timeout=5)(work)())
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    task = asyncio.current_task()
    assert task is not None
    await asyncio.sleep(1)
    assert task.cancelling() == 0

    assert ended.startswith(ending)
    with pytest.raises(rk.AttemptTimeoutError, match="within 5 s") as raised:
        await rk.retry(attempts=2, attempt_timeout=5)(asyncio.sleep)(3600)
    assert (raised.value.seconds, raised.value.abandoned) == (5, False), "that of the last attempt is the caller's"


async def test_closing_a_suspended_limited_coroutine_closes_the_work() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    task = asyncio.ensure_future(rk.retry(deadline=100)(work)())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]


async def test_a_time_limit_outside_a_task_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def outside() -> None:
        with Timeout(1.0, RuntimeError):
            pass

    asyncio.get_running_loop().call_soon(outside)
    await asyncio.sleep(1)
    assert "RuntimeError: a time limit needs a running asyncio task" in caplog.text


async def test_a_limit_passes_values_and_errors_of_many_awaits_through() -> None:
    async def raises(n: int) -> None:
        await asyncio.sleep(0)
        raise KeyError(n)

    async def work() -> list[int]:
        got = []
        for n in range(3):
            got.append(await asyncio.sleep(1, n))
            try:
                await raises(n)
            except KeyError as error:
                got.append(error.args[0])
        return got

    assert await rk.retry(attempt_timeout=100)(work)() == [0, 0, 1, 1, 2, 2]


# ---- threads ---------------------------------------------------------------------------------------------------------


word: ContextVar[str] = ContextVar("word", default="outside")


class Stuck:
    """Work that hangs until it is let go."""

    def __init__(self, times: int = 99) -> None:
        self.let_go = threading.Event()
        self.ended = threading.Semaphore(0)
        self.calls = 0
        self.times = times

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            self.let_go.wait(10)
            self.ended.release()
        return "ok"


def test_an_attempt_in_a_thread_that_takes_too_long_is_abandoned_and_says_so(virtual_time: VirtualClock) -> None:
    stuck = Stuck()
    with pytest.raises(rk.AttemptTimeoutError, match="abandoned and may still be running") as raised:
        rk.retry(attempts=2, attempt_timeout=0.01, in_thread=True)(stuck)()
    assert raised.value.abandoned
    assert stuck.calls == 2
    assert stuck.ended.acquire(blocking=False) is False  # nobody interrupted it

    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)
    assert stuck.ended.acquire(timeout=5)


def test_a_later_attempt_in_a_thread_may_work_and_the_deadline_ends_the_waiting_for_one() -> None:
    stuck = Stuck(times=1)
    assert rk.retry(on=ConnectionError, attempt_timeout=0.01, base_delay=0, in_thread=True)(stuck)() == "ok"
    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)
    stuck = Stuck()
    with pytest.raises(rk.DeadlineExceededError, match="abandoned") as raised:
        rk.retry(attempts=9, deadline=0.02, in_thread=True)(stuck)()
    assert (stuck.calls, raised.value.abandoned) == (1, True)
    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)


def test_the_thread_has_the_callers_context_and_its_error_is_the_callers_with_its_traceback(
    no_wait: VirtualClock,
) -> None:
    original = KeyError("from the thread")

    def deep() -> None:
        raise original

    with pytest.raises(KeyError) as raised:
        rk.retry(in_thread=True)(lambda: deep())()
    assert raised.value is original
    assert raised.traceback[-1].name == "deep"
    word.set("inside")
    assert rk.retry(in_thread=True)(word.get)() == "inside"
    word.set("outside")


def test_run_and_call_use_the_thread_too(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(in_thread=True)
    here = threading.get_ident()
    assert here not in (retrier.call(threading.get_ident), retrier.run(threading.get_ident).value)
    assert retrier.run(Flaky(ConnectionError)).attempts == 2


def test_an_abandoned_attempt_counts_against_the_breaker() -> None:
    """Nobody waits for the thread to say so itself."""
    stuck = Stuck()
    breaker = rk.CircuitBreaker("slow", failures=1)
    with pytest.raises(rk.AttemptTimeoutError):
        rk.retry(on=ConnectionError, attempt_timeout=0.01, in_thread=True, breaker=breaker)(stuck)()
    assert breaker.state is rk.BreakerState.OPEN
    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)
