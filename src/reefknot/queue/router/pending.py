"""
Assignments that a router has claimed and whose result it waits for: waiting here, or sent to a worker.

Nothing is scanned for each assignment: what waits stands in one priority queue for each class, deadlines in a heap.
`RouterContext` is what all parts of one router share, the table of pending assignments among it.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from typing import Any

from msgspec import Struct, structs

from reefknot.audit.assignments import briefly_about
from reefknot.audit.journal import Journal, about_assignment
from reefknot.audit.model.event import Event, OperatorAction, Requeued, Routing
from reefknot.core.clock import Clock
from reefknot.core.limits import Grant
from reefknot.queue.execution.events import expired_event
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.messages import ExecAssignment
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.transport import Transport
from reefknot.queue.port.work_queue import Held, WorkQueue
from reefknot.queue.router.settings import RouterSettings


class ClaimedSubmission(Struct, frozen=True):
    """A submission that this router has claimed. `deadline_at` is milliseconds UTC."""

    assignment: ExecAssignment
    held: Held
    deadline_at: int | None = None
    sent_before: bool = False
    """Whether it was claimed before, by another router or an earlier run of this one: a worker may have seen it."""
    body: bytes = b""
    """The assignment's bytes as they were submitted."""
    was_accepted: bool = False
    """Whether a worker that is gone had accepted it: it knew the step."""
    requeued_at: int = 0
    """When an operator last retried it (ms UTC): an older result belongs to an earlier generation."""
    generation: int = 0
    """How often it was restarted with its full retry budget."""
    waits: WorkItem | None = None
    """Its record, if it has to wait for other work: see `waiting`."""


_GARBAGE = 1000
"""Stale heap entries tolerated before a rebuild."""


class Pending(Struct, eq=False):
    """An assignment between its claim and its result: among others the fields of its `ClaimedSubmission`."""

    resource_class: str
    since: float
    assignment: ExecAssignment
    held: Held
    """The claim on the submission. It is void once a worker has accepted it."""
    deadline_at: int | None
    sent_before: bool
    """Whether a worker may have it."""
    body: bytes
    was_accepted: bool
    requeued_at: int
    generation: int
    waits: WorkItem | None
    id: str = ""
    maybe_held_before_send: bool = False
    """`sent_before` as of the previous send. Restored on refusal: a worker that refused cannot hold it."""
    place: int = 0
    """Its number in the queue of its class; 0 when it is in none."""
    worker_id: str | None = None
    asked_at: float = 0.0
    """When it was last sent."""
    acked: bool = False
    route: int = 0
    """How often it was sent: part of the message's id."""
    refused_until: dict[str, float] = {}
    """Workers that refused it, and when they may be asked again; never, if they do not know the step."""
    too_late_for: set[str] = set()
    """Workers with which it would miss its deadline."""
    refusal: str = ""
    unknown_since: float | None = None
    """Since when every live worker has refused it because it does not know the type."""
    cancel_reason: str | None = None
    """The caller's reason, once it was cancelled: it is not sent any more."""
    held_by: str = ""
    """The limit or the pause in whose line it waits."""
    grant: Grant | None = None
    """Its start, once it was granted under the limits that hold for it."""

    def __post_init__(self) -> None:
        self.id, self.maybe_held_before_send = self.held.id, self.sent_before


_Stand = tuple[float, int, Pending]
"""Age and number: the order within a priority and tenant. A number is never used twice."""


