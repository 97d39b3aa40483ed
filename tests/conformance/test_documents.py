"""The store of documents on SQLite keeps its contract, with its thread and without."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import DocumentStore
from reefknot.runtime.clocks import VirtualClock
from reefknot.testing.conformance import DocumentChangesContract, DocumentHarness, DocumentsContract


class TestSqliteDocuments(DocumentsContract, DocumentChangesContract):
    @pytest.fixture(params=[False, True], ids=["thread", "inline"])
    def documents(self, tmp_path: Path, request: pytest.FixtureRequest) -> DocumentHarness:
        @asynccontextmanager
        async def opened(clock: VirtualClock) -> AsyncIterator[DocumentStore]:
            store = await SqliteDocuments(tmp_path / "documents.db", clock, inline=request.param).start()
            try:
                yield store
            finally:
                await store.close()

        return DocumentHarness(opened)
