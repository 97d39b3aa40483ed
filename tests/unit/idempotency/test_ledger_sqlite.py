"""Mode txn on SQLite: the effect and its record commit together, or neither does."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import apsw
import msgspec
import pydantic
import pytest

from reefknot import errors
from reefknot.idempotency.ledger import claims, ledger
from tests.rows import for_each_row

pytestmark = pytest.mark.real_time
Connect = Callable[[str], Any]
DYING = Path(__file__).with_name("ledger_dying.py")


def with_sqlite3(**options: Any) -> Connect:
    return lambda path: sqlite3.connect(path, **options)


def with_dictionaries(path: str) -> sqlite3.Connection:
    """A caller whose rows are dictionaries, and whose text is bytes."""
    conn = sqlite3.connect(path)
    conn.row_factory = lambda cursor, row: dict(zip((name for name, *_ in cursor.description), row, strict=True))
    conn.text_factory = bytes
    return conn


def with_apsw_traces(path: str) -> apsw.Connection:
    conn = apsw.Connection(path)
    conn.row_trace = lambda cursor, row: {"row": row}
    return conn


BEGINS_BY_ITSELF: dict[str, Connect] = {
    "sqlite3": with_sqlite3(),
    "sqlite3 immediate": with_sqlite3(isolation_level="IMMEDIATE"),
    "sqlite3 none": with_sqlite3(isolation_level=None),
    "sqlite3 dictionaries": with_dictionaries,
    "apsw": apsw.Connection,
    "apsw traces": with_apsw_traces,
}
if sys.version_info >= (3, 12):
    BEGINS_BY_ITSELF["sqlite3 autocommit"] = with_sqlite3(autocommit=True)


def plain(path: str, beside: Any = None) -> Any:
    """
    A connection through the same library as `beside`.

    `apsw` and `sqlite3` each bring an SQLite of their own. Two on one file in one process undo each other's locks.
    """
    return apsw.Connection(path) if isinstance(beside, apsw.Connection) else sqlite3.connect(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A database that holds one table of the caller's."""
    path = str(tmp_path / "app.db")
    with closing(plain(path)) as conn:
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("CREATE TABLE effect (n INTEGER)")
    return path


@pytest.fixture
def conn(request: pytest.FixtureRequest, path: str) -> Iterator[Any]:
    with closing(getattr(request, "param", sqlite3.connect)(path)) as conn:
        yield conn


connects = pytest.mark.parametrize("conn", BEGINS_BY_ITSELF.values(), ids=BEGINS_BY_ITSELF.keys(), indirect=True)


def effects(path: str, beside: Any = None) -> int:
    with closing(plain(path, beside)) as conn:
        ((count,),) = list(conn.execute("SELECT count(*) FROM effect"))
    return int(count)


def records(path: str, beside: Any = None) -> list[tuple[str, str, str | None]]:
    with closing(plain(path, beside)) as conn:
        return list(conn.execute("SELECT key, fingerprint, result FROM reefknot_ledger ORDER BY key"))


def pay(conn: Any, key: str = "a", *, amount: int = 20, wait: float = 10.0) -> Any:
    """A caller's code, as documented."""
    with ledger(conn, wait=wait).once(key) as claim:
        if claim.done:
            return claim.result
        conn.execute("INSERT INTO effect VALUES (1)")
        claim.result = {"paid": amount}
    return claim.result


def write_and_fail(conn: Any, key: str = "a") -> None:
    with ledger(conn).once(key):
        conn.execute("INSERT INTO effect VALUES (1)")
        raise ZeroDivisionError


def write_and_answer(conn: Any, value: object) -> None:
    """A body that never asks whether it is done."""
    with ledger(conn).once("a") as claim:
        conn.execute("INSERT INTO effect VALUES (1)")
        claim.result = value


def enter(block: Any) -> None:
    with block:
        pass


# ---- one block -------------------------------------------------------------------------------------------------------


