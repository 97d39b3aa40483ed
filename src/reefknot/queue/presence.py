"""
Liveness of the systems on one store, and recall of the work that dead ones leave behind.

A system reports its status every second and withdraws it at the end. A killed system is noticed before its status is
stale: its process has an identity (`runtime/processes.py`), which is in the status and in the names under which it
holds leases. A frozen process exists, so it counts until its status is stale.

Leases of a dead process end at once: those of work here, that of an idempotency key when a caller asks for it. Its work
is brought back at once too, for a router to send it to another worker. A router does the same for every worker that has
been silent for a while, or that is leaving; without a router the work waits for one, or for its worker.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from math import inf, isfinite
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import WorkerGone, timestamp
from reefknot.core.limits import LimitRule
from reefknot.errors import NameTakenError, StoreError, StoreReplacedError
from reefknot.queue.model.routing import WorkerState, worker_state
from reefknot.queue.model.wait_reasons import FleetFacts, HeldLimit, PoolFacts, Unserved, WorkerFacts, unserved
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, pool_of, worker_of
from reefknot.queue.port.control import SILENT_KEPT_S, StatusReport
from reefknot.queue.port.work_queue import WorkFilter, WorkSnapshot
from reefknot.runtime.log import RepeatedErrors, logger
from reefknot.runtime.processes import is_gone, owner_is_gone
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import Store

LOOK_S = 1.0
STATUS_KEPT_S = 5.0
"""How long a status counts as that of a living system."""
STATUS_EVERY_S = 1.0
"""How often a system publishes its status. It goes stale after `STATUS_KEPT_S`."""
FAILURE_EVERY_S = 0.25
LOOKS_PER_FILE = 4
"""How often it is looked whether a store has failed, and of these looks the one that looks at its file, too."""
WHOLE_SYSTEMS_ROUTER = "router"
MOST_HELD = 20
"""Most running jobs that the status of a system names, to show what it held when it died."""
LOOK_FOR_GONE_S = 5.0
SILENT_UNTIL_GONE_S = 10.0
"""Silence after which a system whose process cannot be checked is recorded as gone; it is shown as gone earlier."""
MOST_LOOKED_AT = 200
"""Number of submissions at each end of the queue whose classes are compared with those of the workers."""

Status = dict[str, Any]
Recall = Callable[[Sequence[str]], Awaitable[int]]
"""Brings the work of these classes back to the routers; see `WorkQueue.recall`."""


async def store_failed(store: Store) -> NoReturn:
    """
    Raise the error after which a store takes no more writes.

    A failed write shows it. A system that ends writes little, so the file is checked as well.
    """
    looks = 0
    while (failure := store.failure) is None:
        await asyncio.sleep(FAILURE_EVERY_S)
        looks += 1
        if looks % LOOKS_PER_FILE or store.path is None:
            continue
        try:
            async with asyncio.timeout(STORE_S):
                await store.control.latest()
        except StoreReplacedError:
            raise
        except (StoreError, TimeoutError):
            continue  # the part that needs the store reports it
    raise failure


def _of_all() -> Sequence[str]:
    return ()


async def look_for_orphans(
    store: Store, recall: Recall | None, concerned: Callable[[], Sequence[str] | None] = _of_all
) -> None:
    """
    Every second, release the leases of dead processes and bring their work back to the routers. Never ends.

    `concerned` names the resource classes that this process looks after: all if it names none, and with these it
    recalls; with None nothing.
    """
    loop, errors = asyncio.get_running_loop(), RepeatedErrors()
    gone = 1  # workers that died before this one started
    while True:
        classes = concerned()
        try:
            if classes is not None:
                gone += await release_dead_leases(store, classes)
            if classes:
                gone = 1  # those that die before it looks after all
            elif classes is not None:
                if gone and recall is not None:
                    await recall_left(store, recall)
                gone = 0
        except Exception as error:
            errors.log(
                "work of dead processes cannot be searched for; the next search is in a second", error, loop.time()
            )
        await asyncio.sleep(LOOK_S)


async def recall_left(store: Store, recall: Recall) -> None:
    """Recall the work of workers that belong to no living system, if a router is there to route it again."""
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
    """The status of every system that runs on this store, oldest system first."""
    async with asyncio.timeout(STORE_S):
        reports = await store.control.reports()
    living = [one for one in map(_status, reports) if not is_gone(one.get("process", ""))]
    return sorted(living, key=lambda one: (one["started_at"], one["system_id"]))


def _status(report: StatusReport) -> Status:
    return {**json.loads(report.body), "sequence": report.sequence, "reported_at": report.at}


def leading(systems: Sequence[Status]) -> Status | None:
    """
    The system that looks after what concerns all: the oldest with a router for everyone, else the oldest.

    A system that only does its own work never leads.
    """
    candidates = [one for one in systems if not one.get("own_work_only")]
    return next((one for one in candidates if one["router"]), next(iter(candidates), None))


def worker_names(systems: Sequence[Status]) -> set[str]:
    """The names of the workers of these systems."""
    return {worker["worker_id"] for one in systems for worker in one["workers"]}


def router_names(systems: Sequence[Status]) -> set[str]:
    """The names of the routers of these systems."""
    return {one["router"]["router_id"] for one in systems if one["router"]}


def free_names(kind: str, count: int, taken: set[str]) -> list[str]:
    """`worker-1`, `worker-2`, …, without those that a system which runs here already has."""
    names = (f"{kind}-{number}" for number in range(1, count + len(taken) + 1))
    return [name for name in names if name not in taken][:count]


def finite(value: Any) -> Any:
    """The value for JSON, which has no infinity: never probed is null."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


