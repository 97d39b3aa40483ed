"""
The waiting places of one resource class: how many are taken, which is the oldest, what is due, what has expired.

The queue holds ids and times, no payloads. The order in which work runs is the store's: it claims by priority, then
age. After a restart the places are rebuilt from the store.
"""

from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf

from msgspec import Struct

from reefknot.core.overload.admission import Oldest

_SPARE = 64
"""Entries of a heap that may belong to places which are gone."""


class Queued(Struct, frozen=True, gc=False):
    """A place in the queue. Times are seconds of the worker's own clock."""

    id: str
    priority: int = 0
    since: float = 0.0
    due: float = 0.0
    expires: float = inf


class BoundedQueue:
    """Places of one class. `size` bounds them (None: no bound); whoever puts in has asked for admission before."""

    __slots__ = ("_arrivals", "_due", "_expiring", "_later", "_oldest", "_ready", "size")

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._ready: dict[str, Queued] = {}
        self._later: dict[str, Queued] = {}
        """Places whose time has not come: retries and deferred work."""
        self._due: list[tuple[float, str]] = []
        self._expiring: list[tuple[float, str]] = []
        self._oldest: dict[int, list[tuple[float, int, str]]] = {}
        """By priority, every place by its age; of equals, the first that came."""
        self._arrivals = count().__next__

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
        if item.due > now:
            if item.id in self:
                return
            self._later[item.id] = item
            heappush(self._due, (item.due, item.id))
        else:
            self._later.pop(item.id, None)
            self._ready[item.id] = item
        heappush(self._oldest.setdefault(item.priority, []), (item.since, self._arrivals(), item.id))
        if item.expires != inf:
            heappush(self._expiring, (item.expires, item.id))
        self._compact(item.priority)

    def remove(self, work_id: str) -> Queued | None:
        """Give up a place. Returns it, or None when there is none."""
        return self._ready.pop(work_id, None) or self._later.pop(work_id, None)

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
        for priority in sorted(self._oldest):
            first = self._oldest_of(priority)
            if first is not None:
                return Oldest(first.id, first.priority, int((now - first.since) * 1000))
        return None

    def oldest_age(self, now: float) -> float:
        """Seconds that the oldest place of all has waited."""
        firsts = [self._oldest_of(priority) for priority in list(self._oldest)]
        return max((now - first.since for first in firsts if first is not None), default=0.0)

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
        for places in (self._ready, self._later, self._due, self._expiring, self._oldest):
            places.clear()

    def _promote(self, now: float) -> None:
        """Make ready what has become due, and forget the due times of places that are gone."""
        while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._later):
            due, work_id = heappop(self._due)
            item = self._later.get(work_id)
            if item is not None and item.due == due:
                self._ready[work_id] = self._later.pop(work_id)

    def _oldest_of(self, priority: int) -> Queued | None:
        ages = self._oldest[priority]
        while ages:
            since, _, work_id = ages[0]
            item = self.get(work_id)
            if item is not None and item.since == since and item.priority == priority:
                return item
            heappop(ages)
        del self._oldest[priority]
        return None

    def _compact(self, priority: int) -> None:
        """Sweep entries of places that are gone out of the heaps, before they outnumber the living."""
        most = 2 * self.depth + _SPARE
        ages = self._oldest[priority]
        if len(ages) > most:
            kept: dict[str, tuple[float, int, str]] = {}
            for entry in sorted(ages):
                item = self.get(entry[2])
                if item is not None and (item.since, item.priority) == (entry[0], priority):
                    kept.setdefault(item.id, entry)
            ages[:] = kept.values()  # sorted, and so a heap
        if len(self._expiring) > most:
            self._expiring = [(item.expires, item.id) for item in map(self.get, {e[1] for e in self._expiring}) if item]
            heapify(self._expiring)
        if len(self._due) > most:
            self._due = [(item.due, item.id) for item in self._later.values()]
            heapify(self._due)
