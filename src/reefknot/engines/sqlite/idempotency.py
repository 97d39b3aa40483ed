"""
The idempotency keys of a SQLite store, as rows.

All requests of a batch are decided by `core.idempotency` over the records as of the transaction: one read, one write,
whatever the number of callers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import apsw
from msgspec import Struct, json, structs

from reefknot.core import idempotency as core
from reefknot.core.idempotency import (
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
from reefknot.core.time import milliseconds
from reefknot.engines.sqlite import upkeep
from reefknot.engines.sqlite.audit import SqliteAuditLog
from reefknot.engines.sqlite.connection import query
from reefknot.engines.sqlite.reads import StoreContext
from reefknot.engines.sqlite.transaction import BulkStatement, Transaction, each
from reefknot.engines.sqlite.writer import Handler
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError, ReefknotError
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.idempotency_store import TakeoverEvents

_NAMES = KeyRecord.__struct_fields__
_COLUMNS = ", ".join(_NAMES)
# Key by key in the given order. `key IN (…)` would sort them first.
_LOAD = (
    f"SELECT json_group_array(json_array({', '.join(f'found.{name}' for name in _NAMES)})) "  # noqa: S608
    "FROM json_each(?) AS wanted CROSS JOIN idempotency AS found ON found.key = wanted.value"
)
_INSERT = BulkStatement(f"INSERT OR ROLLBACK INTO idempotency ({_COLUMNS}) VALUES {{}}", width=len(_NAMES))  # noqa: S608


def _updating(names: Sequence[str]) -> BulkStatement:
    """An update of these columns. A row is the key and the columns' values."""
    values = ", ".join(f"{name} = new.column{number}" for number, name in enumerate(names, 2))
    template = f"UPDATE OR ROLLBACK idempotency SET {values} FROM (VALUES {{}}) AS new WHERE key = new.column1"  # noqa: S608
    return BulkStatement(template, width=1 + len(names))


_REPLACE = _updating(_NAMES[1:])
# All that can change while the fence stays the same: owner and fingerprint are fixed by the claim.
_CHANGING = ("state", "lease_until", "lease_ms", "result", "failure", "metadata", "updated_at", "expires_at")
_UPDATE = _updating(_CHANGING)
_changes = attrgetter("key", *_CHANGING)
_FULL_FOR_MS = 1000
_IN_PROGRESS = KeyState.IN_PROGRESS
_records = json.Decoder(list[KeyRecord], strict=False)  # SQLite's booleans are 0 and 1


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

    def __init__(
        self,
        context: StoreContext,
        audit: SqliteAuditLog,
        *,
        retention: float,
        largest_result: int,
        most_keys: int | None,
    ) -> None:
        self.audit = audit
        self._context = context
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

        return await self._context.watch(partial(self.get, key), f"key:{key}", pause=pause, timeout=timeout)

    async def counts(self) -> Mapping[KeyState, int]:
        now = self._context.now()
        statement = f"SELECT state, count(*) FROM idempotency WHERE NOT ({upkeep.SPENT}) GROUP BY state"  # noqa: S608
        counts = await self._context.read(
            lambda connection: query(connection, statement, now.wall, now.steady).fetchall()
        )
        return {KeyState(state): number for state, number in counts}

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        forgotten: bool = await self._write(_forget, (checked_key(key), events))
        return forgotten

    async def purge(self) -> int:
        return await upkeep.purge_keys(self._context)

    def _apply_batch(self, transaction: Transaction, requests: list[_Request]) -> list[Any]:
        """Apply all claims, renewals and endings of a batch, one after the other."""
        records = _current(transaction, [key for key, *_ in requests])
        stored = dict(records)
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
                transaction.touched.add(f"key:{key}")
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
        """Remove spent keys when the quota is reached, but none that this batch has read: it may be written yet."""
        limit, now = self._most_keys, transaction.now
        if limit is None or transaction.counters.keys < limit:
            return
        if now.steady >= self._full_until:
            if upkeep.make_room(transaction, keep=list(records)):
                return
            self._full_until = now.steady + _FULL_FOR_MS  # a flood must not scan the table for every key
        raise KeyQuotaError(keys=transaction.counters.keys, limit=limit)


def _current(transaction: Transaction, keys: list[str]) -> dict[str, KeyRecord]:
    """The records of these keys, from the cache where this process wrote them last."""
    cached = transaction.cache.keys.get
    records = {key: record for key in keys if (record := cached(key)) is not None}
    rest = [key for key in keys if key not in records]
    return records | load(transaction.connection, rest) if rest else records


def _save(transaction: Transaction, changed: Iterable[KeyRecord], stored: Mapping[str, KeyRecord]) -> None:
    connection, cache = transaction.connection, transaction.cache.keys
    new, updated, replaced = [], [], []
    for record in changed:
        key = record.key
        old = stored.get(key)
        if old is None:
            new.append(structs.astuple(record))
        elif record.fence == old.fence:
            updated.append(_changes(record))
        else:
            replaced.append(structs.astuple(record))
        if record.state is _IN_PROGRESS:
            cache.note(key, record)
        else:
            cache.drop(key)
    _INSERT.run(connection, new)
    _UPDATE.run(connection, updated)
    _REPLACE.run(connection, replaced)


@each
def _forget(transaction: Transaction, key: str, events: Sequence[AuditEntry]) -> Any:
    """Whether there was such a key; `KeyInProgressError`, as the answer of this request alone, if it is held."""
    record = load(transaction.connection, [key]).get(key)
    if record is None:
        return False
    left = record.lease_until - transaction.now.steady
    if record.state is _IN_PROGRESS and left > 0:
        return KeyInProgressError(key, owner=record.owner, retry_after=left / 1000)
    transaction.connection.execute("DELETE FROM idempotency WHERE key = ?", (key,))
    transaction.cache.keys.drop(key)
    transaction.counters.keys -= 1
    transaction.touched.add(f"key:{key}")
    transaction.add_events(events)
    return True


def load(connection: apsw.Connection, keys: list[str]) -> dict[str, KeyRecord]:
    """The records of these keys, read as one row: every row costs a handover of the interpreter's lock."""
    text = query(connection, _LOAD, json.encode(keys).decode()).get
    return {record.key: record for record in _records.decode(text)}
