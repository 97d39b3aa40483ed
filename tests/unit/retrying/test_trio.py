"""Async retries under Trio and under anyio on both loops: waits, deadlines, limits, breakers, loops, cancellation."""

import asyncio
import inspect
import sqlite3
import sys
import threading
import types
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, closing
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import anyio
import pytest
import trio
import trio.testing

import reefknot as rk
from reefknot import clock
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from tests.unit.retrying.flaky import AsyncAlways, AsyncFlaky

Run = Callable[[Callable[[], Awaitable[Any]]], Any]
Story = Callable[..., Awaitable[None]]


def in_trio(main: Callable[[], Awaitable[Any]]) -> Any:
    """`main` in Trio, in time that jumps to the next timer."""
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def in_anyio_on_trio(main: Callable[[], Awaitable[Any]]) -> Any:
    options = {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return anyio.run(main, backend="trio", backend_options=options)


def in_anyio_on_asyncio(main: Callable[[], Awaitable[Any]]) -> Any:
    async def on_asyncio() -> Any:
        return await main()

    return rk.testing.run_virtual(on_asyncio())


def every_loop(story: Story) -> Callable[..., None]:
    """Run a story in Trio, and under anyio on both loops."""

    @wraps(story)
    def test(run: Run, **given: Any) -> None:
        run(partial(story, **given))

    signature = inspect.signature(story)
    first = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    del test.__wrapped__  # pytest would look there for fixtures
    made: Callable[..., None] = pytest.mark.parametrize("run", [in_trio, in_anyio_on_trio, in_anyio_on_asyncio])(test)
    return made


async def time_of(awaitable: Awaitable[Any]) -> float:
    began = anyio.current_time()
    await awaitable
    return anyio.current_time() - began


@every_loop
async def test_a_failure_is_tried_again_and_the_last_error_is_the_callers() -> None:
    assert await rk.retry(AsyncFlaky(ConnectionError, TimeoutError))() == "ok"
    with pytest.raises(ConnectionError, match="call 4") as raised:
        await rk.retry(AsyncAlways())()
    assert "all attempts are spent (4 attempts" in raised.value.__notes__[0]
    assert await time_of(rk.Retrier(wait=[2], attempts=3).arun(AsyncAlways())) == pytest.approx(4, abs=0.05)


@every_loop
async def test_an_attempt_that_hangs_is_cut_short_and_tried_again() -> None:
    calls = 0

    @rk.retry(attempt_timeout=5, base_delay=0)
    async def hangs_twice() -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            with anyio.move_on_after(60):  # a scope of the work's own is entered before anything is awaited
                await anyio.sleep(3600)
        await anyio.sleep(1)  # a limit that is not reached changes nothing

    assert 11 <= await time_of(hangs_twice()) < 11.1
    assert calls == 3


@every_loop
async def test_a_deadline_cuts_the_attempt_short() -> None:
    for deadline in (3, timedelta(seconds=3)):
        began = anyio.current_time()
        with pytest.raises(rk.DeadlineExceededError) as raised:
            await rk.retry(deadline=deadline)(anyio.sleep)(3600)
        assert "would not fit into the deadline" in raised.value.__notes__[0]
        assert anyio.current_time() - began == pytest.approx(3, abs=0.1)


@every_loop
async def test_a_loop_limits_its_blocks() -> None:
    turns = []
    async for attempt in rk.Retrier(attempt_timeout=5, base_delay=0).attempts():
        with attempt:
            turns.append(attempt.number)
            if attempt.number < 3:
                await anyio.sleep(3600)
    assert turns == [1, 2, 3]


@every_loop
async def test_a_cancelled_call_is_never_tried_again() -> None:
    calls: list[float] = []

    @rk.retry(on=lambda error: True, deadline=60)
    async def work() -> None:
        calls.append(anyio.current_time())
        await anyio.sleep(3600)

    with anyio.move_on_after(1) as scope:
        await work()
    assert scope.cancelled_caught
    assert len(calls) == 1


@every_loop
async def test_a_breaker_opens_and_refuses() -> None:
    breaker, fn = rk.CircuitBreaker("billing", failures=2), AsyncAlways()
    outcome = await rk.Retrier(attempts=5, base_delay=0, breaker=breaker).arun(fn)
    assert outcome.reason is rk.Reason.BREAKER_OPEN
    with pytest.raises(rk.BreakerOpenError):
        await breaker(fn)()
    assert fn.calls == 2


@every_loop
async def test_generators_are_retried_until_their_first_item() -> None:
    failures = [ConnectionError(), ConnectionError()]

    @rk.retry(base_delay=0, deadline=60)
    async def items() -> Any:
        await anyio.sleep(1)
        if failures:
            raise failures.pop()
        yield 1
        await anyio.sleep(1)
        yield 2

    assert [item async for item in items()] == [1, 2]


@every_loop
async def test_async_predicates_hooks_and_fallbacks_are_awaited() -> None:
    order: list[str] = []

    def named(name: str, answer: object = None) -> Callable[[Any], Awaitable[Any]]:
        async def function(subject: object) -> object:
            await anyio.sleep(1)
            order.append(name)
            return answer

        return function

    hooks: Any = {name: named(name) for name in ("before", "after", "on_retry", "on_recover", "on_give_up")}
    hooks |= {"on": named("on", True), "fallback": named("fallback", "cached"), "attempts": 2, "base_delay": 0}
    assert await rk.retry(**hooks)(AsyncAlways())() == "cached"
    assert await rk.retry(**hooks)(AsyncFlaky(ConnectionError))() == "ok"
    failed_once = ["before", "on", "after", "on_retry", "before"]
    assert order == [*failed_once, "on", "after", "on_give_up", "fallback", *failed_once, "after", "on_recover"]


@pytest.mark.parametrize(
    ("run", "event"),
    [
        *((in_trio, event) for event in (trio.Event, threading.Event)),
        *((run, anyio.Event) for run in (in_trio, in_anyio_on_trio, in_anyio_on_asyncio)),
    ],
)
def test_an_event_ends_a_wait(run: Run, event: Any) -> None:
    async def main() -> rk.Reason | None:
        stop = event()

        async def ask() -> None:
            await anyio.sleep(5)
            stop.set()

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            outcome = await rk.Retrier(stop=stop, wait=[30]).arun(AsyncAlways())
        return outcome.reason

    assert run(main) is rk.Reason.STOPPED


def test_virtual_time_is_virtual_in_trio_and_its_timeout_a_timeout() -> None:
    async def main() -> VirtualClock:
        with rk.testing.virtual_time() as clock:
            outcome = await rk.Retrier(wait=[1000], max_delay=1000, deadline=1500).arun(AsyncAlways())
            assert outcome.reason is rk.Reason.BUDGET_SPENT
        return clock

    assert trio.run(main).waits == [1000.0]

    async def slow() -> None:
        with trio.fail_after(1):
            await trio.sleep(60)

    outcome = in_trio(lambda: rk.Retrier(attempts=2, base_delay=0).arun(slow))
    assert (outcome.attempts, type(outcome.error)) == (2, trio.TooSlowError)


def _memory() -> MemoryStore:
    return MemoryStore(VirtualClock())


async def _entered(opening: AbstractAsyncContextManager[object]) -> None:
    async with opening:
        pass


async def _manage(manager: rk.RetryManager | None = None) -> None:
    manager = manager or rk.RetryManager(idempotency=_memory().idempotency)
    await manager.execute_with_retry("api.request", "get", AsyncFlaky())


async def _manage_keys() -> None:
    rk.IdempotencyManager(_memory().idempotency)


async def _guard() -> None:
    await rk.idempotent(key=lambda: "k", store=_memory())(AsyncFlaky())()


async def _ledger() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        await _entered(rk.ledger(connection).once("k"))


async def _start(part: Any) -> None:
    await part.start(object())  # refused before it is looked at


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (lambda: _entered(rk.open_store("memory:")), "open_store"),
        (lambda: _entered(rk.open_audit_log("never-written")), "open_audit_log"),
        (lambda: _entered(rk.connect("memory:")), "connect"),
        (_manage, "IdempotencyManager"),
        (_manage_keys, "IdempotencyManager"),
        (_guard, "an idempotency key"),
        (_ledger, "ledger"),
        (lambda: _start(rk.Worker), "Worker"),
        (lambda: _start(rk.Router), "Router"),
    ],
)
def test_parts_that_run_on_asyncio_alone_refuse_trio_by_name(use: Callable[[], Awaitable[None]], part: str) -> None:
    with pytest.raises(rk.AsyncioOnlyError, match=f"^{part} runs on asyncio, and this is Trio"):
        trio.run(use)


