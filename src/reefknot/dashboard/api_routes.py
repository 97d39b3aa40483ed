"""
The table of the HTTP API: for each method and path its operation, its parameters, its body and its answer.

The routes that are served and the OpenAPI document are both made from it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from reefknot.dashboard.api_types import (
    ACTION_S,
    ActionBody,
    ApiRoute,
    Call,
    DrainBody,
    DryRunBody,
    EditBody,
    JobParameters,
    KeyParameters,
    NamedParameters,
    PolicyKind,
    PolicyTarget,
    QuarantineBody,
    RetryBody,
    RouterParameters,
    SourceParameters,
    SyncBody,
    TelemetryParameters,
    WorkerParameters,
    WrittenAssignment,
)
from reefknot.operations import (
    alerts,
    audit,
    health,
    idempotency,
    jobs,
    overview,
    policies,
    quarantine,
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
_COMMAND = {"workers": "array", "actor": "string", "dry_run": "boolean"}
_RELOAD = {"systems": "array", "actor": "string", "dry_run": "boolean"}


def _get(path: str, name: str, summary: str, call: Call, answer: dict[str, str], **more: Any) -> ApiRoute:
    return ApiRoute(method="GET", path=path, name=name, summary=summary, call=call, answer=answer, **more)


def _post(path: str, name: str, summary: str, call: Call, answer: dict[str, str], **more: Any) -> ApiRoute:
    return ApiRoute(method="POST", path=path, name=name, summary=summary, call=call, answer=answer, **more)


def _running(part: str) -> Call:
    """The question for the workers or the routers that run. That none does is an answer, too."""

    async def call(operator: Any, *_: Any) -> dict[str, Any]:
        return {part: (await systems.running_systems(operator))[part]}

    return call


_OVERVIEW = (
    _get(
        "/overview",
        "overview",
        "Jobs, workers, rates, admissions, retries and quarantine at a glance, with the last 15 minutes.",
        lambda operator, *_: overview.overview(operator),
        {"at": "string", "states": "object", "workers": "array", "series": "object"},
    ),
    _get(
        "/alerts",
        "list_alerts",
        "The alerts that are active, the last ones that were resolved, and every rule with its value now.",
        lambda operator, *_: alerts.list_alerts(operator),
        {"alerts": "array", "resolved": "array", "rules": "array", "watched": "boolean"},
    ),
    _get(
        "/doctor",
        "doctor",
        "The findings about the store and all around it, each with its remedy.",
        lambda operator, *_: health.examine_store(operator),
        {"ok": "boolean", "store": "string", "findings": "array"},
    ),
)

_JOBS = (
    _post(
        "/jobs",
        "submit_job",
        "Submit an assignment. The same id with the same content is the same job.",
        lambda operator, _, body: jobs.submit_job(operator, body),
        {"id": "string", "tenant_id": "string?", "state": "string", "created": "boolean"},
        body=WrittenAssignment,
        longest=10.0,
    ),
    _get(
        "/jobs",
        "list_jobs",
        "A page of jobs, and the number of all jobs in each state.",
        lambda operator, given, _: jobs.list_jobs(operator, given),
        {
            "jobs": "array",
            "next": "string?",
            "states": "object",
            "waiting_for_router": "integer",
            "oldest_due_s": "number",
        },
        parameters=jobs.JobQuery,
    ),
    _get(
        "/jobs/{job}",
        "show_job",
        "Everything about one job: state, attempts, history, events and result.",
        lambda operator, given, _: jobs.show_job(operator, given.job, given.tenant),
        {**_JOB, "history": "array", "events": "array"},
        parameters=JobParameters,
    ),
    _get(
        "/jobs/{job}/story",
        "job_story",
        "The story of one job for a timeline: its attempts, each with its decision and its wait, and its events.",
        lambda operator, given, _: jobs.job_story(operator, given.job, given.tenant),
        {"id": "string", "state": "string", "attempts": "array", "events": "array", "total_s": "number"},
        parameters=JobParameters,
    ),
    _post(
        "/jobs/{job}/cancel",
        "cancel_job",
        "Cancel a job, wherever it is.",
        lambda operator, given, body: jobs.cancel_job(
            operator, given.job, tenant=given.tenant, because=body.because, dry_run=body.dry_run
        ),
        {"id": "string", "was": "string", "state": "string", "cancelled": "boolean", "actor": "string"},
        parameters=JobParameters,
        body=ActionBody,
    ),
    _post(
        "/jobs/retry",
        "retry_jobs",
        "Run jobs again that ended without success: named ones, or those that match a filter.",
        lambda operator, _, body: jobs.retry_jobs(operator, body, because=body.because, dry_run=body.dry_run),
        {"retried": "array", **_BULK},
        body=RetryBody,
    ),
)


def _bulk_action(verb: str, participle: str, summary: str, operation: Any) -> ApiRoute:
    """An action on quarantined jobs: named ones, a group, or those that match a filter."""

    def call(operator: Any, _: Any, body: Any) -> Any:
        return operation(operator, body, because=body.because, dry_run=body.dry_run)

    answer = {participle: "array", **_BULK}
    return _post(f"/quarantine/{verb}", f"{verb}_jobs", summary, call, answer, body=QuarantineBody)


_QUARANTINE = (
    _get(
        "/quarantine",
        "list_quarantined",
        "A page of quarantined jobs, each with its reason.",
        lambda operator, given, _: quarantine.list_quarantined(operator, given),
        {"items": "array", "next": "string?", "quarantine_failed": "boolean"},
        parameters=quarantine.QuarantineQuery,
    ),
    _get(
        "/quarantine/groups",
        "quarantine_groups",
        "Quarantined jobs in groups, by the fingerprint of their failure.",
        lambda operator, given, _: quarantine.quarantine_groups(operator, given),
        {"groups": "array", "ungrouped": "integer", "total": "integer"},
        parameters=quarantine.QuarantineQuery,
    ),
    _get(
        "/quarantine/stats",
        "quarantine_stats",
        "The number of quarantined jobs by type, source and reason.",
        lambda operator, *_: quarantine.quarantine_stats(operator),
        {"total": "integer", "by_type": "object", "by_source": "object", "by_reason": "object", "oldest_at": "string?"},
    ),
    _get(
        "/quarantine/jobs/{job}",
        "show_quarantined",
        "One quarantined job with payload, reason, failure and history.",
        lambda operator, given, _: quarantine.show_quarantined(operator, given.job, given.tenant),
        {"id": "string", "type": "string", "reason": "string", "history": "array"},
        parameters=JobParameters,
    ),
    _get(
        "/quarantine/jobs/{job}/payload",
        "editable_payload",
        "The part of a quarantined job's payload that may be edited.",
        lambda operator, given, _: quarantine.editable_payload(operator, given.job, given.tenant),
        {"id": "string", "tenant_id": "string?", "payload": "object", "notes": "array"},
        parameters=JobParameters,
    ),
    _post(
        "/quarantine/jobs/{job}/edit",
        "edit_and_requeue",
        "Replace a quarantined job by its next version, with another payload.",
        lambda operator, given, body: quarantine.edit_and_requeue(
            operator,
            given.job,
            tenant=given.tenant,
            payload=body.payload,
            because=body.because,
            dry_run=body.dry_run,
        ),
        {"requeued": "array", "replaces": "string", "diff": "array", "count": "integer", "actor": "string"},
        parameters=JobParameters,
        body=EditBody,
    ),
    _bulk_action("requeue", "requeued", "Queue quarantined jobs again.", quarantine.requeue_jobs),
    _bulk_action("discard", "discarded", "Give quarantined jobs up for good, with a reason.", quarantine.discard_jobs),
    _bulk_action("purge", "purged", "Delete quarantined jobs, payloads included.", quarantine.purge_jobs),
)


def _worker_action(verb: str, participle: str, summary: str) -> tuple[ApiRoute, ApiRoute]:
    """An action on one worker, and on all of them."""
    body = DrainBody if verb == "drain" else DryRunBody

    async def call(operator: Any, given: Any, body: Any) -> Any:
        worker, seconds = getattr(given, "worker", None), getattr(body, "seconds", 30.0)
        return await systems.command_worker(operator, verb, worker, seconds=seconds, dry_run=body.dry_run)

    answer = {participle: "boolean", **_COMMAND}
    one = _post(
        f"/workers/{{worker}}/{verb}",
        f"{verb}_worker",
        f"{summary} a worker.",
        call,
        answer,
        body=body,
        parameters=WorkerParameters,
    )
    return one, _post(f"/workers/{verb}", f"{verb}_workers", f"{summary} all workers.", call, answer, body=body)


def _reload_action(part: str, parameters: type[Struct]) -> tuple[ApiRoute, ApiRoute]:
    """The reload of one worker or router, and of all."""

    async def call(operator: Any, given: Any, body: Any) -> Any:
        return await systems.reload_parts(operator, part, getattr(given, part, None), dry_run=body.dry_run)

    text = f"Have the process of a {part} read its configuration again."
    one = _post(
        f"/{part}s/{{{part}}}/reload", f"reload_{part}", text, call, _RELOAD, body=DryRunBody, parameters=parameters
    )
    all_text = f"Have the processes of all {part}s read their configuration again."
    return one, _post(f"/{part}s/reload", f"reload_{part}s", all_text, call, _RELOAD, body=DryRunBody)


_SYSTEMS = (
    _get(
        "/workers",
        "list_workers",
        "The workers that run, with their resource classes.",
        _running("workers"),
        {"workers": "array"},
    ),
    _get(
        "/routers",
        "list_routers",
        "The routers that run, with their load and the workers that they see.",
        _running("routers"),
        {"routers": "array"},
    ),
    *_worker_action("drain", "drained", "Drain"),
    *_worker_action("pause", "paused", "Pause"),
    *_worker_action("resume", "resumed", "Resume"),
    *_reload_action("worker", WorkerParameters),
    *_reload_action("router", RouterParameters),
)

_POLICIES = (
    _get(
        "/policies",
        "list_policies",
        "Every target and source with its policy, and where it is defined.",
        lambda operator, given, _: policies.list_policies(operator.settings, given.kind),
        {"gate": "string", "policies": "array"},
        parameters=PolicyKind,
    ),
    _get(
        "/policies/show",
        "show_policy",
        "The policy of a target: for each field its value, and the layer that set it.",
        lambda operator, given, _: policies.show_policy(operator.settings, given.target, given.source),
        {"target": "string", "source": "string?", "gate": "string", "policy": "object", "overrides": "object"},
        parameters=PolicyTarget,
    ),
    _get(
        "/policies/explain",
        "explain_failure",
        "Whether a failure is retried, why, and when.",
        lambda operator, given, _: policies.explain_failure(operator.settings, given, redactor=operator.redactor),
        {"target": "string", "failure": "object", "decision": "string", "reason": "string", "schedule": "array"},
        parameters=policies.PolicyQuestion,
    ),
    _get(
        "/policies/waits",
        "policy_waits",
        "The waits of a target, each with the range that jitter allows.",
        lambda operator, given, _: policies.policy_waits(operator.settings, given, redactor=operator.redactor),
        {"target": "string", "max_attempts": "integer", "schedule": "array"},
        parameters=policies.PolicyQuestion,
    ),
)

_SCHEDULE = {"name": "string", "paused": "boolean", "changed": "boolean", "actor": "string", "dry_run": "boolean"}
_PAUSED = {"name": "string", "paused": "boolean", "changed": "boolean", "was_paused": "boolean"}


def _source_action(verb: str, summary: str, operation: Any) -> ApiRoute:
    def call(operator: Any, given: Any, body: Any) -> Any:
        return operation(operator, given.name, because=body.because, dry_run=body.dry_run)

    types = {"parameters": NamedParameters, "body": ActionBody}
    return _post(f"/sources/{{name}}/{verb}", f"{verb}_source", summary, call, _PAUSED, **types)


_INGESTION = (
    _get(
        "/sources",
        "list_sources",
        "The sources with their state, documents, problems and due times.",
        lambda operator, *_: sources.list_sources(operator),
        {"sources": "array"},
    ),
    _get(
        "/sources/{name}",
        "show_source",
        "A source with its settings, and the documents that could be read only in part.",
        lambda operator, given, _: sources.show_source(operator, given.name, limit=given.limit),
        {"name": "string", "connector": "string", "state": "string", "settings": "object"},
        parameters=SourceParameters,
    ),
    _post(
        "/sources/{name}/run",
        "run_source",
        "Ask a running system for a sync now.",
        lambda operator, given, body: sources.run_source(operator, given.name, full=body.full, dry_run=body.dry_run),
        {"source": "string", "job": "string?", "queued": "boolean", "existing": "boolean", "note": "string?"},
        parameters=NamedParameters,
        body=SyncBody,
    ),
    _source_action("pause", "Pause a source: none of its jobs begins until it is resumed.", sources.pause_source),
    _source_action("resume", "Resume a paused source.", sources.resume_source),
    _get(
        "/schedules",
        "list_schedules",
        "Schedules and sources with their timetables, due times, and the outcome of the last job.",
        lambda operator, *_: schedules.list_schedules(operator),
        {"schedules": "array"},
    ),
    _post(
        "/schedules/{name}/run",
        "run_schedule",
        "Submit the assignment of a schedule now.",
        lambda operator, given, body: schedules.run_schedule(operator, given.name, dry_run=body.dry_run),
        {"name": "string", "job": "string?", "actor": "string", "dry_run": "boolean"},
        parameters=NamedParameters,
        body=DryRunBody,
    ),
    _post(
        "/schedules/{name}/pause",
        "pause_schedule",
        "Pause a timetable for all processes, with a reason.",
        lambda operator, given, body: schedules.pause_schedule(
            operator, given.name, because=body.because, dry_run=body.dry_run
        ),
        _SCHEDULE,
        parameters=NamedParameters,
        body=ActionBody,
    ),
    _post(
        "/schedules/{name}/resume",
        "resume_schedule",
        "Resume a paused timetable with its next due time.",
        lambda operator, given, body: schedules.resume_schedule(operator, given.name, dry_run=body.dry_run),
        _SCHEDULE,
        parameters=NamedParameters,
        body=DryRunBody,
    ),
    _get(
        "/telemetry",
        "show_telemetry",
        "What the retries of each connector came to.",
        lambda operator, given, _: telemetry.show_telemetry(operator, connector=given.connector, details=given.details),
        {"retry_metrics": "object"},
        parameters=TelemetryParameters,
    ),
)

_KEYS = (
    _get(
        "/idempotency/stats",
        "key_stats",
        "The number of idempotency keys in each state.",
        lambda operator, *_: idempotency.key_stats(operator),
        {"total": "integer"},
    ),
    _get(
        "/idempotency/keys/{key}",
        "show_key",
        "The record of an idempotency key.",
        lambda operator, given, _: idempotency.show_key(operator, given.key),
        {"key": "string", "state": "string", "owner": "string", "fence": "integer"},
        parameters=KeyParameters,
    ),
)

_AUDIT = (
    _get(
        "/audit",
        "search_events",
        "A page of audited events, newest first, each with its fields and in words.",
        lambda operator, given, _: audit.search_events(operator, given),
        {"events": "array", "next": "string?", "looked_at": "integer"},
        parameters=audit.EventQuery,
    ),
    _get(
        "/audit/head",
        "audit_head",
        "The heads of all chains. Kept elsewhere, they prove later what the log held now.",
        lambda operator, *_: audit.audit_head(operator),
        {"heads": "array"},
    ),
    _get(
        "/audit/verify",
        "verify_events",
        "The verification of the hash chains, and of a long log its newest part.",
        lambda operator, *_: audit.verify_events(operator),
        {
            "ok": "boolean",
            "source": "string",
            "mismatches": "array",
            "mismatches_total": "integer",
            "covered": "object",
        },
        longest=ACTION_S,
    ),
    _get(
        "/audit/replay",
        "replay_events",
        "Every audited decision decided again, with each difference.",
        lambda operator, *_: audit.replay_events(operator),
        {"ok": "boolean", "events": "integer", "decisions": "integer", "differences": "array", "covered": "object"},
        longest=ACTION_S,
    ),
)

ROUTES: tuple[ApiRoute, ...] = (
    *(*_OVERVIEW, *_JOBS, *_QUARANTINE, *_SYSTEMS),
    *(*_INGESTION, *_POLICIES, *_KEYS, *_AUDIT),
)
