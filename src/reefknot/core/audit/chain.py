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
MOST_FOUND = 10_000
"""Mismatches that are told one by one."""


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
    walk = Walk(start or Head(head.chain), head)
    walk.take(links)
    return walk.result()


class Walk:
    """
    One way along a chain, links taken as they come: a chain of any length needs the same memory.

    It compares with every head it is given. Beyond the first ten thousand findings it only counts.
    """

    def __init__(self, start: Head, *heads: Head) -> None:
        self._start = start
        self._heads = list(heads)
        self._at = start
        self._vouched = start == Head(start.chain)
        self._met: set[int] = set()
        self._found: list[Mismatch] = []
        self._more = 0

    @property
    def sequence(self) -> int:
        """The number of the link that was taken last."""
        return self._at.sequence

    def take(self, links: Iterable[Link]) -> None:
        """The next ones."""
        wanted = {head.sequence for head in self._heads}
        for item in links:
            if item.sequence != self._at.sequence + 1:
                self._wrong(item.sequence, f"expected number {self._at.sequence + 1}")
                self._at = Head(self._at.chain, item.sequence - 1, self._at.hash)
            self._at, hashed = link(self._at, item.body)
            if hashed != item.hash:
                self._wrong(item.sequence, "the hash does not fit the body and its place")
                self._at = Head(self._at.chain, item.sequence, item.hash)
            if item.sequence in wanted:
                self._meet()
            self._vouched = self._vouched or anchored(item.body) == self._start

    def go_on_from(self, anchor: Head, head: Head) -> None:
        """Retention has let go of what lies ahead, up to `anchor`; the chain stood at `head` then."""
        self._start = self._at = anchor
        self._vouched = False
        self._heads[0] = head

    def result(self) -> list[Mismatch]:
        """What was found, after the last link."""
        if not self._vouched:
            self._wrong(self._start.sequence + 1, "what came before is gone, and no anchor event says so")
        for head in self._heads:
            if head.sequence not in self._met:
                self._compare(head)
        if self._more:
            return [*self._found, Mismatch(self._at.sequence, f"and {self._more} more")]
        return self._found

    def _meet(self) -> None:
        self._met.add(self._at.sequence)
        for head in self._heads:
            if head.sequence == self._at.sequence and head.hash != self._at.hash:
                self._wrong(head.sequence, "the hash is not the one of the head")

    def _compare(self, head: Head) -> None:
        """A head that was not met: is it at the start, before it, or behind the end?"""
        start = self._start
        if self._at.sequence < head.sequence:
            self._wrong(self._at.sequence + 1, f"cut off: the head is at {head.sequence}")
        elif head.sequence < start.sequence:
            problem = f"the head cannot be compared: everything up to {start.sequence} was let go after it"
            self._wrong(head.sequence, problem)
        elif head.sequence == start.sequence and head.hash != start.hash:
            self._wrong(head.sequence, "the hash is not the one of the head")

    def _wrong(self, sequence: int, problem: str) -> None:
        found = Mismatch(sequence, problem)
        if len(self._found) >= MOST_FOUND:
            self._more += 1
        elif found not in self._found[-1:]:  # two heads may say the same
            self._found.append(found)
