"""
A fan-out and its fan-in, next to as many plain jobs: a step asks for all children, and one job runs after the last.

The steps do nothing, so all of the time is reefknot's and the disk's.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from itertools import count
from pathlib import Path
from time import perf_counter

import reefknot as rk
from bench.measure import FULL, Effort, Timing
from bench.table import MICROSECONDS, Run, Table
from bench.tables.round_trip import GATES
from bench.verdict import AtMostTimes, Target
from reefknot.app.system import running_system
from reefknot.policy.settings import load_settings
from reefknot.queue.client import Client

STEPS = """
import reefknot as rk


@rk.block("bench.empty")
async def empty(inputs, context):
    return {}


@rk.block("bench.fan_out")
async def fan_out(inputs, context):
    children = [rk.then("bench.empty", {"n": n}) for n in range(inputs["number"])]
    return rk.gather(*children, then=rk.then("bench.fan_in"))


@rk.block("bench.fan_in")
async def fan_in(inputs, context):
    return {"children": len(await context.children())}
"""
SIZES = (1_000, 10_000)
PART = 400
"""Plain jobs that are submitted at once; two such parts are open at a time."""
WITHIN_S = 300.0
_names = count()


def fan(number: int) -> str:
    return f"fan-out of {number:,} and fan-in"


def plain(number: int) -> str:
    return f"{number:,} plain jobs"


async def _plain(client: Client, number: int) -> None:
    async def done(handles: list[rk.Handle | rk.QueueFullError | rk.KeyConflictError]) -> None:
        for one in handles:
            assert isinstance(one, rk.Handle), one
            await one.result(WITHIN_S)

    before: asyncio.Task[None] | None = None
    for at in range(0, number, PART):
        part = await client.submit_many([("bench.empty", {"n": n}) for n in range(at, min(number, at + PART))])
        task = asyncio.create_task(done(part))
        if before is not None:
            await before
        before = task
    if before is not None:
        await before


async def _fan_out(client: Client, number: int) -> None:
    name = f"fan-{next(_names)}"
    await (await client.submit("bench.fan_out", {"number": number}, assignment_id=name)).result(WITHIN_S)
    result = await client.job(f"{name}:1").result(WITHIN_S)
    assert result.output == {"children": number}, result


async def _timings(folder: Path, sizes: tuple[int, ...], rounds: int) -> dict[str, Timing]:
    taken: dict[str, list[float]] = {}
    settings = load_settings(None, environ=GATES, cwd=folder)
    async with running_system(f"sqlite:{folder / 'state.db'}", settings, modules=("bench_steps",)) as system:
        await system.client.run("bench.empty")
        for _ in range(rounds):
            for number in sizes:
                for name, call in ((plain(number), _plain), (fan(number), _fan_out)):
                    began = perf_counter()
                    await call(system.client, number)
                    taken.setdefault(name, []).append((perf_counter() - began) / number)
    return {name: Timing(min(seconds), sorted(seconds)[len(seconds) // 2]) for name, seconds in taken.items()}


def run(effort: Effort) -> Run:
    is_full = effort == FULL
    sizes = SIZES if is_full else SIZES[:1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bench_steps.py").write_text(STEPS)
        sys.path.insert(0, name)
        try:
            timings = asyncio.run(_timings(folder, sizes, 3 if is_full else 1))
        finally:
            sys.path.remove(name)
    targets: dict[str, tuple[Target, ...]] = {fan(number): (AtMostTimes(3.0, plain(number)),) for number in sizes}
    if is_full:
        targets[fan(SIZES[1])] = (*targets[fan(SIZES[1])], AtMostTimes(1.5, fan(SIZES[0])))
    return Run(timings, targets=targets)


TABLES = (
    Table(
        name="fan-out",
        title="Fan-out and fan-in",
        about=(
            "A step asks for its children by `rk.gather`, and one job runs when the last has ended; next to it "
            "plain jobs of the same number, submitted in parts of 400. Per job, in one process, on SQLite with "
            "`synchronous=FULL`; the steps do nothing."
        ),
        unit=MICROSECONDS,
        reference=plain(SIZES[0]),
        targets={},
        packages=("reefknot", "apsw"),
        run=run,
    ),
)
