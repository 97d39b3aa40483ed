"""
The audit log of a SQLite store: events as rows, the head of their chain in a row that moves in the same transaction.

The whole log is read in short reads, one after the other: it may have any length, and no read keeps the write-ahead log
from being checkpointed. Retention first moves the anchor, and with that the events before it are gone; their rows are
removed afterwards, some at a time.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from math import inf
from typing import Any

import apsw
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from reefknot.audit.model import chain
from reefknot.audit.model.chain import ANCHOR, EventIndex, Head, Mismatch, Removal, RetentionInForce
from reefknot.audit.model.event import RESULT_DIGITS
from reefknot.audit.port import EVERYTHING, AuditEntry, AuditQuery, KeptEntry, pages_of
from reefknot.stores.sqlite.connection import query
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import EVENTS_PER_BLOCK, Transaction, each
from reefknot.stores.sqlite.wait_table import AUDIT_TOPIC

LINKS_PER_READ = 1000
"""Events per read of `verify`."""
ROWS_PER_READ = 20_000
"""Rows per read when no index leads to what is wanted."""
ROWS_PER_DELETE = 1000
"""Rows that one transaction removes."""

# Bodies are read as bytes. A changed body may be neither text nor JSON; the chain reports that.
_ROWS = "SELECT sequence, hash, at, event_type, correlation_id, trace_id, work_id, CAST(body AS BLOB) FROM audit"
_ROWS_AS_BYTES = (
    "SELECT sequence, CAST(hash AS BLOB), at, CAST(event_type AS BLOB), CAST(correlation_id AS BLOB), "
    "CAST(trace_id AS BLOB), CAST(work_id AS BLOB), CAST(body AS BLOB) FROM audit"
)
_IDS = ("correlation_id", "trace_id", "work_id")
_INDEXED = ("event_type", *_IDS)
_FILTERS = {name: f"{name} = ?" for name in _INDEXED} | {"since": "at >= ?", "until": "at < ?"}
_LINKS = (
    "SELECT sequence, CAST(hash AS BLOB), CAST(body AS BLOB) FROM audit "
    "WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?"
)
_HEADS = "SELECT chain, sequence, hash, anchor_sequence, anchor_hash FROM audit_head"

_RESULTS = (
    "SELECT work.seq, work.id, work.result, audit.sequence, CAST(audit.body AS BLOB) "
    "FROM work LEFT JOIN audit ON audit.sequence = ("
    "SELECT max(sequence) FROM audit WHERE work_id = substr(work.id, instr(work.id, '|') + 1) "
    "AND +event_type = 'completed' AND CASE WHEN json_valid(body) THEN "
    "ifnull(json_extract(body, '$.tenant_id'), '') = ifnull(work.tenant_id, '') ELSE true END) "
    "WHERE work.seq > ? ORDER BY work.seq LIMIT ?"
)

_RESULT_DIGITS = (RESULT_DIGITS, 64)
"""Older events have the whole hash."""

SOON_S = 0.1
"""How long an event that belongs to no other change waits for a transaction to join."""


class SqliteAuditLog:
    """Appends events to the chain, reads, verifies and trims them."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        return await self._context.write(_append_batch, entries)

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        """Append these with the next transaction of this process, or in one of their own after a tenth of a second."""
        return self._context.submit(_append_batch, entries, within=SOON_S)

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        start, end = await self._context.read(partial(_bounds, wanted=query))
        step = end - start if _is_indexed(query) else ROWS_PER_READ
        found: list[KeptEntry] = []
        is_done = False
        while not is_done:  # an empty log is asked as well: a filter that is no text is refused there too
            low, high = (max(start, end - step), end) if query.newest_first else (start, min(end, start + step))
            left = query.limit - len(found)
            found += await self._context.read(partial(_read_rows, wanted=query, after=low, last=high, limit=left))
            start, end = (start, low) if query.newest_first else (high, end)
            is_done = start >= end or len(found) >= query.limit
        return found

    async def end_before(self, until: int) -> int:
        return await self._context.read(partial(_end_before, until=until))

    async def head(self) -> Head:
        return await self._context.read(lambda connection: heads(connection)[0])

    async def verify(
        self,
        head: Head | None = None,
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Mismatch]:
        stored, anchor = await self._context.read(heads)
        others = [] if head is None or head == stored else [head]
        verifier = chain.ChainVerifier(anchor, stored, *others, in_force=in_force)
        done = anchor.sequence
        while done < stored.sequence:
            links, now_stored, now_anchor = await self._context.read(partial(_links, after=done, end=stored.sequence))
            if now_anchor.sequence > done:  # retention has removed this: the log begins at the anchor
                stored, done = now_stored, now_anchor.sequence
                verifier.resume_from(now_anchor, stored)
                continue
            verifier.add(links)
            if progress is not None:
                progress(len(links))
            if len(links) < LINKS_PER_READ:
                break
            done = links[-1].sequence
        found = verifier.result() + await self._context.read(_beyond_head)
        return found + await self._changed_results()

    async def index_mismatches(self) -> list[Mismatch]:
        """Events that a search by their own fields would miss: their columns do not say what their bodies do."""
        found: list[Mismatch] = []
        async for page in pages_of(self):
            for kept in page:
                one = kept.entry
                filed = EventIndex(one.event_type, one.correlation_id, one.trace_id, one.work_id)
                wrong = chain.index_mismatch(kept.sequence, one.body, filed, one.at)
                found += [] if wrong is None else [wrong]
        return found

    async def _changed_results(self) -> list[Mismatch]:
        """Stored results that are not those of their `completed` events."""
        found: list[Mismatch] = []
        after: int | None = 0
        while after is not None:
            page, after = await self._context.read(partial(_changed_results, after=after))
            found += page
        return found

    async def trim(self, before: int, *, rule: str = "by hand") -> int:
        last = await self._last_before(before)
        gone = 0 if last is None else await self._context.write(_trim, (last, rule))
        while await self._context.write(_remove_batch, ()):  # also what a process that died here has left
            continue
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        head = await self._context.watch(
            self.head, AUDIT_TOPIC, pause=lambda head: inf if head.sequence <= after else 0.0, timeout=timeout
        )
        return head.sequence > after

    async def _last_before(self, before: int) -> int | None:
        """The last event to remove: the first event that is young enough stays, and so do all after it."""
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
    name, sequence, hashed, anchor_sequence, anchor_hash = query(connection, _HEADS).fetchone()
    return Head(name, sequence, hashed), Head(name, anchor_sequence, anchor_hash)


