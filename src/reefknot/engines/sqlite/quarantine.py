"""The quarantine of a SQLite store: rows of the work table that wait for a person to decide."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import apsw
from msgspec import structs

from reefknot.core import work as core
from reefknot.core.time import Moment
from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.sqlite import work_rows as rows
from reefknot.engines.sqlite.reads import StoreContext
from reefknot.engines.sqlite.transaction import Transaction, each
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.work_queue import ALL, QuarantineFilter, QuarantineStats

_NO_LIMIT = -1
_Change = Callable[[WorkItem, Moment], WorkItem]


class SqliteQuarantine:
    """Quarantined work as rows: found, requeued, discarded, purged, each change in one transaction."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def find(self, which: QuarantineFilter = ALL, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        return await self._context.read(lambda connection: _matching(connection, which, after, limit))

    async def show(self, work_id: str) -> WorkItem | None:
        item = await self._context.read(lambda connection: rows.one(connection, work_id))
        return item if item is not None and item.state is WorkState.QUARANTINED else None

    async def requeue(
        self, which: QuarantineFilter, *, who: str, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        return await self._change(which, partial(core.requeue, who=who), dry_run, events)

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

    async def stats(self) -> QuarantineStats:
        items = await self._context.read(lambda connection: _matching(connection, ALL, "", _NO_LIMIT))
        return QuarantineStats(
            total=len(items),
            by_kind=dict(Counter(item.kind for item in items)),
            by_source=dict(Counter(item.source for item in items)),
            by_reason=dict(Counter(item.reason for item in items)),
            oldest_at=min((item.updated_at for item in items), default=None),
        )

    async def _change(
        self, which: QuarantineFilter, change: _Change | None, dry_run: bool, events: Sequence[AuditEntry]
    ) -> list[str]:
        if not dry_run:
            return await self._context.write(_change, (which, change, events))
        items = await self._context.read(lambda connection: _matching(connection, which, "", _NO_LIMIT))
        return [item.id for item in items]


@each
def _change(
    transaction: Transaction, which: QuarantineFilter, change: _Change | None, events: Sequence[AuditEntry]
) -> list[str]:
    """Change the items that meet the filter, or delete them when there is no change to make. Returns their ids."""
    items = _matching(transaction.connection, which, "", _NO_LIMIT)
    ids = [item.id for item in items]
    if change is not None:
        rows.update(transaction, [change(item, transaction.now) for item in items])
    else:
        statement = "DELETE FROM work WHERE id IN (SELECT value FROM json_each(?))"
        transaction.connection.execute(statement, (rows.listed(ids),))
    if ids:
        transaction.add_events(events)
    return ids


def _matching(connection: apsw.Connection, which: QuarantineFilter, after: str, limit: int) -> list[WorkItem]:
    """Quarantined items that meet the filter, in the order of their ids, without payloads."""
    given: dict[str, Any] = {
        "id IN (SELECT value FROM json_each(?))": rows.listed(which.ids) if which.ids else None,
        "kind = ?": which.kind,
        "source = ?": which.source,
        "instr(reason, ?) > 0": which.reason_contains,
        "updated_at < ?": which.before,
    }
    conditions = {words: value for words, value in given.items() if value is not None}
    where = ["state = 'quarantined'", "id > ?", *conditions]
    found = rows.page(connection, where, [after, *conditions.values()], limit)
    return [structs.replace(item, payload=b"") for item in found]
