"""The health of a source: rests, probes, slow start, cooling, and whose fault a failure is."""

from msgspec import json, structs

from reefknot.queue.model import source_health
from reefknot.queue.model.source_health import SourceCondition, SourceHealth, after_answer, after_outage, free_places

NOW = 1_700_000_000_000
RULES = source_health.HealthRules(failures=5, jobs=2, rest_ms=30_000, longest_rest_ms=900_000)
NEW = SourceHealth()


def down(health: SourceHealth = NEW, now: int = NOW, jobs: str = "ababa") -> SourceHealth:
    for job in jobs:
        health = after_outage(health, job, now, RULES)
    return health


def test_a_healthy_source_has_the_places_of_its_limit() -> None:
    assert SourceHealth().condition(NOW) is SourceCondition.HEALTHY
    assert free_places(SourceHealth(), NOW, running=1, limit=4) == 3
    assert free_places(SourceHealth(), NOW, running=5, limit=4) == 0


def test_a_paused_source_has_none_and_nothing_but_a_person_changes_that() -> None:
    paused = SourceHealth(paused=True, cools_until=NOW + 5)
    assert paused.condition(NOW) is SourceCondition.PAUSED
    assert free_places(paused, NOW, running=0, limit=4) == 0
    assert paused.opens_at(NOW) is None


def test_five_transient_failures_in_a_row_of_two_jobs_open_the_breaker() -> None:
    almost = down(jobs="abab")
    assert almost.condition(NOW) is SourceCondition.HEALTHY
    opened = after_outage(almost, "a", NOW, RULES)
    assert opened.condition(NOW) is SourceCondition.RESTING
    assert opened.opens_at(NOW) == opened.rests_until == NOW + 30_000
    assert free_places(opened, NOW, running=0, limit=4) == 0
    late = after_outage(opened, "c", NOW + 1, RULES)
    assert late.rests_until == opened.rests_until, "failures of jobs that began before the rest do not prolong it"


def test_one_job_alone_an_answer_in_between_and_a_switch_keep_it_closed() -> None:
    assert down(jobs="a" * 50).condition(NOW) is SourceCondition.HEALTHY
    answered = after_answer(down(jobs="abab"), NOW, limit=4)
    assert (answered.failures, answered.failed_jobs) == (0, ())
    assert down(answered, jobs="abab").condition(NOW) is SourceCondition.HEALTHY
    assert after_outage(NEW, "a", NOW, source_health.HealthRules(enabled=False)) == NEW


def test_one_probe_at_a_time_after_the_rest() -> None:
    now, rested = NOW + 30_000, down()
    assert rested.condition(now) is SourceCondition.PROBING
    assert [free_places(rested, now, running=running, limit=4) for running in (0, 1)] == [1, 0]
    probed = source_health.probe_begun(rested, now)
    assert free_places(probed, now, running=0, limit=4) == 0, "another process has one under way"
    assert free_places(probed, now + source_health.LONGEST_PROBE_MS, running=0, limit=4) == 1, "that one is lost"
    assert free_places(source_health.probe_released(probed), now, running=0, limit=4) == 1
    assert source_health.probe_begun(NEW, NOW) == source_health.probe_released(NEW) == NEW, "a healthy one needs none"


def test_each_failed_probe_doubles_the_rest_up_to_the_longest() -> None:
    health, now, rests = down(), NOW, []
    for _ in range(40):
        rests.append(health.rests_until - now)
        now = health.rests_until
        health = after_outage(source_health.probe_begun(health, now), "a", now, RULES)
    assert (rests[:6], set(rests[6:])) == ([30_000, 60_000, 120_000, 240_000, 480_000, 900_000], {900_000})


def test_a_probe_that_succeeds_begins_a_slow_start() -> None:
    now, places = NOW + 30_000, []
    health = probed = source_health.probe_begun(down(), now)
    for _ in range(5):
        health = after_answer(health, now, limit=4)
        places.append(free_places(health, now, running=0, limit=4))
    assert places == [1, 2, 3, 4, 4]
    assert health.condition(now) is SourceCondition.HEALTHY
    assert health == SourceHealth(answered_at=now)
    assert after_answer(probed, now, limit=0).condition(now) is SourceCondition.HEALTHY, "it is back at once"


def test_a_failure_during_the_slow_start_lets_it_rest_again_for_longer() -> None:
    now = NOW + 30_000
    recovering = after_answer(source_health.probe_begun(down(), now), now, limit=4)
    assert recovering.condition(now) is SourceCondition.RECOVERING
    again = after_outage(recovering, "a", now, RULES)
    assert (again.condition(now), again.rests_until, again.slow_start) == (SourceCondition.RESTING, now + 60_000, 0)


