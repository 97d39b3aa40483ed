"""
The audit log and the idempotency keys of a memory store, and the state that all its parts share.

Events are a list, chained as in every engine; keys are a dictionary. Every change happens between two awaits, which is
what makes it atomic.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from reefknot.core import idempotency as core
from reefknot.core.audit.chain import ANCHOR, Head, Link, Mismatch, anchor_body, link, verify
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
from reefknot.core.overload.submission import Capacity, SubmissionRules
from reefknot.core.time import Moment, Timeline, milliseconds
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError, StoreUnavailableError
from reefknot.ports.audit_log import EVERYTHING, AuditEntry, AuditQuery, KeptEntry
from reefknot.ports.clock import Clock


class MemoryContext:
    """Time, fences and change notifications, shared by the parts of one memory store."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self._waiting: dict[asyncio.Future[None], frozenset[str]] = {}
        """Those who wait for a change, in their order, and the topics they wait for; none: any change."""
        self._closed = False
        self.next_fence = count(1).__next__
        self.capacities: dict[str, tuple[int, Capacity]] = {}
        """By system: until when its capacity counts."""

    def offered(self, pool: str, wall: int) -> tuple[int, SubmissionRules | None]:
        """The slots of a resource class in all systems, and the rules that a router has published."""
        self.capacities = {name: one for name, one in self.capacities.items() if one[0] > wall}
        offers = [capacity for _, capacity in self.capacities.values()]
        rules = next((one.rules for one in offers if one.rules is not None), None)
        return sum(one.slots.get(pool, 0) for one in offers), rules

    def now(self) -> Moment:
        """The current moment; `StoreUnavailableError` after the store was closed."""
        if self._closed:
            raise StoreUnavailableError("memory:", "it is closed", "open a new one")
        return self._timeline.at(self._clock.now())

    def changed(self, topics: Iterable[str] = ()) -> None:
        """Wake those who wait for one of these topics, or for any change."""
        for future, wanted in list(self._waiting.items()):
            if not wanted or not wanted.isdisjoint(topics):
                del self._waiting[future]
                if not future.done():
                    future.set_result(None)

    async def change(self, timeout: float, topics: Iterable[str] = ()) -> bool:
        """Wait for a change of these topics (or of any), at most `timeout` seconds. False when there was none."""
        self.now()
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = frozenset(topics)
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(future, None)
        return True

    def deadline(self, timeout: float) -> float:
        """The time of the running loop at which a wait of `timeout` seconds ends."""
        self.now()
        return asyncio.get_running_loop().time() + max(0.0, timeout)

    def left(self, deadline: float) -> float:
        """Seconds until the deadline, 0 when it has passed."""
        return max(0.0, deadline - asyncio.get_running_loop().time())

    def close(self) -> None:
        self._closed = True
        self.changed({topic for topics in self._waiting.values() for topic in topics})


class MemoryAuditLog:
    """The audit log of a memory store."""

    def __init__(self, shared: MemoryContext, chain: str) -> None:
        self._shared = shared
        self._kept: list[KeptEntry] = []
        self._head = Head(chain)
        self._anchor = Head(chain)

    def add(self, entries: Sequence[AuditEntry]) -> None:
        """Append these events as part of a change; the caller calls `changed`."""
        for entry in entries:
            self._head, hashed = link(self._head, entry.body)
            self._kept.append(KeptEntry(self._head.sequence, hashed, entry))

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        self._shared.now()
        self.add(entries)
        self._shared.changed()
        return self._head

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        self.add(entries)
        future: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        future.set_result(self._head)
        return future

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        self._shared.now()
        start = bisect_right(self._kept, query.after, key=lambda kept: kept.sequence)
        end = None if query.before is None else bisect_left(self._kept, query.before, key=lambda kept: kept.sequence)
        found: list[KeptEntry] = []
        page = self._kept[start:end]
        for kept in reversed(page) if query.newest_first else page:
            if len(found) >= query.limit:
                break
            if query.matches(kept.entry):
                found.append(kept)
        return found

    async def head(self) -> Head:
        self._shared.now()
        return self._head

    async def verify(
        self, head: Head | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Mismatch]:
        self._shared.now()
        links = (Link(kept.sequence, kept.hash, kept.entry.body) for kept in self._kept)
        if progress is not None:
            progress(len(self._kept))
        return verify(links, head or self._head, start=self._anchor)

    async def trim(self, before: int) -> int:
        now = self._shared.now()
        gone = 0
        while gone < len(self._kept) and self._kept[gone].entry.at < before:
            gone += 1
        if gone:
            last = self._kept[gone - 1]
            self._anchor = Head(self._head.chain, last.sequence, last.hash)
            del self._kept[:gone]
            self.add([AuditEntry(anchor_body(self._anchor, now.wall), ANCHOR, now.wall)])
            self._shared.changed()
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        deadline = self._shared.deadline(timeout)
        while self._head.sequence <= after:
            left = self._shared.left(deadline)
            if not left:
                return False
            await self._shared.change(left)
        return True


