"""
The activity of all systems on one store: counters and the last 24 hours, the same from every process.

Each system counts its own events (`telemetry/metrics.py`) and keeps them as the value `activity/ID`, written only when
something has changed. What a system counted outlives it: at its end it adds its record to `activity/ended`, and that of
a system that was killed is added by another one. A record is closed first: if its writer is alive after all, its next
write is refused and it continues under a new id with what it has counted since. Then the record is added, exactly once,
because the sum names the records in it, and deleted. So the totals of a store never go down.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import structs

from reefknot.audit.journal import Journal, observed
from reefknot.audit.metrics import COARSE, STEP_S, ActivityRecord, EventCounters, added, held, less
from reefknot.core.clock import Clock
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import WorkSnapshot
from reefknot.queue.presence import Status, living_systems, visible_work
from reefknot.runtime.log import RepeatedErrors
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import Store, StoredValue

if TYPE_CHECKING:
    from reefknot.queue.worker.service import Worker

PREFIX = "activity/"
ENDED = f"{PREFIX}ended"
LOOK_EVERY_S = 0.5
WRITE_EVERY_S = 5.0
SILENT_S = 60.0
"""How long the record of a system that no longer reports is kept separately."""
CLOSE_S = 3.0
"""Longest wait at the end of a system for its activity to be stored."""
FOLD_TRIES = 10

_record = msgspec.json.Decoder(ActivityRecord)


class Activity:
    """The counters of one system, in the store. As a context manager, it counts and writes while the block runs."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._errors = RepeatedErrors()
        self._counting = AsyncExitStack()
        self._services = Services("system")
        self.counters = EventCounters(clock.wall)
        self.record_id = new_id()
        self.workers: Sequence[Worker] = ()
        """The workers whose levels and destinations are shown."""
        self.leads = True
        """Whether this system samples the queue of the store and adds up the records of ended systems, for all."""
        self.looked_at: Callable[[], int] = int
        """When this system last looked at its alerts (ms UTC); 0 for never."""
        self._journal = Journal(store.audit)
        self._lost = 0
        self._earlier = ActivityRecord()
        """What this system has counted under an id that others closed."""
        self._written = ActivityRecord()
        self._version = 0
        self._changes = 0
        """The changes that were written, and those that the last look has seen."""
        self._seen = 0
        self._written_at = -inf
        self._sampled_step = 0

    async def __aenter__(self) -> Self:
        self._counting.enter_context(observed(self._store.audit, self.counters.observe))
        self._services.keep("activity", self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._services.stop()
        await self._counting.aclose()
        if self._store.failure is not None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.close()
        except Exception as problem:
            self._errors.log("the activity of this system was not kept", problem, self._clock.now())

    def status(self) -> dict[str, Any]:
        """The activity in a system's status: the last steps, rates, and the workers' problems."""
        buckets, rates = self.counters.recent()
        shown = less(ActivityRecord(buckets=buckets), self._earlier).buckets
        return {
            "id": self.record_id,
            "buckets": shown,
            "rates": rates,
            "levels": {worker.worker_id: worker.level_reasons() for worker in self.workers},
            "looked_at": self.looked_at(),
            "audit_buffered": self._journal.buffered,
            "destinations": [one for worker in self.workers for one in worker.troubled_destinations()],
        }

    def _worst_level(self) -> int:
        pools = [pool for worker in self.workers for pool in worker.pools.values()]
        return max((pool.held_status().severity for pool in pools), default=0)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(STORE_S):
                    await self._look()
            except Exception as error:
                self._errors.log("the activity of this system cannot be written", error, self._clock.now())
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        """Sample once in each step; write what has changed: every few seconds, and soon after the last change."""
        now, wall = self._clock.now(), self._clock.wall()
        lost, self._lost = self._journal.lost - self._lost, self._journal.lost
        if lost > 0:
            self.counters.count({"audit_lost": lost}, {"audit_lost": lost})
        step = int(wall // STEP_S)
        if step != self._sampled_step:
            self._sampled_step = step
            queue = sampled(await visible_work(self._store)) if self.leads else {}
            self.counters.sample({**queue, "level": self._worst_level()})
            if self.leads:
                await fold_left(self._store, int(wall * 1000), but=self.record_id)
        is_quiet, self._seen = self.counters.changes == self._seen, self.counters.changes
        if is_quiet or now - self._written_at >= WRITE_EVERY_S:
            self._written_at = now
            await self.write()

    def _current(self) -> ActivityRecord:
        return less(self.counters.record(), self._earlier)

    async def write(self) -> None:
        """Write the record, if anything has changed since the last time."""
        if self.counters.changes != self._changes:
            changes = self.counters.changes
            if await self._put(self._current()):
                self._changes = changes

    async def _put(self, record: ActivityRecord) -> bool:
        """Replace the record. False: another system closed it, and what it does not have continues under a new id."""
        name = PREFIX + self.record_id
        kept = await self._store.values.put(name, _encoded(record), version=self._version)
        if kept is not None:
            self._version, self._written = kept.version, record
            return True
        found = await self._store.values.get(name)
        if found is not None:
            self._version, self._written = found.version, _decoded(found)
            if not self._written.closed:  # the answer to a write was lost
                return False
        self._earlier = added([self._earlier, self._written])
        self.record_id, self._version, self._written = new_id(), 0, ActivityRecord()
        return False

    async def close(self) -> None:
        """Add the record to those of the ended systems. Nothing is written for a system that counted nothing."""
        record = self._current()
        if not record.totals and not self._version:
            return
        if self._version and not await self._put(structs.replace(record, closed=True)):
            record = self._current()
        if not await _fold(self._store, [(self.record_id, record, self._version)]) and not self._version:
            await self._put(structs.replace(record, closed=True))


def sampled(snapshot: WorkSnapshot) -> dict[str, float]:
    """The sampled series of the queue at this moment."""
    counts = snapshot.counts.values()
    return {
        "queued": sum(one.get(WorkState.PENDING, 0) for one in counts),
        "oldest_s": round(snapshot.oldest_due_ms / 1000, 1),
        "quarantine": sum(one.get(WorkState.QUARANTINED, 0) for one in counts),
    }


# ---- all systems -----------------------------------------------------------------------------------------------------


def reported(system: Status, name: str, default: Any) -> Any:
    """A part of what a system reports of its activity; the default for a system of an earlier version."""
    return (system.get("activity") or {}).get(name, default)


async def store_activity(store: Store, systems: Sequence[Status] = ()) -> ActivityRecord:
    """
    The sum of all records of a store.

    The last steps of living systems come from their statuses, which are fresher than their records. The totals are the
    written ones alone: they never go down, even when a system is killed.
    """
    async with asyncio.timeout(STORE_S):
        values = await store.values.list(PREFIX)
    records = {one.name.removeprefix(PREFIX): _decoded(one) for one in values}
    ended = records.pop("ended", ActivityRecord())
    for name in ended.folded:
        records.pop(name, None)
    for status in systems:
        name = str(reported(status, "id", ""))
        if name and name not in ended.folded:
            fresh = {int(step): one for step, one in reported(status, "buckets", {}).items()}
            known, now = records.get(name, ActivityRecord()), store.moment().wall / 1000
            longer = {one: held(known.coarse.get(one, {}), now, span) for one, span in COARSE.items()}
            records[name] = structs.replace(known, buckets=held(known.buckets | fresh, now), coarse=longer)
    return added([ended, *(records[name] for name in sorted(records))])


async def fold_left(store: Store, now_ms: int, *, but: str = "") -> int:
    """Add the records of systems that are gone, `but` one's own, to the sum of the ended ones. Returns how many."""
    values = [one for one in await store.values.list(PREFIX) if one.name not in (ENDED, PREFIX + but)]
    old = [(one, record) for one in values if (record := _decoded(one)).closed or now_ms - record.at > SILENT_S * 1000]
    if not old:
        return 0
    living = {reported(one, "id", None) for one in await living_systems(store)}
    closed = []
    for value, record in old:
        name, version = value.name.removeprefix(PREFIX), value.version
        if name in living and not record.closed:
            continue
        if not record.closed:
            body = _encoded(structs.replace(record, closed=True))
            kept = await store.values.put(value.name, body, version=version)
            if kept is None:  # its writer lives, or another one was faster
                continue
            version = kept.version
        closed.append((name, record, version))
    if closed:
        await _fold(store, closed)
    return len(closed)


async def _fold(store: Store, closed: Sequence[tuple[str, ActivityRecord, int]]) -> bool:
    """
    Add closed records to the sum, each once, and delete them. A record of version 0 was never written by itself.

    The sum is read before the list: a record that is there after the sum was read, and not named by it, is not in it.
    False: others changed the sum all the time.
    """
    for _ in range(FOLD_TRIES):
        found = await store.values.get(ENDED)
        ended = ActivityRecord() if found is None else _decoded(found)
        still = {one.name.removeprefix(PREFIX) for one in await store.values.list(PREFIX)}
        new = {
            name: record
            for name, record, version in closed
            if name not in ended.folded and (name in still or not version)
        }
        names = (*(name for name in ended.folded if name in still), *new)
        body = _encoded(structs.replace(added([ended, *new.values()]), folded=names))
        if not new or await store.values.put(ENDED, body, version=0 if found is None else found.version):
            for name, _, version in closed:
                if version:
                    await store.values.delete(PREFIX + name, version=version)
            return True
    return False


def _encoded(record: ActivityRecord) -> str:
    return msgspec.json.encode(record).decode()


def _decoded(value: StoredValue) -> ActivityRecord:
    """The record of a value. One that cannot be read counts as empty, and is replaced."""
    try:
        return _record.decode(value.body)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return ActivityRecord()
