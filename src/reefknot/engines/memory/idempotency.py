"""Idempotency keys in a dictionary."""

from collections import Counter
from collections.abc import Mapping, Sequence

from reefknot.core import idempotency as core
from reefknot.core.idempotency import Answer, Asking, Claim, Claimed, Ending, KeyRecord, KeyState, Lost, checked_key
from reefknot.core.moment import Moment, milliseconds
from reefknot.engines.memory.audit import MemoryAuditLog
from reefknot.engines.memory.state import Shared
from reefknot.errors import KeyInProgressError, KeyQuotaError, LeaseLostError
from reefknot.ports.audit_log import AuditEntry

FULL_FOR_MS = 1000
"""How long nothing is looked for after nothing was found: a flood must not walk through all keys for every one."""


class MemoryIdempotencyStore:
    """The keys of a memory store."""

    def __init__(
        self,
        shared: Shared,
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
    ) -> Answer:
        now = self._shared.now()
        asking = Asking(checked_key(key), owner, fingerprint, milliseconds(lease), guard)
        old = self._records.get(key)
        if old is None:
            self._make_room(now)
        answer = core.claim(old, asking, fence=self._shared.next_fence(), now=now, retention_ms=self._retention_ms)
        self._keep(old, answer.record, events if isinstance(answer, Claimed) else ())
        return answer

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        now = self._shared.now()
        old = self._records.get(claim.key)
        new = core.renew(old, claim, now=now, lease_ms=milliseconds(lease), retention_ms=self._retention_ms)
        return self._kept(claim, old, new, ())

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        now = self._shared.now()
        core.checked_ending(ending, self._largest_result)
        old = self._records.get(claim.key)
        new = core.finish(old, claim, ending, now=now, retention_ms=self._retention_ms)
        return self._kept(claim, old, new, events)

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        now = self._shared.now()
        core.checked_ending(ending, self._largest_result)
        old = self._records.get(checked_key(key))
        new = core.resolve(old, ending, now=now, retention_ms=self._retention_ms)
        if isinstance(new, Lost):
            return False
        self._keep(old, new, events)
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

    async def find(self, *, state: KeyState | None = None, after: str = "", limit: int = 100) -> list[KeyRecord]:
        now = self._shared.now()
        live = (self._records[key] for key in sorted(self._records) if key > after)
        wanted = (record for record in live if state in (None, record.state) and not core.is_spent(record, now))
        return [record for record, _ in zip(wanted, range(limit), strict=False)]

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

    def _kept(
        self, claim: Claim, old: KeyRecord | None, new: KeyRecord | Lost, events: Sequence[AuditEntry]
    ) -> KeyRecord:
        if isinstance(new, Lost):
            raise LeaseLostError(claim.key, owner=claim.owner, fence=claim.fence)
        self._keep(old, new, events)
        return new

    def _keep(self, old: KeyRecord | None, new: KeyRecord, events: Sequence[AuditEntry]) -> None:
        if new is old:
            return  # said before: nothing is written, and nothing is told twice
        self._records[new.key] = new
        self.audit.add(events)
        self._shared.changed()
