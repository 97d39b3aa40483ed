"""
Events in the state stream: the packs that they are stored in, the chain that this process writes, and the verification
of all chains.

The events of a batch are one message of it, a pack: a JSON array of CloudEvents, each with its own body byte for byte
as it was hashed. So an event is stored with its change or not at all. The subject of a pack says its chain, the number
of its first event, and the piece of work that all of its events are about, if it is one.

A log with several chains is verified in one pass, every chain by itself. A chain begins with its first event, or behind
what retention removed, as an anchor event says; that may be an event of another chain, the one of the process which
removed.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, json

from reefknot.audit.model.chain import (
    ANCHOR,
    MOST_FOUND,
    ChainVerifier,
    EventIndex,
    Head,
    Link,
    Mismatch,
    RetentionInForce,
    anchor_in,
    index_mismatch,
    link,
)
from reefknot.audit.model.event import timestamp, timestamp_ms
from reefknot.audit.port import AuditEntry, AuditQuery, ChainReport, KeptEntry
from reefknot.errors import StoreFullError
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.reads import StreamMessage
from reefknot.stores.jetstream.state import Message
from reefknot.stores.jetstream.streams import Names, token_of

TYPE_PREFIX = "reefknot."
POSITIONS = 1000
"""Positions in the log that belong to one message of the stream, so the most events of a pack."""
MOST_EVENTS = 500
MOST_PACKS = 16
"""Most packs of one batch."""
MOST_BYTES = 900_000
COMPRESSED_FROM = 4096
MOST_UNPACKED = 1 << 20
HEADROOM = 8192
"""Bytes of a message that its headers may need."""
RARE = frozenset({ANCHOR, "book_stored", "rules_stored", "operator_action"})
"""Types of events that are looked for in the whole log: the subjects of packs with one of them say so."""
UNREADABLE = "unreadable"


class CloudEvent(Struct, frozen=True, omit_defaults=True):
    """An event in a pack: CloudEvents 1.0, structured. A body that is no JSON is in `data_base64`."""

    specversion: str
    id: str
    source: str
    type: str
    chain: str
    chainsequence: str
    """Text: an integer of CloudEvents has 32 bits."""
    chainhash: str
    time: str | None = None
    subject: str | None = None
    """The id of the work."""
    correlationid: str | None = None
    traceid: str | None = None
    atms: str | None = None
    """The time in milliseconds, where `time` cannot say it."""
    datacontenttype: str | UnsetType = UNSET
    data: Raw | UnsetType = UNSET
    data_base64: str | UnsetType = UNSET


class StoredEvent(Struct, frozen=True):
    """An event as a pack has it."""

    chain: str
    sequence: int
    hash: str
    entry: AuditEntry


_raw = json.Decoder(Raw).decode
_event = json.Decoder(CloudEvent).decode
_events = json.Decoder(list[CloudEvent]).decode
_each = json.Decoder(list[Raw]).decode
_encode = json.Encoder().encode


def cloud_event(source: str, head: Head, entry: AuditEntry) -> CloudEvent:
    """The CloudEvent of the event that brought its chain to `head`."""
    time, at_ms = _time_texts(entry.at)
    is_json = _is_json(entry.body)
    return CloudEvent(
        "1.0",
        f"{head.chain}/{head.sequence}",
        source,
        TYPE_PREFIX + entry.event_type,
        head.chain,
        str(head.sequence),
        head.hash,
        time=time,
        subject=entry.work_id,
        correlationid=entry.correlation_id,
        traceid=entry.trace_id,
        atms=at_ms,
        datacontenttype="application/json" if is_json else UNSET,
        data=Raw(entry.body) if is_json else UNSET,
        data_base64=UNSET if is_json else b64encode(entry.body).decode(),
    )


def _time_texts(at: int) -> tuple[str | None, str | None]:
    try:
        return timestamp(at / 1000), None
    except (ValueError, OverflowError, OSError):
        return None, str(at)


def _is_json(body: bytes) -> bool:
    try:
        return bytes(_raw(body)) == body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def stored_event(event: CloudEvent) -> StoredEvent:
    """The event in a CloudEvent; `ValueError` when it is not one of reefknot's."""
    at = timestamp_ms(event.time) if event.time is not None else int(event.atms or "")
    if at is None or not event.type.startswith(TYPE_PREFIX):
        raise ValueError(event.type)
    body = bytes(event.data) if isinstance(event.data, Raw) else b64decode(event.data_base64 or "", validate=True)
    entry = AuditEntry(
        body, event.type.removeprefix(TYPE_PREFIX), at, event.correlationid, event.traceid, event.subject
    )
    return StoredEvent(event.chain, int(event.chainsequence), event.chainhash, entry)


# ---- packs -----------------------------------------------------------------------------------------------------------


