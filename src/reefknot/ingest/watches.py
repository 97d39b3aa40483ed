"""
`SourceWatches`: sources that tell of changes are synced soon after.

A change that comes while a sync runs may be behind what that sync has read already, so another one follows it. A change
whose sync cannot be asked for is kept until it can. A watch that fails is begun again, and may have missed changes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from reefknot.core.clock import Clock
from reefknot.ingest.jobs import JobQueue
from reefknot.ingest.sources import IngestionSource, SourceRecords
from reefknot.queue.model.work import WorkState
from reefknot.runtime.log import RepeatedErrors, logger
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import STORE_S

WATCH_AGAIN_S = 30.0
"""How soon a source is watched again whose watch has ended."""
ASK_AGAIN_S = 1.0
"""How soon a sync is asked for again, after one that runs, or a store that failed."""


class SourceWatches:
    """Watches sources, and asks for their syncs."""

    def __init__(
        self, jobs: JobQueue, records: SourceRecords, request: Callable[[str], Awaitable[object]], clock: Clock
    ) -> None:
        """`request` asks for a sync of the source of this name."""
        self._jobs = jobs
        self._records = records
        self._request = request
        self._clock = clock
        self._errors = RepeatedErrors()
        self._changed: set[str] = set()
        """Sources that have changed, and have no sync yet that begins afterwards."""
        self._has_changes = asyncio.Event()

    def start(self, services: Services, sources: Iterable[IngestionSource]) -> None:
        """Watch these sources for as long as the services run."""
        services.keep("changes", self._follow)
        for one in sources:
            services.keep(f"watch {one.name}", partial(self._watch, one))

    async def _watch(self, source: IngestionSource) -> None:
        while True:
            connector = None
            try:
                connector = source.open()
                watch = getattr(connector, "watch", None)
                if watch is None:
                    text = "source %s: the connector %s cannot watch; on_change has no effect"
                    logger().warning(text, source.name, source.connector)
                    return
                async for _ in watch():
                    self._note(source.name)
            except asyncio.CancelledError:  # by a step: what changes until it is watched again is not missed
                self._note(source.name)
                raise
            except Exception as error:
                self._errors.log(f"source {source.name} cannot be watched", error, self._clock.now())
            finally:
                if connector is not None:
                    with suppress(Exception):
                        async with asyncio.timeout(STORE_S):
                            await connector.close()
            await asyncio.sleep(WATCH_AGAIN_S)
            self._note(source.name)

    def _note(self, name: str) -> None:
        self._changed.add(name)
        self._has_changes.set()

    async def _follow(self) -> None:
        """Ask for syncs of the sources that have changed."""
        while True:
            if not self._changed:
                self._has_changes.clear()
                await self._has_changes.wait()
            for name in list(self._changed):
                try:
                    async with asyncio.timeout(STORE_S):
                        if await self._ask(name):
                            self._changed.discard(name)
                except Exception as error:
                    self._errors.log(f"source {name}: no sync after a change yet", error, self._clock.now())
            if self._changed:
                await asyncio.sleep(ASK_AGAIN_S)

    async def _ask(self, name: str) -> bool:
        """Ask for a sync. False: one runs, which may have passed the change by."""
        latest = await self._jobs.get((await self._records.read(name)).sync_job)
        if latest is not None and latest.state is WorkState.RUNNING:
            return False
        await self._request(name)
        return True
