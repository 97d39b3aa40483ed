"""
What a worker that is being drained has queued, on its way to the others.

It stays in the store as it is, with its due time and its attempts. Whoever sent it hears that it is free again, and the
next worker that is sent it takes it over. Should nobody come for it, it is still there when this worker goes on or
starts again. The baseline's acks cannot say why work was refused: there its router is told nothing, and the workers
over the same store find it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from reefknot.audit.journal import Journal, event_id
from reefknot.core.audit.event import Requeued, timestamp
from reefknot.core.messages import ExecAssignmentAck
from reefknot.core.work import WorkItem, WorkState
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import WorkQueue
from reefknot.runtime.timeouts import STORE_S, Timeouts
from reefknot.worker.closing import Outbox
from reefknot.worker.pool import Pool

PAGE = 500
AT_ONCE = 64
REASON = "its worker is draining"

Refusal = Callable[[str, Pool], ExecAssignmentAck]


class Handover:
    """Gives up what the pools of one worker have queued."""

    def __init__(
        self,
        *,
        pools: Mapping[str, Pool],
        refusal: Refusal,
        v2: bool,
        work: WorkQueue,
        journal: Journal,
        outbox: Outbox,
        clock: Clock,
        limits: Timeouts,
    ) -> None:
        self._pools = pools
        self._refusal = refusal
        self._v2 = v2
        self._work = work
        self._journal = journal
        self._outbox = outbox
        self._clock = clock
        self._limits = limits
        self._told: set[str] = set()
        self.on = False
        """Whether the worker is leaving: a pause keeps what is queued where it is."""

    def begin(self) -> None:
        self.on = True
        self._told.clear()

    @property
    def has_more(self) -> bool:
        """Whether something found a place here after all: it was on its way in, or its attempt is to be repeated."""
        return self.on and any(pool.queue.depth or pool.hand for pool in self._pools.values())

    async def give(self) -> int:
        """Give up every place, and say so. Answers how many pieces of work that were."""
        for pool in self._pools.values():
            pool.queue.clear()
        free = [item for item in await self._queued() if item.id not in self._told]
        self._told.update(item.id for item in free)
        if not free:
            return 0
        await self._journal.write(*(self._event(item) for item in free))
        if self._v2:
            for start in range(0, len(free), AT_ONCE):
                await asyncio.gather(*(self._tell(item) for item in free[start : start + AT_ONCE]))
        return len(free)

    async def _queued(self) -> list[WorkItem]:
        """As the store has it: what was handed back is in no queue."""
        ours, found, after = self._by_queue(), list[WorkItem](), ""
        while True:
            with self._limits.timeout(STORE_S):
                page: Sequence[WorkItem] = await self._work.find(state=WorkState.PENDING, after=after, limit=PAGE)
            found += [item for item in page if item.resource_class in ours]
            if len(page) < PAGE:
                return found
            after = page[-1].id

    def _by_queue(self) -> dict[str, Pool]:
        return {pool.queue_name: pool for pool in self._pools.values()}

    async def _tell(self, item: WorkItem) -> None:
        await self._outbox.ack(self._refusal(item.id, self._by_queue()[item.resource_class]))

    def _event(self, item: WorkItem) -> Requeued:
        return Requeued(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=item.tenant_id,
            trace_id=item.trace_id,
            correlation_id=item.correlation_id,
            work_id=item.id,
            reason=REASON,
            generation=item.generation,
        )
