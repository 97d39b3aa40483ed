"""Leases and quarantine of a memory store, over its work."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from msgspec import structs

from reefknot.core import work as core
from reefknot.core.time import Moment
from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.memory.store import MemoryAuditLog
from reefknot.engines.memory.work import LEASES_TOPIC, MemoryWorkQueue
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.work_queue import ALL, Held, QuarantineFilter, QuarantineStats

_Change = Callable[[WorkItem, Moment], WorkItem]


class MemoryLeases:
    """The leases of all work in a memory store."""

    def __init__(self, work: MemoryWorkQueue) -> None:
        self._work = work

    async def owners(self) -> list[str]:
        self._work.shared.now()
        return sorted({item.owner for item in self._running()})

    async def end(self, owners: Collection[str]) -> int:
        now = self._work.shared.now()
        held = [item for item in self._running() if item.owner in owners]
        for item in held:
            self._work.put(structs.replace(item, lease_until=0), now)
        if held:
            self._work.wake(LEASES_TOPIC)
        return len(held)

    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        self._work.extend(held, lease)

    def give_back(self, held: Sequence[Held]) -> None:
        now = self._work.shared.now()
        for one in held:
            item = self._work.items.get(one.id)
            if item is not None and core.holds(item, owner=one.owner, fence=one.fence):
                self._work.put(core.settle(item, core.Interrupted(), now), now)

    def _running(self) -> list[WorkItem]:
        return [item for item in self._work.items.values() if item.state is WorkState.RUNNING]


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
        return self._change(which, partial(core.requeue, who=who), dry_run, events)

    async def discard(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        reason: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        return self._change(which, partial(core.discard, who=who, reason=reason), dry_run, events)

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return self._change(which, None, dry_run, events)

    async def count(self, which: QuarantineFilter = ALL) -> dict[str, int]:
        self._work.shared.now()
        return dict(Counter(item.kind for item in self._meant(which)).most_common())

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

    def _change(
        self, which: QuarantineFilter, change: _Change | None, dry_run: bool, events: Sequence[AuditEntry]
    ) -> list[str]:
        """Change the items that meet the filter, or delete them when there is no change to make. Returns their ids."""
        now = self._work.shared.now()
        items = self._meant(which)
        if items and not dry_run:
            for item in items:
                if change is None:
                    self._work.remove(item.id)
                else:
                    self._work.put(change(item, now), now)
            self._audit.add(events)
            self._work.wake()
        return [item.id for item in items]


def _matches(which: QuarantineFilter, item: WorkItem) -> bool:
    return (
        (not which.ids or item.id in which.ids)
        and which.kind in (None, item.kind)
        and which.source in (None, item.source)
        and (which.reason_contains is None or which.reason_contains in item.reason)
        and (which.before is None or item.updated_at < which.before)
    )
