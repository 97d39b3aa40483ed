"""A log of JSON lines and the documents on SQLite, which are no whole stores, keep their contracts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reefknot.audit.jsonlines import JsonLinesLog
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import DocumentStore
from reefknot.runtime.clocks import VirtualClock
from reefknot.testing import conformance
from tests.conformance.ends import harness_of


@pytest.fixture(params=["inline", "thread"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> conformance.Harness:
    async def opened(clock: VirtualClock, **options: Any) -> Any:
        file, is_inline = tmp_path / "audit.jsonl", request.param == "inline"
        log = await JsonLinesLog.open(file, clock, fsync="never", largest=4096, inline=is_inline)
        return SimpleNamespace(audit=log, close=log.close)  # a log has no other parts, and its contract asks for none

    return harness_of(opened)


class TestJsonLinesLog(conformance.AuditLogContract): ...


class TestSqliteDocuments(conformance.DocumentsContract, conformance.DocumentChangesContract):
    @pytest.fixture(params=[False, True], ids=["thread", "inline"])
    def documents(self, tmp_path: Path, request: pytest.FixtureRequest) -> conformance.DocumentHarness:
        @asynccontextmanager
        async def opened(clock: VirtualClock) -> AsyncIterator[DocumentStore]:
            store = await SqliteDocuments(tmp_path / "documents.db", clock, inline=request.param).start()
            try:
                yield store
            finally:
                await store.close()

        return conformance.DocumentHarness(opened)
