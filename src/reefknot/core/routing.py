"""
Who gets it?

A router chooses among workers by what they last said about themselves: healthy ones first, then degraded ones; an
overloaded one is passed over half of the time, a critical one never gets work but a probe now and then, and one that
fell silent is gone. Time and chance are arguments.
"""

from collections.abc import Iterable

from msgspec import Struct

from reefknot.core.overload.level import OverloadStatus

HEARTBEAT_S = 1.0
MISSED_UNTIL_GONE = 3
PROBE_EVERY_S = 2.0


class WorkerHealth(Struct, frozen=True):
    """What is known of one worker and one resource class. A worker that never sent a heartbeat is of the old kind."""

    worker_id: str
    status: OverloadStatus = OverloadStatus.HEALTHY
    queue_depth: int = 0
    active: int = 0
    capacity: int = 1
    heard_at: float = 0.0
    heartbeat_at: float | None = None
    probed_at: float = float("-inf")
    pending: int = 0
    """Sent there and not yet spoken of."""

    def gone(self, now: float) -> bool:
        """Three heartbeats missed. Who never sent one is unknown, not gone."""
        return self.heartbeat_at is not None and now - self.heartbeat_at > MISSED_UNTIL_GONE * HEARTBEAT_S

    @property
    def load(self) -> float:
        """How busy it is for its size, with what is on its way."""
        return (self.queue_depth + self.active + self.pending) / max(1, self.capacity)


class Chosen(Struct, frozen=True):
    """This one. `probe`: to see whether a critical worker has recovered."""

    worker_id: str
    probe: bool = False


class Nobody(Struct, frozen=True):
    """The work waits at the router. `why` is for the caller and the record."""

    why: str


def choose_worker(workers: Iterable[WorkerHealth], draw: float, now: float) -> Chosen | Nobody:
    """The worker for one piece of work, by health and then by load."""
    here = sorted((one for one in workers if not one.gone(now)), key=lambda one: (one.load, one.worker_id))
    if not here:
        return Nobody("no worker is there")
    probe = next((one for one in here if one.status is OverloadStatus.CRITICAL and _may_probe(one, now)), None)
    if probe is not None:
        return Chosen(probe.worker_id, probe=True)
    for status in (OverloadStatus.HEALTHY, OverloadStatus.DEGRADED):
        best = next((one for one in here if one.status is status), None)
        if best is not None:
            return Chosen(best.worker_id)
    overloaded = next((one for one in here if one.status is OverloadStatus.OVERLOADED), None)
    if overloaded is None:
        return Nobody("every worker is critical")
    return Chosen(overloaded.worker_id) if draw >= 0.5 else Nobody("every worker is overloaded, and this one waits")


def _may_probe(worker: WorkerHealth, now: float) -> bool:
    return now - worker.probed_at >= PROBE_EVERY_S
