"""`Retrier`: call, acall, run, arun, using."""

import asyncio
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncAlways, AsyncFlaky, Flaky

POLICY = rk.RetryPolicy(3, 1, jitter="none")


async def test_call_and_acall_give_the_value_or_the_last_error() -> None:
    with rk.testing.virtual_time() as clock:
        assert rk.Retrier(POLICY).call(Flaky(ConnectionError), 1, key=2) == "ok"
        with pytest.raises(ConnectionError, match="call 3"):
            rk.Retrier(POLICY).call(Always())
    assert clock.waits == [1, 1, 2]
    assert await rk.Retrier(POLICY).acall(AsyncFlaky(ConnectionError), 1, key=2) == "ok"
    with pytest.raises(ConnectionError, match="call 3"):
        await rk.Retrier(POLICY).acall(AsyncAlways())
    assert asyncio.get_running_loop().time() == 4


@pytest.mark.parametrize("options", [{}, {"deadline": 60}])
async def test_acall_takes_a_plain_function_that_gives_an_awaitable(options: Any) -> None:
    fn = AsyncFlaky(ConnectionError)
    assert await rk.Retrier(POLICY, **options).acall(lambda: fn()) == "ok"
    assert fn.calls == 2


def test_run_tells_a_success_and_a_failure_and_does_not_raise_what_it_handled(virtual_time: VirtualClock) -> None:
    outcome = rk.Retrier(POLICY).run(Flaky(ConnectionError("one"), TimeoutError("two"), value=7))
    assert (outcome.ok, outcome.value, outcome.error, outcome.reason) == (True, 7, None, None)
    assert (outcome.attempts, outcome.elapsed, outcome.unwrap()) == (3, 3.0, 7)
    told = [(record.number, str(record.failure), record.elapsed, record.delay) for record in outcome.history]
    assert told == [(1, "ConnectionError: one", 0.0, 1.0), (2, "TimeoutError: two", 1.0, 2.0)]
    first_try = rk.Retrier().run(Flaky(value=None))
    assert (first_try.ok, first_try.value, first_try.attempts, first_try.history) == (True, None, 1, ())
    assert first_try.unwrap() is None

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


def test_an_async_function_given_to_call_or_run_is_refused_with_what_to_use() -> None:
    for use in (rk.Retrier().call, rk.Retrier().run):
        with pytest.raises(rk.ParameterTypeError, match="use acall, arun or `async for`"):
            use(asyncio.sleep, 0)


def test_using_makes_another_retrier_and_keeps_the_first_which_cannot_be_changed(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(POLICY, on=KeyError)
    other = retrier.using(attempts=2)
    assert (retrier.policy.max_attempts, other.policy.max_attempts) == (3, 2)
    assert other.run(Flaky(KeyError)).ok
    assert not other.run(Flaky(ConnectionError)).ok

    assert repr(rk.Retrier(POLICY, name="billing")).startswith("<Retrier billing: 3 attempts (1 + 2 retries)")
    assert repr(rk.Retrier(POLICY)).startswith("<Retrier unnamed: ")
    for name, value in (("policy", rk.RetryPolicy()), ("more", 1)):
        with pytest.raises(AttributeError):
            setattr(rk.Retrier(POLICY), name, value)
