"""The memory engine keeps every contract."""

from typing import Any

import pytest

from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.testing import conformance
from tests.conformance.ends import harness_of, two_ends


async def opened(clock: VirtualClock, **options: Any) -> MemoryStore:
    return MemoryStore(clock, **options)


@pytest.fixture
def harness() -> conformance.Harness:
    return harness_of(opened)


TestMemoryIdempotency = conformance.IdempotencyContract
TestMemoryAuditLog = conformance.AuditLogContract
TestMemoryWorkQueue = conformance.WorkQueueContract
TestMemoryNotes = conformance.NoteContract
TestMemoryQuarantine = conformance.QuarantineContract
TestMemoryRecords = conformance.RecordsContract
TestMemoryControl = conformance.ControlContract
TestMemoryValues = conformance.ValueContract


class TestMemoryTransport(conformance.TransportContract):
    @pytest.fixture
    def transports(self) -> conformance.TransportHarness:
        return two_ends(opened)


def test_it_says_that_it_is_not_durable() -> None:
    assert MemoryStore(VirtualClock()).durable is False
