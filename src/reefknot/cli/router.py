"""`reefknot router`: start a router as a process of its own; show the status of running routers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from reefknot.cli.app import Exit, examples, noun
from reefknot.cli.options import STORE, StoreFlags
from reefknot.cli.output import age, put, put_table, show, time_text
from reefknot.cli.serve import For, Seed, SystemPart, start_part
from reefknot.cli.stores import address_of, systems_with, with_store
from reefknot.core.work import ROUTER

if TYPE_CHECKING:
    from reefknot.ports.store import Store

app = noun("router", "router start", "router status")


@app.command(
    help_epilogue=examples("router start", "router start --engine sqlite:state.db --router-id front --for 3600")
)
def start(
    *,
    router_id: Annotated[str | None, Parameter(help="Router id. Default: router-1, or the next free one.")] = None,
    seconds: For = None,
    seed: Seed = None,
    options: StoreFlags = STORE,
) -> int:
    """
    Run one router until Ctrl-C or SIGTERM, for the workers on the same store. Several routers may run.

    The exit code is 75 when a router with this id is running already.
    """
    return start_part(SystemPart("router", router_id, seed=seed), options, seconds)


@app.command(help_epilogue=examples("router status --json"))
def status(*, options: StoreFlags = STORE) -> int:
    """Show what each router holds, its load, and the workers it sees. The exit code is 69 when none is running."""
    address = address_of(options)

    async def work(store: Store) -> tuple[list[dict[str, Any]], dict[str, int]]:
        found = await systems_with("router", store, address)
        submitted: Counter[str] = Counter()
        for name, counts in (await store.work.snapshot()).counts.items():
            if name == ROUTER or "@" in name:  # not yet accepted by a worker, or accepted
                submitted.update({state.value: number for state, number in counts.items()})
        return found, dict(submitted)

    systems, submitted = with_store(address, work)
    routers = [_fields(one) for one in systems if one["router"]]

    def text() -> None:
        for one in routers:
            _put_router(one)
        if submitted:
            counts = ", ".join(f"{number} {state}" for state, number in sorted(submitted.items()) if number)
            put(f"submitted so far: {counts}")

    show({"routers": routers, "handed_in": submitted}, text, json=options.json)
    return Exit.FINE


def _put_router(router: dict[str, Any]) -> None:
    name = "router" if router["router_id"] == "router" else f"router {router['router_id']}"
    up_for = age((router["at"] - router["started"]) / 1000)
    put(f"{name} of pid {router['pid']} on {router['host']}, up for {up_for}: {router['status']}")
    put(f"  {router['pending']} pending, {router['waiting']} of them wait here for a worker")
    gates = (("retries", router["retries_v2"]), ("queue", router["queue_v2"]))
    put("  " + ", ".join(f"{name}: {'v2' if on else 'baseline'}" for name, on in gates))
    rows = [
        (worker, name, str(health["status"]), str(health["queue_depth"]), f"{health['active']} of {health['capacity']}")
        for name, by_worker in router["workers"].items()
        for worker, health in by_worker.items()
    ]
    put_table(("worker", "class", "status", "queued", "running"), sorted(rows), styles=("cyan", "", "bold"))


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
