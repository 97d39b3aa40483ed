"""
`@idempotent`: guards the effect of an async function by a key made from its arguments.

    @rk.idempotent(key=lambda order: order.id)
    async def charge(order): ...

The record is kept under the function's name and the key, in the store in scope: `async with open_store(…)` sets it for
the code inside. Every caller of a key gets the recorded result, the first one too: as JSON gives it back, or as
`result_type`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, Signature, signature, unwrap
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

import msgspec

from reefknot import clock
from reefknot.audit.journal import Journal, OnFailure, envelope
from reefknot.core import checks
from reefknot.core.audit.event import IdempotencyEvent
from reefknot.core.canonical import canonical, checked_result_type, json_value
from reefknot.core.canonical import fingerprint as fingerprint_of
from reefknot.core.redaction import Redactor
from reefknot.errors import NoStoreError, NotJsonError, ParameterError, ParameterTypeError
from reefknot.idempotency.events import KeyEvents
from reefknot.idempotency.once import KeyOptions, Mode, Once, mode_named
from reefknot.retrying.functions import is_async, name_of

if TYPE_CHECKING:
    from reefknot.ports.store import Store

P = ParamSpec("P")
R = TypeVar("R")

current_store: ContextVar[Store | None] = ContextVar("reefknot_store", default=None)
_KEY_PARAMETER = "idempotency_key"
_REQUIRED: Any = None
"""Default of a required parameter, so that its absence gets an error that helps."""
_files: dict[str, str] = {}
"""The file in which the function of each record name is written."""


def store_in_scope() -> Store:
    """The innermost open store; `NoStoreError` when there is none."""
    store = current_store.get()
    if store is None:
        raise NoStoreError
    return store


@contextmanager
def in_scope(store: Store) -> Iterator[None]:
    """Make `store` the store in scope for the code inside, and for the tasks it starts."""
    token = current_store.set(store)
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in: that one never saw the store
            current_store.reset(token)


def idempotent(
    *bare: Any,
    key: Callable[..., object] = _REQUIRED,
    mode: Mode | str = Mode.RETRY,
    lease: float = 60.0,
    wait: float = 60.0,
    store: Store | None = None,
    result_type: Any = Any,
    fingerprint: Callable[..., object] | bool = True,
    name: str = "",
    secrets: tuple[str, ...] = (),
    on_audit_failure: OnFailure | str | None = None,
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """
    Guard an async function by a key made from its arguments.

    `mode` is the guarantee: `retry` at least once, `guard` at most once, `dedup` once where the receiver deduplicates
    on the `idempotency_key` that the function is given. `wait` is how many seconds a later caller waits for the first
    one; with 0 it gets `KeyInProgressError` at once. The arguments' fingerprint detects a key that is reused for
    another payload; `fingerprint=False` turns that off, a function returns what to compare.

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

    def decorate(fn: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        if not is_async(fn):
            raise ParameterTypeError("fn", fn, "an async function; records are kept by awaiting a store")
        if options.mode is Mode.DEDUP and not _takes_key(signature(fn)):
            raise ParameterError("mode", mode, f"for a function that takes {_KEY_PARAMETER}, for its receiver")
        return _guarded(fn, _unique_name(fn, name or name_of(fn)), guard)

    return decorate


class _Guard(msgspec.Struct, frozen=True):
    """Arguments of one `@idempotent`, checked."""

    key: Callable[..., object]
    options: KeyOptions
    store: Store | None
    fingerprint: Callable[..., object] | bool
    redactor: Redactor
    on_failure: OnFailure | None


def _guarded(fn: Callable[P, Awaitable[R]], name: str, guard: _Guard) -> Callable[P, Coroutine[Any, Any, R]]:
    shape = signature(fn)

    @wraps(fn)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        store = store_in_scope() if guard.store is None else guard.store
        full_key = f"{name}:{_key_text(guard.key(*args, **kwargs))}"
        fingerprint = _fingerprint(guard.fingerprint, shape, args, kwargs)
        journal = Journal(store.audit, redactor=guard.redactor, on_failure=guard.on_failure)
        await journal.flush_backlog()

        def event(action: str) -> IdempotencyEvent:
            fields: dict[str, Any] = {"operation": name, "idempotency_key": journal.safe(full_key), "action": action}
            return IdempotencyEvent(**envelope(wall=clock.wall()), **fields)

        async def work() -> Any:
            if guard.options.mode is Mode.DEDUP:
                return await fn(*args, **{**kwargs, _KEY_PARAMETER: full_key})  # type: ignore[arg-type]  # checked above
            return await fn(*args, **kwargs)

        options = msgspec.structs.replace(guard.options, fingerprint=fingerprint)
        events = KeyEvents(journal, event, one_chain=store.idempotency.audit is store.audit)
        answer: R = await Once(store.idempotency).run(full_key, work, options, events)
        return answer

    return call


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

    An argument counts by its parameter, however it was passed. One that is not JSON (a connection, `self`) counts by
    its class alone.
    """
    if wanted is False:
        return ""
    if wanted is not True:
        return fingerprint_of(json_value(wanted(*args, **kwargs)))
    bound = shape.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    return fingerprint_of({name: _comparable(value) for name, value in bound.arguments.items()})


def _comparable(value: object) -> object:
    try:
        comparable = json_value(value)
        canonical(comparable)
    except NotJsonError:
        return {"class": type(value).__qualname__}
    return comparable


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
