"""Settings from a configuration, what a worker counts, what it knows of destinations, and answers without a result."""

from __future__ import annotations

import pytest

from reefknot.config.settings import load_settings
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import StepStatus
from reefknot.core.overload.admission import Rules
from reefknot.core.retry.builtin import builtin_book
from reefknot.core.work import WorkItem, WorkState
from reefknot.worker import destinations
from reefknot.worker.counters import Counters
from reefknot.worker.destinations import Destinations
from reefknot.worker.results import DROPPED, EXPIRED, ended_without_result
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


def test_a_fleet_shares_tokens_and_nobody_gets_less_than_one() -> None:
    places = Destinations(ThrottleSettings(tokens=10.0, per_second=0.1))
    place = places.at("x")
    assert place.throttle is not None
    caps = []
    for workers in (1, 2, 5, 100, 0):
        places.fleet_of(workers)
        caps.append(place.throttle.cap)

    assert caps == [10.0, 5.0, 2.0, 1.0, 10.0]
    assert place.throttle.tokens == 1.0, "what a small share took away does not come back at once"


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
