"""Async retries under Trio and under anyio on both loops: waits, deadlines, limits, breakers, loops, cancellation."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import types
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio
import trio.testing

import reefknot as rk
from reefknot import clock
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import AsyncAlways, AsyncFlaky

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


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


every_loop = pytest.mark.parametrize("run", [in_trio, in_anyio_on_trio, in_anyio_on_asyncio])


@every_loop
def test_a_failure_is_tried_again_and_the_last_error_is_the_callers(run: Run) -> None:
    async def main() -> None:
        fn = AsyncFlaky(ConnectionError, TimeoutError)
        assert await rk.retry(fn)() == "ok"
        with pytest.raises(ConnectionError, match="call 4") as raised:
            await rk.retry(AsyncAlways())()
        assert "all attempts are spent (4 attempts" in raised.value.__notes__[0]

    run(main)


@every_loop
def test_a_wait_lets_other_tasks_run_and_takes_its_time(run: Run) -> None:
    async def main() -> float:
        began = anyio.current_time()
        await rk.Retrier(wait=[2], attempts=3).arun(AsyncAlways())
        return anyio.current_time() - began

    assert 4 <= run(main) < 4.1


@every_loop
def test_an_attempt_that_hangs_is_cut_short_and_tried_again(run: Run) -> None:
    calls = 0

    @rk.retry(attempt_timeout=5, base_delay=0)
    async def hangs_twice() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            with anyio.move_on_after(60):  # a scope of the work's own is entered before anything is awaited
                await anyio.sleep(3600)
        return "third time"

    async def main() -> tuple[str, float]:
        began = anyio.current_time()
        return await hangs_twice(), anyio.current_time() - began

    value, took = run(main)
    assert (value, calls) == ("third time", 3)
    assert 10 <= took < 10.1


@every_loop
def test_a_deadline_cuts_the_attempt_short(run: Run) -> None:
    @rk.retry(deadline=3)
    async def hangs() -> None:
        await anyio.sleep(3600)

    async def main() -> float:
        began = anyio.current_time()
        with pytest.raises(rk.DeadlineExceededError) as raised:
            await hangs()
        assert "would not fit into the deadline" in raised.value.__notes__[0]
        return anyio.current_time() - began

    assert 3 <= run(main) < 3.1


@every_loop
def test_a_limit_that_is_not_reached_changes_nothing(run: Run) -> None:
    @rk.retry(deadline=60, attempt_timeout=30)
    async def work() -> str:
        await anyio.sleep(1)
        return "done"

    assert run(work) == "done"


@every_loop
def test_a_loop_limits_its_blocks(run: Run) -> None:
    async def main() -> list[int]:
        turns = []
        async for attempt in rk.Retrier(attempt_timeout=5, base_delay=0).attempts():
            with attempt:
                turns.append(attempt.number)
                if attempt.number < 3:
                    await anyio.sleep(3600)
        return turns

    assert run(main) == [1, 2, 3]


@every_loop
def test_a_cancelled_call_is_never_tried_again(run: Run) -> None:
    calls = 0

    @rk.retry(on=lambda error: True, deadline=60)
    async def work() -> None:
        nonlocal calls
        calls += 1
        await anyio.sleep(3600)

    async def main() -> None:
        with anyio.move_on_after(1) as scope:
            await work()
        assert scope.cancelled_caught

    run(main)
    assert calls == 1


@every_loop
def test_a_wait_can_be_cancelled(run: Run) -> None:
    async def main() -> None:
        with anyio.move_on_after(1) as scope:
            await rk.Retrier(wait=[30]).acall(AsyncAlways())
        assert scope.cancelled_caught

    run(main)


@every_loop
def test_a_breaker_opens_and_refuses(run: Run) -> None:
    breaker = rk.CircuitBreaker("billing", failures=2)
    fn = AsyncAlways()

    async def main() -> None:
        outcome = await rk.Retrier(attempts=5, base_delay=0, breaker=breaker).arun(fn)
        assert outcome.reason is rk.Reason.BREAKER_OPEN
        with pytest.raises(rk.BreakerOpenError):
            await breaker(fn)()

    run(main)
    assert fn.calls == 2


@every_loop
def test_generators_are_retried_until_their_first_item(run: Run) -> None:
    failures = [ConnectionError(), ConnectionError()]

    @rk.retry(base_delay=0, deadline=60)
    async def items() -> Any:
        await anyio.sleep(1)
        if failures:
            raise failures.pop()
        yield 1
        await anyio.sleep(1)
        yield 2

    async def main() -> list[int]:
        return [item async for item in items()]

    assert run(main) == [1, 2]


@every_loop
def test_async_hooks_are_awaited(run: Run) -> None:
    told: list[int] = []

    async def hook(event: rk.RetryEvent) -> None:
        await anyio.sleep(1)
        told.append(event.attempt)

    async def main() -> None:
        await rk.retry(base_delay=0, on_retry=hook, on_recover=hook)(AsyncFlaky(ConnectionError))()

    run(main)
    assert told == [1, 2]


@every_loop
def test_async_predicates_hooks_and_fallbacks_are_awaited(run: Run) -> None:
    order: list[str] = []

    def named(name: str, answer: object) -> Callable[[Any], Awaitable[Any]]:
        async def function(subject: object) -> object:
            await anyio.sleep(1)
            order.append(name)
            return answer

        return function

    async def main() -> object:
        options: Any = {name: named(name, None) for name in ("before", "after")}
        options |= {"on": named("on", True), "fallback": named("fallback", "cached"), "attempts": 2, "base_delay": 0}
        return await rk.retry(**options)(AsyncAlways())()

    assert run(main) == "cached"
    assert order == [*["before", "on", "after"] * 2, "fallback"]


@pytest.mark.parametrize("kind", [trio.Event, threading.Event])
def test_an_event_ends_a_wait_in_trio(kind: Any) -> None:
    async def main() -> tuple[rk.Outcome[object], float]:
        stop = kind()

        async def ask() -> None:
            await trio.sleep(5)
            stop.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            outcome = await rk.Retrier(stop=stop, wait=[30]).arun(AsyncAlways())
        return outcome, trio.current_time()

    outcome, _ = in_trio(main)
    assert outcome.reason is rk.Reason.STOPPED


@every_loop
def test_an_event_of_anyio_ends_a_wait(run: Run) -> None:
    async def main() -> rk.Reason | None:
        stop = anyio.Event()

        async def ask() -> None:
            await anyio.sleep(5)
            stop.set()

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            outcome = await rk.Retrier(stop=stop, wait=[30]).arun(AsyncAlways())
        return outcome.reason

    assert run(main) is rk.Reason.STOPPED


def test_virtual_time_is_virtual_in_trio_too() -> None:
    async def main() -> VirtualClock:
        with rk.testing.virtual_time() as clock:
            outcome = await rk.Retrier(wait=[1000], max_delay=1000, deadline=1500).arun(AsyncAlways())
            assert outcome.reason is rk.Reason.BUDGET_SPENT
        return clock

    assert trio.run(main).waits == [1000.0]


def test_a_timeout_of_trio_is_a_timeout() -> None:
    async def slow() -> None:
        with trio.fail_after(1):
            await trio.sleep(60)

    async def main() -> rk.Outcome[None]:
        return await rk.Retrier(attempts=2, base_delay=0).arun(slow)

    outcome = in_trio(main)
    assert (outcome.attempts, type(outcome.error)) == (2, trio.TooSlowError)


async def _open_store() -> None:
    async with rk.open_store("memory:"):
        pass


async def _open_audit_log() -> None:
    async with rk.open_audit_log("never-written"):
        pass


async def _connect() -> None:
    async with rk.connect("memory:"):
        pass


async def _manage() -> None:
    await rk.RetryManager(idempotency=_memory_keys()).execute_with_retry("api.request", "get", AsyncFlaky())


async def _manage_keys() -> None:
    rk.IdempotencyManager(_memory_keys())


async def _guard() -> None:
    from reefknot.stores.memory import MemoryStore

    await rk.idempotent(key=lambda: "k", store=MemoryStore(VirtualClock()))(_work)()


async def _work() -> int:
    return 1


async def _ledger() -> None:
    connection = sqlite3.connect(":memory:")
    try:
        async with rk.ledger(connection).once("k"):
            pass
    finally:
        connection.close()


async def _start_worker() -> None:
    await rk.Worker.start(object())  # type: ignore[arg-type]  # refused before it is looked at


async def _start_router() -> None:
    await rk.Router.start(object())  # type: ignore[arg-type]  # refused before it is looked at


def _memory_keys() -> Any:
    from reefknot.stores.memory import MemoryStore

    return MemoryStore(VirtualClock()).idempotency


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (_open_store, "open_store"),
        (_open_audit_log, "open_audit_log"),
        (_connect, "connect"),
        (_manage, "IdempotencyManager"),
        (_manage_keys, "IdempotencyManager"),
        (_guard, "an idempotency key"),
        (_ledger, "ledger"),
        (_start_worker, "Worker"),
        (_start_router, "Router"),
    ],
)
def test_parts_that_run_on_asyncio_alone_refuse_trio_by_name(use: Callable[[], Awaitable[None]], part: str) -> None:
    with pytest.raises(rk.AsyncioOnlyError, match=f"^{part} runs on asyncio, and this is Trio"):
        trio.run(use)


def test_a_manager_made_outside_refuses_trio_when_it_is_used() -> None:
    manager = rk.RetryManager(idempotency=_memory_keys())

    async def main() -> None:
        await manager.execute_with_retry("api.request", "get", AsyncFlaky())

    with pytest.raises(rk.AsyncioOnlyError, match=r"^RetryManager runs on asyncio"):
        trio.run(main)


def test_asyncio_in_a_thread_of_trio_is_asyncio() -> None:
    async def main() -> str:
        return await trio.to_thread.run_sync(lambda: asyncio.run(_slow_success()))

    assert trio.run(main) == "done"


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
def test_an_inner_retry_is_not_multiplied(run: Run) -> None:
    async def main() -> int:
        fn = AsyncAlways()
        with pytest.raises(ConnectionError):
            await rk.retry(attempts=3)(rk.retry(attempts=2)(fn))()
        return fn.calls

    assert run(main) == 2


@rk.retry(deadline=60)
async def _slow_success() -> str:
    await asyncio.sleep(0)
    return "done"


@pytest.mark.parametrize("half", [types.ModuleType("trio"), types.SimpleNamespace(lowlevel=types.ModuleType("l"))])
def test_a_library_that_another_thread_imports_at_the_moment_runs_nothing(
    half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trio", half)
    assert not clock.in_trio()
