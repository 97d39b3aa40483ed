"""
The router's admission: the health of its workers, their throughput, and whether an arrival would miss its deadline.

Acks, results and heartbeats update the health table; silence and time make it expire. Throughput is measured only while
every slot of a class is taken: at other times the time between two ends tells how little there is to do. Callers in
other processes are refused by the same rule, from what routers last published.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from reefknot.core.messages import (
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    Heartbeat,
    ResultStatus,
    resource_class,
)
from reefknot.core.overload.admission import (
    KNOWN_AFTER,
    MISSES_MESSAGE,
    Admission,
    Arrival,
    OverloadStatus,
    QueueView,
    Reject,
    RejectReason,
    Rules,
    admit,
    retry_after_ms,
    would_miss_deadline,
)
from reefknot.core.routing import WorkerHealth
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.router.pending import Pending, PendingTable

MOST_WORKERS = 10_000
MOST_CLASSES = 64
FORGET_AFTER_S = 300.0


class HealthTable:
    """The health of workers, by class and id. It decides nothing: `WorkerRanking.choose` does."""

    def __init__(self) -> None:
        self.store = ""
        """The store of this router; see `Heartbeat.store`."""
        self._sharing: set[str] = set()
        self._leaving: set[str] = set()
        self._entries: dict[str, dict[str, WorkerHealth]] = {}
        self._incarnations: dict[str, str] = {}
        self._slots: dict[str, tuple[int, float]] = {}
        """By class: all slots, and until when the number holds if there is no news."""
        self.draining: set[str] = set()

    def record_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """Update a worker's health. True when it restarted: what it was sent may be in its store only."""
        worker_id = beat.worker_id
        self._slots.clear()
        restarted = worker_id in self._incarnations and self._incarnations[worker_id] != beat.incarnation
        restarted = restarted or (worker_id in self.draining and not beat.draining)
        for name, reported in list(beat.classes.items())[:MOST_CLASSES]:
            before = self._entries.get(name, {}).get(worker_id) or WorkerHealth(worker_id)
            changed = msgspec.structs.replace(
                before,
                status=reported.status,
                queue_depth=reported.queue_depth,
                active=reported.active,
                capacity=reported.capacity,
                heard_at=now,
                heartbeat_at=now,
            )
            if self._put(name, changed):
                self._incarnations[worker_id] = beat.incarnation
                (self.draining.add if beat.draining else self.draining.discard)(worker_id)
                (self._leaving.add if beat.leaving else self._leaving.discard)(worker_id)
                is_shared = bool(beat.store) and beat.store == self.store
                (self._sharing.add if is_shared else self._sharing.discard)(worker_id)
        return restarted

    def is_live(self, worker_id: str, now: float) -> bool:
        """Whether the worker is known, and not gone."""
        found = [by_id[worker_id] for by_id in self._entries.values() if worker_id in by_id]
        return any(not one.gone(now) for one in found)

    def keeps_queue(self, worker_id: str, now: float) -> bool:
        """Whether queued work is left to the worker: it is live, and not leaving."""
        return worker_id not in self._leaving and self.is_live(worker_id, now)

    def shares_store(self, worker_id: str) -> bool:
        """Whether the worker keeps its results in this router's store."""
        return worker_id in self._sharing

    def record_ack(self, worker_id: str, name: str, ack: ExecAssignmentAck, now: float) -> None:
        """Update status and depth from an ack."""
        before = self._entries.get(name, {}).get(worker_id)
        if before is None:
            return
        depth = ack.queue_depth if isinstance(ack.queue_depth, int) else before.queue_depth
        status = ack.overload_status or before.status
        self._put(name, msgspec.structs.replace(before, status=status, queue_depth=depth, heard_at=now))

    def record_result(self, worker_id: str, name: str, result: ExecResult, now: float) -> None:
        before = self._entries.get(name, {}).get(worker_id)
        if before is not None and result.overload_status is not None:
            self._put(name, msgspec.structs.replace(before, status=result.overload_status, heard_at=now))

    def probed(self, worker_id: str, name: str, now: float) -> None:
        before = self._entries.get(name, {}).get(worker_id)
        if before is not None:
            self._put(name, msgspec.structs.replace(before, probed_at=now))

    def of_class(self, name: str, unacked: Mapping[tuple[str, str], int]) -> list[WorkerHealth]:
        """The workers of a class that accept work, each with the number of unacked assignments."""
        return [
            msgspec.structs.replace(one, unacked=unacked.get((one.worker_id, name), 0))
            for one in self._entries.get(name, {}).values()
            if one.worker_id not in self.draining
        ]

    def gone(self, now: float) -> set[str]:
        """Workers whose heartbeats stopped."""
        return {one.worker_id for by_id in self._entries.values() for one in by_id.values() if one.gone(now)}

    def forget(self, now: float) -> None:
        """Drop workers that have been gone for long."""
        self._slots.clear()
        for name, by_id in list(self._entries.items()):
            for worker_id, one in list(by_id.items()):
                if one.gone(now) and now - one.heard_at > FORGET_AFTER_S:
                    del by_id[worker_id]
            if not by_id:
                del self._entries[name]
        here = {worker_id for by_id in self._entries.values() for worker_id in by_id}
        for worker_id in self._incarnations.keys() - here:
            del self._incarnations[worker_id]
        self.draining &= here
        self._sharing &= here
        self._leaving &= here

    def live(self, now: float) -> int:
        """The number of live workers, which share the fleet's throttle."""
        return len({one.worker_id for by_id in self._entries.values() for one in by_id.values() if not one.gone(now)})

    def capacity(self, name: str, now: float) -> int:
        """The slots of a class, of all live workers."""
        slots, until = self._slots.get(name, (0, -inf))
        if now <= until:
            return slots
        here = [one for one in self._entries.get(name, {}).values() if not one.gone(now)]
        slots = sum(one.capacity for one in here)
        until = min((one.gone_after for one in here), default=inf)
        self._slots[name] = slots, until
        return slots

    def knows(self, name: str) -> bool:
        """Whether a worker of this class is known."""
        return name in self._entries

    def classes(self, now: float) -> list[str]:
        """The classes of all live workers."""
        return sorted(name for name, by_id in self._entries.items() if any(not one.gone(now) for one in by_id.values()))

    def status(self, worker_id: str, name: str) -> OverloadStatus | None:
        one = self._entries.get(name, {}).get(worker_id)
        return None if one is None else one.status

    def all(self) -> dict[str, dict[str, WorkerHealth]]:
        return {name: dict(by_id) for name, by_id in self._entries.items()}

    def _put(self, name: str, health: WorkerHealth) -> bool:
        if name not in self._entries and len(self._entries) >= MOST_CLASSES:
            return False
        by_id = self._entries.setdefault(name, {})
        if health.worker_id not in by_id and len(by_id) >= MOST_WORKERS:
            return False
        by_id[health.worker_id] = health
        return True


