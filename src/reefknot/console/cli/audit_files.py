"""
Audited events in files: an exported file or a JSON-lines log as a source of events, and the forms of an export.

An export has the chains of a log one after the other, each with its header line, and its head file has a head for each.
A file is read as it is: a change in it shows in the verification or the replay.
"""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from pathlib import Path
from types import EllipsisType
from typing import Any

import msgspec

from reefknot.audit.jsonlines.writer import files_of, lines_of
from reefknot.audit.model.chain import (
    LOG_FORMAT,
    UNREADABLE,
    EventIndex,
    Head,
    LogHeader,
    LogLine,
    Mismatch,
    anchor_in,
    event_line,
    header_line,
    read_line,
    verify_lines,
)
from reefknot.audit.model.event import EVENT_CODES, FOUND_BY_SUBMISSION, tenant_hash
from reefknot.audit.port import AuditLog, AuditQuery, ChainReport, KeptEntry, MultiChainLog, ReadableLog, pages_of
from reefknot.audit.verification import (
    KeptHeads,
    OneChain,
    StoreSource,
    configured_heads,
    differs,
    hashes_of,
    in_force_with,
    index_in_store,
    other_hash,
    read_heads,
    store_source,
)
from reefknot.console.cli.app import CommandError, Exit
from reefknot.console.cli.options import StoreFlags, load
from reefknot.console.cli.output import Advance, progress, relative, say
from reefknot.console.cli.store import StoreAddress, address_of, opened
from reefknot.console.operations.audit import EventFilter, NumberedBody
from reefknot.console.words.events import event_fields
from reefknot.errors import ConfigurationError, NotJsonError, OperationError
from reefknot.runtime.log import printable
from reefknot.stores.port.engines import has_file, url_of_file

JSONL, CSV = "jsonl", "csv"
EVERY_EVENT = EventFilter()


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

    @property
    def size(self) -> int:
        """The number of bytes that a verification reads: it reads the files twice."""
        return 2 * self._size

    async def events(self, label: str, wanted: EventFilter = EVERY_EVENT) -> AsyncIterator[NumberedBody]:
        """The events that the filter accepts, and every damaged line, because its event is unknown."""
        self._require_header()
        submissions = SubmittedIds()
        with progress(label, self._size) as advance:
            for text in self._lines(advance):
                found = read_line(text)
                if isinstance(found, LogLine):
                    if wanted.accepts(found.body, submissions.index_of(found.body, found.filed)):
                        yield found.sequence, found.body
                elif found is None:  # a damaged line has no number
                    yield 0, text

    def _require_header(self) -> None:
        """Refuse a file without an audit log's header: replaying it would "succeed" with 0 decisions."""
        first = next(lines_of(self._files), b"")
        if not isinstance(read_line(first), LogHeader):
            found = printable(first[:40].decode("utf-8", "replace").rstrip("\n")) or "nothing"
            expected = '{"chain":"…","format":2,"hash":"…","sequence":0}, as `reefknot audit export` writes it'
            message = f"{self._files[0]}:1: this is not an audit log: expected {expected}; found {found!r}"
            raise CommandError(message, Exit.MISMATCH)

    async def heads(self) -> list[Head]:
        """The last head of each chain in the file."""
        self._require_header()
        with progress("reading", self._size) as advance:
            return [self._read_hashes(lines, KeptHeads(), refuse_damaged=True)[0] for lines in self._chains(advance)]

    async def reports(self, kept: KeptHeads, advance: Advance) -> list[ChainReport]:
        """The verification of every chain in the file, compared with the heads that were kept of it."""
        anchors: dict[str, list[bytes]] = {}
        ends = [self._read_hashes(lines, kept, anchors) for lines in self._chains(advance)] or [(Head("?"), [])]
        is_one = len(ends) == 1
        found = []
        sections = self._chains(advance)
        for end, others in ends:
            lines: Iterator[bytes] = next(sections, iter(()))
            heads = kept.of(end.chain if kept.configured else "") if is_one else kept.heads_of(end.chain)
            in_force = in_force_with(self._retention, heads[0] if heads else None, self._most_files)
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
        end, mismatches, kept_hashes = Head("?"), [], hashes_of([])
        for text in lines:
            found = read_line(text)
            if isinstance(found, LogHeader):
                end, kept_hashes = found.head, hashes_of(kept.heads_of(found.chain))
            elif found is not None:
                end = Head(end.chain, found.sequence, found.hash)
                if differs(found.hash, kept_hashes, found.sequence):
                    mismatches.append(other_hash(found.sequence))
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


