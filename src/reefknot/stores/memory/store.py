"""
The parts of a memory store except its work and its values: audit log, keys, control, transport; and the state they
share.

Events are a list, chained as in every engine; keys are a dictionary. Every change happens between two awaits, which is
what makes it atomic. Every subscriber of the transport has its own bounded queue, and a sender waits while one is full.
A message id that was published lately is not delivered again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf

from msgspec import structs

from reefknot.audit.model.chain import (
    ANCHOR,
    Head,
    Link,
    Mismatch,
    Removal,
    RetentionInForce,
    anchor_body,
    link,
    verify,
)
from reefknot.audit.port import EVERYTHING, AuditEntry, AuditQuery, KeptEntry
from reefknot.core.clock import Clock
from reefknot.core.time import Moment, Timeline, milliseconds
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError, StoreUnavailableError
from reefknot.idempotency import model as core
from reefknot.idempotency.model import Claim, Claimed, ClaimRequest, ClaimResult, Ending, KeyRecord, KeyState, Lost
from reefknot.idempotency.port import TakeoverEvents
from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.port.control import EVERYONE, NO_CAPACITY, SILENT_KEPT_S, Command, StatusReport
from reefknot.queue.port.transport import Delivery, Notice, Room
from reefknot.runtime.changes import Waiters
from reefknot.runtime.tasks import ReaderQueue

MOST_EVENTS = 100_000
"""Most events that a memory store keeps; beyond that the oldest tenth is removed, as by retention."""


class MemoryContext(Waiters):
    """Time, fences and waiters for changes, shared by the parts of one memory store."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._timeline = Timeline(steady=clock.now(), wall=clock.wall())
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

    def changed(self, *topics: str) -> None:
        """Wake the waiters for one of these topics, or for any change, in a reproducible order."""
        if self._waiting:
            self.wake(*sorted(topics), "")

    def close(self) -> None:
        self._closed = True
        self.wake_all()


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
        if len(self._kept) > MOST_EVENTS:
            self._drop(len(self._kept) - MOST_EVENTS * 9 // 10, self._shared.now().wall, "the bound of a memory store")

    def _drop(self, gone: int, wall: int, rule: str) -> None:
        """Remove this many events from the start of the chain, with an anchor event that names the rule."""
        last = self._kept[gone - 1]
        previous = self._kept[gone - 2].hash if gone > 1 else self._anchor.hash
        removal = Removal(rule, gone, previous, last.entry.body)
        self._anchor = Head(self._head.chain, last.sequence, last.hash)
        del self._kept[:gone]
        self.add([AuditEntry(anchor_body(self._anchor, wall, removal), ANCHOR, wall)])

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        self._shared.now()
        self.add(entries)
        self._shared.changed()
        return self._head

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        self._shared.now()
        self.add(entries)
        self._shared.changed()
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
        self,
        head: Head | None = None,
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Mismatch]:
        self._shared.now()
        links = (Link(kept.sequence, kept.hash, kept.entry.body) for kept in self._kept)
        if progress is not None:
            progress(len(self._kept))
        return verify(links, head or self._head, start=self._anchor, in_force=in_force)

    @property
    def newest_at(self) -> int | None:
        return self._kept[-1].entry.at if self._kept else None

    async def trim(self, before: int, *, rule: str = "by hand") -> int:
        now = self._shared.now()
        gone = 0
        for number, kept in enumerate(self._kept, 1):
            if kept.entry.at >= before:
                break
            gone = gone if kept.entry.event_type == ANCHOR else number
        if gone:
            self._drop(gone, now.wall, rule)
            self._shared.changed()
        return gone

    async def wait(self, after: int, timeout: float) -> bool:
        head = await self._shared.watch(
            self.head, "", pause=lambda head: inf if head.sequence <= after else 0.0, timeout=timeout
        )
        return head.sequence > after


FULL_FOR_MS = 1000
"""Pause after a search for spent keys that found none: a flood must not scan all keys for every new one."""


