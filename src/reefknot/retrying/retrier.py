"""
`Retrier`: one plan, and every way to run work under it.

A retrier keeps nothing per call: any number of threads and tasks may share it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from sys import _getframe
from typing import ParamSpec, Self, TypeVar, Unpack

from reefknot import clock
from reefknot.core.failure import Failure
from reefknot.core.retry.decide import Outcome
from reefknot.core.retry.policy import RetryPolicy
from reefknot.errors import ParameterTypeError
from reefknot.retrying.attempts import Attempts
from reefknot.retrying.call import CallState
from reefknot.retrying.exhaustion import exhaustions
from reefknot.retrying.functions import RejectedResult, is_async, name_of, what_to_pass
from reefknot.retrying.plan import LIBRARY_DEFAULT, Plan, meant_instead_of
from reefknot.retrying.types import RetryKeywords
from reefknot.retrying.wrappers import (
    aresume,
    behind_breaker,
    checking_result,
    in_thread,
    refuse_in_plain_code,
    result_error,
    resume,
    wrapped,
)

P = ParamSpec("P")
R = TypeVar("R")


class Retrier:
    """
    Runs work under a policy: `call`, `acall`, `run`, `arun`, `attempts`; as a decorator, `@retry(policy=retrier)`.

    Without `on=`, connection errors, timeouts and HTTP 408, 429, 5xx are retried.
    """

    __slots__ = ("plan",)

    def __init__(self, policy: RetryPolicy | None = None, **options: Unpack[RetryKeywords]) -> None:
        if policy is not None and not isinstance(policy, RetryPolicy):
            meant = meant_instead_of(policy)
            raise ParameterTypeError("policy", policy, f"a RetryPolicy{meant and f'; for this: Retrier({meant})'}")
        self.plan = Plan(policy or LIBRARY_DEFAULT).with_options(options)

    @classmethod
    def following(cls, resolve: Callable[[Failure], RetryPolicy], policy: RetryPolicy, name: str = "") -> Self:
        """A retrier whose policy depends on the failure; `policy` applies before the first one."""
        return cls.following_latest(lambda: resolve, policy, name)

    @classmethod
    def following_latest(
        cls, resolver: Callable[[], Callable[[Failure], RetryPolicy]], policy: RetryPolicy, name: str = ""
    ) -> Self:
        """`following`, with `resolver` called once per call: a call keeps its policy book, the next has the latest."""
        retrier = cls.__new__(cls)
        retrier.plan = Plan(policy, name=name, resolver=resolver)
        return retrier

    @property
    def policy(self) -> RetryPolicy:
        return self.plan.policy

    def using(self, **options: Unpack[RetryKeywords]) -> Self:
        """This retrier with the given options changed."""
        other = type(self).__new__(type(self))
        other.plan = self.plan.with_options(options)
        return other

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the value of `fn(*args, **kwargs)`, or raise its last error."""
        value: R = wrapped(self._named(fn), _plain(fn))(*args, **kwargs)
        return value

    async def acall(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`call`, awaited."""
        value: R = await wrapped(self._named(fn), _awaited(fn))(*args, **kwargs)
        return value

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Return the outcome as data: the last error is in it, not raised."""
        plan = self._named(_plain(fn))
        refuse_in_plain_code(plan)
        call = CallState(plan, clock.now(), exhaustions.count, args, kwargs)
        work = checking_result(plan, fn)
        attempt = behind_breaker(plan, in_thread(call, work) if plan.in_thread else work)
        try:
            value = resume(call, attempt, args, kwargs)
        except Exception as error:
            return _outcome(call, None, error)
        return _outcome(call, value)

    async def arun(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """`run`, awaited."""
        plan = self._named(fn)
        awaited = checking_result(plan, _awaited(fn))
        call = CallState(plan, clock.now(), exhaustions.count, args, kwargs)
        try:
            value = await aresume(call, awaited, args, kwargs)
        except Exception as error:
            return _outcome(call, None, error)
        return _outcome(call, value)

    def attempts(self) -> Attempts:
        """
        A retry loop around a block of code; see `reefknot.retrying.attempts`.

        Without a name of its own, the loop has the name of the function that it is in.
        """
        if self.plan.name:
            return Attempts(self.plan)
        frame = _getframe(1)
        inside = frame.f_code.co_qualname
        name = str(frame.f_globals.get("__name__", "")) if inside == "<module>" else inside
        return Attempts(self.plan.with_options({"name": name}))

    def _named(self, fn: object) -> Plan:
        if self.plan.name or not callable(fn):
            return self.plan
        return self.plan.with_options({"name": name_of(fn)})

    def __repr__(self) -> str:
        return f"<Retrier {self.plan.name or 'unnamed'}: {self.plan.policy.describe()}>"


def _plain(fn: Callable[P, R]) -> Callable[P, R]:
    if not callable(fn):
        raise ParameterTypeError("fn", fn, what_to_pass(fn))
    if is_async(fn):
        raise ParameterTypeError("fn", fn, "a plain function; use acall, arun or `async for` for an async one")
    return fn


def _awaited(fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """`fn` as an async function; a plain one that returns an awaitable is wrapped."""
    if not callable(fn):
        raise ParameterTypeError("fn", fn, what_to_pass(fn))
    if is_async(fn):
        return fn

    async def shim(*args: P.args, **kwargs: P.kwargs) -> R:
        return await fn(*args, **kwargs)

    return shim


def _outcome(call: CallState, value: R | None, error: Exception | None = None) -> Outcome[R]:
    if type(error) is RejectedResult:
        given_back = result_error(call.plan, error) if call.plan.raise_result else None
        return Outcome(False, error.value, given_back, call.attempts, call.records, call.elapsed, call.reason)
    attempts = call.attempts if error is not None else call.attempts + 1
    return Outcome(error is None, value, error, attempts, call.records, call.elapsed, call.reason)
