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


def test_a_failure_is_tried_again_after_a_wait_that_grows_and_follows_the_draw_and_the_last_wait() -> None:
    policy = PLAIN.replace(max_attempts=10)
    assert [decide(policy, History(n), CUT, 0.5) for n in (1, 2, 3)] == [Again(1.0), Again(2.0), Again(4.0)]
    assert [History(n).retries for n in (1, 2, 3)] == [0, 1, 2]
    assert (FIRST.elapsed, FIRST.previous_delay) == (0.0, 0.0)

    full = RetryPolicy(jitter="full", base_delay=2)
    decorrelated = RetryPolicy(jitter="decorrelated", base_delay=1)
    assert decide(full, FIRST, CUT, 0.25) == Again(0.5)
    assert decide(decorrelated, History(2, previous_delay=2.0), CUT, 0.5) == Again(3.5)


# --- each way to stop ---------------------------------------------------------------------------------------------

OUT_OF_TIME = Failure(ErrorCode.cancelled_by_timeout, FailureType.PERMANENT)
EXHAUSTED = Failure(ErrorCode.network_error, FailureType.TRANSIENT, exhausted=True)
IN_3_S = Failure(ErrorCode.network_error, FailureType.TRANSIENT, retry_after=3.0)
NEVER = PLAIN.replace(non_retryable_exceptions=[ConnectionError])
FIVE_S = PLAIN.replace(time_budget=5)
NO, SPENT, LATE = Stop(Reason.NOT_RETRYABLE), Stop(Reason.ATTEMPTS_SPENT), Stop(Reason.BUDGET_SPENT)


@for_each_row(
    ("policy", "history", "failure", "more", "answer"),
    [
        (PLAIN, FIRST, CUT, {}, Again(1.0)),
        (PLAIN, FIRST, OUT_OF_TIME, {"verdict": True}, LATE),
        (PLAIN, FIRST, EXHAUSTED, {"verdict": True}, Stop(Reason.INNER_EXHAUSTED)),
        # a policy that forbids retries beats a verdict, a verdict is obeyed, none lets the rest decide
        (PLAIN.replace(retryable=False), FIRST, CUT, {"verdict": True}, NO),
        (PLAIN.replace(strategy="no_retry"), FIRST, CUT, {"verdict": True}, NO),
        (PLAIN, FIRST, CUT, {"verdict": False}, NO),
        (PLAIN, FIRST, CUT, {"verdict": True}, Again(1.0)),
        (PLAIN, FIRST, CUT, {"verdict": None}, Again(1.0)),
        # the policy's own lists speak only when nothing else did
        (NEVER, FIRST, CUT, {}, NO),
        (NEVER, FIRST, CUT, {"verdict": True}, Again(1.0)),
        (PLAIN.replace(retryable_exceptions=[ValueError]), FIRST, CUT, {}, NO),
        (PLAIN.replace(retryable_exceptions=[OSError, ConnectionError]), FIRST, CUT, {}, Again(1.0)),
        # attempts count executions
        (PLAIN, History(2), CUT, {}, Again(2.0)),
        (PLAIN, History(3), CUT, {}, SPENT),
        (PLAIN, History(4), CUT, {}, SPENT),
        # an open breaker, and a caller who asked to stop
        (PLAIN, FIRST, CUT, {"breaker_open": True}, Stop(Reason.BREAKER_OPEN)),
        (PLAIN, FIRST, CUT, {"breaker_open": False}, Again(1.0)),
        (PLAIN, FIRST, CUT, {"stopped": True}, Stop(Reason.STOPPED)),
        (PLAIN, FIRST, CUT, {"stopped": False}, Again(1.0)),
        # a wait of the caller's takes the place of the backoff, within the cap, hints and the deadline
        *((PLAIN, FIRST, CUT, {"wait": wait}, Again(wait)) for wait in (0.0, 2.5)),
        (PLAIN, FIRST, CUT, {"wait": None}, Again(1.0)),
        (PLAIN, FIRST, CUT, {"wait": 1e9}, Again(PLAIN.max_delay)),
        (PLAIN, FIRST, IN_3_S, {"wait": 1.0}, Again(3.0)),
        (FIVE_S, FIRST, CUT, {"wait": 5.0}, LATE),
        # an acting throttle wants a whole token
        (PLAIN, FIRST, CUT, {"throttle": None}, Again(1.0)),
        (PLAIN, FIRST, CUT, {"throttle": ThrottleView(acting=True, tokens=1.0)}, Again(1.0)),
        (PLAIN, FIRST, CUT, {"throttle": ThrottleView(acting=True, tokens=0.999)}, Stop(Reason.THROTTLED)),
        (PLAIN, FIRST, CUT, {"throttle": ThrottleView(acting=False, tokens=-50.0)}, Again(1.0)),
        # a wait that ends at or after the deadline is not started
        (FIVE_S, History(1, 3.999), CUT, {}, Again(1.0)),
        *((FIVE_S, History(1, elapsed), CUT, {}, LATE) for elapsed in (4.0, 4.9, 7.0)),
    ],
)
def test_each_way_to_stop_and_what_is_just_not_one(
    policy: RetryPolicy, history: History, failure: Failure, more: dict[str, Any], answer: Decision
) -> None:
    assert decide(policy, history, failure, 0.0, **more) == answer
    if failure is CUT:
        assert decide(policy, history, failure, 0.5, **more) == answer