@connects
def test_the_second_call_of_a_key_gets_the_first_ones_result_and_has_no_effect(conn: Any, path: str) -> None:
    assert pay(conn, amount=20) == {"paid": 20}
    assert pay(conn, amount=99) == {"paid": 20}
    assert not conn.in_transaction
    assert effects(path, conn) == 1
    assert records(path, conn) == [("a", "", '{"paid":20}')]


@connects
def test_an_exception_undoes_the_effect_and_the_record_and_propagates(conn: Any, path: str) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail(conn)
    assert not conn.in_transaction
    assert effects(path, conn) == 0
    assert pay(conn) == {"paid": 20}
    assert effects(path, conn) == 1


@connects
def test_a_block_joins_an_open_transaction_and_leaves_the_commit_to_the_caller(conn: Any, path: str) -> None:
    conn.execute("BEGIN")
    pay(conn)
    assert conn.in_transaction
    conn.execute("ROLLBACK")
    assert effects(path, conn) == 0
    conn.execute("BEGIN")
    pay(conn)
    conn.execute("COMMIT")
    assert (effects(path, conn), len(records(path, conn))) == (1, 1)


@connects
def test_in_a_joined_transaction_an_exception_undoes_the_block_alone(conn: Any, path: str) -> None:
    conn.execute("BEGIN")
    conn.execute("INSERT INTO effect VALUES (0)")
    pay(conn, "earlier")
    with pytest.raises(ZeroDivisionError):
        write_and_fail(conn)
    conn.execute("COMMIT")
    assert effects(path, conn) == 2
    assert [key for key, *_ in records(path, conn)] == ["earlier"]


def test_nested_blocks_of_one_caller_share_the_outer_ones_end(conn: Any, path: str) -> None:
    with ledger(conn).once("outer"):
        pay(conn, "inner")
        with pytest.raises(ZeroDivisionError):
            write_and_fail(conn, "inner too")
        assert effects(path) == 0
    assert effects(path) == 1
    outer = ledger(conn).once("another outer")
    outer.__enter__()
    pay(conn, "another inner")
    outer.__exit__(ValueError, ValueError(), None)
    assert effects(path) == 1
    assert [key for key, *_ in records(path)] == ["inner", "outer"]


if sys.version_info >= (3, 12):

    def test_without_autocommit_the_callers_commit_keeps_both(path: str) -> None:
        """Such a connection has a transaction open at all times."""
        conn = sqlite3.connect(path, autocommit=False)
        pay(conn)
        assert effects(path) == 0
        conn.commit()
        assert pay(conn, amount=99) == {"paid": 20}
        conn.close()
        assert effects(path) == 1


def test_leaving_without_a_result_records_null_and_that_is_a_hit(conn: Any, path: str) -> None:
    for done in (False, True):
        with ledger(conn).once("a") as claim:
            assert (claim.done, claim.result) == (done, None)
    assert records(path) == [("a", "", "null")]


def test_a_body_that_forgets_to_look_has_no_second_effect_and_may_not_set_a_result(conn: Any, path: str) -> None:
    for _ in range(2):
        with ledger(conn).once("a"):
            conn.execute("INSERT INTO effect VALUES (1)")
    with pytest.raises(errors.IdempotencyError, match=r"if claim\.done"):
        write_and_answer(conn, "again")
    assert effects(path) == 1


async def _pay_async(conn: Any) -> Any:
    async with ledger(conn).once("a") as claim:
        if claim.done:
            return claim.result
        conn.execute("INSERT INTO effect VALUES (1)")
        claim.result = {"paid": 20}
    return claim.result


@connects
def test_async_with_does_the_same(conn: Any, path: str) -> None:
    assert [asyncio.run(_pay_async(conn)) for _ in range(2)] == [{"paid": 20}] * 2
    assert effects(path, conn) == 1


