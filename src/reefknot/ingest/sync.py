"""
The execution of one ingestion job: fetch page after page, and keep each with its cursor.

    fetch a page → remember the items that failed → keep documents and cursor → …

The cursor never passes an item that is neither kept nor remembered. An item that cannot be read is remembered by a job
of its own, which is enqueued before the cursor moves behind it. The number of such jobs is bounded for each source: at
the bound a page with further failures is not kept, and the sync stops there (`MemoryFullError`) until there is room.

A connector that returns page after page and brings nothing new is stopped as well, see `ProgressWatch`.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import Struct, structs

from reefknot.core.failure import Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.errors import SourceError
from reefknot.ingest.jobs import IngestionJob, JobQueue, item_job_id, location_in
from reefknot.ingest.pages import checked_document, checked_page
from reefknot.ingest.port import Connector, DocumentSink, FetchRequest, ItemFailure, Page, Position
from reefknot.ingest.sources import IngestionSource, SourceRecord, SourceRecords, remembered_jobs
from reefknot.ingest.telemetry import TelemetryRecorder
from reefknot.queue.execution.settling import OwnerContext
from reefknot.queue.execution.tracing import spanned
from reefknot.queue.model.source_health import HealthRules
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.timeouts import STORE_S

MOST_FAILED_ITEMS = 1000
"""Jobs of items that could not be read, open or in quarantine, that one source may have."""
STALLED_S = 600.0
"""Seconds without progress after which a sync that still gets pages is ended."""
MOST_IDLE_PAGES = 100
"""Pages in a row without progress after which a sync is ended."""
MOST_UNCHANGED_PAGES = 100_000
"""Pages in a row in which a connector looked at items and found none of them changed."""
MOST_LOCATIONS = 10_000
"""Locations of one sync that are remembered to its end."""
MOST_SEEN = 100_000
"""Documents, deletions and cursors of one sync that are recognised when they come again."""
REQUEUED_AT_ONCE = 500
"""Jobs in quarantine that are looked at in one step."""
CLOSE_S = 30.0
"""Time to close a connector."""

T = TypeVar("T")
PolicyOf = Callable[[IngestionSource, Failure], RetryPolicy]
"""The policy for a failure of a source."""


class SyncLimits(Struct, frozen=True):
    """The limits of syncs: items that are remembered for each source, and time without progress."""

    max_failed_items: int = MOST_FAILED_ITEMS
    stalled_after: float = STALLED_S


class IngestionContext(OwnerContext, frozen=True, kw_only=True):
    """The parts that all jobs of one orchestrator share."""

    jobs: JobQueue
    documents: DocumentSink
    policy: PolicyOf
    rules: HealthRules
    records: SourceRecords
    telemetry: TelemetryRecorder
    limits: SyncLimits = SyncLimits()


class SyncSummary(Struct, frozen=True):
    """The result of a job: what was looked at, kept, deleted, and could not be read."""

    pages: int = 0
    seen: int = 0
    kept: int = 0
    deleted: int = 0
    failed: int = 0
    problems: int = 0

    def with_page(self, page: Page) -> "SyncSummary":
        kept = len(page.documents)
        return SyncSummary(
            self.pages + 1,
            self.seen + max(page.seen, kept + len(page.failures)),
            self.kept + kept,
            self.deleted + len(page.deleted),
            self.failed + len(page.failures),
            self.problems + sum(1 for one in page.documents if one.problem),
        )


class StoppingError(Exception):
    """The orchestrator ends: the job goes back to the queue behind the last page that was kept."""


class MemoryFullError(Exception):
    """No further item can be remembered: the sync stops before a page with items that could not be read."""


# ---- progress --------------------------------------------------------------------------------------------------------


class ProgressWatch:
    """
    Whether the pages of a sync still bring something new.

    Progress is a document, in this version, or a deletion that did not come before in this sync; an item that failed
    for the first time; or, in a page without any of those, items that were looked at and a cursor that is new.
    """

    def __init__(self, now: float, *, stalled_after: float) -> None:
        self._stalled_after = stalled_after
        self._progress_at = now
        self._idle = 0
        self._unchanged = 0
        self._met: set[int] = set()

    def page(self, page: Page, now: float, *, new_items: int) -> str:
        """Take a page into account. Returns why the sync is to end, or an empty text."""
        found = [hash(("document", one.id, one.version, one.fingerprint)) for one in page.documents]
        found += [hash(("deleted", one)) for one in page.deleted]
        is_new_place = self._is_new([hash(("cursor", page.cursor))])
        if new_items or self._is_new(found):
            self._unchanged = 0
        elif not found and (page.seen or page.checked) and is_new_place and self._unchanged < MOST_UNCHANGED_PAGES:
            self._unchanged += 1
        else:
            return self._idle_page(page, now)
        self._idle, self._progress_at = 0, now
        return ""

    def _is_new(self, found: Sequence[int]) -> bool:
        is_new = any(one not in self._met for one in found)
        if len(self._met) + len(found) > MOST_SEEN:
            self._met.clear()
        self._met.update(found)
        return is_new

    def _idle_page(self, page: Page, now: float) -> str:
        self._idle += 1
        seconds = now - self._progress_at
        if self._idle < MOST_IDLE_PAGES and seconds < self._stalled_after:
            return ""
        if page.documents or page.deleted:
            what = "with documents or deletions that it returned before in the same sync"
        else:
            what = "without anything that is new"
        return f"{self._idle} pages in a row, within {seconds:.0f} s, {what}"


# ---- the execution ---------------------------------------------------------------------------------------------------


class JobExecution:
    """An execution of one job of a source."""

    def __init__(self, context: IngestionContext, job: IngestionJob, source: IngestionSource) -> None:
        self._context = context
        self._jobs = context.jobs
        self._documents = context.documents
        self._records = context.records
        self._timeouts = context.timeouts
        self._job = job
        self._source = source
        self._room: int | None = None
        """The number of further items that can be remembered; None before it was asked for."""
        self._is_from_beginning = False
        self.is_stopping: Callable[[], bool] = lambda: False
        self.page_kept: Callable[[SyncSummary], None] = lambda summary: None
        self.answered: Callable[[], Awaitable[None]] | None = None
        """Called after a page with documents when jobs of the source have failed before: it answers."""
        self.pages = 0
        """The pages that were kept."""
        self.progress = 0
        """The number of pages of the source that are kept, in all its syncs; 0 for a job that is no sync."""

    async def run(self) -> SyncSummary:
        connector = self._source.open()
        try:
            return await (self._fetch_item(connector) if self._job.item else self._sync(connector))
        finally:
            try:
                with self._timeouts.timeout(CLOSE_S):
                    await connector.close()
            except Exception as error:
                logger().warning("%s: its connector could not be closed (%s)", self._source.name, error_text(error))

    async def _sync(self, connector: Connector) -> SyncSummary:
        """Fetch and keep page after page. A job with a payload of its own does not move the cursor of its source."""
        job, source, clock = self._job, self._source, self._context.clock
        position = await self._position() if job.is_sync else Position()
        self.progress = position.sequence
        is_anew = job.is_sync and await self._begins_anew()
        cursor = "" if is_anew else position.cursor
        self._is_from_beginning = not cursor
        known, summary = self._documents.known(source.name), SyncSummary()
        watch = ProgressWatch(clock.now(), stalled_after=self._context.limits.stalled_after)
        kept: set[str] = set()
        failed: set[str] = set()
        while not self.is_stopping():
            page = await self._fetch(connector, FetchRequest(cursor, known, source.page_size, job.payload))
            new_items = await self._remember(page.failures) if page.failures else 0  # before the cursor passes them
            position = await self._keep(page, position)
            cursor = position.cursor
            if is_anew:
                is_anew = await self._has_begun()
            summary = summary.with_page(page)
            if len(kept) < MOST_LOCATIONS:
                kept.update(one.location for one in page.documents)
            if len(failed) < MOST_LOCATIONS:
                failed.update(one.location for one in page.failures)
            self.page_kept(summary)
            if page.documents and self.answered is not None and self._records.known(source.name).health.failures:
                await self.answered()
            if page.is_last:
                if job.is_sync:
                    await self._requeue_recovered(kept, failed)
                return summary
            if stalled := watch.page(page, clock.now(), new_items=new_items):
                text = f"the connector {source.connector} makes no progress: {stalled}; correct it, or its source"
                raise SourceError(text, FailureType.PERMANENT)
        raise StoppingError

    async def _position(self) -> Position:
        with self._timeouts.timeout(STORE_S):
            return await self._documents.position(self._source.name)

    async def _begins_anew(self) -> bool:
        """Whether a person has asked for all of the source; see `SourceRecord.begin_anew`."""
        with self._timeouts.timeout(STORE_S):
            return (await self._records.read(self._source.name)).begin_anew

    async def _has_begun(self) -> bool:
        """Note that the first page of a sync from the beginning is kept: what follows goes on behind it."""
        return (await self._change_record(begin_anew=False)).begin_anew

    async def _change_record(self, **fields: bool | int) -> SourceRecord:
        with self._timeouts.timeout(STORE_S):
            return await self._records.change(self._source.name, lambda one: structs.replace(one, **fields))

    async def _fetch(self, connector: Connector, request: FetchRequest) -> Page:
        with spanned("reefknot.page", {"reefknot.source": self._source.name}):
            page = await self._within("page", connector.fetch(request))
            return checked_page(page, self._source.connector, request.limit)

    async def _within(self, noun: str, answer: Awaitable[T]) -> T:
        """The answer of a connector, within the time limit of its source."""
        seconds = self._source.page_timeout
        limit = self._timeouts.timeout(seconds)
        try:
            with limit:
                return await answer
        except TimeoutError:
            if not limit.expired:
                raise
            message = f"the {noun} did not arrive within {seconds:g} s; timeout_seconds of the source is the limit"
            raise SourceError(message, FailureType.TRANSIENT) from None

    async def _keep(self, page: Page, after: Position) -> Position:
        with self._timeouts.timeout(STORE_S):
            if self._job.is_sync:
                position = await self._documents.keep(self._source.name, page, after=after)
                self.progress = position.sequence
            else:
                await self._documents.put(self._source.name, page.documents, deleted=page.deleted)
                position = Position(page.cursor, after.sequence + 1)
        self.pages += 1
        return position

    async def _fetch_item(self, connector: Connector) -> SyncSummary:
        name, item = self._source.name, self._job.item
        known = self._documents.known(name)
        found = await self._within("item", connector.fetch_item(item, known))
        document = None if found is None else checked_document(found, self._source.connector)
        with self._timeouts.timeout(STORE_S):
            if document is not None:
                await self._documents.put(name, [document])
                return SyncSummary(seen=1, kept=1, problems=int(bool(document.problem)))
            gone = [one.id for one in (await known.at([item])).values()]
            await self._documents.put(name, [], deleted=gone)
            return SyncSummary(seen=1, deleted=len(gone))

    # ---- items that could not be read --------------------------------------------------------------------------------

    async def _remember(self, failures: Sequence[ItemFailure]) -> int:
        """
        Give every item that could not be read a job of its own: the sync goes on without it. Returns how many are new.

        Raises `MemoryFullError` at the bound, unless all of them have jobs already. The page that reaches the bound may
        pass it, so that no page is too large to be kept.
        """
        jobs = await self._missing_jobs(failures)
        if not jobs:
            return 0
        with self._timeouts.timeout(STORE_S):
            if self._room is None or self._room <= 0:
                remembered = await remembered_jobs(self._jobs.store, self._source.name) - 1  # without this one
                self._room = self._context.limits.max_failed_items - remembered
            if self._room <= 0:
                raise MemoryFullError
            await self._jobs.enqueue(*jobs)
        self._room -= len(jobs)
        return len(jobs)

    async def _missing_jobs(self, failures: Sequence[ItemFailure]) -> list[IngestionJob]:
        """The jobs for those items that no job remembers."""
        found: dict[str, IngestionJob] = {}
        for one in failures:
            version, known = one.version, None
            while True:
                job_id = item_job_id(self._source.name, one.location, version)
                with self._timeouts.timeout(STORE_S):
                    known = await self._jobs.get(job_id)
                if known is None or not self._has_let_go(known):
                    break
                version += f"\0{known.updated_at}"  # the next job of the same item
            if known is None:
                kind, name = self._source.connector, self._source.name
                found[job_id] = IngestionJob(job_id, kind, name, trigger="item", item=one.location)
        return list(found.values())

    def _has_let_go(self, job: WorkItem) -> bool:
        """Whether a job does not remember its item any more. What a person has ended stays so until a full sync."""
        by_person = job.state in (WorkState.CANCELLED, WorkState.DISCARDED)
        return job.state in (WorkState.SUCCEEDED, WorkState.FAILED) or (by_person and self._is_from_beginning)

    async def _requeue_recovered(self, kept: set[str], failed: set[str]) -> None:
        """
        Take items out of quarantine that this sync could read: their jobs find nothing wrong any more.

        A folder is no document; one that did not fail this time can be read.
        """
        name, after = self._source.name, ""
        which = WorkFilter(source=name)
        while True:
            with self._timeouts.timeout(STORE_S):
                found = await self._jobs.store.quarantine.find(which, after=after, limit=REQUEUED_AT_ONCE)
                if not found:
                    return
                after = found[-1].id
                places = {one.assignment_id: location_in(one.assignment_id, name) for one in found}
                ids = [one for one, at in places.items() if at in kept or (at.endswith("/") and at not in failed)]
                if ids:
                    await self._jobs.requeue(ids, who="ingestion", why="the item can be read now")
