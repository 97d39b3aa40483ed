"""`overview`: what operators see first, from what systems keep of themselves, never by reading the log."""

import json
from typing import Any

import msgspec
import pytest

from reefknot.app.activity import Activity, sampled
from reefknot.app.alert_watch import AlertsRecord, RecordedAlert, measured_now
from reefknot.app.system import System
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model import event
from reefknot.console.operations.metrics import metrics_text
from reefknot.console.operations.operator import Operator
from reefknot.console.operations.overview import overview
from reefknot.console.operations.systems import list_workers
from reefknot.core.decide import Reason
from reefknot.core.redaction import HIDDEN, Redactor
from reefknot.ingest.sources import SourceRecords, with_health
from reefknot.queue.model.source_health import SourceHealth
from reefknot.queue.model.work import ROUTER, WorkItem
from reefknot.queue.port.work_queue import Enqueue
from reefknot.queue.presence import visible_work
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock, VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from tests.unit.audit.test_metrics import given_up, retry
from tests.unit.console.operations.statuses import running

pytestmark = pytest.mark.real_time


async def seen(store: Store, *secrets: str) -> dict[str, Any]:
    return await overview(Operator(store, Redactor(secrets)))


def about(number: int = 0) -> dict[str, Any]:
    return envelope(wall=1.0, work_id=f"job-{number}")


async def test_an_empty_store_has_zeros_and_a_whole_series() -> None:
    view = await seen(MemoryStore(SystemClock()))
    assert view["admissions"] == {"accepted": 0, "rejected": 0, "dropped": 0, "deferred": 0, "degraded": 0}
    assert view["retries"]["recovered_share"] is None
    assert view["quarantine"] == {"size": 0, "added": 0}
    assert (view["levels"], view["breakers"], view["throttled"], view["alerts"]) == ([], [], [], [])
    columns = {name: column for name, column in view["series"].items() if name not in ("step_s", "from")}
    assert {len(column) for column in columns.values()} == {90}
    assert {"accepted", "rejected", "retries", "recovered", "queued", "oldest_s", "quarantine", "level"} <= set(columns)


async def test_what_ended_systems_did_within_15_minutes_is_counted() -> None:
    store = MemoryStore(SystemClock())
    async with Activity(store, SystemClock()):
        await Journal(store.audit).write(
            event.Admission(**about()),
            event.Admission(**about(1), status="rejected"),
            event.Dropped(**about(2), reason="dropped"),
            retry(),
            retry(),
            event.RetryRecovered(**about(), total_attempts=3, elapsed_seconds=1.0),
            event.Quarantined(**about(3), reason="spent"),
            event.Completed(**about(), status="success"),
        )
    view = await seen(store)
    assert view["admissions"] == {"accepted": 1, "rejected": 1, "dropped": 1, "deferred": 0, "degraded": 0}
    assert view["retries"] == {"granted": 2, "recovered": 1, "given_up": 0, "throttled": 0, "recovered_share": 1.0}
    assert (view["quarantine"]["added"], sum(view["series"]["retries"])) == (1, 2)
    assert sum(view["series"]["retries"][-2:]) == 2, "the newest step is the last one"
    assert (view["ended_per_s"], view["last_ends"][0]["id"]) == (0.0, "job-0"), "the rates are of running systems"


async def test_given_up_is_every_job_that_is_not_retried_any_more_as_in_the_metrics() -> None:
    """The share of recovered ones is of those that were retried: retries cannot help what is never retried."""
    store = MemoryStore(SystemClock())
    async with Activity(store, SystemClock()):
        await Journal(store.audit).write(
            *(given_up(event.RetryRefused, Reason.NOT_RETRYABLE, 1) for _ in range(10)),
            given_up(event.RetryExhausted, Reason.BUDGET_SPENT, 3),
            event.RetryRecovered(**about(), total_attempts=3, elapsed_seconds=1.0),
        )
    view, text = await seen(store), await metrics_text(Operator(store, Redactor(())))
    counted = [line.rpartition(" ")[2] for line in text.decode().splitlines() if "retry_given_up_total{" in line]
    assert view["retries"]["given_up"] == sum(map(float, counted)) == 11
    assert view["retries"]["recovered_share"] == 0.5
    assert b"reefknot_retry_budget_exhausted_total 1.0" in text