def _links(connection: apsw.Connection, after: int, end: int) -> tuple[list[chain.Link], Head, Head]:
    """Some links of the chain with its head and its anchor, all of one snapshot."""
    connection.execute("BEGIN")
    try:
        stored, anchor = heads(connection)
        rows = query(connection, _LINKS, (after, end, LINKS_PER_READ))
        return [chain.Link(number, _text(hashed), body) for number, hashed, body in rows], stored, anchor
    finally:
        connection.execute("COMMIT")


def _text(value: bytes) -> str:
    """The text of a column that was read as bytes; invalid bytes are replaced, and so match nothing."""
    return value.decode("utf-8", "replace")


def _beyond_head(connection: apsw.Connection) -> list[Mismatch]:
    """Events after the head of the chain: they were not written through it."""
    beyond = "SELECT min(sequence) FROM audit WHERE sequence > (SELECT sequence FROM audit_head)"
    first = query(connection, beyond).get
    return [] if first is None else [Mismatch(int(first), "it is behind the head of its chain")]


def _changed_results(connection: apsw.Connection, after: int) -> tuple[list[Mismatch], int | None]:
    """Results of one page of work that differ from the hash in their last `completed` event, and the next page."""
    rows = query(connection, _RESULTS, (after, LINKS_PER_READ))
    found: list[Mismatch] = []
    last: int | None = None
    for last, work_id, result, sequence, body in rows:  # noqa: B007 - the last one is where the next page begins
        if result is not None and body is not None and _is_json(body):  # else the chain names the event
            hashed = sha256(result.encode()).hexdigest()
            if not any(f'"result_hash":"{hashed[:digits]}"'.encode() in body for digits in _RESULT_DIGITS):
                found.append(Mismatch(sequence, f"the stored result of {work_id!r} is not the one of this event"))
            elif not _is_same_end(result, body):
                found.append(Mismatch(sequence, f"the stored result of {work_id!r} is of another end than this event"))
    return found, last


def _is_json(body: bytes) -> bool:
    try:
        _any(body)
    except chain.UNREADABLE:
        return False
    return True


class _End(Struct):
    """The fields that a result and the event of its end share."""

    status: str = ""
    retries_used: int | None = None
    attempts: int | None = 1


_ends = Decoder(_End)
_any = Decoder(Raw).decode


def _is_same_end(result: str, body: bytes) -> bool:
    """
    Whether status and attempts of a result are those of its event. An end that a router made had no attempt.

    The summary of an ingestion job has neither, and is only stored by a success.
    """
    try:
        reported, recorded = _ends.decode(result), _ends.decode(body)
    except (DecodeError, UnicodeDecodeError):
        return False
    if not reported.status:
        return recorded.status == "success"
    attempts = None if reported.retries_used is None else reported.retries_used + 1
    return reported.status == recorded.status and recorded.attempts in (0, attempts)


def _old_until(connection: apsw.Connection, after: int, before: int) -> tuple[int, bool]:
    """The last event older than `before` that is no anchor, and whether a younger one was met."""
    ages = "SELECT sequence, at, event_type FROM audit WHERE sequence > ? ORDER BY sequence LIMIT ?"
    last, young = after, False
    for sequence, at, event_type in query(connection, ages, (after, ROWS_PER_READ)):
        young = young or at >= before
        last = last if young or event_type == ANCHOR else sequence
    return last, young


