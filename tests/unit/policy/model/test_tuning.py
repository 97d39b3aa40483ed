"""Proposals from counts: each rule where it answers, where it has too little to go by, and never out of bounds."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.failure import FailureType
from reefknot.core.policy import RetryStrategy
from reefknot.policy.model.tuning import (
    LEAST,
    LONGEST_BASE_DELAY,
    LONGEST_RATE_LIMIT_DELAY,
    MOST_RETRIES,
    MOST_TRANSIENT_RETRIES,
    ConnectorCounts,
    CurrentPolicy,
    TuningAnswer,
    Verdict,
    proposed_values,
    tune,
)
from tests.rows import for_each_row

POLICY = CurrentPolicy(max_attempts=5, base_delay_seconds=60, max_delay_seconds=600)


def counts(
    successes: dict[int, int] | None = None,
    *,
    failures: dict[str, int] | None = None,
    quarantined: dict[str, int] | None = None,
    after: dict[str, int] | None = None,
) -> ConnectorCounts:
    return ConnectorCounts(successes or {}, failures or {}, quarantined or {}, after or {})


def answer(about: str, given_counts: ConnectorCounts, policy: CurrentPolicy = POLICY) -> TuningAnswer:
    (found,) = [one for one in tune(given_counts, policy) if about in one.question]
    return found


def test_below_fifty_jobs_without_retries_and_without_failures_nothing_is_proposed() -> None:
    (few,) = tune(counts({1: 40}, quarantined={"transient": 9}), POLICY)
    assert (few.verdict, few.why) == (Verdict.NOT_ENOUGH_DATA, "not enough data: 49 of 50 jobs")
    (without,) = tune(counts({1: 100}), CurrentPolicy(strategy=RetryStrategy.NO_RETRY))
    assert without.verdict is Verdict.KEEP

    found = tune(counts({1: 100}), POLICY)
    assert [one.verdict.value for one in found] == ["not_enough_data", "keep", "not_enough_data", "not_enough_data"]
    assert proposed_values(found) == {}


# ---- the number of retries -------------------------------------------------------------------------------------------


def test_retries_that_rescue_nobody_are_given_up() -> None:
    """After the second retry, 1 of 101 jobs was rescued: three retries of 100 jobs were for nothing."""
    spent = counts({1: 800, 2: 60, 3: 39, 6: 1}, quarantined={"unknown": 100}, after={"unknown": 700})
    found = answer("retries", spent)

    assert (found.verdict, found.field, found.current, found.proposed) == (Verdict.PROPOSAL, "max_attempts", 5, 2)
    assert "of 101 jobs that were not done after retry 2, later ones rescued at most 1" in found.why
    assert found.effect.startswith("about 300 executions fewer per 1,000 jobs; at most 1 more jobs per 1,000")
    one_more = counts({1: 800, 6: 3}, quarantined={"unknown": 100}, after={"unknown": 700})
    assert answer("retries", one_more).verdict is Verdict.KEEP, "the control: 3 of 103 is above 2 %"


def test_late_successes_of_any_type_speak_against_fewer_retries_of_one_type() -> None:
    policy = CurrentPolicy(max_attempts=3, transient_max_attempts=7)
    found = counts({1: 800, 5: 20}, quarantined={"transient": 100, "unknown": 60}, after={"transient": 700})

    assert answer("transient_max_attempts", found, policy).proposed == 4
    assert answer("(max_attempts)", found, policy).verdict is Verdict.KEEP


def test_a_last_retry_that_still_rescues_many_is_followed_by_more_of_the_type_that_it_rescues() -> None:
    late = counts({1: 800, 6: 100}, quarantined={"unknown": 100}, after={"unknown": 60, "transient": 60})
    found = answer("retries", late)
    assert (found.verdict, found.field, found.current, found.proposed) == (Verdict.PROPOSAL, "max_attempts", 5, 7)
    assert "rescued 100 of 200 jobs (50%), and 100 went to quarantine" in found.why
    assert found.effect.startswith("about 75 more jobs rescued per 1,000, for 150 more executions")

    passing = counts({1: 800, 6: 100}, quarantined={"transient": 90, "unknown": 10}, after={"transient": 500})
    found = answer("retries", passing)
    assert (found.field, found.current, found.proposed) == ("transient_max_attempts", 5, 7)


def test_it_is_not_told_which_type_late_retries_rescue() -> None:
    policy = CurrentPolicy(max_attempts=5, transient_max_attempts=7)
    aside, after = {"transient": 90, "unknown": 90}, {"transient": 500, "unknown": 500}
    mixed = counts({1: 800, 6: 100, 8: 50}, quarantined=aside, after=after)

    found = answer("transient_max_attempts", mixed, policy)

    assert found.verdict is Verdict.KEEP
    assert "is not counted" in found.why


@for_each_row(
    ("policy", "kind", "field"),
    [
        (CurrentPolicy(max_attempts=10), "unknown", "(max_attempts)"),
        (CurrentPolicy(max_attempts=3, transient_max_attempts=20), "transient", "transient_max_attempts"),
    ],
)
def test_at_the_highest_number_there_is_only_advice(policy: CurrentPolicy, kind: str, field: str) -> None:
    last = 1 + (policy.transient_max_attempts or policy.max_attempts)
    found = answer(field, counts({1: 800, last: 100}, quarantined={kind: 100}, after={kind: 700}), policy)

    assert (found.verdict, found.proposed) == (Verdict.ADVICE, None)
    assert "is the highest already" in found.why


def test_a_single_retry_is_judged_by_those_that_needed_it() -> None:
    one = CurrentPolicy(max_attempts=1)

    assert answer("retries", counts({1: 100, 2: 20}), one).why == "not enough data: 20 of 50 jobs that were retried"
    found = answer("retries", counts({1: 100, 2: 60}, quarantined={"unknown": 20}, after={"unknown": 80}), one)
    assert (found.current, found.proposed) == (1, 3)


def test_permanent_failures_count_where_they_are_retried() -> None:
    stubborn = counts({1: 800}, quarantined={"permanent": 100}, after={"permanent": 500})

    assert answer("retries", stubborn).verdict is Verdict.NOT_ENOUGH_DATA
    retried = CurrentPolicy(max_attempts=5, permanent_failures_no_retry=False)
    assert answer("retries", stubborn, retried).proposed == 1


# ---- waits -----------------------------------------------------------------------------------------------------------


LIMITED = counts({1: 50, 2: 50}, failures={"rate_limited": 50}, after={"rate_limited": 50})


def test_a_source_that_limits_often_is_waited_for_longer() -> None:
    found = answer("rate limits", LIMITED)
    assert (found.field, found.current, found.proposed) == ("rate_limit_delay_seconds", 60, 120)
    assert found.why == "50 of 150 executions met a rate limit (33%)"
    assert found.effect.startswith("up to 500 executions fewer per 1,000 jobs")
    assert "max_concurrency" in found.effect
    own = CurrentPolicy(rate_limit_delay_seconds=5000)
    assert answer("rate limits", LIMITED, own).proposed == LONGEST_RATE_LIMIT_DELAY
    few = answer("rate limits", counts({1: 100}, failures={"rate_limited": 20}))
    assert few.verdict is Verdict.KEEP
    assert answer("rate limits", counts(quarantined={"transient": 50})).why == "not enough data: 0 of 50 executions"


@for_each_row(
    ("policy", "text"),
    [
        (CurrentPolicy(rate_limit_delay_seconds=7200), "the wait is the longest already"),
        (CurrentPolicy(strategy="immediate"), "the strategy immediate does not wait"),
    ],
)
def test_where_no_wait_helps_fewer_jobs_at_once_do(policy: CurrentPolicy, text: str) -> None:
    found = answer("rate limits", LIMITED, policy)

    assert (found.verdict, text in found.why, "max_concurrency" in found.why) == (Verdict.ADVICE, True, True)


def test_a_first_retry_that_nearly_always_helps_comes_sooner_and_one_that_hardly_helps_later() -> None:
    quick = counts({1: 900, 2: 96, 3: 4}, failures={"transient": 104}, after={"transient": 104})
    found = answer("first wait", quick)
    assert (found.field, found.current, found.proposed) == ("base_delay_seconds", 60, 30)
    assert found.why == "96 of 100 retried jobs succeeded at the first retry (96%)"
    assert "30 s earlier" in found.effect
    assert answer("first wait", quick, CurrentPolicy(base_delay_seconds=1)).verdict is Verdict.KEEP

    slow = counts({1: 900, 2: 10, 3: 50, 4: 20}, quarantined={"transient": 20}, after={"transient": 200})
    found = answer("first wait", slow)
    assert (found.current, found.proposed) == (60, 120)
    assert "although 80 succeeded in the end" in found.why
    assert answer("first wait", slow, CurrentPolicy(base_delay_seconds=60, max_delay_seconds=60)).proposed is None
    most = CurrentPolicy(base_delay_seconds=2000, max_delay_seconds=9000)
    assert answer("first wait", slow, most).proposed == LONGEST_BASE_DELAY


@for_each_row(
    ("more", "after", "text"),
    [
        ({"strategy": "immediate"}, {"transient": 100}, "has waits of its own"),
        ({}, {"rate_limited": 30, "transient": 70}, "wait for rate limits"),
    ],
)
def test_waits_that_the_first_one_does_not_decide_are_left_alone(
    more: dict[str, Any], after: dict[str, int], text: str
) -> None:
    found = answer("first wait", counts({1: 900, 2: 100}, after=after), CurrentPolicy(**more))

    assert (found.verdict, text in found.why) == (Verdict.KEEP, True)
    as_often_as_not = counts({1: 900, 2: 50, 3: 50}, after={"transient": 150})
    assert answer("first wait", as_often_as_not).verdict is Verdict.KEEP


# ---- failures without a type -----------------------------------------------------------------------------------------


def test_failures_without_a_type_are_to_be_classified() -> None:
    found = answer("without a type", counts({1: 100}, failures={"unknown": 60, "transient": 40}))

    assert (found.verdict, found.proposed) == (Verdict.ADVICE, None)
    assert found.why.startswith("60 of 100 failures are of no known type (60%)")
    assert answer("without a type", counts({1: 100}, failures={"transient": 60})).verdict is Verdict.KEEP
    few = answer("without a type", counts({1: 100}, failures={"unknown": 49}))
    assert few.why == "not enough data: 49 of 50 failed executions"


# ---- whatever was counted --------------------------------------------------------------------------------------------

numbers = st.integers(0, 400)
by_type = st.dictionaries(st.sampled_from([one.value for one in FailureType]), numbers)
policies = st.builds(
    CurrentPolicy,
    strategy=st.sampled_from([*RetryStrategy, "one.of.my.own"]),
    max_attempts=st.integers(1, 10),
    transient_max_attempts=st.none() | st.integers(1, 20),
    base_delay_seconds=st.integers(1, 3600),
    max_delay_seconds=st.integers(3600, 86400),
    rate_limit_delay_seconds=st.none() | st.integers(1, 7200),
    permanent_failures_no_retry=st.booleans(),
)


@given(st.builds(ConnectorCounts, st.dictionaries(st.integers(1, 25), numbers), by_type, by_type, by_type), policies)
def test_whatever_was_counted_proposals_are_within_bounds_and_say_why(
    found: ConnectorCounts, policy: CurrentPolicy
) -> None:
    answers = tune(found, policy)
    bounds = {
        "max_attempts": MOST_RETRIES,
        "transient_max_attempts": MOST_TRANSIENT_RETRIES,
        "base_delay_seconds": min(LONGEST_BASE_DELAY, policy.max_delay_seconds),
        "rate_limit_delay_seconds": LONGEST_RATE_LIMIT_DELAY,
    }
    values = proposed_values(answers)
    assert all(1 <= value <= bounds[field] for field, value in values.items())
    proposals = [one for one in answers if one.verdict is Verdict.PROPOSAL]
    assert len({one.field for one in proposals}) == len(proposals) == len(values), "no field is proposed twice"
    assert all(one.effect and one.current != one.proposed for one in proposals)
    assert all(one.why for one in answers)
    assert found.jobs >= LEAST or not proposals
