"""
Keeps pages of one source in competition with another process, and prints how often it was overtaken.

    python -m tests.faults.keeping_at_once FILE NAME PAGES
"""

import asyncio
import json
import sys
from pathlib import Path

from reefknot.errors import StalePositionError
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import Document, Page
from reefknot.runtime.clocks import SystemClock


async def compete(file: Path, name: str, pages: int) -> dict[str, list[int]]:
    """Every page replaces all documents: a mixture of two pages would show."""
    documents = await SqliteDocuments(file, SystemClock(), patience=60).start()
    await _meet(documents, name)
    kept: list[int] = []
    refused: list[int] = []
    for number in range(pages):
        position = await documents.position("s")
        version = f"{name} {number}"
        page = Page(version, tuple(Document(f"{one}", f"{one}.md", version, text=version) for one in range(10)))
        try:
            kept.append((await documents.keep("s", page, after=position)).sequence)
        except StalePositionError:
            refused.append(position.sequence)
        items = await documents.known("s").after("", 100)
        assert len({item.version for item in items}) == 1, items
    await documents.close()
    return {"kept": kept, "refused": refused}


async def _meet(documents: SqliteDocuments, name: str) -> None:
    """Begin when the other one is there."""
    await documents.put("ready", [Document(name, name, "")])
    async with asyncio.timeout(60):
        while True:
            if (await documents.counts())["ready"].documents == 2:
                return
            await asyncio.sleep(0.002)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(compete(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))))
