"""A decision before it is needed, and every wait that would follow."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from reefknot.core.backoff import delay_before, draw, key_number
from reefknot.core.decide import Again, History, Reason, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import Jitter, RetryPolicy
from reefknot.policy.model.book import Layer, Request, TargetEntry, patch
from reefknot.policy.model.defaults import builtin_book
from reefknot.policy.model.explain import MOST_SHOWN, PlannedWait, explain, horizon, lost_retries, schedule
from tests.rows import for_each_row

TIMEOUT = Failure(ErrorCode.connection_timeout, FailureType.TRANSIENT)
STEADY = RetryPolicy(4, 1.0, max_delay=30.0, jitter="none")


def test_a_failure_worth_another_try_has_a_schedule_and_no_reason() -> None:
    answer = explain("block:http", STEADY, TIMEOUT)

    assert answer.retries
    assert answer.reason is None
    assert (answer.target, answer.failure, answer.policy) == ("block:http", TIMEOUT, STEADY)
    assert answer.schedule == (PlannedWait(0, 1.0, 1.0), PlannedWait(1, 2.0, 2.0), PlannedWait(2, 4.0, 4.0))


@for_each_row(
    ("policy", "failure", "reason"),
    [
        (STEADY.replace(retryable=False), TIMEOUT, Reason.NOT_RETRYABLE),
        (STEADY.replace(strategy="no_retry"), TIMEOUT, Reason.NOT_RETRYABLE),
        (STEADY.replace(max_attempts=1), TIMEOUT, Reason.ATTEMPTS_SPENT),
        (STEADY.replace(time_budget=1.0), TIMEOUT, Reason.BUDGET_SPENT),
        (STEADY, Failure(ErrorCode.http_error, FailureType.RATE_LIMITED, retry_after=301.0), Reason.HINT_TOO_LONG),
        (STEADY, Failure(ErrorCode.cancelled_by_timeout, FailureType.PERMANENT), Reason.BUDGET_SPENT),
    ],
)
def test_a_failure_that_ends_it_has_its_reason_and_no_schedule(
    policy: RetryPolicy, failure: Failure, reason: Reason
) -> None:
    answer = explain("block:http", policy, failure)

    assert not answer.retries
    assert (answer.reason, answer.schedule) == (reason, ())
    assert (answer.target, answer.failure, answer.policy) == ("block:http", failure, policy)


LOST = (
    "the first wait is up to 60 s (base_delay, at s.py:7), and all executions and waits have 30 s (time_budget, at "
    "built-in: worker default), so a failed execution is often not retried; write @rk.block(…, timeout=210), which has "
    "room for every wait, or a shorter base_delay"
)


@for_each_row(
    ("step", "request", "text"),
    [
        ({"base_delay": 60.0}, Request(), LOST),
        ({"base_delay": 30.0, "jitter": "none"}, Request(), "the first wait is 30 s (base_delay"),
        ({"base_delay": 30.0, "jitter": "none"}, Request(), "a failed execution is never retried; "),
        ({"base_delay": 20.0}, Request(time_budget=20.0), "; give the assignment a timeout of 100 s, which"),
        ({"time_budget": 0.1}, Request(), "(base_delay, at built-in: worker default)"),
        ({"time_budget": 0.1}, Request(), "write @rk.block(…, timeout=1)"),
        ({"base_delay": 29.9}, Request(), ""),
        ({"base_delay": 60.0, "max_attempts": 1}, Request(), ""),
        ({"base_delay": 60.0, "retryable": False}, Request(), ""),
        ({"max_attempts": 3}, Request(base_delay=20.0, time_budget=5.0), ""),
    ],
)
def test_a_steps_wait_that_its_time_cannot_hold_is_told_with_what_to_write(
    step: dict[str, Any], request: Request, text: str
) -> None:
    own = {"block:a": patch(Layer.STEP, "s.py:7", step)}
    policy = builtin_book().with_blocks(own).resolve("block:a", request=request)

    found = lost_retries(policy, policy.provenance, near="at {}".format)

    assert text in found
    assert bool(found) is bool(text)


def test_the_time_that_a_file_gives_a_step_is_changed_there() -> None:
    book = structs.replace(
        builtin_book(),
        targets={"block:a": (TargetEntry(patch(Layer.TARGET, "reefknot.yaml:3", {"time_budget": 20.0})),)},
        own={"block:a": patch(Layer.STEP, "s.py:7", {"base_delay": 60.0})},
        _cache={},
    )
    policy = book.resolve("block:a")

    assert "; set timeout_ms to 200000 at reefknot.yaml:3, which has" in lost_retries(policy, policy.provenance)


def test_a_schedule_ends_where_the_shortest_waits_would_outlive_the_budget() -> None:
    """1 + 2 fit into 3.5 s, and 4 more do not; at 3 s sharp the second would end with the budget."""
    assert [wait.retry for wait in schedule(STEADY.replace(time_budget=3.5))] == [0, 1]
    assert [wait.retry for wait in schedule(STEADY.replace(time_budget=3.0))] == [0]
    assert explain("block:http", STEADY.replace(jitter="full", time_budget=0.5), TIMEOUT).retries


@for_each_row(
    ("jitter", "ranges"),
    [
        ("none", [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)]),
        ("full", [(0.0, 1.0), (0.0, 2.0), (0.0, 4.0)]),
        ("equal", [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0)]),
        ("proportional", [(0.9, 1.1), (1.8, 2.2), (3.6, 4.4)]),
        ("decorrelated", [(1.0, 3.0), (1.0, 9.0), (1.0, 27.0)]),
    ],
)
def test_a_wait_is_given_as_its_range(jitter: Jitter, ranges: list[tuple[float, float]]) -> None:
    waits = list(schedule(STEADY.replace(jitter=jitter)))

    assert [pytest.approx((wait.min, wait.max)) for wait in waits] == ranges
    assert [wait.delay for wait in waits] == [None, None, None]


@for_each_row("jitter", Jitter)
def test_with_a_seed_the_very_waits_are_given(jitter: Jitter) -> None:
    policy = STEADY.replace(jitter=jitter, max_attempts=8)
    expected: list[float] = []
    for k in range(7):
        chosen = draw(7, key_number("block:http"), k)
        expected.append(delay_before(k, policy, draw=chosen, previous=expected[-1] if expected else 0.0))

    answer = explain("block:http", policy, TIMEOUT, seed=7)

    assert [wait.delay for wait in answer.schedule] == expected
    assert all(wait.min <= (wait.delay or 0.0) <= wait.max for wait in answer.schedule)
    assert answer.schedule != explain("block:http", policy, TIMEOUT, seed=8).schedule or jitter is Jitter.NONE


@for_each_row(
    ("policy", "hint", "ranges"),
    [
        (STEADY, 3.0, [(3.0, 3.3), (3.0, 3.3), (4.0, 4.3)]),  # it stretches every wait that is shorter
        (STEADY.replace(max_attempts=2), 60.0, [(60.0, 61.0)]),  # its spread is at most a second
        (STEADY, 0.0, [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)]),
        # the wait that decorrelated jitter looks back to is the one that a hint stretched
        (STEADY.replace(jitter="decorrelated", max_delay=100.0, max_attempts=3), 10.0, [(10.0, 11.0), (10.0, 34.0)]),
        (STEADY.replace(max_attempts=1), 3.0, []),
    ],
)
def test_a_hint_stretches_the_waits_that_are_shorter(
    policy: RetryPolicy, hint: float, ranges: list[tuple[float, float]]
) -> None:
    assert [(wait.min, wait.max) for wait in schedule(policy, hint)] == [pytest.approx(one) for one in ranges]


def test_a_hint_is_spread_by_the_same_draw_and_another_key_draws_otherwise() -> None:
    waits = list(schedule(STEADY, 3.0, seed=7, key="k"))
    for wait, own in zip(waits, (1.0, 2.0, 4.0), strict=True):
        assert wait.delay == pytest.approx(max(own, 3.0) + draw(7, key_number("k"), wait.retry) * 0.3)

    policy = STEADY.replace(jitter="full")
    one, other = list(schedule(policy, seed=7, key="a")), list(schedule(policy, seed=7, key="b"))
    assert [wait.delay for wait in one] != [wait.delay for wait in other]
    assert list(schedule(policy, seed=7)) == list(schedule(policy, seed=7, key=""))


def test_waits_are_whole_seconds_for_a_connector_and_a_hundred_at_most() -> None:
    policy = RetryPolicy(4, 1.0, max_delay=30.0, jitter="proportional", jitter_factor=0.3, whole_seconds=True)
    waits = list(schedule(policy, seed=3, key="connector:x"))
    assert [(wait.min, wait.max) for wait in waits] == [(1.0, 1.0), (1.0, 2.0), (2.0, 5.0)]
    assert all(wait.delay == int(wait.delay or 0.5) for wait in waits)

    waits = list(schedule(STEADY.replace(max_attempts=1_000_000)))
    assert (len(waits), MOST_SHOWN) == (100, 100)
    assert waits[-1] == PlannedWait(99, 30.0, 30.0)


@given(
    st.sampled_from(Jitter),
    st.integers(1, 12),
    st.none() | st.floats(0.0, 400.0),
    st.integers(0, 99),
    st.sampled_from([None, 5.0, 60.0]),
)
def test_the_schedule_is_what_deciding_again_and_again_would_give(
    jitter: Jitter, attempts: int, hint: float | None, seed: int, budget: float | None
) -> None:
    """Work that fails at once every time, driven through `decide` with the schedule's own draws."""
    policy = RetryPolicy(attempts, 0.5, max_delay=20.0, jitter=jitter, jitter_factor=0.2, time_budget=budget)
    failure = Failure(ErrorCode.connection_timeout, FailureType.TRANSIENT, retry_after=hint)
    answer = explain("block:x", policy, failure, seed=seed)
    planned = [wait.delay for wait in answer.schedule]

    waited: list[float] = []
    while True:
        k = len(waited)
        history = History(k + 1, sum(waited), waited[-1] if waited else 0.0)
        decision = decide(policy, history, failure, draw(seed, key_number("block:x"), k))
        if not isinstance(decision, Again):
            break
        waited.append(decision.delay)

    assert planned[: len(waited)] == pytest.approx(waited)
    if budget is None:
        assert len(planned) == len(waited)
    else:
        assert len(planned) >= len(waited)


@for_each_row(
    ("policy", "seconds"),
    [
        (RetryPolicy(4, 1.0, jitter="none", attempt_timeout=10), 1 + 2 + 4 + 4 * 10),
        (RetryPolicy(4, 1.0, jitter="none", attempt_timeout=10, time_budget=30), 30),
        (RetryPolicy(3, 1.0, jitter="full"), 1 + 2),  # attempts without a limit count as nothing
    ],
)
def test_the_horizon_is_the_longest_waits_and_all_attempts_within_the_budget(policy: RetryPolicy, seconds: int) -> None:
    assert horizon(policy) == seconds
