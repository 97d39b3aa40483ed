"""
Verification of a store's audit log: its chains, the heads that were kept elsewhere, and the retention in force.

Where every process writes a chain of its own, a log has several. Pages are bounded, so a log of any length needs the
same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import time
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from reefknot.audit.model.chain import (
    UNREADABLE,
    EventIndex,
    Head,
    KeptHead,
    Mismatch,
    RetentionInForce,
    index_mismatch,
    link,
)
from reefknot.audit.port import (
    EVERYTHING,
    AuditLog,
    AuditQuery,
    ChainReport,
    KeptEntry,
    LogEnd,
    MultiChainLog,
    ReadableLog,
    pages_of,
)
from reefknot.errors import OperationError

if TYPE_CHECKING:
    from reefknot.policy.schema import AuditSection
    from reefknot.policy.settings import Settings

MOST_HEAD_BYTES = 16 * 1024 * 1024
Advance = Callable[[int], None]
"""Called with the number of further events that are done."""


def _silent(_: int) -> None:
    return None


# ---- heads that were kept --------------------------------------------------------------------------------------------


class KeptHeads(NamedTuple):
    """
    The heads to compare a log with: the file they are in, and whether it is that of the setting `audit.heads`.

    Those that an export wrote next to its file (`of_export`) are the heads of all chains in it.
    """

    file: Path | None = None
    heads: Sequence[Head] = ()
    configured: bool = False
    of_export: bool = False

    def of(self, chain: str) -> list[Head]:
        """
        The heads of one chain, the newest first: of a configured file that of the log, else the last line's.

        A configured file may have heads of other stores, and of logs that no longer exist.
        """
        return self.heads_of(chain if self.configured or not self.heads else self.heads[-1].chain)

    def heads_of(self, chain: str) -> list[Head]:
        """The heads of one chain, the newest first."""
        ours = [one for one in self.heads if one.chain == chain]
        return sorted(ours, key=lambda one: one.sequence, reverse=True)

    def others(self, chains: Iterable[str]) -> list[str]:
        """Other chains that a configured file has heads of."""
        return sorted({one.chain for one in self.heads}.difference(chains)) if self.configured else []


def configured_heads(settings: Settings | None) -> tuple[KeptHeads, Path | None]:
    """The heads in the file of the setting `audit.heads`, and that file's name when it is missing."""
    setting = None if settings is None else settings.configuration.audit.heads
    if settings is None or setting is None:
        return KeptHeads(), None
    kept = settings.folder / setting.path
    if not kept.is_file():
        return KeptHeads(), kept
    return KeptHeads(kept, read_heads(kept), configured=True), None


def read_heads(file: Path) -> list[Head]:
    """
    The heads in a file, one JSON object per line.

    A last line that a crash has cut is left out: the next head that is written takes its place.
    """
    with file.open("rb") as stream:
        lines = stream.read(MOST_HEAD_BYTES).splitlines(keepends=True)
    heads: list[KeptHead] = []
    for number, line in enumerate(lines, 1):
        try:
            heads.append(msgspec.json.decode(line, type=KeptHead))
        except UNREADABLE as error:
            if line.endswith(b"\n"):
                raise OperationError(f"{file}:{number}: this line is no head: {error}", "misconfigured") from None
    if not heads:
        raise OperationError(f"{file} contains no head; `audit head` prints one", "misconfigured")
    return [Head(one.chain, one.sequence, one.hash) for one in heads]


def hashes_of(heads: Sequence[Head]) -> dict[int, set[str]]:
    """The hashes that were kept of each event. An event has two if the log was rolled back and continued."""
    hashes: dict[int, set[str]] = {}
    for one in heads:
        hashes.setdefault(one.sequence, set()).add(one.hash)
    return hashes


def differs(found: str, hashes: Mapping[int, set[str]], sequence: int) -> bool:
    """Whether another hash than this was kept of an event."""
    return bool(hashes.get(sequence, set()) - {found})


def other_hash(sequence: int) -> Mismatch:
    """The mismatch of an event and a head that was kept of it."""
    return Mismatch(sequence, "the hash is not the one of the head")


# ---- the log of a store ----------------------------------------------------------------------------------------------


class StoreSource:
    """The log of a store, up to its head when this source was made."""

    def __init__(self, log: AuditLog, head: Head, name: str, retention: float | EllipsisType | None = ...) -> None:
        """`retention` is the one in force for events, in seconds; without it, removed events are not compared."""
        self.log = log
        self.head = head
        self.name = name
        self._retention = retention

    @property
    def size(self) -> int:
        """The number of events that verifying comes by: it goes over them twice."""
        return 2 * self.head.sequence

    async def heads(self) -> list[Head]:
        return [self.head]

    async def reports(self, kept: KeptHeads, advance: Advance = _silent) -> list[ChainReport]:
        """The verification of every chain, compared with the heads that were kept of it."""
        return [ChainReport(*await self.verify(kept.of(self.head.chain if kept.configured else ""), advance))]

    async def verify(self, heads: Sequence[Head], advance: Advance = _silent) -> tuple[Head, list[Mismatch]]:
        """The head and every mismatch, by two passes: the chain, then index columns and the other heads."""
        newest = heads[0] if heads else None
        if newest is not None and newest.chain != self.head.chain:
            return self.head, [Mismatch(0, f"this is chain {self.head.chain}, the head is of chain {newest.chain}")]
        kept_hashes, in_force = hashes_of(heads), in_force_with(self._retention, newest)
        found = await self.log.verify(newest, in_force=in_force, progress=advance)
        async for kept in pages_of(self.log, until=self.head.sequence):
            found += filter(None, map(_index_mismatch, kept))
            found += [other_hash(one.sequence) for one in kept if differs(one.hash, kept_hashes, one.sequence)]
            advance(len(kept))
        return self.head, found

    async def newest_reports(self, kept: KeptHeads, most: int) -> list[ChainReport]:
        """The verification of the newest events of every chain, `most` in all, and of the fields they are found by."""
        heads = hashes_of(kept.of(self.head.chain if kept.configured else ""))
        return [await _newest_report(self.log, self.head, most, heads)]