async def test_a_cancelled_task_undoes_its_block(conn: Any, path: str) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with ledger(conn).once("a"):
            conn.execute("INSERT INTO effect VALUES (1)")
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.wait_for(inside.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not conn.in_transaction
    assert effects(path) == 0


# ---- results ---------------------------------------------------------------------------------------------------------


class Receipt(msgspec.Struct):
    number: int
    lines: tuple[str, ...]


class Model(pydantic.BaseModel):
    number: int
    lines: tuple[str, ...] = ()


@pytest.mark.parametrize("kind", [Receipt, Model])
def test_a_result_comes_back_as_json_or_as_its_type_to_the_first_caller_too(conn: Any, kind: Any) -> None:
    given = kind(number=7, lines=("tea",))
    with ledger(conn).once("a") as claim:
        claim.result = [given]
    for _ in range(2):
        assert claim.result == [{"number": 7, "lines": ["tea"]}]
        assert claim.result_as(list[kind]) == [given]
        with ledger(conn).once("a") as claim:
            assert claim.done
    with pytest.raises(msgspec.ValidationError):
        claim.result_as(kind)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), errors.NotJsonError),
        (float("nan"), errors.NotJsonError),
        ("x" * claims.LARGEST_RESULT, errors.ResultTooLargeError),
    ],
)
def test_an_unkept_result_undoes_the_effect(conn: Any, path: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        write_and_answer(conn, value)
    assert effects(path) == 0


def test_a_result_of_the_largest_size_is_kept_and_a_block_is_entered_once(conn: Any) -> None:
    with ledger(conn).once("a") as claim:
        claim.result = "x" * (claims.LARGEST_RESULT - 2)
    with ledger(conn).once("a") as claim:
        assert len(claim.result) == claims.LARGEST_RESULT - 2
    block = ledger(conn).once("a")
    enter(block)
    with pytest.raises(errors.IdempotencyError, match="entered before"):
        enter(block)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_key_with_another_fingerprint_is_refused_with_both(conn: Any) -> None:
    book = ledger(conn)
    enter(book.once("a", fingerprint="f1"))
    with pytest.raises(errors.KeyConflictError) as caught:
        enter(book.once("a", fingerprint="f2"))
    assert (caught.value.recorded, caught.value.given) == ("f1", "f2")
    assert not conn.in_transaction
    for same in (book.once("a"), book.once("a", fingerprint="f1")):
        with same as claim:
            assert claim.done


def test_what_is_no_connection_of_a_known_driver_is_refused() -> None:
    class Connection:
        """The name alone does not make one."""

    for thing in (Connection(), None, "app.db"):
        with pytest.raises(errors.ParameterTypeError, match="sqlite3, apsw or psycopg"):
            ledger(thing)


TABLES = ("", "1a", "a-b", 'a"b', "a;DROP TABLE effect", "a.b.c", "a b", "x" * 64, "ü", "a\n", 7)


@for_each_row(
    ("options", "key", "error"),
    [
        *(({}, key, errors.ParameterError) for key in ("", "\0")),
        ({}, 7, errors.ParameterTypeError),
        ({}, "x" * 513, errors.KeyTooLongError),
        *(({"table": table}, "a", errors.ParameterError) for table in TABLES),
        *(({"wait": wait}, "a", errors.ParameterError) for wait in (-1, float("nan"), float("inf"), True, "1")),
    ],
)
def test_a_bad_key_table_or_wait_is_refused(options: Any, key: Any, error: type[Exception], conn: Any) -> None:
    with pytest.raises(error):
        ledger(conn, **options).once(key)


@pytest.mark.parametrize("table", ["order", "main.select", "_x9"])
def test_a_table_name_may_be_qualified_or_a_word_of_sql(conn: Any, table: str) -> None:
    for expected in (False, True):
        with ledger(conn, table=table).once("a") as claim:
            assert claim.done is expected


def commit(conn: Any) -> None:
    conn.commit()


def commit_and_go_on(conn: Any) -> None:
    conn.commit()
    conn.execute("INSERT INTO effect VALUES (2)")


def roll_back(conn: Any) -> None:
    conn.rollback()


def write_and_end(conn: Any, end: Callable[[Any], None]) -> None:
    with ledger(conn).once("a"):
        conn.execute("INSERT INTO effect VALUES (1)")
        end(conn)


@pytest.mark.parametrize("end", [commit, commit_and_go_on, roll_back])
@pytest.mark.parametrize("joined", [False, True])
def test_a_block_that_ends_its_own_transaction_is_told(conn: Any, path: str, end: Any, joined: bool) -> None:
    if joined:
        conn.execute("BEGIN")
    with pytest.raises(errors.IdempotencyError, match="ended its own transaction"):
        write_and_end(conn, end)
    conn.rollback()
    if end is roll_back:
        assert pay(conn) == {"paid": 20}
    else:  # committed without its result: whether the whole effect happened, nobody can tell
        with pytest.raises(errors.OutcomeUnknownError):
            pay(conn)
    assert effects(path) == 1


def read_only(path: str) -> Any:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def no_database(connect: Connect) -> Connect:
    def connected(path: str) -> Any:
        Path(path).write_bytes(b"not a database, but long enough" * 100)
        return connect(path)

    return connected


@pytest.mark.parametrize(
    ("conn", "table", "error", "says"),
    [
        (sqlite3.connect, "effect", errors.StoreVersionError, "not a ledger"),
        (read_only, "reefknot_ledger", errors.StoreUnavailableError, "may not be written"),
        (no_database(sqlite3.connect), "reefknot_ledger", errors.StoreCorruptError, None),
        (no_database(apsw.Connection), "reefknot_ledger", errors.StoreCorruptError, None),
    ],
    indirect=["conn"],
)
def test_what_cannot_hold_a_ledger_is_named(conn: Any, table: str, error: type[Exception], says: str | None) -> None:
    with pytest.raises(error, match=says):
        enter(ledger(conn, table=table).once("a"))
    assert not conn.in_transaction


def test_a_closed_connection_raises_what_the_driver_raises_and_leaves_no_trace(path: str) -> None:
    conn = sqlite3.connect(path)
    conn.close()
    for _ in range(2):  # the second time it is not "another task" either
        with pytest.raises(sqlite3.ProgrammingError) as caught:
            enter(ledger(conn).once("a"))
        assert caught.value.__cause__ is not caught.value


def test_a_busy_handler_of_the_callers_own_is_left_in_place(path: str) -> None:
    one, two = apsw.Connection(path), apsw.Connection(path)
    asked = []

    def handler(count: int) -> bool:
        asked.append(count)
        return False

    two.set_busy_handler(handler)
    with ledger(one).once("a"), pytest.raises(errors.KeyInProgressError):
        pay(two, wait=0)
    assert asked == [0]
    one.close()
    two.close()


# ---- two at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connect", BEGINS_BY_ITSELF.values(), ids=BEGINS_BY_ITSELF.keys())
@pytest.mark.parametrize("first_ends", ["well", "badly"])
async def test_a_second_task_waits_without_blocking_the_loop(connect: Connect, path: str, first_ends: str) -> None:
    """Both live in one loop: a driver that waited inside of its call would never let the first one end."""
    one, two = connect(path), connect(path)
    block = ledger(one).once("a")
    claim = await block.__aenter__()
    one.execute("INSERT INTO effect VALUES (1)")
    claim.result = "first"
    later = asyncio.create_task(_pay_async(two))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not later.done()
    if first_ends == "well":
        await block.__aexit__(None, None, None)
    else:
        await block.__aexit__(ValueError, ValueError(), None)
    answer = await later
    one.close()
    two.close()

    assert answer == ("first" if first_ends == "well" else {"paid": 20})
    assert effects(path) == 1


@connects
def test_a_wait_is_bounded_and_the_busy_timeout_is_put_back(conn: Any, path: str) -> None:
    conn.execute("PRAGMA busy_timeout = 3000")
    with closing(plain(path, conn)) as one, ledger(one).once("a"):
        with pytest.raises(errors.KeyInProgressError, match="write lock") as caught:
            pay(conn, wait=0.02)
        assert "lease" not in str(caught.value)
    assert not conn.in_transaction
    with ledger(conn).once("a") as claim:
        assert claim.done
    assert "3000" in str(next(iter(conn.execute("PRAGMA busy_timeout"))))


def test_a_joined_transaction_that_read_an_old_state_is_told_to_start_over(path: str) -> None:
    one, two = apsw.Connection(path), apsw.Connection(path)
    list(two.execute("BEGIN; SELECT * FROM effect"))
    pay(one)
    with pytest.raises(errors.StoreUnavailableError, match="no longer the latest"):
        pay(two)
    two.execute("ROLLBACK")
    assert pay(two) == {"paid": 20}
    one.close()
    two.close()
    assert effects(path) == 1


async def test_two_tasks_in_blocks_of_one_connection_are_refused(conn: Any, path: str) -> None:
    """Joining, the second would report as done what the first may still undo."""
    block = ledger(conn).once("a")
    await block.__aenter__()
    with pytest.raises(errors.IdempotencyError, match="give each its own connection"):
        await asyncio.create_task(_pay_async(conn))
    await block.__aexit__(ValueError, ValueError(), None)
    assert await asyncio.create_task(_pay_async(conn)) == {"paid": 20}
    assert effects(path) == 1


def naive(conn: Any, key: str, between: Callable[[], object]) -> None:
    """Look, then act: what the race is about."""
    if not list(conn.execute("SELECT key FROM reefknot_ledger WHERE key = ?", (key,))):
        between()
        conn.execute("INSERT INTO effect VALUES (1)")
        conn.execute("INSERT OR IGNORE INTO reefknot_ledger (key, fingerprint) VALUES (?, '')", (key,))


def race(path: str, callers: int, work: Callable[[Any], object]) -> None:
    start = Barrier(callers)
    trouble: list[BaseException] = []

    def caller() -> None:
        try:
            conn = apsw.Connection(path)
            conn.set_busy_timeout(10_000)  # before the first read: another caller may be recovering the log right now
            conn.execute("PRAGMA synchronous = OFF")
            start.wait(10)
            work(conn)
            conn.close()
        except BaseException as error:
            trouble.append(error)

    threads = [Thread(target=caller) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not trouble


def test_sixteen_callers_of_each_key_have_one_effect_each(path: str) -> None:
    keys = [f"key-{n}" for n in range(12)]
    answers: list[Any] = []
    race(path, 16, lambda conn: answers.extend(pay(conn, key) for key in keys))
    assert effects(path) == len(keys)
    assert len(records(path)) == len(keys)
    assert answers == [{"paid": 20}] * 16 * len(keys)


def test_control_callers_that_look_and_then_act_have_two_effects(conn: Any, path: str) -> None:
    enter(ledger(conn).once("makes the table"))
    conn.close()
    both_looked = Barrier(2)
    race(path, 2, lambda conn: naive(conn, "a", lambda: both_looked.wait(10)))
    assert effects(path) == 2


# ---- death -----------------------------------------------------------------------------------------------------------


def die_everywhere(variant: str, path: str) -> list[tuple[int, int]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(DYING), variant, "sqlite", path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(effects, records) for effects, records in json.loads(done.stdout)]


def test_killed_at_any_statement_and_restarted_there_is_one_effect_and_one_record(tmp_path: Path) -> None:
    counts = die_everywhere("txn", str(tmp_path / "app.db"))
    assert len(counts) >= 10
    assert set(counts) == {(1, 1)}


@pytest.mark.parametrize(("variant", "wrong"), [("effect_first", 2), ("record_first", 0)])
def test_control_a_record_outside_the_transaction_repeats_or_loses_it(tmp_path: Path, variant: str, wrong: int) -> None:
    assert wrong in {effects for effects, _ in die_everywhere(variant, str(tmp_path / "app.db"))}


# ---- what it costs to load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("driver", "loaded"), [("sqlite3", []), ("apsw", ["apsw"])])
def test_a_driver_is_imported_only_for_its_own_connections(driver: str, loaded: list[str]) -> None:
    program = (
        f"import sys, {driver}; from reefknot.idempotency.ledger import ledger\n"
        f"conn = {driver}.Connection(':memory:')\n"
        "with ledger(conn).once('a'): pass\n"
        "conn.close(); print([name for name in ('apsw', 'psycopg') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(loaded), done.stderr
