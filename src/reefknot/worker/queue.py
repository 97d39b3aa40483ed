"""
The queue of one resource class: bounded, ordered, and honest about its depth.

Highest priority first, then oldest; while overloaded, newest first within a priority, because old work is what callers
have given up on. Work that is not due yet keeps its place. The queue holds no payloads and touches no store: what is in
it is kept elsewhere, and can be put back after a restart.
"""

from collections import OrderedDict
from heapq import heappop, heappush

from msgspec import Struct

from reefknot.core.overload.admission import Oldest


class Queued(Struct, frozen=True, gc=False):
    """A place in the queue. Times are seconds of the worker's own clock."""

    id: str
    priority: int = 0
    since: float = 0.0
    due: float = 0.0
    expires: float = float("inf")


class BoundedQueue:
    """One class's waiting work. `size` bounds it; who puts in has asked for admission before."""

    __slots__ = ("_later", "_lines", "_places", "_priorities", "_ready", "size")

    def __init__(self, size: int | None) -> None:
        self.size = size
        """None is the baseline's queue without a bound."""
        self._lines: dict[int, OrderedDict[str, Queued]] = {}
        self._priorities: list[int] = []
        self._later: list[tuple[float, str]] = []
        self._places: dict[str, Queued] = {}
        """Work that is not due yet, by id."""
        self._ready = 0

    @property
    def depth(self) -> int:
        """All places taken: what could run now, and what waits for its time."""
        return self._ready + len(self._places)

    @property
    def ready(self) -> int:
        return self._ready

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._places or any(work_id in line for line in self._lines.values())

    def put(self, item: Queued, now: float) -> None:
        """Take a place."""
        if item.due > now:
            self._places[item.id] = item
            heappush(self._later, (item.due, item.id))
            return
        line = self._lines.get(item.priority)
        if line is None:
            line = self._lines[item.priority] = OrderedDict()
            self._priorities = sorted(self._lines, reverse=True)
        line[item.id] = item
        self._ready += 1

    def take(self, now: float, *, newest_first: bool = False) -> Queued | None:
        """The next one that is due, or None."""
        if self._later and self._later[0][0] <= now:
            self._wake(now)
        if self._ready:
            for priority in self._priorities:
                line = self._lines[priority]
                if line:
                    self._ready -= 1
                    return line.popitem(last=newest_first)[1]
        return None

    def remove(self, work_id: str) -> Queued | None:
        """Give up a place: dropped, cancelled, or taken by somebody else."""
        waiting = self._places.pop(work_id, None)
        if waiting is not None:
            return waiting
        for line in self._lines.values():
            found = line.pop(work_id, None)
            if found is not None:
                self._ready -= 1
                return found
        return None

    def next_due(self, now: float) -> float | None:
        """Seconds until something becomes due; 0 when something is, None when nothing waits."""
        if self._ready:
            return 0.0
        while self._later and self._later[0][1] not in self._places:
            heappop(self._later)
        return max(0.0, self._later[0][0] - now) if self._later else None

    def oldest(self, now: float) -> Oldest | None:
        """The oldest of the lowest priority: the one that makes room when somebody must."""
        for priority in reversed(self._priorities):
            line = self._lines[priority]
            if line:
                first = next(iter(line.values()))
                return Oldest(first.id, priority, int((now - first.since) * 1000))
        return None

    def oldest_age(self, now: float) -> float:
        """How long the oldest of all has waited."""
        firsts = [next(iter(line.values())).since for line in self._lines.values() if line]
        waiting = [item.since for item in self._places.values()]
        return max((now - since for since in (*firsts, *waiting)), default=0.0)

    def expired(self, now: float) -> list[Queued]:
        """Work whose deadline passed while it waited; it is taken out."""
        late = [item for line in self._lines.values() for item in line.values() if item.expires <= now]
        late += [item for item in self._places.values() if item.expires <= now]
        for item in late:
            self.remove(item.id)
        return late

    def drain_ready(self, now: float) -> list[Queued]:
        """Take out everything that is due."""
        taken = []
        while (item := self.take(now)) is not None:
            taken.append(item)
        return taken

    def _wake(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, work_id = heappop(self._later)
            item = self._places.pop(work_id, None)
            if item is not None:
                self.put(item, now)
