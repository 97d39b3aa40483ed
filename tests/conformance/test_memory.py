"""The memory engine keeps every contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reefknot.engines.memory import MemoryStore
from reefknot.engines.virtual import VirtualClock
from reefknot.testing.conformance import (
    AuditLogContract,
    ControlContract,
    Harness,
    IdempotencyContract,
    QuarantineContract,
    WorkQueueContract,
)


@asynccontextmanager
async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[MemoryStore]:
    store = MemoryStore(clock, **options)
    yield store
    await store.close()


@pytest.fixture
def harness() -> Harness:
    return Harness(opened)


class TestMemoryIdempotency(IdempotencyContract): ...


class TestMemoryAuditLog(AuditLogContract): ...


class TestMemoryWorkQueue(WorkQueueContract): ...


class TestMemoryQuarantine(QuarantineContract): ...


class TestMemoryControl(ControlContract): ...


def test_it_says_that_it_is_not_durable() -> None:
    assert MemoryStore(VirtualClock()).durable is False
