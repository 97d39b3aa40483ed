"""
What the router knows about its workers: one entry for each worker and resource class.

Acks, results and heartbeats update it; silence and time make it expire. It decides nothing: `choose_worker` does.
"""

from collections.abc import Mapping
from math import inf

import msgspec

from reefknot.core.messages import ExecAssignmentAck, ExecResult, Heartbeat
from reefknot.core.overload.level import OverloadStatus
from reefknot.core.routing import WorkerHealth

MOST_WORKERS = 10_000
MOST_CLASSES = 64
FORGET_AFTER_S = 300.0


class HealthTable:
    """Workers by id and class."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, WorkerHealth]] = {}
        self._lives: dict[str, str] = {}
        self._slots: dict[str, tuple[int, float]] = {}
        """By class: all slots, and until when that holds if nobody is heard of."""
        self.draining: set[str] = set()

    def heard_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """A worker told how it is. True when it began anew: what it had in its hands may be in its store only."""
        worker_id = beat.worker_id
        self._slots.clear()
        anew = worker_id in self._lives and self._lives[worker_id] != beat.incarnation
        for name, said in list(beat.classes.items())[:MOST_CLASSES]:
            before = self._entries.get(name, {}).get(worker_id) or WorkerHealth(worker_id)
            changed = msgspec.structs.replace(
                before,
                status=said.status,
                queue_depth=said.queue_depth,
                active=said.active,
                capacity=said.capacity,
                heard_at=now,
                heartbeat_at=now,
            )
            if self._put(name, changed):
                self._lives[worker_id] = beat.incarnation
                (self.draining.add if beat.draining else self.draining.discard)(worker_id)
        return anew

    def heard_ack(self, worker_id: str, name: str, ack: ExecAssignmentAck, now: float) -> None:
        """An answer to an assignment: its status and depth are news."""
        before = self._entries.get(name, {}).get(worker_id)
        if before is None:
            return
        depth = ack.queue_depth if isinstance(ack.queue_depth, int) else before.queue_depth
        status = ack.overload_status or before.status
        self._put(name, msgspec.structs.replace(before, status=status, queue_depth=depth, heard_at=now))

    def heard_result(self, worker_id: str, name: str, result: ExecResult, now: float) -> None:
        before = self._entries.get(name, {}).get(worker_id)
        if before is not None and result.overload_status is not None:
            self._put(name, msgspec.structs.replace(before, status=result.overload_status, heard_at=now))

    def probed(self, worker_id: str, name: str, now: float) -> None:
        before = self._entries.get(name, {}).get(worker_id)
        if before is not None:
            self._put(name, msgspec.structs.replace(before, probed_at=now))

    def of_class(self, name: str, unspoken: Mapping[tuple[str, str], int]) -> list[WorkerHealth]:
        """Everybody who may be asked for this class, with what is on its way to each."""
        return [
            msgspec.structs.replace(one, unspoken=unspoken.get((one.worker_id, name), 0))
            for one in self._entries.get(name, {}).values()
            if one.worker_id not in self.draining
        ]

    def gone(self, now: float) -> set[str]:
        """Workers whose heartbeats stopped."""
        return {one.worker_id for by_id in self._entries.values() for one in by_id.values() if one.gone(now)}

    def forget(self, now: float) -> None:
        """Workers that have been gone for long are not kept for ever."""
        self._slots.clear()
        for name, by_id in list(self._entries.items()):
            for worker_id, one in list(by_id.items()):
                if one.gone(now) and now - one.heard_at > FORGET_AFTER_S:
                    del by_id[worker_id]
            if not by_id:
                del self._entries[name]
        here = {worker_id for by_id in self._entries.values() for worker_id in by_id}
        for worker_id in self._lives.keys() - here:
            del self._lives[worker_id]
        self.draining &= here

    def live(self, now: float) -> int:
        """How many workers share the fleet's throttle."""
        return len({one.worker_id for by_id in self._entries.values() for one in by_id.values() if not one.gone(now)})

    def capacity(self, name: str, now: float) -> int:
        """Slots of a class, of all workers that are there."""
        slots, until = self._slots.get(name, (0, -inf))
        if now <= until:
            return slots
        here = [one for one in self._entries.get(name, {}).values() if not one.gone(now)]
        slots = sum(one.capacity for one in here)
        until = min((one.gone_after for one in here), default=inf)
        self._slots[name] = slots, until
        return slots

    def knows(self, name: str) -> bool:
        """Whether a worker of this class was heard of and is not forgotten yet."""
        return name in self._entries

    def classes(self, now: float) -> list[str]:
        """The classes of all workers that are there."""
        return sorted(name for name, by_id in self._entries.items() if any(not one.gone(now) for one in by_id.values()))

    def status(self, worker_id: str, name: str) -> OverloadStatus | None:
        one = self._entries.get(name, {}).get(worker_id)
        return None if one is None else one.status

    def everybody(self) -> dict[str, dict[str, WorkerHealth]]:
        return {name: dict(by_id) for name, by_id in self._entries.items()}

    def best(self, name: str, now: float) -> OverloadStatus:
        """The best that is left of a class: what a caller is told when nobody can take its work."""
        statuses = [one.status for one in self._entries.get(name, {}).values() if not one.gone(now)]
        return min(statuses, key=lambda status: status.severity, default=OverloadStatus.CRITICAL)

    def _put(self, name: str, health: WorkerHealth) -> bool:
        if name not in self._entries and len(self._entries) >= MOST_CLASSES:
            return False
        by_id = self._entries.setdefault(name, {})
        if health.worker_id not in by_id and len(by_id) >= MOST_WORKERS:
            return False
        by_id[health.worker_id] = health
        return True
