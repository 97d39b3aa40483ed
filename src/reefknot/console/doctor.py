"""
`examine`: findings about a store: can it be used, is it as it should be, and what does it promise.

Nothing is made, changed or repaired. What cannot be known from here is said, not guessed. A store that others work on
is read beside them: no check holds a lock for longer than a moment, and the check of a file's content has a time limit.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, json

from reefknot.errors import (
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StorePermissionError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.queue.model.work import WorkState
from reefknot.runtime.database_urls import NATS_PREFIXES, SQLITE_PREFIX, sqlite_path
from reefknot.runtime.files import is_open_here
from reefknot.runtime.log import error_text, printable

if TYPE_CHECKING:
    from reefknot.stores.jetstream.connection import Connection, NatsOptions
    from reefknot.stores.jetstream.streams import StreamInfo
    from reefknot.stores.port import Store

Level = Literal["ok", "warning", "problem"]
Cause = Literal["", "unreachable", "locked", "forbidden", "misconfigured", "damaged", "unserved"]

FREE_BYTES, FULL_BYTES = 1 << 30, 64 << 20
SKEW_S = 1.0
OUTBOX_S = 60.0
MIRRORED = 100_000
FILLED = 0.8
CONSUMERS = 10
MONITOR_S = 3.0
MONITOR_BYTES = 4 << 20
QUICK_CHECK = 10
"""Most damages that the quick check of a file lists."""
CHECK_S = 60.0
"""Time limit of the quick check of a file."""
OPEN_CHECK_S = 0.1
"""The same for a store that is open, whose findings a page shows."""
LOCKED_S = 2.0
"""How long a file that others have locked is waited for."""
KEEP_LOG = "copy the file and its log before another command opens them and drops the log; compare with a backup"
CHECK_STEPS = 10_000
"""Steps of SQLite's machine between two looks at the clock: well under a millisecond."""
WAL_RESET_FIXED = (3, 51, 3)
"""The first version of SQLite in which two connections that write and checkpoint at once cannot damage the file."""


class Finding(Struct, frozen=True):
    """The outcome of one check; `way_out` says what to do, `cause` what kind of problem it is."""

    check: str
    level: Level
    text: str
    way_out: str = ""
    cause: Cause = ""


async def examine(
    url: str, *, nats: Mapping[str, Any] | None = None, monitor: str | None = None, takes_shared: bool = False
) -> list[Finding]:
    """
    All findings about the store at this URL.

    `monitor` is the URL of a NATS server's monitoring port; with `takes_shared` the workers of the configuration take
    assignments from the subject that peers share.
    """
    if not url.startswith(NATS_PREFIXES):
        path = sqlite_path(url)
        beside = await asyncio.to_thread(lambda: _log_findings(path) + _lock_findings(path))
        return await asyncio.to_thread(_file_findings, path, CHECK_S) + beside
    from reefknot.stores.jetstream.connection import options_from_url

    options = options_from_url(url, **(nats or {}))
    return [one async for one in _server_findings(options, monitor, takes_shared)]


async def examine_open(store: Store, *, monitor: str | None = None, takes_shared: bool = False) -> list[Finding]:
    """All findings about a store that is open here, soon enough for a page."""
    if store.identity.startswith(SQLITE_PREFIX):
        return await asyncio.to_thread(_file_findings, sqlite_path(store.identity), OPEN_CHECK_S)
    if store.identity.startswith("nats:"):
        from reefknot.stores.jetstream import JetStreamStore

        assert isinstance(store, JetStreamStore), store
        counts = (await store.work.snapshot()).counts.values()
        open_jobs = sum(one.get(WorkState.PENDING, 0) + one.get(WorkState.RUNNING, 0) for one in counts)
        return [one async for one in _server_findings(store.options, monitor, takes_shared, open_jobs)]
    text = "in the memory of this process, and ends with it"
    return [Finding("durability", "warning", text, "name a file or a server: --engine sqlite:PATH")]


