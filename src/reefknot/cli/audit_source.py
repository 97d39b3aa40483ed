"""
Where recorded events are read from: a store, an exported file, or the files of a JSON-lines log.

Pages are bounded, so a log of any length needs the same memory. A file is read as it is: what was changed in it shows
in what reads it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.output import Advance, printable, progress
from reefknot.cli.stores import opened, place
from reefknot.core.audit.chain import Head, Mismatch, anchor_in
from reefknot.core.audit.lines import (
    UNREADABLE,
    EventIndex,
    LogHeader,
    LogLine,
    event_line,
    header_line,
    read_line,
    verify_lines,
    wrong_index_field,
)
from reefknot.engines.jsonlines.writer import files_of, lines_of
from reefknot.errors import NotJsonError

if TYPE_CHECKING:
    from reefknot.ports.audit_log import AuditLog, AuditQuery, KeptEntry

PAGE = 1000
MOST_HEAD_BYTES = 4096
SQLITE = b"SQLite format 3\x00"
"""How a database begins."""


class Recorded(Struct, frozen=True):
    """One event and its number, 0 when it has none."""

    sequence: int
    body: bytes


class Page(Struct, frozen=True):
    """Some events, and how far they bring a progress bar."""

    events: list[Recorded]
    size: int


class Evidence(Protocol):
    """Something that holds events."""

    name: str
    total: int

    def pages(self) -> AsyncIterator[Page]: ...

    async def verify(self, head: Head | None) -> tuple[Head, list[Mismatch]]:
        """Where the chain stands, and what is wrong with it."""


class OfStore:
    """The log of a store, up to where it stood when this was made."""

    def __init__(self, log: AuditLog, head: Head, name: str) -> None:
        self.log = log
        self.head = head
        self.name = name
        self.total = head.sequence

    async def pages(self) -> AsyncIterator[Page]:
        async for kept in pages_of(self.log, until=self.head.sequence):
            yield Page([Recorded(one.sequence, one.entry.body) for one in kept], len(kept))

    async def verify(self, head: Head | None) -> tuple[Head, list[Mismatch]]:
        if head is not None and head.chain != self.head.chain:
            return self.head, [Mismatch(0, f"this is chain {self.head.chain}, the head is of chain {head.chain}")]
        with progress("verifying", 2 * self.total) as advance:
            found = await self.log.verify(head, progress=advance)
            async for kept in pages_of(self.log, until=self.head.sequence):
                found += filter(None, map(_misfiled, kept))
                advance(len(kept))
        return self.head, found


class OfFiles:
    """An exported file, or the files of a JSON-lines log."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CommandError(f"{path}: there is no such file", Exit.UNREACHABLE)
        self.name = str(path)
        self._files = files_of(path)
        self.total = sum(file.stat().st_size for file in self._files)

    async def pages(self) -> AsyncIterator[Page]:
        self._refuse_no_log()
        lines = lines_of(self._files)
        while page := list(islice(lines, PAGE)):
            yield Page([one for text in page if (one := _recorded(text)) is not None], sum(map(len, page)))

    def _refuse_no_log(self) -> None:
        """What is no log has nothing in it that could come out differently."""
        first = next(lines_of(self._files), b"")
        if not isinstance(read_line(first), LogHeader):
            began = printable(first[:40].decode("utf-8", "replace").rstrip("\n")) or "nothing"
            expected = '{"chain":"…","format":1,"hash":"…","sequence":0}, as `reefknot audit export` writes it'
            message = f"{self._files[0]}:1: this is no audit log: expected {expected}; found {began!r}"
            raise CommandError(message, Exit.MISMATCH)

    async def verify(self, head: Head | None) -> tuple[Head, list[Mismatch]]:
        with progress("verifying", 2 * self.total) as advance:
            return self._end(advance), verify_lines(_told(lines_of(self._files), advance), head)

    def _end(self, advance: Advance) -> Head:
        end = Head("?")
        for text in _told(lines_of(self._files), advance):
            found = read_line(text)
            if isinstance(found, LogHeader):
                end = found.head
            elif found is not None:
                end = Head(end.chain, found.sequence, found.hash)
        return end


