"""Sources, syncs and documents as text and as JSON: the list, tests, the end of a sync, hits of a search, exports."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, structs

from reefknot.console.cli.app import Exit
from reefknot.console.cli.output import data, json_text, put, put_fields, put_table, reader_is_gone, say, show
from reefknot.console.operations.sources import change_fields, changes_page, check_changed, check_kept, open_for_reading
from reefknot.console.operations.values import age, plural, time_text
from reefknot.console.words.sources import failure_of
from reefknot.core.failure import ErrorCode, FailureType
from reefknot.queue.model.work import WorkItem, WorkState

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.ingest.port import Document, SourceCounts
    from reefknot.ingest.sources import SourceRecord
    from reefknot.ingest.sync import SyncSummary

Redact = Callable[[str], str]
EXPORTED_AT_ONCE = 100
CHANGES_AT_ONCE = 500
FOLLOWED_EVERY_S = 0.5
"""Time between two looks at the feed of changes; a look without news reads three pages of the file."""
PROGRESS_EVERY_S = 2.0

# ---- the list --------------------------------------------------------------------------------------------------------


def put_sources(fields: Mapping[str, Any], *, wide: bool, json: bool) -> None:
    """The table of sources, and beneath it what to do."""
    found = fields["sources"]

    def text() -> None:
        columns = ("source", "connector", "schedule", "state", "documents", "problems", "quarantined", "last sync")
        keys = ("name", "connector", "schedule", "state", "documents", "problems", "quarantined")
        cells = [(*(str(one[key]) for key in keys), _last_sync(one), _short(one["next_due"])) for one in found]
        whole = ("source", "state", "last sync", "next due")
        optional = ("connector", "problems", "quarantined", "schedule", "last sync")
        put_table((*columns, "next due"), cells, styles=("cyan",), whole=whole, optional=optional, wide=wide)
        for one in found:
            for line in one["to_do"]:
                put(f"{one['name']}: {line}")
        if not found:
            say("no source is configured; `source add` adds one")

    show(fields, text, json=json)


def _last_sync(source: Mapping[str, Any]) -> str:
    """The end of the last sync that succeeded; before there is one, the state of the first."""
    return _short(source["last_sync"]) or source["sync_state"] or ""


def _short(moment: str | None) -> str:
    """A time in a table, to the second."""
    return "" if moment is None else moment[:19] + "Z"


def put_source(fields: Mapping[str, Any], *, json: bool) -> None:
    """A source with its settings, and the documents of it that could be read only in part."""
    problems, number = fields["problem_documents"], fields["problems"]

    def text() -> None:
        row = {key: value for key, value in fields.items() if key not in ("settings", "problem_documents")}
        settings = {f"settings.{key}": json_text(value) for key, value in fields["settings"].items()}
        put_fields(row | {"to_do": None} | settings)
        for line in fields["to_do"]:
            put(line.removesuffix(f": reefknot source show {fields['name']}"))  # that is this very command
        if problems:
            put()
            cells = [(one["location"], one["problem"]) for one in problems]
            put_table(("document", "problem"), cells, styles=("cyan",))
        if len(problems) < number:
            say(f"{len(problems)} of {plural(number, 'document')} with a problem shown; --limit shows more")

    show(fields, text, json=json)


# ---- tests -----------------------------------------------------------------------------------------------------------


class TestResult(Struct, frozen=True):
    """The answer of one source, or why there is none."""

    __test__ = False

    name: str
    ok: bool
    answer: str
    exit: int
    tested: bool = True
    """False: the connector cannot be tested, and only its settings were checked."""


def failed_test(name: str, error: Exception, timeout: float, own: str | None = None) -> TestResult:
    """
    The result of a test that failed: forbidden, unreachable, limited, or misconfigured.

    `own` tells of an error that a connector of one's own did not raise on purpose.
    """
    from reefknot.retrying.failures import failure_from

    failure = failure_from(error)
    text = failure.message or failure.exception
    if isinstance(error, TimeoutError) and not str(error):
        text = f"there was no answer within {timeout:g} s; timeout_seconds of the source is the limit"
    code = Exit.UNREACHABLE
    is_forbidden = isinstance(error, PermissionError) or bool(getattr(error, "forbidden", False))
    if is_forbidden or failure.code is ErrorCode.permission_denied or failure.http_status in (401, 403):
        code = Exit.FORBIDDEN
    elif failure.failure_type is FailureType.RATE_LIMITED:
        code = Exit.TEMPORARY
    elif failure.failure_type is FailureType.TRANSIENT:
        pass
    elif own is not None:
        code, text = Exit.FAILED, own
    elif failure.failure_type is FailureType.PERMANENT:
        code = Exit.MISCONFIGURED
    else:
        code = Exit.FAILED
    return TestResult(name, False, text, code)


# ---- syncs -----------------------------------------------------------------------------------------------------------


class Progress:
    """Pages of a sync as they are kept: a line on stderr every few seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._printed_at = monotonic()

    def page(self, summary: SyncSummary) -> None:
        if monotonic() - self._printed_at >= PROGRESS_EVERY_S:
            self._printed_at = monotonic()
            say(f"{self._name}: {summary.seen} looked at, {summary.kept} new or changed")


class SyncOutcome(Struct, frozen=True):
    """The end of a `source run`."""

    source: str
    job_id: str
    state: str
    """done, retry, waiting, quarantined, or cancelled."""
    seconds: float
    kept: int = 0
    deleted: int = 0
    unchanged: int = 0
    failed: int = 0
    problems: int = 0
    documents: int = 0
    documents_per_second: float = 0.0
    next_try: str | None = None
    reason: str | None = None


