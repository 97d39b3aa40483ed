"""Waits as bars: where chance may put each of them, and how much time has gone by then."""

from __future__ import annotations

from collections.abc import Sequence

from reefknot.cli.output import put_table
from reefknot.cli.wording import long_seconds, seconds, span
from reefknot.core.retry.explain import PlannedWait

WIDTH = 36
MOST_DRAWN = 20


def bar(wait: PlannedWait, longest: float) -> str:
    """The range of one wait on a line from 0 to the longest of all; `◆` is where the seed puts it."""
    if longest <= 0:
        return "│" + " " * WIDTH
    first = min(WIDTH - 1, int(wait.min / longest * WIDTH))
    last = max(first + 1, round(wait.max / longest * WIDTH))
    cells = ["·"] * first + ["█"] * (last - first) + [" "] * (WIDTH - last)
    if wait.delay is not None:
        cells[min(WIDTH - 1, int(wait.delay / longest * WIDTH))] = "◆"
    return "│" + "".join(cells)


def put_waits(schedule: Sequence[PlannedWait]) -> None:
    """Every wait as a line: its range, its bar, and when the attempt after it would begin, were attempts instant."""
    longest = max((wait.max for wait in schedule), default=0.0)
    seeded = any(wait.delay is not None for wait in schedule)
    rows, low, high, sure = [], 0.0, 0.0, 0.0
    for wait in schedule:
        low, high, sure = low + wait.min, high + wait.max, sure + (wait.delay or 0.0)
        if wait.retry >= MOST_DRAWN:
            continue
        after = f"{long_seconds(low)} – {long_seconds(high)}" if high > low else long_seconds(high)
        row = [str(wait.retry + 1), span(wait.min, wait.max), bar(wait, longest), after]
        rows.append([*row, seconds(wait.delay), long_seconds(sure)] if seeded else row)
    columns = ["retry", "wait", f"0 … {seconds(longest)}", "after"]
    put_table([*columns, "drawn", "sum"] if seeded else columns, rows, styles=("", "", "cyan"))
    if len(schedule) > MOST_DRAWN:
        from reefknot.cli.output import put

        put(f"… and {len(schedule) - MOST_DRAWN} more, {long_seconds(low)} – {long_seconds(high)} in all")
