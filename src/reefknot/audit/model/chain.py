"""
The hash chain over audit events: `link` extends it, `verify` finds every place where it was changed.

Each link's hash covers its chain's name, its number, the hash before it and its body, so an edit, a swap, an insertion
or a removal inside shows. A chain alone does not show that its end was cut off: compare it with a head that was
exported earlier.

A chain whose beginning was removed by retention begins at an anchor, and one of its own events has to confirm that. The
event carries the last removed event, whose hash the rest of the chain continues. So the age of what was removed is
known as surely as the rest, and can be compared with the retention in force: a removal that retention did not ask for
shows, however its anchor was written.

A chain is also written as files of JSON lines. A file begins with a header line: the chain's name, the format of the
lines, and the head before the first event. Every other line is one event with its hash and its number. Logs that are
appended to have format 1; exports have format 2, whose hashes are base64url and shorter:

    {"chain":"5f…","format":1,"hash":"00…","sequence":0}        {"chain":"5f…","format":2,"hash":"00…","sequence":0}
    {"event":{…},"hash":"9a41…","sequence":1}                   {"event":{…},"hash":"mkEc…","seq":1}

The event is stored byte for byte as it was hashed. A line is only accepted in exactly the form it is written in. Pure:
nothing is stored or read, and no file is opened.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from reefknot.audit.model.event import (
    BRIEF_DEFAULTS,
    FOUND_BY_SUBMISSION,
    IDS_OF_SUBMISSION,
    Anchor,
    decode,
    encode,
    timestamp,
    timestamp_ms,
)
from reefknot.errors import NotJsonError

GENESIS = "0" * 64
"""The hash before the first link."""
ANCHOR = "anchor"
"""The type of the event that retention writes."""
MOST_FOUND = 10_000
"""Mismatches that are listed one by one; the rest is counted."""


class Head(Struct, frozen=True, gc=False):
    """The last link of a chain: enough to prove later what the chain held at this point."""

    chain: str
    sequence: int = 0
    hash: str = GENESIS


class KeptHead(Head, frozen=True):
    """A line of a file of heads: a head, and when it was written; a head that was printed has no time."""

    at: str = ""


class Link(Struct, frozen=True):
    """A recorded body with its number and its hash."""

    sequence: int
    hash: str
    body: bytes


class Mismatch(Struct, frozen=True):
    """A place where a chain is broken, and how."""

    sequence: int
    problem: str


def link(head: Head, body: bytes) -> tuple[Head, str]:
    """The head after appending this body, and the body's hash."""
    sequence = head.sequence + 1
    hashed = sha256(b"%s\n%d\n%s\n%s" % (head.chain.encode(), sequence, head.hash.encode(), body)).hexdigest()
    return Head(head.chain, sequence, hashed), hashed


class Removal(Struct, frozen=True):
    """A step of retention: by which rule, how many links, and the last of them with the hash before it, if known."""

    rule: str = ""
    count: int = 0
    previous: str = ""
    last: bytes = b""


class RetentionInForce(Struct, frozen=True):
    """
    The retention that a verification compares anchors with: `seconds` of events, None for ever, as of `now` (ms UTC).

    `files` is the number of files that a JSON-lines log keeps; a log with that rule removes by size, not by age. With
    `needs_proof` an anchor without its last removed event, as earlier versions wrote them, is a mismatch.
    """

    seconds: float | None
    now: int
    files: int | None = None
    needs_proof: bool = False


def file_rule(files: int) -> str:
    """The rule of an anchor in a JSON-lines log that keeps this many files."""
    return f"max_files {files}"


_UNKNOWN = Removal()


def anchor_body(anchor: Head, at: int, removal: Removal = _UNKNOWN) -> bytes:
    """The event that says where the chain begins after retention removed the links before. `at` is ms UTC."""
    return encode(
        Anchor(
            timestamp=timestamp(at / 1000),
            chain=anchor.chain,
            sequence=anchor.sequence,
            hash=anchor.hash,
            removed=anchor.sequence,
            removed_now=removal.count,
            rule=removal.rule,
            previous=removal.previous,
            last=removal.last.decode("utf-8", "replace"),
        )
    )


def anchor_in(body: bytes) -> Head | None:
    """The head that an anchor event confirms; None when the body is another event."""
    event = _anchor_event(body)
    return None if event is None else Head(event.chain, event.sequence, event.hash)


def _anchor_event(body: bytes) -> Anchor | None:
    if b'"event_type":"anchor"' not in body:
        return None
    try:
        event = decode(body)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, Anchor) else None


