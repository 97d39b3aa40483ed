"""
The quarantine: the work that is not tried again unless an operator requeues it. It is a state of the work queue.

It keeps the payload byte for byte, the reason, the failure and the history. A requeued item keeps its id and gets a
fresh budget; it may return to quarantine as often as it fails.
"""

from collections.abc import Sequence

from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.queue.model.failure_groups import FailureGroups
from reefknot.queue.model.transitions import Discard, Remove, Replace, Requeue, next_record
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import EVERYTHING, QuarantineStats, WorkFilter, WorkQueue


class QuarantineStore:
    """The quarantine of a store: lists items, and does what an operator decided. A dry run changes nothing."""

    def __init__(self, work: WorkQueue) -> None:
        self._work = work

    async def find(self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        """Items in the order of their ids, without payloads."""
        return await self._work.by_id(_aside(which), after=after, limit=limit)

    async def show(self, work_id: str) -> WorkItem | None:
        """An item with its payload; None when it is not in quarantine."""
        item = await self._work.get(work_id)
        return item if item is not None and item.state is WorkState.QUARANTINED else None

    async def requeue(
        self, which: WorkFilter, *, who: str, why: str = "", dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """Return items to the queue; returns their ids. Their callers get the new results."""
        return await self._work.change(_aside(which), Requeue(who, why), dry_run=dry_run, events=events)

    async def discard(
        self, which: WorkFilter, *, who: str, reason: str = "", dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """End items without another attempt. They stay stored until they are purged."""
        return await self._work.change(_aside(which), Discard(who, reason), dry_run=dry_run, events=events)

    async def purge(self, which: WorkFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()) -> list[str]:
        """Delete items, permanently."""
        return await self._work.change(_aside(which), Remove(), dry_run=dry_run, events=events)

    async def replace(
        self, work_id: str, payload: bytes, *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> str | None:
        """Replace an item by its next version, whose id it returns. None: it is not here, or that version is there."""
        which = _aside(WorkFilter(ids=(work_id,)))
        done = await self._work.change(which, Replace(payload, who, why), events=events)
        return next_record(work_id) if done else None

    async def count(self, which: WorkFilter = EVERYTHING) -> dict[str, int]:
        """The number of items by kind, the most frequent first."""
        return await self._work.count(_aside(which))

    async def stats(self) -> QuarantineStats:
        """The number of items, by kind, source and reason."""
        return await self._work.quarantine_stats()

    async def groups(self, which: WorkFilter = EVERYTHING) -> FailureGroups:
        """The items grouped by the fingerprints of their failures."""
        return await self._work.groups(_aside(which))


def _aside(which: WorkFilter) -> WorkFilter:
    return structs.replace(which, state=WorkState.QUARANTINED)
