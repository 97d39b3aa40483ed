"""
The pool of one resource class: its slots, and the queue in front of them.

A free slot takes the next due piece of work from the store and runs one attempt. A wait frees the slot, and so does the
end of an attempt: its report goes to the store during the next claim, and a bounded number of them is under way. While
steps take next to no time a pool claims some ahead, as much as its slots run in a few milliseconds.

The store has the last word: work can come back by itself (crashed, requeued by a person), and the store wakes the pool.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil, inf
from typing import Any

from msgspec import Struct, structs

from reefknot.queue.execution.settling import Settling
from reefknot.queue.execution.slots import IDLE_S, STORE_PAUSE_S, Isolation, RunAttempt, Slots, wait
from reefknot.queue.model.admission import (
    KNOWN_AFTER,
    Arrival,
    HeldStatus,
    Oldest,
    OverloadStatus,
    QueueView,
    held,
    level,
    reported,
    rules_hash,
)
from reefknot.queue.model.submission import running_mean
from reefknot.queue.model.work import WorkItem, WorkState, worker_class
from reefknot.queue.port.work_queue import ItemEvents
from reefknot.queue.worker.context import WorkerContext
from reefknot.runtime.log import RepeatedErrors

MOST_EMPTY = 16
"""Priorities without a place that are kept, so that coming and going costs nothing."""
_SPARE = 64
"""Entries of a heap that may belong to places which are gone."""


class Queued(Struct, frozen=True, gc=False):
    """A place in the queue. Times are seconds of the worker's own clock."""

    id: str
    priority: int = 0
    since: float = 0.0
    due: float = 0.0
    expires: float = inf
    tenant: str = ""


class _Ages:
    """The places of one priority in the order of their age, without a heap where they come in that order."""

    __slots__ = ("_early", "newest", "places", "tenants")

    def __init__(self) -> None:
        self.places: dict[str, Queued] = {}
        self.tenants: dict[str, int] = {}
        """The number of places of each tenant that has a name."""
        self.newest = -inf
        self._early: list[tuple[float, int, str]] = []
        """Places that are older than those before them: retries, and what was recovered from the store."""

    def add_early(self, item: Queued) -> None:
        """Remember the age of a place that its order does not tell."""
        heappush(self._early, (item.since, len(self.places), item.id))
        if len(self._early) > 2 * len(self.places) + _SPARE:
            kept = {entry[2]: entry for entry in sorted(self._early, reverse=True) if self._is_live(entry)}
            self._early = sorted(kept.values())

    def oldest(self) -> Queued | None:
        first = next(iter(self.places.values()), None)
        while self._early and not self._is_live(self._early[0]):
            heappop(self._early)
        if first is None or not self._early or first.since <= self._early[0][0]:
            return first
        return self.places[self._early[0][2]]

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        item = self.places.get(entry[2])
        return item is not None and item.since == entry[0]


