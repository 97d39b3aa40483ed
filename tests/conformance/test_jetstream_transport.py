"""The transport on NATS keeps the contract, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.listeners import Listeners
from reefknot.stores.jetstream.transport import JetStreamTransport
from reefknot.testing.conformance import TransportContract, TransportHarness
from reefknot.testing.conformance.transport import Ends

_contract = TransportContract()


def harness_on(server: NatsServer, connections: int) -> TransportHarness:
    @asynccontextmanager
    async def two_ends(clock: VirtualClock) -> AsyncIterator[Ends]:
        options = options_from_url(f"{server.url}/{new_id()}", patience=30.0)
        opened = [Connection(options) for _ in range(connections)]
        for connection in opened:
            await connection.open()
        near, far = JetStreamTransport(opened[0]), JetStreamTransport(opened[-1])
        try:
            yield near, far
        finally:
            for end in (near, far):
                await end.close()
            for connection in opened:
                await connection.close()

    return TransportHarness(two_ends)


class TestJetStreamTransport(TransportContract):
    @pytest.fixture(params=[2, 1], ids=["two connections", "one connection"])
    def transports(self, nats_server: NatsServer, request: pytest.FixtureRequest) -> TransportHarness:
        """Two connections know no more of each other than two processes do."""
        return harness_on(nats_server, request.param)


async def _never_waits(self: Listeners, subject: str) -> str:
    return ""


def _knows_nobody(self: Listeners, subject: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("method", "broken"), [("wait_for_room", _never_waits), ("has", _knows_nobody)], ids=["never waits", "knows nobody"]
)
def test_the_suite_catches_a_transport_without_back_pressure(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(Listeners, method, broken)
    with pytest.raises(AssertionError, match="it never waited"):
        _contract.test_a_sender_that_gets_ahead_waits_and_nothing_is_lost(harness_on(nats_server, 2))