class MemoryIdempotencyStore:
    """The idempotency keys of a memory store."""

    durable = False

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
        self._extended: dict[str, tuple[int, int]] = {}
        """By key: fence and end of leases that another thread has extended, while the loop was blocked."""
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
        takeover_events: TakeoverEvents | None = None,
    ) -> ClaimResult:
        now = self._shared.now()
        request = ClaimRequest(core.checked_key(key), owner, fingerprint, milliseconds(lease), guard)
        old = self._record(key)
        if old is None:
            self._make_room(now)
        answer = core.claim(old, request, fence=self._shared.next_fence(), now=now, retention_ms=self._retention_ms)
        self._write(old, answer.record, events if isinstance(answer, Claimed) else ())
        if takeover_events is not None and old is not None and isinstance(answer, Claimed) and answer.taken_over:
            self.audit.add(takeover_events(old, answer.record))
        return answer

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        now = self._shared.now()
        old = self._record(claim.key)
        new = core.renew(old, claim, now=now, lease_ms=milliseconds(lease), retention_ms=self._retention_ms)
        return self._write_back(claim, old, new, ())

    def extend(self, claims: Sequence[Claim], *, lease: float) -> None:
        """Extend a lease from another thread. Only the extension is touched: the loop may continue at any moment."""
        until = self._shared.now().steady + milliseconds(lease)
        for one in claims:
            record = self._records.get(one.key)
            if record is not None and (record.owner, record.fence) == (one.owner, one.fence):
                self._extended[one.key] = one.fence, until

    def _record(self, key: str) -> KeyRecord | None:
        """The record of a key, with its lease as it was extended."""
        record = self._records.get(key)
        fence, until = self._extended.get(key, (0, 0))
        if record is None or record.state is not KeyState.IN_PROGRESS or record.fence != fence:
            return record
        return structs.replace(record, lease_until=max(until, record.lease_until))

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        now = self._shared.now()
        core.checked_ending(ending, self._largest_result)
        old = self._record(claim.key)
        new = core.finish(old, claim, ending, now=now, retention_ms=self._retention_ms)
        return self._write_back(claim, old, new, events)

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        now = self._shared.now()
        core.checked_ending(ending, self._largest_result)
        old = self._records.get(core.checked_key(key))
        new = core.resolve(old, ending, now=now, retention_ms=self._retention_ms)
        if isinstance(new, Lost):
            return False
        self._write(old, new, events)
        return True

    async def get(self, key: str) -> KeyRecord | None:
        now = self._shared.now()
        record = self._record(core.checked_key(key))
        return None if record is None or core.is_spent(record, now) else record

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        def pause(record: KeyRecord | None) -> float:
            if record is None or record.state is not KeyState.IN_PROGRESS:
                return 0.0
            return (record.lease_until - self._shared.now().steady) / 1000

        return await self._shared.watch(partial(self.get, key), "", pause=pause, timeout=timeout)

    async def counts(self) -> Mapping[KeyState, int]:
        now = self._shared.now()
        return Counter(record.state for record in self._records.values() if not core.is_spent(record, now))

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        now = self._shared.now()
        record = self._record(core.checked_key(key))
        if record is None:
            return False
        if record.state is KeyState.IN_PROGRESS and now.steady < record.lease_until:
            left = (record.lease_until - now.steady) / 1000
            raise KeyInProgressError(key, owner=record.owner, retry_after=left)
        del self._records[key]
        self._extended.pop(key, None)
        self.audit.add(events)
        self._shared.changed()
        return True

    async def records(self) -> AsyncIterator[list[KeyRecord]]:
        self._shared.now()
        found = [one for key in list(self._records) if (one := self._record(key)) is not None]
        if found:
            yield found

    async def adopt(self, records: Sequence[KeyRecord]) -> int:
        now = self._shared.now()
        self._shared.next_fence = count(max(now.wall * 1000, self._shared.next_fence())).__next__
        new = [one for one in records if one.key not in self._records]
        self._records |= {one.key: one for one in new}
        self._shared.changed()
        return len(new)

    async def purge(self) -> int:
        return self._purge(self._shared.now())

    @property
    def newest_at(self) -> int | None:
        return max((record.updated_at for record in self._records.values()), default=None)

    def _purge(self, now: Moment) -> int:
        spent = [key for key, record in self._records.items() if core.is_spent(record, now)]
        for key in spent:
            del self._records[key]
            self._extended.pop(key, None)
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
        self._extended.pop(new.key, None)
        self.audit.add(events)
        self._shared.changed()


