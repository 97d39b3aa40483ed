"""The retry decision, and the outcome."""

from math import inf, nan
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reefknot.core.backoff import delay_before
from reefknot.core.backoff import draw as drawn
from reefknot.core.decide import (
    DECIDER_VERSION,
    Again,
    AttemptRecord,
    Decision,
    History,
    Outcome,
    Reason,
    Stop,
    ThrottleView,
    decide,
    matches_exception_lists,
)
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import Jitter, RetryPolicy, RetryStrategy, class_name
from tests.rows import for_each_row

CUT = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "cut", exceptions=("builtins.ConnectionError",))
PLAIN = RetryPolicy(jitter="none")
FIRST = History(attempts=1)
EMPTY = ThrottleView(acting=True, tokens=0.0)


def hinted(seconds: float) -> Failure:
    return Failure(ErrorCode.http_error, FailureType.RATE_LIMITED, "slow down", 429, seconds)


def delay_of(decision: Decision) -> float:
    assert isinstance(decision, Again)
    return decision.delay


def test_a_first_failure_is_tried_again_after_the_base_delay() -> None:
    assert decide(PLAIN, FIRST, CUT, 0.5) == Again(1.0)


def test_the_wait_grows_with_the_retries_made() -> None:
    policy = PLAIN.replace(max_attempts=10)

    assert [decide(policy, History(n), CUT, 0.5) for n in (1, 2, 3)] == [Again(1.0), Again(2.0), Again(4.0)]
    assert [History(n).retries for n in (1, 2, 3)] == [0, 1, 2]


def test_a_history_begins_with_nothing_spent() -> None:
    assert (FIRST.elapsed, FIRST.previous_delay) == (0.0, 0.0)


def test_the_draw_and_the_last_wait_reach_the_backoff() -> None:
    full = RetryPolicy(jitter="full", base_delay=2)
    decorrelated = RetryPolicy(jitter="decorrelated", base_delay=1)

    assert decide(full, FIRST, CUT, 0.25) == Again(0.5)
    assert decide(decorrelated, History(2, previous_delay=2.0), CUT, 0.5) == Again(3.5)


# --- each way to stop ---------------------------------------------------------------------------------------------

OUT_OF_TIME = Failure(ErrorCode.cancelled_by_timeout, FailureType.PERMANENT)
EXHAUSTED = Failure(ErrorCode.network_error, FailureType.TRANSIENT, exhausted=True)


def test_a_spent_time_budget_is_the_reason_when_the_failure_says_so() -> None:
    assert decide(PLAIN, FIRST, OUT_OF_TIME, 0.0, verdict=True) == Stop(Reason.BUDGET_SPENT)


def test_an_inner_retry_that_gave_up_is_not_multiplied() -> None:
    assert decide(PLAIN, FIRST, EXHAUSTED, 0.0, verdict=True) == Stop(Reason.INNER_EXHAUSTED)


@pytest.mark.parametrize("policy", [PLAIN.replace(retryable=False), PLAIN.replace(strategy="no_retry")])
def test_a_policy_that_forbids_retries_beats_a_verdict(policy: RetryPolicy) -> None:
    assert decide(policy, FIRST, CUT, 0.0, verdict=True) == Stop(Reason.NOT_RETRYABLE)


def test_a_verdict_is_obeyed_and_no_verdict_lets_the_rest_decide() -> None:
    assert decide(PLAIN, FIRST, CUT, 0.0, verdict=False) == Stop(Reason.NOT_RETRYABLE)
    assert decide(PLAIN, FIRST, CUT, 0.0, verdict=True) == Again(1.0)
    assert decide(PLAIN, FIRST, CUT, 0.0, verdict=None) == Again(1.0)


def test_the_policys_own_lists_speak_only_when_nobody_else_did() -> None:
    never = PLAIN.replace(non_retryable_exceptions=[ConnectionError])
    other = PLAIN.replace(retryable_exceptions=[ValueError])

    assert decide(never, FIRST, CUT, 0.0) == Stop(Reason.NOT_RETRYABLE)
    assert decide(never, FIRST, CUT, 0.0, verdict=True) == Again(1.0)
    assert decide(other, FIRST, CUT, 0.0) == Stop(Reason.NOT_RETRYABLE)
    assert decide(PLAIN.replace(retryable_exceptions=[OSError, ConnectionError]), FIRST, CUT, 0.0) == Again(1.0)


@pytest.mark.parametrize(
    ("attempts", "answer"), [(2, Again(2.0)), (3, Stop(Reason.ATTEMPTS_SPENT)), (4, Stop(Reason.ATTEMPTS_SPENT))]
)
def test_attempts_count_executions(attempts: int, answer: Decision) -> None:
    assert decide(PLAIN, History(attempts), CUT, 0.0) == answer


