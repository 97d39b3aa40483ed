"""
`MemoryStore`: a store in this process's memory, for tests, simulation and small tools.

It fulfils the contracts of the durable engines, is lost with the process, and belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.time import Moment
from reefknot.errors import ParameterError
from reefknot.idempotency.model import KEY_RETENTION_S
from reefknot.queue.model.work import Interrupted
from reefknot.queue.port.quarantine import QuarantineStore
from reefknot.queue.port.work_queue import Held, Settlement
from reefknot.runtime.seeds import new_id
from reefknot.stores.memory.store import (
    Hub,
    MemoryAuditLog,
    MemoryContext,
    MemoryControl,
    MemoryIdempotencyStore,
    MemoryTransport,
)
from reefknot.stores.port import StoredValue, checked_body, checked_name
from reefknot.stores.port.engines import Engine, Examination, ExamineOptions, Finding, OpenOptions, StoreFiles
from reefknot.stores.work_in_memory.queue import TableLeases, TableWorkQueue
from reefknot.stores.work_in_memory.table import MOST_ENDED, WorkTable

if TYPE_CHECKING:
    from reefknot.audit.port import AuditEntry
    from reefknot.stores.port import Store

__all__ = ["ENGINE", "MemoryStore", "MemoryWorkQueue"]

R = TypeVar("R")


class MemoryWorkQueue(TableWorkQueue):
    """The work of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        super().__init__(WorkTable(shared.offered, most_ended=MOST_ENDED), shared)
        self._shared = shared
        self._audit = audit

    async def write(
        self, run: Callable[[Moment], R], *, ids: Sequence[str] = (), wake: bool = True, is_soft: bool = False
    ) -> R:
        now = self._shared.now()
        try:
            answer = run(now)
        except BaseException:
            self.table.roll_back()
            raise
        self.table.clear_changes()
        if self.table.events:
            self._audit.add(self.table.take_events())
        if wake or self.table.touched:
            self._shared.changed(*self.table.take_topics())
        return answer

    async def look(self, read: Callable[[Moment], R]) -> R:
        return read(self._shared.now())


class MemoryLeases(TableLeases):
    """The leases of all work in a memory store."""

    def __init__(self, work: MemoryWorkQueue, shared: MemoryContext) -> None:
        super().__init__(work)
        self._shared = shared

    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        self._work.table.extend(held, now=self._shared.now(), lease=lease)

    def give_back(self, held: Sequence[Held]) -> None:
        settled = [Settlement(one.id, one.owner, one.fence, Interrupted()) for one in held]
        self._work.table.settle(settled, now=self._shared.now())
        self._work.table.clear_changes()


class MemoryValues:
    """The named values of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        self._shared = shared
        self._audit = audit
        self._values: dict[str, StoredValue] = {}
        self._last = 0

    async def get(self, name: str) -> StoredValue | None:
        self._shared.now()
        return self._values.get(checked_name(name))

    async def put(self, name: str, body: str, *, version: int, events: Sequence[AuditEntry] = ()) -> StoredValue | None:
        self._shared.now()
        if self._version(checked_name(name)) != version:
            return None
        value = self._values[name] = StoredValue(name, checked_body(body), self._last + 1)
        self._last += 1
        self._changed(events)
        return value

    async def delete(self, name: str, *, version: int, events: Sequence[AuditEntry] = ()) -> bool:
        self._shared.now()
        if self._version(checked_name(name)) != version or version == 0:
            return False
        del self._values[name]
        self._changed(events)
        return True

    async def list(self, prefix: str = "") -> Sequence[StoredValue]:
        self._shared.now()
        return [self._values[name] for name in sorted(self._values) if name.startswith(prefix)]

    def _version(self, name: str) -> int:
        return self._values[name].version if name in self._values else 0

    def _changed(self, events: Sequence[AuditEntry]) -> None:
        self._audit.add(events)
        self._shared.changed()


class MemoryStore:
    """All parts of a store over one shared state."""

    durable = False
    failure = None
    path = None
    read_only = False
    expires_by_itself = False
    reached_for = inf

    def __init__(
        self,
        clock: Clock,
        *,
        chain: str = "memory",
        retention: float = KEY_RETENTION_S,
        largest_result: int = 1 << 20,
        most_keys: int | None = None,
    ) -> None:
        context = MemoryContext(clock)
        self.identity = f"memory:{new_id()}"
        self.audit = MemoryAuditLog(context, chain)
        self.idempotency = MemoryIdempotencyStore(
            context, self.audit, retention=retention, largest_result=largest_result, most_keys=most_keys
        )
        self.work = MemoryWorkQueue(context, self.audit)
        self.quarantine = QuarantineStore(self.work)
        self.control = MemoryControl(context, self.audit)
        self.leases = MemoryLeases(self.work, context)
        self.values = MemoryValues(context, self.audit)
        self.clock = SteadyClock(clock)
        self._hub = Hub()
        self._context = context

    def moment(self) -> Moment:
        return self._context.now()

    async def newest_record_at(self) -> int | None:
        found = [self.audit.newest_at, self.work.table.newest_at, self.idempotency.newest_at]
        return max((at for at in found if at is not None), default=None)

    async def room(self) -> int | None:
        return None

    def transport(self, *, keeps_shared: bool = False) -> MemoryTransport:
        return MemoryTransport(self._hub)

    def acquire_retention_lock(self) -> bool:
        return True

    async def close(self) -> None:
        self._context.close()


class MemoryEngine:
    """The engine of `memory:`."""

    magic = b""
    without_file = "ends with the process that opened it"
    hears_peers = False
    extra = ""

    def files(self) -> StoreFiles:
        raise LookupError(self.without_file)

    def path(self, url: str) -> None:
        if url.rstrip(":") != "memory":
            raise ValueError

    async def open(self, url: str, options: OpenOptions) -> MemoryStore:
        if options.read_only:
            raise ParameterError("read_only", True, "False for a store in memory: it has nothing to read")
        return MemoryStore(options.clock, **options.limits)

    async def create(self, url: str, settings: Mapping[str, Any], *, keeps_shared: bool) -> list[str]:
        return []

    async def examine(self, url: str, options: ExamineOptions) -> Examination:
        return Examination(_FINDINGS, is_ready=False)

    async def examine_open(self, store: Store, options: ExamineOptions) -> list[Finding]:
        return _FINDINGS


_FINDINGS = [
    Finding(
        "durability",
        "warning",
        "in the memory of this process, and ends with it",
        "name a file or a server: --engine sqlite:PATH",
    )
]
ENGINE: Engine = MemoryEngine()