def _problem(check: str, error: StoreError) -> Finding:
    causes: tuple[tuple[type[StoreError], Cause], ...] = (
        (StoreCorruptError, "damaged"),
        (StoreVersionError, "misconfigured"),
        (StoreLockedError, "locked"),
        (StorePermissionError, "forbidden"),
    )
    cause: Cause = next((cause for kind, cause in causes if isinstance(error, kind)), "unreachable")
    return Finding(check, "problem", error.problem, error.way_out, cause)


# ---- SQLite ----------------------------------------------------------------------------------------------------------


def _file_findings(path: str, seconds: float) -> list[Finding]:
    """Findings about the file of a store, read without changing it. The check of its content ends after `seconds`."""
    import apsw

    from reefknot.runtime.sqlite_files import is_frozen, is_writable, log_state

    findings = [library_finding(apsw.sqlite_lib_version())]
    file = Path(path)
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        size = 0
    except OSError as error:  # a name that is too long, or a folder that this user may not enter
        return [*findings, _problem("file", _unreadable(path, error))]
    if size == 0 or not file.is_file():
        text, way_out = f"there is no store at {path} yet", "`reefknot submit`, `up` and `worker start` make one"
        missing = Finding("file", "warning", text, way_out)
        if file.is_file() and (logged := log_state(path)[0]):
            text = f"{path} has 0 bytes beside a log of {logged} bytes: its content is lost"
            missing = Finding("file", "problem", text, KEEP_LOG, "damaged")
        return [*findings, missing, disk_finding(file)]
    if is_writable(path):
        findings.append(Finding("file", "ok", f"{path}, {size} bytes"))
    else:
        text, way_out = f"{path} may be read and not written", "give this user the right to write it, and its folder"
        findings.append(Finding("file", "warning", text, way_out))
    findings.append(disk_finding(file))
    was_frozen = is_frozen(path)
    content = _content_findings(path, seconds)
    if was_frozen and not is_frozen(path):  # it was read without locks, and somebody has opened it meanwhile
        content = _content_findings(path, seconds)
    return findings + content


def _lock_findings(path: str) -> list[Finding]:
    """Whether somebody keeps the file locked, so that nobody else can write it; readers do not notice."""
    from reefknot.runtime.sqlite_files import check_unlocked, is_frozen, is_writable

    if not os.path.isfile(path) or is_frozen(path) or not is_writable(path):
        return []
    try:
        check_unlocked(path, LOCKED_S)
    except StoreLockedError as error:
        return [_problem("lock", error)]
    except StoreError:
        pass  # the other checks tell more
    return []


def _log_findings(path: str) -> list[Finding]:
    """Whether the log of the file holds bytes that SQLite does not count: what is in them seems never written."""
    from reefknot.runtime.sqlite_files import log_state

    size, state = log_state(path)
    text = f"{path}-wal has {size} bytes and no valid frame, so nothing in it is read"
    if state == "uncommitted":
        return [Finding("log", "warning", f"{text}: a write that never ended, or damage", KEEP_LOG)]
    return [Finding("log", "problem", text, KEEP_LOG, "damaged")] if state else []


def _content_findings(path: str, seconds: float) -> list[Finding]:
    import apsw

    from reefknot.runtime.sqlite_files import open_read_only, translated
    from reefknot.stores.sqlite.connection import check_version

    try:
        connection = open_read_only(path, patience=LOCKED_S, check=lambda one: check_version(one, path))
        try:
            return _content(connection, path, seconds)
        finally:
            connection.close()
    except StoreCorruptError as error:
        return [_problem("content", error)]
    except StoreError as error:
        return [_problem("schema", error)]
    except apsw.Error as error:
        found = translated(error, path)
        return [_problem("content", found if isinstance(found, StoreError) else _unreadable(path, found))]


