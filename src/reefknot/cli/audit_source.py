"""
Sources of audited events: a store, an exported file, or the files of a JSON-lines log.

Where every process writes a chain of its own, a log has several. An export has them one after the other, each with its
header line, and its head file has a head for each.

Pages are bounded, so a log of any length needs the same memory. A file is read as it is: a change in it shows in the
verification or the replay.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from time import time
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.audit_events import EventFilter, csv_rows, json_line
from reefknot.cli.options import StoreFlags, load
from reefknot.cli.output import Advance, progress, relative, say
from reefknot.cli.store import address_of, opened
from reefknot.core.audit.chain import (
    UNREADABLE,
    EventIndex,
    Head,
    KeptHead,
    LogHeader,
    LogLine,
    Mismatch,
    RetentionInForce,
    anchor_in,
    event_line,
    header_line,
    read_line,
    verify_lines,
    wrong_index_field,
)
from reefknot.core.redaction import redact
from reefknot.engines.jsonlines.writer import files_of, lines_of
from reefknot.errors import ConfigurationError, NotJsonError
from reefknot.ports.audit_log import (
    EVERYTHING,
    AuditLog,
    AuditQuery,
    ChainReport,
    KeptEntry,
    LogEnd,
    MultiChainLog,
)
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.config.schema import AuditSection

PAGE = 1000
JSONL, CSV = "jsonl", "csv"
MOST_HEAD_BYTES = 16 * 1024 * 1024
SQLITE_MAGIC = b"SQLite format 3\x00"
EVERY_EVENT = EventFilter()
NumberedBody = tuple[int, bytes]
"""The sequence number of an event, and its body."""


class StoreSource:
    """The log of a store, up to its head when this source was made."""

    def __init__(self, log: AuditLog, head: Head, name: str, retention: float | EllipsisType | None = ...) -> None:
        """`retention` is the one in force for events, in seconds; without it, removed events are not compared."""
        self.log = log
        self.head = head
        self.name = name
        self._retention = retention

    async def events(self, label: str, wanted: EventFilter = EVERY_EVENT) -> AsyncIterator[NumberedBody]:
        """The events that the filter's query and its fields choose."""
        with progress(label, self.head.sequence) as advance:
            async for kept in pages_of(self.log, wanted.query, until=self.head.sequence):
                for one in filter(wanted.matches, kept):
                    yield one.sequence, one.entry.body
                advance(len(kept))

    async def heads(self) -> list[Head]:
        return [self.head]

    async def reports(self, kept: KeptHeads) -> list[ChainReport]:
        """The verification of every chain, compared with the heads that were kept of it."""
        return [ChainReport(*await self.verify(kept.of(self.head.chain if kept.configured else "")))]

    async def verify(self, heads: Sequence[Head]) -> tuple[Head, list[Mismatch]]:
        """The head and every mismatch, by two passes: the chain, then index columns and the other heads."""
        newest = heads[0] if heads else None
        if newest is not None and newest.chain != self.head.chain:
            return self.head, [Mismatch(0, f"this is chain {self.head.chain}, the head is of chain {newest.chain}")]
        kept_hashes = _hashes(heads)
        with progress("verifying", 2 * self.head.sequence) as advance:
            in_force = _in_force(self._retention, newest)
            found = await self.log.verify(newest, in_force=in_force, progress=advance)
            async for kept in pages_of(self.log, until=self.head.sequence):
                found += filter(None, map(_index_mismatch, kept))
                found += [
                    _other_hash(one.sequence) for one in kept if kept_hashes.get(one.sequence, set()) - {one.hash}
                ]
                advance(len(kept))
        return self.head, found


class ChainsSource(StoreSource):
    """The log of a store with several chains, up to its end when this source was made."""

    def __init__(
        self, log: MultiChainLog, end: LogEnd, name: str, retention: float | EllipsisType | None = ...
    ) -> None:
        super().__init__(log, Head(end.log, end.sequence), name, retention)
        self._chains = log

    async def heads(self) -> list[Head]:
        return await self._chains.heads() or [await self.log.head()]

    async def reports(self, kept: KeptHeads) -> list[ChainReport]:
        """The verification of every chain. A configured file may have heads of chains that are no more."""
        newest = kept.heads[-1] if kept.heads else None
        with progress("verifying", self.head.sequence) as advance:
            in_force = _in_force(self._retention, newest)
            found = await self._chains.verify_chains(kept.heads, in_force=in_force, progress=advance)
        if kept.configured:
            found = [one for one in found if one.head.sequence]
        return found or [ChainReport(await self.log.head(), [])]


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