def verify(
    links: Iterable[Link],
    head: Head,
    *,
    start: Head | None = None,
    in_force: RetentionInForce | None = None,
    anchors: Iterable[bytes] = (),
) -> list[Mismatch]:
    """
    Every mismatch between these links and a chain from `start` (the beginning, or an anchor) to `head`.

    `anchors` are anchor events of this chain that were written to other chains. After a mismatch verification goes on
    from what the link itself claims, so one edit is one finding, not a thousand.
    """
    verifier = ChainVerifier(start or Head(head.chain), head, in_force=in_force)
    for body in anchors:
        verifier.confirm(body)
    verifier.add(links)
    return verifier.result()


class ChainVerifier:
    """
    Verifies a chain page by page, so that a chain of any length needs the same memory.

    It compares the chain with every head it is given. Beyond the first ten thousand mismatches it only counts.
    """

    def __init__(self, start: Head, *heads: Head, in_force: RetentionInForce | None = None) -> None:
        self._start = start
        self._heads = list(heads)
        self._in_force = in_force
        self._at = start
        self._is_whole = start == Head(start.chain)
        self._anchor: Anchor | None = None
        """The newest anchor that confirms the start."""
        self._removed: int | None = None
        """The count of removed events in the last anchor."""
        self._is_counted = True
        """Whether every anchor of this chain is an event of it."""
        self._met: set[int] = set()
        self._found: list[Mismatch] = []
        self._more = 0

    @property
    def sequence(self) -> int:
        """The number of the last link that was added."""
        return self._at.sequence

    def add(self, links: Iterable[Link]) -> None:
        """Verify the next links."""
        wanted = {head.sequence for head in self._heads}
        for item in links:
            if item.sequence != self._at.sequence + 1:
                self._mismatch(item.sequence, f"expected number {self._at.sequence + 1}")
                self._at = Head(self._at.chain, item.sequence - 1, self._at.hash)
            self._at, hashed = link(self._at, item.body)
            if hashed != item.hash:
                self._mismatch(item.sequence, "the hash does not fit the body and its place")
                self._at = Head(self._at.chain, item.sequence, item.hash)
            if item.sequence in wanted:
                self._compare_with_heads_here()
            event = _anchor_event(item.body)
            if event is not None and event.chain == self._at.chain:
                self._add_anchor(item.sequence, event)

    def confirm(self, body: bytes) -> None:
        """
        Take an anchor of this chain that is an event of another one.

        Where several processes write a log, each its own chain, the one that removes events writes it into its own.
        Then the anchors in this chain do not continue each other's counts.
        """
        event = _anchor_event(body)
        if event is not None and event.chain == self._at.chain:
            self._is_counted = False
            self._note_start(event)

    def _add_anchor(self, sequence: int, event: Anchor) -> None:
        """Check that an anchor continues the count of the one before it, and remember it."""
        before = self._removed
        # An anchor of an earlier version has no rule and no count; a crash may write the same one twice.
        is_apart = not event.rule or before is None or not self._is_counted
        is_counted = is_apart or event.removed - (before or 0) in (0, event.removed_now)
        if event.removed != event.sequence or not is_counted:
            self._mismatch(sequence, "the anchor does not continue the count of removed events")
        self._removed = event.removed
        self._note_start(event)

    def _note_start(self, event: Anchor) -> None:
        """Remember the anchor that confirms the start."""
        if Head(event.chain, event.sequence, event.hash) == self._start:
            self._anchor = event

    def resume_from(self, anchor: Head, head: Head) -> None:
        """Continue at `anchor`, after retention removed the links up to there; the chain's head was `head` then."""
        self._start = self._at = anchor
        self._is_whole, self._anchor, self._removed = False, None, None
        self._heads[0] = head

    def result(self) -> list[Mismatch]:
        """All mismatches, after the last link."""
        if not self._is_whole:
            problem = self._removal_problem()
            if problem:
                self._mismatch(self._start.sequence + 1, problem)
        for head in self._heads:
            if head.sequence not in self._met:
                self._compare_with_unmet(head)
        if self._more:
            return [*self._found, Mismatch(self._at.sequence, f"and {self._more} more")]
        return self._found

    def _removal_problem(self) -> str:
        """The problem with the removal of the links before the start, by its anchor; nothing when it is fine."""
        anchor, start, in_force = self._anchor, self._start, self._in_force
        if anchor is None:
            return "the links before are gone, and no anchor event says so"
        body = anchor.last.encode()
        is_proven = link(Head(start.chain, start.sequence - 1, anchor.previous), body)[0] == start
        if anchor.last and not is_proven:
            return "the last removed event that the anchor shows is not the one that was there"
        if in_force is None or anchor.rule == file_rule(in_force.files or 0):
            return ""
        if in_force.seconds is None:
            return "the links before are gone, and the retention in force keeps events for ever"
        if not is_proven:
            return "the anchor does not show what was removed, so its age is not known" if in_force.needs_proof else ""
        return _too_young(body, in_force.now, in_force.seconds)

    def _compare_with_heads_here(self) -> None:
        self._met.add(self._at.sequence)
        for head in self._heads:
            if head.sequence == self._at.sequence and head.hash != self._at.hash:
                self._mismatch(head.sequence, "the hash is not the one of the head")

    def _compare_with_unmet(self, head: Head) -> None:
        """Compare with a head whose number no link had: it is at the start, before it, or behind the end."""
        start = self._start
        if self._at.sequence < head.sequence:
            self._mismatch(self._at.sequence + 1, f"cut off: the head is at {head.sequence}")
        elif head.sequence < start.sequence:
            problem = f"the head cannot be compared: everything up to {start.sequence} was removed after it"
            self._mismatch(head.sequence, problem)
        elif head.sequence == start.sequence and head.hash != start.hash:
            self._mismatch(head.sequence, "the hash is not the one of the head")

    def _mismatch(self, sequence: int, problem: str) -> None:
        found = Mismatch(sequence, problem)
        if len(self._found) >= MOST_FOUND:
            self._more += 1
        elif found not in self._found[-1:]:  # two heads may find the same
            self._found.append(found)