MARGIN = 0.7
"""Of the wait that the rules allow. The worker judges again, by its own times; who passes here should pass there."""
_SMOOTHING = 0.1


class Throughput:
    """The rate at which work of one class ends."""

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
        """A queue of this depth. Until intervals are known, the steps' own times stand in: work leaves no faster."""
        if self.intervals >= KNOWN_AFTER:
            return QueueView(depth, 1, self.intervals, self.mean_interval_ms)
        return QueueView(depth, max(1, slots), self.steps, self.mean_step_ms)


class RouterAdmission:
    """Admits arrivals by count and, if they have a deadline, by expected wait."""

    def __init__(self, rules: Rules, *, table: PendingTable, health: HealthTable, clock: Clock) -> None:
        self._rules = rules
        self._table = table
        self._health = health
        self._clock = clock
        self._throughputs: dict[str, Throughput] = {}
        self.unclaimed: set[str] = set()
        """Submitted here, and not yet in the table."""

    def waiting(self) -> int:
        """The number of assignments that wait at the router."""
        return self._table.waiting + len(self.unclaimed)

    def admit(self, assignment: ExecAssignment) -> Admission:
        """Whether the arrival comes in: by the count of those that wait here, and by the time of all ahead of it."""
        name = resource_class(assignment)
        throughput, slots = self._throughputs.get(name) or Throughput(), self._slots(name)
        line = self._line(name, throughput, slots)
        deadline = assignment.options.deadline_ms
        arrival = Arrival(assignment.priority, None if deadline is None else MARGIN * deadline)
        if would_miss_deadline(line, arrival, self._rules):
            return Reject(RejectReason.WOULD_MISS_DEADLINE, MISSES_MESSAGE, retry_after_ms(line))
        return admit(throughput.view(self.waiting(), slots), Arrival(arrival.priority), self._rules)

    def lines(self) -> dict[str, QueueView]:
        """By class, what is ahead of an arrival and how fast it leaves: published for callers elsewhere."""
        return {name: self._line(name, throughput, self._slots(name)) for name, throughput in self._throughputs.items()}

    def _line(self, name: str, throughput: Throughput, slots: int) -> QueueView:
        return throughput.view(max(0, self._ahead(name) - slots), slots)

    def ended(self, pending: Pending, result: ExecResult) -> None:
        """Count the end of an assignment that is still in the table."""
        name = pending.resource_class
        if name not in self._throughputs and len(self._throughputs) >= MOST_CLASSES:
            return
        busy = self._ahead(name) >= self._slots(name) > 0
        step_ms = result.latency_ms if result.status is ResultStatus.SUCCESS else None
        self._throughputs.setdefault(name, Throughput()).ended(self._clock.now(), busy=busy, step_ms=step_ms)

    def _ahead(self, name: str) -> int:
        """The number of assignments of a class that were accepted and have not ended."""
        return self._table.of_class[name] + len(self.unclaimed)

    def _slots(self, name: str) -> int:
        return self._health.capacity(name, self._clock.now())


