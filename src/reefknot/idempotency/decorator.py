"""
`@idempotent`: guards the effect of a function by a key made from its arguments.

    @rk.idempotent(key=lambda order: order.id)
    async def charge(order): ...

The record is kept under the function's name and the key, in the store in scope: `async with open_store(…)` sets it for
the code inside, `with connect_sync(…)` for plain functions. Every caller of a key gets the recorded result, the first
one too: as JSON gives it back, or as `result_type`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, Signature, signature, unwrap
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, get_type_hints, overload
from uuid import UUID

import msgspec

from reefknot import clock
from reefknot.audit.journal import Journal, OnFailure, envelope
from reefknot.audit.model.event import IdempotencyEvent
from reefknot.core import checks
from reefknot.core.canonical import canonical, check_returned, checked_result_type, json_value
from reefknot.core.canonical import fingerprint as fingerprint_of
from reefknot.core.redaction import Redactor
from reefknot.errors import NoStoreError, NotJsonError, ParameterError, ParameterTypeError
from reefknot.idempotency.events import KeyEvents
from reefknot.idempotency.once import KeyOptions, Mode, Once, mode_named
from reefknot.idempotency.plain_functions import (
    CallersWork,
    SyncStore,
    home_of_store,
    loop_of,
    refuse_running_loop,
    run_on,
)
from reefknot.retrying.functions import ASYNC_GENERATOR, GENERATOR, code_flags, is_async, name_of

if TYPE_CHECKING:
    from reefknot.stores.port import Store

P = ParamSpec("P")
R = TypeVar("R")

current_store: ContextVar[Store | None] = ContextVar("reefknot_store", default=None)
_KEY_PARAMETER = "idempotency_key"
_REQUIRED: Any = None
"""Default of a required parameter, so that its absence gets an error that helps."""
_files: dict[str, str] = {}
"""The file in which the function of each record name is written."""


def store_in_scope() -> Store:
    """The innermost open store; `NoStoreError` if no store is open."""
    store = current_store.get()
    if store is None:
        raise NoStoreError
    return store


@contextmanager
def in_scope(store: Store, home: asyncio.AbstractEventLoop | SyncStore | None = None) -> Iterator[None]:
    """Make `store` the store in scope for the code inside, its tasks and threads; `home` is where it is open."""
    token, token_of_home = current_store.set(store), home_of_store.set(home)
    try:
        yield
    finally:
        with suppress(ValueError):  # exited in another context than it was entered in, which never saw the store
            current_store.reset(token)
            home_of_store.reset(token_of_home)


class IdempotentDecorator(Protocol):
    """The result of `idempotent(…)`: a decorator that keeps the type of the function."""

    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]: ...


def idempotent(
    *bare: Any,
    key: Callable[..., object] = _REQUIRED,
    mode: Mode | str = Mode.RETRY,
    lease: checks.Seconds = 60.0,
    wait: checks.Seconds = 60.0,
    store: Store | SyncStore | None = None,
    result_type: Any = Any,
    fingerprint: Callable[..., object] | bool = True,
    name: str = "",
    secrets: tuple[str, ...] = (),
    on_audit_failure: OnFailure | str | None = None,
) -> IdempotentDecorator:
    """
    Guard a function by a key made from its arguments.

    A plain function runs in the thread that calls it, and reaches the store of `with connect_sync(…)`, of a client in
    `store=`, or of the `async with open_store(…)` whose code called it in a thread.

    `mode` is the guarantee: `retry` at least once, `guard` at most once, `dedup` once where the receiver deduplicates
    on the `idempotency_key` that the function is given. `wait` is how many seconds a later caller waits for the first
    one; with 0 it gets `KeyInProgressError` at once. The arguments' fingerprint detects a key that is reused for
    another payload; `fingerprint=False` turns that off, a function returns what to compare.

    `result_type` is the type that every caller gets the result as: a dataclass, a pydantic model, a `msgspec.Struct`,
    an attrs class, a collection of them and so on. Without it, callers get JSON: a dictionary for a model.

    `secrets` are redacted in events and recorded failures. `on_audit_failure` says what happens when events cannot be
    kept: `fail_open` goes on; `fail_closed` raises `AuditUnavailableError`, before the work begins or after it.
    """
    if bare:
        accepted = "keywords only: write @idempotent(key=lambda order: order.id), with a function that makes the key"
        raise ParameterTypeError("idempotent", bare[0], accepted)
    if not callable(key):
        raise ParameterTypeError("key", key, "a function that makes the key from the arguments")
    options = KeyOptions(
        mode_named(mode),
        checks.seconds("lease", lease),
        checks.seconds("wait", wait, or_zero=True),
        result_type=checked_result_type(result_type),
    )
    on_failure = None if on_audit_failure is None else checks.choice("on_audit_failure", on_audit_failure, OnFailure)
    guard = _Guard(key, options, store, fingerprint, Redactor(secrets), on_failure)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(fn) or code_flags(fn) & (GENERATOR | ASYNC_GENERATOR):
            raise ParameterTypeError("fn", fn, "a function that returns its result, plain or async")
        if options.mode is Mode.DEDUP and not _takes_key(signature(fn)):
            raise ParameterError("mode", mode, f"for a function that takes {_KEY_PARAMETER}, for its receiver")
        if result_type is Any:
            check_returned(getattr(fn, "__name__", "fn"), _return_annotation(fn))
        own_name = _unique_name(fn, name or name_of(fn))
        if not is_async(fn):
            return _guarded_plain(fn, own_name, guard)
        if hasattr(store, "call"):
            raise ParameterTypeError("store", store, "a store for an async function; a sync client for a plain one")
        return _guarded(fn, own_name, guard)

    return decorate


class _Guard(msgspec.Struct, frozen=True):
    """Arguments of one `@idempotent`, checked."""

    key: Callable[..., object]
    options: KeyOptions
    store: Store | SyncStore | None
    fingerprint: Callable[..., object] | bool
    redactor: Redactor
    on_failure: OnFailure | None


def _guarded(fn: Callable[P, Awaitable[R]], name: str, guard: _Guard) -> Callable[P, Coroutine[Any, Any, R]]:
    shape = signature(fn)

    @wraps(fn)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        store: Any = store_in_scope() if guard.store is None else guard.store
        made = _MadeKey(name, guard, shape, args, kwargs)
        answer: R = await made.result(store, lambda: fn(*args, **made.with_key(kwargs)))
        return answer

    return call


def _guarded_plain(fn: Callable[P, R], name: str, guard: _Guard) -> Callable[P, R]:
    shape = signature(fn)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_running_loop(name)
        store, loop = _reached(guard.store)
        made = _MadeKey(name, guard, shape, args, kwargs)
        work = CallersWork(lambda: fn(*args, **made.with_key(kwargs)))
        answer: R = run_on(loop, store, work, made.result(store, work.run))
        return answer

    return call


def _reached(given: Any) -> tuple[Store, asyncio.AbstractEventLoop]:
    """The store of a plain function, and the loop in which it is open."""
    home: Any = given if hasattr(given, "call") else home_of_store.get()
    if home is None:
        raise NoStoreError
    loop = loop_of(home)
    if hasattr(home, "call") and (given is None or given is home):
        return home.store, loop  # read after the loop: a client that a fork made connect again has another store
    return store_in_scope() if given is None else given, loop


class _MadeKey:
    """Key of one call, and the fingerprint that its record is compared by."""

    def __init__(
        self, name: str, guard: _Guard, shape: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._name = name
        self._guard = guard
        self._key = f"{name}:{_key_text(guard.key(*args, **kwargs))}"
        self._fingerprint = _fingerprint(guard.fingerprint, shape, args, kwargs)

    def with_key(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the function, in mode `dedup` with the key for its receiver."""
        return {**kwargs, _KEY_PARAMETER: self._key} if self._guard.options.mode is Mode.DEDUP else kwargs

    async def result(self, store: Store, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of the key in this store, recorded before or by running `work` now."""
        guard = self._guard
        journal = Journal(store.audit, redactor=guard.redactor, on_failure=guard.on_failure)
        await journal.flush_backlog()

        def event(action: str) -> IdempotencyEvent:
            key = journal.safe(self._key)
            fields: dict[str, Any] = {"operation": self._name, "idempotency_key": key, "action": action}
            return IdempotencyEvent(**envelope(wall=clock.wall()), **fields)

        options = msgspec.structs.replace(guard.options, fingerprint=self._fingerprint)
        events = KeyEvents(journal, event, one_chain=store.idempotency.audit is store.audit)
        return await Once(store.idempotency).run(self._key, work, options, events)


def _key_text(made: object) -> str:
    if isinstance(made, str) and made:
        return made
    if isinstance(made, int | UUID) and not isinstance(made, bool):
        return str(made)
    raise ParameterTypeError("key", made, "a function that gives a text that is not empty, a whole number or a UUID")


def _fingerprint(
    wanted: Callable[..., object] | bool, shape: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """
    Fingerprint of the arguments, to detect another payload under the same key.

    An argument counts by its parameter, however it was passed: JSON, records and pydantic models by their content. One
    that is neither (a connection, `self`) counts by its class alone.
    """
    if wanted is False:
        return ""
    if wanted is not True:
        return fingerprint_of(json_value(wanted(*args, **kwargs), round_trip=True))
    bound = shape.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    return fingerprint_of({name: _comparable(value) for name, value in bound.arguments.items()})


def _comparable(value: object) -> object:
    try:
        comparable = json_value(value, round_trip=True)
        canonical(comparable)
    except NotJsonError:
        return {"class": type(value).__qualname__}
    return comparable


def _return_annotation(fn: Callable[..., object]) -> Any:
    """The annotated type of the function's result; None without one, and when it cannot be evaluated."""
    given = signature(fn).return_annotation
    if not isinstance(given, str):
        return None if given is Signature.empty else given
    names = getattr(unwrap(fn), "__globals__", {})
    holder = type("Hints", (), {"__annotations__": {"result": given}})
    try:
        return get_type_hints(holder, dict(names))["result"]
    except Exception:  # a name that only type checkers know, or one of the function around it
        return None


def _takes_key(shape: Signature) -> bool:
    return _KEY_PARAMETER in shape.parameters or any(
        one.kind is Parameter.VAR_KEYWORD for one in shape.parameters.values()
    )


def _unique_name(fn: Callable[..., object], name: str) -> str:
    """The name, refused when a function in another file has it: two functions must not share their records."""
    code = getattr(unwrap(fn), "__code__", None)
    file = "" if code is None else str(code.co_filename)
    if _files.setdefault(name, file) != file:
        raise ParameterError(
            "name", name, f"another name: a function in {_files[name]} keeps its records under this one"
        )
    return name
