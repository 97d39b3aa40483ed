"""
One assignment on an idle system: how long until its result is there, and what it costs the store.

The step does nothing, so all of the time is reefknot's and the disk's. What an idle system writes is counted as well.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import reefknot as rk
from bench.measure import Effort, Timing
from bench.table import MILLISECONDS, Run, Table
from bench.verdict import AtMostSeconds
from reefknot.app.system import running_system
from reefknot.policy.settings import load_settings

GATES = {"WORKER_RETRIES_V2_ENABLED": "true", "WORKER_QUEUE_V2_ENABLED": "true"}
STEPS = """
import reefknot as rk


@rk.block("bench.empty")
async def empty(inputs, context):
    return {}
"""
ONE, THREE = "one process", "client, router and worker as three processes"
PAUSE_S = 0.05
"""Between two assignments: the system is idle when one comes."""
IDLE_S = 5.0
STARTED_WITHIN_S = 30.0


async def _samples(call: Callable[[], Awaitable[Any]], number: int) -> list[float]:
    for _ in range(5):
        await call()
    taken = []
    for _ in range(number):
        await asyncio.sleep(PAUSE_S)
        began = perf_counter()
        await call()
        taken.append(perf_counter() - began)
    return taken


async def _in_one_process(folder: Path, number: int) -> tuple[list[float], str]:
    """The samples, and a sentence about transactions, reads and idle writes."""
    settings = load_settings(None, environ=GATES, cwd=folder)
    async with running_system(f"sqlite:{folder / 'one.db'}", settings, modules=("bench_steps",)) as system:
        store: Any = system.store
        reads = _counted(store)
        taken = await _samples(lambda: system.client.run("bench.empty"), number)
        before = store.batches, reads[0]
        for _ in range(number):  # back to back, so that what goes on in the background hardly counts
            await system.client.run("bench.empty")
        written, read = (store.batches - before[0]) / number, (reads[0] - before[1]) / number
        await asyncio.sleep(1.0)
        idle = store.batches
        await asyncio.sleep(IDLE_S)
        idle = (store.batches - idle) / IDLE_S
    return taken, (
        f"Through a client of the same process an assignment takes {written:.1f} write transactions (≤ 4) and "
        f"{read:.1f} reads (≤ 5); an idle system writes {idle:.1f} times a second (≤ 1)."
    )


def _counted(store: Any) -> list[int]:
    reader, number = store._reader, [0]
    read = reader.read

    async def counted(*given: Any, **named: Any) -> Any:
        number[0] += 1
        return await read(*given, **named)

    reader.read = counted
    return number


def part_of(folder: Path, url: str, *command: str) -> subprocess.Popen[bytes]:
    """One part of a system as a process of its own."""
    environ = {**os.environ, **GATES, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
    line = [sys.executable, "-m", "reefknot", *command, "--engine", url]
    return subprocess.Popen(line, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def in_three_processes(folder: Path, url: str, number: int, nats: dict[str, Any] | None = None) -> list[float]:
    """Seconds of single assignments through a router and a worker in other processes."""
    parts = [
        part_of(folder, url, "router", "start"),
        part_of(folder, url, "worker", "start", "--module", "bench_steps"),
    ]

    async def client_side() -> list[float]:
        async with rk.connect(url, nats=nats) as client:
            await (await client.submit("bench.empty")).result(STARTED_WITHIN_S)
            return await _samples(lambda: client.run("bench.empty"), number)

    try:
        return asyncio.run(client_side())
    finally:
        end_parts(parts)


def end_parts(parts: list[subprocess.Popen[bytes]]) -> None:
    for part in parts:
        part.terminate()
    for part in parts:
        part.wait(STARTED_WITHIN_S)


def percentiles(name: str, taken: list[float]) -> dict[str, Timing]:
    cuts = quantiles(taken, n=100, method="inclusive")
    return {f"{name}, p50": Timing(cuts[49], cuts[49]), f"{name}, p99": Timing(cuts[98], cuts[98])}


def run(effort: Effort) -> Run:
    number = max(20, effort.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bench_steps.py").write_text(STEPS)
        sys.path.insert(0, name)
        try:
            one, remark = asyncio.run(_in_one_process(folder, number))
            three = in_three_processes(folder, f"sqlite:{folder / 'three.db'}", number)
        finally:
            sys.path.remove(name)
    return Run(percentiles(ONE, one) | percentiles(THREE, three), (remark,))


TABLES = (
    Table(
        name="round-trip",
        title="One assignment on an idle system",
        about=(
            "From `client.run` to its result, of a step that does nothing, on SQLite with `synchronous=FULL`; the "
            "system has nothing else to do. Nothing polls: a commit wakes its waiters, in the same process by "
            "topic, in others because those that wait for what it touched are called."
        ),
        unit=MILLISECONDS,
        reference=f"{ONE}, p50",
        targets={
            f"{ONE}, p50": (AtMostSeconds(0.010),),
            f"{ONE}, p99": (AtMostSeconds(0.025),),
            f"{THREE}, p50": (AtMostSeconds(0.020),),
            f"{THREE}, p99": (AtMostSeconds(0.060),),
        },
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
