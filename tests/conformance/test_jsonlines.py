"""A log of JSON lines keeps the contract of an audit log."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reefknot.audit.jsonlines import JsonLinesLog
from reefknot.runtime.clocks import VirtualClock
from reefknot.testing.conformance import AuditLogContract, Harness
from tests.conformance.ends import harness_of


@pytest.fixture(params=["inline", "thread"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    async def opened(clock: VirtualClock, **options: Any) -> Any:
        file, is_inline = tmp_path / "audit.jsonl", request.param == "inline"
        log = await JsonLinesLog.open(file, clock, fsync="never", largest=4096, inline=is_inline)
        return SimpleNamespace(audit=log, close=log.close)  # a log has no other parts, and its contract asks for none

    return harness_of(opened)


class TestJsonLinesLog(AuditLogContract): ...
