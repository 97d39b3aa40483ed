"""
The audit log of a SQLite store: events as rows, the head of their chain in a row that moves in the same transaction.

The whole log is read in short reads, one after the other: it may have any length, and no read keeps the write-ahead log
from being checkpointed. Retention first moves the anchor, and with that the events before it are gone; their rows are
removed afterwards, some at a time.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import apsw

from reefknot.core.audit import chain
from reefknot.core.audit.chain import ANCHOR, Head, Mismatch
from reefknot.engines.sqlite.context import StoreContext, until
from reefknot.engines.sqlite.transaction import EVENTS_PER_BLOCK, Transaction
from reefknot.ports.audit_log import EVERYTHING, AuditEntry, AuditQuery, KeptEntry

LINKS_PER_READ = 1000
"""Events per read of `verify`."""
ROWS_PER_READ = 20_000
"""Rows per read when no index leads to what is wanted."""
ROWS_PER_DELETE = 1000
"""Rows that one transaction removes."""

_ROWS = "SELECT sequence, hash, at, event_type, correlation_id, trace_id, work_id, body FROM audit"
_FILTERS = (
    ("event_type", "event_type = ?"),
    ("correlation_id", "correlation_id = ?"),
    ("trace_id", "trace_id = ?"),
    ("work_id", "work_id = ?"),
    ("since", "at >= ?"),
    ("until", "at < ?"),
)
_INDEXED = ("event_type", "correlation_id", "trace_id", "work_id")
_HEADS = "SELECT chain, sequence, hash, anchor_sequence, anchor_hash FROM audit_head"

SOON_S = 0.1
"""How long an event that goes with no other change waits for a transaction to join."""


class SqliteAuditLog:
    """Appends events to the chain, reads, verifies and trims them."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        head: Head = await self._context.write(_append_batch, entries)
        return head

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        """Append these with the next transaction of this process, within a tenth of a second: none starts for them."""
        return self._context.write(_append_batch, entries, within=SOON_S)

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        start, end = await self._context.read(partial(_bounds, query=query))
        step = end - start if _is_indexed(query) else ROWS_PER_READ
        found: list[KeptEntry] = []
        while start < end and len(found) < query.limit:
            low, high = (max(start, end - step), end) if query.newest_first else (start, min(end, start + step))
            left = query.limit - len(found)
            found += await self._context.read(partial(_read_rows, query=query, after=low, last=high, limit=left))
            start, end = (start, low) if query.newest_first else (high, end)
        return found

    async def head(self) -> Head:
        return await self._context.read(lambda connection: heads(connection)[0])

    async def verify(
        self, head: Head | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Mismatch]:
        stored, anchor = await self._context.read(heads)
        verifier = chain.ChainVerifier(anchor, stored, *([] if head is None or head == stored else [head]))
        done = anchor.sequence
        while done < stored.sequence:
            links, now_stored, now_anchor = await self._context.read(partial(_links, after=done, end=stored.sequence))
            if now_anchor.sequence > done:  # retention went past this: what is left begins there
                stored, done = now_stored, now_anchor.sequence
                verifier.resume_from(now_anchor, stored)
                continue
            verifier.add(links)
            if progress is not None:
                progress(len(links))
            if len(links) < LINKS_PER_READ:
                break
            done = links[-1].sequence
        return verifier.result() + await self._context.read(_beyond_head)

    async def trim(self, before: int) -> int:
        last = await self._last_before(before)
        gone: int = 0 if last is None else await self._context.write(_trim_batch, last)
        while await self._context.write(_remove_batch, None):  # also what a process that died here has left
            continue
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        deadline = self._context.deadline(timeout)
        while True:
            with self._context.listening("audit") as change:
                if (await self.head()).sequence > after:
                    return True
                left = self._context.left(deadline)
                if not left:
                    return False
                await until(change, left)

    async def _last_before(self, before: int) -> int | None:
        """The last event to remove: the first one that is young enough, and all after it, stay."""
        _, anchor = await self._context.read(heads)
        last, young = anchor.sequence, False
        while not young:
            at, young = await self._context.read(partial(_old_until, after=last, before=before))
            if at == last:
                break
            last = at
        return None if last == anchor.sequence else last


def heads(connection: apsw.Connection) -> tuple[Head, Head]:
    """The head of the chain, and the anchor at which what is left of it begins."""
    row: Any = connection.execute(_HEADS).fetchone()
    return Head(row[0], row[1], row[2]), Head(row[0], row[3], row[4])


def _links(connection: apsw.Connection, after: int, end: int) -> tuple[list[chain.Link], Head, Head]:
    """Some links of the chain with its head and its anchor, all of one snapshot."""
    connection.execute("BEGIN")
    try:
        stored, anchor = heads(connection)
        rows: Any = connection.execute(
            "SELECT sequence, hash, body FROM audit WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
            (after, end, LINKS_PER_READ),
        )
        return [chain.Link(number, hashed, body.encode()) for number, hashed, body in rows], stored, anchor
    finally:
        connection.execute("COMMIT")


