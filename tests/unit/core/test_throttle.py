"""The retry throttle."""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.backoff import draw
from reefknot.core.decide import Again, History, ThrottleView, decide
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import RetryPolicy
from reefknot.core.throttle import RetryThrottle
from reefknot.errors import ParameterError, ParameterTypeError, shown
from tests.rows import for_each_row

DOWN = Failure(ErrorCode.network_error, FailureType.TRANSIENT)
POLICY = RetryPolicy(4, 0.1, jitter="full")


@dataclass
class Traffic:
    requests: int = 0
    attempts: int = 0
    retries: int = 0
    successes: int = 0
    throttled: int = 0


def execute(throttle: RetryThrottle, now: float) -> None:
    if now > throttle.edge:
        throttle.roll(now)
    throttle.tick()


def run(throttle: RetryThrottle | None, *, rate: float, seconds: float, failing: float, start: float = 50.0) -> Traffic:
    """Requests at an even rate, each with its retries, against a place where a share of all calls fails."""
    seen = Traffic(requests=round(rate * seconds))
    due: list[tuple[float, int, int]] = []
    for n in range(seen.requests):
        heappush(due, (start + n / rate, n, 1))
    while due:
        now, key, attempt = heappop(due)
        seen.attempts += 1
        if throttle is not None:
            execute(throttle, now)
        if draw(7, key, 1000 + attempt) >= failing:
            seen.successes += 1
            if throttle is not None:
                throttle.feed()
            continue
        view = None if throttle is None else throttle.view(now)
        chance = draw(3, key, attempt)
        decision = decide(POLICY, History(attempt, now - (start + key / rate)), DOWN, chance, throttle=view)
        if isinstance(decision, Again):
            seen.retries += 1
            if throttle is not None:
                throttle.spend()
            heappush(due, (now + decision.delay, key, attempt + 1))
        elif attempt < POLICY.max_attempts:
            seen.throttled += 1
    return seen


def test_an_outage_of_a_busy_place_is_multiplied_by_four_without_a_throttle_and_hardly_with_one() -> None:
    # 100 requests a second, nothing succeeds for 30 s
    seen = run(RetryThrottle(), rate=100, seconds=30, failing=1.0)
    assert seen.requests == 3000
    assert seen.attempts / seen.requests <= 1.05
    assert seen.throttled > 2800

    # the control
    seen = run(None, rate=100, seconds=30, failing=1.0)
    assert seen.attempts / seen.requests == 4


def test_a_quiet_place_keeps_all_its_retries_and_so_does_a_busy_one_with_one_failure_in_twenty() -> None:
    # two requests a second are eight executions a second: never 100 in 10 s
    seen = run(RetryThrottle(), rate=2, seconds=60, failing=1.0)
    assert seen.attempts == 4 * seen.requests
    assert seen.throttled == 0

    seen = run(RetryThrottle(), rate=100, seconds=30, failing=0.05)
    assert seen.throttled == 0
    assert seen.retries > 100


def test_retries_come_back_with_the_successes() -> None:
    throttle = RetryThrottle()
    run(throttle, rate=100, seconds=10, failing=1.0, start=50.0)
    after = run(throttle, rate=100, seconds=20, failing=0.02, start=100.0)

    assert throttle.tokens > 1
    assert after.throttled <= 20


@given(st.floats(0.0, 1.0), st.integers(20, 200), st.integers(0, 3))
def test_on_a_busy_place_retries_are_bounded_by_what_feeds_them(failing: float, rate: int, whom: int) -> None:
    """
    The first tokens, a tenth per success, a trickle, and the executions before it began to act.

    Busy means 20 requests a second or more. Below 10 a second the throttle stops acting whenever its own refusals
    bring the place under 100 executions in 10 s, and retries are granted again: there the bound does not hold.
    """
    seconds = 8.0
    seen = run(RetryThrottle(), rate=rate, seconds=seconds, failing=failing, start=10.0 + whom)

    assert seen.retries <= 10 + 0.1 * seen.successes + 0.1 * (seconds + 10) + 100


# --- the parts ----------------------------------------------------------------------------------------------------


def busy(**settings: Any) -> RetryThrottle:
    throttle = RetryThrottle(**settings)
    for _ in range(100):
        execute(throttle, 20.0)
    return throttle


@for_each_row(("executions", "acting"), [(0, False), (1, False), (99, False), (100, True), (250, True)])
def test_it_acts_from_a_hundred_executions_on(executions: int, acting: bool) -> None:
    throttle = RetryThrottle()
    for _ in range(executions):
        execute(throttle, 5.0)

    assert throttle.view(5.0) == ThrottleView(acting=acting, tokens=10.0)
    assert throttle.recent(5.0) == throttle.executions == executions


def test_executions_are_forgotten_after_the_window() -> None:
    """To a tenth of the window: 100 executions at 20 s count until 31 s."""
    throttle = busy()

    assert throttle.recent(30.0) == 100
    assert throttle.recent(30.99) == 100
    assert throttle.recent(31.0) == 0
    assert throttle.view(31.0).acting is False


def test_a_new_tenth_begins_only_after_the_edge_and_has_one_mark() -> None:
    throttle = RetryThrottle(window=10)
    for second in range(100):
        execute(throttle, float(second) * 1.5)
        assert throttle.edge == second * 1.5 + 1.0
    assert throttle.executions == 100
    assert throttle.recent(148.5) == 8  # 138 s, 139.5 s, … 148.5 s
    assert len(throttle._marks) == 8

    throttle = RetryThrottle(window=10)
    for tenth in range(10):
        execute(throttle, 3.0 + tenth / 10)

    assert len(throttle._marks) == 1
    assert throttle.recent(3.9) == 10
    execute(throttle, 4.0)
    assert len(throttle._marks) == 1
    execute(throttle, 4.001)
    assert len(throttle._marks) == 2


