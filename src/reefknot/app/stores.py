"""Stores and logs by their address, opened for as long as a block lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import EllipsisType
from typing import TYPE_CHECKING, TypedDict

from reefknot.app.retention import Note, Retention, Tidier, retention_said
from reefknot.core import checks
from reefknot.errors import ParameterError
from reefknot.idempotency import manager as ambient
from reefknot.ports.audit_log import AuditLog
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store

if TYPE_CHECKING:
    from reefknot.config.schema import Configuration

_ACCEPTED = "memory:, or sqlite:PATH"


@asynccontextmanager
async def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    retention: float = 7 * 86400.0,
    largest_result: int = 1 << 20,
    most_keys: int | None = None,
    audit_retention: float | EllipsisType | None = ...,
    work_retention: float | EllipsisType | None = ...,
    tidy: bool = True,
) -> AsyncIterator[Store]:
    """
    A store, for as long as the block lasts: `.idempotency`, `.audit`, `.work`, `.quarantine`, `.control`.

    `retention` is how long an ended key is remembered, in seconds; `largest_result` how many bytes a recorded result
    may have; `most_keys` how many keys there may be. In a virtual loop the store lives in that loop's time.
    For the code inside it is the store in scope: a function under `@idempotent` finds it by itself.

    What is past its retention is removed in the background, every ten minutes: keys, events after `audit_retention`
    (90 days unless said), ended work after `work_retention` (7 days unless said); None is for ever, and what somebody
    said is noted beside the file. With `tidy=False`, and in a virtual loop, nothing is removed.
    """
    checks.text("url", url, _ACCEPTED)
    checks.seconds("retention", retention)
    checks.whole_number("largest_result", largest_result)
    if most_keys is not None:
        checks.whole_number("most_keys", most_keys)
    said = retention_said(audit_retention, work_retention)
    now = clock or clock_of_this_loop()
    store = await _opened(url, now, retention=retention, largest_result=largest_result, most_keys=most_keys)
    tidier = _tidier(store, now, said) if tidy and not _in_virtual_loop() else None
    try:
        if tidier is not None:
            tidier.start()
        with ambient.in_scope(store):
            yield store
    finally:
        if tidier is not None:
            await tidier.close()
        await store.close()


def _tidier(store: Store, clock: Clock, said: Retention | None) -> Tidier:
    if store.durable:
        from reefknot.engines.sqlite import SqliteStore

        assert isinstance(store, SqliteStore), store
        return Tidier(store, clock, said=said, note=Note(store.path), may=store.become_tidier)
    return Tidier(store, clock, said=said)


class StoreOptions(TypedDict):
    """What a configuration says about its store, as `open_store` takes it."""

    retention: float
    largest_result: int
    most_keys: int | None
    audit_retention: float | None
    work_retention: float | None


def options_of(configuration: "Configuration") -> StoreOptions:
    """The sections `idempotency` and `audit`, and the worker's retention."""
    keys = configuration.idempotency
    return {
        "retention": keys.retention_seconds,
        "largest_result": keys.largest_result_bytes,
        "most_keys": keys.max_keys,
        "audit_retention": configuration.audit.retention_seconds,
        "work_retention": configuration.worker.retention_seconds,
    }


@asynccontextmanager
async def open_audit_log(
    path: str,
    *,
    clock: Clock | None = None,
    largest: int = 64 << 20,
    keep: int | None = None,
    fsync: str = "always",
) -> AsyncIterator[AuditLog]:
    """
    An audit log in files of JSON lines, for as long as the block lasts, to be given as `audit=`.

    A file is followed by the next after `largest` bytes; with `keep`, the oldest go when there are more files than
    that, and an anchor event says so. `fsync` is `always`, `rotate` or `never`. One process writes a log.
    """
    from reefknot.engines.jsonlines import JsonLinesLog

    log = await JsonLinesLog.open(
        path, clock or clock_of_this_loop(), largest=largest, keep=keep, fsync=fsync, inline=_in_virtual_loop()
    )
    try:
        yield log
    finally:
        await log.close()


async def _opened(url: str, clock: Clock, *, retention: float, largest_result: int, most_keys: int | None) -> Store:
    scheme, colon, path = url.partition(":")
    if url in ("memory", "memory:"):
        from reefknot.engines.memory import MemoryStore

        return MemoryStore(clock, retention=retention, largest_result=largest_result, most_keys=most_keys)
    if scheme == "sqlite" and colon and path.removeprefix("//"):
        from reefknot.engines.sqlite import SqliteStore

        inline = _in_virtual_loop()
        store = SqliteStore(
            path.removeprefix("//"),
            clock,
            retention=retention,
            largest_result=largest_result,
            most_keys=most_keys,
            inline=inline,
        )
        return await store.start()
    if scheme in ("nats", "tls"):
        accepted = f"{_ACCEPTED}; nats:// needs the extra 'nats' and an engine that this version does not have yet"
        raise ParameterError("url", url, accepted)
    raise ParameterError("url", url, _ACCEPTED)


def _in_virtual_loop() -> bool:
    from reefknot.engines.clocks import VirtualLoop

    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def clock_of_this_loop() -> Clock:
    from reefknot.engines.clocks import LoopClock, SystemClock, VirtualLoop

    loop = asyncio.get_running_loop()
    return LoopClock(loop) if isinstance(loop, VirtualLoop) else SystemClock()
