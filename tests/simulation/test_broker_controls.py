"""Weakened protocols of the engine on a broker. A simulation that does not catch them would prove nothing."""

from typing import Any

import pytest

from reefknot.stores.jetstream.audit import _Uncopied
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.events import SealedEvent
from reefknot.stores.jetstream.state import Kept, Message, State
from reefknot.stores.jetstream.wire import Written
from tests.simulation.broker_world import run_on_broker

FEW = 60

_headers, _work_messages, _behind = Message.headers, State.work_messages, _Uncopied._behind


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


def _behind_any(self: _Uncopied, event: SealedEvent, position: int, is_at_end: bool = False) -> Written:
    return _behind(self, event, position)


VARIANTS: dict[str, tuple[Any, str, Any, int]] = {
    "no revision check": (Message, "headers", _without_revisions, 3),
    "no look into the outbox": (Commits, "_found", _never_looks, 1),
    "a tombstone after its record": (State, "work_messages", _tombstones_last, 1),
    "a mirror that is not held": (State, "hold", _does_not_hold, 64),
    "events that follow any event": (_Uncopied, "_behind", _behind_any, 5),
    "no memory of what others copied": (_Uncopied, "copied", property(lambda self: 0, lambda self, number: None), 34),
}
"""What is weakened, and the seed that noticed it first when this was written: tried first, it saves seconds."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_weakened_protocol_is_caught_within_a_few_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken, likely = VARIANTS[name]
    monkeypatch.setattr(owner, attribute, broken, raising=False)
    for seed in (likely, *range(1, FEW)):
        if run_on_broker(seed).broken:
            return
    pytest.fail(f"{FEW} seeds, and nobody noticed")
