"""
A network that is slow, cut, reset or silent between each part of a system and its NATS server, under load.

Router, worker and client each have a proxy of their own. An answer that is swallowed is the worst of it: the server has
stored what was sent, and the sender does not know.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import HOST, NatsServer
from tests.faults.nats_system import Evidence, Parts, judge, loaded
from tests.faults.points import ALL, either
from tests.faults.proxy import Proxy, Way, proxied

pytestmark = [
    pytest.mark.slow,
    # nats-py leaves the streams of connections that broke in their handshake to the garbage collector.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]

PLACES = ("router-1", "worker-1", "client")
FAULTS = ("cut", "reset", "silent", "slow", "swallowed")
SILENT_S = float(either(1, 6))
"""In full longer than a client takes to notice."""
SLOW_S = 0.15
REFUSED = "its result is dropped"


@asynccontextmanager
async def behind_proxies(folder: Path, server: NatsServer, flaw: str) -> AsyncIterator[tuple[Parts, dict[str, Proxy]]]:
    """A router and a worker behind a proxy each; one more for the client."""
    assert server.port is not None
    name = f"s{uuid4().hex[:8]}"
    parts = Parts(folder, f"{server.url}/{name}")
    async with AsyncExitStack() as stack:
        proxies = {place: await stack.enter_async_context(proxied(server.port)) for place in PLACES}
        stack.callback(parts.stop)
        urls = {place: f"nats://{HOST}:{proxies[place].port}/{name}" for place in PLACES[:-1]}
        await asyncio.gather(*(parts.start(place, url=url, flaw=flaw) for place, url in urls.items()))
        yield parts, proxies


async def strike(proxy: Proxy, fault: str, pause: float) -> None:
    """Let one fault happen, and be over. A swallowed answer is held until its connection is cut."""
    match fault:
        case "cut":
            proxy.cut()
        case "reset":
            proxy.reset()
        case "silent":
            proxy.hold()
            await asyncio.sleep(SILENT_S)
            proxy.release()
        case "slow":
            proxy.delay(SLOW_S)
            await asyncio.sleep(SILENT_S)
            proxy.delay(0.0)
        case _:
            proxy.hold(Way.DOWN)
            await asyncio.sleep(pause)
            proxy.cut()
            proxy.release()


async def troubled(
    folder: Path, server: NatsServer, *faults: str, rounds: int, flaw: str = "none"
) -> tuple[Evidence, str]:
    """What is left, and the worker's log."""
    dice = random.Random(3)
    async with asyncio.timeout(either(200, 2000)), behind_proxies(folder, server, flaw) as (parts, proxies):
        url = f"nats://{HOST}:{proxies['client'].port}/{parts.url.rpartition('/')[2]}"
        async with loaded(parts, url=url) as load:
            for _ in range(rounds):
                for place in PLACES:
                    for fault in faults:
                        await asyncio.sleep(dice.uniform(0.1, 0.4))  # another step of the work each time
                        await strike(proxies[place], fault, dice.uniform(0.05, 0.3))
        assert all(proxy.connections > 1 for proxy in proxies.values())
        return load.found, parts.log("worker-1")


def test_a_network_that_fails_in_any_way_loses_nothing_that_was_accepted(tmp_path: Path, server: NatsServer) -> None:
    found, _ = asyncio.run(troubled(tmp_path, server, *FAULTS, rounds=either(1, 10)))
    assert judge(found) == []
    assert len(found.accepted) > 100


def test_a_change_whose_answer_is_lost_is_stored_once_and_its_sender_knows(tmp_path: Path, server: NatsServer) -> None:
    """Nobody dies: nothing runs twice, nothing counts as a crash, no report is taken for refused."""
    found, log = asyncio.run(troubled(tmp_path, server, "swallowed", rounds=either(1, 40)))
    assert judge(found, deaths=False) == []
    assert REFUSED not in log


if ALL:

    def test_control_who_looks_for_no_batch_takes_its_work_for_anothers(tmp_path: Path, server: NatsServer) -> None:
        _, log = asyncio.run(troubled(tmp_path, server, "swallowed", rounds=6, flaw="nobody looks for a batch"))
        assert REFUSED in log
