"""
Events as lines of text.

A file begins with an opening line: the chain's name and the place before its first event. Every other line is one event
at its place:

    {"chain":"5f…","format":1,"hash":"00…","sequence":0}
    {"event":{…},"hash":"9a…","sequence":1}

The event stands there byte for byte as it was hashed. A line is only accepted in exactly the form it is written in.
Nothing here opens a file.
"""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Raw, Struct

from reefknot.core.audit.chain import Head, Link, Mismatch
from reefknot.core.audit.chain import verify as verify_chain
from reefknot.errors import NotJsonError

FORMAT = 1
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What the decoder raises: what is not UTF-8 is an error of its own to it."""


class Filed(Struct, frozen=True):
    """What an event is found by."""

    event_type: str = ""
    correlation_id: str | None = None
    trace_id: str | None = None
    work_id: str | None = None


class Opening(Struct, frozen=True):
    """The first line of a file: which chain it is, and where it stood before."""

    chain: str
    format: int
    hash: str
    sequence: int

    @property
    def head(self) -> Head:
        return Head(self.chain, self.sequence, self.hash)


class Line(Struct, frozen=True, omit_defaults=True):
    """One event. `more` lines of the same batch follow; `filed` is only there when the event itself does not say it."""

    event: Raw
    hash: str
    sequence: int
    at: int | None = None
    filed: Filed | None = None
    more: int = 0

    @property
    def body(self) -> bytes:
        return bytes(self.event)


_encode = msgspec.json.Encoder().encode
_opening = msgspec.json.Decoder(Opening).decode
_line = msgspec.json.Decoder(Line).decode
_filed = msgspec.json.Decoder(Filed).decode
_any = msgspec.json.Decoder(Raw).decode


def opening_of(head: Head) -> bytes:
    """The first line of a file that goes on from here."""
    return _encode(Opening(head.chain, FORMAT, head.hash, head.sequence)) + b"\n"


def line_of(head: Head, body: bytes, *, at: int | None = None, filed: Filed | None = None, more: int = 0) -> bytes:
    """The line of the event that brought the chain to `head`."""
    if b"\n" in body:
        raise NotJsonError("", "an event is one line")
    try:
        _any(body)
    except UNREADABLE as error:
        raise NotJsonError("", str(error)) from error
    return (
        _encode(Line(Raw(body), head.hash, head.sequence, at, None if filed == filed_in(body) else filed, more)) + b"\n"
    )


def filed_in(body: bytes) -> Filed:
    """What the event itself says it is found by."""
    try:
        return _filed(body)
    except UNREADABLE:
        return Filed()


def misfiled(body: bytes, filed: Filed) -> str | None:
    """The field by which an event would be looked for in vain, None when there is none."""
    own = filed_in(body)
    for name in Filed.__struct_fields__:
        said = getattr(own, name)
        if said and said != getattr(filed, name):
            return name
    return None


def read_line(text: bytes) -> Opening | Line | None:
    """A line with its line break, None when it is not one of ours to the byte."""
    decode = _opening if text.startswith(b'{"chain":') else _line
    try:
        found = decode(text)
    except UNREADABLE:
        return None
    if isinstance(found, Opening) and found.format != FORMAT:
        return None
    return found if _encode(found) + b"\n" == text else None


def verify_lines(lines: Iterable[bytes], head: Head | None = None) -> list[Mismatch]:
    """Every place where a file, or files one after the other, is not one whole chain; and does it lead to `head`?"""
    walk = _Walk(iter(lines))
    start = walk.opened()
    if start is None:
        return walk.problems
    if head is not None and head.chain != start.chain:
        return [Mismatch(0, f"this is chain {start.chain}, the head is of chain {head.chain}")]
    return verify_chain(walk.links(start), head or start, start=start) + walk.problems


class _Walk:
    """One pass over lines, and what is wrong with them as lines."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self.problems: list[Mismatch] = []

    def opened(self) -> Head | None:
        first = read_line(next(self._lines, b""))
        if isinstance(first, Opening):
            return first.head
        self.problems.append(Mismatch(0, "the first line does not open a log of format 1"))
        return None

    def links(self, at: Head) -> Iterator[Link]:
        more = 0
        for text in self._lines:
            found = read_line(text)
            if isinstance(found, Line):
                self._check(found, more)
                more = found.more
                at = Head(at.chain, found.sequence, found.hash)
                yield Link(found.sequence, found.hash, found.body)
            elif found is None:
                self.problems.append(Mismatch(at.sequence + 1, "a line that is none of ours, or was changed"))
            elif found.head != at:
                self.problems.append(Mismatch(at.sequence + 1, "the next file does not go on from here"))
        if more:
            self.problems.append(Mismatch(at.sequence + 1, "cut off in the middle of a batch"))

    def _check(self, line: Line, more: int) -> None:
        if more and line.more != more - 1:
            self.problems.append(Mismatch(line.sequence, "it does not belong to the batch before it"))
        wrong = None if line.filed is None else misfiled(line.body, line.filed)
        if wrong is not None:
            self.problems.append(Mismatch(line.sequence, f"it is filed under another {wrong} than its own"))