def library_finding(version: str) -> Finding:
    """The version of SQLite that reefknot is linked with, and whether it has the race that damages files."""
    found = tuple(int(part) for part in version.split(".") if part.isdecimal())
    if found >= WAL_RESET_FIXED:
        return Finding("library", "ok", f"SQLite {version}")
    fixed = ".".join(map(str, WAL_RESET_FIXED))
    text = f"SQLite {version}: two processes that write at once may, very rarely, damage the file (fixed in {fixed})"
    return Finding("library", "warning", text, "pip install --upgrade apsw")


def _unreadable(path: str, error: Exception) -> StoreError:
    return StoreUnavailableError(
        path, f"it cannot be read ({error_text(error)})", "check its name, its folders and its disk"
    )


def _content(connection: Any, path: str, seconds: float) -> list[Finding]:
    from reefknot.runtime.sqlite_files import is_frozen
    from reefknot.stores.sqlite.connection import VERSION, check_version

    found = check_version(connection, path)
    if found == VERSION:
        schema = Finding("schema", "ok", f"version {found}")
    else:
        text = f"version {found}; this program writes {VERSION}"
        schema = Finding("schema", "warning", text, "`reefknot store migrate`, which keeps a copy of the file as it is")
    durability = Finding("durability", "ok", "WAL, every commit synced: what is acknowledged survives a power cut")
    mode = connection.pragma("journal_mode")
    if mode != "wal" and not (is_frozen(path) and _has_wal_mode(path)):
        text = f"the journal mode is {mode}, not wal"
        durability = Finding("durability", "warning", text, "the next process that opens the store sets it back")
    return [schema, durability, _quick_check(connection, seconds)]


def _has_wal_mode(path: str) -> bool:
    """
    Whether the header of a file that nobody has open says so; a connection to such a file does not tell.

    Of a file that is open here, closing this second descriptor would give back the locks that SQLite has on it.
    """
    if is_open_here(os.stat(path)):
        return True  # as its connection has set it
    with open(path, "rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _quick_check(connection: Any, seconds: float) -> Finding:
    """The quick check of a file. It reads beside writers, and is given up after `seconds`."""
    import apsw

    until = monotonic() + seconds
    connection.set_progress_handler(lambda: monotonic() > until, CHECK_STEPS)
    damages: list[str] = []
    try:
        damages.extend(row[0] for row in connection.execute(f"PRAGMA quick_check({QUICK_CHECK})"))
    except apsw.InterruptError:
        if not damages:
            text = (
                f"the quick check found nothing in {seconds:g} s and was ended; `reefknot store check` goes to the end"
            )
            return Finding("content", "ok", text)
    if damages != ["ok"]:
        way_out = "restore a backup beside it and compare both, before anything else is written"
        return Finding("content", "problem", "; ".join(damages), way_out, "damaged")
    return Finding("content", "ok", "the quick check finds nothing; `reefknot store check` looks at everything")


def disk_finding(file: Path) -> Finding:
    """The finding about the room on the disk of a store, which need not be there."""
    try:
        free = shutil.disk_usage(next(one for one in file.absolute().parents if one.is_dir())).free
    except OSError as error:
        return Finding("disk", "warning", f"free space is not known ({error_text(error)})", "look at the disk")
    level: Level = "problem" if free < FULL_BYTES else "warning" if free < FREE_BYTES else "ok"
    way_out = "" if level == "ok" else "make room: a full disk refuses new work"
    return Finding("disk", level, f"{_size(free)} free", way_out)


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.0f} TiB"


# ---- NATS ------------------------------------------------------------------------------------------------------------


