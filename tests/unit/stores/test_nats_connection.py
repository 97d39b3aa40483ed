"""A request over NATS that is cancelled, with a client that waits for answers as nats-py does."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import pytest
from nats.aio.client import Client

from reefknot.stores.jetstream.connection import Connection, options_from_url


class WaitingClient:
    """A client that has one answer, which a test gives."""

    is_connected = True

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def request(self, *given: Any, **named: Any) -> str:
        return await asyncio.wait_for(self.answer, 30)


async def _cancelled_with_the_answer(asking: asyncio.Task[Any], client: WaitingClient) -> bool:
    """Whether a task that is cancelled in the moment of its answer ends as cancelled."""
    for _ in range(5):
        await asyncio.sleep(0)
    client.answer.set_result("an answer")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return asking.cancelled()


@pytest.mark.real_time
async def test_a_request_that_is_cancelled_while_its_answer_arrives_is_cancelled() -> None:
    """Else a task that is told to end goes on, and whoever waits for its end waits for ever."""
    client = WaitingClient()
    connection = Connection(options_from_url("nats://127.0.0.1:4222"))
    connection._client = cast("Client", client)
    asking = asyncio.create_task(connection.request("a"))
    assert await _cancelled_with_the_answer(asking, client)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for keeps cancellations since Python 3.12")
@pytest.mark.real_time
async def test_control_the_clients_own_request_loses_the_cancellation() -> None:
    client = WaitingClient()
    assert not await _cancelled_with_the_answer(asyncio.create_task(client.request()), client)
