"""
Schedules: the timetables of schedules and sources with their last runs, and schedules run, paused and resumed.

A source has its own actions; its timetable is listed together with those of schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from reefknot.console.operations.job_filters import state_in_words
from reefknot.console.operations.values import ParameterUseError, time_text, unknown_word
from reefknot.errors import OperationError, RejectedError
from reefknot.queue.model.work import WorkState, record_id

if TYPE_CHECKING:
    from datetime import datetime

    from reefknot.console.operations.operator import Operator
    from reefknot.ingest.schedules import ScheduleState
    from reefknot.ingest.sources import SourceStatus
    from reefknot.policy.schema import TimetableKeys
    from reefknot.queue.model.schedules import Timetable
    from reefknot.stores.port import Store


async def list_schedules(operator: Operator) -> dict[str, Any]:
    """Schedules and sources with their timetables, due times, and the outcome of the last job."""
    from reefknot.ingest.sources import statuses

    kinds = _kinds(operator)
    sources = [name for name, kind in kinds.items() if kind == "source"]
    known = {one.name: one for one in await statuses(operator.store, sources)} if sources else {}
    return {"schedules": [await _fields(operator, name, known.get(name)) for name in kinds]}


async def show_schedule(operator: Operator, name: str) -> dict[str, Any]:
    """A schedule with its timetable and its last 20 runs, the newest first, each with the state of its job."""
    from reefknot.ingest.schedules import read_state, submission_id
    from reefknot.queue.model.schedules import due_text

    check_schedule(operator, name, "show")
    state = (await read_state(operator.store, name))[0]
    runs = []
    for one in reversed(state.runs if state is not None else ()):
        job = None if one.at is None else submission_id(name, one.due)
        fields = {"due": due_text(one.due), "submitted_at": None if one.at is None else due_text(one.at), "job": job}
        outcome = "missed: no system was running" if job is None else await _job_outcome(operator, name, job)
        runs.append({**fields, "outcome": operator.redactor(outcome)})
    tenant = _assignment(operator, name).get("tenant_id")
    return {**await _fields(operator, name), "tenant_id": tenant, "runs": runs}


async def run_schedule(operator: Operator, name: str, *, missed: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Submit the assignment of a schedule now, outside its timetable, paused or not; or, with `missed`, once for each
    of its last due times at which no system was running."""
    from reefknot.ingest.configured_schedules import schedule_entries
    from reefknot.ingest.schedules import read_state, run_missed, run_now, submission_id

    check_schedule(operator, name, "run")
    state = (await read_state(operator.store, name))[0] if missed else None
    jobs = [submission_id(name, one.due) for one in (state.runs if state is not None else ()) if one.at is None]
    if not dry_run and (jobs or not missed):
        assert operator.settings is not None, "it has the schedule"
        entries = schedule_entries(operator.settings, operator.client())
        (entry,) = [one for one in entries if one.name == name]
        run = run_missed if missed else run_now
        try:
            details: dict[str, Any] = {"missed": len(jobs)} if missed else {}
            done = await run(operator.store, entry, events=[operator.event("schedule.run", name, **details)])
        except RejectedError as error:
            raise OperationError(f"{name}: not submitted, {error}", "temporary") from error
        jobs = done if isinstance(done, list) else [done]
    count = len(jobs) if missed else 1
    job = jobs[-1] if jobs and not dry_run else None
    return {"name": name, "job": job, "jobs": jobs, "count": count, "actor": operator.actor, "dry_run": dry_run}


async def pause_schedule(operator: Operator, name: str, *, because: str, dry_run: bool = False) -> dict[str, Any]:
    """Pause a timetable for all processes: its due times are passed over until it is resumed."""
    return await _set_paused(operator, name, because, dry_run=dry_run)


