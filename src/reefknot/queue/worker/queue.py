"""
The waiting places of one resource class: how many are taken, which is the oldest, what is due, what has expired.

The queue holds ids and times, no payloads. The order in which work runs is the store's: it claims by priority, then
age. After a restart the places are rebuilt from the store.
"""

from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from msgspec import Struct

from reefknot.queue.model.admission import Oldest

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
    """Places of one class. `size` bounds them (None: no bound); whoever puts in has asked for admission before."""

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