def _append_batch(transaction: Transaction, batch: list[Sequence[AuditEntry]]) -> list[Head]:
    """Append all entries at once. Every caller is given the head after all of them."""
    for entries in batch:
        transaction.add_events(entries)
    return [transaction.flush_events()] * len(batch)


@each
def _trim(transaction: Transaction, last: int, rule: str) -> int:
    """Move the anchor to this event, with an event in the chain. Returns how many events are removed by that."""
    transaction.flush_events()
    connection = transaction.connection
    head, anchor = heads(connection)
    row = query(connection, "SELECT hash, CAST(body AS BLOB) FROM audit WHERE sequence = ?", (last,)).fetchone()
    if row is None or last <= anchor.sequence:  # another process was faster
        return 0
    before = query(connection, "SELECT hash FROM audit WHERE sequence = ?", (last - 1,)).get
    previous = anchor.hash if last - 1 == anchor.sequence else before
    removal = Removal(rule, last - anchor.sequence, previous or "", row[1])
    connection.execute("UPDATE audit_head SET anchor_sequence = ?, anchor_hash = ?", (last, row[0]))
    at = transaction.now.wall
    body = chain.anchor_body(Head(head.chain, last, row[0]), at, removal)
    transaction.add_events([AuditEntry(body, ANCHOR, at)])
    return last - anchor.sequence


@each
def _remove_batch(transaction: Transaction) -> int:
    """Remove some rows before the anchor. Returns how many."""
    connection = transaction.connection
    first, anchor = query(
        connection, "SELECT min(sequence), (SELECT anchor_sequence FROM audit_head) FROM audit"
    ).fetchone()
    if first is None or first > anchor:
        return 0
    last = min(anchor, first + ROWS_PER_DELETE - 1)
    connection.execute("DELETE FROM audit WHERE sequence <= ?", (last,))
    gone = connection.changes()
    connection.execute("DELETE FROM audit_block WHERE block < ?", (last // EVENTS_PER_BLOCK,))
    return gone


def _is_indexed(wanted: AuditQuery) -> bool:
    """Whether a read meets only wanted rows, and need not be split."""
    return any(getattr(wanted, name) is not None for name in _INDEXED) or (
        wanted.since is None and wanted.until is None
    )


def _bounds(connection: apsw.Connection, wanted: AuditQuery) -> tuple[int, int]:
    """The sequence before the first event that can be meant, and that of the last one."""
    stored, anchor = heads(connection)
    start, end = max(wanted.after, anchor.sequence), stored.sequence
    if wanted.before is not None:
        end = min(end, wanted.before - 1)
    if wanted.since is not None:
        block = query(connection, "SELECT min(block) FROM audit_block WHERE latest_at >= ?", (wanted.since,)).get
        start = end if block is None else max(start, block * EVENTS_PER_BLOCK - 1)
    if wanted.until is not None:
        end = max(start, min(end, _end_before(connection, wanted.until)))
    return start, end


def _end_before(connection: apsw.Connection, until: int) -> int:
    """The end of the last block that has an event before this time; 0 without one."""
    block = query(connection, "SELECT max(block) FROM audit_block WHERE earliest_at < ?", (until,)).get
    return 0 if block is None else int((block + 1) * EVENTS_PER_BLOCK - 1)


def _read_rows(connection: apsw.Connection, wanted: AuditQuery, after: int, last: int, limit: int) -> list[KeptEntry]:
    """Events that meet the query, behind `after` and up to `last`."""
    given = {words: value for name, words in _FILTERS.items() if (value := getattr(wanted, name)) is not None}
    if any(getattr(wanted, name) is not None for name in _IDS):  # few events share an id, many share a type
        given = {words.replace("event_type", "+event_type"): value for words, value in given.items()}
    where = " AND ".join(["sequence > ?", "sequence <= ?", *given])
    order = "DESC" if wanted.newest_first else "ASC"
    rest = f"WHERE {where} ORDER BY sequence {order} LIMIT ?"
    values = (after, last, *given.values(), limit)
    try:
        found = query(connection, f"{_ROWS} {rest}", values).fetchall()
    except UnicodeDecodeError:
        rows = query(connection, f"{_ROWS_AS_BYTES} {rest}", values)
        found = [[*map(_text_or_other, row[:-1]), row[-1]] for row in rows]
    return [
        KeptEntry(sequence, hashed, AuditEntry(body, event_type, at, correlation_id, trace_id, work_id))
        for sequence, hashed, at, event_type, correlation_id, trace_id, work_id, body in found
    ]


def _text_or_other(value: Any) -> Any:
    return _text(value) if isinstance(value, bytes) else value
