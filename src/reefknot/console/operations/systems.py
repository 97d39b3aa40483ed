"""
Systems that run over a store: their workers and routers, and the commands to them.

A command is a message in the store. Every router reads it and passes it on to its workers, so that an operator with
access to the store can drain a worker on another machine. The answer says whether all of them obeyed within a few
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import to_builtins

from reefknot.console.operations.operator import polled
from reefknot.console.operations.values import ParameterUseError, time_text, unknown_word
from reefknot.errors import OperationError, ParameterError
from reefknot.queue.model.routing import WorkerState, worker_state
from reefknot.queue.presence import GonePart, gone_parts, living_systems, unserved_work, visible_work

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator

OBEY_WAIT_S = 5.0
RELIEF = "start another worker, give it more slots, or submit less"
"""The remedy for a worker whose queue is full."""
LONGEST_DRAIN_S = 86_400
PARTS = ("worker", "router")

# ---- running systems -------------------------------------------------------------------------------------------------


async def running_systems(operator: Operator) -> dict[str, Any]:
    """The workers and the routers that run, none of either when nothing does, and those that are gone."""
    systems = await living_systems(operator.store)
    gone = await gone_of(operator, systems)
    lacking = to_builtins(await unserved_work(operator.store, systems, await visible_work(operator.store)))
    workers = _safe_workers(systems, operator)
    return {"workers": workers, "routers": routers_of(systems), "gone": gone, "unserved": lacking}


async def list_workers(operator: Operator) -> dict[str, Any]:
    """The workers with their resource classes, and those that died within 15 minutes. When there is none of either, an
    error that says how to start one."""
    systems = await living_systems(operator.store)
    gone = await gone_of(operator, systems, "worker")
    if not gone:
        _check_part(systems, "worker", operator)
    return {"workers": _safe_workers(systems, operator), "gone": gone}


async def gone_of(operator: Operator, living: list[dict[str, Any]], part: str = "") -> list[dict[str, Any]]:
    """The workers and routers that died or fell silent within 15 minutes, with their last words; of one `part`, or of
    both."""
    now, parts = operator.store.moment().wall, await gone_parts(operator.store, living)
    shown: Any = operator.redactor.tree([_gone_fields(one, now) for one in parts if part in ("", one.part)])
    return list(shown)


def _gone_fields(gone: GonePart, now: int) -> dict[str, Any]:
    return {
        "part": gone.part,
        "name": gone.name,
        "state": WorkerState.GONE.value,
        "classes": list(gone.classes),
        **{name: getattr(gone, name) for name in ("pid", "host", "system_id", "is_dead", "held")},
        "last_seen": time_text(gone.last_seen),
        "silent_s": max(0.0, (now - gone.last_seen) / 1000),
    }


def _safe_workers(systems: list[dict[str, Any]], operator: Operator) -> list[dict[str, Any]]:
    """The workers of these systems, without secrets in the names of their destinations."""
    safe: Any = operator.redactor.tree(workers_of(systems))
    return list(safe)


async def list_routers(operator: Operator) -> dict[str, Any]:
    """The routers, each with its load and the workers that it sees, and the number of jobs in each state that any job
    has; an error when no router is running."""
    from reefknot.console.operations.jobs import job_counts

    systems = await living_systems(operator.store)
    gone = await gone_of(operator, systems, "router")
    if not gone:
        _check_part(systems, "router", operator)
    counts = (await job_counts(operator))["states"]
    submitted = {state: number for state, number in counts.items() if number}
    return {"routers": routers_of(systems), "handed_in": submitted, "gone": gone}


async def systems_with(part: str, operator: Operator) -> list[dict[str, Any]]:
    """The status of every running system. With no `part` (worker or router) among them, an error that says how to
    start one. A system reports before it says that it is ready, so nothing has to be waited for."""
    found = await living_systems(operator.store)
    _check_part(found, part, operator)
    return found


def _check_part(systems: list[dict[str, Any]], part: str, operator: Operator) -> None:
    if not has_part(systems, part):
        raise OperationError(missing_part(part, operator.shown), "unreachable")


def missing_part(part: str, shown: str) -> str:
    """The sentence about a store on which no worker, or no router, is running."""
    ways = f"reefknot up --engine {shown} (or, alone: reefknot {part} start --engine {shown})"
    return f"no {part} is running on {shown}; start one with: {ways}"


def has_part(systems: list[dict[str, Any]], part: str, *, for_all: bool = False) -> bool:
    """True when one of the systems has the part, `worker` or `router`; with `for_all`, one for work of everybody: a
    `run` is only for its own."""
    able = [one for one in systems if not (for_all and one.get("own_work_only"))]
    return any(one["workers"] if part == "worker" else one["router"] for one in able)


def workers_of(systems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers of these systems, each with its state and its process, the reason of each level that is not healthy,
    and the destinations whose breaker is not closed, or whose retries are throttled."""
    return [_worker(worker, system) for system in systems for worker in system["workers"]]


def _worker(worker: Mapping[str, Any], system: Mapping[str, Any]) -> dict[str, Any]:
    activity, name = system.get("activity") or {}, worker["worker_id"]
    reasons = activity.get("levels", {}).get(name, {})
    return {
        "state": _state_of(worker),
        **worker,
        "classes": {one: {**state, "reason": reasons.get(one, "")} for one, state in worker["classes"].items()},
        "destinations": [one for one in activity.get("destinations", []) if one["worker_id"] == name],
        **{part: system[part] for part in ("pid", "host", "system_id")},
    }


