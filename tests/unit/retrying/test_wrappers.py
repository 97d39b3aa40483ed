"""The wrapped function: what is tried again, what is kept alive, and what passes through."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reefknot as rk
from reefknot import clock
from reefknot.retrying.types import RetryKeywords
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncFlaky, Flaky


class Thing:
    """Something an attempt holds in its hands."""


class Refused(ConnectionError):
    """An error that a weak reference can watch; the built-in ones cannot be."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only reference counts free memory while the test runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- what is tried again ---------------------------------------------------------------------------------------------


def looped(retrier: rk.Retrier, fn: Callable[[], object]) -> None:
    for attempt in retrier.attempts():
        with attempt:
            fn()


WAYS: dict[str, Callable[[rk.Retrier, Flaky], object]] = {
    "decorated": lambda retrier, fn: rk.retry(policy=retrier)(fn)(),
    "deadline": lambda retrier, fn: rk.retry(policy=retrier, deadline=9)(fn)(),
    "throttled": lambda retrier, fn: rk.retry(policy=retrier, throttle=True)(fn)(),
    "thread": lambda retrier, fn: rk.retry(policy=retrier, in_thread=True)(fn)(),
    "run": lambda retrier, fn: retrier.run(fn),
    "loop": looped,
}
ASYNC_WAYS: dict[str, Callable[[rk.Retrier, AsyncFlaky], Any]] = {
    "decorated": lambda retrier, fn: rk.retry(policy=retrier)(fn)(),
    "deadline": lambda retrier, fn: rk.retry(policy=retrier, deadline=5)(fn)(),
    "arun": lambda retrier, fn: retrier.arun(fn),
}


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_control_flow_is_never_retried(kind: type[BaseException]) -> None:
    asked: list[Exception] = []
    retrier = rk.Retrier(on=asked.append)

    async def ended(way: Callable[[rk.Retrier, AsyncFlaky], Any], fn: AsyncFlaky) -> type[BaseException] | None:
        try:
            await way(retrier, fn)
        except BaseException as error:  # the loop itself cannot show all of them
            return type(error)
        return None

    for name, way in WAYS.items():
        fn = Flaky(kind("stop"))
        with pytest.raises(kind):
            way(retrier, fn)
        assert (fn.calls, asked) == (1, []), name
    for name, away in ASYNC_WAYS.items():
        afn = AsyncFlaky(kind("stop"))
        assert rk.testing.run_virtual(ended(away, afn)) is kind, name
        assert (afn.calls, asked) == (1, []), name


