"""
Stores by their address, open for as long as a block lasts. The table of engines is in `port/engines.py`.

In a virtual loop everything runs in that loop's time and thread, and no retention runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypedDict

from reefknot.audit.retention import Retention, RetentionNote, retention_given
from reefknot.core import checks
from reefknot.errors import ConfigurationError
from reefknot.idempotency.decorator import in_scope
from reefknot.idempotency.model import KEY_RETENTION_S
from reefknot.runtime.clocks import clock_of_this_loop, in_virtual_loop
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.log import printable
from reefknot.stores.port import refuse_moved
from reefknot.stores.port.engines import OpenOptions, accepted_urls, engine_of, file_of, has_file, located
from reefknot.stores.retention import RetentionJob

if TYPE_CHECKING:
    from reefknot.core.clock import Clock
    from reefknot.policy.settings import Settings
    from reefknot.stores.port import Store

# ---- stores and logs -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    retention: checks.Seconds = KEY_RETENTION_S,
    largest_result: int = 1 << 20,
    most_keys: int | None = None,
    audit_retention: checks.Seconds | EllipsisType | None = ...,
    work_retention: checks.Seconds | EllipsisType | None = ...,
    tidy: bool = True,
    read_only: bool = False,
    migrate: bool = True,
    nats: Mapping[str, Any] | None = None,
) -> AsyncIterator[Store]:
    """
    A store, for as long as the block lasts: `.idempotency`, `.audit`, `.work`, `.quarantine`, `.control`.

    `retention` is how many seconds an ended key is remembered, `largest_result` how many bytes a recorded result may
    have, `most_keys` how many keys there may be. For the code inside it is the store in scope: a function under
    `@idempotent` uses it by default.

    Records past their retention are removed in the background, every ten minutes: keys, events after `audit_retention`
    (default: 90 days), ended work after `work_retention` (default: 7 days). None keeps them forever. A retention that
    was given is noted next to the file. A block that lasts less than a minute removes nothing, nor does one with
    `tidy=False`, or in a virtual loop.

    `read_only` opens a store that must not be written, such as a file on a read-only disk: reads work, writes are
    refused.

    A file of an older version is migrated, after a copy of it to `NAME.vN.bak`: a program of that version cannot open
    it any more. With `migrate=False` it is read as it is, or `StoreVersionError` says what to do.

    `nats` are settings of a store on NATS, with secrets as values: `guarantee`, `replicas`, `roles`, `user`,
    `password`, `token`, `credentials`, `tls_ca`, `tls_certificate`, `tls_key`, `patience`.
    """
    require_asyncio("open_store")
    checks.text("url", url, accepted_urls())
    kept = checks.seconds("retention", retention)
    checks.whole_number("largest_result", largest_result)
    if most_keys is not None:
        checks.whole_number("most_keys", most_keys)
    given = retention_given(audit_retention, work_retention)
    file_of(url)
    how = {"read_only": read_only, "migrate": migrate, "inline": in_virtual_loop()}
    keys, work = (kept, largest_result, most_keys), (given or Retention()).work
    options = OpenOptions(clock or clock_of_this_loop(), *keys, work, nats or {}, **how)
    store = await engine_of(url).open(url, options)
    if not read_only:
        try:
            await refuse_moved(store)
        except BaseException:
            await store.close()
            raise
    removes = tidy and not options.inline and not store.read_only
    job = _retention_job(store, store.clock, given) if removes else None
    try:
        if job is not None:
            job.start()
        with in_scope(store, asyncio.get_running_loop()):
            yield store
    finally:
        if job is not None:
            await job.close()
        await store.close()


@asynccontextmanager
async def store_to_move(
    url: str, settings: Settings | None, *, creates: bool, work_retention: float | None = None
) -> AsyncIterator[Store]:
    """A store as a move opens it: whatever mark it has, without retention, and without a migration."""
    given: Any = {} if settings is None else options_of(settings)
    keys = (given.get("retention", KEY_RETENTION_S), given.get("largest_result", 1 << 20), given.get("most_keys"))
    nats, how = {**given.get("nats", {}), "creates": creates}, {"read_only": False, "migrate": False}
    options = OpenOptions(clock_of_this_loop(), *keys, work_retention, nats, **how, inline=in_virtual_loop())
    store = await engine_of(url).open(url, options)
    try:
        yield store
    finally:
        await store.close()


def _retention_job(store: Store, clock: Clock, given: Retention | None) -> RetentionJob:
    note = RetentionNote(store.path)
    return RetentionJob(store, clock, given=given, note=note, may_run=store.acquire_retention_lock)


class StoreOptions(TypedDict):
    """Settings of a store in a configuration, as keywords of `open_store`."""

    retention: float
    largest_result: int
    most_keys: int | None
    audit_retention: float | None
    work_retention: float | None
    nats: dict[str, Any]


def options_of(settings: Settings) -> StoreOptions:
    """The settings of the sections `idempotency`, `audit` and `nats`, and the worker's retention."""
    configuration = settings.configuration
    keys = configuration.idempotency
    return {
        "nats": _nats_options(settings),
        "retention": keys.retention_seconds,
        "largest_result": keys.largest_result_bytes,
        "most_keys": keys.max_keys,
        "audit_retention": configuration.audit.retention_seconds,
        "work_retention": configuration.worker.retention_seconds,
    }


def _nats_options(settings: Settings) -> dict[str, Any]:
    """The section `nats` with the secrets it names, paths beneath the configuration's folder."""
    import os

    from reefknot.policy.reading.session import Problem
    from reefknot.policy.secrets import NATS_SECRETS, resolve_at

    section, folder = settings.configuration.nats, settings.folder
    found: dict[str, Any] = {
        "guarantee": section.guarantee,
        "replicas": section.replicas,
        "roles": tuple(section.roles),
        "user": section.user,
        "patience": section.patience_seconds,
        "max_shared_assignments": section.max_shared_assignments,
        "max_bytes": section.max_bytes,
        "subject_prefix": section.subject_prefix,
    }
    for name in ("credentials", "tls_ca", "tls_certificate", "tls_key"):
        path = getattr(section, name)
        found[name] = None if path is None else str(folder / path)
    for name in NATS_SECRETS:
        outcome = resolve_at(settings.tree, ("nats", name), environ=os.environ, folder=folder)
        if isinstance(outcome, Problem):
            raise ConfigurationError([str(outcome)])
        found[name] = None if outcome is None else outcome.reveal()
    return found


def store_url(settings: Settings | None, engine: str | None = None) -> str:
    """The address of a process's store: `engine`, else the configured one, else the default. Its path is absolute."""
    if engine is None and settings is not None:
        return located(settings.configuration.engine, settings.folder)
    return located(engine, Path.cwd())


def shown_url(url: str) -> str:
    """A store's address for messages: without user, password or token."""
    from reefknot.core.redaction import redact

    return url if has_file(url) else printable(redact(url))
