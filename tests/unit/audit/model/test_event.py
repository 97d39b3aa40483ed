"""What is put on record."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.audit.model.event import (
    EVENT_TYPES,
    Admission,
    Completed,
    DecisionRecord,
    IdempotencyEvent,
    PolicyRecord,
    RetryAttempt,
    Routing,
    Submitted,
    as_written,
    decode,
    encode,
    lone_worker,
    tenant_hash,
    timestamp,
)
from reefknot.core.decide import History, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from tests.unit.audit import retry_events

AT = retry_events.AT
POLICY = RetryPolicy(3, 0.5, max_delay=10, jitter="none")
LATE = History(2, 0.6)
TIMEOUT = Failure(ErrorCode.connection_timeout, FailureType.TRANSIENT, "Connection timeout")


def recorded(history: History = LATE, policy: RetryPolicy = POLICY) -> DecisionRecord:
    return DecisionRecord.of(decide(policy, history, TIMEOUT, 0.5), policy, history, TIMEOUT, 0.5)


def attempt(**changes: Any) -> RetryAttempt:
    about = {"tenant_id": "tenant-123", "correlation_id": "corr-456", "trace_id": "trace-789"}
    usual = about | {"retry_category": "RETRY_NATS_PUBLISH", "operation": "Publish to audit", "attempt_number": 2}
    return retry_events.attempt(recorded(), **usual | changes)


def test_a_retry_attempt_has_the_documented_keys_on_top_and_reads_back_as_itself_to_the_byte() -> None:
    body = encode(attempt())
    assert {
        *("event_type", "retry_category", "operation", "attempt_number", "max_attempts", "delay_seconds"),
        *("exception_type", "exception_message", "tenant_id", "correlation_id", "trace_id", "timestamp"),
    } <= set(json.loads(body))
    assert json.loads(body)["event_type"] == "retry_attempt"
    assert decode(body) == attempt()
    assert encode(decode(body)) == body
    key = json.loads(encode(IdempotencyEvent(timestamp=AT, idempotency_key="abc", action="hit")))
    assert (key["event_type"], key["idempotency_key"], key["action"]) == ("idempotency", "abc", "hit")
    with pytest.raises(msgspec.ValidationError):
        decode(b'{"event_type":"gossip","timestamp":"now"}')


def test_an_exhaustion_has_the_documented_keys_on_top() -> None:
    event = retry_events.given_up(recorded(History(3, 2.0)), final_exception_message="KV operation timeout")
    body = json.loads(encode(event))

    assert {"event_type", "retry_category", "operation", "total_attempts", "final_exception_type"} <= set(body)
    assert body["reason"] == "attempts_spent" == body["decision"]["answer"]


def test_keys_are_sorted_at_every_depth() -> None:
    text = encode(attempt(additional_context={"b": {"z": 1, "a": 2}, "a": 3})).decode()

    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def test_every_type_and_code_is_there_once() -> None:
    tags = [str(kind.__struct_config__.tag) for kind in EVENT_TYPES]
    fields = [field for kind in EVENT_TYPES for field in msgspec.structs.fields(kind)]
    codes = [field.default for field in fields if field.name == "event_code"]
    assert len(set(tags)) == len(tags) == len(set(codes)) == len(codes)
    assert {
        *("retry_attempt", "retry_exhausted", "idempotency", "retry_refused", "retry_recovered", "admission"),
        *("routing", "dropped", "quarantined", "requeued", "breaker", "timeout_occurred", "operator_action"),
    } <= set(tags)


def test_no_limit_is_stored_as_null_and_a_time_as_utc_to_the_millisecond() -> None:
    stored = PolicyRecord.of(POLICY)
    assert json.loads(msgspec.json.encode(stored))["time_budget"] is None
    assert stored.policy() == POLICY
    assert timestamp(1_769_375_700.1239) == "2026-01-25T21:15:00.123Z"


@given(
    st.integers(1, 9),
    st.floats(0, 20),
    st.sampled_from(["exponential", "linear", "fixed", "immediate", "none"]),
    st.sampled_from(["none", "full", "equal", "proportional", "decorrelated"]),
    st.none() | st.floats(0.1, 100),
)
def test_any_policy_survives_being_stored(
    attempts: int, base: float, strategy: Any, jitter: Any, budget: float | None
) -> None:
    policy = RetryPolicy(attempts, base, strategy=strategy, jitter=jitter, time_budget=budget, whole_seconds=True)

    assert msgspec.json.decode(msgspec.json.encode(PolicyRecord.of(policy)), type=PolicyRecord).policy() == policy


def test_correlation_and_trace_are_written_with_the_submission_and_with_what_is_refused() -> None:
    ids: dict[str, Any] = {"timestamp": AT, "correlation_id": "c", "trace_id": "t", "work_id": "w"}
    kept = [Submitted(**ids, actor="me", host="h", process=1), Admission(**ids, status="rejected", reason="queue_full")]
    assert [as_written(one) for one in kept] == kept
    for event in (Routing(**ids), Admission(**ids), Completed(**ids, status="error")):
        written = as_written(event)
        assert (written.correlation_id, written.trace_id, written.work_id) == (None, None, "w")


def test_a_long_tenant_is_written_as_its_hash_where_a_worker_was_chosen_or_accepted() -> None:
    tenant = "4f1c9a52-7a43-4a55-9c53-0b6e3f0f3a77"
    assert tenant_hash(tenant) == "c7c6309fefa2", "as documented: stored events have it"
    ids: dict[str, Any] = {"timestamp": AT, "work_id": "w", "tenant_id": tenant}
    for event in (Routing(**ids, worker_id="worker-1"), Admission(**ids, worker_id="worker-1")):
        written = as_written(event)
        assert isinstance(written, Routing | Admission)
        assert (written.tenant_id, written.tenant_hash) == (None, tenant_hash(tenant))
    named = [
        Submitted(**ids, actor="me"),
        Completed(**ids, status="success"),
        Routing(**ids, reason="no worker"),
        Admission(**ids, status="rejected", reason="queue_full"),
    ]
    assert {as_written(event).tenant_id for event in named} == {tenant}
    short = ids | {"tenant_id": tenant[:14]}
    lengths = {len(encode(as_written(Routing(**one, worker_id="w1")))) for one in (short, ids)}
    assert len(lengths) == 1, "the control: up to here a hash is not shorter"
    assert as_written(Routing(**short, worker_id="w1")).tenant_id == tenant[:14]


def test_a_routing_to_the_only_worker_names_it_once_and_reads_back_with_it() -> None:
    alone: dict[str, Any] = {"timestamp": AT, "work_id": "w", "inputs": {"best": (("worker-1",),)}}
    body = encode(as_written(Routing(**alone, worker_id="worker-1")))
    assert body.count(b"worker-1") == 1
    read = decode(body)
    assert isinstance(read, Routing)
    assert read.worker_id == "worker-1"
    for other in (
        Routing(**alone, worker_id="worker-2"),
        Routing(**alone, worker_id="worker-1", reason="probe"),
        Routing(timestamp=AT, worker_id="worker-1", inputs={"best": [["worker-1"]], "route": 2}),
        Routing(timestamp=AT, worker_id="worker-1"),
    ):
        assert b'"worker_id":"worker-' in encode(as_written(other))
    assert lone_worker({"best": [["a"], ["b"]]}) is None
    missing = decode(b'{"event_type":"routing","timestamp":"2026-01-25T21:15:00.000Z"}')
    assert isinstance(missing, Routing)
    assert missing.worker_id is None
