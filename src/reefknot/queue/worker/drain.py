"""
Draining: queued work of a worker that is leaving, offered to the others.

The work stays in the store, with its due time and its attempts. Whoever sent it gets a rejecting ack, and the next
worker that is sent it takes it over. If nobody does, it is still there when this worker resumes or restarts. The
baseline's acks cannot say why work was refused: there the workers over the same store find it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from reefknot.audit.journal import about_item
from reefknot.audit.model.event import Requeued
from reefknot.queue.model.messages import ExecAssignmentAck
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.queue.worker.context import WorkerContext
from reefknot.queue.worker.pool import Pool
from reefknot.runtime.timeouts import STORE_S

PAGE = 500
AT_ONCE = 64
REASON = "its worker is draining"

DrainAck = Callable[[str, Pool], ExecAssignmentAck]


class Drain:
    """Gives up the queued work of one worker. `is_on`: the worker is leaving; a mere pause keeps its queue."""

    def __init__(self, context: WorkerContext, pools: Mapping[str, Pool], ack: DrainAck) -> None:
        self._context = context
        self._pools = pools
        self._ack = ack
        self._offered: set[str] = set()
        self.is_on = False

    def begin(self) -> None:
        self.is_on = True
        self._offered.clear()

    @property
    def has_more(self) -> bool:
        """Whether work was queued since the last offer: it was on its way in, or its attempt is to be repeated."""
        return self.is_on and any(pool.queue.depth or pool.prefetched for pool in self._pools.values())

    async def offer(self) -> int:
        """Give up every place, and tell the senders. Returns the number of assignments offered."""
        for pool in self._pools.values():
            pool.queue.clear()
        free = [item for item in await self._queued() if item.id not in self._offered]
        self._offered.update(item.id for item in free)
        if not free:
            return 0
        wall = self._context.clock.wall()
        events = [Requeued(**about_item(one, wall), reason=REASON, generation=one.generation) for one in free]
        await self._context.journal.write(*events)
        if self._context.settings.queue_v2:
            for start in range(0, len(free), AT_ONCE):
                await asyncio.gather(*(self._reject(item) for item in free[start : start + AT_ONCE]))
        return len(free)

    async def _queued(self) -> list[WorkItem]:
        """The items that the store has queued for this worker; those handed back are in no pool's queue."""
        names = [pool.queue_name for pool in self._pools.values()]
        found, after = list[WorkItem](), ""
        while True:
            with self._context.timeouts.timeout(STORE_S):
                page: Sequence[WorkItem] = await self._context.work.find(
                    state=WorkState.PENDING, classes=names, after=after, limit=PAGE
                )
            found += page
            if len(page) < PAGE:
                return found
            after = page[-1].id

    async def _reject(self, item: WorkItem) -> None:
        pool = self._pools[item.resource_class.rpartition("@")[0]]
        await self._context.send_ack(self._ack(item.assignment_id, pool))
