"""
`reefknot audit`: the audit log, followed, verified, replayed, exported and analysed. No command here runs an effect.

Every read is paged and every wait is bounded. An export is complete or absent: both files appear whole, the head last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.audit_source import PAGE, audit_source, exported, head_file_of, pages_of, read_head
from reefknot.cli.options import STORE, StoreFlags, arg, check_number, time_ms, unknown
from reefknot.cli.output import plural, progress, put, put_table, reader_is_gone, say, show
from reefknot.cli.stores import address_of, with_store
from reefknot.core.audit.analysis import Analyser, Analysis, Pattern, canonical_category, epoch_seconds
from reefknot.core.audit.chain import UNREADABLE, Head, event_line
from reefknot.core.audit.event import EVENT_TYPES, decode
from reefknot.errors import NotJsonError
from reefknot.ports.audit_log import AuditLog, AuditQuery, KeptEntry
from reefknot.runtime.database_urls import PREFIX, sqlite_path
from reefknot.runtime.spare_files import whole_file

if TYPE_CHECKING:
    from cyclopts import Token

    from reefknot.core.audit.replay import Replayer
    from reefknot.ports.store import Store

app = noun("audit", "audit tail --follow --type retry_exhausted")


def _file(_: object, tokens: Sequence[Token]) -> Path:
    """A file by its name, or by the URL of a store: a `Path` would merge the slashes of a URL."""
    text = tokens[0].value
    return Path(f"{PREFIX}{Path(sqlite_path(text)).absolute()}" if text.startswith(PREFIX) else text)


File = Annotated[
    Path | None,
    arg("Exported file, JSON-lines log, or file of a store, instead of --engine.", converter=_file),
]
Since = Annotated[
    str | None, arg("Only events since a time such as 2026-01-25T21:15:00Z, or an age: 90s, 15m, 2h, 7d.")
]
MOST_SHOWN = 1000
"""Mismatches and differences that are listed; all of them are counted."""

# ---- tail ------------------------------------------------------------------------------------------------------------

LONGEST_WAIT_S = 5.0
_DETAILS = (
    "operation",
    "action",
    "attempt_number",
    "total_attempts",
    "delay_seconds",
    "exception_message",
    "final_exception_message",
    "reason",
    "status",
    "state",
    "name",
    "worker_id",
    "actor",
    "subject",
    "idempotency_key",
    "correlation_id",
    "work_id",
    "tenant_id",
)
"""The fields of an event that its line shows, in this order."""


@app.command(help_epilogue=examples("audit tail --follow --for 60 --category nats.publish"))
def tail(
    *,
    lines: Annotated[int, arg("Most of the last events to show. Default: 20.", "--lines", "-n")] = 20,
    follow: Annotated[bool, arg("Continue with new events, until interrupted.", "--follow", "-f")] = False,
    for_: Annotated[float | None, arg("Follow for this many seconds, then end.", "--for")] = None,
    type_: Annotated[str | None, arg("Only this event type, such as retry_attempt.", "--type")] = None,
    category: Annotated[str | None, arg("Only this retry category, in any of its spellings.")] = None,
    correlation: Annotated[str | None, arg("Only this correlation id.")] = None,
    trace: Annotated[str | None, arg("Only this trace id.")] = None,
    since: Since = None,
    options: StoreFlags = STORE,
) -> None:
    """Show the last events, and with --follow new ones as they are written. With --json, one event per line."""
    check_number("--lines", lines, 0, sys.maxsize, f"a whole number from 0 to {sys.maxsize}")
    check_number("--for", for_, 0, 86400, "seconds, from 0 to 86400")
    wanted = EventFilter.of(type_, category, correlation, trace, time_ms("--since", since))

    async def work(store: Store) -> None:
        head = await store.audit.head()
        put_events(await wanted.last(store.audit, head, lines), json=options.json)
        if follow or for_ is not None:
            await follow_log(store.audit, wanted, after=head.sequence, seconds=for_, json=options.json)

    with_store(address_of(options), work)


class EventFilter(Struct, frozen=True):
    """The events that `tail` shows."""

    query: AuditQuery
    category: str | None

    @classmethod
    def of(
        cls, type_: str | None, category: str | None, correlation: str | None, trace: str | None, since: int | None
    ) -> EventFilter:
        known = [str(kind.__struct_config__.tag) for kind in EVENT_TYPES]
        if type_ is not None and type_ not in known:
            raise unknown("--type", type_, known)
        query = AuditQuery(event_type=type_, correlation_id=correlation, trace_id=trace, since=since)
        return cls(query, None if category is None else canonical_category(category))

    def matches(self, kept: KeptEntry) -> bool:
        if self.category is None:
            return True
        return canonical_category(_fields(kept.entry.body).get("retry_category")) == self.category

    async def last(self, log: AuditLog, head: Head, lines: int) -> list[KeptEntry]:
        """The last matching entries, found from the end on."""
        found: list[KeptEntry] = []
        limit, before = min(lines, PAGE) if self.category is None else PAGE, head.sequence + 1
        with progress("searching", head.sequence) as advance:
            while len(found) < lines:
                query = msgspec.structs.replace(self.query, before=before, limit=limit, newest_first=True)
                page = await log.read(query)
                found += filter(self.matches, page)
                if len(page) < limit:
                    break
                advance(before - page[-1].sequence)
                before = page[-1].sequence
        return found[:lines][::-1]


async def follow_log(log: AuditLog, wanted: EventFilter, *, after: int, seconds: float | None, json: bool) -> None:
    """Show new events for this many seconds, or until interrupted."""
    until = None if seconds is None else monotonic() + seconds
    while True:
        left = LONGEST_WAIT_S if until is None else min(LONGEST_WAIT_S, until - monotonic())
        if left <= 0:
            return
        if not await log.wait(after, left):
            continue
        query = msgspec.structs.replace(wanted.query, after=after, limit=PAGE)
        head = await log.head()
        async for page in pages_of(log, query, until=head.sequence):
            put_events(list(filter(wanted.matches, page)), json=json)
            if reader_is_gone():
                return
        after = head.sequence


def put_events(events: list[KeptEntry], *, json: bool) -> None:
    """Print a line per event, and flush."""
    for one in events:
        if json:
            print(_json_line(one))
        else:
            put(_text_line(one))
    sys.stdout.flush()


def _json_line(one: KeptEntry) -> str:
    from json import dumps

    head = Head("", one.sequence, one.hash)
    try:
        line = event_line(head, one.entry.body)
    except NotJsonError:  # the stored body was changed: shown as text
        line = event_line(head, msgspec.json.encode(one.entry.body.decode("utf-8", "replace")))
    text = line.decode("utf-8", "replace").rstrip("\n")
    return "".join(char if char.isprintable() else dumps(char)[1:-1] for char in text)


def _text_line(kept: KeptEntry) -> str:
    """Sequence number, time, type, category, and the details of an event."""
    fields = _fields(kept.entry.body)
    words = [
        str(kept.sequence),
        str(fields.get("timestamp", "")),
        kept.entry.event_type,
        *([str(fields["retry_category"])] if fields.get("retry_category") else []),
        *(f"{name}={_short(fields[name])}" for name in _DETAILS if fields.get(name) is not None),
    ]
    return "  ".join(words)


def _short(value: Any) -> str:
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 120 else text[:119] + "…"


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}


# ---- verify and replay -----------------------------------------------------------------------------------------------


@app.command(help_epilogue=examples("audit verify", "audit verify log.jsonl --head kept.head.json"))
def verify(
    file: File = None,
    /,
    *,
    head: Annotated[Path | None, arg("Head that was exported earlier: reveals whether the end was cut off.")] = None,
    options: StoreFlags = STORE,
) -> int:
    """Verify the hash chain: list every edit, removal, swap and insertion. Exits with 65 when there is one."""
    beside = None if file is None else head_file_of(file)
    chosen = head or (beside if beside is not None and beside.is_file() else None)

    async def work() -> tuple[str, Any, list[Any]]:
        async with audit_source(file, options) as source:
            return source.name, *await source.verify(None if chosen is None else read_head(chosen))

    name, end, mismatches = asyncio.run(work())
    data: dict[str, Any] = {
        "ok": not mismatches,
        "source": name,
        **msgspec.structs.asdict(end),
        "compared_with": None if chosen is None else str(chosen),
        "mismatches": msgspec.to_builtins(mismatches[:MOST_SHOWN]),
        "mismatches_total": len(mismatches),
    }

    def text() -> None:
        for one in mismatches[:MOST_SHOWN]:
            put(f"event {one.sequence}: {one.problem}")
        verdict = plural(len(mismatches), "mismatch", "mismatches") if mismatches else "OK"
        put(f"{name}: {verdict}; chain {end.chain} ends at event {end.sequence}")

    show(data, text, json=options.json)
    if chosen is None:
        say("Without --head a cut-off end is not detected. `audit export` writes a head; keep it elsewhere.")
    return Exit.MISMATCH if mismatches else Exit.FINE


@app.command(help_epilogue=examples("audit replay", "audit replay log.jsonl --json"))
def replay(file: File = None, /, *, options: StoreFlags = STORE) -> int:
    """Decide every audited decision again and list each difference (exit code 65). Nothing is executed."""
    from reefknot.config.dialects import load_all
    from reefknot.core.audit.replay import Replayer

    for problem in load_all():  # a decision by a registered strategy can only be repeated with that strategy
        say(f"warning: {problem}")
    replayer = Replayer()
    name, total, differences = asyncio.run(_replay(replayer, file, options))
    again = replayer.result()
    data = {
        "ok": not total,
        "source": name,
        "events": again.events,
        "decisions": again.decisions,
        "differences_total": total,
        "differences": differences,
        "books": again.books,
        "books_missing": list(again.books_missing),
    }

    def text() -> None:
        for one in differences:
            decisions = f"recorded: {one['recorded']}; decided now: {one['decided']}"
            put(f"event {one['sequence']} ({one['event_type']}): {decisions}")
        verdict = plural(total, "difference") if total else "no differences"
        put(f"{name}: {again.decisions} decisions in {again.events} events; {verdict}")

    show(data, text, json=options.json)
    if again.books_missing:
        some = ", ".join(one[:12] for one in again.books_missing[:3])
        say(
            f"Missing from the log: {len(again.books_missing)} of the policy books that were in force ({some}); every "
            "decision has its own policy, so the replay is complete."
        )
    return Exit.MISMATCH if total else Exit.FINE


async def _replay(replayer: Replayer, file: Path | None, options: StoreFlags) -> tuple[str, int, list[dict[str, Any]]]:
    """The source's name, the number of differences, and the first of them."""
    total, first = 0, []
    async with audit_source(file, options) as source:
        async for sequence, body in source.events("replaying"):
            for one in replayer.add(body):
                total += 1
                if total <= MOST_SHOWN:
                    decisions = {"recorded": one.recorded, "decided": one.decided}
                    first.append({"sequence": sequence, "event_type": one.event_type, **decisions})
        return source.name, total, first


