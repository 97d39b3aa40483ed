"""Sources, syncs and documents as text and as JSON: the list with what to do, the end of a sync, hits of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from time import monotonic, time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct, structs

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.output import age, json_text, plural, put, put_fields, put_table, say, show, time_text
from reefknot.core.audit.event import FailureRecord
from reefknot.core.failure import ErrorCode, FailureType
from reefknot.core.overload.source_health import SourceCondition
from reefknot.core.schedules import next_due
from reefknot.core.work import WorkItem, WorkState, is_over
from reefknot.ports.documents import SourceCounts

if TYPE_CHECKING:
    from reefknot.app.sources import ConfiguredSource
    from reefknot.ingestion.attempt import SyncSummary
    from reefknot.ingestion.sources import SourceRecord, SourceStatus
    from reefknot.ports.connector import Document
    from reefknot.ports.documents import SearchHit

Redact = Callable[[str], str]
NEEDS_ATTENTION, NEVER_SYNCED, NOT_CONFIGURED = "needs attention", "never synced", "not configured"
ELSEWHERE, OTHER_CONNECTOR, RETRYING = "kept elsewhere", "other connector", "retrying"
PROGRESS_EVERY_S = 2.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# ---- the list --------------------------------------------------------------------------------------------------------


class SourceRow(Struct, frozen=True):
    """A source in the list. Times are ISO 8601."""

    name: str
    connector: str
    schedule: str
    state: str
    documents: int
    problems: int
    quarantined: int
    last_sync: str | None
    next_due: str | None
    to_do: list[str] = []


class Here(NamedTuple):
    """The place of the documents that a command reads, and whether its store is a file of this host."""

    documents: str = ""
    is_local: bool = True

    def obstacle(self, source: ConfiguredSource, record: SourceRecord) -> tuple[str, str] | None:
        """The state of a source that is left alone here, and what can be done; None for one that can be synced."""
        full = f"reefknot source run {source.name} --full"
        if record.is_of_other(source.connector):
            text = (
                f"what is kept of it is of the connector {record.connector}, and it is {source.connector} now. Give it "
                f"another name; or begin anew, without the documents that are there: {full}"
            )
            return OTHER_CONNECTOR, text
        if place := record.elsewhere(self.documents, is_local=self.is_local):
            text = f"its documents and its cursor are in another place: {place}, perhaps on another host. Sync it there"
            return ELSEWHERE, f"{text}, or keep them here from now on: {full}"
        return None


def rows(
    sources: Sequence[ConfiguredSource],
    statuses: Sequence[SourceStatus],
    counts: Mapping[str, SourceCounts],
    redact: Redact,
    *,
    here: Here | None = None,
    now: int | None = None,
) -> list[SourceRow]:
    """The configured sources in their order, then those that only have documents or jobs. `now` is in ms."""
    now = round(time() * 1000) if now is None else now
    found, known = [], {one.name: one for one in statuses}
    for one in sources:
        status = known.pop(one.name, None)
        row = _row(one, status, counts.get(one.name), redact, now)
        obstacle = None if status is None else (here or Here()).obstacle(one, status.record)
        found.append(row if obstacle is None else structs.replace(row, state=obstacle[0], to_do=[obstacle[1]]))
    configured = {one.name for one in sources}
    return [
        *found,
        *(_left(name, known.get(name), counts.get(name)) for name in sorted({*known, *counts} - configured)),
    ]


def _left(name: str, status: SourceStatus | None, count: SourceCounts | None) -> SourceRow:
    """A source that is not configured any more, by what is left of it."""
    kept = count or SourceCounts()
    open_jobs, quarantined = (status.open_jobs, status.quarantined) if status else (0, 0)
    left = [plural(kept.documents, "document")] if kept.documents else []
    left += [plural(open_jobs, "open job")] if open_jobs else []
    left += [plural(quarantined, "job in quarantine", "jobs in quarantine")] if quarantined else []
    forget = f"reefknot source forget {name} --because TEXT"
    words = ", ".join(left) or "its cursor"
    to_do = [f"it is not configured any more, and nobody runs its jobs; left are: {words}. To remove that: {forget}"]
    last = time_text(kept.kept_at)
    return SourceRow(name, "", "", NOT_CONFIGURED, kept.documents, kept.problems, quarantined, last, None, to_do)


def _row(
    source: ConfiguredSource, status: SourceStatus | None, count: SourceCounts | None, redact: Redact, now: int
) -> SourceRow:
    condition = SourceCondition.HEALTHY if status is None else status.record.health.condition(now)
    following = None if condition is SourceCondition.PAUSED else _following(source, status, now)
    return SourceRow(
        source.name,
        source.connector,
        source.schedule,
        _state(status, condition),
        count.documents if count else 0,
        count.problems if count else 0,
        status.quarantined if status else 0,
        time_text(status.record.synced_at or None) if status else None,
        time_text(following),
        _to_do(source, status, count, redact, now),
    )


def _state(status: SourceStatus | None, condition: SourceCondition) -> str:
    if condition is not SourceCondition.HEALTHY:
        return condition.value
    if status is not None and status.quarantined:
        return NEEDS_ATTENTION
    if status is not None and status.sync is not None and status.sync.failure and not is_over(status.sync):
        return RETRYING
    return NEVER_SYNCED if status is None or not status.record.synced_at else condition.value


def _following(source: ConfiguredSource, status: SourceStatus | None, now: int) -> int | None:
    """The time of the next sync: that of a retry that waits, or by the timetable."""
    sync = None if status is None else status.sync
    if sync is not None and sync.state is WorkState.PENDING:
        return max(sync.due_at, status.record.health.opens_at(now) or 0) if status else None
    due = next_due(source.timetable, _EPOCH + timedelta(milliseconds=now))
    return None if due is None else (due - _EPOCH) // timedelta(milliseconds=1)


def _to_do(
    source: ConfiguredSource, status: SourceStatus | None, count: SourceCounts | None, redact: Redact, now: int
) -> list[str]:
    """Lines on what a person can do about this source, and on what happens by itself."""
    name = source.name
    if status is None or (status.sync is None and count is None):
        return [f"it has no documents yet: reefknot source run {name}"]
    health, lines = status.record.health, []
    failure = redact(_failure_of(status.sync))
    match health.condition(now):
        case SourceCondition.PAUSED:
            why = f" because {status.record.paused_because}" if status.record.paused_because else ""
            by = f" by {status.record.paused_by}" if status.record.paused_by else ""
            lines.append(f"paused{by}{why}: reefknot source resume {name}")
        case SourceCondition.COOLING:
            until = time_text(health.cools_until)
            lines.append(f"no job begins before {until} ({redact(health.cooling_reason)}); it goes on by itself then")
        case SourceCondition.RESTING:
            until = time_text(health.rests_until)
            lines.append(f"it does not answer ({failure or 'several jobs failed'}); it is tried again at {until}")
        case SourceCondition.PROBING | SourceCondition.RECOVERING:
            lines.append("it did not answer for a while, and is tried with few jobs at first")
        case SourceCondition.HEALTHY:
            pass
    if failure and status.sync is not None and status.sync.state is WorkState.PENDING:
        again = time_text(_following(source, status, now))
        lines.append(f"its sync failed ({failure}) and is tried again at {again}")
    if status.sync is not None and status.sync.state is WorkState.QUARANTINED:
        lines.append(f"its sync failed: {failure or redact(status.sync.reason)}; then: reefknot source run {name}")
        others = status.quarantined - 1
    else:
        others = status.quarantined
    if others > 0:
        lines.append(f"{plural(others, 'item')} could not be read: reefknot quarantine list --source {name}")
    if count is not None and count.problems:
        lines.append(f"{plural(count.problems, 'document')} could be read only in part: reefknot source show {name}")
    return lines


def _failure_of(item: WorkItem | None) -> str:
    """The message of a job's last failure."""
    if item is None or not item.failure:
        return ""
    return msgspec.json.decode(item.failure, type=FailureRecord).message


