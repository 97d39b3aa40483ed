"""Assignments through `run`: from a file to the router, its queue, a worker, and back with their results."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.measure import Contestant, Effort, measure
from bench.table import MICROSECONDS, Run, Table
from reefknot.app.system import running_system
from reefknot.console.cli.run import IN_FLIGHT, BatchRun
from reefknot.console.cli.serve import Shutdown
from reefknot.policy.settings import load_settings
from reefknot.steps.port import BlockContext
from reefknot.steps.python import block

ON_DISK = "reefknot run, SQLite, FULL"
IN_MEMORY = "reefknot run, memory"
PATIENCE_S = 60.0
ROUND = 500
"""Assignments in one file. The figures are for one of them."""
GATES = {"WORKER_RETRIES_V2_ENABLED": "true", "WORKER_QUEUE_V2_ENABLED": "true"}


@block("bench.nothing")
async def nothing(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
    """A step that costs nothing, so that all the rest shows."""
    return {"number": inputs["number"]}


def through(name: str, url: str, folder: Path) -> Contestant:
    """A batch is a file of assignments with new ids, in a system that is up already."""
    file = folder / "assignments.jsonl"
    lines = [{"job": {"type": "bench.nothing", "payload": {"number": number}}} for number in range(ROUND)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = load_settings(None, environ=GATES, cwd=folder)

    async def files(times: int) -> float:
        async with running_system(url, settings, modules=(__name__,)) as system, asyncio.timeout(PATIENCE_S):
            began = perf_counter()
            for _ in range(times):
                batch = BatchRun(str(file), lambda _: None, IN_FLIGHT, new=True)
                await batch.run(system, Shutdown(asyncio.Event()))
                assert batch.tally.ends["succeeded"] == ROUND
            return (perf_counter() - began) / ROUND

    return Contestant(name, lambda times: asyncio.run(files(times)))


def run(effort: Effort) -> Run:
    rounds = max(3, effort.rounds // 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contestants = [
            through(IN_MEMORY, "memory:", folder),
            through(ON_DISK, f"sqlite:{folder / 'state.db'}", folder),
        ]
        timings = measure(contestants, rounds=rounds, batch_seconds=None)
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    return Run(timings, (f"Assignments each second: {rate}.",))


TABLES = (
    Table(
        name="run",
        title="Assignments through `run`",
        about=(
            "A file of assignments goes through the router's durable queue, admission, a worker's slot and "
            f"a step that does nothing, and every result comes back; {IN_FLIGHT} are on their way at once. On disk an "
            "assignment is written three times, each before the next thing happens (`synchronous=FULL`, in groups): "
            "submitted, accepted and started, settled with its result. In memory nothing of it outlives the process."
        ),
        unit=MICROSECONDS,
        reference=IN_MEMORY,
        targets={},
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
