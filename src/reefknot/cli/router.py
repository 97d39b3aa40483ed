"""`reefknot router`: one as a process of its own, what the routers hold, and what they know of the workers."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.app import Exit
from reefknot.cli.options import Config, Engine, Json
from reefknot.cli.output import put, put_json, put_table
from reefknot.cli.serve import For, Part, Seed
from reefknot.cli.serve import start as serve
from reefknot.cli.stores import age, opened, place, run, running, time_text

app = App(
    name="router",
    help="Start a router; see those that run.",
    help_epilogue="Examples:\n\n    reefknot router start\n    reefknot router status",
)


@app.command(
    help_epilogue="Examples:\n\n    reefknot router start\n"
    "    reefknot router start --engine sqlite:state.db --router-id front --for 3600"
)
def start(
    *,
    router_id: Annotated[
        str | None, Parameter(help="Its name; without it, router-1, or the next that is free.")
    ] = None,
    engine: Engine = None,
    seconds: For = None,
    seed: Seed = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """
    Run one router until Ctrl-C or SIGTERM, for the workers on the same store. Several may run: each answers its own.

    The exit code is 75 when a router of this name is running already.
    """
    return serve(Part("router", router_id, seed=seed), engine, config, seconds=seconds, json=json)


@app.command(help_epilogue="Example:\n\n    reefknot router status --json")
def status(*, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """What it holds, how busy it is, and which workers it sees. The exit code is 69 when no system is running."""
    where = place(engine, config)

    async def work() -> tuple[list[dict[str, Any]], dict[str, int]]:
        async with opened(where) as store:
            found = await running(store, where, "router")
            handed_in = (await store.work.snapshot()).counts.get("router", {})
            return found, {state.value: number for state, number in handed_in.items()}

    systems, handed_in = run(work())
    routers = [_fields(one) for one in systems if one["router"]]
    if json:
        put_json({"routers": routers, "handed_in": handed_in})
        return Exit.FINE
    for one in routers:
        up_for = age((one["at"] - one["started"]) / 1000)
        put(f"{_name(one)} of pid {one['pid']} on {one['host']}, up for {up_for}: {one['status']}")
        put(f"  {one['pending']} on their way, {one['waiting']} of them wait here for a worker")
        gates = (("retries", one["retries_v2"]), ("queue", one["queue_v2"]))
        put("  " + ", ".join(f"{name}: {'v2' if on else 'baseline'}" for name, on in gates))
        rows = [
            (
                worker,
                name,
                str(health["status"]),
                str(health["queue_depth"]),
                f"{health['active']} of {health['capacity']}",
            )
            for name, by_worker in one["workers"].items()
            for worker, health in by_worker.items()
        ]
        put_table(("worker", "class", "status", "waiting", "running"), sorted(rows), styles=("cyan", "", "bold"))
    if handed_in:
        told = ", ".join(f"{number} {state}" for state, number in sorted(handed_in.items()) if number)
        put(f"handed in so far: {told}")
    return Exit.FINE


def _name(router: dict[str, Any]) -> str:
    """The router of a whole system has no other name."""
    return "router" if router["router_id"] == "router" else f"router {router['router_id']}"


def _fields(system: dict[str, Any]) -> dict[str, Any]:
    return {
        "system_id": system["system_id"],
        "pid": system["pid"],
        "host": system["host"],
        "started": system["started_at"],
        "started_at": time_text(system["started_at"]),
        "at": system["at"],
        "retries_v2": system["retries_v2"],
        "queue_v2": system["queue_v2"],
        "blocks": system["blocks"],
        **system["router"],
    }
