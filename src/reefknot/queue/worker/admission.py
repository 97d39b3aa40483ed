"""
Admission to the pools of a worker: the decision, the exchange of places when other work is dropped, and the room for
what the transport keeps (`SharedRoom`).

A decision to drop other work takes its place at once and reserves one for the arrival, before anything is awaited: so
no two arrivals drop the same work, and the depth never exceeds the size. Work that is being written cannot be dropped
yet; an arrival that would have to choose it waits until it is written.

Assignments on the shared subject that a stream keeps are pulled as far as there are places. The class of an assignment
is known when it is read, so a pull is bounded by the class with the fewest free places: all that it brings is admitted,
whatever it is. When one class is full and another is not, this alone would leave the other idle behind the head of the
stream. So the worker then also looks past the head, and gives back what belongs to the full class: the stream delivers
it again after the pause that the refusal would have named, to this worker or another. The rate of that is bounded, and
falls while it finds nothing for another class. Nothing is refused for want of places, except on a worker's own subject,
where no other worker could take it.

Two rules need arrivals at a full queue. `drop_oldest` acts on them, so a worker with this policy pulls without a bound,
and refuses what it may not make room for. An arrival of higher priority may displace other work, but its turn in the
stream comes first: the stream has one order, and to find it there all that is in front of it would have to be refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, structs

from reefknot.audit.model.event import Event
from reefknot.core.clock import Clock
from reefknot.queue.model.admission import (
    DRAINING_MESSAGE,
    LONGEST_WAIT_MS,
    Accept,
    AcceptDropping,
    Admission,
    Arrival,
    Reject,
    RejectionPolicy,
    RejectReason,
    admit,
    can_displace,
    refused_from,
    unknown_type_message,
)
from reefknot.queue.model.messages import ExecAssignment, ExecAssignmentAck, InvalidMessage, named_class, resource_class
from reefknot.queue.model.work import WorkItem
from reefknot.queue.worker.pool import Pool, Queued
from reefknot.queue.worker.records import AcceptedWork


class AdmissionVerdict(Struct, frozen=True):
    """An admission decision and its inputs."""

    answer: Admission
    inputs: dict[str, Any]
    place: Queued | None = None
    """The place of the work that is dropped, which the arrival has from now on."""
    at: float = 0.0
    """When it was decided, on the worker's clock: the arrival waits since then, however long its write takes."""


class Admitted(Struct, frozen=True):
    """An assignment that has its place in a pool and is not kept yet."""

    work: AcceptedWork
    pool: Pool
    item: WorkItem
    ack: ExecAssignmentAck
    """The ack that is sent once it is kept; it shows the queue at admission."""
    event: Event
    failure: str
    """The ack's message if it cannot be kept."""
    since: float
    """When it was admitted, on the worker's clock."""


class IntakeResult(Struct, frozen=True):
    """The outcome of one delivery."""

    ack: ExecAssignmentAck
    evicted: tuple[str, ExecAssignmentAck] | None = None
    """The record of another assignment that had to make room, and its ack. Its result follows."""
    duplicate: tuple[str, Pool] | None = None
    """A record that the store has already, and the pool that it was sent to."""

    @property
    def is_plain(self) -> bool:
        """Whether the ack is all that follows."""
        return self.evicted is None and self.duplicate is None


def with_own_class(
    read: ExecAssignment | InvalidMessage, classes: Mapping[str, str]
) -> ExecAssignment | InvalidMessage:
    """The assignment with the class of its step, if it names none; a sender that does not know the step cannot."""
    own = None if isinstance(read, InvalidMessage) else classes.get(read.job.type)
    if own is None or isinstance(read, InvalidMessage) or named_class(read):
        return read
    return structs.replace(read, resource_class=own)


class WorkerAdmission:
    """Admission decisions of one worker."""

    def __init__(self, pools: Mapping[str, Pool], known: Mapping[str, object], *, v2: bool) -> None:
        self._pools = pools
        self._known = known
        self._v2 = v2
        self.draining = False

    def pool_of(self, assignment: ExecAssignment) -> Pool | tuple[RejectReason, str]:
        """The pool that an assignment comes to, or why this worker can never run it."""
        if assignment.job.type not in self._known:
            return RejectReason.UNKNOWN_JOB_TYPE, unknown_type_message(assignment.job.type, self._known)
        if assignment.job.payload_ref is not None:
            return RejectReason.INVALID, "job.payload_ref: this worker has no resolver for references; send job.payload"
        name = resource_class(assignment)
        if name not in self._pools:
            return RejectReason.INVALID, f"resource_class: {name!r} is not known here; known: {', '.join(self._pools)}"
        return self._pools[name]

    def undecided(self, assignment: ExecAssignment, pool: Pool) -> bool:
        """Whether the pool is full, and the work that would make room for this assignment is not written yet."""
        if not self._v2 or self.draining or not pool.entering:
            return False
        return _makes_room_later(pool, assignment) and not pool.has(assignment.record_id)

    def decide(self, assignment: ExecAssignment, pool: Pool, now: float) -> AdmissionVerdict:
        """The decision with its inputs. With one to drop other work the place changes hands: see `give_back`."""
        arrival = _arrival(assignment)
        view = pool.view(arrival, draining=self.draining)
        if not self._v2:
            draining = Reject(RejectReason.DRAINING, DRAINING_MESSAGE, LONGEST_WAIT_MS)
            return AdmissionVerdict(draining if self.draining else Accept(), {"view": view.for_baseline()}, at=now)
        inputs = {"view": view, "newcomer": arrival, "rules_hash": pool.rules_hash}
        answer, place = admit(view, arrival, pool.rules), None
        if isinstance(answer, AcceptDropping):
            place = pool.queue.remove(answer.victim)
            pool.reserve(assignment.priority)
        return AdmissionVerdict(answer, inputs, place, now)

    def give_back(self, verdict: AdmissionVerdict | None, assignment: ExecAssignment, pool: Pool) -> None:
        """Undo the exchange of places of a decision to drop other work."""
        if verdict is not None and isinstance(verdict.answer, AcceptDropping):
            pool.release(assignment.priority)
            if verdict.place is not None:
                pool.put(verdict.place)


