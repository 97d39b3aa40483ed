"""Attempts in threads: waited for, abandoned, never interrupted."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

import reefknot as rk
from reefknot.engines.clocks import VirtualClock
from tests.unit.retrying.flaky import Flaky

word: ContextVar[str] = ContextVar("word", default="outside")


class Stuck:
    """Work that hangs until it is let go."""

    def __init__(self, times: int = 99) -> None:
        self.let_go = threading.Event()
        self.ended = threading.Semaphore(0)
        self.calls = 0
        self.times = times

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            self.let_go.wait(10)
            self.ended.release()
        return "ok"


def test_an_attempt_in_a_thread_that_takes_too_long_is_abandoned_and_says_so(virtual_time: VirtualClock) -> None:
    stuck = Stuck()
    with pytest.raises(rk.AttemptTimeoutError, match="abandoned and may still be running") as raised:
        rk.retry(attempts=2, attempt_timeout=0.01, in_thread=True)(stuck)()
    assert raised.value.abandoned
    assert stuck.calls == 2
    assert stuck.ended.acquire(blocking=False) is False  # nobody interrupted it

    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)
    assert stuck.ended.acquire(timeout=5)


def test_a_later_attempt_in_a_thread_may_work(virtual_time: VirtualClock) -> None:
    stuck = Stuck(times=1)
    assert rk.retry(on=ConnectionError, attempt_timeout=0.01, in_thread=True)(stuck)() == "ok"
    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)


def test_the_deadline_ends_the_waiting_for_a_thread() -> None:
    stuck = Stuck()
    with pytest.raises(rk.DeadlineExceededError, match="abandoned") as raised:
        rk.retry(attempts=9, deadline=0.02, in_thread=True)(stuck)()
    assert (stuck.calls, raised.value.abandoned) == (1, True)
    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)


def test_an_error_in_the_thread_is_the_callers_error_with_its_traceback(no_wait: VirtualClock) -> None:
    original = KeyError("from the thread")

    def deep() -> None:
        raise original

    with pytest.raises(KeyError) as raised:
        rk.retry(in_thread=True)(lambda: deep())()
    assert raised.value is original
    assert raised.traceback[-1].name == "deep"


def test_run_and_call_use_the_thread_too(no_wait: VirtualClock) -> None:
    retrier = rk.Retrier(in_thread=True)
    here = threading.get_ident()
    assert retrier.call(threading.get_ident) != here
    assert retrier.run(threading.get_ident).value != here
    assert retrier.run(Flaky(ConnectionError)).attempts == 2


def test_the_thread_sees_the_callers_context() -> None:
    word.set("inside")
    assert rk.retry(in_thread=True)(word.get)() == "inside"
    word.set("outside")


def test_an_abandoned_attempt_counts_against_the_breaker() -> None:
    """Nobody waits for the thread to say so itself."""
    stuck = Stuck()
    breaker = rk.CircuitBreaker("slow", failures=1)
    with pytest.raises(rk.AttemptTimeoutError):
        rk.retry(on=ConnectionError, attempt_timeout=0.01, in_thread=True, breaker=breaker)(stuck)()
    assert breaker.state is rk.BreakerState.OPEN
    stuck.let_go.set()
    assert stuck.ended.acquire(timeout=5)
