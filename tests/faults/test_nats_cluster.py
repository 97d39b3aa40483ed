"""Three NATS servers, each record on all of them: the leader killed, moved and cut off, under load."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.errors import StoreUnavailableError
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.streams import Names
from tests.faults.nats_system import CONFIG, Calm, Evidence, Parts, judge, loaded, servers_in_memory, waited_too_long
from tests.faults.outside_load import percentile
from tests.faults.points import ALL, either
from tests.faults.proxy import proxied

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
        self.dice = random.Random(3)

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

        return self.rest

    async def cut_leader_off(self) -> Heal:
        """Frozen, it hears and says nothing, to the others and to its clients, while its connections stay open."""
        leader = await self.leader()
        os.kill(leader.pid, signal.SIGSTOP)

        async def heal() -> None:
            os.kill(leader.pid, signal.SIGCONT)

        return heal

    async def kill_any(self) -> Heal:
        server = self.dice.choice(self.servers)
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(server.wait_until_ended, 10.0)
        await asyncio.sleep(self.dice.uniform(0, 0.5))
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        return self.rest

    async def freeze_any(self) -> Heal:
        server = self.dice.choice(self.servers)
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(self.dice.uniform(0.1, 1.5))
        os.kill(server.pid, signal.SIGCONT)
        return self.rest

    async def slow_down(self) -> Heal:
        """As a server with a slow disk: each of its steps takes a while."""
        server = self.dice.choice(self.servers)
        for _ in range(15):
            os.kill(server.pid, signal.SIGSTOP)
            await asyncio.sleep(0.06)
            os.kill(server.pid, signal.SIGCONT)
            await asyncio.sleep(0.02)
        return self.rest

    async def kill_part(self) -> Heal:
        name = self.dice.choice(("router-1", "worker-1", "worker-2"))
        self.parts.kill(name)
        await self.parts.start(name)
        return self.rest

    async def rest(self) -> None:
        """Nothing is broken any more."""


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


# ---- one fault after the other ---------------------------------------------------------------------------------------

NUMBER = either(12, 500)
STORM_S = float(either(60, 840))
"""No further fault after this, however slow the machine is."""
FREQUENT: dict[str, tuple[Callable[[Cluster], Awaitable[Heal]], int]] = {
    "moved": (Cluster.move_leader, 25),
    "killed": (Cluster.kill_any, 25),
    "frozen": (Cluster.freeze_any, 15),
    "slow": (Cluster.slow_down, 10),
    "part killed": (Cluster.kill_part, 10),
}


async def stormed(folder: Path, servers: list[NatsServer]) -> tuple[Evidence, list[tuple[float, float]], Counter[str]]:
    """What the load of two clients leaves, the times without a fault, and the faults."""
    calm, made = Calm(), Counter[str]()
    async with asyncio.timeout(STORM_S + 200), AsyncExitStack() as opened:
        found = await opened.enter_async_context(cluster(folder, servers, 3))
        await found.parts.start("router-2")
        ports = [one.port for one in servers if one.port is not None]
        proxies = [await opened.enter_async_context(proxied(port)) for port in ports]
        through = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        load = await opened.enter_async_context(
            loaded(found.parts, per_second=6.0, clients=2, url=f"nats://{through}/{NAME}")
        )
        ends, (names, weights) = (
            time.monotonic() + STORM_S,
            zip(*((k, w) for k, (_, w) in FREQUENT.items()), strict=True),
        )
        while made.total() < NUMBER and time.monotonic() < ends:
            (name,) = found.dice.choices([*names, "cut"], [*weights, 15])
            with calm.broken():
                if name == "cut":
                    for proxy in proxies:
                        proxy.cut()
                else:
                    heal = await FREQUENT[name][0](found)
                    await heal()
                    await found.leader()
            made[name] += 1
            await asyncio.sleep(5.0 if made.total() % 10 == 0 else found.dice.uniform(0, 0.8))
    return load.found, calm.ends(), made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_fault_after_the_other_loses_nothing_and_delays_no_result(
    tmp_path: Path, servers: list[NatsServer]
) -> None:
    # nats-py leaves a connection to the garbage collector that ends in its handshake, as at a proxy without a server.
    found, calm, made = asyncio.run(stormed(tmp_path, servers))
    print(f"{made.total()} faults: {dict(made)}")
    assert judge(found) == []
    assert waited_too_long(found, calm) == []
    assert made.total() >= 0.5 * NUMBER
