"""
An attempt in a thread of its own, so that somebody can stop waiting for it.

No exception is ever injected into a thread. Work that ran out of time goes on alone, and the error says so.

A time limit around a piece of asynchronous work.

Most awaits that matter for speed never suspend: the coroutine is driven one step by hand, and only if it really waits
is a timer armed. Our own timeout is told from somebody else's cancellation by our own scope, never by the exception's
type: when both happen, the other one wins.

A function, wrapped.

The wrapper is specialised when the function is decorated. A first-try success runs through `try: return fn(…)` and
little else; only a failure builds a `Run` and enters the loop. The loop leaves its `except` block before it waits, so
that no attempt's frame outlives its attempt and no error becomes the context of the next.
"""

from __future__ import annotations

from contextvars import copy_context
from math import inf
from types import coroutine

from reefknot import clock as timing
from reefknot.errors import AttemptTimeoutError, DeadlineExceededError, ParameterError
from reefknot.retrying import plan as exhaustion
from reefknot.retrying.plan import ASYNC_GENERATOR, GENERATOR, Plan, flags_of, is_async

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator
    from types import TracebackType
    from typing import Any, Self, TypeVar

    T = TypeVar("T")
    from collections.abc import AsyncGenerator

    from reefknot.retrying.call import Run

    Function = Callable[..., Any]


class _Slot:
    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        from threading import Event  # loaded by calls that use a thread, not by `import reefknot`

        self.done = Event()
        self.value: Any = None
        self.error: BaseException | None = None


def call_within(
    fn: Callable[..., Any], args: Any, kwargs: Any, *, seconds: float, expired: Callable[[], Exception]
) -> Any:
    """`fn(*args, **kwargs)`, waited for at most `seconds`."""
    from threading import Thread

    slot = _Slot()
    context = copy_context()

    def work() -> None:
        try:
            slot.value = context.run(fn, *args, **kwargs)
        except BaseException as error:  # handed to the waiting thread, which raises it
            slot.error = error
        finally:
            slot.done.set()

    Thread(target=work, name="reefknot-attempt", daemon=True).start()
    if not slot.done.wait(None if seconds == float("inf") else seconds):
        raise expired()
    error, slot.error = slot.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error
    return slot.value


class TimeScope:
    """Cancels the current task's work after `seconds`, and turns that cancellation into `expired()`'s error."""

    __slots__ = ("_before", "_expired", "_fired", "_handle", "_seconds", "_task")

    def __init__(self, seconds: float, expired: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._expired = expired
        self._fired = False
        self._handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._before = 0

    def __enter__(self) -> Self:
        import asyncio

        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a running asyncio task")
        self._task = task
        self._before = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._fire)
        return self

    def _fire(self) -> None:
        self._fired = True
        assert self._task is not None
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None
        assert self._task is not None
        self._handle.cancel()
        if not self._fired:
            return
        outer_cancelled = self._task.uncancel() > self._before
        if kind is not None and kind.__name__ == "CancelledError" and not outer_cancelled:
            raise self._expired() from None


@coroutine
def within(
    work: Coroutine[Any, Any, T], seconds: float, expired: Callable[[], Exception], started: float
) -> Generator[Any, Any, T]:
    """Await `work` for at most `seconds` after `started`; a timer exists only if it suspends."""
    try:
        waiting_for = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    with TimeScope(seconds - (timing.now() - started), expired):
        return (yield from continued(work, waiting_for))


def continued(work: Coroutine[Any, Any, T] | Generator[Any, Any, T], item: Any) -> Generator[Any, Any, T]:
    """Delegate, like `yield from`, to a coroutine or generator whose first item is in hand already."""
    try:
        while True:
            try:
                sent = yield item
            except GeneratorExit:
                work.close()
                raise
            except BaseException as thrown:
                item = work.throw(thrown)
            else:
                item = work.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result


_Run: type[Run] | None = None


def begin(plan: Plan, started: float | None, since: int) -> Run:
    """The run of a call. What it takes to fail is loaded when something fails for the first time."""
    global _Run
    if _Run is None:
        from reefknot.retrying.call import Run

        _Run = Run
    return _Run(plan, started, since)


