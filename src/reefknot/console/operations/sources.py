"""
Sources of documents: listed with what to do, shown, asked for a sync, paused, resumed, searched and forgotten.

A sync is requested by a job in the queue, as a timetable does: a running system fetches, never the process that asks.
Documents and cursors are in a file of their own, which is read without a lock.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct, structs

from reefknot.console.operations.values import ParameterUseError, check_limit, shown_value, time_text, unknown_word
from reefknot.console.words.sources import (
    NOT_CONFIGURED,
    Here,
    failure_of,
    health_lines,
    left_line,
    state_word,
    stopped_line,
    sync_note,
    sync_refusal,
    sync_word,
    to_do_lines,
)
from reefknot.errors import ChangesLostError, OperationError
from reefknot.ingest.model import parse_search
from reefknot.ingest.port import SourceCounts
from reefknot.queue.model.schedules import next_due
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.work import WorkItem, WorkState, is_over
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.runtime.log import printable
from reefknot.runtime.seeds import new_id

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.core.redaction import Redactor
    from reefknot.ingest.configured_sources import ConfiguredSource
    from reefknot.ingest.documents import SqliteDocuments
    from reefknot.ingest.port import DocumentChange, DocumentChanges
    from reefknot.ingest.sources import SourceRecord, SourceStatus
    from reefknot.stores.port import Store

LONGEST_CURSOR_SHOWN = 200
ENDED_AT_ONCE = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# ---- the configured sources and their documents ----------------------------------------------------------------------


class NoDocumentsError(OperationError):
    """No source has been synced yet, so there is no file of documents. A server that says so is in order itself."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unreachable")


def configured_sources(operator: Operator) -> list[ConfiguredSource]:
    """The configured sources; none where nothing is configured."""
    from reefknot.ingest.configured_sources import sources_of

    return [] if operator.settings is None else sources_of(operator.settings)


def named_source(sources: Iterable[ConfiguredSource], name: str) -> ConfiguredSource:
    """The configured source of this name, or an error that lists the names."""
    known = {one.name: one for one in sources}
    if name not in known:
        also = "; `source add` adds one, and `source list` shows what is left of a removed one"
        raise ParameterUseError("name", unknown_word(name, known, also=also))
    return known[name]


def documents_file(operator: Operator) -> Path:
    """The file of the documents."""
    from reefknot.ingest.configured_sources import documents_path

    return documents_path(operator.settings, operator.shown or operator.store.identity)


@asynccontextmanager
async def open_for_reading(
    operator: Operator, wanted: str | None = None, *, parameter: str = "name"
) -> AsyncIterator[SqliteDocuments]:
    """The documents, for reading: a file that is not there is an error that says how it comes to be."""
    from reefknot.ingest.configured_sources import open_documents

    file = documents_file(operator)
    if not file.is_file():
        check_kept(operator, wanted, (), parameter=parameter)
        shown = str(file).removeprefix(os.getcwd() + os.sep)
        raise NoDocumentsError(f"there are no documents yet ({shown}); `source run NAME` syncs a source")
    async with open_documents(file, create=False, for_reading=True) as documents:
        yield documents


def check_kept(operator: Operator, name: str | None, kept: Sequence[str], *, parameter: str = "name") -> None:
    """Refuse a source without stored documents: one that was never synced, or is unknown."""
    if name is None or name in kept:
        return
    configured = [one.name for one in configured_sources(operator)]
    if name in configured:
        raise OperationError(f"{name} has no documents yet: reefknot source run {name}", "not_found")
    raise ParameterUseError(parameter, unknown_word(name, dict.fromkeys([*configured, *kept])))