LOOKS_PER_S = 200
"""The number of assignments of a full class that a worker may give back in a second, to see what is behind them."""
RAREST = 16
"""Looks that find nothing for another class become rarer by this factor at most."""
NEARLY_FULL = 0.1
"""Looks past the head begin when less than this share of the places of a class is free."""
MOST_BACK_S = 5.0
"""The longest pause before an assignment that was given back is delivered again."""
UNBOUNDED = 1 << 30


class SharedRoom:
    """The room of one worker for assignments on the shared subject, where a stream keeps them."""

    def __init__(
        self, pools: Mapping[str, Pool], admissions: WorkerAdmission, undecided: Callable[[], int], *, clock: Clock
    ) -> None:
        """`undecided` counts arrivals that were read and have no place yet."""
        self.changed: Callable[[], None] = lambda: None
        self._pools = pools
        self._places = {
            name: refused_from(pool.rules)
            for name, pool in pools.items()
            if pool.queue.size is not None and pool.rules.policy is not RejectionPolicy.DROP_OLDEST
        }
        """The depths at which classes refuse an arrival for want of places, where they do."""
        self._admissions = admissions
        self._undecided = undecided
        self._clock = clock
        self._nearly_full: list[str] = []
        self._saved_since = clock.now()
        """The moment since when looks are saved up, `LOOKS_PER_S` at most."""
        self._rarer = 1
        self._vain_looks = 0

    def watch(self) -> None:
        """Tell the transport of every change from now on."""
        for pool in self._pools.values():
            pool.room_changed = self.update

    def update(self) -> None:
        """Tell the transport that there may be more room, or that the worker takes nothing any more."""
        self.free()  # so that it is known since when a class is full
        self.changed()

    @property
    def is_open(self) -> bool:
        return not self._admissions.draining

    def free(self) -> int:
        """
        The number of assignments to pull now.

        Looks are saved up only while a class is nearly full: what is given back for a class that is full for a moment
        would be missing there in the next.
        """
        if self._admissions.draining:
            return 0
        now, fewest, most = self._clock.now(), UNBOUNDED, 0
        self._nearly_full = []
        for name, places in self._places.items():
            room = self._room(self._pools[name], places)
            fewest, most = min(fewest, room), max(most, room)
            if room < NEARLY_FULL * places:
                self._nearly_full.append(name)
        if self._nearly_full:
            looks = int(min(1.0, (now - self._saved_since) / self._rarer) * LOOKS_PER_S)
            fewest = max(fewest, min(most, looks))
        else:
            self._saved_since = now
        return max(0, fewest - self._undecided())

    def took(self, pool: Pool) -> None:
        """Count an arrival that was admitted: for a class that would have been idle, looks are worth their while."""
        if self._nearly_full and pool.name not in self._nearly_full:
            self._rarer, self._vain_looks = 1, 0

    def _room(self, pool: Pool, places: int) -> int:
        """The number of arrivals that get a place or a free slot of this pool."""
        free = places - pool.queue.later
        return 0 if free <= 0 else max(0, free - pool.unstarted())

    def back_after(self, verdict: AdmissionVerdict | None) -> float | None:
        """The pause before an arrival that is given back is delivered again, in seconds; None: it is answered here."""
        answer = None if verdict is None else verdict.answer
        if not isinstance(answer, Reject):
            return None
        if answer.reason is RejectReason.DRAINING:
            return 0.0
        if not self._places or answer.reason not in (RejectReason.QUEUE_FULL, RejectReason.OVERLOADED):
            return None
        self._saved_since = max(self._saved_since, self._clock.now() - self._rarer) + self._rarer / LOOKS_PER_S
        self._vain_looks += 1
        if self._vain_looks >= LOOKS_PER_S:
            self._rarer, self._vain_looks = min(RAREST, 2 * self._rarer), 0
        return min(MOST_BACK_S, answer.retry_after_ms / 1000)


def _makes_room_later(pool: Pool, assignment: ExecAssignment) -> bool:
    """Whether the work that would make room for the arrival is being written: until it is, none can be chosen."""
    lowest = min(pool.entering)
    if not can_displace(_arrival(assignment), lowest, pool.rules) or not pool.is_full(pool.depth()):
        return False
    oldest = pool.oldest()
    return oldest is None or oldest.priority > lowest


def _arrival(assignment: ExecAssignment) -> Arrival:
    """The assignment as admission sees it."""
    deadline = assignment.options.deadline_ms
    return Arrival(assignment.priority, None if deadline is None else float(deadline), assignment.tenant_id or "")
