"""`reefknot worker`: start a worker as a process of its own; list, drain, pause and resume running workers."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from reefknot.cli.app import Exit, examples, noun
from reefknot.cli.options import (
    OPERATOR,
    STORE,
    Modules,
    OperatorFlags,
    StoreFlags,
    check_number,
    unknown,
)
from reefknot.cli.output import age, put, put_json, put_table, queue_depth, say, show
from reefknot.cli.serve import DrainSeconds, For, Seed, SystemPart, start_part
from reefknot.cli.stores import StoreAddress, address_of, polled, systems_with, with_store

if TYPE_CHECKING:
    from reefknot.ports.store import Store

OBEY_WAIT_S = 5.0

app = noun("worker", "worker start --module app", "worker list")

WorkerId = Annotated[str | None, Parameter(help="Worker id. Default: every worker.")]


@app.command(
    help_epilogue=examples(
        "worker start", "worker start --engine sqlite:state.db --worker-id mailer --module app --module more"
    )
)
def start(
    *,
    worker_id: Annotated[str | None, Parameter(help="Worker id. Default: worker-1, or the next free one.")] = None,
    module: Modules = None,
    seconds: For = None,
    drain: DrainSeconds = None,
    seed: Seed = None,
    options: StoreFlags = STORE,
) -> int:
    """
    Run one worker until Ctrl-C or SIGTERM, for the routers on the same store.

    The exit code is 75 when a worker with this id is running already.
    """
    return start_part(SystemPart("worker", worker_id, tuple(module or ()), drain, seed), options, seconds)


@app.command(name="list", help_epilogue=examples("worker list --json"))
def list_(*, options: StoreFlags = STORE) -> int:
    """List every worker on this store with its resource classes. The exit code is 69 when none is running."""
    address = address_of(options)
    systems = with_store(address, lambda store: systems_with("worker", store, address))
    workers = [
        {**worker, "pid": one["pid"], "host": one["host"], "system_id": one["system_id"]}
        for one in systems
        for worker in one["workers"]
    ]

    def text() -> None:
        rows = [
            (
                worker["worker_id"],
                name,
                "draining" if worker["draining"] else state["status"],
                queue_depth(state["depth"], state["size"]),
                f"{state['active']} of {state['capacity']}",
                age(state["oldest_age_s"]) if state["depth"] else "",
                f"pid {worker['pid']}",
            )
            for worker in workers
            for name, state in worker["classes"].items()
        ]
        columns = ("worker", "class", "status", "queued", "running", "oldest", "process")
        put_table(columns, rows, styles=("cyan", "", "bold"), whole=("worker", "class", "status"))

    show({"workers": workers}, text, json=options.json)
    return Exit.FINE


@app.command(help_epilogue=examples("worker drain worker-2", "worker drain --dry-run"))
def drain(
    worker: WorkerId = None,
    /,
    *,
    seconds: Annotated[float, Parameter(help="Seconds that running steps get. Default: 30.")] = 30.0,
    options: OperatorFlags = OPERATOR,
) -> int:
    """Drain a worker: running steps finish, nothing new is accepted, and queued work goes to the other workers."""
    check_number("--seconds", seconds, 0, 86_400, "from 0 to 86400")
    effect = f"draining; no new work is accepted, queued work goes to others, running steps have {seconds:g} s"
    return WorkerCommand("drain", "drained", effect, draining=True).send(worker, options, seconds=seconds)


@app.command(help_epilogue=examples("worker pause worker-2"))
def pause(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Pause a worker: it accepts and starts nothing until it is resumed, and keeps its queue."""
    effect = "paused; no new work is accepted, and queued work waits"
    return WorkerCommand("pause", "paused", effect, draining=True).send(worker, options)


@app.command(help_epilogue=examples("worker resume worker-2"))
def resume(worker: WorkerId = None, /, *, options: OperatorFlags = OPERATOR) -> int:
    """Resume a paused or drained worker."""
    return WorkerCommand("resume", "resumed", "running again", draining=False).send(worker, options)


class WorkerCommand(NamedTuple):
    """A command to one worker or to all, and the status that shows that it was obeyed."""

    verb: str
    participle: str
    effect: str
    draining: bool
    """The `draining` flag that an obedient worker reports."""

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
        reported = {one["worker_id"]: one["draining"] for each in living for one in each["workers"]}
        return all(reported.get(name, self.draining) is self.draining for name in names)