# ---- export ----------------------------------------------------------------------------------------------------------


@app.command(help_epilogue=examples("audit export log.jsonl"))
def export(
    file: Annotated[Path, arg("File to write. The head goes beside it, to FILE.head.json.")],
    /,
    *,
    force: Annotated[bool, arg("Replace existing files.")] = False,
    options: StoreFlags = STORE,
) -> None:
    """Write all events as JSON lines, and the head that proves later that nothing was cut off."""
    head_file = head_file_of(file)
    existing = [str(one) for one in (file, head_file) if one.exists()]
    if existing and not force:
        names = " and ".join(existing)
        raise CommandError(f"{names}: exists already; name another file, or replace it with --force", Exit.FAILED)
    count, head = with_store(address_of(options), lambda store: export_to(file, head_file, store.audit))
    data = {"file": str(file), "head_file": str(head_file), "events": count, "head": msgspec.to_builtins(head)}

    def text() -> None:
        put(f"{file}: {count} events of chain {head.chain}, up to {head.sequence}; the head is in {head_file}")
        say("Keep the head where nobody who can write the log can write it: it reveals a cut-off end.")

    show(data, text, json=options.json)


async def export_to(file: Path, head_file: Path, log: AuditLog) -> tuple[int, Head]:
    """Write both files, the head last: its presence means that the export is complete."""
    head = await log.head()
    count = -1  # the header is no event
    with whole_file(file) as stream, progress("exporting", head.sequence) as advance:
        async for lines in exported(log, head):
            stream.write(lines)
            written = lines.count(b"\n")
            count += written
            advance(written)
    with whole_file(head_file) as stream:
        stream.write(msgspec.json.encode(head) + b"\n")
    return count, head