class WaitingLine:
    """
    Waiting assignments of one resource class: by priority, tenants taking turns within it, then by age.

    Removed entries are skipped on pop.
    """

    def __init__(self) -> None:
        self._levels: dict[int, dict[str, list[_Stand]]] = {}
        """By priority and tenant. The order of the tenants is that of their turns."""
        self._entries = 0
        self.waiting = 0
        """The number that waits, where `PendingTable` holds it."""

    def put(self, pending: Pending, place: int) -> None:
        pending.place = place
        tenants = self._levels.setdefault(pending.assignment.priority, {})
        heappush(tenants.setdefault(pending.assignment.tenant_id or "", []), (pending.since, place, pending))
        self._entries += 1

    def next(self) -> Pending | None:
        """Pop the next one."""
        while self._levels:
            priority = max(self._levels)
            tenants = self._levels[priority]
            name, queue = next(iter(tenants.items()))
            _, place, pending = heappop(queue)
            self._entries -= 1
            is_there = pending.place == place
            if is_there or not queue:  # a removed entry costs its tenant no turn
                del tenants[name]
                if queue:
                    tenants[name] = queue
            if not tenants:
                del self._levels[priority]
            if is_there:
                pending.place = 0
                return pending
        return None

    def all(self) -> list[Pending]:
        """All of them; they stay."""
        return [pending for queue in self._queues() for _, place, pending in queue if pending.place == place]

    def tidy(self, waiting: int) -> None:
        """Sweep removed entries out before they outnumber the waiting."""
        if self._entries > 2 * waiting + _GARBAGE:
            left = [(pending, place) for queue in self._queues() for _, place, pending in queue]
            self._levels, self._entries = {}, 0
            for pending, place in left:
                if pending.place == place:
                    self.put(pending, place)

    def _queues(self) -> list[list[_Stand]]:
        return [queue for tenants in self._levels.values() for queue in tenants.values()]


