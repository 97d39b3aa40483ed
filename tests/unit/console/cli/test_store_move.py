"""`reefknot store move` between files: what is shown, refused and given up, and what a moved store still does."""

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from reefknot import StoreFullError, StoreMovedError, connect, open_store
from reefknot.console.cli.app import Exit
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueue
from reefknot.runtime.processes import marked_owner
from reefknot.stores.port import MOVE, StoredValue
from reefknot.stores.sqlite import SqliteStore
from tests.unit.console.cli.running import Commands, Ended

FROM, TO = ("--from", "sqlite:old.db"), ("--to", "sqlite:new.db")


@pytest.fixture
def old(rk: Commands) -> Path:
    """A store with one job."""
    assert rk("submit", "--type", "http.get", "--inputs", "{}", "--id", "a", "--engine", "sqlite:old.db").code == 0
    return rk.folder / "old.db"


def move(rk: Commands, *words: str) -> Ended:
    return rk("store", "move", *FROM, *TO, *words)


def one_of(file: str, statement: str) -> str:
    """The first value that a query of a file finds."""
    with sqlite3.connect(file) as connection:
        return str(connection.execute(statement).fetchone()[0])


def cut_off(monkeypatch: pytest.MonkeyPatch, rk: Commands) -> None:
    """A move that dies before it has ended."""

    async def dies(self: SqliteStore, *items: object) -> int:
        raise StoreFullError("sqlite:new.db", "the disk is full", "make room")

    with monkeypatch.context() as patched:
        patched.setattr("reefknot.stores.sqlite.work.SqliteWorkQueue.adopt", dies)
        ended = move(rk)
    assert (ended.code, "the disk is full" in ended.err) == (Exit.UNREACHABLE, True)


def test_a_move_says_what_went_where_and_the_archive_is_verified(rk: Commands, old: Path) -> None:
    ended = move(rk, "--archive", "events.jsonl", "--as", "ann", "--json")
    assert ended.code == 0
    done = ended.json
    assert (done["jobs"], done["keys"], done["values"], done["actor"]) == ({"pending": 1}, {}, 0, "ann")
    assert (done["archive"], done["chains"]) == (str(rk.folder / "events.jsonl"), 1)
    verified = rk("audit", "verify", "events.jsonl")
    assert (verified.code, f"chain {done['heads'][0]['chain']}" in verified.out) == (0, True)
    for name, other in (("old.db", "new.db"), ("new.db", "old.db")):
        text = one_of(name, "SELECT body FROM audit WHERE event_type = 'operator_action' ORDER BY sequence DESC")
        assert f"sqlite:{rk.folder / other}" in text
        assert done["heads"][0]["hash"] in text
    assert [one["id"] for one in rk("job", "list", "--engine", "sqlite:new.db", "--json").json["jobs"]] == ["a"]


