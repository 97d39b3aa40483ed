"""
Where idempotency keys are kept.

Every call is one atomic step of `core.idempotency`. The `events` of a call are kept in the same step, and only if the
call did what it was asked: a refused write leaves no event. Waiting is bounded, always.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from reefknot.core.idempotency import Answer, Claim, Ending, KeyRecord, KeyState
from reefknot.ports.audit_log import AuditEntry, AuditLog


class IdempotencyStore(Protocol):
    """Claims, renews, finishes, remembers."""

    @property
    def audit(self) -> AuditLog:
        """The log that keeps the `events` of these calls."""

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
        """Ask for the key. The events are kept when it was claimed. `owner` is unique to this call."""

    async def renew(self, claim: Claim, *, lease: float = 60.0) -> KeyRecord:
        """Hold it for longer; `LeaseLostError` when somebody took over."""

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        """Write down what came of it; `LeaseLostError` when somebody took over. The same ending twice is fine."""

    async def resolve(self, key: str, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> bool:
        """A person tells what happened to an unknown outcome. False when the key is not in that state."""

    async def get(self, key: str) -> KeyRecord | None:
        """The record as it stands, None when there is none or its retention is over."""

    async def wait(self, key: str, timeout: float) -> KeyRecord | None:
        """The record as soon as it has ended or its lease has run out, or as it stands after `timeout` seconds."""

    async def counts(self) -> Mapping[KeyState, int]:
        """How many keys there are in each state."""

    async def forget(self, key: str, *, events: Sequence[AuditEntry] = ()) -> bool:
        """Remove a key that nobody holds. False when there is none, `KeyInProgressError` when its lease is live."""

    async def purge(self) -> int:
        """Remove what is past its retention, and tell how much that was."""
