"""
`Limit`: a rate, a number of calls at the same time, or both, in front of any call.

    limit = rk.Limit("billing", rate="10/s", burst=20, running=5)

It is a decorator, `with limit:`, `async with limit:`, `limit=` of a retrier, and `acquire` with `release`. All limits
of one name in a process are the same one, for threads and tasks, in asyncio and Trio. Another process has its own; over
a fleet, the section `limits` of the configuration holds. Waits are in the order of their calls: each takes the next
free moment of the rate at once, and sleeps until then.
"""

from __future__ import annotations

from collections import deque
from functools import wraps
from math import inf
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reefknot import clock
from reefknot.core import checks
from reefknot.core.limits import LimitRule, limit_rule
from reefknot.errors import LimitReachedError, ParameterError, ParameterTypeError
from reefknot.retrying.functions import is_async

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from reefknot.core.checks import Seconds

P = ParamSpec("P")
R = TypeVar("R")

MOST_NAMES = 10_000
_FIRST_LOOK_S = 0.001
_LONGEST_LOOK_S = 0.05


class _Shared:
    """The state of all limits of one name. Tokens below zero are those of calls that wait for their moment."""

    def __init__(self, rule: LimitRule) -> None:
        self.rule = rule
        self.lock = Lock()
        self.line: deque[object] = deque()
        """Calls that wait for another one to end, the first come first."""
        self.running = 0
        self._tokens = float(rule.burst)
        self._at = 0.0

    def take(self, longest: float) -> float:
        """Take the next moment of the rate that is free; the seconds until then, or those that would be too long."""
        if self.rule.rate is None:
            return 0.0
        now, per_second = clock.now(), self.rule.rate.per_second
        if now < self._at:  # another clock: virtual time, or an earlier test's
            self._tokens = float(self.rule.burst)
        else:
            self._tokens = min(float(self.rule.burst), self._tokens + (now - self._at) * per_second)
        self._at = now
        wait = max(0.0, (1.0 - self._tokens) / per_second)
        if wait <= longest:
            self._tokens -= 1.0
        return wait

    def give_back(self) -> None:
        """Give back a moment that was taken, and in which nothing was called."""
        self._tokens = min(float(self.rule.burst), self._tokens + 1.0)

    def may_run(self, ticket: object) -> bool:
        """Whether one more may run now, and this call is the first of those that wait; it then runs."""
        most = self.rule.running
        if most is not None and (self.running >= most or (self.line and self.line[0] is not ticket)):
            return False
        if self.line and self.line[0] is ticket:
            self.line.popleft()
        self.running += 1
        return True


_shared: dict[str, _Shared] = {}
_naming = Lock()


