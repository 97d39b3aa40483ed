"""Counters of a decorated function, and the switch that turns retries off."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

import reefknot as rk
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncAlways, AsyncFlaky, Flaky


def counted(fn: Any) -> tuple[int, int, int]:
    return fn.statistics.calls, fn.statistics.retries, fn.statistics.give_ups


@pytest.mark.parametrize("options", [{}, {"throttle": True}, {"in_thread": True}, {"deadline": 60}])
def test_calls_retries_and_give_ups_are_counted(options: Any, no_wait: VirtualClock) -> None:
    fn = rk.retry(attempts=3, **options)(Flaky(ConnectionError(), ConnectionError()))
    fn()
    assert counted(fn) == (1, 2, 0)
    failing = rk.retry(attempts=3, **options)(Always())
    with pytest.raises(ConnectionError):
        failing()
    assert counted(failing) == (1, 2, 1)


@pytest.mark.parametrize("options", [{}, {"deadline": 60}, {"breaker": rk.CircuitBreaker("x", failures=99)}])
def test_async_calls_are_counted_too(options: Any) -> None:
    fn = rk.retry(**options)(AsyncFlaky(ConnectionError()))
    rk.testing.run_virtual(fn())
    rk.testing.run_virtual(fn())
    assert counted(fn) == (2, 1, 0)
    failing = rk.retry(attempts=2, **options)(AsyncAlways())
    with pytest.raises(ConnectionError):
        rk.testing.run_virtual(failing())
    assert counted(failing) == (1, 1, 1)


def test_an_error_that_is_not_retried_or_cannot_be_read_is_a_give_up(
    no_wait: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise RecursionError

    bug = rk.retry(Flaky(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        bug()
    monkeypatch.setattr("reefknot.retrying.call.failure_from", broken)
    fn = rk.retry(Flaky(ConnectionError()))
    with pytest.raises(ConnectionError):
        fn()
    unread = rk.retry(on_result=lambda value: True, raise_result=True)(Flaky())
    with pytest.raises(rk.RetryError, match="not_retryable"):
        unread()
    assert counted(bug) == counted(fn) == counted(unread) == (1, 0, 1)


def test_overrides_count_for_the_function_and_functions_count_alone(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(attempts=2)
    one, other = rk.retry(policy=retrier)(Flaky()), rk.retry(policy=retrier)(Flaky())
    one()
    one.using(deadline=3)()
    rk.using(one, deadline=3)()
    assert (one.statistics.calls, other.statistics.calls) == (3, 0)
    assert repr(one.statistics) == "RetryStatistics(calls=3, retries=0, give_ups=0)"


def test_a_wait_that_was_stopped_is_no_retry() -> None:
    stop = threading.Event()
    fn = rk.retry(stop=stop, wait=[1], on_retry=lambda event: stop.set())(Always())
    with pytest.raises(ConnectionError):
        fn()
    assert counted(fn) == (1, 0, 1)


def test_no_call_of_many_threads_is_lost() -> None:
    fn = rk.retry(lambda: None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [fn() for _ in range(5000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert fn.statistics.calls == 20_000


# ---- the switch ------------------------------------------------------------------------------------------------------


def test_every_way_to_retry_obeys_the_switch_and_says_so(no_retry: None) -> None:
    fn, afn = Always(), AsyncAlways()
    with pytest.raises(ConnectionError) as raised:
        rk.retry(attempts=9)(fn)()
    assert "all attempts are spent; retries are turned off (1 attempt" in raised.value.__notes__[0]
    rk.Retrier().run(fn)
    rk.testing.run_virtual(rk.Retrier(deadline=60).arun(afn))
    with pytest.raises(ConnectionError):  # noqa: PT012 - a loop is a block
        for attempt in rk.Retrier().attempts():
            with attempt:
                fn()
    with pytest.raises(rk.RetryAfter):
        rk.retry(Flaky(rk.RetryAfter(1)))()
    assert rk.retry(on_result=lambda value: True)(Flaky())() == "ok"
    assert (fn.calls, afn.calls) == (3, 1)


def test_the_switch_is_scoped_and_nested(no_wait: VirtualClock) -> None:
    fn = rk.retry(attempts=3)(Always())
    with rk.testing.no_retry():
        with rk.testing.no_retry(), pytest.raises(ConnectionError):
            fn()
        with pytest.raises(ConnectionError):
            fn()
    assert counted(fn) == (2, 0, 2)
    with pytest.raises(ConnectionError):
        fn()
    assert counted(fn) == (3, 2, 3)


PROGRAM = """
import reefknot as rk
calls = []
@rk.retry(attempts=3, base_delay=0)
def work():
    calls.append(1)
    raise ConnectionError
try:
    work()
except ConnectionError:
    print(len(calls))
"""


def program(value: str | None) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if name != "REEFKNOT_RETRY"}
    if value is not None:
        environ["REEFKNOT_RETRY"] = value
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("value", "calls"), [("off", "1"), ("0", "1"), ("OFF", "1"), (None, "3"), ("on", "3")])
def test_the_environment_turns_retries_off_for_a_process(value: str | None, calls: str) -> None:
    assert program(value).stdout.strip() == calls


def test_a_word_that_is_neither_on_nor_off_is_refused() -> None:
    done = program("maybe")
    assert (done.returncode, "REEFKNOT_RETRY='maybe' is not accepted: on or off" in done.stderr) == (1, True)
