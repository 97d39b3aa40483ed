"""The SQLite engine keeps every contract, with its threads and without."""

from pathlib import Path
from typing import Any

import pytest

from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing import conformance
from tests.conformance.ends import harness_of, two_ends


@pytest.fixture(params=[False, True], ids=["threads", "inline"])
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> conformance.Harness:
    async def opened(clock: VirtualClock, **options: Any) -> SqliteStore:
        return await SqliteStore(tmp_path / "state.db", clock, inline=request.param, **options).start()

    return harness_of(opened)


TestSqliteIdempotency = conformance.IdempotencyContract
TestSqliteAuditLog = conformance.AuditLogContract
TestSqliteWorkQueue = conformance.WorkQueueContract
TestSqliteNotes = conformance.SharedNoteContract
TestSqliteQuarantine = conformance.QuarantineContract
TestSqliteRecords = conformance.RecordsContract
TestSqliteControl = conformance.ControlContract
TestSqliteValues = conformance.SharedValueContract


class TestSqliteTransport(conformance.TransportContract):
    @pytest.fixture(params=[2, 1], ids=["two stores", "one store"])
    def transports(self, tmp_path: Path, request: pytest.FixtureRequest) -> conformance.TransportHarness:
        return two_ends(lambda clock: SqliteStore(tmp_path / "state.db", clock).start(), request.param)


def test_it_says_that_it_is_durable(tmp_path: Path) -> None:
    assert SqliteStore(tmp_path / "state.db", VirtualClock()).durable is True
