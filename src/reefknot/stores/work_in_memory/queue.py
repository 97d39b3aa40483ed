"""
The async fronts of a work table: work queue and leases, as the ports ask for them.

An engine that holds its work in a table says how a change of it is made whole (`write`), and how it is looked at
(`look`); everything else is the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.queue.model import work as core
from reefknot.queue.model.failure_groups import FailureGroups
from reefknot.queue.model.notes import Notes
from reefknot.queue.model.transitions import Transition, records_of
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import (
    EVERYTHING,
    FREELY,
    NO_NOTES,
    Enqueue,
    Held,
    ItemEvents,
    Outcome,
    QuarantineStats,
    Settlement,
    WorkClaim,
    WorkFilter,
    WorkPage,
    WorkSnapshot,
)
from reefknot.runtime.changes import Waiters
from reefknot.stores.wakeups import END_TOPIC, LOOK_S, WakingQueue
from reefknot.stores.work_in_memory.table import WorkTable

R = TypeVar("R")
RECORDS = 500
"""Items on a page of all that are stored."""


class TableWorkQueue(WakingQueue):
    """The work of a store that holds it in a table."""

    def __init__(self, table: WorkTable, waiters: Waiters) -> None:
        super().__init__(waiters)
        self.table = table

    @abstractmethod
    async def write(
        self, run: Callable[[Moment], R], *, ids: Sequence[str] = (), wake: bool = True, is_soft: bool = False
    ) -> R:
        """
        Change the table and write its events, both or neither; then wake the callers that wait for the change.

        `ids` are the items that the change may ask for. With `wake` False, callers that wait for any change sleep on
        when no topic was touched: a claim or a renewal is no news to them. A soft change may be reported as made before
        it is stored.
        """

    @abstractmethod
    async def look(self, read: Callable[[Moment], R]) -> R:
        """Look at the table as it is stored."""

    async def enqueue(
        self,
        items: Sequence[WorkItem],
        terms: Enqueue = FREELY,
        *,
        events: Sequence[AuditEntry] = (),
    ) -> list[Outcome]:
        return await self.write(
            lambda now: self.table.enqueue(items, terms, now=now, events=events), ids=[item.id for item in items]
        )

    async def assign(
        self,
        items: Sequence[WorkItem],
        *,
        start: Collection[str] = (),
        owner: str = "",
        lease: float = 60.0,
        events: Sequence[AuditEntry] = (),
    ) -> list[WorkItem | None]:
        return await self.write(
            lambda now: self.table.assign(items, now=now, start=start, owner=owner, lease=lease, events=events),
            ids=[item.id for item in items],
            is_soft=True,
        )

    async def claim(self, n: int, claim: WorkClaim) -> list[WorkItem]:
        return await self.write(lambda now: self.table.claim(n, claim, now=now), wake=False, is_soft=True)

    async def renew(self, held: Sequence[Held], *, lease: float = 60.0) -> list[bool]:
        return await self.write(lambda now: self.table.renew(held, now=now, lease=lease), wake=False, is_soft=True)

    async def note(self, held: Held, notes: Notes) -> bool:
        return await self.write(lambda now: self.table.note(held, notes, now=now), wake=False)

    async def notes(self, work_id: str) -> dict[str, bytes]:
        return await self.look(lambda _: self.table.parts.get(work_id, {}))

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        new = [item.id for one in settlements if one.follow_ups is not None for item in one.follow_ups.items]
        return await self.write(lambda now: self.table.settle(settlements, now=now), ids=new)

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        return await self.write(
            lambda now: self.table.cancel(work_id, now=now, reason=reason, who=who, events=events), ids=[work_id]
        )

    async def change(
        self, which: WorkFilter, transition: Transition, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return await self.write(
            lambda now: self.table.change(which, transition, now=now, dry_run=dry_run, events=events),
            ids=records_of(which.ids or (), transition),
        )

    async def transfer(self, work_id: str, resource_class: str, *, due_at: int | None = None) -> bool:
        return await self.write(
            lambda now: self.table.transfer(work_id, resource_class, now=now, due_at=due_at), ids=[work_id]
        )

    async def open_classes(self) -> list[str]:
        return await self.look(lambda _: self.table.open_classes())

    async def recall(self, classes: Sequence[str], *, crash_events: ItemEvents | None = None) -> int:
        return await self.write(lambda now: self.table.recall(classes, now=now, crash_events=crash_events))

    async def get(self, work_id: str) -> WorkItem | None:
        return await self.look(lambda _: self.table.get(work_id))

    async def named(self, ids: Sequence[str]) -> list[WorkItem]:
        return await self.look(lambda _: [item for one in ids if (item := self.table.get(one)) is not None])

    async def search(
        self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100, oldest_first: bool = False
    ) -> WorkPage:
        return await self.look(
            lambda now: self.table.search(which, now=now, after=after, limit=limit, oldest_first=oldest_first)
        )

    async def by_id(self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        return await self.look(lambda _: self.table.by_id(which, after=after, limit=limit))

    async def count(self, which: WorkFilter = EVERYTHING) -> dict[str, int]:
        return await self.look(lambda _: self.table.count(which))

    async def groups(self, which: WorkFilter = EVERYTHING) -> FailureGroups:
        return await self.look(lambda _: self.table.groups(which))

    async def quarantine_stats(self) -> QuarantineStats:
        return await self.look(lambda _: self.table.quarantine_stats())

    async def snapshot(self, gone: Collection[str] = ()) -> WorkSnapshot:
        return await self.look(lambda now: self.table.snapshot(gone, now=now))

    async def purge(self, before: int) -> int:
        return await self.write(lambda _: self.table.purge(before), wake=False)

    async def records(self) -> AsyncIterator[list[WorkItem]]:
        found = await self.look(lambda _: self.table.in_order())
        for at in range(0, len(found), RECORDS):
            yield found[at : at + RECORDS]

    async def adopt(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]] = NO_NOTES) -> int:
        return await self.write(lambda now: self.table.adopt(items, notes, now=now), ids=[item.id for item in items])

    async def soonest(self, classes: Sequence[str]) -> float:
        return await self.look(lambda now: self.table.soonest(classes, now))

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        async def over() -> WorkItem | None:
            item = await self.get(work_id)
            return item if item is not None and core.is_over(item) else None

        return await self.waiters.watch(
            over, END_TOPIC + work_id, pause=lambda item: 0.0 if item else LOOK_S, timeout=timeout
        )


class TableLeases(ABC):
    """The leases of all work in a store."""

    def __init__(self, work: TableWorkQueue) -> None:
        self._work = work

    async def owners(self, *, silent_for: float = 0.0, classes: Sequence[str] = ()) -> list[str]:
        return await self._work.look(
            lambda now: self._work.table.owners(now=now, silent_for=silent_for, classes=classes)
        )

    async def end(self, owners: Collection[str]) -> int:
        return await self._work.write(lambda now: self._work.table.end_leases(owners, now=now), wake=False)

    @abstractmethod
    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        """Hold work for longer, from any thread."""

    @abstractmethod
    def give_back(self, held: Sequence[Held]) -> None:
        """Give work back, from any thread of a process that ends."""
