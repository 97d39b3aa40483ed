"""
The verification of an audit log with several chains: one pass over the log, every chain by itself.

A chain begins with its first event, or behind what retention removed, as an anchor event says; the anchor may be an
event of another chain, that of the process which removed. Pure: it is given the messages in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from reefknot.core.audit.chain import (
    ANCHOR,
    MOST_FOUND,
    ChainVerifier,
    EventIndex,
    Head,
    Link,
    Mismatch,
    RetentionInForce,
    anchor_in,
    wrong_index_field,
)
from reefknot.engines.jetstream.audit import StoredEvent
from reefknot.engines.jetstream.reads import StreamMessage
from reefknot.ports.audit_log import ChainReport


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
        self._anchors: dict[str, bytes] = {}
        """By chain: the newest anchor so far that is an event of another chain."""
        self._verifiers: dict[str, ChainVerifier] = {}
        self._ends: dict[str, Head] = {}
        self._found: dict[str, list[Mismatch]] = {}
        for _, event in known:
            start = anchor_in(event.entry.body)
            if start is not None:
                self._starts[start.chain, start.sequence] = self._latest[start.chain] = start

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
        anchor = anchor_in(event.entry.body) if event.entry.event_type == ANCHOR else None
        if anchor is not None and anchor.chain != event.chain:
            self._anchors[anchor.chain] = event.entry.body
            if anchor.chain in self._verifiers:
                self._verifiers[anchor.chain].confirm(event.entry.body)

    def _add_problems(self, event: StoredEvent) -> None:
        """Note that an event is not the one of an older head, or is filed under what is not its own."""
        entry, newest = event.entry, self._heads.get(event.chain)
        is_newest = newest is not None and newest.sequence == event.sequence  # which the chain's verifier compares
        if not is_newest and self._hashes.get((event.chain, event.sequence), set()) - {event.hash}:
            self._note(event.chain, event.sequence, "the hash is not the one of the head")
        index = EventIndex(entry.event_type, entry.correlation_id, entry.trace_id, entry.work_id)
        wrong = wrong_index_field(entry.body, index, entry.at)
        if wrong is not None:
            self._note(event.chain, event.sequence, f"it is filed under another {wrong} than its own")

    def _note(self, chain: str, number: int, problem: str) -> None:
        found = self._found.setdefault(chain, [])
        if len(found) < MOST_FOUND:
            found.append(Mismatch(number, problem))

    def _begin(self, chain: str, start: Head) -> ChainVerifier:
        ours = [self._heads[chain]] if chain in self._heads else []
        verifier = self._verifiers[chain] = ChainVerifier(start, *ours, in_force=self._in_force)
        verifier.confirm(self._anchors.get(chain, b""))
        return verifier

    def reports(self) -> list[ChainReport]:
        """The end and the mismatches of every chain, and of those that only a head tells of."""
        for chain in self._heads:
            if chain not in self._verifiers:
                self._begin(chain, self._latest.get(chain, Head(chain)))
        return [
            ChainReport(self._ends.get(chain, Head(chain)), [*verifier.result(), *self._found.pop(chain, [])])
            for chain, verifier in self._verifiers.items()
        ] + [ChainReport(Head(chain), found) for chain, found in self._found.items()]
