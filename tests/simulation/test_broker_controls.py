"""Weakened protocols of the engine on a broker. A simulation that does not catch them would prove nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from reefknot.audit.port import AuditEntry
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.events import AuditWriter, Sealed
from reefknot.stores.jetstream.state import Kept, Message, State
from tests.simulation.broker_world import run_on_broker

FEW = 60

_headers, _work_messages, _seal = Message.headers, State.work_messages, AuditWriter.seal


def _without_revisions(self: Message) -> dict[str, str]:
    is_free = ".work." in self.subject
    return {name: value for name, value in _headers(self).items() if not (is_free and name.startswith("Nats-Expected"))}


async def _never_looks(self: Commits, message: Message, commit_id: str) -> None:
    """Take a batch without an answer for lost when its second try is refused."""


def _tombstones_last(self: State) -> tuple[list[Message], list[tuple[str, int, Kept]]]:
    messages, records = _work_messages(self)
    for number, (work_id, place, kept) in enumerate(records):
        before = messages[place - 1] if place else None
        if before is not None and not before.body and before.over == messages[place].over:
            messages[place - 1], messages[place] = messages[place], before
            records[number] = work_id, place - 1, kept
    return messages, records


def _does_not_hold(self: State) -> None:
    """Apply what arrives while a batch is on its way."""


def _moves_at_once(self: AuditWriter, entries: Sequence[AuditEntry]) -> Sealed:
    """Take numbers of the chain although the batch is not stored yet, and may be refused."""
    sealed = _seal(self, entries)
    self.head = sealed.head
    return sealed


VARIANTS: dict[str, tuple[Any, str, Any, int]] = {
    "no revision check": (Message, "headers", _without_revisions, 3),
    "no look for the batch": (Commits, "_found", _never_looks, 1),
    "a tombstone after its record": (State, "work_messages", _tombstones_last, 1),
    "a mirror that is not held": (State, "hold", _does_not_hold, 64),
    "a head that moves before its batch is stored": (AuditWriter, "seal", _moves_at_once, 1),
}
"""What is weakened, and the seed that noticed it first when this was written: tried first, it saves seconds."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_weakened_protocol_is_caught_within_a_few_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken, likely = VARIANTS[name]
    monkeypatch.setattr(owner, attribute, broken, raising=False)
    for seed in (likely, *range(1, FEW)):
        try:
            if run_on_broker(seed).broken:
                return
        except TimeoutError:  # a change that never gets through is noticed as well
            return
    pytest.fail(f"{FEW} seeds, and nobody noticed")
