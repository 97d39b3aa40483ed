"""
Audited actions on many jobs: a `Selection` says which, `change_jobs` counts them, changes them in chunks and reports.

The number of jobs is known before the first is changed: a caller hears it (`BulkListener.on_count`), or asks with
`dry_run` first. An answer is bounded; a caller that wants every id hears them in chunks (`BulkListener.on_changed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from reefknot.errors import OperationError
from reefknot.queue.model.work import WorkItem, assignment_and_tenant, is_ingestion
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.audit.port import AuditEntry
    from reefknot.console.operations.operator import Operator
    from reefknot.stores.port import Store

CHUNK = 500
MOST_SHOWN = 20
"""The jobs that a message names one by one."""
MOST_NAMED = 10_000
"""The jobs that an answer names; its `count` is of all."""
TENANT_ADVICE = "for a job of a tenant, give"


class BulkQuery(Protocol):
    """A question for jobs, as a person asks it of an action."""

    def selection(self) -> Selection:
        """The jobs that are selected at this moment."""

    def filters(self) -> dict[str, str]:
        """The fields that select jobs which are not named, as they were typed: they are audited with the action."""


class Selection(Protocol):
    """The jobs that an operator has selected."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The records that were named one by one; none when a filter selects."""

    def chunks(self, store: Store) -> AsyncIterator[list[WorkItem]]:
        """The selected jobs, at most `CHUNK` at a time. Those that were handed out may be changed meanwhile."""

    async def count(self, store: Store) -> dict[str, int]:
        """The number of selected jobs by kind, the most frequent first."""

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        """Why a job that was named is not selected, and where to look."""

    def of(self, ids: tuple[str, ...]) -> Selection:
        """This selection, of other records."""


MOST_TENANTS = 20
"""The jobs of one id, each of another tenant, that are looked for."""


async def located(store: Store, record: str) -> str:
    """
    The record of a job that was named without a tenant: the one without, else that of the only tenant that has the id.

    Where several have it, it is refused, and they are listed. An id that none has stays as it is.
    """
    job, tenant = assignment_and_tenant(record)
    if tenant is not None or await store.work.get(record) is not None:
        return record
    found = (await store.work.search(WorkFilter(assignment_id=job), limit=MOST_TENANTS)).items
    if len(found) > 1:
        tenants = ", ".join(sorted(printable(item.tenant_id or "", most=60) for item in found))
        text = f"{named(job, None)} is the id of jobs of {len(found)} tenants: {tenants}"
        raise OperationError(text, "conflict", advice="say which one with", parameter="tenant")
    return found[0].id if found else record


async def counted(chunks: AsyncIterator[list[WorkItem]]) -> dict[str, int]:
    """The number of jobs by kind, the most frequent first."""
    number: Counter[str] = Counter()
    async for chunk in chunks:
        number.update(item.kind for item in chunk)
    return dict(number.most_common())


Act = Callable[["Operator", "tuple[str, ...]", str, "list[AuditEntry]"], Awaitable[list[str]]]
"""Changes the jobs of these records, for this reason, with these events. Returns the records that it has changed."""


class BulkVerb(Struct, frozen=True):
    """An action on jobs: its name in the audit log, and its participle, under which an answer names the jobs."""

    name: str
    participle: str
    act: Act
    requeues: str = ""
    """The reason of a requeue, for an action that is one."""


class BulkListener(Struct, frozen=True):
    """A caller that follows an action on many jobs."""

    on_count: Callable[[dict[str, int]], None] = lambda counts: None
    """Called once, before any change, with the number of selected jobs by kind."""
    advance: Callable[[int], None] = lambda number: None
    """Called after each chunk with its number of jobs."""
    on_changed: Callable[[Sequence[str]], None] = lambda records: None
    """Called with the records of each chunk that were changed; of a dry run, that would be."""
    is_brief: bool = False
    """Whether the first few ids are enough: a dry run then reads no more, where it need not look for unclaimed jobs."""


