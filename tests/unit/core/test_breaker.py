"""A breaker's table of moves, one probe at a time, and reports that come too late."""

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.breaker import Breaker, BreakerSnapshot, BreakerState, Permit, Refused
from reefknot.errors import ParameterError, ParameterTypeError, shown
from tests.rows import for_each_row

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def admitted(breaker: Breaker, now: float) -> Permit:
    permit = breaker.admit(now)
    assert isinstance(permit, Permit)
    return permit


def opened(now: float = 0.0, failures: int = 2) -> Breaker:
    """Open since `now`, with a cool-down of 30 s."""
    breaker = Breaker("billing", failures=failures)
    for _ in range(failures):
        breaker.failed(admitted(breaker, now), now)
    return breaker


def test_it_begins_closed_and_lets_every_call_through() -> None:
    breaker = Breaker("billing")

    assert [breaker.admit(1.0) for _ in range(3)] == [Permit(0), Permit(0), Permit(0)]
    assert Permit(0).probe is False
    assert (breaker.name, breaker.threshold, breaker.cooldown) == ("billing", 5, 30.0)
    assert breaker.snapshot(1.0) == BreakerSnapshot("billing", CLOSED, failures=0, opened=0, retry_after=0.0)


def test_failures_in_a_row_open_it_and_a_success_between_starts_the_count_again() -> None:
    breaker = Breaker("billing")
    states = []
    for _ in range(5):
        breaker.failed(admitted(breaker, 10.0), 10.0)
        states.append(breaker.state(10.0))
    assert states == [CLOSED, CLOSED, CLOSED, CLOSED, OPEN]
    assert breaker.snapshot(12.0) == BreakerSnapshot("billing", OPEN, failures=5, opened=1, retry_after=28.0)

    breaker = Breaker("billing", failures=2)
    breaker.failed(admitted(breaker, 0.0), 0.0)
    breaker.succeeded(admitted(breaker, 0.0))
    breaker.failed(admitted(breaker, 0.0), 0.0)
    assert breaker.state(0.0) is CLOSED
    assert breaker.snapshot(0.0).failures == 1


def test_failures_that_may_not_open_it_count_and_the_next_that_may_does() -> None:
    breaker = Breaker("billing", failures=2)
    for _ in range(5):
        breaker.failed(admitted(breaker, 1.0), 1.0, may_open=False)
    assert breaker.snapshot(1.0) == BreakerSnapshot("billing", CLOSED, failures=5, opened=0, retry_after=0.0)

    breaker.failed(admitted(breaker, 1.0), 1.0, may_open=True)
    assert breaker.state(1.0) is OPEN


def test_one_failure_may_be_enough_and_a_failed_probe_opens_it_whoever_sent_it() -> None:
    assert opened(failures=1).state(0.0) is OPEN
    breaker = opened()
    probe = admitted(breaker, 30.0)
    breaker.failed(probe, 31.0, may_open=False)

    assert breaker.state(60.9) is OPEN


def test_while_open_it_refuses_and_says_for_how_long_and_then_lets_exactly_one_probe_through() -> None:
    breaker = opened(now=100.0)
    assert breaker.admit(100.0) == Refused(30.0)
    assert breaker.admit(129.0) == Refused(1.0)
    assert breaker.state(129.999) is OPEN

    breaker = opened(now=100.0)

    assert breaker.state(130.0) is HALF_OPEN
    assert breaker.snapshot(130.0).retry_after == 0.0
    assert breaker.snapshot(135.0).retry_after == 0.0
    probe = admitted(breaker, 130.0)
    assert probe.probe
    assert breaker.admit(130.0) == Refused(30.0)
    assert breaker.admit(150.0) == Refused(10.0)
    assert breaker.state(150.0) is HALF_OPEN


def test_a_probe_that_succeeds_closes_it_and_one_that_fails_opens_it_for_another_cool_down() -> None:
    breaker = opened(now=100.0)
    breaker.succeeded(admitted(breaker, 130.0))
    assert breaker.snapshot(130.0) == BreakerSnapshot("billing", CLOSED, failures=0, opened=1, retry_after=0.0)
    assert [admitted(breaker, 130.0).probe for _ in range(3)] == [False] * 3
    breaker.failed(admitted(breaker, 131.0), 131.0)
    assert breaker.state(131.0) is CLOSED

    breaker = opened(now=100.0)
    breaker.failed(admitted(breaker, 130.0), 131.0)
    assert breaker.state(131.0) is OPEN
    assert breaker.snapshot(131.0).opened == 2
    assert breaker.admit(131.0) == Refused(30.0)
    assert breaker.admit(161.0) == Permit(breaker._generation, probe=True), "no probe is left behind"


def test_a_probe_that_never_reports_is_given_up_after_a_cool_down() -> None:
    breaker = opened(now=100.0)
    lost = admitted(breaker, 130.0)

    assert isinstance(breaker.admit(159.999), Refused)
    second = admitted(breaker, 160.0)
    assert second.probe
    assert second.generation != lost.generation
    breaker.succeeded(lost)
    assert breaker.state(160.0) is HALF_OPEN
    breaker.failed(lost, 161.0)
    assert breaker.state(161.0) is HALF_OPEN
    breaker.succeeded(second)
    assert breaker.state(161.0) is CLOSED


