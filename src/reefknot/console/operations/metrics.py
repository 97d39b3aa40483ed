"""
`metrics_text`: what Prometheus scrapes.

Counters are the store's: the sum over all systems that ever ran, living and ended, so they never go down and are the
same from every process. Gauges are of the moment. Labels have bounded values: known codes and words, and at most
`MOST_BLOCKS` blocks, `MOST_WORKERS` workers and `MOST_CLASSES` classes, beyond which they are `other` or left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reefknot.app.activity import store_activity
from reefknot.audit.metrics import DECISIONS, JOB_BOUNDS, KEY_ACTIONS, STATUSES, WAIT_BOUNDS
from reefknot.console.operations.overview import overview_of
from reefknot.core.alert_rules import RULES
from reefknot.core.decide import Reason
from reefknot.errors import OperationError
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.wait_reasons import WaitCode
from reefknot.queue.presence import living_systems

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from reefknot.console.operations.operator import Operator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_WORKERS = 100
MOST_CLASSES = 64
BREAKER_STATES = ("open", "half_open", "cooling", "resting", "probing", "recovering")
"""States of a breaker that is not closed: of a destination the first two, of a source the others."""

_Values = Mapping[tuple[str, ...], float]

_COUNTERS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "retry_attempts": ("retry_attempts", "Retries granted.", ("block", "code"), ()),
    "retry_recovered": ("retry_recovered", "Jobs that succeeded after at least one retry.", (), ()),
    "retry_given_up": (
        "retry_given_up",
        "Jobs whose failure was not retried any more, by the reason.",
        ("reason",),
        tuple(one.value for one in Reason),
    ),
    "admissions": ("admissions", "Decisions of admission.", ("decision",), DECISIONS),
    "jobs": ("jobs_ended", "Jobs that ended.", ("status",), STATUSES),
    "quarantined": ("quarantined", "Jobs that went to quarantine.", (), ()),
    "timeouts": ("timeouts", "Attempts and jobs that exceeded their time limit.", (), ()),
    "idempotency": ("idempotency_events", "Idempotency keys written and found.", ("action",), KEY_ACTIONS),
    "breaker_changes": ("breaker_changes", "State changes of circuit breakers.", ("state",), ("open", "closed")),
    "audit_lost": ("audit_lost_events", "Events that no audit log will ever hold.", (), ()),
}
"""By the name of a total: the metric, its help, its labels, and the values of one label that are there from the start.
A counter that appears with its first event has no rate of that event."""


async def metrics_text(operator: Operator) -> bytes:
    """All metrics in the text format of Prometheus."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        text = "metrics need the package prometheus-client; install it with: pip install '.[metrics]' in a checkout"
        raise OperationError(text, "misconfigured") from None
    systems = await living_systems(operator.store)
    activity = await store_activity(operator.store, systems)
    shown, totals = await overview_of(operator, systems, activity), activity.totals
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([*_counters(operator, totals), *_histograms(totals), *_gauges(shown)]))
    return generate_latest(registry)