async def search_documents(
    operator: Operator, words: str, *, source: str | None = None, limit: int = 20
) -> dict[str, Any]:
    """The documents that a search finds, best first, and the names of the sources that were searched."""
    check_limit(limit)
    wanted = list(parse_search(words).sources) if source is None else [source]
    async with open_for_reading(operator, source, parameter="source") as documents:
        known = sorted(await documents.counts())
        for name in wanted:
            check_kept(operator, name, known, parameter="source")
        found = await documents.search(words, source=source, limit=limit)
    hits = [structs.asdict(hit) | {"modified_at": time_text(hit.modified_at)} for hit in found]
    return {"hits": hits, "searched": wanted or known}


async def document_changes(
    operator: Operator, *, after: str = "0", source: str | None = None, limit: int = 100, text: bool = True
) -> dict[str, Any]:
    """A page of changes of documents, in their order, and the cursor behind it as `next`; none when there are none."""
    check_limit(limit)
    async with open_for_reading(operator, source, parameter="source") as documents:
        await check_changed(operator, documents, source)
        found = await changes_page(documents, after=after, source=source, limit=limit, text=text)
    return {"changes": [change_fields(one) for one in found.changes], "next": found.cursor}


async def check_changed(operator: Operator, documents: SqliteDocuments, source: str | None) -> None:
    """Refuse a source without any change: one that was never synced, or is unknown. A forgotten one has deletions."""
    if source is not None and not (await documents.changes(source=source, limit=1, text=False)).changes:
        check_kept(operator, source, sorted(await documents.counts()), parameter="source")


async def changes_page(documents: SqliteDocuments, **asked: Any) -> DocumentChanges:
    """A page of changes. That a consumer has to start over is a conflict, with what to do."""
    try:
        return await documents.changes(**asked)
    except ChangesLostError as error:
        raise OperationError(str(error), "conflict") from None


def change_fields(one: DocumentChange) -> dict[str, Any]:
    """A change as a line or an entry of JSON: whether the document was kept or deleted, and if kept its fields."""
    document = {} if one.document is None else structs.asdict(one.document)
    if document:
        document["modified_at"] = time_text(document["modified_at"])
    return {
        "sequence": one.sequence,
        "cursor": one.cursor,
        "change": "deleted" if one.document is None else "kept",
        "changed_at": time_text(one.changed_at),
        "source": one.source,
        "id": one.id,
        "location": one.location,
        **document,
    }


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
    cursor: str | None = None
    """The beginning of the cursor: where the next sync goes on."""
    cooldown_until: str | None = None
    """The time before which no job of it begins."""
    sync_job: str | None = None
    """The id of the latest sync."""
    sync_state: str | None = None
    """The state of the latest sync: syncing, waiting, retrying, succeeded, quarantined or cancelled."""


class _Kept(NamedTuple):
    """The documents' side of the list: counts and cursors by source, and the place they are in."""

    counts: Mapping[str, SourceCounts] = {}
    cursors: Mapping[str, str] = {}
    place: str = ""


async def list_sources(operator: Operator) -> dict[str, Any]:
    """The configured sources in their order, then those that only have documents or jobs."""
    from reefknot.ingest.sources import statuses

    store, sources, kept = operator.store, configured_sources(operator), await _kept(operator)
    found = await statuses(store, [one.name for one in sources], with_others=True)
    here = Here(kept.place, isinf(store.reached_for))
    rows = _rows(sources, found, kept, operator.redactor, here=here, now=store.moment().wall)
    return {"sources": msgspec.to_builtins(rows)}


async def show_source(operator: Operator, name: str, *, limit: int = 20) -> dict[str, Any]:
    """A source with its settings, and the documents that could be read only in part. Secrets are hidden."""
    check_limit(limit)
    source = named_source(configured_sources(operator), name)
    listed = (await list_sources(operator))["sources"]
    row: dict[str, Any] = next(one for one in listed if one["name"] == name)
    problems: list[dict[str, str]] = []
    if row["problems"]:
        async with open_for_reading(operator) as documents:
            found = await documents.problems(name, limit=limit)
        problems = [{"id": one.id, "location": one.location, "problem": one.problem} for one in found]
    shown = {key: shown_value(("sources", name, key), value) for key, value in source.settings.items()}
    return row | {"settings": shown, "problem_documents": problems}


