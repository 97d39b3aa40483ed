"""The table of waiting processes: a commit calls those that wait for what it touched, and no others."""

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from reefknot.queue.model.work import WorkItem
from reefknot.stores.sqlite import SqliteStore, reads, wait_table
from reefknot.stores.sqlite.wait_table import CONTROL_TOPIC, FOR_ONE, WaitTable, bucket_of
from reefknot.stores.wakeups import CLASS_TOPIC, END_TOPIC
from tests.unit.stores.sqlite.stores_on_a_file import opened

TOPIC, OTHER = END_TOPIC + "a", CONTROL_TOPIC
WITHIN_S = 20.0
OPEN_AND_WAIT = """
import sys, time
from reefknot.stores.sqlite.wait_table import WaitTable, bucket_of
table = WaitTable(sys.argv[1])
assert table.open()
table.wait_for(bucket_of(sys.argv[2]))
print("ready", flush=True)
time.sleep(600)
"""

Tables = Callable[[], WaitTable]


@pytest.fixture
def tables(path: Path) -> Iterator[Tables]:
    """Opens one table after the other, each with a slot of its own, as those of different processes."""
    path.touch(0o600)
    with ExitStack() as stack:

        def another() -> WaitTable:
            table = WaitTable(str(path))
            assert table.open()
            stack.callback(table.close)
            return table

        yield another


def is_called(table: WaitTable) -> bool:
    return bool(select.select([table.descriptor], [], [], 0)[0])


def used(table: WaitTable) -> int:
    assert table._memory is not None
    return table._memory[wait_table._USED : wait_table._CALLED].count(1)


def test_a_commit_calls_who_waits_for_its_topic_and_no_one_else(tables: Tables) -> None:
    sender, waits, idle, other = tables(), tables(), tables(), tables()
    waits.wait_for(bucket_of(TOPIC))
    other.wait_for(bucket_of(OTHER))
    sender.post({TOPIC})
    assert [is_called(one) for one in (sender, waits, idle, other)] == [False, True, False, False]
    assert waits.take() == [bucket_of(TOPIC)]
    assert (is_called(waits), waits.take()) == (False, [])
    waits.leave(bucket_of(TOPIC))
    sender.post({TOPIC})
    assert not is_called(waits), "it waits no longer"


def test_a_process_that_has_not_come_yet_is_called_once_and_gets_all_topics(tables: Tables) -> None:
    sender, waits = tables(), tables()
    for topic in (TOPIC, OTHER):
        waits.wait_for(bucket_of(topic))
        for _ in range(50):
            sender.post({topic})
    assert waits._socket is not None
    assert waits._socket.recv(1) == b""
    assert not is_called(waits)
    assert sorted(waits.take()) == sorted({bucket_of(TOPIC), bucket_of(OTHER)})


def test_a_call_that_comes_while_the_last_one_is_taken_is_not_lost(tables: Tables) -> None:
    """Between the last datagram that was read and the mark that is taken back, another commit may call."""
    sender, waits = tables(), tables()
    waits.wait_for(bucket_of(TOPIC))
    sender.post({TOPIC})
    receive = waits._socket

    class Late:
        """Before it says that nothing more is there, another commit calls."""

        def recv(self, size: int) -> bytes:
            try:
                return receive.recv(size)  # type: ignore[union-attr]
            except BlockingIOError:
                sender.post({TOPIC})
                raise

        def __getattr__(self, name: str) -> Any:
            return getattr(receive, name)

    waits._socket = Late()  # type: ignore[assignment]
    assert waits.take() == [bucket_of(TOPIC)]
    waits._socket = receive
    sender.post({TOPIC})
    assert is_called(waits)


def test_of_the_routers_that_wait_one_is_called_and_each_in_its_turn(tables: Tables) -> None:
    sender, routers = tables(), [tables() for _ in range(3)]
    for one in routers:
        one.wait_for(bucket_of(FOR_ONE))
    for number in range(1, 4):
        sender.post({FOR_ONE})
        assert sum(is_called(one) for one in routers) == number
    sender.post({TOPIC})
    assert sum(is_called(one) for one in routers) == 3


def test_ends_and_classes_share_no_number_with_what_many_commits_touch() -> None:
    common = {bucket_of(topic) for topic in (FOR_ONE, "", *wait_table.COMMON_TOPICS)}
    assert len(common) == len(wait_table.COMMON_TOPICS) + 2
    classes = {bucket_of(f"{CLASS_TOPIC}cpu@worker-{number}") for number in range(3000)}
    ends = {bucket_of(f"{END_TOPIC}{number}") for number in range(9000)}
    assert common.isdisjoint(classes | ends)
    assert classes.isdisjoint(ends)
    assert max(ends) < wait_table.BUCKETS


