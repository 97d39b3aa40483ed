"""
What a router has taken on and not yet answered: waiting here, or sent to a worker.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from reefknot.core.messages import ExecAssignment
from reefknot.ports.work_queue import Held


class Pending:
    """One assignment on its way."""

    __slots__ = ("acked", "assignment", "held", "resource_class", "route", "sent_at", "since", "worker_id")

    def __init__(self, assignment: ExecAssignment, resource_class: str, now: float, held: Held) -> None:
        self.assignment = assignment
        self.resource_class = resource_class
        self.since = now
        self.held = held
        """The claim on the submission: only its holder may answer it."""
        self.worker_id: str | None = None
        self.sent_at = 0.0
        self.acked = False
        self.route = 0
        """How often it was sent: part of the message's id."""


class PendingTable:
    """All of them, by id; those that wait here also in their order."""

    def __init__(self) -> None:
        self._all: dict[str, Pending] = {}
        self._waiting: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def get(self, assignment_id: str) -> Pending | None:
        return self._all.get(assignment_id)

    def everyone(self) -> list[Pending]:
        return list(self._all.values())

    def add(self, assignment: ExecAssignment, resource_class: str, now: float, held: Held) -> Pending:
        pending = Pending(assignment, resource_class, now, held)
        self._all[assignment.assignment_id] = self._waiting[assignment.assignment_id] = pending
        return pending

    def next_waiting(self) -> Iterator[Pending]:
        """In the order they go out: priority, then age."""
        yield from sorted(self._waiting.values(), key=lambda one: (-one.assignment.priority, one.since))

    def sent(self, pending: Pending, worker_id: str, now: float) -> None:
        self._waiting.pop(pending.assignment.assignment_id, None)
        pending.worker_id, pending.sent_at, pending.acked = worker_id, now, False
        pending.route += 1

    def acked(self, pending: Pending) -> None:
        pending.acked = True

    def back(self, pending: Pending) -> None:
        """It waits here again."""
        pending.worker_id = None
        self._waiting[pending.assignment.assignment_id] = pending

    def remove(self, pending: Pending) -> None:
        self._all.pop(pending.assignment.assignment_id, None)
        self._waiting.pop(pending.assignment.assignment_id, None)

    def sent_to(self, workers: AbstractSet[str]) -> list[Pending]:
        return [one for one in self._all.values() if one.worker_id is not None and one.worker_id in workers]

    def unanswered(self, before: float) -> list[Pending]:
        return [
            one for one in self._all.values() if one.worker_id is not None and not one.acked and one.sent_at < before
        ]
