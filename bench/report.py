"""
Results as text for a terminal, as JSON, and as the page `docs/performance.md`.

The page has one section a table, each with its own date and machine, between two comments: a run of some tables
renews their sections and leaves the others as they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from bench.machine import Machine, versions
from bench.peers import DIFFERENCES
from bench.table import Result, Row, Table

_SECTION = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->\n", re.DOTALL)

HEAD = f"""\
# Performance

`make bench` writes this page; do not edit it by hand. It exits with 1 when a target is missed.

## How it is measured

- The contestants of a table take turns in one process: a batch of calls each, round after round, every round beginning
  with another one. The garbage collector is off while a batch runs.
- Of each contestant the fastest batch counts. Noise only ever adds time, so minima are steadier than averages.
- Everybody gets the same order: three executions at most, for `ConnectionError`, no wait, the last error to the caller.
  Every contestant must give back the right answer before it is measured.
- Every call site is compiled for one contestant. Log lines are made as usual and go to a null handler.
- Imports are measured as whole processes, also in turns.

## What the figures cannot tell

- On a shared machine the same code differs by 25–60 % between batches; each table says how much it was. Differences
  under 1.3 × mean nothing, in either direction.
- Ratios carry over to another machine roughly, microseconds not at all.
- The work measured does nothing. A call over the network takes a thousand times longer, and next to it all of
  these costs vanish; they matter where a retrier guards something fast, and on the event loop.
- A verdict has no allowance for noise: a figure at its limit can go either way.

## What the peers do differently

{DIFFERENCES}

"""


def shown(seconds: float, per_second: float) -> str:
    """Three digits that mean something, never in powers of ten."""
    value = seconds * per_second
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _judged(*rows: Row) -> tuple[str, str]:
    """Targets and verdict."""
    verdicts = [verdict for row in rows for verdict in row.verdicts]
    missed = [str(verdict) for verdict in verdicts if verdict.missed is not None]
    return "; ".join(str(verdict.target) for verdict in verdicts), "; ".join(missed) or ("met" if verdicts else "")


def _cells(row: Row, result: Result) -> tuple[str, ...]:
    return row.name, shown(row.seconds, result.table.unit.per_second), f"{row.ratio:.2f}", *_judged(row)


def _matrix(result: Result) -> list[tuple[str, ...]]:
    """A line for the contestants whose names differ in the column only, with the targets of all of them."""
    lines: dict[str, list[Row]] = {}
    for row in result.rows:
        lines.setdefault(row.name.rpartition(", ")[0], []).append(row)
    unit = result.table.unit
    grid: list[tuple[str, ...]] = [("", *(f"{column}, {unit.name}" for column in result.columns), "target", "verdict")]
    for name, rows in lines.items():
        judged = (cell.replace(f"{name}, ", "") for cell in _judged(*rows))
        grid.append((name, *(shown(row.seconds, unit.per_second) for row in rows), *judged))
    return grid


def _grid(result: Result) -> list[tuple[str, ...]]:
    if result.columns:
        return _matrix(result)
    heading = ("", result.table.unit.name, f"× {result.table.reference}", "target", "verdict")
    return [heading, *(_cells(row, result) for row in result.rows)]


def _spread(result: Result) -> str:
    low, high = result.spread
    return f"The middle batch lay {low:.0%} to {high:.0%} above the fastest, by contestant."


def text(result: Result) -> str:
    """For a terminal."""
    grid = _grid(result)
    widths = [max(len(cells[column]) for cells in grid) for column in range(len(grid[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < column < len(cells) - 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in grid
    ]
    return "\n".join([f"{result.table.name}: {result.table.title}", *lines, *result.remarks, _spread(result)])


def section(result: Result, *, date: str, machine: Machine) -> str:
    """One table of the page."""
    heading, *body = _grid(result)
    lines = [
        f"## {result.table.title}",
        "",
        *_prose(result.table.about),
        "",
        f"| {' | '.join(heading)} |",
        f"| --- |{' ---: |' * (len(heading) - 3)} --- | --- |",
        *(f"| {' | '.join(cells)} |" for cells in body),
        "",
        *(line for remark in result.remarks for line in (*_prose(remark), "")),
        *_prose(f"Measured {date} with `python -m bench {result.table.name}`: {machine}; {_packages(result.table)}."),
        _spread(result),
    ]
    return "\n".join(lines) + "\n"


def _prose(text: str) -> list[str]:
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _packages(table: Table) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions(table.packages).items())


def sections_of(page: str) -> dict[str, str]:
    """The sections of a page that was written before."""
    return {found["name"]: found["body"] for found in _SECTION.finditer(page)}


def page(before: str, renewed: Mapping[str, str], order: Iterable[str]) -> str:
    """The page with these sections renewed; sections of tables that are no more are left out."""
    kept = sections_of(before) | dict(renewed)
    parts = [f"<!-- table: {name} -->\n{kept[name]}<!-- end -->\n" for name in order if name in kept]
    return HEAD + "\n".join(parts)


def as_json(results: Sequence[Result], *, date: str, machine: Machine) -> dict[str, Any]:
    """All figures, in seconds."""
    return {
        "date": date,
        "machine": {"cores": machine.cores, "cpu": machine.cpu, "python": machine.python, "load": machine.load},
        "tables": [
            {
                "name": result.table.name,
                "reference": result.table.reference,
                "packages": versions(result.table.packages),
                "rows": [_row_as_json(row) for row in result.rows],
                "remarks": list(result.remarks),
            }
            for result in results
        ],
        "missed": [line for result in results for line in result.missed],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "seconds": row.seconds,
        "middle_seconds": row.middle_seconds,
        "ratio": row.ratio,
        "targets": [{"target": str(verdict.target), "met": verdict.missed is None} for verdict in row.verdicts],
    }
