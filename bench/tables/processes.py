"""
Growth with processes and backlog: what an assignment costs when more processes share a store, on both engines.

The principle behind the targets: no process pays for the work of the others, and no claim costs more because more is
waiting. Processor time is therefore judged besides seconds: it says the same on two cores as on twenty.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import reefknot as rk
from bench.measure import FULL, Effort, Timing
from bench.table import MICROSECONDS, MILLISECONDS, Run, Table
from bench.tables.nats import PACKAGES, servers
from bench.tables.round_trip import STARTED_WITHIN_S, STEPS, end_parts, part_of
from bench.verdict import AtMostSeconds, AtMostTimes
from reefknot.console.nats_servers import url_of
from reefknot.queue.presence import living_systems

SIZES = ((1, 1), (4, 1), (8, 2), (16, 4))
"""Workers and routers, each a process of its own."""
AT_ONCE = 60
ASSIGNMENTS, FEW = 1500, 500
"""In one measurement, and in a quick look."""
WARM = 200
SETTLE_S, IDLE_S = 2.0, 4.0
TIME, CPU = "time", "CPU"
CLIENTS, CLIENTS_WORKERS, CLIENTS_ROUTERS = 8, 4, 2
ONE, P50, P99 = "one assignment", "submit, p50", "submit, p99"

# ---- a system of processes -------------------------------------------------------------------------------------------

Place = Callable[[], AbstractContextManager[tuple[str, Path, list[int]]]]
"""Where a system runs: the address of a new store, a folder, and the processes of its servers."""


@contextmanager
def on_sqlite() -> Iterator[tuple[str, Path, list[int]]]:
    with tempfile.TemporaryDirectory() as name:
        yield f"sqlite:{name}/state.db", Path(name), []


@contextmanager
def on_nats() -> Iterator[tuple[str, Path, list[int]]]:
    with servers() as (running, folder):
        yield url_of(running), folder, [one.pid for one in running]


@contextmanager
def parts(folder: Path, url: str, workers: int, routers: int) -> Iterator[list[int]]:
    """Process ids of workers and routers, which end with the block."""
    (folder / "bench_steps.py").write_text(STEPS)
    kinds = {"worker": (workers, ("--module", "bench_steps")), "router": (routers, ())}
    begun = [
        part_of(folder, url, kind, "start", f"--{kind}-id", f"{kind}-{number}", *more)
        for kind, (count, more) in kinds.items()
        for number in range(count)
    ]
    try:
        yield [part.pid for part in begun]
    finally:
        end_parts(begun)


async def all_there(client: rk.Client, number: int) -> None:
    """Wait until so many systems have reported, and an assignment goes through."""
    async with asyncio.timeout(2 * STARTED_WITHIN_S):
        while True:
            if len(await living_systems(client.store)) >= number:
                break
            await asyncio.sleep(0.1)
        await client.run("bench.empty")


async def round_trips(client: rk.Client, number: int, at_once: int = AT_ONCE) -> list[float]:
    """Seconds of each of so many assignments, from `run` to the result."""
    numbers, taken = iter(range(number)), list[float]()

    async def caller() -> None:
        for _ in numbers:
            began = perf_counter()
            result = await client.run("bench.empty")
            taken.append(perf_counter() - began)
            assert result.status == "success", result

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return taken


def cpu_of(processes: Sequence[int]) -> float:
    """Processor seconds that these processes have used, in user and in kernel mode."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


class Meter:
    """Processor seconds of groups of processes, without what the same processes use while they are idle."""

    def __init__(self, *groups: Sequence[int]) -> None:
        self._groups = groups
        self.idle = [0.0] * len(groups)
        """Processor seconds of each group in one second without work."""
        self._start()

    def _start(self) -> None:
        self._before, self._began = [cpu_of(one) for one in self._groups], perf_counter()

    async def learn_idle(self, seconds: float) -> None:
        """Measure the idle processes for so long; from then on the meter counts."""
        self._start()
        await asyncio.sleep(seconds)
        self.idle = [used / seconds for used in self.used()]
        self._start()

    def used(self) -> list[float]:
        """Seconds of each group."""
        passed = perf_counter() - self._began
        return [
            cpu_of(group) - before - idle * passed
            for group, before, idle in zip(self._groups, self._before, self.idle, strict=True)
        ]


