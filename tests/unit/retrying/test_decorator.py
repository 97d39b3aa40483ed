"""`@retry` on everything that can be called, and one request's override."""

import asyncio
import functools
import gc
import inspect
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

import reefknot as rk
from reefknot.retrying.functions import is_async
from reefknot.runtime.clocks import VirtualClock
from tests.unit.retrying.flaky import Always, AsyncFlaky, Flaky


class Client:
    """Fails twice, whichever way it is called."""

    calls = 0

    def __init__(self, word: str = "self") -> None:
        self.word = word

    @classmethod
    def fail(cls, times: int = 2) -> None:
        cls.calls += 1
        if cls.calls <= times:
            raise ConnectionError(f"call {cls.calls}")

    @rk.retry
    def method(self, x: int) -> str:
        """Doc of the method."""
        self.fail()
        return f"{self.word} {x}"

    @rk.retry(attempts=4)
    async def amethod(self, x: int) -> str:
        self.fail()
        return f"{self.word} {x}"

    @rk.retry
    @staticmethod
    def static_inside(x: int) -> int:
        Client.fail()
        return x

    @staticmethod
    @rk.retry(attempts=4)
    def static_outside(x: int) -> int:
        Client.fail()
        return x

    @rk.retry
    @classmethod
    def class_inside(cls, x: int) -> str:
        cls.fail()
        return f"{cls.__name__} {x}"

    @classmethod
    @rk.retry(attempts=4)
    def class_outside(cls, x: int) -> str:
        cls.fail()
        return f"{cls.__name__} {x}"

    @property
    @rk.retry
    def prop(self) -> str:
        self.fail()
        return self.word


class Sub(Client):
    """Inherits."""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Client.calls = Sub.calls = 0


def test_methods_of_every_kind_are_retried(no_wait: VirtualClock) -> None:
    client = Sub("me")

    def twice_failed(value: object) -> object:
        assert max(Client.calls, Sub.calls) == 3
        Client.calls = Sub.calls = 0
        return value

    assert twice_failed(client.method(1)) == "me 1"
    assert twice_failed(Sub.method(client, 2)) == "me 2"
    assert twice_failed(asyncio.run(client.amethod(3))) == "me 3"
    assert twice_failed(client.static_inside(4)) == 4
    assert twice_failed(Sub.static_outside(5)) == 5
    assert twice_failed(client.class_inside(6)) == "Sub 6"
    assert twice_failed(Sub.class_outside(7)) == "Sub 7"
    assert twice_failed(client.prop) == "me"


def test_one_requests_override_works_on_methods_of_every_kind(no_wait: VirtualClock) -> None:
    client = Sub("me")
    for call in (
        lambda: rk.using(client.method, attempts=2)(1),
        lambda: asyncio.run(rk.using(client.amethod, attempts=2)(1)),
        lambda: rk.using(client.static_inside, attempts=2)(1),
        lambda: rk.using(Client.static_outside, attempts=2)(1),
        lambda: rk.using(client.class_inside, attempts=2)(1),
        lambda: rk.using(Sub.class_outside, attempts=2)(1),
        lambda: Client.method.using(attempts=2)(client, 1),
    ):
        with pytest.raises(ConnectionError, match="call 2"):
            call()
        Client.calls = Sub.calls = 0
    Client.calls = Sub.calls = 9
    assert rk.using(client.method, attempts=2)(5) == "me 5"
    assert rk.using(Sub.class_outside, attempts=2)(6) == "Sub 6"


def test_an_override_leaves_the_function_as_it_was(no_wait: VirtualClock) -> None:
    fn = Always()
    call = rk.retry(attempts=5)(fn)
    for attempts, changed in ((2, call.using(attempts=2)), (3, call.using(attempts=2).using(attempts=3)), (5, call)):
        fn.calls = 0
        with pytest.raises(ConnectionError):
            changed()
        assert fn.calls == attempts