SILENT = BulkListener()


class UnclaimedJobs:
    """Jobs that an operator returns to the queue although their source is unknown, both to the configuration here and
    to every running system. They wait, however many systems run."""

    def __init__(self, sources: Collection[str]) -> None:
        """`sources` are the known ones."""
        self.count = 0
        self.sources: set[str] = set()
        self._known = sources
        self._first = ""

    @classmethod
    async def over(cls, operator: Operator) -> UnclaimedJobs:
        """None yet, by the configuration of the operator and the systems over the store."""
        from reefknot.queue.presence import living_systems

        running = {name for one in await living_systems(operator.store) for name in one.get("sources", ())}
        configured = () if operator.settings is None else operator.settings.configuration.sources
        return cls(running.union(configured))

    def add(self, items: Iterable[WorkItem]) -> None:
        for item in items:
            if is_ingestion(item) and item.source not in self._known:
                self.count += 1
                self.sources.add(item.source)
                self._first = self._first or item.assignment_id

    def hints(self, total: int, *, dry_run: bool) -> list[str]:
        """Sentences about `total` jobs that were returned to the queue: when they run, and which of them do not."""
        others, lines = total - self.count, []
        if others and not dry_run:
            which = f"the other {others}" if self.count else "it" if total == 1 else "them"
            lines.append(f"a running system picks {which} up within seconds; to start one: reefknot up")
        if self.count:
            lines.append(self._text(dry_run=dry_run))
        return lines

    def _text(self, *, dry_run: bool) -> str:
        """The sentence about them: why they wait, and what to do."""
        names = [printable(name, most=60) for name in sorted(self.sources)]
        listed = ", ".join(names[:MOST_SHOWN]) + (" …" if len(names) > MOST_SHOWN else "")
        wait = "would wait" if dry_run else "waits" if self.count == 1 else "wait"
        add = f"reefknot source add {names[0] if len(names) == 1 else 'NAME'} …"
        cancel = f"reefknot job cancel {quote(printable(self._first)) if self.count == 1 else 'ID'}"
        why = "not configured here, and in no running system"
        text = f"{self.count} job{'' if self.count == 1 else 's'} {wait} for {listed} ({why})"
        return f"{text}. Add the source: {add}; or cancel the job: {cancel}"


class _Changed:
    """The records that an action has changed: the first ones, their number, and the named ones that are missing."""

    def __init__(self, wanted: tuple[str, ...], listener: BulkListener) -> None:
        self.first: list[str] = []
        self.count = 0
        self.missing = set(wanted)
        self._listener = listener

    def add(self, records: Sequence[str]) -> None:
        self.first += records[: MOST_NAMED - len(self.first)]
        self.count += len(records)
        self.missing.difference_update(records)
        self._listener.on_changed(records)


async def change_jobs(
    operator: Operator,
    verb: BulkVerb,
    query: BulkQuery,
    *,
    because: str,
    dry_run: bool,
    listener: BulkListener,
) -> dict[str, Any]:
    """
    Change the selected jobs, in chunks, each audited in the step that changes it; a dry run only names them.

    The answer names the changed jobs under the participle of the verb, and those that were named and are not selected
    as `missing`, with the `reasons`. `by_type` is the number of jobs before the first was changed.
    """
    store, selection, why = operator.store, query.selection(), operator.reason(because)
    if selection.ids:
        selection = selection.of(tuple([await located(store, one) for one in selection.ids]))
    changed = _Changed(selection.ids, listener)
    unclaimed = await UnclaimedJobs.over(operator) if verb.requeues else UnclaimedJobs(())
    counts = await selection.count(store)
    listener.on_count(counts)
    is_brief = listener.is_brief and dry_run and not selection.ids and not verb.requeues
    async for chunk in selection.chunks(store):
        ids = tuple(item.id for item in chunk)
        if is_brief:
            changed.add(ids[:MOST_SHOWN])
            changed.count = sum(counts.values())
            break
        done: Sequence[str] = ids
        if not dry_run:
            done = await verb.act(operator, ids, why, _events(operator, verb, chunk, why, query.filters()))
        changed.add(done)
        unclaimed.add(item for item in chunk if item.id in set(done))
        listener.advance(len(chunk))
    missing = sorted(changed.missing)
    named_ones = [assignment_and_tenant(one) for one in changed.first]
    return {
        verb.participle: [name for name, _ in named_ones],
        "tenant_ids": [tenant for _, tenant in named_ones],
        "missing": [assignment_and_tenant(one)[0] for one in missing],
        "count": changed.count,
        "actor": operator.actor,
        "dry_run": dry_run,
        **({"unconfigured_sources": sorted(unclaimed.sources)} if verb.requeues else {}),
        "by_type": counts,
        "reasons": await _reasons(store, selection, missing),
        "hints": unclaimed.hints(changed.count, dry_run=dry_run) if verb.requeues else _left(verb, counts, changed),
    }


