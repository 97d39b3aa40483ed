"""
`overview`: a store and its systems at a glance, and their last 15 minutes, two hours or 24 hours.

Counts and series come from what running systems keep of themselves (`app/activity.py`), never from reading the log: the
answer takes the same time whatever the store holds, and may be asked for every second.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.app.activity import reported, store_activity
from reefknot.app.alert_watch import measured, stored_alerts
from reefknot.audit.metrics import COARSE, DECISIONS, RATE_S, SPANS, ActivityRecord, series
from reefknot.audit.model.event import Completed, decode, timestamp_ms
from reefknot.audit.port import AuditQuery
from reefknot.console.operations.alerts import active_alerts
from reefknot.console.operations.job_notes import steps_under_way
from reefknot.console.operations.jobs import counts_of
from reefknot.console.operations.systems import gone_of, open_breakers, status_of, workers_of
from reefknot.console.operations.values import one_of, time_text
from reefknot.ingest.sources import source_conditions
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.routing import WorkerState
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.work import ROUTER
from reefknot.queue.presence import living_systems, unserved_work, visible_work
from reefknot.runtime.timeouts import STORE_S

if TYPE_CHECKING:
    from reefknot.audit.port import KeptEntry
    from reefknot.console.operations.operator import Operator
    from reefknot.queue.presence import Status
    from reefknot.stores.port import Store

MOST_ENDS = 8
MOST_BREAKERS = 100

_LAST_ENDS = AuditQuery(event_type="completed", newest_first=True, limit=MOST_ENDS)


async def overview(operator: Operator, *, span: str = "15m") -> dict[str, Any]:
    """
    Everything that operators see first: jobs, workers, rates, admissions, retries, quarantine, and their series.

    `series` has one number for each step of `step_s` seconds from `from` on, over a span of 15m, 2h or 24h. Counts are
    per step; `queued`, `oldest_s`, `quarantine` and `level` are values as they were, in long steps the highest. Sums
    (`admissions`, `retries`, `added`, `lost`) are those of the last 15 minutes, whatever the span.
    """
    span = span.lower()
    one_of("span", span, SPANS)
    systems = await living_systems(operator.store)
    return await overview_of(operator, systems, await store_activity(operator.store, systems), span=span)


async def overview_of(
    operator: Operator, systems: list[Status], activity: ActivityRecord, *, span: str = "15m"
) -> dict[str, Any]:
    """The overview over these systems, and over what all systems of the store counted."""
    store = operator.store
    now = store.moment().wall
    columns = series(activity.buckets, now / 1000)
    work = await visible_work(store)
    jobs = counts_of(work)
    workers = workers_of(systems)
    levels = _levels(workers)
    record, _ = await stored_alerts(store)
    lacking = await unserved_work(store, systems, work)
    values = measured(activity, work, systems, now / 1000, lacking) if record.active else {}
    shown: dict[str, Any] = {
        "at": time_text(now),
        **jobs,
        "window_s": RATE_S,
        "ended_per_s": _rate(systems, "ended"),
        "retries_per_s": _rate(systems, "retries"),
        "routers": sum(bool(one["router"]) for one in systems),
        "workers": workers,
        "gone": await gone_of(operator, systems),
        "unserved": msgspec.to_builtins(lacking),
        "under_way": await steps_under_way(store),
        "last_ends": [_end(kept) for kept in await store.audit.read(_LAST_ENDS)],
        "systems": len(systems),
        "levels": levels,
        "classes": _classes(levels, jobs["waiting_for_router"], work.oldest_ms.get(ROUTER, 0) / 1000),
        "admissions": {name: round(sum(columns[name])) for name in DECISIONS},
        "retries": _retries(columns),
        **_destinations(workers, await _source_breakers(store, now)),
        "quarantine": {"size": jobs["states"]["quarantined"], "added": round(sum(columns["quarantined"]))},
        "alerts": active_alerts(record, systems, values)["alerts"],
        "audit": {
            "buffered": sum(reported(one, "audit_buffered", 0) for one in systems),
            "lost": round(sum(columns["audit_lost"])),
        },
        "series": _series(activity, now, span),
    }
    hidden: Any = operator.redactor.tree(shown)
    return dict(hidden)


def _series(activity: ActivityRecord, now: int, span: str) -> dict[str, Any]:
    """The series of a span, with the seconds of a step and the time of the first one."""
    step_s, steps = SPANS[span].step_s, SPANS[span].steps
    buckets = activity.coarse.get(span, {}) if span in COARSE else activity.buckets
    begins = time_text((now // (step_s * 1000) - steps + 1) * step_s * 1000)
    return {"step_s": step_s, "from": begins, **series(buckets, now / 1000, steps=steps, step_s=step_s)}


def _rate(systems: list[Status], name: str) -> float:
    """The sum of a rate over the living systems."""
    return float(round(sum(reported(one, "rates", {}).get(name, 0.0) for one in systems), 1))


def _retries(columns: dict[str, list[float]]) -> dict[str, Any]:
    """
    The retries of the last 15 minutes. `given_up` is what `reefknot_retry_given_up_total` counts: jobs that failed or
    went to quarantine, retried or not. `recovered_share` is of the retried ones that have ended, None without any.
    """
    recovered, lost = round(sum(columns["recovered"])), round(sum(columns["unrecovered"]))
    return {
        "granted": round(sum(columns["retries"])),
        "recovered": recovered,
        "given_up": round(sum(columns["given_up"])),
        "throttled": round(sum(columns["throttled"])),
        "recovered_share": round(recovered / (recovered + lost), 4) if recovered + lost else None,
    }


def _end(kept: KeptEntry) -> dict[str, Any]:
    """The end of a job by its event; for a damaged event, the fields that the store has in columns."""
    try:
        event = decode(kept.entry.body)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, Completed) or timestamp_ms(event.timestamp) is None:
        unknown = dict.fromkeys(("tenant_id", "attempts", "worker_id"))
        return {"at": time_text(kept.entry.at), "id": kept.entry.work_id, "status": "unreadable", **unknown}
    return {
        "at": event.timestamp,
        "id": event.work_id,
        "tenant_id": event.tenant_id,
        "status": event.status,
        "attempts": event.attempts,
        "worker_id": event.worker_id,
    }


# ---- workers ---------------------------------------------------------------------------------------------------------


def _levels(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The load level of each class of each worker, with the reason of one that is not healthy."""
    found = []
    for worker in workers:
        for name, state in worker["classes"].items():
            status = status_of(worker["state"], state["status"])
            found.append(
                {
                    "worker_id": worker["worker_id"],
                    "class": name,
                    "level": state["status"],
                    "status": status,
                    "reason": state["reason"] if status == state["status"] else f"an operator asked for it: {status}",
                    **{one: state[one] for one in ("depth", "size", "active", "capacity", "oldest_age_s")},
                }
            )
    return found