class Pack:
    """A message of the log. Its events have one position each, the last of them that of the message."""

    def __init__(self, message: StreamMessage) -> None:
        self.message = message
        self.last = message.sequence * POSITIONS
        self.text = _unpacked(message.body)
        """The events as JSON text; empty when the message is no pack."""

    def events(self) -> Sequence[StoredEvent | None]:
        """The events; None in place of anything else, and of a message that is no pack."""
        try:
            return [stored_event(one) for one in _events(self.text)][:POSITIONS]
        except _NOT_EVENTS:
            pass
        try:
            return [_event_or_none(one) for one in _each(self.text)][:POSITIONS]
        except _NOT_EVENTS:
            return [None]

    def placed(self) -> Iterator[tuple[int, StoredEvent | None]]:
        """The events with their positions."""
        found = self.events()
        return enumerate(found, self.last - len(found) + 1)

    def kept(self, query: AuditQuery) -> list[KeptEntry]:
        """The events that match; what is no event is shown as it is."""
        if self.text and not all(one in self.text for one in _texts_of(query)):
            return []
        return [
            kept
            for position, event in self.placed()
            if position > query.after and (query.before is None or position < query.before)
            if query.matches((kept := self._entry(position, event)).entry)
        ]

    def _entry(self, position: int, event: StoredEvent | None) -> KeptEntry:
        if event is None:
            return KeptEntry(position, "", AuditEntry(self.message.body, UNREADABLE, self.message.stored_at))
        return KeptEntry(position, event.hash, event.entry)

    def is_in_place(self, names: Names, events: Sequence[StoredEvent | None]) -> bool:
        """Whether these, its events, are written as this engine writes them, and on the subject that they belong on."""
        found = [one for one in events if one is not None]
        if not found or len(found) < len(events):
            return False
        written = [
            cloud_event(_source(names), Head(one.chain, one.sequence, one.hash), one.entry)
            for one in found
            if one.chain == found[0].chain
        ]
        return subject_of(names, found) == self.message.subject and _encode(written) == self.text


_NOT_EVENTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError)


def _unpacked(body: bytes) -> bytes:
    """The JSON text of a pack; empty when the message is another one, or would be larger than any pack."""
    if body.startswith(b"["):
        return body
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(body, MOST_UNPACKED)
    except zlib.error:
        return b""
    return text if reader.eof and not reader.unused_data else b""


def _event_or_none(raw: Raw) -> StoredEvent | None:
    try:
        return stored_event(_event(raw))
    except _NOT_EVENTS:
        return None


def _texts_of(query: AuditQuery) -> Iterator[bytes]:
    """Texts that are in every pack with a matching event: most packs need no decoding."""
    if query.event_type not in (None, UNREADABLE):
        yield _encode(f"{TYPE_PREFIX}{query.event_type}")
    for one in (query.work_id, query.correlation_id, query.trace_id):
        if one is not None:
            yield _encode(one)


def chain_of(message: StreamMessage) -> str:
    """The chain of a pack by its subject."""
    return message.subject.split(".")[2]


def subject_of(names: Names, events: Sequence[StoredEvent]) -> str:
    """The subject of a pack with these events."""
    return names.pack(events[0].chain, events[0].sequence, _about([one.entry for one in events]))


def _about(entries: Sequence[AuditEntry]) -> str:
    """The last token of a pack's subject."""
    if any(one.event_type in RARE for one in entries):
        return Names.RARE
    works = {one.work_id for one in entries}
    (work_id,) = works if len(works) == 1 else (None,)
    return token_of(work_id) if work_id else Names.SEVERAL


def _source(names: Names) -> str:
    return f"reefknot/{names.name}"


# ---- writing ---------------------------------------------------------------------------------------------------------


class Sealed(Struct, frozen=True):
    """The packs of a batch, and the head of the chain once they are stored."""

    packs: list[Message]
    head: Head


class AuditWriter:
    """The chain of this process. `Commits` stores what `seal` returns, and then says so."""

    def __init__(self, connection: Connection, names: Names) -> None:
        self._connection, self._names = connection, names
        self.position = 0
        """The position in the log of the last event of this process; 0 before the first."""
        self.begin()

    def begin(self) -> None:
        """Begin a chain: the first one, or another when it is not known how the last one ends."""
        self.head = Head(new_id())

    def seal(self, entries: Sequence[AuditEntry]) -> Sealed:
        """
        The events with their numbers and hashes, if they are stored next.

        A pack expects no other pack with the number of its first event. So a batch that is sent again is stored once.
        """
        head, packs, source, most = self.head, list[Message](), _source(self._names), self._most
        bodies: list[bytes] = []
        some: list[AuditEntry] = []
        size, first = 0, head.sequence + 1
        for entry in entries:
            after, _ = link(head, entry.body)
            body = _encode(cloud_event(source, after, entry))
            if len(body) > most:
                raise self._full(f"an event has {len(body)} bytes, and {most} are the most")
            if bodies and (len(bodies) == MOST_EVENTS or size + len(body) > most):
                packs.append(self._pack(first, bodies, some))
                bodies, some, size, first = [], [], 0, after.sequence
            bodies.append(body)
            some.append(entry)
            size, head = size + len(body) + 1, after
        if bodies:
            packs.append(self._pack(first, bodies, some))
        if len(packs) > MOST_PACKS:
            raise self._full(f"the events of these changes need {len(packs)} messages, and {MOST_PACKS} are the most")
        return Sealed(packs, head)

    def _pack(self, first: int, bodies: Sequence[bytes], entries: Sequence[AuditEntry]) -> Message:
        body = b"[%s]" % b",".join(bodies)
        if len(body) > COMPRESSED_FROM:
            body = zlib.compress(body, 1)
        subject = self._names.pack(self.head.chain, first, _about(entries))
        return Message(subject, body, 0, self._names.pack(self.head.chain, first, "*"))

    @property
    def _most(self) -> int:
        return min(MOST_BYTES, self._connection.max_payload - HEADROOM)

    def _full(self, problem: str) -> StoreFullError:
        return StoreFullError(self._connection.options.shown, problem, "record less in it, or make it in smaller parts")

    def stored(self, sealed: Sealed, last: int) -> None:
        """Note that the batch with these packs is stored, the last one with this sequence."""
        if sealed.packs:
            self.head, self.position = sealed.head, last * POSITIONS


