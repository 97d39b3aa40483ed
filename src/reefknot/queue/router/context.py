"""
The context of one router: what all of its parts share, and the events it writes.

Events that go with no change of the store are written with the next transaction.
"""

from typing import Any

from msgspec import Struct

from reefknot.audit.assignments import briefly_about
from reefknot.audit.journal import Journal, about_assignment
from reefknot.audit.model.event import Event, OperatorAction, Requeued, Routing, TimeoutOccurred
from reefknot.core.clock import Clock
from reefknot.queue.model.messages import ExecAssignment
from reefknot.queue.port.transport import Transport
from reefknot.queue.port.work_queue import WorkQueue
from reefknot.queue.router.pending import Pending, PendingTable
from reefknot.queue.router.settings import RouterSettings


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


def expired_event(assignment: ExecAssignment, wall: float) -> Event:
    """The event of an assignment that nobody had ended by its deadline."""
    return TimeoutOccurred(
        **about_assignment(assignment, wall),
        operation=assignment.job.type,
        attempt_number=0,
        timeout_seconds=(assignment.options.deadline_ms or 0) / 1000,
        whole=True,
    )


def cancelled_event(about: dict[str, Any], reason: str, *, who: str) -> Event:
    return OperatorAction(**about, actor=who, action="cancel", subject=about["work_id"], details={"reason": reason})
