"""Managers that work without arguments: built-in policies, the store in scope, else memory."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from reefknot import clock as timing
from reefknot.app import retry_manager as manager
from reefknot.audit.journal import AuditSink, OnFailure
from reefknot.errors import ConfigurationError
from reefknot.idempotency import manager as ambient
from reefknot.idempotency import manager as keys
from reefknot.ports.idempotency_store import IdempotencyStore
from reefknot.runtime.log import logger


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
        on_audit_failure: OnFailure | str | None = None,
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


@asynccontextmanager
async def open_manager(
    config: str | None = None, *, engine: str | None = None, environ: Mapping[str, str] | None = None
) -> AsyncIterator[RetryManager]:
    """
    A manager as a configuration says it, for as long as the block lasts: its book, store, secrets and audit.

    The file is the one named, else the one that would be found from here. `engine` is used instead of its engine.
    """
    from reefknot.app.audit_copies import kept_events
    from reefknot.app.stores import open_store, options_of
    from reefknot.config.book import PolicyBook
    from reefknot.config.secrets import secret_texts
    from reefknot.config.settings import load_settings

    known = os.environ if environ is None else environ
    settings = load_settings(config, environ=known, cwd=Path.cwd())
    secrets, problems = secret_texts(settings.tree, settings.path, environ=known)
    if problems:
        raise ConfigurationError(problems)
    url = engine or _beneath(settings.folder, settings.configuration.engine or f"sqlite:{DEFAULT_STORE}")
    async with (
        open_store(url, **options_of(settings.configuration)) as store,
        kept_events(store, settings, secrets=secrets),
    ):
        book = PolicyBook.of(settings.book)
        yield RetryManager(book=book, idempotency=store.idempotency, audit=store.audit, secrets=secrets)


def _beneath(folder: Path, url: str) -> str:
    """A file's path is meant from the configuration's folder."""
    scheme, _, path = url.partition(":")
    return f"sqlite:{folder / path.removeprefix('//')}" if scheme == "sqlite" else url


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


DEFAULT_STORE = ".reefknot/state.db"
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
        logger().warning(
            "idempotency keys are kept in memory and end with this process; for durable ones, "
            "open a store (async with reefknot.open_store('sqlite:state.db') as store) and pass store.idempotency"
        )
    return MemoryStore(_ContextClock(), retention=86400.0, most_keys=_MOST_KEYS_IN_MEMORY).idempotency


def _log_of(store: IdempotencyStore) -> AuditSink:
    from reefknot.engines.log_sink import LogSink
    from reefknot.engines.memory.audit_and_keys import MemoryIdempotencyStore

    # A list in memory that nobody trims is no place for the events of a process that runs for months.
    return LogSink() if isinstance(store, MemoryIdempotencyStore) else store.audit
