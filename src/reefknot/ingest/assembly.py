"""
Ingestion in a running system: the orchestrator over the configured sources, and their timetables.

A source that has never been synced is synced at once; after that its timetable, its changes and people ask for syncs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from reefknot.ingest.configured_sources import (
    ConfiguredSource,
    check_sources,
    documents_path,
    ingestion_settings,
    open_documents,
    sources_of,
)
from reefknot.ingest.jobs import JobQueue
from reefknot.ingest.orchestrator import IngestionOrchestrator
from reefknot.ingest.schedules import ScheduledEntry, submission_id
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.timeouts import AWAY_S, ended, unless_away

if TYPE_CHECKING:
    from reefknot.policy.settings import Settings
    from reefknot.queue.execution.slots import Isolation
    from reefknot.stores.port import Store


@asynccontextmanager
async def running_ingestion(
    store: Store,
    settings: Settings,
    url: str,
    *,
    isolation: Isolation | None = None,
    secrets: tuple[str, ...] = (),
    seed: int | None = None,
    drain: float | None = None,
) -> AsyncIterator[IngestionOrchestrator | None]:
    """The orchestrator over the configured sources, for as long as the block lasts; None without sources."""
    check_sources(settings, strict=True)
    sources = sources_of(settings)
    if not sources:
        yield None
        return
    async with open_documents(documents_path(settings, url)) as documents:
        orchestrator = IngestionOrchestrator(
            job_queue=JobQueue(store),
            sources=[one.for_orchestrator() for one in sources],
            documents=documents,
            book=settings.book,
            settings=ingestion_settings(settings),
            isolation=isolation,
            secrets=secrets,
            seed=seed,
        )
        await orchestrator.start()
        try:
            await _first_syncs(orchestrator, sources)
            yield orchestrator
        finally:
            await _stop(orchestrator, store, drain)


async def _stop(orchestrator: IngestionOrchestrator, store: Store, drain: float | None) -> None:
    """Stop in order; what cannot be given back to a store that is away is left to its lease."""

    def is_away() -> bool:
        return store.reached_for == 0 and not orchestrator.running

    if await unless_away(orchestrator.stop(drain), is_away, AWAY_S) is None:
        held = len(orchestrator.claims())
        text = "the store does not answer: %d jobs of sources are not returned and wait for the end of their leases"
        logger().warning(text, held)
        await ended(*orchestrator.abandon())


async def _first_syncs(orchestrator: IngestionOrchestrator, sources: list[ConfiguredSource]) -> None:
    for source in sources:
        is_timed = source.timetable.every_ms or source.timetable.cron
        if (is_timed or source.on_change) and not orchestrator.records.known(source.name).sync_job:
            try:
                await orchestrator.request_sync(source.name, trigger="schedule", job_id=f"{source.name}@first")
            except Exception as error:  # the next due time asks again
                text = "the first sync of source %s was not submitted; the next due time submits it (%s)"
                logger().error(text, source.name, error_text(error))


def sync_entries(settings: Settings, orchestrator: IngestionOrchestrator) -> list[ScheduledEntry]:
    """The timetables of sources, for the scheduler."""

    async def submit(name: str, due_at: datetime) -> None:
        await orchestrator.request_sync(name, trigger="schedule", job_id=submission_id(name, due_at))

    timed = [one for one in sources_of(settings) if one.timetable.every_ms or one.timetable.cron]
    return [ScheduledEntry(one.name, one.timetable, partial(submit, one.name)) for one in timed]
