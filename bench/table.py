"""
A table: contestants, a reference, targets.

Every module in `bench/tables` that has `TABLES` adds its own; nothing else has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from bench.measure import Effort, Timings
from bench.verdict import Target, Verdict, judge, ratio


@dataclass(frozen=True, slots=True)
class Unit:
    """What a figure is shown in: seconds times `per_second`."""

    name: str
    per_second: float


MICROSECONDS = Unit("µs per call", 1e6)
MILLISECONDS = Unit("ms", 1e3)
MESSAGES = Unit("messages", 1)
"""For a table that counts: its figures are no seconds."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a table's run brought: timings, and sentences that come from them."""

    timings: Timings
    remarks: tuple[str, ...] = ()
    targets: Mapping[str, tuple[Target, ...]] | None = None
    """In place of the table's own, when they depend on what ran."""
    columns: tuple[str, ...] = ()
    """Not empty: a contestant's name is that of its row, a comma, and one of these."""


@dataclass(frozen=True, slots=True)
class Table:
    """What is measured side by side. `about` is what a reader needs to know of it; `packages` are those measured."""

    name: str
    title: str
    about: str
    unit: Unit
    reference: str
    targets: Mapping[str, tuple[Target, ...]]
    packages: tuple[str, ...]
    run: Callable[[Effort], Run]


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant's line."""

    name: str
    seconds: float
    middle_seconds: float
    ratio: float
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A table, filled in."""

    table: Table
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
    columns: tuple[str, ...]
    spread: tuple[float, float]
    """How far the middle batch lay above the fastest: of the steadiest contestant, and of the least steady."""

    @property
    def missed(self) -> tuple[str, ...]:
        """One line for every target that was missed."""
        return tuple(
            f"{self.table.name}: {row.name}: {verdict.target}: {verdict.missed}"
            for row in self.rows
            for verdict in row.verdicts
            if verdict.missed is not None
        )


def filled(table: Table, run: Run) -> Result:
    """The timings with the reference and the targets. A target for a contestant that did not run is a mistake."""
    figures = {name: timing.best for name, timing in run.timings.items()}
    targets = table.targets if run.targets is None else run.targets
    strangers = set(targets) - set(figures)
    if strangers:
        raise ValueError(f"{table.name}: targets for {sorted(strangers)}, who did not run")
    rows = tuple(
        Row(
            name,
            timing.best,
            timing.middle,
            ratio(figures, name, table.reference or name),
            tuple(judge(target, name, figures) for target in targets.get(name, ())),
        )
        for name, timing in run.timings.items()
    )
    spreads = [timing.spread for timing in run.timings.values()]
    return Result(table, rows, run.remarks, run.columns, (min(spreads), max(spreads)))


def registered() -> tuple[Table, ...]:
    """All tables, by module and then as listed there."""
    import bench.tables

    tables: list[Table] = []
    for module in sorted(iter_modules(bench.tables.__path__), key=lambda found: found.name):
        tables += getattr(import_module(f"bench.tables.{module.name}"), "TABLES", ())
    return tuple(tables)


def chosen(tables: Sequence[Table], names: Iterable[str]) -> tuple[Table, ...]:
    """The tables with these names, or with names that begin so: `retry-success` is also `retry-success-async`."""
    wanted = tuple(names)
    for name in wanted:
        if not any(_called(table, name) for table in tables):
            raise LookupError(f"no table {name!r}; there are {', '.join(table.name for table in tables)}")
    return tuple(table for table in tables if not wanted or any(_called(table, name) for name in wanted))


def _called(table: Table, name: str) -> bool:
    return table.name == name or table.name.startswith(f"{name}-")
