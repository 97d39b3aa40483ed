"""
Audited actions of an operator on many jobs: selected, counted, changed in chunks, and reported.

A `Selection` says which jobs, `BulkAction` does the rest, the same for every verb.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from json import dumps, loads
from typing import IO, TYPE_CHECKING, Any, Protocol

from reefknot.cli.app import Exit
from reefknot.cli.output import progress, put, put_json, say
from reefknot.cli.store import address_of, with_store
from reefknot.core.work import WorkItem, assignment_and_tenant
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.cli.options import OperatorFlags
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store

CHUNK = 500
MOST_SHOWN = 20


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


async def counted(chunks: AsyncIterator[list[WorkItem]]) -> dict[str, int]:
    """The number of jobs by kind, the most frequent first."""
    number: Counter[str] = Counter()
    async for chunk in chunks:
        number.update(item.kind for item in chunk)
    return dict(number.most_common())


Act = Callable[["Store", "tuple[str, ...]", "list[AuditEntry]"], Awaitable[list[str]]]
"""Changes the jobs of these records, with these events. Returns the records that it has changed."""


class ChangedJobs:
    """The records that an action has changed: the first few, their number, and all of them as lines of JSON on disk."""

    def __init__(self, wanted: tuple[str, ...], lines: IO[str]) -> None:
        self.first: list[str] = []
        self.count = 0
        self.missing = set(wanted)
        self._lines = lines

    def add(self, ids: Sequence[str]) -> None:
        self.first += ids[: MOST_SHOWN - len(self.first)]
        self.count += len(ids)
        self.missing.difference_update(ids)
        self._lines.writelines(f"{dumps(one)}\n" for one in ids)

    def as_json(self, part: int) -> Iterator[str]:
        """The assignment ids (part 0) or the tenants (part 1) as a list of JSON, in pieces."""
        self._lines.seek(0)
        before = "["
        for line in self._lines:
            yield f"{before}\n    {dumps(assignment_and_tenant(loads(line))[part])}"
            before = ","
        yield "[]" if before == "[" else "\n  ]"


class BulkAction:
    """An audited action on the selected jobs, in chunks. Their number is printed before the first is changed."""

    def __init__(
        self, name: str, participle: str, options: OperatorFlags, *, because: str = "", requeues: str = ""
    ) -> None:
        """`name` is the action in the audit log; `requeues` the reason of a requeue, for an action that is one."""
        self.address = address_of(options)
        self._name = name
        self._participle = participle
        self._options = options
        self._because = because
        self._requeues = requeues

    def run(self, selection: Selection, act: Act) -> int:
        from tempfile import TemporaryFile

        dry_run, done = self._options.dry_run, self._participle
        with TemporaryFile("w+", encoding="utf-8") as lines:
            changed = ChangedJobs(selection.ids, lines)
            with_store(self.address, lambda store: self._apply(store, act, selection, changed))
            missing = [assignment_and_tenant(one)[0] for one in sorted(changed.missing)]
            if self._options.json:
                fields = {"missing": missing, "count": changed.count, "actor": self.address.actor, "dry_run": dry_run}
                put_json(fields, first={done: changed.as_json(0), "tenant_ids": changed.as_json(1)})
        if not self._options.json:
            for name, tenant in map(assignment_and_tenant, changed.first):
                put(f"{name}{f' of {tenant}' if tenant else ''} {'would be ' if dry_run else ''}{done}")
            if changed.count > MOST_SHOWN:
                put(f"… and {changed.count - MOST_SHOWN} more")
        if self._requeues and changed.count and not dry_run:
            say("a running system picks them up within seconds; to start one: reefknot up")
        return Exit.FAILED if missing else Exit.FINE

    async def _apply(self, store: Store, act: Act, selection: Selection, changed: ChangedJobs) -> None:
        """Change the jobs, or with --dry-run only collect their records."""
        dry_run = self._options.dry_run
        counts = await selection.count(store)
        total = sum(counts.values())
        if total:
            kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            say(f"{total} {'would be' if dry_run else 'to be'} {self._participle}: {kinds}")
        elif not selection.ids:
            say("no job matches")
        is_shown = dry_run and not self._options.json and not selection.ids
        with progress(self._name.rpartition(".")[2], total) as advance:
            async for chunk in selection.chunks(store):
                ids = tuple(item.id for item in chunk)
                if is_shown:  # what is shown is enough
                    changed.add(ids[:MOST_SHOWN])
                    changed.count = total
                    return
                changed.add(ids if dry_run else await act(store, ids, self._events(chunk)))
                advance(len(chunk))
        await _report_missing(store, selection, sorted(changed.missing))

    def _events(self, items: list[WorkItem]) -> list[AuditEntry]:
        """Audit entries: one for the action, and one per job that goes back to the queue."""
        from reefknot import clock
        from reefknot.audit.journal import Journal, about_item
        from reefknot.core.audit.event import Requeued

        subject = items[0].assignment_id if len(items) == 1 else None
        tenants = [item.tenant_id for item in items]
        tenant = tenants[0] if len(set(tenants)) == 1 else None
        details: dict[str, Any] = {"count": len(items), "ids": [item.assignment_id for item in items]}
        if any(tenants):
            details["tenant_ids"] = tenants
        if self._because:
            details["reason"] = self._because
        events = [self.address.event(self._name, subject, tenant_id=tenant, **details)]
        if self._requeues:
            why = f": {self._because}" if self._because else ""
            reason, wall = f"{self._requeues} by {self.address.actor}{why}", clock.wall()
            returning = [
                Requeued(**about_item(item, wall), reason=reason, generation=item.generation + 1) for item in items
            ]
            events += Journal(None, redactor=self.address.redactor).entries(returning)
        return events


async def _report_missing(store: Store, selection: Selection, names: list[str]) -> None:
    """Print why named jobs are not selected."""
    for name in names[:MOST_SHOWN]:
        item, (job, tenant) = await store.work.get(name), assignment_and_tenant(name)
        hint = tenant_hint(tenant) if item is None else ""
        say(f"{named(job, tenant)} {await selection.missing(store, item)}{hint}")
    if len(names) > MOST_SHOWN:
        say(f"… and {len(names) - MOST_SHOWN} more are not")


def named(job: str, tenant: str | None) -> str:
    """A job's id in a message, with its tenant."""
    of = f" of tenant {printable(tenant[:200])!r}" if tenant else ""
    return f"{printable(job[:200])!r}{of}"


def tenant_hint(tenant: str | None) -> str:
    """The hint for a job that was not found without a tenant."""
    return "" if tenant else "; for a job of a tenant, give --tenant"
