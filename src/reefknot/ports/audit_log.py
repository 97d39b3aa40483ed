"""
Where events are kept.

The log stores bodies and a few fields to find them by. It neither builds, redacts nor understands an event: whoever
hands one in has done so. Every body becomes a link of the log's chain in the same atomic step that keeps it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.core.audit.chain import Head, Mismatch


class AuditEntry(Struct, frozen=True):
    """One event, ready to be kept: canonical JSON, and what it is found by. `at` is milliseconds UTC."""

    body: bytes
    event_type: str
    at: int
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None


class KeptEntry(Struct, frozen=True):
    """An event at its place in the chain."""

    sequence: int
    hash: str
    entry: AuditEntry


class AuditQuery(Struct, frozen=True):
    """What to read, oldest first. Everything given must hold."""

    after: int = 0
    event_type: str | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None
    since: int | None = None
    until: int | None = None
    limit: int = 1000

    def matches(self, entry: AuditEntry) -> bool:
        """Whether an event has everything that is asked for; `after` and `limit` are the reader's to apply."""
        return (
            self.event_type in (None, entry.event_type)
            and self.correlation_id in (None, entry.correlation_id)
            and self.trace_id in (None, entry.trace_id)
            and self.work_id in (None, entry.work_id)
            and (self.since is None or entry.at >= self.since)
            and (self.until is None or entry.at < self.until)
        )


EVERYTHING = AuditQuery()


class AuditLog(Protocol):
    """Appends, reads, proves."""

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        """Keep these, all or none, and tell where the chain stands."""

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        """A page of events; `after` the last one's sequence gives the next page."""

    async def head(self) -> Head:
        """Where the chain stands now. Keep it elsewhere: it proves later that nothing was cut off."""

    async def verify(
        self, head: Head | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Mismatch]:
        """
        Walk the chain from its anchor to `head` (default: the stored one) and list every mismatch.

        `progress` is told now and then how many more events were walked.
        """

    async def trim(self, before: int) -> int:
        """
        Forget events before this time (ms UTC), from the start of the chain on, and write an anchor event.

        Answers how many went. The anchor says where the rest of the chain begins.
        """

    async def wait(self, after: int, timeout: float) -> bool:
        """Until there is an event after this sequence, at most `timeout` seconds. False: there is none yet."""