def test_an_override_keeps_what_it_does_not_name(virtual_time: VirtualClock) -> None:
    call = rk.retry(on=KeyError, attempts=3, base_delay=1, jitter="none")(Flaky(KeyError, KeyError))
    assert call.using(deadline=100)() == "ok"
    assert virtual_time.waits == [1, 2]


def test_an_override_reaches_the_decorated_function_in_a_partial_and_nothing_else(no_wait: VirtualClock) -> None:
    call = rk.using(functools.partial(rk.retry(Always()), 1, key=2), attempts=2)
    with pytest.raises(ConnectionError, match="call 2"):
        call()
    with pytest.raises(rk.ParameterTypeError, match="decorated with retry"):
        rk.using(len, attempts=2)


def test_name_doc_signature_origin_and_the_kind_of_function_are_kept() -> None:
    def fetch(url: str, *, timeout: float = 1.0) -> bytes:
        """Doc."""
        return b""

    call = rk.retry(fetch)
    assert (call.__name__, call.__doc__, call.__module__) == ("fetch", "Doc.", __name__)
    assert call.__qualname__ == fetch.__qualname__
    assert call.__wrapped__ is fetch
    assert inspect.signature(call) == inspect.signature(fetch)
    assert call.using(attempts=2).__wrapped__ is fetch
    assert Client.method.__doc__ == "Doc of the method."
    assert Client().method.__name__ == "method"

    async def coroutine() -> None: ...
    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    assert inspect.iscoroutinefunction(rk.retry(coroutine))
    assert inspect.iscoroutinefunction(rk.retry(deadline=1)(coroutine))
    assert inspect.isgeneratorfunction(rk.retry(generator))
    assert inspect.isasyncgenfunction(rk.retry(async_generator))
    assert inspect.isfunction(rk.retry(len))


def test_partials_callable_objects_builtins_lambdas_and_mocks_are_retried(no_wait: VirtualClock) -> None:
    plain: list[tuple[Any, tuple[Any, ...], object]] = [
        (functools.partial(Flaky(ConnectionError, ConnectionError), 1), (), "ok"),
        (Flaky(ConnectionError), (), "ok"),
        (lambda: Flaky()(), (), "ok"),
        (len, ([1],), 1),
        (MagicMock(side_effect=[ConnectionError, "ok"]), (), "ok"),
    ]
    for fn, args, value in plain:
        assert not is_async(fn)
        assert rk.retry(fn)(*args) == value
    awaited = AsyncFlaky(ConnectionError)
    for afn in (functools.partial(awaited, 1), awaited, AsyncMock(side_effect=[ConnectionError, "ok"])):
        assert is_async(afn)
        assert asyncio.run(rk.retry(afn)()) == "ok"


@pytest.mark.parametrize("policy", [5, "fast", {"attempts": 3}, rk.RetryPolicy])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    for use in (lambda: rk.retry(policy=policy), lambda: rk.Retrier(policy)):
        with pytest.raises(rk.ParameterTypeError, match="a RetryPolicy"):
            use()


@pytest.mark.parametrize("fn", [5, "f", int, Client, object()])
def test_what_cannot_be_retried_is_refused(fn: Any) -> None:
    for retry in (rk.retry, rk.retry()):
        with pytest.raises(rk.ParameterTypeError, match="a function to call for every attempt"):
            retry(fn)


@pytest.mark.parametrize(
    "give",
    [
        *(rk.retry, lambda given: rk.retry()(given), rk.Retrier().call, rk.Retrier().run),
        *(lambda given, use=use: asyncio.run(use(given)) for use in (rk.Retrier().acall, rk.Retrier().arun)),
    ],
)
def test_a_coroutine_object_is_refused_with_what_to_pass_and_without_complaints(give: Any) -> None:
    """It is closed: otherwise Python would warn of a coroutine that was never awaited."""
    with pytest.raises(rk.ParameterTypeError, match="pass the function itself"):
        give(AsyncFlaky()())
    gc.collect()


