"""
Work that nobody looks after any more, and how it comes to somebody who does.

What a process that is gone was running is free at once. What it had queued comes to the workers here that know such
steps and have room; a worker that comes back under its name finds the rest. What a worker has queued that is being
drained is for the others in the same way.
"""

import asyncio
from collections.abc import Container, Sequence

from reefknot.assembly import presence
from reefknot.core.work import WorkState
from reefknot.execution import report
from reefknot.ports.store import Store
from reefknot.worker.service import Worker

LOOK_S = 1.0
ADOPT_EVERY_S = 10.0
PAGE = 500


async def look_for_orphans(store: Store, workers: Sequence[Worker], steps: Container[str]) -> None:
    """Often for processes that are gone, which costs little; now and then for queues without a worker."""
    loop = asyncio.get_running_loop()
    adopt_at = loop.time()
    while True:
        try:
            gone = await presence.end_leases_of_the_gone(store)
            if workers and (gone or loop.time() >= adopt_at):
                adopt_at = loop.time() + ADOPT_EVERY_S
                await adopt(store, workers, steps)
        except Exception as error:
            report.logger().error("left work cannot be looked for (%s)", report.printable(str(error), most=300))
        await asyncio.sleep(LOOK_S)


async def adopt(store: Store, workers: Sequence[Worker], steps: Container[str]) -> None:
    """Take over what is queued for a worker that no living system has, or that leaves it to others."""
    systems = await presence.living_systems(store)
    living = presence.names_of(systems) | {worker.worker_id for worker in workers}
    leaving = presence.leaving_of(systems) - {worker.worker_id for worker in workers}
    leaving |= {worker.worker_id for worker in workers if worker.handover.on}
    able = [worker for worker in workers if not worker.intake.draining]
    counts = (await store.work.snapshot()).counts
    for state, here in ((WorkState.PENDING, living - leaving), (WorkState.RUNNING, living)) if able else ():
        left = {
            name
            for name, states in counts.items()
            if "@" in name and name.partition("@")[2] not in here and states.get(state)
        }
        if left:
            await _adopt(store, able, steps, state, left)


async def _adopt(
    store: Store, workers: Sequence[Worker], steps: Container[str], state: WorkState, left: set[str]
) -> None:
    after, number = "", 0
    while True:
        items = await store.work.find(state=state, after=after, limit=PAGE)
        for item in items:
            if item.resource_class not in left or item.kind not in steps:
                continue
            worker = workers[number % len(workers)]
            pool = worker.pools.get(item.resource_class.partition("@")[0])
            number += 1
            if pool is not None and pool.has_room:
                await worker.endings.known_already(item.id, pool)
        if len(items) < PAGE:
            return
        after = items[-1].id