# ---- analyse ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("attempts", "total_attempts", ""),
    ("retries", "retries", ""),
    ("recovered", "recovered", ""),
    ("given up", "exhausted", ""),
    ("refused", "refused", ""),
    ("success", "success_rate", ".1%"),
    ("avg attempts", "avg_attempts", ".2f"),
    ("peak/min", "peak_per_minute", ""),
    ("key hits", "idempotency_hits", ""),
)
"""The columns after the category: heading, field of a `Pattern`, and format."""


@app.command(help_epilogue=examples("audit analyse --since 1h --threshold 30 --fail-on-alert"))
def analyse(
    file: File = None,
    /,
    *,
    threshold: Annotated[float | None, arg("Alert above this many retries per minute.")] = None,
    fail_on_alert: Annotated[bool, arg("Exit with 1 when there was an alert.")] = False,
    since: Since = None,
    options: StoreFlags = STORE,
) -> int:
    """Retries per minute, success rate and average attempts of every category, and alerts above a threshold."""
    result, unreadable = asyncio.run(_analyse(file, options, Analyser(threshold=threshold), time_ms("--since", since)))
    data = {**msgspec.to_builtins(result), "unreadable": unreadable}
    show(data, lambda: _put_analysis(result, unreadable), json=options.json)
    for alert in result.alerts:
        rate = f"{alert.peak_per_minute} retries per minute, above {alert.threshold:g}"
        until = "until the end of the log" if alert.until is None else f"until {alert.until}"
        say(f"alert: {alert.category or 'all categories'}: {rate}, from {alert.since}, {until}")
    if result.alerts_left_out:
        say(f"alert: {result.alerts_left_out} more")
    if unreadable:
        say(f"{unreadable} events could not be read and are not counted; see `audit verify`")
        return Exit.MISMATCH
    return Exit.FAILED if fail_on_alert and result.alerts else Exit.FINE


