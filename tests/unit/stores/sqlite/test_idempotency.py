"""Idempotency keys are found by their hash, and new ones rewrite few pages of a file with many."""

from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.idempotency.model import Busy, Claimed, Done, Hit
from reefknot.stores.sqlite import SqliteStore, idempotency
from reefknot.stores.sqlite.connection import add_key_hash, key_hash
from tests.unit.stores.sqlite.stores_on_a_file import by_hand, ended, opened

pytestmark = pytest.mark.real_time

_ALL_MOVE = "INSERT INTO older_key SELECT * FROM recent_key; DELETE FROM recent_key"
_NOT_FOUND = "1 idempotency keys are in the file but are not found by their hash"
_PAGE_BYTES, _LOG_HEADER, _FRAME_HEADER = 4096, 32, 24


async def rows_of(store: SqliteStore, table: str) -> int:
    found: Any = await store._context.read(lambda connection: connection.execute(f"SELECT count(*) FROM {table}").get)
    return int(found)


@pytest.fixture
def few_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranges of hashes; one of them is due every eight rows."""
    monkeypatch.setattr(idempotency, "ROWS_PER_MOVE", 8)
    monkeypatch.setattr(idempotency, "RECENT_KEYS", 32)


@pytest.mark.usefixtures("few_recent")
async def test_recent_keys_stay_few_and_every_key_is_found(tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(200)]
    async with opened(tmp_path / "state.db", inline=True, synchronous="OFF") as store:
        for key in keys:
            await ended(store, key)
            assert await rows_of(store, "recent_key") <= 48
        assert await rows_of(store, "recent_key") + await rows_of(store, "older_key") == len(keys)
        for key in keys:
            assert isinstance(await store.idempotency.claim(key, owner="late"), Hit)
            assert await store.idempotency.get(key) is not None
        assert (await store.check()).ok


@pytest.mark.usefixtures("few_recent")
async def test_recent_keys_that_never_move_are_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(idempotency, "move_recent", lambda *_: None)
    async with opened(tmp_path / "state.db", inline=True, synchronous="OFF") as store:
        await ended(store, *(f"key-{number}" for number in range(100)))
        assert await rows_of(store, "recent_key") == 100


@pytest.mark.usefixtures("few_recent")
async def test_a_key_that_has_moved_is_finished_forgotten_and_purged_like_a_recent_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "state.db", inline=True, synchronous="OFF", retention=0) as store:
        held = await store.idempotency.claim("held", owner="me")
        assert isinstance(held, Claimed)
        await ended(store, *(f"key-{number}" for number in range(100)))
        assert isinstance(await store.idempotency.claim("held", owner="you"), Busy)
        await store.idempotency.finish(held.claim, Done("2"))
        assert await store.idempotency.forget("key-0") is True
        assert await store.idempotency.forget("key-99") is True
        assert await store.idempotency.purge() == 99
        assert [await rows_of(store, table) for table in ("idempotency", "recent_key", "older_key")] == [0, 0, 0]
        await ended(store, "key-0")


async def test_keys_of_one_hash_are_different_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "key_hash", lambda _: 7)
    async with opened(tmp_path / "state.db") as store:
        await ended(store, "a", "b", "c")
        assert await store.idempotency.forget("b") is True
        assert isinstance(await store.idempotency.claim("a", owner="late"), Hit)
        assert isinstance(await store.idempotency.claim("b", owner="late"), Claimed)
        assert isinstance(await store.idempotency.claim("c", owner="late"), Hit)


_SECOND_ROW = (
    "INSERT INTO idempotency (hash, key, state, owner, fence, lease_until, lease_ms, fingerprint, guard, created_at, "
    "updated_at, expires_at) SELECT hash, key, state, owner, fence, lease_until, lease_ms, fingerprint, guard, "
    "created_at, updated_at, expires_at FROM idempotency"
)


@pytest.mark.parametrize("table", ["recent_key", "older_key"])
async def test_the_file_refuses_a_second_row_of_a_key(path: Path, table: str) -> None:
    """Whichever code writes it. With the control: without its trigger the file takes the row, and the check tells."""
    async with opened(path) as store:
        await ended(store, "k")
    if table == "older_key":
        by_hand(path, _ALL_MOVE)
    with pytest.raises(apsw.ConstraintError, match="the key has a row already"):
        by_hand(path, _SECOND_ROW)
    by_hand(path, f"DROP TRIGGER idempotency_in; {_SECOND_ROW}")
    async with opened(path) as store:
        assert not (await store.check()).ok


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE idempotency SET hash = hash + 1", _NOT_FOUND),
        ("DELETE FROM recent_key", _NOT_FOUND),
        ("INSERT INTO older_key VALUES (5, 5)", "1 hashes of idempotency keys lead to no key"),
    ],
)
async def test_a_key_that_cannot_be_found_is_a_finding_of_the_check(path: Path, damage: str, problem: str) -> None:
    async with opened(path) as store:
        await ended(store, "k")
        assert (await store.check()).problems == []
    by_hand(path, damage)
    async with opened(path) as store:
        assert (await store.check()).problems == [problem]


def pages_in_log(path: Path) -> int:
    """Distinct pages in the write-ahead log: those that the next checkpoint writes all over the file."""
    log = Path(f"{path}-wal").read_bytes()
    frames = range(_LOG_HEADER, len(log), _FRAME_HEADER + _PAGE_BYTES)
    return len({log[at : at + 4] for at in frames})


async def pages_of_new_keys(path: Path, *, have_moved: bool) -> int:
    """Pages that 600 new keys rewrite, in a store with 100 000 keys, which have moved to the older ones or not."""
    async with opened(path):
        pass
    filling = apsw.Connection(str(path))
    add_key_hash(filling)
    filling.execute("PRAGMA synchronous = OFF; BEGIN")
    filling.executemany(
        "INSERT INTO idempotency VALUES (?1, key_hash(?1), ?1, 'done', '', 1, 0, 0, '', 0, '', '', '', 1, 1, 1)",
        ((number,) for number in range(1, 100_001)),
    )
    if have_moved:
        filling.execute(_ALL_MOVE)
    filling.execute("COMMIT; PRAGMA wal_checkpoint(TRUNCATE)")
    filling.close()
    async with opened(path, inline=True, synchronous="OFF") as store:
        for number in range(600):
            assert isinstance(await store.idempotency.claim(f"new-{number}", owner="me"), Claimed)
        return pages_in_log(path)


async def test_new_keys_rewrite_few_pages_among_many_keys(tmp_path: Path) -> None:
    """With the control: in one large index nearly every new key has a page of its own."""
    in_two_tables = await pages_of_new_keys(tmp_path / "two.db", have_moved=True)
    in_one_table = await pages_of_new_keys(tmp_path / "one.db", have_moved=False)
    assert 3 * in_two_tables < in_one_table


def test_the_hash_of_a_key_is_fixed_because_files_hold_it() -> None:
    assert key_hash("ключ") == 269162103629031