class FileSource:
    """An exported file, or the files of a JSON-lines log."""

    def __init__(self, path: Path, retention: float | EllipsisType | None = ..., files: int | None = None) -> None:
        """`files` is the configured number of files of a JSON-lines log, which is a retention of its own."""
        self._retention = retention
        self._most_files = files
        if not path.is_file():
            raise CommandError(f"{path}: there is no such file", Exit.NO_INPUT)
        self.name = str(path)
        self._files = files_of(path)
        self._size = sum(file.stat().st_size for file in self._files)

    async def events(self, label: str, wanted: EventFilter = EVERY_EVENT) -> AsyncIterator[NumberedBody]:
        """The events that the filter accepts, and every damaged line: nobody can tell what it was."""
        self._require_header()
        with progress(label, self._size) as advance:
            for text in self._lines(advance):
                found = read_line(text)
                if isinstance(found, LogLine):
                    if wanted.accepts(found.body):
                        yield found.sequence, found.body
                elif found is None:  # a damaged line has no number
                    yield 0, text

    def _require_header(self) -> None:
        """Refuse a file without an audit log's header: replaying it would "succeed" with 0 decisions."""
        first = next(lines_of(self._files), b"")
        if not isinstance(read_line(first), LogHeader):
            found = printable(first[:40].decode("utf-8", "replace").rstrip("\n")) or "nothing"
            expected = '{"chain":"…","format":1,"hash":"…","sequence":0}, as `reefknot audit export` writes it'
            message = f"{self._files[0]}:1: this is not an audit log: expected {expected}; found {found!r}"
            raise CommandError(message, Exit.MISMATCH)

    async def heads(self) -> list[Head]:
        """The last head of each chain in the file."""
        self._require_header()
        with progress("reading", self._size) as advance:
            return [self._read_hashes(lines, KeptHeads(), refuse_damaged=True)[0] for lines in self._chains(advance)]

    async def reports(self, kept: KeptHeads) -> list[ChainReport]:
        """The verification of every chain in the file, compared with the heads that were kept of it."""
        with progress("verifying", 2 * self._size) as advance:
            anchors: dict[str, list[bytes]] = {}
            ends = [self._read_hashes(lines, kept, anchors) for lines in self._chains(advance)] or [(Head("?"), [])]
            is_one = len(ends) == 1
            found = []
            sections = self._chains(advance)
            for end, others in ends:
                lines: Iterator[bytes] = next(sections, iter(()))
                heads = kept.of(end.chain if kept.configured else "") if is_one else kept.heads_of(end.chain)
                in_force = _in_force(self._retention, heads[0] if heads else None, self._most_files)
                newest, elsewhere = heads[0] if heads else None, anchors.get(end.chain, [])
                wrong = verify_lines(lines, newest, in_force=in_force, anchors=elsewhere)
                found.append(ChainReport(end, wrong + others))
        chains = {one.chain for one in kept.heads}
        if kept.configured or len(chains) < 2 or (is_one and not kept.of_export):
            return found
        missing = sorted(chains - {end.chain for end, _ in ends})
        return found + [ChainReport(Head(one), [Mismatch(0, "the file does not have this chain")]) for one in missing]

    def _read_hashes(
        self,
        lines: Iterable[bytes],
        kept: KeptHeads,
        anchors: dict[str, list[bytes]] | None = None,
        *,
        refuse_damaged: bool = False,
    ) -> tuple[Head, list[Mismatch]]:
        """
        The last head, and the events whose hashes are not the ones that were kept. A line may be under way.

        Anchors of other chains are added to `anchors`.
        """
        end, mismatches, kept_hashes = Head("?"), [], _hashes([])
        for text in lines:
            found = read_line(text)
            if isinstance(found, LogHeader):
                end, kept_hashes = found.head, _hashes(kept.heads_of(found.chain))
            elif found is not None:
                end = Head(end.chain, found.sequence, found.hash)
                if _differs(found.hash, kept_hashes, found.sequence):
                    mismatches.append(_other_hash(found.sequence))
                anchor = anchor_in(found.body)
                if anchors is not None and anchor is not None and anchor.chain != end.chain:
                    anchors.setdefault(anchor.chain, []).append(found.body)
            elif refuse_damaged and text.endswith(b"\n"):
                message = f"{self._files[0]}: the line after event {end.sequence} is damaged; see `audit verify`"
                raise CommandError(message, Exit.MISMATCH)
        return end, mismatches

    def _chains(self, advance: Advance) -> Iterator[Iterator[bytes]]:
        """The lines of each chain. The files of a JSON-lines log have one; a header of another does not fit there."""
        chain = ""

        def chain_of(text: bytes) -> str:
            nonlocal chain
            found = read_line(text) if len(self._files) == 1 and text.startswith(b'{"chain":') else None
            chain = found.chain if isinstance(found, LogHeader) else chain
            return chain

        for _, lines in groupby(self._lines(advance), key=chain_of):
            yield lines

    def _lines(self, advance: Advance) -> Iterator[bytes]:
        for line in lines_of(self._files):
            advance(len(line))
            yield line