def put_sources(found: Sequence[SourceRow], *, wide: bool, json: bool) -> None:
    """The table of sources, and beneath it what to do."""

    def text() -> None:
        columns = ("source", "connector", "schedule", "state", "documents", "problems", "quarantined", "last sync")
        cells = [
            (
                *(one.name, one.connector, one.schedule, one.state, str(one.documents), str(one.problems)),
                *(str(one.quarantined), _short(one.last_sync), _short(one.next_due)),
            )
            for one in found
        ]
        whole = ("source", "state", "last sync", "next due")
        optional = ("connector", "problems", "quarantined", "schedule", "last sync")
        put_table((*columns, "next due"), cells, styles=("cyan",), whole=whole, optional=optional, wide=wide)
        for one in found:
            for line in one.to_do:
                put(f"{one.name}: {line}")
        if not found:
            say("no source is configured; `source add` adds one")

    show({"sources": msgspec.to_builtins(found)}, text, json=json)


def _short(moment: str | None) -> str:
    """A time in a table, to the second."""
    return "" if moment is None else moment[:19] + "Z"


def put_source(row: SourceRow, settings: Mapping[str, Any], problems: Sequence[Document], *, json: bool) -> None:
    """A source with its settings, and the documents of it that could be read only in part."""

    def text() -> None:
        fields = msgspec.to_builtins(row) | {"to_do": None}
        put_fields(fields | {f"settings.{key}": json_text(value) for key, value in settings.items()})
        for line in row.to_do:
            put(line.removesuffix(f": reefknot source show {row.name}"))  # that is this very command
        if problems:
            put()
            put_table(("document", "problem"), [(one.location, one.problem) for one in problems], styles=("cyan",))
        if len(problems) < row.problems:
            say(f"{len(problems)} of {plural(row.problems, 'document')} with a problem shown; --limit shows more")

    listed = [{"id": one.id, "location": one.location, "problem": one.problem} for one in problems]
    show(msgspec.to_builtins(row) | {"settings": settings, "problem_documents": listed}, text, json=json)


