"""Events in a list, chained like everywhere else."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from reefknot.core.audit.chain import ANCHOR, Head, Link, Mismatch, anchor_body, link, verify
from reefknot.engines.memory.state import Shared
from reefknot.ports.audit_log import EVERYTHING, AuditEntry, AuditQuery, KeptEntry


class MemoryAuditLog:
    """The log of a memory store."""

    def __init__(self, shared: Shared, chain: str) -> None:
        self._shared = shared
        self._kept: list[KeptEntry] = []
        self._head = Head(chain)
        self._anchor = Head(chain)

    def add(self, entries: Sequence[AuditEntry]) -> None:
        """Keep these in the step that is under way."""
        for entry in entries:
            self._head, hashed = link(self._head, entry.body)
            self._kept.append(KeptEntry(self._head.sequence, hashed, entry))

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        self._shared.now()
        self.add(entries)
        self._shared.changed()
        return self._head

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        self._shared.now()
        start = bisect_right(self._kept, query.after, key=lambda kept: kept.sequence)
        found: list[KeptEntry] = []
        for kept in self._kept[start:]:
            if len(found) >= query.limit:
                break
            if matches(query, kept.entry):
                found.append(kept)
        return found

    async def head(self) -> Head:
        self._shared.now()
        return self._head

    async def verify(
        self, head: Head | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Mismatch]:
        self._shared.now()
        links = (Link(kept.sequence, kept.hash, kept.entry.body) for kept in self._kept)
        if progress is not None:
            progress(len(self._kept))
        return verify(links, head or self._head, start=self._anchor)

    async def trim(self, before: int) -> int:
        now = self._shared.now()
        gone = 0
        while gone < len(self._kept) and self._kept[gone].entry.at < before:
            gone += 1
        if gone:
            last = self._kept[gone - 1]
            self._anchor = Head(self._head.chain, last.sequence, last.hash)
            del self._kept[:gone]
            self.add([AuditEntry(anchor_body(self._anchor, now.wall), ANCHOR, now.wall)])
            self._shared.changed()
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        deadline = self._shared.deadline(timeout)
        while self._head.sequence <= after:
            left = self._shared.left(deadline)
            if not left:
                return False
            await self._shared.change(left)
        return True


def matches(query: AuditQuery, entry: AuditEntry) -> bool:
    """Does everything that was asked for hold?"""
    return (
        (query.event_type is None or entry.event_type == query.event_type)
        and (query.correlation_id is None or entry.correlation_id == query.correlation_id)
        and (query.trace_id is None or entry.trace_id == query.trace_id)
        and (query.work_id is None or entry.work_id == query.work_id)
        and (query.since is None or entry.at >= query.since)
        and (query.until is None or entry.at < query.until)
    )
