"""Destinations of a worker's steps: bounded, their throttles shared by a fleet, their breakers fed by facts."""

from itertools import count

import pytest

from reefknot.core.breaker import BreakerState, Permit
from reefknot.queue.model.destination_health import DestinationRules
from reefknot.queue.worker import destinations
from reefknot.queue.worker.destinations import LEAST_ANSWERS, TENANT_SEEN_S, Destination, Destinations
from reefknot.queue.worker.settings import ThrottleSettings
from tests.rows import for_each_row

OPENS_AFTER = DestinationRules().failures
numbers = count()


def test_destinations_are_bounded_and_the_least_lately_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MOST", 3)
    places = Destinations(ThrottleSettings())
    first = [places.at(name) for name in "abc"]
    assert places.at("a") is first[0]
    places.at("d")
    assert (places.at("a") is first[0], places.at("b") is first[1]) == (True, False)


def test_a_fleet_shares_tokens_calls_and_failures_but_three_jobs_have_to_fail() -> None:
    places = Destinations(ThrottleSettings(tokens=10.0, per_second=0.1))
    place = places.at("x")
    assert place.throttle is not None
    tokens, calls = [], []
    for workers in (1, 2, 3, 5, 100, 0):
        places.fleet_of(workers)
        tokens.append((round(place.throttle.cap, 2), place.throttle.least))
        calls.append((place.rules.failures, place.rules.calls))
    assert tokens == [(10.0, 100), (5.0, 50), (3.33, 33), (2.0, 20), (1.0, 1), (10.0, 100)]
    assert place.throttle.tokens == 0.1, "what a small share took away does not come back at once"
    assert calls == [(10, 100), (5, 50), (4, 33), (3, 20), (3, 10), (10, 100)]


def attempts_per_request(workers: int, per_second: float, *, shared: bool = True) -> float:
    """Half a minute of nothing but failures after a minute of health, three attempts for each request."""
    fleet = []
    for _ in range(workers):
        places = Destinations(ThrottleSettings())
        if shared:
            places.fleet_of(workers)
        fleet.append(places.at("x"))
    attempts, requests = 0, int(per_second * 30)
    for number in range(int(per_second * 60)):
        fleet[number % workers].counted(number / per_second, ok=True)
    for number in range(requests):
        now, place = 60.0 + number / per_second, fleet[number % workers]
        for attempt in range(3):
            attempts += 1
            place.counted(now, ok=False)
            seen = place.view(now)
            assert seen is not None
            if attempt == 2 or (seen.acting and seen.tokens < 1.0):
                break
            assert place.throttle is not None
            place.throttle.spend()
    return attempts / requests


@for_each_row("workers", [1, 3, 10, 30, 100, 400, 2000])
@for_each_row("per_second", [100.0, 1000.0])
def test_a_fleet_of_any_size_does_not_multiply_an_outage(workers: int, per_second: float) -> None:
    """The control: with nothing shared each has all tokens, and each alone is too small for its throttle to act."""
    assert attempts_per_request(workers, per_second) <= 1.10
    assert workers != per_second or attempts_per_request(workers, per_second, shared=False) > 2.9


def test_a_worker_of_a_large_fleet_still_retries_the_failure_now_and_then() -> None:
    places = Destinations(ThrottleSettings())
    places.fleet_of(100)
    place, granted = places.at("x"), 0
    for number in range(2000):
        now = number / 10
        place.counted(now, ok=number % 20 != 0)
        seen = place.view(now)
        assert seen is not None
        if number % 20 == 0 and number > 100 and (not seen.acting or seen.tokens >= 1.0):
            granted += 1
            assert place.throttle is not None
            place.throttle.spend()
    assert granted == 94, "one in twenty fails, and every one of them is tried again"


def test_one_job_that_fails_alone_opens_no_breaker_in_a_fleet_of_any_size() -> None:
    for workers in (1, 10, 100, 2000):
        places = Destinations(ThrottleSettings())
        places.fleet_of(workers)
        place = places.at("x")
        for now in (1.0, 2.0, 3.0, 4.0):
            place.counted(now, ok=False)
            permit, _ = place.admit(now)
            assert isinstance(permit, Permit)
            place.report(permit, now, ok=False, job="a", tenant="")
            assert place.health.state(now) is BreakerState.CLOSED, f"{workers} workers"


def test_a_switched_off_throttle_still_counts_traffic_for_the_breaker() -> None:
    place = Destinations(ThrottleSettings(enabled=False)).at("x")
    for _ in range(100):
        place.counted(1.0, ok=False)
    assert (place.throttle, place.busy(1.5), place.busy(99.0)) == (None, True, False)


def place() -> Destination:
    return Destinations(ThrottleSettings()).at("x")


def test_a_service_time_is_usual_after_some_answers_and_then_follows_slowly() -> None:
    slow = place()
    for number in range(LEAST_ANSWERS):
        assert slow.usual(0.0) == 0.0, f"{number} answers"
        slow.answered(0.0, float(number))
    assert slow.usual(0.0) == pytest.approx(2.0), "the mean of the first ones"
    for _ in range(10):
        slow.answered(0.0, 2.0)
    slow.answered(0.0, 12.0)
    assert slow.usual(0.0) == pytest.approx(3.0), "a tenth of the newest"


