"""
Stores and logs by their address, open for as long as a block lasts, and the retention of what is in them.

Every ten minutes or so, one process of a host removes expired keys, ended work, and events from the start of the chain
on, a little at a time, so that no caller waits for it. It never removes a key that is held, work that has not ended, or
anything in quarantine.

The retention of events and work is noted beside the store, so that a process without a setting of its own does not
remove what another one was told to keep. Only a process that has had the store open for a minute removes anything, and
none whose clock is more than a day past the newest record: a clock that is wrong makes nothing old.

In a virtual loop everything runs in that loop's time and thread, and nothing is removed by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
from msgspec import Struct

from reefknot.core import checks
from reefknot.core.idempotency import KEY_RETENTION_S
from reefknot.core.time import Timeline
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.idempotency.decorator import in_scope
from reefknot.runtime.database_urls import NATS_PREFIXES, SQLITE_PREFIX, nats_address, sqlite_path
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.files import whole_file
from reefknot.runtime.log import logger, printable
from reefknot.runtime.tasks import Services

if TYPE_CHECKING:
    from reefknot.config.settings import Settings
    from reefknot.ports.audit_log import AuditLog
    from reefknot.ports.clock import Clock
    from reefknot.ports.store import Store
    from reefknot.router.client import Client

DEFAULT_STORE = ".reefknot/state.db"
ACCEPTED_URLS = "memory:, sqlite:PATH, or nats://HOST:PORT"

# ---- retention -------------------------------------------------------------------------------------------------------

EVERY_S = 600.0
SPREAD = 0.2
"""Random part of each wait, so that the processes of a fleet do not run at once."""
SHORTEST_WAIT_S = 60.0
"""Least time for which a process has had the store open before it removes anything: short commands remove nothing."""
CLOSE_S = 5.0
NEWEST_WITHIN_S = 86_400.0
"""Most that a clock may be past the newest record for anything to be removed."""
KEEP_EVENTS_S = 90 * 86_400.0
KEEP_WORK_S = 7 * 86_400.0
MOST_NOTE_BYTES = 4096


class Retention(Struct, frozen=True):
    """Seconds that events and ended work are kept; None keeps them for ever. Keys carry their own expiry."""

    events: float | None = KEEP_EVENTS_S
    work: float | None = KEEP_WORK_S


class Removed(Struct, frozen=True):
    """Counts of records that one round removed."""

    keys: int = 0
    work: int = 0
    events: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.work or self.events)


class _Noted(Struct, frozen=True):
    retention: Retention | None = None
    last_round_at: float = msgspec.field(default=0.0, name="tidied_at")


class RetentionNote:
    """A small file beside a store: the retention that was asked for, and the time of the last round."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(f"{path}-retention")
        self._noted = _Noted()

    def read(self) -> _Noted:
        """The note as it stands; one that cannot be read counts as empty."""
        if self._path is not None:
            with suppress(OSError, msgspec.DecodeError), self._path.open("rb") as file:
                self._noted = msgspec.json.decode(file.read(MOST_NOTE_BYTES), type=_Noted)
        return self._noted

    def write(self, **changes: object) -> None:
        """Replace the file atomically. A folder that cannot be written is reported by the store itself."""
        self._noted = msgspec.structs.replace(self.read(), **changes)
        if self._path is None:
            return
        with suppress(OSError), whole_file(self._path, durable=False) as file:
            file.write(msgspec.json.encode(self._noted))


