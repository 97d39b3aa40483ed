"""
The end of a log, and what comes after it.

Retries summed up, for people and for programs.

A log written out: the events as lines, the head beside them. A file is whole or not there.

`reefknot audit`: what was decided, proven and decided again. No command here runs an effect.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.audit_source import PAGE, evidence, exported, pages_of, shown_lines
from reefknot.cli.options import Config, Engine, Json
from reefknot.cli.output import progress, put, put_json, put_table, say
from reefknot.cli.stores import opened, place, run
from reefknot.core.audit.analysis import Analyser, Analysis, Pattern, canonical_category, epoch_seconds
from reefknot.core.audit.chain import Head
from reefknot.core.audit.event import decode
from reefknot.core.audit.lines import UNREADABLE, event_line
from reefknot.errors import NotJsonError
from reefknot.ports.audit_log import AuditQuery, KeptEntry

if TYPE_CHECKING:
    from reefknot.core.audit.chain import Head
    from reefknot.ports.audit_log import AuditLog

LONGEST_WAIT = 5.0
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
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
)
"""What a person wants to see of an event, in this order."""


def moment_of(text: str | None, *, now: datetime | None = None, flag: str = "--since") -> int | None:
    """Milliseconds UTC of `--since`, or of another flag that says when."""
    if text is None:
        return None
    ago = _AGO.match(text)
    if ago is not None:
        try:
            at = (now or datetime.now(UTC)) - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])
        except OverflowError:
            return 0
        return int(at.timestamp() * 1000)
    seconds = epoch_seconds(text)
    if seconds is None:
        accepted = "a time such as 2026-01-25T21:15:00Z, or how long ago: 90s, 15m, 2h, 7d"
        raise CommandError(f"{flag}: {text[:60]!r} is not accepted: {accepted}")
    return int(seconds * 1000)


class Wanted(Struct, frozen=True):
    """Which events are meant."""

    query: AuditQuery
    category: str | None

    @classmethod
    def of(
        cls, type_: str | None, category: str | None, correlation: str | None, trace: str | None, since: int | None
    ) -> Wanted:
        from reefknot.cli.options import unknown
        from reefknot.core.audit.event import EVENT_TYPES

        known = [str(kind.__struct_config__.tag) for kind in EVENT_TYPES]
        if type_ is not None and type_ not in known:
            raise unknown("--type", type_, known)
        query = AuditQuery(event_type=type_, correlation_id=correlation, trace_id=trace, since=since)
        return cls(query, None if category is None else canonical_category(category))

    def fits(self, kept: KeptEntry) -> bool:
        if self.category is None:
            return True
        return canonical_category(_fields(kept.entry.body).get("retry_category")) == self.category

    async def last(self, log: AuditLog, head: Head, lines: int) -> list[KeptEntry]:
        """The last so many that fit. Only without a filter is it known where they begin."""
        if lines == 0:
            return []
        query = self.query
        if self.category is None and query == AuditQuery():
            query = AuditQuery(after=max(0, head.sequence - lines))
        found: deque[KeptEntry] = deque(maxlen=lines)
        at = query.after
        with progress("looking", head.sequence - at) as advance:
            async for page in pages_of(log, query, until=head.sequence):
                found.extend(filter(self.fits, page))
                advance(page[-1].sequence - at)
                at = page[-1].sequence
        return list(found)


async def follow_log(log: AuditLog, wanted: Wanted, *, after: int, seconds: float | None, json: bool) -> None:
    """Show what comes, for so many seconds or until interrupted. Every wait is bounded."""
    until = None if seconds is None else monotonic() + seconds
    while True:
        left = LONGEST_WAIT if until is None else min(LONGEST_WAIT, until - monotonic())
        if left <= 0:
            return
        if not await log.wait(after, left):
            continue
        query = msgspec.structs.replace(wanted.query, after=after, limit=PAGE)
        head = await log.head()
        async for page in pages_of(log, query, until=head.sequence):
            put_events(list(filter(wanted.fits, page)), json=json)
        after = head.sequence


def put_events(events: list[KeptEntry], *, json: bool) -> None:
    """One line an event, at once."""
    for one in events:
        if json:
            print(next(shown_lines([_line(one)])))
        else:
            put(described(one))
    sys.stdout.flush()


def _line(one: KeptEntry) -> bytes:
    head = Head("", one.sequence, one.hash)
    try:
        return event_line(head, one.entry.body)
    except NotJsonError:  # somebody changed it: shown as text
        return event_line(head, msgspec.json.encode(one.entry.body.decode("utf-8", "replace")))


def described(kept: KeptEntry) -> str:
    """An event for people: number, time, type, category, and what matters most."""
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


async def analysed(
    file: Path | None, engine: str | None, config: str | None, *, threshold: float | None, since: int | None
) -> tuple[Analysis, int]:
    """The whole record, or what happened since; and how many events could not be read."""
    analyser = Analyser(threshold=threshold)
    unreadable = 0
    async with evidence(file, engine, config) as found:
        with progress("analysing", found.total) as advance:
            async for page in found.pages():
                for one in page.events:
                    try:
                        event = decode(one.body)
                    except msgspec.DecodeError:
                        unreadable += 1
                        continue
                    at = None if since is None else epoch_seconds(event.timestamp)
                    if since is None or (at is not None and at * 1000 >= since):
                        analyser.add(event)
                advance(page.size)
    return analyser.result(), unreadable


def put_analysis(result: Analysis, unreadable: int, *, json: bool) -> None:
    """All numbers as JSON, or a table with a row for each category."""
    if json:
        put_json({**msgspec.to_builtins(result), "unreadable": unreadable})
        return
    span = f", from {result.first} to {result.last}" if result.first else ""
    put(f"{result.events} events{span}")
    put(f"retries a minute: {result.retries_per_minute} in the last one, {result.peak_per_minute} at most")
    if unreadable:
        put(f"{unreadable} events could not be read")
    if result.categories:
        rows = [_row(name, pattern) for name, pattern in result.categories.items()]
        put_table(COLUMNS, [*rows, _row("all", result.overall)], styles=("cyan",), whole=("category",))


COLUMNS = (
    "category",
    "attempts",
    "retries",
    "recovered",
    "given up",
    "refused",
    "success",
    "avg attempts",
    "peak/min",
    "key hits",
)


def _row(name: str, pattern: Pattern) -> tuple[str, ...]:
    numbers: tuple[Any, ...] = (
        pattern.total_attempts,
        pattern.retries,
        pattern.recovered,
        pattern.exhausted,
        pattern.refused,
        "–" if pattern.success_rate is None else f"{pattern.success_rate:.1%}",
        "–" if pattern.avg_attempts is None else f"{pattern.avg_attempts:.2f}",
        pattern.peak_per_minute,
        pattern.idempotency_hits,
    )
    return name, *map(str, numbers)


async def export_to(file: Path, head_file: Path, log: AuditLog) -> tuple[int, Head]:
    """Write both files, the head last: with it there, the export is complete."""
    head = await log.head()
    count = -1  # the opening line is no event
    with _whole(file) as stream, progress("exporting", head.sequence) as advance:
        async for lines in exported(log, head):
            stream.write(lines)
            written = lines.count(b"\n")
            count += written
            advance(written)
    with _whole(head_file) as stream:
        stream.write(msgspec.json.encode(head) + b"\n")
    return count, head


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears when it is complete, readable by its owner only."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


app = App(
    name="audit",
    help="Read, prove, replay and analyse what was decided.",
    help_epilogue="Example:\n\n    reefknot audit tail --follow --type retry_exhausted",
)

File = Annotated[
    Path | None, Parameter(help="An exported file, a JSON-lines log, or a store's file, instead of --engine.")
]
Since = Annotated[
    str | None, Parameter(help="Not before: a time such as 2026-01-25T21:15:00Z, or 90s, 15m, 2h, 7d ago.")
]
MOST_SHOWN = 1000
"""Findings that are listed; all of them are counted."""


@app.command(help_epilogue="Example:\n\n    reefknot audit tail --follow --for 60 --category nats.publish")
def tail(
    *,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="How many of the last events to begin with.")] = 20,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Go on with what comes, until interrupted.")
    ] = False,
    for_: Annotated[float | None, Parameter(name="--for", help="Follow for so many seconds, then end.")] = None,
    type_: Annotated[str | None, Parameter(name="--type", help="Only this event type, such as retry_attempt.")] = None,
    category: Annotated[str | None, Parameter(help="Only this retry category, in any of its spellings.")] = None,
    correlation: Annotated[str | None, Parameter(help="Only this correlation id.")] = None,
    trace: Annotated[str | None, Parameter(help="Only this trace id.")] = None,
    since: Since = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """The last events, and with --follow those that come. With --json, one event a line."""

    if lines < 0:
        raise CommandError(f"--lines: {lines} is not accepted: a number, 0 or more")
    if for_ is not None and not 0 <= for_ <= 86400:
        raise CommandError(f"--for: {for_:g} is not accepted: seconds, from 0 to 86400")
    wanted = Wanted.of(type_, category, correlation, trace, moment_of(since))

    async def work() -> None:
        async with opened(place(engine, config)) as store:
            head = await store.audit.head()
            put_events(await wanted.last(store.audit, head, lines), json=json)
            if follow or for_ is not None:
                await follow_log(store.audit, wanted, after=head.sequence, seconds=for_, json=json)

    run(work())
    return Exit.FINE


@app.command(
    help_epilogue="Examples:\n\n    reefknot audit verify\n    reefknot audit verify log.jsonl --head kept.head.json"
)
def verify(
    file: File = None,
    /,
    *,
    head: Annotated[
        Path | None, Parameter(help="A head that was exported earlier: shows whether the end was cut off.")
    ] = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Is the record what it was? Every edit, removal, swap and insertion is listed, and the exit code is 65."""
    from reefknot.cli.audit_source import evidence, head_beside, head_in

    beside = None if file is None else head_beside(file)
    chosen = head or (beside if beside is not None and beside.is_file() else None)

    async def work() -> tuple[str, Any, list[Any]]:
        async with evidence(file, engine, config) as found:
            return found.name, *await found.verify(None if chosen is None else head_in(chosen))

    name, end, mismatches = run(work())
    answer: dict[str, Any] = {
        "ok": not mismatches,
        "source": name,
        "chain": end.chain,
        "sequence": end.sequence,
        "hash": end.hash,
        "compared_with": None if chosen is None else str(chosen),
        "mismatches": [{"sequence": one.sequence, "problem": one.problem} for one in mismatches[:MOST_SHOWN]],
        "mismatches_total": len(mismatches),
    }
    if json:
        put_json(answer)
    else:
        for one in mismatches[:MOST_SHOWN]:
            put(f"event {one.sequence}: {one.problem}")
        verdict = (
            "OK" if not mismatches else f"{len(mismatches)} {'mismatch' if len(mismatches) == 1 else 'mismatches'}"
        )
        put(f"{name}: {verdict}; chain {end.chain} stands at event {end.sequence}")
    if chosen is None:
        say("Without --head a cut-off end does not show. `audit export` writes a head; keep it elsewhere.")
    return Exit.MISMATCH if mismatches else Exit.FINE


