"""
The idempotency keys of a SQLite store, as rows.

All requests of a batch are decided by `idempotency.model` on the records as of the transaction: one read, one write,
whatever the number of callers.

Rows are in the order of their arrival, and are found by the hash of their key in one of two tables. A new key enters
`recent_key`, which is small. Range by range, recent keys move to `older_key`, where keys of one range are neighbours:
a page that is rewritten takes many keys. In one large index each new key would rewrite a page of its own, and the disk
would be busy with them.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import apsw
from msgspec import Struct, json, structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import milliseconds
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError, ReefknotError
from reefknot.idempotency import model as core
from reefknot.idempotency.model import (
    Claim,
    Claimed,
    ClaimRequest,
    ClaimResult,
    Ending,
    KeyRecord,
    KeyState,
    Lost,
    checked_key,
)
from reefknot.idempotency.port import TakeoverEvents
from reefknot.stores.sqlite import upkeep
from reefknot.stores.sqlite.audit import SqliteAuditLog
from reefknot.stores.sqlite.connection import HASH_BITS, key_hash, moved, query
from reefknot.stores.sqlite.reads import StoreContext
from reefknot.stores.sqlite.transaction import BulkStatement, Handler, StoredKey, Transaction, each, write_apart
from reefknot.stores.sqlite.wait_table import KEY_TOPIC

RECENT_KEYS = 1 << 16
"""About the largest number of keys in `recent_key`."""
ROWS_PER_MOVE = 256
PAGE_ROWS = 500

_NAMES = KeyRecord.__struct_fields__
_COLUMNS = ", ".join(_NAMES)
# Key by key in the given order. `key IN (…)` would sort them first.
_FIND = (
    "SELECT found.* FROM json_each(?1) AS wanted CROSS JOIN {} AS hashed ON hashed.hash = wanted.value ->> 0 "
    "CROSS JOIN idempotency AS found ON found.seq = hashed.seq AND found.key = wanted.value ->> 1"
)
_LOAD = (
    f"SELECT json_group_array(json_array(seq, json_array({_COLUMNS}))) "  # noqa: S608
    f"FROM ({_FIND.format('recent_key')} UNION ALL {_FIND.format('older_key')})"
)
_BEHIND = (
    f"SELECT json_group_array(json_array(seq, json_array({_COLUMNS}))) "  # noqa: S608
    "FROM (SELECT * FROM idempotency WHERE seq > ? ORDER BY seq LIMIT ?)"
)
_MOVE = "INSERT INTO older_key SELECT hash, seq FROM recent_key WHERE hash BETWEEN ? AND ?"
_MOVED = "DELETE FROM recent_key WHERE hash BETWEEN ? AND ?"
_LAST = "SELECT ifnull(max(seq), 0) FROM idempotency"
_INSERT = BulkStatement(
    f"INSERT OR ROLLBACK INTO idempotency (seq, hash, {_COLUMNS}) VALUES {{}}",  # noqa: S608
    width=2 + len(_NAMES),
)


def _updating(names: Sequence[str]) -> BulkStatement:
    """An update of these columns. A row is the key's row number and the columns' values."""
    values = ", ".join(f"{name} = new.column{number}" for number, name in enumerate(names, 2))
    template = f"UPDATE OR ROLLBACK idempotency SET {values} FROM (VALUES {{}}) AS new WHERE seq = new.column1"  # noqa: S608
    places = ", ".join(f"{name} = ?{number}" for number, name in enumerate(names, 2))
    single = f"UPDATE OR ROLLBACK idempotency SET {places} WHERE seq = ?1"  # noqa: S608
    return BulkStatement(template, width=1 + len(names), single=single)


_REPLACE = _updating(_NAMES[1:])
# The columns that can change under one fence: owner and fingerprint are fixed by the claim.
_CHANGING = ("state", "lease_until", "lease_ms", "result", "failure", "metadata", "updated_at", "expires_at")
_UPDATE = _updating(_CHANGING)
_changes = attrgetter(*_CHANGING)
_FULL_FOR_MS = 1000
_IN_PROGRESS = KeyState.IN_PROGRESS
_rows = json.Decoder(list[StoredKey], strict=False)  # SQLite's booleans are 0 and 1


class _Renew(Struct, frozen=True):
    claim: Claim
    lease_ms: int


class _Finish(Struct, frozen=True):
    claim: Claim
    ending: Ending


class _Resolve(Struct, frozen=True):
    key: str
    ending: Ending


_Operation = ClaimRequest | _Renew | _Finish | _Resolve
_Request = tuple[str, _Operation, Sequence[AuditEntry], TakeoverEvents | None]


class SqliteIdempotencyStore:
    """Claims, renews and finishes keys. Requests of concurrent callers share a transaction."""

    durable = True

    def __init__(
        self,
        context: StoreContext,
        audit: SqliteAuditLog,
        *,
        retention: float,
        largest_result: int,
        most_keys: int | None,
        connect: Callable[[], apsw.Connection],
    ) -> None:
        self.audit = audit
        self._context = context
        self._connect = connect
        self._retention_ms = milliseconds(retention)
        self._largest_result = largest_result
        self._most_keys = most_keys
        self._full_until = 0
        # Bound once: the writer groups requests by the identity of their handler.
        self._write = context.write
        self._handler: Handler[Any, Any] = self._apply_batch

    async def claim(
        self,
        key: str,
        *,
        owner: str,
        fingerprint: str = "",
        lease: float = 60.0,
        guard: bool = False,
        events: Sequence[AuditEntry] = (),
        takeover_events: TakeoverEvents | None = None,
    ) -> ClaimResult:
        request = ClaimRequest(checked_key(key), owner, fingerprint, milliseconds(lease), guard)
        answer: ClaimResult = await self._write(self._handler, (key, request, events, takeover_events))
        return answer

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        operation = _Renew(claim, milliseconds(lease))
        record: KeyRecord = await self._write(self._handler, (claim.key, operation, (), None))
        return record

    def extend(self, claims: Sequence[Claim], *, lease: float) -> None:
        requests: list[_Request] = [(one.key, _Renew(one, milliseconds(lease)), (), None) for one in claims]
        write_apart(self._connect, self._context.now, self._handler, requests)

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        core.checked_ending(ending, self._largest_result)
        record: KeyRecord = await self._write(self._handler, (claim.key, _Finish(claim, ending), events, None))
        return record

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        core.checked_ending(ending, self._largest_result)
        resolved: bool = await self._write(self._handler, (checked_key(key), _Resolve(key, ending), events, None))
        return resolved

    async def get(self, key: str) -> KeyRecord | None:
        checked_key(key)
        found = await self._context.read(lambda connection: load(connection, [key]))
        record = found.get(key)
        return None if record is None or core.is_spent(record, self._context.now()) else record

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        def pause(record: KeyRecord | None) -> float:
            if record is None or record.state is not _IN_PROGRESS:
                return 0.0
            return (record.lease_until - self._context.now().steady) / 1000

        return await self._context.watch(partial(self.get, key), KEY_TOPIC + key, pause=pause, timeout=timeout)

    async def counts(self) -> Mapping[KeyState, int]:
        now = self._context.now()
        statement = f"SELECT state, count(*) FROM idempotency WHERE NOT ({upkeep.SPENT}) GROUP BY state"  # noqa: S608
        counts = await self._context.read(
            lambda connection: query(connection, statement, (now.wall, now.steady)).fetchall()
        )
        return {KeyState(state): number for state, number in counts}

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        forgotten: bool = await self._write(_forget, (checked_key(key), events))
        return forgotten

    async def records(self) -> AsyncIterator[list[KeyRecord]]:
        seq = 0
        while found := await self._context.read(partial(_page_behind, seq=seq)):
            yield [record for _, record in found]
            seq = found[-1][0]

    async def adopt(self, records: Sequence[KeyRecord]) -> int:
        return await self._write(_adopt, (records,))

    async def purge(self) -> int:
        return await upkeep.purge_keys(self._context)

    def _apply_batch(self, transaction: Transaction, requests: list[_Request]) -> list[Any]:
        """Apply all claims, renewals and endings of a batch, one after the other."""
        stored = _current(transaction, [key for key, *_ in requests])
        records = {key: record for key, (_, record) in stored.items()}
        changed: dict[str, KeyRecord] = {}
        answers: list[Any] = []
        for key, operation, events, takeover_events in requests:
            old = records.get(key)
            try:
                answer, new = self._decide(transaction, old, operation, records)
            except ReefknotError as error:
                answers.append(error)
                continue
            answers.append(answer)
            if new is not None and new is not old:
                records[key] = changed[key] = new
                transaction.touched.add(KEY_TOPIC + key)
                if events and (not isinstance(operation, ClaimRequest) or isinstance(answer, Claimed)):
                    transaction.add_events(events)
                if (
                    takeover_events is not None
                    and old is not None
                    and isinstance(answer, Claimed)
                    and answer.taken_over
                ):
                    transaction.add_events(takeover_events(old, new))
        if changed:
            _save(transaction, changed.values(), stored)
        return answers

    def _decide(
        self, transaction: Transaction, old: KeyRecord | None, operation: _Operation, records: Mapping[str, KeyRecord]
    ) -> tuple[Any, KeyRecord | None]:
        """The answer to a request, and the record to keep."""
        now, retention_ms = transaction.now, self._retention_ms
        match operation:
            case ClaimRequest():
                if (refusal := moved(transaction.connection)) is not None:
                    raise refusal
                counters = transaction.counters
                if old is None:
                    self._make_room(transaction, records)
                    counters.keys += 1
                counters.fence += 1
                answer = core.claim(old, operation, fence=counters.fence, now=now, retention_ms=retention_ms)
                return answer, answer.record
            case _Finish():
                new = core.finish(old, operation.claim, operation.ending, now=now, retention_ms=retention_ms)
            case _Renew():
                new = core.renew(old, operation.claim, now=now, lease_ms=operation.lease_ms, retention_ms=retention_ms)
            case _Resolve():
                resolved = core.resolve(old, operation.ending, now=now, retention_ms=retention_ms)
                return (False, None) if isinstance(resolved, Lost) else (True, resolved)
        if isinstance(new, Lost):
            raise LeaseLostError(operation.claim.key, owner=operation.claim.owner, fence=operation.claim.fence)
        return new, new

    def _make_room(self, transaction: Transaction, records: Mapping[str, KeyRecord]) -> None:
        """Remove spent keys when the quota is reached, but none that this batch has read and may still write."""
        limit, now = self._most_keys, transaction.now
        if limit is None or transaction.counters.keys < limit:
            return
        if now.steady >= self._full_until:
            if upkeep.make_room(transaction, keep=list(records)):
                return
            self._full_until = now.steady + _FULL_FOR_MS  # a flood must not scan the table for every key
        raise KeyQuotaError(keys=transaction.counters.keys, limit=limit)


def _current(transaction: Transaction, keys: list[str]) -> dict[str, StoredKey]:
    """The rows of these keys, from the cache where this process wrote them last."""
    rows, rest = transaction.cache.keys.find(keys)
    return rows | _load_rows(transaction.connection, rest) if rest else rows


def _save(transaction: Transaction, changed: Collection[KeyRecord], stored: Mapping[str, StoredKey]) -> None:
    connection, cache = transaction.connection, transaction.cache.keys
    added = _add(connection, [record for record in changed if record.key not in stored])
    updated, replaced = [], []
    noted: dict[str, StoredKey | None] = {}
    for record in changed:
        key = record.key
        before = stored.get(key)
        if before is None:
            seq = added[key]
        else:
            seq = before[0]
            if record.fence == before[1].fence:
                updated.append((seq, *_changes(record)))
            else:
                replaced.append((seq, *structs.astuple(record)[1:]))
        noted[key] = (seq, record) if record.state is _IN_PROGRESS else None
    cache.note(noted)
    _UPDATE.run(connection, updated)
    _REPLACE.run(connection, replaced)


def _add(connection: apsw.Connection, new: list[KeyRecord]) -> dict[str, int]:
    """Write rows of new keys. Returns their numbers."""
    if not new:
        return {}
    last: int = query(connection, _LAST).get
    numbers = {record.key: seq for seq, record in enumerate(new, last + 1)}
    rows = [(numbers[record.key], key_hash(record.key), *structs.astuple(record)) for record in new]
    _INSERT.run(connection, rows)
    move_recent(connection, last, last + len(new))
    return numbers


def move_recent(connection: apsw.Connection, before: int, after: int) -> None:
    """
    Move the recent keys of the ranges that are due between two row numbers to the older keys.

    Every `ROWS_PER_MOVE` rows the next range of hashes is due, and after `RECENT_KEYS` rows each has been once.
    """
    ranges = RECENT_KEYS // ROWS_PER_MOVE
    width = (1 << HASH_BITS) // ranges
    for number in range(before // ROWS_PER_MOVE, after // ROWS_PER_MOVE):
        first = number % ranges * width
        hashes = (first, first + width - 1)
        connection.execute(_MOVE, hashes)
        connection.execute(_MOVED, hashes)


def _page_behind(connection: apsw.Connection, seq: int) -> list[StoredKey]:
    return _rows.decode(query(connection, _BEHIND, (seq, PAGE_ROWS)).get)


@each
def _adopt(transaction: Transaction, records: Sequence[KeyRecord]) -> int:
    """Write rows of new keys. Fences go on behind the time: those of a store on a server follow it."""
    counters, known = transaction.counters, _current(transaction, [record.key for record in records])
    new = {record.key: record for record in records if record.key not in known}
    _save(transaction, new.values(), known)
    counters.fence = max(counters.fence, transaction.now.wall * 1000)
    counters.keys += len(new)
    transaction.touched.update(KEY_TOPIC + key for key in new)
    return len(new)


@each
def _forget(transaction: Transaction, key: str, events: Sequence[AuditEntry]) -> Any:
    """Whether the key existed; if it is held, `KeyInProgressError` as the answer to this request alone."""
    row = _load_rows(transaction.connection, [key]).get(key)
    if row is None:
        return False
    seq, record = row
    left = record.lease_until - transaction.now.steady
    if record.state is _IN_PROGRESS and left > 0:
        return KeyInProgressError(key, owner=record.owner, retry_after=left / 1000)
    transaction.connection.execute("DELETE FROM idempotency WHERE seq = ?", (seq,))
    transaction.cache.keys.drop([key])
    transaction.counters.keys -= 1
    transaction.touched.add(KEY_TOPIC + key)
    transaction.add_events(events)
    return True


def load(connection: apsw.Connection, keys: list[str]) -> dict[str, KeyRecord]:
    """The records of these keys."""
    return {key: record for key, (_, record) in _load_rows(connection, keys).items()}


def _load_rows(connection: apsw.Connection, keys: list[str]) -> dict[str, StoredKey]:
    """The rows of these keys, read as one: every row costs a handover of the interpreter's lock."""
    text = query(connection, _LOAD, (json.encode([(key_hash(key), key) for key in keys]).decode(),)).get
    return {record.key: (seq, record) for seq, record in _rows.decode(text)}