async def _analyse(
    file: Path | None, options: StoreFlags, analyser: Analyser, since: int | None
) -> tuple[Analysis, int]:
    """The analysis of the whole log, or of the events since a time; and the number of unreadable events."""
    unreadable = 0
    async with audit_source(file, options) as source:
        async for _, body in source.events("analysing", since=since):
            try:
                event = decode(body)
            except msgspec.DecodeError:
                unreadable += 1
                continue
            at = None if since is None else epoch_seconds(event.timestamp)
            if since is None or (at is not None and at * 1000 >= since):
                analyser.add(event)
    return analyser.result(), unreadable


def _put_analysis(result: Analysis, unreadable: int) -> None:
    span = f", from {result.first} to {result.last}" if result.first else ""
    put(f"{result.events} events{span}")
    put(f"retries per minute: {result.retries_per_minute} in the last one, peak {result.peak_per_minute}")
    if unreadable:
        put(f"{unreadable} events could not be read")
    if result.categories:
        rows = [_row(name, pattern) for name, pattern in result.categories.items()]
        columns = ("category", *(heading for heading, _, _ in COLUMNS))
        put_table(columns, [*rows, _row("all", result.overall)], styles=("cyan",), whole=("category",))


def _row(name: str, pattern: Pattern) -> tuple[str, ...]:
    values = [(getattr(pattern, field), form) for _, field, form in COLUMNS]
    return name, *("–" if value is None else format(value, form) for value, form in values)
