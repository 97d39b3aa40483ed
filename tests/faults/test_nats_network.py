"""A proxy between a client and a NATS server cuts, resets, holds and delays what passes, each way by itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple
from uuid import uuid4

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from reefknot.console.nats_servers import HOST, NatsServer
from tests.faults.proxy import Proxy, Way, proxied
from tests.stories import InLoop

pytestmark = pytest.mark.real_time

PATIENCE_S = 30.0
SILENT_S = 0.5
"""How long one waits to see that no answer comes."""


class Scene(NamedTuple):
    """A stream of its own, a client that goes through the proxy to it, and one that does not."""

    proxy: Proxy
    through: JetStreamContext
    client: Client
    direct: JetStreamContext
    stream: str

    async def stored(self) -> int:
        return (await self.direct.stream_info(self.stream)).state.messages

    async def publish(self, timeout: float = PATIENCE_S) -> None:
        await self.through.publish(f"{self.stream}.x", b"7", timeout=timeout)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():  # noqa: ASYNC110 - another process is waited for
                await asyncio.sleep(0.02)


@asynccontextmanager
async def scene(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    assert server.port is not None
    async with asyncio.timeout(2 * PATIENCE_S), proxied(server.port) as proxy:
        client = await nats.connect(
            f"nats://{HOST}:{proxy.port}", reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=_ignore
        )
        near = await nats.connect(server.url)
        direct = near.jetstream(timeout=PATIENCE_S)
        await direct.add_stream(name=name, subjects=[f"{name}.>"])
        try:
            yield Scene(proxy, client.jetstream(timeout=PATIENCE_S), client, direct, name)
        finally:
            proxy.release()
            proxy.delay(0.0)
            await direct.delete_stream(name)
            await client.close()
            await near.close()


async def _ignore(_: Exception) -> None:
    """The client prints errors otherwise."""


@pytest.fixture
def found(nats_server: NatsServer) -> InLoop:
    return InLoop(lambda: scene(nats_server, f"s{uuid4().hex}"))


async def test_what_is_held_on_the_way_up_is_not_stored_until_it_is_released(found: Scene) -> None:
    found.proxy.hold(Way.UP)
    with pytest.raises(nats.errors.TimeoutError):
        await found.publish(timeout=SILENT_S)
    assert await found.stored() == 0

    found.proxy.release()
    await found.until(lambda: _has(found, 1))


async def test_what_is_held_on_the_way_down_is_stored_and_not_acknowledged(found: Scene) -> None:
    found.proxy.hold(Way.DOWN)
    with pytest.raises(nats.errors.TimeoutError):
        await found.publish(timeout=SILENT_S)
    assert await found.stored() == 1

    found.proxy.release(Way.DOWN)
    await found.publish()
    assert await found.stored() == 2


@pytest.mark.parametrize("ending", [Proxy.cut, Proxy.reset], ids=["cut", "reset"])
async def test_a_client_whose_connection_ends_comes_back(found: Scene, ending: Callable[[Proxy], None]) -> None:
    assert found.proxy.connections == 1
    ending(found.proxy)
    await found.until(lambda: _reconnected(found))
    await found.publish()
    assert await found.stored() == 1
    assert found.proxy.connections == 2


async def test_an_answer_that_was_held_when_the_connection_ends_is_lost(found: Scene) -> None:
    found.proxy.hold(Way.DOWN)
    publishing = asyncio.create_task(found.publish())
    await found.until(lambda: _has(found, 1))
    found.proxy.cut()
    found.proxy.release()
    await found.until(lambda: _reconnected(found))
    assert not publishing.done()
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)


@pytest.mark.parametrize("way", Way)
async def test_a_delay_makes_answers_late_and_loses_nothing(found: Scene, way: Way) -> None:
    found.proxy.delay(0.3, way)
    began = time.monotonic()
    await found.publish()
    assert time.monotonic() - began >= 0.3
    assert await found.stored() == 1


async def _has(found: Scene, count: int) -> bool:
    return await found.stored() == count


async def _reconnected(found: Scene) -> bool:
    return found.client.stats["reconnects"] == 1 and found.client.is_connected
