"""The SQLite engine beyond the contracts of a store: its file, its thread, its errors, the bounds of a search."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

from reefknot import errors, runtime, testing
from reefknot.idempotency.model import Busy, Claimed, Done
from reefknot.queue.model.work import WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueued, Settlement, WorkClaim, WorkFilter
from reefknot.runtime import forks, open_files
from reefknot.runtime.clocks import VirtualClock
from reefknot.runtime.sqlite_files import LARGEST_IDLE_LOG, translated
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore, admission, idempotency, transaction, work
from reefknot.stores.sqlite import store as sqlite_store
from reefknot.stores.sqlite import work_rows as rows
from reefknot.testing.conformance.harness import event
from tests.unit.stores.sqlite.stores_on_a_file import by_hand, opened

pytestmark = pytest.mark.real_time


async def test_the_file_is_wal_fully_synchronous_and_its_owners_alone_to_read(tmp_path: Path) -> None:
    async with opened(tmp_path / "new folder" / "state.db") as store:
        found = await store._context.read(lambda one: (one.pragma("journal_mode"), one.pragma("synchronous")))
        assert found == ("wal", 2)
    assert stat.S_IMODE((tmp_path / "new folder" / "state.db").stat().st_mode) == 0o600


async def test_one_bad_request_harms_no_other_of_its_batch(store: SqliteStore) -> None:
    items = [WorkItem("good", "t"), WorkItem("bad", "\ud800"), WorkItem("fine", "t")]
    calls = *(store.work.enqueue([item]) for item in items), store.idempotency.claim("k", owner="me")
    good, bad, fine, claimed = await asyncio.gather(*calls, return_exceptions=True)
    assert good == fine == [Enqueued.ACCEPTED]
    assert isinstance(bad, errors.StoreError)
    assert isinstance(claimed, Claimed)
    assert [item.id for item in (await store.work.search()).items] == ["fine", "good"]


async def test_a_file_of_another_program_is_refused_and_not_touched(path: Path) -> None:
    by_hand(path, "CREATE TABLE theirs (x)")
    with pytest.raises(errors.StoreVersionError, match="another program"):
        await SqliteStore(path, VirtualClock()).start()
    assert by_hand(path, "SELECT group_concat(name) FROM sqlite_schema") == "theirs"


async def test_a_file_that_may_not_be_written_says_which_right_is_missing(path: Path) -> None:
    async with opened(path):
        pass

    def read_only(path: str, flags: int) -> apsw.Connection:
        return apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)

    with pytest.raises(errors.StoreUnavailableError, match="right to write"):
        await SqliteStore(path, VirtualClock(), opener=read_only).start()


LARGE = 8 * LARGEST_IDLE_LOG // 5


async def log_sizes(path: Path) -> tuple[int, int]:
    """Bytes of the log while a reader holds an old snapshot, and after it has ended and others have written."""
    log = path.with_name(f"{path.name}-wal")
    async with opened(path) as store:
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM work")
        for number in range(8):
            await store.work.enqueue([WorkItem(f"{number}", "t", payload=bytes(LARGE // 8))])
        largest = log.stat().st_size
        reader.close()
        for number in range(3):
            await store.work.enqueue([WorkItem(f"after-{number}", "t")])
        return largest, log.stat().st_size


async def test_the_log_shrinks_after_a_long_reader_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control: a log without a bound stays at its largest size."""
    largest, left = await log_sizes(tmp_path / "bounded.db")
    assert (largest > LARGEST_IDLE_LOG * 3 / 2, left <= LARGEST_IDLE_LOG) == (True, True)
    monkeypatch.setattr(runtime.sqlite_files, "LARGEST_IDLE_LOG", -1)
    largest, left = await log_sizes(tmp_path / "control.db")
    assert left >= largest


async def test_a_closed_store_and_one_of_before_a_fork_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(forks.FORKS, "generation", forks.FORKS.generation + 1)
            for call in (store.idempotency.claim("k", owner="me"), store.idempotency.get("k")):
                with pytest.raises(errors.StoreUnavailableError, match="fork"):
                    await call
        await store.idempotency.claim("k", owner="me")
    await store.close()
    with pytest.raises(errors.StoreUnavailableError, match="closed"):
        await store.idempotency.claim("k", owner="me")


