"""Work, leases and quarantine of a memory store: items in a dictionary, and a heap of what is next for each class."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf

from msgspec import structs

from reefknot.core import work as core
from reefknot.core.overload.admission import Accept, Arrival, Reject
from reefknot.core.overload.submission import (
    Displace,
    OpenWork,
    ServiceTime,
    Stage,
    SubmissionRules,
    Waiting,
    admit_scheduled,
    admit_submission,
    in_turns,
)
from reefknot.core.results import DROPPED
from reefknot.core.time import Moment, milliseconds
from reefknot.core.work import ENDED, WorkItem, WorkState
from reefknot.engines.memory.store import MemoryAuditLog, MemoryContext
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.work_queue import (
    FIRST_FENCE,
    CrashEvents,
    Enqueued,
    Held,
    Settlement,
    WorkSnapshot,
    events_to_keep,
    refuse_classes_with_gone,
)

CLASS_TOPIC, END_TOPIC, LEASES_TOPIC = "work in ", "end of ", "leases ended"
MOST_ENDED = 10_000
"""Ended items that are kept; the first to end goes first. Work in quarantine waits for an operator, and stays."""


_Place = tuple[int, int, int, str]


class MemoryWorkQueue:
    """The work of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        self.shared = shared
        self._audit = audit
        self.items: dict[str, WorkItem] = {}
        self._ended: dict[str, None] = {}
        """Ended items, in the order of their ends."""
        self._running: set[str] = set()
        self._next_lease_end = inf
        """No lease runs out before; after a renewal it may be later."""
        self._open: Counter[tuple[str, Stage, int, str]] = Counter()
        """Open work, by pool, stage, priority and tenant."""
        self._service_times: dict[str, ServiceTime] = {}
        self._last_tenant = ""
        self._arrivals = count()
        self._order: dict[str, int] = {}
        self._ready: dict[str, list[_Place]] = {}
        self._later: list[tuple[int, int, str]] = []
        self._touched: set[str] = set()
        self._extended: dict[str, tuple[int, int, int]] = {}
        """By id: fence, end and length of leases that another thread has extended, while the loop was blocked."""

    async def enqueue(
        self,
        items: Sequence[WorkItem],
        *,
        rules: SubmissionRules | None = None,
        events: Sequence[AuditEntry] = (),
        accept_events: CrashEvents | None = None,
        owner: str = "",
        lease: float = 60.0,
        drop_events: CrashEvents | None = None,
    ) -> list[Enqueued | Reject]:
        now = self.shared.now()
        lease_ms = milliseconds(lease)
        answers: list[Enqueued | Reject] = []
        for item in items:
            if item.id in self.items:
                answers.append(Enqueued.DUPLICATE)
                continue
            new = core.accepted(item, now, is_claimed=bool(owner))
            verdict = Accept() if rules is None else self._admit(new, rules, now)
            if isinstance(verdict, Reject):
                answers.append(verdict)
                continue
            if isinstance(verdict, Displace):
                self._displace(new.pool, verdict, now, drop_events)
            self._order[item.id] = next(self._arrivals)
            if owner:
                new = core.started(new, owner=owner, fence=FIRST_FENCE, lease_ms=lease_ms, now=now)
            self.put(new, now)
            self._audit.add(tuple(accept_events(new)) if accept_events else ())
            answers.append(Enqueued.ACCEPTED)
        if Enqueued.ACCEPTED in answers:
            self._audit.add(events_to_keep(items, answers, events))
            self.wake()
        return answers

    def _admit(self, item: WorkItem, rules: SubmissionRules, now: Moment) -> Accept | Displace | Reject:
        slots, published = self.shared.offered(item.pool, now.wall)
        rows = [
            (stage, priority, tenant, n)
            for (pool, stage, priority, tenant), n in self._open.items()
            if pool == item.pool
        ]
        work = OpenWork(rows, slots=slots, service=self._service_times.get(item.pool))
        deadline = None if item.deadline_at is None else float(item.deadline_at - now.wall)
        if core.stage_of(item) is Stage.SCHEDULED:
            return admit_scheduled(work, item.tenant_id or "", published or rules)
        return admit_submission(work, Arrival(item.priority, deadline, item.tenant_id or ""), published or rules)

    def _displace(self, pool: str, verdict: Displace, now: Moment, drop_events: CrashEvents | None) -> None:
        """End the oldest submission of this priority and tenant, to make room."""
        wanted = (pool, Stage.SUBMITTED, verdict.priority, verdict.tenant)
        victims = [item for item in self.items.values() if self._counted_as(item) == wanted]
        victim = min(victims, key=lambda item: self._order[item.id])
        dropped = core.cancel(victim, now, reason=DROPPED, who="admission")
        self.put(dropped, now)
        self._audit.add(tuple(drop_events(dropped)) if drop_events else ())

    def _counted_as(self, item: WorkItem | None) -> tuple[str, Stage, int, str] | None:
        stage = None if item is None else core.stage_of(item)
        if item is None or stage is None:
            return None
        return item.pool, stage, item.priority, item.tenant_id or ""

    async def assign(
        self,
        items: Sequence[WorkItem],
        *,
        start: Collection[str] = (),
        owner: str = "",
        lease: float = 60.0,
        events: Sequence[AuditEntry] = (),
    ) -> list[WorkItem | None]:
        now = self.shared.now()
        lease_ms = milliseconds(lease)
        kept: list[WorkItem | None] = []
        for item in items:
            new = core.accepted_for_worker(self.items.get(item.id), item, now)
            if new is not None:
                self._order.setdefault(new.id, next(self._arrivals))
                if item.id in start and not core.is_suspect(new):
                    new = core.started(new, owner=owner, fence=new.fence + 1, lease_ms=lease_ms, now=now)
                self.put(new, now)
            kept.append(new)
        answers = [Enqueued.DUPLICATE if new is None else Enqueued.ACCEPTED for new in kept]
        if Enqueued.ACCEPTED in answers:
            self._audit.add(events_to_keep(items, answers, events))
            self.wake()
        return kept

    async def claim(
        self,
        n: int,
        *,
        owner: str,
        classes: Sequence[str] = (),
        lease: float = 60.0,
        newest_first: bool = False,
        only: Collection[str] | None = None,
        isolate: bool = False,
        crash_limit: int = core.CRASH_LIMIT,
        crash_events: CrashEvents | None = None,
    ) -> list[WorkItem]:
        now = self.shared.now()
        self._reap(now, classes, crash_limit, crash_events)
        self._promote(now)
        lease_ms = milliseconds(lease)
        taken: list[WorkItem] = []
        names = classes or tuple(self._ready)
        places = self._next(n, names, newest_first) if only is None else self._named(n, names, only)
        for place in self._together(places) if isolate else places:
            item = self.items[place[3]]
            item = core.started(item, owner=owner, fence=item.fence + 1, lease_ms=lease_ms, now=now)
            self.put(item, now)
            taken.append(item)
        return taken

    async def renew(self, held: Sequence[Held], *, lease: float = 60.0) -> list[bool]:
        now = self.shared.now()
        answers = [core.holds(self.items.get(one.id), owner=one.owner, fence=one.fence) for one in held]
        lease_ms = milliseconds(lease)
        for one, ours in zip(held, answers, strict=True):
            if ours:
                renewed = structs.replace(self.items[one.id], lease_until=now.steady + lease_ms, lease_ms=lease_ms)
                self.put(renewed, now)
        return answers

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        now = self.shared.now()
        answers: list[bool] = []
        for one in settlements:
            item = self.items.get(one.id)
            ours = item is not None and core.holds(item, owner=one.owner, fence=one.fence)
            if ours and item is not None:
                if one.took_ms is not None:
                    known = self._service_times.get(item.pool, ServiceTime())
                    self._service_times[item.pool] = known.after(one.took_ms)
                self.put(core.settle(item, one.settled, now), now)
                self._audit.add(one.events)
            answers.append(ours)
        self.wake()
        return answers

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        now = self.shared.now()
        item = self.items.get(work_id)
        if item is None or WorkState.CANCELLED not in core.MOVES[item.state]:
            return False
        self.put(core.cancel(item, now, reason=reason, who=who), now)
        self._audit.add(events)
        self.wake()
        return True

    async def retry(
        self, ids: Sequence[str], *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        now = self.shared.now()
        found = [self.items[one] for one in dict.fromkeys(ids) if one in self.items]
        ended = [item for item in found if core.can_retry(item)]
        for item in ended:
            self.put(core.requeue(item, now, who=who, why=why), now)
        self._audit.add(events if ended else ())
        self.wake()
        return [item.id for item in ended]

    async def transfer(self, work_id: str, resource_class: str) -> bool:
        now = self.shared.now()
        item = self.items.get(work_id)
        if item is None or item.state is not WorkState.PENDING:
            return False
        if item.resource_class != resource_class:
            pool = core.pool_of(resource_class)
            self.put(structs.replace(item, resource_class=resource_class, pool=pool, updated_at=now.wall), now)
            self.wake()
        return True

    async def open_classes(self) -> list[str]:
        self.shared.now()
        states = (WorkState.PENDING, WorkState.RUNNING)
        return sorted({item.resource_class for item in self.items.values() if item.state in states})

    async def recall(self, classes: Sequence[str], *, crash_events: CrashEvents | None = None) -> int:
        now = self.shared.now()
        self._reap(now, classes, core.CRASH_LIMIT, crash_events)
        back = [
            item for item in self.items.values() if item.state is WorkState.PENDING and item.resource_class in classes
        ]
        for item in back:
            self.put(core.recalled(item, now), now)
        self.wake()
        return len(back)

    async def get(self, work_id: str) -> WorkItem | None:
        self.shared.now()
        return self._with_lease(item) if (item := self.items.get(work_id)) is not None else None

    async def find(
        self,
        *,
        state: WorkState | None = None,
        kind: str | None = None,
        classes: Collection[str] = (),
        after: str = "",
        limit: int = 100,
        since: int = 0,
        oldest_first: bool = False,
        gone: Collection[str] | None = None,
    ) -> list[WorkItem]:
        refuse_classes_with_gone(classes, gone)
        now = self.shared.now()
        if after and after not in self.items:
            return []
        first, last = (self._order[after], inf) if after and oldest_first else (-inf, self._order.get(after, inf))
        found = [
            self._with_lease(item)
            for item in self.items.values()
            if kind in (None, item.kind) and item.created_at >= since and first < self._order[item.id] < last
        ]
        if state is not None:
            shown = {
                item.id: item.state if gone is None else core.visible_state(item, now, gone=gone) for item in found
            }
            found = [item for item in found if shown[item.id] is state]
        if classes:
            found = [item for item in found if core.stage_of(item) is not None and item.resource_class in classes]
        choose = heapq.nsmallest if oldest_first else heapq.nlargest
        found = choose(limit, found, key=lambda item: self._order[item.id])
        return [structs.replace(item, payload=b"") for item in found]

    async def snapshot(self) -> WorkSnapshot:
        now = self.shared.now()
        counts: dict[str, dict[WorkState, int]] = {}
        oldest = 0
        for item in self.items.values():
            of_class = counts.setdefault(item.resource_class, {})
            of_class[item.state] = of_class.get(item.state, 0) + 1
            if item.state is WorkState.PENDING:
                oldest = max(oldest, now.wall - item.due_at)
        return WorkSnapshot(counts, oldest)

    @property
    def newest_at(self) -> int | None:
        return max((item.updated_at for item in self.items.values()), default=None)

    async def purge(self, before: int) -> int:
        self.shared.now()
        gone = [item.id for item in self.items.values() if item.state in ENDED and item.updated_at < before]
        for work_id in gone:
            self.remove(work_id)
        return len(gone)

    async def wait(self, timeout: float, *, classes: Sequence[str] = ()) -> bool:
        topics = (LEASES_TOPIC, *(CLASS_TOPIC + name for name in classes)) if classes else ("",)
        soonest = partial(self._soonest, classes)
        return await self.shared.watch(soonest, *topics, pause=float, timeout=timeout) == 0

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        async def over() -> WorkItem | None:
            item = await self.get(work_id)
            return item if item is not None and core.is_over(item) else None

        return await self.shared.watch(
            over, END_TOPIC + work_id, pause=lambda item: 0.0 if item else inf, timeout=timeout
        )

    def wake(self, *topics: str) -> None:
        """Wake those who wait for what has changed since the last call."""
        touched, self._touched = self._touched, set()
        self.shared.changed(*touched, *topics)

    def put(self, item: WorkItem, now: Moment) -> None:
        """Keep an item as it is now, at the place that belongs to its state."""
        was, is_now = self._counted_as(self.items.get(item.id)), self._counted_as(item)
        if was != is_now:
            if was is not None:
                self._open[was] -= 1
                if not self._open[was]:
                    del self._open[was]
            if is_now is not None:
                self._open[is_now] += 1
        self.items[item.id] = item
        self._extended.pop(item.id, None)
        self._running.discard(item.id)
        self._ended.pop(item.id, None)
        if item.state in ENDED:
            self._ended[item.id] = None
            if len(self._ended) > MOST_ENDED:
                self.remove(next(iter(self._ended)))
        if item.state is WorkState.RUNNING:
            self._running.add(item.id)
            self._next_lease_end = min(self._next_lease_end, item.lease_until)
        elif item.state is not WorkState.PENDING:
            self._touched.add(END_TOPIC + item.id)
        else:
            self._touched.add(CLASS_TOPIC + item.resource_class)
            heapq.heappush(self._later, (item.due_at, self._order[item.id], item.id))
            self._promote(now)

    def remove(self, work_id: str) -> None:
        """Forget an item that is neither pending nor running."""
        del self.items[work_id]
        del self._order[work_id]
        self._ended.pop(work_id, None)
        self._extended.pop(work_id, None)

    def _promote(self, now: Moment) -> None:
        while self._later and self._later[0][0] <= now.wall:
            due_at, order, work_id = heapq.heappop(self._later)
            item = self.items.get(work_id)
            if item is not None and item.state is WorkState.PENDING and item.due_at == due_at:
                ready = self._ready.setdefault(item.resource_class, [])
                heapq.heappush(ready, (-item.priority, due_at, order, work_id))

    def _reap(self, now: Moment, classes: Sequence[str], crash_limit: int, crash_events: CrashEvents | None) -> None:
        if now.steady < self._next_lease_end:
            return
        expired = [
            work_id
            for work_id in self._running
            if self._lease_end(self.items[work_id]) <= now.steady
            and (not classes or self.items[work_id].resource_class in classes)
        ]
        for work_id in sorted(expired, key=self._order.__getitem__):
            item = core.lease_ran_out(self.items[work_id], now, crash_limit=crash_limit)
            self.put(item, now)
            self._audit.add(tuple(crash_events(item)) if crash_events else ())
        self._next_lease_end = min((self._lease_end(self.items[work_id]) for work_id in self._running), default=inf)

    def extend(self, held: Sequence[Held], lease: float) -> None:
        """Extend leases from any thread: nothing else may be touched, since the loop may go on at any moment."""
        now, lease_ms = self.shared.now(), milliseconds(lease)
        for one in held:
            if core.holds(self.items.get(one.id), owner=one.owner, fence=one.fence):
                self._extended[one.id] = one.fence, now.steady + lease_ms, lease_ms

    def _lease_end(self, item: WorkItem) -> int:
        return self._with_lease(item).lease_until

    def _with_lease(self, item: WorkItem) -> WorkItem:
        """The item with its lease as it was extended."""
        fence, until, lease_ms = self._extended.get(item.id, (0, 0, 0))
        if fence != item.fence or until <= item.lease_until:
            return item
        return structs.replace(item, lease_until=until, lease_ms=lease_ms)

    def _is_ready(self, name: str, place: _Place) -> bool:
        item = self.items.get(place[3])
        is_due = item is not None and item.state is WorkState.PENDING and item.due_at == place[1]
        return is_due and item is not None and item.resource_class == name

    def _named(self, n: int, classes: Sequence[str], only: Collection[str]) -> list[_Place]:
        """The places of these ids that are ready; they are skipped where they stand."""
        heaps = {name: self._ready[name] for name in dict.fromkeys(classes) if name in self._ready}
        ready = {place for name, heap in heaps.items() for place in heap if self._is_ready(name, place)}
        return sorted(place for place in ready if place[3] in only)[:n]

    def _together(self, places: list[_Place]) -> list[_Place]:
        """The places that may run beside each other; the others are back where they stood."""
        number = core.number_together([core.is_suspect(self.items[place[3]]) for place in places])
        for place in places[number:]:
            heapq.heappush(self._ready[self.items[place[3]].resource_class], place)
        return places[:number]

    def _next(self, n: int, classes: Sequence[str], newest_first: bool) -> list[_Place]:
        """The places that come next, by priority, then age, tenants taking turns."""
        heaps = {name: self._ready[name] for name in dict.fromkeys(classes) if name in self._ready}
        if not newest_first and len({tenant for _, stage, _, tenant in self._open if stage != Stage.RUNNING}) <= 1:
            return self._oldest(n, heaps)
        queues: dict[str, dict[Waiting, _Place]] = {}
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

    def _oldest(self, n: int, heaps: Mapping[str, list[_Place]]) -> list[_Place]:
        """The next places of a single tenant."""
        taken: list[_Place] = []
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

    async def _soonest(self, classes: Sequence[str]) -> float:
        """Seconds until something may be claimed, infinite when only a change can bring it."""
        now = self.shared.now()
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
        if self._later:
            ends.append(max(1, self._later[0][0] - now.wall))
        return min(ends, default=inf) / 1000
