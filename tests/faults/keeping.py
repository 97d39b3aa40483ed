"""
Keeps pages of documents until it is killed at a storage call, and prints what is left.

    python -m tests.faults.keeping FOLDER < plans.jsonl > evidence.jsonl

A plan is one line: the number of the call (null: run to the end and count), whether a write is cut in half, and the
broken variant that is tried if any. Page N has the documents N-0 to N-4, a new version of `head`, and deletes what page
N - 3 had: so what is there tells exactly which pages were kept.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import Document, Page, Position
from reefknot.runtime.clocks import SystemClock
from tests.faults.dying import in_a_process_of_its_own
from tests.faults.vfs import Counter, FaultyDisk, Fuse, Hook

PAGES = 30
OF_A_PAGE = 5
LASTS = 3
AUTOCHECKPOINT = 40


class InTwoSteps(SqliteDocuments):
    """The broken variant: the documents first, and the cursor in a transaction of its own."""

    async def keep(self, source: str, page: Page, *, after: Position) -> Position:
        await self.put(source, page.documents, deleted=page.deleted)
        return await super().keep(source, Page(page.cursor), after=after)


KINDS = {"": SqliteDocuments, "in two steps": InTwoSteps}


def nth(number: int) -> Page:
    """Page `number`, from 1 on."""
    names = [f"{number}-{other}" for other in range(OF_A_PAGE)]
    documents = [Document(name, f"{name}.md", "1", text=f"page{number} " * 40) for name in names]
    head = Document("head", "head.md", str(number), text=f"head of page{number}")
    gone = tuple(f"{number - LASTS}-{other}" for other in range(OF_A_PAGE)) if number > LASTS else ()
    return Page(f"cursor {number}", (*documents, head), gone)


def expected(pages: int) -> dict[str, str]:
    """The versions of all documents after so many pages, by id."""
    there = range(max(1, pages - LASTS + 1), pages + 1)
    found = {f"{number}-{other}": "1" for number in there for other in range(OF_A_PAGE)}
    return found | ({"head": str(pages)} if pages else {})


async def keep_pages(folder: Path, flaw: str, hook: Hook, say: Callable[[Any], None]) -> None:
    opener = FaultyDisk(hook, lazy=True).opener(autocheckpoint=AUTOCHECKPOINT)
    documents = await KINDS[flaw](folder / "documents.db", SystemClock(), opener=opener, inline=True).start()
    position = await documents.position("s")
    for number in range(1, PAGES + 1):
        position = await documents.keep("s", nth(number), after=position)
        say(["kept", position.sequence])
    await documents.close()
    if isinstance(hook, Counter):
        say(["calls", [call.kind for call in hook.calls]])


async def look(folder: Path) -> dict[str, Any]:
    """Everything that can be read after a death, in a process of its own."""
    documents = await SqliteDocuments(folder / "documents.db", SystemClock(), inline=True).start()
    position = await documents.position("s")
    items = await documents.known("s").after("", 1000)
    hits = [hit.id for number in range(PAGES + 1) for hit in await documents.search(f"page{number}", limit=100)]
    counts = (await documents.counts()).get("s")
    listed = [one.id for one in await documents.page("s", limit=1000)]
    await documents.close()
    return {
        "cursor": position.cursor,
        "sequence": position.sequence,
        "versions": [[item.id, item.version] for item in items],
        "hits": hits,
        "listed": listed,
        "counted": counts.documents if counts else 0,
    }


def one(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    hook = Counter() if plan["at"] is None else Fuse(plan["at"], torn=plan["torn"])
    child, heard = in_a_process_of_its_own(lambda say: asyncio.run(keep_pages(folder, plan["flaw"], hook, say)))
    said = heard()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    child, seen = in_a_process_of_its_own(lambda say: say(asyncio.run(look(folder))))
    evidence = seen()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"plan": plan, "ended": ended, "said": said, "second": code, "evidence": evidence[-1] if evidence else None}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(one(Path(sys.argv[1]) / "life", json.loads(line))), flush=True)
