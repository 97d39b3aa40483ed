"""
How fast work leaves, class by class, and who may still come in.

While every slot of a class is taken, the time between two ends tells what the workers can do; at other times it tells
how little there is to do, and is not counted. From it a caller is told when to come back, or not to wait at all.
"""

from reefknot.core.messages import ExecAssignment, ExecResult, ResultStatus, resource_class
from reefknot.core.overload.admission import (
    KNOWN_AFTER,
    Admission,
    Newcomer,
    QueueView,
    Reject,
    RejectReason,
    Rules,
    admit,
    retry_after_ms,
    would_miss_deadline,
)
from reefknot.ports.clock import Clock
from reefknot.router.health import MOST_CLASSES, HealthTable
from reefknot.router.pending import Pending, PendingTable

MISSES = "Assignment would miss its deadline in the queue, rejecting assignment"
MARGIN = 0.7
"""Of the wait that the rules allow. The worker judges again, by its own times; who passes here should pass there."""
_SMOOTHING = 0.1


class _Pace:
    """One class."""

    __slots__ = ("busy", "intervals", "last_end", "mean_interval_ms", "mean_step_ms", "steps")

    def __init__(self) -> None:
        self.busy = False
        self.last_end = 0.0
        self.intervals = 0
        self.mean_interval_ms = 0.0
        self.steps = 0
        self.mean_step_ms = 0.0

    def ended(self, now: float, *, busy: bool, step_ms: object) -> None:
        if busy and self.busy:
            self.intervals += 1
            share = max(_SMOOTHING, 1 / self.intervals)
            self.mean_interval_ms += ((now - self.last_end) * 1000 - self.mean_interval_ms) * share
        if isinstance(step_ms, int | float):
            self.steps += 1
            self.mean_step_ms += (step_ms - self.mean_step_ms) * max(_SMOOTHING, 1 / self.steps)
        self.busy, self.last_end = busy, now

    def view(self, depth: int, slots: int) -> QueueView:
        """A line of this depth. Until intervals are known the steps' own times stand in: work leaves no faster."""
        if self.intervals >= KNOWN_AFTER:
            return QueueView(depth, 1, self.intervals, self.mean_interval_ms)
        return QueueView(depth, max(1, slots), self.steps, self.mean_step_ms)


class Door:
    """The router's admission: by count and, for who has a deadline, by time."""

    def __init__(self, rules: Rules, *, table: PendingTable, health: HealthTable, clock: Clock) -> None:
        self._rules = rules
        self._table = table
        self._health = health
        self._clock = clock
        self._paces: dict[str, _Pace] = {}
        self.unclaimed: set[str] = set()
        """Handed in here, and not yet in the table."""

    def waiting(self) -> int:
        """What waits at the router."""
        return self._table.waiting + len(self.unclaimed)

    def admission(self, assignment: ExecAssignment) -> Admission:
        """By count, as many as may wait here; by time, with all that is ahead of it at the workers too."""
        name = resource_class(assignment)
        pace, slots = self._paces.get(name) or _Pace(), self._slots(name)
        line = self._line(name, pace, slots)
        deadline = assignment.options.deadline_ms
        newcomer = Newcomer(assignment.priority, None if deadline is None else MARGIN * deadline)
        if would_miss_deadline(line, newcomer, self._rules):
            return Reject(RejectReason.WOULD_MISS_DEADLINE, MISSES, retry_after_ms(line))
        return admit(pace.view(self.waiting(), slots), Newcomer(newcomer.priority), self._rules)

    def lines(self) -> dict[str, QueueView]:
        """All that is ahead of a newcomer, by class, for whoever asks from elsewhere."""
        return {name: self._line(name, pace, self._slots(name)) for name, pace in self._paces.items()}

    def _line(self, name: str, pace: _Pace, slots: int) -> QueueView:
        return pace.view(max(0, self._ahead(name) - slots), slots)

    def ended(self, pending: Pending, result: ExecResult) -> None:
        """A worker ended this one, which is still in the table."""
        name = pending.resource_class
        if name not in self._paces and len(self._paces) >= MOST_CLASSES:
            return
        busy = self._ahead(name) >= self._slots(name) > 0
        step_ms = result.latency_ms if result.status is ResultStatus.SUCCESS else None
        self._paces.setdefault(name, _Pace()).ended(self._clock.now(), busy=busy, step_ms=step_ms)

    def _ahead(self, name: str) -> int:
        """Taken on and not ended, wherever it is."""
        return self._table.of_class[name] + len(self.unclaimed)

    def _slots(self, name: str) -> int:
        return self._health.capacity(name, self._clock.now())
