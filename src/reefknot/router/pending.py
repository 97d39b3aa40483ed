"""
What a router has taken on and not yet answered: waiting here, or sent to a worker.
"""

from collections import Counter
from collections.abc import Set as AbstractSet
from math import inf

from reefknot.core.messages import ExecAssignment
from reefknot.ports.work_queue import Held
from reefknot.router.desk import TakenOn


class Pending:
    """One assignment on its way."""

    __slots__ = (
        "acked",
        "asked_at",
        "assignment",
        "called_off",
        "deadline_at",
        "held",
        "not_before",
        "refusal",
        "resource_class",
        "route",
        "sent_before",
        "since",
        "unsure_before",
        "worker_id",
    )

    def __init__(self, taken: TakenOn, resource_class: str, now: float) -> None:
        self.assignment: ExecAssignment = taken.assignment
        self.deadline_at = taken.deadline_at
        self.sent_before = taken.sent_before
        """Somebody may have it."""
        self.unsure_before = taken.sent_before
        """The same, as it was before it was last sent: a refusal proves that this one does not have it."""
        self.resource_class = resource_class
        self.since = now
        self.held: Held = taken.held
        """The claim on the submission: only its holder may answer it."""
        self.worker_id: str | None = None
        self.asked_at = 0.0
        """When it was last sent: to its worker, or to the same one again."""
        self.acked = False
        self.route = 0
        """How often it was sent: part of the message's id."""
        self.not_before: dict[str, float] = {}
        """Workers that refused it, and when they may be asked again: never, when they do not know the step."""
        self.refusal = ""
        self.called_off: str | None = None
        """The caller's reason, once it was called off: it is not sent to anybody any more."""

    @property
    def id(self) -> str:
        return self.assignment.assignment_id


class PendingTable:
    """All of them, by id; those that wait here also by themselves."""

    def __init__(self) -> None:
        self._all: dict[str, Pending] = {}
        self._waiting: dict[str, Pending] = {}
        self.of_class: Counter[str] = Counter()
        """How many of each class there are in all."""
        self.unspoken: Counter[tuple[str, str]] = Counter()
        """By worker and class: sent, and not a word about it yet."""

    def __len__(self) -> int:
        return len(self._all)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def get(self, assignment_id: str) -> Pending | None:
        return self._all.get(assignment_id)

    def everyone(self) -> list[Pending]:
        return list(self._all.values())

    def add(self, taken: TakenOn, resource_class: str, now: float) -> Pending:
        """Take it on. One that is here already only gets its newer claim."""
        known = self._all.get(taken.assignment.assignment_id)
        if known is not None:
            known.held = taken.held
            return known
        pending = Pending(taken, resource_class, now)
        self._all[pending.id] = self._waiting[pending.id] = pending
        self.of_class[resource_class] += 1
        return pending

    def next_waiting(self) -> list[Pending]:
        """In the order they go out: priority, then age."""
        return sorted(self._waiting.values(), key=lambda one: (-one.assignment.priority, one.since))

    def sent(self, pending: Pending, worker_id: str, now: float) -> None:
        self._spoken_of(pending)
        self._waiting.pop(pending.id, None)
        pending.worker_id, pending.asked_at, pending.acked = worker_id, now, False
        pending.route += 1
        self.unspoken[worker_id, pending.resource_class] += 1

    def asked_again(self, pending: Pending, now: float) -> None:
        pending.asked_at = now
        pending.route += 1

    def acked(self, pending: Pending) -> None:
        self._spoken_of(pending)
        pending.acked = True

    def back(self, pending: Pending) -> None:
        """It waits here again."""
        self._spoken_of(pending)
        pending.worker_id, pending.acked = None, False
        self._waiting[pending.id] = pending

    def refused(self, pending: Pending, worker_id: str, until: float, message: str) -> None:
        """This worker does not want it before then."""
        pending.not_before[worker_id] = until
        pending.refusal = message
        pending.sent_before = pending.unsure_before
        self.back(pending)

    def remove(self, pending: Pending) -> bool:
        """Out of the table. False when it was not in it any more."""
        if self._all.get(pending.id) is not pending:
            return False
        self._spoken_of(pending)
        del self._all[pending.id]
        self.of_class[pending.resource_class] -= 1
        self._waiting.pop(pending.id, None)
        return True

    def sent_to(self, workers: AbstractSet[str]) -> list[Pending]:
        return [one for one in self._all.values() if one.worker_id is not None and one.worker_id in workers]

    def silent(self, *, unacked_since: float, acked_since: float) -> list[Pending]:
        """Those that nobody spoke of for long: sent and not acked, or acked and without a result."""
        return [
            one
            for one in self._all.values()
            if one.worker_id is not None and one.asked_at < (acked_since if one.acked else unacked_since)
        ]

    def known_nowhere(self, pending: Pending, workers: AbstractSet[str]) -> bool:
        """Whether every one of these workers said that it does not know the step."""
        return bool(workers) and all(pending.not_before.get(one) == inf for one in workers)

    def _spoken_of(self, pending: Pending) -> None:
        if pending.worker_id is not None and not pending.acked:
            key = pending.worker_id, pending.resource_class
            self.unspoken[key] -= 1
            if self.unspoken[key] <= 0:
                del self.unspoken[key]
