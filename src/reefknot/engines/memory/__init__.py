"""
A store in this process's memory. Not durable: it ends with the process.

The same contracts as the durable engines, for tests, simulation and small tools. It belongs to one event loop. Every
step happens between two awaits, which is what makes it atomic.
"""

from reefknot.engines.memory.audit_and_keys import MemoryAuditLog, MemoryIdempotencyStore, Shared
from reefknot.engines.memory.store import Hub, MemoryControl, MemoryQuarantine, MemoryTransport
from reefknot.engines.memory.work import MemoryLeases, MemoryWorkQueue
from reefknot.ports.clock import Clock

__all__ = ["MemoryStore"]


class MemoryStore:
    """All parts over one state."""

    durable = False

    def __init__(
        self,
        clock: Clock,
        *,
        chain: str = "memory",
        retention: float = 7 * 86400.0,
        largest_result: int = 1 << 20,
        most_keys: int | None = None,
    ) -> None:
        shared = Shared(clock)
        self.audit = MemoryAuditLog(shared, chain)
        self.idempotency = MemoryIdempotencyStore(
            shared, self.audit, retention=retention, largest_result=largest_result, most_keys=most_keys
        )
        self.work = MemoryWorkQueue(shared, self.audit)
        self.quarantine = MemoryQuarantine(self.work, self.audit)
        self.control = MemoryControl(shared, self.audit)
        self.leases = MemoryLeases(self.work)
        self._hub = Hub()
        self._shared = shared

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self._hub)

    async def close(self) -> None:
        self._shared.close()