AuditSource = StoreSource | FileSource


def _in_force(
    retention: float | EllipsisType | None, head: Head | None, files: int | None = None
) -> RetentionInForce | None:
    """The retention to compare anchors with. Against a head that was kept elsewhere, each has to prove what it says."""
    if retention is ...:
        return None
    return RetentionInForce(retention, int(time() * 1000), files, needs_proof=head is not None)


@asynccontextmanager
async def audit_source(file: Path | None, options: StoreFlags) -> AsyncIterator[AuditSource]:
    """The file when one is named, else the store. A file that is a store is opened as one."""
    if file is not None:
        if options.engine is not None:
            raise CommandError("name a file or --engine, not both")
        engine = _store_url(file)
        if engine is None:
            yield FileSource(file, *_retention_of_file(options.config))
            return
        from dataclasses import replace

        options = replace(options, engine=engine)
    address = address_of(options)
    async with opened(address) as store:
        configured = None if address.settings is None else address.settings.configuration.audit
        retention = _retention_of(configured, address.path if address.is_sqlite else None)
        if isinstance(store.audit, MultiChainLog):
            yield ChainsSource(store.audit, await store.audit.end(), printable(redact(address.url)), retention)
        else:
            yield StoreSource(store.audit, await store.audit.head(), address.url, retention)


def _retention_of(audit: AuditSection | None, store: Path | None) -> float | EllipsisType | None:
    """
    The retention of events in force: as configured, else as noted beside the store's file, else the built-in one.

    A store without a file has no note: who shares it may keep events for a shorter time, so none is compared.
    """
    from reefknot.app.stores import Retention, RetentionNote

    if audit is not None and "retention_seconds" in audit.model_fields_set:
        return audit.retention_seconds
    if store is None:
        return ...
    return (RetentionNote(str(store)).read().retention or Retention()).events


def _retention_of_file(config: str | None) -> tuple[float | None, int | None]:
    """
    The configured retention of events, and the number of files, for a file that may come from anywhere.

    Without a setting any age will do: nobody here knows which retention was in force where the file was written.
    """
    try:
        audit = load(config).configuration.audit
    except ConfigurationError:
        if config is not None:
            raise
        return 0.0, None
    retention = audit.retention_seconds if "retention_seconds" in audit.model_fields_set else 0.0
    return retention, None if audit.jsonl is None else audit.jsonl.max_files


def _store_url(file: Path) -> str | None:
    """The URL of the store that this file is; None when it is no database."""
    if str(file).startswith("sqlite:"):
        return str(file)
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return f"sqlite:{file.absolute()}" if stream.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC else None


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


def _index_of(one: KeptEntry) -> EventIndex:
    entry = one.entry
    return EventIndex(entry.event_type, entry.correlation_id, entry.trace_id, entry.work_id)


def _index_mismatch(one: KeptEntry) -> Mismatch | None:
    wrong = wrong_index_field(one.entry.body, _index_of(one), one.entry.at)
    return None if wrong is None else Mismatch(one.sequence, f"it is filed under another {wrong} than its own")


# ---- export ----------------------------------------------------------------------------------------------------------


class ReadableLog(Protocol):
    """A log to read from."""

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]: ...


async def export_pages(
    log: AuditLog, heads: Sequence[Head], wanted: EventFilter, form: str, *, end: int
) -> AsyncIterator[tuple[bytes, int, int]]:
    """The text of an export, page by page, with the number of its events and of those that were looked at."""
    if form == JSONL and wanted.is_everything:
        for head in heads:  # of several chains, one after the other
            heading = 1  # the first line is no event
            chain = OneChain(log, head.chain) if isinstance(log, MultiChainLog) else log
            async for lines in exported(chain, head):
                number = lines.count(b"\n") - heading
                heading = 0
                yield lines, number, number
        return
    if form == CSV:
        yield csv_rows([], heading=True), 0, 0
    async for page in pages_of(log, wanted.query, until=end):
        found = [one for one in page if wanted.matches(one)]
        yield csv_rows(found) if form == CSV else b"".join(map(json_line, found)), len(found), len(page)


