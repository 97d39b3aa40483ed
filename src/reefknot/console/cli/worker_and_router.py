"""
`reefknot worker` and `reefknot router`: one part of a system as a process of its own, and the parts that run.

A part runs over the same store as the others; a store that only this process can see is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.live_output import LOG, LogFlags
from reefknot.console.cli.options import (
    OPERATOR,
    STORE,
    Modules,
    OperatorFlags,
    StoreFlags,
    Wide,
    arg,
    check_number,
    check_seconds,
)
from reefknot.console.cli.output import (
    data,
    prints_to_stderr,
    put,
    put_json,
    put_table,
    relative,
    say,
    show,
    table_width,
    wrapped,
)
from reefknot.console.cli.serve import (
    DrainSeconds,
    For,
    Reload,
    Startup,
    restarting,
    run_service,
    shutdown_on_signals,
    startup,
    unfinished,
    until_text,
)
from reefknot.console.cli.store import StoreAddress, address_of, address_to_read, place_of, shown_url, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.cli.worker_processes import ParentLink
from reefknot.console.operations import systems as operations
from reefknot.console.operations.systems import (
    LONGEST_DRAIN_S,
    RELIEF,
    WORKER_COMMANDS,
    command_worker,
    has_part,
    list_routers,
    list_workers,
    missing_part,
    names_of,
    open_breakers,
    reload_report,
    reloaded,
    status_of,
)
from reefknot.console.operations.values import age, queue_depth
from reefknot.console.words.events import last_words, part_name
from reefknot.errors import StoreError
from reefknot.queue.model.routing import WorkerState
from reefknot.runtime.log import printable
from reefknot.runtime.tasks import until_first_ends
from reefknot.stores.port.engines import accepted_urls, is_shared

if TYPE_CHECKING:
    from reefknot.app.system import System

worker_app = noun("worker", "worker start --module app", "worker list")
router_app = noun("router", "router start", "router status")

Seed = Annotated[int | None, arg("Seed of jitter.")]
WorkerId = Annotated[str | None, arg("Worker id. Default: every worker.")]
MOST_TROUBLES = 10

# ---- start -----------------------------------------------------------------------------------------------------------


@worker_app.command(
    name="start",
    help_epilogue=examples(
        "worker start",
        "worker start --engine sqlite:state.db --worker-id mailer --module app --module more",
        "worker start --reload --module steps.py",
    ),
)
def start_worker(
    *,
    worker_id: Annotated[str | None, arg("Worker id. Default: worker-1, or the next free one.")] = None,
    module: Modules = None,
    seconds: For = None,
    drain: DrainSeconds = None,
    seed: Seed = None,
    reload: Reload = False,
    parent_socket: Annotated[int | None, arg("Number of a socket to `up --processes`.", show=False)] = None,
    log: LogFlags = LOG,
    options: StoreFlags = STORE,
) -> int:
    """
    Run one worker until Ctrl-C or SIGTERM, for the routers on the same store.

    The exit code is 75 when a worker with this id is running already.
    """
    if reload:
        check_seconds("--for", seconds)
        check_seconds("--drain", drain)
        with log.applied(is_service=True):
            return restarting(module, options, seconds=seconds, drain=drain)
    parts = {"workers": (worker_id,) if worker_id else 1, "router": None, "modules": tuple(module or ()), "seed": seed}
    parent = None if parent_socket is None else ParentLink(parent_socket)
    with log.applied(feed=parent is not None, is_service=True):
        return _start("worker", worker_id, options, seconds, drain, parts, parent=parent)


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
    with log.applied(is_service=True):
        return _start("router", router_id, options, seconds, None, parts)


def _start(
    kind: str,
    name: str | None,
    options: StoreFlags,
    seconds: float | None,
    drain: float | None,
    parts: dict[str, Any],
    *,
    parent: ParentLink | None = None,
) -> int:
    """
    Run one part, with these arguments of `running_system`, until the time is over or a signal comes.

    With a `parent`, which has checked and shown everything once for all its workers, messages are left to that one.
    """
    from reefknot.queue.model.messages import PART_NAME, can_name_a_part

    check_seconds("--for", seconds)
    check_seconds("--drain", drain)
    if name is not None and not can_name_a_part(name):
        raise CommandError(f"--{kind}-id: {printable(name) or 'nothing'} is not accepted: {PART_NAME}")
    start = startup(options.engine, options.config, warns=parent is None)
    if not is_shared(start.url):
        origin = "--engine" if options.engine is not None else relative(str(start.settings.path))
        text = (
            f"{origin}: a memory: store is visible to one process only, and a {kind} alone needs others; "
            f"accepted: {accepted_urls(shared_only=True)} (for everything in one process: reefknot up --engine memory:)"
        )
        raise CommandError(text, Exit.USAGE if origin == "--engine" else Exit.MISCONFIGURED)
    with prints_to_stderr():
        if parent is not None:
            return run_service(_serve_parent(parent, start, drain, parts))
        return run_service(_serve(kind, start, seconds, drain, parts, json=options.json))


async def _serve_parent(parent: ParentLink, start: Startup, drain: float | None, parts: dict[str, Any]) -> int:
    """Run a worker for `up --processes`, which has a report instead of messages and a summary."""

    async def stopped(system: System) -> None:
        parent.report_now(system.workers[0])

    with shutdown_on_signals(is_quiet=True) as shutdown:
        parent.follow(shutdown.request, shutdown.reload, shutdown.stop_at_once, drain=start.drain(drain))
        async with start.system(drain=drain, stopped=stopped, checks_steps=False, **parts) as system:
            shutdown.reloads(system)
            await until_first_ends(shutdown.requested.wait(), system.store_failed(), parent.report(system.workers[0]))
    return Exit.FINE if shutdown.code is None else shutdown.code


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
            say(f"{kind} {name} is ready, {until_text(seconds)}, on {place_of(start.url)}")
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
    from reefknot.queue.presence import living_systems

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


def worker_rows(workers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each resource class of each worker: worker, class, status, queued, running, oldest, process."""
    return [
        (
            worker["worker_id"],
            name,
            status_of(worker["state"], state["status"]),
            queue_depth(state["depth"], state["size"]),
            f"{state['active']} of {state['capacity']}",
            age(state["oldest_age_s"]) if state["depth"] and state["oldest_age_s"] else "",
            f"pid {worker['pid']}",
        )
        for worker in workers
        for name, state in worker["classes"].items()
    ]


