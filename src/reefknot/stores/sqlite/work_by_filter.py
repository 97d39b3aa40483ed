"""
Work of a SQLite store by filter: listed in the order of ids, counted, grouped, and changed.

Most filters have no index, and fingerprints are computed, so a read examines at most `SCANNED` rows.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial

import apsw
from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.queue.model.failure_groups import FailureGroups, fingerprint_of
from reefknot.queue.model.transitions import Transition, outcome
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import EVERYTHING, QuarantineStats, WorkFilter
from reefknot.stores.sqlite import work_rows as rows
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import Transaction, each

_NO_LIMIT = -1
SCANNED = 5000
"""Most items that one read examines: no read holds its snapshot for long, however many there are."""
_Window = tuple[str, str | None]
"""A range of ids: after the first, up to the second."""
_ALL_IDS = ("", None)


class WorkByFilter:
    """The part of the work queue that takes a filter: each change is one transaction."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def change(
        self, which: WorkFilter, transition: Transition, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        if dry_run or (which.fingerprint is not None and which.ids is None):
            now = self._context.now()
            found = [item async for page in self._pages(which) for item in page]
            ids = [item.id for item in found if outcome(item, transition, now) is not None]
            if dry_run or not ids:
                return ids
            which = structs.replace(which, ids=tuple(ids))
        return await self._context.write(_change, (which, transition, events))

    async def by_id(self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        found: list[WorkItem] = []
        async for page in self._pages(which, after, limit):
            found += page
            if len(found) >= limit:
                break
        return found[:limit]

    async def count(self, which: WorkFilter = EVERYTHING) -> dict[str, int]:
        if which == _QUARANTINED:
            return await self._context.read(lambda connection: _sums(connection, "kind"))
        number: Counter[str] = Counter()
        if which.fingerprint is None:
            async for window in self._windows(which):
                number.update(await self._context.read(partial(_count, which=which, window=window)))
        else:
            async for page in self._pages(which):
                number.update(item.kind for item in page)
        return dict(sorted(number.items(), key=lambda one: (-one[1], one[0])))

    async def groups(self, which: WorkFilter = EVERYTHING) -> FailureGroups:
        groups = FailureGroups()
        async for page in self._pages(which):
            for item in page:
                groups.add(item)
        return groups

    async def quarantine_stats(self) -> QuarantineStats:
        return await self._context.read(_stats)

    async def _pages(self, which: WorkFilter, after: str = "", limit: int = _NO_LIMIT) -> AsyncIterator[list[WorkItem]]:
        """The items that match, page by page, at most `limit` on each. Where all match, no more rows are read."""
        is_all = which == structs.replace(EVERYTHING, state=which.state)
        size = min(limit, SCANNED) if is_all and limit > 0 else SCANNED
        async for window in self._windows(which, after, size):
            yield await self._context.read(partial(_matching, which=which, window=window, limit=limit))

    async def _windows(self, which: WorkFilter, after: str = "", size: int = SCANNED) -> AsyncIterator[_Window]:
        """Ranges of ids, each of `size` items or fewer; one range for items that are named."""
        while True:
            end = partial(_window_end, state=which.state, after=after, size=size)
            last = None if which.ids is not None else await self._context.read(end)
            yield after, last
            if last is None:
                return
            after = last


_QUARANTINED = WorkFilter(state=WorkState.QUARANTINED)


@each
def _change(
    transaction: Transaction, which: WorkFilter, transition: Transition, events: Sequence[AuditEntry]
) -> list[str]:
    found = [(item, outcome(item, transition, transaction.now)) for item in _matching(transaction.connection, which)]
    allowed = [(item, kept) for item, kept in found if kept is not None]
    taken = rows.known(transaction.connection, [one.id for _, kept in allowed for one in kept[1:]])
    changed = [(item, kept) for item, kept in allowed if taken.isdisjoint(one.id for one in kept[1:])]
    rows.update(transaction, [item for item, kept in changed if kept], [kept[0] for _, kept in changed if kept])
    rows.insert(transaction, [one for _, kept in changed for one in kept[1:]])
    rows.delete(transaction, [item for item, kept in changed if not kept])
    transaction.add_events(events if changed else ())
    return [item.id for item, _ in changed]


def _matching(
    connection: apsw.Connection, which: WorkFilter, window: _Window = _ALL_IDS, limit: int = _NO_LIMIT
) -> list[WorkItem]:
    """Items that match within a range of ids, in the order of their ids, without payloads."""
    most = limit if which.fingerprint is None else _NO_LIMIT
    found = rows.by_id(connection, _table(which.state), _conditions(which, window), most)
    return [item for item in found if which.fingerprint in (None, fingerprint_of(item))]


def _count(connection: apsw.Connection, which: WorkFilter, window: _Window) -> dict[str, int]:
    where, values = _conditions(which, window)
    counted = f"SELECT kind, count(*) FROM {_table(which.state)} WHERE {where} GROUP BY kind"  # noqa: S608
    return dict(query(connection, counted, values))


def _window_end(connection: apsw.Connection, state: WorkState | None, after: str, size: int) -> str | None:
    """The id of the last of the next `size` items; None when there are fewer."""
    where = f"{_in_state(state)} AND id > ? ORDER BY id LIMIT 1 OFFSET ?"
    found = query(connection, f"SELECT id FROM {_table(state)} WHERE {where}", (after, size - 1)).get  # noqa: S608
    return None if found is None else str(found)


def _conditions(which: WorkFilter, window: _Window) -> rows.Way:
    """The conditions of a filter within a range of ids, but for that of its fingerprint."""
    (after, last), (where, values) = window, rows.conditions(which)
    where = f"{_in_state(which.state)} AND id > ? AND {where}"
    return (where, (after, *values)) if last is None else (f"{where} AND id <= ?", (after, *values, last))


def _in_state(state: WorkState | None) -> str:
    return "true" if state is None else f"state = '{state}'"  # as a constant: the index has only rows of this state


def _table(state: WorkState | None) -> str:
    return "work INDEXED BY work_quarantined" if state is WorkState.QUARANTINED else "work"


def _sums(connection: apsw.Connection, column: str) -> dict[str, int]:
    summed = f"SELECT {column}, sum(number) FROM quarantine_count GROUP BY 1 ORDER BY 2 DESC, 1"  # noqa: S608
    return dict(query(connection, summed))


def _stats(connection: apsw.Connection) -> QuarantineStats:
    by_kind, by_source, by_reason = (_sums(connection, column) for column in ("kind", "source", "reason"))
    oldest = "SELECT min(updated_at) FROM work INDEXED BY work_quarantined_since WHERE state = 'quarantined'"
    return QuarantineStats(sum(by_kind.values()), by_kind, by_source, by_reason, query(connection, oldest).get)
