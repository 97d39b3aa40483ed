"""
What a router has taken on and not yet answered: waiting here, or sent to a worker.

Nobody looks through all of it for each assignment: what waits stands in one line for each class, deadlines in a heap.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from msgspec import Struct

from reefknot.core.messages import ExecAssignment
from reefknot.ports.work_queue import Held


class TakenOn(Struct, frozen=True):
    """A submission that this router has claimed. `deadline_at` is milliseconds UTC."""

    assignment: ExecAssignment
    held: Held
    deadline_at: int | None = None
    sent_before: bool = False
    """Another router had it, or an earlier life of this one: a worker may have its result."""
    body: bytes = b""
    """The assignment as it was handed in, for those who pass it on as it is."""


_GARBAGE = 1000
"""Entries of a heap that may stand for nobody any more."""


class Pending:
    """One assignment on its way."""

    __slots__ = (
        "acked",
        "asked_at",
        "assignment",
        "body",
        "called_off",
        "deadline_at",
        "held",
        "not_before",
        "place",
        "refusal",
        "resource_class",
        "route",
        "sent_before",
        "since",
        "too_late_for",
        "unsure_before",
        "worker_id",
    )

    def __init__(self, taken: TakenOn, resource_class: str, now: float) -> None:
        self.assignment: ExecAssignment = taken.assignment
        self.body = taken.body
        """The assignment as it was handed in."""
        self.deadline_at = taken.deadline_at
        self.sent_before = taken.sent_before
        """Somebody may have it."""
        self.unsure_before = taken.sent_before
        """The same, as it was before it was last sent: a refusal proves that this one does not have it."""
        self.resource_class = resource_class
        self.since = now
        self.place = 0
        """Its place in the line of its class; 0 when it stands in none."""
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
        self.too_late_for: set[str] = set()
        """Workers that said that it would miss its deadline with them. It gets no younger."""
        self.refusal = ""
        self.called_off: str | None = None
        """The caller's reason, once it was called off: it is not sent to anybody any more."""

    @property
    def id(self) -> str:
        return self.assignment.assignment_id


_Stand = tuple[int, float, int, Pending]
"""Priority, age, place: the order of a line. A place is never given twice."""


class Line:
    """Those of one class that wait, by priority and then by age. Who left without a word is passed over."""

    def __init__(self) -> None:
        self._heap: list[_Stand] = []

    def put(self, pending: Pending, place: int) -> None:
        pending.place = place
        heappush(self._heap, (-pending.assignment.priority, pending.since, place, pending))

    def next(self) -> Pending | None:
        """The next one, out of the line."""
        while self._heap:
            stand = heappop(self._heap)
            if stand[3].place == stand[2]:
                stand[3].place = 0
                return stand[3]
        return None

    def everyone(self) -> list[Pending]:
        """All of them, where they stand."""
        return [stand[3] for stand in self._heap if stand[3].place == stand[2]]

    def tidy(self, waiting: int) -> None:
        """Those who left must not outnumber those who wait."""
        if len(self._heap) > 2 * waiting + _GARBAGE:
            self._heap = [stand for stand in self._heap if stand[3].place == stand[2]]
            heapify(self._heap)


class PendingTable:
    """All of them, by id; those that wait here also in a line for each class."""

    def __init__(self) -> None:
        self._all: dict[str, Pending] = {}
        self._waiting: dict[str, Pending] = {}
        self._lines: dict[str, Line] = {}
        self._next_place = count(1).__next__
        self._looks: list[tuple[int, int, Pending]] = []
        self.off: list[Pending] = []
        """Called off while a worker had it, and back here."""
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

    def waits(self, pending: Pending) -> bool:
        return self._waiting.get(pending.id) is pending

    def everyone(self) -> list[Pending]:
        return list(self._all.values())

    def add(self, taken: TakenOn, resource_class: str, now: float) -> Pending:
        """Take it on. One that is here already only gets its newer claim."""
        known = self._all.get(taken.assignment.assignment_id)
        if known is not None:
            known.held = taken.held
            return known
        pending = Pending(taken, resource_class, now)
        self._all[pending.id] = pending
        self.of_class[resource_class] += 1
        self._stand(pending)
        return pending

    def _stand(self, pending: Pending) -> None:
        self._waiting[pending.id] = pending
        self.line_up(pending)
        if pending.deadline_at is not None:
            self.look_at(pending, pending.deadline_at)

    def line_up(self, pending: Pending) -> None:
        """Back into the line, at the place that its priority and its age give it."""
        line = self._lines.get(pending.resource_class)
        if line is None:
            line = self._lines[pending.resource_class] = Line()
        line.put(pending, self._next_place())
        line.tidy(len(self._waiting))

    def lines(self) -> Iterator[tuple[str, Line]]:
        """The lines in which somebody may stand. Those without anybody's work are forgotten."""
        for name, line in list(self._lines.items()):
            if self.of_class[name] > 0:
                yield name, line
            else:
                del self._lines[name], self.of_class[name]

    def look_at(self, pending: Pending, wall_ms: int) -> None:
        """At this time, should it still wait here, its deadline matters."""
        heappush(self._looks, (wall_ms, self._next_place(), pending))
        if len(self._looks) > 2 * len(self._all) + _GARBAGE:
            self._looks = [one for one in self._looks if self._all.get(one[2].id) is one[2]]
            heapify(self._looks)

    def overdue(self, wall_ms: int) -> list[Pending]:
        """Those that wait here and are to be looked at by now."""
        found = []
        while self._looks and self._looks[0][0] <= wall_ms:
            pending = heappop(self._looks)[2]
            if self.waits(pending):
                found.append(pending)
        return found

    def sent(self, pending: Pending, worker_id: str, now: float) -> None:
        self._spoken_of(pending)
        self._waiting.pop(pending.id, None)
        pending.place = 0
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
        """It waits here again, unless it has ended."""
        if self._all.get(pending.id) is not pending:
            return
        self._spoken_of(pending)
        pending.worker_id, pending.acked = None, False
        if pending.called_off is not None:
            self.off.append(pending)
        if not self.waits(pending):
            self._stand(pending)

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
        pending.place = 0
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
