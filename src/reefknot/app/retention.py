"""
`RetentionJob`: removes records past their retention from an open store, in the background.

Every ten minutes or so, one process of a host removes expired keys, ended work, and events from the start of the chain
on, a little at a time, so that no caller waits for it. It never removes a key that is held, work that has not ended, or
anything in quarantine.

The retention of events and work is noted beside the store, so that a process without a setting of its own does not
remove what another one was told to keep. A script that ends sooner runs a round as it closes, when one is due.
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
"""Random part of each wait, so that the processes of a fleet do not run at once."""
SHORTEST_WAIT_S = 1.0
LAST_ROUND_S = 1.0
KEEP_EVENTS_S = 90 * 86_400.0
KEEP_WORK_S = 7 * 86_400.0
MOST_NOTE_BYTES = 4096


class Retention(Struct, frozen=True):
    """Seconds that events and ended work are kept; None keeps them for ever. Keys carry their own expiry."""

    events: float | None = KEEP_EVENTS_S
    work: float | None = KEEP_WORK_S


class Removed(Struct, frozen=True):
    """Counts of records that one round removed."""

    keys: int = 0
    work: int = 0
    events: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.work or self.events)


class _Noted(Struct, frozen=True):
    retention: Retention | None = None
    last_round_at: float = msgspec.field(default=0.0, name="tidied_at")


class RetentionNote:
    """A small file beside a store: the retention that was asked for, and the time of the last round."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(f"{path}-retention")
        self._noted = _Noted()

    def read(self) -> _Noted:
        """The note as it stands; one that cannot be read counts as empty."""
        if self._path is not None:
            with suppress(OSError, msgspec.DecodeError), self._path.open("rb") as file:
                self._noted = msgspec.json.decode(file.read(MOST_NOTE_BYTES), type=_Noted)
        return self._noted

    def write(self, **changes: object) -> None:
        """Replace the file atomically. A folder that cannot be written is reported by the store itself."""
        self._noted = msgspec.structs.replace(self.read(), **changes)
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(msgspec.json.encode(self._noted))
            os.replace(fresh, self._path)


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
        self._task: asyncio.Task[None] | None = None
        self._given = given

    def start(self) -> None:
        """Start the background task. In a new store the first round is due one interval from now."""
        if self._given is not None:
            self._note.write(retention=self._given)
        if not self._note.read().last_round_at:
            self._note.write(last_round_at=self._wall_ms() / 1000)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="store retention")

    async def close(self) -> None:
        """Stop the task; run a last round, for a second at most, when one is due."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            if self._due_in() <= 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_ROUND_S):
                        await self._round()

    @property
    def retention(self) -> Retention:
        """The retention in force: the one given here, else the noted one, else the built-in one."""
        return self._given or self._note.read().retention or Retention()

    async def once(self) -> Removed:
        """Run one round: remove what is past its retention, and log how much that was."""
        keep, wall_ms = self.retention, self._wall_ms()
        keys = await self._store.idempotency.purge()
        work = 0 if keep.work is None else await self._store.work.purge(wall_ms - int(keep.work * 1000))
        events = 0 if keep.events is None else await self._store.audit.trim(wall_ms - int(keep.events * 1000))
        removed = Removed(keys, work, events)
        if removed:
            logger().info("retention removed %d keys, %d ended work items, %d events", keys, work, events)
        return removed

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(SHORTEST_WAIT_S, self._due_in()) * random.uniform(1.0, 1.0 + SPREAD))
            if self._due_in() <= 0:
                await self._round()

    async def _round(self) -> None:
        try:
            if self._may_run():
                await self.once()
                self._note.write(last_round_at=self._wall_ms() / 1000)
        except Exception as error:
            logger().error("the retention round failed (%s)", printable(str(error), most=300))

    def _wall_ms(self) -> int:
        """Wall time as the store reckons it: a wall clock that jumps while the store is open makes nothing older."""
        return self._timeline.at(self._clock.now()).wall

    def _due_in(self) -> float:
        """Seconds until the next round; 0 when the clock was set back, which must not put rounds off."""
        passed = self._wall_ms() / 1000 - self._note.read().last_round_at
        return EVERY_S - passed if passed >= 0 else 0.0


def retention_given(events: float | EllipsisType | None, work: float | EllipsisType | None) -> Retention | None:
    """The retention that a caller of `open_store` gave, with defaults for the rest; None when it gave none."""
    if events is ... and work is ...:
        return None
    built_in = Retention()
    return Retention(
        built_in.events if events is ... else checks.seconds_or_none("audit_retention", events, meaning="for ever"),
        built_in.work if work is ... else checks.seconds_or_none("work_retention", work, meaning="for ever"),
    )
