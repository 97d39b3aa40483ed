"""The work of a memory store: a table of it, whose changes are final as soon as they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from reefknot.core.time import Moment
from reefknot.engines.memory.store import MemoryAuditLog, MemoryContext
from reefknot.engines.table_queue import TableLeases, TableWorkQueue
from reefknot.engines.work_table import WorkTable
from reefknot.ports.work_queue import Held

R = TypeVar("R")


class MemoryWorkQueue(TableWorkQueue):
    """The work of a memory store."""

    def __init__(self, shared: MemoryContext, audit: MemoryAuditLog) -> None:
        super().__init__(WorkTable(shared.offered), shared)
        self._shared = shared
        self._audit = audit

    async def change(
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
