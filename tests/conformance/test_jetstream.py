"""The JetStream engine keeps every contract, against a real server. Every story has a store of its own name there."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.listeners import Listeners
from reefknot.testing import conformance
from reefknot.testing.conformance import Harness, TransportContract, TransportHarness
from reefknot.testing.conformance.harness import event, event_types
from reefknot.testing.conformance.transport import Ends


@pytest.fixture
def harness(nats_server: NatsServer) -> Harness:
    name = _name()  # a story that opens its store again finds what it wrote

    @asynccontextmanager
    async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[JetStreamStore]:
        store = await JetStreamStore.open(nats_server.url, clock, name=name, has_server_time=False, **options)
        try:
            yield store
        finally:
            await store.close()

    return Harness(opened)


def _name() -> str:
    """A name that no other story has, in any run over the same server."""
    return f"story-{uuid4().hex[:16]}"


class TestJetStreamIdempotency(conformance.IdempotencyContract): ...


class TestJetStreamAuditLog(conformance.AuditLogContract): ...


class TestJetStreamWorkQueue(conformance.WorkQueueContract): ...


class TestJetStreamQuarantine(conformance.QuarantineContract): ...


class TestJetStreamControl(conformance.ControlContract): ...


class TestJetStreamValues(conformance.SharedValueContract): ...


def _two_ends(server: NatsServer, number: int) -> TransportHarness:
    name = _name()

    @asynccontextmanager
    async def opened(clock: VirtualClock) -> AsyncIterator[Ends]:
        stores = [await JetStreamStore.open(server.url, clock, name=name, has_server_time=False) for _ in range(number)]
        near, far = stores[0].transport(), stores[-1].transport()
        try:
            yield near, far
        finally:
            await near.close()
            await far.close()
            for store in stores:
                await store.close()

    return TransportHarness(opened)


class TestJetStreamTransport(TransportContract):
    @pytest.fixture(params=[2, 1], ids=["two stores", "one store"])
    def transports(self, nats_server: NatsServer, request: pytest.FixtureRequest) -> TransportHarness:
        """Two stores over one name know no more of each other than two processes do."""
        return _two_ends(nats_server, request.param)


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
        TransportContract().test_a_sender_that_gets_ahead_waits_and_nothing_is_lost(_two_ends(nats_server, 2))


@pytest.mark.real_time
async def test_two_names_on_one_server_are_two_durable_stores(nats_server: NatsServer) -> None:
    """What one story writes, no other can see."""
    one, other = [await JetStreamStore.open(nats_server.url, VirtualClock(), name=_name()) for _ in range(2)]
    try:
        await one.audit.append([event("first")])
        assert await event_types(one) == ["first"]
        assert await event_types(other) == []
        assert one.durable
    finally:
        await one.close()
        await other.close()