async def _server_findings(
    options: NatsOptions, monitor: str | None, takes_shared: bool, open_jobs: int | None = None
) -> AsyncIterator[Finding]:
    """Findings about a server or cluster, and the streams of a store there, over a connection of their own."""
    from reefknot.stores.jetstream.connection import Connection

    connection = Connection(options)
    try:
        began = perf_counter()
        await connection.open()
    except StoreError as error:
        yield _problem("server", error)
        return
    try:
        yield _server(connection, perf_counter() - began)
        try:
            yield await _jetstream(connection)
        except StoreError as error:
            yield _problem("jetstream", error)
            return
        for finding in await _store_findings(connection, open_jobs):
            yield finding
        for finding in await _shared_assignments(connection, takes_shared):
            yield finding
        yield await asyncio.to_thread(_syncing, monitor)
        yield _guarantee(options)
    finally:
        await connection.close()


def _server(connection: Connection, seconds: float) -> Finding:
    found, cluster = connection.client.connected_server_version, connection.cluster
    version = f"{found.major}.{found.minor}.{found.patch}"
    place = f"in the cluster {printable(str(cluster), most=60)}" if cluster else "alone, in no cluster"
    text = f"{connection.options.shown} answers, connected in {seconds * 1000:.0f} ms; version {version}, {place}"
    return Finding("server", "ok", text)


async def _jetstream(connection: Connection) -> Finding:
    """JetStream and the limits of the account."""
    from reefknot.stores.jetstream.connection import NobodyThereError

    try:
        info = json.decode(await connection.api("INFO"))
    except NobodyThereError as error:
        raise StoreVersionError(error.store, "JetStream is not enabled there", error.way_out) from error
    used, limits = info.get("storage", 0), info.get("limits", {})
    limit, most_consumers = limits.get("max_storage", -1), limits.get("max_consumers", -1)
    streams, consumers = info.get("streams", 0), info.get("consumers", 0)
    most = f" of {limits['max_streams']}" if limits.get("max_streams", -1) > 0 else ""
    text = f"on, {streams}{most} streams with {_size(used)}"
    text += f" of {_size(limit)}" if limit >= 0 else ", no limit for this account"
    if most_consumers > 0:
        text += f", {consumers} of {most_consumers} consumers"
    if 0 <= limit < used / FILLED:
        return Finding("jetstream", "warning", text, "raise the account's limit: a full stream refuses new work")
    if most_consumers > 0 and most_consumers - consumers < CONSUMERS:
        way_out = f"raise max_consumers of the account: a process needs up to {CONSUMERS}"
        return Finding("jetstream", "warning", text, way_out)
    return Finding("jetstream", "ok", text)


async def _store_findings(connection: Connection, open_jobs: int | None) -> list[Finding]:
    """Findings about the streams of the store, and what is in them."""
    from reefknot.stores.jetstream.connection import RefusedError
    from reefknot.stores.jetstream.streams import (
        NOT_FOUND,
        Names,
        audit_stream,
        drift,
        lacks_subjects,
        state_stream,
        stream_info,
    )

    names, options = Names(connection.options.name), connection.options
    findings: list[Finding] = []
    found: list[StreamInfo] = []
    for wanted in (state_stream(names, options.replicas), audit_stream(names, options.replicas)):
        name = wanted["name"]
        try:
            info = await stream_info(connection, name)
        except RefusedError as error:
            if error.number != NOT_FOUND:
                return [*findings, _problem("stream", error)]
            way_out = "`reefknot submit`, `run`, `up`, `worker start` and `router start` make it"
            findings.append(Finding("stream", "warning", f"there is no stream {name} yet", way_out))
            continue
        except StoreError as error:
            return [*findings, _problem("stream", error)]
        changed = drift(info.config, wanted)
        if len(changed) == 1 and lacks_subjects(info.config, wanted):
            text = f"{name} was made by an earlier version"
            findings.append(
                Finding("stream", "warning", text, "open the store once, for example by `reefknot job list`")
            )
        elif changed:
            text, way_out = f"{name} was changed: {'; '.join(changed)}", f"set it back: nats stream edit {name}"
            findings.append(Finding("stream", "problem", text, way_out, "misconfigured"))
        else:
            held = f"{info.state.get('messages', 0)} messages, {_size(info.state.get('bytes', 0))}"
            findings.append(Finding("stream", "ok", f"{name} is as it should be: {held}"))
        findings.append(_bound(info, options.max_bytes))
        findings.append(_replicas(info, options.replicas))
        found.append(info)
    if len(found) == 2:
        try:
            number = await _open_jobs(connection, names) if open_jobs is None else open_jobs
            findings += [await _clock(connection, names.state), _mirror(number)]
            findings.append(await _outboxes(connection, names))
        except (StoreError, TimeoutError) as error:
            way_out = "check the server's load and log"
            findings.append(Finding("records", "problem", error_text(error), way_out, "unreachable"))
    return findings


