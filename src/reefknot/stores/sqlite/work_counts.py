"""
The numbers of work rows: `WorkCounts` gathers the changes of a transaction and writes them once.

Admission, snapshots and lists read these counters instead of counting rows. A trigger for each row would keep them as
well, and cost more than the row itself; a transaction that moves a hundred jobs changes two or three numbers. What is
gathered is written before anything in the same transaction reads it, and before the commit.
"""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import apsw

from reefknot.queue.model.work import WorkItem, WorkState, stage_of

_Key = tuple[Any, ...]
_counted = attrgetter("resource_class", "state", "pool", "priority", "tenant_id", "reason", "kind", "source")

COLUMNS = {
    "work_count": ("resource_class", "state"),
    "open_work": ("pool", "stage", "priority", "tenant"),
    "quarantine_count": ("kind", "source", "reason"),
}
"""The tables of numbers, each with the columns that its rows are counted by."""
_STAGE = (
    "CASE WHEN resource_class = 'router' AND state = 'pending' AND reason = 'scheduled' THEN 'scheduled' "
    "WHEN resource_class = 'router' THEN 'submitted' WHEN state = 'pending' THEN 'queued' ELSE 'running' END"
)
COUNTED = {
    "work_count": "SELECT resource_class, state, count(*) FROM work GROUP BY 1, 2",
    "open_work": (
        f"SELECT pool, {_STAGE}, priority, ifnull(tenant_id, ''), count(*) FROM work "  # noqa: S608 - our own words
        "WHERE state IN ('pending', 'running') GROUP BY 1, 2, 3, 4"
    ),
    "quarantine_count": (
        "SELECT kind, source, reason, count(*) FROM work INDEXED BY work_quarantined "
        "WHERE state = 'quarantined' GROUP BY 1, 2, 3"
    ),
}
"""The same numbers, counted row by row."""


def _statements(table: str, columns: tuple[str, ...]) -> tuple[str, str]:
    places = ", ".join("?" * len(columns))
    changed = f"INSERT INTO {table} VALUES ({places}, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number"  # noqa: S608
    removed = f"DELETE FROM {table} WHERE ({', '.join(columns)}) = ({places}) AND number <= 0"  # noqa: S608
    return changed, removed


_STATEMENTS = {table: _statements(table, columns) for table, columns in COLUMNS.items()}


class WorkCounts:
    """The changes of the numbers of work rows within a transaction."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(self, items: Iterable[WorkItem], number: int = 1) -> None:
        """Add these rows to the counts; with a number of -1 subtract them."""
        numbers = self._numbers
        for key, found in Counter(map(_counted, items)).items():
            numbers[key] = numbers.get(key, 0) + number * found

    def start(self, items: Iterable[WorkItem]) -> None:
        """Count these running rows, which were pending."""
        numbers = self._numbers
        for key, found in Counter(map(_counted, items)).items():
            before = (key[0], WorkState.PENDING, *key[2:])
            numbers[key] = numbers.get(key, 0) + found
            numbers[before] = numbers.get(before, 0) - found

    def flush(self, connection: apsw.Connection) -> None:
        """Write what was gathered."""
        if not self._numbers:
            return
        classes, stages, quarantined = Counter[_Key](), Counter[_Key](), Counter[_Key]()
        for (resource_class, state, pool, priority, tenant, reason, kind, source), number in self._numbers.items():
            classes[resource_class, state] += number
            stage = stage_of(WorkItem("", kind, resource_class, state=state, reason=reason))
            if stage is not None:
                stages[pool, stage, priority, tenant or ""] += number
            elif state is WorkState.QUARANTINED:
                quarantined[kind, source, reason] += number
        self._numbers.clear()
        for table, changes in (("work_count", classes), ("open_work", stages), ("quarantine_count", quarantined)):
            change, remove = _STATEMENTS[table]
            for key, number in changes.items():
                if number:
                    connection.execute(change, (*key, number))
                if number < 0:
                    connection.execute(remove, key)


def wrong_counts(connection: apsw.Connection) -> list[str]:
    """The tables whose numbers are not those of the rows."""
    connection.execute("BEGIN")  # one snapshot
    try:
        return [
            table
            for table, columns in COLUMNS.items()
            if set(connection.execute(f"SELECT {', '.join(columns)}, number FROM {table}"))  # noqa: S608
            != set(connection.execute(COUNTED[table]))
        ]
    finally:
        connection.execute("COMMIT")


def recount(connection: apsw.Connection) -> None:
    """Count all rows again, inside the caller's transaction."""
    for table, counted in COUNTED.items():
        connection.execute(f"DELETE FROM {table}; INSERT INTO {table} {counted}")  # noqa: S608 - our own words
