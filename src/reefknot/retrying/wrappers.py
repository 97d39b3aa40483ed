"""
Wrappers: a function under a plan, as the same kind of function, with time limits on its attempts.

The wrapper is specialised when the function is decorated. A first-try success runs through `try: return fn(…)` and
little else, with keywords only if there are any, which spares a dictionary. Only a failure builds a `CallState` and
enters the retry loop. The loop leaves its `except` block before it waits, so that no attempt's frame outlives its
attempt and no error becomes the context of the next.

An async attempt is cancelled when its time is over. Most awaits that matter for speed never suspend: the coroutine is
driven one step by hand, and a timer is armed only if it really waits. A plain attempt with a time limit runs in a
thread. No exception is ever injected into it: work that ran out of time continues in the background, and the error says
so.
"""

from __future__ import annotations

from contextvars import copy_context
from math import inf
from sys import modules
from types import coroutine

from reefknot import clock
from reefknot.errors import AttemptTimeoutError, DeadlineExceededError, ParameterError, ParameterTypeError, RetryError
from reefknot.retrying.exhaustion import current_scope, exhaustions, scope_of_caller
from reefknot.retrying.functions import (
    ASYNC_GENERATOR,
    GENERATOR,
    RejectedResult,
    code_flags,
    continued,
    is_async,
    rejected,
)
from reefknot.retrying.plan import NO_FALLBACK, Plan
from reefknot.runtime.tracing import tracing

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Any, TypeVar

    from reefknot.retrying.call import CallState
    from reefknot.runtime.event_loops import TrioTimeout
    from reefknot.runtime.timeouts import Timeout

    Function = Callable[..., Any]
    T = TypeVar("T")

_time_limit: Callable[[float, Callable[[], Exception]], Timeout | TrioTimeout] | None = None


def _load_and_begin(plan: Plan, started: float | None, since: int, args: Any, kwargs: Any) -> CallState:
    """`begin` until something fails for the first time: loads the code of failing calls, whose own takes its place."""
    global begin
    from reefknot.retrying.call import begin_call

    begin = begin_call
    return begin_call(plan, started, since, args, kwargs)


begin: Callable[[Plan, float | None, int, Any, Any], CallState] = _load_and_begin
"""State of a call that begins."""


def wrapped(plan: Plan, fn: Function) -> Function:
    """`fn` under the plan, as the same kind of function."""
    flags = code_flags(fn)
    if flags & (ASYNC_GENERATOR | GENERATOR):
        if plan.result_rule is not None:
            raise ParameterError("on_result", fn, "for a function that returns; a generator is retried by its errors")
        if plan.fallback is not NO_FALLBACK:
            raise ParameterError("fallback", fn, "for a function that returns; a generator has no one value to replace")
        from reefknot.retrying.generators import afirst_item, agenerating, first_item, generating

        if flags & ASYNC_GENERATOR:
            return agenerating(wrapped(plan, afirst_item(fn)))
        return generating(wrapped(plan, first_item(fn)))
    if is_async(fn):
        if plan.is_watched:
            return _async_watched(plan, fn)
        return _async(plan, fn) if plan.result_rule is None else _async_with_result(plan, fn)
    refuse_in_plain_code(plan)
    if plan.is_watched:
        return _sync_watched(plan, fn)
    if plan.result_rule is not None:
        return _sync_with_result(plan, fn)
    return _sync_threaded(plan, fn) if plan.in_thread else _sync(plan, behind_breaker(plan, fn))


def behind_breaker(plan: Plan, fn: Function) -> Function:
    """`fn` behind the plan's breaker, if any. A time limit goes inside it: running out of time is a failure."""
    if plan.breaker is None:
        return fn
    from reefknot.retrying.breaker import guarded

    return guarded(plan.breaker, fn, plan.rule)


