"""
What dies, freezes or is repeated around a store on NATS, under load from another process: every accepted assignment
has one result, and nothing that was accepted is lost.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.faults import nats_system
from tests.faults.nats_system import ANSWERED_S, LEASE_S, Evidence, Load, Parts, judge, loaded
from tests.faults.points import ALL, either

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


@asynccontextmanager
async def under_load(
    folder: Path,
    server: NatsServer,
    *names: str,
    flaw: str = "none",
    within: float = either(150, 1500),
    per_second: float = 30.0,
    patience: float = ANSWERED_S,
    clients: int = 1,
    port: int = 0,
) -> AsyncIterator[tuple[Parts, Load]]:
    """
    Parts that carry out a load, whose evidence is complete after the block; bounded, for stories that would hang.

    With a `port`, that of a proxy, the clients reach the server there.
    """
    parts = Parts(folder, f"{server.url}/s{uuid4().hex[:8]}")
    try:
        await asyncio.gather(*(parts.start(name, flaw=flaw) for name in names))
        how: dict[str, Any] = {"per_second": per_second, "patience": patience, "clients": clients}
        how["url"] = parts.url.replace(f":{server.port}/", f":{port}/") if port else parts.url
        async with asyncio.timeout(within), loaded(parts, **how) as load:
            yield parts, load
    finally:
        parts.stop()


async def until(parts: Parts, effects: int) -> None:
    """A bounded wait for so many steps to have begun."""
    async with asyncio.timeout(PATIENCE_S):
        while parts.effects().total() < effects:  # noqa: ASYNC110 - other processes are waited for
            await asyncio.sleep(0.02)


# ---- the server ------------------------------------------------------------------------------------------------------


async def server_killed(folder: Path, server: NatsServer, times: int, *, forgets: bool = False) -> Evidence:
    dice, patience = random.Random(1), 3.0 if forgets else ANSWERED_S
    names = ("router-1", "worker-1", "worker-2")
    async with under_load(folder, server, *names, patience=patience) as (parts, load):
        for _ in range(times):
            await until(parts, parts.effects().total() + dice.randrange(10, 60))
            await nats_system.kill_and_restart(server, away_s=dice.uniform(0, 0.5))
            if forgets:
                await nats_system.forget_open_work(parts.url)
    return load.found


def test_a_server_killed_under_load_loses_nothing_that_was_accepted(tmp_path: Path, server: NatsServer) -> None:
    """Also what waits for a retry, and what is due later."""
    found = asyncio.run(server_killed(tmp_path, server, either(1, 40)))
    assert judge(found) == []
    assert len(found.accepted) > 10, "a load that was hardly there shows nothing"


def test_control_a_server_that_forgets_loses_what_was_accepted(tmp_path: Path, server: NatsServer) -> None:
    found = asyncio.run(server_killed(tmp_path, server, 1, forgets=True))
    assert any(one.startswith("lost") for one in judge(found))


# ---- a worker, a router ----------------------------------------------------------------------------------------------


async def part_killed(folder: Path, server: NatsServer, times: int, kind: str) -> Evidence:
    dice = random.Random(2)
    async with under_load(folder, server, "router-1", "router-2", "worker-1", "worker-2") as (parts, load):
        for _ in range(times):
            await until(parts, parts.effects().total() + dice.randrange(10, 60))
            victim = f"{kind}-{dice.choice((1, 2))}"
            parts.kill(victim)
            await parts.start(victim)
    return load.found


@pytest.mark.parametrize("kind", ["worker", "router"] if ALL else ["worker"])
def test_killed_parts_lose_nothing_and_everything_has_one_result(tmp_path: Path, server: NatsServer, kind: str) -> None:
    assert judge(asyncio.run(part_killed(tmp_path, server, either(1, 40), kind))) == []


# ---- a frozen worker -------------------------------------------------------------------------------------------------


async def frozen(folder: Path, server: NatsServer, flaw: str = "none") -> tuple[Evidence, str]:
    """A worker frozen in the middle of a step until another has done its work, and its log when it is awake again."""
    async with under_load(folder, server, "router-1", "worker-1", flaw=flaw, per_second=0.0) as (parts, load):
        asking = [asyncio.create_task(load.ask(f"long{n}", seconds=1.0)) for n in range(3)]
        await until(parts, 3)
        parts.send("worker-1", signal.SIGSTOP)
        await parts.start("worker-2", flaw=flaw)
        await asyncio.gather(*asking)
        parts.send("worker-1", signal.SIGCONT)
        await asyncio.create_task(load.ask("after", seconds=LEASE_S / 2))  # the woken one reports meanwhile
    return load.found, parts.log("worker-1")


def test_the_late_results_of_a_frozen_worker_are_refused(tmp_path: Path, server: NatsServer) -> None:
    found, log = asyncio.run(frozen(tmp_path, server))
    assert judge(found) == []
    assert [found.effects[f"long{n}"] for n in range(3)] == [2, 2, 2]
    assert "its result is dropped" in log, log


# ---- repeated and swapped messages -----------------------------------------------------------------------------------


async def repeated(folder: Path, server: NatsServer, flaw: str) -> Evidence:
    names, within = ("router-1", "worker-1", "worker-2"), either(150, 600)
    async with under_load(folder, server, *names, flaw=flaw, per_second=20.0, within=within) as (parts, load):
        await until(parts, either(40, 1000))
    return load.found


def test_messages_that_come_twice_and_in_another_order_are_carried_out_once(tmp_path: Path, server: NatsServer) -> None:
    assert judge(asyncio.run(repeated(tmp_path, server, "repeated and swapped")), deaths=False) == []


if ALL:

    def test_control_without_fences_a_late_result_replaces_the_one_told(tmp_path: Path, server: NatsServer) -> None:
        found, _ = asyncio.run(frozen(tmp_path, server, "nobody looks at the fence"))
        assert any("more than one result" in one for one in judge(found))

    def test_control_whoever_takes_a_repeat_for_new_work_does_it_twice(tmp_path: Path, server: NatsServer) -> None:
        found = asyncio.run(repeated(tmp_path, server, "repeats are new"))
        assert any("done 2 times" in one for one in judge(found, deaths=False))
