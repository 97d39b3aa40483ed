"""The audit log on JetStream keeps the contract, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reefknot.app.nats_servers import NatsServer
from reefknot.engines.clocks import VirtualClock
from reefknot.engines.jetstream.store import JetStreamStore
from reefknot.runtime.seeds import new_id
from reefknot.testing.conformance import AuditLogContract, Harness


@pytest.fixture
def harness(nats_server: NatsServer) -> Harness:
    @asynccontextmanager
    async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[JetStreamStore]:
        store = await JetStreamStore.open(nats_server.url, clock, name=new_id(), has_server_time=False, **options)
        try:
            yield store
        finally:
            await store.close()

    return Harness(opened)


class TestJetStreamAuditLog(AuditLogContract): ...