def test_a_call_from_before_the_opening_has_nothing_to_say_any_more() -> None:
    breaker = Breaker("billing", failures=1)
    old, slow = admitted(breaker, 0.0), admitted(breaker, 0.0)
    breaker.failed(admitted(breaker, 0.0), 0.0)
    breaker.succeeded(old)
    assert breaker.state(0.0) is OPEN
    breaker.failed(slow, 10.0)
    assert breaker.snapshot(10.0) == BreakerSnapshot("billing", OPEN, failures=1, opened=1, retry_after=20.0)
    breaker.succeeded(admitted(breaker, 30.0))
    breaker.failed(slow, 31.0)
    assert breaker.state(31.0) is CLOSED


def test_a_probe_that_failed_cannot_speak_again_for_the_next_one() -> None:
    breaker = opened(now=100.0)
    first = admitted(breaker, 130.0)
    breaker.failed(first, 130.0)
    second = admitted(breaker, 160.0)
    breaker.succeeded(first)
    assert breaker.state(160.0) is HALF_OPEN
    breaker.released(first)
    assert isinstance(breaker.admit(161.0), Refused)
    breaker.succeeded(second)
    assert breaker.state(161.0) is CLOSED


def test_only_the_current_probe_makes_room_for_the_next_at_once() -> None:
    breaker = opened(now=100.0)
    breaker.released(admitted(breaker, 130.0))
    assert breaker.state(130.0) is HALF_OPEN
    assert admitted(breaker, 130.0).probe

    breaker = opened(now=100.0)
    lost = admitted(breaker, 130.0)
    current = admitted(breaker, 160.0)
    breaker.released(lost)
    assert isinstance(breaker.admit(161.0), Refused)
    breaker.released(Permit(current.generation, probe=False))
    assert isinstance(breaker.admit(161.0), Refused)
    breaker.released(current)
    assert admitted(breaker, 161.0).probe

    breaker = Breaker("billing", failures=2)
    breaker.failed(admitted(breaker, 0.0), 0.0)
    breaker.released(admitted(breaker, 0.0))
    assert breaker.snapshot(0.0) == BreakerSnapshot("billing", CLOSED, failures=1, opened=0, retry_after=0.0)


MOVES = {(CLOSED, CLOSED), (CLOSED, OPEN), (OPEN, OPEN), *((HALF_OPEN, after) for after in BreakerState)}
moves = st.lists(
    st.tuples(st.sampled_from(["call", "success", "failure", "release"]), st.integers(0, 5), st.floats(0, 20)),
    max_size=60,
)


@given(moves, st.integers(1, 4))
def test_whatever_happens_there_is_one_live_probe_at_most_and_no_endless_silence(
    steps: list[tuple[str, int, float]], failures: int
) -> None:
    breaker, now, out = Breaker("x", failures=failures, cooldown=10), 0.0, list[tuple[Permit, float]]()
    for move, which, passed in steps:
        now += passed
        before = breaker.snapshot(now)
        if move == "call":
            answer = breaker.admit(now)
            if isinstance(answer, Permit):
                live = [p for p, since in out if p.probe and p.generation == breaker._generation and now < since + 10]
                assert not (answer.probe and [p for p in live if p is not answer])
                assert answer.probe is (before.state is HALF_OPEN)
                out.append((answer, now))
            else:
                assert 0 < answer.retry_after <= 10
        elif out:
            permit, _ = out.pop(which % len(out))
            match move:
                case "success":
                    breaker.succeeded(permit)
                case "failure":
                    breaker.failed(permit, now)
                case _:
                    breaker.released(permit)
        after = breaker.snapshot(now)
        assert (before.state, after.state) in MOVES

    assert isinstance(breaker.admit(now + 20), Permit)


FAILURES, COOLDOWN = "a whole number, 1 or more", "a finite number of seconds above 0"


@for_each_row(
    ("settings", "accepted", "of_another_kind"),
    [
        *(({"failures": value}, FAILURES, False) for value in (0, -1)),
        *(({"cooldown": value}, COOLDOWN, False) for value in (0, 0.0, -1, nan, inf, -inf, 10**400)),
        *(({"name": value}, "a text that names the destination", True) for value in (None, 3, b"x")),
        *(({"failures": value}, FAILURES, True) for value in (True, 2.0, "2", None, nan)),
        *(({"cooldown": value}, COOLDOWN, True) for value in (True, "2", None)),
    ],
)
def test_a_setting_out_of_range_or_of_another_kind_is_refused_by_name(
    settings: dict[str, Any], accepted: str, of_another_kind: bool
) -> None:
    with pytest.raises(ParameterError) as caught:
        Breaker(**({"name": "billing"} | settings))

    ((parameter, value),) = settings.items()
    assert isinstance(caught.value, ParameterTypeError) is of_another_kind
    assert (caught.value.parameter, caught.value.accepted) == (parameter, accepted)
    assert str(caught.value) == f"{parameter}={shown(value)} is not accepted: {accepted}"


def test_the_cool_down_is_a_float() -> None:
    assert type(Breaker("x", cooldown=3).cooldown) is float
    for cooldown in (1e-9, 1.7976931348623157e308):
        assert Breaker("x", cooldown=cooldown).cooldown == cooldown
