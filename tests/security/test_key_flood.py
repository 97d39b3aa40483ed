"""A flood of keys (`FLOOD_KEYS`): refused beyond the quota, never at the price of a live key, in bounded memory."""

import asyncio
import os
import resource
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from reefknot.errors import KeyQuotaError
from reefknot.idempotency.model import Claimed, Done, Hit, KeyState
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite import upkeep as retention
from reefknot.stores.sqlite.transaction import LARGEST

KEYS = int(os.environ.get("FLOOD_KEYS", "20000"))
AT_ONCE = 500
RETENTION = 3600.0
AN_EMPTY_STORE = 256 * 1024


async def claimed(store: SqliteStore, number: int) -> bool:
    """One key of the flood; every tenth one that gets in is held, the others have ended."""
    try:
        answer = await store.idempotency.claim(f"flood-{number:09}", owner=str(number), lease=RETENTION)
    except KeyQuotaError:
        return False
    assert isinstance(answer, Claimed)
    if number % 10:
        await store.idempotency.finish(answer.claim, Done("1"))
    return True


async def flood(store: SqliteStore, keys: int) -> int:
    """How many got in."""
    taken = 0
    for first in range(0, keys, AT_ONCE):
        taken += sum(await asyncio.gather(*(claimed(store, number) for number in range(first, first + AT_ONCE))))
        assert len(store._writer._cache.keys._kept) <= LARGEST + AT_ONCE
    return taken


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*") if not file.name.endswith("-shm"))


async def flooded(path: Path, keys: int) -> dict[str, float]:
    """The whole story; gives what was measured."""
    clock, quota = VirtualClock(), keys // 2
    store = await SqliteStore(path, clock, retention=RETENTION, most_keys=quota, patience=60).start()
    try:
        memory, began = megabytes(), perf_counter()
        assert await flood(store, keys) == quota
        seconds = perf_counter() - began
        counts = await store.idempotency.counts()
        assert counts == {KeyState.IN_PROGRESS: quota // 10, KeyState.DONE: quota - quota // 10}
        for number in (0, 1, quota // 2, quota - 1):  # the oldest and the youngest are what they were
            record = await store.idempotency.get(f"flood-{number:09}")
            assert record is not None
            assert record.owner == str(number)
        assert isinstance(await store.idempotency.claim("flood-000000001", owner="again"), Hit)
        grown, full = megabytes() - memory, size(path)

        clock.advance(2 * RETENTION)
        began = perf_counter()
        assert await store.idempotency.purge() == quota
        purged = perf_counter() - began
        await store.compact()
        assert await store.idempotency.counts() == {}
        assert isinstance(await store.idempotency.claim("flood-000000001", owner="new"), Claimed)
    finally:
        await store.close()
    assert size(path) <= AN_EMPTY_STORE < full
    assert grown < 200
    times = {"keys a second": keys / seconds, "purge, s": purged}
    return times | {"memory, MB more": grown, "full, MB": full / 1e6, "left, kB": size(path) / 1e3}


def test_a_flood_is_refused_beyond_the_quota_and_leaves_nothing_behind(tmp_path: Path) -> None:
    figures = asyncio.run(flooded(tmp_path / "state.db", KEYS))
    print(f"{KEYS} keys:", {name: round(figure, 1) for name, figure in figures.items()})


def evict(transaction: Any, *, keep: list[str]) -> int:
    """What a cache would do: the oldest give way, whether they live or not."""
    transaction.connection.execute("DELETE FROM idempotency WHERE seq IN (SELECT seq FROM idempotency LIMIT 100)")
    gone = transaction.connection.changes()
    transaction.counters.keys -= gone
    transaction.cache.keys.clear()
    return int(gone)


def test_control_a_store_that_evicts_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "make_room", evict)
    with pytest.raises(AssertionError):
        asyncio.run(flooded(tmp_path / "state.db", 2000))
