"""Decisions, decided again."""

import random
from typing import Any

import msgspec
import pytest

from reefknot.audit.model.event import (
    Admission,
    AnyEvent,
    BookStored,
    BreakerEvent,
    DecisionRecord,
    Requeued,
    RetryAttempt,
    RetryExhausted,
    RetryRefused,
    Routing,
    RulesStored,
    encode,
)
from reefknot.audit.model.replay import BUILTIN_BOOKS, decided_again, replay
from reefknot.core.breaker import Permit
from reefknot.core.decide import REFUSED, Again, History, Stop, ThrottleView, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import Jitter, RetryPolicy, RetryStrategy
from reefknot.core.redaction import HIDDEN
from reefknot.policy.check import retry_part
from reefknot.policy.model.book import content_hash
from reefknot.queue.model import admission
from reefknot.queue.model.destination_health import BreakerInputs, DestinationHealth
from reefknot.queue.model.routing import WorkerHealth, WorkerRanking
from tests.rows import for_each_row
from tests.unit.audit import retry_events

AT = retry_events.AT


def random_event(dice: random.Random) -> AnyEvent:
    """A decision as it might have been taken, with all of its inputs."""
    policy = RetryPolicy(
        dice.randint(1, 8),
        dice.uniform(0, 2),
        max_delay=dice.uniform(2, 60),
        multiplier=dice.uniform(1, 4),
        jitter=dice.choice(list(Jitter)),
        strategy=dice.choice(list(RetryStrategy)),
        time_budget=dice.choice([None, dice.uniform(0.1, 60)]),
        retryable=dice.random() < 0.9,
        non_retryable_exceptions=dice.choice([(), ("ValueError",)]),
        whole_seconds=dice.random() < 0.2,
    )
    code, failure_type = dice.choice(list(ErrorCode)), dice.choice(list(FailureType))
    status, hint = dice.choice([None, 429, 503]), dice.choice([None, 0.0, dice.uniform(0, 400)])
    raised = dice.choice([(), ("builtins.ValueError",), ("builtins.TimeoutError", "builtins.OSError")])
    failure = Failure(code, failure_type, "it broke", status, hint, raised, dice.random() < 0.1)
    history = History(dice.randint(1, 8), dice.uniform(0, 60), dice.uniform(0, 5))
    draw = dice.random()
    more: dict[str, Any] = {
        "verdict": dice.choice([None, True, False]),
        "throttle": dice.choice([None, ThrottleView(dice.random() < 0.5, dice.uniform(-1, 10))]),
        "breaker_open": dice.random() < 0.1,
    }
    decision = decide(policy, history, failure, draw, **more)
    record = DecisionRecord.of(decision, policy, history, failure, draw, **more)
    kind = failure.code.wire
    match decision:
        case Again(delay=delay):
            tried = {"attempt_number": history.attempts, "max_attempts": policy.max_attempts, "delay_seconds": delay}
            return retry_events.attempt(record, **tried, exception_type=kind, exception_message="it broke")
        case Stop(reason=reason):
            made = RetryRefused if reason in REFUSED else RetryExhausted
            ended = {"total_attempts": history.attempts, "reason": reason, "final_exception_type": kind}
            return retry_events.given_up(record, made, **ended, final_exception_message="it broke")


def test_ten_thousand_recorded_decisions_come_out_the_same_to_the_byte() -> None:
    dice = random.Random(20260125)
    seen = replay(encode(random_event(dice)) for _ in range(10_000))

    assert (seen.events, seen.decisions, seen.differences) == (10_000, 10_000, ())


def test_a_changed_answer_is_found() -> None:
    """The control: without it, a replay that compares nothing would pass."""
    dice = random.Random(7)
    events = [random_event(dice) for _ in range(200)]
    changed = [i for i, event in enumerate(events, 1) if isinstance(event, RetryAttempt)]
    bodies = [encode(event).replace(b'"answer":"again"', b'"answer":"attempts_spent"') for event in events]
    seen = replay(bodies)

    assert [difference.position for difference in seen.differences] == changed
    assert "recorded attempts_spent" in str(seen.differences[0])


def recorded() -> DecisionRecord:
    policy, failure = RetryPolicy(3, 0.5, jitter="none"), Failure(ErrorCode.network_error, FailureType.TRANSIENT)
    return DecisionRecord.of(decide(policy, History(1), failure, 0.5), policy, History(1), failure, 0.5)