def refuse_in_plain_code(plan: Plan) -> None:
    """Refuse what plain code cannot do: await a function or an event, or cut an attempt short without a thread."""
    option = plan.async_option
    if option is not None:
        accepted = "a plain function here; only an `async def` under retry awaits its hooks, predicates and fallback"
        raise ParameterTypeError(option, plan.function_of(option), accepted)
    if plan.stop is not None and is_async(plan.stop.wait):
        raise ParameterTypeError("stop", plan.stop, "a threading.Event here; only async code can wait for this one")
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
    statistics = plan.statistics
    if plan.timed:

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            statistics.calls += 1
            since, started = exhaustions.count, clock.now()
            if tracing.tracer is not None:
                return resume(begin(plan, started, since, args, kwargs), fn, args, kwargs)
            try:
                return fn(*args, **kwargs) if kwargs else fn(*args)
            except Exception as error:
                call = begin(plan, started, since, args, kwargs)
                if call.record_failure(error) is None:
                    raise
            return resume(call, fn, args, kwargs)

        return timed_call

    def plain_call(*args: Any, **kwargs: Any) -> Any:
        statistics.calls += 1
        since = exhaustions.count
        if tracing.tracer is not None:
            return resume(begin(plan, None, since, args, kwargs), fn, args, kwargs)
        try:
            return fn(*args, **kwargs) if kwargs else fn(*args)
        except Exception as error:
            call = begin(plan, None, since, args, kwargs)
            if call.record_failure(error) is None:
                raise
        while True:  # `resume` without what only other plans have, and without a second frame in every traceback
            if call.delay > 0.0:
                pause(call)
            try:
                value = fn(*args, **kwargs) if kwargs else fn(*args)
            except Exception as error:
                if call.record_failure(error) is None:
                    raise
            else:
                call.succeeded(value)
                return value

    return plain_call


def _sync_throttled(plan: Plan, fn: Function) -> Function:
    throttle, statistics = plan.throttle, plan.statistics
    assert throttle is not None

    def throttled_call(*args: Any, **kwargs: Any) -> Any:
        statistics.calls += 1
        since, started = exhaustions.count, clock.now()
        if tracing.tracer is not None:
            return resume(begin(plan, started, since, args, kwargs), fn, args, kwargs)
        if started > throttle.edge:
            throttle.roll(started)
        throttle.executions += 1
        try:
            value = fn(*args, **kwargs) if kwargs else fn(*args)
        except Exception as error:
            call = begin(plan, started, since, args, kwargs)
            if call.record_failure(error) is None:
                raise
        else:
            if throttle.tokens < throttle.cap:
                throttle.feed()
            return value
        return resume(call, fn, args, kwargs)

    return throttled_call


def resume(call: CallState, fn: Function, args: Any, kwargs: Any) -> Any:
    """Wait, execute, repeat: the value of the attempt that succeeds, or the error of the last one."""
    is_counted = call.plan.throttle is not None or call.trace is not None or call.plan.before is not None
    try:
        while True:
            if call.delay > 0.0:
                pause(call)
            if is_counted:
                call.attempt_started()
            try:
                value = fn(*args, **kwargs) if kwargs else fn(*args)
            except Exception as error:
                if call.record_failure(error) is None:
                    raise
            else:
                call.succeeded(value)
                return value
    finally:
        if call.trace is not None:
            call.trace.end()


def pause(call: CallState) -> None:
    """Wait before the next attempt; raise the last error when `stop=` is set meanwhile."""
    event = call.plan.stop
    if event is None:
        clock.sleep(call.delay)
        return
    clock.sleep_unless_set(event, call.delay)
    if event.is_set():
        raise call.stop_waiting()


# ---- plain functions in threads --------------------------------------------------------------------------------------


def _sync_threaded(plan: Plan, fn: Function) -> Function:
    def threaded_call(*args: Any, **kwargs: Any) -> Any:
        plan.statistics.calls += 1
        call = begin(plan, clock.now(), exhaustions.count, args, kwargs)
        return resume(call, behind_breaker(plan, in_thread(call, fn)), args, kwargs)

    return threaded_call


def in_thread(call: CallState, fn: Function) -> Function:
    """`fn` in a thread of its own, waited for as long as the attempt's limit or the deadline allows."""

    def attempt(*args: Any, **kwargs: Any) -> Any:
        from threading import Event, Thread  # loaded by calls that use a thread, not by `import reefknot`

        seconds, expired = attempt_limit(call, abandoned=True)
        done, context = Event(), copy_context()
        context.run(scope_of_caller.set, current_scope())
        values: list[Any] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                values.append(context.run(fn, *args, **kwargs))
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        Thread(target=work, name="reefknot-attempt", daemon=True).start()
        if not done.wait(None if seconds == inf else seconds):
            raise expired()
        if errors:
            raise errors.pop()  # kept nowhere: its traceback holds this frame
        return values[0]

    return attempt


def attempt_limit(call: CallState, *, abandoned: bool = False) -> tuple[float, Callable[[], Exception]]:
    """Seconds for the next attempt and the error when they are over: its own limit, or what is left of the deadline."""
    policy = call.plan.policy
    left = policy.time_budget - call.elapsed
    if left <= policy.attempt_timeout:
        return left, lambda: DeadlineExceededError(seconds=policy.time_budget, abandoned=abandoned)
    return policy.attempt_timeout, lambda: AttemptTimeoutError(seconds=policy.attempt_timeout, abandoned=abandoned)


# ---- async functions -------------------------------------------------------------------------------------------------


