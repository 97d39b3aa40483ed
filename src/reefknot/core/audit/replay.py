"""
Replay: every recorded decision is decided again, and each difference is listed.

`decide` gets the inputs that were recorded, and its answer must be the same to the byte. No effect is ever run: a
replay is arithmetic over the audit log.
"""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import BookStored, DecisionRecord, answer_of, decode
from reefknot.core.redaction import HIDDEN
from reefknot.core.retry.book import content_hash
from reefknot.core.retry.decide import DECIDER_VERSION, decide
from reefknot.errors import ParameterError

MOST_BOOKS = 10_000
BUILTIN_BOOKS = frozenset(
    {"builtin", content_hash({"worker": {}, "retry_policies": {}, "operations": {}, "sources": {}})}
)
"""The hashes of a book without any written policy."""

_encoder = msgspec.json.Encoder(order="sorted")


class Difference(Struct, frozen=True):
    """A recorded event whose decision, or whose book, comes out differently now."""

    position: int
    event_type: str
    recorded: str
    decided: str

    def __str__(self) -> str:
        return f"event {self.position} ({self.event_type}): recorded {self.recorded}, decided again {self.decided}"


class Replayed(Struct, frozen=True):
    """The result of a replay. `books_missing` are hashes of books that decisions refer to and no event contains."""

    events: int
    decisions: int
    differences: tuple[Difference, ...]
    books: int = 0
    books_missing: tuple[str, ...] = ()


def replay(bodies: Iterable[bytes]) -> Replayed:
    """Decide every recorded decision again, and list each difference."""
    replayer = Replayer()
    differences = tuple(difference for body in bodies for difference in replayer.add(body))
    return replayer.result(differences)


class Replayer:
    """Replays event by event, so that a log of any length needs the same memory."""

    def __init__(self) -> None:
        self._events = 0
        self._decisions = 0
        self._stored: set[str] = set()
        self._referenced: set[str] = set()

    def add(self, body: bytes) -> list[Difference]:
        """Replay one more event; returns its differences."""
        self._events += 1
        try:
            event = decode(body)
        except msgspec.DecodeError as error:
            shown = body[:60].decode("utf-8", "replace").strip()
            return [Difference(self._events, "unreadable", shown, str(error))]
        if isinstance(event, BookStored):
            return self._book(event, HIDDEN.encode() in body)
        record = getattr(event, "decision", None)
        return self._decision(record, event.event_type) if isinstance(record, DecisionRecord) else []

    def result(self, differences: tuple[Difference, ...] = ()) -> Replayed:
        """The whole replay. The built-in book is never missing: it is not recorded."""
        missing = self._referenced - self._stored - BUILTIN_BOOKS
        return Replayed(self._events, self._decisions, differences, len(self._stored), tuple(sorted(missing)))

    def _book(self, event: BookStored, redacted: bool) -> list[Difference]:
        """Compare a book with its hash, unless a secret was redacted in it."""
        self._note(self._stored, event.book_hash)
        hashed = content_hash(event.content)
        if redacted or hashed == event.book_hash:
            return []
        return [Difference(self._events, event.event_type, f"book {event.book_hash[:12]}", f"book {hashed[:12]}")]

    def _decision(self, record: DecisionRecord, event_type: str) -> list[Difference]:
        self._decisions += 1
        if record.book_hash is not None:
            self._note(self._referenced, record.book_hash)
        again = decided_again(record)
        if _encoder.encode(record) == _encoder.encode(again):
            return []
        return [Difference(self._events, event_type, _answer(record), _answer(again))]

    def _note(self, among: set[str], hashed: str) -> None:
        if len(among) < MOST_BOOKS:
            among.add(hashed)


def decided_again(record: DecisionRecord) -> DecisionRecord:
    """The record with the same inputs, and the answer that `decide` gives now."""
    if record.decider_version != DECIDER_VERSION:
        return msgspec.structs.replace(record, answer=f"unknown decider version {record.decider_version}", delay=None)
    try:
        decision = decide(
            record.policy.policy(),
            record.history,
            record.failure.failure(),
            record.draw,
            verdict=record.verdict,
            throttle=record.throttle,
            breaker_open=record.breaker_open,
        )
    except (ParameterError, KeyError) as error:
        return msgspec.structs.replace(record, answer=f"impossible inputs: {error}", delay=None)
    answer, delay = answer_of(decision)
    return msgspec.structs.replace(record, answer=answer, delay=delay)


def _answer(record: DecisionRecord) -> str:
    return record.answer if record.delay is None else f"{record.answer} after {record.delay!r} s"