# ---- verification ----------------------------------------------------------------------------------------------------


class Verification:
    """Verifies all chains of a log at once, in the order of the log."""

    def __init__(self, heads: Sequence[Head], known: Iterable[StoredEvent], in_force: RetentionInForce | None) -> None:
        self._heads: dict[str, Head] = {}
        """By chain: the newest head, which its end is compared with."""
        self._hashes: dict[tuple[str, int], set[str]] = {}
        for head in sorted(heads, key=lambda one: one.sequence):
            self._heads[head.chain] = head
            self._hashes.setdefault((head.chain, head.sequence), set()).add(head.hash)
        self._in_force = in_force
        self._starts: dict[tuple[str, int], Head] = {}
        self._latest: dict[str, Head] = {}
        self._anchors: dict[str, list[bytes]] = {}
        """By chain: its anchors that are events of other chains."""
        self._verifiers: dict[str, ChainVerifier] = {}
        self._ends: dict[str, Head] = {}
        self._found: dict[str, list[Mismatch]] = {}
        for event in known:
            start = anchor_in(event.entry.body)
            if start is not None:
                self._starts[start.chain, start.sequence] = self._latest[start.chain] = start
                if start.chain != event.chain:
                    self._anchors.setdefault(start.chain, []).append(event.entry.body)

    def add(self, names: Names, pack: Pack) -> int:
        """Verify the next message of the log; returns the number of its events."""
        events = pack.events()
        if not pack.is_in_place(names, events):
            chain = chain_of(pack.message)
            problem = f"the message at position {pack.last} is no pack of events of this log, or is misplaced"
            self._note(chain, self._ends.get(chain, Head(chain)).sequence + 1, problem)
        for event in events:
            if event is not None and event.chain == chain_of(pack.message):
                self._add(event)
        return len(events)

    def _add(self, event: StoredEvent) -> None:
        verifier = self._verifiers.get(event.chain)
        if verifier is None:
            start = self._starts.get((event.chain, event.sequence - 1), Head(event.chain))
            verifier = self._begin(event.chain, start)
        verifier.add([Link(event.sequence, event.hash, event.entry.body)])
        self._add_problems(event)
        self._ends[event.chain] = Head(event.chain, event.sequence, event.hash)

    def _add_problems(self, event: StoredEvent) -> None:
        """Note that an event is not the one of an older head, or is filed under what is not its own."""
        entry, newest = event.entry, self._heads.get(event.chain)
        is_newest = newest is not None and newest.sequence == event.sequence  # which the chain's verifier compares
        if not is_newest and self._hashes.get((event.chain, event.sequence), set()) - {event.hash}:
            self._note(event.chain, event.sequence, "the hash is not the one of the head")
        index = EventIndex(entry.event_type, entry.correlation_id, entry.trace_id, entry.work_id)
        wrong = index_mismatch(event.sequence, entry.body, index, entry.at)
        if wrong is not None:
            self._note(event.chain, wrong.sequence, wrong.problem)

    def _note(self, chain: str, number: int, problem: str) -> None:
        found = self._found.setdefault(chain, [])
        if len(found) < MOST_FOUND:
            found.append(Mismatch(number, problem))

    def _begin(self, chain: str, start: Head) -> ChainVerifier:
        ours = [self._heads[chain]] if chain in self._heads else []
        verifier = self._verifiers[chain] = ChainVerifier(start, *ours, in_force=self._in_force)
        for body in self._anchors.get(chain, []):
            verifier.confirm(body)
        return verifier

    def reports(self) -> list[ChainReport]:
        """The end and the mismatches of every chain, including chains that are known only by a head."""
        for chain in self._heads:
            if chain not in self._verifiers:
                self._begin(chain, self._latest.get(chain, Head(chain)))
        return [
            ChainReport(self._ends.get(chain, Head(chain)), [*verifier.result(), *self._found.pop(chain, [])])
            for chain, verifier in self._verifiers.items()
        ] + [ChainReport(Head(chain), found) for chain, found in self._found.items()]
