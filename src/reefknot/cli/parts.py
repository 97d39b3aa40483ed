"""
`reefknot worker` and `reefknot router`: one part of a system as a process of its own, and the parts that run.

A part runs over the same store as the others; a store that only this process can see is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from json import dumps
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from reefknot.cli.app import CommandError, Exit, examples, noun
from reefknot.cli.live_output import LOG, LogFlags
from reefknot.cli.options import (
    OPERATOR,
    STORE,
    Modules,
    OperatorFlags,
    StoreFlags,
    Wide,
    arg,
    check_number,
    check_seconds,
    unknown,
)
from reefknot.cli.output import (
    age,
    data,
    prints_to_stderr,
    put,
    put_json,
    put_table,
    queue_depth,
    relative,
    say,
    show,
    time_text,
)
from reefknot.cli.serve import (
    DrainSeconds,
    For,
    Startup,
    shutdown_on_signals,
    startup,
    unfinished,
    until_first_ends,
    until_text,
)
from reefknot.cli.store import (
    StoreAddress,
    address_of,
    address_to_read,
    has_part,
    polled,
    shown_url,
    systems_with,
    with_store,
)
from reefknot.cli.watch import Watch, repeated
from reefknot.core.routing import WorkerState, worker_state
from reefknot.errors import StoreError
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.app.system import System
    from reefknot.ports.store import Store

OBEY_WAIT_S = 5.0

worker_app = noun("worker", "worker start --module app", "worker list")
router_app = noun("router", "router start", "router status")

Seed = Annotated[int | None, arg("Seed of jitter.")]
WorkerId = Annotated[str | None, arg("Worker id. Default: every worker.")]

# ---- start -----------------------------------------------------------------------------------------------------------


@worker_app.command(
    name="start",
    help_epilogue=examples(
        "worker start", "worker start --engine sqlite:state.db --worker-id mailer --module app --module more"
    ),
)
def start_worker(
    *,
    worker_id: Annotated[str | None, arg("Worker id. Default: worker-1, or the next free one.")] = None,
    module: Modules = None,
    seconds: For = None,
    drain: DrainSeconds = None,
    seed: Seed = None,
    log: LogFlags = LOG,
    options: StoreFlags = STORE,
) -> int:
    """
    Run one worker until Ctrl-C or SIGTERM, for the routers on the same store.

    The exit code is 75 when a worker with this id is running already.
    """
    parts = {"workers": (worker_id,) if worker_id else 1, "router": None, "modules": tuple(module or ()), "seed": seed}
    with log.applied():
        return _start("worker", worker_id, options, seconds, drain, parts)


@router_app.command(
    name="start",
    help_epilogue=examples("router start", "router start --engine sqlite:state.db --router-id front --for 3600"),
)
def start_router(
    *,
    router_id: Annotated[str | None, arg("Router id. Default: router-1, or the next free one.")] = None,
    seconds: For = None,
    seed: Seed = None,
    log: LogFlags = LOG,
    options: StoreFlags = STORE,
) -> int:
    """
    Run one router until Ctrl-C or SIGTERM, for the workers on the same store. Several routers may run.

    The exit code is 75 when a router with this id is running already.
    """
    parts = {"workers": (), "router": router_id or "", "seed": seed}
    with log.applied():
        return _start("router", router_id, options, seconds, None, parts)


def _start(
    kind: str, name: str | None, options: StoreFlags, seconds: float | None, drain: float | None, parts: dict[str, Any]
) -> int:
    """Run one part, with these arguments of `running_system`, until the time is over or a signal comes."""
    from reefknot.core.messages import PART_NAME, can_name_a_part

    check_seconds("--for", seconds)
    check_seconds("--drain", drain)
    if name is not None and not can_name_a_part(name):
        raise CommandError(f"--{kind}-id: {printable(name) or 'nothing'} is not accepted: {PART_NAME}")
    start = startup(options.engine, options.config)
    if start.url.rstrip(":") == "memory":
        origin = "--engine" if options.engine is not None else relative(str(start.settings.path))
        text = (
            f"{origin}: a memory: store is visible to one process only, and a {kind} alone needs others; "
            "accepted: sqlite:PATH, nats://HOST:PORT (for everything in one process: reefknot up --engine memory:)"
        )
        raise CommandError(text, Exit.USAGE if origin == "--engine" else Exit.MISCONFIGURED)
    with prints_to_stderr():
        return asyncio.run(_serve(kind, start, seconds, drain, parts, json=options.json))


async def _serve(
    kind: str, start: Startup, seconds: float | None, drain: float | None, parts: dict[str, Any], *, json: bool
) -> int:
    began = monotonic()
    counts: dict[str, int] = {}

    async def stopped(system: System) -> None:
        counts.update(await _counts(kind, system))

    with shutdown_on_signals() as shutdown:
        async with start.system(drain=drain, stopped=stopped, **parts) as system:
            shutdown.reloads(system)
            name = system.router.router_id if kind == "router" else system.workers[0].worker_id
            say(f"{kind} {name} is ready, {until_text(seconds)}, on {start.store_name}")
            await _say_missing_part("worker" if kind == "router" else "router", system, shown_url(start.url))
            await until_first_ends(shutdown.requested.wait(), system.store_failed(), timeout=seconds)
    elapsed = round(monotonic() - began, 3)
    if json:
        print(dumps({"summary": {f"{kind}_id": name, **counts, "elapsed_s": elapsed}}), file=data())
    else:
        done = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        idle = "nothing is left" if kind == "router" else "nothing arrived"
        put(f"{kind} {name} ran for {elapsed:.1f} s: {done or idle}")
    return Exit.FINE if shutdown.code is None else shutdown.code


async def _say_missing_part(part: str, system: System, url: str) -> None:
    """Print that the other part is missing: a router waits for workers, and a worker for a router."""
    from reefknot.app.presence import living_systems

    try:
        systems = await living_systems(system.store)
    except StoreError:  # a store that is gone ends the system, which says so
        return
    if not has_part(systems, part, for_all=True):
        say(f"no {part} is running on this store yet; start one with: reefknot {part} start --engine {url}")


async def _counts(kind: str, system: System) -> dict[str, int]:
    """The counts of a part that has stopped."""
    if kind == "router":
        return {"unfinished": await unfinished(system)}
    counts = system.workers[0].snapshot().retries
    return {name: getattr(counts, name) for name in ("succeeded", "failed", "recovered", "retries")}


# ---- running workers -------------------------------------------------------------------------------------------------


def _state_of(worker: Mapping[str, Any]) -> str:
    return worker_state(draining=worker["draining"], leaving=worker["leaving"])


def _status_of(state: str, level: str) -> str:
    """The word for a worker in a class: its load level while it runs, else its state."""
    return level if state == WorkerState.RUNNING else state


def workers_of(systems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers of these systems, each with its state and its process."""
    return [
        {"state": _state_of(worker), **worker, "pid": one["pid"], "host": one["host"], "system_id": one["system_id"]}
        for one in systems
        for worker in one["workers"]
    ]


