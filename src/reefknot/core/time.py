"""
Moments in steady and wall time, in whole milliseconds.

`steady` only goes forward, and is the same for every process of a machine: leases are measured with it, so a wall clock
that jumps by a day moves none of them. `wall` is UTC, advanced by the steady clock: due times, deadlines and retention
are measured with it. All processes of one boot of a host that share a store agree on the wall time at which that boot
began (`agreed_boot_time`), so for them comparing wall times is comparing the boot clock, even if the wall clock is set
in between. Records of another boot are compared by wall time alone. Pure: no clock is read.
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
"""Difference between two boot times, in milliseconds, from which on the clock is taken to have been set in between."""


def agreed_boot_time(known: int | None, believed: int, *, in_use: bool) -> int:
    """
    The wall time (ms) at which this boot of the host began, as agreed by all processes on one store.

    The first process of a boot decides it. A later process that computes another value, because the wall clock was set
    in between, uses the first one as long as anything measured by it is `in_use`; after that the new value counts.
    """
    if known is None or (not in_use and abs(known - believed) >= CLOCK_SET_MS):
        return believed
    return known
