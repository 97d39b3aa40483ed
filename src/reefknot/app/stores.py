"""
`open_store` and `open_audit_log`: open a store or a log by its address, for as long as a block lasts.

In a virtual loop everything runs in that loop's time and thread, and nothing is removed by itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import EllipsisType
from typing import TYPE_CHECKING, TypedDict

from reefknot.app.retention import Retention, RetentionJob, RetentionNote, retention_given
from reefknot.core import checks
from reefknot.core.idempotency import KEY_RETENTION_S
from reefknot.core.redaction import redact
from reefknot.errors import ParameterError
from reefknot.idempotency.decorator import in_scope
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
    retention: float = KEY_RETENTION_S,
    largest_result: int = 1 << 20,
    most_keys: int | None = None,
    audit_retention: float | EllipsisType | None = ...,
    work_retention: float | EllipsisType | None = ...,
    tidy: bool = True,
) -> AsyncIterator[Store]:
    """
    A store, for as long as the block lasts: `.idempotency`, `.audit`, `.work`, `.quarantine`, `.control`.

    `retention` is how many seconds an ended key is remembered, `largest_result` how many bytes a recorded result may
    have, `most_keys` how many keys there may be. For the code inside it is the store in scope: a function under
    `@idempotent` finds it by itself.

    Records past their retention are removed in the background, every ten minutes: keys, events after `audit_retention`
    (default: 90 days), ended work after `work_retention` (default: 7 days). None is for ever. A retention that was
    given is noted beside the file. With `tidy=False`, and in a virtual loop, nothing is removed.
    """
    checks.text("url", url, _ACCEPTED)
    checks.seconds("retention", retention)
    checks.whole_number("largest_result", largest_result)
    if most_keys is not None:
        checks.whole_number("most_keys", most_keys)
    given = retention_given(audit_retention, work_retention)
    now = clock or clock_of_this_loop()
    store = await _opened(url, now, retention=retention, largest_result=largest_result, most_keys=most_keys)
    job = _retention_job(store, now, given) if tidy and not _in_virtual_loop() else None
    try:
        if job is not None:
            job.start()
        with in_scope(store):
            yield store
    finally:
        if job is not None:
            await job.close()
        await store.close()


def _retention_job(store: Store, clock: Clock, given: Retention | None) -> RetentionJob:
    if store.durable:
        from reefknot.engines.sqlite import SqliteStore

        assert isinstance(store, SqliteStore), store
        note = RetentionNote(store.path)
        return RetentionJob(store, clock, given=given, note=note, may_run=store.acquire_retention_lock)
    return RetentionJob(store, clock, given=given)


class StoreOptions(TypedDict):
    """Settings of a store in a configuration, as keywords of `open_store`."""

    retention: float
    largest_result: int
    most_keys: int | None
    audit_retention: float | None
    work_retention: float | None


def options_of(configuration: "Configuration") -> StoreOptions:
    """The settings of the sections `idempotency` and `audit`, and the worker's retention."""
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

    A new file begins after `largest` bytes. With `keep`, the oldest files are removed beyond that number, and an anchor
    event says so. `fsync` is `always`, `rotate` or `never`. One process writes a log.
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
        raise ParameterError("url", redact(url), accepted)
    raise ParameterError("url", redact(url), _ACCEPTED)


def _in_virtual_loop() -> bool:
    from reefknot.engines.clocks import VirtualLoop

    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def clock_of_this_loop() -> Clock:
    """The running loop's clock: its virtual time, or the system's."""
    from reefknot.engines.clocks import LoopClock, SystemClock, VirtualLoop

    loop = asyncio.get_running_loop()
    return LoopClock(loop) if isinstance(loop, VirtualLoop) else SystemClock()
