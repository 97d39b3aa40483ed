"""The connection to NATS: a request that is cancelled ends, whatever the client library makes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reefknot.engines.jetstream.connection import Connection, UnansweredError, options_from_url
from reefknot.testing import run_virtual


class AnsweringLate:
    """A client whose answer comes in the moment of the cancellation, which `wait_for` of Python 3.11 then swallows."""

    is_connected = True

    def __init__(self, *, swallows: bool) -> None:
        self._swallows = swallows
        self.is_asked = asyncio.Event()

    async def request(self, subject: str, body: bytes, **_: Any) -> str:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not self._swallows:
                raise
        return "answer"


def connected(client: Any) -> Connection:
    connection = Connection(options_from_url("nats://127.0.0.1:4222"))
    connection._client = client
    return connection


@pytest.mark.parametrize("swallows", [True, False])
def test_a_cancelled_request_ends_its_caller(swallows: bool) -> None:
    async def main() -> None:
        client = AnsweringLate(swallows=swallows)
        asking = asyncio.ensure_future(connected(client).request("subject"))
        await client.is_asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run_virtual(main())


def test_a_request_whose_connection_is_lost_may_have_been_carried_out() -> None:
    async def main() -> None:
        client = AnsweringLate(swallows=False)
        connection = connected(client)
        asking = asyncio.ensure_future(connection.request("subject"))
        await client.is_asked.wait()
        await connection._lost()
        with pytest.raises(UnansweredError, match="the connection was lost before a request was answered"):
            await asking

    run_virtual(main())