def test_an_open_breaker_stops() -> None:
    assert decide(PLAIN, FIRST, CUT, 0.0, breaker_open=True) == Stop(Reason.BREAKER_OPEN)
    assert decide(PLAIN, FIRST, CUT, 0.0, breaker_open=False) == Again(1.0)


def test_a_caller_who_asked_to_stop_gets_no_further_attempt() -> None:
    assert decide(PLAIN, FIRST, CUT, 0.0, stopped=True) == Stop(Reason.STOPPED)
    assert decide(PLAIN, FIRST, CUT, 0.0, stopped=False) == Again(1.0)


@for_each_row(
    ("wait", "answer"),
    [(None, Again(1.0)), (0.0, Again(0.0)), (2.5, Again(2.5)), (1e9, Again(PLAIN.max_delay))],
)
def test_a_wait_of_the_callers_takes_the_place_of_the_backoff_below_the_cap(
    wait: float | None, answer: Decision
) -> None:
    assert decide(PLAIN, FIRST, CUT, 0.5, wait=wait) == answer


def test_a_wait_of_the_callers_is_bounded_by_hints_and_the_deadline() -> None:
    hint = Failure(ErrorCode.network_error, FailureType.TRANSIENT, retry_after=3.0)
    assert decide(PLAIN, FIRST, hint, 0.0, wait=1.0) == Again(3.0)
    assert decide(PLAIN.replace(time_budget=5), FIRST, CUT, 0.0, wait=5.0) == Stop(Reason.BUDGET_SPENT)


@for_each_row(
    ("view", "answer"),
    [
        (None, Again(1.0)),
        (ThrottleView(acting=True, tokens=1.0), Again(1.0)),
        (ThrottleView(acting=True, tokens=0.999), Stop(Reason.THROTTLED)),
        (ThrottleView(acting=False, tokens=-50.0), Again(1.0)),
    ],
)
def test_an_acting_throttle_wants_a_whole_token(view: ThrottleView | None, answer: Decision) -> None:
    assert decide(PLAIN, FIRST, CUT, 0.0, throttle=view) == answer


@for_each_row(
    ("elapsed", "answer"),
    [
        (3.999, Again(1.0)),
        (4.0, Stop(Reason.BUDGET_SPENT)),
        (4.9, Stop(Reason.BUDGET_SPENT)),
        (7.0, Stop(Reason.BUDGET_SPENT)),
    ],
)
def test_a_wait_that_ends_at_or_after_the_deadline_is_not_started(elapsed: float, answer: Decision) -> None:
    assert decide(PLAIN.replace(time_budget=5), History(1, elapsed), CUT, 0.0) == answer


def test_the_reasons_come_in_the_order_of_the_checks() -> None:
    """Everything that can stop it does; taking the first away shows the next."""
    policy = PLAIN.replace(max_attempts=1, retryable=False, time_budget=1, max_retry_after=2)
    late = History(1, elapsed=9.0)
    hint = Failure(ErrorCode.network_error, FailureType.TRANSIENT, retry_after=3.0)
    everything: dict[str, Any] = {"verdict": False, "throttle": EMPTY, "breaker_open": True, "stopped": True}

    assert decide(policy, late, OUT_OF_TIME, 0.0, **everything) == Stop(Reason.BUDGET_SPENT)
    assert decide(policy, late, EXHAUSTED, 0.0, **everything) == Stop(Reason.INNER_EXHAUSTED)
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.NOT_RETRYABLE)
    policy = policy.replace(retryable=True)
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.NOT_RETRYABLE)
    everything["verdict"] = True
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.ATTEMPTS_SPENT)
    policy = policy.replace(max_attempts=2)
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.STOPPED)
    everything["stopped"] = False
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.BREAKER_OPEN)
    everything["breaker_open"] = False
    policy = policy.replace(max_delay=2.0)
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.HINT_TOO_LONG)
    policy = policy.replace(max_retry_after=3)
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.BUDGET_SPENT)
    policy = policy.replace(time_budget=None)
    assert decide(policy, late, hint, 0.0, **everything) == Stop(Reason.THROTTLED)
    everything["throttle"] = None
    assert decide(policy, late, hint, 0.0, **everything) == Again(3.0)


def test_the_reasons_and_the_version_are_what_events_carry() -> None:
    assert [reason.value for reason in Reason] == [
        "not_retryable",
        "inner_exhausted",
        "attempts_spent",
        "stopped",
        "breaker_open",
        "hint_too_long",
        "budget_spent",
        "throttled",
    ]
    assert DECIDER_VERSION == 1