FULL_FOR_MS = 1000
"""Pause after a search for spent keys that found none: a flood must not scan all keys for every new one."""


class MemoryIdempotencyStore:
    """The idempotency keys of a memory store."""

    def __init__(
        self,
        shared: MemoryContext,
        audit: MemoryAuditLog,
        *,
        retention: float,
        largest_result: int,
        most_keys: int | None,
    ) -> None:
        self._shared = shared
        self.audit = audit
        self._retention_ms = milliseconds(retention)
        self._largest_result = largest_result
        self._most_keys = most_keys
        self._records: dict[str, KeyRecord] = {}
        self._full_until = 0

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
        now = self._shared.now()
        request = ClaimRequest(checked_key(key), owner, fingerprint, milliseconds(lease), guard)
        old = self._records.get(key)
        if old is None:
            self._make_room(now)
        answer = core.claim(old, request, fence=self._shared.next_fence(), now=now, retention_ms=self._retention_ms)
        self._write(old, answer.record, events if isinstance(answer, Claimed) else ())
        return answer

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        now = self._shared.now()
        old = self._records.get(claim.key)
        new = core.renew(old, claim, now=now, lease_ms=milliseconds(lease), retention_ms=self._retention_ms)
        return self._write_back(claim, old, new, ())

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        now = self._shared.now()
        core.checked_ending(ending, self._largest_result)
        old = self._records.get(claim.key)
        new = core.finish(old, claim, ending, now=now, retention_ms=self._retention_ms)
        return self._write_back(claim, old, new, events)

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        now = self._shared.now()
        core.checked_ending(ending, self._largest_result)
        old = self._records.get(checked_key(key))
        new = core.resolve(old, ending, now=now, retention_ms=self._retention_ms)
        if isinstance(new, Lost):
            return False
        self._write(old, new, events)
        return True

    async def get(self, key: str) -> KeyRecord | None:
        now = self._shared.now()
        record = self._records.get(checked_key(key))
        return None if record is None or core.is_spent(record, now) else record

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        deadline = self._shared.deadline(timeout)
        while True:
            record = await self.get(key)
            left = self._shared.left(deadline)
            if record is None or record.state is not KeyState.IN_PROGRESS or not left:
                return record
            lease_ms = record.lease_until - self._shared.now().steady
            if lease_ms <= 0:
                return record
            await self._shared.change(min(left, lease_ms / 1000))

    async def counts(self) -> Mapping[KeyState, int]:
        now = self._shared.now()
        return Counter(record.state for record in self._records.values() if not core.is_spent(record, now))

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        now = self._shared.now()
        record = self._records.get(checked_key(key))
        if record is None:
            return False
        if record.state is KeyState.IN_PROGRESS and now.steady < record.lease_until:
            left = (record.lease_until - now.steady) / 1000
            raise KeyInProgressError(key, owner=record.owner, retry_after=left)
        del self._records[key]
        self.audit.add(events)
        self._shared.changed()
        return True

    async def purge(self) -> int:
        return self._purge(self._shared.now())

    def _purge(self, now: Moment) -> int:
        spent = [key for key, record in self._records.items() if core.is_spent(record, now)]
        for key in spent:
            del self._records[key]
        return len(spent)

    def _make_room(self, now: Moment) -> None:
        limit = self._most_keys
        if limit is None or len(self._records) < limit:
            return
        if now.steady >= self._full_until:
            if self._purge(now):
                return
            self._full_until = now.steady + FULL_FOR_MS
        raise KeyQuotaError(keys=len(self._records), limit=limit)

    def _write_back(
        self, claim: Claim, old: KeyRecord | None, new: KeyRecord | Lost, events: Sequence[AuditEntry]
    ) -> KeyRecord:
        if isinstance(new, Lost):
            raise LeaseLostError(claim.key, owner=claim.owner, fence=claim.fence)
        self._write(old, new, events)
        return new

    def _write(self, old: KeyRecord | None, new: KeyRecord, events: Sequence[AuditEntry]) -> None:
        if new is old:
            return  # a repetition: nothing is written, and no event twice
        self._records[new.key] = new
        self.audit.add(events)
        self._shared.changed()