@app.command(help_epilogue="Examples:\n\n    reefknot audit replay\n    reefknot audit replay log.jsonl --json")
def replay(file: File = None, /, *, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """Decide every recorded decision again and list each difference (exit code 65). Nothing is executed."""
    from reefknot.cli.audit_source import evidence
    from reefknot.cli.output import progress
    from reefknot.config.dialects import load_all
    from reefknot.core.audit.replay import Replayer

    for problem in load_all():  # a decision that followed one can only be taken again with it
        say(f"warning: {problem}")
    differences: list[dict[str, Any]] = []
    total = 0
    replayer = Replayer()

    async def work() -> str:
        nonlocal total
        async with evidence(file, engine, config) as found:
            with progress("replaying", found.total) as advance:
                async for page in found.pages():
                    for event in page.events:
                        for one in replayer.add(event.body):
                            total += 1
                            if total <= MOST_SHOWN:
                                told = {"event_type": one.event_type, "recorded": one.recorded, "decided": one.decided}
                                differences.append({"sequence": event.sequence, **told})
                    advance(page.size)
            return found.name

    name = run(work())
    again = replayer.result()
    if json:
        counts = {"events": again.events, "decisions": again.decisions, "differences_total": total}
        books = {"books": again.books, "books_missing": list(again.books_missing)}
        put_json({"ok": not total, "source": name, **counts, "differences": differences, **books})
    else:
        for one in differences:
            answers = f"recorded {one['recorded']}, decided again {one['decided']}"
            put(f"event {one['sequence']} ({one['event_type']}): {answers}")
        verdict = f"{total} come{'s' * (total == 1)} out differently" if total else "all come out the same"
        put(f"{name}: {again.decisions} decisions in {again.events} events; {verdict}")
    if again.books_missing:
        some = ", ".join(one[:12] for one in again.books_missing[:3])
        say(
            f"Not on record: {len(again.books_missing)} of the policy books that were in force ({some}); the decisions "
            "carry their own policies, so nothing else is missing."
        )
    return Exit.MISMATCH if total else Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot audit export log.jsonl")
def export(
    file: Annotated[Path, Parameter(help="Where to write. The head goes beside it, to FILE.head.json.")],
    /,
    *,
    force: Annotated[bool, Parameter(help="Replace files that are there.")] = False,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Write all events as JSON lines, and the head that proves later that nothing was cut off."""
    from reefknot.cli.audit_source import head_beside

    beside = head_beside(file)
    there = [str(one) for one in (file, beside) if one.exists()]
    if there and not force:
        names = " and ".join(there)
        raise CommandError(f"{names}: exists already; name another file, or replace it with --force", Exit.FAILED)

    async def work() -> tuple[int, Any]:
        async with opened(place(engine, config)) as store:
            return await export_to(file, beside, store.audit)

    count, head = run(work())
    if json:
        put_json(
            {"file": str(file), "head_file": str(beside), "events": count}
            | {"head": {"chain": head.chain, "sequence": head.sequence, "hash": head.hash}}
        )
    else:
        put(f"{file}: {count} events of chain {head.chain}, up to {head.sequence}; its head is in {beside}")
        say("Keep the head where whoever can write the log cannot: it shows a cut-off end.")
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot audit analyse --since 1h --threshold 30 --fail-on-alert")
def analyse(
    file: File = None,
    /,
    *,
    threshold: Annotated[float | None, Parameter(help="Retries a minute beyond which there is an alert.")] = None,
    fail_on_alert: Annotated[bool, Parameter(help="Exit with 1 when there was an alert.")] = False,
    since: Since = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Retries a minute, success rate and average attempts of every category, and alerts past a threshold."""

    result, unreadable = run(analysed(file, engine, config, threshold=threshold, since=moment_of(since)))
    put_analysis(result, unreadable, json=json)
    for alert in result.alerts:
        rate = f"{alert.peak_per_minute} retries a minute, more than {alert.threshold:g}"
        until = "still so at the end" if alert.until is None else f"until {alert.until}"
        say(f"alert: {alert.category or 'all categories'}: {rate}, from {alert.since}, {until}")
    if result.alerts_left_out:
        say(f"alert: {result.alerts_left_out} more")
    if unreadable:
        say(f"{unreadable} events could not be read and are in no number; see `audit verify`")
        return Exit.MISMATCH
    return Exit.FAILED if fail_on_alert and result.alerts else Exit.FINE
