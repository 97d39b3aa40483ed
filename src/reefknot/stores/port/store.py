"""
The port of a store: its parts, over one database.

All parts share one database and one chain of events, so a change and its event are stored in one step.
"""

from typing import Protocol

from reefknot.audit.port import AuditLog
from reefknot.core.clock import Clock
from reefknot.core.time import Moment
from reefknot.errors import ReefknotError
from reefknot.idempotency.port import IdempotencyStore
from reefknot.queue.port.control import Control
from reefknot.queue.port.transport import Transport
from reefknot.queue.port.work_queue import Leases, QuarantineStore, WorkQueue
from reefknot.stores.port.values import ValueStore


class Store(Protocol):
    """A store, as `open_store` returns it."""

    @property
    def durable(self) -> bool:
        """Whether acknowledged writes survive the process, and a power cut; on a server that is its own setting."""

    @property
    def identity(self) -> str:
        """The place where the data is kept: the same for two stores over one file."""

    @property
    def failure(self) -> ReefknotError | None:
        """The error after which every write is refused until the store is opened again; None while it works."""

    @property
    def expires_by_itself(self) -> bool:
        """Whether keys and ended work past their retention go without being purged."""

    @property
    def reached_for(self) -> float:
        """Seconds for which the store could be reached without a break; infinite where it is a part of this host."""

    @property
    def clock(self) -> Clock:
        """The clock of the store's records: deadlines and due times are compared with its wall time."""

    def moment(self) -> Moment:
        """This moment as the store reckons: leases are compared with its steady time."""

    @property
    def idempotency(self) -> IdempotencyStore: ...

    @property
    def audit(self) -> AuditLog: ...

    @property
    def work(self) -> WorkQueue: ...

    @property
    def quarantine(self) -> QuarantineStore: ...

    @property
    def control(self) -> Control: ...

    @property
    def leases(self) -> Leases: ...

    @property
    def values(self) -> ValueStore: ...

    async def newest_record_at(self) -> int | None:
        """The time of the newest event, key or work item (ms UTC); None when there is none."""

    def transport(self, *, keeps_shared: bool = False) -> Transport:
        """
        A new transport. All transports over one database exchange messages; the caller closes it.

        With `keeps_shared`, assignments of peers on the shared subject are kept for whoever reads them, each for one
        reader, where the engine can: elsewhere every reader hears them.
        """

    async def close(self) -> None:
        """Finish pending writes, then close. A second call does nothing."""