async def test_after_the_machine_restarted_every_lease_is_over(path: Path) -> None:
    async with opened(path, VirtualClock(start=1_000_000)) as store:
        await store.idempotency.claim("k", owner="me", lease=60)
        await store.work.enqueue([WorkItem("a", "t")])
        await store.work.claim(1, WorkClaim(owner="me", lease=60))
    async with opened(path, VirtualClock(start=10)) as store:
        answer = await store.idempotency.claim("k", owner="you")
        assert isinstance(answer, Claimed)
        assert answer.taken_over
        assert [item.crashes for item in await store.work.claim(1, WorkClaim(owner="you"))] == [1]


async def test_what_another_store_on_the_file_writes_wakes_up_who_waits(path: Path) -> None:
    async with opened(path) as one, opened(path) as two:
        answer = await two.idempotency.claim("k", owner="two")
        assert isinstance(answer, Claimed)
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(one.work.wait(15)),
            asyncio.create_task(one.audit.wait(0, 15)),
            asyncio.create_task(one.control.wait(15, after=0)),
        ]
        result = asyncio.create_task(one.idempotency.wait("k", 15))
        await asyncio.sleep(0.01)
        await two.work.enqueue([WorkItem("a", "t")], events=[event("admission")])
        await two.idempotency.finish(answer.claim, Done("7"))
        said = await two.control.post("hello")
        assert await asyncio.gather(*waits) == [True, True, said]
        record = await result
        assert record is not None
        assert record.result == "7"


async def test_a_status_from_another_store_on_the_file_wakes_nobody(path: Path) -> None:
    async with opened(path) as one, opened(path) as two:
        waiting = asyncio.create_task(one.control.wait(15, after=0))
        await asyncio.sleep(0.01)
        with one._watcher.listening("control") as change:
            for _ in range(3):
                await two.control.report("s", "{}", keep=5)
                await asyncio.sleep(0.1)
            await two.control.withdraw("s")
            await asyncio.sleep(0.6)
            assert not change.done()
            said = await two.control.post("hello")
            assert await waiting == said
            assert change.done()


async def zombie_writes(path: Path) -> tuple[bool, bool]:
    """Two stores on one file. The first one claims, the second one takes over; are the first one's reports refused?"""
    clock = VirtualClock()
    async with opened(path, clock) as one, opened(path, clock) as two:
        await one.work.enqueue([WorkItem("a", "t")])
        answer = await one.idempotency.claim("k", owner="one", lease=5)
        (item,) = await one.work.claim(1, WorkClaim(owner="one", lease=5))
        assert isinstance(answer, Claimed)
        clock.advance(5)
        heir = await two.idempotency.claim("k", owner="two")
        assert isinstance(heir, Claimed)
        await two.idempotency.finish(heir.claim, Done('"two"'))
        await two.work.claim(1, WorkClaim(owner="two"))
        (settled,) = await one.work.settle([Settlement("a", "one", item.fence, WorkDone())])
        try:
            await one.idempotency.finish(answer.claim, Done('"one"'))
        except errors.LeaseLostError:
            return True, not settled
        return False, not settled


@pytest.mark.parametrize("careless", [False, True], ids=["refused", "control: without asking for the version"])
async def test_a_store_sees_what_another_one_wrote(path: Path, monkeypatch: pytest.MonkeyPatch, careless: bool) -> None:
    if careless:
        monkeypatch.setattr(transaction.RecordCaches, "check", lambda caches, connection: None)
    assert await zombie_writes(path) == (not careless, not careless)


