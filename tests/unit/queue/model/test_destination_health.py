"""The health of a destination: when its breaker opens, how it is probed, and what a failure costs."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert, json, structs, to_builtins

from reefknot.core.breaker import BreakerState, Permit, Refused
from reefknot.queue.model import destination_health
from reefknot.queue.model.destination_health import DestinationHealth, Traffic, admitted, answered, failed, released
from tests.rows import for_each_row

RULES = destination_health.DestinationRules()
QUIET = Traffic(1, 1)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def fails(
    health: DestinationHealth, *jobs: str, at: float = 100.0, every: float = 1.0, **how: Any
) -> DestinationHealth:
    rules, traffic = how.pop("rules", RULES), how.pop("traffic", QUIET)
    assert not how
    for number, job in enumerate(jobs):
        health = failed(health, Permit(health.generation), at + number * every, rules, job=job, traffic=traffic)
    return health


def opened(at: float = 100.0) -> DestinationHealth:
    return fails(DestinationHealth(), *"abcabcabca", at=at, every=0.0)


def probe(health: DestinationHealth, now: float) -> tuple[DestinationHealth, Permit]:
    health, answer = admitted(health, now, RULES, running=0)
    assert isinstance(answer, Permit)
    return health, answer


def test_ten_failures_in_a_row_of_three_jobs_open_it() -> None:
    nine = fails(DestinationHealth(), *"abcabcabc")
    assert nine.state(200.0) is CLOSED
    ten = fails(nine, "a", at=109.0)
    assert (ten.state(109.0), ten.rests, ten.rests_until) == (OPEN, 1, 110.0)
    two = fails(DestinationHealth(), *("ab" * 50), every=0.1)
    assert two.state(110.0) is CLOSED
    assert fails(two, "c", at=110.0).state(110.0) is OPEN, "the third job says that it is not the first two"


def test_one_tenant_alone_and_a_switch_keep_it_closed() -> None:
    alone = Traffic(1, 1, may_open=False)
    assert fails(DestinationHealth(), *"abcabcabcabc", traffic=alone).state(200.0) is CLOSED
    off = destination_health.DestinationRules(enabled=False)
    assert fails(DestinationHealth(), *"abcabcabca", rules=off) == DestinationHealth()


def test_an_answer_between_them_begins_the_count_again() -> None:
    well = answered(fails(DestinationHealth(), *"abcabcabc"), Permit(0), RULES)
    assert well == DestinationHealth()
    assert answered(well, Permit(0), RULES) is well
    assert fails(well, *"abcabcabc", at=200.0).state(300.0) is CLOSED


def test_failures_and_the_jobs_that_failed_count_for_five_minutes() -> None:
    for every, state in ((33.0, OPEN), (34.0, CLOSED)):
        assert fails(DestinationHealth(), *"abcabcabca", every=every).state(100.0 + 9 * every) is state
    early = fails(DestinationHealth(), "a", "b", at=0.0)
    assert fails(early, *("c" * 20), at=302.0, every=0.1).state(305.0) is CLOSED


def test_half_of_a_hundred_calls_open_it_as_well() -> None:
    assert fails(DestinationHealth(), "a", traffic=Traffic(100, 50)).state(100.0) is OPEN
    for traffic in (Traffic(99, 99), Traffic(100, 49), Traffic(1000, 500, may_open=False)):
        assert fails(DestinationHealth(), "a", traffic=traffic).state(100.0) is CLOSED, traffic


def test_while_it_rests_nothing_is_called_and_then_one_probe() -> None:
    health = opened(100.0)
    assert admitted(health, 100.25, RULES, running=0) == (health, Refused(0.75))
    assert admitted(health, 101.0 - 1e-9, RULES, running=0)[1] == Refused(destination_health.LEAST_WAIT)
    probed, permit = probe(health, 101.0)
    assert permit.probe
    assert admitted(probed, 101.0, RULES, running=1)[1] == Refused(destination_health.SHORTEST_PAUSE)
    assert admitted(probed, 103.0, RULES, running=1)[1] == Refused(2.0)
    assert admitted(probed, 121.0, RULES, running=1)[1] == Refused(destination_health.LONGEST_PAUSE)
    again, second = probe(probed, 161.0)
    assert second.generation == permit.generation + 1, "a probe that says nothing for a minute is given up"
    assert failed(again, permit, 162.0, RULES, job="a", traffic=QUIET) is again
    assert answered(again, permit, RULES) is again


def test_rests_double_up_to_a_minute() -> None:
    health, now, rests = opened(0.0), 0.0, []
    for _ in range(9):
        rests.append(health.rests_until - now)
        now = health.rests_until
        health, permit = probe(health, now)
        health = failed(health, permit, now, RULES, job="a", traffic=QUIET)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert destination_health.rest_of(10**9, RULES) == 60


def test_a_probe_that_was_cancelled_lets_the_next_one_through() -> None:
    probed, permit = probe(opened(), 101.0)
    free = released(probed, permit)
    assert isinstance(admitted(free, 101.0, RULES, running=0)[1], Permit)
    assert released(free, Permit(permit.generation)) is free
    assert released(free, Permit(permit.generation - 1, probe=True)) is free


def test_a_destination_that_answers_gets_one_call_more_at_once_with_each_answer() -> None:
    health, permit = probe(opened(), 101.0)
    for number in range(1, RULES.at_once + 1):
        health = answered(health, permit, RULES)
        assert (health.state(101.0), health.slow_start) == (HALF_OPEN, number)
        assert isinstance(admitted(health, 101.0, RULES, running=number - 1)[1], Permit)
        assert admitted(health, 101.0, RULES, running=number)[1] == Refused(destination_health.SLOW_START_PAUSE)
    health = answered(health, permit, RULES)
    assert health == DestinationHealth(generation=permit.generation)
    assert admitted(health, 102.0, RULES, running=999)[1] == Permit(permit.generation)


def test_a_failure_of_the_slow_start_opens_it_for_the_first_rest() -> None:
    health = structs.replace(opened(), rests=7, slow_start=3, rests_until=0.0)
    again = failed(health, Permit(health.generation), 500.0, RULES, job="a", traffic=QUIET)
    assert (again.rests, again.rests_until, again.slow_start) == (1, 501.0, 0)


def test_a_failure_in_an_outage_spends_nothing_unless_the_job_is_to_blame() -> None:
    assert destination_health.spends_attempt(DestinationHealth(), None, 0.0)
    firsts = (None, 90.0, 40.0)
    assert [destination_health.spends_attempt(opened(), first, 50.0) for first in firsts] == [False, False, True]


@for_each_row(("waited", "rests"), [(0.5, 1), (1.0, 1), (2.0, 2), (7.0, 3), (100.0, 7), (86_400.0, 7)])
def test_a_worker_that_starts_goes_on_where_the_wait_of_a_job_says(waited: float, rests: int) -> None:
    health = destination_health.resumed(DestinationHealth(), RULES, since=1000.0 - waited, until=1000.0)
    assert (health.rests, health.rests_until, health.state(999.0)) == (rests, 1000.0, OPEN)
    later = destination_health.resumed(health, RULES, since=999.5, until=990.0)
    assert (later.rests, later.rests_until) == (rests, 1000.0), "the longest wait counts"


CALLS = st.lists(
    st.tuples(
        st.floats(0.0, 90.0), st.sampled_from(["ok", "fails", "cut", "hangs"]), st.sampled_from("abcd"), st.booleans()
    ),
    max_size=120,
)


@given(CALLS)
def test_whatever_happens_one_probe_is_out_rests_are_bounded_and_replay_is_exact(calls: Any) -> None:
    health, now, late, probes = DestinationHealth(), 1000.0, [], 0
    for passed, how, job, is_late in calls:
        now += passed
        asked = destination_health.BreakerInputs(now, RULES, health, running=0)
        assert (
            convert(json.decode(json.encode(to_builtins(asked))), destination_health.BreakerInputs).decided()
            == asked.decided()
        )
        after, answer = asked.admitted()
        if isinstance(answer, Refused):
            assert after is health
            assert 0.0 < answer.retry_after <= RULES.longest_rest
            assert health.state(now) is not CLOSED
            continue
        if answer.probe:
            assert health.state(now) is HALF_OPEN
            probes += 1
        health = after
        if how == "hangs":
            late.append(answer)
            continue
        permit = late.pop() if is_late and late else answer
        if how == "cut":
            health = released(health, permit)
            continue
        told = destination_health.BreakerInputs(
            now, RULES, health, permit=permit, ok=how == "ok", job=job, traffic=QUIET
        )
        assert convert(json.decode(json.encode(to_builtins(told))), type(told)).decided() == told.decided()
        health = told.reported(permit)
        assert health.rests_until <= now + RULES.longest_rest
        assert len(health.failed_at) <= RULES.failures
        assert len(health.failed_jobs) <= RULES.jobs
        assert 0 <= health.slow_start <= RULES.at_once


@given(st.floats(1.0, 100_000.0), st.floats(0.001, 20.0))
def test_an_outage_of_any_length_at_any_rate_costs_ten_calls_and_a_probe_a_minute(seconds: float, every: float) -> None:
    """Every call fails at once; each is another job's."""
    health, now, calls, number = DestinationHealth(), 0.0, 0, 0
    while now < seconds and number < 3000:
        number += 1
        health, answer = admitted(health, now, RULES, running=0)
        if isinstance(answer, Permit):
            calls += 1
            health = failed(health, answer, now, RULES, job=str(number), traffic=QUIET)
            now += every
        else:
            now += answer.retry_after
    assert calls <= RULES.failures + 6 + seconds / RULES.longest_rest
