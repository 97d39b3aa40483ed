"""The memory engine keeps every contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.testing import conformance
from reefknot.testing.conformance import Harness, TransportHarness
from reefknot.testing.conformance.transport import Ends


@asynccontextmanager
async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[MemoryStore]:
    store = MemoryStore(clock, **options)
    yield store
    await store.close()


@pytest.fixture
def harness() -> Harness:
    return Harness(opened)


class TestMemoryIdempotency(conformance.IdempotencyContract): ...


class TestMemoryAuditLog(conformance.AuditLogContract): ...


class TestMemoryWorkQueue(conformance.WorkQueueContract): ...


class TestMemoryQuarantine(conformance.QuarantineContract): ...


class TestMemoryControl(conformance.ControlContract): ...


class TestMemoryValues(conformance.ValueContract): ...


@asynccontextmanager
async def two_ends(clock: VirtualClock) -> AsyncIterator[Ends]:
    store = MemoryStore(clock)
    near, far = store.transport(), store.transport()
    yield near, far
    await near.close()
    await far.close()


class TestMemoryTransport(conformance.TransportContract):
    @pytest.fixture
    def transports(self) -> TransportHarness:
        return TransportHarness(two_ends)


def test_it_says_that_it_is_not_durable() -> None:
    assert MemoryStore(VirtualClock()).durable is False
