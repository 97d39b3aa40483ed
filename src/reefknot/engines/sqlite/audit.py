"""Events as rows, and the head of their chain in a row of its own, moved in the same transaction."""

from collections.abc import Iterator, Sequence
from typing import Any

import apsw

from reefknot.core.audit import chain
from reefknot.core.audit.chain import ANCHOR, Head, Mismatch
from reefknot.engines.sqlite.link import Link
from reefknot.engines.sqlite.transaction import Transaction
from reefknot.engines.sqlite.wake import until
from reefknot.ports.audit_log import EVERYTHING, AuditEntry, AuditQuery, KeptEntry

_ROWS = "SELECT sequence, hash, at, event_type, correlation_id, trace_id, work_id, body FROM audit"
_FILTERS = (
    ("event_type", "event_type = ?"),
    ("correlation_id", "correlation_id = ?"),
    ("trace_id", "trace_id = ?"),
    ("work_id", "work_id = ?"),
    ("since", "at >= ?"),
    ("until", "at < ?"),
)


class SqliteAuditLog:
    """The log of a SQLite store."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        head: Head = await self._link.write(self._appends, entries)
        return head

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        return await self._link.read(lambda connection: _page(connection, query))

    async def head(self) -> Head:
        return await self._link.read(lambda connection: heads(connection)[0])

    async def verify(self, head: Head | None = None) -> list[Mismatch]:
        return await self._link.read(lambda connection: verify(connection, head))

    async def trim(self, before: int) -> int:
        gone: int = await self._link.write(self._trims, before)
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

    def _appends(self, transaction: Transaction, wanted: list[Sequence[AuditEntry]]) -> list[Head]:
        answers = []
        for entries in wanted:
            transaction.tell(entries)
            answers.append(transaction.chain())
        return answers

    def _trims(self, transaction: Transaction, wanted: list[int]) -> list[int]:
        return [self._trim(transaction, before) for before in wanted]

    def _trim(self, transaction: Transaction, before: int) -> int:
        transaction.chain()
        connection = transaction.connection
        head, _ = heads(connection)
        # Only from the start on: the first event that is young enough, and all after it, stay.
        first: Any = connection.execute("SELECT min(sequence) FROM audit WHERE at >= ?", (before,)).get
        last = head.sequence if first is None else first - 1
        row: Any = connection.execute("SELECT hash FROM audit WHERE sequence = ?", (last,)).fetchone()
        if row is None:
            return 0
        anchor = Head(head.chain, last, row[0])
        connection.execute("DELETE FROM audit WHERE sequence <= ?", (last,))
        gone = connection.changes()
        connection.execute("UPDATE audit_head SET anchor_sequence = ?, anchor_hash = ?", (last, anchor.hash))
        at = transaction.now.wall
        transaction.tell([AuditEntry(chain.anchor_body(anchor, at), ANCHOR, at)])
        return gone


def heads(connection: apsw.Connection) -> tuple[Head, Head]:
    """Where the chain stands, and where what is left of it begins."""
    row: Any = connection.execute(
        "SELECT chain, sequence, hash, anchor_sequence, anchor_hash FROM audit_head"
    ).fetchone()
    return Head(row[0], row[1], row[2]), Head(row[0], row[3], row[4])


def verify(connection: apsw.Connection, head: Head | None) -> list[Mismatch]:
    """Walk the stored chain, in one snapshot."""
    connection.execute("BEGIN")
    try:
        stored, anchor = heads(connection)
        found = chain.verify(_links(connection), stored, start=anchor)
        if head is not None and head != stored:
            found += [one for one in chain.verify(_links(connection), head, start=anchor) if one not in found]
        return found
    finally:
        connection.execute("COMMIT")


def _links(connection: apsw.Connection) -> Iterator[chain.Link]:
    rows: Any = connection.execute("SELECT sequence, hash, body FROM audit ORDER BY sequence")
    for sequence, hashed, body in rows:
        yield chain.Link(sequence, hashed, body.encode())


def _page(connection: apsw.Connection, query: AuditQuery) -> list[KeptEntry]:
    given = [(words, getattr(query, name)) for name, words in _FILTERS if getattr(query, name) is not None]
    where = " AND ".join(["sequence > ?", *(words for words, _ in given)])
    values = (query.after, *(value for _, value in given), query.limit)
    rows: Any = connection.execute(f"{_ROWS} WHERE {where} ORDER BY sequence LIMIT ?", values)
    return [
        KeptEntry(sequence, hashed, AuditEntry(body.encode(), event_type, at, correlation_id, trace_id, work_id))
        for sequence, hashed, at, event_type, correlation_id, trace_id, work_id, body in rows
    ]
