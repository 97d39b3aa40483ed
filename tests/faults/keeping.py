"""
Keeps pages of documents until it is killed at a storage call, and prints what is left.

A plan is the number of the call (null: run to the end and count), whether a write is cut in half, and the broken
variant that is tried if any; or a number of pages that two processes keep at once. Page N has the documents N-0 to N-4,
a new version of `head`, and deletes what page N - 3 had: so what is there tells exactly which pages were kept.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from reefknot.errors import StalePositionError
from reefknot.ingest.documents import SqliteDocuments
from reefknot.ingest.port import Document, Page, Position
from reefknot.runtime.clocks import SystemClock
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans, two_lives
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


async def keep_pages(file: Path, flaw: str, hook: Hook, say: Say) -> None:
    opener = FaultyDisk(hook, lazy=True).opener(autocheckpoint=AUTOCHECKPOINT)
    documents = await KINDS[flaw](file, SystemClock(), opener=opener, inline=True).start()
    position = await documents.position("s")
    for number in range(1, PAGES + 1):
        position = await documents.keep("s", nth(number), after=position)
        say(["kept", position.sequence])
    await documents.close()
    if isinstance(hook, Counter):
        say(["calls", [call.kind for call in hook.calls]])


async def look(file: Path) -> dict[str, Any]:
    """Everything that can be read after a death, in a process of its own."""
    documents = await SqliteDocuments(file, SystemClock(), inline=True).start()
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


async def compete(file: Path, pages: int, name: str, _: Say) -> dict[str, list[int]]:
    """Every page replaces all documents: a mixture of two pages would show. It tells how often it was overtaken."""
    documents = await SqliteDocuments(file, SystemClock(), patience=60).start()
    await documents.put("ready", [Document(name, name, "")])
    async with asyncio.timeout(60):
        while (await documents.counts())["ready"].documents < 2:  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.002)
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


def one(folder: Path, plan: Plan) -> Life:
    file = folder / "documents.db"
    if "at_once" in plan:
        both = [Fork(partial(compete, file, plan["at_once"], name)) for name in "ab"]
        return {"said": [word for fork in both for word in fork.heard()], "ended": [fork.ended() for fork in both]}
    hook = Counter() if plan["at"] is None else Fuse(plan["at"], torn=plan["torn"])
    return two_lives(plan, Fork(lambda say: keep_pages(file, plan["flaw"], hook, say)), lambda _: look(file))


if __name__ == "__main__":
    carry_out_plans(one)