def test_a_dry_run_counts_and_makes_no_store_and_no_mark(rk: Commands, old: Path) -> None:
    ended = move(rk, "--dry-run")
    assert (ended.code, "would be moved to" in ended.out, "1 pending" in ended.out) == (0, True, True)
    assert not (rk.folder / "new.db").exists()
    assert rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:old.db").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--type", "http.get", "--inputs", "{}"),
        ("run", "work.jsonl"),
        ("up",),
        ("worker", "start"),
        ("router", "start"),
        ("job", "cancel", "a"),
        ("store", "compact"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("is_whole", [True, False], ids=["moved", "half moved"])
def test_nothing_works_on_a_store_that_was_moved_or_has_a_part_of_one(
    rk: Commands, monkeypatch: pytest.MonkeyPatch, old: Path, words: tuple[str, ...], is_whole: bool
) -> None:
    rk.write('{"type": "http.get", "inputs": {}}\n', "work.jsonl")
    if is_whole:
        assert move(rk).code == 0
    else:
        cut_off(monkeypatch, rk)
    for name in ("old.db",) if is_whole or "a" in words else ("old.db", "new.db"):
        ended = rk(*words, "--engine", f"sqlite:{name}")
        said = f"it was moved to sqlite:{rk.folder / 'new.db'}" if is_whole else "is under way"
        assert (ended.code, said in ended.err) == (Exit.MISCONFIGURED, True), (ended.code, ended.err)


def test_a_moved_store_is_read_and_backed_up_and_no_code_can_open_it_to_write(rk: Commands, old: Path) -> None:
    assert move(rk).code == 0
    flag = ("--engine", "sqlite:old.db")
    for words in ("job list", "job show a", "audit verify", "store check", "quarantine list"):
        ended = rk(*words.split(), *flag)
        assert ended.code == 0, (words, ended.err)
        assert "it was moved to" in ended.err
    assert rk("store", "backup", "copy.db", *flag).code == 0

    async def opened() -> None:
        for one in (open_store("sqlite:old.db"), connect("sqlite:old.db")):
            with pytest.raises(StoreMovedError, match=r"moved to .*new.db"):
                async with one:
                    pass

    asyncio.run(opened())


def test_a_move_that_was_cut_off_goes_on_with_the_same_command_alone(
    rk: Commands, monkeypatch: pytest.MonkeyPatch, old: Path
) -> None:
    cut_off(monkeypatch, rk)
    other = rk("store", "move", *FROM, "--to", "sqlite:third.db")
    assert (other.code, "is under way" in other.err) == (Exit.MISCONFIGURED, True)
    rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:third.db")
    foreign = rk("store", "move", "--from", "sqlite:third.db", *TO)
    assert (foreign.code, "delete it, or name another target" in foreign.err) == (Exit.FAILED, True)
    assert move(rk).code == move(rk).code == 0
    assert rk("job", "list", "--engine", "sqlite:new.db", "--json").json["jobs"][0]["id"] == "a"


def test_a_move_is_given_up_and_the_old_store_works_again(
    rk: Commands, monkeypatch: pytest.MonkeyPatch, old: Path
) -> None:
    assert move(rk, "--cancel").code == Exit.FAILED, "nothing is under way"
    cut_off(monkeypatch, rk)
    (rk.folder / "new.db").rename(rk.folder / "away.db")
    given_up = move(rk, "--cancel")
    assert (given_up.code, "is given up" in given_up.out) == (0, True)
    assert rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:old.db").code == 0
    (rk.folder / "away.db").rename(rk.folder / "new.db")
    assert rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:new.db").code == 78, "a part of it"
    assert move(rk).code == Exit.FAILED
    assert rk("store", "move", *FROM, "--to", "sqlite:third.db").code == 0
    assert move(rk, "--cancel").code == Exit.FAILED, "it has ended"


def test_there_and_back_again_to_a_new_file(rk: Commands, old: Path) -> None:
    assert move(rk).code == 0
    back = rk("store", "move", "--from", "sqlite:new.db", "--to", "sqlite:old.db")
    assert (back.code, "delete it, or name another target" in back.err) == (Exit.FAILED, True)
    old.rename(rk.folder / "old.db.moved")
    assert rk("store", "move", "--from", "sqlite:new.db", "--to", "sqlite:old.db").code == 0
    assert rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:old.db").code == 0
    assert rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:new.db").code == 78


def test_what_cannot_be_moved_is_refused_by_name_and_nothing_changes(
    rk: Commands, monkeypatch: pytest.MonkeyPatch, old: Path
) -> None:
    before = old.read_bytes()
    rk("submit", "--type", "http.get", "--inputs", "{}", "--engine", "sqlite:full.db")
    rk.write("no archive", "taken.jsonl")
    rk.write("", "empty.db")
    refused = {
        Exit.USAGE: [
            ("--from memory: --to sqlite:new.db", "--from: memory: ends with the process"),
            ("--from sqlite:old.db --to memory:", "--to: memory: ends with the process"),
            ("--from sqlite:old.db --to old.db", "--to: old.db: is no address of a store"),
            ("--from sqlite:old.db --to sqlite:./old.db", "are the same store"),
            ("--from sqlite:old.db --engine sqlite:old.db --to sqlite:new.db", "not with both"),
        ],
        Exit.FAILED: [
            ("--from sqlite:old.db --to sqlite:full.db", "full.db is not empty"),
            ("--from sqlite:old.db --to sqlite:new.db --archive taken.jsonl", "taken.jsonl: exists already"),
        ],
        Exit.UNREACHABLE: [
            ("--from sqlite:nowhere.db --to sqlite:new.db", "there is no store at"),
            ("--from sqlite:empty.db --to sqlite:new.db", "empty.db: is an empty file"),
            ("--from nats://127.0.0.1:9 --to sqlite:new.db", "cannot be reached"),
        ],
    }
    monkeypatch.setenv("REEFKNOT__NATS__PATIENCE_SECONDS", "0.1")
    for code, cases in refused.items():
        for words, said in cases:
            ended = rk("store", "move", *words.split())
            assert (ended.code, said in ended.err) == (code, True), (words, ended.code, ended.err)
    assert old.read_bytes() == before
    assert rk("store", "move", *FROM, "--to", "sqlite:full.db", "--dry-run").code == Exit.FAILED


async def no_room(self: SqliteStore) -> int:
    return 100


def test_a_target_without_room_and_a_source_of_another_version_are_refused(
    rk: Commands, monkeypatch: pytest.MonkeyPatch, old: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SqliteStore, "room", no_room)
        ended = move(rk)
    assert (ended.code, "room for 100 bytes, and 2 KiB are needed" in ended.err) == (Exit.UNREACHABLE, True), ended.err
    with sqlite3.connect(old) as connection:
        connection.execute("PRAGMA user_version = 99")
    ended = move(rk)
    assert (ended.code, "version 99" in ended.err) == (Exit.MISCONFIGURED, True)


@pytest.mark.parametrize("what", ["job", "key"])
def test_what_a_living_process_holds_is_not_moved_and_what_a_dead_one_held_is(
    rk: Commands, old: Path, what: str
) -> None:
    dead = "w@" + marked_owner("").removeprefix("@").replace(".", ".999", 1)

    async def hold(owner: str, name: str) -> None:
        async with open_store("sqlite:old.db") as store:
            if what == "key":
                await store.idempotency.claim(name, owner=owner)
            else:
                await store.work.enqueue([WorkItem(name, "t")], Enqueue(owner=owner))

    asyncio.run(hold(dead, "left"))
    assert move(rk, "--dry-run").code == 0
    asyncio.run(hold(marked_owner("w"), "held"))
    ended = move(rk)
    assert (ended.code, "a process still holds held (w@" in ended.err) == (Exit.TEMPORARY, True), ended.err
    assert not (rk.folder / "new.db").exists()


def test_the_systems_and_values_of_a_move_are_left_behind(rk: Commands, old: Path) -> None:
    async def fill() -> None:
        async with open_store("sqlite:old.db") as store:
            for name in ("gone", "schedule:a"):
                await store.values.put(name, "{}", version=0)

    async def values() -> list[StoredValue]:
        async with open_store("sqlite:new.db") as store:
            return list(await store.values.list())

    asyncio.run(fill())
    assert move(rk).code == 0
    assert [one.name for one in asyncio.run(values())] == ["schedule:a", MOVE]
    mark = one_of("new.db", f"SELECT body FROM value WHERE name = '{MOVE}'")
    assert json.loads(mark)["role"] == "target"
