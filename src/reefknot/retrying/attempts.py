"""
`Attempts`: a retry loop around any block of code.

    for attempt in retrier.attempts():
        with attempt:
            attempt.value = work()

Also `async for`, with the same plain `with`. The error of a block that will be retried is suppressed and the block runs
again; the last error leaves the `with` unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from reefknot import clock
from reefknot.core.decide import AttemptRecord
from reefknot.errors import BreakerOpenError, LoopMisuseError, ParameterError, ParameterTypeError
from reefknot.retrying.breaker import Guard
from reefknot.retrying.call import begin_call
from reefknot.retrying.exhaustion import exhaustions
from reefknot.retrying.functions import RejectedResult, rejected
from reefknot.retrying.plan import Plan
from reefknot.retrying.wrappers import apause, attempt_limit, pause, refuse_in_plain_code, result_error, time_limit

if TYPE_CHECKING:
    from reefknot.runtime.event_loops import TrioTimeout
    from reefknot.runtime.timeouts import Timeout


class Attempt:
    """A turn of the loop. `number` counts from 1; `value` is for the caller to set."""

    __slots__ = ("_entered", "_guard", "_loop", "_timeout", "number", "value")

    def __init__(self, loop: Attempts, number: int) -> None:
        self._loop = loop
        self._entered = False
        self._timeout: Timeout | TrioTimeout | None = None
        self._guard: Guard | None = None
        self.number = number
        self.value: Any = None

    @property
    def history(self) -> tuple[AttemptRecord, ...]:
        """Failed attempts before this one."""
        return self._loop.call.records

    def __enter__(self) -> Self:
        if self._entered:
            raise LoopMisuseError("this attempt was already used; go on to the loop's next one")
        self._entered = True
        self._loop.call.attempt_started()
        plan, self._timeout = self._loop.plan, self._loop.timeout()
        if plan.breaker is not None:
            self._guard = plan.breaker.guard(plan.rule)
            try:
                self._guard.__enter__()
            except BreakerOpenError as refused:  # it ends the loop and gets its note like any other failure
                self._loop.finished = self._loop.call.record_failure(refused) is None
                raise
        if self._timeout is not None:
            self._timeout.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._timeout is not None:
            try:
                self._timeout.__exit__(kind, error, trace)
            except Exception as expired:
                if self._swallows(expired):
                    return True
                raise
        return self._swallows(error)

    if not TYPE_CHECKING:  # a type checker refuses `async with` without this

        async def __aenter__(self) -> None:
            raise LoopMisuseError("write `with attempt:`, without async, in `async for` too: the loop does the waiting")

        async def __aexit__(self, *error: object) -> None:
            """Exists because Python looks it up before entering."""

    def _swallows(self, error: BaseException | None) -> bool:
        if self._guard is not None:
            self._guard.__exit__(None if error is None else type(error), error, None)
        if error is None and self._loop.plan.result_rule is not None:
            error = rejected(self._loop.plan.result_rule(self.value), self.value)
        if error is None:
            self._loop.call.succeeded(self.value)
        is_retried = isinstance(error, Exception) and self._loop.call.record_failure(error) is not None
        self._loop.finished = not is_retried
        if not is_retried and self._loop.call.trace is not None:
            self._loop.call.trace.end()  # a cancelled attempt has not ended yet
        if not is_retried and type(error) is RejectedResult and self._loop.plan.raise_result:
            raise result_error(self._loop.plan, error) from error
        return is_retried


class Attempts:
    """The loop of `Retrier.attempts()`: iterate it once, with `for` or `async for`."""

    def __init__(self, plan: Plan) -> None:
        if plan.limit is not None:
            raise ParameterError("limit", plan.limit, "for functions and calls; in a loop write `with limit:` yourself")
        self.plan = plan
        self.finished = False
        self._begun = False
        self._async = False
        self.call = begin_call(plan, clock.now(), exhaustions.count, keeps_records=True)

    def timeout(self) -> Timeout | TrioTimeout | None:
        """Time limit of the next attempt; None in a plain loop, whose block cannot be interrupted."""
        if not self._async or not self.plan.limited:
            return None
        return time_limit(*attempt_limit(self.call))

    def __iter__(self) -> Iterator[Attempt]:
        if self.plan.policy.attempt_timeout != inf:
            accepted = "in `async for`; a plain block of code cannot be stopped, in a thread neither"
            raise ParameterError("attempt_timeout", self.plan.policy.attempt_timeout, accepted)
        refuse_in_plain_code(self.plan)
        self._begin()
        turns = self.turns()
        try:
            for attempt in turns:
                if attempt is None:
                    pause(self.call)
                else:
                    yield attempt
        finally:
            turns.close()

    def __aiter__(self) -> AsyncIterator[Attempt]:
        self._begin()
        self._async = True
        return AsyncTurns(self)

    def turns(self) -> Generator[Attempt | None, None, None]:
        """The attempts, with None where a wait comes before the next one."""
        try:
            while not self.finished:
                if self.call.delay > 0.0:
                    yield None
                yield from self._turn()
        finally:
            if self.call.trace is not None:  # a loop that was left early
                self.call.trace.end()

    def _begin(self) -> None:
        if self._begun:
            raise LoopMisuseError("this loop was already run; call attempts() for another one")
        self._begun = True
        option = self.plan.async_option
        if option is not None:
            accepted = "a plain function here: a loop ends in a plain `with`, which awaits no hook and no predicate"
            raise ParameterTypeError(option, self.plan.function_of(option), f"{accepted}; use acall or a decorator")
        self.call = begin_call(self.plan, clock.now(), exhaustions.count, keeps_records=True)

    def _turn(self) -> Iterator[Attempt]:
        failures = self.call.attempts
        yield Attempt(self, failures + 1)
        if not self.finished and self.call.attempts == failures:
            raise LoopMisuseError("the loop's body did not run inside `with attempt:`, so its outcome is unknown")


class AsyncTurns:
    """
    The iterator of `async for`.

    It is not an async generator, because Trio warns about each one that is left before its end, as a loop is by
    `return`, `break` and its last error. The plain generator inside ends with this object.
    """

    __slots__ = ("_loop", "_turns")

    def __init__(self, loop: Attempts) -> None:
        self._loop = loop
        self._turns = loop.turns()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Attempt:
        for attempt in self._turns:
            if attempt is not None:
                return attempt
            try:
                await apause(self._loop.call)
            except BaseException:
                self._turns.close()
                raise
        raise StopAsyncIteration
