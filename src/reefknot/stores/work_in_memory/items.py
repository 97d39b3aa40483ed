"""
`WorkItems`: the work items of a store in memory, the order in which they come next, and what has changed.

`put` and `remove` are the only writes. Both note an item as it was before its first change, so that an engine can store
what has changed (`take_changes`), or undo all of it when it could not be stored (`roll_back`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf

from msgspec import Struct, structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.queue.model import work as core
from reefknot.queue.model.submission import ServiceTime, Stage, Waiting, in_turns
from reefknot.queue.model.work import ENDED, WorkItem, WorkState
from reefknot.stores.wakeups import END_TOPIC, topics_of

Place = tuple[int, int, int, str]
"""Where a pending item waits in its class: priority (negative), due time, order of arrival, id."""
Group = tuple[str, Stage, int, str]
"""Open work is counted by pool, stage, priority and tenant."""
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


class WorkItems:
    """Items in a dictionary, and a heap of the next ones for each class."""

    def __init__(self, *, most_ended: int) -> None:
        self._most_ended = most_ended
        self.items: dict[str, WorkItem] = {}
        self.service_times: dict[str, ServiceTime] = {}
        """By pool. Changed by `note_service_time`, or set from outside."""
        self.events: list[AuditEntry] = []
        self.touched: set[str] = set()
        self.before: dict[str, WorkItem | None] = {}
        self.pools_entered: set[str] = set()
        self._served_before: dict[str, ServiceTime | None] = {}
        self._kept_as: dict[str, tuple[int, int | None, _Extension | None]] = {}
        """By id: order, number of its end and extended lease of an item before its first change."""
        self._ended: dict[str, int] = {}
        """Ended items, in the order of their ends, with the numbers of their ends."""
        self._ends = 0
        self._running: set[str] = set()
        self._next_lease_end = inf
        """No lease runs out before; after a renewal it may be later."""
        self._open: Counter[Group] = Counter()
        self._group: dict[str, Group] = {}
        """By id: the group in which open work is counted."""
        self._last_tenant = self._last_tenant_before = ""
        self._arrivals = 0
        self._order: dict[str, int] = {}
        self._ready: dict[str, list[Place]] = {}
        self._later: list[tuple[int, int, str]] = []
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

    def remove(self, work_id: str) -> None:
        """Forget an item."""
        self._note(work_id, self.items[work_id])
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

    def _keep(self, item: WorkItem, old: WorkItem | None) -> None:
        self.items[item.id] = item
        self._count(item.id, group_of(item))
        if old is not None:
            self._extended.pop(item.id, None)
            self._running.discard(item.id)
            self._ended.pop(item.id, None)
        if item.state is WorkState.PENDING:
            heapq.heappush(self._later, (item.due_at, self._order[item.id], item.id))
        elif item.state is WorkState.RUNNING:
            self._running.add(item.id)
            self._next_lease_end = min(self._next_lease_end, item.lease_until)
        elif item.state in ENDED:
            self._ended[item.id] = self._ends
            self._ends += 1

    def _drop(self, work_id: str) -> None:
        del self.items[work_id], self._order[work_id]
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

    # ---- the order in which items come next --------------------------------------------------------------------------

    def soonest(self, classes: Sequence[str], now: Moment) -> float:
        """Seconds until something may be claimed, infinite when only a change can bring it."""
        self._promote(now)
        for name in classes or tuple(self._ready):
            heap = self._ready.get(name, [])
            while heap and not self._is_ready(name, heap[0]):
                heapq.heappop(heap)
            if heap:
                return 0.0
        running = (self.items[work_id] for work_id in self._running)
        ends = [
            max(0, self._lease_end(item) - now.steady)
            for item in running
            if not classes or item.resource_class in classes
        ]
        while self._later and not self._is_later(*self._later[0]):
            heapq.heappop(self._later)
        if self._later:
            ends.append(max(1, self._later[0][0] - now.wall))
        return min(ends, default=inf) / 1000

    def _promote(self, now: Moment) -> None:
        while self._later and self._later[0][0] <= now.wall:
            due_at, order, work_id = heapq.heappop(self._later)
            if self._is_later(due_at, order, work_id):
                item = self.items[work_id]
                ready = self._ready.setdefault(item.resource_class, [])
                heapq.heappush(ready, (-item.priority, due_at, order, work_id))

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

    def _named(self, n: int, classes: Sequence[str], only: Collection[str]) -> list[Place]:
        """The places of these ids that are ready; they are skipped where they stand."""
        heaps = {name: self._ready[name] for name in dict.fromkeys(classes) if name in self._ready}
        ready = {place for name, heap in heaps.items() for place in heap if self._is_ready(name, place)}
        return sorted(place for place in ready if place[3] in only)[:n]

    def _together(self, places: list[Place]) -> list[Place]:
        """The places that may run at the same time; the others go back to their heaps."""
        number = core.number_together([core.is_suspect(self.items[place[3]]) for place in places])
        for place in places[number:]:
            heapq.heappush(self._ready[self.items[place[3]].resource_class], place)
        return places[:number]

    def _next(self, n: int, classes: Sequence[str], newest_first: bool) -> list[Place]:
        """The places that come next, by priority, then age, tenants taking turns."""
        heaps = {name: self._ready[name] for name in dict.fromkeys(classes) if name in self._ready}
        if not newest_first and len({tenant for _, stage, _, tenant in self._open if stage != Stage.RUNNING}) <= 1:
            return self._oldest(n, heaps)
        queues: dict[str, dict[Waiting, Place]] = {}
        for name, heap in heaps.items():
            heap[:] = sorted({place for place in heap if self._is_ready(name, place)})
            for place in heap:
                tenant = self.items[place[3]].tenant_id or ""
                queues.setdefault(tenant, {})[-place[0], place[1], place[2]] = place
        sign = -1 if newest_first else 1
        ordered = {
            tenant: sorted(queue, key=lambda one: (-one[0], sign * one[1], sign * one[2]))
            for tenant, queue in queues.items()
        }
        chosen = in_turns(ordered, n, self._last_tenant)
        if chosen:
            self._last_tenant = chosen[-1][0]
        taken = [queues[tenant][waiting] for tenant, waiting in chosen]
        gone = set(taken)
        for heap in heaps.values():
            heap[:] = [place for place in heap if place not in gone]
        return taken

    def _oldest(self, n: int, heaps: Mapping[str, list[Place]]) -> list[Place]:
        """The next places of a single tenant."""
        taken: list[Place] = []
        while len(taken) < n:
            filled = [(heap[0], name) for name, heap in heaps.items() if heap]
            if not filled:
                break
            _, name = min(filled)
            place = heapq.heappop(heaps[name])
            if self._is_ready(name, place) and place not in taken:
                taken.append(place)
                self._last_tenant = self.items[place[3]].tenant_id or ""
        return taken