def outcome(
    name: str,
    item: WorkItem,
    record: SourceRecord,
    counts: SourceCounts | None,
    seconds: float,
    now: int,
    redact: Redact,
) -> SyncOutcome:
    """The outcome of a sync, by its job and the record of its source."""
    from reefknot.ingest.sync import SyncSummary

    ended = SyncOutcome(
        name, item.assignment_id, "waiting", round(seconds, 3), documents=counts.documents if counts else 0
    )
    failure = redact(failure_of(item) or item.reason)
    match item.state:
        case WorkState.SUCCEEDED:
            found = msgspec.json.decode(item.result or "{}", type=SyncSummary)
            return structs.replace(
                ended,
                state="done",
                kept=found.kept,
                deleted=found.deleted,
                unchanged=max(0, found.seen - found.kept - found.failed),
                failed=found.failed,
                problems=found.problems,
                documents_per_second=round(found.seen / seconds, 1) if seconds > 0 else 0.0,
            )
        case WorkState.QUARANTINED:
            return structs.replace(ended, state="quarantined", reason=failure)
        case WorkState.PENDING:
            due = max(item.due_at, record.health.opens_at(now) or 0)
            state = "retry" if item.attempts else "waiting"
            return structs.replace(ended, state=state, reason=failure, next_try=time_text(due))
        case _:
            return structs.replace(ended, state="cancelled", reason=redact(item.reason))


class ItemsLeft(Struct, frozen=True):
    """The jobs of a source after a sync: those of items that are retried, and those in quarantine."""

    retried: int = 0
    quarantined: int = 0


def put_outcome(found: SyncOutcome, left: ItemsLeft, *, again: str, json: bool) -> int:
    """Print how a sync ended, and `again`, the command that runs the next one. Returns the exit code."""
    name = found.source

    def text() -> None:
        took = age(found.seconds)
        match found.state:
            case "done":
                put(
                    f"{name}: {found.kept} new or changed, {found.deleted} deleted, {found.unchanged} unchanged, "
                    f"{found.failed} failed; {plural(found.documents, 'document')} in all, {took}, "
                    f"{found.documents_per_second:g} documents/s"
                )
                if left.retried:
                    say(f"{plural(left.retried, 'item')} failed and will be retried, by `reefknot up` or `source run`")
                if left.quarantined:
                    number = plural(left.quarantined, "item")
                    say(f"{number} in quarantine, for you to decide: reefknot quarantine list --source {name}")
                if found.problems:
                    say(f"{plural(found.problems, 'document')} could be read only in part: reefknot source show {name}")
            case "quarantined":
                put(f"{name}: the sync failed: {found.reason}")
                say(f"It is in quarantine and is not repeated by itself. Mend that, then: {again}")
            case "cancelled":
                put(f"{name}: the sync was cancelled after {took}: {found.reason}")
            case _:
                put(f"{name}: not done yet: {found.reason or 'the source lets no job begin now'}")
                say(f"It is tried again at {found.next_try}, by `reefknot up` or the next `{again}`.")

    show(msgspec.to_builtins(found), text, json=json)
    return {"done": Exit.FINE, "quarantined": Exit.FAILED, "cancelled": Exit.FAILED}.get(found.state, Exit.TEMPORARY)


# ---- documents -------------------------------------------------------------------------------------------------------


async def export_lines(operator: Operator, name: str | None, write: Callable[[str], object]) -> int:
    """Write a line for every document, page by page. Returns how many."""
    number = 0
    async with open_for_reading(operator, name) as documents:
        known = sorted(await documents.counts())
        check_kept(operator, name, known)
        for source in known if name is None else [name]:
            after = ""
            while page := await documents.page(source, after=after, limit=EXPORTED_AT_ONCE):
                for one in page:
                    write(_line(source, one))
                number += len(page)
                after = page[-1].id
    return number


def _line(source: str, document: Document) -> str:
    """A document as a line of JSON. Names of files that are no text are escaped, which JSON allows."""
    return _json_line({"source": source, **structs.asdict(document), "modified_at": time_text(document.modified_at)})


def _json_line(fields: Mapping[str, Any]) -> str:
    line = json_module.dumps(fields, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        return json_module.dumps(fields)
    return line


async def put_changes(
    operator: Operator, after: str, source: str | None, *, follow: bool, text: bool, json: bool
) -> None:
    """Print a line for every change behind a cursor; with `follow` also for those to come, until it is interrupted."""
    async with open_for_reading(operator, source, parameter="source") as documents:
        await check_changed(operator, documents, source)
        while not reader_is_gone():
            found = await changes_page(documents, after=after, source=source, limit=CHANGES_AT_ONCE, text=text and json)
            for one in found.changes:
                if json:
                    data().write(_json_line(change_fields(one)) + "\n")
                else:
                    word = "deleted" if one.document is None else "kept"
                    put(f"{one.cursor}  {word:7}  [{one.source}] {one.location}")
            data().flush()
            if not found.changes:
                if not follow:
                    return
                await asyncio.sleep(FOLLOWED_EVERY_S)
            after = found.cursor


def put_hits(found: Mapping[str, Any], limit: int, *, json: bool) -> None:
    """The documents that were found: title, place and excerpt."""
    hits = found["hits"]

    def text() -> None:
        for hit in hits:
            title = f"{hit['title']}  " if hit["title"] and hit["title"] != hit["location"] else ""
            put(f"{title}[{hit['source']}] {hit['location']}")
            put(f"    {hit['excerpt']}")
        if len(hits) == limit:
            say(f"{plural(len(hits), 'document')} shown; there may be more: --limit")

    show(found, text, json=json)
