"""`Retrier`: call, acall, run, arun, using."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncAlways, AsyncFlaky, Flaky

POLICY = rk.RetryPolicy(3, 1, jitter="none")


def test_call_gives_the_value_or_the_last_error(virtual_time: VirtualClock) -> None:
    assert rk.Retrier(POLICY).call(Flaky(ConnectionError), 1, key=2) == "ok"
    with pytest.raises(ConnectionError, match="call 3"):
        rk.Retrier(POLICY).call(Always())
    assert virtual_time.waits == [1, 1, 2]


async def test_acall_gives_the_value_or_the_last_error() -> None:
    assert await rk.Retrier(POLICY).acall(AsyncFlaky(ConnectionError), 1, key=2) == "ok"
    with pytest.raises(ConnectionError, match="call 3"):
        await rk.Retrier(POLICY).acall(AsyncAlways())

    assert asyncio.get_running_loop().time() == 4


def test_acall_takes_a_plain_function_that_gives_an_awaitable() -> None:
    fn = AsyncFlaky(ConnectionError)

    def plain() -> Awaitable[object]:
        return fn()

    retrier = rk.Retrier(POLICY, deadline=60)
    assert rk.testing.run_virtual(retrier.acall(plain)) == "ok"
    assert fn.calls == 2


def test_run_tells_a_success_after_failures(virtual_time: VirtualClock) -> None:
    outcome = rk.Retrier(POLICY).run(Flaky(ConnectionError("one"), TimeoutError("two"), value=7))
    assert (outcome.ok, outcome.value, outcome.error, outcome.reason) == (True, 7, None, None)
    assert (outcome.attempts, outcome.elapsed) == (3, 3.0)
    first, second = outcome.history
    assert (first.number, str(first.failure), first.elapsed, first.delay) == (1, "ConnectionError: one", 0.0, 1.0)
    assert (second.number, str(second.failure), second.elapsed, second.delay) == (2, "TimeoutError: two", 1.0, 2.0)
    assert outcome.unwrap() == 7


def test_run_tells_a_first_try_success() -> None:
    outcome = rk.Retrier().run(Flaky(value=None))
    assert (outcome.ok, outcome.value, outcome.attempts, outcome.history) == (True, None, 1, ())
    assert outcome.unwrap() is None


def test_run_does_not_raise_what_it_handled(virtual_time: VirtualClock) -> None:
    fn = Always()
    outcome = rk.Retrier(POLICY).run(fn)
    assert (outcome.ok, outcome.value, outcome.attempts) == (False, None, 3)
    assert outcome.reason is rk.Reason.ATTEMPTS_SPENT
    assert [record.delay for record in outcome.history] == [1, 2, None]
    assert str(outcome.error) == "call 3"
    with pytest.raises(ConnectionError, match="call 3"):
        outcome.unwrap()


async def test_arun_is_run_awaited() -> None:
    retrier = rk.Retrier(POLICY)
    good, bad = await retrier.arun(AsyncFlaky(ConnectionError)), await retrier.arun(AsyncAlways())
    assert (good.ok, good.value, good.attempts, good.elapsed) == (True, "ok", 2, 1.0)
    assert (bad.ok, bad.attempts, bad.reason, bad.elapsed) == (False, 3, rk.Reason.ATTEMPTS_SPENT, 3.0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_run_and_arun_let_control_flow_through(kind: type[BaseException]) -> None:
    retrier = rk.Retrier(on=lambda error: True)
    caught: list[type[BaseException]] = []
    try:
        retrier.run(Flaky(kind))
    except BaseException as error:
        caught.append(type(error))

    async def main() -> None:
        try:
            await retrier.arun(AsyncFlaky(kind))
        except BaseException as error:
            caught.append(type(error))

    rk.testing.run_virtual(main())
    assert caught == [kind, kind]


def test_arun_holds_its_deadline_and_tells_it() -> None:
    async def hangs() -> None:
        await asyncio.sleep(3600)

    outcome = rk.testing.run_virtual(rk.Retrier(deadline=5).arun(hangs))
    assert isinstance(outcome.error, rk.DeadlineExceededError)
    assert (outcome.reason, outcome.elapsed) == (rk.Reason.BUDGET_SPENT, 5.0)


def test_an_async_function_given_to_call_or_run_is_refused_with_what_to_use() -> None:
    async def fetch() -> None: ...

    for use in (rk.Retrier().call, rk.Retrier().run):
        with pytest.raises(rk.ParameterTypeError, match="use acall, arun or `async for`"):
            use(fetch)


def test_using_makes_another_retrier_and_keeps_the_first(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(POLICY, on=KeyError)
    other = retrier.using(attempts=2)
    assert (retrier.policy.max_attempts, other.policy.max_attempts) == (3, 2)
    assert other.run(Flaky(KeyError)).ok
    assert not other.run(Flaky(ConnectionError)).ok


def test_a_retrier_shows_its_name_and_policy() -> None:
    assert repr(rk.Retrier(POLICY, name="billing")).startswith("<Retrier billing: 3 attempts (1 + 2 retries)")
    assert repr(rk.Retrier(POLICY)).startswith("<Retrier unnamed: ")


def test_a_retrier_cannot_be_changed_from_outside() -> None:
    with pytest.raises(AttributeError):
        rk.Retrier(POLICY).policy = rk.RetryPolicy()  # type: ignore[misc]  # that is the test
    with pytest.raises(AttributeError):
        rk.Retrier(POLICY).more = 1  # type: ignore[attr-defined]  # that is the test
