"""
The contestants of the retry tables: the same order to everybody.

Three executions at most, only for `ConnectionError`, no wait, the last error to the caller. Where a peer cannot say a
part of it, `DIFFERENCES` tells. Loggers go to null handlers, so that nobody is charged for a terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import backoff
import funcy
import pyresilience
import stamina
import tenacity
from google.api_core import retry as api_core

from reefknot import retry

Function = Callable[[int], int]
AsyncFunction = Callable[[int], Awaitable[int]]

ATTEMPTS = 3
HAND = "hand loop"
PACKAGES = (
    "reefknot",
    "tenacity",
    "stamina",
    "backoff",
    "pyresilience",
    "google-api-core",
    "funcy",
    "prometheus-client",
)

LOGGERS = ("reefknot", "stamina", "backoff", "tenacity", "pyresilience", "google")

DIFFERENCES = """\
- A zero wait: tenacity, stamina, backoff, pyresilience and google-api-core call `time.sleep(0)`, which gives the
  processor away and comes back after the kernel's timer slack. reefknot, funcy and the hand loop do not sleep.
- tenacity builds a state object and a list of actions for every call, and keeps statistics.
- stamina is tenacity underneath, with safer defaults. It counts and logs every retry; with the Prometheus client
  installed, as here, it also bumps a counter.
- backoff computes the elapsed time of every call and passes a details dictionary to handlers.
- pyresilience is built to hold a breaker, a bulkhead, a cache and listeners as well; here it only retries.
- google-api-core has no limit of attempts, only of time, and builds a sleep generator for every call. For coroutines it
  has another class, which is not measured.
- funcy does the least: no clock, no log, no hints, no async. On the failing path it is ahead of reefknot.
- The hand loop is the loop as people write it, around one function it knows by name:
  `for attempt in range(3): try: return work(x)`."""


@contextmanager
def silence() -> Iterator[None]:
    """Everybody's log lines are made as usual, and go nowhere."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


def hand_loop(work: Function) -> Function:
    """The loop as one writes it around a call."""

    def hand(x: int) -> int:
        for attempt in range(ATTEMPTS):
            try:
                return work(x)
            except ConnectionError:
                if attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    return hand


def terse_loop(work: Function) -> Function:
    """The cheapest loop there is: no range, no iterator."""

    def terse(x: int) -> int:
        attempt = 1
        while True:
            try:
                return work(x)
            except ConnectionError:
                if attempt == ATTEMPTS:
                    raise
                attempt += 1

    return terse


def loop_for_any(work: Function) -> Function:
    """The hand loop as a decorator for any function, which is what a library has to be."""

    def looped(*args: Any, **kwargs: Any) -> int:
        for attempt in range(ATTEMPTS):
            try:
                return work(*args, **kwargs)
            except ConnectionError:
                if attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    return looped


def hand_loop_async(work: AsyncFunction) -> AsyncFunction:
    async def hand(x: int) -> int:
        for attempt in range(ATTEMPTS):
            try:
                return await work(x)
            except ConnectionError:
                if attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    return hand


def ours(work: Any, **options: Any) -> Any:
    return retry(on=ConnectionError, attempts=ATTEMPTS, base_delay=0, **options)(work)


def with_tenacity(work: Any, **options: Any) -> Any:
    decorate = tenacity.retry(
        retry=tenacity.retry_if_exception_type(ConnectionError),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_none(),
        reraise=True,
        **options,
    )
    return decorate(work)


def with_stamina(work: Any) -> Any:
    decorate = stamina.retry(
        on=ConnectionError, attempts=ATTEMPTS, timeout=None, wait_initial=0, wait_max=0, wait_jitter=0
    )
    return decorate(work)


def with_backoff(work: Any) -> Any:
    decorate = backoff.on_exception(backoff.constant, ConnectionError, max_tries=ATTEMPTS, jitter=None, interval=0)
    return decorate(work)


def with_pyresilience(work: Any) -> Any:
    order = pyresilience.RetryConfig(max_attempts=ATTEMPTS, delay=0.0, jitter=False, retry_on=(ConnectionError,))
    return pyresilience.resilient(retry=order)(work)


def with_api_core(work: Function) -> Function:
    decorate = api_core.Retry(
        predicate=api_core.if_exception_type(ConnectionError), initial=0.0, maximum=0.0, timeout=None
    )
    wrapped: Function = decorate(work)
    return wrapped


def with_funcy(work: Function) -> Function:
    wrapped: Function = funcy.retry(ATTEMPTS, errors=ConnectionError)(work)
    return wrapped


SYNC_PEERS: dict[str, Callable[[Any], Any]] = {
    "funcy": with_funcy,
    "google-api-core": with_api_core,
    "pyresilience": with_pyresilience,
    "backoff": with_backoff,
    "stamina": with_stamina,
    "tenacity": with_tenacity,
}
ASYNC_PEERS: dict[str, Callable[[Any], Any]] = {
    "pyresilience": with_pyresilience,
    "backoff": with_backoff,
    "stamina": with_stamina,
    "tenacity": with_tenacity,
}