async def exported(log: ReadableLog, head: Head) -> AsyncIterator[bytes]:
    """The lines of an export, its header first."""
    start: Head | None = None
    async for page in pages_of(log, until=head.sequence):
        if start is None:
            start = await _start(log, head, page[0].sequence)
            yield header_line(start)
        yield b"".join(_exported_line(head.chain, one) for one in page)
    if start is None:
        yield header_line(head)


def _exported_line(chain: str, one: KeptEntry) -> bytes:
    try:
        return event_line(Head(chain, one.sequence, one.hash), one.entry.body, filed=_index_of(one))
    except NotJsonError as error:
        raise CommandError(f"event {one.sequence} was changed ({error}); see `audit verify`", Exit.MISMATCH) from error


async def _start(log: ReadableLog, head: Head, first: int) -> Head:
    """The head before the first event: the chain's beginning, or the one that an anchor event vouches for."""
    start = Head(head.chain)
    if first > 1:
        async for page in pages_of(log, AuditQuery(event_type="anchor")):
            for one in page:
                found = anchor_in(one.entry.body)
                if found is not None and (found.chain, found.sequence) == (head.chain, first - 1):
                    start = found
    return start


def head_file_of(file: Path) -> Path:
    """The file in which an export writes its head."""
    return file.with_name(f"{file.name}.head.json")


class KeptHeads(NamedTuple):
    """
    The heads to compare a log with: the file they are in, and whether it is that of the setting `audit.heads`.

    Those that an export wrote beside its file (`of_export`) are the heads of all chains in it.
    """

    file: Path | None = None
    heads: Sequence[Head] = ()
    configured: bool = False
    of_export: bool = False

    def of(self, chain: str) -> list[Head]:
        """
        The heads of one chain, the newest first: of a configured file that of the log, else the last line's.

        A configured file may have heads of other stores, and of a log that is no more.
        """
        return self.heads_of(chain if self.configured or not self.heads else self.heads[-1].chain)

    def heads_of(self, chain: str) -> list[Head]:
        """The heads of one chain, the newest first."""
        ours = [one for one in self.heads if one.chain == chain]
        return sorted(ours, key=lambda one: one.sequence, reverse=True)

    def others(self, chains: Iterable[str]) -> list[str]:
        """Other chains that a configured file has heads of."""
        return sorted({one.chain for one in self.heads}.difference(chains)) if self.configured else []


def heads_for(file: Path | None, head: Path | None, options: StoreFlags) -> KeptHeads:
    """
    The heads to compare with.

    They are in the file that was named, else in the one that an export wrote beside its file, else in that of the
    setting `audit.heads`, when the log is a store's own.
    """
    if head is not None:
        return KeptHeads(head, read_heads(head))
    if file is not None and _store_url(file) is None:
        beside = head_file_of(file)
        return KeptHeads(beside, read_heads(beside), of_export=True) if beside.is_file() else KeptHeads()
    found = address_of(options).settings
    setting = None if found is None else found.configuration.audit.heads
    if found is None or setting is None:
        return KeptHeads()
    kept = found.folder / setting.path
    if not kept.is_file():
        say(f"audit.heads: {relative(str(kept))}: there is no such file; running processes write it")
        return KeptHeads()
    return KeptHeads(kept, read_heads(kept), configured=True)


def read_heads(file: Path) -> list[Head]:
    """
    The heads in a file, one JSON object per line.

    A last line that a crash has cut is left out: the next head that is written takes its place.
    """
    try:
        with file.open("rb") as stream:
            lines = stream.read(MOST_HEAD_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        raise CommandError(f"--head: {file}: there is no such file", Exit.NO_INPUT) from None
    heads: list[KeptHead] = []
    for number, line in enumerate(lines, 1):
        try:
            heads.append(msgspec.json.decode(line, type=KeptHead))
        except UNREADABLE as error:
            if line.endswith(b"\n"):
                text = f"--head: {file}:{number}: this line is no head: {error}"
                raise CommandError(text, Exit.MISMATCH) from None
    if not heads:
        raise CommandError(f"--head: {file} contains no head; `audit head` prints one", Exit.MISMATCH)
    return [Head(one.chain, one.sequence, one.hash) for one in heads]


def _hashes(heads: Sequence[Head]) -> dict[int, set[str]]:
    """The hashes that were kept of each event. Of a log that somebody went back in, an event has two."""
    hashes: dict[int, set[str]] = {}
    for one in heads:
        hashes.setdefault(one.sequence, set()).add(one.hash)
    return hashes


def _differs(found: str, hashes: Mapping[int, set[str]], sequence: int) -> bool:
    return bool(hashes.get(sequence, set()) - {found})


def _other_hash(sequence: int) -> Mismatch:
    return Mismatch(sequence, "the hash is not the one of the head")
