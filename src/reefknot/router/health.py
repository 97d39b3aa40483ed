"""
What the router knows about its workers: one entry for each worker and resource class.

Acks, results and heartbeats update it; silence and time make it expire. It decides nothing: `choose_worker` does.
"""

import msgspec

from reefknot.core.messages import ExecAssignmentAck, ExecResult, Heartbeat
from reefknot.core.overload.level import OverloadStatus
from reefknot.core.routing import WorkerHealth

MOST_WORKERS = 10_000
FORGET_AFTER_S = 300.0


class HealthTable:
    """Workers by id and class."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, WorkerHealth]] = {}
        self.draining: set[str] = set()

    def add(self, worker_id: str, classes: tuple[str, ...], now: float) -> None:
        """A worker that is known by name and has said nothing yet."""
        for name in classes:
            self._put(name, WorkerHealth(worker_id, heard_at=now))

    def heard_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """A worker told how it is. True when it is new or was gone."""
        fresh = False
        (self.draining.add if beat.draining else self.draining.discard)(beat.worker_id)
        for name, said in beat.classes.items():
            before = self._entries.get(name, {}).get(beat.worker_id)
            fresh = fresh or before is None or before.gone(now)
            self._put(
                name,
                msgspec.structs.replace(
                    before or WorkerHealth(beat.worker_id),
                    status=said.status,
                    queue_depth=said.queue_depth,
                    active=said.active,
                    capacity=said.capacity,
                    heard_at=now,
                    heartbeat_at=now,
                ),
            )
        return fresh

    def heard_ack(self, worker_id: str, name: str, ack: ExecAssignmentAck, now: float) -> None:
        """An answer to an assignment: its status and depth are news, and one less is on its way."""
        before = self._entries.get(name, {}).get(worker_id)
        if before is None:
            return
        depth = ack.queue_depth if isinstance(ack.queue_depth, int) else before.queue_depth
        status = ack.overload_status or before.status
        self._put(
            name,
            msgspec.structs.replace(
                before, status=status, queue_depth=depth, heard_at=now, pending=max(0, before.pending - 1)
            ),
        )

    def heard_result(self, worker_id: str, name: str, result: ExecResult, now: float) -> None:
        before = self._entries.get(name, {}).get(worker_id)
        if before is not None and result.overload_status is not None:
            self._put(name, msgspec.structs.replace(before, status=result.overload_status, heard_at=now))

    def sent(self, worker_id: str, name: str, now: float, *, probe: bool) -> None:
        before = self._entries[name][worker_id]
        changed = msgspec.structs.replace(before, pending=before.pending + 1)
        self._put(name, msgspec.structs.replace(changed, probed_at=now) if probe else changed)

    def of_class(self, name: str) -> list[WorkerHealth]:
        """Everybody who may be asked for this class."""
        return [one for one in self._entries.get(name, {}).values() if one.worker_id not in self.draining]

    def gone(self, now: float) -> set[str]:
        """Workers whose heartbeats stopped."""
        return {one.worker_id for by_id in self._entries.values() for one in by_id.values() if one.gone(now)}

    def forget(self, now: float) -> None:
        """Workers that have been gone for long are not kept for ever."""
        for by_id in self._entries.values():
            for worker_id in [
                key for key, one in by_id.items() if one.gone(now) and now - one.heard_at > FORGET_AFTER_S
            ]:
                del by_id[worker_id]

    def live(self, now: float) -> int:
        """How many workers share the fleet's throttle."""
        return len({one.worker_id for by_id in self._entries.values() for one in by_id.values() if not one.gone(now)})

    def everybody(self) -> dict[str, dict[str, WorkerHealth]]:
        return {name: dict(by_id) for name, by_id in self._entries.items()}

    def worst(self, name: str) -> OverloadStatus:
        """The best that is left: what a caller is told when nobody can take its work."""
        statuses = [one.status for one in self.of_class(name)]
        return min(statuses, key=lambda status: status.severity, default=OverloadStatus.CRITICAL)

    def _put(self, name: str, health: WorkerHealth) -> None:
        by_id = self._entries.setdefault(name, {})
        if health.worker_id in by_id or len(by_id) < MOST_WORKERS:
            by_id[health.worker_id] = health