def test_a_changed_input_is_found_when_it_matters_and_another_decider_is_not_taken_for_ours() -> None:
    record = recorded()
    broken = msgspec.structs.replace(record.policy, max_attempts=0)
    assert decided_again(record) == record
    assert decided_again(msgspec.structs.replace(record, history=History(3))).answer == "attempts_spent"
    assert decided_again(msgspec.structs.replace(record, decider_version=99)).answer == "unknown decider version 99"
    impossible = decided_again(msgspec.structs.replace(record, policy=broken))
    assert impossible.answer.startswith("impossible inputs: ")


def test_what_is_no_event_is_a_difference_in_one_line_and_not_a_crash() -> None:
    deep = b'{"event_type":"routing","inputs":{"a":' + b"[" * 50_000
    bodies = [
        b"garbage\n",
        b'{"event_type":"gossip","timestamp":""}',
        b'{"event_type":"dropped","reason":"\xff"}',
        deep,
    ]
    seen = replay(bodies)
    assert [difference.event_type for difference in seen.differences] == ["unreadable"] * 4
    why = "JSON is malformed: invalid character (byte 0)"
    assert str(seen.differences[0]) == f"event 1 (unreadable): recorded garbage, decided again {why}"


# ---- books -----------------------------------------------------------------------------------------------------------

CONTENT = {"worker": {}, "retry_policies": {}, "operations": {"KV_GET": {"max_attempts": 9}}, "sources": {}}


def decision_of(book_hash: str | None) -> bytes:
    return encode(retry_events.attempt(msgspec.structs.replace(recorded(), book_hash=book_hash)))


def stored(book_hash: str) -> bytes:
    return encode(BookStored(timestamp=AT, book_hash=book_hash, content=CONTENT))


def test_a_book_is_looked_for_wherever_it_stands_in_the_record_and_the_built_in_one_is_not_missed() -> None:
    known, nothing_written = content_hash(CONTENT), content_hash(retry_part({}))
    seen = replay([decision_of(known), decision_of("gone"), stored(known), decision_of(None)])
    assert (seen.decisions, seen.books, seen.books_missing) == (3, 1, ("gone",))
    assert seen.differences == ()
    assert nothing_written in BUILTIN_BOOKS
    assert replay([decision_of(nothing_written), decision_of("builtin")]).books_missing == ()


def test_a_book_that_is_not_what_its_hash_says_is_a_difference_unless_a_secret_was_taken_out_of_it() -> None:
    (difference,) = replay([stored("f" * 64)]).differences
    assert (difference.event_type, difference.recorded) == ("book_stored", f"book {'f' * 12}")
    assert difference.decided == f"book {content_hash(CONTENT)[:12]}"
    gap = BookStored(timestamp=AT, book_hash="f" * 64, content={"operations": {"[redacted]": {}}})
    assert replay([encode(gap)]).differences == ()


def test_a_flood_of_books_and_of_rules_needs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.audit.model.replay.MOST_BOOKS", 2)
    assert len(replay([decision_of(str(number)) for number in range(5)]).books_missing) == 2
    monkeypatch.setattr("reefknot.audit.model.replay.MOST_BOOKS", 1)
    other = admission.Rules(size=11)
    found = replay([rules_stored(other, admission.rules_hash(other, "cpu")), rules_stored(), admitted()])
    assert found.differences == ()
    assert sum(found.undecided_by.values()) == 1


# ---- fields, admissions and routings ---------------------------------------------------------------------------------

RULES = admission.Rules(size=10)
HASHED = admission.rules_hash(RULES, "cpu")


def retried() -> bytes:
    return decision_of(None)


def admitted(depth: int = 3, **fields: object) -> bytes:
    view = admission.QueueView(depth, concurrency=2)
    inputs = {"view": view, "rules_hash": HASHED}
    event = Admission(timestamp=AT, work_id="a", resource_class="cpu", queue_depth=depth + 1, inputs=inputs)
    return encode(msgspec.structs.replace(event, **fields))


def rules_stored(
    rules: admission.Rules = RULES, hashed: str = HASHED, version: int = admission.ADMISSION_VERSION
) -> bytes:
    content = admission.rules_content(rules, "cpu")
    return encode(RulesStored(timestamp=AT, version=version, rules_hash=hashed, resource_class="cpu", content=content))