def wrapped(plan: Plan, fn: Function) -> Function:
    """`fn` under the plan, as the same kind of function."""
    flags = flags_of(fn)
    if flags & ASYNC_GENERATOR:
        return _async_generator(plan, fn)
    if flags & GENERATOR:
        return _generator(plan, fn)
    if is_async(fn):
        return _async(plan, fn)
    refuse_uninterruptible(plan)
    return _sync_threaded(plan, fn) if plan.in_thread else _sync(plan, behind_breaker(plan, fn))


def behind_breaker(plan: Plan, fn: Function) -> Function:
    """`fn` behind the plan's breaker, if any. A time limit goes inside it: running out of time is a failure."""
    if plan.breaker is None:
        return fn
    from reefknot.retrying.breaker import guarded

    return guarded(plan.breaker, fn, plan.judge)


def refuse_uninterruptible(plan: Plan) -> None:
    """A running plain function cannot be stopped, so a limit on its attempts would be a promise not kept."""
    if plan.policy.attempt_timeout != inf and not plan.in_thread:
        raise ParameterError(
            "attempt_timeout",
            plan.policy.attempt_timeout,
            "for a plain function only together with in_thread=True (an async function needs nothing)",
        )


# ---- plain functions -------------------------------------------------------------------------------------------------


def _sync(plan: Plan, fn: Function) -> Function:
    if plan.throttle is not None:
        return _sync_throttled(plan, fn)
    if plan.timed:

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            since, started = exhaustion.so_far, timing.now()
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                run = begin(plan, started, since)
                if run.stops(error):
                    raise
            return resume(run, fn, args, kwargs)

        return timed_call

    def call(*args: Any, **kwargs: Any) -> Any:
        since = exhaustion.so_far
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            run = begin(plan, None, since)
            if run.stops(error):
                raise
        return resume(run, fn, args, kwargs)

    return call


def _sync_throttled(plan: Plan, fn: Function) -> Function:
    throttle = plan.throttle
    assert throttle is not None
    cap, tick = throttle.cap, throttle.tick

    def throttled_call(*args: Any, **kwargs: Any) -> Any:
        since, started = exhaustion.so_far, timing.now()
        if started > throttle.edge:
            throttle.roll(started)
        tick()
        try:
            value = fn(*args, **kwargs)
        except Exception as error:
            run = begin(plan, started, since)
            if run.stops(error):
                raise
        else:
            if throttle.tokens < cap:
                throttle.feed()
            return value
        return resume(run, fn, args, kwargs)

    return throttled_call


def resume(run: Run, fn: Function, args: Any, kwargs: Any) -> Any:
    """Wait, try, and so on, until it works or `run` says stop."""
    while True:
        if run.delay > 0.0:
            timing.sleep(run.delay)
        run.began()
        try:
            value = fn(*args, **kwargs)
        except Exception as error:
            if run.stops(error):
                raise
        else:
            run.succeeded()
            return value


def _sync_threaded(plan: Plan, fn: Function) -> Function:
    def threaded_call(*args: Any, **kwargs: Any) -> Any:
        run = begin(plan, timing.now(), exhaustion.so_far)
        return resume(run, behind_breaker(plan, in_thread(run, fn)), args, kwargs)

    return threaded_call


def in_thread(run: Run, fn: Function) -> Function:
    """One attempt in a thread of its own, waited for as long as its limit or the deadline allows."""

    plan = run.plan

    def attempt(*args: Any, **kwargs: Any) -> Any:
        left = plan.policy.time_budget - run.elapsed
        seconds = min(plan.policy.attempt_timeout, left)
        return call_within(
            fn, args, kwargs, seconds=seconds, expired=lambda: _out_of_time(plan, seconds, left, abandoned=True)
        )

    return attempt


def _out_of_time(plan: Plan, seconds: float, left: float, *, abandoned: bool = False) -> Exception:
    """Which limit was it: the attempt's own, or what was left of the deadline?"""
    if left <= plan.policy.attempt_timeout:
        return DeadlineExceededError(seconds=plan.policy.time_budget, abandoned=abandoned)
    return AttemptTimeoutError(seconds=seconds, abandoned=abandoned)


# ---- async functions -------------------------------------------------------------------------------------------------