def open_breakers(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The breakers of these workers' destinations that are not closed."""
    return [
        {"name": one["name"], "worker_id": one["worker_id"], "state": one["breaker"]}
        for worker in workers
        for one in worker["destinations"]
        if one["breaker"] != "closed"
    ]


def routers_of(systems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The routers of these systems, each with its process and the gates in force."""
    return [
        {
            **{name: system[name] for name in ("system_id", "pid", "host")},
            "started": system["started_at"],
            "started_at": time_text(system["started_at"]),
            **{name: system[name] for name in ("at", "retries_v2", "queue_v2", "blocks")},
            **{name: value for name, value in system["router"].items() if name not in ("unanswered", "is_shared")},
        }
        for system in systems
        if system["router"]
    ]


def _state_of(worker: Mapping[str, Any]) -> str:
    return worker_state(draining=worker["draining"], leaving=worker["leaving"])


def status_of(state: str, level: str) -> str:
    """The word for a worker in a class: its load level while it runs, else its state."""
    return level if state == WorkerState.RUNNING else state


# ---- commands to workers ---------------------------------------------------------------------------------------------


class WorkerCommand(NamedTuple):
    """A command to one worker or to all: its participle, and the state that an obedient worker reports."""

    participle: str
    state: WorkerState


WORKER_COMMANDS = {
    "drain": WorkerCommand("drained", WorkerState.DRAINING),
    "pause": WorkerCommand("paused", WorkerState.PAUSED),
    "resume": WorkerCommand("resumed", WorkerState.RUNNING),
}


async def command_worker(
    operator: Operator, verb: str, worker: str | None = None, *, seconds: float = 30.0, dry_run: bool = False
) -> dict[str, Any]:
    """
    Drain, pause or resume one worker, or all of them, and wait until they obey.

    A drained worker gives its running steps these `seconds`. The answer has the names, and under the participle
    (`drained`, `paused`, `resumed`) whether all of them have obeyed; a command that is not obeyed yet stays in force.
    """
    if verb not in WORKER_COMMANDS:
        raise ParameterUseError("verb", unknown_word(verb, WORKER_COMMANDS))
    command = WORKER_COMMANDS[verb]
    if not 0 <= seconds <= LONGEST_DRAIN_S:
        raise ParameterError("seconds", seconds, f"from 0 to {LONGEST_DRAIN_S}")
    systems = await systems_with("worker", operator)
    known = [one["worker_id"] for each in systems for one in each["workers"]]
    if worker is not None and worker not in known:
        raise ParameterUseError("worker", unknown_word(worker, known))
    workers, obeyed = known if worker is None else [worker], False
    if not dry_run:
        details: dict[str, Any] = {"seconds": seconds} if command.state is WorkerState.DRAINING else {}
        body = dumps({"worker_id": worker, **details})
        event = operator.event(f"worker.{verb}", worker or "*", **details)
        control = operator.store.control
        await control.post(verb, target="router", body=body, sender=operator.actor, events=[event])
        obeyed = await polled(lambda: _are_all(operator, workers, command.state), OBEY_WAIT_S)
    return {"workers": workers, command.participle: obeyed, "actor": operator.actor, "dry_run": dry_run}


async def _are_all(operator: Operator, names: list[str], state: WorkerState) -> bool:
    """Whether every worker reports this state. One that is gone meanwhile need not."""
    reported = {one["worker_id"]: one["state"] for one in workers_of(await living_systems(operator.store))}
    return all(reported.get(name, state) == state for name in names)


# ---- reloading -------------------------------------------------------------------------------------------------------


async def reload_parts(
    operator: Operator, part: str, name: str | None = None, *, dry_run: bool = False
) -> dict[str, Any]:
    """
    Have the processes of these parts (`worker` or `router`) read their configuration again.

    The answer has an entry for each addressed system: its id alone while it has not obeyed, else the outcome too.
    """
    found = await reloaded(operator, part, name, dry_run=dry_run)
    return reload_report(operator.actor, found, dry_run=dry_run)


def reload_report(actor: str, found: Mapping[str, dict[str, Any]], *, dry_run: bool) -> dict[str, Any]:
    """The answer about these systems, as `reloaded` found them."""
    reports = [{"system_id": number, **(one["reload"] or {})} for number, one in found.items()]
    return {"systems": reports, "actor": actor, "dry_run": dry_run}


async def reloaded(operator: Operator, part: str, name: str | None, *, dry_run: bool) -> dict[str, dict[str, Any]]:
    """The status of every addressed system, by its id. `reload` is there when it has obeyed."""
    if part not in PARTS:
        raise ParameterUseError("part", unknown_word(part, PARTS))
    systems = await systems_with(part, operator)
    known = {number for one in systems for number in names_of(part, one)}
    if name is not None and name not in known:
        raise ParameterUseError(part, unknown_word(name, sorted(known)))
    addressed = [one for one in systems if (name in names_of(part, one) if name else names_of(part, one))]
    found = {one["system_id"]: {**one, "reload": None} for one in addressed}
    if dry_run:
        return found
    store, event = operator.store, operator.event(f"{part}.reload", name or "*")
    body = dumps({"part": part, "name": name})
    sequence = await store.control.post("reload", target="router", body=body, sender=operator.actor, events=[event])

    async def look() -> bool:
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


def names_of(part: str, system: dict[str, Any]) -> list[str]:
    """The names of the workers, or of the router, of a system."""
    if part == "worker":
        return [one["worker_id"] for one in system["workers"]]
    return [system["router"]["router_id"]] if system["router"] else []
