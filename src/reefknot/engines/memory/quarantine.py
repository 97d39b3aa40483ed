"""The quarantined items of a memory store's work."""

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from reefknot.core import work as core
from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.memory.audit import MemoryAuditLog
from reefknot.engines.memory.work import MemoryWorkQueue
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.quarantine import ALL, QuarantineFilter, QuarantineStats


class MemoryQuarantine:
    """The quarantine of a memory store."""

    def __init__(self, work: MemoryWorkQueue, audit: MemoryAuditLog) -> None:
        self._work = work
        self._audit = audit

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        self._work.shared.now()
        found = [item for item in self._meant(which) if item.id > after]
        return [structs.replace(item, payload=b"") for item in found[:limit]]

    async def show(self, work_id: str) -> WorkItem | None:
        item = await self._work.get(work_id)
        return item if item is not None and item.state is WorkState.QUARANTINED else None

    async def requeue(
        self, which: QuarantineFilter, *, who: str, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        now = self._work.shared.now()
        items = self._meant(which)
        if not dry_run:
            came_from = (self._work.items.get(core.submission_id(item.id)) for item in items)
            failed = [one for one in came_from if one is not None and one.state is WorkState.FAILED]
            for item in [*items, *failed]:
                self._work.put(core.requeue(item, now, who=who), now)
            self._tell(items, events)
        return [item.id for item in items]

    async def discard(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        reason: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        now = self._work.shared.now()
        items = self._meant(which)
        if not dry_run:
            for item in items:
                self._work.put(core.discard(item, now, who=who, reason=reason), now)
            self._tell(items, events)
        return [item.id for item in items]

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        self._work.shared.now()
        items = self._meant(which)
        if not dry_run:
            for item in items:
                self._work.remove(item.id)
            self._tell(items, events)
        return [item.id for item in items]

    async def stats(self) -> QuarantineStats:
        self._work.shared.now()
        items = self._meant(ALL)
        return QuarantineStats(
            total=len(items),
            by_kind=dict(Counter(item.kind for item in items)),
            by_source=dict(Counter(item.source for item in items)),
            by_reason=dict(Counter(item.reason for item in items)),
            oldest_at=min((item.updated_at for item in items), default=None),
        )

    def _meant(self, which: QuarantineFilter) -> list[WorkItem]:
        held = (item for item in self._work.items.values() if item.state is WorkState.QUARANTINED)
        return sorted((item for item in held if _matches(which, item)), key=lambda item: item.id)

    def _tell(self, items: list[WorkItem], events: Sequence[AuditEntry]) -> None:
        if items:
            self._audit.add(events)
            self._work.shared.changed()


def _matches(which: QuarantineFilter, item: WorkItem) -> bool:
    return (
        (not which.ids or item.id in which.ids)
        and which.kind in (None, item.kind)
        and which.source in (None, item.source)
        and (which.reason_contains is None or which.reason_contains in item.reason)
        and (which.before is None or item.updated_at < which.before)
    )
