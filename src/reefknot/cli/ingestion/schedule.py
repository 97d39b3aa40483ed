"""`reefknot schedule`: the timetables of schedules and sources, and what came of them. Every change is audited."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from msgspec.structs import replace

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.options import OPERATOR, STORE, OperatorFlags, StoreFlags, Wide, arg, unknown
from reefknot.cli.output import put, put_table, say, show, time_text
from reefknot.cli.store import StoreAddress, address_of, with_store
from reefknot.cli.watch import Watch, repeated
from reefknot.core.work import WorkState
from reefknot.errors import RejectedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from reefknot.config.schema import TimetableKeys
    from reefknot.core.schedules import Timetable
    from reefknot.ingestion.schedules import ScheduleState
    from reefknot.ports.store import Store

R = TypeVar("R")

app = noun("schedule", "schedule list", "schedule run nightly")

Name = Annotated[str, arg("Name of the schedule.")]


@app.command(name="list", help_epilogue=examples("schedule list", "schedule list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List schedules and sources with their timetables, due times, and the outcome of the last job."""
    address = address_of(options)
    repeated(watch, lambda: _list(address, wide=wide, json=options.json))


def _list(address: StoreAddress, *, wide: bool, json: bool) -> None:
    async def look(store: Store | None) -> list[dict[str, Any]]:
        return [await _fields(store, address, name, kind) for name, kind in _names(address).items()]

    found = _looked(address, look)

    def text() -> None:
        columns = ("name", "timetable", "next due", "last due", "last outcome")
        rows = [
            (one["name"], one["timetable"], _next_in_words(one), one["last_due"] or "-", one["last_outcome"] or "-")
            for one in found
        ]
        put_table(columns, rows, styles=("cyan",), whole=("name", "next due"), optional=("last due",), wide=wide)
        if not found:
            say("no schedule is configured; add one under `schedules:` in reefknot.yaml")

    show({"schedules": found}, text, json=json)


def _looked(address: StoreAddress, look: Callable[[Store | None], Coroutine[Any, Any, R]]) -> R:
    """The answer of `look(store)`, or of `look(None)` while no store has been made: then nothing has run yet."""
    return asyncio.run(look(None)) if address.is_unmade() else with_store(address, look)


def _next_in_words(fields: Mapping[str, Any]) -> str:
    if fields["paused"]:
        return f"paused by {fields['paused_by'] or 'unknown'}" + (f": {fields['why']}" if fields["why"] else "")
    return fields["next_due"] or "-"


async def _fields(store: Store | None, address: StoreAddress, name: str, kind: str) -> dict[str, Any]:
    """A schedule or source as JSON shows it; without a store, one that has never run."""
    from reefknot.app.schedules import timetable_of
    from reefknot.core.schedules import due_text
    from reefknot.ingestion.schedules import ScheduleState, read_state, time_of

    timetable = timetable_of(_keys(address)[name])
    now = datetime.now(UTC) if store is None else time_of(store)
    state, outcome = ScheduleState(now), ""
    if store is not None:
        state = (await read_state(store, name))[0] or state
        if kind == "source":
            state, outcome = await _of_source(store, name, state)
        outcome = outcome or await _outcome(store, address, name, state)
    following = _next_due(timetable, state, now)
    return {
        "name": name,
        "kind": kind,
        "timetable": _times_of_source(address, name) if kind == "source" else str(timetable),
        "missed": timetable.missed,
        "next_due": None if following is None else due_text(following),
        "last_due": None if state.submitted is None else due_text(state.submitted),
        "last_outcome": address.redactor(outcome) or None,
        "missed_count": state.missed,
        "last_error": address.redactor(state.last_error) or None,
        "paused": state.paused,
        "paused_by": state.paused_by or None,
        "why": state.why or None,
    }


def _times_of_source(address: StoreAddress, name: str) -> str:
    """The times of a source's syncs in words, as the list of sources has them: it may be watched for changes, too."""
    from reefknot.app.sources import sources_of

    (source,) = [one for one in sources_of(address.settings) if one.name == name]
    return source.schedule


def _next_due(timetable: Timetable, state: ScheduleState, now: Any) -> Any:
    from reefknot.core.schedules import next_due

    return None if state.paused else next_due(timetable, max(state.last_due, now))


async def _of_source(store: Store, name: str, state: ScheduleState) -> tuple[ScheduleState, str]:
    """The timetable of a source, paused when the source is, and the outcome of its last sync."""
    from reefknot.ingestion.sources import statuses
    from reefknot.operations.jobs import state_in_words

    (status,) = await statuses(store, [name])
    record, sync = status.record, status.sync
    paused = replace(state, paused=record.health.paused, paused_by=record.paused_by, why=record.paused_because)
    if sync is None:
        return paused, ""
    if sync.state is WorkState.PENDING and sync.attempts:
        due = max(sync.due_at, record.health.opens_at(store.moment().wall) or 0)
        return paused, f"retry at {time_text(due)}"
    return paused, await state_in_words(store, sync)