async def resume_schedule(operator: Operator, name: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Resume a paused timetable with its next due time; what was due meanwhile is passed over."""
    return await _set_paused(operator, name, None, dry_run=dry_run)


async def _set_paused(operator: Operator, name: str, because: str | None, *, dry_run: bool) -> dict[str, Any]:
    """Pause a timetable for a reason, or resume it (None), unless it is so already."""
    from reefknot.ingest import schedules

    check_schedule(operator, name, "resume" if because is None else "pause", because=because)
    known = (await schedules.read_state(operator.store, name))[0]
    is_news = (known is not None and known.paused) != (because is not None)
    if is_news and not dry_run:
        if because is None:
            await schedules.resume(operator.store, name, events=[operator.event("schedule.resume", name)])
        else:
            why = operator.reason(because.strip())
            event = operator.event("schedule.pause", name, reason=why)
            await schedules.pause(operator.store, name, who=operator.actor, why=why, events=[event])
    fields = await _fields(operator, name)
    return {**fields, "changed": is_news, "actor": operator.actor, "dry_run": dry_run}


# ---- one schedule ----------------------------------------------------------------------------------------------------


async def _fields(operator: Operator, name: str, source: SourceStatus | None = None) -> dict[str, Any]:
    """A schedule as JSON shows it, or the timetable of a source, whose status is given."""
    from reefknot.ingest.configured_schedules import timetable_of
    from reefknot.ingest.schedules import ScheduleState, read_state, time_of
    from reefknot.queue.model.schedules import due_text

    timetable, store = timetable_of(_keys(operator)[name]), operator.store
    now, outcome = time_of(store), ""
    state = (await read_state(store, name))[0] or ScheduleState(now)
    if source is not None:
        state, outcome = await _of_source(store, source, state)
    outcome = outcome or await _outcome(operator, name, state)
    following = _next_due(timetable, state, now)
    return {
        "name": name,
        "kind": "schedule" if source is None else "source",
        "timetable": str(timetable) if source is None else _times_of_source(operator, name),
        "missed": timetable.missed,
        "next_due": None if following is None else due_text(following),
        "last_due": None if state.submitted is None else due_text(state.submitted),
        "last_outcome": operator.redactor(outcome) or None,
        "missed_count": state.missed,
        "last_error": operator.redactor(state.last_error) or None,
        "paused": state.paused,
        "paused_by": state.paused_by or None,
        "why": state.why or None,
    }


def _times_of_source(operator: Operator, name: str) -> str:
    """The times of a source's syncs in words, as the list of sources has them: it may be watched for changes, too."""
    from reefknot.console.operations.sources import configured_sources, named_source

    return named_source(configured_sources(operator), name).schedule


def _next_due(timetable: Timetable, state: ScheduleState, now: datetime) -> datetime | None:
    from reefknot.queue.model.schedules import next_due

    return None if state.paused else next_due(timetable, max(state.last_due, now))


async def _of_source(store: Store, status: SourceStatus, state: ScheduleState) -> tuple[ScheduleState, str]:
    """The timetable of a source, paused when the source is, and the outcome of its last sync."""
    record, sync = status.record, status.sync
    paused = replace(state, paused=record.health.paused, paused_by=record.paused_by, why=record.paused_because)
    if sync is None:
        return paused, ""
    if sync.state is WorkState.PENDING and sync.attempts:
        due = max(sync.due_at, record.health.opens_at(store.moment().wall) or 0)
        return paused, f"retry at {time_text(due)}"
    return paused, await state_in_words(store, sync)


async def _outcome(operator: Operator, name: str, state: ScheduleState) -> str:
    """The state of the job that was submitted last, or why there is none."""
    from reefknot.ingest.schedules import submission_id

    if state.last_error:
        return f"not submitted: {state.last_error}"
    if state.submitted is None or not _assignment(operator, name):  # a source has a list of its own
        return ""
    return await _job_outcome(operator, name, submission_id(name, state.submitted))


async def _job_outcome(operator: Operator, name: str, job: str) -> str:
    """The state of a job of a schedule in words."""
    item = await operator.store.work.get(record_id(job, _assignment(operator, name).get("tenant_id")))
    return "submitted" if item is None else await state_in_words(operator.store, item)


def _assignment(operator: Operator, name: str) -> dict[str, Any]:
    """The assignment of a schedule; that of a source is empty."""
    schedules = {} if operator.settings is None else operator.settings.configuration.schedules
    return schedules[name].assignment if name in schedules else {}


def _keys(operator: Operator) -> dict[str, TimetableKeys]:
    """The configured sources and schedules; no name is both."""
    if operator.settings is None:
        return {}
    configuration = operator.settings.configuration
    return {**configuration.schedules, **configuration.sources}


def _kinds(operator: Operator) -> dict[str, str]:
    """By name: `schedule` or `source`."""
    sources = {} if operator.settings is None else operator.settings.configuration.sources
    return {name: "source" if name in sources else "schedule" for name in _keys(operator)}


def check_schedule(operator: Operator, name: str, action: str, *, because: str | None = None) -> None:
    """Refuse a name that is not a schedule's, and a blank reason; sources have actions of their own."""
    if because is not None and not because.strip():
        raise ParameterUseError("because", "give the reason; it is shown in the list and audited")
    kinds = _kinds(operator)
    if name not in kinds:
        raise ParameterUseError("name", unknown_word(name, [one for one, kind in kinds.items() if kind == "schedule"]))
    if kinds[name] == "source":
        text = f"{name} is a source; {action} it with: reefknot source {action} {name}"
        raise OperationError(text, "invalid")
