"""
Liveness of the systems over one store, and recall of the work that dead ones leave behind.

A system reports its status every second and withdraws it at the end. A killed one stops, and nobody need wait until
its status is stale: its process has a mark (`runtime/processes.py`), in the status and in the names under which it
holds leases. A frozen process exists, so it counts until its status is stale.

Leases of a dead process end at once: those of work here, that of an idempotency key when somebody asks for it. Its work
is brought back at once too, for a router to send it to another worker. A router does the same for every worker that it
has not heard of for a while, or that is leaving; without a router the work waits for one, or for its worker.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any

from reefknot.core.work import worker_of
from reefknot.errors import NameTakenError
from reefknot.ports.store import Store
from reefknot.ports.work_queue import WorkSnapshot
from reefknot.runtime.log import RepeatedErrors
from reefknot.runtime.processes import is_gone, owner_is_gone

LOOK_S = 1.0
STATUS_KEPT_S = 5.0
"""How long a status is one of a system that lives."""
STORE_S = 10.0
WHOLE_SYSTEMS_ROUTER = "router"

Status = dict[str, Any]
Recall = Callable[[Sequence[str]], Awaitable[int]]
"""Brings the work of these classes back to the routers; see `WorkQueue.recall`."""


async def look_for_orphans(store: Store, recall: Recall | None) -> None:
    """Every second, release the leases of dead processes and bring their work back to the routers. Never ends."""
    loop, errors = asyncio.get_running_loop(), RepeatedErrors()
    gone = 1  # whoever died before
    while True:
        try:
            gone += await release_dead_leases(store)
            if gone and recall is not None:
                await recall_left(store, recall)
            gone = 0
        except Exception as error:
            errors.log("left work cannot be looked for", error, loop.time())
        await asyncio.sleep(LOOK_S)


async def recall_left(store: Store, recall: Recall) -> None:
    """Bring back what workers have that no living system has, if a router is there to route it anew."""
    systems = await living_systems(store)
    if not router_names([one for one in systems if not one.get("own_work_only")]):
        return
    async with asyncio.timeout(STORE_S):
        workers = {name: worker_of(name) for name in await store.work.open_classes()}
    living = worker_names(systems)
    left = [name for name, worker in workers.items() if worker and worker not in living]
    if left:
        await recall(left)


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


def router_names(systems: list[Status]) -> set[str]:
    """The names of the routers of these systems."""
    return {one["router"]["router_id"] for one in systems if one["router"]}


def free_names(kind: str, count: int, taken: set[str]) -> list[str]:
    """`worker-1`, `worker-2`, …, without those that a system which runs here already has."""
    names = (f"{kind}-{number}" for number in range(1, count + len(taken) + 1))
    return [name for name in names if name not in taken][:count]


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
        gone = await dead_owners(store)
        return await store.leases.end(gone) if gone else 0


async def gone_owners(store: Store) -> list[str]:
    """The owners of running work whose processes on this host have ended."""
    return [owner for owner in await store.leases.owners() if owner_is_gone(owner)]


async def visible_work(store: Store) -> WorkSnapshot:
    """The queue at this moment as people see it: work that nobody is at waits."""
    return await store.work.snapshot(await gone_owners(store))


async def dead_owners(store: Store) -> list[str]:
    """The owners of running work whose processes are gone, or silent on another host."""
    gone = await gone_owners(store)
    return gone + [owner for owner in await _silent_owners(store) if owner not in gone]


async def _silent_owners(store: Store) -> list[str]:
    """
    The owners on other hosts that neither report nor renew any more.

    After a break of one's own all others look silent: they are given the time to report again.
    """
    if STATUS_KEPT_S < store.reached_for < inf:
        living = {one.get("process", "") for one in await living_systems(store)}
        silent = await store.leases.owners(silent_for=STATUS_KEPT_S)
        return [owner for owner in silent if owner.rpartition("@")[2] not in living]
    return []