async def _outcome(store: Store, address: StoreAddress, name: str, state: ScheduleState) -> str:
    """The state of the job that was submitted last, or why there is none."""
    from reefknot.core.work import record_id
    from reefknot.ingestion.schedules import submission_id
    from reefknot.operations.jobs import state_in_words

    if state.last_error:
        return f"not submitted: {state.last_error}"
    schedule = address.settings.configuration.schedules.get(name)
    if state.submitted is None or schedule is None:  # a source has a list of its own
        return ""
    tenant = schedule.assignment.get("tenant_id")
    item = await store.work.get(record_id(submission_id(name, state.submitted), tenant))
    return "submitted" if item is None else await state_in_words(store, item)


@app.command(help_epilogue=examples("schedule run nightly"))
def run(name: Name, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Submit the assignment of a schedule now, beside its timetable, and print the job's id."""
    from reefknot.app.schedules import schedule_entries
    from reefknot.app.stores import client_of
    from reefknot.ingestion.schedules import run_now

    address = address_of(options)
    _check_schedule(address, name, "run")

    async def submit(store: Store | None) -> str:
        if store is None or options.dry_run:
            return ""
        entries = schedule_entries(address.settings, client_of(store, store.clock))
        (entry,) = [one for one in entries if one.name == name]
        return await run_now(store, entry, events=[address.event("schedule.run", name)])

    try:
        job = _looked(address, submit) if options.dry_run else with_store(address, submit, creates=True)
    except RejectedError as error:
        raise CommandError(f"{name}: not submitted, {error}", Exit.TEMPORARY) from error
    fields = {"name": name, "job": job or None, "actor": address.actor, "dry_run": options.dry_run}
    show(fields, lambda: put(job or f"{name} would be submitted"), json=options.json)
    return Exit.FINE


@app.command(help_epilogue=examples("schedule pause nightly --because 'the stock is counted'"))
def pause(
    name: Name,
    /,
    *,
    because: Annotated[str, arg("Why, for whoever looks at the list and at the audit log.")],
    options: OperatorFlags = OPERATOR,
) -> int:
    """Pause a timetable for all processes: its due times are passed over until it is resumed."""
    from reefknot.ingestion import schedules

    reason = because.strip()[:500]
    if not reason:
        raise CommandError("--because: give the reason; it is shown in the list and audited")

    async def change(store: Store, address: StoreAddress) -> None:
        event = address.event("schedule.pause", name, reason=reason)
        await schedules.pause(store, name, who=address.actor, why=address.redactor(reason), events=[event])

    return _change(name, options, change, paused=True)


@app.command(help_epilogue=examples("schedule resume nightly"))
def resume(name: Name, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Resume a paused timetable with its next due time; what was due meanwhile is passed over."""
    from reefknot.ingestion import schedules

    async def change(store: Store, address: StoreAddress) -> None:
        await schedules.resume(store, name, events=[address.event("schedule.resume", name)])

    return _change(name, options, change, paused=False)


def _change(
    name: str, options: OperatorFlags, change: Callable[[Store, StoreAddress], Awaitable[None]], *, paused: bool
) -> int:
    """Pause or resume a timetable, unless it is so already."""
    from reefknot.ingestion.schedules import read_state

    address, done = address_of(options), "paused" if paused else "resumed"
    _check_schedule(address, name, "pause" if paused else "resume")

    async def work(store: Store | None) -> tuple[bool, dict[str, Any]]:
        known = None if store is None else (await read_state(store, name))[0]
        is_news = (known is not None and known.paused) != paused
        if store is not None and is_news and not options.dry_run:
            await change(store, address)
        return is_news, await _fields(store, address, name, "schedule")

    is_pause = paused and not options.dry_run  # it holds for the systems that will be started, so it is kept
    is_news, fields = with_store(address, work, creates=True) if is_pause else _looked(address, work)

    def text() -> None:
        if not is_news:
            put(f"{name} is {'paused already' if paused else 'not paused'}")
        elif options.dry_run:
            put(f"{name} would be {done}")
        else:
            put(f"{name} {done}" + ("" if paused else f"; next due: {fields['next_due'] or '-'}"))

    show({**fields, "changed": is_news, "actor": address.actor, "dry_run": options.dry_run}, text, json=options.json)
    return Exit.FINE


def _keys(address: StoreAddress) -> dict[str, TimetableKeys]:
    """The configured sources and schedules; no name is both."""
    if address.settings is None:
        return {}
    configuration = address.settings.configuration
    return {**configuration.schedules, **configuration.sources}


def _names(address: StoreAddress) -> dict[str, str]:
    """By name: `schedule` or `source`."""
    sources = {} if address.settings is None else address.settings.configuration.sources
    return {name: "source" if name in sources else "schedule" for name in _keys(address)}


def _check_schedule(address: StoreAddress, name: str, action: str) -> None:
    """Refuse a name that is none of a schedule; sources have commands of their own."""
    names = _names(address)
    if name not in names:
        raise unknown("NAME", name, [one for one, kind in names.items() if kind == "schedule"])
    if names[name] == "source":
        raise CommandError(f"{name} is a source; {action} it with: reefknot source {action} {name}")
