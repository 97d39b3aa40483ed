"""
Decisions, decided again.

Every recorded decision is handed back to `decide` with the inputs it had. The answer must be the same to the byte. No
effect is ever run: a replay is arithmetic over what was put on record.
"""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import DecisionRecord, answer_of, decode
from reefknot.core.retry.decide import DECIDER_VERSION, decide
from reefknot.errors import ParameterError

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
    """What a replay saw."""

    events: int
    decisions: int
    differences: tuple[Difference, ...]


def replay(bodies: Iterable[bytes]) -> Replayed:
    """Decide every recorded decision again, and list each difference."""
    events = decisions = 0
    differences: list[Difference] = []
    for position, body in enumerate(bodies, 1):
        events += 1
        for record, event_type in _decisions(body, position, differences):
            decisions += 1
            again = decided_again(record)
            recorded, decided = _encoder.encode(record), _encoder.encode(again)
            if recorded != decided:
                differences.append(Difference(position, event_type, _answer(record), _answer(again)))
    return Replayed(events, decisions, tuple(differences))


def _decisions(body: bytes, position: int, differences: list[Difference]) -> Iterator[tuple[DecisionRecord, str]]:
    try:
        event = decode(body)
    except msgspec.DecodeError as error:
        differences.append(Difference(position, "unreadable", body[:60].decode("utf-8", "replace").strip(), str(error)))
        return
    record = getattr(event, "decision", None)
    if isinstance(record, DecisionRecord):
        yield record, event.event_type


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
