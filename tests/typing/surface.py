"""
The public surface as type checkers see it. This file is not run: mypy and pyright read it, both strict.

A wrong use carries both checkers' marks; a mark that is not needed is itself an error.
"""

import asyncio
import logging
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict, assert_type

import msgspec
import pydantic

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
bare.using(atempts=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
bare.using(attempts="2")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
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
rk.retry(on=lambda error: re.search("5..", str(error)), on_result=lambda value: value["errors"])
rk.retry(on=lambda error: timedelta(seconds=1), deadline=timedelta(minutes=1), wait=[timedelta(seconds=1), 2])
rk.retry(on=lambda error: rk.RetryAfter(1), wait=lambda attempt: attempt.error.retry_in, before=hook, after=ahook)


async def apredicate(error: Exception) -> bool:
    return True


def number(attempt: int) -> float:
    return 2.0 * attempt


rk.retry(on=apredicate, on_result=apredicate, wait=number)
rk.retry(wait=lambda attempt: "soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
rk.retry(before=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
rk.retry(deadline="10")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


# ---- options in a dictionary -----------------------------------------------------------------------------------------
def decorates(given: dict[str, Any], options: rk.RetryKeywords) -> None:
    @rk.retry(**given)
    def by_dict(url: str) -> bytes:
        return b""

    @rk.retry(**given)
    async def aby_dict(url: str) -> bytes:
        return b""

    @rk.retry(**options)
    def by_keywords(url: str) -> bytes:
        return b""

    # For mypy the value is `bytes | Any`, as a fallback may be among the options: what bytes cannot be is refused.
    as_function: Callable[[str], bytes] = by_dict
    as_async: Callable[[str], Awaitable[bytes]] = aby_dict
    as_other: Callable[[str], bytes] = by_dict.using(**given)
    print(as_function, as_async, as_other)
    by_dict(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    by_dict("x").nothing()  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    by_dict.using(atempts=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    rk.retry(**given, atempts=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    assert_type(by_keywords("x"), bytes)
    assert_type(by_keywords.using(**options)("x"), bytes)
    assert_type(rk.using(by_keywords, **options)("x"), bytes)


# ---- fallback --------------------------------------------------------------------------------------------------------
@rk.retry(attempts=2, fallback=None)
def or_none(url: str) -> bytes:
    return b""


def attempt_of(event: rk.RetryEvent) -> int:
    return event.attempt


@rk.retry(fallback=attempt_of)
def or_attempt(url: str) -> bytes:
    return b""


async def acached(event: rk.RetryEvent) -> str:
    return ""


@rk.retry(fallback=acached)
async def or_cached(url: str) -> bytes:
    return b""


@rk.retry(fallback=0)
async def or_zero(url: str) -> bytes:
    return b""


class Prices:
    @rk.retry(fallback=0)
    def of(self, name: str) -> str:
        return name


class Cached:
    @rk.retry
    async def get(self, name: str) -> bytes:
        return b""


assert_type(bare.using(fallback=None)("x", size=2), bytes | None)
assert_type(bare.using(fallback=attempt_of, attempts=2)("x"), bytes | int)
assert_type(Client.method.using(fallback=0)(client, 1), str | int)
bare.using(fallback=None)(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bare.using(fallback=None, atempts=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
assert_type(or_none("x"), bytes | None)
assert_type(or_attempt("x"), bytes | int)
assert_type(Prices().of("x"), str | int)
assert_type(rk.Retrier(fallback=0).call(fetch, "x"), int)
assert_type(rk.Retrier(fallback="").call(fetch, "x"), int | str)
assert_type(rk.Retrier(fallback="").run(fetch, "x"), rk.Outcome[int | str])
assert_type(rk.Retrier().using(fallback="").call(fetch, "x"), int | str)
or_none(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def fallback_awaited() -> None:
    assert_type(await or_cached("x"), bytes | str)
    assert_type(await or_zero("x"), bytes | int)
    assert_type(await abare.using(fallback=acached)("x"), bytes | str)
    assert_type(await abare.using(fallback=attempt_of)("x"), bytes | int)
    assert_type(await abare.using(fallback=None)("x"), bytes | None)
    assert_type(await Cached.get.using(fallback=None)(Cached(), "x"), bytes | None)
    assert_type(await rk.Retrier(fallback=acached).acall(afetch, "x"), int | str)


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


# ---- limit -----------------------------------------------------------------------------------------------------------
limit = rk.Limit("billing", rate="10/s", burst=20, running=5, timeout=timedelta(seconds=5))
assert_type(limit(fetch)("x", size=2), int)
assert_type(limit.try_acquire(timeout=timedelta(seconds=1)), bool)
with limit, limit.within(5):
    limit.acquire(timeout=1)
    limit.release()
rk.retry(limit=limit)
rk.retry(limit="billing")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
rk.Limit("billing", rate=10)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def limit_awaited() -> None:
    assert_type(await limit(afetch)("x"), int)
    assert_type(await limit.atry_acquire(timeout=1), bool)
    async with limit, limit.within(5):
        await limit.aacquire()


# ---- testing ---------------------------------------------------------------------------------------------------------
assert_type(rk.testing.run_virtual(afetch("x")), int)
with rk.testing.virtual_time() as clock:
    assert_type(clock.waited, float)
    assert_type(clock.waits, list[float])
with rk.testing.system_sync(modules=["steps"], config={"worker": {}}) as tested:
    assert_type(tested, rk.testing.SyncVirtualSystem)
    assert_type(tested.submit("a.b", {"id": 7}, delay=timedelta(hours=1)), rk.testing.SyncVirtualJob)
    assert_type(tested.job("x").result(timedelta(hours=1)), rk.ExecResult)
    tested.advance(timedelta(hours=1))
    tested.fail("a.b", times=2, error=ConnectionError)
    for tested_answer in tested.submit_many([{"job_type": "a.b", "deadline": 5}, ("a.b", None)]):
        assert_type(tested_answer, rk.testing.SyncVirtualJob | rk.QueueFullError | rk.KeyConflictError)
    tested.submit_many([{"job_type": "a.b", "deadlin": 5}])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    tested.submit("a.b", deadlin=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tested.advance("1h")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tested.fail("a.b", error="refused")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def tests_a_system() -> None:
    async with rk.testing.system("steps", workers=2) as tested:
        assert_type(tested, rk.testing.VirtualSystem)
        assert_type(await tested.run("a.b", {}, timeout=5), rk.ExecResult)
        assert_type(await (await tested.submit("a.b")).wait(), str)
        for answer in await tested.submit_many([("a.b", {"id": 7})]):
            assert_type(answer, rk.testing.VirtualJob | rk.QueueFullError | rk.KeyConflictError)
        await tested.run("a.b", timeut=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# ---- clients ---------------------------------------------------------------------------------------------------------
async def submits(given: dict[str, Any], items: list[rk.SubmitItem]) -> None:
    async with rk.connect(config="reefknot.yaml", create=False) as connected:
        assert_type(connected, rk.Client)
        handle = await connected.submit("a.b", given, deadline=timedelta(minutes=1), delay=5, assignment_id="x")
        assert_type(handle, rk.Handle)
        assert_type(await connected.job("x", tenant_id="acme").wait(timedelta(seconds=1)), str)
        assert_type(await handle.result(5), rk.ExecResult)
        await connected.submit("a.b", given, deadlin=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        await connected.submit("a.b", deadline="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await connected.run("a.b", timeut=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        await connected.submit("a.b", 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        for answer in await connected.submit_many([{"job_type": "a.b", "deadline": 5}, ("a.b", given), *items]):
            assert_type(answer, rk.Handle | rk.QueueFullError | rk.KeyConflictError)
        later = await connected.submit("a.b", after=[handle, "order-7"])
        await later.cancel("withdrawn", tree=True)
        once = await connected.submit("a.b", unique="report", for_=timedelta(hours=1))
        assert_type(once.is_new, bool)
        await connected.submit("a.b", unique=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await connected.hand_in({"job": {"type": "a.b"}}, unique="report", for_=3600)
        await connected.submit("a.b", after=[7])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
        await connected.submit_many([{"job_type": "a.b", "deadlin": 5}])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
        await connected.submit_many([{"inputs": given}])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


def submits_without_a_loop(given: dict[str, Any], options: rk.SubmitOptions) -> None:
    with rk.connect_sync() as connected:
        assert_type(connected, rk.SyncClient)
        assert_type(connected.submit("a.b", given, **options), rk.SyncHandle)
        assert_type(connected.job("x").status(), str)
        assert_type(connected.run("a.b", given, timeout=timedelta(seconds=3)), rk.ExecResult)
        connected.submit("a.b", given, deadlin=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        connected.run("a.b", retries="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        connected.hand_in({"job": {"type": "a.b"}}, dealy=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        connected.job("x", tennant_id="y")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    rk.connect_sync(creat=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with rk.system_sync(modules="steps", drain=timedelta(seconds=5)) as served:
        assert_type(served, rk.SyncClient)
    rk.system_sync(module="steps")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def serves(connect: Callable[[], AbstractAsyncContextManager[rk.ClientLike]]) -> None: ...


def serves_without_a_loop(connect: Callable[[], AbstractContextManager[rk.SyncClientLike]]) -> None: ...


serves(rk.connect)
serves(lambda: rk.system(modules="steps"))
serves(rk.testing.system)
serves(rk.connect_sync)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
serves_without_a_loop(rk.connect_sync)
serves_without_a_loop(rk.system_sync)
serves_without_a_loop(rk.testing.system_sync)


async def runs_a_system_of_its_own() -> None:
    async with rk.system("memory:", modules=["steps", rk.testing], workers=2, sources=True) as served:
        assert_type(served, rk.Client)
    rk.system(workers="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- idempotent ------------------------------------------------------------------------------------------------------
@rk.idempotent(key=str, lease=timedelta(seconds=5))
def plain_charge(order: str) -> int:
    return 1


@rk.idempotent(key=str)
async def async_charge(order: str) -> int:
    return 1


with rk.connect_sync("memory:") as sync_client:

    @rk.idempotent(key=str, store=sync_client)
    def charge_of_client(order: str) -> int:
        return 1


assert_type(plain_charge("x"), int)
assert_type(charge_of_client("x"), int)
plain_charge(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def idempotent_awaited() -> None:
    assert_type(await async_charge("x"), int)


# ---- steps -----------------------------------------------------------------------------------------------------------
@dataclass
class Order:
    amount: int


class OrderModel(pydantic.BaseModel):
    amount: int


class OrderStruct(msgspec.Struct):
    amount: int


class OrderDict(TypedDict):
    amount: int


@rk.block("order.plain")
def plain_step(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    assert_type(context.attempt, int)
    return {"amount": inputs["amount"]}


@rk.block("order.mapping", attempts=3, base_delay=timedelta(seconds=1), max_delay=60, multiplier=2, jitter="full")
async def mapping_step(inputs: Mapping[str, Any], context: rk.BlockContext) -> Mapping[str, int] | None:
    return None


@rk.block("order.dataclass", timeout=30, attempt_timeout=5.5, resource_class="emails", destination="mail.example.com")
async def dataclass_step(inputs: Order, context: rk.BlockContext) -> Order:
    return inputs


@rk.block("order.model")
async def model_step(inputs: OrderModel, context: rk.BlockContext) -> OrderModel:
    return inputs


@rk.block("order.struct")
def struct_step(inputs: OrderStruct, context: rk.BlockContext) -> OrderStruct:
    return inputs


@rk.block("order.dict")
async def dict_step(inputs: OrderDict, context: rk.BlockContext) -> OrderDict:
    return inputs


@rk.block("order.result")
def result_step(inputs: dict[str, Any], context: rk.BlockContext) -> rk.StepResult:
    return rk.StepResult(rk.StepStatus.ERROR, rk.ErrorCode.invalid_input, error_message="amount: at least 1")


@rk.block("order.on", on=(ConnectionError, KeyError))
def classes_step(inputs: dict[str, Any], context: rk.BlockContext) -> None: ...


@rk.block("order.predicate", on=lambda error: re.search("busy", str(error)))
def predicate_step(inputs: dict[str, Any], context: rk.BlockContext) -> None: ...


@rk.block("order.seconds", on=yes_or_seconds)
async def seconds_step(inputs: dict[str, Any], context: rk.BlockContext) -> None: ...


@rk.block("order.wrong", on=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def wrong_on_step(inputs: dict[str, Any], context: rk.BlockContext) -> None: ...


@rk.block("order.long")
async def long_step(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    assert_type(await context.checkpoint({"page": 1}), None)
    assert_type(context.last_checkpoint, Any)
    assert_type(context.progress(1, 10, "one"), None)
    context.progress(0.5)
    context.log("a line")
    context.log(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    context.progress("half")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@rk.block("order.long.plain")
def long_plain_step(inputs: dict[str, Any], context: rk.BlockContext) -> None:
    context.checkpoint([1, 2])
    context.notes = context.notes  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


@rk.block("order.chain")
async def chain_step(inputs: dict[str, Any], context: rk.BlockContext) -> rk.FollowUp:
    assert_type(context.then("order.mail", {"id": 7}, delay=timedelta(minutes=1)), rk.FollowUp)
    return rk.then("order.pay", {"id": 7}, retries=3)


@rk.block("order.chord")
async def chord_step(inputs: dict[str, Any], context: rk.BlockContext) -> rk.Gather:
    assert_type(await context.children(), list[rk.ExecResult])
    return rk.gather(*[rk.then("order.pay") for _ in range(3)], then=rk.then("order.report"), return_failures=True)


@rk.block("order.group")
def group_step(inputs: dict[str, Any], context: rk.BlockContext) -> list[rk.FollowUp]:
    for result in context.children():
        assert_type(result, rk.ExecResult)
    return [rk.then("order.pay", {"id": 7})]


rk.then("order.pay", dealy=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
rk.gather("order.pay")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

assert_type(plain_step({}, rk.BlockContext("a", 1, "a/0", 30.0)), dict[str, Any])
long_plain_step({}, rk.BlockContext("a", 1, "a/0", 30.0, last_checkpoint=7))
struct_step(Order(1), rk.BlockContext("a", 1, "a/0", 30.0))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@rk.block("order.typo", atempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
def typo_step(inputs: dict[str, Any], context: rk.BlockContext) -> None: ...


@rk.block("order.text", attempts="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def text_step(inputs: dict[str, Any], context: rk.BlockContext) -> None: ...


@rk.block("order.number")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def number_step(inputs: dict[str, Any], context: rk.BlockContext) -> int:
    return 1


@rk.block("order.alone")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def alone_step(inputs: dict[str, Any]) -> None: ...
