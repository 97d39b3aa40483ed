"""`KeyEvents`: the events of one call on a key, each written once."""

import pytest

from reefknot.audit.journal import Journal
from reefknot.audit.model.event import IdempotencyEvent, RetryRecovered
from reefknot.idempotency.events import KeyEvents
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from tests.unit.idempotency.failing_store import events_in

RECOVERED = RetryRecovered(timestamp="", total_attempts=2, elapsed_seconds=1.0)


def event(action: str) -> IdempotencyEvent:
    return IdempotencyEvent(timestamp="", idempotency_key="k", action=action)


@pytest.mark.parametrize("one_chain", [True, False])
async def test_a_flushed_event_is_not_written_again(one_chain: bool) -> None:
    store = MemoryStore(VirtualClock())
    events = KeyEvents(Journal(store.audit), event, one_chain=one_chain)
    events.observed("hit")
    events.with_record.append(RECOVERED)
    await events.flush()
    await events.flush()
    assert await events_in(store.audit) == [RECOVERED, event("hit")]


async def test_an_event_is_written_with_its_change_on_one_chain_and_after_it_on_two() -> None:
    store = MemoryStore(VirtualClock())
    events = KeyEvents(Journal(store.audit), event, one_chain=True)
    events.with_record.append(RECOVERED)
    assert [entry.event_type for entry in events.atomic_with("release")] == ["idempotency"]
    assert [entry.event_type for entry in events.atomic_with("record")] == ["retry_recovered", "idempotency"]
    events.applied("record")
    await events.flush()
    assert await events_in(store.audit) == []
    store = MemoryStore(VirtualClock())
    events = KeyEvents(Journal(store.audit), event, one_chain=False)
    events.with_record.append(RECOVERED)
    assert events.atomic_with("record") == []
    events.applied("record")
    await events.flush()
    assert await events_in(store.audit) == [RECOVERED, event("record")]
