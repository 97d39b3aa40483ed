"""
Where the parts are put together.

The only module that knows every class. Plain constructor calls; no part finds another by itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reefknot.errors import ParameterError
from reefknot.execution import ambient, keys, manager, report, timing
from reefknot.execution.journal import AuditSink, OnFailure
from reefknot.ports.audit_log import AuditLog
from reefknot.ports.clock import Clock
from reefknot.ports.idempotency_store import IdempotencyStore
from reefknot.ports.store import Store

_ACCEPTED = "memory:, or sqlite:PATH"


@asynccontextmanager
async def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    retention: float = 7 * 86400.0,
    largest_result: int = 1 << 20,
    most_keys: int | None = None,
) -> AsyncIterator[Store]:
    """
    A store, for as long as the block lasts: `.idempotency`, `.audit`, `.work`, `.quarantine`, `.control`.

    `retention` is how long an ended key is remembered, in seconds; `largest_result` how many bytes a recorded result
    may have; `most_keys` how many keys there may be. In a virtual loop the store lives in that loop's time.
    For the code inside it is the store in scope: a function under `@idempotent` finds it by itself.
    """
    store = await _opened(
        url, clock or _clock_of_this_loop(), retention=retention, largest_result=largest_result, most_keys=most_keys
    )
    try:
        with ambient.in_scope(store):
            yield store
    finally:
        await store.close()


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
        path, clock or _clock_of_this_loop(), largest=largest, keep=keep, fsync=fsync, inline=_in_virtual_loop()
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
    from reefknot.engines.virtual import VirtualLoop

    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def _clock_of_this_loop() -> Clock:
    from reefknot.engines.system import SystemClock
    from reefknot.engines.virtual import LoopClock, VirtualLoop

    loop = asyncio.get_running_loop()
    return LoopClock(loop) if isinstance(loop, VirtualLoop) else SystemClock()


class IdempotencyManager(keys.IdempotencyManager):
    """Keys and their records: in the store given, else in the store in scope, else in memory, which is not durable."""

    def __init__(self, store: IdempotencyStore | None = None) -> None:
        super().__init__(_keys_in_scope() if store is None else store)


class RetryManager(manager.RetryManager):
    """
    Executes operations under the policy of their category; see `execute_with_retry`.

    Without a book the built-in policies hold. Without `idempotency` it is the store in scope, else memory, which is not
    durable. Without `audit` the events go to where the keys are kept, and for memory to the `reefknot.audit` logger.
    """

    def __init__(
        self,
        *,
        book: manager.HasSnapshot | None = None,
        idempotency: IdempotencyStore | None = None,
        audit: AuditSink | None = None,
        secrets: tuple[str, ...] = (),
        on_audit_failure: OnFailure | str = OnFailure.FAIL_OPEN,
        lease: float = 60.0,
        wait_for_result: float = 60.0,
    ) -> None:
        from reefknot.config.book import PolicyBook

        store = _keys_in_scope() if idempotency is None else idempotency
        super().__init__(
            book=PolicyBook() if book is None else book,
            idempotency=store,
            audit=_log_of(store) if audit is None else audit,
            secrets=secrets,
            on_audit_failure=on_audit_failure,
            lease=lease,
            wait_for_result=wait_for_result,
        )


def get_retry_manager() -> RetryManager:
    """The manager of this process: built-in policies, keys in memory, events in the log. For one event loop."""
    global _manager
    if _manager is None:
        _manager = RetryManager(idempotency=_keys_in_memory())
    return _manager


class _ContextClock:
    """The time that the library itself goes by, a virtual one included."""

    def now(self) -> float:
        return timing.now()

    def wall(self) -> float:
        return timing.wall()

    def sleep(self, seconds: float) -> None:
        timing.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await timing.asleep(seconds)


_manager: RetryManager | None = None
_warned = False
_MOST_KEYS_IN_MEMORY = 100_000


def _keys_in_scope() -> IdempotencyStore:
    store = ambient.current.get()
    return _keys_in_memory() if store is None else store.idempotency


def _keys_in_memory() -> IdempotencyStore:
    from reefknot.engines.memory import MemoryStore

    global _warned
    if not _warned:
        _warned = True
        report.logger().warning(
            "idempotency keys are kept in memory and end with this process; for durable ones, "
            "open a store (async with reefknot.open_store('sqlite:state.db') as store) and use idempotency=store.idempotency"
        )
    return MemoryStore(_ContextClock(), retention=86400.0, most_keys=_MOST_KEYS_IN_MEMORY).idempotency


def _log_of(store: IdempotencyStore) -> AuditSink:
    from reefknot.engines.log_sink import LogSink
    from reefknot.engines.memory.idempotency import MemoryIdempotencyStore

    # A list in memory that nobody trims is no place for the events of a process that runs for months.
    return LogSink() if isinstance(store, MemoryIdempotencyStore) else store.audit
