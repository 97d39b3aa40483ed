"""Assignments through `run`: from a file to the router, its queue, a worker, and back with their results."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.measure import Contestant, Effort, measure
from bench.table import MICROSECONDS, Run, Table
from reefknot.assembly.system import System, running_system
from reefknot.blocks.python import block
from reefknot.cli.run import AT_ONCE, Batch
from reefknot.cli.running import Ending
from reefknot.config.settings import Settings, load_settings
from reefknot.ports.block import BlockContext

ON_DISK = "reefknot run, SQLite, FULL"
IN_MEMORY = "reefknot run, memory"
ROUND = 500
"""Assignments in one file. The figures are for one of them."""
GATES = {"WORKER_RETRIES_V2_ENABLED": "true", "WORKER_QUEUE_V2_ENABLED": "true"}


@block("bench.nothing")
async def nothing(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
    """A step that costs nothing, so that all the rest shows."""
    return {"number": inputs["number"]}


def through(name: str, url: str, folder: Path, stack: ExitStack) -> Contestant:
    """A system that is up; a batch is a file of assignments with new ids."""
    runner = stack.enter_context(asyncio.Runner())
    settings = load_settings(None, environ=GATES, cwd=folder)
    system = runner.run(_entered(url, settings))
    stack.callback(lambda: runner.run(system.stop()))
    file = folder / "assignments.jsonl"

    async def one_file() -> None:
        batch = Batch(str(file), lambda _: None, AT_ONCE)
        await batch.through(system, Ending(asyncio.Event()))
        assert batch.tally.ends["succeeded"] == ROUND

    def batch(times: int) -> float:
        lines = [{"job": {"type": "bench.nothing", "payload": {"number": number}}} for number in range(ROUND)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        began = perf_counter()
        for _ in range(times):
            runner.run(one_file())
        return (perf_counter() - began) / ROUND

    return Contestant(name, batch)


async def _entered(url: str, settings: Settings) -> System:
    """Opened here and stopped by the stack: a context manager cannot be left in another call of a runner."""
    return await running_system(url, settings, modules=(__name__,)).__aenter__()


def run(effort: Effort) -> Run:
    rounds = max(3, effort.rounds // 20)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contestants = [
            through(IN_MEMORY, "memory:", folder, stack),
            through(ON_DISK, f"sqlite:{folder / 'state.db'}", folder, stack),
        ]
        timings = measure(contestants, rounds=rounds, batch_seconds=None)
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    return Run(timings, (f"Assignments each second: {rate}.",))


TABLES = (
    Table(
        name="run",
        title="Assignments through `run`",
        about=(
            "A file of assignments goes through the router's durable queue, admission, the worker's durable queue and a "
            f"step that does nothing, and every result comes back; {AT_ONCE} are on their way at once. On disk an "
            "assignment is written six times, each time before the next thing happens (`synchronous=FULL`, in groups): "
            "handed in, claimed by the router, accepted, claimed by a slot, settled, answered. In memory nothing of it "
            "outlives the process."
        ),
        unit=MICROSECONDS,
        reference=IN_MEMORY,
        targets={},
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
