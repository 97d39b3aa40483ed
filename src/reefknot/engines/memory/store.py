"""
Control, transport and quarantine of a memory store.

Every subscriber of the transport has its own bounded queue, and a sender waits while one is full. A message id that was
published lately is not delivered again.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec import structs

from reefknot.core import work as core
from reefknot.core.overload.submission import Capacity
from reefknot.core.time import milliseconds
from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.memory.audit_and_keys import MemoryAuditLog, MemoryContext
from reefknot.engines.memory.work import MemoryWorkQueue
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.control import EVERYONE, NO_CAPACITY, Command, StatusReport
from reefknot.ports.quarantine import ALL, QuarantineFilter, QuarantineStats
from reefknot.ports.transport import Delivery


class MemoryControl:
    """The commands and statuses of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        self._shared = shared
        self._audit = audit
        self._posted: list[tuple[int, Command]] = []
        self._last = 0
        self._reported: dict[str, tuple[int, StatusReport]] = {}
        self._last_report = 0

    async def post(
        self,
        name: str,
        *,
        target: str = EVERYONE,
        body: str = "{}",
        sender: str = "",
        keep: float = 300.0,
        events: Sequence[AuditEntry] = (),
    ) -> int:
        now = self._shared.now()
        self._posted = [(stale_at, command) for stale_at, command in self._posted if stale_at > now.wall]
        self._last += 1
        self._posted.append((now.wall + milliseconds(keep), Command(self._last, name, target, body, sender, now.wall)))
        self._audit.add(events)
        self._shared.changed(("control",))
        return self._last

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        now = self._shared.now()
        unread = [
            command
            for stale_at, command in self._posted
            if command.sequence > after and command.target in (EVERYONE, target) and stale_at > now.wall
        ]
        return unread[:limit]

    async def latest(self) -> int:
        self._shared.now()
        return self._last

    async def wait(self, timeout: float, *, after: int) -> int:
        self._shared.now()
        if self._last <= after:
            await self._shared.change(timeout, ("control",))
        return self._last

    async def report(self, name: str, body: str, *, keep: float, capacity: Capacity = NO_CAPACITY) -> int:
        now = self._shared.now().wall
        self._shared.capacities[name] = now + milliseconds(keep), capacity
        self._reported = {one: kept for one, kept in self._reported.items() if kept[0] > now}
        if name in self._reported:
            sequence = self._reported[name][1].sequence
        else:
            sequence = self._last_report = self._last_report + 1
        self._reported[name] = (now + milliseconds(keep), StatusReport(sequence, name, body, now))
        return sequence

    async def withdraw(self, name: str) -> None:
        self._shared.now()
        self._reported.pop(name, None)
        self._shared.capacities.pop(name, None)

    async def reports(self) -> list[StatusReport]:
        now = self._shared.now().wall
        return [report for stale_at, report in self._reported.values() if stale_at > now]


REMEMBERED_IDS = 10_000


class _Inbox:
    """The unread messages of one subscriber."""

    def __init__(self, subjects: frozenset[str], limit: int) -> None:
        self.subjects = subjects
        self.unread: asyncio.Queue[Delivery | None] = asyncio.Queue(limit)


class Hub:
    """The subscribers and message ids that all transports over one store share."""

    def __init__(self) -> None:
        self.lines: list[_Inbox] = []
        self.seen: OrderedDict[str, None] = OrderedDict()


class MemoryTransport:
    """Publishes to whoever listens now, at this end or another one of the same hub."""

    def __init__(self, hub: Hub | None = None) -> None:
        self._hub = hub or Hub()
        self._own: list[_Inbox] = []
        self._closed = False

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = ""
    ) -> None:
        name = f"{subject} {message_id}" if message_id else ""
        if name and self._is_repeat(name):
            return
        delivery = Delivery(subject, body, headers or {})
        try:
            for line in list(self._hub.lines):
                if subject in line.subjects:
                    await line.unread.put(delivery)
        except BaseException:
            self._hub.seen.pop(name, None)  # whoever tries again under this id has something to say
            raise

    def _is_repeat(self, name: str) -> bool:
        seen = self._hub.seen
        if name in seen:
            return True
        seen[name] = None
        if len(seen) > REMEMBERED_IDS:
            seen.popitem(last=False)
        return False

    def subscribe(self, *subjects: str, limit: int = 1024) -> AsyncIterator[Delivery]:
        line = _Inbox(frozenset(subjects), limit)
        self._hub.lines.append(line)
        self._own.append(line)
        return self._read(line)

    async def _read(self, line: _Inbox) -> AsyncIterator[Delivery]:
        try:
            while True:
                delivery = await line.unread.get()
                if delivery is None:
                    return
                yield delivery
        finally:
            self._forget(line)

    def _forget(self, line: _Inbox) -> None:
        for lines in (self._hub.lines, self._own):
            if line in lines:
                lines.remove(line)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for line in list(self._own):
                self._forget(line)
                if line.unread.full():
                    line.unread.get_nowait()
                line.unread.put_nowait(None)


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
            for item in items:
                self._work.put(core.requeue(item, now, who=who), now)
            self._append_for(items, events)
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
            self._append_for(items, events)
        return [item.id for item in items]

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        self._work.shared.now()
        items = self._meant(which)
        if not dry_run:
            for item in items:
                self._work.remove(item.id)
            self._append_for(items, events)
        return [item.id for item in items]

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

    def _append_for(self, items: list[WorkItem], events: Sequence[AuditEntry]) -> None:
        if items:
            self._audit.add(events)
            self._work.wake()


def _matches(which: QuarantineFilter, item: WorkItem) -> bool:
    return (
        (not which.ids or item.id in which.ids)
        and which.kind in (None, item.kind)
        and which.source in (None, item.source)
        and (which.reason_contains is None or which.reason_contains in item.reason)
        and (which.before is None or item.updated_at < which.before)
    )
