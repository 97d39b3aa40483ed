"""
Events as rows, and the head of their chain in a row of its own, moved in the same transaction.

What walks through the whole log does it in short reads, one after the other: the log may have any length, and no read
keeps the write-ahead log from being folded back. What retention lets go of is gone when the anchor has moved; its rows
are removed afterwards, some at a time.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import apsw

from reefknot.core.audit import chain
from reefknot.core.audit.chain import ANCHOR, Head, Mismatch
from reefknot.engines.sqlite.reads import Link, until
from reefknot.engines.sqlite.transaction import Transaction
from reefknot.ports.audit_log import EVERYTHING, AuditEntry, AuditQuery, KeptEntry

LINKS_AT_ONCE = 1000
"""Events that one read of a walk takes."""
LOOKED_AT_ONCE = 20_000
"""Rows that one read looks at when no index leads to what is wanted."""
REMOVED_AT_ONCE = 1000
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
_INDEXED = ("correlation_id", "trace_id", "work_id")
_HEADS = "SELECT chain, sequence, hash, anchor_sequence, anchor_hash FROM audit_head"

SOON_S = 0.1
"""How long an event that goes with no other change waits for a transaction to join."""


class SqliteAuditLog:
    """The log of a SQLite store."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        head: Head = await self._link.write(self._appends, entries)
        return head

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        return self._link.write(self._appends, entries, within=SOON_S)

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        given = [(words, getattr(query, name)) for name, words in _FILTERS if getattr(query, name) is not None]
        is_short = not given or any(getattr(query, name) is not None for name in _INDEXED)
        found: list[KeptEntry] = []
        after: int | None = query.after
        while after is not None:
            left, rows = query.limit - len(found), None if is_short else LOOKED_AT_ONCE
            page, after = await self._link.read(partial(_window, given=given, after=after, left=left, rows=rows))
            found += page
        return found

    async def head(self) -> Head:
        return await self._link.read(lambda connection: heads(connection)[0])

    async def verify(
        self, head: Head | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Mismatch]:
        stored, anchor = await self._link.read(heads)
        walk = chain.Walk(anchor, stored, *([] if head is None or head == stored else [head]))
        done = anchor.sequence
        while done < stored.sequence:
            links, now_stored, now_anchor = await self._link.read(partial(_links, after=done, end=stored.sequence))
            if now_anchor.sequence > done:  # retention went past us: what is left begins there
                stored, done = now_stored, now_anchor.sequence
                walk.go_on_from(now_anchor, stored)
                continue
            walk.take(links)
            if progress is not None:
                progress(len(links))
            if len(links) < LINKS_AT_ONCE:
                break
            done = links[-1].sequence
        return walk.result() + await self._link.read(_behind)

    async def trim(self, before: int) -> int:
        last = await self._last_before(before)
        gone: int = 0 if last is None else await self._link.write(self._trims, last)
        while await self._link.write(_removes, None):  # also what a process that died in here has left
            continue
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        deadline = self._link.deadline(timeout)
        while True:
            with self._link.listening("audit") as change:
                if (await self.head()).sequence > after:
                    return True
                left = self._link.left(deadline)
                if not left:
                    return False
                await until(change, left)

    async def _last_before(self, before: int) -> int | None:
        """The last event of the old beginning: the first one that is young enough, and all after it, stay."""
        _, anchor = await self._link.read(heads)
        last, young = anchor.sequence, False
        while not young:
            at, young = await self._link.read(partial(_old, after=last, before=before))
            if at == last:
                break
            last = at
        return None if last == anchor.sequence else last

    def _appends(self, transaction: Transaction, wanted: list[Sequence[AuditEntry]]) -> list[Head]:
        answers = []
        for entries in wanted:
            transaction.tell(entries)
            answers.append(transaction.chain())
        return answers

    def _trims(self, transaction: Transaction, wanted: list[int]) -> list[int]:
        return [self._trim(transaction, last) for last in wanted]

    def _trim(self, transaction: Transaction, last: int) -> int:
        """Move the anchor, and say so in the chain. From then on what came before it is gone."""
        transaction.chain()
        connection = transaction.connection
        head, anchor = heads(connection)
        row: Any = connection.execute("SELECT hash FROM audit WHERE sequence = ?", (last,)).fetchone()
        if row is None or last <= anchor.sequence:  # another process was faster
            return 0
        connection.execute("UPDATE audit_head SET anchor_sequence = ?, anchor_hash = ?", (last, row[0]))
        at = transaction.now.wall
        body = chain.anchor_body(Head(head.chain, last, row[0]), at)
        transaction.tell([AuditEntry(body, ANCHOR, at)])
        return last - anchor.sequence


