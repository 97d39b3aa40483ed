"""Parts that start while a cluster has no leader: they wait for the election, and none ends."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.faults.nats_system import servers_in_memory
from tests.faults.points import either
from tests.faults.test_nats_cluster import cluster

pytestmark = pytest.mark.slow

AWAY_S = 7.0
"""How long no leader can be elected: longer than a request is repeated anywhere else."""


@pytest.fixture
def servers() -> Iterator[list[NatsServer]]:
    with servers_in_memory(3) as found:
        yield found


async def restarts(folder: Path, servers: list[NatsServer], times: int) -> None:
    """Restart a part in the moment in which a leader is killed or moved, again and again."""
    dice = random.Random(7)
    async with cluster(folder, servers, 3) as three:
        for number in range(times):
            faults = (three.kill_leader, three.move_leader, three.kill_any)
            fault = asyncio.create_task(dice.choice(faults)())
            await asyncio.sleep(dice.uniform(0, 0.3))
            name = dice.choice(("router-1", "worker-1", "worker-2"))
            three.parts.kill(name)
            began = time.monotonic()
            await three.parts.start(name)  # an error when it ends
            print(f"{number}: {name} is ready after {time.monotonic() - began:.1f} s")
            await (await fault)()


def test_parts_that_restart_during_elections_are_ready(tmp_path: Path, servers: list[NatsServer]) -> None:
    asyncio.run(restarts(tmp_path, servers, either(2, 100)))


async def without_quorum(folder: Path, servers: list[NatsServer], flaw: str) -> None:
    """Start a part while one server of three is there."""
    async with cluster(folder, servers, 3) as three:
        for server in servers[1:]:
            server.terminate()
            await asyncio.to_thread(server.wait_until_ended, 10.0)
        three.parts.kill("worker-1")
        starting = asyncio.create_task(three.parts.start("worker-1", flaw=flaw))
        await asyncio.sleep(AWAY_S)
        for server in servers[1:]:
            server.start()
        await asyncio.gather(*(asyncio.to_thread(server.wait_until_ready) for server in servers[1:]))
        await starting


def test_a_part_that_starts_without_a_quorum_waits_for_it(tmp_path: Path, servers: list[NatsServer]) -> None:
    asyncio.run(without_quorum(tmp_path, servers, "none"))


def test_a_part_that_does_not_wait_ends(tmp_path: Path, servers: list[NatsServer]) -> None:
    """The broken variant."""
    with pytest.raises(AssertionError, match="reefknot: store nats://"):
        asyncio.run(without_quorum(tmp_path, servers, "nobody waits for an election"))