async def test_what_a_failed_transaction_would_have_written_is_not_remembered(path: Path) -> None:
    connections: list[apsw.Connection] = []

    def remembering(path: str, flags: int) -> apsw.Connection:
        connections.append(apsw.Connection(path, flags=flags))
        return connections[-1]

    async with opened(path, opener=remembering) as store:
        connections[0].set_commit_hook(lambda: True)  # the commit becomes a rollback
        with pytest.raises(errors.StoreError):
            await store.idempotency.claim("k", owner="one")
        connections[0].set_commit_hook(None)
        answer = await store.idempotency.claim("k", owner="two")
        assert isinstance(answer, Claimed)
        assert not answer.taken_over


async def test_a_backup_is_a_store_of_its_own_and_never_overwrites(store: SqliteStore, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    await store.work.enqueue([WorkItem(f"{n}", "t", payload=b"x" * 1000) for n in range(200)])
    head = await store.audit.append([event("a")])
    await store.backup(tmp_path / "copy.db", progress=lambda done, total: steps.append((done, total)))
    with pytest.raises(errors.StoreUnavailableError, match="exists"):
        await store.backup(tmp_path / "copy.db")
    with pytest.raises(errors.StoreUnavailableError, match="name a file in a folder that is there"):
        await store.backup(tmp_path / "nowhere" / "copy.db")
    assert steps[-1][0] == steps[-1][1]
    async with opened(tmp_path / "copy.db") as copy:
        assert await copy.audit.head() == head
        assert len((await copy.work.search(limit=500)).items) == 200


STATEMENTS = [
    *(rows._EXPIRED, rows._LOAD, rows._OLDEST_DUE, rows._LOST_CLAIMS, rows._CLASSES, rows._KINDS),
    *(admission._OLDEST_SUBMISSION, admission._OPEN_WORK, admission._SUBMITTERS, admission._QUEUED_TENANTS),
    *(work._SOONEST, work._PROMOTE, admission._NEXT.format("ASC"), rows._BY_SEQ.format("DESC")),
    *(text for _, text in (*idempotency._UPDATE.texts, *idempotency._REPLACE.texts)),
    *(rows._PAGE.format(f"{one} AND resource_class = ?", "DESC") for ones in rows._OF_CLASS.values() for one in ones),
    rows._PAGE.format(rows._OF_STATE, "DESC"),
    idempotency._LOAD,
    sqlite_store._END_EARLIER.format("work INDEXED BY work_leased", "running"),
]


@pytest.mark.parametrize("statement", STATEMENTS)
async def test_what_every_claim_asks_for_never_walks_through_the_table(store: SqliteStore, statement: str) -> None:
    places = max((number for number in range(1, 20) if f"?{number}" in statement), default=statement.count("?"))

    def plan(connection: apsw.Connection) -> list[str]:
        rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", [None] * places)
        return [str(row[3]) for row in rows]

    steps = await store._context.read(plan)
    assert not [step for step in steps if step.startswith("SCAN") and step.endswith((" work", " idempotency"))]


def test_in_a_virtual_loop_the_store_lives_in_virtual_time(path: Path) -> None:
    async def main() -> list[type]:
        async with open_store(f"sqlite:{path}") as store:
            answers = [await store.idempotency.claim("k", owner="me", lease=3600)]
            for seconds in (3599, 2):
                await asyncio.sleep(seconds)
                answers.append(await store.idempotency.claim("k", owner="you"))
            return [type(one) for one in answers]

    assert testing.run_virtual(main()) == [Claimed, Busy, Claimed]


async def test_a_url_without_an_engine_names_those_there_are() -> None:
    for url in ("", "sqlite:", "sqlite", "redis://here", "nats://here:0", "state.db"):
        with pytest.raises(errors.ParameterError, match="sqlite:PATH, nats://HOST:PORT or memory:"):
            async with open_store(url):
                pass


def test_a_file_that_others_keep_is_unavailable_and_no_defect() -> None:
    for error in (apsw.BusyError("busy"), apsw.LockedError("locked"), apsw.ProtocolError("lost")):
        unavailable = translated(error, "state.db")
        assert isinstance(unavailable, errors.StoreUnavailableError)
        assert "another process kept it locked" in str(unavailable)


async def test_opening_a_store_takes_no_lease_away_that_was_granted_in_that_very_moment(path: Path) -> None:
    """A claim between reading the clock and reading the leases: such a lease ends later than expected."""

    class Late(VirtualClock):
        """Right after it was read, time goes on and another one claims."""

        then: Callable[[], None] | None = None

        def now(self) -> float:
            read = super().now()
            if self.then is not None:
                then, self.then = self.then, None
                then()
            return read

    here, late = VirtualClock(), Late()
    claimed: list[WorkItem] = []

    def claims() -> None:
        here.advance(5)
        late.advance(5)
        try:  # without a thread it is done at once, unless the one who opens is in the way
            living.work.claim(1, WorkClaim(owner="w", lease=60)).send(None)
        except StopIteration as done:
            claimed.extend(done.value)
        except errors.StoreUnavailableError:
            return

    async with opened(path, here, inline=True, patience=0.05) as living:
        await living.work.enqueue([WorkItem("a", "t")])
        late.then = claims
        async with opened(path, late, inline=True) as opening:
            assert late.then is None
            taken = [item.crashes for item in await opening.work.claim(1, WorkClaim(owner="next"))]
            assert taken == ([] if claimed else [0])


class HostClock(VirtualClock):
    """A clock whose steady part all processes of a boot share, and whose wall part somebody sets."""

    def __init__(self, ahead: float = 0.0, boot: str = "this boot") -> None:
        super().__init__()
        self.boot = boot
        self._ahead = ahead

    def wall(self) -> float:
        return super().wall() + self._ahead


DAY = 86_400.0


def in_half_a_minute(store: SqliteStore) -> WorkItem:
    return WorkItem("a", "t", due_at=int((store.clock.wall() + 30) * 1000))


@pytest.mark.parametrize("ahead", [-DAY, -60.0, 60.0, DAY])
async def test_processes_of_one_boot_agree_on_the_time_while_anything_is_open(path: Path, ahead: float) -> None:
    async with opened(path, HostClock()) as first:
        await first.work.enqueue([in_half_a_minute(first)])
    clock = HostClock(ahead)
    async with opened(path, clock) as later:
        assert later.clock.wall() == first.clock.wall()
        clock.advance(29)
        assert await later.work.claim(1, WorkClaim(owner="me")) == []
        clock.advance(2)
        (due,) = await later.work.claim(1, WorkClaim(owner="me"))
        assert due.id == "a", "it is due, whatever the clock"
        async with opened(path, HostClock(ahead, "another boot")) as other:
            assert other.clock.wall() == first.clock.wall() + ahead, "by wall time alone"
        async with opened(path, VirtualClock()) as unknown:
            assert unknown.clock.wall() == first.clock.wall()


async def test_control_processes_that_believe_their_own_clocks_disagree(path: Path) -> None:
    async with opened(path, HostClock(boot="")) as first:
        await first.work.enqueue([in_half_a_minute(first)])
    clock = HostClock(-60.0, boot="")
    async with opened(path, clock) as later:
        clock.advance(31)
        assert await later.work.claim(1, WorkClaim(owner="me")) == []


async def test_nothing_is_acknowledged_after_the_file_was_deleted(store: SqliteStore, tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    assert await store.work.enqueue([WorkItem("a", "t")]) == [Enqueued.ACCEPTED]
    file.unlink()
    with pytest.raises(errors.StoreReplacedError, match="deleted or moved"):
        await store.work.enqueue([WorkItem("b", "t")])
    with pytest.raises(errors.StoreReplacedError):
        await store.work.get("a")
    assert isinstance(store.failure, errors.StoreReplacedError), "a system that looks at it ends"
    await store.close()
    assert not file.exists(), "no reader and no writer has made a new file"


async def test_without_the_check_a_write_to_a_deleted_file_is_acknowledged_and_lost(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(open_files.OpenedFile, "in_place", True)
    file = tmp_path / "state.db"
    file.unlink()
    assert await store.work.enqueue([WorkItem("b", "t")]) == [Enqueued.ACCEPTED]
    await store.close()
    assert not file.exists()


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
async def test_pages_go_on_without_gap_or_repetition(
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
