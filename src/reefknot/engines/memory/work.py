"""Work, leases and quarantine of a memory store: asynchronous fronts of one work table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import TypeVar

from reefknot.core import work as core
from reefknot.core.overload.admission import Reject
from reefknot.core.overload.submission import SubmissionRules
from reefknot.core.time import Moment
from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.memory.store import MemoryAuditLog, MemoryContext
from reefknot.engines.work_items import CLASS_TOPIC, END_TOPIC, LEASES_TOPIC
from reefknot.engines.work_table import MOST_ENDED, QuarantineTable, WorkTable
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.work_queue import (
    ALL,
    CrashEvents,
    Enqueued,
    Held,
    QuarantineFilter,
    QuarantineStats,
    Settlement,
    WorkSnapshot,
)

R = TypeVar("R")


class MemoryWorkQueue:
    """The work of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        self.shared = shared
        self._audit = audit
        self.table = WorkTable(shared.offered, most_ended=MOST_ENDED)

    def commit(self, change: Callable[[Moment], R], *, wake: bool = True) -> R:
        """
        Make a change of the table, whole or not at all: its events are audited, and those who wait for it are woken.

        With `wake` False those who wait for any change sleep on when no topic was touched: a claim or a renewal brings
        them nothing.
        """
        now = self.shared.now()
        try:
            answer = change(now)
        except BaseException:
            self.table.roll_back()
            raise
        self.table.clear_changes()
        if self.table.events:
            self._audit.add(self.table.take_events())
        if wake or self.table.touched:
            self.shared.changed(*self.table.take_topics())
        return answer

    async def enqueue(
        self,
        items: Sequence[WorkItem],
        *,
        rules: SubmissionRules | None = None,
        events: Sequence[AuditEntry] = (),
        accept_events: CrashEvents | None = None,
        owner: str = "",
        lease: float = 60.0,
        drop_events: CrashEvents | None = None,
    ) -> list[Enqueued | Reject]:
        return self.commit(
            lambda now: self.table.enqueue(
                items,
                now=now,
                rules=rules,
                events=events,
                accept_events=accept_events,
                owner=owner,
                lease=lease,
                drop_events=drop_events,
            )
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
        return self.commit(
            lambda now: self.table.assign(items, now=now, start=start, owner=owner, lease=lease, events=events)
        )

    async def claim(
        self,
        n: int,
        *,
        owner: str,
        classes: Sequence[str] = (),
        lease: float = 60.0,
        newest_first: bool = False,
        only: Collection[str] | None = None,
        isolate: bool = False,
        crash_limit: int = core.CRASH_LIMIT,
        crash_events: CrashEvents | None = None,
    ) -> list[WorkItem]:
        return self.commit(
            lambda now: self.table.claim(
                n,
                now=now,
                owner=owner,
                classes=classes,
                lease=lease,
                newest_first=newest_first,
                only=only,
                isolate=isolate,
                crash_limit=crash_limit,
                crash_events=crash_events,
            ),
            wake=False,
        )

    async def renew(self, held: Sequence[Held], *, lease: float = 60.0) -> list[bool]:
        return self.commit(lambda now: self.table.renew(held, now=now, lease=lease), wake=False)

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        return self.commit(lambda now: self.table.settle(settlements, now=now))

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        return self.commit(lambda now: self.table.cancel(work_id, now=now, reason=reason, who=who, events=events))

    async def retry(
        self, ids: Sequence[str], *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return self.commit(lambda now: self.table.retry(ids, now=now, who=who, why=why, events=events))

    async def transfer(self, work_id: str, resource_class: str) -> bool:
        return self.commit(lambda now: self.table.transfer(work_id, resource_class, now=now))

    async def open_classes(self) -> list[str]:
        self.shared.now()
        return self.table.open_classes()

    async def recall(self, classes: Sequence[str], *, crash_events: CrashEvents | None = None) -> int:
        return self.commit(lambda now: self.table.recall(classes, now=now, crash_events=crash_events))

    async def get(self, work_id: str) -> WorkItem | None:
        self.shared.now()
        return self.table.get(work_id)

    async def find(
        self,
        *,
        state: WorkState | None = None,
        kind: str | None = None,
        classes: Collection[str] = (),
        after: str = "",
        limit: int = 100,
        since: int = 0,
        oldest_first: bool = False,
        gone: Collection[str] | None = None,
    ) -> list[WorkItem]:
        return self.table.find(
            now=self.shared.now(),
            state=state,
            kind=kind,
            classes=classes,
            after=after,
            limit=limit,
            since=since,
            oldest_first=oldest_first,
            gone=gone,
        )

    async def snapshot(self) -> WorkSnapshot:
        return self.table.snapshot(now=self.shared.now())

    @property
    def newest_at(self) -> int | None:
        return self.table.newest_at

    async def purge(self, before: int) -> int:
        return self.commit(lambda _: self.table.purge(before), wake=False)

    async def wait(self, timeout: float, *, classes: Sequence[str] = ()) -> bool:
        async def soonest() -> float:
            return self.table.soonest(classes, self.shared.now())

        topics = (LEASES_TOPIC, *(CLASS_TOPIC + name for name in classes)) if classes else ("",)
        return await self.shared.watch(soonest, *topics, pause=float, timeout=timeout) == 0

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        async def over() -> WorkItem | None:
            item = await self.get(work_id)
            return item if item is not None and core.is_over(item) else None

        return await self.shared.watch(
            over, END_TOPIC + work_id, pause=lambda item: 0.0 if item else inf, timeout=timeout
        )


class MemoryLeases:
    """The leases of all work in a memory store."""

    def __init__(self, work: MemoryWorkQueue) -> None:
        self._work = work

    async def owners(self) -> list[str]:
        self._work.shared.now()
        return self._work.table.owners()

    async def end(self, owners: Collection[str]) -> int:
        return self._work.commit(lambda now: self._work.table.end_leases(owners, now=now), wake=False)

    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        self._work.table.extend(held, now=self._work.shared.now(), lease=lease)


class MemoryQuarantine:
    """The quarantine of a memory store."""

    def __init__(self, work: MemoryWorkQueue) -> None:
        self._work = work
        self._table = QuarantineTable(work.table)

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        self._work.shared.now()
        return self._table.find(which, after=after, limit=limit)

    async def show(self, work_id: str) -> WorkItem | None:
        self._work.shared.now()
        return self._table.show(work_id)

    async def requeue(
        self, which: QuarantineFilter, *, who: str, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return self._work.commit(
            lambda now: self._table.requeue(which, now=now, who=who, dry_run=dry_run, events=events)
        )

    async def discard(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        reason: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        return self._work.commit(
            lambda now: self._table.discard(which, now=now, who=who, reason=reason, dry_run=dry_run, events=events)
        )

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return self._work.commit(lambda now: self._table.purge(which, now=now, dry_run=dry_run, events=events))

    async def count(self, which: QuarantineFilter = ALL) -> dict[str, int]:
        self._work.shared.now()
        return self._table.count(which)

    async def stats(self) -> QuarantineStats:
        self._work.shared.now()
        return self._table.stats()
