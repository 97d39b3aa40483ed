"""
The public surface as type checkers see it. This file is not run: mypy and pyright read it, both strict.

A wrong use carries both checkers' marks; a mark that is not needed is itself an error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, assert_type

import reefknot as rk


# ---- functions: with and without options -----------------------------------------------------------------------------
@rk.retry
def bare(url: str, *, size: int = 1) -> bytes:
    return b""


@rk.retry(on=(ConnectionError, TimeoutError), attempts=5, deadline=10)
def configured(url: str) -> bytes:
    return b""


@rk.retry
async def abare(url: str) -> bytes:
    return b""


@rk.retry(policy=rk.RetryPolicy(max_attempts=2), jitter="full", strategy="linear", throttle="billing")
async def aconfigured(url: str, size: int) -> bytes:
    return b""


assert_type(bare("x", size=2), bytes)
assert_type(configured("x"), bytes)
assert_type(bare.using(attempts=2)("x"), bytes)
assert_type(bare.using(attempts=2).using(deadline=None)("x", size=3), bytes)
assert_type(rk.using(bare, attempts=2)("x", size=1), bytes)
assert_type(bare.__name__, str)

bare(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bare("x", 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
configured()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
bare.using(atempts=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
bare.using(attempts="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
rk.using(bare, attempts=2)(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
assert_type(bare.statistics.calls, int)

# ---- names that are not there ----------------------------------------------------------------------------------------
rk.retri()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
rk.Retryer()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
rk.testing.waits()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


async def awaited() -> None:
    assert_type(await abare("x"), bytes)
    assert_type(await aconfigured("x", 1), bytes)
    assert_type(await abare.using(attempts=2)("x"), bytes)
    assert_type(await rk.using(abare, attempts=2)("x"), bytes)
    await abare(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


acoroutine: Coroutine[Any, Any, bytes] = abare("x")
as_argument: Callable[[str], bytes] = configured
as_async_argument: Callable[[str], Awaitable[bytes]] = abare


# ---- methods ---------------------------------------------------------------------------------------------------------
class Client:
    @rk.retry
    def method(self, x: int) -> str:
        return str(x)

    @rk.retry(attempts=2)
    async def amethod(self, x: int) -> str:
        return str(x)

    @staticmethod
    @rk.retry
    def static(x: int) -> str:
        return str(x)

    @staticmethod
    @rk.retry(attempts=2)
    def static_configured(x: int) -> str:
        return str(x)

    @classmethod
    @rk.retry
    def made(cls, x: int) -> str:
        return str(x)

    @classmethod
    @rk.retry(attempts=2)
    def made_configured(cls, x: int) -> str:
        return str(x)


class Special(Client):
    pass


client = Special()
assert_type(client.method(1), str)
assert_type(Client.method(client, 1), str)
assert_type(rk.using(client.method, attempts=2)(1), str)
assert_type(Client.method.using(attempts=2)(client, 1), str)
assert_type(client.static(1), str)
assert_type(Client.static(1), str)
assert_type(client.static_configured(1), str)
assert_type(rk.using(Client.static, attempts=2)(1), str)
assert_type(client.made(1), str)
assert_type(Client.made(1), str)
assert_type(Special.made_configured(1), str)
assert_type(rk.using(Client.made, attempts=2)(1), str)


async def methods_awaited() -> None:
    assert_type(await client.amethod(1), str)
    assert_type(await rk.using(client.amethod, attempts=2)(1), str)


client.method("x")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
client.static("x")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
Client.made("x")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


# ---- generators ------------------------------------------------------------------------------------------------------
@rk.retry
def items(n: int) -> Iterator[int]:
    yield n


@rk.retry(attempts=2)
def talk() -> Generator[int, str, bool]:
    yield 1
    return True


@rk.retry
async def aitems(n: int) -> AsyncIterator[int]:
    yield n


@rk.retry(attempts=2)
async def atalk() -> AsyncGenerator[int, str]:
    yield 1


assert_type(items(1), Iterator[int])
assert_type(talk(), Generator[int, str, bool])
assert_type(aitems(1), AsyncIterator[int])
assert_type(atalk(), AsyncGenerator[int, str])

# ---- Retrier ---------------------------------------------------------------------------------------------------------
retrier = rk.Retrier(rk.RetryPolicy(max_attempts=5, base_delay=0.2, jitter="full", time_budget=30), on=ConnectionError)


def fetch(url: str, *, size: int = 1) -> int:
    return size


async def afetch(url: str) -> int:
    return 1


assert_type(retrier.call(fetch, "x", size=2), int)
assert_type(retrier.run(fetch, "x"), rk.Outcome[int])
assert_type(retrier.run(fetch, "x").value, int | None)
assert_type(retrier.run(fetch, "x").unwrap(), int)
assert_type(retrier.run(fetch, "x").error, Exception | None)
assert_type(retrier.run(fetch, "x").reason, rk.Reason | None)
assert_type(retrier.run(fetch, "x").history, tuple[rk.AttemptRecord, ...])
assert_type(retrier.using(attempts=2), rk.Retrier)
retrier.call(fetch, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
retrier.call(fetch)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
retrier.run(fetch, "x", sise=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def retrier_awaited() -> None:
    assert_type(await retrier.acall(afetch, "x"), int)
    assert_type(await retrier.arun(afetch, "x"), rk.Outcome[int])
    await retrier.acall(fetch, "x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await retrier.acall(afetch("x"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    async for attempt in retrier.attempts():
        with attempt:
            attempt.value = await afetch("x")


for turn in retrier.attempts():
    with turn:
        turn.value = fetch("x")
    assert_type(turn.number, int)
    assert_type(turn.history, tuple[rk.AttemptRecord, ...])


# ---- options ---------------------------------------------------------------------------------------------------------
def seconds(error: Exception) -> float:
    return 1.0


def yes_or_seconds(error: Exception) -> bool | float:
    return True


def hook(event: rk.RetryEvent) -> None:
    assert_type(event.delay, float | None)


async def ahook(event: rk.RetryEvent) -> None: ...


rk.retry(on=seconds)
rk.retry(on=yes_or_seconds)
rk.retry(on=rk.http_errors, on_retry=hook, on_give_up=hook, on_recover=hook)
rk.retry(on=[KeyError, ValueError], throttle=rk.RetryThrottle(), breaker=rk.CircuitBreaker("x"), in_thread=True, seed=1)
rk.retry(on_retry=ahook, on_result=lambda value: value is None, raise_result=True, log=False)
rk.retry(wait=[1, 2.5], stop=threading.Event(), log="info")
rk.retry(wait=lambda attempt: attempt * 2.0, stop=asyncio.Event(), log=logging.getLogger("mine"))
rk.retry(wait=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
rk.retry(stop=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
rk.retry(on=KeyboardInterrupt)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
rk.retry(on=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
rk.retry(jitter="wild")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
rk.retry(policy=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]

# ---- breaker ---------------------------------------------------------------------------------------------------------
breaker = rk.CircuitBreaker("billing")
assert_type(breaker.call(fetch, "x"), int)
assert_type(breaker(fetch)("x", size=2), int)
breaker.call(fetch, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def breaker_awaited() -> None:
    assert_type(await breaker.acall(afetch, "x"), int)
    assert_type(await breaker(afetch)("x"), int)


# ---- testing ---------------------------------------------------------------------------------------------------------
assert_type(rk.testing.run_virtual(afetch("x")), int)
with rk.testing.virtual_time() as clock:
    assert_type(clock.waited, float)
    assert_type(clock.waits, list[float])
