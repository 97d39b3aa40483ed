"""Clients and stores in forked processes: a child connects by itself or hears what to do, and its parent goes on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.pace import slowness
from tests.warm_commands import run_cold

HEAD = """
import asyncio, json, multiprocessing, os, signal, sys, threading
import reefknot as rk

url = sys.argv[1]

def forked(story):
    # What the story returns in a forked child, or the text of its error. A child that hangs is ended by its alarm.
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            found = story()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(there, json.dumps(found).encode())
        os._exit(0)
    os.close(there)
    with open(here, "rb") as answer:
        told = answer.read()
    ended = os.waitpid(child, 0)[1]
    return json.loads(told) if ended == 0 else f"ended by {ended}"
"""

SYNC = (
    HEAD
    + """
client = rk.connect_sync(url)
first = client.submit("test.step", {"n": 1}, assignment_id="first")

def child():
    second = client.submit("test.step", {"n": 2}, assignment_id=f"child-{os.getpid()}")
    again = forked(lambda: client.job("first").status())  # a grandchild
    return [first.status(), client.job("first").status(), second.status(), second.assignment_id, again]

told = [forked(child) for _ in range(3)]

stopped = threading.Event()
def load():
    while not stopped.is_set():
        client.submit("test.step", delay=3600)
        client.job("first").status()
threads = [threading.Thread(target=load) for _ in range(3)]
for one in threads:
    one.start()
busy = [forked(child) for _ in range(5)]  # in the middle of the writes and reads of other threads
stopped.set()
for one in threads:
    one.join()

def worker(number):
    signal.alarm(60)
    client.submit("test.step", {"n": number}, assignment_id=f"process-{number}")
    client.close()

fork = multiprocessing.get_context("fork")
processes = [fork.Process(target=worker, args=(number,)) for number in range(4)]
for one in processes:
    one.start()
for one in processes:
    one.join(60)

unused = forked(lambda: client.close())
parent = [client.job(name).status() for name in ("first", *(one[3] for one in [*told, *busy]))]
codes = [one.exitcode for one in processes]
found = [client.job(f"process-{number}").status() for number in range(4)]
client.close()
print(json.dumps([told, busy, codes, found, parent, unused, forked(lambda: client.job("first").status())]))
"""
)

ASYNC = (
    HEAD
    + """
async def main():
    async with rk.connect(url) as client, rk.open_store(url) as store:
        handle = await client.submit("test.step", assignment_id="a")
        async def use(call):
            return await call()
        calls = [
            lambda: client.submit("test.step"),
            handle.status,
            handle.result,
            lambda: store.work.get("a"),
            lambda: store.audit.append([]),
        ]
        told = [forked(lambda call=call: asyncio.run(use(call))) for call in calls]
        async def opens():
            async with rk.connect(url) as own:
                return await own.job("a").status()
        told.append(forked(lambda: asyncio.run(opens())))
        return [*told, await handle.status()]

print(json.dumps(asyncio.run(main())))
"""
)


def told_by(script: str, url: str, *words: str) -> Any:
    done = run_cold(sys.executable, "-c", script, url, *words, timeout=60 * slowness())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(params=["sqlite", "nats"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'state.db'}"
    server: NatsServer = request.getfixturevalue("nats_server")
    return f"{server.url}/{tmp_path.name.replace('_', '-')[-24:]}"


def test_a_sync_client_connects_again_in_every_child_and_its_parent_goes_on(url: str) -> None:
    told, busy, codes, found, parent, unused, closed = told_by(SYNC, url)

    for answer in [*told, *busy]:
        first, by_id, own, name, grandchild = answer
        assert (first, by_id, own, grandchild) == ("pending",) * 4
        assert name.startswith("child-")
    assert (codes, found) == ([0] * 4, ["pending"] * 4)
    assert parent == ["pending"] * 9, "what the children submitted, and the parent's own"
    assert unused is None
    assert "the client is closed; connect again" in closed


def test_an_async_client_and_a_store_say_in_a_child_what_to_do(url: str) -> None:
    *refused, opened, parent = told_by(ASYNC, url)
    for text in refused:
        assert text.startswith("StoreUnavailableError"), text
        assert "opened before this process was forked" in text
        assert "open it again in the child" in text
    assert (opened, parent) == ("pending", "pending")


GUARDED = (
    HEAD
    + """
