"""
Retention: expired keys, ended work and old events are removed in the background, a little at a time.

Every ten minutes or so, one process of a host runs a round, so that no caller waits for it. A round never removes a key
that is held, work that has not ended, or anything in quarantine.

A process removes records only if it has had the store open for a minute and its clock is at most a day past the newest
record: a wrong clock makes no record old.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from reefknot.audit.retention import Retention, RetentionNote
from reefknot.core.time import Timeline
from reefknot.runtime.log import logger, printable
from reefknot.runtime.tasks import Services

if TYPE_CHECKING:
    from reefknot.core.clock import Clock
    from reefknot.stores.port import Store

EVERY_S = 600.0
SPREAD = 0.2
"""Random part of each wait, so that the processes of a fleet do not run at once."""
SHORTEST_WAIT_S = 60.0
"""Least time for which a process has had the store open before it removes anything: short commands remove nothing."""
CLOSE_S = 5.0
NEWEST_WITHIN_S = 86_400.0
"""Most that a clock may be past the newest record for anything to be removed."""


class Removed(Struct, frozen=True):
    """Counts of records that one round removed."""

    keys: int = 0
    work: int = 0
    events: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.work or self.events)


class RetentionJob:
    """Retention of one open store. `may_run` asks whether this process is the one of its host that runs it."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        given: Retention | None = None,
        note: RetentionNote | None = None,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self._note = note or RetentionNote(None)
        self._may_run = may_run
        self._services = Services("store")
        self._given = given
        self._opened_at = self._doubted_until = clock.now()
        self._has_warned = False

    def start(self) -> None:
        """Start the background task. In a new store the first round is due one interval from now."""
        if self._given is not None:
            self._note.write(retention=self._given)
        if not self._note.read().last_round_at:
            self._note.write(last_round_at=self._wall_ms() / 1000)
        self._services.keep("retention", self._run)

    async def close(self) -> None:
        """Stop the task."""
        await self._services.stop(CLOSE_S)

    @property
    def retention(self) -> Retention:
        """The retention in force: the one given here, else the noted one, else the built-in one."""
        return self._given or self._note.read().retention or Retention()

    async def once(self) -> Removed:
        """Run one round: remove what is past its retention, and log how much that was."""
        keep, wall_ms = self.retention, self._wall_ms()
        keys = work = 0
        if not self._store.expires_by_itself:
            keys = await self._store.idempotency.purge()
            work = 0 if keep.work is None else await self._store.work.purge(wall_ms - int(keep.work * 1000))
        events = 0
        if keep.events is not None:
            rule = f"retention {keep.events:g} s"
            events = await self._store.audit.trim(wall_ms - int(keep.events * 1000), rule=rule)
        removed = Removed(keys, work, events)
        if removed:
            logger().info("retention removed %d keys, %d ended work items, %d events", keys, work, events)
        return removed

    async def _run(self) -> None:
        await self._look_at_clock()
        while True:
            await asyncio.sleep(max(SHORTEST_WAIT_S, self._due_in()) * random.uniform(1.0, 1.0 + SPREAD))
            if self._due_in() <= 0:
                await self._round()

    async def _round(self) -> None:
        try:
            if self._may_run() and await self._clock_is_plausible():
                await self.once()
                self._note.write(last_round_at=self._wall_ms() / 1000)
        except Exception as error:
            logger().error("the retention round failed (%s)", printable(str(error), most=300))

    async def _look_at_clock(self) -> None:
        """Note how far the clock is past the newest record, before this process writes a record by the same clock."""
        try:
            self._doubted_until = self._opened_at + NEWEST_WITHIN_S if await self._is_far_ahead() else self._opened_at
        except Exception as error:  # the round reports it too
            logger().error("retention: the newest record was not read (%s)", printable(str(error), most=300))

    async def _clock_is_plausible(self) -> bool:
        """Whether the clock can be trusted: one that was wrong at the start is given a day to be noticed."""
        if self._clock.now() >= self._doubted_until and not await self._is_far_ahead():
            return True
        if not self._has_warned:
            self._has_warned = True
            logger().warning("the clock is, or was, more than a day past the newest record: nothing is removed for now")
        return False

    async def _is_far_ahead(self) -> bool:
        newest = await self._store.newest_record_at()
        return newest is not None and self._wall_ms() - newest > NEWEST_WITHIN_S * 1000

    def _wall_ms(self) -> int:
        """Wall time by the store's clock: a wall clock that jumps while the store is open makes no record older."""
        return self._timeline.at(self._clock.now()).wall

    def _due_in(self) -> float:
        """Seconds until the next round; 0 when the clock was set back, which must not put rounds off."""
        passed = self._wall_ms() / 1000 - self._note.read().last_round_at
        return EVERY_S - passed if passed >= 0 else 0.0