def test_only_a_coroutine_is_closed_when_it_is_refused() -> None:
    with socket.socket() as open_one:
        with pytest.raises(rk.ParameterTypeError):
            rk.retry(open_one)  # type: ignore[call-overload]  # that is the test
        assert open_one.fileno() != -1


def test_a_policy_or_a_retrier_can_be_given(no_wait: VirtualClock) -> None:
    for policy in (rk.RetryPolicy(2), rk.Retrier(rk.RetryPolicy(2)), rk.Retrier(attempts=2)):
        fn = Always()
        with pytest.raises(ConnectionError):
            rk.retry(policy=policy)(fn)()
        assert fn.calls == 2
        with pytest.raises(ConnectionError):
            rk.retry(policy=policy, attempts=3)(fn)()
        assert fn.calls == 5


# ---- `using` of a method ---------------------------------------------------------------------------------------------


class Store:
    """Methods of all kinds."""

    @rk.retry
    def get(self, path: object = "none") -> object:
        return path

    @rk.retry
    async def aget(self, path: object = "none") -> object:
        return path

    @classmethod
    @rk.retry
    def made(cls, path: object = "none") -> tuple[type, object]:
        return cls, path

    @staticmethod
    @rk.retry
    def static(path: object) -> object:
        return path


class SpecialStore(Store):
    @rk.retry
    def get(self, path: object = "none") -> object:  # type: ignore[override]  # another first parameter
        return Store.get.using(attempts=1)(self, path)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda store: store.get.using(attempts=1)("/a"), "get"),
        (lambda store: store.get.using(attempts=1)(), "get"),
        (lambda store: store.get.using(attempts=1)(path="/a"), "get"),
        (lambda store: store.get.using(attempts=1).using(deadline=3)({"get": 1}), "get"),
        (lambda store: asyncio.run(store.aget.using(attempts=1)("/a")), "aget"),
        (lambda store: store.made.using(attempts=1)("/a"), None),
    ],
)
def test_using_of_a_bound_method_says_how_to_keep_the_instance(call: Callable[[Any], Any], says: str | None) -> None:
    """A function's attribute does not know of the instance: the path would be taken for self."""
    of_instance = rf"^self=.*an instance of Store.*rk\.using\(obj\.{says}, …\)"
    with pytest.raises(
        rk.ParameterTypeError, match=of_instance if says else r"^cls='/a' .*rk\.using\(Store\.made, …\)"
    ):
        call(Store())


def test_using_with_its_instance_works_on_every_kind_of_method() -> None:
    store: Any = Store()
    assert Store.get.using(attempts=1)(store, "/a") == "/a"
    assert Store.get.using(attempts=1).using(attempts=2)(self=store, path="/a") == "/a"
    assert rk.using(store.get, attempts=1)("/a") == "/a"
    assert rk.using(rk.using(store.get, attempts=1), deadline=3)("/a") == "/a"
    assert asyncio.run(Store.aget.using(attempts=1)(store, "/a")) == "/a"
    assert asyncio.run(rk.using(store.aget, attempts=1)("/a")) == "/a"
    assert inspect.iscoroutinefunction(Store.aget.using(attempts=1))
    assert Store.static.using(attempts=1)("/a") == "/a"
    assert store.static.using(attempts=1)("/a") == "/a"
    assert rk.using(Store.made, attempts=1)("/a") == (Store, "/a")
    assert SpecialStore().get("/a") == "/a"
    assert Store.get.using(attempts=1)(SpecialStore(), "/b") == "/b"
    assert Store.get.using(attempts=1).__wrapped__ is Store.get.__wrapped__


def test_using_knows_a_method_under_another_decorator_and_a_function_with_a_parameter_named_self() -> None:
    class Client:
        @functools.cache  # noqa: B019 - any decorator that keeps `__wrapped__`
        @rk.retry
        def get(self, path: str) -> str:
            return path

    @rk.retry
    def get(self: str) -> str:
        return self

    assert Client.get.__wrapped__.using(attempts=1)(Client(), "/a") == "/a"  # type: ignore[attr-defined]
    assert get.using(attempts=1)("/a") == "/a"
