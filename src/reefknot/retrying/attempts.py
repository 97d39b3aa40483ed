"""
A retry loop around any block of code.

    for attempt in retrier.attempts():
        with attempt:
            attempt.value = work()

Also `async for`, with the same plain `with`. A block that fails and is worth it is swallowed and run again; the last
failure leaves the `with` as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from math import inf
from types import TracebackType
from typing import Any, Self

from reefknot import clock as timing
from reefknot.core.retry.decide import AttemptRecord
from reefknot.errors import (
    AttemptTimeoutError,
    BreakerOpenError,
    DeadlineExceededError,
    LoopMisuseError,
    ParameterError,
)
from reefknot.retrying import plan as exhaustion
from reefknot.retrying.breaker import Guard
from reefknot.retrying.call import Run
from reefknot.retrying.plan import Plan
from reefknot.retrying.wrappers import TimeScope


class Attempt:
    """One turn of the loop. `number` counts from 1; `value` is yours to set."""

    __slots__ = ("_entered", "_guard", "_loop", "_scope", "number", "value")

    def __init__(self, loop: Attempts, number: int) -> None:
        self._loop = loop
        self._entered = False
        self._scope: TimeScope | None = None
        self._guard: Guard | None = None
        self.number = number
        self.value: Any = None

    @property
    def history(self) -> tuple[AttemptRecord, ...]:
        """The failures before this attempt."""
        return self._loop.run.records

    def __enter__(self) -> Self:
        if self._entered:
            raise LoopMisuseError("this attempt was already used; go on to the loop's next one")
        self._entered = True
        self._loop.run.began()
        self._guard, self._scope = self._loop.guard(), self._loop.scope()
        if self._guard is not None:
            self._ask(self._guard)
        if self._scope is not None:
            self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._scope is not None:
            try:
                self._scope.__exit__(kind, error, trace)
            except Exception as expired:
                if self._swallows(expired):
                    return True
                raise
        return self._swallows(error)

    def _ask(self, guard: Guard) -> None:
        """A refusal is the end of the loop; it gets its note like any other."""
        try:
            guard.__enter__()
        except BreakerOpenError as refused:
            self._loop.finished = self._loop.run.stops(refused)
            raise

    def _swallows(self, error: BaseException | None) -> bool:
        if self._guard is not None:
            self._guard.__exit__(None if error is None else type(error), error, None)
        run = self._loop.run
        if error is None:
            self._loop.finished = True
            run.succeeded()
            return False
        if isinstance(error, Exception) and not run.stops(error):
            return True
        self._loop.finished = True
        return False


class Attempts:
    """What `Retrier.attempts()` gives: iterate it once, with `for` or `async for`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.finished = False
        self._begun = False
        self._limits = False
        self.run = Run(plan, timing.now(), exhaustion.so_far)

    def guard(self) -> Guard | None:
        breaker = self.plan.breaker
        return None if breaker is None else breaker.guard(self.plan.judge)

    def scope(self) -> TimeScope | None:
        """In async code every attempt has its limit; a plain block cannot be stopped."""
        plan = self.plan
        if not self._limits or not plan.limited:
            return None
        left = plan.policy.time_budget - self.run.elapsed
        seconds = min(plan.policy.attempt_timeout, left)

        def expired() -> Exception:
            if left <= plan.policy.attempt_timeout:
                return DeadlineExceededError(seconds=plan.policy.time_budget)
            return AttemptTimeoutError(seconds=seconds)

        return TimeScope(seconds, expired)

    def __iter__(self) -> Iterator[Attempt]:
        if self.plan.policy.attempt_timeout != inf:
            accepted = "in `async for`; a plain block of code cannot be stopped, in a thread neither"
            raise ParameterError("attempt_timeout", self.plan.policy.attempt_timeout, accepted)
        self._begin()
        while not self.finished:
            if self.run.delay > 0.0:
                timing.sleep(self.run.delay)
            yield from self._turn()

    async def __aiter__(self) -> AsyncIterator[Attempt]:
        self._begin()
        self._limits = True
        while not self.finished:
            if self.run.delay > 0.0:
                await timing.asleep(self.run.delay)
            for attempt in self._turn():
                yield attempt

    def _begin(self) -> None:
        if self._begun:
            raise LoopMisuseError("this loop was already run; call attempts() for another one")
        self._begun = True
        self.run = Run(self.plan, timing.now(), exhaustion.so_far)

    def _turn(self) -> Iterator[Attempt]:
        attempt = Attempt(self, self.run.attempts + 1)
        failures = self.run.attempts
        yield attempt
        if not self.finished and self.run.attempts == failures:
            raise LoopMisuseError(
                "the loop's body did not run inside `with attempt:`, so nobody knows whether it worked"
            )
