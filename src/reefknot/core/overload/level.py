"""
How full is full?

A level is a share of a bounded queue. The raw level follows the depth; the reported one leaves a level only when the
depth has fallen well below its threshold, so that a status that others steer by does not flutter.
"""

from enum import StrEnum

from msgspec import Struct

HYSTERESIS = 0.1
_GRAIN = 1e-9
"""0.8 less 0.1 is a hair above 0.7 in floats; a queue of 1000 with 700 in it is not below 70 %."""


class OverloadStatus(StrEnum):
    """What a worker says about one of its queues, from well to full."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OVERLOADED = "overloaded"
    CRITICAL = "critical"

    @property
    def severity(self) -> int:
        return _ORDER.index(self)


_ORDER = tuple(OverloadStatus)


class Thresholds(Struct, frozen=True):
    """Shares of a full queue at which the level changes, ascending."""

    degraded: float = 0.5
    overloaded: float = 0.8
    critical: float = 1.0

    def of(self, status: OverloadStatus) -> float:
        """Where a level begins; healthy begins at nothing."""
        return (0.0, self.degraded, self.overloaded, self.critical)[status.severity]


def level(depth: int, size: int, thresholds: Thresholds = Thresholds()) -> OverloadStatus:  # noqa: B008 - frozen
    """The raw level: each begins at its threshold."""
    share = depth / size
    if share >= thresholds.critical:
        return OverloadStatus.CRITICAL
    if share >= thresholds.overloaded:
        return OverloadStatus.OVERLOADED
    if share >= thresholds.degraded:
        return OverloadStatus.DEGRADED
    return OverloadStatus.HEALTHY


def reported(
    before: OverloadStatus,
    depth: int,
    size: int,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
) -> OverloadStatus:
    """The level that is told to others: up at once, down only below the threshold less a tenth of the queue."""
    raw = level(depth, size, thresholds)
    if raw.severity >= before.severity:
        return raw
    share = depth / size
    for status in _ORDER[before.severity : raw.severity : -1]:
        if share >= thresholds.of(status) - HYSTERESIS - _GRAIN:
            return status
    return raw