def test_a_zero_wait_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeps(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s")

    monkeypatch.setattr(clock, "sleep", sleeps)
    assert rk.retry(base_delay=0, max_delay=0)(Flaky(ConnectionError))() == "ok"


@pytest.mark.parametrize(("deadline", "waits"), [(5, [1, 2]), (3, [1])])
def test_a_wait_that_would_reach_the_deadline_is_refused_before_sleeping(
    deadline: float, waits: list[float], virtual_time: VirtualClock
) -> None:
    """Waits of 1, 2, 4 s under a deadline of 5 s: 1 + 2 fit, 4 more do not; 3 s would end exactly at 3 s."""
    fn = Always()
    with pytest.raises(ConnectionError) as raised:
        rk.retry(attempts=10, deadline=deadline, base_delay=1, jitter="none")(fn)()
    assert (fn.calls, virtual_time.waits) == (len(waits) + 1, waits)
    assert "would not fit into the deadline" in raised.value.__notes__[0]


def test_a_plain_function_is_never_interrupted_nor_tried_again_past_its_deadline(virtual_time: VirtualClock) -> None:
    for fn in (Flaky(value="late, but here"), Always()):

        @rk.retry(deadline=5, base_delay=0, max_delay=0)
        def slow(fn: Flaky = fn) -> object:
            virtual_time.advance(60)
            return fn()

        if isinstance(fn, Always):
            with pytest.raises(ConnectionError, match="call 1"):
                slow()
        else:
            assert slow() == "late, but here"
        assert fn.calls == 1


def test_an_attempt_timeout_on_a_plain_function_is_refused_at_decoration() -> None:
    with pytest.raises(rk.ParameterError, match="in_thread=True") as raised:
        rk.retry(attempt_timeout=1)(Flaky())
    assert raised.value.parameter == "attempt_timeout"
    with pytest.raises(rk.ParameterError, match="in_thread=True"):
        rk.Retrier(attempt_timeout=1).run(Flaky())


def test_arguments_reach_every_attempt(no_wait: VirtualClock) -> None:
    fn = Flaky(ConnectionError, ConnectionError)
    assert rk.retry(fn)(7, word="x") == "ok"
    assert fn.given == [((7,), {"word": "x"})] * 3


def test_a_throttle_that_is_empty_ends_retries(virtual_time: VirtualClock) -> None:
    """Busy and down: after its ten tokens, one call is one attempt."""
    fn = Always()
    reasons: list[rk.Reason | None] = []
    give_up: Any = lambda event: reasons.append(event.reason)  # noqa: E731 - as one writes it
    call = rk.retry(throttle=rk.RetryThrottle(), base_delay=0, max_delay=0, attempts=2, on_give_up=give_up)(fn)
    for _ in range(200):
        with pytest.raises(ConnectionError):
            call()
    assert rk.Reason.THROTTLED in reasons
    assert fn.calls < 300  # 400 without a throttle


def test_successes_feed_the_throttle_which_also_counts_async_calls(virtual_time: VirtualClock) -> None:
    throttle = rk.RetryThrottle(min_executions=0, per_second=0)
    rk.retry(throttle=throttle)(Flaky(ConnectionError))()
    spent = throttle.tokens
    well = rk.retry(throttle=throttle)(Flaky())
    for _ in range(5):
        well()
    assert spent < throttle.tokens == pytest.approx(min(10, spent + 0.5))

    throttle = rk.RetryThrottle(min_executions=0, per_second=0)
    rk.testing.run_virtual(rk.retry(throttle=throttle)(AsyncFlaky(ConnectionError))())
    assert throttle.executions == 2
    assert throttle.tokens == pytest.approx(9.1)


# ---- shared by many --------------------------------------------------------------------------------------------------


async def test_one_retrier_serves_a_thousand_tasks_at_once() -> None:
    retrier = rk.Retrier(on=ConnectionError, attempts=4, deadline=3600)
    attempts = [0] * 1000

    async def work(n: int) -> int:
        attempts[n] += 1
        await asyncio.sleep(n % 7)
        if attempts[n] <= n % 4:
            raise ConnectionError(str(n))
        return n

    assert await asyncio.gather(*(retrier.acall(work, n) for n in range(1000))) == list(range(1000))
    assert attempts == [n % 4 + 1 for n in range(1000)]


def test_one_decorated_function_serves_threads_at_once() -> None:
    attempts = [0] * 200

    @rk.retry(base_delay=0, max_delay=0)
    def work(n: int) -> int:
        attempts[n] += 1
        if attempts[n] <= n % 4:
            raise ConnectionError(str(n))
        return n

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == list(range(200))
    assert attempts == [n % 4 + 1 for n in range(200)]


# ---- what is kept alive ----------------------------------------------------------------------------------------------


def watched(fail: int) -> tuple[Callable[[], str], list[weakref.ref[Thing]]]:
    """Work that holds a thing in a local while it fails."""
    held: list[weakref.ref[Thing]] = []

    def work() -> str:
        thing = Thing()
        held.append(weakref.ref(thing))
        if len(held) <= fail:
            raise Refused("with a thing in hand")
        return "ok"

    return work, held


def alive(held: list[weakref.ref[Thing]]) -> int:
    return sum(ref() is not None for ref in held)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("options", [{}, {"deadline": 3600}, {"throttle": True}, {"in_thread": True}])
def test_no_attempts_locals_are_alive_during_the_wait(options: RetryKeywords, monkeypatch: pytest.MonkeyPatch) -> None:
    work, held = watched(2)
    during: list[int] = []
    monkeypatch.setattr(clock, "sleep", lambda seconds: during.append(alive(held)))

    assert rk.retry(policy=rk.Retrier(**options), jitter="none")(work)() == "ok"
    assert during == [0, 0]


@pytest.mark.usefixtures("uncollected")
def test_control_a_loop_that_waits_inside_its_except_block_keeps_them_alive() -> None:
    work, held = watched(1)
    during: list[int] = []
    try:
        work()
    except ConnectionError:
        during.append(alive(held))
    assert during == [1]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("options", [{}, {"deadline": 3600}])
async def test_no_async_attempts_locals_are_alive_during_the_wait(options: RetryKeywords) -> None:
    work, held = watched(2)
    during: list[int] = []

    async def awork() -> str:
        await asyncio.sleep(0)
        return work()

    task = asyncio.ensure_future(rk.retry(policy=rk.Retrier(**options), base_delay=10, jitter="none")(awork)())
    await asyncio.sleep(5)
    during.append(alive(held))
    await task
    assert during == [0]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("fail", [0, 2, 9])
def test_neither_success_nor_giving_up_leaves_a_reference_cycle(fail: int, no_wait: VirtualClock) -> None:
    """Nothing but reference counts frees the things, and the error that was handed out."""
    work, held = watched(fail)
    gone: list[weakref.ref[BaseException]] = []
    try:
        rk.retry(work)()
    except ConnectionError as error:
        gone.append(weakref.ref(error))
    assert alive(held) == 0
    assert [ref() for ref in gone] == [None] * (fail == 9)


async def by_loop(retrier: rk.Retrier) -> None:
    async for attempt in retrier.attempts():
        with attempt:
            await asyncio.sleep(60)


async def by_decorator(retrier: rk.Retrier) -> None:
    await rk.retry(policy=retrier)(asyncio.sleep)(60)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("way", [by_loop, by_decorator])
async def test_an_async_deadline_leaves_no_reference_cycle(way: Callable[[rk.Retrier], Any]) -> None:
    gone: list[weakref.ref[BaseException]] = []
    try:
        await way(rk.Retrier(deadline=5))
    except rk.DeadlineExceededError as error:
        gone.append(weakref.ref(error))
    assert [ref() for ref in gone] == [None]


def test_the_original_exception_comes_back_with_its_traceback_and_none_becomes_the_context_of_the_next(
    no_wait: VirtualClock,
) -> None:
    contexts: list[BaseException | None] = []
    fn = Always()

    def on(error: Exception) -> bool:
        contexts.append(error.__context__)
        return True

    def deep() -> None:
        fn()

    with pytest.raises(ConnectionError, match="call 4") as raised:
        rk.retry(on=on)(lambda: deep())()
    assert contexts == [None] * 4
    assert (raised.value.__context__, raised.value.__cause__) == (None, None)
    assert [entry.name for entry in raised.traceback][-2:] == ["deep", "__call__"]


# ---- generators ------------------------------------------------------------------------------------------------------


def test_a_generator_is_retried_before_its_first_item_and_not_after(no_wait: VirtualClock) -> None:
    begun = 0

    @rk.retry
    def items(*, midway: bool = False) -> Generator[int, None, None]:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ConnectionError
        yield 1
        if midway:
            raise ConnectionError("midway")

    assert list(items()) == [1]
    assert begun == 3
    with pytest.raises(ConnectionError, match="midway"):
        list(items(midway=True))
    assert begun == 4


@rk.retry
def echo(log: list[object]) -> Generator[object, object, str]:
    """Tells what comes in."""
    said: object = "ready"
    try:
        while said != "end":
            try:
                said = yield said
            except KeyError as error:
                said = f"threw {error.args[0]}"
        return "the value"
    finally:
        log.append("closed")


def test_a_generator_hears_send_and_throw_and_gives_its_return_value() -> None:
    log: list[object] = []
    items = echo(log)
    assert next(items) == "ready"
    assert items.send("a") == "a"
    assert items.throw(KeyError("k")) == "threw k"
    with pytest.raises(StopIteration) as ended:
        items.send("end")
    assert ended.value.value == "the value"
    assert log == ["closed"]
    other = echo(log)
    next(other)
    other.close()
    assert log == ["closed", "closed"], "closing a generator closes the wrapped one"


def test_an_empty_generator_begins_when_it_is_asked_and_ends_with_its_value() -> None:
    begun: list[int] = []

    @rk.retry
    def nothing() -> Generator[int, None, str]:
        begun.append(1)
        yield from ()
        return "none at all"

    items = nothing()
    assert begun == []
    with pytest.raises(StopIteration, match="none at all"):
        next(items)


async def test_an_async_generator_is_retried_before_its_first_item_and_not_after() -> None:
    begun = 0

    @rk.retry(deadline=100)
    async def items() -> AsyncGenerator[int, None]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(1)
        if begun < 3:
            raise ConnectionError
        yield 1
        raise ConnectionError("midway")

    @rk.retry
    async def nothing() -> AsyncGenerator[int, None]:
        for item in list[int]():
            yield item

    kept = items()
    got = [await anext(kept)]
    with pytest.raises(ConnectionError, match="midway"):
        await anext(kept)
    assert (got, begun) == ([1], 3)
    assert [item async for item in nothing()] == []


async def test_an_async_generator_hears_asend_athrow_and_aclose() -> None:
    log: list[object] = []

    @rk.retry
    async def talk() -> AsyncGenerator[object, object]:
        said: object = "ready"
        try:
            while said != "end":
                try:
                    said = yield said
                except (KeyError, asyncio.CancelledError) as error:
                    said = f"threw {type(error).__name__}"
        finally:
            log.append("closed")

    items = talk()
    assert await anext(items) == "ready"
    assert await items.asend("a") == "a"
    assert await items.athrow(KeyError("k")) == "threw KeyError"
    assert await items.athrow(asyncio.CancelledError()) == "threw CancelledError"
    with pytest.raises(StopAsyncIteration):
        await items.asend("end")
    assert log == ["closed"]
    other = talk()
    await anext(other)
    await other.aclose()
    assert log == ["closed", "closed"]