# ---- more workers and routers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of one assignment: of the clock, and of the processors of routers and workers, and of the servers."""

    seconds: float
    cpu: float
    server_cpu: float
    idle: float
    """Processor seconds of routers and workers in one second without work."""
    round_trips: list[float]


async def load_on(place: tuple[str, Path, list[int]], workers: int, routers: int, number: int) -> Load:
    """One measurement of a new system."""
    url, folder, server = place
    async with rk.connect(url) as client:
        with parts(folder, url, workers, routers) as processes:
            await all_there(client, workers + routers)
            await round_trips(client, WARM)
            await asyncio.sleep(SETTLE_S)
            meter = Meter(processes, server)
            await meter.learn_idle(IDLE_S)
            began = perf_counter()
            taken = await round_trips(client, number)
            seconds = perf_counter() - began
            cpu, server_cpu = meter.used()
    return Load(seconds / number, cpu / number, server_cpu / number, meter.idle[0], taken)


def _size(workers: int, routers: int) -> str:
    return f"{workers} + {routers}"


def run_growth(effort: Effort, place: Place) -> Run:
    """Every size once a round, and of each the middle one."""
    rounds, number = (3, ASSIGNMENTS) if effort is FULL else (1, FEW)
    loads: dict[str, list[Load]] = {_size(*one): [] for one in SIZES}
    for _ in range(rounds):
        for one in SIZES:
            with place() as where:
                loads[_size(*one)].append(asyncio.run(load_on(where, *one, number)))
    timings: dict[str, Timing] = {}
    for name, measured in loads.items():
        timings[f"{name}, {TIME}"] = _middle([one.seconds for one in measured])
        timings[f"{name}, {CPU}"] = _middle([one.cpu for one in measured])
    remarks = ["Workers + routers: " + "; ".join(_said(name, measured) for name, measured in loads.items()) + "."]
    if any(one.server_cpu for one in loads[_size(*SIZES[0])]):
        server = (f"{name} {median(one.server_cpu for one in some) * 1e6:,.0f} µs" for name, some in loads.items())
        remarks.append(f"The server's own CPU for one assignment, which is not in the table: {', '.join(server)}.")
    return Run(timings, tuple(remarks), columns=(TIME, CPU))


def _middle(figures: list[float]) -> Timing:
    return Timing(median(figures), median(figures))


def _said(name: str, measured: list[Load]) -> str:
    p50, p99 = _percentiles([one for load in measured for one in load.round_trips])
    rate = 1 / median(one.seconds for one in measured)
    idle = median(one.idle for one in measured)
    trips = f"round trip p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"
    return f"{name} makes {rate:,.0f} a second, {trips}, idle CPU {idle:.1%} of a core"


def _percentiles(taken: list[float]) -> tuple[float, float]:
    cuts = quantiles(taken, n=100, method="inclusive")
    return cuts[49], cuts[98]


# ---- more clients ----------------------------------------------------------------------------------------------------