def routed(**fields: object) -> bytes:
    ranking = WorkerRanking([WorkerHealth("w1", queue_depth=2), WorkerHealth("w2", queue_depth=1)], 0.0)
    inputs = msgspec.to_builtins(ranking.inputs())
    event = Routing(timestamp=AT, work_id="a", worker_id="w2", reason="chosen", inputs=inputs)
    return encode(msgspec.structs.replace(event, **fields))


def breaker(**fields: Any) -> bytes:
    """The end of the first rest's probe: it failed, and the next one is in two seconds."""
    health = DestinationHealth(rests=1, rests_until=9.0, probed_at=10.0, generation=2)
    inputs = BreakerInputs(10.5, health=health, permit=Permit(2, probe=True), job="a")
    event = BreakerEvent(
        timestamp=AT, work_id="a", name="x", state="open", probe_seconds=2.0, inputs=msgspec.to_builtins(inputs)
    )
    return encode(msgspec.structs.replace(event, **fields))


def held_back(**fields: Any) -> bytes:
    """A job that finds a breaker open and waits."""
    inputs = BreakerInputs(8.0, health=DestinationHealth(rests=1, rests_until=9.0, generation=1))
    event = BreakerEvent(
        timestamp=AT, work_id="a", name="x", state="open", wait_seconds=1.0, inputs=msgspec.to_builtins(inputs)
    )
    return encode(msgspec.structs.replace(event, **fields))


def test_every_kind_is_decided_again_and_breakers_of_sources_are_facts() -> None:
    source = encode(BreakerEvent(timestamp=AT, name="source:mail", state="resting"))
    redacted = held_back(wait_seconds=9.0, name=HIDDEN)
    seen = replay([breaker(), held_back(), source, retried(), rules_stored(), admitted(), routed()])
    assert seen.kinds == {"breaker": 2, "admission": 1, "retry": 1, "routing": 1}
    assert (seen.decisions, seen.differences, seen.undecided) == (5, (), 0)
    assert replay([redacted]).differences == (), "what was redacted is not compared"


@for_each_row(
    ("body", "said"),
    [
        (breaker(state="closed"), "state 'closed', decided again state 'open'"),
        (breaker(probe_seconds=60.0), "probe_seconds 60.0"),
        (breaker(wait_seconds=1.0), "wait_seconds 1.0"),
        (held_back(wait_seconds=9.0), "wait_seconds 9.0, decided again wait_seconds 1.0"),
        (held_back(inputs={"at": "noon"}), "impossible inputs"),
    ],
)
def test_a_forged_change_of_a_breaker_is_found(body: bytes, said: str) -> None:
    (difference, *_) = replay([body]).differences

    assert said in str(difference)


MESSAGE = b'"inputs":{"message":"Assignment deferred for 9ms",'


@for_each_row(
    ("body", "found", "forged", "said"),
    [
        (retried(), b'"delay_seconds":0.5', b'"delay_seconds":99.0', "delay_seconds 99.0, decided again delay_seconds"),
        (retried(), b'"attempt_number":1', b'"attempt_number":2', "attempt_number 2"),
        (retried(), b'"max_attempts":3,"operation"', b'"max_attempts":4,"operation"', "max_attempts 4"),
        (retried(), b'"exception_type":"NETWORK_ERROR"', b'"exception_type":"OtherError"', "exception_type"),
        (retried(), b'"exception_message":""', b'"exception_message":"fine"', "exception_message 'fine'"),
        (admitted(), b'"timestamp"', b'"status":"rejected","timestamp"', "status 'rejected'"),
        (admitted(), b'"queue_depth":4', b'"queue_depth":2', "queue_depth 2, decided again queue_depth 4"),
        (admitted(), b'"depth":3', b'"depth":10', "decided again status 'rejected'"),
        (admitted(), b'"inputs":{', MESSAGE, "message 'Assignment deferred"),
        (admitted(), b'"timestamp"', b'"reason":"queue_full","timestamp"', "reason 'queue_full'"),
        (routed(), b'"worker_id":"w2"', b'"worker_id":"w1"', "worker_id 'w1', decided again worker_id 'w2'"),
        (routed(), b'"timestamp"', b'"reason":"probe","timestamp"', "reason 'probe'"),
        (routed(), b'["w1","healthy",2,1]', b'["w1","healthy",0,1]', "decided again worker_id 'w1'"),
        (routed(), b'["w1","healthy",2,1]', b'["w1","well",2,1]', "impossible inputs"),
    ],
)
def test_every_field_that_follows_from_a_decision_is_compared(
    body: bytes, found: bytes, forged: bytes, said: str
) -> None:
    assert body.count(found) == 1
    assert replay([rules_stored(), body]).differences == (), "the control"
    (difference, *_) = replay([rules_stored(), body.replace(found, forged)]).differences
    assert said in str(difference)


