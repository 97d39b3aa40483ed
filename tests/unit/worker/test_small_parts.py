"""Settings from a configuration, what a worker counts, what it knows of destinations, and answers without a result."""

from __future__ import annotations

import pytest

from reefknot.config.settings import load_settings
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import StepResult, StepStatus
from reefknot.core.overload.admission import Rules
from reefknot.core.retry.defaults import builtin_book
from reefknot.core.work import WorkItem, WorkState
from reefknot.worker import destinations
from reefknot.worker.destinations import Destinations
from reefknot.worker.records import DROPPED, EXPIRED, Counters, ended_without_result, sendable
from reefknot.worker.settings import POOLS, ThrottleSettings, default_settings, settings_from


def test_pools_and_their_sizes_come_from_the_configuration(tmp_path: object) -> None:
    from pathlib import Path

    overrides = {
        "worker": {
            "queue": {
                "v2": {
                    "max_queue_size": 7,
                    "resource_pools": {"gpu": {"max_concurrency": 2}, "tpu": {}, "io": {"max_queue_size": 3}},
                }
            },
            "retries": {"v2": {"throttle": {"tokens": 4.0}}},
            "quarantine_failed": True,
        }
    }
    loaded = load_settings(environ={}, cwd=Path(str(tmp_path)), overrides=overrides)
    settings = settings_from(loaded.configuration, loaded.book, retries_gate=False, queue_gate=True, lease=9.0)

    assert settings.concurrency == {"cpu": 4, "gpu": 2, "io": 8, "tpu": 4}
    assert [settings.rules_for(name).size for name in ("cpu", "gpu", "io", "tpu")] == [7, 7, 3, 7]
    assert (settings.retries_v2, settings.queue_v2, settings.quarantine_failed) == (False, True, True)
    assert settings.throttle == ThrottleSettings(tokens=4.0)
    assert settings.lease == 9.0
    assert dict(POOLS) == {"cpu": 4, "gpu": 1, "io": 8}


def test_the_default_settings_have_both_gates_open() -> None:
    settings = default_settings()

    assert (settings.retries_v2, settings.queue_v2, settings.rules) == (True, True, Rules())
    assert settings.slots_for("cpu") == 4
    assert settings.slots_for("unheard-of") == 4
    assert settings.book.hash == builtin_book().hash


def test_a_worker_that_did_nothing_has_no_rate() -> None:
    counts = Counters().snapshot()

    assert counts.retry_success_rate is None
    assert (counts.mean_backoff_s, counts.retries) == (0.0, 0)


def test_counts_tell_first_tries_from_recoveries() -> None:
    counters = Counters()
    counters.ended(ok=True, retried=False)
    counters.ended(ok=True, retried=True)
    counters.ended(ok=False, retried=True)
    counters.ended(ok=False, retried=False)
    counters.retry("HTTP_ERROR", "http.request", 2.0)
    counters.retry("NETWORK_ERROR", "http.request", 1.0)
    counts = counters.snapshot()

    assert (counts.succeeded, counts.failed, counts.recovered, counts.given_up) == (2, 2, 1, 1)
    assert counts.retries_by_block == {"http.request": 2}
    assert (counts.mean_backoff_s, counts.retry_success_rate) == (1.5, 0.5)


def test_destinations_are_bounded_and_the_least_lately_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MOST", 3)
    places = Destinations(ThrottleSettings())
    first = [places.at(name) for name in "abc"]
    assert places.at("a") is first[0]
    places.at("d")

    assert places.at("a") is first[0]
    assert places.at("b") is not first[1]


def test_a_fleet_shares_tokens_and_the_calls_that_make_a_place_busy() -> None:
    places = Destinations(ThrottleSettings(tokens=10.0, per_second=0.1))
    place = places.at("x")
    assert place.throttle is not None
    shares = []
    for workers in (1, 2, 5, 100, 0):
        places.fleet_of(workers)
        shares.append((place.throttle.cap, place.throttle.least))

    assert shares == [(10.0, 100), (5.0, 50), (2.0, 20), (1.0, 1), (10.0, 100)]
    assert place.throttle.tokens == 0.1, "what a small share took away does not come back at once"


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


@pytest.mark.parametrize("workers", [1, 3, 10, 30, 100, 400, 2000])
@pytest.mark.parametrize("per_second", [100.0, 1000.0])
def test_a_fleet_of_any_size_does_not_multiply_an_outage(workers: int, per_second: float) -> None:
    assert attempts_per_request(workers, per_second) <= 1.10


def test_workers_that_share_nothing_do_multiply_it() -> None:
    """The control: each has all tokens, and each alone is too small for its throttle to act."""
    assert attempts_per_request(100, 100.0, shared=False) > 2.9


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


def test_a_switched_off_throttle_still_counts_traffic_for_the_breaker() -> None:
    place = Destinations(ThrottleSettings(enabled=False)).at("x")
    for _ in range(100):
        place.counted(1.0, ok=False)

    assert place.throttle is None
    assert place.busy(1.5)
    assert not place.busy(99.0)


@pytest.mark.parametrize(
    ("state", "reason", "status", "code"),
    [
        (WorkState.CANCELLED, DROPPED, StepStatus.ERROR, ErrorCode.system_overload),
        (WorkState.CANCELLED, EXPIRED, StepStatus.TIMEOUT, ErrorCode.cancelled_by_timeout),
        (WorkState.CANCELLED, "no need", StepStatus.CANCELLED, ErrorCode.cancelled_by_user),
        (WorkState.QUARANTINED, "crashed", StepStatus.ERROR, ErrorCode.internal_error),
        (WorkState.DISCARDED, "crashed", StepStatus.ERROR, ErrorCode.internal_error),
    ],
)
def test_what_ended_without_a_result_is_answered_from_its_reason(
    state: WorkState, reason: str, status: StepStatus, code: ErrorCode
) -> None:
    step = ended_without_result(WorkItem("a", "k", state=state, reason=reason))

    assert step is not None
    assert (step.status, step.error_code) == (status, code)


@pytest.mark.parametrize("state", [WorkState.PENDING, WorkState.RUNNING, WorkState.SUCCEEDED, WorkState.FAILED])
def test_what_has_not_ended_or_has_a_result_is_not_answered_for(state: WorkState) -> None:
    assert ended_without_result(WorkItem("a", "k", state=state)) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_an_output_that_has_no_json_form_is_a_failure_with_its_place_and_not_null(number: float) -> None:
    step = sendable(StepResult(outputs={"a": [1, {"b": number}], "c": None}))
    assert (step.status, step.error_code) == (StepStatus.ERROR, ErrorCode.execution_failed)
    assert "outputs.a[1].b" in step.error_message


def test_an_output_that_is_null_is_null() -> None:
    step = StepResult(outputs={"a": None, "b": "null"})
    assert sendable(step) is step
