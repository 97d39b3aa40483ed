"""
Views: for each page, its address, the parameters that it knows, and the operations whose answers it shows.

A filter that is not accepted is no failure of the page: the error stands beside its field, with what is accepted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from reefknot.core.work import WorkState
from reefknot.dashboard.formats import amount, duration, percent
from reefknot.errors import OperationError, ParameterError

if TYPE_CHECKING:
    from reefknot.operations.operator import Operator

Q = TypeVar("Q")
Asked = Mapping[str, str]
Found = dict[str, Any]

ROWS = 50
GROUPS = 100


class View(Struct, frozen=True):
    """A page: the name of its template, its address and title, and what it loads."""

    name: str
    path: str
    title: str
    load: Callable[[Operator, Asked], Awaitable[Found]]
    parameters: tuple[str, ...] = ()
    key: str = ""
    """The letter that leads to it after `g`; a page without one is not in the navigation."""
    is_live: bool = True


def checked(make: Callable[..., Q], asked: Asked, **more: Any) -> tuple[Q | None, dict[str, str]]:
    """The query that was asked for, or the error beside the name of its field."""
    try:
        return make(**asked, **more), {}
    except ParameterError as error:
        return None, {error.parameter: str(error)}


def only(asked: Asked, *names: str) -> dict[str, str]:
    """The parameters of these names."""
    return {name: asked[name] for name in names if name in asked}


# ---- overview --------------------------------------------------------------------------------------------------------


async def _overview(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.overview import overview

    found = await overview(operator)
    return {"title": "Overview", "view": found, "charts": _charts(found), "alerts": await _alerts(operator)}


async def _alerts(operator: Operator) -> Found:
    from importlib.util import find_spec

    if find_spec("reefknot.operations.alerts") is None:
        return {"alerts": []}
    from reefknot.operations.alerts import list_alerts

    return await list_alerts(operator)


def _charts(found: Found) -> list[Found]:
    """The series of the last 15 minutes, as charts with their legends."""
    series, step = found["series"], found["series"]["step_s"]

    def rows(*names: str, per_second: bool = False) -> list[Found]:
        return [
            {"name": name.replace("_", " "), "values": [None if one is None else one / step for one in series[name]]}
            if per_second
            else {"name": name.replace("_", " "), "values": series[name]}
            for name in names
        ]

    def chart(title: str, kind: str, unit: str, shown: list[Found], told: Callable[[float], str] = amount) -> Found:
        for one in shown:
            known = [value for value in one["values"] if value is not None]
            one["now"] = told(known[-1]) if known else "–"
        return {"title": title, "kind": kind, "unit": unit, "series": shown, "step_s": step}

    recovered = [
        {"name": "recovered share", "values": _shares(series["recovered"], series["given_up"])},
    ]
    return [
        chart("Admissions", "stacked", "per second", rows("accepted", "deferred", "degraded", "rejected", "dropped", per_second=True)),
        chart("Jobs ended", "stacked", "per second", rows("succeeded", "failed", per_second=True)),
        chart("Retries", "lines", "per second", rows("retries", "throttled", "given_up", per_second=True)),
        chart("Recovered share", "lines", "", recovered, percent),
        chart("Queued", "lines", "jobs", rows("queued")),
        chart("Oldest due job", "lines", "s", [{"name": "waits for", "values": series["oldest_s"]}], duration),
        chart("In quarantine", "lines", "jobs", [{"name": "in quarantine", "values": series["quarantine"]}]),
        chart("Worst load level", "lines", "", [{"name": "level, 0 healthy to 3 critical", "values": series["level"]}]),
    ]


def _shares(recovered: list[float], given_up: list[float]) -> list[float | None]:
    """The share of retried work that recovered, in each step with an end."""
    both = zip(recovered, given_up, strict=True)
    return [good / (good + bad) if good is not None and bad is not None and good + bad else None for good, bad in both]


# ---- work ------------------------------------------------------------------------------------------------------------

_WORK = ("state", "type", "connector", "source", "tenant", "error", "since", "before", "sort", "after")


async def _work(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.jobs import JobQuery, list_jobs

    query, errors = checked(JobQuery, asked, limit=ROWS)
    found = await list_jobs(operator, JobQuery(limit=1) if query is None else query)
    if errors:
        found["jobs"] = []
    return {"title": "Work", "found": found, "errors": errors, "states": [state.value for state in WorkState]}


async def _job(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.jobs import job_story

    story = await job_story(operator, asked["id"], asked.get("tenant"))
    return {"title": f"Job {asked['id']}", "job": story}


# ---- quarantine ------------------------------------------------------------------------------------------------------

_QUARANTINE = ("type", "source", "reason", "fingerprint", "before", "after")


async def _quarantine(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.quarantine import QuarantineQuery, list_quarantined, quarantine_groups, quarantine_stats

    query, errors = checked(QuarantineQuery, asked, limit=ROWS)
    stats = await quarantine_stats(operator)
    found: Found = {"title": "Quarantine", "stats": stats, "errors": errors, "groups": None, "jobs": None}
    if query is not None:
        found["jobs"] = await list_quarantined(operator, query)
        wide = QuarantineQuery(**{name: text for name, text in asked.items() if name != "after"}, limit=GROUPS)
        found["groups"] = await quarantine_groups(operator, wide)
    return found


async def _quarantined(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.quarantine import editable_payload, show_quarantined

    job, tenant = asked["id"], asked.get("tenant")
    found = await show_quarantined(operator, job, tenant)
    try:
        editable = await editable_payload(operator, job, tenant)
        refusal = ""
    except (OperationError, ParameterError) as error:
        editable, refusal = {}, str(error)
    return {"title": f"Quarantined {job}", "job": found, "editable": editable, "not_editable": refusal}


# ---- workers, policies, health ---------------------------------------------------------------------------------------


async def _workers(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.systems import running_systems

    return {"title": "Workers", "found": await running_systems(operator)}


_QUESTION = ("target", "source", "error", "status", "failure_type", "exception", "message")
_QUESTION += ("retry_after", "retry_count", "timeout_ms")


async def _policies(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.policies import explain_failure, list_policies, policy_waits, question_of, show_policy

    listed = list_policies(operator.settings)
    targets = list(dict.fromkeys(one["target"] for one in listed["policies"]))
    sources = [one["source"] for one in listed["policies"] if one["source"]]
    found: Found = {"title": "Policies", "targets": targets, "sources": sources, "found": None, "errors": {}}
    found |= {"answer": None, "shown_policy": None, "schedule": []}
    if not asked:
        return found | {"found": listed}
    try:
        question = question_of(asked)
        found["shown_policy"] = show_policy(operator.settings, question.target, question.source)
        waits = policy_waits(operator.settings, question, redactor=operator.redactor)
        found["schedule"] = [(one["min"], one["max"]) for one in waits["schedule"]]
        if question.has_failure or question.is_control_flow:
            found["answer"] = explain_failure(operator.settings, question, redactor=operator.redactor)
    except ParameterError as error:
        found["errors"] = {error.parameter: str(error)}
        found["found"] = listed
    return found


async def _health(operator: Operator, asked: Asked) -> Found:
    from reefknot.operations.health import examine_store

    return {"title": "Health", "found": await examine_store(operator)}


VIEWS: tuple[View, ...] = (
    View("overview", "/", "Overview", _overview, key="o"),
    View("work", "/work", "Work", _work, _WORK, key="w"),
    View("job", "/work/{id:path}", "Job", _job, ("id", "tenant")),
    View("quarantine", "/quarantine", "Quarantine", _quarantine, _QUARANTINE, key="q"),
    View("quarantined", "/quarantine/{id:path}", "Quarantined job", _quarantined, ("id", "tenant"), is_live=False),
    View("policies", "/policies", "Policies", _policies, _QUESTION, key="p", is_live=False),
    View("workers", "/workers", "Workers", _workers, key="k"),
    View("health", "/health", "Health", _health, key="h", is_live=False),
)
BY_NAME = {view.name: view for view in VIEWS}