def test_a_manager_made_outside_refuses_trio_when_it_is_used() -> None:
    manager = rk.RetryManager(idempotency=_memory().idempotency)
    with pytest.raises(rk.AsyncioOnlyError, match=r"^RetryManager runs on asyncio"):
        trio.run(_manage, manager)


def test_asyncio_in_a_thread_of_trio_is_asyncio() -> None:
    def with_asyncio() -> None:
        asyncio.run(rk.retry(deadline=60)(asyncio.sleep)(0))

    trio.run(trio.to_thread.run_sync, with_asyncio)


def test_tasks_that_share_an_exception_have_all_of_their_attempts() -> None:
    shared, spent = ConnectionError("shared"), {}

    async def caller(attempts: int) -> None:
        fn = AsyncFlaky(*[shared] * 9)
        with pytest.raises(ConnectionError):
            await rk.retry(attempts=attempts, base_delay=1.0 / attempts, jitter="none")(fn)()
        spent[attempts] = fn.calls

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for attempts in (2, 5, 3):
                nursery.start_soon(caller, attempts)

    in_trio(main)
    assert spent == {2: 2, 3: 3, 5: 5}


@every_loop
async def test_an_inner_retry_is_not_multiplied() -> None:
    fn = AsyncAlways()
    with pytest.raises(ConnectionError):
        await rk.retry(attempts=3)(rk.retry(attempts=2)(fn))()
    assert fn.calls == 2


@pytest.mark.parametrize("half", [types.ModuleType("trio"), types.SimpleNamespace(lowlevel=types.ModuleType("l"))])
def test_a_library_that_another_thread_imports_at_the_moment_runs_nothing(
    half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trio", half)
    assert not clock.in_trio()