def _left(verb: BulkVerb, counts: Mapping[str, int], changed: _Changed) -> list[str]:
    """The sentence about jobs that were selected and are not changed; nothing where all are."""
    left = sum(counts.values()) - changed.count
    if left <= 0 or changed.missing:
        return []
    text = (
        f"{left} more were selected, and are not {verb.participle}: they ended meanwhile, or no router has answered yet"
    )
    return [f"{text}; run the same command again for the rest"]


def action_event(
    operator: Operator, verb: BulkVerb, items: Sequence[WorkItem], because: str, **more: Any
) -> AuditEntry:
    """The audit entry of an action on these jobs."""
    subject = items[0].assignment_id if len(items) == 1 else None
    tenants = [item.tenant_id for item in items]
    tenant = tenants[0] if len(set(tenants)) == 1 else None
    details: dict[str, Any] = {"count": len(items), "ids": [item.assignment_id for item in items], **more}
    if any(tenants):
        details["tenant_ids"] = tenants
    if because:
        details["reason"] = because
    return operator.event(verb.name, subject, tenant_id=tenant, **details)


def _events(
    operator: Operator, verb: BulkVerb, items: list[WorkItem], because: str, filters: Mapping[str, Any]
) -> list[AuditEntry]:
    """Audit entries: one for the action, and one per job that goes back to the queue."""
    from reefknot import clock
    from reefknot.audit.journal import Journal, about_item
    from reefknot.audit.model.event import Requeued

    events = [action_event(operator, verb, items, because, **({"filter": dict(filters)} if filters else {}))]
    if verb.requeues:
        why = f": {because}" if because else ""
        reason, wall = f"{verb.requeues} by {operator.actor}{why}", clock.wall()
        returning = [
            Requeued(**about_item(item, wall), reason=reason, generation=item.generation + 1) for item in items
        ]
        events += Journal(None, redactor=operator.redactor).entries(returning)
    return events


async def _reasons(store: Store, selection: Selection, records: list[str]) -> list[str]:
    """Why named jobs are not selected, the first ones one by one."""
    lines = []
    for record in records[:MOST_SHOWN]:
        item, (job, tenant) = await store.work.get(record), assignment_and_tenant(record)
        hint = f"; {TENANT_ADVICE} --tenant" if item is None and not tenant else ""
        lines.append(f"{named(job, tenant)} {await selection.missing(store, item)}{hint}")
    if len(records) > MOST_SHOWN:
        lines.append(f"… and {len(records) - MOST_SHOWN} more are not")
    return lines


def named(job: str, tenant: str | None) -> str:
    """A job's id in a message, with its tenant."""
    of = f" of tenant {printable(tenant[:200])!r}" if tenant else ""
    return f"{printable(job[:200])!r}{of}"


def absent_job(text: str, tenant: str | None) -> OperationError:
    """The refusal of a job that is not there. Without a tenant, one of a tenant may have been meant."""
    return OperationError(text, "not_found", advice="" if tenant else TENANT_ADVICE, parameter="tenant")