class BoundedQueue:
    """Places of one class. `size` bounds them (None: no bound); callers of `put` have asked for admission before."""

    __slots__ = ("_ages", "_due", "_expiring", "_later", "_ready", "size")

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._ready: dict[str, Queued] = {}
        self._later: dict[str, Queued] = {}
        """Places whose time has not come: retries and deferred work."""
        self._due: list[tuple[float, str]] = []
        self._expiring: list[tuple[float, str]] = []
        self._ages: dict[int, _Ages] = {}

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def later(self) -> int:
        return len(self._later)

    @property
    def depth(self) -> int:
        return len(self._ready) + len(self._later)

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._ready or work_id in self._later

    def put(self, item: Queued, now: float) -> None:
        """Take a place. A place that exists keeps its due time, except that work due now becomes ready."""
        work_id = item.id
        if item.due > now:
            if work_id in self._ready or work_id in self._later:
                return
            self._later[work_id] = item
            self._push(self._due, (item.due, work_id))
        else:
            if work_id in self._ready or (self._later and work_id in self._later):
                self.remove(work_id)
            self._ready[work_id] = item
        ages = self._ages.get(item.priority)
        if ages is None:
            ages = self._ages[item.priority] = _Ages()
        ages.places[work_id] = item
        if item.tenant:
            ages.tenants[item.tenant] = ages.tenants.get(item.tenant, 0) + 1
        if item.since >= ages.newest:
            ages.newest = item.since
        else:
            ages.add_early(item)
        if item.expires != inf:
            self._push(self._expiring, (item.expires, work_id))

    def remove(self, work_id: str) -> Queued | None:
        """Give up a place. Returns it, or None when there is none."""
        item = self._ready.pop(work_id, None) or self._later.pop(work_id, None)
        if item is not None:
            ages = self._ages[item.priority]
            del ages.places[work_id]
            if item.tenant:
                ages.tenants[item.tenant] -= 1
                if not ages.tenants[item.tenant]:
                    del ages.tenants[item.tenant]
            if not ages.places and len(self._ages) > MOST_EMPTY:
                del self._ages[item.priority]
        return item

    def behind(self, priority: int, tenant: str) -> int:
        """The number of places whose turn comes after that of an arrival."""
        number = sum(len(ages.places) for one, ages in self._ages.items() if one < priority)
        peers = self._ages.get(priority)
        if peers is None or not peers.places:
            return number
        counts = {**peers.tenants, "": len(peers.places) - sum(peers.tenants.values())}
        own = counts.pop(tenant, 0)
        return number + sum(max(0, one - own - 1) for one in counts.values())

    def get(self, work_id: str) -> Queued | None:
        return self._ready.get(work_id) or self._later.get(work_id)

    def next_due(self, now: float) -> float | None:
        """Seconds until something becomes due; 0 when something is, None when nothing waits."""
        self._promote(now)
        if self._ready:
            return 0.0
        return self._due[0][0] - now if self._due else None

    def due(self, now: float, most: int) -> list[Queued]:
        """Up to `most` places whose work could run now; they stay."""
        self._promote(now)
        return list(islice(self._ready.values(), most))

    def oldest(self, now: float) -> Oldest | None:
        """The oldest place of the lowest priority, due or not: the victim of `drop_oldest`."""
        if not self._ready and not self._later:
            return None
        lowest = min(priority for priority, ages in self._ages.items() if ages.places)
        first = self._ages[lowest].oldest()
        return None if first is None else Oldest(first.id, first.priority, int((now - first.since) * 1000))

    def oldest_age(self, now: float) -> float:
        """Seconds since the first of the places whose work could run now became due."""
        self._promote(now)
        return now - min((item.due for item in self._ready.values()), default=now)

    def expired(self, now: float) -> list[Queued]:
        """Places whose deadline has passed; they are removed."""
        late = []
        while self._expiring and self._expiring[0][0] <= now:
            item = self.get(heappop(self._expiring)[1])
            if item is not None and item.expires <= now:
                self.remove(item.id)
                late.append(item)
        return late

    def clear(self) -> None:
        for places in (self._ready, self._later, self._due, self._expiring, self._ages):
            places.clear()

    def _promote(self, now: float) -> None:
        """Make ready what has become due, and forget the due times of places that are gone."""
        while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._later):
            due, work_id = heappop(self._due)
            item = self._later.get(work_id)
            if item is not None and item.due == due:
                self._ready[work_id] = self._later.pop(work_id)

    def _push(self, heap: list[tuple[float, str]], entry: tuple[float, str]) -> None:
        """Add a due or expiry time; sweep out those of places that are gone before they outnumber the living."""
        heappush(heap, entry)
        if len(heap) > 2 * self.depth + _SPARE:
            is_due = heap is self._due
            live = self._later.values() if is_due else [*self._ready.values(), *self._later.values()]
            heap[:] = [(item.due if is_due else item.expires, item.id) for item in live]
            heapify(heap)


RESYNC_BATCH = 50
RESYNC_S = 0.05
"""How soon a pool asks again for what the store did not give it."""
AHEAD_MS = 5.0
"""What the slots run within this time is claimed ahead: later claims know better what comes first."""
MOST_AHEAD = 300
LEAST_SHARE = 0.02
"""A claim that takes less than this share of an attempt is not worth one ahead."""


