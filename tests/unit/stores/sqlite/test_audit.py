"""The audit log as rows: verified in short reads, and rows that go after the anchor has moved."""

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.audit.model.chain import Head, Mismatch
from reefknot.audit.port import AuditQuery
from reefknot.errors import StoreUnavailableError
from reefknot.stores.sqlite import SqliteStore, audit
from reefknot.testing.conformance.harness import event
from tests.unit.stores.sqlite.stores_on_a_file import by_hand, opened

pytestmark = pytest.mark.real_time
ROWS = "SELECT count(*) FROM audit"


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINKS_PER_READ", "ROWS_PER_READ", "ROWS_PER_DELETE"):
        monkeypatch.setattr(audit, name, 3)


async def filled(store: SqliteStore, number: int, *, at: int = 0) -> Head:
    return await store.audit.append([event("a" if index % 10 else "tenth", at=at + index) for index in range(number)])


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 10])
async def test_a_chain_is_whole_however_its_pages_fall(store: SqliteStore, number: int) -> None:
    head = await filled(store, number)
    told: list[int] = []
    assert await store.audit.verify(progress=told.append) == []
    assert (await store.audit.verify(head), sum(told)) == ([], number)


async def test_an_edit_beyond_the_first_page_is_found_once(store: SqliteStore, path: Path) -> None:
    head = await filled(store, 10)
    by_hand(path, "UPDATE audit SET body = '{}' WHERE sequence = 8")
    edited = Mismatch(8, "the hash does not fit the body and its place")
    assert await store.audit.verify() == [edited]
    of_head = Mismatch(9, "the hash is not the one of the head")
    assert await store.audit.verify(Head(head.chain, 9, "f" * 64)) == [edited, of_head]


async def test_an_event_behind_the_head_is_found(store: SqliteStore, path: Path) -> None:
    await filled(store, 4)
    by_hand(path, "INSERT INTO audit SELECT 9, hash, at, event_type, NULL, NULL, NULL, body FROM audit LIMIT 1")
    assert await store.audit.verify() == [Mismatch(9, "it is behind the head of its chain")]


async def test_a_walk_may_take_longer_than_one_read_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a read is for one page; with the whole log as one page, the same log cannot be proven."""

    def slowly(connection: apsw.Connection, *, after: int, end: int) -> Any:
        import time

        taken = real(connection, after=after, end=end)
        time.sleep(0.02 * len(taken[0]))  # a page costs what it holds; in the reader's own thread
        return taken

    real = audit._links
    monkeypatch.setattr(audit, "_links", slowly)
    async with opened(tmp_path / "state.db", patience=0.5) as store:
        await filled(store, 60)
        assert await store.audit.verify() == []
        monkeypatch.setattr(audit, "LINKS_PER_READ", 1000)
        with pytest.raises(StoreUnavailableError, match="has not finished"):
            await store.audit.verify()


def can_be_folded_back(path: Path) -> bool:
    """Can the write-ahead log be begun anew, or does a reader still need the old one?"""
    is_busy, _, _ = by_hand(path, "PRAGMA wal_checkpoint(RESTART)")
    return bool(is_busy == 0)


@pytest.mark.parametrize("whole", [False, True], ids=["in pages", "control: in one snapshot"])
async def test_a_walk_lets_the_write_ahead_log_be_folded_back(store: SqliteStore, path: Path, whole: bool) -> None:
    await filled(store, 30)
    seen: list[bool] = []
    if whole:
        await store._context.read(lambda connection: connection.execute("BEGIN; SELECT 1 FROM audit").fetchall())
        seen.append(can_be_folded_back(path))
        await store._context.read(lambda connection: connection.execute("COMMIT").fetchall())
    else:
        assert await store.audit.verify(progress=lambda _: seen.append(can_be_folded_back(path))) == []
        assert len(seen) == 10
    assert set(seen) == {not whole}


async def test_retention_during_a_walk_is_no_mismatch(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled(store, 40)
    calls, real = 0, store._context.read

    async def read(function: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # between two pages
            monkeypatch.undo()
            assert await store.audit.trim(30) == 30
        return await real(function, **more)

    monkeypatch.setattr(type(store._context), "read", lambda self, function, **more: read(function, **more))
    assert (await store.audit.verify(), calls) == ([], 3)
    assert next(one.sequence for one in await store.audit.read()) == 31


async def test_a_filter_without_an_index_is_looked_for_in_windows_and_pages_join_up(store: SqliteStore) -> None:
    async def found(query: AuditQuery) -> list[int]:
        return [one.sequence for one in await store.audit.read(query)]

    await filled(store, 41)
    assert await found(AuditQuery(event_type="tenth")) == [1, 11, 21, 31, 41]
    assert await found(AuditQuery(event_type="tenth", limit=2)) == [1, 11]
    assert await found(AuditQuery(event_type="tenth", after=11, limit=3)) == [21, 31, 41]
    assert await found(AuditQuery(since=38)) == [39, 40, 41]
    assert await found(AuditQuery(event_type="never")) == []


async def test_what_is_let_go_of_goes_in_small_transactions_and_in_one_anchor(store: SqliteStore, path: Path) -> None:
    await filled(store, 20)
    before = store.batches
    assert await store.audit.trim(14) == 14
    assert store.batches - before == 1 + 5 + 1  # the anchor, five times three rows at most, and none left
    assert by_hand(path, ROWS) == 7
    assert [one.entry.event_type for one in await store.audit.read()].count("anchor") == 1
    assert await store.audit.verify() == []


async def test_a_death_between_anchor_and_removal_does_not_show(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: object) -> Any:
        raise KeyError("dead")

    await filled(store, 20)
    with monkeypatch.context() as broken:
        broken.setattr(audit, "_remove_batch", dies)
        with pytest.raises(Exception, match="dead"):
            await store.audit.trim(14)
    assert by_hand(path, ROWS) == 21
    assert [one.sequence for one in await store.audit.read()] == [15, 16, 17, 18, 19, 20, 21]
    assert await store.audit.verify() == []
    assert await store.audit.trim(14) == 0
    assert by_hand(path, ROWS) == 7


async def test_two_who_trim_at_once_write_one_anchor(path: Path) -> None:
    async with opened(path) as one, opened(path) as other:
        await filled(one, 20)
        assert sorted(await asyncio.gather(one.audit.trim(10), other.audit.trim(10))) == [0, 10]
        assert await other.audit.verify() == []