def _async(plan: Plan, fn: Function) -> Function:
    statistics = plan.statistics
    if plan.breaker is not None:

        async def guarded_call(*args: Any, **kwargs: Any) -> Any:
            statistics.calls += 1
            return await aresume(begin(plan, clock.now(), exhaustions.count, args, kwargs), fn, args, kwargs)

        return guarded_call
    if plan.timed or plan.throttle is not None:
        return _async_timed(plan, fn)

    async def plain_call(*args: Any, **kwargs: Any) -> Any:
        statistics.calls += 1
        since = exhaustions.count
        if tracing.tracer is not None:
            return await aresume(begin(plan, None, since, args, kwargs), fn, args, kwargs)
        try:
            return await (fn(*args, **kwargs) if kwargs else fn(*args))
        except Exception as error:  # without a hook: a plan with one is timed
            call = begin(plan, None, since, args, kwargs)
            if call.record_failure(error) is None:
                raise
        return await aresume(call, fn, args, kwargs)

    return plain_call


def _async_timed(plan: Plan, fn: Function) -> Function:
    throttle, statistics = plan.throttle, plan.statistics
    budget, own = plan.policy.time_budget, plan.policy.attempt_timeout
    seconds = min(own, budget)

    def expired() -> Exception:
        return DeadlineExceededError(seconds=budget) if budget <= own else AttemptTimeoutError(seconds=own)

    async def timed_call(*args: Any, **kwargs: Any) -> Any:
        statistics.calls += 1
        since, started = exhaustions.count, clock.now()
        if tracing.tracer is not None:
            return await aresume(begin(plan, started, since, args, kwargs), fn, args, kwargs)
        if throttle is not None:
            if started > throttle.edge:
                throttle.roll(started)
            throttle.executions += 1
        try:
            value = await (
                fn(*args, **kwargs) if seconds == inf else _within(fn(*args, **kwargs), seconds, expired, started)
            )
        except Exception as error:
            call = begin(plan, started, since, args, kwargs)
            delay = call.record_failure(error)
            if call.awaited is not None:
                await call.await_hooks()
            if delay is None:
                raise
        else:
            if throttle is not None and throttle.tokens < throttle.cap:
                throttle.feed()
            return value
        return await aresume(call, fn, args, kwargs)

    return timed_call


async def aresume(call: CallState, fn: Function, args: Any, kwargs: Any) -> Any:
    """`resume`, awaited; every attempt runs under its limit."""
    try:
        while True:
            if call.delay > 0.0:
                await apause(call)
            call.attempt_started()
            if call.awaited is not None:
                await call.await_hooks()
            try:
                value = await attempt_within(call, fn, args, kwargs)
            except Exception as error:
                delay = call.record_failure(error)
                if call.awaited is not None:
                    await call.await_hooks()
                if delay is None:
                    raise
            else:
                call.succeeded(value)
                if call.awaited is not None:
                    await call.await_hooks()
                return value
    finally:
        if call.trace is not None:
            call.trace.end()


async def apause(call: CallState) -> None:
    """`pause`, awaited."""
    event = call.plan.stop
    if event is None:
        await clock.asleep(call.delay)
        return
    from reefknot.runtime.event_loops import sleep_unless_set

    await sleep_unless_set(event, call.delay)
    if event.is_set():
        error = call.stop_waiting()
        await call.await_hooks()
        raise error


async def attempt_within(call: CallState, fn: Function, args: Any, kwargs: Any) -> Any:
    """Execute one attempt behind the breaker, under its limits."""
    breaker, is_asked = call.plan.breaker, call.plan.has_async_rule
    work = _asked if is_asked else _limited
    if call.plan.limit is not None:
        from reefknot.retrying.limit import awaited_behind_limit

        work = awaited_behind_limit(call, work)
    if breaker is None:
        return await work(call, fn, args, kwargs)
    with breaker.guard(call.verdict if is_asked else call.plan.rule):
        return await work(call, fn, args, kwargs)


def _limited(call: CallState, fn: Function, args: Any, kwargs: Any) -> Any:
    work = fn(*args, **kwargs)
    if not call.plan.limited:
        return work
    seconds, expired = attempt_limit(call)
    return _within(work, seconds, expired, clock.now())


async def _asked(call: CallState, fn: Function, args: Any, kwargs: Any) -> Any:
    """An attempt whose error the async predicate of `on=` is asked about, before breaker and decision are."""
    try:
        return await _limited(call, fn, args, kwargs)
    except Exception as error:
        await call.ask_rule(error)
        raise


