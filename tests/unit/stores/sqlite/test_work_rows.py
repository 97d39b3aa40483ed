"""A search of work reads a bounded number of rows, says where it goes on, and loses nothing at its bounds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from reefknot.queue.model.work import WorkFailed, WorkItem, WorkState
from reefknot.queue.port.work_queue import Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import work_rows as rows
from tests.unit.stores.sqlite.stores_on_a_file import opened

pytestmark = pytest.mark.real_time

FAILURE = '{"code": "HTTP_ERROR", "message": "it answered 503"}'
ITEMS = 60


async def filled(store: Store, seed: int) -> None:
    """Items of several kinds, tenants and states, in an order that the seed gives."""
    random = Random(seed)
    for number in range(ITEMS):
        tenant = random.choice([None, "acme", "rare" if number < 5 else "acme"])
        name = f"{tenant}|{number}" if tenant else str(number)
        item = WorkItem(name, f"t{random.randrange(3)}", tenant_id=tenant, source=random.choice(["", "notes"]))
        await store.work.enqueue([item])
        if random.random() < 0.5:
            (held,) = await store.work.claim(1, WorkClaim(owner="w", only=[name]))
            if random.random() < 0.8:
                settled = WorkFailed(FAILURE if random.random() < 0.3 else None, None, "attempts_spent")
                assert await store.work.settle([Settlement(name, "w", held.fence, settled)]) == [True]


def filters() -> list[WorkFilter]:
    states = (None, WorkState.PENDING, WorkState.FAILED)
    kinds, tenants = (None, "t1"), (None, "rare", "nobody")
    return [
        WorkFilter(state=state, kind=kind, tenant_id=tenant, error=error, gone=gone)
        for state in states
        for kind in kinds
        for tenant in tenants
        for error in (None, "503")
        for gone in (None, ("w",))
    ]


async def pages(store: Store, which: WorkFilter, *, limit: int, oldest_first: bool) -> tuple[list[str], int]:
    """The ids of all pages, and the number of pages that were cut at the bound."""
    found, cut, after = list[str](), 0, ""
    while True:
        page = await store.work.search(which, after=after, limit=limit, oldest_first=oldest_first)
        found += [item.id for item in page.items]
        cut += bool(page.after) and len(page.items) < limit
        after = page.after
        if not after:
            return found, cut


@asynccontextmanager
async def memory_and_file(folder: Path) -> AsyncIterator[tuple[Store, Store]]:
    """A store in memory and one in a file, of the same content."""
    clock = VirtualClock()
    async with opened(folder / "s.db", clock) as file:
        memory = MemoryStore(clock)
        for store in (memory, file):
            await filled(store, seed=7)
        yield memory, file


@pytest.mark.parametrize("sizes", [(3,), (2, 7), (500, 4500)])
async def test_pages_that_end_at_the_bound_go_on_without_a_gap_or_a_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    for name in ("SCANNED", "LOOKED_UP"):
        monkeypatch.setattr(rows, name, sizes)
    monkeypatch.setattr(rows, "_LEAST_SHARE", 1)
    cuts = 0
    async with memory_and_file(tmp_path) as (memory, file):
        for which, oldest_first in product(filters(), (False, True)):
            options: Any = {"limit": 5, "oldest_first": oldest_first}
            wanted, _ = await pages(memory, which, **options)
            found, cut = await pages(file, which, **options)
            assert found == wanted, (which, oldest_first)
            cuts += cut
    assert bool(cuts) == (sum(sizes) < ITEMS), "a search that may read all rows is never cut, a smaller one is"


async def test_control_a_short_page_taken_for_the_last_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SCANNED", (3,))
    monkeypatch.setattr(rows, "_LEAST_SHARE", 1)
    which = WorkFilter(tenant_id="rare")
    async with memory_and_file(tmp_path) as (memory, file):
        wanted, _ = await pages(memory, which, limit=50, oldest_first=False)
        page = await file.work.search(which, limit=50)
        assert len(page.items) < len(wanted)
        assert page.after, "and so the page says that there may be more"
