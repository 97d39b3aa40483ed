"""A folder, synced into the real document store."""

from pathlib import Path

import pytest

from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.documents import SqliteDocuments
from reefknot.runtime.clocks import SystemClock
from tests.unit.ingest.connectors.memory_sink import context, put, sync


@pytest.mark.real_time
async def test_a_folder_is_found_moved_and_forgotten_as_its_files_are(tmp_path: Path) -> None:
    root = tmp_path / "folder"
    for number in range(250):
        put(root, f"{number % 7}/{number}.txt", f"file {number} of the harbour")
    put(root, "odd\n\udcff.txt", "strange name")

    connector = LocalFiles(context(root))
    documents = await SqliteDocuments(tmp_path / "documents.db", SystemClock()).start()
    try:
        assert len((await sync(connector, documents)).documents) == 251
        before = await documents.search("file 93")
        assert [hit.location for hit in before] == ["2/93.txt"]
        assert [hit.location for hit in await documents.search("strange")] == ["odd\\x0a\\xff.txt"]

        (root / "2").rename(root / "9")
        (root / "3/3.txt").unlink()
        pages = await sync(connector, documents, limit=20)

        after = await documents.search("file 93")
        assert [(hit.id, hit.location) for hit in after] == [(before[0].id, "9/93.txt")]
        assert len(pages.deleted) == 1
        assert (await documents.counts())["s"].documents == 250
    finally:
        await documents.close()
