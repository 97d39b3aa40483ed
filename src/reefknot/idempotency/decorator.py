"""
`@idempotent`: a function whose effect is guarded by a key.

    @rk.idempotent(key=lambda order: order.id)
    async def charge(order): ...

The record lives in the store in scope, under the function's name and the key. Every caller of a key gets the recorded
result, the first one too: as JSON gives it back, or as `result_type`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from inspect import Parameter, Signature, signature, unwrap
from math import inf
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

import msgspec

from reefknot.audit.journal import Journal, OnFailure, event_id, now_text, on_failure_named
from reefknot.core.audit.event import IdempotencyEvent
from reefknot.core.canonical import canonical, checked_result_type, json_value
from reefknot.core.canonical import fingerprint as fingerprint_of
from reefknot.core.redaction import Redactor
from reefknot.errors import NotJsonError, ParameterError, ParameterTypeError
from reefknot.idempotency.events import Telling
from reefknot.idempotency.manager import store_in_scope
from reefknot.idempotency.once import How, Mode, Once, mode_named
from reefknot.retrying.plan import is_async, name_of

if TYPE_CHECKING:
    from reefknot.ports.store import Store

P = ParamSpec("P")
R = TypeVar("R")

_KEY_PARAMETER = "idempotency_key"
_REQUIRED: Any = None
"""Given by everybody; its absence is told in words that help."""
_homes: dict[str, str] = {}
"""Which file the function of a name is written in."""


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

    `mode` says what is promised: `retry` at least once, `guard` at most once, `dedup` once where the sink deduplicates
    on the `idempotency_key` that the function is given. `wait` bounds how long a later caller waits for the first; 0
    means that it is told (`KeyInProgressError`). The arguments' fingerprint tells a key that is used for something
    else; `fingerprint=False` leaves that out, a function says what counts.

    `secrets` are taken out of what is told about a call, wherever they stand in it. `on_audit_failure` says what
    happens when events cannot be kept: `fail_open` goes on, `fail_closed` raises `AuditUnavailableError` before the
    work begins, or after it.
    """
    if bare:
        accepted = "keywords only: write @idempotent(key=lambda order: order.id), with a function that makes the key"
        raise ParameterTypeError("idempotent", bare[0], accepted)
    if not callable(key):
        raise ParameterTypeError("key", key, "a function that makes the key from the arguments")
    chosen = mode_named(mode)
    told = _Told(Redactor(secrets), None if on_audit_failure is None else on_failure_named(on_audit_failure))
    how = How(
        chosen,
        _seconds("lease", lease, above_zero=True),
        _seconds("wait", wait),
        result_type=checked_result_type(result_type),
    )

    def decorate(fn: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        if not is_async(fn):
            raise ParameterTypeError("fn", fn, "an async function; records are kept by awaiting a store")
        if chosen is Mode.DEDUP and not _takes_key(signature(fn)):
            raise ParameterError("mode", mode, f"for a function that takes {_KEY_PARAMETER}, to hand it to its sink")
        return _guarded(fn, key, how, store, fingerprint, _unique_name(fn, name or name_of(fn)), told)

    return decorate


class _Told(msgspec.Struct, frozen=True):
    """How a function's calls are told of."""

    redactor: Redactor
    on_failure: OnFailure | None


def _guarded(
    fn: Callable[P, Awaitable[R]],
    key: Callable[..., object],
    how: How,
    given: Store | None,
    fingerprint: Callable[..., object] | bool,
    name: str,
    told: _Told,
) -> Callable[P, Coroutine[Any, Any, R]]:
    shape = signature(fn)

    @wraps(fn)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        store = store_in_scope() if given is None else given
        full = f"{name}:{_key_text(key(*args, **kwargs))}"
        mine = msgspec.structs.replace(how, fingerprint=_fingerprint(fingerprint, shape, args, kwargs))
        journal = Journal(store.audit, redactor=told.redactor, on_failure=told.on_failure)
        await journal.ready()
        telling = _telling(store, journal, name, told.redactor(full))

        async def work() -> Any:
            if how.mode is Mode.DEDUP:
                return await fn(*args, **{**kwargs, _KEY_PARAMETER: full})  # type: ignore[arg-type]  # checked above
            return await fn(*args, **kwargs)

        try:
            answer: R = await Once(store.idempotency).run(full, work, mine, telling)
        except Exception:
            await telling.tell()
            raise
        except BaseException:
            telling.tell_later()
            raise
        await telling.tell()
        return answer

    return call


def _telling(store: Store, journal: Journal, name: str, key: str) -> Telling:
    def event(action: str) -> IdempotencyEvent:
        return IdempotencyEvent(
            timestamp=now_text(), event_id=event_id(), operation=name, idempotency_key=key, action=action
        )

    return Telling(journal, event, one_chain=store.idempotency.audit is store.audit)


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
    What the arguments look like, so that another payload under the same key is seen.

    An argument counts by its parameter, however it was passed. One that JSON cannot say (a connection, `self`) counts
    by its class alone.
    """
    if wanted is False:
        return ""
    if wanted is not True:
        return fingerprint_of(json_value(wanted(*args, **kwargs)))
    bound = shape.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    return fingerprint_of({name: _seen(value) for name, value in bound.arguments.items()})


def _seen(value: object) -> object:
    try:
        seen = json_value(value)
        canonical(seen)
    except NotJsonError:
        return {"class": type(value).__qualname__}
    return seen


def _takes_key(shape: Signature) -> bool:
    return _KEY_PARAMETER in shape.parameters or any(
        one.kind is Parameter.VAR_KEYWORD for one in shape.parameters.values()
    )


def _unique_name(fn: Callable[..., object], name: str) -> str:
    """Two functions must not share their records: the second of a name is refused, unless it is the same code."""
    home = getattr(unwrap(fn), "__code__", None)
    file = "" if home is None else str(home.co_filename)
    if _homes.setdefault(name, file) != file:
        raise ParameterError(
            "name", name, f"another name: a function in {_homes[name]} keeps its records under this one"
        )
    return name


def _seconds(parameter: str, value: float, *, above_zero: bool = False) -> float:
    accepted = "a finite number of seconds, " + ("above 0" if above_zero else "0 or more")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterTypeError(parameter, value, accepted)
    if not (value > 0 if above_zero else value >= 0) or value == inf:
        raise ParameterError(parameter, value, accepted)
    return float(value)
