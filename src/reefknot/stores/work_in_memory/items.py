"""
`WorkItems`: the work items of a store in memory, the order in which they come next, and what has changed.

`put` and `remove` are the only writes. Both note an item as it was before its first change, so that an engine can store
what has changed (`take_changes`), or undo all of it when it could not be stored (`roll_back`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from typing import overload

from msgspec import Struct, structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.queue.model import work as core
from reefknot.queue.model.submission import ServiceTime, Stage, Waiting, in_turns
from reefknot.queue.model.unique import holds_key, unique_name
from reefknot.queue.model.work import ENDED, WorkItem, WorkState
from reefknot.stores.wakeups import END_TOPIC, topics_of

Place = tuple[int, int, int, str]
"""Where a pending item waits in its class: priority (negative), due time, order of arrival, id."""
Group = tuple[str, Stage, int, str]
"""Open work is counted by pool, stage, priority and tenant."""
_SPARE = 64
"""Entries of a heap of lease ends that may be older than their leases, before it is built again."""
_Extension = tuple[int, int, int]
"""Fence, end and length of a lease that was extended."""


class Changes(Struct, frozen=True):
    """The changes since they were last taken."""

    before: Mapping[str, WorkItem | None]
    """By id: the item before its first change; None: it was not there."""
    pools_served: Collection[str]
    """The resource classes whose service time has changed."""
    pools_entered: Collection[str]
    """The resource classes into which admission has accepted work."""


def group_of(item: WorkItem) -> Group | None:
    """The group in which an item is counted; None when it is not open."""
    stage = core.stage_of(item)
    return None if stage is None else (item.pool, stage, item.priority, item.tenant_id or "")


class _Line:
    """The places of one tenant in one class, in their order; those of items that wait there no more are passed by."""

    __slots__ = ("name", "places")

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: list[Place] = []

    def put(self, place: Place) -> None:
        at = bisect_left(self.places, place)
        if at == len(self.places) or self.places[at] != place:
            self.places.insert(at, place)

    def remove(self, gone: Sequence[int]) -> None:
        """Remove the places at these indexes, which mostly lie side by side."""
        indexes = sorted(gone, reverse=True)
        while indexes:
            end = start = indexes[0]
            length = 1
            while length < len(indexes) and indexes[length] == start - 1:
                start, length = start - 1, length + 1
            del self.places[start : end + 1], indexes[:length]

    def indexes(self, newest_first: bool) -> Iterator[int]:
        """The indexes in the order in which a claim takes: by priority, then the oldest or the newest first."""
        if not newest_first:
            yield from range(len(self.places))
            return
        start = 0
        while start < len(self.places):
            end = bisect_left(self.places, (self.places[start][0] + 1,), lo=start)
            yield from reversed(range(start, end))
            start = end


class _Turns(Sequence[Waiting]):
    """The places of one tenant in the order of a claim. They are looked up only as far as the claim asks."""

    def __init__(self, lines: Sequence[_Line], is_ready: Callable[[str, Place], bool], newest_first: bool) -> None:
        self._is_ready = is_ready
        self._asked = 0
        self.found: list[tuple[_Line, int]] = []
        self.stale: list[tuple[_Line, int]] = []
        sign = -1 if newest_first else 1

        def of_line(line: _Line) -> Iterator[tuple[tuple[int, int, int], int, _Line]]:
            for at in line.indexes(newest_first):
                priority, due_at, order, _ = line.places[at]
                yield (priority, sign * due_at, sign * order), at, line

        every = [of_line(line) for line in lines]
        self._rest = every[0] if len(every) == 1 else heapq.merge(*every, key=lambda one: one[0])

    def _look(self, number: int) -> None:
        while len(self.found) < number:
            one = next(self._rest, None)
            if one is None:
                return
            _, at, line = one
            (self.found if self._is_ready(line.name, line.places[at]) else self.stale).append((line, at))

    def place(self, at: int) -> Place:
        line, index = self.found[at]
        return line.places[index]

    def __len__(self) -> int:
        """The number of places, as far as a claim has to know: one more than it has asked for."""
        self._look(self._asked + 1)
        return len(self.found)

    @overload
    def __getitem__(self, at: int) -> Waiting: ...
    @overload
    def __getitem__(self, at: slice) -> list[Waiting]: ...
    def __getitem__(self, at: int | slice) -> Waiting | list[Waiting]:
        if isinstance(at, slice):
            self._look(at.stop)
            return [self[index] for index in range(min(at.stop, len(self.found)))]
        self._asked = max(self._asked, at + 1)
        self._look(self._asked)
        priority, due_at, order, _ = self.place(at)
        return -priority, due_at, order


class WorkItems:
    """Items in a dictionary, and the lines of those that are due: O(log n) for a claim, however many wait."""

    def __init__(self, *, most_ended: int) -> None:
        self._most_ended = most_ended
        self.items: dict[str, WorkItem] = {}
        self.service_times: dict[str, ServiceTime] = {}
        """By pool. Changed by `note_service_time`, or set from outside."""
        self.events: list[AuditEntry] = []
        self.touched: set[str] = set()
        self.parts: dict[str, dict[str, bytes]] = {}
        """By id: the parts of notes that are kept here, or are on their way to a server."""
        self._parts_before: dict[str, dict[str, bytes]] = {}
        self.before: dict[str, WorkItem | None] = {}
        self.pools_entered: set[str] = set()
        self._served_before: dict[str, ServiceTime | None] = {}
        self._kept_as: dict[str, tuple[int, int | None, _Extension | None]] = {}
        """By id: order, number of its end and extended lease of an item before its first change."""
        self._ended: dict[str, int] = {}
        """Ended items, in the order of their ends, with the numbers of their ends."""
        self._ends = 0
        self._running: set[str] = set()
        self._lease_ends: dict[str, list[tuple[int, str]]] = {}
        """By class: heaps of the ends of leases and their items. An entry may be older than the lease."""
        self._open: Counter[Group] = Counter()
        self._group: dict[str, Group] = {}
        """By id: the group in which open work is counted."""
        self._last_tenant = self._last_tenant_before = ""
        self._arrivals = 0
        self._order: dict[str, int] = {}
        self._ready: dict[str, dict[str, _Line]] = {}
        """By class and tenant."""
        self._later: list[tuple[int, int, str]] = []
        self._by_key: dict[str, dict[str, None]] = {}
        """By key of unique work: the items that may hold it."""
        self._extended: dict[str, _Extension] = {}
        """By id: leases that another thread has extended, while the loop was blocked."""

    # ---- writes ------------------------------------------------------------------------------------------------------

    def put(self, item: WorkItem, now: Moment, order: int | None = None) -> None:
        """Keep an item as it is now, at the place that belongs to its state. An unknown one is the latest arrival."""
        old = self.items.get(item.id)
        if item.id not in self.before:
            self._note(item.id, old)
        if old is None or order is not None:
            self._order[item.id] = number = self._arrivals if order is None else order
            self._arrivals = max(self._arrivals, number + 1)
        self._keep(item, old)
        self.touched.update(topics_of(item.resource_class, item.state, end=END_TOPIC + item.id))
        if item.state is WorkState.PENDING:
            self._promote(now)
        elif item.state is not WorkState.RUNNING and len(self._ended) > self._most_ended:
            self.remove(next(iter(self._ended)))

    def put_parts(self, work_id: str, parts: Mapping[str, bytes]) -> None:
        """Keep these parts of the notes of an item."""
        if parts:
            known = self.parts.get(work_id, {})
            self._parts_before.setdefault(work_id, known)
            self.parts[work_id] = {**known, **parts}

    def remove(self, work_id: str) -> None:
        """Forget an item."""
        self._note(work_id, self.items[work_id])
        if work_id in self.parts:
            self._parts_before.setdefault(work_id, self.parts[work_id])
        self._drop(work_id)

    def order_of(self, work_id: str) -> int:
        """The place of an item in the order of arrival."""
        return self._order[work_id]

    def trim_ended(self, most: int) -> list[str]:
        """Forget the oldest ended items beyond `most`, as if they had never existed. Returns their ids."""
        gone = list(self._ended)[: max(0, len(self._ended) - most)]
        for work_id in gone:
            self._drop(work_id)
        return gone

    def note_service_time(self, pool: str, took_ms: float) -> None:
        """Count a service time into the mean of its pool."""
        known = self.service_times.get(pool)
        self._served_before.setdefault(pool, known)
        self.service_times[pool] = (known or ServiceTime()).after(took_ms)

    def _note(self, work_id: str, old: WorkItem | None) -> None:
        if work_id not in self.before:
            self.before[work_id] = old
            if old is not None:
                self._kept_as[work_id] = self._order[work_id], self._ended.get(work_id), self._extended.get(work_id)

    def with_key(self, name: str, wall: int) -> str | None:
        """The item that holds this key of unique work (see `unique_name`)."""
        if not name:
            return None
        known = self._by_key.get(name, {})
        for work_id in [one for one in known if not holds_key(self.items[one], wall)]:
            self._drop_key(name, work_id)
        return next(iter(known), None)

    def keyed(self, name: str) -> list[str]:
        """The items that may hold this key."""
        return list(self._by_key.get(name, ()))

    def _drop_key(self, name: str, work_id: str) -> None:
        known = self._by_key.get(name, {})
        known.pop(work_id, None)
        if not known:
            self._by_key.pop(name, None)

    def _keep(self, item: WorkItem, old: WorkItem | None) -> None:
        self.items[item.id] = item
        if item.extra.unique:
            self._by_key.setdefault(unique_name(item), {})[item.id] = None
        self._count(item.id, group_of(item))
        if old is not None:
            self._extended.pop(item.id, None)
            self._running.discard(item.id)
            self._ended.pop(item.id, None)
        if item.state is WorkState.PENDING:
            heapq.heappush(self._later, (item.due_at, self._order[item.id], item.id))
        elif item.state is WorkState.RUNNING:
            self._running.add(item.id)
            self._note_lease_end(item)
        elif item.state in ENDED:
            self._ended[item.id] = self._ends
            self._ends += 1

    def _drop(self, work_id: str) -> None:
        item = self.items.pop(work_id)
        if item.extra.unique:
            self._drop_key(unique_name(item), work_id)
        del self._order[work_id]
        self.parts.pop(work_id, None)
        self._count(work_id, None)
        self._ended.pop(work_id, None)
        self._running.discard(work_id)
        self._extended.pop(work_id, None)

    def _count(self, work_id: str, group: Group | None) -> None:
        was = self._group.get(work_id)
        if was == group:
            return
        if was is not None:
            del self._group[work_id]
            self._open[was] -= 1
            if not self._open[was]:
                del self._open[was]
        if group is not None:
            self._group[work_id] = group
            self._open[group] += 1

    # ---- what the writes leave behind --------------------------------------------------------------------------------

    @property
    def pools_served(self) -> set[str]:
        """The resource classes whose service time has changed."""
        return set(self._served_before)

    def take_events(self) -> list[AuditEntry]:
        """The audit events since the last call, in order."""
        events, self.events = self.events, []
        return events

    def take_topics(self) -> set[str]:
        """The topics whose waiters have to be woken since the last call."""
        touched, self.touched = self.touched, set()
        return touched

    def take_changes(self) -> Changes:
        """The changes since the last call. They can no longer be rolled back."""
        changes = Changes(dict(self.before), self.pools_served, set(self.pools_entered))
        self.clear_changes()
        return changes

    def clear_changes(self) -> None:
        """Make the changes final."""
        self.before.clear()
        self.pools_entered.clear()
        self._served_before.clear()
        self._kept_as.clear()
        self._parts_before.clear()
        self._last_tenant_before = self._last_tenant

    def roll_back(self) -> None:
        """Undo every change since they were last taken, with its events and topics. Extended leases stay extended."""
        for work_id, item in self.before.items():
            if item is not None:
                self._put_back(item)
            elif work_id in self.items:
                self._drop(work_id)
        if any(end is not None for _, end, _ in self._kept_as.values()):
            self._ended = dict(sorted(self._ended.items(), key=lambda one: one[1]))
        for pool, known in self._served_before.items():
            if known is None:
                self.service_times.pop(pool, None)
            else:
                self.service_times[pool] = known
        self.parts.update(self._parts_before)
        self._last_tenant = self._last_tenant_before
        self.events.clear()
        self.touched.clear()
        self.clear_changes()

    def _put_back(self, item: WorkItem) -> None:
        self._order[item.id], end, extension = self._kept_as[item.id]
        extension = self._extended.get(item.id, extension)
        self._keep(item, self.items.get(item.id))
        if end is not None:
            self._ended[item.id] = end
        if extension is not None:
            self._extended[item.id] = extension

    # ---- leases ------------------------------------------------------------------------------------------------------

    def _lease_end(self, item: WorkItem) -> int:
        return self._with_lease(item).lease_until

    def _with_lease(self, item: WorkItem) -> WorkItem:
        """The item with its lease as it was extended."""
        fence, until, lease_ms = self._extended.get(item.id, (0, 0, 0))
        if fence != item.fence or until <= item.lease_until:
            return item
        return structs.replace(item, lease_until=until, lease_ms=lease_ms)

    def _note_lease_end(self, item: WorkItem) -> None:
        heap = self._lease_ends.setdefault(item.resource_class, [])
        heapq.heappush(heap, (item.lease_until, item.id))
        if len(heap) > 2 * len(self._running) + _SPARE:
            live = (self.items[one] for one in self._running)
            heap[:] = [(self._lease_end(one), one.id) for one in live if one.resource_class == item.resource_class]
            heapq.heapify(heap)

    def _first_lease_end(self, name: str) -> tuple[int, str] | None:
        """The first end of a lease in a class, and its item."""
        heap = self._lease_ends.get(name, [])
        while heap:
            until, work_id = heap[0]
            item = self.items.get(work_id)
            ends = self._lease_end(item) if item is not None and work_id in self._running else -1
            if item is not None and item.resource_class == name and ends == until:
                return heap[0]
            if item is not None and item.resource_class == name and ends > until:
                heapq.heapreplace(heap, (ends, work_id))
            else:
                heapq.heappop(heap)
        self._lease_ends.pop(name, None)
        return None

    def _expired(self, steady: int, classes: Sequence[str]) -> list[str]:
        """The running items of these classes, or of all, whose leases have run out."""
        found: set[str] = set()
        for name in classes or tuple(self._lease_ends):
            while (first := self._first_lease_end(name)) is not None and first[0] <= steady:
                found.add(first[1])
                heapq.heappop(self._lease_ends[name])
        return sorted(found, key=self._order.__getitem__)

    # ---- the order in which items come next --------------------------------------------------------------------------

    def soonest(self, classes: Sequence[str], now: Moment) -> float:
        """Seconds until something may be claimed, infinite when only a change can bring it."""
        self._promote(now)
        for name in classes or tuple(self._ready):
            if any(self._has_ready(line) for line in tuple(self._ready.get(name, {}).values())):
                return 0.0
        first_ends = [self._first_lease_end(name) for name in classes or tuple(self._lease_ends)]
        ends = [max(0, first[0] - now.steady) for first in first_ends if first is not None]
        while self._later and not self._is_later(*self._later[0]):
            heapq.heappop(self._later)
        if self._later:
            ends.append(max(1, self._later[0][0] - now.wall))
        return min(ends, default=inf) / 1000

    def _has_ready(self, line: _Line) -> bool:
        """Whether something waits in this line. What does not wait any more is removed from its head."""
        number = 0
        while number < len(line.places) and not self._is_ready(line.name, line.places[number]):
            number += 1
        del line.places[:number]
        return bool(line.places)

    def _stand(self, place: Place, item: WorkItem) -> None:
        """Put a place into the line of its class and tenant."""
        name, tenant = item.resource_class, item.tenant_id or ""
        lines = self._ready.setdefault(name, {})
        line = lines.get(tenant)
        if line is None:
            line = lines[tenant] = _Line(name)
        line.put(place)

    def _promote(self, now: Moment) -> None:
        while self._later and self._later[0][0] <= now.wall:
            due_at, order, work_id = heapq.heappop(self._later)
            if self._is_later(due_at, order, work_id):
                item = self.items[work_id]
                self._stand((-item.priority, due_at, order, work_id), item)

    def _is_later(self, due_at: int, order: int, work_id: str) -> bool:
        item = self.items.get(work_id)
        if item is None or item.state is not WorkState.PENDING:
            return False
        return item.due_at == due_at and self._order[work_id] == order

    def _is_ready(self, name: str, place: Place) -> bool:
        priority, due_at, order, work_id = place
        item = self.items.get(work_id)
        if item is None or item.state is not WorkState.PENDING or item.resource_class != name:
            return False
        return item.due_at == due_at and item.priority == -priority and self._order[work_id] == order

    def _named(self, n: int, classes: Sequence[str], only: Collection[str], now: Moment) -> list[Place]:
        """The places of these ids that are ready; they are passed by where they stand."""
        items = [self.items[one] for one in only if one in self.items]
        due = [one for one in items if one.state is WorkState.PENDING and one.due_at <= now.wall]
        places = [
            (-one.priority, one.due_at, self._order[one.id], one.id) for one in due if one.resource_class in classes
        ]
        return sorted(places)[:n]

    def _together(self, places: list[Place]) -> list[Place]:
        """The places that may run at the same time; the others go back to their lines."""
        number = core.number_together([core.is_suspect(self.items[place[3]]) for place in places])
        for place in places[number:]:
            self._stand(place, self.items[place[3]])
        return places[:number]

    def _next(self, n: int, classes: Sequence[str], newest_first: bool) -> list[Place]:
        """The places that come next, by priority, then age, tenants taking turns."""
        by_tenant: dict[str, list[_Line]] = {}
        for name in dict.fromkeys(classes):
            for tenant, line in self._ready.get(name, {}).items():
                by_tenant.setdefault(tenant, []).append(line)
        every = {tenant: _Turns(lines, self._is_ready, newest_first) for tenant, lines in by_tenant.items()}
        turns = {tenant: one for tenant, one in every.items() if len(one)}
        chosen = in_turns(turns, n, self._last_tenant) if turns else []
        if chosen:
            self._last_tenant = chosen[-1][0]
        number, taken = Counter[str](), list[Place]()
        for tenant, _ in chosen:
            taken.append(turns[tenant].place(number[tenant]))
            number[tenant] += 1
        gone: dict[int, tuple[_Line, list[int]]] = {}
        for tenant, one in every.items():
            for line, at in (*one.found[: number[tenant]], *one.stale):
                gone.setdefault(id(line), (line, []))[1].append(at)
        for line, indexes in gone.values():
            line.remove(indexes)
        for name in dict.fromkeys(classes):
            if name in self._ready:
                self._ready[name] = {tenant: line for tenant, line in self._ready[name].items() if line.places}
        return taken