def _async(plan: Plan, fn: Function) -> Function:
    if plan.breaker is not None:

        async def guarded_call(*args: Any, **kwargs: Any) -> Any:
            return await aresume(begin(plan, timing.now(), exhaustion.so_far), fn, args, kwargs)

        return guarded_call
    if plan.limited or plan.throttle is not None:
        return _async_limited(plan, fn)
    if plan.timed:

        async def timed_call(*args: Any, **kwargs: Any) -> Any:
            since, started = exhaustion.so_far, timing.now()
            try:
                return await fn(*args, **kwargs)
            except Exception as error:
                run = begin(plan, started, since)
                if run.stops(error):
                    raise
            return await aresume(run, fn, args, kwargs)

        return timed_call

    async def call(*args: Any, **kwargs: Any) -> Any:
        since = exhaustion.so_far
        try:
            return await fn(*args, **kwargs)
        except Exception as error:
            run = begin(plan, None, since)
            if run.stops(error):
                raise
        return await aresume(run, fn, args, kwargs)

    return call


def _async_limited(plan: Plan, fn: Function) -> Function:
    throttle = plan.throttle
    seconds = min(plan.policy.attempt_timeout, plan.policy.time_budget)
    budget = plan.policy.time_budget

    def expired() -> Exception:
        return _out_of_time(plan, seconds, budget)

    async def limited_call(*args: Any, **kwargs: Any) -> Any:
        since, started = exhaustion.so_far, timing.now()
        if throttle is not None:
            if started > throttle.edge:
                throttle.roll(started)
            throttle.tick()
        try:
            value = await (
                fn(*args, **kwargs) if seconds == inf else within(fn(*args, **kwargs), seconds, expired, started)
            )
        except Exception as error:
            run = begin(plan, started, since)
            if run.stops(error):
                raise
        else:
            if throttle is not None and throttle.tokens < throttle.cap:
                throttle.feed()
            return value
        return await aresume(run, fn, args, kwargs)

    return limited_call


async def aresume(run: Run, fn: Function, args: Any, kwargs: Any) -> Any:
    """`resume`, awaited; every attempt runs under what is left."""
    while True:
        if run.delay > 0.0:
            await timing.asleep(run.delay)
        run.began()
        try:
            value = await attempt_within(run, fn, args, kwargs)
        except Exception as error:
            if run.stops(error):
                raise
        else:
            run.succeeded()
            return value


async def attempt_within(run: Run, fn: Function, args: Any, kwargs: Any) -> Any:
    """One attempt behind the breaker, under its limits."""
    breaker = run.plan.breaker
    if breaker is None:
        return await _limited(run, fn(*args, **kwargs))
    with breaker.guard(run.plan.judge):
        return await _limited(run, fn(*args, **kwargs))


def _limited(run: Run, work: Any) -> Any:
    """`work` under the smaller of the attempt's own limit and what is left of the deadline."""
    plan = run.plan
    if not plan.limited:
        return work
    left = plan.policy.time_budget - run.elapsed
    seconds = min(plan.policy.attempt_timeout, left)
    return within(work, seconds, lambda: _out_of_time(plan, seconds, left), timing.now())


# ---- generators: retried only before their first item ----------------------------------------------------------------


def _generator(plan: Plan, fn: Function) -> Function:
    def begin(*args: Any, **kwargs: Any) -> tuple[Any, bool, Any]:
        items = fn(*args, **kwargs)
        try:
            return items, True, next(items)
        except StopIteration as ended:
            return items, False, ended.value

    begun = wrapped(plan, begin)

    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        items, going, item = begun(*args, **kwargs)
        if not going:
            return item
        return (yield from continued(items, item))

    return generate


def _async_generator(plan: Plan, fn: Function) -> Function:
    async def begin(*args: Any, **kwargs: Any) -> tuple[Any, bool, Any]:
        items = fn(*args, **kwargs)
        try:
            return items, True, await anext(items)
        except StopAsyncIteration:
            return items, False, None

    begun = wrapped(plan, begin)

    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        items, going, item = await begun(*args, **kwargs)
        try:
            while going:
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as thrown:
                    item = await items.athrow(thrown)
                else:
                    item = await items.asend(sent)
        except StopAsyncIteration:
            return
        finally:
            await items.aclose()

    return generate
