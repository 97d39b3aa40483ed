"""
Every caller of `result()` on NATS has the result within two seconds of the job's end, or of the recovery of what broke:
the server, its own connection, the router, a worker, or the messages about ends.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import NamedTuple

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.stores.jetstream import ended_work
from tests.faults.nats_system import Calm, Evidence, Parts, judge, kill_and_restart, waited_too_long
from tests.faults.points import ALL, either
from tests.faults.proxy import Proxy, proxied
from tests.faults.test_nats_parts import under_load, until

pytestmark = pytest.mark.slow

AWAY_S = 3.0
WITHIN_S = 2.0


class Scene(NamedTuple):
    """What can break."""

    parts: Parts
    server: NatsServer
    proxy: Proxy
    """Before the server, for the clients alone."""

    async def kill_server(self) -> None:
        await kill_and_restart(self.server, away_s=AWAY_S / 3)

    async def freeze_server(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)
        await asyncio.sleep(AWAY_S)
        os.kill(self.server.pid, signal.SIGCONT)

    async def cut(self) -> None:
        self.proxy.cut()

    async def silence(self) -> None:
        """Nothing passes, and then the connection is found to be gone."""
        self.proxy.hold()
        await asyncio.sleep(AWAY_S)
        self.proxy.reset()
        self.proxy.release()

    async def kill_router(self) -> None:
        self.parts.kill("router-1")
        await asyncio.sleep(AWAY_S / 3)
        await self.parts.start("router-1")

    async def freeze_router(self) -> None:
        self.parts.send("router-1", signal.SIGSTOP)
        await asyncio.sleep(AWAY_S)
        self.parts.send("router-1", signal.SIGCONT)

    async def freeze_worker(self) -> None:
        self.parts.send("worker-1", signal.SIGSTOP)
        await asyncio.sleep(AWAY_S)
        self.parts.send("worker-1", signal.SIGCONT)

    async def nothing(self) -> None:
        """What breaks is in the parts."""


FAULTS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "server killed": Scene.kill_server,
    "server frozen": Scene.freeze_server,
    "connection cut": Scene.cut,
    "connection silent": Scene.silence,
    "router killed": Scene.kill_router,
    "router frozen": Scene.freeze_router,
    "worker frozen": Scene.freeze_worker,
}


async def harmed(
    folder: Path,
    server: NatsServer,
    fault: Callable[[Scene], Awaitable[None]],
    times: int,
    *,
    flaw: str = "none",
    patience: float = 60.0,
) -> tuple[Evidence, list[tuple[float, float]]]:
    """What a load leaves, and the times in which nothing was broken."""
    calm = Calm()
    assert server.port is not None
    async with proxied(server.port) as proxy:
        port = proxy.port if fault in (Scene.cut, Scene.silence) else 0
        parts, how = ("router-1", "worker-1", "worker-2"), {"port": port, "clients": 2}
        async with under_load(folder, server, *parts, flaw=flaw, patience=patience, **how) as (found, load):
            scene = Scene(found, server, proxy)
            for _ in range(times):
                await until(found, found.effects().total() + 40)
                with calm.broken():
                    await fault(scene)
            await until(found, found.effects().total() + 40)
    return load.found, calm.ends()


@pytest.mark.parametrize("fault", FAULTS if ALL else ["server killed", "connection cut", "router frozen"])
def test_each_caller_has_its_result_within_two_seconds_of_the_end_or_of_the_recovery(
    tmp_path: Path, server: NatsServer, fault: str
) -> None:
    found, calm = asyncio.run(harmed(tmp_path, server, FAULTS[fault], either(1, 5)))
    assert judge(found) == []
    assert waited_too_long(found, calm, within=WITHIN_S) == []


def test_each_caller_has_its_result_within_two_seconds_though_no_end_is_announced(
    tmp_path: Path, server: NatsServer
) -> None:
    found, _ = asyncio.run(harmed(tmp_path, server, Scene.nothing, 1, flaw="ends are not announced"))
    assert judge(found) == []
    assert waited_too_long(found, within=WITHIN_S) == []


def test_control_without_the_look_each_second_callers_wait_for_ever(
    tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_work, "LOOK_S", inf)
    harming = harmed(tmp_path, server, Scene.nothing, 1, flaw="ends are not announced", patience=5.0)
    found, _ = asyncio.run(harming)
    assert waited_too_long(found, within=WITHIN_S)
