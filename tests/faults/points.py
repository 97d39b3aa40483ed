"""
Which points are tried.

`make test` tries a spread of them, `make faults` (REEFKNOT_FAULT_POINTS=all) every one. A spread is even and always has
the first and the last point in it; it is the same in every run.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("REEFKNOT_FAULT_POINTS", "") == "all"


def spread(points: Sequence[T], most: int) -> list[T]:
    """These points, or so many of them that lie evenly; all of them when all are asked for."""
    if ALL or len(points) <= most:
        return list(points)
    last = len(points) - 1
    return [points[round(number * last / (most - 1))] for number in range(most)]


def either(few: int, many: int) -> int:
    """A size: the small one in `make test`, the large one when all points are asked for."""
    return many if ALL else few