def test_a_usual_time_counts_half_after_each_half_life_without_an_answer() -> None:
    slow = place()
    for _ in range(10):
        slow.answered(100.0, 8.0)
    assert [slow.usual(now) for now in (100.0, 105.0, 110.0)] == pytest.approx([8.0, 4.0, 2.0])
    assert slow.usual(99.0) == pytest.approx(8.0), "a clock that is a moment behind does not make it longer"
    slow.answered(105.0, 4.0)
    assert slow.usual(105.0) == pytest.approx(4.0), "the next answer goes on from what was left"


def report(to: Destination, tenant: str, now: float, *, ok: bool = False, times: int = 1) -> BreakerState:
    """Calls of this tenant, each for another job."""
    for _ in range(times):
        permit, _ = to.admit(now)
        if isinstance(permit, Permit):
            to.report(permit, now, ok=ok, job=f"{tenant}-{next(numbers)}", tenant=tenant)
    return to.health.state(now)


def test_one_tenant_alone_does_not_open_a_breaker_while_others_call() -> None:
    shared, alone = place(), place()
    report(shared, "b", 0.0, ok=True)
    assert report(shared, "a", 1.0, times=10 * OPENS_AFTER) is BreakerState.CLOSED
    assert report(shared, "b", 2.0) is BreakerState.OPEN, "the second one that fails says that it is not the first"
    assert report(alone, "a", 1.0, times=OPENS_AFTER - 1) is BreakerState.CLOSED
    assert report(alone, "a", 1.0) is BreakerState.OPEN, "a tenant that is the only one opens it"


def test_a_tenant_that_has_not_called_for_a_while_does_not_count_as_another_one() -> None:
    quiet = place()
    report(quiet, "b", 0.0, ok=True)
    assert report(quiet, "a", TENANT_SEEN_S, times=OPENS_AFTER) is BreakerState.CLOSED
    assert report(quiet, "a", TENANT_SEEN_S + 0.1) is BreakerState.OPEN


def test_a_success_of_any_tenant_starts_the_count_and_the_list_of_failing_tenants_again() -> None:
    shared = place()
    for tenant, ok, times in (("a", False, OPENS_AFTER - 2), ("b", False, 1), ("c", True, 1)):
        report(shared, tenant, 0.0, ok=ok, times=times)
    assert report(shared, "a", 1.0, times=2 * OPENS_AFTER) is BreakerState.CLOSED, "again only one of them fails"


def test_the_tenants_of_a_destination_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MOST_TENANTS", 3)
    crowded = place()
    for number in range(10):
        report(crowded, f"t{number}", 0.0)
    assert (list(crowded._tenants), len(crowded._failing)) == (["t7", "t8", "t9"], 3)


def test_destinations_in_trouble_are_those_whose_breaker_is_open_or_whose_tokens_are_spent() -> None:
    places = Destinations(ThrottleSettings(tokens=2.0, per_second=0.0))
    places.at("fine").counted(1.0, ok=True)
    broken, busy = places.at("broken"), places.at("busy")
    report(broken, "", 1.0, times=OPENS_AFTER)
    for _ in range(150):
        busy.counted(1.0, ok=False)
    assert busy.throttle is not None
    for _ in range(2):
        busy.throttle.spend()
    assert places.troubled(1.0) == [
        {"name": "busy", "breaker": "closed", "throttled": True, "tokens": 0.0},
        {"name": "broken", "breaker": "open", "throttled": False, "tokens": 2.0, "probe_in_s": 1.0},
    ]
    assert [one["breaker"] for one in places.troubled(100.0)] == ["half_open"]


def test_only_the_lately_used_destinations_are_looked_at_and_few_are_shown() -> None:
    places = Destinations(ThrottleSettings())
    for number in range(destinations.MOST_LOOKED_AT + 5):
        report(places.at(str(number)), "", 1.0, times=OPENS_AFTER)
    found = [one["name"] for one in places.troubled(1.0)]
    assert (len(found), found[0]) == (destinations.MOST_TROUBLED, str(destinations.MOST_LOOKED_AT + 4))


def test_half_of_a_hundred_calls_in_ten_seconds_open_it_though_others_succeed_and_a_third_does_not() -> None:
    for share, state in ((2, BreakerState.OPEN), (3, BreakerState.CLOSED)):
        busy = place()
        for number in range(300):
            is_well = number % share != share - 1
            report(busy, "", 1.0, ok=is_well)
            busy.counted(1.0, ok=is_well)
        assert busy.health.state(1.0) is state


def test_what_failed_before_it_closed_does_not_open_it_again() -> None:
    busy = place()
    for _ in range(120):
        busy.counted(1.0, ok=False)
        report(busy, "", 1.0)
    assert report(busy, "", 2.5, ok=True, times=9) is BreakerState.CLOSED
    assert report(busy, "", 2.5) is BreakerState.CLOSED


def test_only_the_calls_of_the_slow_start_count_for_how_many_may_be_out() -> None:
    back = place()
    stuck = [back.admit(1.0)[0] for _ in range(8)]
    report(back, "", 1.0, times=OPENS_AFTER)
    report(back, "", 2.5, ok=True)
    first, _ = back.admit(2.5)
    assert isinstance(first, Permit)
    assert not isinstance(back.admit(2.5)[0], Permit), "one at a time at first"
    for permit in stuck:
        assert isinstance(permit, Permit)
        back.release(permit)
    assert not isinstance(back.admit(2.5)[0], Permit)
    back.release(first)
    assert isinstance(back.admit(2.5)[0], Permit)