def test_an_end_of_another_type_or_for_another_reason_than_decided_is_found() -> None:
    dice = random.Random(3)
    ends = [event for event in (random_event(dice) for _ in range(200)) if isinstance(event, RetryExhausted)]
    for event in ends[:20]:
        body = encode(event)
        assert replay([body]).differences == ()
        as_refused = body.replace(b'"event_type":"retry_exhausted"', b'"event_type":"retry_refused"')
        as_more = encode(msgspec.structs.replace(event, total_attempts=event.total_attempts + 1))
        assert "event_type 'retry_refused'" in str(replay([as_refused]).differences[0])
        assert "total_attempts" in str(replay([as_more]).differences[0])


def test_rules_that_are_not_there_leave_their_admissions_undecided_and_forged_ones_are_found() -> None:
    seen = replay([admitted(), admitted()])
    assert (seen.decisions, seen.undecided, seen.rules_missing) == (0, 2, (HASHED,))
    forged = replay([rules_stored(admission.Rules(size=11)), admitted()])

    assert "rules_stored" in str(forged.differences[0])
    assert forged.undecided == 1, "rules that do not fit their hash are not used"


def test_the_baseline_that_admits_everything_is_no_decision() -> None:
    view = {"view": admission.QueueView(3)}
    seen = replay([admitted(inputs=view)])
    assert (seen.decisions, seen.undecided) == (0, 0)
    forgeries: list[dict[str, Any]] = [{"status": "rejected"}, {"reason": "x"}, {"overload_status": "overloaded"}]
    for forged in forgeries:
        assert replay([admitted(inputs=view, **forged)]).differences, forged
    alone = admitted(inputs=view | {"isolated": True}, overload_status="overloaded")
    drained = refused("draining", {"view": admission.QueueView(3, draining=True)})
    assert replay([alone, drained]).differences == ()


# ---- what cannot be decided again ------------------------------------------------------------------------------------


def refused(reason: str, inputs: Any = None, status: str = "rejected") -> bytes:
    return admitted(inputs=inputs, status=status, reason=reason)


@for_each_row(
    ("body", "cause", "said"),
    [
        (admitted(inputs=None), "admission with no inputs", "status 'accepted' with no inputs"),
        (refused("queue_full"), "admission with no inputs", "status 'rejected' with no inputs"),
        (routed(inputs=None, worker_id="w1"), "routing with no inputs", "worker_id 'w1' with no inputs"),
        (routed(inputs={"workers": 2}, worker_id="w1"), "routing with no inputs", "worker_id 'w1' with no inputs"),
    ],
)
def test_a_decision_whose_inputs_were_removed_is_undecided_and_a_difference(body: bytes, cause: str, said: str) -> None:
    seen = replay([rules_stored(), body])
    assert (seen.decisions, seen.undecided, seen.undecided_by) == (0, 1, {cause: 1})
    assert said in str(seen.differences[0])


CLASSES = {"classes": ["cpu"]}
NO_WORKER = "no worker has its class"
FULL = {"refused": {"queue_full cpu": 3}}


@for_each_row(
    ("body", "cause"),
    [
        (refused("invalid", {"message": "job: missing"}, "error"), "admission refused as invalid"),
        (refused("unknown_job_type"), "admission refused as unknown_job_type"),
        (refused("overloaded"), "admission refused as overloaded"),
        (refused("queue_full", FULL), "admission refused where it was submitted"),
        (routed(inputs=None, reason="refused: queue_full"), "routing refused by a worker"),
        (routed(inputs=CLASSES, worker_id=None, reason=NO_WORKER), "routing of a class that no worker has"),
    ],
)
def test_a_recorded_fact_is_undecided_by_its_name_and_no_difference(body: bytes, cause: str) -> None:
    seen = replay([body])
    assert (seen.differences, seen.undecided, seen.undecided_by) == ((), 1, {cause: 1})