class _Collected:
    """Metrics that were measured already, as a registry wants them."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


# ---- counters --------------------------------------------------------------------------------------------------------


def _counters(operator: Operator, totals: Mapping[str, float]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _COUNTERS}
    for key, number in totals.items():
        name, *given = key.split("|")
        if name in found and len(given) == len(_COUNTERS[name][2]):
            safe = tuple(operator.redactor(label) for label in given)
            found[name][safe] = found[name].get(safe, 0) + number
    for name, (metric, text, labels, known) in _COUNTERS.items():
        family = CounterMetricFamily(f"reefknot_{metric}", text, labels=labels)
        start: dict[tuple[str, ...], float] = {(one,): 0.0 for one in known} if labels else {(): 0.0}
        for values, number in sorted((start | found[name]).items()):
            family.add_metric(values, number)
        yield family
    spent = CounterMetricFamily("reefknot_retry_budget_exhausted", "Jobs whose retry budget of time was spent.")
    spent.add_metric([], totals.get(f"retry_given_up|{Reason.BUDGET_SPENT.value}", 0))
    yield spent


def _histograms(totals: Mapping[str, float]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    for name, metric, text, bounds in (
        ("retry_wait", "retry_wait_seconds", "Waits before retries.", WAIT_BOUNDS),
        ("job_seconds", "job_duration_seconds", "Time from the submission of a job to its end.", JOB_BOUNDS),
    ):
        buckets, count = [], 0.0
        for bound in (*(f"{one:g}" for one in bounds), "+Inf"):
            count += totals.get(f"{name}|{bound}", 0)
            buckets.append((bound, count))
        family = HistogramMetricFamily(f"reefknot_{metric}", text)
        family.add_metric([], buckets, totals.get(f"{name}_sum", 0.0))
        yield family


# ---- gauges ----------------------------------------------------------------------------------------------------------


def _gauges(shown: Mapping[str, Any]) -> Iterator[Metric]:
    from reefknot import __version__

    classes = dict(list(shown["classes"].items())[:MOST_CLASSES])
    workers: list[dict[str, Any]] = shown["levels"][: MOST_WORKERS * len(classes)]
    active = {one["alert"] for one in shown["alerts"]}
    states = [one["state"] for one in shown["breakers"]]
    yield _by_class("queue_depth", "Jobs that wait, by resource class.", classes, "queued")
    yield _by_class("class_oldest_seconds", "Wait of the oldest due job of a class.", classes, "oldest_age_s")
    yield _by_class("class_running", "Attempts that run, by resource class.", classes, "active")
    yield _by_class("class_slots", "Attempts that can run at once, by resource class.", classes, "capacity")
    yield _gauge(
        "worker_level",
        "Load level of a worker: 0 healthy, 1 degraded, 2 overloaded, 3 critical.",
        {(one["worker_id"], one["class"]): OverloadStatus(one["level"]).severity for one in workers},
        "worker",
        "class",
    )
    for name, text, value in (
        ("oldest_ready_age_seconds", "Wait of the oldest due job.", shown["oldest_due_s"]),
        ("quarantine_size", "Jobs in quarantine.", shown["quarantine"]["size"]),
        ("throttled_destinations", "Destinations whose retries are throttled.", len(shown["throttled"])),
        ("audit_buffered_events", "Events that wait for the audit log to come back.", shown["audit"]["buffered"]),
        ("systems", "Systems that run.", shown["systems"]),
        ("workers", "Workers that run.", len(shown["workers"])),
        ("routers", "Routers that run.", shown["routers"]),
        ("gone_parts", "Workers and routers that died or fell silent within 15 minutes.", len(shown["gone"])),
    ):
        yield _gauge(name, text, {(): value})
    text = "Due jobs that wait for a part of the system that does not run, by that part."
    codes = [(one["code"], one["jobs"]) for one in shown["unserved"]]
    router = sum(jobs for code, jobs in codes if code in (WaitCode.NO_SYSTEM, WaitCode.NO_ROUTER))
    worker = sum(jobs for code, jobs in codes if code != WaitCode.NO_ROUTER)
    yield _gauge("unserved_jobs", text, {("router",): router, ("worker",): worker}, "missing")
    yield _gauge("jobs", "Jobs, by state.", {(name,): number for name, number in shown["states"].items()}, "state")
    breakers: _Values = {(name,): states.count(name) for name in BREAKER_STATES}
    yield _gauge("breakers", "Circuit breakers that are not closed, by state.", breakers, "state")
    alerts: _Values = {(name,): int(name in active) for name in RULES}
    yield _gauge("alert_active", "Whether an alert is active.", alerts, "alert")
    yield _gauge("build_info", "The version of reefknot.", {(__version__,): 1}, "version")


def _by_class(name: str, text: str, classes: Mapping[str, Mapping[str, Any]], field: str) -> Metric:
    return _gauge(name, text, {(one,): state[field] for one, state in classes.items()}, "class")


def _gauge(name: str, text: str, values: _Values, *labels: str) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"reefknot_{name}", text, labels=labels)
    for found, value in values.items():
        family.add_metric(found, value)
    return family
