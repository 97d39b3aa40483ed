"""Decisions, decided again."""

import random

import msgspec
import pytest

from reefknot.config.check import book_hash
from reefknot.core.audit.event import (
    AnyEvent,
    BookStored,
    DecisionRecord,
    RetryAttempt,
    RetryExhausted,
    RetryRecovered,
    RetryRefused,
    encode,
)
from reefknot.core.audit.replay import BUILTIN_BOOKS, decided_again, replay
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.book import content_hash
from reefknot.core.retry.decide import REFUSED, Again, History, Stop, ThrottleView, decide
from reefknot.core.retry.policy import Jitter, RetryPolicy, RetryStrategy

AT = "2026-01-25T21:15:00.000Z"


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
    failure = Failure(
        dice.choice(list(ErrorCode)),
        dice.choice(list(FailureType)),
        "it broke",
        dice.choice([None, 429, 503]),
        dice.choice([None, 0.0, dice.uniform(0, 400)]),
        dice.choice([(), ("builtins.ValueError",), ("builtins.TimeoutError", "builtins.OSError")]),
        dice.random() < 0.1,
    )
    history = History(dice.randint(1, 8), dice.uniform(0, 60), dice.uniform(0, 5))
    verdict = dice.choice([None, True, False])
    throttle = dice.choice([None, ThrottleView(dice.random() < 0.5, dice.uniform(-1, 10))])
    breaker = dice.random() < 0.1
    draw = dice.random()
    decision = decide(policy, history, failure, draw, verdict=verdict, throttle=throttle, breaker_open=breaker)
    record = DecisionRecord.of(
        decision, policy, history, failure, draw, verdict=verdict, throttle=throttle, breaker_open=breaker
    )
    match decision:
        case Again(delay=delay):
            return RetryAttempt(
                timestamp=AT,
                attempt_number=history.attempts,
                max_attempts=policy.max_attempts,
                delay_seconds=delay,
                exception_type=failure.code.wire,
                exception_message="it broke",
                decision=record,
            )
        case Stop(reason=reason):
            kind = RetryRefused if reason in REFUSED else RetryExhausted
            return kind(
                timestamp=AT,
                total_attempts=history.attempts,
                final_exception_type=failure.code.wire,
                final_exception_message="it broke",
                reason=reason,
                decision=record,
            )


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


def test_a_changed_input_is_found_when_it_matters() -> None:
    policy = RetryPolicy(3, 0.5, jitter="none")
    failure = Failure(ErrorCode.network_error, FailureType.TRANSIENT)
    history = History(1)
    record = DecisionRecord.of(decide(policy, history, failure, 0.5), policy, history, failure, 0.5)
    forged = msgspec.structs.replace(record, history=History(3))

    assert decided_again(record) == record
    assert decided_again(forged).answer == "attempts_spent"


def test_events_without_a_decision_are_passed_over() -> None:
    seen = replay([encode(RetryRecovered(timestamp=AT, total_attempts=2, elapsed_seconds=0.3))])

    assert (seen.events, seen.decisions, seen.differences) == (1, 0, ())


def test_what_is_no_event_is_a_difference_and_not_a_crash() -> None:
    seen = replay([b"not json", b'{"event_type":"gossip","timestamp":""}', b'{"event_type":"dropped","reason":"\xff"}'])

    assert [difference.event_type for difference in seen.differences] == ["unreadable"] * 3


def test_a_difference_is_told_in_one_line() -> None:
    seen = replay([b"garbage\n"])

    assert [str(one) for one in seen.differences] == [
        "event 1 (unreadable): recorded garbage, decided again JSON is malformed: invalid character (byte 0)"
    ]


def test_a_decision_of_another_decider_is_not_silently_taken_for_ours() -> None:
    policy = RetryPolicy(3, 0.5, jitter="none")
    failure = Failure(ErrorCode.network_error, FailureType.TRANSIENT)
    record = DecisionRecord.of(decide(policy, History(1), failure, 0.5), policy, History(1), failure, 0.5)

    assert decided_again(msgspec.structs.replace(record, decider_version=99)).answer == "unknown decider version 99"


def test_inputs_that_cannot_be_are_told() -> None:
    policy = RetryPolicy(3, 0.5, jitter="none")
    failure = Failure(ErrorCode.network_error, FailureType.TRANSIENT)
    record = DecisionRecord.of(decide(policy, History(1), failure, 0.5), policy, History(1), failure, 0.5)
    broken = msgspec.structs.replace(record, policy=msgspec.structs.replace(record.policy, max_attempts=0))

    assert decided_again(broken).answer.startswith("impossible inputs: ")


# ---- books -----------------------------------------------------------------------------------------------------------

CONTENT = {"worker": {}, "retry_policies": {}, "operations": {"KV_GET": {"max_attempts": 9}}, "sources": {}}


def decision_of(book_hash: str | None) -> bytes:
    policy, failure = RetryPolicy(3, 0.5, jitter="none"), Failure(ErrorCode.network_error, FailureType.TRANSIENT)
    record = DecisionRecord.of(decide(policy, History(1), failure, 0.5), policy, History(1), failure, 0.5)
    return encode(
        RetryAttempt(
            timestamp=AT,
            attempt_number=1,
            max_attempts=3,
            delay_seconds=0.5,
            exception_type="NETWORK_ERROR",
            exception_message="",
            decision=msgspec.structs.replace(record, book_hash=book_hash),
        )
    )


def stored(book_hash: str) -> bytes:
    return encode(BookStored(timestamp=AT, book_hash=book_hash, content=CONTENT))


def test_a_book_is_looked_for_wherever_it_stands_in_the_record() -> None:
    known = content_hash(CONTENT)
    seen = replay([decision_of(known), decision_of("gone"), stored(known), decision_of(None)])

    assert (seen.decisions, seen.books, seen.books_missing) == (3, 1, ("gone",))
    assert seen.differences == ()


def test_the_built_in_book_is_not_missed() -> None:
    nothing_written = book_hash({})

    assert nothing_written in BUILTIN_BOOKS
    assert replay([decision_of(nothing_written), decision_of("builtin")]).books_missing == ()


def test_a_book_that_is_not_what_its_hash_says_is_a_difference() -> None:
    (difference,) = replay([stored("f" * 64)]).differences

    assert (difference.event_type, difference.recorded) == ("book_stored", f"book {'f' * 12}")
    assert difference.decided == f"book {content_hash(CONTENT)[:12]}"


def test_a_book_that_a_secret_was_taken_out_of_cannot_fit_and_is_none() -> None:
    gap = BookStored(timestamp=AT, book_hash="f" * 64, content={"operations": {"[redacted]": {}}})

    assert replay([encode(gap)]).differences == ()


def test_a_flood_of_books_needs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.core.audit.replay.MOST_BOOKS", 2)

    assert len(replay([decision_of(str(number)) for number in range(5)]).books_missing) == 2
