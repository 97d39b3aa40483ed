"""
Ingestion jobs, and the queue they wait in: `IngestionJob` and `JobQueue`, a front of the store's work queue.

The jobs of a source have a resource class of their own, so a source that rests is not claimed from, and none of its
jobs has to be put off one by one. A job is a sync of its source, one item of it again, or what its payload asks for.
The payload is kept byte for byte; the budget of retries is in the job's row.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.audit.assignments import submitted_event
from reefknot.audit.journal import Journal, about_item
from reefknot.audit.model.event import Requeued
from reefknot.audit.port import AuditEntry
from reefknot.core import checks
from reefknot.errors import ParameterError
from reefknot.policy.model.defaults import JobType
from reefknot.queue.model.transitions import Requeue
from reefknot.queue.model.work import INGEST, WorkItem, assignment_and_tenant, is_ingestion, record_id
from reefknot.queue.port.work_queue import Enqueue, Enqueued, WorkFilter
from reefknot.stores.port import Store

MOST_AT_ONCE = 100
"""Jobs that are kept in one step: a store on NATS takes no more than 900 records in one."""
LONGEST_LOCATION = 200
"""Characters of an item's location that stand in the id of its job."""


def class_of(source: str) -> str:
    """The resource class of a source's jobs. It has no `@`, which stands before the name of a worker."""
    return f"{INGEST}{source.replace('%', '%25').replace('@', '%40')}"


def source_of(resource_class: str) -> str:
    """The source whose jobs have this class; empty for the classes of others."""
    name = resource_class.removeprefix(INGEST)
    return "" if name == resource_class else name.replace("%40", "@").replace("%25", "%")


class IngestionJob(Struct, frozen=True):
    """A job of a source."""

    job_id: str
    job_type: JobType | str
    source: str
    payload: Mapping[str, Any] = {}
    """What the connector is asked for instead of a sync; empty for a sync."""
    trigger: str = "manual"
    """schedule, change, manual or item."""
    item: str = ""
    """The location of the item that is fetched again; empty for the whole source."""
    priority: int = 0

    @property
    def is_sync(self) -> bool:
        return not self.item and not self.payload

    def as_item(self, *, due_at: int = 0) -> WorkItem:
        """The job as the store keeps it, due at `due_at` (ms UTC) or at once."""
        body = _JobBody(self.source, self.trigger, self.item, dict(self.payload))
        return WorkItem(
            id=record_id(self.job_id, None),
            kind=str(self.job_type),
            resource_class=class_of(self.source),
            source=self.source,
            priority=self.priority,
            due_at=due_at,
            payload=msgspec.json.encode(body),
        )

    @classmethod
    def of(cls, item: WorkItem) -> "IngestionJob":
        """The job that a stored item is. Raises `msgspec.DecodeError` for a payload that no job has."""
        body = _bodies.decode(item.payload)
        return cls(item.assignment_id, item.kind, item.source, body.payload, body.trigger, body.item, item.priority)


class _JobBody(Struct, frozen=True, omit_defaults=True):
    source: str
    trigger: str = "manual"
    item: str = ""
    payload: dict[str, Any] = {}


_bodies = msgspec.json.Decoder(_JobBody)


def item_job_id(source: str, location: str, version: str) -> str:
    """The id of the job that fetches one version of an item again."""
    shown = location if len(location) <= LONGEST_LOCATION else location[:LONGEST_LOCATION] + "…"
    digest = sha256(f"{location}\0{version}".encode("utf-8", "replace")).hexdigest()
    return f"{source}/{shown}@{digest[:12]}"


def location_in(job_id: str, source: str) -> str:
    """The location of the item in such an id; empty for other jobs, and where the id does not hold all of it."""
    beginning, at, _ = job_id.rpartition("@")
    location = beginning.removeprefix(f"{source}/")
    return "" if not at or location == beginning or location.endswith("…") else location


class JobQueue:
    """The ingestion jobs of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._journal = Journal(store.audit)

    async def enqueue(
        self, *jobs: IngestionJob, delay: "checks.Seconds" = 0.0, events: Sequence[AuditEntry] = ()
    ) -> list[bool]:
        """
        Keep these jobs, due after `delay` seconds. False: a job of this id is there already.

        The events are kept with the first jobs that are new. Many jobs are kept in several steps.
        """
        for job in jobs:
            checks.text("job_id", job.job_id, "a text that names the job")
            checks.text("source", job.source, "the name of a source")
        due_at = self.store.moment().wall + int(checks.seconds("delay", delay, or_zero=True) * 1000)
        items, accepted = [job.as_item(due_at=due_at) for job in jobs], list[bool]()
        for at in range(0, len(items), MOST_AT_ONCE):
            part = items[at : at + MOST_AT_ONCE]
            of_part = () if any(accepted) else events
            answers = await self.store.work.enqueue(part, Enqueue(accept_events=self._submitted), events=of_part)
            accepted += [answer is Enqueued.ACCEPTED for answer in answers]
        return accepted

    def _submitted(self, item: WorkItem) -> list[AuditEntry]:
        return self._journal.entries([submitted_event(item, self.store.moment().wall / 1000)])

    async def requeue(self, ids: Sequence[str], *, who: str, why: str) -> list[str]:
        """Return jobs to the queue that are in quarantine or have failed, with fresh budgets. Returns their ids."""
        wall, events = self.store.moment().wall / 1000, []
        for job_id in ids:
            item = await self.get(job_id)
            if item is not None:
                events.append(Requeued(**about_item(item, wall), reason=why, generation=item.generation + 1))
        which, entries = WorkFilter(ids=tuple(record_id(one, None) for one in ids)), self._journal.entries(events)
        back = await self.store.work.change(which, Requeue(who, why), events=entries)
        return [assignment_and_tenant(one)[0] for one in back]

    async def get(self, job_id: str) -> WorkItem | None:
        """The job with its state, counters and budget, if there is one."""
        item = await self.store.work.get(record_id(job_id, None))
        return item if item is not None and is_ingestion(item) else None

    async def reschedule(self, job_id: str, delay_seconds: "checks.Seconds") -> bool:
        """
        Make a job that waits due in `delay_seconds`, earlier or later than it was. Spends no attempt.

        False when it is running, has ended, or is not there.
        """
        delay_ms = int(checks.seconds("delay_seconds", delay_seconds, or_zero=True) * 1000)
        item = await self.get(job_id)
        due_at = self.store.moment().wall + delay_ms
        return item is not None and await self.store.work.transfer(item.id, item.resource_class, due_at=due_at)

    async def cancel(self, job_id: str, *, reason: str = "", who: str = "") -> bool:
        """Cancel a job that waits or runs. False when there is none."""
        item = await self.get(job_id)
        return item is not None and await self.store.work.cancel(item.id, reason=reason, who=who)

    async def list(self, source: str, *, limit: int = 100, after: str = "") -> list[WorkItem]:
        """The open jobs of a source, the newest first, without payloads."""
        if limit < 1:
            raise ParameterError("limit", limit, "a whole number from 1")
        return await self.store.work.find(classes=(class_of(source),), limit=limit, after=after)
