"""
Moments in steady and wall time, in whole milliseconds.

`steady` only goes forward, for every process of one machine alike: leases are measured with it, so a wall clock that
jumps by a day moves none of them. `wall` is UTC, advanced by the steady clock: due times, deadlines and retention are
measured with it. All processes of one boot of a host that share a store agree on the wall time at which that boot began
(`agreed_boot_time`), so for them a comparison of wall times is one of the boot clock, however the wall clock is set
meanwhile. Records of another boot are compared by wall time alone. Pure: no clock is read.
"""

from typing import NamedTuple


class Moment(NamedTuple):
    """A point in time, by both clocks."""

    steady: int
    wall: int


class Timeline:
    """The offset between the two clocks, in seconds: the wall time at which the steady clock began."""

    __slots__ = ("offset",)

    def __init__(self, *, steady: float, wall: float) -> None:
        self.offset = wall - steady

    def at(self, steady: float) -> Moment:
        """The moment at which the steady clock reads this many seconds."""
        return Moment(int(steady * 1000), round((steady + self.offset) * 1000))


def milliseconds(seconds: float) -> int:
    """A duration in whole milliseconds; a positive one is at least 1."""
    return (round(seconds * 1000) or 1) if seconds > 0 else 0


CLOCK_SET_MS = 1000
"""Difference between two beliefs about the time from which on somebody has set the clock in between."""


def agreed_boot_time(known: int | None, believed: int, *, in_use: bool) -> int:
    """
    The wall time (ms) at which this boot of the host began, as all processes over one store take it.

    The first process of a boot says it. A later one that believes otherwise, because the wall clock was set meanwhile,
    goes by it as well, as long as anything is `in_use` that was measured by it; then the new belief counts.
    """
    if known is None or (not in_use and abs(known - believed) >= CLOCK_SET_MS):
        return believed
    return known