def test_transient_failures_spend_attempts_only_while_the_source_is_healthy() -> None:
    assert source_health.spends_attempt(SourceHealth(), None)
    assert not source_health.spends_attempt(down(), None)
    assert not source_health.spends_attempt(down(), NOW), "it has met nothing but the outage"


def test_a_job_that_failed_before_the_source_answered_others_is_to_blame() -> None:
    answered = SourceHealth(answered_at=NOW)
    assert source_health.is_to_blame(answered, NOW - 1)
    assert not source_health.is_to_blame(answered, NOW)
    assert not source_health.is_to_blame(answered, None)
    assert source_health.spends_attempt(structs.replace(answered, rests=1), NOW - 1)


def test_jobs_that_are_to_blame_do_not_open_the_breaker_but_keep_it_open() -> None:
    health = SourceHealth(answered_at=NOW)
    for job in "abcdefgh":
        health = after_outage(health, job, NOW, RULES, first_attempt_at=NOW - 1)
    assert health == SourceHealth(answered_at=NOW)
    opened = down(health)
    assert after_outage(opened, "c", opened.rests_until, RULES, first_attempt_at=NOW - 1).rests == opened.rests + 1


def test_the_time_of_an_answer_is_written_now_and_then() -> None:
    first = after_answer(SourceHealth(), NOW, limit=4)
    assert first.answered_at == NOW
    assert after_answer(first, NOW + source_health.ANSWERED_EVERY_MS - 1, limit=4) is first
    assert (
        after_answer(first, NOW + source_health.ANSWERED_EVERY_MS, limit=4).answered_at
        == NOW + source_health.ANSWERED_EVERY_MS
    )


def test_a_source_cools_until_the_time_it_asked_for_and_at_most_a_day() -> None:
    cooling = source_health.cooled(SourceHealth(), NOW + 5000, NOW, "429")
    assert (cooling.condition(NOW), cooling.opens_at(NOW)) == (SourceCondition.COOLING, NOW + 5000)
    assert free_places(cooling, NOW, running=0, limit=4) == 0
    assert cooling.condition(NOW + 5000) is SourceCondition.HEALTHY
    assert source_health.cooled(cooling, NOW + 4000, NOW, "sooner") is cooling
    assert source_health.cooled(SourceHealth(), NOW * 2, NOW, "").cools_until == NOW + source_health.LONGEST_COOLING_MS
    assert SourceHealth().opens_at(NOW) is None


def test_the_state_is_small_and_survives_json() -> None:
    opened = down()
    assert json.decode(json.encode(opened), type=SourceHealth) == opened
    assert json.encode(SourceHealth()) == b"{}"


def test_three_failures_of_the_source_itself_open_the_breaker_whatever_job_met_them() -> None:
    health = SourceHealth(answered_at=NOW)
    for n in range(3):
        assert health.condition(NOW) is SourceCondition.HEALTHY
        health = after_outage(health, "sync", NOW, RULES, first_attempt_at=NOW - 1 - n, of_source=True)
    assert health.condition(NOW) is SourceCondition.RESTING
    assert (health.rests_until, health.failing_since) == (NOW + 30_000, NOW)
    answered = NEW
    for _ in range(10):
        for _ in range(2):
            answered = after_outage(answered, "sync", NOW, RULES, of_source=True)
        answered = after_answer(answered, NOW, limit=2)
    assert answered == SourceHealth(answered_at=NOW), "an answer between them begins the count again"


def test_an_outage_is_too_long_for_a_job_that_waited_for_all_of_it_and_not_for_a_later_one() -> None:
    rules = source_health.HealthRules(max_outage_ms=1000)
    failing = after_outage(SourceHealth(), "sync", NOW, rules, of_source=True)
    assert not source_health.outage_is_too_long(failing, NOW - 5000, NOW + 1000, rules)
    assert source_health.outage_is_too_long(failing, NOW - 5000, NOW + 1001, rules)
    assert not source_health.outage_is_too_long(failing, NOW + 500, NOW + 1001, rules), "requeued meanwhile"
    assert not source_health.outage_is_too_long(SourceHealth(), NOW - 5000, NOW + 1001, rules), "it answers"


def test_limits_without_an_answer_count_as_time_without_an_answer() -> None:
    limited = source_health.cooled(SourceHealth(), NOW + 10, NOW, "limit")
    again = source_health.cooled(limited, NOW + 500, NOW + 100, "limit")
    assert (limited.failing_since, again.failing_since) == (NOW, NOW)
    assert after_answer(again, NOW + 200, limit=2).failing_since == 0