@asynccontextmanager
async def evidence(file: Path | None, engine: str | None, config: str | None) -> AsyncIterator[Evidence]:
    """The file when one is named, else the store. A file that is a store is opened as one."""
    if file is not None:
        if engine is not None:
            raise CommandError("name a file or --engine, not both")
        engine = _store_at(file)
        if engine is None:
            yield OfFiles(file)
            return
    where = place(engine, config)
    async with opened(where) as store:
        yield OfStore(store.audit, await store.audit.head(), where.url)


def _store_at(file: Path) -> str | None:
    """The address of the store that this file is; None of one that is no database."""
    if str(file).startswith("sqlite:"):
        return str(file)
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return f"sqlite:{file.absolute()}" if stream.read(len(SQLITE)) == SQLITE else None


async def pages_of(
    log: AuditLog, query: AuditQuery | None = None, *, until: int | None = None
) -> AsyncIterator[list[KeptEntry]]:
    """What the query finds, page by page; `until` is the last number that is wanted."""
    from reefknot.ports.audit_log import AuditQuery

    query = msgspec.structs.replace(query or AuditQuery(), limit=PAGE)
    while True:
        page = await log.read(query)
        wanted = [one for one in page if until is None or one.sequence <= until]
        if wanted:
            yield wanted
        if len(page) < PAGE or len(wanted) < len(page):
            return
        query = msgspec.structs.replace(query, after=page[-1].sequence)


async def exported(log: AuditLog, head: Head) -> AsyncIterator[bytes]:
    """The lines of an export, its opening first."""
    start: Head | None = None
    async for page in pages_of(log, until=head.sequence):
        if start is None:
            start = await _start(log, head, page[0].sequence)
            yield header_line(start)
        yield b"".join(_exported(head.chain, one) for one in page)
    if start is None:
        yield header_line(head)


def _exported(chain: str, one: KeptEntry) -> bytes:
    try:
        return event_line(Head(chain, one.sequence, one.hash), one.entry.body, filed=_filed(one))
    except NotJsonError as error:
        raise CommandError(f"event {one.sequence} was changed ({error}); see `audit verify`", Exit.MISMATCH) from error


async def _start(log: AuditLog, head: Head, first: int) -> Head:
    """The place before the first event: the beginning, or the one that an anchor event vouches for."""
    from reefknot.ports.audit_log import AuditQuery

    start = Head(head.chain)
    if first > 1:
        async for page in pages_of(log, AuditQuery(event_type="anchor")):
            for one in page:
                found = anchor_in(one.entry.body)
                if found is not None and found.sequence == first - 1:
                    start = found
    return start


def _told(lines: Iterator[bytes], advance: Advance) -> Iterator[bytes]:
    """The lines, and how far they bring a progress bar."""
    for line in lines:
        advance(len(line))
        yield line


def head_in(file: Path) -> Head:
    """A head that was exported earlier."""
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(MOST_HEAD_BYTES), type=Head)
    except FileNotFoundError:
        raise CommandError(f"--head: {file}: there is no such file", Exit.UNREACHABLE) from None
    except UNREADABLE as error:
        raise CommandError(f"--head: {file} holds no head: {error}", Exit.MISMATCH) from None


def head_beside(file: Path) -> Path:
    """Where an export puts its head."""
    return file.with_name(f"{file.name}.head.json")


def _recorded(text: bytes) -> Recorded | None:
    found = read_line(text)
    if found is None:
        return Recorded(0, text)
    return Recorded(found.sequence, found.body) if isinstance(found, LogLine) else None


def _filed(one: KeptEntry) -> EventIndex:
    entry = one.entry
    return EventIndex(entry.event_type, entry.correlation_id, entry.trace_id, entry.work_id)


def _misfiled(one: KeptEntry) -> Mismatch | None:
    wrong = wrong_index_field(one.entry.body, _filed(one))
    return None if wrong is None else Mismatch(one.sequence, f"the event is filed under another {wrong} than its own")


def shown_lines(bodies: list[bytes]) -> Iterator[str]:
    """JSON as it may be shown: what steers a terminal is an escape."""
    from json import dumps

    for body in bodies:
        text = body.decode("utf-8", "replace").rstrip("\n")
        if not text.isprintable():
            text = "".join(char if char.isprintable() else dumps(char)[1:-1] for char in text)
        yield text