def worker_rows(workers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each resource class of each worker: worker, class, status, queued, running, oldest, process."""
    return [
        (
            worker["worker_id"],
            name,
            _status_of(worker["state"], state["status"]),
            queue_depth(state["depth"], state["size"]),
            f"{state['active']} of {state['capacity']}",
            age(state["oldest_age_s"]) if state["depth"] else "",
            f"pid {worker['pid']}",
        )
        for worker in workers
        for name, state in worker["classes"].items()
    ]


@worker_app.command(name="list", help_epilogue=examples("worker list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List every worker on this store with its resource classes. The exit code is 69 when none is running."""
    address = address_to_read(options)
    repeated(watch, lambda: _list_workers(address, wide=wide, json=options.json))


def _list_workers(address: StoreAddress, *, wide: bool, json: bool) -> None:
    systems = with_store(address, lambda store: systems_with("worker", store, address))
    workers = workers_of(systems)

    def text() -> None:
        rows = worker_rows(workers)
        columns = ("worker", "class", "status", "queued", "running", "oldest", "process")
        whole, optional = ("worker", "class", "status", "running", "process"), ("process", "oldest")
        put_table(columns, rows, styles=("cyan", "", "bold"), whole=whole, optional=optional, wide=wide)

    show({"workers": workers}, text, json=json)


@worker_app.command(help_epilogue=examples("worker drain worker-2", "worker drain --dry-run"))
def drain(
    worker: WorkerId = None,
    /,
    *,
    seconds: Annotated[float, arg("Seconds that running steps get. Default: 30.")] = 30.0,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Drain a worker: running steps finish, nothing new is accepted, and queued work goes to the other workers."""
    check_number("--seconds", seconds, 0, 86_400, "from 0 to 86400")
    effect = f"draining; no new work is accepted, queued work goes to others, running steps have {seconds:g} s"
    return WorkerCommand("drain", "drained", effect, WorkerState.DRAINING).send(worker, options, seconds=seconds)


@worker_app.command(help_epilogue=examples("worker pause worker-2"))
def pause(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Pause a worker: it accepts and starts nothing until it is resumed, and keeps its queue."""
    effect = "paused; no new work is accepted, and queued work waits"
    return WorkerCommand("pause", "paused", effect, WorkerState.PAUSED).send(worker, options)


@worker_app.command(help_epilogue=examples("worker resume worker-2"))
def resume(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Resume a paused or drained worker."""
    return WorkerCommand("resume", "resumed", "running again", WorkerState.RUNNING).send(worker, options)


@worker_app.command(name="reload", help_epilogue=examples("worker reload", "worker reload worker-2"))
def reload_worker(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Reload the policies of a worker's process: work that begins from now on follows the configuration as it is."""
    return _reload("worker", worker, options)


@router_app.command(name="reload", help_epilogue=examples("router reload", "router reload router-2"))
def reload_router(
    router: Annotated[str | None, arg("Router id. Default: every router.")] = None,
    /,
    *,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Reload the policies of a router's process: work that begins from now on follows the configuration as it is."""
    return _reload("router", router, options)


def _reload(part: str, name: str | None, options: OperatorFlags) -> int:
    """Have the processes of these parts read their configuration again; 78 when one refuses it."""
    address = address_of(options)
    systems = with_store(address, lambda store: _reloaded(store, address, part, name, dry_run=options.dry_run))
    outcomes = [one.get("reload") or {} for one in systems.values()]
    refused = any(one.get("problems") for one in outcomes)
    silent = [number for number, one in systems.items() if not one.get("reload")]
    if options.json:
        reports = [{"system_id": number, **(one.get("reload") or {})} for number, one in systems.items()]
        put_json({"systems": reports, "actor": address.actor, "dry_run": options.dry_run})
    for one in systems.values():
        _say_reload(part, one, dry_run=options.dry_run, json=options.json)
    if refused:
        return Exit.MISCONFIGURED
    return Exit.TEMPORARY if silent and not options.dry_run else Exit.FINE


async def _reloaded(
    store: Store, address: StoreAddress, part: str, name: str | None, *, dry_run: bool
) -> dict[str, dict[str, Any]]:
    """The status of every addressed system, by its id. `reload` is there when it has obeyed."""
    systems = await systems_with(part, store, address)
    known = {number for one in systems for number in _names_of(part, one)}
    if name is not None and name not in known:
        raise unknown(part.upper(), name, sorted(known))
    addressed = [one for one in systems if (name in _names_of(part, one) if name else _names_of(part, one))]
    found = {one["system_id"]: {**one, "reload": None} for one in addressed}
    if dry_run:
        return found
    body, event = dumps({"part": part, "name": name}), address.event(f"{part}.reload", name or "*")
    sequence = await store.control.post("reload", target="router", body=body, sender=address.actor, events=[event])

    async def look() -> bool:
        from reefknot.app.presence import living_systems

        living = {one["system_id"]: one for one in await living_systems(store)}
        for number in [number for number in found if number not in living]:
            del found[number]  # it has ended meanwhile
        for number, status in found.items():
            outcome = living[number].get("reload")
            if outcome and outcome["sequence"] >= sequence:
                status["reload"] = outcome
        return all(one["reload"] for one in found.values())

    await polled(look, OBEY_WAIT_S)
    return found


def _names_of(part: str, system: dict[str, Any]) -> list[str]:
    if part == "worker":
        return [one["worker_id"] for one in system["workers"]]
    return [system["router"]["router_id"]] if system["router"] else []


def _say_reload(part: str, system: dict[str, Any], *, dry_run: bool, json: bool) -> None:
    """Print the outcome of one system: mistakes on stderr, the rest on stdout unless that is for JSON."""
    from reefknot.app.reload import ReloadOutcome

    names = f"{', '.join(_names_of(part, system))} (pid {system['pid']})"
    if dry_run:
        text = "would reload its policies"
    elif not system["reload"]:
        say(f"{names}: the command is stored, but not obeyed within {OBEY_WAIT_S:g} s")
        return
    else:
        outcome = msgspec.convert(system["reload"], ReloadOutcome)
        for problem in outcome.problems:
            say(relative(problem))
        text = outcome.sentence()
    if not json:
        put(f"{names}: {text}")


class WorkerCommand(NamedTuple):
    """A command to one worker or to all, and the status that shows that it was obeyed."""

    verb: str
    participle: str
    effect: str
    state: WorkerState
    """The state that an obedient worker reports."""

    def send(self, worker: str | None, options: OperatorFlags, **details: Any) -> int:
        """Send the command, wait until it is obeyed, and return the exit code."""
        address, dry_run = address_of(options), options.dry_run
        workers, obeyed = with_store(address, lambda store: self._post(store, address, worker, details, dry_run))
        names = ", ".join(workers)
        if options.json:
            put_json({"workers": workers, self.participle: obeyed, "actor": address.actor, "dry_run": dry_run})
        elif dry_run:
            put(f"{names} would be {self.participle}")
        elif obeyed:
            put(f"{names}: {self.effect}")
        if not obeyed and not dry_run:
            say(f"{names}: the command is stored, but not obeyed within {OBEY_WAIT_S:g} s; see: reefknot worker list")
            return Exit.TEMPORARY
        return Exit.FINE

    async def _post(
        self, store: Store, address: StoreAddress, worker: str | None, details: dict[str, Any], dry_run: bool
    ) -> tuple[list[str], bool]:
        """The addressed workers, and whether all of them obeyed."""
        systems = await systems_with("worker", store, address)
        known = [one["worker_id"] for each in systems for one in each["workers"]]
        if worker is not None and worker not in known:
            raise unknown("WORKER", worker, known)
        workers = known if worker is None else [worker]
        if dry_run:
            return workers, False
        event = address.event(f"worker.{self.verb}", worker or "*", **details)
        body = dumps({"worker_id": worker, **details})
        await store.control.post(self.verb, target="router", body=body, sender=address.actor, events=[event])
        return workers, await polled(lambda: self._obeyed(store, workers), OBEY_WAIT_S)

    async def _obeyed(self, store: Store, names: list[str]) -> bool:
        """Whether every worker reports the wanted status. One that is gone meanwhile need not."""
        from reefknot.app.presence import living_systems

        living = await living_systems(store)
        reported = {one["worker_id"]: _state_of(one) for each in living for one in each["workers"]}
        return all(reported.get(name, self.state) == self.state for name in names)


# ---- running routers -------------------------------------------------------------------------------------------------


@router_app.command(help_epilogue=examples("router status --json"))
def status(*, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """Show what each router holds, its load, and the workers it sees. The exit code is 69 when none is running."""
    address = address_to_read(options)
    repeated(watch, lambda: _show_routers(address, json=options.json))


def _show_routers(address: StoreAddress, *, json: bool) -> None:
    async def work(store: Store) -> tuple[list[dict[str, Any]], dict[str, int]]:
        from reefknot.operations.jobs import now_in, visible_counts

        found = await systems_with("router", store, address)
        counts = await visible_counts(store, await store.work.snapshot(), await now_in(store))
        return found, {state: number for state, number in counts.items() if number}

    systems, submitted = with_store(address, work)
    routers = [_router_fields(one) for one in systems if one["router"]]

    def text() -> None:
        for one in routers:
            _put_router(one)
        if submitted:
            counts = ", ".join(f"{number} {state}" for state, number in sorted(submitted.items()) if number)
            put(f"submitted so far: {counts}")

    show({"routers": routers, "handed_in": submitted}, text, json=json)


def _put_router(router: dict[str, Any]) -> None:
    name = "router" if router["router_id"] == "router" else f"router {router['router_id']}"
    up_for = age((router["at"] - router["started"]) / 1000)
    put(f"{name} of pid {router['pid']} on {router['host']}, up for {up_for}: {router['status']}")
    put(f"  {router['pending']} pending, {router['waiting']} of them wait here for a worker")
    gates = (("retries", router["retries_v2"]), ("queue", router["queue_v2"]))
    put("  " + ", ".join(f"{name}: {'v2' if on else 'baseline'}" for name, on in gates))
    rows = [
        (
            worker,
            name,
            _status_of(health["state"], health["status"]),
            str(health["queue_depth"]),
            f"{health['active']} of {health['capacity']}",
        )
        for name, by_worker in router["workers"].items()
        for worker, health in by_worker.items()
    ]
    put_table(("worker", "class", "status", "queued", "running"), sorted(rows), styles=("cyan", "", "bold"))


def _router_fields(system: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: system[name] for name in ("system_id", "pid", "host")},
        "started": system["started_at"],
        "started_at": time_text(system["started_at"]),
        **{name: system[name] for name in ("at", "retries_v2", "queue_v2", "blocks")},
        **system["router"],
    }
