"""The JetStream engine keeps every contract, against a real server. Every story has a store of its own name there."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from reefknot.console.nats_servers import NatsServer
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.listeners import Listeners
from reefknot.testing import conformance
from reefknot.testing.conformance.harness import event, event_types
from tests.conformance.ends import harness_of, two_ends


def named(server: NatsServer) -> Callable[..., Awaitable[JetStreamStore]]:
    """Stores of one name, which no other story has, in any run over the same server."""
    name = f"story-{uuid4().hex[:16]}"

    def opened(clock: VirtualClock, **options: Any) -> Awaitable[JetStreamStore]:
        return JetStreamStore.open(server.url, clock, name=name, has_server_time=False, **options)

    return opened


@pytest.fixture
def harness(nats_server: NatsServer) -> conformance.Harness:
    return harness_of(named(nats_server))


TestJetStreamIdempotency = conformance.IdempotencyContract
TestJetStreamAuditLog = conformance.AuditLogContract
TestJetStreamWorkQueue = conformance.WorkQueueContract
TestJetStreamNotes = conformance.SharedNoteContract
TestJetStreamQuarantine = conformance.QuarantineContract
TestJetStreamRecords = conformance.RecordsContract
TestJetStreamControl = conformance.ControlContract
TestJetStreamValues = conformance.SharedValueContract


class TestJetStreamTransport(conformance.TransportContract):
    @pytest.fixture(params=[2, 1], ids=["two stores", "one store"])
    def transports(self, nats_server: NatsServer, request: pytest.FixtureRequest) -> conformance.TransportHarness:
        return two_ends(named(nats_server), request.param)


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
    line = conformance.TransportContract().test_a_sender_that_gets_ahead_waits_and_nothing_is_lost
    with pytest.raises(AssertionError, match="it never waited"):
        line(two_ends(named(nats_server), 2))


@pytest.mark.real_time
async def test_two_names_on_one_server_are_two_durable_stores(nats_server: NatsServer) -> None:
    """What one story writes, no other can see."""
    one, other = [await named(nats_server)(VirtualClock()) for _ in range(2)]
    try:
        await one.audit.append([event("first")])
        assert await event_types(one) == ["first"]
        assert await event_types(other) == []
        assert one.durable
    finally:
        await one.close()
        await other.close()
