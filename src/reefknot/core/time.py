"""
Moments in steady and wall time, in whole milliseconds.

`steady` only goes forward, for every process of one machine alike: leases are measured with it, so a wall clock that
jumps by a day moves none of them. `wall` is UTC as the process believed it when it started, advanced by the steady
clock: due times and retention are measured with it. Pure: no clock is read.
"""

from typing import NamedTuple


class Moment(NamedTuple):
    """A point in time, by both clocks."""

    steady: int
    wall: int


class Timeline:
    """The offset between the two clocks when a store was opened."""

    __slots__ = ("_offset",)

    def __init__(self, *, steady: float, wall: float) -> None:
        self._offset = wall - steady

    def at(self, steady: float) -> Moment:
        """The moment at which the steady clock reads this many seconds."""
        return Moment(int(steady * 1000), round((steady + self._offset) * 1000))


def milliseconds(seconds: float) -> int:
    """A duration in whole milliseconds; a positive one is at least 1."""
    return (round(seconds * 1000) or 1) if seconds > 0 else 0