class Limit:
    """
    `rk.Limit("billing", rate="10/s")`: waits until a call may begin.

    `burst` calls may begin at once (default: those of a second), `running` may be under way at the same time. A wait
    longer than `timeout` seconds is refused with `LimitReachedError`, before it begins where that is known.
    """

    def __init__(
        self,
        name: str,
        *,
        rate: str | None = None,
        burst: int | None = None,
        running: int | None = None,
        timeout: Seconds | None = None,
    ) -> None:
        checks.text("name", name, "a text that names the limit")
        self.timeout = checks.seconds_or_none("timeout", timeout, meaning="to wait as long as it takes")
        with _naming:
            known = _shared.get(name)
            if known is None or (rate, burst, running) != (None, None, None):
                rule = limit_rule("*", rate=rate, burst=burst, running=running)
                if known is None and len(_shared) >= MOST_NAMES:
                    raise ParameterError("name", name, f"at most {MOST_NAMES} limits by name in one process")
                if known is None:
                    known = _shared[name] = _Shared(rule)
                elif known.rule != rule:
                    accepted = f"a name of its own, or the same numbers: {name} has {known.rule}"
                    raise ParameterError("name", name, accepted)
        self.name = name
        self._state = known

    # ---- calls ------------------------------------------------------------------------------------------------------

    def acquire(self, timeout: Seconds | None = None) -> None:
        """Wait until a call may begin; `release` follows it. `LimitReachedError` after `timeout` seconds."""
        ticket, ends = object(), clock.now() + self._longest(timeout)
        try:
            pause = _FIRST_LOOK_S
            while not self._begins(ticket, ends):
                clock.sleep(pause)
                pause = min(_LONGEST_LOOK_S, 1.5 * pause)
        finally:
            self._leave(ticket)
        self._wait_in(clock.sleep, self._moment(ends))

    async def aacquire(self, timeout: Seconds | None = None) -> None:
        """`acquire`, awaited. A call that is cancelled while it waits spends nothing."""
        ticket, ends = object(), clock.now() + self._longest(timeout)
        try:
            pause = _FIRST_LOOK_S
            while not self._begins(ticket, ends):
                await clock.asleep(pause)
                pause = min(_LONGEST_LOOK_S, 1.5 * pause)
        finally:
            self._leave(ticket)
        wait = self._moment(ends)
        try:
            await clock.asleep(wait)
        except BaseException:
            self._undo()
            raise

    def try_acquire(self, timeout: Seconds = 0.0) -> bool:
        """Whether a call may begin now, or within `timeout` seconds; `release` follows it then."""
        try:
            self.acquire(timeout)
        except LimitReachedError:
            return False
        return True

    async def atry_acquire(self, timeout: Seconds = 0.0) -> bool:
        """`try_acquire`, awaited."""
        try:
            await self.aacquire(timeout)
        except LimitReachedError:
            return False
        return True

    def release(self) -> None:
        """The call is over."""
        with self._state.lock:
            self._state.running = max(0, self._state.running - 1)

    def within(self, timeout: float) -> LimitedCall:
        """`with limit.within(5):` or `async with`: one call, and at most these seconds of waiting."""
        return LimitedCall(self, timeout)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        await self.aacquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.release()

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, `def` or `async def`."""
        if not callable(fn):
            raise ParameterTypeError("fn", fn, "a function")
        if is_async(fn):

            @wraps(fn)
            async def acall(*args: Any, **kwargs: Any) -> Any:
                async with self:
                    return await fn(*args, **kwargs)  # type: ignore[misc]  # is_async says it is awaitable

            return acall  # type: ignore[return-value]  # the same kind of function as fn

        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return fn(*args, **kwargs)

        return call

    def __repr__(self) -> str:
        return f"<Limit {self.name!r} {self._state.rule}>"

    # ---- waits ------------------------------------------------------------------------------------------------------

    def _longest(self, timeout: Seconds | None) -> float:
        if timeout is None:
            return inf if self.timeout is None else self.timeout
        return inf if timeout == inf else checks.seconds("timeout", timeout, or_zero=True, most=checks.LARGEST_FLOAT)

    def _begins(self, ticket: object, ends: float) -> bool:
        """Whether the call may run as far as the number is concerned; else it stands in line until `ends`."""
        state = self._state
        with state.lock:
            if state.may_run(ticket):
                return True
            if clock.now() >= ends:
                raise LimitReachedError(name=self.name, retry_after=_LONGEST_LOOK_S)
            if ticket not in state.line:
                state.line.append(ticket)
        return False

    def _leave(self, ticket: object) -> None:
        with self._state.lock:
            if ticket in self._state.line:
                self._state.line.remove(ticket)

    def _moment(self, ends: float) -> float:
        """The seconds until the call's own moment of the rate, which it has from now on."""
        longest = max(0.0, ends - clock.now())
        with self._state.lock:
            wait = self._state.take(longest)
            if wait > longest:
                self._state.running -= 1
        if wait > longest:
            raise LimitReachedError(name=self.name, retry_after=wait)
        return wait

    def _wait_in(self, sleep: Callable[[float], None], wait: float) -> None:
        try:
            sleep(wait)
        except BaseException:  # Ctrl-C
            self._undo()
            raise

    def _undo(self) -> None:
        with self._state.lock:
            self._state.running -= 1
            self._state.give_back()


class LimitedCall:
    """Context manager of one call, plain or async, with a longest wait of its own."""

    __slots__ = ("_limit", "_timeout")

    def __init__(self, limit: Limit, timeout: float) -> None:
        self._limit = limit
        self._timeout = timeout

    def __enter__(self) -> None:
        self._limit.acquire(self._timeout)

    def __exit__(self, *ended: object) -> None:
        self._limit.release()

    async def __aenter__(self) -> None:
        await self._limit.aacquire(self._timeout)

    async def __aexit__(self, *ended: object) -> None:
        self._limit.release()


def behind_limit(call: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` behind the limit of a call: an attempt waits for it as long as the deadline allows."""
    limit, budget = call.plan.limit, call.plan.policy.time_budget
    assert limit is not None

    def attempt(*args: Any, **kwargs: Any) -> Any:
        with limit.within(max(0.0, budget - call.elapsed)):
            return fn(*args, **kwargs)

    return attempt


def awaited_behind_limit(call: Any, work: Callable[..., Any]) -> Callable[..., Any]:
    """`behind_limit` for the work of an async attempt, whose time limits begin after the wait."""
    limit, budget = call.plan.limit, call.plan.policy.time_budget
    assert limit is not None

    async def attempt(*given: Any) -> Any:
        async with limit.within(max(0.0, budget - call.elapsed)):
            return await work(*given)

    return attempt
