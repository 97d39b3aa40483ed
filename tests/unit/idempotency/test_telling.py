"""The events of one call on a key, each told once."""

from __future__ import annotations

import pytest

from reefknot.audit.journal import Journal
from reefknot.core.audit.event import IdempotencyEvent, RetryRecovered
from reefknot.engines.clocks import VirtualClock
from reefknot.engines.memory import MemoryStore
from reefknot.idempotency.events import Telling
from reefknot.testing import run_virtual
from tests.unit.idempotency.keeping import events_in

RECOVERED = RetryRecovered(timestamp="", total_attempts=2, elapsed_seconds=1.0)


def event(action: str) -> IdempotencyEvent:
    return IdempotencyEvent(timestamp="", idempotency_key="k", action=action)


@pytest.mark.parametrize("one_chain", [True, False])
def test_what_was_told_is_not_told_again(one_chain: bool) -> None:
    async def main() -> None:
        store = MemoryStore(VirtualClock())
        telling = Telling(Journal(store.audit), event, one_chain=one_chain)
        telling.saw("hit")
        telling.with_record.append(RECOVERED)
        await telling.tell()
        await telling.tell()
        assert await events_in(store.audit) == [RECOVERED, event("hit")]

    run_virtual(main())


def test_on_one_chain_an_event_goes_with_its_change_and_not_after_it() -> None:
    async def main() -> None:
        store = MemoryStore(VirtualClock())
        telling = Telling(Journal(store.audit), event, one_chain=True)
        telling.with_record.append(RECOVERED)
        assert [entry.event_type for entry in telling.beside("release")] == ["idempotency"]
        assert [entry.event_type for entry in telling.beside("record")] == ["retry_recovered", "idempotency"]
        telling.did("record")
        await telling.tell()
        assert await events_in(store.audit) == []

    run_virtual(main())


def test_on_two_chains_an_event_comes_after_its_change_and_not_with_it() -> None:
    async def main() -> None:
        store = MemoryStore(VirtualClock())
        telling = Telling(Journal(store.audit), event, one_chain=False)
        telling.with_record.append(RECOVERED)
        assert telling.beside("record") == []
        telling.did("record")
        await telling.tell()
        assert await events_in(store.audit) == [RECOVERED, event("record")]

    run_virtual(main())
