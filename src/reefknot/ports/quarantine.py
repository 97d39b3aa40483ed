"""
Where work goes that will not be tried again without a person.

It keeps the payload byte for byte, the reason, the failure and the history. A requeued item keeps its id and gets a
fresh budget; it may come back here as often as it fails.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.core.work import WorkItem
from reefknot.ports.audit_log import AuditEntry


class QuarantineFilter(Struct, frozen=True):
    """Which items are meant. Everything given must hold; an empty filter means all."""

    ids: tuple[str, ...] = ()
    kind: str | None = None
    source: str | None = None
    reason_contains: str | None = None
    before: int | None = None


ALL = QuarantineFilter()


class QuarantineStats(Struct, frozen=True):
    """What is in quarantine, by kind, source and reason."""

    total: int
    by_kind: dict[str, int]
    by_source: dict[str, int]
    by_reason: dict[str, int]
    oldest_at: int | None


class Quarantine(Protocol):
    """Shows, and does what a person decided."""

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        """Items in the order of their ids, without payloads."""

    async def show(self, work_id: str) -> WorkItem | None:
        """One item with its payload, None when it is not in quarantine."""

    async def requeue(
        self, which: QuarantineFilter, *, who: str, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """
        Back to the queue. Answers the ids; a dry run only answers.

        A submission that failed with it is open again in the same step, so that its caller gets the result to come.
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
        """Not worth another try: it ends, and stays on record until it is purged."""

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """Remove from quarantine and from the record, for good."""

    async def stats(self) -> QuarantineStats:
        """How many, and why."""