class MemoryControl:
    """The commands and statuses of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        self._shared = shared
        self._audit = audit
        self._posted: list[tuple[int, Command]] = []
        self._last = 0
        self._reported: dict[str, tuple[int, StatusReport]] = {}
        self._last_report = 0

    async def post(
        self,
        name: str,
        *,
        target: str = EVERYONE,
        body: str = "{}",
        sender: str = "",
        keep: float = 300.0,
        events: Sequence[AuditEntry] = (),
    ) -> int:
        now = self._shared.now()
        self._posted = [(stale_at, command) for stale_at, command in self._posted if stale_at > now.wall]
        self._last += 1
        self._posted.append((now.wall + milliseconds(keep), Command(self._last, name, target, body, sender, now.wall)))
        self._audit.add(events)
        self._shared.changed("control")
        return self._last

    async def poll(self, target: str, *, after: int = 0, limit: int = 100) -> list[Command]:
        now = self._shared.now()
        unread = [
            command
            for stale_at, command in self._posted
            if command.sequence > after and command.target in (EVERYONE, target) and stale_at > now.wall
        ]
        return unread[:limit]

    async def latest(self) -> int:
        self._shared.now()
        return self._last

    async def wait(self, timeout: float, *, after: int) -> int:
        return await self._shared.watch(
            self.latest, "control", pause=lambda last: inf if last <= after else 0.0, timeout=timeout
        )

    async def report(self, name: str, body: str, *, keep: float, capacity: Capacity = NO_CAPACITY) -> int:
        now = self._shared.now().wall
        self._shared.capacities[name] = now + milliseconds(keep), capacity
        forgotten = now - milliseconds(SILENT_KEPT_S)
        self._reported = {one: kept for one, kept in self._reported.items() if kept[0] > forgotten}
        if name in self._reported and self._reported[name][0] > now:
            sequence = self._reported[name][1].sequence
        else:
            self._reported.pop(name, None)
            sequence = self._last_report = self._last_report + 1
        self._reported[name] = (now + milliseconds(keep), StatusReport(sequence, name, body, now))
        return sequence

    async def withdraw(self, name: str) -> None:
        self._shared.now()
        self._reported.pop(name, None)
        self._shared.capacities.pop(name, None)

    async def reports(self, *, silent: bool = False) -> list[StatusReport]:
        now = self._shared.now().wall
        if not silent:
            return [report for stale_at, report in self._reported.values() if stale_at > now]
        forgotten = now - milliseconds(SILENT_KEPT_S)
        return [report for stale_at, report in self._reported.values() if forgotten < stale_at <= now]


REMEMBERED_IDS = 10_000


class _Inbox:
    """The unread messages of one subscriber."""

    def __init__(self, subjects: frozenset[str], limit: int) -> None:
        self.subjects = subjects
        self.unread: ReaderQueue[Delivery | None] = ReaderQueue(limit)


class Hub:
    """The subscribers and message ids that all transports over one store share."""

    def __init__(self) -> None:
        self.lines: list[_Inbox] = []
        self.seen: OrderedDict[str, None] = OrderedDict()


class MemoryTransport:
    """Publishes to the current listeners, at this end or another one of the same hub."""

    def __init__(self, hub: Hub | None = None) -> None:
        self._hub = hub or Hub()
        self._own: list[_Inbox] = []
        self._closed = False

    async def publish(
        self, subject: str, body: bytes, *, headers: Mapping[str, str] | None = None, message_id: str = "", to: str = ""
    ) -> None:
        name = f"{subject} {message_id}" if message_id else ""
        if name and self._is_repeat(name):
            return
        delivery = Delivery(subject, body, headers or {})
        try:
            for line in list(self._hub.lines):
                if subject in line.subjects:
                    await line.unread.put(delivery)
        except BaseException:
            self._hub.seen.pop(name, None)  # a retry under this id is a new message
            raise

    def _is_repeat(self, name: str) -> bool:
        seen = self._hub.seen
        if name in seen:
            return True
        seen[name] = None
        if len(seen) > REMEMBERED_IDS:
            seen.popitem(last=False)
        return False

    async def ready(self) -> None: ...  # a subscription is active at once

    def notice(self, subject: str, body: bytes, *, message_id: str, to: str) -> Notice | None:
        return None  # a message needs no step of its own

    def subscribe(self, *subjects: str, limit: int = 1024, room: Room | None = None) -> AsyncIterator[Delivery]:
        line = _Inbox(frozenset(subjects), limit)
        self._hub.lines.append(line)
        self._own.append(line)
        return self._read(line)

    async def _read(self, line: _Inbox) -> AsyncIterator[Delivery]:
        try:
            while True:
                delivery = await line.unread.get()
                if delivery is None:
                    return
                yield delivery
        finally:
            self._forget(line)

    def _forget(self, line: _Inbox) -> None:
        for lines in (self._hub.lines, self._own):
            if line in lines:
                lines.remove(line)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for line in list(self._own):
                self._forget(line)
                line.unread.put_nowait(None)