def audited_store(file: Path | None, options: StoreFlags) -> StoreAddress | None:
    """The store whose log is meant; None for a file that is not a store. A file that is one is opened as one."""
    if file is not None:
        if options.engine is not None:
            raise CommandError("name a file or --engine, not both")
        engine = _store_url(file)
        if engine is None:
            return None
        from dataclasses import replace

        options = replace(options, engine=engine)
    return address_of(options, looks=True)


@asynccontextmanager
async def audit_source(
    file: Path | None, options: StoreFlags, address: StoreAddress | None = None
) -> AsyncIterator[AuditSource]:
    """The file when one is named, else the store, which is found when no `address` is given."""
    address = audited_store(file, options) if address is None else address
    if address is None:
        assert file is not None
        yield FileSource(file, *_retention_of_file(options.config))
        return
    async with opened(address) as store:
        configured = None if address.settings is None else address.settings.configuration.audit
        file = address.path if address.has_file else None
        yield await store_source(store.audit, address.shown, configured, file)


async def events_of(source: AuditSource, label: str, wanted: EventFilter = EVERY_EVENT) -> AsyncIterator[NumberedBody]:
    """The events of a source that the filter chooses, with a progress bar."""
    if isinstance(source, FileSource):
        async for one in source.events(label, wanted):
            yield one
        return
    with progress(label, source.head.sequence) as advance:
        async for page in pages_of(source.log, wanted.query, until=source.head.sequence):
            for kept in filter(wanted.matches, page):
                yield kept.sequence, kept.entry.body
            advance(len(page))


def _retention_of_file(config: str | None) -> tuple[float | None, int | None]:
    """
    The configured retention of events, and the number of files, for a file that may come from anywhere.

    Without a setting any age is accepted: the retention in force where the file was written is unknown here.
    """
    try:
        audit = load(config).configuration.audit
    except ConfigurationError:
        if config is not None:
            raise
        return 0.0, None
    retention = audit.retention_seconds if "retention_seconds" in audit.written else 0.0
    return retention, None if audit.jsonl is None else audit.jsonl.max_files


def _store_url(file: Path) -> str | None:
    """The URL of the store that this file is; None when it is no database."""
    if has_file(str(file)):
        return str(file)
    return url_of_file(file) if file.is_file() else None


def heads_for(file: Path | None, head: Path | None, address: StoreAddress | None) -> KeptHeads:
    """
    The heads to compare with.

    They are in the named file, else in the one that an export wrote with its file, else in that of the setting
    `audit.heads`, when the log is a store's own.
    """
    if head is not None:
        return KeptHeads(head, _read_heads(head))
    if address is None:
        assert file is not None
        beside = head_file_of(file)
        return KeptHeads(beside, _read_heads(beside), of_export=True) if beside.is_file() else KeptHeads()
    with _as_mismatch():
        kept, missing = configured_heads(address.settings)
    if missing is not None:
        say(f"audit.heads: {relative(str(missing))}: there is no such file; running processes write it")
    return kept


def _read_heads(file: Path) -> list[Head]:
    with _as_mismatch():
        try:
            return read_heads(file)
        except FileNotFoundError:
            raise CommandError(f"--head: {file}: there is no such file", Exit.NO_INPUT) from None


@contextmanager
def _as_mismatch() -> Iterator[None]:
    """Refuse a damaged file of heads like a log that does not fit its head."""
    try:
        yield
    except OperationError as error:
        raise CommandError(f"--head: {error}", Exit.MISMATCH) from None


# ---- export ----------------------------------------------------------------------------------------------------------


def head_file_of(file: Path) -> Path:
    """The file in which an export writes its head."""
    return file.with_name(f"{file.name}.head.json")


MOST_SUBMISSIONS = 100_000
"""Submissions whose ids an export remembers; events of an older one are written with all their ids."""


class _Subject(EventIndex, frozen=True):
    """The fields by which an event is found, and the tenant that its work belongs to, by its name or its hash."""

    tenant_id: str | None = None
    tenant_hash: str | None = None


_subject = msgspec.json.Decoder(_Subject).decode


