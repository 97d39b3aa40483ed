"""
Work that nobody looks after any more, and how it comes to somebody who does.

What a process that is gone was running is free at once. What it had queued comes to the workers here that know such
steps and have room; a worker that comes back under its name finds the rest. What a worker has queued that is being
drained is for the others in the same way.

Which processes are there over one store, and which are gone for good.

A system says every second how it is. One that was killed says nothing any more, and nobody need wait for it: its
process carries a mark, in what it says and in the name under which it holds work, and whoever is on the same machine
can look whether that process still exists. One that is frozen exists. About another machine's processes nothing is
known from here but their silence.
"""

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Container, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from reefknot.core.work import WorkState
from reefknot.errors import NameTakenError
from reefknot.ports.store import Store
from reefknot.runtime.log import logger, printable
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
            gone = await end_leases_of_the_gone(store)
            if workers and (gone or loop.time() >= adopt_at):
                adopt_at = loop.time() + ADOPT_EVERY_S
                await adopt(store, workers, steps)
        except Exception as error:
            logger().error("left work cannot be looked for (%s)", printable(str(error), most=300))
        await asyncio.sleep(LOOK_S)


async def adopt(store: Store, workers: Sequence[Worker], steps: Container[str]) -> None:
    """Take over what is queued for a worker that no living system has, or that leaves it to others."""
    systems = await living_systems(store)
    living = names_of(systems) | {worker.worker_id for worker in workers}
    leaving = leaving_of(systems) - {worker.worker_id for worker in workers}
    leaving |= {worker.worker_id for worker in workers if worker.leaving.is_on}
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
                await worker.closing.answer_duplicate(item.id, pool)
        if len(items) < PAGE:
            return
        after = items[-1].id


OBSERVERS = "observers"
STATUS = "status"
STORE_S = 10.0
WHOLE_SYSTEMS_ROUTER = "router"

Status = dict[str, Any]


# ---- processes ------------------------------------------------------------------------------------------------------


def mark(pid: int | None = None) -> str:
    """This process, or another one of this machine, so that it can be told from every other that ever was."""
    number = os.getpid() if pid is None else pid
    return f"{_machine()}.{number}.{_began(number) or 0}"


def is_gone(marked: str) -> bool:
    """Whether the process of this mark is known to have ended. False as well when nothing can be known."""
    machine, _, rest = marked.partition(".")
    number, _, began = rest.partition(".")
    if machine != _machine() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # somebody else's, and so it is there
        return False
    now = _began(int(number))
    return now == "" or (began.isdecimal() and began != "0" and now is not None and now != began)


def owner_is_gone(owner: str) -> bool:
    """The same of whoever holds work under this name. A name without a mark tells nothing."""
    _, at, marked = owner.rpartition("@")
    return bool(at) and is_gone(marked)


@cache
def _machine() -> str:
    """This boot of this machine, seen from where our process numbers mean something: a container has its own."""
    known = [socket.gethostname()]
    try:
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        known.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # another system than Linux
        known.append("")
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def _began(pid: int) -> str | None:
    """When a process began, as the system counts; empty when only its exit code is left, None when it is not known."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if told[0] in ("Z", "X") else told[19]


# ---- systems --------------------------------------------------------------------------------------------------------


async def living_systems(store: Store) -> list[Status]:
    """The last status of every system that runs over this store, oldest system first."""
    living = [one[-1] for one in (await _said(store)).values() if not one[-1].get("ended") and not _died(one[-1])]
    return sorted(living, key=lambda one: (one["started_at"], one["system_id"]))


def names_of(systems: list[Status]) -> set[str]:
    """The workers of these systems."""
    return {worker["worker_id"] for one in systems for worker in one["workers"]}


def leaving_of(systems: list[Status]) -> set[str]:
    """Those of them that leave what they have queued to others."""
    return {worker["worker_id"] for one in systems for worker in one["workers"] if worker.get("leaving")}


def routers_of(systems: list[Status]) -> set[str]:
    """The names of their routers."""
    return {one["router"]["router_id"] for one in systems if one["router"]}


async def told_by_routers(store: Store) -> list[Status]:
    """What each router over this store last told of itself."""
    return [one["router"] for one in await living_systems(store) if one["router"]]


async def has_router(store: Store) -> bool:
    """Whether somebody routes over this store."""
    return bool(routers_of(await living_systems(store)))


async def refuse_taken_names(store: Store, system_id: str) -> None:
    """
    Raise if another living system has a name of this one.

    Both have said theirs before they look, so of two that start at once the one that spoke later gives way.
    """
    said = await _said(store)
    ours = said.get(system_id)
    if ours is None:
        return
    for other in said.values():
        last = other[-1]
        if last["system_id"] == system_id or last.get("ended") or _died(last):
            continue
        if other[0]["sequence"] < ours[0]["sequence"]:
            for kind, names in _names(ours[0]).items():
                for name in sorted(names & _names(last)[kind]):
                    raise NameTakenError(kind=kind, name=name, holder=f"pid {last['pid']} on {last['host']}")


def _names(status: Status) -> dict[str, set[str]]:
    """What must be there once. The router of a whole system has no name of its own."""
    return {"worker": names_of([status]), "router": routers_of([status]) - {WHOLE_SYSTEMS_ROUTER}}


async def _said(store: Store) -> dict[str, list[Status]]:
    """What was said lately, by system, oldest first."""
    async with asyncio.timeout(STORE_S):
        commands = await store.control.poll(OBSERVERS, limit=1000)
    said: dict[str, list[Status]] = {}
    for command in commands:
        if command.name == STATUS:
            status = {**json.loads(command.body), "sequence": command.sequence}
            said.setdefault(status["system_id"], []).append(status)
    return said


def _died(status: Status) -> bool:
    """Killed without a word: its process was on this machine and is not there any more."""
    return is_gone(status.get("process", ""))


async def end_leases_of_the_gone(store: Store) -> int:
    """What processes that are gone held is for the next claim, now. Answers how many pieces of work that were."""
    async with asyncio.timeout(STORE_S):
        gone = [owner for owner in await store.leases.owners() if owner_is_gone(owner)]
        return await store.leases.end(gone) if gone else 0
