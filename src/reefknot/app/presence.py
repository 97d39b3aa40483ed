"""
Liveness of the systems over one store, and adoption of the work that dead or draining ones leave behind.

A system reports its status every second and withdraws it at the end. A killed one stops, and nobody need wait until
its status is stale: its process has a mark (`runtime/processes.py`), in the status and in the names under which it
holds leases. A frozen process exists, so it counts until its status is stale.

Leases of a dead process end at once: those of work here, that of an idempotency key when somebody asks for it. Work
that it had queued moves to workers of this process that know the step and have room; a worker that comes back under its
old name finds the rest. Queued work of a draining worker moves likewise.
"""

import asyncio
import json
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from reefknot.core.work import WorkState
from reefknot.errors import NameTakenError
from reefknot.ports.store import Store
from reefknot.runtime.log import RepeatedErrors
from reefknot.runtime.processes import is_gone, owner_is_gone

if TYPE_CHECKING:
    from reefknot.worker.service import Worker

LOOK_S = 1.0
ADOPT_EVERY_S = 10.0
PAGE = 500


async def look_for_orphans(store: Store, workers: "Sequence[Worker]", steps: Container[str]) -> None:
    """Release leases of dead processes every second, which costs little; adopt queued work now and then. Never ends."""
    loop = asyncio.get_running_loop()
    adopt_at, errors = loop.time(), RepeatedErrors()
    while True:
        try:
            gone = await release_dead_leases(store)
            if workers and (gone or loop.time() >= adopt_at):
                adopt_at = loop.time() + ADOPT_EVERY_S
                await adopt(store, workers, steps)
        except Exception as error:
            errors.log("left work cannot be looked for", error, loop.time())
        await asyncio.sleep(LOOK_S)


async def adopt(store: Store, workers: "Sequence[Worker]", steps: Container[str]) -> None:
    """Take over work that is queued for workers which no living system has, or which are draining."""
    systems = await living_systems(store)
    living = worker_names(systems) | {worker.worker_id for worker in workers}
    leaving = draining_workers(systems) - {worker.worker_id for worker in workers}
    leaving |= {worker.worker_id for worker in workers if worker.leaving.is_on}
    able = [worker for worker in workers if not worker.intake.draining]
    counts = (await store.work.snapshot()).counts
    for state, here in ((WorkState.PENDING, living - leaving), (WorkState.RUNNING, living)) if able else ():
        left = {
            name
            for name, states in counts.items()
            if "@" in name and name.rpartition("@")[2] not in here and states.get(state)
        }
        if left:
            await _adopt(store, able, steps, state, left)


async def _adopt(
    store: Store, workers: "Sequence[Worker]", steps: Container[str], state: WorkState, left: set[str]
) -> None:
    after, number = "", 0
    while True:
        items = await store.work.find(state=state, classes=left, after=after, limit=PAGE)
        for item in items:
            if item.kind not in steps:
                continue
            worker = workers[number % len(workers)]
            pool = worker.pools.get(item.resource_class.rpartition("@")[0])
            number += 1
            if pool is not None and pool.has_room:
                await worker.closing.answer_duplicate(item.id, pool)
        if len(items) < PAGE:
            return
        after = items[-1].id


STORE_S = 10.0
WHOLE_SYSTEMS_ROUTER = "router"

Status = dict[str, Any]


# ---- systems --------------------------------------------------------------------------------------------------------


async def living_systems(store: Store) -> list[Status]:
    """The status of every system that runs over this store, oldest system first."""
    async with asyncio.timeout(STORE_S):
        reports = await store.control.reports()
    systems = [{**json.loads(one.body), "sequence": one.sequence} for one in reports]
    living = [one for one in systems if not is_gone(one.get("process", ""))]
    return sorted(living, key=lambda one: (one["started_at"], one["system_id"]))


def worker_names(systems: list[Status]) -> set[str]:
    """The names of the workers of these systems."""
    return {worker["worker_id"] for one in systems for worker in one["workers"]}


def draining_workers(systems: list[Status]) -> set[str]:
    """The names of the workers that are draining and leave their queued work to others."""
    return {worker["worker_id"] for one in systems for worker in one["workers"] if worker.get("leaving")}


def router_names(systems: list[Status]) -> set[str]:
    """The names of the routers of these systems."""
    return {one["router"]["router_id"] for one in systems if one["router"]}


async def has_router(store: Store) -> bool:
    """Whether a living router works over this store."""
    return bool(router_names(await living_systems(store)))


async def refuse_taken_names(store: Store, system_id: str) -> None:
    """
    Raise if another living system has a name of this one.

    Each reports its names before it looks, so of two that start at once the one that reported later gives way.
    """
    systems = await living_systems(store)
    ours = next((one for one in systems if one["system_id"] == system_id), None)
    if ours is None:
        return
    for other in systems:
        if other["sequence"] < ours["sequence"]:
            for kind, names in _names(ours).items():
                for name in sorted(names & _names(other)[kind]):
                    raise NameTakenError(kind=kind, name=name, holder=f"pid {other['pid']} on {other['host']}")


def _names(status: Status) -> dict[str, set[str]]:
    """The names of a system that must be unique, by kind. The router of a whole system has no name of its own."""
    return {"worker": worker_names([status]), "router": router_names([status]) - {WHOLE_SYSTEMS_ROUTER}}


async def release_dead_leases(store: Store) -> int:
    """End the leases of dead processes, so that the next claim can have their work. Returns how many there were."""
    async with asyncio.timeout(STORE_S):
        gone = [owner for owner in await store.leases.owners() if owner_is_gone(owner)]
        return await store.leases.end(gone) if gone else 0
