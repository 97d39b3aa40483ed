"""The tables of growth count the work of processes alone, and judge it by the smallest system."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import reefknot as rk
from bench.measure import FULL, QUICK, Effort
from bench.table import Result, Table, filled
from bench.tables import processes
from bench.tables.processes import Load, Meter, Sequences

TRIPS = [0.01, 0.02]
TABLES = {table.name: table for table in processes.TABLES}


def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the tables, which stands still otherwise."""
    now = [100.0]

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    async def sleep(seconds: float) -> None:
        pass_by(seconds)

    monkeypatch.setattr(processes, "perf_counter", lambda: now[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pass_by


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_the_processor_time_of_processes_is_that_of_all_of_them_and_one_that_waits_adds_nothing() -> None:
    child = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        waiting.stdout.readline()
        groups = ([waiting.pid], [waiting.pid, os.getpid()])
        before = [processes.cpu_of(group) for group in groups]
        ends = time.process_time() + 0.3
        while time.process_time() < ends:
            pass
        idle, both = (processes.cpu_of(group) - one for group, one in zip(groups, before, strict=True))
        waiting.kill()

    assert idle <= 0.05
    assert both >= 0.25


def test_a_meter_takes_off_what_the_same_processes_use_while_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle 0.1 s in each second; then 2 s of work in 5 s, which shows as 2.5 s. The server's group is never idle."""
    used = {1: 10.0, 2: 50.0}
    pass_by = clock(monkeypatch)

    async def idle(seconds: float) -> None:
        pass_by(seconds)
        used[1] += 0.1 * seconds

    monkeypatch.setattr(processes, "cpu_of", lambda group: sum(used[one] for one in group))
    monkeypatch.setattr(asyncio, "sleep", idle)
    meter = Meter([1], [2], [])
    asyncio.run(meter.learn_idle(4.0))
    pass_by(5.0)
    used[1] += 2.5
    used[2] += 1.0

    assert meter.idle == pytest.approx([0.1, 0.0, 0.0])
    assert meter.used() == pytest.approx([2.0, 1.0, 0.0])


def test_stored_messages_are_those_of_the_stores_streams_without_those_of_an_idle_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message a second while idle; 40 more in 10 s, 30 of them for work. A foreign stream does not count."""
    pass_by, last = clock(monkeypatch), {"reefknot_state": 7, "other_state": 3}

    async def streams() -> list[Any]:
        return [
            SimpleNamespace(config=SimpleNamespace(name=name), state=SimpleNamespace(last_seq=number))
            for name, number in last.items()
        ]

    async def idle(seconds: float) -> None:
        pass_by(seconds)
        last["reefknot_state"] += int(seconds)

    monkeypatch.setattr(asyncio, "sleep", idle)
    sequences = Sequences(SimpleNamespace(jetstream=lambda: SimpleNamespace(streams_info=streams)))

    async def work() -> dict[str, float]:
        await sequences.learn_idle(8.0)
        await sequences.start()
        pass_by(10.0)
        last.update(reefknot_state=last["reefknot_state"] + 40, reefknot_audit=5, other_state=99)
        return await sequences.stored()

    assert asyncio.run(work()) == {"reefknot_state": pytest.approx(30.0), "reefknot_audit": 5}


# ---- what is judged --------------------------------------------------------------------------------------------------


def judged(monkeypatch: pytest.MonkeyPatch, table: Table, load: Callable[[int], Load], effort: Effort) -> Result:
    """The table when a system of so many processes has this load."""

    async def load_on(place: Any, workers: int, routers: int, number: int) -> Load:
        return load(workers + routers)

    monkeypatch.setattr(processes, "load_on", load_on)
    monkeypatch.setattr(processes, "servers", lambda: nullcontext(([], Path("folder"))))
    monkeypatch.setattr(processes, "url_of", lambda running: "nats://127.0.0.1")
    return filled(table, table.run(effort))


@pytest.mark.parametrize("name", ["processes", "nats-processes"])
@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_a_cost_that_grows_with_the_processes_is_missed_and_a_flat_one_is_met(
    name: str, effort: Effort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missed(load: Callable[[int], Load]) -> list[str]:
        return [line.split(": ")[1] for line in judged(monkeypatch, TABLES[name], load, effort).missed]

    slower = ["8 + 2, time"] if name == "processes" else []

    assert missed(lambda number: Load(1e-3, 1e-3, number * 1e-3, 0.0, TRIPS)) == []
    assert missed(lambda number: Load(1e-3, number * 1e-3, 0.0, 0.0, TRIPS)) == ["16 + 4, CPU"]
    assert missed(lambda number: Load(number * 1e-3, 1e-3, 0.0, 0.0, TRIPS)) == slower


def test_of_three_measurements_the_middle_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([9.0] * 4 + [1.0] * 4 + [2.0] * 4)
    table = TABLES["nats-processes"]

    result = judged(monkeypatch, table, lambda number: Load(next(rounds), 1.0, 0.0, 0.0, TRIPS), FULL)

    assert [row.seconds for row in result.rows] == [2.0, 1.0] * 4


# ---- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SETTLE_S": 0.1, "IDLE_S": 0.1, "WARM": 1, "AT_ONCE": 8, "MESSAGES": 20, "SLOTS": 2}.items():
        monkeypatch.setattr(processes, name, value)


@pytest.mark.usefixtures("small")
def test_a_router_and_two_workers_in_processes_of_their_own_are_measured() -> None:
    with processes.on_sqlite() as place:
        load = asyncio.run(processes.load_on(place, 2, 1, 20))

    assert len(load.round_trips) == 20
    assert 0 < load.seconds < sum(load.round_trips)
    assert load.server_cpu == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [processes.AT_WORKER, processes.AT_ROUTER])
def test_a_worker_is_measured_while_others_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty in the line of the worker, behind two that have its slots, or sixty for a router that is not there yet."""
    waiting: list[int] = []
    line_up = processes.line_up

    async def open_work(url: str) -> None:
        async with rk.connect(url) as client:
            waiting.append(len((await client.store.work.search(limit=100)).items))

    with processes.on_nats() as place:

        async def lined_up(client: Any, number: int) -> None:
            await line_up(client, number)
            await open_work(place[0])

        monkeypatch.setattr(processes, "line_up", lined_up)
        waited = asyncio.run(processes.backlog_on(place, kind, 60, 1))

    assert waiting == ([62] if kind == processes.AT_WORKER else [])
    assert waited.seconds > 0
    assert waited.server_cpu >= 0  # a few assignments may take less than a tick of the clock