async def test_jobs_that_a_router_holds_are_due_in_every_figure() -> None:
    """Every worker is paused: the router has claimed the jobs, nobody is at them, and their age counts."""
    clock = VirtualClock()
    store = MemoryStore(clock)
    await store.work.enqueue([WorkItem(one, "t", ROUTER) for one in "abc"], Enqueue(owner="router-1", lease=60))
    clock.advance(12)
    metrics = await metrics_text(Operator(store, Redactor(())))
    assert sampled(await visible_work(store)) == {"queued": 3, "oldest_s": 12.0, "quarantine": 0}
    view, text, values = await seen(store), metrics.decode(), await measured_now(store, [])
    router = view["classes"]["router"]
    assert (view["oldest_due_s"], view["waiting_for_router"]) == (router["oldest_age_s"], router["queued"]) == (12.0, 3)
    assert (view["states"]["pending"], view["states"]["running"]) == (3, 0)
    assert "reefknot_oldest_ready_age_seconds 12.0" in text
    assert 'reefknot_queue_depth{class="router"} 3.0' in text
    assert 'reefknot_class_oldest_seconds{class="router"} 12.0' in text
    assert values["oldest_age"] == 12.0


async def test_levels_come_with_their_reasons_and_classes_are_added_up() -> None:
    store, reason = MemoryStore(SystemClock()), "85 of 100 places in the queue are taken"
    levels, rates = {"worker-1": {"io": reason}}, {"ended": 1.5, "retries": 0.2}
    await running(store, depth=85, status="overloaded", levels=levels, rates=rates)
    await running(store, "worker-2", depth=3, rates={"ended": 0.5, "retries": 0.0})
    view = await seen(store)
    assert [(one["worker_id"], one["class"], one["level"], one["reason"]) for one in view["levels"]] == [
        ("worker-1", "io", "overloaded", reason),
        ("worker-2", "io", "healthy", ""),
    ]
    together = {"queued": 88, "active": 2, "capacity": 8, "oldest_age_s": 2.5, "level": "overloaded"}
    assert view["classes"]["io"] == together
    assert (view["ended_per_s"], view["retries_per_s"], view["systems"]) == (2.0, 0.2, 2)


async def test_breakers_and_throttles_are_shown_without_secrets_and_sources_whose_breaker_holds_their_jobs() -> None:
    store = MemoryStore(SystemClock())
    open_ = {"worker_id": "worker-1", "name": "hunter2hunter2", "breaker": "open", "throttled": False, "tokens": 9}
    dry = {"worker_id": "worker-1", "name": "b.example", "breaker": "closed", "throttled": True, "tokens": 0.2}
    await running(store, destinations=[open_, dry])
    cooling = SourceHealth(cools_until=store.moment().wall + 60_000)
    for name, health in {"mail": cooling, "notes": SourceHealth(), "vault": SourceHealth(paused=True)}.items():
        await SourceRecords(store).change(name, with_health(lambda _, health=health: health))  # type: ignore[misc] # its default
    listed = await list_workers(Operator(store, Redactor(("hunter2hunter2",))))
    told = [(one["name"][:4], one["breaker"]) for one in listed["workers"][0]["destinations"]]
    assert told == [(HIDDEN[:4], "open"), ("b.ex", "closed")]
    view = await seen(store, "hunter2hunter2")
    place, source = view["breakers"]
    assert (place["state"], "hunter2" in place["name"]) == ("open", False)
    assert source == {"name": "source:mail", "worker_id": None, "state": "cooling"}
    assert view["throttled"] == [{"name": "b.example", "worker_id": "worker-1", "tokens": 0.2}]


async def test_active_alerts_are_part_of_it_and_a_system_of_an_earlier_version_is_no_obstacle() -> None:
    store = MemoryStore(SystemClock())
    told = RecordedAlert("retry_rate", 70, 60, 1_700_000_000_000, "retries per minute: 70 (above 60)")
    body = msgspec.json.encode(AlertsRecord(active={"retry_rate": told})).decode()
    await store.values.put("alerts", body, version=0)
    system = System(store, SystemClock(), settings=default_settings(), blocks={})
    old = {name: one for name, one in system.snapshot().items() if name != "activity"}
    await store.control.report(system.system_id, json.dumps(old, default=str), keep=300)
    view = await seen(store)
    (alert,) = view["alerts"]
    assert (alert["alert"], alert["state"], alert["since"]) == ("retry_rate", "raised", "2023-11-14T22:13:20.000Z")
    assert "reefknot audit analyse" in alert["advice"]
    assert (view["systems"], view["ended_per_s"], view["audit"]) == (1, 0.0, {"buffered": 0, "lost": 0})
