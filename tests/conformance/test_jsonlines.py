"""A log of JSON lines keeps the contract of an audit log."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reefknot.audit.jsonlines import JsonLinesLog
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance import AuditLogContract, Harness


@pytest.fixture(params=["inline", "thread"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    @asynccontextmanager
    async def opened(clock: VirtualClock, **options: Any) -> AsyncIterator[Store]:
        log = await JsonLinesLog.open(
            tmp_path / "audit.jsonl", clock, fsync="never", largest=4096, inline=request.param == "inline"
        )
        yield cast(Store, SimpleNamespace(audit=log))  # a log has no other parts, and its contract asks for none
        await log.close()

    return Harness(opened)


class TestJsonLinesLog(AuditLogContract): ...
