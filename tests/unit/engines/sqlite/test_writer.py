"""How the loop and the writer's thread take turns."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.core.idempotency import Claimed, ClaimRequest, Done
from reefknot.engines.clocks import VirtualClock
from reefknot.engines.sqlite import SqliteStore, writer
from tests.pace import slowness

TURNS = 200


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
        monkeypatch.setattr(writer, "_has_more_to_do", lambda loop: True)
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
            asking: Any = ("k", ClaimRequest("k", "me", "", 1000), ())
            future = store._writer.submit(store.idempotency._handler, asking)
            await store.close()
            assert isinstance(await future, Claimed)

    run(story)


@contextmanager
def moments(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The moments for which this thread stands still for the writer's."""
    taken: list[float] = []
    really, ours = time.sleep, threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() == ours:
            taken.append(seconds)
        really(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        yield taken


def test_a_busy_loop_stands_still_for_moments_until_the_write_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            with moments(store, monkeypatch) as taken:
                with locked(tmp_path / "state.db"):
                    waiting = asyncio.create_task(store.idempotency.claim("k", owner="me"))
                    while len(taken) < 5:  # noqa: ASYNC110 - the loop has to be busy
                        await asyncio.sleep(0)
                assert isinstance(await waiting, Claimed)
                assert all(one == writer.MOMENT for one in taken)
                seen = len(taken)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                assert len(taken) <= seen + 1, "nobody writes any more"

    run(story)


def test_a_loop_that_has_nothing_to_do_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            with moments(store, monkeypatch) as taken:
                with locked(tmp_path / "state.db"):
                    waiting = asyncio.create_task(store.idempotency.claim("k", owner="me"))
                    await asyncio.wait({waiting}, timeout=0.05)
                assert isinstance(await waiting, Claimed)
                assert len(taken) <= 2, "at the ends of the wait, when there was something to do"

    run(story)


def test_the_longer_a_write_takes_the_rarer_the_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk, or a file that others keep, must not cost a loop half of its time."""

    async def story() -> None:
        async with opened(tmp_path / "state.db") as store:
            gaps: list[float] = []
            loop = asyncio.get_running_loop()
            later = loop.call_later

            def call_later(delay: float, callback: Any, *words: Any) -> asyncio.TimerHandle:
                if callback == store._writer._attend:
                    gaps.append(delay)
                return later(delay, callback, *words)

            monkeypatch.setattr(loop, "call_later", call_later)
            with locked(tmp_path / "state.db"):
                waiting = asyncio.create_task(store.idempotency.claim("k", owner="me"))
                async with asyncio.timeout(10):
                    while len(gaps) < 7:  # noqa: ASYNC110 - the loop has to be busy
                        await asyncio.sleep(0)
            await waiting
            assert gaps[0] == writer.FIRST_GAP
            assert all(after == min(2 * before, writer.LONGEST_GAP) for before, after in pairwise(gaps[:7]))
            assert gaps[6] == writer.LONGEST_GAP

    run(story)