FRESH_S = 1.0
"""How long a client uses snapshots before it reads them again."""

RouterSnapshots = Callable[[Store], Awaitable[Sequence[Mapping[str, Any]]]]
"""Reads the last snapshot of each router over a store, as JSON carries it."""


class DeadlineForecast:
    """The routers' last snapshots, read at most once a second."""

    def __init__(self, store: Store, clock: Clock, snapshots: RouterSnapshots | None) -> None:
        self._store = store
        self._clock = clock
        self._snapshots = snapshots
        self._last: Sequence[Mapping[str, Any]] = ()
        self._fresh_until = float("-inf")

    async def refusal(self, assignment: ExecAssignment) -> float | None:
        """Seconds to wait, if the assignment would miss its deadline at every router. None: submit it."""
        if self._snapshots is None or assignment.options.deadline_ms is None:
            return None
        if self._clock.now() >= self._fresh_until:
            self._last = await self._snapshots(self._store)
            self._fresh_until = self._clock.now() + FRESH_S
        waits = [_wait(status, assignment) for status in self._last]
        misses = [wait for wait in waits if wait is not None]
        return min(misses) / 1000 if misses and len(misses) == len(waits) else None


def _wait(status: Mapping[str, Any], assignment: ExecAssignment) -> int | None:
    """Milliseconds until it may be worth asking this router; None when it is worth it now."""
    line = status.get("lines", {}).get(resource_class(assignment))
    if line is None:
        return None
    view = msgspec.convert(line, QueueView)
    rules = Rules(max_wait_fraction=status.get("max_wait_fraction"))
    arrival = Arrival(assignment.priority, MARGIN * (assignment.options.deadline_ms or 0))
    return retry_after_ms(view) if would_miss_deadline(view, arrival, rules) else None
