"""
Idempotency keys as rows.

All requests of a batch are decided by `core.idempotency` over the records as they stand inside the transaction: one
read, one write, whatever the number of callers.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from reefknot.engines.sqlite import upkeep as retention_of
from reefknot.engines.sqlite.audit import SqliteAuditLog
from reefknot.engines.sqlite.reads import Link, until
from reefknot.engines.sqlite.transaction import Grouped, Transaction
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError, ReefknotError
from reefknot.ports.audit_log import AuditEntry

_NAMES = KeyRecord.__struct_fields__
_COLUMNS = ", ".join(_NAMES)
# Key by key as they come. `key IN (…)` would sort them first.
_LOAD = (
    f"SELECT json_group_array(json_array({', '.join(f'found.{name}' for name in _NAMES)})) "  # noqa: S608
    "FROM json_each(?) AS wanted CROSS JOIN idempotency AS found ON found.key = wanted.value"
)
_PAGE = (
    f"SELECT json_group_array(json_array({_COLUMNS})) FROM "  # noqa: S608 - our own column names
    "(SELECT * FROM idempotency WHERE key > ?1 AND (?2 IS NULL OR state = ?2) ORDER BY key LIMIT ?3)"
)
_INSERT = Grouped(f"INSERT OR ROLLBACK INTO idempotency ({_COLUMNS}) VALUES {{}}", width=len(_NAMES))  # noqa: S608


def _updating(names: Sequence[str]) -> Grouped:
    """Sets these columns. A row is the key, and then their values."""
    values = ", ".join(f"{name} = new.column{number}" for number, name in enumerate(names, 2))
    template = f"UPDATE OR ROLLBACK idempotency SET {values} FROM (VALUES {{}}) AS new WHERE key = new.column1"  # noqa: S608
    return Grouped(template, width=1 + len(names))


_REPLACE = _updating(_NAMES[1:])
# All that can change while the fence stays the same: who claimed it, and what for, is settled with the claim.
_CARRY_ON = _updating(("state", "lease_until", "lease_ms", "result", "failure", "metadata", "updated_at", "expires_at"))
_SPENT = retention_of.SPENT
_FULL_FOR_MS = 1000
_IN_PROGRESS = KeyState.IN_PROGRESS
_records = json.Decoder(list[KeyRecord], strict=False)  # SQLite's booleans are 0 and 1


class _Renewing(Struct, frozen=True):
    claim: Claim
    lease_ms: int


class _Finishing(Struct, frozen=True):
    claim: Claim
    ending: Ending


class _Resolving(Struct, frozen=True):
    key: str
    ending: Ending


_Wish = ClaimRequest | _Renewing | _Finishing | _Resolving
_Step = tuple[str, _Wish, Sequence[AuditEntry]]


class SqliteIdempotencyStore:
    """The keys of a SQLite store."""

    def __init__(
        self, link: Link, audit: SqliteAuditLog, *, retention: float, largest_result: int, most_keys: int | None
    ) -> None:
        self.audit = audit
        self._link = link
        self._retention_ms = milliseconds(retention)
        self._largest_result = largest_result
        self._most_keys = most_keys
        self._full_until = 0
        # Bound once: every request is grouped by its handler, and looks them up.
        self._write = link.write
        self._handler = self._steps

    async def claim(
        self,
        key: str,
        *,
        owner: str,
        fingerprint: str = "",
        lease: float = 60.0,
        guard: bool = False,
        events: Sequence[AuditEntry] = (),
    ) -> ClaimResult:
        asking = ClaimRequest(checked_key(key), owner, fingerprint, milliseconds(lease), guard)
        answer: ClaimResult = await self._write(self._handler, (key, asking, events))
        return answer

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        step = _Renewing(claim, milliseconds(lease))
        record: KeyRecord = await self._write(self._handler, (claim.key, step, ()))
        return record

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        core.checked_ending(ending, self._largest_result)
        record: KeyRecord = await self._write(self._handler, (claim.key, _Finishing(claim, ending), events))
        return record

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        core.checked_ending(ending, self._largest_result)
        resolved: bool = await self._write(self._handler, (checked_key(key), _Resolving(key, ending), events))
        return resolved

    async def get(self, key: str) -> KeyRecord | None:
        checked_key(key)
        found = await self._link.read(lambda connection: load(connection, [key]))
        record = found.get(key)
        return None if record is None or core.is_spent(record, self._link.now()) else record

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        deadline = self._link.deadline(timeout)
        while True:
            with self._link.listening(f"key:{key}") as change:
                record = await self.get(key)
                left = self._link.left(deadline)
                if record is None or record.state is not KeyState.IN_PROGRESS or not left:
                    return record
                lease_ms = record.lease_until - self._link.now().steady
                if lease_ms <= 0:
                    return record
                await until(change, min(left, lease_ms / 1000))

    async def find(self, *, state: KeyState | None = None, after: str = "", limit: int = 100) -> list[KeyRecord]:
        now = self._link.now()

        def page(connection: apsw.Connection) -> list[KeyRecord]:
            found: list[KeyRecord] = []
            last = after
            while len(found) < limit:
                text: Any = connection.execute(_PAGE, (last, state, limit)).get
                rows = _records.decode(text)
                found += [record for record in rows if not core.is_spent(record, now)]
                if len(rows) < limit:
                    break
                last = rows[-1].key
            return found[:limit]

        return await self._link.read(page)

    async def counts(self) -> Mapping[KeyState, int]:
        now = self._link.now()
        query = f"SELECT state, count(*) FROM idempotency WHERE NOT ({_SPENT}) GROUP BY state"  # noqa: S608

        def count(connection: apsw.Connection) -> dict[KeyState, int]:
            rows: Any = connection.execute(query, (now.wall, now.steady))
            return {KeyState(state): number for state, number in rows}

        return await self._link.read(count)

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        forgotten: bool = await self._link.write(self._forgets, (checked_key(key), events))
        return forgotten

    async def purge(self) -> int:
        return await retention_of.purge_keys(self._link)

    def _steps(self, transaction: Transaction, steps: list[_Step]) -> list[Any]:
        """All claims, renewals and endings of a batch, one after the other over what is stored."""
        records = _recalled(transaction, [key for key, _, _ in steps])
        stored = dict(records)
        changed: dict[str, KeyRecord] = {}
        answers: list[Any] = []
        for key, step, events in steps:
            old = records.get(key)
            try:
                answer, new = self._decide(transaction, old, step, records)
            except ReefknotError as error:
                answers.append(error)
                continue
            answers.append(answer)
            if new is not None and new is not old:
                records[key] = changed[key] = new
                transaction.touched.add(f"key:{key}")
                if events and (not isinstance(step, ClaimRequest) or isinstance(answer, Claimed)):
                    transaction.tell(events)
        if changed:
            _save(transaction, changed.values(), stored)
        return answers

    def _decide(
        self, transaction: Transaction, old: KeyRecord | None, step: _Wish, records: Mapping[str, KeyRecord]
    ) -> tuple[Any, KeyRecord | None]:
        now, retention_ms = transaction.now, self._retention_ms
        match step:
            case ClaimRequest():
                counters = transaction.counters
                if old is None:
                    self._make_room(transaction, records)
                    counters.keys += 1
                counters.fence += 1
                answer = core.claim(old, step, fence=counters.fence, now=now, retention_ms=retention_ms)
                return answer, answer.record
            case _Finishing():
                new = core.finish(old, step.claim, step.ending, now=now, retention_ms=retention_ms)
            case _Renewing():
                new = core.renew(old, step.claim, now=now, lease_ms=step.lease_ms, retention_ms=retention_ms)
            case _Resolving():
                told = core.resolve(old, step.ending, now=now, retention_ms=retention_ms)
                return (False, None) if isinstance(told, Lost) else (True, told)
        if isinstance(new, Lost):
            raise LeaseLostError(step.claim.key, owner=step.claim.owner, fence=step.claim.fence)
        return new, new

    def _make_room(self, transaction: Transaction, records: Mapping[str, KeyRecord]) -> None:
        """Never by letting go of a live key. What this batch has read already stays too: it may be written yet."""
        limit, now = self._most_keys, transaction.now
        if limit is None or transaction.counters.keys < limit:
            return
        if now.steady >= self._full_until:
            gone = retention_of.make_room(transaction, keep=list(records))
            if gone:
                return
            self._full_until = now.steady + _FULL_FOR_MS  # a flood must not walk through the table for every key
        raise KeyQuotaError(keys=transaction.counters.keys, limit=limit)

    def _forgets(self, transaction: Transaction, wanted: list[tuple[str, Sequence[AuditEntry]]]) -> list[Any]:
        records = load(transaction.connection, [key for key, _ in wanted])
        answers: list[Any] = []
        for key, events in wanted:
            record = records.pop(key, None)
            left = 0 if record is None else record.lease_until - transaction.now.steady
            if record is not None and record.state is KeyState.IN_PROGRESS and left > 0:
                answers.append(KeyInProgressError(key, owner=record.owner, retry_after=left / 1000))
                continue
            if record is not None:
                transaction.connection.execute("DELETE FROM idempotency WHERE key = ?", (key,))
                transaction.memory.keys.drop(key)
                transaction.counters.keys -= 1
                transaction.touched.add(f"key:{key}")
                transaction.tell(events)
            answers.append(record is not None)
        return answers


def _recalled(transaction: Transaction, keys: list[str]) -> dict[str, KeyRecord]:
    """The records of these keys; what this process wrote last is not read back."""
    recall = transaction.memory.keys.get
    records = {key: record for key in keys if (record := recall(key)) is not None}
    rest = [key for key in keys if key not in records]
    return records | load(transaction.connection, rest) if rest else records


def _save(transaction: Transaction, changed: Iterable[KeyRecord], stored: Mapping[str, KeyRecord]) -> None:
    connection, memory = transaction.connection, transaction.memory.keys
    new, carried_on, replaced = [], [], []
    for record in changed:
        key = record.key
        old = stored.get(key)
        if old is None:
            new.append(structs.astuple(record))
        elif record.fence == old.fence:
            carried_on.append(
                (
                    key,
                    record.state,
                    record.lease_until,
                    record.lease_ms,
                    record.result,
                    record.failure,
                    record.metadata,
                    record.updated_at,
                    record.expires_at,
                )
            )
        else:
            replaced.append(structs.astuple(record))
        if record.state is _IN_PROGRESS:
            memory.note(key, record)
        else:
            memory.drop(key)
    _INSERT.run(connection, new)
    _CARRY_ON.run(connection, carried_on)
    _REPLACE.run(connection, replaced)


def load(connection: apsw.Connection, keys: list[str]) -> dict[str, KeyRecord]:
    """The records of these keys. One row comes back, because every row costs a hand-over of the interpreter's lock."""
    text: Any = connection.execute(_LOAD, (json.encode(keys).decode(),)).get
    return {record.key: record for record in _records.decode(text)}
