"""
Decisions, decided again.

Every recorded decision is handed back to `decide` with the inputs it had. The answer must be the same to the byte. No
effect is ever run: a replay is arithmetic over what was put on record.
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
"""The hashes of a book in which nothing was written."""

_encoder = msgspec.json.Encoder(order="sorted")


class Difference(Struct, frozen=True):
    """A recorded decision that does not come out the same."""

    position: int
    event_type: str
    recorded: str
    decided: str

    def __str__(self) -> str:
        return f"event {self.position} ({self.event_type}): recorded {self.recorded}, decided again {self.decided}"


class Replayed(Struct, frozen=True):
    """What a replay saw. `books_missing` are hashes that decisions refer to, and that no event explains."""

    events: int
    decisions: int
    differences: tuple[Difference, ...]
    books: int = 0
    books_missing: tuple[str, ...] = ()


def replay(bodies: Iterable[bytes]) -> Replayed:
    """Decide every recorded decision again, and list each difference."""
    replayer = Replayer()
    differences = tuple(difference for body in bodies for difference in replayer.take(body))
    return replayer.result(differences)


class Replayer:
    """Takes events one by one, so that a record of any length needs the same memory."""

    def __init__(self) -> None:
        self._events = 0
        self._decisions = 0
        self._stored: set[str] = set()
        self._meant: set[str] = set()

    def take(self, body: bytes) -> list[Difference]:
        """One more event, and what of it does not come out the same."""
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
        """All of it. What nobody wrote about has the built-in book, which is not on record."""
        missing = self._meant - self._stored - BUILTIN_BOOKS
        return Replayed(self._events, self._decisions, differences, len(self._stored), tuple(sorted(missing)))

    def _book(self, event: BookStored, has_gaps: bool) -> list[Difference]:
        """A book has to be what its hash says, unless a secret was taken out of it."""
        self._note(self._stored, event.book_hash)
        hashed = content_hash(event.content)
        if has_gaps or hashed == event.book_hash:
            return []
        return [Difference(self._events, event.event_type, f"book {event.book_hash[:12]}", f"book {hashed[:12]}")]

    def _decision(self, record: DecisionRecord, event_type: str) -> list[Difference]:
        self._decisions += 1
        if record.book_hash is not None:
            self._note(self._meant, record.book_hash)
        again = decided_again(record)
        if _encoder.encode(record) == _encoder.encode(again):
            return []
        return [Difference(self._events, event_type, _answer(record), _answer(again))]

    def _note(self, among: set[str], hashed: str) -> None:
        if len(among) < MOST_BOOKS:
            among.add(hashed)


def decided_again(record: DecisionRecord) -> DecisionRecord:
    """The same inputs, and whatever the answer is now."""
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