class RetentionJob:
    """Retention of one open store. `may_run` asks whether this process is the one of its host that runs it."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        given: Retention | None = None,
        note: RetentionNote | None = None,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self._note = note or RetentionNote(None)
        self._may_run = may_run
        self._services = Services("store")
        self._given = given
        self._opened_at = self._doubted_until = clock.now()
        self._has_warned = False

    def start(self) -> None:
        """Start the background task. In a new store the first round is due one interval from now."""
        if self._given is not None:
            self._note.write(retention=self._given)
        if not self._note.read().last_round_at:
            self._note.write(last_round_at=self._wall_ms() / 1000)
        self._services.keep("retention", self._run)

    async def close(self) -> None:
        """Stop the task."""
        await self._services.stop(CLOSE_S)

    @property
    def retention(self) -> Retention:
        """The retention in force: the one given here, else the noted one, else the built-in one."""
        return self._given or self._note.read().retention or Retention()

    async def once(self) -> Removed:
        """Run one round: remove what is past its retention, and log how much that was."""
        keep, wall_ms = self.retention, self._wall_ms()
        keys = work = 0
        if not self._store.expires_by_itself:
            keys = await self._store.idempotency.purge()
            work = 0 if keep.work is None else await self._store.work.purge(wall_ms - int(keep.work * 1000))
        events = 0
        if keep.events is not None:
            rule = f"retention {keep.events:g} s"
            events = await self._store.audit.trim(wall_ms - int(keep.events * 1000), rule=rule)
        removed = Removed(keys, work, events)
        if removed:
            logger().info("retention removed %d keys, %d ended work items, %d events", keys, work, events)
        return removed

    async def _run(self) -> None:
        await self._look_at_clock()
        while True:
            await asyncio.sleep(max(SHORTEST_WAIT_S, self._due_in()) * random.uniform(1.0, 1.0 + SPREAD))
            if self._due_in() <= 0:
                await self._round()

    async def _round(self) -> None:
        try:
            if self._may_run() and await self._clock_is_plausible():
                await self.once()
                self._note.write(last_round_at=self._wall_ms() / 1000)
        except Exception as error:
            logger().error("the retention round failed (%s)", printable(str(error), most=300))

    async def _look_at_clock(self) -> None:
        """Note how far the clock is past the newest record, before this process writes one by the same clock."""
        try:
            self._doubted_until = self._opened_at + NEWEST_WITHIN_S if await self._is_far_ahead() else self._opened_at
        except Exception as error:  # the round will say so too
            logger().error("the newest record was not found (%s)", printable(str(error), most=300))

    async def _clock_is_plausible(self) -> bool:
        """Whether the clock can be trusted: a wrong one that was there at the start is given a day to be noticed."""
        if self._clock.now() >= self._doubted_until and not await self._is_far_ahead():
            return True
        if not self._has_warned:
            self._has_warned = True
            logger().warning("the clock is, or was, more than a day past the newest record: nothing is removed for now")
        return False

    async def _is_far_ahead(self) -> bool:
        newest = await self._store.newest_record_at()
        return newest is not None and self._wall_ms() - newest > NEWEST_WITHIN_S * 1000

    def _wall_ms(self) -> int:
        """Wall time as the store reckons it: a wall clock that jumps while the store is open makes nothing older."""
        return self._timeline.at(self._clock.now()).wall

    def _due_in(self) -> float:
        """Seconds until the next round; 0 when the clock was set back, which must not put rounds off."""
        passed = self._wall_ms() / 1000 - self._note.read().last_round_at
        return EVERY_S - passed if passed >= 0 else 0.0


def retention_given(
    events: checks.Seconds | EllipsisType | None, work: checks.Seconds | EllipsisType | None
) -> Retention | None:
    """The retention that a caller of `open_store` gave, with defaults for the rest; None when it gave none."""
    if events is ... and work is ...:
        return None
    built_in = Retention()
    return Retention(
        built_in.events if events is ... else checks.seconds_or_none("audit_retention", events, meaning="for ever"),
        built_in.work if work is ... else checks.seconds_or_none("work_retention", work, meaning="for ever"),
    )


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
    `@idempotent` finds it by itself.

    Records past their retention are removed in the background, every ten minutes: keys, events after `audit_retention`
    (default: 90 days), ended work after `work_retention` (default: 7 days). None is for ever. A retention that was
    given is noted beside the file. A block that lasts less than a minute removes nothing, nor does one with
    `tidy=False`, or in a virtual loop.

    `read_only` opens a store that may not be written, such as a file on a read-only disk: reads work, writes are
    refused. On NATS events that dead processes left stay where they are, and are not read.

    A file of an older version is migrated, after a copy of it to `NAME.vN.bak`: a program of that version cannot open
    it any more. With `migrate=False` it is read as it is, or `StoreVersionError` says what to do.

    `nats` are settings of a store on NATS, with secrets as values: `guarantee`, `replicas`, `user`, `password`,
    `token`, `credentials`, `tls_ca`, `tls_certificate`, `tls_key`, `patience`.
    """
    require_asyncio("open_store")
    checks.text("url", url, ACCEPTED_URLS)
    kept = checks.seconds("retention", retention)
    checks.whole_number("largest_result", largest_result)
    if most_keys is not None:
        checks.whole_number("most_keys", most_keys)
    given = retention_given(audit_retention, work_retention)
    now = clock or clock_of_this_loop()
    limits: dict[str, Any] = {"retention": kept, "largest_result": largest_result, "most_keys": most_keys}
    if url.startswith(NATS_PREFIXES):
        limits |= {"work_retention": (given or Retention()).work, "settings": nats or {}}
    store = await _opened(url, now, limits, read_only=read_only, migrate=migrate)
    removes = tidy and not read_only and not in_virtual_loop() and not getattr(store, "read_only", False)
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


