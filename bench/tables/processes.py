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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import nats

import reefknot as rk
from bench.measure import FULL, Effort, Timing
from bench.table import MESSAGES as STORED
from bench.table import MICROSECONDS, MILLISECONDS, Run, Table
from bench.tables.nats import MESSAGES, PACKAGES, Counter, are_there, count_results, our_bodies, servers, write
from bench.tables.round_trip import STARTED_WITHIN_S, STEPS, end_parts, part_of
from bench.verdict import AtMost, AtMostSeconds, AtMostTimes, Target
from reefknot.console.nats_servers import url_of
from reefknot.queue.model.messages import ASSIGN
from reefknot.queue.presence import living_systems
from reefknot.stores.jetstream.assignments import CONSUMER
from reefknot.stores.jetstream.connection import DEFAULT_NAME

SIZES = ((1, 1), (4, 1), (8, 2), (16, 4))
"""Workers and routers, each a process of its own."""
AT_ONCE = 60
ASSIGNMENTS, FEW = 1500, 500
"""In one measurement, and in a quick look."""
WARM = 200
SETTLE_S, IDLE_S = 2.0, 4.0
TIME, CPU = "time", "CPU"
CLIENTS, CLIENTS_WORKERS, CLIENTS_ROUTERS = 8, 4, 2
BACKLOGS, SMALL_BACKLOGS = (1_000, 100_000), (1_000, 10_000)
"""How many assignments wait, and how many in a quick look."""
SCHEDULED, AT_WORKER, AT_ROUTER = "scheduled for tomorrow", "waiting at the worker", "waiting at the router"
ENDED = "ended before"
SLOTS = 100
PORTION, PORTION_WITHIN_S = 5_000, 300.0
"""The stream of the shared subject holds 10,000 and refuses more."""
GROUP = 500
"""Submissions of one call: on NATS an atomic batch holds a thousand messages."""
WARM_WINDOWS = 2
LONG_LINES = """
nats: {{guarantee: fenced}}
router: {{max_queue_size: {at_router}}}
worker:
  default_timeout_ms: 3600000
  queue: {{v2: {{max_queue_size: {at_worker}, resource_pools: {{cpu: {{max_concurrency: {slots}}}}}}}}}
"""
GATE = """
import asyncio, pathlib


@rk.block("bench.gate")
async def gate(inputs, context):
    while not pathlib.Path("open").exists():
        await asyncio.sleep(0.05)
    return {}
"""
ALONE, LOADED = "alone", f"{AT_ONCE} at once"
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
def parts(folder: Path, url: str, workers: int, routers: int, steps: str = STEPS) -> Iterator[list[int]]:
    """Process ids of workers and routers, which end with the block."""
    (folder / "bench_steps.py").write_text(steps)
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
        self.idle = [used / (perf_counter() - self._began) for used in self.used()]
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
class Waited:
    """Seconds of one assignment while others wait or have ended: of the clock, our processes, and the server."""

    seconds: float
    cpu: float
    server_cpu: float


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


# ---- more that waits -------------------------------------------------------------------------------------------------


async def submit(client: rk.Client, number: int, delay: float = 0.0) -> None:
    for begun in range(0, number, GROUP):
        group = min(GROUP, number - begun)
        answers = await client.submit_many([{"job_type": "bench.empty", "delay": delay} for _ in range(group)])
        refused = [one for one in answers if isinstance(one, Exception)]
        if refused:
            raise refused[0]


async def line_up(client: Any, waiting: int) -> None:
    """Send so many assignments to a worker whose slots are all taken, and return when it has accepted them."""
    stream = f"{DEFAULT_NAME}_assign"
    last = (await client.jetstream().stream_info(stream)).state.last_seq + SLOTS
    await write(client, ASSIGN, our_bodies(SLOTS, "bench.gate"))
    for begun in range(0, waiting, PORTION):
        number = min(PORTION, waiting - begun)
        last += number
        await write(client, ASSIGN, our_bodies(number, "bench.empty"))
        async with asyncio.timeout(PORTION_WITHIN_S):
            while True:  # what is written is stored a moment later
                stored = (await client.jetstream().stream_info(stream)).state.last_seq
                found = await client.jetstream().consumer_info(stream, CONSUMER)
                if stored >= last and not found.num_pending and not found.num_ack_pending:
                    break
                await asyncio.sleep(0.1)


async def windows(client: Any, feed: Callable[[], Awaitable[None]], number: int) -> None:
    """Feed so many assignments, wait for as many results, and again: what waits stays as long as it is."""
    counter = Counter(MESSAGES)
    subscription = await count_results(client, counter)
    await client.flush()
    for _ in range(number):
        counter.restart(MESSAGES)
        await feed()
        await counter.wait()
    await subscription.unsubscribe()


