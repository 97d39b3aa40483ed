"""
Who gets it?

A router chooses among workers by what they last said about themselves: healthy ones first, then degraded ones; an
overloaded one is passed over half of the time, a critical one never gets work but a probe now and then, and one that
fell silent is gone. Time and chance are arguments.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from reefknot.core.overload.level import OverloadStatus

HEARTBEAT_S = 1.0
MISSED_UNTIL_GONE = 3
PROBE_EVERY_S = 2.0
MOST_UNSPOKEN = 64
"""What is on its way to one worker without an answer. More would be sent by what the worker said long ago."""


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
    unspoken: int = 0
    """Sent there and not yet spoken of."""

    def gone(self, now: float) -> bool:
        """Three heartbeats missed. Who never sent one is unknown, not gone."""
        return self.heartbeat_at is not None and now - self.heartbeat_at > MISSED_UNTIL_GONE * HEARTBEAT_S

    @property
    def load(self) -> float:
        """How busy it is for its size, with what is on its way."""
        return (self.queue_depth + self.active + self.unspoken) / max(1, self.capacity)


class Chosen(Struct, frozen=True):
    """This one. `probe`: to see whether a critical worker has recovered."""

    worker_id: str
    probe: bool = False


class Why(StrEnum):
    """Why work waits at the router; for the caller and the record."""

    NO_WORKER = "no worker is there"
    CRITICAL = "every worker is critical"
    PASSED_OVER = "every worker is overloaded, and this one waits"
    UNSPOKEN = "enough is on its way without an answer"


class Nobody(Struct, frozen=True):
    """The work waits at the router."""

    why: Why


def choose_worker(workers: Iterable[WorkerHealth], draw: float, now: float) -> Chosen | Nobody:
    """The worker for one piece of work, by health and then by load."""
    here = sorted((one for one in workers if not one.gone(now)), key=lambda one: (one.load, one.worker_id))
    if not here:
        return Nobody(Why.NO_WORKER)
    for one in here:
        if one.status is OverloadStatus.CRITICAL and now - one.probed_at >= PROBE_EVERY_S:
            return Chosen(one.worker_id, probe=True)
    able = [one for one in here if one.status is not OverloadStatus.CRITICAL]
    if not able:
        return Nobody(Why.CRITICAL)
    free = [one for one in able if one.unspoken < MOST_UNSPOKEN]
    if not free:
        return Nobody(Why.UNSPOKEN)
    best = min(free, key=lambda one: one.status.severity)
    if best.status is OverloadStatus.OVERLOADED and draw < 0.5:
        return Nobody(Why.PASSED_OVER)
    return Chosen(best.worker_id)
