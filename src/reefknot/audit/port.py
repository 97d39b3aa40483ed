"""
The port of an audit log: stores events in a hash chain.

The log stores bodies and a few fields to find them by. It does not build, redact or interpret events: the caller has
done so. Every body becomes a link of the log's chain in the same atomic step that stores it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from asyncio import Future

    from reefknot.audit.model.chain import Head, Mismatch, RetentionInForce


class AuditEntry(Struct, frozen=True, gc=False):
    """An event to store: canonical JSON, and the fields to find it by. `at` is milliseconds UTC."""

    body: bytes
    event_type: str
    at: int
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None


class KeptEntry(Struct, frozen=True):
    """A stored event with its number and its hash in the chain."""

    sequence: int
    hash: str
    entry: AuditEntry


class ChainReport(Struct, frozen=True):
    """The verification of one chain of a log that has several: where it ends, and every mismatch."""

    head: Head
    mismatches: list[Mismatch]


class AuditQuery(Struct, frozen=True):
    """A filter for reading. All given fields must match; `after` and `before` are sequences, both exclusive."""

    after: int = 0
    before: int | None = None
    event_type: str | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None
    since: int | None = None
    until: int | None = None
    limit: int = 1000
    newest_first: bool = False

    def matches(self, entry: AuditEntry) -> bool:
        """Whether an event has everything that is asked for; sequences, order and limit are the reader's to apply."""
        return (
            self.event_type in (None, entry.event_type)
            and self.correlation_id in (None, entry.correlation_id)
            and self.trace_id in (None, entry.trace_id)
            and self.work_id in (None, entry.work_id)
            and (self.since is None or entry.at >= self.since)
            and (self.until is None or entry.at < self.until)
        )


EVERYTHING = AuditQuery()
PAGE = 1000
"""Events per page of a long read."""


class ReadableLog(Protocol):
    """A log to read from."""

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]: ...


@runtime_checkable
class AuditLog(Protocol):
    """An append-only log of events that can be verified."""

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        """Store these events, all or none; returns the new head of the chain."""

    def append_soon(self, entries: Sequence[AuditEntry]) -> Future[Head]:
        """
        Store these events, all or none, with the log's next write; the caller does not wait.

        The log starts no write for them at once, if it can add them to one that others need within a moment. A log that
        is closed may raise here or fail the future.
        """

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        """A page of events; `after` the last one's sequence (`before`, newest first) gives the next page."""

    async def head(self) -> Head:
        """The current head of the chain. Kept elsewhere, it proves later that no event was cut off."""

    async def verify(
        self,
        head: Head | None = None,
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Mismatch]:
        """
        Verify the chain from its anchor to `head` (default: the stored one); returns every mismatch.

        With `in_force`, events that were removed although that retention keeps them are mismatches too. `progress` is
        called now and then with the number of further events that were verified.
        """

    async def trim(self, before: int, *, rule: str = "by hand") -> int:
        """
        Remove events before this time (ms UTC), from the start of the chain on, and write an anchor event.

        Events that were stored together may stay until all of them are from before.

        Returns how many were removed. The anchor says where the rest of the chain begins, and by which rule. The last
        removed event is never an anchor itself: anchors behind it stay until a later event goes.
        """

    async def wait(self, after: int, timeout: float) -> bool:
        """Wait for an event after this sequence, at most `timeout` seconds. False if none arrived."""


@runtime_checkable
class TimedLog(AuditLog, Protocol):
    """A log that can find where the events before a time end, without reading the later ones."""

    async def end_before(self, until: int) -> int:
        """A sequence behind which no event is earlier than this time (ms UTC)."""


class LogEnd(Struct, frozen=True):
    """The end of a log: a name that no other log has, and a sequence that none of its events of now is behind."""

    log: str
    sequence: int


@runtime_checkable
class MultiChainLog(AuditLog, Protocol):
    """
    A log in which every process writes a chain of its own.

    The sequence of an event is its position in the log, and other positions may be empty; a head has the number in its
    chain. `head` is that of this process's chain, or of the one that was written last. `verify` without a head verifies
    all chains.
    """

    async def removed_up_to(self) -> int:
        """The position up to which retention has removed events; 0 when it has removed none."""

    async def end(self) -> LogEnd:
        """The end of the log."""

    async def heads(self) -> list[Head]:
        """The heads of all chains that have events."""

    async def read_chain(self, chain: str, *, after: int = 0, limit: int = 1000) -> list[KeptEntry]:
        """A page of one chain's events behind its number `after`. Their sequences are the chain's numbers."""

    async def verify_chains(
        self,
        heads: Sequence[Head] = (),
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[ChainReport]:
        """Verify every chain, each with the heads that name it, and the fields that events are found by."""


async def end_of(log: AuditLog) -> LogEnd:
    """The end of a log, whether it has one chain or several."""
    if isinstance(log, MultiChainLog):
        return await log.end()
    head = await log.head()
    return LogEnd(head.chain, head.sequence)


async def start_of_newest(log: AuditLog, most: int) -> int:
    """The sequence of the oldest of the newest `most` events; 0 when the log has no more than these."""
    if not isinstance(log, MultiChainLog):
        first = (await log.head()).sequence - most + 1
        return first if first > 1 else 0
    first, left = 0, most
    while page := await log.read(AuditQuery(newest_first=True, before=first or None, limit=min(PAGE, left + 1))):
        if len(page) > left:
            return page[left - 1].sequence if left else first
        first, left = page[-1].sequence, left - len(page)
    return 0


async def pages_of(
    log: ReadableLog, query: AuditQuery | None = None, *, until: int | None = None
) -> AsyncIterator[list[KeptEntry]]:
    """The matching entries, page by page, up to the sequence number `until`."""
    query = msgspec.structs.replace(query or AuditQuery(), limit=PAGE)
    while True:
        page = await log.read(query)
        wanted = [one for one in page if until is None or one.sequence <= until]
        if wanted:
            yield wanted
        if len(page) < PAGE or len(wanted) < len(page):
            return
        query = msgspec.structs.replace(query, after=page[-1].sequence)