@contextmanager
def starting(pools: "Sequence[Pool]") -> Iterator[None]:
    """A scope in which each of these pools, once for each time it is named, gets an item that is started already."""
    for pool in pools:
        pool.starting += 1
    try:
        yield
    finally:
        for pool in pools:
            pool.starting -= 1


class Pool(Slots):
    """Queue, slots and status of one class."""

    _context: WorkerContext

    def __init__(
        self,
        name: str,
        context: WorkerContext,
        run: RunAttempt,
        reports: Settling,
        crash_events: ItemEvents,
        *,
        isolation: Isolation,
    ) -> None:
        """`isolation` is shared by all pools of a process."""
        settings = context.settings
        queue_name, slots = worker_class(name, context.worker_id), settings.slots_for(name)
        super().__init__(queue_name, context, run, reports, slots=slots, isolation=isolation, crash_events=crash_events)
        self.name = name
        self.rules = settings.rules_for(name)
        self.rules_hash = rules_hash(self.rules, name)
        self.queue = BoundedQueue(self.rules.size if settings.queue_v2 else None)
        self.room_changed: Callable[[], None] = lambda: None
        """Called when places or slots may have become free."""
        self.reserved = 0
        """Places of work that was admitted and is being written."""
        self.entering: Counter[int] = Counter()
        """Those by priority: none of them can be dropped before it is written."""
        self._entered = asyncio.Event()
        self._errors = RepeatedErrors()
        self._status = OverloadStatus.HEALTHY
        self._held = HeldStatus()
        self._store_is_empty = asyncio.Event()
        self._asks_since: float | None = None
        """Since when there is something to claim and no room for its report."""
        self._service_times = 0
        self._mean_ms = 0.0
        self._attempts_timed = 0
        self._attempt_ms = 0.0
        self._claims_timed = 0
        self._claim_ms = 0.0

    # ---- state ------------------------------------------------------------------------------------------------------

    def depth(self) -> int:
        """
        Places taken. Work that a free slot takes at once does not wait, and does not count.

        A slot whose last attempt is not on record yet is not free: that work may come back for another one.
        """
        return self.queue.later + max(0, self.unstarted())

    def unstarted(self) -> int:
        """The work that is due and has no slot, less the free slots: negative while slots are free for more."""
        waiting = self.queue.ready + self.reserved + len(self.prefetched)
        if self.paused or self._isolation.is_on:
            return waiting
        taken = max(len(self.running), len(self.claimed) - len(self.prefetched))
        return waiting - max(0, self.slots - taken)

    def reserve(self, priority: int) -> None:
        """Take a place for work that is being written."""
        self.reserved += 1
        self.entering[priority] += 1

    def release(self, priority: int) -> None:
        """Give a reserved place up: its work has one in the queue or a slot now, or is not kept."""
        self.reserved -= 1
        self.entering[priority] -= 1
        if not self.entering[priority]:
            del self.entering[priority]
        self._entered.set()

    async def entered(self) -> None:
        """Wait until a reserved place is given up."""
        self._entered.clear()
        await self._entered.wait()

    @property
    def has_room(self) -> bool:
        return self.queue.size is None or self.depth() < self.queue.size

    def status(self) -> OverloadStatus:
        """
        The reported status, which has hysteresis. A queue without a bound is never full.

        During isolation it is overloaded at least: routers prefer every worker that begins work, and where there is
        none they still send some.
        """
        return self.measured()[1]

    def measured(self) -> tuple[int, OverloadStatus]:
        """The depth, and the reported status that follows from it."""
        depth = self.depth()
        if self.queue.size is not None and (depth or self._status is not OverloadStatus.HEALTHY):
            self._status = reported(self._status, depth, self.rules.size, self.rules.thresholds)
        is_least = self._isolation.is_on and self._status.severity < OverloadStatus.OVERLOADED.severity
        return depth, OverloadStatus.OVERLOADED if is_least else self._status

    def level_inputs(self, depth: int) -> dict[str, Any]:
        """The inputs of `status` other than the depth, if they count: isolation, and a level that hysteresis holds."""
        inputs: dict[str, Any] = {"isolated": True} if self._isolation.is_on else {}
        if self.queue.size is not None and self._status is not level(depth, self.rules.size, self.rules.thresholds):
            inputs["held"] = self._status.value
        return inputs

    def held_status(self) -> OverloadStatus:
        """Status for displays, held for a while so that it does not flicker. Routers use `status`."""
        self._held = held(self._held, self.status(), self._clock.now())
        return self._held.status

    def level_reason(self) -> str:
        """The reason for the held status, for displays; empty while the pool is healthy."""
        if self.held_status() is OverloadStatus.HEALTHY:
            return ""
        if self._isolation.is_on:
            return "a job that may have crashed a worker runs alone"
        size, depth = self.rules.size, self.depth()
        taken = f"{depth} of {size} places in the queue are taken"
        raw = level(depth, size, self.rules.thresholds)
        return taken if raw is self._held.status else f"{taken}; it was {self._held.status.value} a moment ago"

    def view(self, arrival: Arrival, *, draining: bool) -> QueueView:
        """The snapshot that admission decides by: the raw depth before the arrival."""
        depth = self.depth()
        oldest = self.oldest() if self.is_full(depth) else None  # else admission does not look at it
        behind = self.queue.behind(arrival.priority, arrival.tenant) if arrival.deadline_ms is not None else 0
        return QueueView(depth, self.slots, self._service_times, round(self._mean_ms, 3), oldest, draining, behind)

    def oldest(self) -> Oldest | None:
        return self.queue.oldest(self._clock.now())

    def is_full(self, depth: int) -> bool:
        return self.queue.size is not None and depth >= self.queue.size * self.rules.thresholds.critical

    def overloaded(self) -> bool:
        """Whether the newest comes first. Not in the baseline, which has no levels."""
        if self.queue.size is None:
            return False
        raw = level(self.depth(), self.rules.size, self.rules.thresholds)
        return raw.severity >= OverloadStatus.OVERLOADED.severity

    def has(self, work_id: str) -> bool:
        return work_id in self.claimed or work_id in self.queue or work_id in self.running

    def forget(self, work_id: str) -> bool:
        """Give up the place or the claim of work that is not this worker's any more. False when it has neither."""
        is_claimed = self.claimed.pop(work_id, None) is not None
        return self.queue.remove(work_id) is not None or is_claimed

    def ahead(self) -> int:
        """
        The number to claim beyond the free slots (prefetch), so that none stands empty while the next claim is made.

        Of short attempts it is what ends within a few milliseconds, of others what ends during a claim. After a restart
        it is 0 until attempts were timed.
        """
        if self._attempts_timed < KNOWN_AFTER:
            return 0
        attempt_ms = max(0.001, self._attempt_ms)
        if attempt_ms <= AHEAD_MS:
            return min(MOST_AHEAD, int(self.slots * AHEAD_MS / attempt_ms))
        share = self._claim_ms / attempt_ms
        return 0 if share < LEAST_SHARE else min(self.slots, ceil(self.slots * share))

    def can_start(self, arrivals: int) -> int:
        """
        The number of these arrivals, whose places are reserved, that may start without a claim.

        None while others wait, since they come first; nor may they take the slots that a claim is under way for.
        """
        if self.paused or self.queue.ready or self._isolation.is_on:
            return 0
        ahead = self.ahead()
        free = self.slots + ahead - self.active - len(self.prefetched) - self._asked - (self.reserved - arrivals)
        return max(0, min(arrivals, free, 2 * (self.slots + ahead) - len(self.claimed) - self._asked))

    def _record_service_time(self, began: float, started: float) -> None:
        """
        Count a service time: all of the time that its slot could do nothing else.

        That is the claim it waited for (since `began`) and the attempt (since `started`).
        """
        now = self._clock.now()
        self._service_times += 1
        self._mean_ms = running_mean(self._mean_ms, (now - began) * 1000, number=self._service_times)
        self._attempts_timed += 1
        self._attempt_ms = running_mean(self._attempt_ms, (now - started) * 1000, number=self._attempts_timed)

    # ---- in and out -------------------------------------------------------------------------------------------------

    def put(self, queued: Queued) -> None:
        self.queue.put(queued, self._clock.now())
        self._wake.set()

    def queued(self, item: WorkItem, due_at: int | None = None) -> Queued:
        """The place of a stored item, due when the store says or at `due_at`."""
        now, wall = self._clock.now(), self._clock.wall()
        expires = float("inf") if item.deadline_at is None else now + item.deadline_at / 1000 - wall
        since = now - max(0.0, wall - item.created_at / 1000)
        due = (item.due_at if due_at is None else due_at) / 1000 - wall
        at = now + (due if due >= 0.001 else min(due, 0.0))
        return Queued(item.id, item.priority, since, at, expires, item.tenant_id or "")

    def due_again(self, item: WorkItem, due_at: int) -> None:
        self.put(self.queued(item, due_at))

    def begin(self, items: Iterable[WorkItem], since: float | None = None) -> None:
        """Run what was claimed (asked for `since` then), or accepted with a start; its places are free."""
        items = list(items)
        for item in items:
            self.queue.remove(item.id)
        super().begin(items, since)

    async def serve(self) -> None:
        """Fill free slots for as long as the worker runs."""
        while True:
            self._wake.clear()
            self._fill_slots()
            self.room_changed()
            now, ahead = self._clock.now(), self.ahead()
            wanted = 0 if self.paused else self.slots + ahead - self.active - len(self.prefetched) - self.reserved
            wanted = self.may_claim(wanted)
            due_in = self.queue.next_due(now)
            if wanted > 0 and (due_in == 0.0 or self.store_has_work):
                if self._asks_since is None:
                    self._asks_since = now
                room = 2 * (self.slots + ahead) - len(self.claimed)
                if room > 0:
                    asked = min(wanted, room)
                    got = await self._claim_some(asked)
                    if got < asked:
                        self.store_has_work = False
                        self._store_is_empty.set()
                    if got or due_in != 0.0:
                        continue
                    await self._resync()
                    continue
            longest = IDLE_S if due_in is None or wanted <= 0 or due_in == 0.0 else min(IDLE_S, due_in)
            await wait(self._wake, max(0.001, longest))

    async def watch_store(self) -> None:
        """Wake the pool when the store has work for it that its own queue does not know."""
        while True:
            await self._store_is_empty.wait()
            try:
                has_work = await self._context.work.wait(IDLE_S, classes=(self.queue_name,))
            except Exception:  # the claim that follows says what is wrong
                has_work = True
            if has_work:
                self._store_is_empty.clear()
                self.wake()

    async def _claim_some(self, wanted: int) -> int:
        asked_at = self._clock.now()
        try:
            items = await self.claim(wanted, newest_first=self.overloaded())
        except Exception as error:
            self._errors.log(f"{self.name}: the store cannot be read", error, self._clock.now())
            self._asks_since = None
            await asyncio.sleep(STORE_PAUSE_S)
            return wanted
        since, self._asks_since = self._asks_since, None
        self._claims_timed += 1
        self._claim_ms = running_mean(self._claim_ms, (self._clock.now() - asked_at) * 1000, number=self._claims_timed)
        if self.admitted(items):
            self.begin(items, since)
        return len(items)

    async def _resync(self) -> None:
        """Correct places that are due here and not in the store: another worker has them, or they are due later."""
        for queued in self.queue.due(self._clock.now(), RESYNC_BATCH):
            item = await self._context.work.get(queued.id)
            if item is not None and item.state is WorkState.PENDING and item.resource_class == self.queue_name:
                self.queue.remove(queued.id)
                due = self._clock.now() + max(RESYNC_S, item.due_at / 1000 - self._clock.wall())
                self.put(structs.replace(queued, due=due))
            elif queued.id not in self.claimed:
                self.queue.remove(queued.id)
