"""Group commit, the GIL where it is needed, several rows in a statement, and news of other processes' commits."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.errors import StoreError
from reefknot.idempotency.model import Claimed, ClaimRequest, Done
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.sqlite import SqliteStore, gil_yield, reads, writer
from reefknot.stores.sqlite.transaction import SIZES, BulkStatement, Transaction, each
from reefknot.stores.sqlite.wait_table import WaitTable
from tests.unit.stores.sqlite.stores_on_a_file import by_hand, locked, opened, waits_for_the_lock

pytestmark = pytest.mark.real_time
TURNS = 200


async def test_all_callers_of_one_turn_share_a_transaction(store: SqliteStore) -> None:
    answers = await asyncio.gather(*(store.idempotency.claim(f"{n}", owner="me") for n in range(64)))
    assert store.batches == 1
    claims = [answer.claim for answer in answers if isinstance(answer, Claimed)]
    await asyncio.gather(*(store.idempotency.finish(claim, Done("1")) for claim in claims))
    assert (len(claims), store.batches) == (64, 2)


@pytest.mark.parametrize("quick", [False, True], ids=["by the thread", "a lone request on a quick disk"])
async def test_a_loop_goes_on_while_the_file_is_locked_by_others(store: SqliteStore, path: Path, quick: bool) -> None:
    if quick:
        call_it_quick(store)
    async with waits_for_the_lock(store, path):
        for _ in range(TURNS):
            await asyncio.sleep(0)


async def blocked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For which of three requests, one after the other, the loop blocks while other processes have the file's lock."""
    asked: list[bool] = []

    class NeverReleased:
        def acquire(self, timeout: float) -> bool:
            asked.append(True)
            time.sleep(timeout)
            return False

        def locked(self) -> bool:
            return False

    async with opened(path) as store:
        monkeypatch.setattr(store._writer._gil, "_released", NeverReleased())
        monkeypatch.setattr(gil_yield, "has_more_to_do", lambda loop: True)
        given = []
        for key in ("a", "b", "c"):
            asked.clear()
            with locked(path):
                waiting = asyncio.create_task(store.idempotency.claim(key, owner="me"))
                for _ in range(3):  # it submits, and the thread is woken
                    await asyncio.sleep(0)
            await waiting
            given.append(bool(asked))
        return given


@pytest.mark.parametrize(
    ("pause", "blocks"),
    [(3600.0, [True, False, False]), pytest.param(-3600.0, [True, True, True], id="control: no pause")],
)
async def test_a_loop_that_blocked_in_vain_rests(
    path: Path, monkeypatch: pytest.MonkeyPatch, pause: float, blocks: list[bool]
) -> None:
    monkeypatch.setattr(gil_yield, "PAUSE_AFTER_TIMEOUT_S", pause)
    assert await blocked_for(path, monkeypatch) == blocks


@each
def _nothing(transaction: Transaction, name: str) -> str:
    return name