# --- the server's hint --------------------------------------------------------------------------------------------


@for_each_row(
    ("hint", "draw", "delay"),
    [
        (0.0, 0.5, 1.0),  # 0 is a value: the own backoff stands
        (0.5, 0.0, 1.0),  # the longer of the two
        (0.5, 0.5, 1.025),  # plus up to a tenth of the hint
        (5.0, 0.0, 5.0),
        (5.0, 0.5, 5.25),
        (10.0, 0.5, 10.5),
        (60.0, 0.5, 60.5),  # plus a second at most, beyond max_delay
        (300.0, 0.0, 300.0),
    ],
)
def test_a_hint_is_heard_and_spread(hint: float, draw: float, delay: float) -> None:
    assert delay_of(decide(PLAIN, FIRST, hinted(hint), draw)) == pytest.approx(delay)


def test_a_hint_within_our_own_longest_wait_is_heard_whatever_the_limit_for_hints() -> None:
    patient = PLAIN.replace(max_delay=900.0)
    assert delay_of(decide(patient, FIRST, hinted(301.0), 0.0)) == 301.0
    assert decide(patient, FIRST, hinted(900.5), 0.0) == Stop(Reason.HINT_TOO_LONG)


@for_each_row("hint", [300.001, 1e9, inf, nan])
def test_a_hint_that_is_too_long_stops_now(hint: float) -> None:
    assert decide(PLAIN, FIRST, hinted(hint), 0.5) == Stop(Reason.HINT_TOO_LONG)


def test_a_hint_beyond_the_time_budget_stops_now() -> None:
    assert decide(PLAIN.replace(time_budget=5), FIRST, hinted(5.0), 0.0) == Stop(Reason.BUDGET_SPENT)


def test_a_hint_below_zero_is_no_shorter_wait() -> None:
    assert decide(PLAIN, FIRST, hinted(-5.0), 0.9) == Again(1.0)


def test_the_hint_is_spread_after_whole_seconds_were_made() -> None:
    connector = RetryPolicy(base_delay=2.5, jitter="none", whole_seconds=True)

    assert delay_of(decide(connector, FIRST, hinted(1.0), 0.5)) == pytest.approx(2.05)


policies = st.builds(
    lambda attempts, base, span, multiplier, jitter, strategy, budget, longest: RetryPolicy(
        attempts,
        base,
        max_delay=base + span,
        multiplier=multiplier,
        jitter=jitter,
        strategy=strategy,
        time_budget=budget,
        max_retry_after=longest,
    ),
    st.integers(1, 40),
    st.floats(0, 100),
    st.floats(0, 1000),
    st.floats(1, 10),
    st.sampled_from(Jitter),
    st.sampled_from(RetryStrategy),
    st.none() | st.floats(0.001, 5000),
    st.floats(0, 1000),
)
hints = st.none() | st.just(0.0) | st.floats(0, 2000)
draws = st.floats(0, 1, exclude_max=True)


@given(policies, st.floats(0, 1000), draws)
@example(RetryPolicy(), 300.0, 0.999)
def test_a_heard_hint_is_never_undercut_and_overshot_by_a_second_at_most(
    policy: RetryPolicy, hint: float, draw: float
) -> None:
    match decide(policy, FIRST, hinted(hint), draw):
        case Again(delay):
            own = delay_before(0, policy, draw=draw)
            assert hint <= max(policy.max_retry_after, policy.max_delay)
            assert max(own, hint) <= delay <= max(own, hint) + min(1.0, hint / 10) + 1e-9
            assert delay < policy.time_budget
        case Stop(reason):
            assert reason is not Reason.HINT_TOO_LONG or hint > max(policy.max_retry_after, policy.max_delay)


@given(policies, hints, st.integers(0, 2**32), st.floats(0, 10))
def test_every_loop_ends_within_its_attempts_and_its_time(
    policy: RetryPolicy, hint: float | None, seed: int, work: float
) -> None:
    failure = Failure(ErrorCode.network_error, FailureType.TRANSIENT, retry_after=hint)
    attempts, now, last = 0, 0.0, 0.0
    while True:
        attempts += 1
        now += work
        decision = decide(policy, History(attempts, now, last), failure, drawn(seed, 1, attempts - 1))
        assert attempts <= policy.max_attempts
        if isinstance(decision, Stop):
            break
        assert 0.0 <= decision.delay < inf
        now += decision.delay
        last = decision.delay
        assert now < policy.time_budget

    assert attempts <= policy.max_attempts
    assert decision.reason in {
        Reason.ATTEMPTS_SPENT,
        Reason.NOT_RETRYABLE,
        Reason.BUDGET_SPENT,
        Reason.HINT_TOO_LONG,
    }


