"""The quarantine of a SQLite store: rows of the work table that wait for a person to decide."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import apsw
from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.queue.model import work as core
from reefknot.queue.model.edited_work import next_record, replaced
from reefknot.queue.model.failure_groups import FailureGroups, fingerprint_of, in_small
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.port.work_queue import ALL, QuarantineFilter, QuarantineStats
from reefknot.stores.sqlite import work_rows as rows
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import Transaction, each

_NO_LIMIT = -1
SCANNED = 5000
"""Most items that one read examines: no read holds its snapshot for long, however many are in quarantine."""
_Window = tuple[str, str | None]
"""A range of ids: after the first, up to the second."""
_WINDOW_END = (
    "SELECT id FROM work INDEXED BY work_quarantined "
    "WHERE state = 'quarantined' AND id > ? ORDER BY id LIMIT 1 OFFSET ?"
)
_Change = Callable[[WorkItem, Moment], WorkItem]


class SqliteQuarantine:
    """Quarantined work as rows: found, requeued, discarded, purged, each change in one transaction."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        found: list[WorkItem] = []
        async for page in self._pages(which, after, limit):
            found += page
            if len(found) >= limit:
                break
        return found[:limit]

    async def _pages(
        self, which: QuarantineFilter, after: str = "", limit: int = _NO_LIMIT
    ) -> AsyncIterator[list[WorkItem]]:
        """
        The items that meet the filter, page by page, at most `limit` on each.

        Most filters have no index, and fingerprints are computed, so each read examines `SCANNED` rows. Without a
        filter every row matches, so no more rows are read than are wanted.
        """
        size = min(limit, SCANNED) if which == ALL and limit > 0 else SCANNED
        async for window in self._windows(which, after, size):
            page = await self._context.read(partial(_matching, which=which, window=window, limit=limit))
            yield (
                page
                if which.fingerprint is None
                else [item for item in page if fingerprint_of(item) == which.fingerprint]
            )

    async def _windows(self, which: QuarantineFilter, after: str = "", size: int = SCANNED) -> AsyncIterator[_Window]:
        """Ranges of ids, each of `size` items or fewer; one range for items that are named."""
        while True:
            last = None if which.ids else await self._context.read(partial(_window_end, after=after, size=size))
            yield after, last
            if last is None:
                return
            after = last

    async def show(self, work_id: str) -> WorkItem | None:
        item = await self._context.read(lambda connection: rows.one(connection, work_id))
        return item if item is not None and item.state is WorkState.QUARANTINED else None

    async def requeue(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        why: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        return await self._change(which, partial(core.requeue, who=who, why=why), dry_run, events)

    async def discard(
        self,
        which: QuarantineFilter,
        *,
        who: str,
        reason: str = "",
        dry_run: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> list[str]:
        return await self._change(which, partial(core.discard, who=who, reason=reason), dry_run, events)

    async def purge(
        self, which: QuarantineFilter, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return await self._change(which, None, dry_run, events)

    async def replace(
        self, work_id: str, payload: bytes, *, who: str, why: str = "", events: Sequence[AuditEntry] = ()
    ) -> str | None:
        return await self._context.write(_replace, (work_id, payload, who, why, events))

    async def count(self, which: QuarantineFilter = ALL) -> dict[str, int]:
        if which == ALL:
            return await self._context.read(lambda connection: _sums(connection, "kind"))
        number: Counter[str] = Counter()
        if which.fingerprint is None:
            async for window in self._windows(which):
                number.update(await self._context.read(partial(_count, which=which, window=window)))
        else:
            async for page in self._pages(which):
                number.update(item.kind for item in page)
        return dict(sorted(number.items(), key=lambda one: (-one[1], one[0])))

    async def stats(self) -> QuarantineStats:
        return await self._context.read(_stats)

    async def groups(self, which: QuarantineFilter = ALL) -> FailureGroups:
        groups = FailureGroups()
        async for page in self._pages(which):
            for item in page:
                groups.add(item)
        return groups

    async def _change(
        self, which: QuarantineFilter, change: _Change | None, dry_run: bool, events: Sequence[AuditEntry]
    ) -> list[str]:
        if dry_run or (which.fingerprint is not None and not which.ids):
            ids = [item.id async for page in self._pages(which) for item in page]
            if dry_run or not ids:
                return ids
            which = structs.replace(which, ids=tuple(ids))
        return await self._context.write(_change, (which, change, events))


@each
def _change(
    transaction: Transaction, which: QuarantineFilter, change: _Change | None, events: Sequence[AuditEntry]
) -> list[str]:
    """Change the items that meet the filter, or delete them when there is no change to make. Returns their ids."""
    items = [
        item for item in _matching(transaction.connection, which) if which.fingerprint in (None, fingerprint_of(item))
    ]
    ids = [item.id for item in items]
    if change is not None:
        rows.update(transaction, items, [change(item, transaction.now) for item in items])
    else:
        statement = "DELETE FROM work WHERE id IN (SELECT value FROM json_each(?))"
        transaction.connection.execute(statement, (rows.listed(ids),))
        transaction.counts.add(items, -1)
    if ids:
        transaction.add_events(events)
    return ids


@each
def _replace(
    transaction: Transaction, work_id: str, payload: bytes, who: str, why: str, events: Sequence[AuditEntry]
) -> str | None:
    """Discard an item and insert the one with this payload. Returns the new id, or None where that cannot be."""
    item = rows.one(transaction.connection, work_id)
    if item is None or item.state is not WorkState.QUARANTINED:
        return None
    if rows.known(transaction.connection, [next_record(work_id)]):
        return None
    old, new = replaced(item, payload, transaction.now, who=who, why=why)
    rows.update(transaction, [item], [old])
    rows.insert(transaction, [new])
    transaction.add_events(events)
    return new.id


def _count(connection: apsw.Connection, which: QuarantineFilter, window: _Window) -> dict[str, int]:
    conditions = _conditions(which, window)
    where = " AND ".join(["state = 'quarantined'", *conditions])
    counted = f"SELECT kind, count(*) FROM work INDEXED BY work_quarantined WHERE {where} GROUP BY kind"  # noqa: S608
    return dict(query(connection, counted, *conditions.values()))


def _window_end(connection: apsw.Connection, after: str, size: int) -> str | None:
    """The id of the last of the next `size` items; None when there are fewer."""
    found = query(connection, _WINDOW_END, after, size - 1).get
    return None if found is None else str(found)


def _sums(connection: apsw.Connection, column: str) -> dict[str, int]:
    summed = f"SELECT {column}, sum(number) FROM quarantine_count GROUP BY 1 ORDER BY 2 DESC, 1"  # noqa: S608
    return dict(query(connection, summed))


def _stats(connection: apsw.Connection) -> QuarantineStats:
    by_kind, by_source, by_reason = (_sums(connection, column) for column in ("kind", "source", "reason"))
    oldest = "SELECT min(updated_at) FROM work INDEXED BY work_quarantined_since WHERE state = 'quarantined'"
    return QuarantineStats(sum(by_kind.values()), by_kind, by_source, by_reason, query(connection, oldest).get)


def _matching(
    connection: apsw.Connection, which: QuarantineFilter, window: _Window = ("", None), limit: int = _NO_LIMIT
) -> list[WorkItem]:
    """Quarantined items that meet the filter but for its fingerprint, in the order of their ids, without payloads."""
    found = rows.quarantined(connection, _conditions(which, window), limit)
    return [structs.replace(item, payload=b"") for item in found]


def _conditions(which: QuarantineFilter, window: _Window) -> dict[str, Any]:
    """The conditions of a filter within a range of ids, each with its value."""
    after, last = window
    given: dict[str, Any] = {
        "id > ?": after,
        "id <= ?": last,
        "id IN (SELECT value FROM json_each(?))": rows.listed(which.ids) if which.ids else None,
        "kind = ?": which.kind,
        "source = ?": which.source,
        "instr(reason, ?) > 0": which.reason_contains,
        "updated_at < ?": which.before,
        "updated_at >= ?": which.since,
        "tenant_id = ?": which.tenant_id,
        rows.HAS_ERROR: None if which.error is None else in_small(which.error),
    }
    return {words: value for words, value in given.items() if value is not None}
