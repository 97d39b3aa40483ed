"""Three NATS servers, each record on all of them: the leader killed, moved and cut off, under load."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreUnavailableError
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.streams import Names
from tests.faults.nats_system import CONFIG, Evidence, Parts, judge, loaded, servers_in_memory
from tests.faults.outside_load import percentile
from tests.faults.points import ALL, either

pytestmark = pytest.mark.slow

Heal = Callable[[], Awaitable[None]]
"""Ends a fault."""
NAME = "three"
BACK_S = float(either(3, 10))
"""How long after a fault the round trips of new requests are as they were before."""
MEASURED_S = 3.0
FAST_S = 3.0
"""The most that 99 of 100 requests take when it is; without a leader, each waits until there is one again."""


@pytest.fixture
def servers() -> Iterator[list[NatsServer]]:
    with servers_in_memory(3) as found:
        yield found


class Cluster:
    """Three servers, the parts over them, and what can happen to the leader of the state stream."""

    def __init__(self, servers: list[NatsServer], parts: Parts) -> None:
        self.servers = servers
        self.parts = parts

    async def leader(self) -> NatsServer:
        async with asyncio.timeout(60):
            while True:
                with suppress(StoreUnavailableError):
                    found = msgspec.json.decode(await self._ask(f"STREAM.INFO.{Names(NAME).state}"))
                    for server in self.servers:
                        if server.name == found["cluster"].get("leader"):
                            return server
                await asyncio.sleep(0.1)

    async def _ask(self, api: str) -> bytes:
        connection = Connection(options_from_url(self.parts.url))
        await connection.open()
        try:
            return await connection.api(api)
        finally:
            await connection.close()

    async def kill_leader(self) -> Heal:
        leader = await self.leader()
        os.kill(leader.pid, signal.SIGKILL)
        await asyncio.to_thread(leader.wait_until_ended, 10.0)

        async def heal() -> None:
            leader.start()
            await asyncio.to_thread(leader.wait_until_ready)

        return heal

    async def move_leader(self) -> Heal:
        await self._ask(f"STREAM.LEADER.STEPDOWN.{Names(NAME).state}")

        async def heal() -> None:
            """Nothing is broken."""

        return heal

    async def cut_leader_off(self) -> Heal:
        """Frozen, it hears and says nothing, to the others and to its clients, while its connections stay open."""
        leader = await self.leader()
        os.kill(leader.pid, signal.SIGSTOP)

        async def heal() -> None:
            os.kill(leader.pid, signal.SIGCONT)

        return heal


FAULTS: dict[str, Callable[[Cluster], Awaitable[Heal]]] = {
    "killed": Cluster.kill_leader,
    "moved": Cluster.move_leader,
    "cut off": Cluster.cut_leader_off,
}


@asynccontextmanager
async def cluster(folder: Path, servers: list[NatsServer], replicas: int) -> AsyncIterator[Cluster]:
    url = "nats://" + ",".join(one.url.removeprefix("nats://") for one in servers)
    parts = Parts(folder, f"{url}/{NAME}")
    (folder / "reefknot.yaml").write_text(f"{CONFIG}nats: {{replicas: {replicas}}}\n")
    try:
        await parts.start("router-1")
        await asyncio.gather(parts.start("worker-1"), parts.start("worker-2"))
        yield Cluster(servers, parts)
    finally:
        parts.stop()


async def faulted(
    folder: Path, servers: list[NatsServer], fault: str, rounds: int, *, replicas: int = 3, back_s: float = BACK_S
) -> tuple[Evidence, list[list[float]]]:
    """What a load leaves, and by round what requests took that were sent from `back_s` after the fault on."""
    after: list[list[float]] = []
    async with asyncio.timeout(either(200, 2000)), cluster(folder, servers, replicas) as found:  # noqa: SIM117
        async with loaded(found.parts, per_second=10.0) as load:
            for _ in range(rounds):
                await asyncio.sleep(1.0)
                heal = await FAULTS[fault](found)
                begins = time.monotonic() + back_s
                await asyncio.sleep(back_s + MEASURED_S)
                after.append([took for sent, took in load.found.took if sent >= begins])
                await heal()
    usual = percentile([took for _, took in load.found.took], 0.5)
    slowest = [round(percentile(some, 0.99) * 1000) for some in after]
    print(f"{fault}: median {usual * 1000:.0f} ms, p99 {back_s:.0f} s after {slowest} ms")
    return load.found, after


@pytest.mark.parametrize("fault", FAULTS if ALL else ["moved"])
def test_a_cluster_loses_nothing_with_its_leader_and_is_back_within_ten_seconds(
    tmp_path: Path, servers: list[NatsServer], fault: str
) -> None:
    """It is back while the node is still away."""
    found, after = asyncio.run(faulted(tmp_path, servers, fault, either(1, 5)))
    assert judge(found) == []
    assert all(len(some) > 5 and percentile(some, 0.99) < FAST_S for some in after), after


if ALL:

    def test_control_one_replica_serves_nobody_without_its_leader(tmp_path: Path, servers: list[NatsServer]) -> None:
        found, after = asyncio.run(faulted(tmp_path, servers, "killed", 1, replicas=1, back_s=2.0))
        assert after == [[]]
        assert judge(found) == [], "they are kept on its disk, and served when it is back"
