"""
The choice of a worker for an assignment.

A router chooses by the last reports of the workers: healthy ones first, then degraded ones; an overloaded one is
skipped half of the time, a critical one gets no work except an occasional probe, and a silent one is gone. Time and
chance are arguments.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from enum import StrEnum
from heapq import heapify, heappop, heapreplace, nsmallest
from math import inf
from typing import Any

from msgspec import Struct, structs, to_builtins

from reefknot.queue.model.admission import OverloadStatus

HEARTBEAT_S = 1.0
MISSED_UNTIL_GONE = 3
PROBE_EVERY_S = 2.0
MOST_UNACKED = 64
"""Most unanswered assignments to one worker. More would be sent on outdated health."""
SHORT_MS = 5.0
MOST_TOGETHER = 64
"""Most assignments at one worker that has a run, if it does them within `SHORT_MS`: waking another would cost more."""
RUN_S = 0.25
"""How long a run goes on: then the next worker has its turn, also while a lone caller keeps one busy."""


class WorkerHealth(Struct, frozen=True):
    """Health of one worker in one resource class. A worker that never sent a heartbeat is a CP1 peer."""

    worker_id: str
    status: OverloadStatus = OverloadStatus.HEALTHY
    queue_depth: int = 0
    active: int = 0
    capacity: int = 1
    heard_at: float = 0.0
    heartbeat_at: float | None = None
    probed_at: float = float("-inf")
    unacked: int = 0
    """Assignments sent to it that are neither acked nor answered yet."""

    def gone(self, now: float) -> bool:
        """Whether three heartbeats were missed. A worker that never sent one is unknown, not gone."""
        return now > self.gone_after

    @property
    def gone_after(self) -> float:
        """The time at which the worker counts as gone, without further news."""
        return inf if self.heartbeat_at is None else self.heartbeat_at + MISSED_UNTIL_GONE * HEARTBEAT_S

    @property
    def taken(self) -> int:
        """The number of assignments at the worker, including those on their way."""
        return self.queue_depth + self.active + self.unacked

    @property
    def load(self) -> float:
        """Load relative to capacity, including assignments on their way."""
        return self.taken / max(1, self.capacity)


class WorkerState(StrEnum):
    """State of a worker as displays show it. Its load is shown separately, for each of its classes."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    GONE = "gone"


def worker_state(*, draining: bool, leaving: bool, gone: bool = False) -> WorkerState:
    """The state that follows from a worker's report: `draining` accepts nothing, `leaving` also returns its queue."""
    if gone:
        return WorkerState.GONE
    if not draining:
        return WorkerState.RUNNING
    return WorkerState.DRAINING if leaving else WorkerState.PAUSED


class Chosen(Struct, frozen=True):
    """The worker that gets the assignment. `probe`: to see whether a critical worker has recovered."""

    worker_id: str
    probe: bool = False


class Why(StrEnum):
    """Reason why an assignment waits at the router."""

    NO_WORKER = "no worker is there"
    CRITICAL = "every worker is critical"
    PASSED_OVER = "every worker is overloaded, and this one waits"
    UNACKED = "enough is on its way without an answer"


class Nobody(Struct, frozen=True):
    """No worker can take the assignment now: it waits at the router."""

    why: Why


def too_late_everywhere(workers: Iterable[WorkerHealth], refused_by: AbstractSet[str], now: float) -> bool:
    """
    Whether every known worker has said that the work would miss its deadline.

    New arrivals have more time left, so an assignment that kept waiting would be overtaken until its time is over.
    """
    return {one.worker_id for one in workers if not one.gone(now)} <= refused_by


class Run(Struct, frozen=True):
    """Short assignments that go to one worker in a row, round after round."""

    worker_id: str = ""
    given: int = 0
    began: float = float("-inf")

    def room(self, together: int, held: int, now: float) -> int:
        """The number that its worker may get while `held` have not ended there; 0: the run is over."""
        return max(0, together - held) if together > 1 and now - self.began < RUN_S else 0

    def after(self, choice: Chosen, now: float, *, is_next: bool) -> "Run":
        """The run after this choice: `is_next` in it, or the first of a new one."""
        if is_next:
            return structs.replace(self, given=self.given + 1)
        return Run(choice.worker_id, 1, now)


NO_RUN = Run()


class Candidate(Struct, frozen=True, array_like=True):
    """A worker in a recorded choice: a list of these four, of which the last may be missing."""

    worker_id: str
    status: OverloadStatus = OverloadStatus.HEALTHY
    taken: int = 0
    capacity: int = 1


MOST_RECORDED = 3
"""Workers that the inputs of a choice name: the chosen one, and the next."""