def heads(connection: apsw.Connection) -> tuple[Head, Head]:
    """Where the chain stands, and where what is left of it begins."""
    row: Any = connection.execute(_HEADS).fetchone()
    return Head(row[0], row[1], row[2]), Head(row[0], row[3], row[4])


def _links(connection: apsw.Connection, after: int, end: int) -> tuple[list[chain.Link], Head, Head]:
    """Some links, and both heads as they were in the same snapshot."""
    connection.execute("BEGIN")
    try:
        stored, anchor = heads(connection)
        rows: Any = connection.execute(
            "SELECT sequence, hash, body FROM audit WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
            (after, end, LINKS_AT_ONCE),
        )
        return [chain.Link(number, hashed, body.encode()) for number, hashed, body in rows], stored, anchor
    finally:
        connection.execute("COMMIT")


def _behind(connection: apsw.Connection) -> list[Mismatch]:
    """Events behind the end of the chain: whoever put them there did not go through it."""
    query = "SELECT min(sequence) FROM audit WHERE sequence > (SELECT sequence FROM audit_head)"
    first: Any = connection.execute(query).get
    return [] if first is None else [Mismatch(int(first), "it stands behind the head of its chain")]


def _old(connection: apsw.Connection, after: int, before: int) -> tuple[int, bool]:
    """How far the events are older than that, and whether one that is not was met."""
    rows: Any = connection.execute(
        "SELECT sequence, at FROM audit WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, LOOKED_AT_ONCE)
    )
    last, young = after, False
    for sequence, at in rows:
        young = young or at >= before
        last = last if young else sequence
    return last, young


def _removes(transaction: Transaction, wanted: list[None]) -> list[int]:
    row: Any = transaction.connection.execute(
        "SELECT min(sequence), (SELECT anchor_sequence FROM audit_head) FROM audit"
    ).fetchone()
    first, anchor = row
    if first is None or first > anchor:
        return [0] * len(wanted)
    last = min(anchor, first + REMOVED_AT_ONCE - 1)
    transaction.connection.execute("DELETE FROM audit WHERE sequence <= ?", (last,))
    return [transaction.connection.changes()] * len(wanted)


def _window(
    connection: apsw.Connection, given: list[tuple[str, Any]], after: int, left: int, rows: int | None
) -> tuple[list[KeptEntry], int | None]:
    """What one read finds of a page, and where the next one goes on; None: that was all, or the page is full."""
    stored, anchor = heads(connection)
    start = max(after, anchor.sequence)
    where = ["sequence > ?", *(words for words, _ in given)]
    values = [start, *(value for _, value in given)]
    if rows is not None:
        where.append("sequence <= ?")
        values.append(start + rows)
    found: Any = connection.execute(f"{_ROWS} WHERE {' AND '.join(where)} ORDER BY sequence LIMIT ?", (*values, left))
    kept = [
        KeptEntry(sequence, hashed, AuditEntry(body.encode(), event_type, at, correlation_id, trace_id, work_id))
        for sequence, hashed, at, event_type, correlation_id, trace_id, work_id, body in found
    ]
    if rows is None or len(kept) >= left or start + rows >= stored.sequence:
        return kept, None
    return kept, start + rows