def submitting(url: str, number: int, start: Any, answers: Any) -> None:
    """A client process: its assignments, a few at once; puts when it began and ended, and the seconds of `submit`."""

    async def callers() -> tuple[float, float, list[float]]:
        numbers, taken = iter(range(number)), list[float]()

        async def caller() -> None:
            for _ in numbers:
                began = perf_counter()
                handle = await client.submit("bench.empty")
                taken.append(perf_counter() - began)
                assert (await handle.result()).status == "success"

        async with rk.connect(url) as client:
            await client.run("bench.empty")
            await asyncio.to_thread(start.wait, STARTED_WITHIN_S)
            began = perf_counter()
            await asyncio.gather(*(caller() for _ in range(AT_ONCE // CLIENTS)))
            return began, perf_counter(), taken

    answers.put(asyncio.run(callers()))


async def clients_on(place: tuple[str, Path, list[int]], number: int) -> tuple[float, list[float]]:
    """Seconds of one assignment, and of each `submit`, when all clients submit their share of so many."""
    url, folder, _ = place
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(CLIENTS), context.Queue()
    async with rk.connect(url) as client:
        with parts(folder, url, CLIENTS_WORKERS, CLIENTS_ROUTERS):
            await all_there(client, CLIENTS_WORKERS + CLIENTS_ROUTERS)
            await round_trips(client, WARM)
            share = number // CLIENTS
            clients = [context.Process(target=submitting, args=(url, share, start, answers)) for _ in range(CLIENTS)]
            for one in clients:
                one.start()
            found = [await asyncio.to_thread(answers.get, True, 4 * STARTED_WITHIN_S) for _ in clients]
            for one in clients:
                one.join(STARTED_WITHIN_S)
    seconds = max(one[1] for one in found) - min(one[0] for one in found)
    return seconds / (share * CLIENTS), [taken for one in found for taken in one[2]]


def run_clients(effort: Effort) -> Run:
    rounds, number = (3, 2 * ASSIGNMENTS) if effort is FULL else (1, 2 * FEW)
    rates, submits = list[float](), list[tuple[float, float]]()
    for _ in range(rounds):
        with on_sqlite() as where:
            seconds, taken = asyncio.run(clients_on(where, number))
        rates.append(seconds)
        submits.append(_percentiles(taken))
    p50, p99 = zip(*submits, strict=True)
    timings = {ONE: _middle(rates), P50: _middle(list(p50)), P99: _middle(list(p99))}
    return Run(timings, (f"Assignments each second: {1 / timings[ONE].best:,.0f}.",))


# ---- the tables ------------------------------------------------------------------------------------------------------

_FIRST, _LAST = _size(*SIZES[0]), _size(*SIZES[-1])
_GROWTH = (
    f"Workers and routers, each a process of its own; a client in another one keeps {AT_ONCE} assignments on their "
    "way, of a step that does nothing, from `client.run` to its result. CPU is what all workers and routers together "
    "use for one assignment; what the same processes use while they are idle is taken off. The middle one of three "
    "measurements, each of a new system."
)
TABLES = (
    Table(
        name="processes",
        title="More processes on one SQLite file",
        about=_GROWTH,
        unit=MICROSECONDS,
        reference="",
        targets={
            f"8 + 2, {TIME}": (AtMostTimes(1.25, f"{_FIRST}, {TIME}"),),
            f"{_LAST}, {CPU}": (AtMostTimes(1.5, f"{_FIRST}, {CPU}"),),
        },
        packages=("reefknot", "apsw"),
        run=lambda effort: run_growth(effort, on_sqlite),
    ),
    Table(
        name="clients",
        title="Several clients of one SQLite file",
        about=(
            f"{CLIENTS} client processes submit steps that do nothing, {AT_ONCE // CLIENTS} at once each, and wait for "
            f"the results; {CLIENTS_WORKERS} workers and {CLIENTS_ROUTERS} routers are processes of their own. "
            "`submit` returns when the assignment is on disk."
        ),
        unit=MILLISECONDS,
        reference=ONE,
        targets={ONE: (AtMostSeconds(1 / 1000),), P99: (AtMostSeconds(0.050),)},
        packages=("reefknot", "apsw"),
        run=run_clients,
    ),
    Table(
        name="nats-processes",
        title="More processes on one NATS server",
        about=_GROWTH,
        unit=MICROSECONDS,
        reference="",
        targets={f"{_LAST}, {CPU}": (AtMostTimes(1.3, f"{_FIRST}, {CPU}"),)},
        packages=PACKAGES,
        run=lambda effort: run_growth(effort, on_nats),
    ),
)