def test_the_reasons_come_in_the_order_of_the_checks() -> None:
    """Everything that can stop it does; taking the first away shows the next."""
    policy = PLAIN.replace(max_attempts=1, retryable=False, time_budget=1, max_retry_after=2)
    late = History(1, elapsed=9.0)
    everything: dict[str, Any] = {"verdict": False, "throttle": EMPTY, "breaker_open": True, "stopped": True}

    assert decide(policy, late, OUT_OF_TIME, 0.0, **everything) == Stop(Reason.BUDGET_SPENT)
    assert decide(policy, late, EXHAUSTED, 0.0, **everything) == Stop(Reason.INNER_EXHAUSTED)
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.NOT_RETRYABLE)
    policy = policy.replace(retryable=True)
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.NOT_RETRYABLE)
    everything["verdict"] = True
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.ATTEMPTS_SPENT)
    policy = policy.replace(max_attempts=2)
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.STOPPED)
    everything["stopped"] = False
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.BREAKER_OPEN)
    everything["breaker_open"] = False
    policy = policy.replace(max_delay=2.0)
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.HINT_TOO_LONG)
    policy = policy.replace(max_retry_after=3)
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.BUDGET_SPENT)
    policy = policy.replace(time_budget=None)
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Stop(Reason.THROTTLED)
    everything["throttle"] = None
    assert decide(policy, late, IN_3_S, 0.0, **everything) == Again(3.0)


def test_the_reasons_and_the_version_are_what_events_carry() -> None:
    in_order = "not_retryable inner_exhausted attempts_spent stopped breaker_open hint_too_long budget_spent throttled"
    assert [reason.value for reason in Reason] == in_order.split()
    assert DECIDER_VERSION == 1


# --- the server's hint --------------------------------------------------------------------------------------------


WHOLE = RetryPolicy(base_delay=2.5, jitter="none", whole_seconds=True)


@for_each_row(
    ("policy", "hint", "draw", "delay"),
    [
        (PLAIN, 0.0, 0.5, 1.0),  # 0 is a value: the own backoff stands
        (PLAIN, -5.0, 0.9, 1.0),  # below it is no shorter wait
        (PLAIN, 0.5, 0.0, 1.0),  # the longer of the two
        (PLAIN, 0.5, 0.5, 1.025),  # plus up to a tenth of the hint
        (PLAIN, 5.0, 0.0, 5.0),
        (PLAIN, 5.0, 0.5, 5.25),
        (PLAIN, 10.0, 0.5, 10.5),
        (PLAIN, 60.0, 0.5, 60.5),  # plus a second at most, beyond max_delay
        (PLAIN, 300.0, 0.0, 300.0),
        (PLAIN.replace(max_delay=900.0), 301.0, 0.0, 301.0),  # within our own longest wait, whatever the limit
        (WHOLE, 1.0, 0.5, 2.05),  # spread after whole seconds were made
    ],
)
def test_a_hint_is_heard_and_spread(policy: RetryPolicy, hint: float, draw: float, delay: float) -> None:
    assert delay_of(decide(policy, FIRST, hinted(hint), draw)) == pytest.approx(delay)


@for_each_row(
    ("policy", "hint", "reason"),
    [
        *((PLAIN, hint, Reason.HINT_TOO_LONG) for hint in (300.001, 1e9, inf, nan)),
        (PLAIN.replace(max_delay=900.0), 900.5, Reason.HINT_TOO_LONG),
        (FIVE_S, 5.0, Reason.BUDGET_SPENT),
    ],
)
def test_a_hint_that_is_too_long_stops_now(policy: RetryPolicy, hint: float, reason: Reason) -> None:
    for draw in (0.0, 0.5):
        assert decide(policy, FIRST, hinted(hint), draw) == Stop(reason)


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
    ends = {Reason.ATTEMPTS_SPENT, Reason.NOT_RETRYABLE, Reason.BUDGET_SPENT, Reason.HINT_TOO_LONG}
    assert decision.reason in ends


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


def test_a_bare_name_matches_in_a_module_of_any_depth_and_no_exception_no_list() -> None:
    deep = ("a.b.c.QuotaError",)
    assert matches_exception_lists(deep, PLAIN.replace(retryable_exceptions=["QuotaError"])) is True
    assert matches_exception_lists(deep, PLAIN.replace(retryable_exceptions=["c.QuotaError"])) is False
    assert matches_exception_lists(("QuotaError",), PLAIN.replace(non_retryable_exceptions=["QuotaError"])) is False

    assert matches_exception_lists((), PLAIN) is True
    assert matches_exception_lists((), PLAIN.replace(retryable_exceptions=[OSError])) is False
    assert matches_exception_lists((), PLAIN.replace(non_retryable_exceptions=[OSError])) is True


# ---- outcomes --------------------------------------------------------------------------------------------------------


FAILURE = Failure(ErrorCode.network_error, FailureType.TRANSIENT, "cut")
RECORD = AttemptRecord(number=1, failure=FAILURE, elapsed=0.5, delay=None, draw=0.25)


@pytest.mark.parametrize(("value", "history"), [(7, ()), (None, (RECORD,))])
def test_a_success_unwraps_to_its_value_which_may_be_none(value: object, history: tuple[AttemptRecord, ...]) -> None:
    outcome = Outcome(ok=True, value=value, error=None, attempts=1, history=history, elapsed=0.1, reason=None)
    assert outcome.unwrap() is value


def test_a_failure_unwraps_by_raising_the_very_error_and_its_record_does_not_change() -> None:
    error = ConnectionError("cut")
    spent: dict[str, Any] = {"attempts": 1, "history": (RECORD,), "elapsed": 0.5, "reason": Reason.ATTEMPTS_SPENT}
    with pytest.raises(ConnectionError) as caught:
        Outcome(ok=False, value=None, error=error, **spent).unwrap()
    assert caught.value is error
    with pytest.raises(AttributeError):
        RECORD.delay = 1.0  # type: ignore[misc]