# ---- tests -----------------------------------------------------------------------------------------------------------


class TestResult(Struct, frozen=True):
    """The answer of one source, or why there is none."""

    __test__ = False

    name: str
    ok: bool
    answer: str
    exit: int


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


def refuse_sync(source: ConfiguredSource, record: SourceRecord, here: Here, *, full: bool) -> None:
    """Refuse to sync a source that somebody has paused, or whose cursor is in another place or another connector's."""
    name, obstacle = source.name, here.obstacle(source, record)
    if obstacle is not None and not full:
        state, text = obstacle
        raise CommandError(f"{name}: {text}", Exit.MISCONFIGURED if state == OTHER_CONNECTOR else Exit.TEMPORARY)
    if record.health.paused:
        by = f" by {record.paused_by}" if record.paused_by else ""
        why = f" because {record.paused_because}" if record.paused_because else ""
        raise CommandError(f"{name} is paused{by}{why}; first: reefknot source resume {name}", Exit.TEMPORARY)


def is_under_way(item: WorkItem, now: int) -> bool:
    """Whether a job runs, or is due."""
    return not is_over(item) and (item.state is WorkState.RUNNING or item.due_at <= now)


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
    from reefknot.ingestion.attempt import SyncSummary

    ended = SyncOutcome(
        name, item.assignment_id, "waiting", round(seconds, 3), documents=counts.documents if counts else 0
    )
    failure = redact(_failure_of(item) or item.reason)
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


def document_fields(source: str, document: Document) -> dict[str, Any]:
    """A document as an export shows it."""
    fields = {"source": source, **structs.asdict(document)}
    return fields | {"modified_at": time_text(document.modified_at)}


def put_hits(hits: Sequence[SearchHit], limit: int, *, json: bool) -> None:
    """The documents that were found: title, place and excerpt."""

    def text() -> None:
        for hit in hits:
            title = f"{hit.title}  " if hit.title and hit.title != hit.location else ""
            put(f"{title}[{hit.source}] {hit.location}")
            put(f"    {hit.excerpt}")
        if len(hits) == limit:
            say(f"{plural(len(hits), 'document')} shown; there may be more: --limit")

    found = [structs.asdict(hit) | {"modified_at": time_text(hit.modified_at)} for hit in hits]
    show({"hits": found}, text, json=json)