async def stopped_sources(store: Store) -> list[str]:
    """A line for each source whose sync has stopped before items that it can neither read nor remember."""
    from reefknot.ingest.sources import SourceRecords, statuses

    records = SourceRecords(store)
    await records.refresh()
    names = [one for one in records.names if records.known(one).full_since]
    found = await statuses(store, names) if names else []
    return [f"{one.name}: {stopped_line(one.name, one)}" for one in found]


async def _kept(operator: Operator) -> _Kept:
    if not documents_file(operator).exists():
        return _Kept()
    async with open_for_reading(operator) as documents:
        counts = await documents.counts()
        cursors = {name: (await documents.position(name)).cursor for name in counts}
        return _Kept(counts, cursors, await documents.identity())


def _rows(
    sources: Sequence[ConfiguredSource],
    statuses: Sequence[SourceStatus],
    kept: _Kept,
    redact: Redactor,
    *,
    here: Here,
    now: int,
) -> list[SourceRow]:
    found, known = [], {one.name: one for one in statuses}
    for one in sources:
        status = known.pop(one.name)
        row = _row(one, status, kept.counts.get(one.name), redact, now)
        obstacle = here.obstacle(one, status.record)
        found.append(row if obstacle is None else structs.replace(row, state=obstacle[0], to_do=[obstacle[1]]))
    others = sorted({*known, *kept.counts} - {one.name for one in sources})
    found += [_left(name, known.get(name), kept.counts.get(name)) for name in others]
    return [structs.replace(one, cursor=_shown_cursor(kept.cursors.get(one.name), redact)) for one in found]


def _shown_cursor(cursor: str | None, redact: Redactor) -> str | None:
    return printable(redact(cursor), most=LONGEST_CURSOR_SHOWN) if cursor else None


def _left(name: str, status: SourceStatus | None, count: SourceCounts | None) -> SourceRow:
    """A source that is not configured any more, by what is left of it."""
    kept = count or SourceCounts()
    open_jobs, quarantined = (status.open_jobs, status.quarantined) if status else (0, 0)
    line = left_line(name, documents=kept.documents, open_jobs=open_jobs, quarantined=quarantined)
    last = time_text(kept.kept_at)
    return SourceRow(name, "", "", NOT_CONFIGURED, kept.documents, kept.problems, quarantined, last, None, [line])


def _row(
    source: ConfiguredSource, status: SourceStatus, count: SourceCounts | None, redact: Redactor, now: int
) -> SourceRow:
    health = status.record.health
    condition, due = health.condition(now), _next_sync(source, status, now)
    return SourceRow(
        source.name,
        source.connector,
        source.schedule,
        state_word(status, condition),
        count.documents if count else 0,
        count.problems if count else 0,
        status.quarantined,
        time_text(status.record.synced_at or None),
        None if condition is SourceCondition.PAUSED else time_text(due),
        to_do_lines(source.name, status, count, redact, now=now, due=due),
        cooldown_until=time_text(health.opens_at(now)),
        sync_job=status.record.sync_job or None,
        sync_state=sync_word(status.sync),
    )


def _next_sync(source: ConfiguredSource, status: SourceStatus, now: int) -> int | None:
    """The time of the next sync: that of a retry that waits, or by the timetable, unless only a person can help."""
    from reefknot.ingest.sources import waits_for_a_person

    sync = status.sync
    if waits_for_a_person(sync):
        return None
    if sync is not None and sync.state is WorkState.PENDING:
        return max(sync.due_at, status.record.health.opens_at(now) or 0)
    due = next_due(source.timetable, _EPOCH + timedelta(milliseconds=now))
    return None if due is None else (due - _EPOCH) // timedelta(milliseconds=1)


# ---- syncs -----------------------------------------------------------------------------------------------------------


