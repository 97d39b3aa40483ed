"""
The format of audit logs as files of JSON lines: writing, reading and verifying single lines.

A file begins with a header line: the chain's name and its head before the first event. Every other line is one event
with its number and its hash:

    {"chain":"5f…","format":1,"hash":"00…","sequence":0}
    {"event":{…},"hash":"9a…","sequence":1}

The event is stored byte for byte as it was hashed. A line is only accepted in exactly the form it is written in. Pure:
no file is opened.
"""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from reefknot.core.audit.chain import Head, Link, Mismatch, RetentionInForce
from reefknot.core.audit.chain import verify as verify_chain
from reefknot.core.audit.event import timestamp_ms
from reefknot.errors import NotJsonError

FORMAT = 1
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""Errors of the decoder; it raises one of its own for bytes that are not UTF-8."""


class EventIndex(Struct, frozen=True):
    """The fields by which an event is found."""

    event_type: str = ""
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None


class LogHeader(Struct, frozen=True):
    """The first line of a file: the chain, and its head before the first event of the file."""

    chain: str
    format: int
    hash: str
    sequence: int

    @property
    def head(self) -> Head:
        return Head(self.chain, self.sequence, self.hash)


class LogLine(Struct, frozen=True, omit_defaults=True):
    """The line of an event. `more` lines of its batch follow; `filed` is only set when the event says otherwise."""

    event: Raw
    hash: str
    sequence: int
    at: int | None = None
    filed: EventIndex | None = None
    more: int = 0

    @property
    def body(self) -> bytes:
        return bytes(self.event)


_encode = msgspec.json.Encoder().encode
_header = msgspec.json.Decoder(LogHeader).decode
_line = msgspec.json.Decoder(LogLine).decode
_filed = msgspec.json.Decoder(EventIndex).decode
_any = msgspec.json.Decoder(Raw).decode


def header_line(head: Head) -> bytes:
    """The first line of a file that continues the chain after `head`."""
    return _encode(LogHeader(head.chain, FORMAT, head.hash, head.sequence)) + b"\n"


def event_line(
    head: Head, body: bytes, *, at: int | None = None, filed: EventIndex | None = None, more: int = 0
) -> bytes:
    """The line of the event that brought the chain to `head`."""
    if b"\n" in body:
        raise NotJsonError("", "an event is one line")
    try:
        _any(body)
    except UNREADABLE as error:
        raise NotJsonError("", str(error)) from error
    apart = None if filed == index_of(body) else filed
    return _encode(LogLine(Raw(body), head.hash, head.sequence, at, apart, more)) + b"\n"


def index_of(body: bytes) -> EventIndex:
    """The index fields in the event's own body."""
    try:
        return _filed(body)
    except UNREADABLE:
        return EventIndex()


class _OwnFields(Struct, frozen=True):
    """The index fields and the time that a body says itself; `UNSET` for those it does not mention."""

    event_type: str | UnsetType = UNSET
    correlation_id: str | UnsetType | None = UNSET
    trace_id: str | UnsetType | None = UNSET
    work_id: str | UnsetType | None = UNSET
    timestamp: str | UnsetType = UNSET


_own = msgspec.json.Decoder(_OwnFields).decode
_NOTHING = _OwnFields()


def _own_fields(body: bytes) -> _OwnFields:
    try:
        return _own(body)
    except UNREADABLE:
        return _NOTHING


def wrong_index_field(body: bytes, filed: EventIndex, at: int | None = None) -> str | None:
    """
    The first index field that differs from the event's own, or `at` for the time; None when none does.

    A search by such a field would miss the event, or find one that does not belong there.
    """
    own_fields = _own_fields(body)
    for name in EventIndex.__struct_fields__:
        if getattr(own_fields, name) not in (UNSET, getattr(filed, name)):
            return name
    own = None if own_fields.timestamp is UNSET else timestamp_ms(own_fields.timestamp)
    return "time" if at is not None and own not in (None, at) else None


def time_of(line: LogLine) -> int | None:
    """The time of a line's event (ms UTC) by its own body; that of the line only where the body has none."""
    own_fields = _own_fields(line.body).timestamp
    own = None if own_fields is UNSET else timestamp_ms(own_fields)
    return line.at if own is None else own


def read_line(text: bytes) -> LogHeader | LogLine | None:
    """A line, given with its line break; None when it is not in this format to the byte."""
    decode = _header if text.startswith(b'{"chain":') else _line
    try:
        found = decode(text)
    except UNREADABLE:
        return None
    if isinstance(found, LogHeader) and found.format != FORMAT:
        return None
    return found if _encode(found) + b"\n" == text else None


def verify_lines(
    lines: Iterable[bytes], head: Head | None = None, *, in_force: RetentionInForce | None = None
) -> list[Mismatch]:
    """Every mismatch between these lines, of one file or consecutive files, and one chain that leads to `head`."""
    verifier = _LineVerifier(iter(lines))
    start = verifier.read_header()
    if start is None:
        return verifier.problems
    if head is not None and head.chain != start.chain:
        return [Mismatch(0, f"this is chain {start.chain}, the head is of chain {head.chain}")]
    return verify_chain(verifier.links(start), head or start, start=start, in_force=in_force) + verifier.problems


class _LineVerifier:
    """Reads lines as links of a chain, and collects what is wrong with them as lines."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self.problems: list[Mismatch] = []

    def read_header(self) -> Head | None:
        first = read_line(next(self._lines, b""))
        if isinstance(first, LogHeader):
            return first.head
        self.problems.append(Mismatch(0, "the first line does not open a log of format 1"))
        return None

    def links(self, at: Head) -> Iterator[Link]:
        more = 0
        for text in self._lines:
            found = read_line(text)
            if isinstance(found, LogLine):
                self._check(found, more)
                more = found.more
                at = Head(at.chain, found.sequence, found.hash)
                yield Link(found.sequence, found.hash, found.body)
            elif found is None:
                self.problems.append(Mismatch(at.sequence + 1, "a line that is not in this format, or was changed"))
            elif found.head != at:
                self.problems.append(Mismatch(at.sequence + 1, "the next file does not go on from here"))
        if more:
            self.problems.append(Mismatch(at.sequence + 1, "cut off in the middle of a batch"))

    def _check(self, line: LogLine, more: int) -> None:
        if more and line.more != more - 1:
            self.problems.append(Mismatch(line.sequence, "the line does not belong to the batch before it"))
        wrong = None if line.filed is None else wrong_index_field(line.body, line.filed)
        if wrong is not None:
            self.problems.append(Mismatch(line.sequence, f"the event is filed under another {wrong} than its own"))
