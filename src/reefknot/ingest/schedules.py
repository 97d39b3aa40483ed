"""
The scheduler: submits what is due, once for each due time, however many processes run.

The state of an entry is a named value, `schedule:NAME`. At a due time every process submits, then moves the last due
time by compare-and-set. The submission comes first, so a crash between the two loses nothing; it has an id made of name
and due time (`submission_id`), so the store keeps the first one and the others add nothing. A submission that fails is
tried again until the next due time, which takes its place. State is read at each due time: a pause counts for all
processes from the next one on, and the due times of a paused entry are passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count

from msgspec import DecodeError, Struct, json
from msgspec.structs import replace

from reefknot.audit.port import AuditEntry
from reefknot.errors import QueueFullError, StoreCorruptError, StoreUnavailableError
from reefknot.queue.model.schedules import DueTimes, Timetable, due, due_text, last_due_times, next_due
from reefknot.runtime.log import RepeatedErrors, error_text, logger, printable
from reefknot.runtime.tasks import Services
from reefknot.stores.port import Store

PREFIX = "schedule:"
SUBMIT_S = 60.0
"""Longest time of one submission and the change of its state."""
LONGEST_SLEEP_S = 60.0
"""The longest sleep: the store's time may be set while a loop sleeps."""
RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
MOST_TRIES = 100
MOST_RUNS = 20
"""Due times of an entry that are remembered."""


class ScheduledEntry(Struct, frozen=True):
    """
    A name, its timetable, and the submission of one due time.

    `submit` returns when the submission is kept, also if it was kept before; an error means that it is not.
    """

    name: str
    timetable: Timetable
    submit: Callable[[datetime], Awaitable[None]]


class ScheduleRun(Struct, frozen=True, omit_defaults=True):
    """A due time that is settled: submitted at a moment, or passed over (None) because nothing ran."""

    due: datetime
    at: datetime | None = None


class ScheduleState(Struct, frozen=True):
    """The state of an entry that all processes share."""

    last_due: datetime
    """The last due time that is settled: submitted, or passed over."""
    submitted: datetime | None = None
    """The due time that was submitted last."""
    submitted_at: datetime | None = None
    missed: int = 0
    """Due times that were passed over because nothing ran, or no submission was accepted."""
    last_error: str = ""
    """The error of the last submission, if it failed and none has succeeded since."""
    paused: bool = False
    paused_by: str = ""
    why: str = ""
    runs: tuple[ScheduleRun, ...] = ()
    """The last due times, the oldest first."""

    def with_runs(self, *runs: ScheduleRun) -> ScheduleState:
        """The state with these runs, each in place of an earlier one for the same due time."""
        known = {one.due: one for one in (*self.runs, *runs)}
        return replace(self, runs=tuple(known[due_at] for due_at in sorted(known))[-MOST_RUNS:])


def submission_id(name: str, due_at: datetime) -> str:
    """The id of the submission for a due time: the same in every process."""
    return f"{name}@{due_text(due_at)}"


