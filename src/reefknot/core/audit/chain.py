"""
A chain over what was recorded.

Each link's hash covers its chain's name, its number, the hash before it and its body, so an edit, a swap, an insertion
or a removal inside shows. A chain whose beginning was let go begins at an anchor, and one of its own events has to
vouch for that. A chain alone does not show that its end was cut off: compare it with a head that was exported earlier.
Nothing here stores or reads.
"""

from collections.abc import Iterable
from hashlib import sha256

from msgspec import DecodeError, Struct

from reefknot.core.audit.event import Anchor, decode, encode, timestamp

GENESIS = "0" * 64
"""The hash before the first link."""
ANCHOR = "anchor"
"""The type of the event that retention writes."""


class Head(Struct, frozen=True):
    """Where a chain stands: enough to prove later what was in it now."""

    chain: str
    sequence: int = 0
    hash: str = GENESIS


class Link(Struct, frozen=True):
    """One recorded body at its place."""

    sequence: int
    hash: str
    body: bytes


class Mismatch(Struct, frozen=True):
    """A place where the chain is not what it says it is."""

    sequence: int
    problem: str


def link(head: Head, body: bytes) -> tuple[Head, str]:
    """The head after this body, and the body's hash."""
    sequence = head.sequence + 1
    hashed = sha256(b"%s\n%d\n%s\n%s" % (head.chain.encode(), sequence, head.hash.encode(), body)).hexdigest()
    return Head(head.chain, sequence, hashed), hashed


def anchor_body(anchor: Head, at: int) -> bytes:
    """The event that says where the rest of the chain begins, after what came before was let go. `at` is ms UTC."""
    return encode(
        Anchor(
            timestamp=timestamp(at / 1000),
            chain=anchor.chain,
            sequence=anchor.sequence,
            hash=anchor.hash,
            removed=anchor.sequence,
        )
    )


def anchored(body: bytes) -> Head | None:
    """The place that an anchor event vouches for, None when the body is another event."""
    if b'"event_type":"anchor"' not in body:
        return None
    try:
        event = decode(body)
    except DecodeError:
        return None
    return Head(event.chain, event.sequence, event.hash) if isinstance(event, Anchor) else None


def verify(links: Iterable[Link], head: Head, *, start: Head | None = None) -> list[Mismatch]:
    """
    Every place where the links do not lead from `start` (the beginning, or an anchor) to `head`.

    After a mismatch the walk goes on from what the link itself claims, so one edit is one finding, not a thousand.
    """
    start = at = start or Head(head.chain)
    vouched = start == Head(start.chain)
    found: list[Mismatch] = []
    for item in links:
        if item.sequence != at.sequence + 1:
            found.append(Mismatch(item.sequence, f"expected number {at.sequence + 1}"))
            at = Head(at.chain, item.sequence - 1, at.hash)
        at, hashed = link(at, item.body)
        if hashed != item.hash:
            found.append(Mismatch(item.sequence, "the hash does not fit the body and its place"))
            at = Head(at.chain, item.sequence, item.hash)
        if at.sequence == head.sequence and at.hash != head.hash:
            found.append(Mismatch(item.sequence, "the hash is not the one of the head"))
        vouched = vouched or anchored(item.body) == start
    if not vouched:
        found.append(Mismatch(start.sequence + 1, "what came before is gone, and no anchor event says so"))
    return found + _compared(at, head, start)


def _compared(end: Head, head: Head, start: Head) -> list[Mismatch]:
    """Is the head within what was walked?"""
    if end.sequence < head.sequence:
        return [Mismatch(end.sequence + 1, f"cut off: the head is at {head.sequence}")]
    if head.sequence < start.sequence:
        problem = f"the head cannot be compared: everything up to {start.sequence} was let go after it"
        return [Mismatch(head.sequence, problem)]
    if head.sequence == start.sequence and head.hash != start.hash:
        return [Mismatch(head.sequence, "the hash is not the one of the head")]
    return []
