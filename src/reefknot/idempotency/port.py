"""
The port of an idempotency store: keeps the records of keys.

Every call is one atomic step of `idempotency.model`. The `events` of a call are stored in the same step, and only if
the call did what it was asked: a refused write leaves no event. Waiting is always bounded.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from reefknot.audit.port import AuditEntry, AuditLog
from reefknot.idempotency.model import Claim, ClaimResult, Ending, KeyRecord, KeyState

TakeoverEvents = Callable[[KeyRecord, KeyRecord], Sequence[AuditEntry]]
"""The events of a takeover, given the record before and the record after it."""


class IdempotencyStore(Protocol):
    """A store of idempotency keys, with atomic claims and fenced writes."""

    @property
    def audit(self) -> AuditLog:
        """The log that stores the `events` of these calls."""

    @property
    def durable(self) -> bool:
        """Whether keys and events outlive the process."""

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
        """
        Ask for the key. The events are stored when it was claimed. `owner` is unique to this call.

        When the key was taken over from an owner whose lease had run out, those of `takeover_events` are stored too.
        """

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        """Extend the lease, or end it now with 0; `LeaseLostError` when another owner took over."""

    def extend(self, claims: Sequence[Claim], *, lease: float) -> None:
        """
        Extend leases as `renew` does, from any thread and without the event loop of the store; it blocks its thread.

        Claims that are lost are left out.
        """

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        """Record the ending; `LeaseLostError` when another owner took over. The same ending twice is accepted."""

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        """Record the ending of an unknown outcome, for an operator. False when the key is not in that state."""

    async def get(self, key: str) -> KeyRecord | None:
        """The current record; None if the key is unknown or its retention is over."""

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        """The record as soon as it has ended or its lease has expired, at the latest after `timeout` seconds."""

    async def counts(self) -> Mapping[KeyState, int]:
        """The number of keys in each state."""

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        """Remove a key. False if the key is unknown; `KeyInProgressError` when its lease is live."""

    async def purge(self) -> int:
        """Remove the keys whose retention is over; returns how many."""

    def records(self) -> AsyncIterator[list[KeyRecord]]:
        """All records as they are stored, a bounded page at a time; those whose retention is over may be among them."""

    async def adopt(self, records: Sequence[KeyRecord]) -> int:
        """
        Keep the records of another store as they are, beyond any quota, without an event; returns how many are new.

        A key that is there already is left as it is. Every later fence is higher than all that the other store gave
        out.
        """