def client_of(store: Store, clock: Clock, size: int = 1000) -> Client:
    """A client over an open store."""
    from reefknot.app import presence
    from reefknot.router.client import Client

    return Client(store, clock, size=size, has_router=presence.has_router)


def _retention_job(store: Store, clock: Clock, given: Retention | None) -> RetentionJob:
    if store.identity.startswith(SQLITE_PREFIX):
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

    from reefknot.config.reading.session import Problem
    from reefknot.config.secrets import NATS_SECRETS, resolve_at

    section, folder = settings.configuration.nats, settings.folder
    found: dict[str, Any] = {
        "guarantee": section.guarantee,
        "replicas": section.replicas,
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


def located(url: str | None, folder: Path) -> str:
    """The address of a store with its path beneath `folder`; None stands for the default one."""
    url = f"sqlite:{DEFAULT_STORE}" if url is None else url
    path = file_of(url)
    return url if path is None else f"sqlite:{folder / path}"


def file_of(url: str) -> str | None:
    """The file of a SQLite store, None for a store in memory or on NATS; every other URL is refused."""
    if url in ("memory", "memory:"):
        return None
    why = ""
    if url.startswith(SQLITE_PREFIX):
        try:
            return sqlite_path(url)
        except ValueError as error:
            why = f"; {error}"
    elif url.startswith(NATS_PREFIXES):
        try:
            nats_address(url)
        except ValueError as error:
            why = f"; {error}"
        else:
            return None
    from reefknot.core.redaction import redact

    raise ParameterError("url", redact(url), ACCEPTED_URLS + why)


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

    require_asyncio("open_audit_log")
    log = await JsonLinesLog.open(
        path, clock or clock_of_this_loop(), largest=largest, keep=keep, fsync=fsync, inline=in_virtual_loop()
    )
    try:
        yield log
    finally:
        await log.close()


async def _opened(url: str, clock: Clock, limits: dict[str, Any], *, read_only: bool, migrate: bool) -> Store:
    path = file_of(url)
    if url.startswith(NATS_PREFIXES):
        from reefknot.engines.jetstream import JetStreamStore, options_from_url

        options = options_from_url(url, **limits.pop("settings"), read_only=read_only)
        return await JetStreamStore(options, clock, **limits, has_server_time=not in_virtual_loop()).start()
    if path is None:
        from reefknot.engines.memory import MemoryStore

        if read_only:
            raise ParameterError("read_only", read_only, "False for a store in memory: it has nothing to read")
        return MemoryStore(clock, **limits)
    from reefknot.engines.sqlite import SqliteStore
    from reefknot.engines.sqlite.connection import is_older

    if not migrate and not read_only:
        read_only = is_older(path) if in_virtual_loop() else await asyncio.to_thread(is_older, path)
    return await SqliteStore(path, clock, **limits, inline=in_virtual_loop(), read_only=read_only).start()


def in_virtual_loop() -> bool:
    """Whether the running loop is one of virtual time, in which no thread may be waited for."""
    from reefknot.engines.clocks import VirtualLoop

    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def clock_of_this_loop() -> Clock:
    """The running loop's clock: its virtual time, or the system's."""
    from reefknot.engines.clocks import LoopClock, SystemClock, VirtualLoop

    loop = asyncio.get_running_loop()
    return LoopClock(loop) if isinstance(loop, VirtualLoop) else SystemClock()
