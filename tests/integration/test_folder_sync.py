"""Folders and vaults, synced into the real document store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from reefknot.ingest.connectors.local_files import LocalFiles
from reefknot.ingest.connectors.obsidian_vault import ObsidianVault
from reefknot.ingest.documents import SqliteDocuments
from reefknot.runtime.clocks import SystemClock
from tests.unit.ingest.connectors.memory_sink import context, put, sync


def with_store(tmp_path: Path, story: Callable[[SqliteDocuments], Awaitable[None]]) -> None:
    async def run() -> None:
        documents = await SqliteDocuments(tmp_path / "documents.db", SystemClock()).start()
        try:
            await story(documents)
        finally:
            await documents.close()

    asyncio.run(run())


def test_a_folder_is_found_moved_and_forgotten_as_its_files_are(tmp_path: Path) -> None:
    root = tmp_path / "folder"
    for number in range(250):
        put(root, f"{number % 7}/{number}.txt", f"file {number} of the harbour")
    put(root, "odd\n\udcff.txt", "strange name")

    async def story(documents: SqliteDocuments) -> None:
        connector = LocalFiles(context(root))
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

    with_store(tmp_path, story)


def test_a_vault_keeps_what_its_notes_say_and_lists_their_problems(tmp_path: Path) -> None:
    root = tmp_path / "vault"
    put(root, "Knots.md", "---\ntags: [ropes]\n---\nSee [[Bends|these]].")
    put(root, "Broken.md", "---\ntitle: a: b\n---\nStill found.")
    put(root, "image.png", b"\x89PNG\0")

    async def story(documents: SqliteDocuments) -> None:
        await sync(ObsidianVault(context(root)), documents)

        (hit,) = await documents.search("these")
        found = await documents.get("s", hit.id)
        assert found is not None
        assert found.metadata["tags"] == ["ropes"]
        assert found.metadata["links"] == [{"target": "Bends", "alias": "these"}]
        (problem,) = await documents.problems("s")
        assert problem.problem.startswith("front matter, line 2: ")
        assert [hit.location for hit in await documents.search("image")] == ["image.png"]

    with_store(tmp_path, story)