class RoutingInputs(Struct, frozen=True, omit_defaults=True):
    """
    The inputs of one choice: the best of `workers`, each as its id, its status, how much it has, and its capacity.

    `after` is the worker that was chosen before, which decides among equals; `draw` is there if chance decided. `route`
    counts how often the assignment was sent; `willing` of the workers had not refused it. `together` counts those right
    before it that went to the same worker: it follows them because they are short, and no other worker is named.
    """

    best: tuple[Candidate, ...]
    workers: int = 1
    willing: int = 1
    after: str = ""
    draw: float | None = None
    route: int = 1
    together: int = 0

    def recorded(self) -> dict[str, Any]:
        """Inputs as an event has them, without the figures of a healthy worker that had no rival."""
        inputs: dict[str, Any] = to_builtins(self)
        if len(self.best) == 1 and self.best[0].status is OverloadStatus.HEALTHY:
            inputs["best"] = ((self.best[0].worker_id,),)
        return inputs

    def choose(self) -> Chosen | Nobody:
        """The choice by these inputs, decided again."""
        workers = [
            WorkerHealth(one.worker_id, one.status, one.taken, capacity=max(1, one.capacity)) for one in self.best
        ]
        return WorkerRanking(workers, 0.0, self.after).choose(self.draw or 0.0)


class WorkerRanking:
    """
    Chooses workers of one class, one assignment after the other.

    Each choice counts as load of the one that was chosen, so the next assignment sees it. Equals take turns, from
    the one `after` the last that was chosen. Up to `together` in a row go to the same healthy worker, and a `run` goes
    on at its worker for as many as it has `room`. A choice costs the logarithm of the number of workers, not the
    number.
    """

    __slots__ = ("_able", "_after", "_anybody", "_given", "_held", "_left", "_line", "_probes", "_together")

    def __init__(
        self,
        workers: Iterable[WorkerHealth],
        now: float,
        after: str = "",
        *,
        together: int = 1,
        run: Run = NO_RUN,
        room: int = 0,
    ) -> None:
        here = [one for one in workers if not one.gone(now)]
        sick = [one for one in here if one.status is OverloadStatus.CRITICAL]
        due = [one for one in sick if now - one.probed_at >= PROBE_EVERY_S]
        self._anybody = bool(here)
        self._able = len(here) > len(sick)
        self._after = after
        self._together = together
        self._held, self._given, self._left = "", 0, 0
        """The last worker, how many in a row it has got, and how many more it gets, which count as its load already."""
        self._probes = sorted(((one.load, one.worker_id, one) for one in due), key=lambda one: one[:2], reverse=True)
        if room:
            here = [self._going_on(one, run, room) if one.worker_id == run.worker_id else one for one in here]
        self._line = [
            (one.status.severity, one.load, one.worker_id <= after, one.worker_id, one.unacked, one)
            for one in here
            if one.status is not OverloadStatus.CRITICAL and one.unacked < MOST_UNACKED
        ]
        heapify(self._line)

    def _going_on(self, one: WorkerHealth, run: Run, room: int) -> WorkerHealth:
        """The worker of a run with what it gets next, if it is well and has room."""
        number = min(room, MOST_UNACKED - one.unacked)
        if one.status is not OverloadStatus.HEALTHY or number <= 0:
            return one
        self._held, self._given, self._left = one.worker_id, run.given, number
        return structs.replace(one, unacked=one.unacked + number)

    @property
    def needs_draw(self) -> bool:
        """Whether chance decides about the next assignment: the best worker is overloaded."""
        is_open = not self._probes and not self._left and bool(self._line)
        return is_open and self._line[0][0] == OverloadStatus.OVERLOADED.severity

    def choose(self, draw: float) -> Chosen | Nobody:
        """The worker of the next assignment. `draw` matters only if it `needs_draw`."""
        if self._probes:
            return Chosen(self._probes.pop()[1], probe=True)
        if self._left:
            self._given, self._left = self._given + 1, self._left - 1
            return Chosen(self._held)
        if not self._line:
            return Nobody(self._why())
        severity, _, waits, worker_id, unacked, health = self._line[0]
        if severity == OverloadStatus.OVERLOADED.severity and draw < 0.5:
            return Nobody(Why.PASSED_OVER)
        number = min(self._together, MOST_UNACKED - unacked) if severity == OverloadStatus.HEALTHY.severity else 1
        if unacked + number < MOST_UNACKED:
            counted = structs.replace(health, unacked=unacked + number)
            heapreplace(self._line, (severity, counted.load, waits, worker_id, unacked + number, counted))
        else:
            heappop(self._line)
        self._held, self._given, self._left = worker_id, 1, number - 1
        return Chosen(worker_id)

    def inputs(self, *, workers: int = 1, willing: int = 1, draw: float | None = None, route: int = 1) -> RoutingInputs:
        """The inputs of the next choice. In a heap, the first three are among the first seven."""
        if self._left and not self._probes:
            return RoutingInputs((Candidate(self._held),), workers, willing, route=route, together=self._given)
        if self._probes:
            best = [health for _, _, health in self._probes[-1 : -MOST_RECORDED - 1 : -1]]
        elif len(self._line) == 1:
            best = [self._line[0][-1]]
        else:
            best = [one[-1] for one in nsmallest(MOST_RECORDED, self._line[:7])]
        recorded = tuple([Candidate(one.worker_id, one.status, one.taken, max(1, one.capacity)) for one in best])
        return RoutingInputs(recorded, workers, willing, self._after if len(recorded) > 1 else "", draw, route)

    def _why(self) -> Why:
        if not self._anybody:
            return Why.NO_WORKER
        return Why.UNACKED if self._able else Why.CRITICAL