# ---- processes that come and go --------------------------------------------------------------------------------------


@contextmanager
def process_that_waits(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", OPEN_AND_WAIT, str(path), TOPIC], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "control: frozen"])
def test_a_killed_process_loses_its_slot_with_the_next_call(path: Path, tables: Tables, is_killed: bool) -> None:
    sender = tables()
    with process_that_waits(path) as process:
        process.send_signal(signal.SIGKILL if is_killed else signal.SIGSTOP)
        if is_killed:
            process.wait(WITHIN_S)
        assert used(sender) == 2
        for _ in range(100):
            sender.post({TOPIC})
        assert used(sender) == (1 if is_killed else 2)
        assert tables()._slot == (1 if is_killed else 2), "the slot is given to the next process"


def test_a_fork_touches_nothing_of_its_parents_slot(path: Path, tables: Tables) -> None:
    sender, waits = tables(), tables()
    waits.wait_for(bucket_of(TOPIC))
    child = os.fork()
    if not child:
        waits.let_go()
        sender.let_go()
        waits.leave(bucket_of(TOPIC))
        sender.post({TOPIC})
        os._exit(0 if waits.take() == [] and waits.descriptor == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not is_called(waits)
    assert tables()._slot == 2, "both slots are still locked"
    sender.post({TOPIC})
    assert waits.take() == [bucket_of(TOPIC)]


def test_a_datagram_of_a_stranger_is_a_look_and_no_more(tables: Tables) -> None:
    waits = tables()
    waits.wait_for(bucket_of(TOPIC))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                stranger.sendto(b"x" * 4096, wait_table._address(waits._entry(waits._slot)[0]))
                sent += 1
        assert sent > 0
        tables().post({TOPIC})  # the buffer is full: it does not wait
        assert waits.take() == [bucket_of(TOPIC)]
        assert (is_called(waits), waits.take()) == (False, [])


def test_the_last_one_to_leave_removes_the_file(path: Path, tables: Tables) -> None:
    file = Path(f"{path}{wait_table.ENDING}")
    path.chmod(0o660)
    first, second = tables(), tables()
    assert stat.S_IMODE(file.stat().st_mode) == 0o660
    first.close()
    assert file.exists()
    second.close()
    assert not file.exists()


def test_a_table_that_was_removed_is_made_again_and_found_by_all(path: Path, tables: Tables) -> None:
    sender, waits = tables(), tables()
    waits.wait_for(bucket_of(TOPIC))
    os.unlink(f"{path}{wait_table.ENDING}")
    newcomer = tables()
    newcomer.post({TOPIC})
    assert (sender.is_lost, waits.is_lost, newcomer.is_lost, is_called(waits)) == (True, True, False, False)
    waits.open_again()
    newcomer.post({TOPIC})
    assert waits.take() == [bucket_of(TOPIC)]


def test_processes_of_another_network_are_not_relied_on_until_they_have_gone(
    path: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers with one volume: neither can call the other."""
    here = tables()
    with monkeypatch.context() as patched:
        patched.setattr(wait_table, "_network", lambda: 7)
        there = tables()
    assert (here.is_in_order, there.is_in_order) == (False, False)
    there.let_go()  # as if it was killed
    assert here.is_in_order


# ---- turns at the file's lock ----------------------------------------------------------------------------------------


@pytest.mark.real_time
async def test_who_waits_for_its_turn_is_woken_by_who_passes_it_on(tables: Tables) -> None:
    holder, waits = tables(), tables()
    waiting = asyncio.get_running_loop().run_in_executor(None, waits.wait_for_turn, WITHIN_S)
    await until(lambda: holder.is_wanted)
    began = asyncio.get_running_loop().time()
    holder.pass_on()
    assert await waiting
    assert asyncio.get_running_loop().time() - began < WITHIN_S / 2
    assert not holder.is_wanted


def test_one_that_does_not_come_is_called_once_and_holds_up_nobody(tables: Tables) -> None:
    holder, frozen = tables(), tables()
    assert frozen._memory is not None
    frozen._memory[wait_table._WANTS + frozen._slot] = 1
    assert holder.is_wanted
    holder.pass_on()
    assert not holder.is_wanted


def test_without_a_table_there_are_no_turns(path: Path) -> None:
    table = WaitTable(str(path))
    assert (table.is_wanted, table.wait_for_turn(1.0), table.is_in_order) == (False, False, False)
    table.pass_on()
    table.post({TOPIC})


# ---- whole stores ----------------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[reads.Reader]:
    """The reader of each read."""
    seen: list[reads.Reader] = []
    read = reads.Reader._timed

    def counted(reader: reads.Reader, *given: Any) -> Any:
        try:
            return read(reader, *given)
        finally:
            seen.append(reader)

    monkeypatch.setattr(reads.Reader, "_timed", counted)
    return seen


def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes look at the file by themselves once an hour, so that a call alone can wake them."""
    monkeypatch.setattr(reads, "RARE_POLL_S", 3600.0)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)


async def called(store: SqliteStore) -> None:
    """Return when this store is called by others, instead of watching the log."""
    await until(lambda: store._watcher._called_by is not None)


@pytest.mark.parametrize("wakes_all", [False, True], ids=["", "control: every commit wakes everybody"])
@pytest.mark.real_time
async def test_a_commit_that_does_not_concern_a_process_costs_it_no_read(
    path: Path, looks: list[reads.Reader], monkeypatch: pytest.MonkeyPatch, wakes_all: bool
) -> None:
    rarely(monkeypatch)
    if wakes_all:
        monkeypatch.setattr(wait_table, "bucket_of", lambda topic: 1)
        monkeypatch.setattr(reads, "bucket_of", lambda topic: 1)
    async with opened(path) as one, opened(path) as two:
        waiting = asyncio.create_task(one.control.wait(3600, after=0))
        await called(one)
        await until(lambda: one._reader in looks)
        looks.clear()
        for number in range(5):
            await two.work.enqueue([WorkItem(f"a{number}", "t")])
        if wakes_all:
            await until(lambda: one._reader in looks)
            waiting.cancel()
            return
        said = await two.control.post("hello")
        async with asyncio.timeout(WITHIN_S):
            assert await waiting == said
        assert looks.count(one._reader) == 1


@pytest.mark.parametrize("is_repaired", [True, False], ids=["", "control: no look at the file"])
@pytest.mark.real_time
async def test_a_lost_call_is_made_good_by_a_look_at_the_file(
    path: Path, looks: list[reads.Reader], monkeypatch: pytest.MonkeyPatch, is_repaired: bool
) -> None:
    assert reads.RARE_POLL_S <= 1
    if not is_repaired:
        rarely(monkeypatch)
    monkeypatch.setattr(WaitTable, "_call", lambda table, slot: None)
    async with opened(path) as one, opened(path) as two:
        waiting = asyncio.create_task(one.control.wait(3600, after=0))
        await called(one)
        await until(lambda: one._reader in looks)
        await two.control.post("hello")
        done, _ = await asyncio.wait([waiting], timeout=WITHIN_S if is_repaired else 1.5)
        assert bool(done) is is_repaired
        waiting.cancel()


@pytest.mark.real_time
async def test_an_end_in_another_process_wakes_only_those_who_wait_for_it(
    path: Path, looks: list[reads.Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    rarely(monkeypatch)
    monkeypatch.setattr("reefknot.stores.sqlite.work.LOOK_S", 3600.0)
    async with opened(path) as one, opened(path) as two, opened(path) as three:
        await three.work.enqueue([WorkItem("a", "t"), WorkItem("b", "t")])
        first, second = (asyncio.create_task(s.work.ended(i, 3600)) for s, i in ((one, "a"), (two, "b")))
        await called(one)
        await called(two)
        await until(lambda: len(looks) >= 2)
        looks.clear()
        assert await three.work.cancel("a")
        async with asyncio.timeout(WITHIN_S):
            item = await first
        assert item is not None
        assert item.id == "a"
        assert two._reader not in looks
        assert not second.done()
        second.cancel()


@pytest.mark.real_time
async def test_where_there_can_be_no_table_processes_watch_the_log(path: Path) -> None:
    os.mkdir(f"{path}{wait_table.ENDING}")
    async with opened(path) as one, opened(path) as two:
        waiting = asyncio.create_task(one.control.wait(3600, after=0))
        await asyncio.sleep(0)
        said = await two.control.post("hello")
        async with asyncio.timeout(WITHIN_S):
            assert await waiting == said
        assert one._table.descriptor == -1
