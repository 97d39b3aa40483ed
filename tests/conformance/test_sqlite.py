"""The SQLite engine keeps every contract, with its threads and without."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing import conformance
from reefknot.testing.conformance import Harness, TransportHarness
from reefknot.testing.conformance.transport import Ends


@pytest.fixture(params=[False, True], ids=["threads", "inline"])
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Harness:
    @asynccontextmanager
    async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[SqliteStore]:
        store = SqliteStore(tmp_path / "state.db", clock, inline=request.param, **options)
        await store.start()
        try:
            yield store
        finally:
            await store.close()

    return Harness(opened)


class TestSqliteIdempotency(conformance.IdempotencyContract): ...


class TestSqliteAuditLog(conformance.AuditLogContract): ...


class TestSqliteWorkQueue(conformance.WorkQueueContract): ...


class TestSqliteQuarantine(conformance.QuarantineContract): ...


class TestSqliteControl(conformance.ControlContract): ...


class TestSqliteValues(conformance.SharedValueContract): ...


class TestSqliteTransport(conformance.TransportContract):
    @pytest.fixture(params=[2, 1], ids=["two stores", "one store"])
    def transports(self, tmp_path: Path, request: pytest.FixtureRequest) -> TransportHarness:
        """Two stores over one file know no more of each other than two processes do."""

        @asynccontextmanager
        async def two_ends(clock: VirtualClock) -> AsyncIterator[Ends]:
            stores = [SqliteStore(tmp_path / "state.db", clock) for _ in range(request.param)]
            for store in stores:
                await store.start()
            near, far = stores[0].transport(), stores[-1].transport()
            try:
                yield near, far
            finally:
                for end in (near, far):
                    await end.close()
                for store in stores:
                    await store.close()

        return TransportHarness(two_ends)


def test_it_says_that_it_is_durable(tmp_path: Path) -> None:
    assert SqliteStore(tmp_path / "state.db", VirtualClock()).durable is True