@given(policies, hints, draws, st.integers(1, 10**9), st.floats(0, 1e6), st.booleans())
def test_the_same_inputs_give_the_same_answer(
    policy: RetryPolicy, hint: float | None, draw: float, attempts: int, elapsed: float, breaker_open: bool
) -> None:
    failure = Failure(ErrorCode.http_error, FailureType.TRANSIENT, retry_after=hint)
    history = History(attempts, elapsed, 1.0)

    first = decide(policy, history, failure, draw, breaker_open=breaker_open)
    assert decide(policy, history, failure, draw, breaker_open=breaker_open) == first


# --- exception lists ----------------------------------------------------------------------------------------------


def names(cls: type[BaseException]) -> tuple[str, ...]:
    return tuple(class_name(c) for c in cls.__mro__ if c not in (object, BaseException))


LISTS: list[tuple[type[BaseException], list[Any], list[Any], bool]] = [
    (ValueError, [], [], True),  # both empty: yes
    (ValueError, [Exception], [], True),
    (ValueError, [OSError], [], False),  # a list without a match: no
    (ValueError, [], [OSError], True),
    (ValueError, [], [ValueError, TypeError, KeyError], False),
    (ValueError, ["NetworkError", ValueError], [ValueError], True),  # an exact tie is retryable
    (ConnectionResetError, [ConnectionError], [OSError], True),  # the more specific one wins
    (ConnectionResetError, [OSError], [ConnectionError], False),
    (ConnectionResetError, [ConnectionResetError], [ConnectionError], True),
    (UnicodeDecodeError, [ValueError], [UnicodeError], False),
    (KeyError, ["LookupError"], [], True),  # a bare name matches a class anywhere
    (KeyError, ["builtins.LookupError"], [], True),
    (KeyError, ["other.LookupError"], [], False),
    (KeyError, [], ["LookupError"], False),
    (KeyError, [], ["builtins.LookupError"], False),
    (KeyError, [], ["other.LookupError"], True),
]


@for_each_row(("raised", "retryable", "non_retryable", "answer"), LISTS)
def test_the_most_specific_listed_class_decides(
    raised: type[BaseException], retryable: list[Any], non_retryable: list[Any], answer: bool
) -> None:
    policy = PLAIN.replace(retryable_exceptions=retryable, non_retryable_exceptions=non_retryable)

    assert matches_exception_lists(names(raised), policy) is answer


def test_a_bare_name_matches_in_a_module_of_any_depth() -> None:
    deep = ("a.b.c.QuotaError",)

    assert matches_exception_lists(deep, PLAIN.replace(retryable_exceptions=["QuotaError"])) is True
    assert matches_exception_lists(deep, PLAIN.replace(retryable_exceptions=["c.QuotaError"])) is False
    assert matches_exception_lists(("QuotaError",), PLAIN.replace(non_retryable_exceptions=["QuotaError"])) is False


def test_a_failure_without_an_exception_matches_no_list() -> None:
    assert matches_exception_lists((), PLAIN) is True
    assert matches_exception_lists((), PLAIN.replace(retryable_exceptions=[OSError])) is False
    assert matches_exception_lists((), PLAIN.replace(non_retryable_exceptions=[OSError])) is True


# ---- outcomes --------------------------------------------------------------------------------------------------------


FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "cut")
RECORD = AttemptRecord(number=1, failure=FAILURE, elapsed=0.5, delay=None, draw=0.25)


def test_a_success_unwraps_to_its_value() -> None:
    outcome = Outcome(ok=True, value=7, error=None, attempts=1, history=(), elapsed=0.1, reason=None)

    assert outcome.unwrap() == 7


def test_a_success_may_be_none() -> None:
    outcome: Outcome[None] = Outcome(
        ok=True, value=None, error=None, attempts=2, history=(RECORD,), elapsed=0.1, reason=None
    )

    assert outcome.unwrap() is None


def test_a_failure_unwraps_by_raising_the_very_error() -> None:
    error = ConnectionError("cut")
    outcome: Outcome[int] = Outcome(
        ok=False,
        value=None,
        error=error,
        attempts=1,
        history=(RECORD,),
        elapsed=0.5,
        reason=Reason.ATTEMPTS_SPENT,
    )

    with pytest.raises(ConnectionError) as caught:
        outcome.unwrap()

    assert caught.value is error


def test_a_record_of_an_attempt_does_not_change() -> None:
    with pytest.raises(AttributeError):
        RECORD.delay = 1.0  # type: ignore[misc]
