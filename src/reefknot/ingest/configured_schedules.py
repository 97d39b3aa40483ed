"""
The schedules of a configuration: assignments that are submitted at each due time, by the same admission as any other.

The id of a submission is made of the schedule's name and the due time, so it is one job whichever process submits it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from reefknot.errors import KeyConflictError
from reefknot.ingest.schedules import ScheduledEntry, Scheduler, submission_id
from reefknot.queue.model.schedules import Timetable, parse
from reefknot.runtime.log import logger, printable

if TYPE_CHECKING:
    from reefknot.policy.schema import TimetableKeys
    from reefknot.policy.settings import Settings
    from reefknot.queue.client import Client
    from reefknot.stores.port import Store


def timetable_of(entry: TimetableKeys) -> Timetable:
    """The timetable of a source or schedule whose configuration was checked."""
    return parse(entry.every, entry.cron, time_zone=entry.time_zone, missed=entry.missed)


def schedule_entries(settings: Settings, client: Client) -> list[ScheduledEntry]:
    """The schedules of a configuration, submitted by this client."""
    return [
        ScheduledEntry(name, timetable_of(entry), _Submission(client, name, entry.assignment))
        for name, entry in settings.configuration.schedules.items()
    ]


class _Submission:
    """Submits the assignment of one schedule."""

    def __init__(self, client: Client, name: str, fields: dict[str, Any]) -> None:
        self._client = client
        self._name = name
        self._fields = fields

    async def __call__(self, due_at: datetime) -> None:
        given = submission_id(self._name, due_at)
        try:
            await self._client.hand_in({**self._fields, "assignment_id": given, "request_id": given})
        except KeyConflictError:  # by a process with another configuration, and a due time is one job
            text = "schedule: %s was submitted with other contents by another process, and keeps those"
            logger().warning(text, printable(given, most=300))


@asynccontextmanager
async def running_schedules(
    store: Store, settings: Settings, client: Client, syncs: Sequence[ScheduledEntry] = ()
) -> AsyncIterator[Scheduler]:
    """Submit what the schedules of a configuration make due, and `syncs`, for as long as the block lasts."""
    scheduler = Scheduler(store, [*schedule_entries(settings, client), *syncs])
    scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop()
