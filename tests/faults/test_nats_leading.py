"""The router that leads is killed or frozen under the load of three clients, and another one stands by."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.faults.nats_system import Evidence, judge, waited_too_long
from tests.faults.points import either
from tests.faults.test_nats_parts import under_load, until

pytestmark = pytest.mark.slow

TAKEN_OVER_S = 2.0
"""How long after the death of the router that leads the one that stands by routes, on the same host."""
FROZEN_S = 12.0
MARGIN_S = 1.0
"""What a round trip takes on a busy machine."""


async def killed(folder: Path, server: NatsServer, times: int) -> tuple[Evidence, list[float]]:
    """What a load leaves, and the moments at which the router that led was killed."""
    at: list[float] = []
    names, leads, stands_by = ("router-1", "worker-1", "worker-2"), "router-1", "router-2"
    async with under_load(folder, server, *names, clients=3) as (parts, load):
        await parts.start(stands_by)
        for _ in range(times):
            await until(parts, parts.effects().total() + 40)
            at.append(time.monotonic())
            parts.kill(leads)
            await asyncio.sleep(either(6, 12))
            await parts.start(leads)
            leads, stands_by = stands_by, leads
    return load.found, at


def slow_after(found: Evidence, at: float, seconds: float) -> list[str]:
    """The requests around a moment that took longer than this: those that were under way, or sent within a second."""
    around = [(sent, took) for sent, took in found.took if sent < at + 1.0 and sent + took > at]
    assert len(around) > 5
    return [f"sent {sent - at:.2f} s after it, {took:.2f} s" for sent, took in around if sent + took > at + seconds]


def test_the_router_that_stands_by_takes_over_within_two_seconds_of_a_death(tmp_path: Path, server: NatsServer) -> None:
    found, moments = asyncio.run(killed(tmp_path, server, either(1, 10)))
    assert judge(found) == []
    assert [slow_after(found, at, TAKEN_OVER_S + MARGIN_S) for at in moments] == [[]] * len(moments)
    assert waited_too_long(found) == []


async def frozen(folder: Path, server: NatsServer) -> Evidence:
    async with under_load(folder, server, "router-1", "worker-1", "worker-2", clients=3) as (parts, load):
        await parts.start("router-2")
        await until(parts, 40)
        parts.send("router-1", signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        parts.send("router-1", signal.SIGCONT)
        await asyncio.sleep(4.0)
    return load.found


def test_a_router_that_wakes_up_and_believes_that_it_leads_gives_no_second_result(
    tmp_path: Path, server: NatsServer
) -> None:
    found = asyncio.run(frozen(tmp_path, server))
    assert judge(found) == []
    assert waited_too_long(found) == []
