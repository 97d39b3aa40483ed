"""
The health of a router's workers, by resource class.

Acks, results and heartbeats update the table; silence and time make it expire. A worker that is silent because a step
blocks its event loop gets no work, but it is not forgotten as long as its process exists.
"""

from collections.abc import Collection, Mapping
from heapq import nlargest
from math import inf
from typing import Any

import msgspec
from msgspec import DecodeError, Struct, json

from reefknot.core.checks import suggest
from reefknot.core.clock import Clock
from reefknot.errors import StoreError
from reefknot.queue.model.admission import KNOWN_AFTER
from reefknot.queue.model.messages import (
    LONGEST_ID,
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    Heartbeat,
    named_class,
    resource_class,
)
from reefknot.queue.model.routing import MOST_TOGETHER, SHORT_MS, WorkerHealth, WorkerState, worker_state
from reefknot.queue.model.submission import running_mean
from reefknot.queue.port.control import Control
from reefknot.runtime.log import logger, printable
from reefknot.runtime.processes import owner_exists
from reefknot.runtime.timeouts import STORE_S, within

MOST_WORKERS = 10_000
MOST_CLASSES = 64
MOST_SHOWN = 500
"""Entries of a status: each router reports its own every second, and a store takes no message of any size."""
LONGEST_INCARNATION = 4 * LONGEST_ID
FORGET_AFTER_S = 300.0