class SubmittedIds:
    """
    The correlation and trace of submitted work, in the order of an exported file.

    Later events of that work need not repeat them there: a reader knows them from `submitted`, as this does.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], _Subject] = {}

    def index_of(self, body: bytes, filed: EventIndex | None = None) -> EventIndex:
        """The fields that an event is found by: as `filed`, else its own, with the ids of its work's submission."""
        try:
            own = _subject(body)
        except UNREADABLE:
            return filed or EventIndex()
        work = own.work_id or "", own.tenant_hash or tenant_hash(own.tenant_id or "")
        if own.event_type == "submitted":
            self._ids.pop(work, None)
            self._ids[work] = own
            if len(self._ids) > MOST_SUBMISSIONS:
                del self._ids[next(iter(self._ids))]
        ids = own.correlation_id, own.trace_id
        if own.event_type in FOUND_BY_SUBMISSION and ids == (None, None) and work in self._ids:
            ids = self._ids[work].correlation_id, self._ids[work].trace_id
        return filed or EventIndex(own.event_type, *ids, own.work_id)


async def export_pages(
    log: AuditLog, heads: Sequence[Head], wanted: EventFilter, form: str, *, end: int
) -> AsyncIterator[tuple[bytes, int, int]]:
    """The text of an export, page by page, with the number of its events and of those that were looked at."""
    if form == JSONL and wanted.is_everything:
        submissions = SubmittedIds()
        for head in heads:  # of several chains, one after the other
            heading = 1  # the first line is no event
            chain = OneChain(log, head.chain) if isinstance(log, MultiChainLog) else log
            async for lines in exported(chain, head, submissions):
                number = lines.count(b"\n") - heading
                heading = 0
                yield lines, number, number
        return
    if form == CSV:
        yield csv_rows([], heading=True), 0, 0
    async for page in pages_of(log, wanted.query, until=end):
        found = [one for one in page if wanted.matches(one)]
        yield csv_rows(found) if form == CSV else b"".join(map(json_line, found)), len(found), len(page)


async def exported(log: ReadableLog, head: Head, submissions: SubmittedIds | None = None) -> AsyncIterator[bytes]:
    """The lines of an export, its header first. `submissions` are those of the chains before it in the file."""
    start: Head | None = None
    submissions = submissions or SubmittedIds()
    async for page in pages_of(log, until=head.sequence):
        if start is None:
            start = await _start(log, head, page[0].sequence)
            yield header_line(start)
        yield b"".join(_exported_line(head.chain, one, submissions) for one in page)
    if start is None:
        yield header_line(head)


def _exported_line(chain: str, one: KeptEntry, submissions: SubmittedIds) -> bytes:
    filed = index_in_store(one)
    is_known = submissions.index_of(one.entry.body) == filed
    try:
        return event_line(Head(chain, one.sequence, one.hash), one.entry.body, filed=None if is_known else filed)
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


def json_line(one: KeptEntry) -> bytes:
    """The line of an event outside of its chain's file; a body that was changed is shown as text."""
    head = Head("", one.sequence, one.hash)
    try:
        return event_line(head, one.entry.body, form=LOG_FORMAT)
    except NotJsonError:
        return event_line(head, msgspec.json.encode(one.entry.body.decode("utf-8", "replace")), form=LOG_FORMAT)


# ---- CSV -------------------------------------------------------------------------------------------------------------

CSV_COLUMNS = (
    *("sequence", "timestamp", "event_type", "event_code", "tenant_id", "work_id", "correlation_id", "trace_id"),
    *("actor", "os_user", "host", "process", "operation", "action", "status", "reason", "attempts", "duration_ms"),
    *("worker_id", "idempotency_key", "hash", "event"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_rows(events: list[KeptEntry], *, heading: bool = False) -> bytes:
    """The events as rows, the whole event as JSON in the last column."""
    text = io.StringIO()
    writer = csv.writer(text)
    if heading:
        writer.writerow(CSV_COLUMNS)
    for one in events:
        fields = event_fields(one.entry.body)
        fields = {"event_code": EVENT_CODES.get(one.entry.event_type), "event_type": one.entry.event_type} | fields
        fields["attempts"] = next(
            (fields[name] for name in ("attempts", "total_attempts", "attempt_number") if name in fields), None
        )
        fields |= {"sequence": one.sequence, "hash": one.hash, "event": one.entry.body.decode("utf-8", "replace")}
        writer.writerow([_cell(fields.get(name)) for name in CSV_COLUMNS])
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> str | int | float:
    """A value as a spreadsheet may have it: text that would be read as a formula begins with an apostrophe."""
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
