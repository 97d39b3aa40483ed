"""
The port of the quarantine: work that is not tried again unless an operator requeues it.

It keeps the payload byte for byte, the reason, the failure and the history. A requeued item keeps its id and gets a
fresh budget; it may return to quarantine as often as it fails.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.core.work import WorkItem
from reefknot.ports.audit_log import AuditEntry


class QuarantineFilter(Struct, frozen=True):
    """A filter for items. All given fields must match; an empty filter matches all."""

    ids: tuple[str, ...] = ()
    kind: str | None = None
    source: str | None = None
    reason_contains: str | None = None
    before: int | None = None


ALL = QuarantineFilter()


class QuarantineStats(Struct, frozen=True):
    """The number of items in quarantine, by kind, source and reason."""

    total: int
    by_kind: dict[str, int]
    by_source: dict[str, int]
    by_reason: dict[str, int]
    oldest_at: int | None


class QuarantineStore(Protocol):
    """The quarantine of a store: lists items, and does what an operator decided."""

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        """Items in the order of their ids, without payloads."""

    async def show(self, work_id: str) -> WorkItem | None:
        """An item with its payload; None when it is not in quarantine."""

    async def requeue(
        self, which: QuarantineFilter, *, who: str, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """
        Return items to the queue; returns their ids. A dry run changes nothing.

        A submission that failed with an item is open again in the same step, so that its caller gets the new result.
        """

    async def discard(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        reason: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        """End items without another attempt. They stay stored until they are purged."""

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """Delete items, permanently."""

    async def count(self, which: QuarantineFilter = ALL) -> dict[str, int]:
        """The number of items by kind, the most frequent first."""

    async def stats(self) -> QuarantineStats:
        """The number of items, by kind, source and reason."""