@for_each_row(
    ("depth", "level", "inputs", "follows", "followed_once"),
    [
        (0, "healthy", {}, True, True),
        (0, "degraded", {}, False, False),
        (0, "critical", {}, False, False),
        (0, "overloaded", {}, False, True),
        (0, "overloaded", {"isolated": True}, True, True),
        (0, "healthy", {"isolated": True}, False, True),
        (10, "critical", {"isolated": True}, True, True),
        (10, "critical", {}, True, True),
        (10, "healthy", {}, False, False),
        (10, None, {}, False, False),
        (4, "degraded", {}, False, True),
        (4, "degraded", {"held": "degraded"}, True, True),
        (4, "healthy", {"held": "degraded"}, False, True),
        (4, "degraded", {"held": "critical"}, True, True),
        (4, "degraded", {"held": "nothing"}, False, False),
    ],
)
def test_the_load_level_of_an_admission_follows_from_depth_isolation_and_hysteresis(
    depth: int, level: str | None, inputs: dict[str, object], follows: bool, followed_once: bool
) -> None:
    """In a log whose rules are of version 1, neither isolation nor a held level is recorded: both are allowed for."""
    view = admission.QueueView(max(0, depth - 1))
    inputs = {"view": view, "rules_hash": HASHED, **inputs}
    body = admitted(queue_depth=depth, overload_status=level, inputs=inputs)

    assert (not replay([rules_stored(), body]).differences) is follows
    assert (not replay([rules_stored(version=1), body]).differences) is followed_once


def test_a_queue_that_is_not_recorded_was_empty() -> None:
    assert replay([rules_stored(), admitted(0, inputs={"rules_hash": HASHED})]).kinds == {"admission": 1}
    removed = replay([rules_stored(), admitted(3, inputs={"rules_hash": HASHED})])
    assert "queue_depth 4, decided again queue_depth 1" in str(removed.differences[0])


def test_the_depth_is_not_compared_where_the_queue_may_have_changed_meanwhile() -> None:
    """A refusal is written after the store was asked, and room for an arrival is made by an end in the store."""
    full = admission.QueueView(10, oldest=admission.Oldest("b", priority=0, waited_ms=5))
    inputs = {"view": full, "rules_hash": HASHED, "held": "critical"}
    after: dict[str, Any] = {"queue_depth": 9, "overload_status": "critical"}
    accepted = inputs | {"newcomer": admission.Arrival(priority=1), "message": admission.AcceptDropping("b").message}
    message = inputs | {"message": "Queue full, rejecting assignment"}
    refused = admitted(**after, status="rejected", reason="queue_full", inputs=message)
    assert replay([rules_stored(), admitted(**after, inputs=accepted), refused]).differences == ()


def test_rules_by_the_longer_hash_of_older_logs_are_found() -> None:
    whole = content_hash(admission.rules_content(RULES, "cpu"))
    older = whole[:32]
    bodies = [rules_stored(hashed=older, version=1), admitted(inputs={"view": {}, "rules_hash": older})]
    assert replay(bodies).kinds == {"admission": 1}
    assert replay([rules_stored(hashed=whole[:8])]).differences, "the control: a hash that is too short"


def test_codes_of_another_type_and_rules_or_inputs_that_do_not_fit_are_differences() -> None:
    content = {"size": "many"}
    hashed = content_hash(content)[: admission.HASH_DIGITS]
    another_code = retried().replace(b'"event_code":"RK-101"', b'"event_code":"RK-102"')
    of_io = rules_stored().replace(b'"resource_class":"cpu","rules_hash"', b'"resource_class":"io","rules_hash"')
    for bodies, said in (
        ([another_code], "event_code 'RK-102', decided again event_code 'RK-101'"),
        ([of_io], "resource_class 'io', decided again resource_class 'cpu'"),
        ([encode(RulesStored(timestamp=AT, rules_hash=hashed, content=content))], "size"),
        ([rules_stored(), admitted(inputs={"view": {"depth": "deep"}, "rules_hash": HASHED})], "impossible inputs"),
        ([rules_stored(), admitted(queue_depth=None, overload_status=None)], "recorded queue_depth None"),
    ):
        assert [said in str(one) for one in replay(bodies).differences] == [True], said
    seen = replay([encode(Requeued(timestamp=AT, reason="by hand"))])
    assert (seen.events, seen.decisions, seen.differences, seen.undecided) == (1, 0, (), 0), "it has no decision"
