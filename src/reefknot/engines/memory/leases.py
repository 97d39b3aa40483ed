"""The leases of a memory store."""

from collections.abc import Collection

from msgspec import structs

from reefknot.core.work import WorkItem, WorkState
from reefknot.engines.memory.work import MemoryWorkQueue


class MemoryLeases:
    """Over the work of one store."""

    def __init__(self, work: MemoryWorkQueue) -> None:
        self._work = work

    async def owners(self) -> list[str]:
        self._work.shared.now()
        return sorted({item.owner for item in self._running()})

    async def end(self, owners: Collection[str]) -> int:
        now = self._work.shared.now()
        held = [item for item in self._running() if item.owner in owners]
        for item in held:
            self._work.put(structs.replace(item, lease_until=0), now)
        if held:
            self._work.shared.changed()
        return len(held)

    def _running(self) -> list[WorkItem]:
        return [item for item in self._work.items.values() if item.state is WorkState.RUNNING]
