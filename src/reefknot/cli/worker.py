"""`reefknot worker`: one as a process of its own, the workers that run, and what they may be told."""

from __future__ import annotations

import asyncio
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Actor, Config, DryRun, Engine, Json, Modules, unknown
from reefknot.cli.output import put, put_json, put_table, say
from reefknot.cli.serve import For, Part, Seed
from reefknot.cli.serve import start as serve
from reefknot.cli.stores import age, opened, operator_event, place, places, run, running, who

if TYPE_CHECKING:
    from reefknot.cli.stores import Place
    from reefknot.ports.store import Store

HEARD_S = 5.0
_LOOK_S = 0.1

app = App(
    name="worker",
    help="Start a worker; see, drain and pause those that run.",
    help_epilogue="Examples:\n\n    reefknot worker start --module app\n    reefknot worker list",
)

Named = Annotated[str | None, Parameter(help="Its id; without it, every worker.")]


@app.command(
    help_epilogue="Examples:\n\n    reefknot worker start\n"
    "    reefknot worker start --engine sqlite:state.db --worker-id mailer --module app --module more"
)
def start(
    *,
    worker_id: Annotated[
        str | None, Parameter(help="Its name; without it, worker-1, or the next that is free.")
    ] = None,
    engine: Engine = None,
    module: Modules = None,
    seconds: For = None,
    drain: Annotated[float | None, Parameter(help="Seconds that running steps get at the end, 30 unless said.")] = None,
    seed: Seed = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """
    Run one worker until Ctrl-C or SIGTERM, for the routers on the same store.

    The exit code is 75 when a worker of this name is running already.
    """
    part = Part("worker", worker_id, tuple(module or ()), drain, seed)
    return serve(part, engine, config, seconds=seconds, json=json)


@app.command(name="list", help_epilogue="Example:\n\n    reefknot worker list --json")
def list_(*, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """Every worker of every system on this store, class by class. The exit code is 69 when none is running."""
    where = place(engine, config)

    async def work() -> list[dict[str, Any]]:
        async with opened(where) as store:
            return await running(store, where, "worker")

    workers = [_fields(one, worker) for one in run(work()) for worker in one["workers"]]
    if json:
        put_json({"workers": workers})
        return Exit.FINE
    rows = []
    for worker in workers:
        for name, state in worker["classes"].items():
            rows.append(
                (
                    worker["worker_id"],
                    name,
                    "draining" if worker["draining"] else state["status"],
                    places(state["depth"], state["size"]),
                    f"{state['active']} of {state['capacity']}",
                    age(state["oldest_age_s"]) if state["depth"] else "",
                    f"pid {worker['pid']}",
                )
            )
    columns = ("worker", "class", "status", "waiting", "running", "oldest waits", "process")
    put_table(columns, rows, styles=("cyan", "", "bold"), whole=("worker", "class", "status"))
    return Exit.FINE


@app.command(help_epilogue="Examples:\n\n    reefknot worker drain worker-2\n    reefknot worker drain --dry-run")
def drain(
    worker: Named = None,
    /,
    *,
    seconds: Annotated[float, Parameter(help="How long running steps get, 30 unless said.")] = 30.0,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Let a worker finish what runs and take nothing new. What it has queued is for the others, or for its restart."""
    if not 0 <= seconds <= 86_400:
        raise CommandError(f"--seconds: {seconds:g} is not accepted: from 0 to 86400")
    told = f"draining; nothing new is taken, what is queued is for the others, and what runs has {seconds:g} s"
    order = Order("drain", "drained", told, True)
    return order.give(worker, engine, config, as_, dry_run=dry_run, json=json, seconds=seconds)


@app.command(help_epilogue="Example:\n\n    reefknot worker pause worker-2")
def pause(
    worker: Named = None,
    /,
    *,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Let a worker take nothing new and begin nothing, until it is resumed. What it has queued keeps its place."""
    order = Order("pause", "paused", "paused; nothing new is taken, and what is queued waits", True)
    return order.give(worker, engine, config, as_, dry_run=dry_run, json=json)


@app.command(help_epilogue="Example:\n\n    reefknot worker resume worker-2")
def resume(
    worker: Named = None,
    /,
    *,
    dry_run: DryRun = False,
    as_: Actor = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Let a worker that was paused or drained go on."""
    order = Order("resume", "resumed", "at work again", False)
    return order.give(worker, engine, config, as_, dry_run=dry_run, json=json)


class Order(NamedTuple):
    """One command to one worker or all, and how one sees that it was obeyed."""

    verb: str
    done: str
    told: str
    draining: bool
    """What an obedient worker says of itself."""

    def give(
        self,
        worker: str | None,
        engine: str | None,
        config: str | None,
        as_: str | None,
        *,
        dry_run: bool,
        json: bool,
        **details: Any,
    ) -> int:
        where = place(engine, config)
        actor = who(as_)
        meant, heard = run(self._give(where, actor, worker, details, dry_run))
        names = ", ".join(meant)
        if json:
            put_json({"workers": meant, self.done: heard, "actor": actor, "dry_run": dry_run})
        elif dry_run:
            put(f"{names} would be {self.done}")
        elif heard:
            put(f"{names}: {self.told}")
        if not heard and not dry_run:
            say(f"{names}: the command is kept, but nobody obeyed within {HEARD_S:g} s; see: reefknot worker list")
            return Exit.TEMPORARY
        return Exit.FINE

    async def _give(
        self, where: Place, actor: str, worker: str | None, details: dict[str, Any], dry_run: bool
    ) -> tuple[list[str], bool]:
        async with opened(where) as store:
            found = await running(store, where, "worker")
            known = [one["worker_id"] for each in found for one in each["workers"]]
            if worker is not None and worker not in known:
                raise unknown("WORKER", worker, known)
            meant = known if worker is None else [worker]
            if dry_run:
                return meant, False
            event = operator_event(where, actor, f"worker.{self.verb}", worker or "*", **details)
            body = dumps({"worker_id": worker, **details})
            await store.control.post(self.verb, target="router", body=body, sender=actor, events=[event])
            return meant, await self._heard(store, set(meant))

    async def _heard(self, store: Store, names: set[str]) -> bool:
        """Until they say so of themselves. One that is gone meanwhile need not."""
        from reefknot.app.presence import living_systems

        for _ in range(int(HEARD_S / _LOOK_S)):
            living = await living_systems(store)
            said = {one["worker_id"]: one["draining"] for each in living for one in each["workers"]}
            if all(said.get(name, self.draining) is self.draining for name in names):
                return True
            await asyncio.sleep(_LOOK_S)
        return False


def _fields(system: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    return {**worker, "pid": system["pid"], "host": system["host"], "system_id": system["system_id"]}