async def run_source(operator: Operator, name: str, *, full: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """
    Ask for a sync by a system that runs, now or later. The answer names its job.

    A sync that is due or runs already is that job: a source is not fetched twice at once.
    """
    from reefknot.ingest.jobs import JobQueue
    from reefknot.ingest.sources import SourceRecords, beginning_anew, request_sync
    from reefknot.queue.presence import living_systems

    if operator.settings is None:
        raise OperationError("no source is configured; `source add` adds one", "misconfigured")
    source = named_source(configured_sources(operator), name)
    store, records, jobs = operator.store, SourceRecords(operator.store), JobQueue(operator.store)
    record = await records.read(name)
    latest = await jobs.get(record.sync_job) if record.sync_job else None
    moves = await _refuse_request(operator, source, record, latest, full=full)
    is_open = latest is not None and is_under_way(latest, store.moment().wall)
    job: str | None = record.sync_job if is_open else None
    if not is_open and not dry_run:
        event, given = operator.event("source.run", name, full=full), f"{name}@{new_id()}"
        if full:
            await records.change(name, partial(beginning_anew, moves=moves), events=[event])
        else:
            await store.audit.append([event])
        who, connector = operator.actor, source.connector
        job = await request_sync(jobs, records, name, connector, job_id=given, trigger="manual", who=who)
    systems = [one for one in await living_systems(store) if not one.get("own_work_only")]
    running = any(name in one.get("sources", ()) for one in systems)
    return {
        "source": name,
        "job": job,
        "queued": not dry_run,
        "existing": is_open,
        "full": full and not is_open,
        "running_system": running,
        "note": sync_note(
            name, is_open=is_open, full=full, has_source=running, systems=len(systems), shown=operator.shown
        ),
        "actor": operator.actor,
        "dry_run": dry_run,
    }


async def _refuse_request(
    operator: Operator, source: ConfiguredSource, record: SourceRecord, latest: WorkItem | None, *, full: bool
) -> bool:
    """
    Refuse a sync that no system would begin: of a source that is paused, cools or rests, or of another connector.

    Over a store on NATS the documents may be on another host, and only a system there knows its own place. Returns
    whether the documents are in another place, and the sync moves them here.
    """
    store, redact = operator.store, operator.redactor
    here = Here(await _place(operator)) if isinf(store.reached_for) else Here(record.documents, is_local=False)
    is_of_other = record.is_of_other(source.connector)
    refused = sync_refusal(source, record, here, full=full and not is_of_other)
    if refused is not None:
        raise OperationError(refused[0], "conflict")
    now = store.moment().wall
    if record.health.opens_at(now) is not None:
        lines = health_lines(source.name, record, redact(failure_of(latest)), redact, now)
        raise OperationError(f"{source.name}: {lines[0]}", "conflict")
    return here.obstacle(source, record) is not None


async def _place(operator: Operator) -> str:
    """The place of the documents here; empty before there are any."""
    if not documents_file(operator).is_file():
        return ""
    async with open_for_reading(operator) as documents:
        return await documents.identity()


def is_under_way(item: WorkItem, now: int) -> bool:
    """Whether a job runs, or is due."""
    return not is_over(item) and (item.state is WorkState.RUNNING or item.due_at <= now)


# ---- pause, resume, forget -------------------------------------------------------------------------------------------


async def pause_source(operator: Operator, name: str, *, because: str = "", dry_run: bool = False) -> dict[str, Any]:
    """Pause a source: its jobs do not start until it is resumed. Its documents stay."""
    return await _set_paused(operator, name, True, because, dry_run=dry_run)


async def resume_source(operator: Operator, name: str, *, because: str = "", dry_run: bool = False) -> dict[str, Any]:
    """Resume a paused source."""
    return await _set_paused(operator, name, False, because, dry_run=dry_run)


async def _set_paused(operator: Operator, name: str, paused: bool, because: str, *, dry_run: bool) -> dict[str, Any]:
    from reefknot.ingest.sources import SourceRecords

    named_source(configured_sources(operator), name)
    reason = operator.reason(because.strip())
    by = {"paused_by": operator.actor, "paused_because": reason} if paused else {}

    def changed(record: SourceRecord) -> SourceRecord:
        health = structs.replace(record.health, paused=paused)
        return structs.replace(record, health=health, **({"paused_by": "", "paused_because": ""} | by))

    records = SourceRecords(operator.store)
    was_paused = (await records.read(name)).health.paused
    changes = was_paused != paused and not dry_run
    if changes:
        action = "source.pause" if paused else "source.resume"
        event = operator.event(action, name, **({"reason": reason} if reason else {}))
        await records.change(name, changed, events=[event])
    fields = {"name": name, "paused": paused, "changed": changes, "was_paused": was_paused}
    return {**fields, "actor": operator.actor, "dry_run": dry_run}


async def forget_source(operator: Operator, name: str, *, because: str, dry_run: bool = False) -> dict[str, Any]:
    """End the jobs, then delete the record, then the documents: cut off, the next call finds the rest again."""
    from reefknot.ingest.configured_sources import open_documents
    from reefknot.ingest.sources import PREFIX, statuses

    reason = operator.reason(because.strip())
    if not reason:
        raise ParameterUseError("because", "give the reason; it is audited")
    configured = {one.name for one in configured_sources(operator)}
    if name in configured:
        text = f"{name} is configured; remove it from the configuration first"
        raise OperationError(f"{text}, or read all of it again: reefknot source run {name} --full", "invalid")
    store, file = operator.store, documents_file(operator)
    kept = open_documents(file, create=False, for_reading=dry_run) if file.is_file() else nullcontext()
    async with kept as documents:
        counts = {} if documents is None else await documents.counts()
        records = {one.name.removeprefix(PREFIX): one for one in await store.values.list(PREFIX)}
        found = {one.name: one for one in await statuses(store, [], with_others=True)}
        known = counts.keys() | records.keys() | found.keys()
        if name not in known:
            left_of = ", ".join(sorted(known - configured)) or "none"
            text = f"nothing is left of a source {name!r}; accepted: a source that is not configured any more"
            raise ParameterUseError("name", f"{text} ({left_of})")
        jobs = sum((found[name].open_jobs, found[name].quarantined)) if name in found else 0
        number = counts[name].documents if name in counts else 0
        if not dry_run:
            await _end_jobs(store, name, who=operator.actor, reason=reason)
            event = operator.event("source.forget", name, reason=reason, documents=number, jobs=jobs)
            record = records.get(name)
            if record is None:
                await store.audit.append([event])
            elif not await store.values.delete(record.name, version=record.version, events=[event]):
                raise OperationError(f"{name} was changed meanwhile: a system still runs it; try again", "temporary")
            if documents is not None:
                await documents.forget(name, documents=True)
    fields = {"name": name, "documents": number, "jobs": jobs, "forgotten": not dry_run}
    return {**fields, "actor": operator.actor, "dry_run": dry_run}


async def _end_jobs(store: Store, name: str, *, who: str, reason: str) -> None:
    """Cancel the open jobs of a source, and discard those in quarantine."""
    from reefknot.ingest.jobs import JobQueue, class_of

    jobs = JobQueue(store)
    for state in (WorkState.PENDING, WorkState.RUNNING):
        which = WorkFilter(state=state, classes=(class_of(name),))
        while page := (await store.work.search(which, limit=ENDED_AT_ONCE)).items:
            ended = [await jobs.cancel(one.assignment_id, reason=reason, who=who) for one in page]
            if not any(ended):
                break
    while page := await store.quarantine.find(WorkFilter(source=name), limit=ENDED_AT_ONCE):
        which = WorkFilter(ids=tuple(one.id for one in page))
        if not await store.quarantine.discard(which, who=who, reason=reason):
            break
