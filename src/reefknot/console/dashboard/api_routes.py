"""
The table of the HTTP API: for each method and path its operation, its parameters, its body and its answer.

The routes that are served and the OpenAPI document are both made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from reefknot.console.dashboard.api_types import (
    ACTION_S,
    ActionBody,
    ApiRoute,
    Call,
    CancelBody,
    ChangesParameters,
    DocumentSearch,
    DrainBody,
    DryRunBody,
    EditBody,
    JobParameters,
    KeyParameters,
    LogParameters,
    NamedParameters,
    NoParameters,
    PauseBody,
    PolicyKind,
    PolicyTarget,
    QuarantineBody,
    ResumeBody,
    RetryBody,
    RouterParameters,
    ScheduleRunBody,
    SearchParameters,
    SourceParameters,
    SpanParameters,
    SyncBody,
    TelemetryParameters,
    UniqueParameters,
    WorkerParameters,
    WrittenAssignment,
)
from reefknot.console.operations import (
    alerts,
    audit,
    health,
    idempotency,
    jobs,
    overview,
    policies,
    quarantine,
    queues,
    schedules,
    sources,
    systems,
    telemetry,
)

_BULK = {
    "tenant_ids": "array",
    "missing": "array",
    "count": "integer",
    "actor": "string",
    "dry_run": "boolean",
    "by_type": "object",
    "reasons": "array",
    "hints": "array",
}
_JOB = {
    "id": "string",
    "tenant_id": "string?",
    "type": "string",
    "state": "string",
    "attempts": "integer",
    "created_at": "string",
}
_FAMILY = {"parent": "string?", "children": "array", "children_by_state": "object", "after": "array"}
_COMMAND = {"workers": "array", "actor": "string", "dry_run": "boolean"}
_RELOAD = {"systems": "array", "actor": "string", "dry_run": "boolean"}


# ---- ways to call an operation ---------------------------------------------------------------------------------------


def _with_fields(operation: Any) -> Call:
    """The parameters and the fields of the body are arguments, by their names."""

    def call(operator: Any, given: Any, body: Any) -> Any:
        return operation(operator, **asdict(given), **({} if body is None else asdict(body)))

    return call


def _with_query(operation: Any) -> Call:
    """The parameters together are one argument."""
    return lambda operator, given, _: operation(operator, given)


def _with_key(operation: Any) -> Call:
    """The body as a whole is one argument; the key of unique work is in the query."""
    return lambda operator, given, body: operation(operator, body, given.key)


def _with_choice(operation: Any) -> Call:
    """The body chooses jobs, and has the reason and whether the action is only tried."""
    return lambda operator, _, body: operation(operator, body, because=body.because, dry_run=body.dry_run)


def _with_settings(operation: Any) -> Call:
    """The configuration is asked, without the store; the parameters are arguments, by their names."""
    return lambda operator, given, _: operation(operator.settings, **asdict(given))


def _with_question(operation: Any) -> Call:
    """The configuration is asked, without the store; the parameters together are one argument."""
    return lambda operator, given, _: operation(operator.settings, given, redactor=operator.redactor)


def _get(
    path: str,
    operation: Any,
    parameters: type[Struct] = NoParameters,
    *,
    call: Callable[[Any], Call] = _with_fields,
    name: str = "",
    longest: float | None = None,
) -> ApiRoute:
    """A question; its name is that of the operation, unless another is given."""
    name = name or operation.__name__
    return ApiRoute(method="GET", path=path, name=name, call=call(operation), parameters=parameters, longest=longest)


def _post(path: str, operation: Any, body: type[Struct], *parameters: type[Struct], **more: Any) -> ApiRoute:
    """An action, with the same rules as a question."""
    return replace(_get(path, operation, *parameters, **more), method="POST", body=body)


# ---- routes ----------------------------------------------------------------------------------------------------------

_OVERVIEW = (
    _get("/overview", overview.overview, SpanParameters).documented(
        "Jobs, workers, rates, admissions, retries and quarantine at a glance, with series of 15m, 2h or 24h.",
        {
            "at": "string",
            "states": "object",
            "workers": "array",
            "gone": "array",
            "unserved": "array",
            "series": "object",
        },
    ),
    _get("/alerts", alerts.list_alerts).documented(
        "The alerts that are active, the last ones that were resolved, and every rule with its value now.",
        {"alerts": "array", "resolved": "array", "rules": "array", "watched": "boolean"},
    ),
    _get("/doctor", health.examine_store, name="doctor").documented(
        "The findings about the store and all around it, each with its remedy.",
        {"ok": "boolean", "store": "string", "findings": "array"},
    ),
)

_JOBS = (
    _post("/jobs", jobs.submit_job, WrittenAssignment, UniqueParameters, call=_with_key, longest=10.0).documented(
        "Submit an assignment. The same id with the same content is the same job, as is the same `unique` key.",
        {"id": "string", "tenant_id": "string?", "state": "string", "created": "boolean"},
    ),
    _get("/jobs", jobs.list_jobs, jobs.JobQuery, call=_with_query).documented(
        "A page of jobs, and the number of all jobs in each state.",
        {
            "jobs": "array",
            "next": "string?",
            "states": "object",
            "waiting_for_router": "integer",
            "oldest_due_s": "number",
            "unserved": "array",
        },
    ),
    _get("/jobs/{job}", jobs.show_job, JobParameters).documented(
        "Everything about one job: state, attempts, progress, history, events and result.",
        {**_JOB, **_FAMILY, "history": "array", "events": "array"},
    ),
    _get("/jobs/{job}/story", jobs.job_story, JobParameters).documented(
        "The story of one job for a timeline: its attempts, each with its decision and its wait, and its events.",
        {"id": "string", "state": "string", "attempts": "array", "events": "array", "total_s": "number", **_FAMILY},
    ),
    _get("/jobs/{job}/logs", jobs.job_logs, LogParameters).documented(
        "The lines that the steps of one job logged, each with its number, time and attempt.",
        {"id": "string", "state": "string", "lines": "array", "dropped": "integer"},
    ),
    _post("/jobs/{job}/cancel", jobs.cancel_job, ActionBody, JobParameters).documented(
        "Cancel a job, wherever it is.",
        {"id": "string", "was": "string", "state": "string", "cancelled": "boolean", "actor": "string"},
    ),
    _get("/search", jobs.find_jobs, SearchParameters).documented(
        "The jobs whose id, correlation id or trace id this is, of all tenants.",
        {"text": "string", "jobs": "array", "is_cut": "boolean"},
    ),
    _post("/jobs/cancel", jobs.cancel_jobs, CancelBody, call=_with_choice, longest=ACTION_S).documented(
        "Cancel jobs: named ones, or those that wait or run and match a filter.",
        {"cancelled": "array", **_BULK},
    ),
    _post("/jobs/retry", jobs.retry_jobs, RetryBody, call=_with_choice).documented(
        "Run jobs again that ended without success: named ones, or those that match a filter.",
        {"retried": "array", **_BULK},
    ),
)

_QUARANTINE = (
    _get("/quarantine", quarantine.list_quarantined, quarantine.QuarantineQuery, call=_with_query).documented(
        "A page of quarantined jobs, each with its reason.",
        {"items": "array", "next": "string?", "quarantine_failed": "boolean"},
    ),
    _get("/quarantine/groups", quarantine.quarantine_groups, quarantine.QuarantineQuery, call=_with_query).documented(
        "Quarantined jobs in groups, by the fingerprint of their failure.",
        {"groups": "array", "ungrouped": "integer", "total": "integer"},
    ),
    _get("/quarantine/stats", quarantine.quarantine_stats).documented(
        "The number of quarantined jobs by type, source and reason.",
        {"total": "integer", "by_type": "object", "by_source": "object", "by_reason": "object", "oldest_at": "string?"},
    ),
    _get("/quarantine/jobs/{job}", quarantine.show_quarantined, JobParameters).documented(
        "One quarantined job with payload, reason, failure and history.",
        {"id": "string", "type": "string", "reason": "string", "history": "array"},
    ),
    _get("/quarantine/jobs/{job}/payload", quarantine.editable_payload, JobParameters).documented(
        "The part of a quarantined job's payload that may be edited.",
        {"id": "string", "tenant_id": "string?", "payload": "object", "notes": "array"},
    ),
    _post("/quarantine/jobs/{job}/edit", quarantine.edit_and_requeue, EditBody, JobParameters).documented(
        "Replace a quarantined job by its next version, with another payload.",
        {"requeued": "array", "replaces": "string", "diff": "array", "count": "integer", "actor": "string"},
    ),
    _post("/quarantine/requeue", quarantine.requeue_jobs, QuarantineBody, call=_with_choice).documented(
        "Queue quarantined jobs again.",
        {"requeued": "array", **_BULK},
    ),
    _post("/quarantine/discard", quarantine.discard_jobs, QuarantineBody, call=_with_choice).documented(
        "Give quarantined jobs up for good, with a reason.",
        {"discarded": "array", **_BULK},
    ),
    _post("/quarantine/purge", quarantine.purge_jobs, QuarantineBody, call=_with_choice).documented(
        "Delete quarantined jobs, payloads included.",
        {"purged": "array", **_BULK},
    ),
)


def _running(part: str) -> Any:
    """The question for the workers or the routers that run, and those that are gone. That none does is an answer."""

    async def operation(operator: Any) -> dict[str, Any]:
        found = await systems.running_systems(operator)
        return {part: found[part], "gone": [one for one in found["gone"] if f"{one['part']}s" == part]}

    return operation


def _worker_action(verb: str, participle: str, body: type[Struct]) -> tuple[ApiRoute, ApiRoute]:
    """An action on one worker, and on all of them."""
    operation, answer = partial(systems.command_worker, verb=verb), {participle: "boolean", **_COMMAND}
    one = _post(f"/workers/{{worker}}/{verb}", operation, body, WorkerParameters, name=f"{verb}_worker")
    every = _post(f"/workers/{verb}", operation, body, name=f"{verb}_workers")
    word = verb.capitalize()
    return one.documented(f"{word} a worker.", answer), every.documented(f"{word} all workers.", answer)


def _reload_action(part: str, parameters: type[Struct]) -> tuple[ApiRoute, ApiRoute]:
    """The reload of one worker or router, and of all."""

    async def operation(operator: Any, *, dry_run: bool, **named: str) -> Any:
        return await systems.reload_parts(operator, part, named.get(part), dry_run=dry_run)

    one = _post(f"/{part}s/{{{part}}}/reload", operation, DryRunBody, parameters, name=f"reload_{part}")
    every = _post(f"/{part}s/reload", operation, DryRunBody, name=f"reload_{part}s")
    return (
        one.documented(f"Have the process of a {part} read its configuration again.", _RELOAD),
        every.documented(f"Have the processes of all {part}s read their configuration again.", _RELOAD),
    )


_PAUSE = {
    "what": "string",
    "name": "string",
    "paused": "boolean",
    "changed": "boolean",
    "note": "string?",
    "actor": "string",
    "dry_run": "boolean",
}
_QUEUE = (
    _get("/queue", queues.list_queue).documented(
        "What is paused, and the limits of the running routers with the work that waits for them.",
        {"paused": "array", "limits": "array"},
    ),
    _post("/queue/pause", queues.pause_queue, PauseBody).documented(
        "Pause a job type or a tenant: nothing of it begins until it is resumed, or until its time is over.",
        {**_PAUSE, "until": "string?"},
    ),
    _post("/queue/resume", queues.resume_queue, ResumeBody).documented(
        "Resume a paused job type or tenant, by the name under which it was paused.", _PAUSE
    ),
)

_SYSTEMS = (
    _get("/workers", _running("workers"), name="list_workers").documented(
        "The workers that run, with their resource classes, and those that died within 15 minutes.",
        {"workers": "array", "gone": "array"},
    ),
    _get("/routers", _running("routers"), name="list_routers").documented(
        "The routers that run, with their load and the workers that they see, and those that died within 15 minutes.",
        {"routers": "array", "gone": "array"},
    ),
    *_worker_action("drain", "drained", DrainBody),
    *_worker_action("pause", "paused", DryRunBody),
    *_worker_action("resume", "resumed", DryRunBody),
    *_reload_action("worker", WorkerParameters),
    *_reload_action("router", RouterParameters),
)

_SCHEDULE = {"name": "string", "paused": "boolean", "changed": "boolean", "actor": "string", "dry_run": "boolean"}
SEARCH_S = 15.0
"""Seconds for a search or a page of changes; a search ends itself before that, and says why."""
_PAUSED = {"name": "string", "paused": "boolean", "changed": "boolean", "was_paused": "boolean"}

_INGESTION = (
    _get("/sources", sources.list_sources).documented(
        "The sources with their state, documents, problems and due times.",
        {"sources": "array"},
    ),
    _get("/sources/{name}", sources.show_source, SourceParameters).documented(
        "A source with its settings, and the documents that could be read only in part.",
        {"name": "string", "connector": "string", "state": "string", "settings": "object"},
    ),
    _post("/sources/{name}/run", sources.run_source, SyncBody, NamedParameters).documented(
        "Ask a running system for a sync now.",
        {"source": "string", "job": "string?", "queued": "boolean", "existing": "boolean", "note": "string?"},
    ),
    _post("/sources/{name}/pause", sources.pause_source, ActionBody, NamedParameters).documented(
        "Pause a source: its jobs do not start until it is resumed.",
        _PAUSED,
    ),
    _post("/sources/{name}/resume", sources.resume_source, ActionBody, NamedParameters).documented(
        "Resume a paused source.",
        _PAUSED,
    ),
    _get("/documents/search", sources.search_documents, DocumentSearch, longest=SEARCH_S).documented(
        "The documents that a search finds, best first: words, phrases, and fields such as from: and before:.",
        {"hits": "array", "searched": "array"},
    ),
    _get("/documents/changes", sources.document_changes, ChangesParameters, longest=SEARCH_S).documented(
        "Documents that were kept or deleted behind a cursor, in order; 409 when a consumer has to start over.",
        {"changes": "array", "next": "string"},
    ),
    _get("/schedules", schedules.list_schedules).documented(
        "Schedules and sources with their timetables, due times, and the outcome of the last job.",
        {"schedules": "array"},
    ),
    _get("/schedules/{name}", schedules.show_schedule, NamedParameters).documented(
        "A schedule with its timetable and its last 20 runs.",
        {"name": "string", "timetable": "string", "paused": "boolean", "runs": "array"},
    ),
    _post("/schedules/{name}/run", schedules.run_schedule, ScheduleRunBody, NamedParameters).documented(
        "Submit the assignment of a schedule now, or once for each of its last due times that was missed.",
        {"name": "string", "job": "string?", "jobs": "array", "actor": "string", "dry_run": "boolean"},
    ),
    _post("/schedules/{name}/pause", schedules.pause_schedule, ActionBody, NamedParameters).documented(
        "Pause a timetable for all processes, with a reason.",
        _SCHEDULE,
    ),
    _post("/schedules/{name}/resume", schedules.resume_schedule, DryRunBody, NamedParameters).documented(
        "Resume a paused timetable with its next due time.",
        _SCHEDULE,
    ),
    _get("/telemetry", telemetry.show_telemetry, TelemetryParameters).documented(
        "Retry outcomes by connector.",
        {"retry_metrics": "object"},
    ),
)

_POLICIES = (
    _get("/policies", policies.list_policies, PolicyKind, call=_with_settings).documented(
        "Every target and source with its policy, and where it is defined.",
        {"gate": "string", "policies": "array"},
    ),
    _get("/policies/show", policies.show_policy, PolicyTarget, call=_with_settings).documented(
        "The policy of a target: for each field its value, and the layer that set it.",
        {"target": "string", "source": "string?", "gate": "string", "policy": "object", "overrides": "object"},
    ),
    _get("/policies/explain", policies.explain_failure, policies.PolicyQuestion, call=_with_question).documented(
        "Whether a failure is retried, why, and when.",
        {"target": "string", "failure": "object", "decision": "string", "reason": "string", "schedule": "array"},
    ),
    _get("/policies/waits", policies.policy_waits, policies.PolicyQuestion, call=_with_question).documented(
        "The waits of a target, each with the range that jitter allows.",
        {"target": "string", "max_attempts": "integer", "schedule": "array"},
    ),
)

_KEYS = (
    _get("/idempotency/stats", idempotency.key_stats).documented(
        "The number of idempotency keys in each state.",
        {"total": "integer"},
    ),
    _get("/idempotency/keys/{key}", idempotency.show_key, KeyParameters).documented(
        "The record of an idempotency key.",
        {"key": "string", "state": "string", "owner": "string", "fence": "integer"},
    ),
)

_AUDIT = (
    _get("/audit", audit.search_events, audit.EventQuery, call=_with_query).documented(
        "A page of audited events, newest first, each with its fields and in words.",
        {"events": "array", "next": "string?", "looked_at": "integer"},
    ),
    _get("/audit/head", audit.audit_head).documented(
        "The heads of all chains. Kept elsewhere, they prove later what the log held now.",
        {"heads": "array"},
    ),
    _get("/audit/verify", audit.verify_events, longest=ACTION_S).documented(
        "The verification of the hash chains, and of a long log its newest part.",
        {
            "ok": "boolean",
            "source": "string",
            "mismatches": "array",
            "mismatches_total": "integer",
            "covered": "object",
        },
    ),
    _get("/audit/replay", audit.replay_events, longest=ACTION_S).documented(
        "Every audited decision decided again, with each difference.",
        {"ok": "boolean", "events": "integer", "decisions": "integer", "differences": "array", "covered": "object"},
    ),
)

ROUTES: tuple[ApiRoute, ...] = (
    *(*_OVERVIEW, *_JOBS, *_QUARANTINE, *_QUEUE, *_SYSTEMS),
    *(*_INGESTION, *_POLICIES, *_KEYS, *_AUDIT),
)
