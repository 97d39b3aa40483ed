"""Spent rows go, a few at a time, and never a live one; keys are found by their hash, and rewrite few pages."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.errors import KeyQuotaError
from reefknot.idempotency.model import Busy, Claimed, Done, Hit, KeyState
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore, audit, idempotency, upkeep
from reefknot.stores.sqlite.connection import add_key_hash, key_hash
from reefknot.stores.sqlite.reads import StoreContext
from tests.unit.stores.sqlite.stores_on_a_file import by_hand, ended, locked, opened

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "ROWS_PER_READ", 4)
    monkeypatch.setattr(upkeep, "ROWS_PER_DELETE", 3)


async def test_spent_keys_go_in_small_transactions_and_live_ones_stay(path: Path) -> None:
    clock = VirtualClock()
    async with opened(path, clock, retention=10, most_keys=15) as store:
        await ended(store, *(f"old-{number}" for number in range(10)))
        guarded = await store.idempotency.claim("guarded", owner="g", lease=5, guard=True)
        clock.advance(20)
        await store.idempotency.claim("held", owner="h", lease=60)
        await ended(store, "new")
        before = store.batches
        assert await store.idempotency.purge() == 10
        assert store.batches - before == 5  # pages of four rows, at most three of them in one transaction
        assert isinstance(guarded, Claimed)
        assert await store.idempotency.counts() == {KeyState.IN_PROGRESS: 2, KeyState.DONE: 1}
        await ended(store, *(f"more-{number}" for number in range(12)))  # the count of keys was kept, too
        with pytest.raises(KeyQuotaError):
            await store.idempotency.claim("one too many", owner="x")


async def test_a_key_that_was_claimed_after_the_look_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without a second look inside of the transaction, the new owner's key would go."""
    clock, statement = VirtualClock(), upkeep._REMOVE

    async def story(careless: bool) -> bool:
        async with opened(tmp_path / f"{careless}.db", clock, retention=10) as store:
            await ended(store, "k")
            clock.advance(20)
            real = StoreContext.write

            async def write(context: StoreContext, handler: Any, argument: Any) -> Any:
                if handler is upkeep._remove_batch:
                    monkeypatch.setattr(StoreContext, "write", real)
                    assert isinstance(await store.idempotency.claim("k", owner="new"), Claimed)
                return await real(context, handler, argument)

            monkeypatch.setattr(StoreContext, "write", write)
            monkeypatch.setattr(upkeep, "_REMOVE", statement.replace("AND {1} ", "") if careless else statement)
            await upkeep.purge_keys(store._context)
            return await store.idempotency.get("k") is not None

    assert await story(careless=False)
    assert not await story(careless=True)


async def test_a_refused_key_of_a_flood_does_not_walk_the_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looked = VirtualClock(), 0
    real = upkeep.make_room

    def counted(*arguments: Any, **more: Any) -> int:
        nonlocal looked
        looked += 1
        return real(*arguments, **more)

    monkeypatch.setattr(upkeep, "make_room", counted)
    async with opened(path, clock, retention=10, most_keys=3) as store:
        await ended(store, "a", "b", "c")
        for number in range(20):
            with pytest.raises(KeyQuotaError):
                await store.idempotency.claim(f"flood-{number}", owner="x")
        assert looked == 1
        clock.advance(1)
        with pytest.raises(KeyQuotaError):
            await store.idempotency.claim("flood", owner="x")
        assert looked == 2
        clock.advance(10)  # the three are spent now, and give way
        assert isinstance(await store.idempotency.claim("flood", owner="x"), Claimed)
        assert looked == 3


