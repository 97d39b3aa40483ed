"""
Events in the audit stream: their form, and the verification of the chains they make.

An event is stored as a CloudEvent in JSON, its own body byte for byte as it was hashed.

A log with several chains is verified in one pass, every chain by itself. A chain begins with its first event, or behind
what retention removed, as an anchor event says; that may be an event of another chain, the one of the process which
removed. Pure: nothing is read or sent here.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, json

from reefknot.audit.model.chain import (
    MOST_FOUND,
    ChainVerifier,
    EventIndex,
    Head,
    Link,
    Mismatch,
    RetentionInForce,
    anchor_in,
    index_mismatch,
)
from reefknot.audit.model.event import timestamp, timestamp_ms
from reefknot.audit.port import AuditEntry, ChainReport
from reefknot.runtime.log import error_text, logger
from reefknot.stores.jetstream.reads import StreamMessage
from reefknot.stores.jetstream.streams import Names

TYPE_PREFIX = "reefknot."


class CloudEvent(Struct, frozen=True, omit_defaults=True):
    """An event in the audit stream: CloudEvents 1.0, structured. A body that is no JSON is in `data_base64`."""

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


class SealedEvent(Struct, frozen=True):
    """An event with its number and hash in its chain, ready to be stored. `body` is its CloudEvent."""

    sequence: int
    hash: str
    subject: str
    body: bytes


class StoredEvent(Struct, frozen=True):
    """An event as the audit stream has it."""

    chain: str
    sequence: int
    hash: str
    entry: AuditEntry


_raw = json.Decoder(Raw).decode
_event = json.Decoder(CloudEvent).decode
_events = json.Decoder(list[CloudEvent]).decode
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


def decoded(body: bytes) -> StoredEvent | None:
    """The event in a message of the audit stream; None when the message was written by something else."""
    try:
        return stored_event(_event(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError):
        return None


def sealed(names: Names, head: Head, entry: AuditEntry) -> SealedEvent:
    """The event that brought its chain to `head`, ready to be stored."""
    subject = names.event(head.chain, entry.event_type, entry.work_id, is_first=head.sequence == 1)
    return SealedEvent(head.sequence, head.hash, subject, _encode(cloud_event(f"reefknot/{names.name}", head, entry)))


def subject_of(names: Names, event: StoredEvent) -> str:
    """The subject of an event by its own fields."""
    return names.event(event.chain, event.entry.event_type, event.entry.work_id, is_first=event.sequence == 1)


def outbox_events(names: Names, body: bytes) -> list[SealedEvent]:
    """The events in an outbox."""
    if not body:
        return []
    try:
        events = _events(body if body.startswith(b"[") else zlib.decompress(body))
        found = [(stored_event(one), one) for one in events]
    except (msgspec.DecodeError, zlib.error, ValueError) as error:
        logger().error("an outbox in %s is unreadable; its events are not copied (%s)", names.state, error_text(error))
        return []
    return [SealedEvent(one.sequence, one.hash, subject_of(names, one), _encode(raw)) for one, raw in found]


# ---- verification ----------------------------------------------------------------------------------------------------


class Verification:
    """Verifies all chains of a log at once, in the order of the log."""

    def __init__(
        self, heads: Sequence[Head], known: Sequence[tuple[int, StoredEvent]], in_force: RetentionInForce | None
    ) -> None:
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
        for _, event in known:
            start = anchor_in(event.entry.body)
            if start is not None:
                self._starts[start.chain, start.sequence] = self._latest[start.chain] = start
                if start.chain != event.chain:
                    self._anchors.setdefault(start.chain, []).append(event.entry.body)

    def add(self, message: StreamMessage, event: StoredEvent | None) -> None:
        """Verify one more message; `event` is None when it is no event, or is not where it belongs."""
        if event is None:
            chain = message.subject.split(".")[2]
            problem = f"the message at position {message.sequence} is no event of this log, or is misplaced"
            number = self._ends.get(chain, Head(chain)).sequence
            self._note(chain, number + 1, problem)
            return
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