class ChainsSource(StoreSource):
    """The log of a store with several chains, up to its end when this source was made."""

    def __init__(
        self,
        log: MultiChainLog,
        end: LogEnd,
        heads: Sequence[Head],
        name: str,
        retention: float | EllipsisType | None = ...,
    ) -> None:
        super().__init__(log, Head(end.log, end.sequence), name, retention)
        self._chains = log
        self._heads = heads

    @property
    def size(self) -> int:
        """The number of events that verifying comes by."""
        return sum(one.sequence for one in self._heads)

    async def heads(self) -> list[Head]:
        return [*self._heads] or [await self.log.head()]

    async def reports(self, kept: KeptHeads, advance: Advance = _silent) -> list[ChainReport]:
        """The verification of every chain. A configured file may have heads of chains that are no more."""
        newest = kept.heads[-1] if kept.heads else None
        in_force = in_force_with(self._retention, newest)
        found = await self._chains.verify_chains(kept.heads, in_force=in_force, progress=advance)
        if kept.configured:
            found = [one for one in found if one.head.sequence]
        return found or [ChainReport(await self.log.head(), [])]

    async def newest_reports(self, kept: KeptHeads, most: int) -> list[ChainReport]:
        heads = await self.heads()
        each = max(1, most // len(heads))
        return [
            await _newest_report(OneChain(self._chains, one.chain), one, each, hashes_of(kept.heads_of(one.chain)))
            for one in heads
        ]


class OneChain:
    """Reads one chain of a log with several like a log of its own."""

    def __init__(self, log: MultiChainLog, chain: str) -> None:
        self._log = log
        self._chain = chain

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        """A page of the chain; of anchors, one of those of all chains."""
        if query.event_type is not None:
            return await self._log.read(query)
        return await self._log.read_chain(self._chain, after=query.after, limit=query.limit)


async def _newest_report(log: ReadableLog, head: Head, most: int, kept: Mapping[int, set[str]]) -> ChainReport:
    """The verification of the last events before a head: each hash follows from the one before it."""
    at, found = None, []
    async for page in pages_of(log, AuditQuery(after=max(0, head.sequence - most - 1)), until=head.sequence):
        for one in page:
            if at is None and one.sequence > 1:  # the first one is only what the next one follows
                at = Head(head.chain, one.sequence, one.hash)
                continue
            at = at or Head(head.chain)
            if one.sequence != at.sequence + 1:
                found.append(Mismatch(one.sequence, f"expected number {at.sequence + 1}"))
                at = Head(head.chain, one.sequence - 1, at.hash)
            _, hashed = link(at, one.entry.body)
            if hashed != one.hash:
                found.append(Mismatch(one.sequence, "the hash does not fit the body and its place"))
            if differs(one.hash, kept, one.sequence):
                found.append(other_hash(one.sequence))
            found += filter(None, [_index_mismatch(one)])
            at = Head(head.chain, one.sequence, one.hash)
    if head.sequence and (at is None or at != head):
        found.append(Mismatch(head.sequence, "the log does not end with its head"))
    return ChainReport(head, found)


def in_force_with(
    retention: float | EllipsisType | None, head: Head | None, files: int | None = None
) -> RetentionInForce | None:
    """The retention to compare anchors with. Against a head that was kept elsewhere, each has to prove what it says."""
    if retention is ...:
        return None
    return RetentionInForce(retention, int(time() * 1000), files, needs_proof=head is not None)


def retention_of(audit: AuditSection | None, store: Path | None) -> float | EllipsisType | None:
    """
    The retention of events in force: as configured, else as noted next to the store's file, else the built-in one.

    A store without a file has no note: another process that shares it may keep events for a shorter time, so no
    comparison is made.
    """
    from reefknot.audit.retention import Retention, RetentionNote

    if audit is not None and "retention_seconds" in audit.written:
        return audit.retention_seconds
    if store is None:
        return ...
    return (RetentionNote(str(store)).read().retention or Retention()).events


async def store_source(log: AuditLog, name: str, audit: AuditSection | None, file: Path | None) -> StoreSource:
    """The log of a store up to its end now. `file` is that of a SQLite store, next to which its retention is noted."""
    retention = retention_of(audit, file)
    if isinstance(log, MultiChainLog):
        return ChainsSource(log, await log.end(), await log.heads(), name, retention)
    return StoreSource(log, await log.head(), name, retention)


def index_in_store(one: KeptEntry) -> EventIndex:
    """The fields by which the store finds an event."""
    entry = one.entry
    return EventIndex(entry.event_type, entry.correlation_id, entry.trace_id, entry.work_id)


def _index_mismatch(one: KeptEntry) -> Mismatch | None:
    return index_mismatch(one.sequence, one.entry.body, index_in_store(one), one.entry.at)