def _classes(levels: list[dict[str, Any]], waiting_for_router: int, oldest_s: float) -> dict[str, dict[str, Any]]:
    """The resource classes of all workers together; `router` is the work that no worker has accepted yet."""
    classes: dict[str, dict[str, Any]] = {}
    for one in levels:
        into = classes.setdefault(
            one["class"],
            {"queued": 0, "active": 0, "capacity": 0, "oldest_age_s": 0.0, "level": OverloadStatus.HEALTHY.value},
        )
        into["queued"] += one["depth"]
        into["active"] += one["active"]
        into["capacity"] += one["capacity"] if one["status"] != WorkerState.PAUSED else 0
        into["oldest_age_s"] = max(into["oldest_age_s"], one["oldest_age_s"] if one["depth"] else 0.0)
        worst = max(OverloadStatus(into["level"]), OverloadStatus(one["level"]), key=lambda level: level.severity)
        into["level"] = worst.value
    router = {"queued": waiting_for_router, "active": 0, "capacity": 0, "oldest_age_s": oldest_s, "level": "healthy"}
    return dict(sorted(classes.items())) | {ROUTER: router}


def _destinations(workers: list[dict[str, Any]], of_sources: list[dict[str, Any]]) -> dict[str, Any]:
    """The destinations whose retries are throttled, and the breakers that are not closed, those of sources included."""
    troubled = [one for worker in workers for one in worker["destinations"]][:MOST_BREAKERS]
    throttled = [{name: one[name] for name in ("name", "worker_id", "tokens")} for one in troubled if one["throttled"]]
    return {"throttled": throttled, "breakers": open_breakers(workers)[:MOST_BREAKERS] + of_sources}


async def _source_breakers(store: Store, now: int) -> list[dict[str, Any]]:
    """The sources that are not healthy. One that an operator paused has no breaker that holds it."""
    fine = (SourceCondition.HEALTHY, SourceCondition.PAUSED)
    async with asyncio.timeout(STORE_S):
        conditions = await source_conditions(store, now)
    troubled = [(name, one) for name, one in conditions.items() if one not in fine]
    return [{"name": f"source:{name}", "worker_id": None, "state": one.value} for name, one in troubled[:MOST_BREAKERS]]
