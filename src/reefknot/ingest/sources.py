"""
Sources: what a source is to the orchestrator, its record in the store, and the request for a sync.

The record of a source (`source:<name>` among the store's values) holds its health and the id of its latest sync. All
processes share it: each change names the version it was made from, and is decided again when another process was
faster.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct, structs

from reefknot.audit.journal import envelope
from reefknot.audit.model.event import BreakerEvent
from reefknot.audit.port import AuditEntry
from reefknot.core.decide import Reason
from reefknot.errors import StoreUnavailableError
from reefknot.ingest.jobs import IngestionJob, JobQueue, class_of, source_of
from reefknot.ingest.port import Connector
from reefknot.queue.model.source_health import SourceCondition, SourceHealth
from reefknot.queue.model.work import WorkItem, WorkState, is_over, visible_state
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.stores.port import Store

PREFIX = "source:"
ENQUEUED_WITHIN_MS = 60_000
"""A sync that was named so recently and is not in the queue is about to be enqueued, or its process died."""
MOST_TRIES = 50
"""Changes of one record in a row that other processes may be faster with."""


class IngestionSource(Struct, frozen=True):
    """A source: its connector, and the limits of its jobs."""

    name: str
    connector: str
    open: Callable[[], Connector]
    """Makes a connector for one job, which closes it."""
    max_concurrency: int = 2
    page_size: int = 100
    page_timeout: float = 120.0
    """Seconds for one page."""
    on_change: bool = False
    """Whether to sync when the connector reports changes."""


class SourceRecord(Struct, frozen=True, omit_defaults=True):
    """The stored state of a source."""

    health: SourceHealth = SourceHealth()
    sync_job: str = ""
    """The id of the latest sync."""
    requested_at: int = 0
    """When that sync was named (ms UTC)."""
    documents: str = ""
    """The place of its documents and its cursor (`DocumentSink.identity`); empty before the first job."""
    connector: str = ""
    """The connector whose documents and cursor these are; empty before the first job."""
    synced_at: int = 0
    """The end of the last sync that succeeded (ms UTC)."""
    paused_by: str = ""
    paused_because: str = ""
    begin_anew: bool = False
    """Whether the next sync reads the source from the beginning, and not behind its cursor."""
    full_since: int = 0
    """Since when its sync is stopped because no further failed item can be remembered (ms UTC); 0 when it is not."""

    def elsewhere(self, here: str, *, is_local: bool) -> str:
        """
        The place of the documents, and so of the cursor, if it is another one than `here`; else empty.

        A file that was deleted is no place any more: the next sync starts from the beginning. That is known of a file
        on this host, so where the store is one (`is_local`).
        """
        name, _, file = self.documents.partition(" ")
        here_name, _, here_file = here.partition(" ")
        if name in ("", here_name) or (is_local and file and (file == here_file or not os.path.exists(file))):
            return ""
        return file or name

    def is_of_other(self, connector: str) -> bool:
        """Whether the documents and the cursor are those of another connector, which this one cannot go on from."""
        return self.connector not in ("", connector)


_records = msgspec.json.Decoder(SourceRecord)

Change = Callable[[SourceRecord], SourceRecord]


class SourceRecords:
    """The records of all sources: read from the store, changed by compare-and-set."""

    def __init__(self, store: Store) -> None:
        self._values = store.values
        self._known: dict[str, tuple[SourceRecord, int]] = {}

    @property
    def names(self) -> list[str]:
        """The sources that have a record, in alphabetical order."""
        return sorted(self._known)

    def known(self, name: str) -> SourceRecord:
        """The record as this process last saw it."""
        return self._known.get(name, (SourceRecord(), 0))[0]

    async def refresh(self) -> None:
        """Read all records, so that changes by other processes are seen."""
        values = await self._values.list(PREFIX)
        self._known = {one.name.removeprefix(PREFIX): (_read(one.body), one.version) for one in values}

    async def read(self, name: str) -> SourceRecord:
        value = await self._values.get(PREFIX + name)
        if value is None:
            self._known.pop(name, None)
            return SourceRecord()
        self._known[name] = _read(value.body), value.version
        return self._known[name][0]

    async def change(self, name: str, change: Change, *, events: Sequence[AuditEntry] = ()) -> SourceRecord:
        """Apply a change to the record; a process that was faster is taken into account. Returns the new record."""
        for _ in range(MOST_TRIES):
            record, version = self._known.get(name, (SourceRecord(), 0))
            changed = change(record)
            if changed == record and not events:
                return record
            body = msgspec.json.encode(changed).decode()
            stored = await self._values.put(PREFIX + name, body, version=version, events=events)
            if stored is not None:
                self._known[name] = changed, stored.version
                return changed
            await self.read(name)
        raise StoreUnavailableError(PREFIX + name, "other processes change it all the time", "try again")


async def source_conditions(store: Store, now: int) -> dict[str, SourceCondition]:
    """The condition of every source that has run, by name."""
    values = await store.values.list(PREFIX)
    return {one.name.removeprefix(PREFIX): _read(one.body).health.condition(now) for one in values}


def _read(body: str) -> SourceRecord:
    try:
        return _records.decode(body)
    except msgspec.DecodeError:  # of another version of the program
        return SourceRecord()


def with_health(change: Callable[[SourceHealth], SourceHealth], **more: Any) -> Change:
    """A change of the health, and of `more` fields."""
    return lambda record: structs.replace(record, health=change(record.health), **more)


def beginning_anew(record: SourceRecord, *, moves: bool = False) -> SourceRecord:
    """The record of a source whose next sync reads all of it; with `moves`, wherever it is synced next."""
    return structs.replace(record, begin_anew=True, documents="" if moves else record.documents)


def condition_event(name: str, record: SourceRecord, now: int) -> BreakerEvent:
    """The event of a source whose condition changed; `wait_seconds` is the time until its jobs may begin again."""
    opens_at = record.health.opens_at(now)
    wait = None if opens_at is None else (opens_at - now) / 1000
    return BreakerEvent(
        **envelope(wall=now / 1000), name=f"source:{name}", state=record.health.condition(now).value, wait_seconds=wait
    )


# ---- syncs -----------------------------------------------------------------------------------------------------------


def waits_for_a_person(item: WorkItem | None) -> bool:
    """Whether the latest sync of a source was not worth a retry: a schedule would only repeat the failure."""
    if item is None or item.state is not WorkState.QUARANTINED:
        return False
    return item.reason.startswith(Reason.NOT_RETRYABLE.value)


async def request_sync(
    jobs: JobQueue,
    records: SourceRecords,
    source: str,
    connector: str,
    *,
    job_id: str,
    trigger: str,
    who: str = "",
    events: Sequence[AuditEntry] = (),
) -> str | None:
    """
    Ask for a sync of a source. Returns the id of its job; None when it needs an operator.

    A sync that is already waiting or running is that job: a source is not fetched twice at once. An operator's request
    does not wait for the retry of an earlier sync, but replaces it. A sync in quarantine is requeued with a fresh
    budget; one that failed permanently is requeued only by an operator.
    """
    now = jobs.store.moment().wall
    for _ in range(MOST_TRIES):
        record = await records.read(source)
        latest = await jobs.get(record.sync_job) if record.sync_job else None
        if latest is None and record.sync_job and now < record.requested_at + ENQUEUED_WITHIN_MS:
            job_id = record.sync_job  # another process has named it, and is about to enqueue it
        elif latest is not None and latest.id != job_id:
            open_id = await _of_latest(jobs, latest, job_id, trigger=trigger, who=who)
            if open_id != job_id:
                return open_id
        name_job = partial(_with_sync, before=record.sync_job, job_id=job_id, now=now)
        if (await records.change(source, name_job)).sync_job == job_id:
            await jobs.enqueue(IngestionJob(job_id, connector, source, trigger=trigger), events=events)
            return job_id
    raise StoreUnavailableError(PREFIX + source, "other processes ask for syncs all the time", "try again")


def _with_sync(record: SourceRecord, *, before: str, job_id: str, now: int) -> SourceRecord:
    """The record with this sync, unless another process has named another one meanwhile."""
    if record.sync_job != before or record.sync_job == job_id:
        return record
    return structs.replace(record, sync_job=job_id, requested_at=now)


async def _of_latest(jobs: JobQueue, latest: WorkItem, job_id: str, *, trigger: str, who: str) -> str | None:
    """The job that serves a request, given the latest sync: that one, none, or the new one (`job_id`)."""
    by_person = trigger == "manual"
    if not is_over(latest):
        if latest.state is WorkState.RUNNING or not by_person or latest.due_at <= jobs.store.moment().wall:
            return latest.id
        await jobs.cancel(latest.id, reason=f"replaced by {job_id}", who=who)
    elif latest.state is WorkState.QUARANTINED:
        if waits_for_a_person(latest) and not by_person:
            return None
        await jobs.requeue([latest.id], who=who or trigger, why=f"a sync was asked for: {trigger}")
        return latest.id
    return job_id


async def remembered_jobs(store: Store, source: str) -> int:
    """The number of jobs of a source that are open or in quarantine: its syncs, and items that failed."""
    counts: Mapping[Any, int] = (await store.work.snapshot()).counts.get(class_of(source), {})
    aside = await store.quarantine.count(WorkFilter(source=source))
    return sum(counts.get(state, 0) for state in (WorkState.PENDING, WorkState.RUNNING)) + sum(aside.values())


class SourceStatus(Struct, frozen=True):
    """A source as people see it."""

    name: str
    record: SourceRecord
    sync: WorkItem | None
    """The latest sync."""
    open_jobs: int
    quarantined: int


async def statuses(store: Store, names: Collection[str], *, with_others: bool = False) -> list[SourceStatus]:
    """The status of these sources; with the others that still have jobs, open or in quarantine."""
    records, jobs = SourceRecords(store), JobQueue(store)
    await records.refresh()
    counts: Mapping[str, Mapping[Any, int]] = (await store.work.snapshot()).counts
    quarantined = (await store.quarantine.stats()).by_source
    found, others = [], set[str]()
    if with_others:
        others = {*quarantined, *map(source_of, await store.work.open_classes())} - {"", *names}
    for name in (*names, *sorted(others)):
        record = records.known(name)
        counted = counts.get(class_of(name), {})
        number = sum(counted.get(state, 0) for state in (WorkState.PENDING, WorkState.RUNNING))
        sync = await jobs.get(record.sync_job) if record.sync_job else None
        if sync is not None:
            sync = structs.replace(sync, state=visible_state(sync, store.moment()))
        found.append(SourceStatus(name, record, sync, number, quarantined.get(name, 0)))
    return found
