"""
The queue of one resource class: bounded, ordered, and honest about its depth.

Highest priority first, then oldest; while overloaded, newest first within a priority, because old work is what callers
have given up on. Work that is not due yet keeps its place. The queue holds no payloads and touches no store: what is in
it is kept elsewhere, and can be put back after a restart.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from math import inf

from msgspec import Struct

from reefknot.core.overload.admission import Oldest

_SPARE_LINES = 16
_SPARE_PLACES = 64

_Line = OrderedDict[str, "Queued"]


class Queued(Struct, frozen=True, gc=False):
    """A place in the queue. Times are seconds of the worker's own clock."""

    id: str
    priority: int = 0
    since: float = 0.0
    due: float = 0.0
    expires: float = inf


class BoundedQueue:
    """One class's waiting work. `size` bounds it; who puts in has asked for admission before."""

    __slots__ = ("_expiring", "_later", "_lines", "_lowest_first", "_newest", "_old", "_ordered", "_waiting", "size")

    def __init__(self, size: int | None) -> None:
        self.size = size
        """None is the baseline's queue without a bound."""
        self._lines: dict[int, _Line] = {}
        self._ordered: list[_Line] = []
        """The lines, highest priority first."""
        self._lowest_first: list[int] = []
        """The priorities, the other way round."""
        self._newest = -inf
        self._old: dict[int, list[tuple[float, str]]] = {}
        """
        By priority, places whose age their line does not tell.

        Work stands in its line in the order in which it came, and that is the order of age, except for what comes back:
        a retry is as old as its first place. Those, and what is not due yet, are marked here too, so that the oldest of
        all is found without a look at everybody.
        """
        self._later: list[tuple[float, str]] = []
        self._waiting: dict[str, Queued] = {}
        """Work that is not due yet, by id."""
        self._expiring: list[tuple[float, str, int]] = []

    @property
    def depth(self) -> int:
        """All places taken: what could run now, and what waits for its time."""
        return self.ready + len(self._waiting)

    @property
    def later(self) -> int:
        """Places of what waits for its time."""
        return len(self._waiting)

    @property
    def ready(self) -> int:
        return sum(map(len, self._ordered))

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._waiting or any(work_id in line for line in self._ordered)

    def put(self, item: Queued, now: float) -> None:
        """Take a place. Who has one already keeps that one."""
        if item.due > now:
            if item.id not in self:
                self._waiting[item.id] = item
                heappush(self._later, (item.due, item.id))
                if item.priority not in self._lines:
                    self._new_line(item.priority)
                self._remember(item)
                self._watch(item)
            return
        line = self._lines.get(item.priority)
        if line is None:
            line = self._new_line(item.priority)
        if self._waiting:
            self._waiting.pop(item.id, None)
        line[item.id] = item
        since = item.since
        if since > self._newest:
            self._newest = since
        elif since < self._newest:
            self._remember(item)
        if item.expires != inf:
            self._watch(item)

    def take(self, now: float, *, newest_first: bool = False) -> Queued | None:
        """The next one that is due, or None."""
        if self._later and self._later[0][0] <= now:
            self._wake(now)
        for line in self._ordered:
            if line:
                return line.popitem(newest_first)[1]
        return None

    def remove(self, work_id: str) -> Queued | None:
        """Give up a place: dropped, cancelled, or taken by somebody else."""
        waiting = self._waiting.pop(work_id, None)
        if waiting is not None:
            return waiting
        for line in self._ordered:
            found = line.pop(work_id, None)
            if found is not None:
                if not line and found.priority not in self._old and len(self._lines) > _SPARE_LINES:
                    del self._lines[found.priority]
                    self._sort()
                return found
        return None

    def next_due(self, now: float) -> float | None:
        """Seconds until something becomes due; 0 when something is, None when nothing waits."""
        if any(self._ordered):
            return 0.0
        while self._later and self._later[0][1] not in self._waiting:
            heappop(self._later)
        return max(0.0, self._later[0][0] - now) if self._later else None

    def oldest(self, now: float) -> Oldest | None:
        """The oldest of the lowest priority, due or not: the one that makes room when somebody must."""
        for priority in self._lowest_first:
            first = self._oldest_of(priority)
            if first is not None:
                return Oldest(first.id, first.priority, int((now - first.since) * 1000))
        return None

    def oldest_age(self, now: float) -> float:
        """How long the oldest of all has waited."""
        firsts = [first for first in map(self._oldest_of, self._lowest_first) if first is not None]
        return max((now - first.since for first in firsts), default=0.0)

    def _oldest_of(self, priority: int) -> Queued | None:
        """Either the first in the line, or one that is older than its place in it."""
        line, marks = self._lines[priority], self._old.get(priority)
        first = next(iter(line.values())) if line else None
        while marks:
            since, work_id = marks[0]
            item = self._marked(priority, work_id, since)
            if item is not None:
                return item if first is None or since < first.since else first
            heappop(marks)
        if marks is not None:
            del self._old[priority]
        return first

    def _marked(self, priority: int, work_id: str, since: float) -> Queued | None:
        """Who this mark stands for, if it is still here."""
        item = self._waiting.get(work_id) or self._lines[priority].get(work_id)
        return item if item is not None and item.since == since and item.priority == priority else None

    def _remember(self, item: Queued) -> None:
        """Its age is not told by its place. Marks of places that are gone are swept out now and then."""
        priority = item.priority
        marks = self._old.setdefault(priority, [])
        heappush(marks, (item.since, item.id))
        if len(marks) > 2 * self.depth + _SPARE_PLACES:
            marks[:] = [mark for mark in set(marks) if self._marked(priority, mark[1], mark[0]) is not None]
            heapify(marks)

    def expired(self, now: float) -> list[Queued]:
        """Work whose deadline passed while it waited; it is taken out."""
        late = []
        while self._expiring and self._expiring[0][0] <= now:
            _, work_id, priority = heappop(self._expiring)
            line = self._lines.get(priority)
            item = self._waiting.get(work_id) or (None if line is None else line.get(work_id))
            if item is not None and item.expires <= now:
                self.remove(work_id)
                late.append(item)
        return late

    def due(self, now: float, most: int) -> list[Queued]:
        """Up to `most` of those that could run now, in their order; they stay."""
        self._wake(now)
        found: list[Queued] = []
        for line in self._ordered:
            for item in line.values():
                if len(found) >= most:
                    return found
                found.append(item)
        return found

    def clear(self) -> list[Queued]:
        """Everybody out; answers who was in it."""
        out = [*(item for line in self._ordered for item in line.values()), *self._waiting.values()]
        for item in out:
            self.remove(item.id)
        return out

    def _wake(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, work_id = heappop(self._later)
            item = self._waiting.get(work_id)
            if item is not None and item.due <= now:
                self.put(item, now)

    def _new_line(self, priority: int) -> _Line:
        """Lines in which nobody stands go before there are more of them."""
        if len(self._lines) >= _SPARE_LINES:
            for other in [name for name, line in self._lines.items() if not line]:
                if self._oldest_of(other) is None:
                    del self._lines[other]
        line: _Line = OrderedDict()
        self._lines[priority] = line
        self._sort()
        return line

    def _sort(self) -> None:
        self._lowest_first = sorted(self._lines)
        self._ordered = [self._lines[priority] for priority in reversed(self._lowest_first)]

    def _watch(self, item: Queued) -> None:
        """Remember when it expires. Places that are gone leave marks behind; now and then they are swept out."""
        if item.expires == inf:
            return
        heappush(self._expiring, (item.expires, item.id, item.priority))
        if len(self._expiring) > 2 * self.depth + _SPARE_PLACES:
            self._expiring = [mark for mark in set(self._expiring) if mark[1] in self]
            heapify(self._expiring)
