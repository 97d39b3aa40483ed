"""
What a router puts on record, and the ends that no worker gave.

Events go to the log in groups, a moment after what they tell of. They are built here, with everything that was known.
"""

from typing import Any

from reefknot.audit.journal import Journal, event_id
from reefknot.core.audit.event import Event, OperatorAction, Requeued, Routing, TimeoutOccurred, timestamp
from reefknot.core.messages import ExecAssignment
from reefknot.ports.clock import Clock
from reefknot.router.pending import Pending
from reefknot.runtime.batches import Batcher

AT_ONCE = 500


class Records:
    """Builds a router's events, and writes those that go with no other change."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self.journal = journal
        self._clock = clock
        self.gather: Batcher[Event] = Batcher("events could not be written", self._write, most=AT_ONCE)

    def put(self, event: Event) -> None:
        """On record soon, in one group with what else comes."""
        self.gather.put(event)

    async def _write(self, events: list[Event]) -> None:
        await self.journal.write(*events)

    def about(self, assignment: ExecAssignment) -> dict[str, Any]:
        return {
            "timestamp": timestamp(self._clock.wall()),
            "event_id": event_id(),
            "tenant_id": assignment.tenant_id,
            "trace_id": assignment.trace_id,
            "correlation_id": assignment.request_id,
            "work_id": assignment.assignment_id,
        }

    def routing(
        self, pending: Pending, worker_id: str | None, reason: str, inputs: dict[str, Any] | None = None
    ) -> Event:
        return Routing(**self.about(pending.assignment), worker_id=worker_id, reason=reason, inputs=inputs)

    def back(self, pending: Pending, why: str) -> Event:
        return Requeued(**self.about(pending.assignment), reason=why, generation=pending.route)

    def too_late(self, pending: Pending) -> Event:
        return TimeoutOccurred(
            **self.about(pending.assignment),
            operation=pending.assignment.job.type,
            attempt_number=0,
            timeout_seconds=(pending.assignment.options.deadline_ms or 0) / 1000,
            whole=True,
        )

    def cancelled(self, assignment: ExecAssignment, reason: str) -> Event:
        about = self.about(assignment)
        details = {"reason": reason}
        return OperatorAction(**about, actor="caller", action="cancel", subject=about["work_id"], details=details)