@coroutine
def _within(
    work: Coroutine[Any, Any, T], seconds: float, expired: Callable[[], Exception], started: float
) -> Generator[Any, Any, T]:
    """
    Await `work` for at most `seconds` after `started`; a timer exists only if it suspends.

    In Trio the limit comes first: its cancel scopes nest, and the work may have entered one before it suspends.
    """
    if "trio" in modules and clock.in_trio():
        with time_limit(seconds, expired):
            ended: T = yield from work  # allowed in a generator that is a coroutine
            return ended
    try:
        waiting_for = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    with time_limit(seconds - (clock.now() - started), expired):
        return (yield from continued(work, waiting_for))


def time_limit(seconds: float, expired: Callable[[], Exception]) -> Timeout | TrioTimeout:
    """A limit around a block, in whichever event loop this is. The loops' code is loaded by those who use it."""
    global _time_limit
    if _time_limit is None:
        from reefknot.runtime.event_loops import time_limit

        _time_limit = time_limit
    return _time_limit(seconds, expired)


# ---- results that are not accepted -----------------------------------------------------------------------------------


def _sync_with_result(plan: Plan, fn: Function) -> Function:
    attempt = checking_result(plan, fn)
    call = _sync_threaded(plan, attempt) if plan.in_thread else _sync(plan, behind_breaker(plan, attempt))

    def call_with_result(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RejectedResult as last:
            return last_result(plan, last)

    return call_with_result


def _async_with_result(plan: Plan, fn: Function) -> Function:
    call = _async(plan, checking_result(plan, fn))

    async def call_with_result(*args: Any, **kwargs: Any) -> Any:
        try:
            return await call(*args, **kwargs)
        except RejectedResult as last:
            return last_result(plan, last)

    return call_with_result


def checking_result(plan: Plan, fn: Function) -> Function:
    """`fn`, raising `RejectedResult` where `on_result=` refuses what it returns; `fn` itself without `on_result=`."""
    rule = plan.result_rule
    if rule is None:
        return fn
    if is_async(fn):
        is_awaited = is_async(rule)

        async def acheck(*args: Any, **kwargs: Any) -> Any:
            value = await fn(*args, **kwargs)
            refusal = rejected(await rule(value) if is_awaited else rule(value), value)
            if refusal is not None:
                raise refusal
            return value

        return acheck

    def check(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        refusal = rejected(rule(value), value)
        if refusal is not None:
            raise refusal
        return value

    return check


def last_result(plan: Plan, last: RejectedResult) -> Any:
    """The result of the last attempt, though it was refused; or `RetryError` with it, as `raise_result=` says."""
    if plan.raise_result:
        raise result_error(plan, last) from last
    return last.value


def result_error(plan: Plan, last: RejectedResult) -> RetryError:
    """The error for a last result that was refused."""
    name = plan.name or "unnamed"
    return RetryError(None, list(last.records), name, reason=str(last.reason), value=last.value)


# ---- functions with a fallback, with hooks around each attempt, or with an async predicate ---------------------------


def _sync_watched(plan: Plan, fn: Function) -> Function:
    def watched_call(*args: Any, **kwargs: Any) -> Any:
        plan.statistics.calls += 1
        call = begin(plan, clock.now(), exhaustions.count, args, kwargs)
        try:
            return execute(call, fn, args, kwargs)
        except Exception as error:
            if call.gave_up is None:
                if type(error) is RejectedResult:
                    return last_result(plan, error)
                raise
        return call.fall_back()

    return watched_call


def _async_watched(plan: Plan, fn: Function) -> Function:
    work = checking_result(plan, fn)

    async def watched_call(*args: Any, **kwargs: Any) -> Any:
        plan.statistics.calls += 1
        call = begin(plan, clock.now(), exhaustions.count, args, kwargs)
        try:
            return await aresume(call, work, args, kwargs)
        except Exception as error:
            if call.gave_up is None:
                if type(error) is RejectedResult:
                    return last_result(plan, error)
                raise
        return await afall_back(call)

    return watched_call


def execute(call: CallState, fn: Function, args: Any, kwargs: Any) -> Any:
    """Every attempt of a call of a plain function, with all that its plan asks for; the last error is raised."""
    plan, work = call.plan, checking_result(call.plan, fn)
    attempt = in_thread(call, work) if plan.in_thread else work
    if plan.limit is not None:
        from reefknot.retrying.limit import behind_limit

        attempt = behind_limit(call, attempt)
    return resume(call, behind_breaker(plan, attempt), args, kwargs)


async def afall_back(call: CallState) -> Any:
    """`CallState.fall_back`, awaited where a function of the caller's answers with something to await."""
    value = call.fall_back()
    return await value if callable(call.plan.fallback) and hasattr(value, "__await__") else value
