"""
The idempotency keys of a store on JetStream: one record for each key, changed by compare-and-set.

A new key is claimed without a read: the server refuses if there is a record, and then the record is read, from the
leader. Records that this process has seen lately are remembered with their revisions. A change that is one message is
sent at once, with many others on their way; one with events, or with a record in several parts, goes with the next
batch. The server removes a record some time after its retention is over; whether it still counts is decided by the
times in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec import json

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment, milliseconds
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError, StoreCorruptError
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
from reefknot.runtime.log import logger
from reefknot.stores.jetstream.audit_log import JetStreamAuditLog
from reefknot.stores.jetstream.commits import (
    MOST_ALONE,
    MOST_TRIES,
    Batch,
    Commits,
    ConflictError,
    pause_after,
    run_apart,
)
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.reads import StreamMessage, count, last_message, scan, stored_now
from reefknot.stores.jetstream.state import PART, Message, State, unreadable

R = TypeVar("R")
MOST_REMEMBERED = 10_000
LOOK_EVERY_S = 0.25
"""How often a caller that waits for a key checks it, unless the key ends in this process."""
COUNT_EVERY_MS = 1000
KEPT_LONGER_S = 60
PAGE = 500
"""Records of one page of all keys."""


class JetStreamIdempotencyStore:
    """Claims, renews and finishes keys."""

    durable = True

    def __init__(
        self,
        state: State,
        commits: Commits,
        audit: JetStreamAuditLog,
        *,
        retention: float,
        largest_result: int,
        most_keys: int | None,
    ) -> None:
        self.audit = audit
        self._state = state
        self._commits = commits
        self._retention_ms = milliseconds(retention)
        self._largest_result = largest_result
        self._most_keys = most_keys
        self._known: OrderedDict[str, tuple[int, KeyRecord | None]] = OrderedDict()
        """By key: the revision and the record as last seen; without a record it was free."""
        self._last_fence = 0
        """Fences follow the time, so that a forgotten one is lower than any later one."""
        self._counted = 0
        self._counted_at = -COUNT_EVERY_MS

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
        await self._make_room(key)

        def decide(old: KeyRecord | None, batch: Batch, now: Moment) -> ClaimResult:
            fence = self._last_fence = max(now.wall * 1000, self._last_fence + 1, 0 if old is None else old.fence + 1)
            answer = core.claim(old, request, fence=fence, now=now, retention_ms=self._retention_ms)
            self._write(batch, old, answer.record, events if isinstance(answer, Claimed) else (), now)
            if takeover_events is not None and old is not None and isinstance(answer, Claimed) and answer.taken_over:
                batch.events += takeover_events(old, answer.record)
            return answer

        known = self._known.get(key)
        if known is not None and known[1] is not None:
            await self._look(key)  # it may have ended elsewhere, and an old answer would be wrong
        return await self._change(key, decide, events)

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        def decide(old: KeyRecord | None, batch: Batch, now: Moment) -> KeyRecord:
            new = core.renew(old, claim, now=now, lease_ms=milliseconds(lease), retention_ms=self._retention_ms)
            return self._write_back(batch, claim, old, new, (), now)

        return await self._owned(claim, decide)

    def extend(self, claims: Sequence[Claim], *, lease: float) -> None:
        run_apart(self._state.connection.options, partial(self._extend, claims, milliseconds(lease)))

    async def _extend(self, claims: Sequence[Claim], lease_ms: int, connection: Connection) -> None:
        names = self._state.names
        for one in claims:
            message = await last_message(connection, names.state, names.key(one.key))
            if message is None or not message.body or "Reefknot-Parts" in message.headers:
                continue
            old, now = json.decode(message.body, type=KeyRecord), self._state.now()
            new = core.renew(old, one, now=now, lease_ms=lease_ms, retention_ms=self._retention_ms)
            if isinstance(new, KeyRecord):
                changed = Message(message.subject, json.encode(new), message.sequence, ttl=_ttl(new, now))
                answer = await connection.request(changed.subject, changed.body, headers=changed.headers())
                connection.check(answer.data)

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        core.checked_ending(ending, self._largest_result)

        def decide(old: KeyRecord | None, batch: Batch, now: Moment) -> KeyRecord:
            new = core.finish(old, claim, ending, now=now, retention_ms=self._retention_ms)
            return self._write_back(batch, claim, old, new, events, now)

        return await self._owned(claim, decide, events)

    async def _owned(
        self,
        claim: Claim,
        decide: Callable[[KeyRecord | None, Batch, Moment], KeyRecord],
        events: Sequence[AuditEntry] = (),
    ) -> KeyRecord:
        """Make an owner's write. A claim that is lost by the cached record may still hold by the server's."""
        known = self._known.get(claim.key)
        if known is None or known[1] is None or known[1].fence != claim.fence or known[1].owner != claim.owner:
            await self._look(claim.key)
        return await self._change(claim.key, decide, events)

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        core.checked_ending(ending, self._largest_result)

        def decide(old: KeyRecord | None, batch: Batch, now: Moment) -> bool:
            new = core.resolve(old, ending, now=now, retention_ms=self._retention_ms)
            if isinstance(new, Lost):
                return False
            self._write(batch, old, new, events, now)
            return True

        await self._look(checked_key(key))
        return await self._change(key, decide, events)

    async def get(self, key: str) -> KeyRecord | None:
        record = await self._look(checked_key(key))
        return None if record is None or core.is_spent(record, self._state.now()) else record

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        def pause(record: KeyRecord | None) -> float:
            if record is None or record.state is not KeyState.IN_PROGRESS:
                return 0.0
            return min(LOOK_EVERY_S, (record.lease_until - self._state.now().steady) / 1000)

        return await self._state.watch(partial(self.get, key), f"key:{key}", pause=pause, timeout=timeout)

    async def counts(self) -> Mapping[KeyState, int]:
        now = self._state.now()
        return Counter(one.state for _, one in await self._all() if not core.is_spent(one, now))

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        def decide(old: KeyRecord | None, batch: Batch, now: Moment) -> bool:
            if old is None:
                return False
            if old.state is KeyState.IN_PROGRESS and now.steady < old.lease_until:
                left = (old.lease_until - now.steady) / 1000
                raise KeyInProgressError(key, owner=old.owner, retry_after=left)
            self._remove(batch, key)
            batch.events += events
            return True

        await self._look(checked_key(key))
        return await self._change(key, decide, events)

    async def records(self) -> AsyncIterator[list[KeyRecord]]:
        names = self._state.names
        async for page in stored_now(self._state.connection, names.state, [f"{names.name}.key.*"], most=PAGE):
            yield [await self._decoded(one) for one in page if one.body]

    async def adopt(self, records: Sequence[KeyRecord]) -> int:
        added = 0
        for at in range(0, len(records), MOST_ALONE):
            added += sum(await asyncio.gather(*(self._adopt(one) for one in records[at : at + MOST_ALONE])))
        return added

    async def _adopt(self, record: KeyRecord) -> bool:
        def decide(old: KeyRecord | None, batch: Batch, now: Moment) -> bool:
            if old is None:
                self._last_fence = max(self._last_fence, record.fence)
                self._write(batch, None, record, (), now)
            return old is None

        return await self._change(record.key, decide)

    async def purge(self) -> int:
        now, gone = self._state.now(), 0
        for _, record in await self._all():
            if core.is_spent(record, now):
                await self._look(record.key)
                gone += await self._change(record.key, partial(self._purge_one, record.key))
        return gone

    def _purge_one(self, key: str, old: KeyRecord | None, batch: Batch, now: Moment) -> int:
        if old is None or not core.is_spent(old, now):
            return 0
        self._remove(batch, key)
        return 1

    async def newest_at(self) -> int | None:
        """The time of the last change of a key that this process knows of."""
        return max((one.updated_at for _, one in self._known.values() if one is not None), default=None)

    # ---- records -----------------------------------------------------------------------------------------------------

    async def _change(
        self, key: str, decide: Callable[[KeyRecord | None, Batch, Moment], R], events: Sequence[AuditEntry] = ()
    ) -> R:
        """
        Make a change: decide on the record as it is known, and store it, unless it was changed; then decide again.

        A caller that is cancelled meanwhile leaves a memory that may be out of date, as after a change by another
        process: the revision finds out.
        """
        if events:
            return await self._change_in_batch(key, decide)
        for number in range(MOST_TRIES):
            known, batch = self._known.get(key), Batch()
            answer = decide(None if known is None else known[1], batch, self._state.now())
            if batch.events or len(batch.messages) > 1:
                return await self._change_in_batch(key, decide)
            for message, (_, stored) in zip(batch.messages, batch.stored, strict=True):
                try:
                    stored(await self._commits.store_alone(message))
                except ConflictError:
                    break
            else:
                return answer
            if self._known.get(key) is known:  # no other caller of this process has seen the newer record
                await self._look(key)
            await pause_after(number)
        raise self._commits.overtaken()

    async def _change_in_batch(self, key: str, decide: Callable[[KeyRecord | None, Batch, Moment], R]) -> R:
        """Make a change whose messages and events are stored together."""

        async def look() -> None:
            await self._look(key)

        def run(batch: Batch, now: Moment) -> R:
            # Other changes of this batch may have written the key just now.
            _, record = batch.keys.get(key) or self._known.get(key, (0, None))
            return decide(record, batch, now)

        return await self._commits.change(run, prepare=look)

    async def _look(self, key: str) -> KeyRecord | None:
        """Read the record of a key from the leader, and remember it."""
        before = self._known.get(key)
        message = await last_message(self._state.connection, self._state.names.state, self._state.names.key(key))
        record = None if message is None or not message.body else await self._decoded(message)
        if message is not None:
            self._remember(key, message.sequence, record)
        elif self._known.get(key) is before:  # otherwise a caller of this process has written it meanwhile
            self._known.pop(key, None)
        return record

    async def _decoded(self, message: StreamMessage) -> KeyRecord:
        parts, names = [message.body], self._state.names
        token = message.subject.rpartition(".")[2]
        for number in range(1, int(message.headers.get("Reefknot-Parts", "1"))):
            subject = f"{names.name}.blob.{token}.key.{number}"
            part = await last_message(self._state.connection, names.state, subject)
            parts.append(b"" if part is None else part.body)
        try:
            return json.decode(b"".join(parts), type=KeyRecord)
        except ValueError as error:
            raise unreadable(self._state.connection, message) from error

    def _remember(self, key: str, sequence: int, record: KeyRecord | None) -> None:
        """Remember a record, unless a newer one is known: answers of several callers may cross."""
        known = self._known.get(key)
        if known is not None and known[0] > sequence:
            return
        self._known[key] = sequence, record
        self._known.move_to_end(key)
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    def _write_back(
        self,
        batch: Batch,
        claim: Claim,
        old: KeyRecord | None,
        new: KeyRecord | Lost,
        events: Sequence[AuditEntry],
        now: Moment,
    ) -> KeyRecord:
        if isinstance(new, Lost):
            raise LeaseLostError(claim.key, owner=claim.owner, fence=claim.fence)
        self._write(batch, old, new, events, now)
        return new

    def _write(
        self, batch: Batch, old: KeyRecord | None, new: KeyRecord, events: Sequence[AuditEntry], now: Moment
    ) -> None:
        if new is old:
            return  # a repetition: nothing is written, and no event twice
        body = json.encode(new)
        parts = [body[at : at + PART] for at in range(0, len(body), PART)]
        ttl = _ttl(new, now)
        names = self._state.names
        for number, part in enumerate(parts[1:], 1):
            batch.add(Message(names.blob(new.key, "key", number), part, ttl=ttl))
        revision = self._known.get(new.key, (0, None))[0]
        message = Message(names.key(new.key), parts[0], revision, ttl=ttl, parts=len(parts))
        batch.put_key(new.key, message, new, partial(self._stored, new.key, new))
        batch.events += events

    def _remove(self, batch: Batch, key: str) -> None:
        revision = self._known.get(key, (0, None))[0]
        message = Message(self._state.names.key(key), b"", revision, ttl=1)
        batch.put_key(key, message, None, partial(self._stored, key, None))

    def _stored(self, key: str, record: KeyRecord | None, sequence: int) -> None:
        self._remember(key, sequence, record)
        self._state.wake(f"key:{key}")

    async def _all(self) -> list[tuple[int, KeyRecord]]:
        names = self._state.names
        found = await scan(self._state.connection, names.state, [f"{names.name}.key.*"])
        records = list[tuple[int, KeyRecord]]()
        for one in found:
            if one.body:
                try:
                    records.append((one.sequence, await self._decoded(one)))
                except StoreCorruptError as error:
                    logger().warning("%s; it is left out", error)
        return records

    async def _make_room(self, key: str) -> None:
        limit = self._most_keys
        if limit is None or key in self._known:
            return
        now = self._state.now()
        if now.steady - self._counted_at >= COUNT_EVERY_MS or self._counted >= limit:
            names = self._state.names
            self._counted = await count(self._state.connection, names.state, [f"{names.name}.key.*"])
            self._counted_at = now.steady
        if self._counted >= limit and not await self.purge() and await self.get(key) is None:
            raise KeyQuotaError(keys=self._counted, limit=limit)
        self._counted += 1


def _ttl(record: KeyRecord, now: Moment) -> int | None:
    """The seconds after which the server may remove a record; None for one that an operator has to resolve."""
    never_goes = record.state is KeyState.UNKNOWN or (record.guard and record.state is KeyState.IN_PROGRESS)
    return None if never_goes else KEPT_LONGER_S + max(0, record.expires_at - now.wall) // 1000
