"""
Findings about a NATS server or cluster, and the stream of a store there: the half of `reefknot doctor` for NATS.

Nothing is created, changed or repaired. What cannot be known from here is reported as unknown, not guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from time import perf_counter, time
from typing import Any

import msgspec
from msgspec import json, msgpack

from reefknot.errors import StoreError, StoreVersionError
from reefknot.idempotency.model import KeyRecord
from reefknot.runtime.log import error_text, printable
from reefknot.stores.jetstream import roles
from reefknot.stores.jetstream.connection import Connection, NatsOptions
from reefknot.stores.jetstream.events import Pack
from reefknot.stores.jetstream.reads import LATEST, StreamMessage, last_message, scan, stored_now
from reefknot.stores.jetstream.requests import NobodyThereError, RefusedError
from reefknot.stores.jetstream.state import StoredCommand, StoredItem, StoredStatus
from reefknot.stores.jetstream.streams import (
    CLUSTER_REPLICAS,
    OPEN,
    Names,
    Restored,
    StreamInfo,
    drift,
    earlier_design,
    earlier_events,
    is_of_earlier_design,
    lacks_subjects,
    state_stream,
    stream_info,
)
from reefknot.stores.jetstream.wire import NOT_FOUND
from reefknot.stores.port.engines import (
    ExamineOptions,
    Finding,
    RecordsReport,
    UnreadableRecord,
    problem_of,
    size_text,
)

SKEW_S = 1.0
MIRRORED = 100_000
FILLED = 0.8
CONSUMERS = 10
MONITOR_S = 3.0
MONITOR_BYTES = 4 << 20
PAGE = 5000
READING_S = 5.0
"""How long `doctor` reads records."""
MOST_UNREADABLE, MOST_SHOWN = 1000, 5


async def server_findings(
    options: NatsOptions, how: ExamineOptions, open_jobs: int | None = None
) -> AsyncIterator[Finding]:
    """Findings about a server or cluster, and the stream of a store there, over a connection of their own."""
    connection = Connection(options, roles.denial)
    try:
        began = perf_counter()
        await connection.open()
    except StoreError as error:
        yield problem_of("server", error)
        return
    try:
        yield _server(connection, perf_counter() - began)
        try:
            await roles.check(connection)
            yield await _jetstream(connection)
        except StoreError as error:
            yield problem_of("jetstream", error)
            return
        for finding in await _store_findings(connection, open_jobs):
            yield finding
        for finding in await _shared_assignments(connection, how.takes_shared):
            yield finding
        yield await asyncio.to_thread(_syncing, how.monitor)
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
    try:
        info = json.decode(await connection.api("INFO"))
    except NobodyThereError as error:
        raise StoreVersionError(error.store, "JetStream is not enabled there", error.way_out) from error
    used, limits = info.get("storage", 0), info.get("limits", {})
    limit, most_consumers = limits.get("max_storage", -1), limits.get("max_consumers", -1)
    streams, consumers = info.get("streams", 0), info.get("consumers", 0)
    most = f" of {limits['max_streams']}" if limits.get("max_streams", -1) > 0 else ""
    text = f"on, {streams}{most} streams with {size_text(used)}"
    text += f" of {size_text(limit)}" if limit >= 0 else ", no limit for this account"
    if most_consumers > 0:
        text += f", {consumers} of {most_consumers} consumers"
    if 0 <= limit < used / FILLED:
        return Finding("jetstream", "warning", text, "raise the account's limit: a full stream refuses new work")
    if most_consumers > 0 and most_consumers - consumers < CONSUMERS:
        way_out = f"raise max_consumers of the account: a process needs up to {CONSUMERS}"
        return Finding("jetstream", "warning", text, way_out)
    return Finding("jetstream", "ok", text)


async def _store_findings(connection: Connection, open_jobs: int | None) -> list[Finding]:
    """Findings about the stream of the store, and what is in it."""
    names, options = Names(connection.options.name), connection.options
    wanted, name = state_stream(names, options.replicas), names.state
    try:
        info = await stream_info(connection, name)
    except RefusedError as error:
        if error.number != NOT_FOUND:
            return [problem_of("stream", error)]
        if (old := await earlier_events(connection)) is not None:
            return [problem_of("stream", earlier_design(connection, old))]
        way_out = "`reefknot submit`, `run`, `up`, `worker start` and `router start` make it"
        return [Finding("stream", "warning", f"there is no stream {name} yet", way_out)]
    except StoreError as error:
        return [problem_of("stream", error)]
    if is_of_earlier_design(info.config):
        return [problem_of("stream", earlier_design(connection, name))]
    findings = [_settings(info, wanted), _bound(info, options.max_bytes), _replicas(info, options.replicas)]
    try:
        number = await _open_jobs(connection, names) if open_jobs is None else open_jobs
        findings += [await _clock(connection, name), _mirror(number)]
        return [*findings, *await _restored(connection, names), await _readable(connection, names)]
    except (StoreError, TimeoutError) as error:
        way_out = "check the server's load and log"
        return [*findings, Finding("records", "problem", error_text(error), way_out, "unreachable")]


def _settings(info: StreamInfo, wanted: dict[str, Any]) -> Finding:
    """The settings of a stream, compared with those that the store needs."""
    name, changed = info.config["name"], drift(info.config, wanted)
    if len(changed) == 1 and lacks_subjects(info.config, wanted):
        way_out = "open the store once, for example by `reefknot job list`"
        return Finding("stream", "warning", f"{name} was made by an earlier version", way_out)
    if changed:
        text, way_out = f"{name} was changed: {'; '.join(changed)}", f"set it back: nats stream edit {name}"
        return Finding("stream", "problem", text, way_out, "misconfigured")
    held = f"{info.state.get('messages', 0)} messages, {size_text(info.state.get('bytes', 0))}"
    return Finding("stream", "ok", f"{name} is as it should be: {held}")


def _bound(info: StreamInfo, wanted: int | None) -> Finding:
    """The limit of a stream in bytes. Without one, the limit of the account or server may cut a change in two."""
    name, bound, used = info.config["name"], info.config.get("max_bytes", -1), info.state.get("bytes", 0)
    if bound < 0:
        text = f"{name} has none: where its server or account runs full, a change may be stored in part"
        size = "BYTES" if wanted is None else wanted
        return Finding("bound", "warning", text, f"nats stream edit {name} --discard new --max-bytes {size}")
    text = f"{name} holds {size_text(used)} of {size_text(bound)}"
    if used > FILLED * bound:
        return Finding("bound", "warning", text, f"nats stream edit {name} --max-bytes BYTES: a full one refuses work")
    return Finding("bound", "ok", text)


def _replicas(info: StreamInfo, wanted: int | None) -> Finding:
    """The copies of one stream: how many there are and could be, and which are behind or unreachable."""
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
    if wanted not in (None, number):
        way_out = f"nats stream edit {name} --replicas {wanted}, or set nats.replicas to {number}"
        return Finding("replicas", "warning", f"{text}, and nats.replicas is {wanted}", way_out)
    if number < CLUSTER_REPLICAS and info.cluster is not None and info.cluster.get("name"):
        way_out = f"nats stream edit {name} --replicas {CLUSTER_REPLICAS}, to outlive one server of three"
        return Finding("replicas", "warning", f"{text}, in a cluster", way_out)
    return Finding("replicas", "ok", f"{text}, all of them current" if number > 1 else text)


async def _clock(connection: Connection, stream: str) -> Finding:
    """This host's clock compared with the server's, which deadlines and leases go by."""
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
    start = {**LATEST, "headers_only": True}
    found = await scan(connection, names.state, [names.all_work(OPEN)], start=start)
    return sum(one.headers.get("Nats-Msg-Size") != "0" for one in found)  # without a body it is a tombstone


async def _restored(connection: Connection, names: Names) -> list[Finding]:
    """The note of a process that its store was replaced while it worked with it, if there is one."""
    found = await last_message(connection, names.state, names.restored)
    if found is None or not found.body:
        return []
    note = json.decode(found.body, type=Restored)
    text = f"was replaced or restored at {note.at[:19]}Z while it was in use: it had {note.was_at} changes, then "
    text += f"{note.is_at}; what came in between may be missing, or happen twice"
    way_out = (
        "compare with your own records; reefknot audit verify names gaps; the guide nats-server says what to check"
    )
    return [Finding("restored", "warning", text, way_out)]


_READERS: dict[str, Callable[[bytes], object]] = {
    "work": json.Decoder(StoredItem).decode,
    "key": json.Decoder(KeyRecord).decode,
    "status": json.Decoder(StoredStatus).decode,
    "command": json.Decoder(StoredCommand).decode,
    "value": msgpack.Decoder(tuple[str, str]).decode,
}
"""What reads the records of each branch. A record of a key in several parts is not read here."""


def problem_in(message: StreamMessage) -> str:
    """The mistake in a record; empty when it can be read, is a tombstone, or is of another kind."""
    branch = message.subject.split(".", 2)[1]
    if not message.body or "Reefknot-Parts" in message.headers:
        return ""
    try:
        if branch == "audit":
            return "" if all(one is not None for one in Pack(message).events()) else "no pack of events"
        reader = _READERS.get(branch)
        if reader is not None:
            reader(message.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return printable(str(error), most=200)
    return ""


async def unreadable_records(connection: Connection, names: Names, seconds: float) -> RecordsReport:
    """The records that cannot be read, looked for at most this number of seconds."""
    loop = asyncio.get_running_loop()
    ends, number, found = loop.time() + seconds, 0, list[UnreadableRecord]()
    filters = [f"{names.name}.{branch}.>" for branch in (*_READERS, "audit")]
    async for page in stored_now(connection, names.state, filters, most=PAGE):
        for message in page:
            number += 1
            if problem := problem_in(message):
                found.append(UnreadableRecord(message.subject, message.sequence, problem))
        if loop.time() >= ends or len(found) >= MOST_UNREADABLE:
            return RecordsReport(number, found, False)
    return RecordsReport(number, found, True)


async def _readable(connection: Connection, names: Names) -> Finding:
    """The first ones that cannot, by subject and sequence."""
    report = await unreadable_records(connection, names, READING_S)
    text = f"{report.read} records were read" + (
        "" if report.is_whole else ", not all of them: `store check` does that"
    )
    if not report.found:
        return Finding("records", "ok", f"{text}; each can be read")
    shown = ", ".join(f"{one.subject} ({one.sequence})" for one in report.found[:MOST_SHOWN])
    text += f"; {len(report.found)} cannot be read and are left out of lists: {printable(shown, most=1000)}"
    return Finding("records", "problem", text, "look at each, then `reefknot store forget-record SUBJECT`", "damaged")


def _mirror(number: int) -> Finding:
    text = f"{number} open jobs, which the leading router mirrors"
    if number > MIRRORED:
        return Finding("mirror", "warning", text, "start more workers, or divide the work: nats://HOST/NAME")
    return Finding("mirror", "ok", text)


async def _shared_assignments(connection: Connection, takes_shared: bool) -> list[Finding]:
    """The stream that keeps assignments of peers on the shared subject, if there is one."""
    name = f"{connection.options.name}_assign"
    try:
        info = await stream_info(connection, name)
    except RefusedError as error:
        return [] if error.number == NOT_FOUND else [problem_of("shared", error)]
    except StoreError as error:
        return [problem_of("shared", error)]
    number = info.state.get("messages", 0)
    text = f"{name} keeps {number} {'assignment' if number == 1 else 'assignments'} of peers"
    if takes_shared:
        copies = _replicas(info, connection.options.replicas)
        return [Finding("shared", "ok", text), *([] if copies.level == "ok" else [copies])]
    text += ", and no worker of this configuration takes them"
    way_out = f"set router.shared_subject to ours; if no peer uses it any more: nats stream rm {name}"
    return [Finding("shared", "warning", text, way_out)]


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