def test_tokens_come_with_successes_and_with_time_up_to_the_cap() -> None:
    throttle = busy()
    throttle.spend()
    assert throttle.tokens == 9.0
    throttle.feed()
    assert throttle.tokens == pytest.approx(9.1)
    for _ in range(20):
        throttle.feed()
    assert throttle.tokens == 10.0

    throttle = busy()
    assert throttle.view(20.0).tokens == 10.0
    for _ in range(5):
        throttle.spend()
    assert throttle.view(20.0).tokens == 5.0
    assert throttle.view(30.0).tokens == pytest.approx(6.0)
    assert throttle.view(30.0).tokens == pytest.approx(6.0)
    assert throttle.view(1000.0).tokens == 10.0


def test_time_begins_with_the_first_look_even_at_zero_and_a_step_back_of_the_clock_moves_no_tokens() -> None:
    throttle = busy()
    throttle.spend()
    assert throttle.view(900.0).tokens == 9.0
    assert throttle.view(901.0).tokens == pytest.approx(9.1)

    throttle = RetryThrottle()
    throttle.spend()
    throttle.view(0.0)
    execute(throttle, 0.0)
    assert throttle.view(5.0).tokens == pytest.approx(9.5)
    assert throttle.recent(0.5) == 1

    throttle = busy()
    throttle.spend()
    throttle.view(50.0)
    assert throttle.view(40.0).tokens == 9.0
    assert throttle.view(41.0).tokens == pytest.approx(9.1)


def test_retries_leave_a_debt_of_one_token_at_most_which_a_few_successes_pay() -> None:
    # fifty retries of a quiet place do not silence it for minutes once it is busy
    throttle = RetryThrottle()
    throttle.view(1.0)
    for _ in range(50):
        throttle.spend()
    assert throttle.view(1.0).tokens == -1.0
    assert throttle.view(21.5).tokens >= 1.0

    # twenty successes are two tokens: one that was missing, one to spend
    throttle = RetryThrottle(tokens=10, per_second=0)
    for _ in range(1000):
        throttle.spend()
    assert throttle.tokens == -1.0
    for _ in range(21):
        throttle.feed()
    assert throttle.view(0.0).tokens >= 1.0

    throttle = RetryThrottle(tokens=1)
    throttle.spend()
    assert throttle.tokens == 0.0
    throttle.spend()
    assert throttle.tokens == -1.0


def test_the_settings_are_heard_and_the_least_are_accepted() -> None:
    throttle = RetryThrottle(2, per_success=0.5, per_second=0.25, min_executions=3, window=1.0)
    throttle.spend()
    throttle.spend()
    throttle.feed()
    assert throttle.tokens == 0.5
    throttle.view(10.0)
    assert throttle.view(12.0).tokens == 1.0
    for _ in range(3):
        execute(throttle, 12.0)
    assert throttle.view(12.0).acting
    assert not throttle.view(13.1).acting

    throttle = RetryThrottle(1, per_success=0, per_second=0, min_executions=0, window=0.001)
    assert throttle.view(1.0) == ThrottleView(acting=True, tokens=1.0)
    assert type(throttle.cap) is float
    assert RetryThrottle(1.7976931348623157e308).cap == 1.7976931348623157e308


SETTINGS = {"tokens": "1", "per_success": "0", "per_second": "0", "min_executions": "0", "window": "0.001"}


@for_each_row(
    ("name", "value", "of_another_kind"),
    [
        *(("tokens", value, False) for value in (0, 0.999, -1, nan, inf, 10**400)),
        *(("per_success", value, False) for value in (-0.1, nan, inf, -inf)),
        *(("per_second", value, False) for value in (-0.1, nan, inf, 10**400)),
        *(("min_executions", value, False) for value in (-1, nan, inf)),
        *(("window", value, False) for value in (0, 0.0009, -1, nan, inf)),
        *((name, value, True) for name in SETTINGS for value in (True, "1", None, [1])),
    ],
)
def test_a_setting_out_of_range_or_of_another_kind_is_refused_by_name(
    name: str, value: Any, of_another_kind: bool
) -> None:
    settings: dict[str, Any] = {name: value}

    with pytest.raises(ParameterError) as caught:
        RetryThrottle(**settings)

    accepted = f"a finite number, {SETTINGS[name]} or more"
    assert isinstance(caught.value, ParameterTypeError) is of_another_kind
    assert (caught.value.parameter, caught.value.accepted) == (name, accepted)
    assert str(caught.value) == f"{name}={shown(value)} is not accepted: {accepted}"


def test_a_share_of_the_fleets_tokens_caps_them_and_what_was_spent_stays_spent() -> None:
    throttle = RetryThrottle(10.0, per_second=1.0)
    throttle.view(0.0)
    for _ in range(7):
        throttle.spend()
    throttle.share(5.0, per_second=0.5)

    assert (throttle.cap, throttle.tokens) == (5.0, 3.0)
    assert throttle.view(2.0).tokens == 4.0
    throttle.share(2.0, per_second=0.5)
    assert throttle.tokens == 2.0
    with pytest.raises(ParameterError, match="tokens"):
        throttle.share(0.5, per_second=0.1)
    with pytest.raises(ParameterError, match="per_second"):
        throttle.share(1.0, per_second=-0.1)
