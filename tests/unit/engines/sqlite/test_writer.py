"""How the loop and the writer's thread take turns."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.core.idempotency import Asking, Claimed, Done
from reefknot.engines.sqlite import SqliteStore, writer
from reefknot.engines.virtual import VirtualClock
from tests.pace import slowness

TURNS = 200


@pytest.fixture(autouse=True)
def the_switch_interval_is_left_as_it_was() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    assert sys.getswitchinterval() == before


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore(path, VirtualClock()).start()
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process writes, and takes its time."""
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20 * slowness()):
            await story()

    asyncio.run(bounded())


def test_all_callers_of_one_turn_share_a_transaction(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            answers = await asyncio.gather(*(store.idempotency.claim(f"{n}", owner="me") for n in range(64)))
            assert store.batches == 1
            claims = [answer.claim for answer in answers if isinstance(answer, Claimed)]
            await asyncio.gather(*(store.idempotency.finish(claim, Done("1")) for claim in claims))
            assert (len(claims), store.batches) == (64, 2)

    run(story)


def test_a_loop_goes_on_while_the_file_is_locked_by_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            with locked(tmp_path / "state.db"):
                waiting = asyncio.create_task(store.idempotency.claim("k", owner="me"))
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                assert not waiting.done()
            assert isinstance(await waiting, Claimed)

    run(story)


async def ways_given(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Three requests one after the other against a locked file: for which of them does the loop give way?"""
    asked: list[bool] = []

    class Way:
        def acquire(self, timeout: float) -> bool:
            asked.append(True)
            time.sleep(timeout)
            return False

        def locked(self) -> bool:
            return False

    async with opened(path) as store:
        monkeypatch.setattr(store._writer, "_way", Way())
        given = []
        for key in ("a", "b", "c"):
            asked.clear()
            await store.idempotency.claim(key, owner="me")
            given.append(bool(asked))
        return given


def test_after_a_way_that_was_too_short_none_is_given_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "UNTIL_THE_NEXT_WAY", 3600.0)
    assert asyncio.run(ways_given(tmp_path / "state.db", monkeypatch)) == [True, False, False]


def test_without_that_rule_a_loop_would_give_way_in_vain_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "UNTIL_THE_NEXT_WAY", -3600.0)
    assert asyncio.run(ways_given(tmp_path / "state.db", monkeypatch)) == [True, True, True]


def test_a_loop_that_stopped_before_it_woke_the_thread_holds_up_no_other(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            stopped = asyncio.new_event_loop()
            store._writer._rousing = stopped
            assert isinstance(await store.idempotency.claim("k", owner="me"), Claimed)
            stopped.close()

    run(story)


def test_what_was_handed_in_right_before_closing_is_written(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            asking: Any = ("k", Asking("k", "me", "", 1000), ())
            future = store._writer.submit(store.idempotency._handler, asking)
            await store.close()
            assert isinstance(await future, Claimed)

    run(story)


def test_two_stores_at_once_leave_the_switch_interval_as_it_was(tmp_path: Path) -> None:
    async def use(store: SqliteStore) -> None:
        for number in range(20):
            await asyncio.gather(*(store.idempotency.claim(f"{number}/{n}", owner="me") for n in range(5)))

    async def story() -> None:
        async with opened(tmp_path / "one.db") as one, opened(tmp_path / "two.db") as two:
            await asyncio.gather(use(one), use(two))

    run(story)  # the fixture looks


def test_a_store_without_a_thread_is_never_in_a_hurry(tmp_path: Path) -> None:
    async def story() -> None:
        store = await SqliteStore(tmp_path / "state.db", VirtualClock(), inline=True).start()
        before = sys.getswitchinterval()
        await store.idempotency.claim("k", owner="me")
        assert sys.getswitchinterval() == before
        await store.close()

    run(story)


def test_while_it_waits_for_the_disk_the_interval_is_short(tmp_path: Path) -> None:
    """The control of the fixture: it is changed at all."""
    seen: list[float] = []
    before = sys.getswitchinterval()

    def note() -> bool:
        seen.append(sys.getswitchinterval())
        return False

    def opener(path: str, flags: int) -> apsw.Connection:
        connection = apsw.Connection(path, flags=flags)
        connection.set_commit_hook(note)
        return connection

    async def story() -> None:
        store = await SqliteStore(tmp_path / "state.db", VirtualClock(), opener=opener).start()
        seen.clear()
        await store.idempotency.claim("k", owner="me")
        await store.close()

    run(story)
    assert seen
    assert max(seen) < before