def gone_rows(gone: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each worker or router that is gone, in the columns of `worker_rows`."""
    rows: list[tuple[str, ...]] = []
    for one in gone:
        held, name = one["held"], part_name(one["part"], one["name"])
        queued = str(held.get("queued", held.get("pending", "")))
        running = str(held.get("running", ""))
        rows.append((name, ", ".join(one["classes"]), one["state"], queued, running, "", f"pid {one['pid']}"))
    return rows


def put_troubles(
    workers: list[dict[str, Any]], breakers: list[dict[str, Any]], gone: Sequence[dict[str, Any]] = ()
) -> None:
    """Lines below a table of workers: why a level is not healthy, the breakers that hold jobs back, and the last words
    of parts that are gone."""
    lines = [
        f"{worker['worker_id']} {name} is {state['status']}: {state['reason']}"
        + f"; {RELIEF}" * (state["status"] == "critical")
        for worker in workers
        for name, state in worker["classes"].items()
        if state["reason"] and worker["state"] == WorkerState.RUNNING
    ]
    for one in breakers:
        place = f" at {one['worker_id']}" if one["worker_id"] else ""
        lines.append(f"breaker of {one['name']}{place} is {one['state']}: jobs wait for it; repair the destination")
    for one in gone:
        end = "its process ended" if one["is_dead"] else "it fell silent"
        what = f"{part_name(one['part'], one['name'])} is gone: {end}, last heard of {age(one['silent_s'])} ago"
        lines.append(f"{what}; {last_words(one['held'])}; look at its log, and start it again")
    more = [f"and {len(lines) - MOST_TROUBLES} more; --json shows all"] if len(lines) > MOST_TROUBLES else []
    for line in [*lines[:MOST_TROUBLES], *more]:
        for part in wrapped(line, table_width()):
            put(part)


@worker_app.command(name="list", help_epilogue=examples("worker list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List every worker on this store with its resource classes. The exit code is 69 when none is running."""
    address = address_to_read(options)
    repeated(watch, lambda: _list_workers(address, wide=wide, json=options.json))


def _list_workers(address: StoreAddress, *, wide: bool, json: bool) -> None:
    found = with_store(address, lambda store: list_workers(address.operator(store)))

    def text() -> None:
        rows = worker_rows(found["workers"]) + gone_rows(found["gone"])
        columns = ("worker", "class", "status", "queued", "running", "oldest", "process")
        whole, optional = ("worker", "class", "status", "running", "process"), ("process", "oldest")
        put_table(columns, rows, styles=("cyan", "", "bold"), whole=whole, optional=optional, wide=wide)
        put_troubles(found["workers"], open_breakers(found["workers"]), found["gone"])

    show(found, text, json=json)
    if not found["workers"]:
        raise CommandError(missing_part("worker", address.shown), Exit.UNREACHABLE)


@worker_app.command(help_epilogue=examples("worker drain worker-2", "worker drain --dry-run"))
def drain(
    worker: WorkerId = None,
    /,
    *,
    seconds: Annotated[float, arg("Seconds that running steps get. Default: 30.")] = 30.0,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Drain a worker: running steps finish, nothing new is accepted, and queued work goes to the other workers."""
    check_number("--seconds", seconds, 0, LONGEST_DRAIN_S, f"from 0 to {LONGEST_DRAIN_S}")
    effect = f"draining; no new work is accepted, queued work goes to others, running steps have {seconds:g} s"
    return _command("drain", worker, effect, options, seconds=seconds)


@worker_app.command(help_epilogue=examples("worker pause worker-2"))
def pause(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Pause a worker: it accepts and starts nothing until it is resumed, and keeps its queue."""
    return _command("pause", worker, "paused; no new work is accepted, and queued work waits", options)


@worker_app.command(help_epilogue=examples("worker resume worker-2"))
def resume(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Resume a paused or drained worker."""
    return _command("resume", worker, "running again", options)


def _command(verb: str, worker: str | None, effect: str, options: OperatorFlags, *, seconds: float = 30.0) -> int:
    """Send a command to workers, wait until it is obeyed, and return the exit code."""
    address, dry_run = address_of(options), options.dry_run
    found = with_store(
        address,
        lambda store: command_worker(address.operator(store), verb, worker, seconds=seconds, dry_run=dry_run),
    )
    names, participle = ", ".join(found["workers"]), WORKER_COMMANDS[verb].participle
    if options.json:
        put_json(found)
    elif dry_run:
        put(f"{names} would be {participle}")
    elif found[participle]:
        put(f"{names}: {effect}")
    if not found[participle] and not dry_run:
        say(f"{names}: {_not_obeyed()}; see: reefknot worker list")
        return Exit.TEMPORARY
    return Exit.FINE


def _not_obeyed() -> str:
    return f"the command is stored, but not obeyed within {operations.OBEY_WAIT_S:g} s"


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
    address, dry_run = address_of(options), options.dry_run
    found = with_store(address, lambda store: reloaded(address.operator(store), part, name, dry_run=dry_run))
    if options.json:
        put_json(reload_report(address.actor, found, dry_run=dry_run))
    for one in found.values():
        _say_reload(part, one, dry_run=dry_run, json=options.json)
    if any((one["reload"] or {}).get("problems") for one in found.values()):
        return Exit.MISCONFIGURED
    silent = not all(one["reload"] for one in found.values())
    return Exit.TEMPORARY if silent and not dry_run else Exit.FINE


def _say_reload(part: str, system: dict[str, Any], *, dry_run: bool, json: bool) -> None:
    """Print the outcome of one system: mistakes on stderr, the rest on stdout unless that is for JSON."""
    from reefknot.app.reload import ReloadOutcome

    names = f"{', '.join(names_of(part, system))} (pid {system['pid']})"
    if dry_run:
        text = "would reload its policies"
    elif not system["reload"]:
        say(f"{names}: {_not_obeyed()}")
        return
    else:
        outcome = msgspec.convert(system["reload"], ReloadOutcome)
        for problem in outcome.problems:
            say(relative(problem))
        text = outcome.sentence()
    if not json:
        put(f"{names}: {text}")


# ---- running routers -------------------------------------------------------------------------------------------------


@router_app.command(help_epilogue=examples("router status --json"))
def status(*, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """Show what each router holds, its load, and the workers it sees. The exit code is 69 when none is running."""
    address = address_to_read(options)
    repeated(watch, lambda: _show_routers(address, json=options.json))


def _show_routers(address: StoreAddress, *, json: bool) -> None:
    found = with_store(address, lambda store: list_routers(address.operator(store)))
    submitted = found["handed_in"]

    def text() -> None:
        for one in found["routers"]:
            _put_router(one)
        if submitted:
            counts = ", ".join(f"{number} {state}" for state, number in sorted(submitted.items()))
            put(f"submitted so far: {counts}")
        put_troubles([], [], found["gone"])

    show(found, text, json=json)
    if not found["routers"]:
        raise CommandError(missing_part("router", address.shown), Exit.UNREACHABLE)


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
            status_of(health["state"], health["status"]),
            str(health["queue_depth"]),
            f"{health['active']} of {health['capacity']}",
        )
        for name, by_worker in router["workers"].items()
        for worker, health in by_worker.items()
    ]
    put_table(("worker", "class", "status", "queued", "running"), sorted(rows), styles=("cyan", "", "bold"))