class PendingTable:
    """
    Pending assignments by the id of their record; those that wait here also in a queue for each class.

    Workers name an assignment by its own id, and their acks do not tell the tenant: see `out`.
    """

    def __init__(self) -> None:
        self._all: dict[str, Pending] = {}
        self._waiting: dict[str, Pending] = {}
        self._lines: dict[str, WaitingLine] = {}
        self._next_place = count(1).__next__
        self._looks: list[tuple[int, int, Pending]] = []
        self._out: dict[str, tuple[Pending, ...]] = {}
        """Those that a worker has, by the assignment's own id."""
        self.held: dict[str, WaitingLine] = {}
        """Those that wait for a limit or a pause, by its key."""
        self.number_held = 0
        self.cancelled: list[Pending] = []
        """Cancelled while a worker had it, and back here."""
        self.of_class: Counter[str] = Counter()
        """The number of each class in all."""
        self.unacked: Counter[tuple[str, str]] = Counter()
        """By worker and class: sent, and neither acked nor answered yet."""
        self.under_way: Counter[tuple[str, str]] = Counter()
        """By worker and class: sent, and not ended yet."""

    def __len__(self) -> int:
        return len(self._all)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def room(self, size: int) -> int:
        """The free places of this number. What waits for a limit or a pause takes no place of other work."""
        return size + min(size, self.number_held) - len(self._all)

    def get(self, work_id: str) -> Pending | None:
        return self._all.get(work_id)

    def out(self, assignment_id: str) -> tuple[Pending, ...]:
        """The assignments of this id, one for each tenant, that a worker has."""
        return self._out.get(assignment_id, ())

    def waits(self, pending: Pending) -> bool:
        return self._waiting.get(pending.id) is pending

    def all(self) -> list[Pending]:
        return list(self._all.values())

    def add(self, taken: ClaimedSubmission, resource_class: str, now: float) -> Pending:
        """Add a claimed submission. One that is here already gets its newer claim, and waits again."""
        known = self._all.get(taken.held.id)
        if known is not None:
            known.held, known.was_accepted, known.requeued_at = taken.held, taken.was_accepted, taken.requeued_at
            self.back(known)
            return known
        pending = Pending(resource_class, now, *structs.astuple(taken))
        self._all[pending.id] = pending
        self.of_class[resource_class] += 1
        self._stand(pending)
        if pending.deadline_at is not None:
            self.check_deadline_at(pending, pending.deadline_at)
        return pending

    def _stand(self, pending: Pending) -> None:
        self._waiting[pending.id] = pending
        self.line_up(pending)

    def line_up(self, pending: Pending) -> None:
        """Queue it, where its priority and its age put it."""
        line = self._lines.get(pending.resource_class)
        if line is None:
            line = self._lines[pending.resource_class] = WaitingLine()
        line.put(pending, self._next_place())
        line.tidy(len(self._waiting))

    def hold(self, pending: Pending, key: str) -> None:
        """Let it wait for a limit or a pause, in the same order as in the queue of its class."""
        line = self.held.get(key)
        if line is None:
            line = self.held[key] = WaitingLine()
        line.put(pending, self._next_place())
        pending.held_by = key
        line.waiting += 1
        self.number_held += 1
        line.tidy(line.waiting)

    def release(self, key: str, most: int) -> None:
        """Queue up to `most` of those that wait for this limit or pause where they came from."""
        line = self.held[key]
        while most > 0 and (pending := line.next()) is not None:
            most -= 1
            self._unhold(pending)
            self.line_up(pending)

    def _unhold(self, pending: Pending) -> None:
        """Take it out of the line of its limit or pause, if it is in one."""
        if not pending.held_by:
            return
        line = self.held[pending.held_by]
        line.waiting -= 1
        self.number_held -= 1
        if not line.waiting:
            del self.held[pending.held_by]
        pending.held_by = ""

    def lines(self) -> Iterator[tuple[str, WaitingLine]]:
        """The queues that may hold something. Those of classes without work are dropped."""
        for name, line in list(self._lines.items()):
            if self.of_class[name] > 0:
                yield name, line
            else:
                del self._lines[name], self.of_class[name]

    def check_deadline_at(self, pending: Pending, wall_ms: int) -> None:
        """Check its deadline at this time, should it not have ended by then."""
        heappush(self._looks, (wall_ms, self._next_place(), pending))
        if len(self._looks) > 2 * len(self._all) + _GARBAGE:
            self._looks = [one for one in self._looks if self._all.get(one[2].id) is one[2]]
            heapify(self._looks)

    def overdue(self, wall_ms: int) -> list[Pending]:
        """The assignments whose check is due, wherever they are."""
        found = []
        while self._looks and self._looks[0][0] <= wall_ms:
            pending = heappop(self._looks)[2]
            if self._all.get(pending.id) is pending:
                found.append(pending)
        return found

    def sent(self, pending: Pending, worker_id: str, now: float) -> None:
        if pending.worker_id is not None:
            self._leave(pending)
        self._waiting.pop(pending.id, None)
        name = pending.assignment.assignment_id
        self._out[name] = (*self._out.get(name, ()), pending)
        pending.place = 0
        pending.worker_id, pending.asked_at, pending.acked = worker_id, now, False
        pending.route += 1
        self.unacked[worker_id, pending.resource_class] += 1
        self.under_way[worker_id, pending.resource_class] += 1

    def asked_again(self, pending: Pending, now: float) -> None:
        pending.asked_at = now
        pending.route += 1

    def acked(self, pending: Pending) -> None:
        self._count_answer(pending)
        pending.acked = True

    def back(self, pending: Pending) -> None:
        """Let it wait here again, unless it has ended."""
        if self._all.get(pending.id) is not pending:
            return
        self._leave(pending)
        pending.worker_id, pending.acked = None, False
        if pending.cancel_reason is not None:
            self.cancelled.append(pending)
        if not self.waits(pending):
            self._stand(pending)

    def refused(self, pending: Pending, worker_id: str, until: float, message: str) -> None:
        """Let it wait here again; this worker is not asked before `until`."""
        pending.refused_until[worker_id] = until
        pending.refusal = message
        if pending.grant is not None:
            pending.grant.refused()
        if not pending.acked:  # else it was accepted before, and the record may be the worker's
            pending.sent_before = pending.maybe_held_before_send
        self.back(pending)

    def remove(self, pending: Pending) -> bool:
        """Remove it. False when it was not there any more."""
        if self._all.get(pending.id) is not pending:
            return False
        self._leave(pending)
        del self._all[pending.id]
        self.of_class[pending.resource_class] -= 1
        self._waiting.pop(pending.id, None)
        self._unhold(pending)
        pending.place = 0
        return True

    def sent_to(self, workers: AbstractSet[str]) -> list[Pending]:
        return [one for one in self._all.values() if one.worker_id is not None and one.worker_id in workers]

    def silent(self, *, unacked_since: float, acked_since: float) -> list[Pending]:
        """The assignments without news for long: sent and not acked, or acked and without a result."""
        return [
            one
            for one in self._all.values()
            if one.worker_id is not None and one.asked_at < (acked_since if one.acked else unacked_since)
        ]

    def unanswered(self, since: float, most: int) -> list[Pending]:
        """Up to `most` assignments that were sent before `since` and are not acked."""
        if not self.unacked:
            return []
        late = (one for sent in self._out.values() for one in sent if not one.acked and one.asked_at < since)
        return list(islice(late, most))

    def known_nowhere(self, pending: Pending, workers: AbstractSet[str]) -> bool:
        """Whether each of these workers has answered that it does not know the step."""
        return bool(workers) and all(pending.refused_until.get(one) == inf for one in workers)

    def _leave(self, pending: Pending) -> None:
        """No worker has it any more."""
        self._count_answer(pending)
        if pending.grant is not None:
            pending.grant.ended()
            pending.grant = None
        if pending.worker_id is not None:
            _count_down(self.under_way, (pending.worker_id, pending.resource_class))
            name = pending.assignment.assignment_id
            others = tuple([one for one in self._out.get(name, ()) if one is not pending])
            if others:
                self._out[name] = others
            else:
                self._out.pop(name, None)

    def _count_answer(self, pending: Pending) -> None:
        if pending.worker_id is not None and not pending.acked:
            _count_down(self.unacked, (pending.worker_id, pending.resource_class))


