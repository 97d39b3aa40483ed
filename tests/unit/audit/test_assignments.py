"""The events that every assignment has are small, and rules are written once, with the first admission that is kept."""

import json

import pytest

from reefknot.audit.assignments import STORE_AGAIN_S, RulesRecorder, briefly_about, ended_event, submitted_event
from reefknot.audit.journal import Journal
from reefknot.audit.model.event import Dropped, decode, encode
from reefknot.queue.model.admission import Rules, rules_hash
from reefknot.queue.model.work import WorkItem
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.processes import own_identity
from reefknot.stores.memory import MemoryStore

AT = 1_769_342_400.0


class Queue:
    def __init__(self, size: int) -> None:
        self.name = f"q{size}"
        self.rules = Rules(size=size)
        self.rules_hash = rules_hash(self.rules, self.name)


def item(**fields: object) -> WorkItem:
    return WorkItem("a", "t", correlation_id="a", created_at=int(AT * 1000), **fields)  # type: ignore[arg-type]


def test_a_brief_event_has_no_nulls_and_an_end_without_a_result_says_that_nothing_ran() -> None:
    event = submitted_event(item(), AT)
    assert set(json.loads(encode(event))) == {"actor", "event_type", "host", "process", "timestamp", "work_id"}
    assert decode(encode(event)) == event
    assert event.event_code == "RK-305"
    assert (event.actor, event.process) == (own_identity().user, own_identity().process)

    end = ended_event(item(), AT + 2.5, cancelled="enough")
    assert (end.status, end.attempts, end.duration_ms, end.result_hash) == ("cancelled", 0, 2500, "")
    assert end.operation == "t"


def test_a_correlation_of_its_own_is_kept() -> None:
    assert briefly_about(item(), AT)["correlation_id"] is None
    other = briefly_about(WorkItem("acme|a", "t", tenant_id="acme", correlation_id="c"), AT)
    ids = {"tenant_id": "acme", "correlation_id": "c", "trace_id": None, "work_id": "a"}
    assert other | {"timestamp": ""} == {"timestamp": "", **ids}


def test_rules_are_missing_until_they_are_written_and_again_after_an_hour() -> None:
    clock = VirtualClock()
    recorder, queues = RulesRecorder(clock, enabled=True), [Queue(5), Queue(7), Queue(5)]
    first = recorder.missing(queues)

    assert [event.resource_class for event in first] == ["q5", "q7"]
    assert [event.rules_hash for event in recorder.missing(queues)] == [event.rules_hash for event in first], "not kept"
    recorder.written(first)
    assert recorder.missing(queues) == []
    clock.advance(STORE_AGAIN_S)
    assert len(recorder.missing(queues)) == 2, "retention may have removed them"
    assert RulesRecorder(clock, enabled=False).missing(queues) == []


@pytest.mark.real_time
async def test_the_rules_stand_before_the_refusal_that_refers_to_them() -> None:
    store = MemoryStore(VirtualClock())
    recorder = RulesRecorder(VirtualClock(), enabled=True)
    refusal = Dropped(timestamp="", reason="full")
    for _ in range(2):
        await recorder.write(Journal(store.audit), refusal, [Queue(5)])
    types = [kept.entry.event_type for kept in await store.audit.read()]
    assert types == ["rules_stored", "dropped", "dropped"]
