"""
One store, seen as its parts.

All parts share one place and one chain of events, so a change and the event that tells of it are kept together.
"""

from typing import Protocol

from reefknot.ports.audit_log import AuditLog
from reefknot.ports.control import Control
from reefknot.ports.idempotency_store import IdempotencyStore
from reefknot.ports.quarantine import Quarantine
from reefknot.ports.transport import Transport
from reefknot.ports.work_queue import Leases, WorkQueue


class Store(Protocol):
    """What `open_store` gives."""

    @property
    def durable(self) -> bool:
        """Does what was acknowledged survive the process, and a power cut?"""

    @property
    def idempotency(self) -> IdempotencyStore: ...

    @property
    def audit(self) -> AuditLog: ...

    @property
    def work(self) -> WorkQueue: ...

    @property
    def quarantine(self) -> Quarantine: ...

    @property
    def control(self) -> Control: ...

    @property
    def leases(self) -> Leases: ...

    def transport(self) -> Transport:
        """A new end for messages. All ends over one place hear each other; whoever asked for it closes it."""

    async def close(self) -> None:
        """Finish what was handed in, then let go. A second call does nothing."""
