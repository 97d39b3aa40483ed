"""
Views: for each page, its address, the parameters that it knows, and the operations whose answers it shows.

A filter that is not accepted does not fail the page: the error is shown at its field, with what is accepted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from reefknot.console.dashboard.formats import amount, job_path, percent, seconds_at, short
from reefknot.console.operations.job_filters import FORM
from reefknot.console.operations.values import duration, typed
from reefknot.errors import OperationError, ParameterError, StoreUnavailableError
from reefknot.queue.model.work import WorkState

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator

Q = TypeVar("Q", bound=Struct)
Asked = Mapping[str, str]
Found = dict[str, Any]

ROWS = 50
GROUPS = 100
VERIFIED, REPLAYED = 5_000, 1_000
"""The newest events that a page verifies or replays: about a tenth of a second of this process."""
WAITS_IN_WORDS = 12
SPANS_IN_WORDS = {"15m": "15 minutes", "2h": "2 hours", "24h": "24 hours"}
MOST_WRONG = 100
"""Mismatches, or differences, that a page shows."""


class View(Struct, frozen=True):
    """A page: the name of its template, its address and title, and what it loads. What was loaded may be `moved_to`,
    the address of the page that shows it by now."""

    name: str
    path: str
    title: str
    load: Callable[[Operator, Asked], Awaitable[Found]]
    parameters: tuple[str, ...] = ()
    key: str = ""
    """The letter that leads to it after `g`; a page without one is not in the navigation."""
    is_live: bool = True
    parent: str = ""
    """The page of the navigation that it belongs to."""
    template: str = ""
    """The name of the template, where it is not that of the page."""

    @property
    def is_of_one(self) -> bool:
        """Whether the page is of one job, by its id."""
        return "{id:" in self.path


def checked(make: type[Q], asked: Asked, **more: Any) -> tuple[Q | None, dict[str, str]]:
    """The query that was asked for, or the error by the name of its field."""
    kinds = {field.name: field.type for field in fields(make)}
    try:
        return make(**{name: typed(name, text, kinds[name]) for name, text in asked.items()}, **more), {}
    except ParameterError as error:
        return None, {error.parameter: str(error)}


# ---- overview --------------------------------------------------------------------------------------------------------


async def _overview(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.overview import overview

    span = asked.get("span", "15m")
    found = await overview(operator, span=span)
    return {"title": "Overview", "view": found, "charts": _charts(found), "span": span, "spans": SPANS_IN_WORDS}


async def _alerts(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.alerts import list_alerts
    from reefknot.core.alert_rules import RULES

    units = {name: rule.unit for name, rule in RULES.items()}
    return {"title": "Alerts", "found": await list_alerts(operator), "units": units}


def _charts(found: Found) -> list[Found]:
    """The series of a span, as charts with their legends."""
    series, step = found["series"], found["series"]["step_s"]

    def rates(*names: str) -> list[Found]:
        per_second = {name: [None if one is None else one / step for one in series[name]] for name in names}
        return [{"name": name.replace("_", " "), "values": values} for name, values in per_second.items()]

    def sampled(name: str, values: list[float | None]) -> list[Found]:
        return [{"name": name, "values": values, "now": None if found["systems"] else "no system runs"}]

    def chart(title: str, kind: str, unit: str, shown: list[Found], in_words: Callable[[float], str] = amount) -> Found:
        for one in shown:
            known = [value for value in one["values"] if value is not None]
            one["now"] = one.get("now") or (in_words(known[-1]) if known else "–")
        return {"title": title, "kind": kind, "unit": unit, "series": shown, "step_s": step}

    admissions = rates("accepted", "deferred", "degraded", "rejected", "dropped")
    shares = _shares(series["recovered"], series["unrecovered"])
    return [
        chart("Admissions", "stacked", "per second", admissions),
        chart("Jobs ended", "stacked", "per second", rates("succeeded", "failed")),
        chart("Retries", "lines", "per second", rates("retries", "throttled", "given_up")),
        chart("Recovered share", "lines", "", [{"name": "recovered share", "values": shares}], percent),
        chart("Queued", "lines", "jobs", sampled("queued", series["queued"])),
        chart("Oldest due job", "lines", "s", sampled("waits for", series["oldest_s"]), duration),
        chart("In quarantine", "lines", "jobs", sampled("in quarantine", series["quarantine"])),
        chart("Worst load level", "lines", "", sampled("level, 0 healthy to 3 critical", series["level"])),
    ]


def _shares(recovered: list[float], unrecovered: list[float]) -> list[float | None]:
    """The share of retried work that recovered, in each step with an end."""
    both = zip(recovered, unrecovered, strict=True)
    return [good / (good + bad) if good is not None and bad is not None and good + bad else None for good, bad in both]


# ---- work ------------------------------------------------------------------------------------------------------------

_WORK = ("find", "state", *FORM, "sort", "after", "back")


async def _work(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.jobs import JobQuery, find_jobs, list_jobs
    from reefknot.console.operations.queues import list_queue

    query, errors = checked(JobQuery, _own(asked, "find"), limit=ROWS)
    found = await list_jobs(operator, JobQuery(limit=1) if query is None else query)
    if errors:
        found["jobs"] = []
    if "find" in asked:
        jobs = (await find_jobs(operator, asked["find"]))["jobs"]
        if len(jobs) == 1:
            return {"moved_to": job_path(jobs[0]["id"], jobs[0]["tenant_id"])}
        found |= {"jobs": jobs, "next": None}
        errors = errors if jobs else {"find": "no job has this id, correlation or trace"}
    states = [state.value for state in WorkState]
    queue = await list_queue(operator)
    return {"title": "Work", "found": found, "errors": errors, "states": states, "form": FORM, "queue": queue}


def _own(asked: Asked, *names: str) -> dict[str, str]:
    """The parameters of a list itself, without those of its page."""
    return {name: value for name, value in asked.items() if name not in (*names, "back")}


async def _job(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.jobs import job_story

    story = await job_story(operator, asked["id"], asked.get("tenant"))
    return {"title": f"Job {asked['id']}", "job": story, "rows": timeline_rows(story)}


def timeline_rows(story: Found) -> list[tuple[str, str, list[Found]]]:
    """The timeline of a job: a row for each attempt, with the wait before it, and one for the next. Of an attempt whose
    start is not on record, the bar begins where it was due, and is grey."""
    rows: list[tuple[str, str, list[Found]]] = []
    free = seconds_at(story["created_at"])
    now, run = free + story["total_s"], 0
    for one in story["attempts"]:
        ends = now if one["ended_at"] is None else seconds_at(one["ended_at"])
        due = free if one["due_at"] is None else seconds_at(one["due_at"])
        if one["generation"] != run:  # nothing waited between the end of a run and the requeue
            run, free = one["generation"], due
        begins = min(ends, max(free, due if one["started_at"] is None else seconds_at(one["started_at"])))
        outcome = one["outcome"] if one["outcome"] in ("succeeded", "running", "cancelled", "crashed") else "failed"
        kind = "other" if one["started_at"] is None else outcome
        spans = [{"begins": begins, "ends": ends, "kind": kind}]
        waited = begins - free > 0.001
        if waited:
            spans.insert(0, {"begins": free, "ends": begins, "kind": "waiting"})
        words = [one["code"] or one["outcome"]]
        ran = one["duration_s"] or ends - begins
        ran_for = {"running": "for", "crashed": "noticed within"}.get(outcome, "ran")
        words.append("start not recorded" if kind == "other" else f"{ran_for} {duration(ran) if ran else 'under 1 ms'}")
        words += [f"after a wait of {duration(begins - free)}"] if waited else []
        rows.append((_attempt(story, run, one["number"]), ", ".join(words), spans))
        free = ends
    if rows and story["state"] == "pending":
        due = max(now, seconds_at(story["due_at"] or ""))
        free = max([free, *(seconds_at(one["at"]) for one in story["history"] if one["what"] == "requeued")])
        rows.append(("next attempt", "waits", [{"begins": min(free, due), "ends": due, "kind": "waiting"}]))
    return rows


def _attempt(story: Found, run: int, number: int) -> str:
    """The name of an attempt, with its run where there are several."""
    return f"run {run + 1}, attempt {number}" if story["generation"] else f"attempt {number}"


# ---- quarantine ------------------------------------------------------------------------------------------------------

_QUARANTINE = ("type", "source", "tenant", "reason", "error", "fingerprint", "since", "before", "after", "back")


async def _quarantine(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.quarantine import (
        QuarantineQuery,
        list_quarantined,
        quarantine_groups,
        quarantine_stats,
    )

    query, errors = checked(QuarantineQuery, _own(asked), limit=ROWS)
    stats = await quarantine_stats(operator)
    found: Found = {"title": "Quarantine", "stats": stats, "errors": errors, "groups": None, "jobs": None}
    if query is not None:
        found["jobs"] = await list_quarantined(operator, query)
        found["groups"] = await quarantine_groups(operator, replace(query, after="", limit=GROUPS))
    return found


async def _quarantined(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.jobs import show_job
    from reefknot.console.operations.quarantine import editable_payload, show_quarantined

    job, tenant = asked["id"], asked.get("tenant")
    try:
        found = await show_quarantined(operator, job, tenant)
    except OperationError as error:
        if error.kind != "not_found":
            raise
        await show_job(operator, job, tenant)
        return {"moved_to": job_path(job, tenant)}
    try:
        editable = await editable_payload(operator, job, tenant)
        refusal = ""
    except (OperationError, ParameterError) as error:
        editable, refusal = {}, str(error)
    return {"title": f"Quarantined {job}", "job": found, "editable": editable, "not_editable": refusal}


# ---- workers, policies, health ---------------------------------------------------------------------------------------


async def _workers(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.systems import running_systems

    return {"title": "Workers", "found": await running_systems(operator)}


_FAILURE = ("error", "status", "failure_type", "exception", "message", "retry_after")
_QUESTION = ("target", "source", *_FAILURE, "retry_count", "timeout_ms")


async def _policies(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations import policies
    from reefknot.console.operations.policies import list_policies, policy_waits, question_of, show_policy
    from reefknot.console.operations.systems import running_systems
    from reefknot.console.words.policies import in_ingestion, sentence, span, under_load
    from reefknot.core.checks import suggest

    listed, running = list_policies(operator.settings), await running_systems(operator)
    own = sorted({f"block:{name}" for one in running["routers"] for name in one["blocks"]})
    targets = list(dict.fromkeys([*(one["target"] for one in listed["policies"]), *own]))
    sources = [one["source"] for one in listed["policies"] if one["source"]]
    found: Found = {"title": "Policies", "targets": targets, "sources": sources, "found": None, "errors": {}}
    found |= {"answer": None, "sentence": "", "load": "", "effects": {}, "shown_policy": None, "schedule": []}
    found["waits_in_words"] = []
    if not asked:
        return found | {"found": listed}
    try:
        if f"block:{asked.get('target')}" in targets:
            found["asked"] = asked = {**asked, "target": f"block:{asked['target']}"}
        question = question_of(asked)
        found["shown_policy"] = show_policy(operator.settings, question.target, question.source)
        waits = policy_waits(operator.settings, question, redactor=operator.redactor)
        found["schedule"] = [(one["min"], one["max"]) for one in waits["schedule"]]
        found["waits_in_words"] = [span(*one) for one in found["schedule"][:WAITS_IN_WORDS]]
        if question.has_failure or question.is_control_flow:
            answer = policies.explained(policies.active_book(operator.settings, redactor=operator.redactor), question)
            found |= {"answer": policies.answer_json(answer), "sentence": sentence(answer), "load": under_load(answer)}
            found["effects"] = {} if answer.health is None else in_ingestion(answer, answer.health)
    except ParameterError as error:
        found["errors"] = {error.parameter: str(error)}
        if error.parameter == "target" and "target" in asked:
            near = suggest(asked["target"].rpartition(":")[2], [one.partition(":")[2] for one in targets])
            whole = next((one for one in targets if f"'{one.partition(':')[2]}'" in near), "")
            hint = f"did you mean {whole}?" if whole else f"accepted: {policies.TARGETS}; listed below"
            found["errors"] = {"target": f"{short(asked['target'], 60)} is unknown; {hint}"}
        found["found"] = listed
    return found


async def _health(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.health import examine_store

    return {"title": "Health", "found": await examine_store(operator)}


# ---- sources ---------------------------------------------------------------------------------------------------------


async def _sources(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.schedules import list_schedules
    from reefknot.console.operations.sources import list_sources

    schedules = [one for one in (await list_schedules(operator))["schedules"] if one["kind"] == "schedule"]
    return {"title": "Sources", "found": await list_sources(operator), "schedules": schedules}


async def _source(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.sources import show_source

    name = asked["name"]
    try:
        return {"title": f"Source {name}", "one": await show_source(operator, name)}
    except ParameterError as error:
        raise OperationError(str(error), "not_found") from None


async def _documents(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.sources import search_documents
    from reefknot.ingest.model import FILTERS, TEXT_FIELDS

    found: Found = {"hits": []}
    errors: dict[str, str] = {}
    if asked:
        try:
            found = await search_documents(operator, asked.get("words", ""), source=asked.get("source"), limit=ROWS)
        except (ParameterError, OperationError, StoreUnavailableError) as error:
            errors = {getattr(error, "parameter", "") or "words": str(error)}
    return {"title": "Documents", "found": found, "errors": errors, "fields": {**TEXT_FIELDS, **FILTERS}}


async def _schedule(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.schedules import show_schedule

    name = asked["name"]
    try:
        found = await show_schedule(operator, name)
    except ParameterError as error:
        raise OperationError(str(error), "not_found") from None
    missed = sum(run["job"] is None for run in found["runs"])
    return {"title": f"Schedule {name}", "one": found, "missed": missed}


# ---- audit -----------------------------------------------------------------------------------------------------------

_AUDIT = (
    "type",
    "work",
    "tenant",
    "actor",
    "key",
    "category",
    "correlation",
    "trace",
    "text",
    "since",
    "until",
    "after",
    "back",
)


async def _audit(operator: Operator, asked: Asked) -> Found:
    from reefknot.audit.model.event import EVENT_TYPES
    from reefknot.console.operations.audit import EventQuery, audit_head, search_events

    found: Found = {"events": [], "next": None}
    errors: dict[str, str] = {}
    try:
        found = await search_events(operator, EventQuery(**_own(asked), limit=ROWS))
    except ParameterError as error:
        errors = {error.parameter: str(error)}
    types = sorted(str(kind.__struct_config__.tag) for kind in EVENT_TYPES)
    heads = (await audit_head(operator))["heads"]
    return {"title": "Audit", "found": found, "errors": errors, "types": types, "heads": heads}


async def _verify(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.audit import verify_events

    found = await verify_events(operator, most=VERIFIED)
    wrong, total = found["mismatches"], found["mismatches_total"]
    summary = f"{total} mismatches" if total else "Every hash follows from the one before it"
    fine = "No event was changed, removed, swapped or inserted, as far as the chain can tell."
    return _check("Verify", "verify", found, summary=summary, wrong=wrong[:MOST_WRONG], fine=fine, notes=proof(found))


def proof(found: Found) -> list[str]:
    """Sentences about the part of the log that kept heads vouch for."""
    accidents = "the hashes are consistent, which shows accidents and not intent"
    missing = [f"The heads of audit.heads are not there: {found['heads_missing']}"] if found["heads_missing"] else []
    if found["compared_with"] is None:
        hint = "Anyone who can write the log can recompute its hashes; audit.heads keeps heads in a second place."
        return [*missing, f"Compared with no head that was kept elsewhere: {accidents}. {hint}"]
    notes = [f"Compared with the heads in {found['compared_with']}."]
    for one in found.get("chains", [found]):
        chain = f" of chain {one['chain']}" if "chains" in found else ""
        proven, last = one["proven_up_to"], one["sequence"]
        if proven is None:
            if not one["mismatches_total"]:
                notes.append(f"No head was kept{chain}: {accidents}.")
            continue
        notes.append(
            f"Proven{chain}: nothing up to event {amount(proven)} of {amount(last)} was changed since its head."
        )
        if last > proven:
            notes.append(f"Events {amount(proven + 1)} to {amount(last)}{chain} are newer than it: {accidents}.")
    return missing + notes


async def _replay(operator: Operator, asked: Asked) -> Found:
    from reefknot.console.operations.audit import replay_events

    found = await replay_events(operator, most=REPLAYED)
    total = found["differences_total"]
    summary = f"{total} differences" if total else f"{amount(found['decisions'])} decisions, decided alike again"
    fine = "Each recorded decision follows from its recorded inputs and policies. Nothing was executed."
    return _check(
        "Replay", "replay", found, summary=summary, wrong=found["differences"][:MOST_WRONG], fine=fine, notes=[]
    )


def _check(title: str, verb: str, found: Found, **more: Any) -> Found:
    few = {name: one[:MOST_WRONG] if isinstance(one, list) else one for name, one in found.items()}
    return {"title": title, "verb": verb, "found": few, "ok": found["ok"], **more}


VIEWS: tuple[View, ...] = (
    View("overview", "/", "Overview", _overview, ("span",), key="o"),
    View("alerts", "/alerts", "Alerts", _alerts, key="l"),
    View("work", "/work", "Work", _work, _WORK, key="w"),
    View("job", "/work/{id:path}", "Job", _job, ("id", "tenant"), parent="work"),
    View("quarantine", "/quarantine", "Quarantine", _quarantine, _QUARANTINE, key="q"),
    View(
        "quarantined",
        "/quarantine/{id:path}",
        "Quarantined job",
        _quarantined,
        ("id", "tenant"),
        is_live=False,
        parent="quarantine",
    ),
    View("policies", "/policies", "Policies", _policies, _QUESTION, key="p", is_live=False),
    View("workers", "/workers", "Workers", _workers, key="k"),
    View("sources", "/sources", "Sources", _sources, key="s"),
    View("source", "/sources/{name}", "Source", _source, ("name",), parent="sources"),
    View("documents", "/documents", "Documents", _documents, ("words", "source"), is_live=False, parent="sources"),
    View("schedule", "/schedules/{name}", "Schedule", _schedule, ("name",), parent="sources"),
    View("audit", "/audit", "Audit", _audit, _AUDIT, key="a"),
    View("verify", "/audit/verify", "Verify", _verify, is_live=False, parent="audit", template="check"),
    View("replay", "/audit/replay", "Replay", _replay, is_live=False, parent="audit", template="check"),
    View("health", "/health", "Health", _health, key="h", is_live=False),
)
BY_NAME = {view.name: view for view in VIEWS}
