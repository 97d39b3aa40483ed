"""
Two readings of one moment.

`steady` only goes forward, for every process of one machine alike: leases are measured with it, so a wall clock that
jumps by a day moves none of them. `wall` is UTC as the process believed it when it started, carried on by the steady
clock: due times and retention are measured with it. Both are whole milliseconds. Nothing here reads a clock.
"""

from typing import NamedTuple


class Moment(NamedTuple):
    """Now, in both readings."""

    steady: int
    wall: int


class Timeline:
    """Where the two clocks stood when a store was opened."""

    __slots__ = ("_offset",)

    def __init__(self, *, steady: float, wall: float) -> None:
        self._offset = wall - steady

    def at(self, steady: float) -> Moment:
        """The moment at which the steady clock reads this many seconds."""
        return Moment(int(steady * 1000), round((steady + self._offset) * 1000))


def milliseconds(seconds: float) -> int:
    """A duration as it is stored; never rounded down to nothing."""
    return (round(seconds * 1000) or 1) if seconds > 0 else 0