def _too_young(body: bytes, now: int, seconds: float) -> str:
    """The problem of an event that was removed before its retention had ended; nothing when it was old enough."""
    try:
        written = str(msgspec.json.decode(body)["timestamp"])
    except (*UNREADABLE, TypeError, KeyError):
        return ""  # not an event of ours: its age is not known
    at = timestamp_ms(written)
    if at is None or at < now - seconds * 1000:
        return ""
    return f"an event of {written} was removed, and the retention in force keeps events for {seconds:g} s"


LOG_FORMAT, EXPORT_FORMAT = FORMATS = 1, 2
"""The formats of a file of lines: of a log that is appended to, and of an export."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of the decoder; it raises others for bytes that are not UTF-8, and for data that is nested too deeply."""


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


class LogLine(Struct, frozen=True):
    """The line of an event. `more` lines of its batch follow; `filed` is only set when the event says otherwise."""

    body: bytes
    hash: str
    sequence: int
    at: int | None = None
    filed: EventIndex | None = None
    more: int = 0
    format: int = EXPORT_FORMAT


class _Members(Struct, frozen=True, omit_defaults=True):
    """The members of an event's line in their order. The number is `sequence` in format 1, and `seq` in format 2."""

    event: Raw
    hash: str
    sequence: int | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    at: int | None = None
    filed: EventIndex | None = None
    more: int = 0


_encode = msgspec.json.Encoder().encode
_header = msgspec.json.Decoder(LogHeader).decode
_members = msgspec.json.Decoder(_Members).decode
_filed = msgspec.json.Decoder(EventIndex).decode
_any = msgspec.json.Decoder(Raw).decode


def header_line(head: Head, form: int = EXPORT_FORMAT) -> bytes:
    """The first line of a file that continues the chain after `head`."""
    return _encode(LogHeader(head.chain, form, head.hash, head.sequence)) + b"\n"


def event_line(
    head: Head,
    body: bytes,
    *,
    at: int | None = None,
    filed: EventIndex | None = None,
    more: int = 0,
    form: int = EXPORT_FORMAT,
) -> bytes:
    """The line of the event that brought the chain to `head`."""
    if b"\n" in body:
        raise NotJsonError("", "an event is one line")
    try:
        _any(body)
    except UNREADABLE as error:
        raise NotJsonError("", str(error)) from error
    apart = None if filed == index_of(body) else filed
    return _written(LogLine(body, head.hash, head.sequence, at, apart, more, form))


def _written(line: LogLine) -> bytes:
    event, rest = Raw(line.body), (line.at, line.filed, line.more)
    if line.format == LOG_FORMAT:
        return _encode(_Members(event, line.hash, line.sequence, UNSET, *rest)) + b"\n"
    return _encode(_Members(event, _shorter(line.hash), UNSET, line.sequence, *rest)) + b"\n"


def _shorter(digits: str) -> str:
    """A hash as base64url without padding. Text that is no hash, as in a store that was changed, stays as it is."""
    try:
        hashed = bytes.fromhex(digits)
    except ValueError:
        return digits
    return urlsafe_b64encode(hashed)[:-1].decode() if hashed.hex() == digits and len(digits) == len(GENESIS) else digits


