"""
Retention that happens by itself.

While a store is open, one process of its host removes, every ten minutes or so, what is past its retention: keys, work
that has ended, events from the start of the chain on. Little at a time, so that nobody waits for it, and told in the
log. It never removes a key that is held, work that has not ended, or anything in quarantine.

How long events and ended work are kept is noted beside the store, so that a process that says nothing about it does not
forget what another one was told to keep. A script that never lives ten minutes tidies when it is due, as it ends.
"""

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import EllipsisType

import msgspec
from msgspec import Struct

from reefknot.core import checks
from reefknot.core.time import Timeline
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.runtime.log import logger, printable

EVERY_S = 600.0
SPREAD = 0.2
"""A fleet must not tidy all at once."""
SOONEST_S = 1.0
LAST_ROUND_S = 1.0
KEEP_EVENTS_S = 90 * 86_400.0
KEEP_WORK_S = 7 * 86_400.0
MOST_NOTE_BYTES = 4096


class Retention(Struct, frozen=True):
    """How long, in seconds, events and ended work are kept. None is for ever. A key knows its own end."""

    events: float | None = KEEP_EVENTS_S
    work: float | None = KEEP_WORK_S


class Tidied(Struct, frozen=True):
    """What one round removed."""

    keys: int = 0
    work: int = 0
    events: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.work or self.events)


class _Noted(Struct, frozen=True):
    retention: Retention | None = None
    tidied_at: float = 0.0


class Note:
    """What is remembered beside a store: the retention that somebody asked for, and when it was tidied last."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(f"{path}-retention")
        self._noted = _Noted()

    def read(self) -> _Noted:
        """As it stands; what cannot be read says nothing."""
        if self._path is not None:
            with suppress(OSError, msgspec.DecodeError), self._path.open("rb") as file:
                self._noted = msgspec.json.decode(file.read(MOST_NOTE_BYTES), type=_Noted)
        return self._noted

    def write(self, **changes: object) -> None:
        """Whole or not at all. A folder that cannot be written is told of by the store itself."""
        self._noted = msgspec.structs.replace(self.read(), **changes)
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(msgspec.json.encode(self._noted))
            os.replace(fresh, self._path)


class Tidier:
    """Tidies one open store. `may` asks to be the one process that does."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        said: Retention | None = None,
        note: Note | None = None,
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self._note = note or Note(None)
        self._may = may
        self._task: asyncio.Task[None] | None = None
        self.said = said

    def start(self) -> None:
        """Begin. A store that nobody tidied yet counts from now on."""
        if self.said is not None:
            self._note.write(retention=self.said)
        if not self._note.read().tidied_at:
            self._note.write(tidied_at=self._wall())
        self._task = asyncio.get_running_loop().create_task(self._run(), name="store retention")

    async def close(self) -> None:
        """End, with a last bounded round when one is due."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            if self._due_in() <= 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_ROUND_S):
                        await self._round()

    @property
    def retention(self) -> Retention:
        """What holds: what was said here, else what somebody else was told, else what is built in."""
        return self.said or self._note.read().retention or Retention()

    async def once(self) -> Tidied:
        """Remove what is past its retention, and say so in the log."""
        keep, wall_ms = self.retention, self._timeline.at(self._clock.now()).wall
        keys = await self._store.idempotency.purge()
        work = 0 if keep.work is None else await self._store.work.purge(wall_ms - int(keep.work * 1000))
        events = 0 if keep.events is None else await self._store.audit.trim(wall_ms - int(keep.events * 1000))
        gone = Tidied(keys, work, events)
        if gone:
            logger().info(
                "past their retention, and removed: %d keys, %d ended pieces of work, %d events", keys, work, events
            )
        return gone

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(SOONEST_S, self._due_in()) * random.uniform(1.0, 1.0 + SPREAD))
            if self._due_in() <= 0:
                await self._round()

    async def _round(self) -> None:
        try:
            if self._may():
                await self.once()
                self._note.write(tidied_at=self._wall())
        except Exception as error:
            logger().error("retention could not be kept (%s)", printable(str(error), most=300))

    def _wall(self) -> float:
        """As the store believes it: a wall clock that jumps while it is open makes nothing older."""
        return self._timeline.at(self._clock.now()).wall / 1000

    def _due_in(self) -> float:
        """Seconds. A clock that was set back must not put it off for longer than one round."""
        passed = self._wall() - self._note.read().tidied_at
        return EVERY_S - passed if passed >= 0 else 0.0


def retention_said(events: float | EllipsisType | None, work: float | EllipsisType | None) -> Retention | None:
    """The retention that a caller gave, None when nothing was said; what was not said is as built in."""
    if events is ... and work is ...:
        return None
    built_in = Retention()
    return Retention(
        built_in.events if events is ... else checks.seconds_or_none("audit_retention", events, meaning="for ever"),
        built_in.work if work is ... else checks.seconds_or_none("work_retention", work, meaning="for ever"),
    )