@pytest.mark.parametrize("careless", [False, True], ids=["kept", "control: it may give way"])
async def test_a_key_claimed_as_room_is_made_stays(path: Path, monkeypatch: pytest.MonkeyPatch, careless: bool) -> None:
    """A newcomer makes room by removing spent keys; one of them is claimed again in the same transaction."""
    clock, real = VirtualClock(), upkeep.make_room
    if careless:
        monkeypatch.setattr(upkeep, "make_room", lambda transaction, keep: real(transaction, keep=[]))
    async with opened(path, clock, retention=10, most_keys=2) as store:
        await ended(store, "a", "b")
        clock.advance(20)
        with locked(path):
            first = store._context.write(audit._append_batch, [])  # waits for the lock, and what follows gathers
            while store._writer._submitted:  # noqa: ASYNC110 - the writer's thread says nothing when it begins
                await asyncio.sleep(0)
            claims = [asyncio.ensure_future(store.idempotency.claim(key, owner="new")) for key in ("newcomer", "a")]
            await asyncio.sleep(0)
        await first
        assert all(isinstance(answer, Claimed) for answer in await asyncio.gather(*claims))
        assert [await store.idempotency.get(key) is not None for key in ("newcomer", "a")] == [True, not careless]


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_file_that_takes_long_to_check_is_checked_as_a_copy_or_table_by_table(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """No snapshot of the file is held for as long as the check takes."""
    async with opened(path):
        pass
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(upkeep, "SNAPSHOT_S", -1.0)
    monkeypatch.setattr(upkeep, "_CHECK_STEPS", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free if has_room else free._replace(free=0))
    (tmp_path / "state.db.check").write_text("of a process that was killed")
    connection = apsw.Connection(str(path))
    assert upkeep.check_file(connection).problems == []
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET rootpage = 2 WHERE name = 'work_trace'")
    connection.close()
    connection = apsw.Connection(str(path))
    assert bool(upkeep._damages(connection)) is has_room, "a page of two owners belongs to no one table"
    connection.close()
    assert not any(".check" in name for name in os.listdir(tmp_path))


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
async def test_recent_keys_stay_few_and_every_key_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control: those that never move are all of them."""
    keys = [f"key-{number}" for number in range(200)]
    async with opened(path, inline=True, synchronous="OFF") as store:
        for key in keys:
            await ended(store, key)
            assert await rows_of(store, "recent_key") <= 48
        assert await rows_of(store, "recent_key") + await rows_of(store, "older_key") == len(keys)
        for key in keys:
            assert isinstance(await store.idempotency.claim(key, owner="late"), Hit)
            assert await store.idempotency.get(key) is not None
        assert (await store.check()).ok
        before = await rows_of(store, "recent_key")
        monkeypatch.setattr(idempotency, "move_recent", lambda *_: None)
        await ended(store, *(f"more-{number}" for number in range(100)))
        assert await rows_of(store, "recent_key") == before + 100


@pytest.mark.usefixtures("few_recent")
async def test_a_key_that_has_moved_is_finished_forgotten_and_purged_like_a_recent_one(path: Path) -> None:
    async with opened(path, inline=True, synchronous="OFF", retention=0) as store:
        held = await store.idempotency.claim("held", owner="me")
        assert isinstance(held, Claimed)
        await ended(store, *(f"key-{number}" for number in range(100)))
        assert isinstance(await store.idempotency.claim("held", owner="you"), Busy)
        await store.idempotency.finish(held.claim, Done("2"))
        assert [await store.idempotency.forget(key) for key in ("key-0", "key-99")] == [True, True]
        assert await store.idempotency.purge() == 99
        assert [await rows_of(store, table) for table in ("idempotency", "recent_key", "older_key")] == [0, 0, 0]
        await ended(store, "key-0")


async def test_keys_of_one_hash_are_different_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "key_hash", lambda _: 7)
    async with opened(path) as store:
        await ended(store, "a", "b", "c")
        assert await store.idempotency.forget("b") is True
        assert [type(await store.idempotency.claim(key, owner="late")) for key in "abc"] == [Hit, Claimed, Hit]


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
    assert 3 * in_two_tables < await pages_of_new_keys(tmp_path / "one.db", have_moved=False)


def test_the_hash_of_a_key_is_fixed_because_files_hold_it() -> None:
    assert key_hash("ключ") == 269162103629031