def _bound(info: StreamInfo, wanted: int | None) -> Finding:
    """The most that a stream may hold. Without a bound of its own, that of the account or server may cut a change."""
    name, bound, used = info.config["name"], info.config.get("max_bytes", -1), info.state.get("bytes", 0)
    if bound < 0:
        text = f"{name} has none: where its server or account runs full, a change may be stored in part"
        size = "BYTES" if wanted is None else wanted
        return Finding("bound", "warning", text, f"nats stream edit {name} --discard new --max-bytes {size}")
    text = f"{name} holds {_size(used)} of {_size(bound)}"
    if used > FILLED * bound:
        return Finding("bound", "warning", text, f"nats stream edit {name} --max-bytes BYTES: a full one refuses work")
    return Finding("bound", "ok", text)


def _replicas(info: StreamInfo, wanted: int) -> Finding:
    """The copies of one stream: how many there are, and which are behind or away."""
    name, number = info.config["name"], info.config.get("num_replicas", 1)
    others = (info.cluster or {}).get("replicas") or []
    sick = [
        f"{printable(str(one.get('name')), most=60)} {'is away' if one.get('offline') else 'is behind'}"
        for one in others
        if one.get("offline") or not one.get("current")
    ]
    text = f"{name} has {number} {'copy' if number == 1 else 'copies'}"
    if sick:
        return Finding("replicas", "warning", f"{text}; {', '.join(sick)}", "start that server, or look at its log")
    if number != wanted:
        way_out = f"nats stream edit {name} --replicas {wanted}, or set nats.replicas to {number}"
        return Finding("replicas", "warning", f"{text}, and nats.replicas is {wanted}", way_out)
    if number == 1 and info.cluster is not None and info.cluster.get("name"):
        return Finding("replicas", "warning", f"{text}, in a cluster", "set nats.replicas to 3 to outlive one server")
    return Finding("replicas", "ok", f"{text}, all of them current" if number > 1 else text)


async def _clock(connection: Connection, stream: str) -> Finding:
    """This host's clock beside the server's, by which deadlines and leases are kept."""
    from reefknot.stores.jetstream.streams import stream_info

    asked = time()
    server = datetime.fromisoformat((await stream_info(connection, stream)).ts).timestamp()
    answered = time()
    ahead = (asked + answered) / 2 - server
    text = f"this host is {abs(ahead) * 1000:.0f} ms {'ahead of' if ahead > 0 else 'behind'} the server"
    if abs(ahead) > SKEW_S + (answered - asked):
        way_out = "synchronise the clocks: work is timed by the server's, `--at` and log lines by this host's"
        return Finding("clock", "warning", text, way_out)
    return Finding("clock", "ok", text)


async def _open_jobs(connection: Connection, names: Any) -> int:
    """The number of jobs that have not ended, counted at the server."""
    from reefknot.stores.jetstream.reads import LATEST, scan
    from reefknot.stores.jetstream.streams import OPEN

    start = {**LATEST, "headers_only": True}
    found = await scan(connection, names.state, [names.all_work(OPEN)], start=start)
    return sum(one.headers.get("Nats-Msg-Size") != "0" for one in found)  # without a body it is a tombstone