async def backlog_on(place: tuple[str, Path, list[int]], kind: str, size: int, number: int) -> Waited:
    """One measurement of a new system in which so many assignments wait, or have ended."""
    url, folder, server = place
    room, with_router = size * 5 // 4 + 10 * MESSAGES, kind == AT_ROUTER  # a tenth is kept for higher priorities
    lines = LONG_LINES.format(at_router=room, at_worker=MESSAGES if with_router else room, slots=SLOTS)
    (folder / "reefknot.yaml").write_text(lines)
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(rk.connect(url, size=room)) if with_router else None
        if ours is not None:
            await submit(ours, size)
        elif kind == SCHEDULED:
            async with rk.connect(url, size=room) as client_of_today:
                await submit(client_of_today, size, delay=86_400)
        processes = stack.enter_context(parts(folder, url, 1, int(with_router), STEPS + GATE))
        client: Any = await nats.connect(url)
        stack.push_async_callback(client.close)
        if ours is None:
            await are_there(client, 1)
        if kind == AT_WORKER:
            await line_up(client, size)
            (folder / "open").touch()

        async def feed() -> None:
            if ours is None:
                await write(client, ASSIGN, our_bodies(MESSAGES, "bench.empty"))
            else:
                await submit(ours, MESSAGES)

        await windows(client, feed, size // MESSAGES if kind == ENDED else WARM_WINDOWS)
        meter, began = Meter(processes, server), perf_counter()
        await windows(client, feed, number)
        fed, seconds = number * MESSAGES, perf_counter() - began
        cpu, server_cpu = meter.used()
    return Waited(seconds / fed, cpu / fed, server_cpu / fed)


def run_backlog(effort: Effort) -> Run:
    sizes, number = (BACKLOGS, 10) if effort is FULL else (SMALL_BACKLOGS, 4)
    columns = tuple(f"{size:,}" for size in sizes)
    found: dict[str, Waited] = {}
    targets: dict[str, tuple[Target, ...]] = {}
    for kind in (SCHEDULED, AT_WORKER, AT_ROUTER, ENDED):
        for size, column in zip(sizes, columns, strict=True):
            with on_nats() as where:
                found[f"{kind}, {column}"] = asyncio.run(backlog_on(where, kind, size, number))
        targets[f"{kind}, {columns[-1]}"] = (AtMostTimes(1 / 0.9, f"{kind}, {columns[0]}"),)
    rates = "; ".join(f"{name} {1 / one.seconds:,.0f}" for name, one in found.items())
    cpu = "; ".join(f"{name} {one.cpu * 1e6:,.0f} + {one.server_cpu * 1e6:,.0f} µs" for name, one in found.items())
    remarks = (f"Assignments each second: {rates}.", f"CPU for one, of worker and router + of the server: {cpu}.")
    return Run({name: _middle([one.seconds]) for name, one in found.items()}, remarks, targets, columns)


# ---- stored messages -------------------------------------------------------------------------------------------------


class Sequences:
    """Messages that the streams of a store have taken since the start, without those of an idle system."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._idle: dict[str, float] = {}

    async def start(self) -> None:
        self._before, self._began = await self._last(), perf_counter()

    async def learn_idle(self, seconds: float) -> None:
        await self.start()
        await asyncio.sleep(seconds)
        self._idle = {name: more / seconds for name, more in (await self.stored()).items()}

    async def stored(self) -> dict[str, float]:
        """By stream."""
        passed, last = perf_counter() - self._began, await self._last()
        return {
            name: now - self._before.get(name, 0) - self._idle.get(name, 0.0) * passed for name, now in last.items()
        }

    async def _last(self) -> dict[str, int]:
        streams = await self._client.jetstream().streams_info()
        return {
            one.config.name: one.state.last_seq for one in streams if one.config.name.startswith(f"{DEFAULT_NAME}_")
        }


async def messages_on(place: tuple[str, Path, list[int]], number: int) -> dict[str, dict[str, float]]:
    """Stored messages of one assignment by stream: alone, and under load."""
    url, folder, _ = place
    found: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        client: Any = await nats.connect(url)
        stack.push_async_callback(client.close)
        ours = await stack.enter_async_context(rk.connect(url))
        stack.enter_context(parts(folder, url, 1, 1))
        await all_there(ours, 2)
        await round_trips(ours, WARM)
        await asyncio.sleep(SETTLE_S)
        sequences = Sequences(client)
        await sequences.learn_idle(2 * IDLE_S)
        for name, count, at_once in ((ALONE, number // 20, 1), (LOADED, number, AT_ONCE)):
            await sequences.start()
            await round_trips(ours, count, at_once)
            await asyncio.sleep(SETTLE_S)  # what is written after the result belongs to it
            found[name] = {stream: more / count for stream, more in (await sequences.stored()).items()}
    return found


def run_messages(effort: Effort) -> Run:
    with on_nats() as where:
        found = asyncio.run(messages_on(where, ASSIGNMENTS if effort is FULL else FEW))
    timings = {name: _middle([sum(streams.values())]) for name, streams in found.items()}
    parted = (
        f"{name}: " + ", ".join(f"{stream} {more:.1f}" for stream, more in streams.items())
        for name, streams in found.items()
    )
    return Run(timings, (f"By stream: {'; '.join(parted)}.",))


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
    Table(
        name="nats-backlog",
        title="More that waits on one NATS server",
        about=(
            f"One worker process, fenced, gets {MESSAGES:,} assignments, of a step that does nothing, whenever as many "
            "have ended, while others are scheduled for tomorrow, wait before them in the line of the worker, or have "
            "ended and are kept. Waiting at the router: the same through a client and a router, a process of its own, "
            "at which the others wait. Each figure is the mean over all that were fed."
        ),
        unit=MICROSECONDS,
        reference="",
        targets={},
        packages=PACKAGES,
        run=run_backlog,
    ),
    Table(
        name="nats-messages",
        title="Stored messages of one assignment on NATS",
        about=(
            "By how much the last sequences of all streams of the store grow with one assignment, through a client, a "
            f"router and a worker: one after the other, and {AT_ONCE} at once. What an idle system stores is taken off."
        ),
        unit=STORED,
        reference=LOADED,
        targets={ALONE: (AtMost(8, "messages"),), LOADED: (AtMost(5, "messages"),)},
        packages=PACKAGES,
        run=run_messages,
    ),
)
