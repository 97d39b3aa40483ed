"""
`reefknot audit`: the audit log, followed, verified, replayed, exported and analysed. No command here runs an effect.

Every read is paged and every wait is bounded. An export is complete or absent: both files appear whole, the head last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from reefknot.audit.model.analysis import FAILED_ONCE, Analyser, Analysis, Pattern
from reefknot.audit.model.chain import Head
from reefknot.audit.model.event import decode
from reefknot.audit.port import PAGE, AuditLog, ChainReport, KeptEntry, MultiChainLog, end_of, pages_of
from reefknot.console.cli.app import CommandError, Exit, UnknownOptionError, examples, noun
from reefknot.console.cli.audit_files import (
    CSV,
    EVERY_EVENT,
    JSONL,
    audit_source,
    audited_store,
    events_of,
    export_pages,
    head_file_of,
    heads_for,
    json_line,
)
from reefknot.console.cli.options import STORE, StoreFlags, arg, check_number, time_arg, unwritable
from reefknot.console.cli.output import progress, put, put_table, reader_is_gone, say, show
from reefknot.console.cli.store import address_of, with_store
from reefknot.console.operations.audit import EventFilter, EventQuery, replayed, verification
from reefknot.console.operations.values import one_of, plural
from reefknot.console.words.events import text_line
from reefknot.runtime.files import output_file
from reefknot.stores.port.engines import has_file, located

if TYPE_CHECKING:
    from cyclopts import Token

    from reefknot.audit.verification import KeptHeads
    from reefknot.stores.port import Store

app = noun("audit", "audit tail --follow --type retry_exhausted")


def _file(_: object, tokens: Sequence[Token]) -> Path:
    """A file by its name, or by the URL of a store: a `Path` would merge the slashes of a URL."""
    text = tokens[0].value
    return Path(located(text, Path.cwd()) if has_file(text) else text)


File = Annotated[
    Path | None,
    arg("Exported file, JSON-lines log, or file of a store, instead of --engine.", converter=_file),
]
# ---- filter ----------------------------------------------------------------------------------------------------------

_TIME = "a time such as 2026-01-25T21:15:00Z, or an age: 90s, 15m, 2h, 7d."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FilterFlags:
    """Options that choose events. All that are given must match."""

    type_: Annotated[str | None, arg("Only this event type, such as retry_attempt.", "--type")] = None
    category: Annotated[str | None, arg("Only this retry category, in any of its spellings.")] = None
    work: Annotated[str | None, arg("Only the events of this assignment, by its id.")] = None
    key: Annotated[str | None, arg("Only this idempotency key.")] = None
    tenant: Annotated[str | None, arg("Only the events of this tenant.")] = None
    by_actor: Annotated[str | None, arg("Only what this actor did: a name given with --as, or a user.", "--actor")] = (
        None
    )
    correlation: Annotated[str | None, arg("Only this correlation id.")] = None
    trace: Annotated[str | None, arg("Only this trace id.")] = None
    since: Annotated[str | None, time_arg(f"Only events since {_TIME}")] = None
    until: Annotated[str | None, time_arg(f"Only events before {_TIME}")] = None

    def chosen(self) -> EventFilter:
        """The filter for these flags."""
        return EventFilter.of(
            EventQuery(
                type=self.type_,
                category=self.category,
                work=self.work,
                key=self.key,
                tenant=self.tenant,
                actor=self.by_actor,
                correlation=self.correlation,
                trace=self.trace,
                since=self.since,
                until=self.until,
            )
        )


FILTER = FilterFlags()


# ---- tail ------------------------------------------------------------------------------------------------------------

LONGEST_WAIT_S = 5.0


@app.command(
    help_epilogue=examples(
        "audit tail --follow --for 60 --category nats.publish", "audit tail --work order-7 --since 1h"
    )
)
def tail(
    *,
    lines: Annotated[int, arg("Number of events to show first. Default: 20.", "--lines", "-n")] = 20,
    follow: Annotated[bool, arg("Continue with new events, until interrupted.", "--follow", "-f")] = False,
    for_: Annotated[float | None, arg("Follow for this many seconds, then end.", "--for")] = None,
    only: FilterFlags = FILTER,
    options: StoreFlags = STORE,
) -> None:
    """Show the last events, and with --follow new ones as they are written. With --json, one event per line."""
    check_number("--lines", lines, 0, sys.maxsize, f"a whole number from 0 to {sys.maxsize}")
    check_number("--for", for_, 0, 86400, "seconds, from 0 to 86400")
    wanted = only.chosen()

    async def work(store: Store) -> None:
        end = (await end_of(store.audit)).sequence
        put_events(await _last(wanted, store.audit, end, lines), json=options.json)
        if follow or for_ is not None:
            await follow_log(store.audit, wanted, after=end, seconds=for_, json=options.json)

    with_store(address_of(options, looks=True), work)


async def _last(wanted: EventFilter, log: AuditLog, end: int, lines: int) -> list[KeptEntry]:
    """The last matching entries, found from the end on."""
    found: list[KeptEntry] = []
    limit, before = min(lines, PAGE) if wanted.by_index else PAGE, end + 1
    with progress("searching", end) as advance:
        while len(found) < lines:
            query = msgspec.structs.replace(wanted.query, before=before, limit=limit, newest_first=True)
            page = await log.read(query)
            found += filter(wanted.matches, page)
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
        end = (await end_of(log)).sequence
        async for page in pages_of(log, query, until=end):
            put_events(list(filter(wanted.matches, page)), json=json)
            if reader_is_gone():
                return
        after = end


def put_events(events: list[KeptEntry], *, json: bool) -> None:
    """Print a line per event, and flush."""
    for one in events:
        if json:
            print(safe_json_line(one))
        else:
            put(text_line(one))
    sys.stdout.flush()


def safe_json_line(one: KeptEntry) -> str:
    """The line of an event for a terminal: characters that cannot be printed are escapes."""
    from json import dumps

    text = json_line(one).decode("utf-8", "replace").rstrip("\n")
    return "".join(char if char.isprintable() else dumps(char)[1:-1] for char in text)


# ---- verify and replay -----------------------------------------------------------------------------------------------


CONSISTENT = "internally consistent; without a head this shows accidents, not intent"
WITHOUT_HEAD = (
    "Without --head this does not prove that the log was never rewritten or cut off at its end. `reefknot audit head` "
    "prints a head; keep it out of reach of those who can write the log, or set audit.heads."
)


@app.command(help_epilogue=examples("audit verify", "audit verify log.jsonl --head kept.head.json"))
def verify(
    file: File = None,
    /,
    *,
    head: Annotated[Path | None, arg("Head that was kept elsewhere, or a file of heads (audit.heads).")] = None,
    options: StoreFlags = STORE,
) -> int:
    """
    Verify the hash chain: list every edit, removal, swap and insertion. Exits with 65 when there is one.

    Without a head this finds accidents only: a person who can write the log can also recompute its hashes.
    `audit head` prints a head, and the setting audit.heads writes heads to a second place.
    """
    address = audited_store(file, options)
    kept = heads_for(file, head, address)

    async def work() -> tuple[str, list[ChainReport]]:
        async with audit_source(file, options, address) as source:
            with progress("verifying", source.size) as advance:
                return source.name, await source.reports(kept, advance)

    name, reports = asyncio.run(work())
    others = kept.others(one.head.chain for one in reports)
    if others:
        say(
            f"{kept.file} also has heads of {plural(len(others), 'other chain')}: of other stores, or of a log that "
            "was removed and started again."
        )
    found = verification(name, reports, kept)
    show(found, lambda: _put_verification(found), json=options.json)
    for line in _what_is_not_proven(found, kept):
        say(line)
    return Exit.FINE if found["ok"] else Exit.MISMATCH


def _put_verification(found: dict[str, Any]) -> None:
    for one in found["mismatches"]:
        put(f"{'chain ' + one['chain'] + ', ' if 'chain' in one else ''}event {one['sequence']}: {one['problem']}")
    chains, verdict = found.get("chains"), CONSISTENT
    if found["mismatches_total"]:
        verdict = plural(found["mismatches_total"], "mismatch", "mismatches")
    elif chains is not None:
        if all(one["proven_up_to"] is not None for one in chains):
            verdict = "OK, nothing up to the heads was changed since they were kept"
    elif found["proven_up_to"] is not None:
        verdict = f"OK, nothing up to event {found['proven_up_to']} was changed since its head was kept"
    end = f"{len(chains)} chains" if chains else f"chain {found['chain']} ends at event {found['sequence']}"
    put(f"{found['source']}: {verdict}; {end}")


def _what_is_not_proven(found: dict[str, Any], kept: KeptHeads) -> Iterator[str]:
    """Sentences about the events that no head vouches for."""
    if found["compared_with"] is None:
        yield WITHOUT_HEAD
    elif "chains" in found:
        bare = [one["chain"] for one in found["chains"] if not kept.heads_of(one["chain"])]
        if bare:
            yield f"No head was kept of {plural(len(bare), 'chain')}: for these, {CONSISTENT}."
    elif found["proven_up_to"] is not None and found["sequence"] > found["proven_up_to"]:
        newer = f"{found['proven_up_to'] + 1} to {found['sequence']}"
        yield f"Events {newer} are newer than the head: for them, {CONSISTENT}."


@app.command(name="head", help_epilogue=examples("audit head", "audit head --engine sqlite:state.db"))
def head_(file: File = None, /, *, options: StoreFlags = STORE) -> None:
    """
    Print the head of the chain as one line of JSON. Kept elsewhere, it proves later what the log held now.

    On NATS every process writes a chain of its own: one line for each.
    """

    async def work() -> list[Head]:
        async with audit_source(file, options) as source:
            return await source.heads()

    for found in asyncio.run(work()):
        put(msgspec.json.encode(found).decode())
    say("Keep it out of reach of those who can write the log; `audit verify --head FILE` compares.")


@app.command(help_epilogue=examples("audit replay", "audit replay log.jsonl --json"))
def replay(file: File = None, /, *, options: StoreFlags = STORE) -> int:
    """Decide every audited decision again and list each difference (exit code 65). Nothing is executed."""
    from reefknot.policy.dialects import load_all

    for problem in load_all():  # a decision by a registered strategy can only be repeated with that strategy
        say(f"warning: {problem}", level="warning")

    async def work() -> dict[str, Any]:
        async with audit_source(file, options) as source:
            return await replayed(source.name, events_of(source, "replaying"))

    again = asyncio.run(work())
    show(again, lambda: _put_replay(again), json=options.json)
    if again["books_missing"]:
        some = ", ".join(one[:12] for one in again["books_missing"][:3])
        say(
            f"Missing from the log: {len(again['books_missing'])} of the policy books that were in force ({some}); "
            "every decision has its own policy, so the replay is complete."
        )
    if again["undecided"]:
        causes = ", ".join(f"{cause}: {number}" for cause, number in again["undecided_by"].items())
        missing = ", ".join(one[:12] for one in again["rules_missing"][:3])
        rules = f" Rules that are not in the log before their admissions: {missing}." if missing else ""
        say(f"Not decided again, for lack of inputs: {causes}. Only the chain vouches for these.{rules}")
    return Exit.FINE if again["ok"] else Exit.MISMATCH


def _put_replay(again: dict[str, Any]) -> None:
    for one in again["differences"]:
        decisions = f"recorded: {one['recorded']}; decided now: {one['decided']}"
        put(f"event {one['sequence']} ({one['event_type']}): {decisions}")
    total = again["differences_total"]
    verdict = plural(total, "difference") if total else "no differences"
    kinds = ", ".join(f"{kind} {number}" for kind, number in again["decisions_by_kind"].items())
    left = f"; {again['undecided']} could not be decided again" if again["undecided"] else ""
    done = f"{again['decisions']} decisions in {again['events']} events{kinds and f' ({kinds})'}"
    put(f"{again['source']}: {done}; {verdict}{left}")


# ---- export ----------------------------------------------------------------------------------------------------------


STDOUT = Path("-")


@app.command(
    help_epilogue=examples("audit export log.jsonl", "audit export - --format csv --tenant acme --since 7d > acme.csv")
)
def export(
    file: Annotated[
        Path,
        arg("File to write, or - for stdout. The head goes to FILE.head.json.", allow_leading_hyphen=True),
    ],
    /,
    *,
    form: Annotated[str, arg("jsonl or csv. Default: jsonl.", "--format")] = JSONL,
    force: Annotated[bool, arg("Replace existing files.")] = False,
    only: FilterFlags = FILTER,
    options: StoreFlags = STORE,
) -> None:
    """
    Write all events as JSON lines, and the head that proves later that nothing was cut off.

    A selection of events, and CSV, has no head: only the whole log can be verified.
    """
    if str(file).startswith("-") and file != STDOUT:
        raise UnknownOptionError(str(file))
    chosen = one_of("--format", form, {JSONL: JSONL, CSV: CSV})
    wanted = only.chosen()
    is_whole = chosen == JSONL and wanted.is_everything
    head_file = head_file_of(file) if is_whole and _is_regular(file) else None
    _check_targets([one for one in (file, head_file) if one is not None and _is_regular(one)], force=force)

    def work(store: Store) -> Awaitable[tuple[int, list[Head]]]:
        return export_log(store, file, head_file, wanted, chosen)

    count, heads = with_store(address_of(options, looks=True), work)
    events = f"{count} events of chain {heads[0].chain}, up to {heads[0].sequence}"
    if len(heads) > 1:
        events = f"{count} events of {len(heads)} chains"
    if file == STDOUT:
        say(f"{events}; `reefknot audit head` prints the head")
        return
    data = {
        "file": str(file),
        "head_file": None if head_file is None else str(head_file),
        "events": count,
        **msgspec.to_builtins({"head": heads[0]} if len(heads) == 1 else {"heads": heads}),
    }

    def text() -> None:
        if is_whole and head_file is None:
            put(f"{file}: {events}; `reefknot audit head` prints the head")
        elif head_file is None:
            put(f"{file}: {events}")
            say("A selection and CSV cannot be verified; `audit export FILE` alone writes the whole log and its head.")
        else:
            put(f"{file}: {events}; the head is in {head_file}")
            say("Keep the head out of reach of those who can write the log: it reveals a cut-off end.")

    show(data, text, json=options.json)


async def export_log(
    store: Store, file: Path, head_file: Path | None, wanted: EventFilter = EVERY_EVENT, form: str = JSONL
) -> tuple[int, list[Head]]:
    """Write the events of a store to a file, and the heads to theirs. Returns how many events, and the heads."""
    log = store.audit
    end = (await end_of(log)).sequence
    heads = await log.heads() if isinstance(log, MultiChainLog) else []
    heads = heads or [await log.head()]
    return await export_to(file, head_file, export_pages(log, heads, wanted, form, end=end), heads, end=end), heads


async def export_to(
    file: Path,
    head_file: Path | None,
    pages: AsyncIterator[tuple[bytes, int, int]],
    heads: Sequence[Head],
    *,
    end: int,
) -> int:
    """Write the pages, and then the heads: they are there when the export is complete. Returns how many events."""
    count = 0
    with _target(file) as stream, progress("exporting", end) as advance:
        async for text, number, looked_at in pages:
            stream.write(text)
            count += number
            advance(looked_at)
    if head_file is not None:
        with _target(head_file) as stream:
            stream.write(b"".join(msgspec.json.encode(head) + b"\n" for head in heads))
    return count


def _is_regular(file: Path) -> bool:
    """Whether a file of that name is, or will be, one that is replaced as a whole: no stdout, pipe or device."""
    return file != STDOUT and (file.is_file() or file.is_dir() or not file.exists())


def _check_targets(files: list[Path], *, force: bool) -> None:
    """Refuse folders, and existing files that may not be replaced."""
    for file in files:
        if file.is_dir():
            raise CommandError(f"{file}: is a folder; accepted: the name of a file, such as {file / 'log.jsonl'}")
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        names = " and ".join(existing)
        raise CommandError(f"{names}: exists already; name another file, or replace it with --force", Exit.FAILED)


@contextmanager
def _target(file: Path) -> Iterator[IO[bytes]]:
    if file != STDOUT:
        with ExitStack() as opened:
            try:
                stream = opened.enter_context(output_file(file))
            except FileNotFoundError:
                raise CommandError(f"{file}: there is no folder {file.parent}; make it first") from None
            except (OSError, ValueError) as error:
                raise unwritable(str(file), error) from None
            yield stream
        return
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


# ---- analyse ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("ended", "ended", ""),
    ("success", "success_rate", ".1%"),
    ("avg attempts", "avg_attempts", ".2f"),
    ("retries", "retries", ""),
    ("recovered", "recovered", ""),
    ("given up", "exhausted", ""),
    ("refused", "refused", ""),
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
    only: FilterFlags = FILTER,
    options: StoreFlags = STORE,
) -> int:
    """
    Success rate, average attempts and retries per minute of every category, and alerts above a threshold.

    Rates of steps (block:TYPE) are those of all assignments that ended. An operation of the retry
    library that succeeds at once is not audited: a rate of these, marked with *, is that of
    operations that failed at least once.
    """
    wanted = only.chosen()
    result, unreadable = asyncio.run(_analyse(file, options, Analyser(threshold=threshold), wanted))
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
    file: Path | None, options: StoreFlags, analyser: Analyser, wanted: EventFilter
) -> tuple[Analysis, int]:
    """The analysis of the chosen events, and the number of unreadable ones."""
    unreadable = 0
    async with audit_source(file, options) as source:
        async for _, body in events_of(source, "analysing", wanted):
            try:
                event = decode(body)
            except msgspec.DecodeError:
                unreadable += 1
                continue
            analyser.add(event)
    return analyser.result(), unreadable


def _put_analysis(result: Analysis, unreadable: int) -> None:
    span = f", from {result.first} to {result.last}" if result.first else ""
    put(f"{result.events} events{span}")
    put(f"retries per minute: {result.retries_per_minute} in the last one, peak {result.peak_per_minute}")
    if unreadable:
        put(f"{unreadable} events could not be read")
    patterns = [*result.categories.values(), result.overall]
    if result.categories:
        shown = [one for one in COLUMNS if one[1] != "idempotency_hits" or result.overall.idempotency_hits]
        names = [*result.categories, "all"]
        rows = [(name, *(_cell(pattern, *one) for one in shown)) for name, pattern in zip(names, patterns, strict=True)]
        put_table(("category", *(one[0] for one in shown)), rows, styles=("cyan",), whole=("category",))
        if any(map(_is_of_failed, patterns)):
            put(f"* of {FAILED_ONCE}")


def _cell(pattern: Pattern, heading: str, field: str, form: str) -> str:
    """A cell of a category. A rate that is only that of failed operations is marked."""
    value = getattr(pattern, field)
    if heading == "ended":
        return str(sum(value.values())) if value else "–"
    if value is None:
        return "–"
    return format(value, form) + "*" * (heading == "success" and _is_of_failed(pattern))


def _is_of_failed(pattern: Pattern) -> bool:
    return pattern.success_of == FAILED_ONCE and pattern.success_rate is not None