def _mirror(number: int) -> Finding:
    text = f"{number} open jobs, which every process of the store mirrors"
    if number > MIRRORED:
        return Finding("mirror", "warning", text, "start more workers, or divide the work: nats://HOST/NAME")
    return Finding("mirror", "ok", text)


async def _shared_assignments(connection: Connection, takes_shared: bool) -> list[Finding]:
    """The stream that keeps assignments of peers on the shared subject, if there is one."""
    from reefknot.stores.jetstream.connection import RefusedError
    from reefknot.stores.jetstream.streams import NOT_FOUND, stream_info

    name = f"{connection.options.name}_assign"
    try:
        info = await stream_info(connection, name)
    except RefusedError as error:
        return [] if error.number == NOT_FOUND else [_problem("shared", error)]
    except StoreError as error:
        return [_problem("shared", error)]
    number = info.state.get("messages", 0)
    text = f"{name} keeps {number} {'assignment' if number == 1 else 'assignments'} of peers"
    if takes_shared:
        return [Finding("shared", "ok", text)]
    text += ", and no worker of this configuration takes them"
    way_out = f"set router.shared_subject to ours; if no peer uses it any more: nats stream rm {name}"
    return [Finding("shared", "warning", text, way_out)]


async def _outboxes(connection: Connection, names: Any) -> Finding:
    """Events that are stored and not in the audit stream yet; another process copies those of a dead one."""
    from reefknot.stores.jetstream.audit import uncopied_events

    oldest = await uncopied_events(connection, names)
    if oldest is None:
        return Finding("outbox", "ok", "every event is in the audit stream")
    text = f"the oldest event that is not in the audit stream yet waits for {oldest:.0f} s"
    if oldest > OUTBOX_S:
        return Finding("outbox", "warning", text, "any process that has the store open copies it: `reefknot up`")
    return Finding("outbox", "ok", text)


def _guarantee(options: NatsOptions) -> Finding:
    if options.guarantee == "fenced":
        return Finding("guarantee", "ok", "fenced: a claim is stored before its work begins")
    return Finding("guarantee", "ok", "result-dedup: a step may begin twice; its result is recorded once")


_UNSYNCED = "a power cut of the server may lose what it acknowledged in the last"
_ALWAYS = "set jetstream.sync_interval to always in the server's configuration"


def _syncing(monitor: str | None) -> Finding:
    """The time after which the server syncs what it acknowledges; only its monitoring port tells."""
    if monitor is None:
        text = "not known from here; by default (2m) a power cut of the server may lose the last two minutes"
        return Finding("sync", "warning", text, "--monitor http://HOST:8222 reads it from the server's monitoring port")
    try:
        config = _monitored(monitor)
    except (OSError, ValueError) as error:
        text, way_out = f"{printable(monitor, most=200)} cannot be read ({error_text(error)})", "check --monitor"
        return Finding("sync", "warning", text, way_out)
    if config.get("sync_always"):
        return Finding("sync", "ok", "always: what the server acknowledges survives a power cut")
    seconds = int(config.get("sync_interval", 0)) / 1e9
    return Finding("sync", "warning", f"every {seconds:g} s: {_UNSYNCED} {seconds:g} s", _ALWAYS)


def _monitored(url: str) -> dict[str, Any]:
    """The configuration of JetStream, as the server's `/varz` shows it."""
    from urllib.request import urlopen

    if not url.startswith(("http://", "https://")):
        raise ValueError("accepted: http://HOST:PORT")
    with urlopen(f"{url.rstrip('/')}/varz", timeout=MONITOR_S) as answer:  # noqa: S310 - of these two schemes
        varz = json.decode(answer.read(MONITOR_BYTES))
    config = varz.get("jetstream", {}).get("config") if isinstance(varz, dict) else None
    if not isinstance(config, dict):
        raise ValueError("it shows no JetStream")
    return config
