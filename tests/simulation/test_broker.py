"""The model of the broker behaves like the server: it keeps the engine's contracts, and does as a real one does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from reefknot.engines.clocks import VirtualClock
from reefknot.engines.jetstream import JetStreamStore
from reefknot.testing.conformance import (
    AuditLogContract,
    ControlContract,
    Harness,
    IdempotencyContract,
    QuarantineContract,
    TransportContract,
    TransportHarness,
    WorkQueueContract,
)
from reefknot.testing.conformance.transport import Ends
from tests.simulation.broker import Broker

URL = "nats://model:4222"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(Random(1), wall=time.time).clients() as model:
        yield model


@pytest.fixture
def harness(broker: Broker) -> Harness:
    @asynccontextmanager
    async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[JetStreamStore]:
        store = await JetStreamStore.open(URL, clock, has_server_time=False, **options)
        try:
            yield store
        finally:
            await store.close()

    return Harness(opened)


class TestModelIdempotency(IdempotencyContract): ...


class TestModelAuditLog(AuditLogContract): ...


class TestModelWorkQueue(WorkQueueContract): ...


class TestModelQuarantine(QuarantineContract): ...


class TestModelControl(ControlContract): ...


class TestModelTransport(TransportContract):
    @pytest.fixture
    def transports(self, broker: Broker) -> TransportHarness:
        @asynccontextmanager
        async def two_ends(clock: VirtualClock) -> AsyncIterator[Ends]:
            stores = [await JetStreamStore.open(URL, clock, has_server_time=False) for _ in range(2)]
            near, far = [one.transport() for one in stores]
            try:
                yield near, far
            finally:
                for end in (near, far):
                    await end.close()
                for store in stores:
                    await store.close()

        return TransportHarness(two_ends)
