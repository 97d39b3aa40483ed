"""
`WorkTable`: every transition of a work queue, over items in memory.

Engines that hold their work in memory share them. They are synchronous and have no clock, no log and no waiting
callers: the moment is an argument and never goes back, and audit events and topics to wake are collected until the
engine takes them (`take_events`, `take_topics`). A call that raises may have made some of its changes: the engine rolls
them back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf

from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment, milliseconds
from reefknot.queue.model import work as core
from reefknot.queue.model.admission import Accept, Reject
from reefknot.queue.model.failure_groups import FailureGroups
from reefknot.queue.model.notes import Notes
from reefknot.queue.model.results import DROPPED
from reefknot.queue.model.submission import BatchAdmission, Displace, OpenWork, Stage, SubmissionRules
from reefknot.queue.model.transitions import Transition, outcome
from reefknot.queue.model.unique import unique_name
from reefknot.queue.model.work import ENDED, WorkItem, WorkState
from reefknot.queue.port.work_queue import (
    FIRST_FENCE,
    FREELY,
    Enqueue,
    Enqueued,
    FollowUps,
    Held,
    ItemEvents,
    Outcome,
    QuarantineStats,
    Settlement,
    Taken,
    WorkClaim,
    WorkFilter,
    WorkPage,
    WorkSnapshot,
    events_to_keep,
)
from reefknot.stores.wakeups import LEASES_TOPIC
from reefknot.stores.work_in_memory.items import WorkItems

MOST_ENDED = 10_000
"""Ended items that are kept; the first to end goes first. Work in quarantine waits for an operator, and stays."""

Offered = Callable[[str, int], tuple[int, SubmissionRules | None]]
"""The slots that all systems offer a resource class at a wall time, and the rules that a router has published."""


class WorkTable(WorkItems):
    """The work of a store: the calls of `WorkQueue` and `Leases`, at a given moment."""

    def __init__(self, offered: Offered, *, most_ended: int = MOST_ENDED) -> None:
        super().__init__(most_ended=most_ended)
        self._offered = offered

    # ---- work comes in -----------------------------------------------------------------------------------------------

    def enqueue(
        self,
        items: Sequence[WorkItem],
        terms: Enqueue = FREELY,
        *,
        now: Moment,
        events: Sequence[AuditEntry] = (),
    ) -> list[Outcome]:
        rules, owner, lease_ms = terms.rules, terms.owner, milliseconds(terms.lease)
        arrivals = BatchAdmission(partial(self._open_work, now.wall))
        answers: list[Outcome] = []
        for item in items:
            if item.id in self.items:
                answers.append(Enqueued.DUPLICATE)
                continue
            if (holder := self.with_key(unique_name(item), now.wall)) is not None:
                answers.append(Taken(holder))
                continue
            new = core.accepted(item, now, is_claimed=bool(owner))
            verdict = (
                Accept()
                if rules is None
                else arrivals.admit(new.pool, core.stage_of(new), core.arrival_of(new, now), rules)
            )
            if isinstance(verdict, Reject):
                answers.append(verdict)
                continue
            if isinstance(verdict, Displace):
                self._displace(new.pool, verdict, now, terms.drop_events)
            if rules is not None:
                self.pools_entered.add(new.pool)
            if owner:
                new = core.started(new, owner=owner, fence=FIRST_FENCE, lease_ms=lease_ms, now=now)
            self.put(new, now)
            self._collect(terms.accept_events, new)
            answers.append(Enqueued.ACCEPTED)
        if Enqueued.ACCEPTED in answers:
            self.events += events_to_keep(items, answers, events)
        return answers

    def _open_work(self, wall: int, wanted: str) -> tuple[OpenWork, SubmissionRules | None]:
        slots, published = self._offered(wanted, wall)
        rows = [
            (stage, priority, tenant, n) for (pool, stage, priority, tenant), n in self._open.items() if pool == wanted
        ]
        return OpenWork(rows, slots=slots, service=self.service_times.get(wanted)), published

    def _displace(self, pool: str, verdict: Displace, now: Moment, drop_events: ItemEvents | None) -> None:
        """End the oldest submission of this priority and tenant, to make room."""
        wanted = (pool, Stage.SUBMITTED, verdict.priority, verdict.tenant)
        victim = min((one for one, group in self._group.items() if group == wanted), key=self._order.__getitem__)
        dropped = core.cancel(self.items[victim], now, reason=DROPPED, who="admission")
        self.put(dropped, now)
        self._collect(drop_events, dropped)

    def _collect(self, events: ItemEvents | None, item: WorkItem) -> None:
        if events is not None:
            self.events += events(item)

    def assign(
        self,
        items: Sequence[WorkItem],
        *,
        now: Moment,
        start: Collection[str] = (),
        owner: str = "",
        lease: float = 60.0,
        events: Sequence[AuditEntry] = (),
    ) -> list[WorkItem | None]:
        lease_ms = milliseconds(lease)
        kept: list[WorkItem | None] = []
        for item in items:
            new = core.accepted_for_worker(self.items.get(item.id), item, now)
            if new is not None:
                if item.id in start and not core.is_suspect(new):
                    new = core.started(new, owner=owner, fence=new.fence + 1, lease_ms=lease_ms, now=now)
                self.put(new, now)
            kept.append(new)
        if None not in kept:
            self.events += events
        else:
            answers = [Enqueued.DUPLICATE if new is None else Enqueued.ACCEPTED for new in kept]
            self.events += events_to_keep(items, answers, events)
        return kept

    # ---- work is held ------------------------------------------------------------------------------------------------

    def claim(self, n: int, claim: WorkClaim, *, now: Moment) -> list[WorkItem]:
        self._reap(now, claim.classes, claim.crash_limit, claim.crash_events)
        self._promote(now)
        lease_ms = milliseconds(claim.lease)
        taken: list[WorkItem] = []
        names, only = claim.classes or tuple(self._ready), claim.only
        places = self._next(n, names, claim.newest_first) if only is None else self._named(n, names, only, now)
        for place in self._together(places) if claim.isolate else places:
            item = self.items[place[3]]
            item = core.started(item, owner=claim.owner, fence=item.fence + 1, lease_ms=lease_ms, now=now)
            self.put(item, now)
            taken.append(item)
        return taken

    def _reap(self, now: Moment, classes: Sequence[str], crash_limit: int, crash_events: ItemEvents | None) -> None:
        for work_id in self._expired(now.steady, classes):
            item = core.lease_ran_out(self.items[work_id], now, crash_limit=crash_limit)
            self.put(item, now)
            self._collect(crash_events, item)

    def renew(self, held: Sequence[Held], *, now: Moment, lease: float = 60.0) -> list[bool]:
        answers = [core.holds(self.items.get(one.id), owner=one.owner, fence=one.fence) for one in held]
        lease_ms = milliseconds(lease)
        for one, ours in zip(held, answers, strict=True):
            if ours:
                renewed = structs.replace(self.items[one.id], lease_until=now.steady + lease_ms, lease_ms=lease_ms)
                self.put(renewed, now)
        return answers

    def note(self, held: Held, notes: Notes, *, now: Moment) -> bool:
        item = self.items.get(held.id)
        if item is None or not core.holds(item, owner=held.owner, fence=held.fence):
            return False
        self._put_noted(structs.replace(item, lease_until=now.steady + item.lease_ms), notes, now)
        return True

    def _put_noted(self, item: WorkItem, notes: Notes | None, now: Moment) -> WorkItem:
        """Keep what the step of an item has said; returns the item with it."""
        noted = core.with_notes(item, notes, now)
        if notes is not None:
            self.put(noted, now)
            self.put_parts(item.id, notes.parts)
        return noted

    def extend(self, held: Sequence[Held], *, now: Moment, lease: float) -> None:
        """Extend leases from any thread: nothing else may be touched, since the loop may go on at any moment."""
        lease_ms = milliseconds(lease)
        for one in held:
            if core.holds(self.items.get(one.id), owner=one.owner, fence=one.fence):
                self._extended[one.id] = one.fence, now.steady + lease_ms, lease_ms

    def owners(self, *, now: Moment, silent_for: float = 0.0, classes: Sequence[str] = ()) -> list[str]:
        latest = now.steady - milliseconds(silent_for)
        held = [self._with_lease(self.items[work_id]) for work_id in self._running]
        running = [item for item in held if not classes or item.resource_class in classes]
        renewed = {item.owner for item in running if item.lease_until - item.lease_ms > latest}
        return sorted({item.owner for item in running} - renewed)

    def end_leases(self, owners: Collection[str], *, now: Moment) -> int:
        held = [item for item in self.items.values() if item.state is WorkState.RUNNING and item.owner in owners]
        for item in held:
            self.put(structs.replace(item, lease_until=0), now)
        if held:
            self.touched.add(LEASES_TOPIC)
        return len(held)

    def settle(self, settlements: Sequence[Settlement], *, now: Moment) -> list[bool]:
        answers: list[bool] = []
        for one in settlements:
            item = self.items.get(one.id)
            ours = item is not None and core.holds(item, owner=one.owner, fence=one.fence)
            if ours and item is not None:
                if one.took_ms is not None:
                    self.note_service_time(item.pool, one.took_ms)
                noted = self._put_noted(item, one.notes, now)
                if one.follow_ups is not None:
                    self._settle_with(one.follow_ups, noted, one, now)
                else:
                    self.put(core.settle(noted, one.settled, now), now)
                    self.events += one.events
            answers.append(ours)
        return answers

    def _settle_with(self, follow: FollowUps, item: WorkItem, one: Settlement, now: Moment) -> None:
        """Keep a report with its follow-ups, or what comes in its place."""
        arrivals = BatchAdmission(partial(self._open_work, now.wall))
        new, events = follow.admit(item, self.items, arrivals, now)
        for child in new:
            self.put(child, now)
        self.put(follow.settle(item, one.settled, now), now)
        self.events += [*events, *(one.events if follow.instead is None else ())]

    # ---- work is called off, tried again, moved ----------------------------------------------------------------------

    def cancel(
        self, work_id: str, *, now: Moment, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()
    ) -> bool:
        item = self.items.get(work_id)
        if item is None or WorkState.CANCELLED not in core.MOVES[item.state]:
            return False
        self.put(core.cancel(item, now, reason=reason, who=who), now)
        self.events += events
        return True

    def change(
        self,
        which: WorkFilter,
        transition: Transition,
        *,
        now: Moment,
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        changed: list[str] = []
        for item in self._matching(which):
            kept = outcome(item, transition, now)
            if kept is None or any(one.id in self.items for one in kept[1:]):
                continue
            changed.append(item.id)
            if dry_run:
                continue
            if not kept:
                self.remove(item.id)
            for one in kept:
                self.put(one, now)
        self.events += events if changed and not dry_run else ()
        return changed

    def transfer(self, work_id: str, resource_class: str, *, now: Moment, due_at: int | None = None) -> bool:
        item = self.items.get(work_id)
        if item is None or item.state is not WorkState.PENDING:
            return False
        if item.resource_class != resource_class or due_at is not None:
            self.put(core.transferred(item, resource_class, now, due_at=due_at), now)
        return True

    def recall(self, classes: Sequence[str], *, now: Moment, crash_events: ItemEvents | None = None) -> int:
        self._reap(now, classes, core.CRASH_LIMIT, crash_events)
        back = [
            item for item in self.items.values() if item.state is WorkState.PENDING and item.resource_class in classes
        ]
        for item in back:
            self.put(core.recalled(item, now), now)
        return len(back)

    def purge(self, before: int) -> int:
        gone = [item.id for item in self.items.values() if item.state in ENDED and item.updated_at < before]
        for work_id in gone:
            self.remove(work_id)
        return len(gone)

    def adopt(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]], *, now: Moment) -> int:
        new = [item for item in items if item.id not in self.items]
        for item in new:
            self.put(item, now)
            self.put_parts(item.id, notes.get(item.id, {}))
        return len(new)

    # ---- reads -------------------------------------------------------------------------------------------------------

    def get(self, work_id: str) -> WorkItem | None:
        return self._with_lease(item) if (item := self.items.get(work_id)) is not None else None

    def search(
        self, which: WorkFilter, *, now: Moment, after: str = "", limit: int = 100, oldest_first: bool = False
    ) -> WorkPage:
        if after and after not in self.items:
            return WorkPage([])
        first, last = (self._order[after], inf) if after and oldest_first else (-inf, self._order.get(after, inf))
        found = [
            item
            for item in map(self._with_lease, self.items.values())
            if first < self._order[item.id] < last and which.shows(item, now)
        ]
        choose = heapq.nsmallest if oldest_first else heapq.nlargest
        return WorkPage.of(choose(limit, found, key=lambda item: self._order[item.id]), limit)

    def by_id(self, which: WorkFilter, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        found = [item for item in self._matching(which) if item.id > after]
        return [structs.replace(item, payload=b"") for item in found[:limit]]

    def in_order(self) -> list[WorkItem]:
        return [self._with_lease(self.items[one]) for one in sorted(self.items, key=self._order.__getitem__)]

    def count(self, which: WorkFilter) -> dict[str, int]:
        return dict(Counter(item.kind for item in self._matching(which)).most_common())

    def groups(self, which: WorkFilter) -> FailureGroups:
        return FailureGroups(self._matching(which))

    def quarantine_stats(self) -> QuarantineStats:
        items = self._matching(WorkFilter(state=WorkState.QUARANTINED))
        return QuarantineStats(
            total=len(items),
            by_kind=dict(Counter(item.kind for item in items)),
            by_source=dict(Counter(item.source for item in items)),
            by_reason=dict(Counter(item.reason for item in items)),
            oldest_at=min((item.updated_at for item in items), default=None),
        )

    def _matching(self, which: WorkFilter) -> list[WorkItem]:
        found = (item for item in self.items.values() if which.state in (None, item.state) and which.matches(item))
        return sorted(found, key=lambda item: item.id)

    def open_classes(self) -> list[str]:
        states = (WorkState.PENDING, WorkState.RUNNING)
        return sorted({item.resource_class for item in self.items.values() if item.state in states})

    def snapshot(self, gone: Collection[str] = (), *, now: Moment) -> WorkSnapshot:
        counts: dict[str, dict[WorkState, int]] = {}
        oldest: dict[str, int] = {}
        for item in self.items.values():
            name, state = item.resource_class, item.state
            if state is WorkState.RUNNING:
                state = core.visible_state(self._with_lease(item), now, gone=gone)
            of_class = counts.setdefault(name, {})
            of_class[state] = of_class.get(state, 0) + 1
            if state is WorkState.PENDING and item.due_at <= now.wall:
                oldest[name] = max(oldest.get(name, 0), now.wall - item.due_at)
        return WorkSnapshot(counts, oldest)

    @property
    def newest_at(self) -> int | None:
        """The time of the latest change of an item that is kept."""
        return max((item.updated_at for item in self.items.values()), default=None)
