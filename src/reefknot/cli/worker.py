"""`reefknot worker`: the workers of a running system, and draining them."""

from __future__ import annotations

import asyncio
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.asking import Config, Json, unknown
from reefknot.cli.engine import Actor, DryRun, Engine, opened, operator_event, place, run, who
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.observing import age, running
from reefknot.cli.output import put, put_json, put_table, say

if TYPE_CHECKING:
    from reefknot.ports.store import Store

HEARD_S = 5.0
_LOOK_S = 0.1

app = App(
    name="worker",
    help="See and drain the workers of a running system.",
    help_epilogue="Example:\n\n    reefknot worker list",
)


@app.command(name="list", help_epilogue="Example:\n\n    reefknot worker list --json")
def list_(*, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """Every worker of every system on this store, class by class. The exit code is 69 when none is running."""
    where = place(engine, config)

    async def work() -> list[dict[str, Any]]:
        async with opened(where) as store:
            return await running(store, where)

    workers = [_fields(one, worker) for one in run(work()) for worker in one["workers"]]
    if json:
        put_json({"workers": workers})
        return Exit.FINE
    rows = []
    for worker in workers:
        for name, state in worker["classes"].items():
            size = "no bound" if state["size"] is None else str(state["size"])
            rows.append(
                (
                    worker["worker_id"],
                    name,
                    "draining" if worker["draining"] else state["status"],
                    f"{state['depth']} of {size}",
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
    worker: Annotated[str | None, Parameter(help="Its id; without it, every worker.")] = None,
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
    where = place(engine, config)
    actor = who(as_)

    async def work() -> tuple[list[str], bool]:
        async with opened(where) as store:
            known = [one["worker_id"] for found in await running(store, where) for one in found["workers"]]
            if worker is not None and worker not in known:
                raise unknown("WORKER", worker, known)
            meant = known if worker is None else [worker]
            if dry_run:
                return meant, False
            body = dumps({"worker_id": worker, "seconds": seconds})
            event = operator_event(where, actor, "worker.drain", worker or "*", seconds=seconds)
            await store.control.post("drain", target="router", body=body, sender=actor, events=[event])
            return meant, await _heard(store, set(meant))

    meant, heard = run(work())
    names = ", ".join(meant)
    if json:
        put_json({"workers": meant, "drained": heard, "actor": actor, "dry_run": dry_run})
    elif dry_run:
        put(f"{names} would be drained")
    elif heard:
        put(f"{names}: draining; nothing new is taken, and what runs has {seconds:g} s")
    if not heard and not dry_run:
        say(f"{names}: the command is kept, but nobody obeyed within {HEARD_S:g} s; look with: reefknot worker list")
        return Exit.TEMPORARY
    return Exit.FINE


async def _heard(store: Store, names: set[str]) -> bool:
    """Until they say of themselves that they drain."""
    from reefknot.assembly.system import living_systems

    for _ in range(int(HEARD_S / _LOOK_S)):
        found = {one["worker_id"]: one["draining"] for each in await living_systems(store) for one in each["workers"]}
        if all(found.get(name, True) for name in names):
            return True
        await asyncio.sleep(_LOOK_S)
    return False


def _fields(system: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    return {**worker, "pid": system["pid"], "host": system["host"], "system_id": system["system_id"]}
