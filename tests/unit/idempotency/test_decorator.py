"""`@idempotent`: a function whose effect is guarded by a key, and the store in scope."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

import reefknot as rk
from reefknot import errors, testing
from reefknot.audit.model.event import IdempotencyEvent
from reefknot.errors import NoStoreError
from reefknot.idempotency import decorator as module
from reefknot.idempotency.decorator import in_scope, store_in_scope
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store
from tests.unit.idempotency.failing_store import actions_in, events_in


@dataclass
class Order:
    id: str
    cents: int = 100


class Receipt(rk.RetryPolicy):
    """Not something that JSON can be read as."""


async def test_the_effect_happens_once_for_each_key(url: str) -> None:
    charged: list[str] = []

    @rk.idempotent(key=lambda order: order.id)
    async def charge(order: Order) -> dict[str, int]:
        """Takes the money."""
        charged.append(order.id)
        return {"cents": order.cents}

    async with rk.open_store(url) as store:
        assert await charge(Order("a")) == {"cents": 100}
        assert await charge(Order("a")) == {"cents": 100}
        assert await charge(Order("b", 7)) == {"cents": 7}
        events = await events_in(store.audit)
    assert charged == ["a", "b"]
    assert [event.action for event in events if isinstance(event, IdempotencyEvent)] == ["record", "hit", "record"]
    assert {getattr(event, "operation", "") for event in events} == {charge.__qualname__}
    assert (charge.__name__, charge.__doc__) == ("charge", "Takes the money.")


def test_without_a_store_the_error_says_what_to_do() -> None:
    @rk.idempotent(key=lambda: "k")
    async def work() -> None: ...

    with pytest.raises(rk.NoStoreError, match="open_store"):
        testing.run_virtual(work())


async def test_a_store_given_is_used_whatever_is_in_scope() -> None:
    own = MemoryStore(VirtualClock())

    @rk.idempotent(key=lambda: "k", store=own)
    async def work() -> int:
        return 1

    async with rk.open_store("memory:") as other:
        await work()
        assert await actions_in(own.audit) == ["record"]
        assert await actions_in(other.audit) == []


async def test_how_an_argument_is_passed_is_no_other_payload_nor_are_self_and_what_json_cannot_say(url: str) -> None:
    @rk.idempotent(key=lambda order, **_: order.id)
    async def charge(order: Order, tags: set[int] | None = None, *, express: bool = False) -> int:
        return order.cents

    async with rk.open_store(url):
        await charge(Order("a"))
        await charge(order=Order("a"))
        await charge(Order("a"), express=False)
        await charge(order=Order("b"), tags={0, 8})  # these two sets are equal and iterate differently
        await charge(order=Order("b"), tags={8, 0})
        with pytest.raises(rk.KeyConflictError):
            await charge(Order("a"), express=True)

    class Till:
        @rk.idempotent(key=lambda self, order: order.id)
        async def charge(self, order: Order) -> int:
            return order.cents

    async with rk.open_store(url):
        assert await Till().charge(Order("a", 1)) == 1
        assert await Till().charge(Order("a", 1)) == 1
        with pytest.raises(rk.KeyConflictError):
            await Till().charge(Order("a", 2))

    @rk.idempotent(key=lambda number, thing: "k")
    async def work(number: float, thing: object) -> int:
        return 1

    async with rk.open_store(url):
        assert await work(float("nan"), object()) == 1
        assert await work(float("nan"), object()) == 1
        with pytest.raises(rk.KeyConflictError):
            await work(float("nan"), "a text")


@pytest.mark.parametrize(
    ("fingerprint", "refused"), [(False, False), (lambda order: order.id, False), (lambda order: order.cents, True)]
)
async def test_what_counts_as_the_payload_can_be_said(url: str, fingerprint: Any, refused: bool) -> None:
    @rk.idempotent(key=lambda order: order.id, fingerprint=fingerprint)
    async def charge(order: Order) -> int:
        return order.cents

    async with rk.open_store(url):
        assert await charge(Order("a", 1)) == 1
        if refused:
            with pytest.raises(rk.KeyConflictError):
                await charge(Order("a", 2))
        else:
            assert await charge(Order("a", 2)) == 1


async def test_dedup_passes_the_key_to_the_function(url: str) -> None:
    sent: list[str] = []

    @rk.idempotent(key=lambda order: order.id, mode="dedup", name="pay")
    async def pay(order: Order, *, idempotency_key: str = "") -> None:
        sent.append(idempotency_key)
        if len(sent) == 1:
            raise ConnectionError

    async with rk.open_store(url):
        with pytest.raises(ConnectionError):
            await pay(Order("a"))
        await pay(Order("a"))
        await pay(Order("a"))
    assert sent == ["pay:a", "pay:a"], "the same key each time, and none after the record"


def test_dedup_needs_a_function_that_takes_the_key() -> None:
    def decorated(fn: Callable[..., Any]) -> object:
        return rk.idempotent(key=lambda **_: "k", mode="dedup")(fn)

    async def takes_it(idempotency_key: str) -> None: ...
    async def takes_anything(**more: object) -> None: ...
    async def does_not() -> None: ...

    assert decorated(takes_it)
    assert decorated(takes_anything)
    with pytest.raises(rk.ParameterError, match="takes idempotency_key"):
        decorated(does_not)


async def test_a_caller_that_does_not_wait_gets_an_error_at_once(url: str) -> None:
    @rk.idempotent(key=lambda: "k", wait=0)
    async def slow() -> None:
        await asyncio.sleep(5)

    async with rk.open_store(url):
        first = asyncio.create_task(slow())
        await asyncio.sleep(1)
        with pytest.raises(rk.KeyInProgressError):
            await slow()
        await first


async def test_the_decorator_works_inside_and_outside_of_a_retry(url: str) -> None:
    calls = 0

    async def flaky() -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise ConnectionError
        return calls

    over = rk.idempotent(key=lambda: "over", name="over")(rk.retry(attempts=2)(flaky))
    under = rk.retry(attempts=2)(rk.idempotent(key=lambda: "under", name="under")(flaky))
    async with rk.open_store(url):
        assert [await over(), await over(), await under(), await under()] == [2, 2, 4, 4]


@pytest.mark.parametrize(("made", "text"), [("a", "a"), (7, "7"), (UUID(int=1), str(UUID(int=1)))])
async def test_a_key_is_a_text_a_number_or_a_uuid(made: object, text: str) -> None:
    @rk.idempotent(key=lambda: made, name="f")
    async def work() -> None: ...

    async with rk.open_store("memory:") as store:
        await work()
        assert await store.idempotency.get(f"f:{text}") is not None


@pytest.mark.parametrize("made", ["", None, True, 1.5, ("a",), b"a"])
async def test_other_keys_are_refused_before_anything_happens(made: object) -> None:
    calls = 0

    @rk.idempotent(key=lambda: made)
    async def work() -> None:
        nonlocal calls
        calls += 1

    async with rk.open_store("memory:"):
        with pytest.raises(rk.ParameterTypeError, match="key"):
            await work()
    assert calls == 0


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"key": "order.id"}, "key"),
        ({"mode": "txn"}, "mode"),
        ({"mode": "exactly-once"}, "mode"),
        ({"lease": 0}, "lease"),
        ({"lease": float("nan")}, "lease"),
        ({"lease": True}, "lease"),
        ({"wait": -1}, "wait"),
        ({"wait": float("inf")}, "wait"),
        ({"wait": "60"}, "wait"),
        ({"result_type": Receipt}, "result_type"),
        ({"result_type": 5}, "result_type"),
    ],
)
def test_mistakes_are_named_when_the_function_is_decorated(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(rk.ParameterError) as refused:
        rk.idempotent(**({"key": lambda: "k"} | options))
    assert refused.value.parameter == parameter


def test_two_functions_in_two_files_do_not_share_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_files", {})

    async def charge() -> None: ...

    async def elsewhere() -> None: ...

    elsewhere.__code__ = elsewhere.__code__.replace(co_filename="another/module.py")
    decorate = rk.idempotent(key=lambda: "k", name="charge")
    decorate(charge)
    decorate(charge)
    with pytest.raises(rk.ParameterError, match="keeps its records under this one"):
        decorate(elsewhere)


async def test_events_that_cannot_be_kept_are_kept_with_those_of_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    @rk.idempotent(key=lambda: "k")
    async def work() -> int:
        return 1

    async with rk.open_store("memory:") as store:
        await work()
        append = store.audit.append

        async def down(entries: object) -> Any:
            raise OSError("down")

        monkeypatch.setattr(store.audit, "append", down)
        await work()
        monkeypatch.setattr(store.audit, "append", append)
        await asyncio.sleep(2)
        await work()
        assert await actions_in(store.audit) == ["record", "hit", "hit"]


def test_a_wrong_form_and_an_unknown_setting_are_refused_with_the_right_one() -> None:
    async def charge(order: Order) -> None: ...

    with pytest.raises(TypeError, match=r"write @idempotent\(key=lambda order: order.id\)"):
        rk.idempotent(charge)
    with pytest.raises(TypeError, match="a function that makes the key"):
        rk.idempotent()
    with pytest.raises(rk.ParameterError, match="on_audit_failure='maybe' is not accepted: one of fail_open, fail_cl"):
        rk.idempotent(key=lambda: "k", on_audit_failure="maybe")


async def test_secrets_are_redacted_in_events_and_not_in_keys_or_results(url: str) -> None:
    @rk.idempotent(key=lambda token: f"card {token}", secrets=("hunter2hunter2",), name="pay.with_secrets")
    async def pay(token: str) -> str:
        return token

    async with rk.open_store(url) as store:
        assert await pay("hunter2hunter2") == "hunter2hunter2"
        (event,) = await events_in(store.audit)
        assert isinstance(event, IdempotencyEvent)
        assert event.idempotency_key == "pay.with_secrets:card [redacted]"
        assert await store.idempotency.get("pay.with_secrets:card hunter2hunter2") is not None


@pytest.mark.parametrize("setting", ["fail_open", "fail_closed", None])
async def test_on_audit_failure_says_how_to_fail(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[str] = []

    @rk.idempotent(key=lambda key: key, on_audit_failure=setting, name=f"charge.{setting}")
    async def charge(key: str) -> str:
        charged.append(key)
        return key

    async def down(*entries: object) -> None:
        raise OSError("no disk")

    store, other = MemoryStore(VirtualClock()), MemoryStore(VirtualClock())
    store.audit = other.audit  # a log of its own: its events are written when the change has happened
    with module.in_scope(store):
        monkeypatch.setattr(other.audit, "append", down)
        if setting != "fail_closed":
            assert [await charge("a"), await charge("b")] == ["a", "b"]
            return
        with pytest.raises(errors.AuditUnavailableError):
            await charge("a")
        with pytest.raises(errors.AuditUnavailableError):
            await charge("b")  # nothing begins while events of earlier work are on no record
        assert charged == ["a"]
        monkeypatch.undo()
        await asyncio.sleep(2)
        assert await charge("a") == "a"  # what has happened stays recorded


async def test_the_innermost_open_store_is_in_scope_also_for_tasks_started_inside() -> None:
    async def seen() -> object:
        return store_in_scope()

    async with open_store("memory:") as outer:
        assert store_in_scope() is outer
        async with open_store("memory:") as inner:
            assert store_in_scope() is inner
            assert await asyncio.create_task(seen()) is inner
        with pytest.raises(ZeroDivisionError):
            async with open_store("memory:"):
                raise ZeroDivisionError
    with pytest.raises(NoStoreError):
        store_in_scope()


async def test_a_store_is_in_scope_of_its_task_and_of_no_other_and_may_be_left_in_another() -> None:
    opened, looked = asyncio.Event(), asyncio.Event()

    async def opening() -> None:
        async with open_store("memory:"):
            opened.set()
            await looked.wait()

    task = asyncio.create_task(opening())
    await opened.wait()
    with pytest.raises(NoStoreError):
        store_in_scope()
    looked.set()
    await task

    scope = in_scope(MemoryStore(VirtualClock()))

    async def enter() -> None:
        scope.__enter__()

    await asyncio.create_task(enter())
    scope.__exit__(None, None, None)
    with pytest.raises(NoStoreError):
        store_in_scope()