def _beyond_head(connection: apsw.Connection) -> list[Mismatch]:
    """Events after the head of the chain: they were not written through it."""
    query = "SELECT min(sequence) FROM audit WHERE sequence > (SELECT sequence FROM audit_head)"
    first: Any = connection.execute(query).get
    return [] if first is None else [Mismatch(int(first), "it stands behind the head of its chain")]


def _old_until(connection: apsw.Connection, after: int, before: int) -> tuple[int, bool]:
    """The last event older than `before`, and whether a younger one was met."""
    rows: Any = connection.execute(
        "SELECT sequence, at FROM audit WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, ROWS_PER_READ)
    )
    last, young = after, False
    for sequence, at in rows:
        young = young or at >= before
        last = last if young else sequence
    return last, young


def _append_batch(transaction: Transaction, batch: list[Sequence[AuditEntry]]) -> list[Head]:
    """Append all entries at once. Every caller is given the head after all of them."""
    for entries in batch:
        transaction.add_events(entries)
    return [transaction.flush_events()] * len(batch)


def _trim_batch(transaction: Transaction, wanted: list[int]) -> list[int]:
    return [_trim(transaction, last) for last in wanted]


def _trim(transaction: Transaction, last: int) -> int:
    """Move the anchor to this event, and say so in the chain. Returns how many events are gone with that."""
    transaction.flush_events()
    connection = transaction.connection
    head, anchor = heads(connection)
    row: Any = connection.execute("SELECT hash FROM audit WHERE sequence = ?", (last,)).fetchone()
    if row is None or last <= anchor.sequence:  # another process was faster
        return 0
    connection.execute("UPDATE audit_head SET anchor_sequence = ?, anchor_hash = ?", (last, row[0]))
    at = transaction.now.wall
    body = chain.anchor_body(Head(head.chain, last, row[0]), at)
    transaction.add_events([AuditEntry(body, ANCHOR, at)])
    return last - anchor.sequence


def _remove_batch(transaction: Transaction, wanted: list[None]) -> list[int]:
    row: Any = transaction.connection.execute(
        "SELECT min(sequence), (SELECT anchor_sequence FROM audit_head) FROM audit"
    ).fetchone()
    first, anchor = row
    if first is None or first > anchor:
        return [0] * len(wanted)
    last = min(anchor, first + ROWS_PER_DELETE - 1)
    transaction.connection.execute("DELETE FROM audit WHERE sequence <= ?", (last,))
    gone = transaction.connection.changes()
    transaction.connection.execute("DELETE FROM audit_block WHERE block < ?", (last // EVENTS_PER_BLOCK,))
    return [gone] * len(wanted)


def _is_indexed(query: AuditQuery) -> bool:
    """Whether a read comes by no row that is not wanted, and need not be cut into pieces."""
    return any(getattr(query, name) is not None for name in _INDEXED) or (query.since is None and query.until is None)


def _bounds(connection: apsw.Connection, query: AuditQuery) -> tuple[int, int]:
    """The sequence before the first event that can be meant, and that of the last one."""
    stored, anchor = heads(connection)
    start, end = max(query.after, anchor.sequence), stored.sequence
    if query.before is not None:
        end = min(end, query.before - 1)
    if query.since is not None:
        block: Any = connection.execute("SELECT min(block) FROM audit_block WHERE latest_at >= ?", (query.since,)).get
        start = end if block is None else max(start, block * EVENTS_PER_BLOCK - 1)
    return start, end


def _read_rows(connection: apsw.Connection, query: AuditQuery, after: int, last: int, limit: int) -> list[KeptEntry]:
    """Events that meet the query, behind `after` and up to `last`."""
    given = [(words, getattr(query, name)) for name, words in _FILTERS if getattr(query, name) is not None]
    if any(getattr(query, name) is not None for name in _INDEXED[1:]):  # there are few of one id, and many of one type
        given = [(f"+{words}" if words.startswith("event_type") else words, value) for words, value in given]
    where = " AND ".join(["sequence > ?", "sequence <= ?", *(words for words, _ in given)])
    order = "DESC" if query.newest_first else "ASC"
    values = (after, last, *(value for _, value in given), limit)
    found: Any = connection.execute(f"{_ROWS} WHERE {where} ORDER BY sequence {order} LIMIT ?", values)
    return [
        KeptEntry(sequence, hashed, AuditEntry(body.encode(), event_type, at, correlation_id, trace_id, work_id))
        for sequence, hashed, at, event_type, correlation_id, trace_id, work_id, body in found
    ]
