"""
Starts of work at a worker that a limit or a pause may hold up.

An assignment under a limit comes with one start, which its router has granted. The worker tells it when the step
begins, and when an attempt is over that another one follows. Whatever has no start (a retry, work that was here before
a restart) goes back to the router when it is due: it spends nothing, keeps its age, and comes again with a start.
"""

from collections.abc import Mapping

from msgspec import structs

from reefknot.audit.journal import about_item
from reefknot.audit.model.event import Requeued
from reefknot.queue.model.messages import (
    BETWEEN_ATTEMPTS,
    LIMITED,
    NOT_STARTED,
    STARTED,
    AckStatus,
    ExecAssignment,
    ExecAssignmentAck,
)
from reefknot.queue.model.results import waits_for
from reefknot.queue.model.work import Returned, Snooze, TryAgain, WorkItem
from reefknot.queue.pauses import Pauses
from reefknot.queue.worker.context import WorkerContext, WorkerMessage
from reefknot.queue.worker.records import AcceptedWork, AdmittedAs, AttemptReport
from reefknot.runtime.tasks import run_in_background

MOST_STARTS = 20_000
WAITS_FOR_LIMIT = "it waits for a limit"


class GrantedStarts:
    """The starts that one worker was granted, and the pauses that it obeys."""

    def __init__(self, context: WorkerContext, pauses: Pauses | None = None) -> None:
        self._context = context
        self.pauses = Pauses() if pauses is None else pauses
        self._arrived: dict[str, None] = {}
        """By record: assignments that came with a start, and have no place yet."""
        self._begun: dict[str, bool] = {}
        """By record: work that was accepted with a start, and whether it has begun."""

    def arrived(self, read: object, headers: Mapping[str, str] | None) -> None:
        """Note the start that an assignment comes with, if it does."""
        if headers and LIMITED in headers and isinstance(read, ExecAssignment):
            if len(self._arrived) >= MOST_STARTS:  # those that were refused
                del self._arrived[next(iter(self._arrived))]
            self._arrived[read.record_id] = None

    def admitted(self, assignment: ExecAssignment, terms: AdmittedAs) -> AdmittedAs:
        """The terms of an admission; those of an assignment that came with a start say so."""
        if not self._arrived or assignment.record_id not in self._arrived:
            return terms
        del self._arrived[assignment.record_id]
        return structs.replace(terms, limited=True)

    def kept(self, work: AcceptedWork) -> None:
        """Note that work is in the store, with its start if it came with one."""
        if work.admitted.limited:
            if len(self._begun) >= MOST_STARTS:  # those that were cancelled before they ended
                del self._begun[next(iter(self._begun))]
            self._begun[work.assignment.record_id] = False

    def held_up(self, item: WorkItem, work: AcceptedWork) -> AttemptReport | None:
        """The return of work to its router that is paused, or under a limit without a start; None when it may begin."""
        wall = self._context.clock.wall()
        pause = self.pauses.of(item.kind, item.tenant_id, int(wall * 1000)) if self.pauses.all else None
        if pause is None and (not work.admitted.limited or self._begun.get(item.id) is False):
            return None
        reason = WAITS_FOR_LIMIT if pause is None else f"{pause} is paused"
        event = Requeued(**about_item(item, wall), reason=reason, generation=item.generation)
        kept = item.reason if waits_for(item) is not None else ""  # since when its destination has been down
        return AttemptReport(Returned(kept, is_held=True), (event,))

    def begin(self, assignment: ExecAssignment) -> None:
        """Use the start of work under a limit, and tell its router."""
        if self._begun and assignment.record_id in self._begun:
            self._begun[assignment.record_id] = True
            self._announce(assignment, STARTED)

    def ended(self, item: WorkItem, work: AcceptedWork, report: AttemptReport | None) -> None:
        """Tell the router that work under a limit does not run any more, and has not ended."""
        if not work.admitted.limited:
            return
        has_begun = self._begun.pop(item.id, True)
        if report is not None and isinstance(report.settled, TryAgain | Snooze | Returned):
            self._announce(work.assignment, BETWEEN_ATTEMPTS if has_begun else NOT_STARTED)

    def _announce(self, assignment: ExecAssignment, message: str) -> None:
        name = self._context.worker_id if self._context.settings.queue_v2 else None
        ack = ExecAssignmentAck(assignment.assignment_id, AckStatus.ACCEPTED, message, worker_id=name)
        run_in_background(self._context.send_all([WorkerMessage.of_ack(ack)]), "telling of a start")