async def chosen_names(
    store: Store, workers: Sequence[str] | int, router: str | None, *, own_work_only: bool
) -> tuple[Sequence[str], str | None]:
    """The names of a system's workers, of which a number asks for free ones, and of its router: "" asks for one."""
    living = await living_systems(store)
    if isinstance(workers, int):
        queued = {worker_of(name) for name in await store.work.open_classes()} if own_work_only else set()
        workers = free_names("worker", workers, worker_names(living) | queued)
    return workers, free_names("router", 1, router_names(living))[0] if router == "" else router


async def has_router(store: Store) -> bool:
    """Whether a living router works on this store."""
    return bool(router_names(await living_systems(store)))


async def refuse_taken_names(store: Store, system_id: str) -> None:
    """
    Raise if another living system has a name of this one.

    Each reports its names before it checks, so if two start at once, the one that reported later is refused.
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


async def release_dead_leases(store: Store, classes: Sequence[str] = ()) -> int:
    """
    End the leases of dead processes on work of these classes, or of all, so that the next claim can take it.

    Returns how many there were.
    """
    async with asyncio.timeout(STORE_S):
        gone = await dead_owners(store, classes)
        return await store.leases.end(gone) if gone else 0


async def gone_owners(store: Store, classes: Sequence[str] = ()) -> list[str]:
    """The owners of running work whose processes on this host have ended."""
    return [owner for owner in await store.leases.owners(classes=classes) if owner_is_gone(owner)]


async def visible_work(store: Store) -> WorkSnapshot:
    """The queue at this moment for display: work whose owner is gone counts as waiting."""
    return await store.work.snapshot(await gone_owners(store))


async def dead_owners(store: Store, classes: Sequence[str] = ()) -> list[str]:
    """The owners of running work whose processes are gone, or silent on another host."""
    gone = await gone_owners(store, classes)
    return gone + [owner for owner in await _silent_owners(store, classes) if owner not in gone]


async def _silent_owners(store: Store, classes: Sequence[str]) -> list[str]:
    """
    The owners on other hosts that neither report nor renew any more.

    After a pause of this process all others look silent: they are given time to report again.
    """
    if not STATUS_KEPT_S < store.reached_for < inf:
        return []
    silent = await store.leases.owners(silent_for=STATUS_KEPT_S, classes=classes)
    living = {one.get("process", "") for one in await living_systems(store)} if silent else ()
    return [owner for owner in silent if owner.rpartition("@")[2] not in living]


# ---- systems that are gone -------------------------------------------------------------------------------------------


class GonePart(Struct, frozen=True):
    """A worker or a router that fell silent without an orderly end, with its last report. Times are ms UTC."""

    part: str
    name: str
    system_id: str
    host: str
    pid: int
    last_seen: int
    is_dead: bool
    """Whether its process is known to have ended; otherwise it is only silent."""
    held: dict[str, Any]
    classes: tuple[str, ...] = ()


async def silent_systems(store: Store) -> list[Status]:
    """The last status of every system that died or fell silent within the last 15 minutes."""
    async with asyncio.timeout(STORE_S):
        reports, silent = await store.control.reports(), await store.control.reports(silent=True)
    dead = [one for one in map(_status, reports) if is_gone(one.get("process", ""))]
    return [*map(_status, silent), *dead]


async def gone_parts(store: Store, living: Sequence[Status]) -> list[GonePart]:
    """
    The parts that died or fell silent within the last 15 minutes, the latest first, without those whose name is
    `living`.
    """
    back = {"worker": worker_names(living), "router": router_names(living)}
    gone = [part for one in await silent_systems(store) for part in _parts(one)]
    left = {(one.part, one.name): one for one in sorted(gone, key=lambda one: one.last_seen)}
    return [one for (part, name), one in reversed(left.items()) if name not in back[part]]


def _parts(system: Status) -> list[GonePart]:
    """The parts of a system that is gone."""
    names = ("system_id", "host", "pid")
    about: dict[str, Any] = {name: system[name] for name in names} | {"last_seen": system["reported_at"]}
    about["is_dead"] = is_gone(system.get("process", ""))
    jobs = system.get("holds") or {}
    found = []
    for one in system["workers"]:
        pools = one["classes"].values()
        held = {"running": sum(pool["active"] for pool in pools), "queued": sum(pool["depth"] for pool in pools)}
        name = one["worker_id"]
        held |= {"jobs": jobs.get(name, [])}
        found.append(GonePart(part="worker", name=name, held=held, classes=tuple(one["classes"]), **about))
    if system["router"]:
        held = {"pending": system["router"]["pending"]}
        found.append(GonePart(part="router", name=system["router"]["router_id"], held=held, **about))
    return found


_recorded = msgspec.json.Decoder(dict[str, int])
GONE = "gone"
"""The value that has the systems whose end was recorded, with the time of that (ms UTC)."""


async def look_for_gone(store: Store, journal: Journal, leads: Callable[[], bool] = lambda: True) -> None:
    """Every few seconds, in the process that leads, record the systems that are gone. Never ends."""
    loop, errors = asyncio.get_running_loop(), RepeatedErrors()
    pause = LOOK_S  # so that the system of this process has reported
    while True:
        await asyncio.sleep(pause)
        pause = LOOK_FOR_GONE_S
        if not leads():
            continue
        try:
            await record_gone(store, journal)
            await forget_replaced(store)
        except Exception as error:
            errors.log(
                "systems that are gone cannot be searched for; the next search is in a few seconds", error, loop.time()
            )


async def record_gone(store: Store, journal: Journal) -> None:
    """
    Record each system that is gone as `worker_gone`, once, whichever process notices it first.

    After a pause of this process all others look silent: they are given time to report again.
    """
    if store.reached_for <= STATUS_KEPT_S:
        return
    now = store.moment().wall
    silent = [part for one in await silent_systems(store) for part in _parts(one)]
    gone = [one for one in silent if one.is_dead or now - one.last_seen > SILENT_UNTIL_GONE_S * 1000]
    if not gone:
        return
    async with asyncio.timeout(STORE_S):
        known = await store.values.get(GONE)
        recorded = {} if known is None else _recorded.decode(known.body)
        new = [one for one in gone if one.system_id not in recorded]
        if not new:
            return
        kept = {name: at for name, at in recorded.items() if now - at < 2 * SILENT_KEPT_S * 1000}
        body = msgspec.json.encode(kept | {one.system_id: now for one in new}).decode()
        entries = journal.entries([_gone_event(one, now) for one in new])
        version = 0 if known is None else known.version
        if await store.values.put(GONE, body, version=version, events=entries) is None:
            return  # another process was faster
    for one in new:
        seconds = (now - one.last_seen) / 1000
        text = "%s %s is gone: pid %s on %s, silent for %.0f s; reefknot worker list shows what it held"
        logger().warning(text, one.part, one.name, one.pid, one.host, seconds)


async def forget_replaced(store: Store) -> None:
    """
    Remove the last reports of systems whose end is on record, once all of their parts run again under their names.
    """
    silent = await silent_systems(store)
    if not silent:
        return
    living = await living_systems(store)
    workers, routers = worker_names(living), router_names(living)
    async with asyncio.timeout(STORE_S):
        known = await store.values.get(GONE)
        recorded = {} if known is None else _recorded.decode(known.body)
        for one in silent:
            if one["system_id"] in recorded and worker_names([one]) <= workers and router_names([one]) <= routers:
                await store.control.withdraw(one["system_id"])


def _gone_event(gone: GonePart, now: int) -> WorkerGone:
    return WorkerGone(
        **envelope(wall=now / 1000),
        part=gone.part,
        worker_id=gone.name,
        host=gone.host,
        process=gone.pid,
        last_seen=timestamp(gone.last_seen / 1000),
        held=gone.held,
    )


# ---- work that waits for a part --------------------------------------------------------------------------------------


def fleet_of(systems: Sequence[Status]) -> FleetFacts:
    """
    The routers, workers and sources of these systems, as they report themselves; and workers on other stores that
    report to their routers.
    """
    workers = [_worker_facts(worker, one) for one in systems for worker in one["workers"]]
    routers = [one["router"] for one in systems if one["router"]]
    ours = {one.name for one in workers}
    foreign: dict[str, WorkerFacts] = {}
    for router in routers:
        for pool, by_id in router["workers"].items():
            for name, health in by_id.items():
                if name not in ours and health["state"] != WorkerState.GONE:
                    known = foreign.get(name) or WorkerFacts(name, WorkerState(health["state"]))
                    slots = PoolFacts(health["active"], health["capacity"])
                    foreign[name] = msgspec.structs.replace(known, pools={**known.pools, pool: slots})
    return FleetFacts(
        routers=len(routers),
        workers=(*workers, *foreign.values()),
        sources=frozenset(name for one in systems for name in one.get("sources", ())),
        unanswered={name: tuple(sent) for one in routers for name, sent in (one.get("unanswered") or {}).items()},
        is_shared=any(one.get("is_shared") for one in routers),
        limits=tuple(
            [HeldLimit(msgspec.convert(one, LimitRule), one["held"]) for r in routers for one in r.get("limits", ())]
        ),
    )


def _worker_facts(worker: Status, system: Status) -> WorkerFacts:
    name = worker["worker_id"]
    troubled = [one for one in (system.get("activity") or {}).get("destinations", []) if one["worker_id"] == name]
    return WorkerFacts(
        name=name,
        state=worker_state(draining=worker["draining"], leaving=worker["leaving"]),
        pools={pool: PoolFacts(one["active"], one["capacity"]) for pool, one in worker["classes"].items()},
        types=frozenset(system["blocks"]),
        throttled=tuple(one["name"] for one in troubled if one["throttled"]),
    )


def known_pool(item: WorkItem) -> str:
    """The class whose slots run a job; empty for a submission that does not name it."""
    return "" if item.pool == ROUTER else item.pool or pool_of(item.resource_class)


def serving(systems: Sequence[Status]) -> list[Status]:
    """The systems that take any work: a `run` takes only its own."""
    return [one for one in systems if not one.get("own_work_only")]


async def unserved_work(store: Store, systems: Sequence[Status], work: WorkSnapshot) -> list[Unserved]:
    """The due jobs that wait for a router, or for a worker of their class, that is not running."""
    living = worker_names(systems)
    pending = {name: states.get(WorkState.PENDING, 0) for name, states in work.counts.items()}
    left = sum(number for name, number in pending.items() if (worker := worker_of(name)) and worker not in living)
    waiting: Counter[str] = Counter()
    if pending.get(ROUTER) and ROUTER in work.oldest_ms:
        private = {one.get("process", "") for one in systems if one.get("own_work_only")} - {""}
        submissions = WorkFilter(classes=(ROUTER,))
        for oldest_first in (True, False):
            async with asyncio.timeout(STORE_S):
                page = await store.work.search(submissions, limit=MOST_LOOKED_AT, oldest_first=oldest_first)
            now, seen = store.moment().wall, Counter[str]()
            for item in page.items:
                if item.due_at <= now and item.owner.rpartition("@")[2] not in private:
                    seen[known_pool(item)] += 1
            waiting |= seen
            if not page.after:
                break
        else:  # those in between are of the class that most of the others have
            frequent = max(waiting, key=lambda pool: waiting[pool], default=None)
            if frequent is not None:
                waiting[frequent] += max(0, pending[ROUTER] - waiting.total())
    return unserved(waiting, left, fleet_of(serving(systems)))