def time_of(store: Store) -> datetime:
    """This moment by the store's clock."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=store.moment().wall)


# ---- state -----------------------------------------------------------------------------------------------------------


async def read_state(store: Store, name: str) -> tuple[ScheduleState | None, int]:
    """The state of an entry, None before it was first seen, and its version."""
    value = await store.values.get(PREFIX + name)
    if value is None:
        return None, 0
    try:
        return json.decode(value.body, type=ScheduleState), value.version
    except DecodeError as error:
        problem = f"the state of schedule {name} cannot be read ({error})"
        raise StoreCorruptError(store.identity, problem, "use a newer reefknot, or restore a backup") from error


async def change_state(
    store: Store, name: str, change: Callable[[ScheduleState], ScheduleState], *, events: Sequence[AuditEntry] = ()
) -> ScheduleState:
    """Change the state of an entry together with the events, even when other processes change it meanwhile."""
    for _ in range(MOST_TRIES):
        known, version = await read_state(store, name)
        changed = change(known or ScheduleState(time_of(store)))
        if await _put(store, name, changed, version, events):
            return changed
    raise StoreUnavailableError(store.identity, f"others changed schedule {name} {MOST_TRIES} times", "try again")


async def pause(
    store: Store, name: str, *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
) -> ScheduleState:
    """Pause an entry: its due times are passed over from now on."""
    return await change_state(
        store, name, lambda known: replace(known, paused=True, paused_by=who, why=why), events=events
    )


async def resume(store: Store, name: str, *, events: Sequence[AuditEntry] = ()) -> ScheduleState:
    """Resume an entry at its first due time after now; due times that passed meanwhile are skipped."""
    now = time_of(store)
    return await change_state(
        store, name, lambda known: replace(known, paused=False, paused_by="", why="", last_due=now), events=events
    )


async def run_now(store: Store, entry: ScheduledEntry, *, events: Sequence[AuditEntry] = ()) -> str:
    """
    Submit an entry for this moment, in addition to its timetable, paused or not. Returns the id of the submission.
    """
    now = time_of(store)
    async with asyncio.timeout(SUBMIT_S):
        await entry.submit(now)
        await change_state(
            store,
            entry.name,
            lambda known: replace(known, submitted=now, submitted_at=now, last_error="").with_runs(
                ScheduleRun(now, now)
            ),
            events=events,
        )
    return submission_id(entry.name, now)


async def run_missed(store: Store, entry: ScheduledEntry, *, events: Sequence[AuditEntry] = ()) -> list[str]:
    """Submit an entry for every due time of its last runs that was passed over. Returns the ids of the submissions."""
    known, _ = await read_state(store, entry.name)
    missed = [one.due for one in known.runs if one.at is None] if known is not None else []
    if not missed:
        return []
    async with asyncio.timeout(SUBMIT_S):
        for due_at in missed:
            await entry.submit(due_at)
        done = [ScheduleRun(due_at, time_of(store)) for due_at in missed]
        await change_state(store, entry.name, lambda found: found.with_runs(*done), events=events)
    return [submission_id(entry.name, due_at) for due_at in missed]


async def _put(store: Store, name: str, state: ScheduleState, version: int, events: Sequence[AuditEntry] = ()) -> bool:
    return (
        await store.values.put(PREFIX + name, json.encode(state).decode(), version=version, events=events) is not None
    )


# ---- the scheduler ---------------------------------------------------------------------------------------------------


class Scheduler:
    """Follows the timetables of its entries, each in a task of its own, until it is stopped."""

    def __init__(self, store: Store, entries: Iterable[ScheduledEntry]) -> None:
        self._store = store
        self._entries = list(entries)
        self._errors = RepeatedErrors()
        self._services = Services("schedule")

    def start(self) -> None:
        """Begin. An entry that no process has seen before is due at its next due time."""
        for entry in self._entries:
            if entry.timetable.every_ms or entry.timetable.cron:
                self._services.keep(entry.name, partial(self._follow, entry))

    async def stop(self) -> None:
        """End. A submission that is under way may be kept or not; the next process finds out."""
        await self._services.stop()

    async def _follow(self, entry: ScheduledEntry) -> None:
        trying: datetime | None = None
        failures = 0
        while True:
            try:
                async with asyncio.timeout(SUBMIT_S):
                    found, state, version = await self._look(entry, trying)
                    trying = found.latest
                    if found.latest is not None or found.missed:
                        await self._settle(entry, found, state, version)
                        continue
                failures = 0
                await self._sleep_until(next_due(entry.timetable, max(state.last_due, time_of(self._store))))
            except Exception as error:
                failures += 1
                await self._failed(entry, error, failures)

    async def _look(self, entry: ScheduledEntry, trying: datetime | None) -> tuple[DueTimes, ScheduleState, int]:
        """The decision by the state as it is now. A due time that is being tried is no older for it."""
        known, version = await read_state(self._store, entry.name)
        now = time_of(self._store)
        state = known or ScheduleState(now)
        if known is None:
            await _put(self._store, entry.name, state, 0)
        if state.paused or known is None:
            return DueTimes(), state, version
        found = due(entry.timetable, state.last_due, now)
        if found.latest is None and found.missed and trying is not None and trying > state.last_due:
            following = next_due(entry.timetable, trying)
            if following is not None and following > now:
                return DueTimes(trying, found.missed - 1), state, version
        return found, state, version

    async def _settle(self, entry: ScheduledEntry, found: DueTimes, state: ScheduleState, version: int) -> None:
        """Submit, then move the last due time. Another process that has moved it has submitted the same."""
        now = time_of(self._store)
        settled = replace(state, last_due=found.latest or now, missed=state.missed + found.missed)
        if found.missed:
            until = found.latest or now + timedelta(milliseconds=1)
            missed = last_due_times(entry.timetable, state.last_due, until, most=min(found.missed, MOST_RUNS))
            settled = settled.with_runs(*map(ScheduleRun, missed))
        if found.latest is not None:
            await entry.submit(found.latest)
            settled = replace(settled, submitted=found.latest, submitted_at=now, last_error="")
            settled = settled.with_runs(ScheduleRun(found.latest, now))
        if await _put(self._store, entry.name, settled, version) and found.missed:
            name = printable(entry.name, most=200)
            logger().warning("schedule %s: due times passed over: %d", name, found.missed)

    async def _sleep_until(self, wanted: datetime | None) -> None:
        for _ in count():
            left = LONGEST_SLEEP_S if wanted is None else (wanted - time_of(self._store)).total_seconds()
            if left <= 0:
                return
            await asyncio.sleep(min(left + 0.001, LONGEST_SLEEP_S))

    async def _failed(self, entry: ScheduledEntry, error: Exception, failures: int) -> None:
        """Log the error, keep it in the state where that can be written, and wait a little."""
        name, text = printable(entry.name, most=200), error_text(error)
        self._errors.log(f"schedule {name} was not submitted", error, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(SUBMIT_S):
                known, version = await read_state(self._store, entry.name)
                if known is not None and known.last_error != text:
                    await _put(self._store, entry.name, replace(known, last_error=text), version)
        except Exception as unwritten:
            logger().debug("the error of schedule %s was not kept (%s)", name, error_text(unwritten))
        pause_s = min(LONGEST_RETRY_S, RETRY_S * 2 ** min(failures - 1, 5))
        if isinstance(error, QueueFullError):
            pause_s = max(pause_s, min(LONGEST_RETRY_S, error.retry_after))
        await asyncio.sleep(pause_s)