def _count_down(counts: Counter[tuple[str, str]], key: tuple[str, str]) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]


# ---- the context -----------------------------------------------------------------------------------------------------


class RouterSnapshot(Struct, frozen=True):
    """The router at one moment."""

    router_id: str
    waiting: int
    pending: int
    status: OverloadStatus
    workers: dict[str, dict[str, Any]]
    """By class and id, at most `MOST_SHOWN` in all."""
    workers_left_out: int = 0
    unanswered: dict[str, tuple[str, float]] = {}
    """Assignments that were sent a while ago and not acknowledged: the worker of each, and the seconds since."""
    is_shared: bool = False
    """Whether it also sends to workers that do not tell of themselves."""
    limits: list[dict[str, Any]] = []
    """The limits of the fleet, each with the keys that work waits for."""


class RouterContext(Struct, frozen=True):
    """Identity, settings, store, clock, journal and pending table of one router."""

    router_id: str
    owner: str
    """The name under which this incarnation holds submissions."""
    settings: RouterSettings
    work: WorkQueue
    transport: Transport
    journal: Journal
    clock: Clock
    table: PendingTable
    seed: int | None = None

    def routing(
        self, pending: Pending, worker_id: str | None, reason: str, inputs: dict[str, Any] | None = None
    ) -> Event:
        about = briefly_about(pending.assignment, self.clock.wall())
        return Routing(**about, worker_id=worker_id, reason=reason, inputs=inputs)

    def requeued(self, pending: Pending, why: str) -> Event:
        about = about_assignment(pending.assignment, self.clock.wall())
        return Requeued(**about, reason=why, generation=pending.generation)

    def expired(self, pending: Pending) -> Event:
        return expired_event(pending.assignment, self.clock.wall())

    def cancelled(self, assignment: ExecAssignment, reason: str) -> Event:
        about = about_assignment(assignment, self.clock.wall())
        return cancelled_event(about, reason, who="caller")


def cancelled_event(about: dict[str, Any], reason: str, *, who: str) -> Event:
    return OperatorAction(**about, actor=who, action="cancel", subject=about["work_id"], details={"reason": reason})