async def test_a_request_with_company_hurries_no_later_one(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may end while the next one waits for company: that would be a transaction for nothing."""
    loop, writer_ = asyncio.get_running_loop(), store._writer
    now, due = loop.time(), list[tuple[Any, ...]]()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_at", lambda _, *call: due.append(call))
        patched.setattr(loop, "time", lambda: now)
        first = writer_.submit(_nothing, ("first",), within=60)
        patched.undo()
        await store.idempotency.claim("k", owner="me")
        assert await first == "first"
        patched.setattr(loop, "call_at", lambda _, *call: due.append(call))
        patched.setattr(loop, "time", lambda: now + 30)
        second = writer_.submit(_nothing, ("second",), within=60)
        (ends_first,) = due
        patched.setattr(loop, "time", lambda: now + 60)
        ends_first[0](*ends_first[1:])
        assert (len(writer_._unhurried), len(writer_._submitted)) == (1, 0), "it has its own time"
        _, ends_second = due
        patched.setattr(loop, "time", lambda: now + 90)
        ends_second[0](*ends_second[1:])
    assert await second == "second"


async def test_a_loop_that_stopped_before_it_woke_the_thread_holds_up_no_other(store: SqliteStore) -> None:
    stopped = asyncio.new_event_loop()
    store._writer._waking = stopped
    assert isinstance(await store.idempotency.claim("k", owner="me"), Claimed)
    stopped.close()


async def test_requests_submitted_right_before_closing_are_written(store: SqliteStore) -> None:
    asking: Any = ("k", ClaimRequest("k", "me", "", 1000), (), None)
    future = store._writer.submit(store.idempotency._handler, asking)
    await store.close()
    assert isinstance(await future, Claimed)


@contextmanager
def nudges(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The sleeps of this thread, by which it lets the writer thread have the interpreter's lock."""
    taken: list[float] = []
    really, ours = time.sleep, threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() == ours:
            taken.append(seconds)
        really(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        yield taken


async def test_a_busy_loop_nudges_in_a_write(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nudges(store, monkeypatch) as taken:
        async with waits_for_the_lock(store, path):
            while len(taken) < 5:  # noqa: ASYNC110 - the loop has to be busy
                await asyncio.sleep(0)
        assert all(one == gil_yield.NUDGE_S for one in taken)
        seen = len(taken)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert len(taken) <= seen + 1, "nothing is written any more"


async def test_an_idle_loop_never_sleeps(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nudges(store, monkeypatch) as taken:
        async with waits_for_the_lock(store, path) as waiting:
            await asyncio.wait({waiting}, timeout=0.05)
        assert len(taken) <= 2, "at the ends of the wait, when there was something to do"


async def test_a_longer_write_has_rarer_nudges(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk, or a file that others keep, must not cost a loop half of its time."""
    gaps: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay: float, callback: Any, *words: Any) -> asyncio.TimerHandle:
        if callback == store._writer._gil.nudge:
            gaps.append(delay)
        return later(delay, callback, *words)

    monkeypatch.setattr(loop, "call_later", call_later)
    async with waits_for_the_lock(store, path), asyncio.timeout(10):
        while len(gaps) < 7:  # noqa: ASYNC110 - the loop has to be busy
            await asyncio.sleep(0)
    assert (gaps[0], gaps[6]) == (gil_yield.MIN_GAP_S, gil_yield.MAX_GAP_S)
    assert all(after == min(2 * before, gil_yield.MAX_GAP_S) for before, after in pairwise(gaps[:7]))


def whose(_transaction: Any, wanted: list[Any]) -> list[int]:
    return [threading.get_ident()] * len(wanted)


def call_it_quick(store: SqliteStore) -> None:
    """As if the last transactions had been quick, however slow the disk of a test is."""
    store._writer._quick = writer.QUICK_IN_A_ROW


@pytest.mark.parametrize("quick", [True, False])
async def test_a_lone_request_is_written_by_the_loop_if_the_disk_is_quick(store: SqliteStore, quick: bool) -> None:
    """With the control: a disk of which that is not known is left to the thread."""
    if quick:
        call_it_quick(store)
    assert (await store._writer.submit(whose, None) == threading.get_ident()) is quick


async def test_callers_that_come_together_share_the_threads_transaction_on_a_quick_disk_too(store: SqliteStore) -> None:
    call_it_quick(store)
    threads = await asyncio.gather(*(store._writer.submit(whose, None) for _ in range(64)))
    assert store.batches == 1
    assert threading.get_ident() not in threads


async def test_a_slow_write_sends_the_next_to_the_thread(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    call_it_quick(store)
    monkeypatch.setattr(writer, "QUICK_S", -1.0)
    here = threading.get_ident()
    assert [await store._writer.submit(whose, None) == here for _ in range(2)] == [True, False]


async def test_a_lone_request_that_fails_is_answered_and_nothing_of_it_is_kept(store: SqliteStore) -> None:
    def fails(transaction: Any, wanted: list[Any]) -> list[Any]:
        transaction.connection.execute("UPDATE counter SET keys = 99")
        raise ZeroDivisionError

    call_it_quick(store)
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        await store._writer.submit(fails, None)
    assert await store._context.read(lambda connection: connection.execute("SELECT keys FROM counter").get) == 0
    assert isinstance(await store.idempotency.claim("k", owner="me"), Claimed)


@pytest.mark.parametrize("pages", [20, 1 << 30])
async def test_the_write_ahead_log_of_a_lone_caller_stays_short(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """With the control: a log that is never brought over to the file grows with every write."""
    monkeypatch.setattr(writer, "CHECKPOINT_PAGES", pages)
    for number in range(60):
        call_it_quick(store)
        await store.idempotency.claim(f"{number}", owner="me")
    assert (path.with_name("state.db-wal").stat().st_size // 4096 < 100) is (pages == 20)


def waits(store: SqliteStore) -> bool:
    """Whether a lone caller on a quick disk has to wait for the loop."""
    call_it_quick(store)
    writing = store._context.write(whose, None)
    try:
        writing.send(None)
    except StopIteration:
        return False
    writing.close()
    return True


@pytest.mark.parametrize(("longest", "expected"), [(60.0, [False, False, False]), (0.0, [False, True])])
async def test_a_lone_caller_on_a_quick_disk_waits_for_the_loop_only_when_it_has_held_it_up_for_long(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, longest: float, expected: list[bool]
) -> None:
    monkeypatch.setattr(writer, "MAX_BLOCK_S", longest)
    assert [waits(store) for _ in expected] == expected
    await asyncio.sleep(0.01)
    assert not waits(store)


async def test_statements_stay_prepared_when_a_batch_writes_hundreds_of_rows(store: SqliteStore) -> None:
    """SQLite's cache of statements forgets the oldest use, and every row of a batch is one."""

    async def batch(number: int) -> None:
        await store.work.enqueue([WorkItem(f"{number}/{one}", "test.step", "io") for one in range(150)])
        taken = await store.work.claim(150, WorkClaim(owner="me", classes=("io",)))
        assert all(await store.work.settle([Settlement(one.id, "me", one.fence, WorkDone("1")) for one in taken]))

    await batch(1)
    connection = store._writer._connection
    assert connection is not None
    before = connection.cache_stats()["misses"]
    await batch(2)
    await batch(3)
    assert connection.cache_stats()["misses"] - before < 5


INSERT = BulkStatement("INSERT OR ROLLBACK INTO t (name, value) VALUES {}", width=2)
UPDATE = BulkStatement("UPDATE t SET value = new.column2 FROM (VALUES {}) AS new WHERE name = new.column1", width=2)


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    opened = apsw.Connection(":memory:")
    opened.execute("CREATE TABLE t (name TEXT NOT NULL UNIQUE, value INTEGER)")
    yield opened
    opened.close()


def rows(number: int, value: int) -> list[tuple[str, int]]:
    return [(f"{n:03}", value + n) for n in range(number)]


@pytest.mark.parametrize("number", [0, 1, *range(SIZES[1] - 1, SIZES[1] + 2), *range(SIZES[0] - 1, SIZES[0] + 2), 171])
def test_every_row_is_written_once_whatever_their_number(connection: apsw.Connection, number: int) -> None:
    INSERT.run(connection, rows(number, 0))
    UPDATE.run(connection, rows(number, 1000))
    assert connection.execute("SELECT * FROM t ORDER BY name").fetchall() == rows(number, 1000)


def test_a_batch_of_64_takes_two_statements(connection: apsw.Connection) -> None:
    seen: list[str] = []
    connection.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: seen.append(event["sql"]))
    INSERT.run(connection, rows(64, 0))
    assert len(seen) == 2


def test_a_row_that_cannot_be_written_leaves_nothing_of_its_transaction(connection: apsw.Connection) -> None:
    """With plain `INSERT` the rows of the statements before would stay, and the transaction would go on."""
    connection.execute("BEGIN IMMEDIATE")
    INSERT.run(connection, rows(1, 0))
    with pytest.raises(apsw.ConstraintError):
        INSERT.run(connection, rows(40, 0))
    assert connection.get_autocommit()
    assert connection.execute("SELECT count(*) FROM t").get == 0


class File:
    """A store's file, with the writer of this process and of another one, each a plain connection."""

    def __init__(self, path: Path) -> None:
        asyncio.run(self._made(path))
        self.own_count = 0
        self._path = path
        self.watcher = reads.ChangeWatcher(
            self._connection,
            str(path),
            own_transactions=lambda: self.own_count,
            is_writing=lambda: False,
            table=WaitTable(str(path)),
        )
        assert self.watcher._look() is False, "what was there before is no news"

    async def _made(self, path: Path) -> None:
        async with opened(path):
            pass

    def _connection(self) -> apsw.Connection:
        return apsw.Connection(str(self._path))

    def commit(self) -> None:
        by_hand(self._path, "UPDATE counter SET transactions = transactions + 1")


@pytest.fixture
def file(path: Path) -> Iterator[File]:
    made = File(path)
    yield made
    made.watcher.close()


def test_only_commits_of_others_are_news(file: File) -> None:
    for _ in range(3):
        file.own_count += 1
        file.commit()
        assert not file.watcher._look()
        file.commit()
        assert file.watcher._look()
        assert not file.watcher._look()


def test_a_foreign_commit_beside_one_that_is_counted_and_not_yet_committed_is_not_lost(file: File) -> None:
    """The writer counts before it commits: the foreign one may look like its own for that long, and no longer."""
    file.own_count += 1
    file.commit()  # the other process, while ours is on its way
    first = file.watcher._look()
    file.commit()  # ours
    assert first or file.watcher._look()


def test_counting_after_the_commit_would_lose_one(file: File) -> None:
    """The control: ours is seen before it is counted, is taken for foreign, and then hides the next foreign one."""
    file.commit()  # ours, not counted yet
    assert file.watcher._look(), "a spurious wake-up"
    file.own_count += 1
    file.commit()  # the other process
    assert not file.watcher._look(), "lost: this is why the writer counts first"