def _digits(shorter: str) -> str:
    """The hexadecimal digits of a hash in base64url; any other text unchanged."""
    try:
        digits = urlsafe_b64decode(f"{shorter}=").hex()
    except ValueError:
        return shorter
    return digits if _shorter(digits) == shorter else shorter


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

    A search by such a field would miss the event, or find one that does not belong there. Correlation and trace of some
    events are only in the `submitted` of their work; where they are filed is not compared.
    """
    own_fields = _own_fields(body)
    absent = None if own_fields.event_type in BRIEF_DEFAULTS else UNSET
    for name in EventIndex.__struct_fields__:
        found = getattr(own_fields, name)
        if found is UNSET and not (name in IDS_OF_SUBMISSION and own_fields.event_type in FOUND_BY_SUBMISSION):
            found = absent
        if found not in (UNSET, getattr(filed, name)):
            return name
    own = None if own_fields.timestamp is UNSET else timestamp_ms(own_fields.timestamp)
    return "time" if at is not None and own not in (None, at) else None


def index_mismatch(sequence: int, body: bytes, filed: EventIndex, at: int) -> Mismatch | None:
    """The mismatch of an event that a store finds by another field, or another time, than its own."""
    wrong = wrong_index_field(body, filed, at)
    return None if wrong is None else Mismatch(sequence, f"it is filed under another {wrong} than its own")


def time_of(line: LogLine) -> int | None:
    """The time of a line's event (ms UTC) by its own body; that of the line only where the body has none."""
    own_fields = _own_fields(line.body).timestamp
    own = None if own_fields is UNSET else timestamp_ms(own_fields)
    return line.at if own is None else own


def read_line(text: bytes) -> LogHeader | LogLine | None:
    """A line of either format, given with its line break; None when it is not in that format to the byte."""
    try:
        if text.startswith(b'{"chain":'):
            header = _header(text)
            return header if header.format in FORMATS and _encode(header) + b"\n" == text else None
        found = _members(text)
    except UNREADABLE:
        return None
    line = _line_of(found)
    return line if line is not None and _written(line) == text else None


def _line_of(found: _Members) -> LogLine | None:
    body, rest = bytes(found.event), (found.at, found.filed, found.more)
    if found.sequence is not UNSET:
        return LogLine(body, found.hash, found.sequence, *rest, LOG_FORMAT)
    return None if found.seq is UNSET else LogLine(body, _digits(found.hash), found.seq, *rest, EXPORT_FORMAT)


def verify_lines(
    lines: Iterable[bytes],
    head: Head | None = None,
    *,
    in_force: RetentionInForce | None = None,
    anchors: Iterable[bytes] = (),
) -> list[Mismatch]:
    """Every mismatch between these lines, of one file or consecutive files, and one chain that leads to `head`."""
    rest = iter(lines)
    first = read_line(next(rest, b""))
    if not isinstance(first, LogHeader):
        return [Mismatch(0, "the first line does not open a log of format 1 or 2")]
    start = first.head
    if head is not None and head.chain != start.chain:
        return [Mismatch(0, f"this is chain {start.chain}, the head is of chain {head.chain}")]
    problems: list[Mismatch] = []
    links = _links(rest, first, problems)
    return verify(links, head or start, start=start, in_force=in_force, anchors=anchors) + problems


def _links(lines: Iterator[bytes], header: LogHeader, problems: list[Mismatch]) -> Iterator[Link]:
    """The links that these lines hold; what is wrong with them as lines is added to `problems`."""
    at, form, more = header.head, header.format, 0
    for text in lines:
        found = read_line(text)
        if isinstance(found, LogLine):
            if found.format != form:
                problems.append(Mismatch(found.sequence, f"a line of format {found.format}, after one of {form}"))
            problems += _line_problems(found, more)
            form, more = found.format, found.more
            at = Head(at.chain, found.sequence, found.hash)
            yield Link(found.sequence, found.hash, found.body)
        elif found is None:
            problems.append(Mismatch(at.sequence + 1, "a line that is not in this format, or was changed"))
            at = Head(at.chain, at.sequence + 1, at.hash)  # it stands where one event stood
        else:
            if found.head != at:
                problems.append(Mismatch(at.sequence + 1, "the next file does not go on from here"))
            form = found.format
    if more:
        problems.append(Mismatch(at.sequence + 1, "cut off in the middle of a batch"))


def _line_problems(line: LogLine, more: int) -> Iterator[Mismatch]:
    if more and line.more != more - 1:
        yield Mismatch(line.sequence, "the line does not belong to the batch before it")
    wrong = None if line.filed is None else wrong_index_field(line.body, line.filed)
    if wrong is not None:
        yield Mismatch(line.sequence, f"the event is filed under another {wrong} than its own")
