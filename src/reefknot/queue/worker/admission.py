"""
Admission to the pools of a worker: the decision, and the exchange of places when other work is dropped.

A decision to drop other work takes its place at once and reserves one for the arrival, before anything is awaited: so
no two arrivals drop the same work, and the depth never exceeds the size. Work that is being written cannot be dropped
yet; an arrival that would have to choose it waits until it is written.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from reefknot.audit.model.event import Event
from reefknot.queue.model.admission import (
    DRAINING_MESSAGE,
    LONGEST_WAIT_MS,
    Accept,
    AcceptDropping,
    Admission,
    Arrival,
    Reject,
    RejectReason,
    admit,
    can_displace,
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


def _makes_room_later(pool: Pool, assignment: ExecAssignment) -> bool:
    """Whether the work that would make room for the arrival is being written: until it is, none can be chosen."""
    if not pool.is_full(pool.depth()):
        return False
    lowest, oldest = min(pool.entering), pool.oldest()
    return can_displace(_arrival(assignment), lowest, pool.rules) and (oldest is None or oldest.priority > lowest)


def _arrival(assignment: ExecAssignment) -> Arrival:
    """The assignment as admission sees it."""
    deadline = assignment.options.deadline_ms
    return Arrival(assignment.priority, None if deadline is None else float(deadline), assignment.tenant_id or "")