with rk.connect_sync(url) as client:
    @rk.idempotent(key=str)
    def charge(order):
        return os.getpid()

    first = charge("order-1")
    told = forked(lambda: [charge("order-1"), charge("order-2") == os.getpid()])
    print(json.dumps([told, first == os.getpid() == charge("order-1"), first, charge("order-2") == os.getpid()]))
"""
)


def test_a_plain_function_under_a_key_uses_the_store_that_its_client_has_in_the_child(url: str) -> None:
    (of_parent, of_child), is_own, first, by_child = told_by(GUARDED, url)
    assert (of_parent, of_child, is_own) == (first, True, True)
    assert not by_child, "the child has charged the second order"


FILES = (
    HEAD
    + """
from pathlib import Path
from reefknot.runtime.clocks import SystemClock
from reefknot.ingest.documents import SqliteDocuments

async def main():
    folder = Path(url.removeprefix("sqlite:")).parent
    async with rk.open_audit_log(str(folder / "log")) as log:
        await log.append([])
        documents = await SqliteDocuments(folder / "documents.db", SystemClock()).start()
        await documents.get("notes", "a")
        async def use(call):
            return await call()
        calls = [log.head, lambda: documents.get("notes", "a"), log.close, documents.close]
        told = [forked(lambda call=call: asyncio.run(use(call))) for call in calls]
        await documents.get("notes", "a")
        await documents.close()
        return [*told, (await log.head()).sequence]

print(json.dumps(asyncio.run(main())))
"""
)


def test_logs_in_files_and_documents_say_so_too_and_a_close_in_a_child_closes_nothing(tmp_path: Path) -> None:
    log, documents, *closed, parent = told_by(FILES, f"sqlite:{tmp_path / 'state.db'}")
    for text in (log, documents):
        assert "opened before this process was forked" in text
    assert closed == [None, None]
    assert parent == 0


LOCKS = (
    HEAD
    + """
from pathlib import Path
from reefknot.runtime import files

client = rk.connect_sync(url)
client.submit("test.step", assignment_id="a")
inode = os.stat(url.removeprefix("sqlite:")).st_ino

def locks():
    client.job("a").status()
    found = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(one[1] == "POSIX" and one[4] == str(os.getpid()) and one[5].endswith(f":{inode}") for one in found)

kept = [locks(), forked(locks), locks()]
honest, files._let_go_of_inherited.__code__ = files._let_go_of_inherited.__code__, (lambda: None).__code__
kept.append(forked(locks))
files._let_go_of_inherited.__code__ = honest

from reefknot.runtime.forks import FORKS
(connection, *_) = [one for one in files._open_here if not one.readonly("main")]
for one in FORKS._uses:
    one.acquire()  # the client rests: the connection may be used here
connection.execute("BEGIN IMMEDIATE")
for one in FORKS._uses:
    one.release()
used = forked(lambda: client.job("a").status())
connection.execute("ROLLBACK")
memory = rk.connect_sync("memory:")
memory.submit("test.step", assignment_id="m")
print(json.dumps([*kept, used, client.job("a").status(), forked(lambda: memory.job("m").status())]))
"""
)


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system does not tell of locks")
def test_a_child_has_locks_of_its_own_and_no_file_that_was_forked_in_the_middle_of_a_write(tmp_path: Path) -> None:
    parent, child, after, control, used, went_on, memory = told_by(LOCKS, f"sqlite:{tmp_path / 'state.db'}")
    assert (parent, child, after) == (True, True, True)
    assert control is False, "a child that keeps its parent's connections is not locked: others could remove the log"
    assert "this process is a fork of one that was using it" in used
    assert went_on == "pending"
    assert "in the memory of the process that made it" in memory