class HealthTable:
    """The health of workers, by class and id. It decides nothing: `WorkerRanking.choose` does."""

    def __init__(self, own: Collection[str] = ()) -> None:
        """`own` workers serve this router alone: they tell everybody that they accept nothing."""
        self._own = frozenset(own)
        self.store = ""
        """The store of this router; see `Heartbeat.store`."""
        self._sharing: set[str] = set()
        self._leaving: set[str] = set()
        self._entries: dict[str, dict[str, WorkerHealth]] = {}
        self._incarnations: dict[str, str] = {}
        self._slots: dict[str, tuple[int, float]] = {}
        """By class: all slots, and until when the number holds if there is no news."""
        self._attempts: dict[str, tuple[int, float]] = {}
        """By class: how many attempts were timed, and the milliseconds of the mean one."""
        self.draining: set[str] = set()
        self._ahead_ms: dict[str, tuple[str, int]] = {}
        """By worker: its incarnation, and how far its wall clock is ahead of this router's, as far as is known."""

    def record_clock(self, beat: Heartbeat, wall_ms: int) -> None:
        """
        Measure a worker's clock by its heartbeat, which arrived at `wall_ms`.

        The least delayed of its heartbeats tells most. The clock of an incarnation does not jump.
        """
        ahead_ms = beat.timestamp - wall_ms
        incarnation, known_ms = self._ahead_ms.get(beat.worker_id, ("", ahead_ms))
        if incarnation != beat.incarnation:
            known_ms = ahead_ms
        if beat.worker_id not in self._ahead_ms and len(self._ahead_ms) >= MOST_WORKERS:
            return
        self._ahead_ms[beat.worker_id] = beat.incarnation, max(known_ms, ahead_ms)

    def ahead_ms(self, worker_id: str) -> int | None:
        """Milliseconds that the worker's wall clock is ahead of this router's; None when it is not known."""
        known = self._ahead_ms.get(worker_id)
        return None if known is None else known[1]

    def record_heartbeat(self, beat: Heartbeat, now: float) -> str:
        """Update a worker's health. The answer says that it restarted, or resumed, if it did: what it was sent may be
        in its store only."""
        worker_id = beat.worker_id
        if len(worker_id) > LONGEST_ID or len(beat.incarnation) > LONGEST_INCARNATION:
            return ""
        is_shared = bool(beat.store) and beat.store == self.store
        self._slots.clear()
        draining = beat.leaving if worker_id in self._own else beat.draining
        is_back = "resumed" if worker_id in self.draining and not draining else ""
        if self._incarnations.get(worker_id, beat.incarnation) != beat.incarnation:
            is_back = "restarted"
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
            if self._put(name, changed, makes_room=is_shared):
                self._incarnations[worker_id] = beat.incarnation
                (self.draining.add if draining else self.draining.discard)(worker_id)
                (self._leaving.add if beat.leaving else self._leaving.discard)(worker_id)
                (self._sharing.add if is_shared else self._sharing.discard)(worker_id)
        return is_back

    def is_live(self, worker_id: str, now: float) -> bool:
        """Whether the worker is known, and not gone."""
        found = [by_id[worker_id] for by_id in self._entries.values() if worker_id in by_id]
        return any(not one.gone(now) for one in found)

    def state(self, worker_id: str, now: float) -> WorkerState:
        """The state of a worker that was heard of."""
        gone = not self.is_live(worker_id, now)
        return worker_state(draining=worker_id in self.draining, leaving=worker_id in self._leaving, gone=gone)

    def keeps_queue(self, worker_id: str, name: str, now: float) -> bool:
        """Whether queued work of a class is left to the worker: it has that class, is live, and not leaving."""
        entry = self._entries.get(name, {}).get(worker_id)
        return worker_id not in self._leaving and entry is not None and not entry.gone(now)

    def shares_store(self, worker_id: str) -> bool:
        """Whether the worker keeps its results in this router's store."""
        return worker_id in self._sharing

    def record_ack(self, worker_id: str, name: str, ack: ExecAssignmentAck, now: float) -> None:
        """Update status and depth from an ack."""
        reported: dict[str, Any] = {} if ack.overload_status is None else {"status": ack.overload_status}
        if isinstance(ack.queue_depth, int):
            reported["queue_depth"] = ack.queue_depth
        self._update(worker_id, name, heard_at=now, **reported)

    def record_result(self, worker_id: str, name: str, result: ExecResult, now: float) -> None:
        if result.overload_status is not None:
            self._update(worker_id, name, status=result.overload_status, heard_at=now)
        if isinstance(result.latency_ms, int | float) and 0 < result.latency_ms < inf and name in self._entries:
            number, mean = self._attempts.get(name, (0, 0.0))
            self._attempts[name] = number + 1, running_mean(mean, result.latency_ms, number=number + 1)

    def together(self, name: str) -> int:
        """The number of assignments of a class that go to one worker in a row, because they are short."""
        number, mean = self._attempts.get(name, (0, 0.0))
        return max(1, min(MOST_TOGETHER, int(SHORT_MS / mean))) if number >= KNOWN_AFTER else 1

    def probed(self, worker_id: str, name: str, now: float) -> None:
        self._update(worker_id, name, probed_at=now)

    def _update(self, worker_id: str, name: str, **changes: Any) -> None:
        if (before := self._entries.get(name, {}).get(worker_id)) is not None:
            self._entries[name][worker_id] = msgspec.structs.replace(before, **changes)

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

    def may_know(self, name: str, now: float) -> set[str]:
        """The workers of a class that are live, paused, or silent though their process exists: they may come back."""
        return {
            one.worker_id
            for one in self._entries.get(name, {}).values()
            if not one.gone(now) or self._may_come_back(one.worker_id)
        }

    def _may_come_back(self, worker_id: str) -> bool:
        return worker_id not in self._leaving and owner_exists(self._incarnations.get(worker_id, ""))

    def forget(self, now: float) -> None:
        """Drop workers that have been gone for long."""
        self._slots.clear()
        for name, by_id in list(self._entries.items()):
            for worker_id, one in list(by_id.items()):
                is_long_gone = one.gone(now) and now - one.heard_at > FORGET_AFTER_S
                if is_long_gone and not self._may_come_back(worker_id):
                    del by_id[worker_id]
            if not by_id:
                del self._entries[name]
                self._attempts.pop(name, None)
        here = {worker_id for by_id in self._entries.values() for worker_id in by_id}
        for known in (self._incarnations, self._ahead_ms):
            for worker_id in known.keys() - here:
                del known[worker_id]
        for names in (self.draining, self._sharing, self._leaving):
            names.intersection_update(here)

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

    def shown(self, now: float) -> tuple[dict[str, dict[str, WorkerHealth]], int]:
        """
        The workers for a status, by class and id, and how many entries are left out.

        Those over this router's store come first, then the living, then those heard last: heartbeats of workers that do
        not exist crowd out none that does.
        """
        entries = [(name, one) for name, by_id in self._entries.items() for one in by_id.values()]
        left_out = max(0, len(entries) - MOST_SHOWN)
        if left_out:
            entries = nlargest(
                MOST_SHOWN,
                entries,
                key=lambda one: (self.shares_store(one[1].worker_id), not one[1].gone(now), one[1].heard_at),
            )
        found: dict[str, dict[str, WorkerHealth]] = {}
        for name, one in entries:
            found.setdefault(name, {})[one.worker_id] = one
        return found, left_out

    def _put(self, name: str, health: WorkerHealth, *, makes_room: bool = False) -> bool:
        """Keep an entry, if there is room; one that `makes_room` takes the place of a worker of another store."""
        if len(name) > LONGEST_ID or (name not in self._entries and len(self._entries) >= MOST_CLASSES):
            return False
        by_id = self._entries.setdefault(name, {})
        if health.worker_id not in by_id and len(by_id) >= MOST_WORKERS:
            foreign = [one for one in by_id.values() if not self.shares_store(one.worker_id)] if makes_room else []
            if not foreign:
                return False
            del by_id[min(foreign, key=lambda one: one.heard_at).worker_id]
        by_id[health.worker_id] = health
        return True


READ_EVERY_S = 2.0
"""How old the classes may be that a submission is placed by."""
MOST_WARNED = 100
"""Classes that one submitter warns of, each once."""


class _WorkerStatus(Struct):
    classes: dict[str, object] = {}


class _SystemStatus(Struct):
    """The part of a system's status that is about classes."""

    workers: list[_WorkerStatus] = []
    step_classes: dict[str, str] = {}


_statuses = json.Decoder(_SystemStatus)


class FleetClasses:
    """The classes of running workers and of step types, as the systems over a store report them."""

    def __init__(self, control: Control, clock: Clock) -> None:
        self._control = control
        self._clock = clock
        self._read_at = -READ_EVERY_S
        self._of_types: dict[str, str] = {}
        self._there: set[str] = set()
        self._warned: set[str] = set()

    async def refresh(self) -> None:
        """Read the reports again, if the last ones are old. What cannot be read is left as it was."""
        now = self._clock.now()
        if now - self._read_at < READ_EVERY_S:
            return
        self._read_at = now
        try:
            reports = await within(self._control.reports(), STORE_S)
        except (StoreError, TimeoutError):  # reported by the parts that need the store
            return
        systems = []
        for report in reports:
            try:
                systems.append(_statuses.decode(report.body))
            except DecodeError:  # of another version
                continue
        self._of_types = {kind: name for one in systems for kind, name in one.step_classes.items()}
        self._there = {name for one in systems for worker in one.workers for name in worker.classes}

    def class_of(self, assignment: ExecAssignment) -> str:
        """The class that an assignment names, else that of its step, else the one of its family."""
        return named_class(assignment) or self._of_types.get(assignment.job.type) or resource_class(assignment)

    def warn_of(self, assignment: ExecAssignment, name: str) -> None:
        """Warn, once, of a class that no running worker has. While no worker runs, nothing is known."""
        if not self._there or name in self._there or name in self._warned or len(self._warned) >= MOST_WARNED:
            return
        self._warned.add(name)
        logger().warning(
            "%s: no running worker has the class %r%s; there are: %s. The job waits for one for a while, then it is in "
            "quarantine. A class comes from @rk.block(resource_class=…) or worker.queue.v2.resource_pools",
            printable(assignment.assignment_id, most=100),
            printable(name, most=100),
            suggest(name, self._there),
            ", ".join(sorted(self._there)),
        )
