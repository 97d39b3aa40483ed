"""Mode txn on a real PostgreSQL: the effect and its record commit together, or neither does."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import reefknot as rk
from reefknot.idempotency.ledger import ledger
from tests.integration.postgres import Server
from tests.unit.idempotency.test_ledger_sqlite import pay, write_and_fail
from tests.warm_commands import run_cold

pytestmark = pytest.mark.real_time

DYING = Path(__file__).parents[1] / "unit" / "idempotency" / "ledger_dying.py"
NUMBERS = itertools.count(1)
LEVELS = [psycopg.IsolationLevel.READ_COMMITTED, psycopg.IsolationLevel.SERIALIZABLE]


@pytest.fixture
def dsn(postgres: Server) -> Iterator[str]:
    """A schema of this test's own, with one table of the caller's."""
    name = f"ledger_{next(NUMBERS)}"
    dsn = postgres.new_schema(name)
    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE TABLE effect (n int)")
    yield dsn
    postgres.drop_schema(name)


def count(dsn: str) -> tuple[int, int]:
    """Effects, and records with a result."""
    with psycopg.connect(dsn) as conn:
        (effects,) = conn.execute("SELECT count(*) FROM effect").fetchone() or (0,)
        if conn.execute("SELECT to_regclass('reefknot_ledger')").fetchone() == (None,):
            return int(effects), 0
        (records,) = conn.execute("SELECT count(*) FROM reefknot_ledger WHERE result IS NOT NULL").fetchone() or (0,)
    return int(effects), int(records)


async def apay(conn: psycopg.AsyncConnection[Any], key: str = "a", *, wait: float = 10.0) -> Any:
    async with ledger(conn, wait=wait).once(key) as claim:
        if claim.done:
            return claim.result
        await conn.execute("INSERT INTO effect VALUES (1)")
        claim.result = {"paid": 20}
    return claim.result


def somebody_waits_for_a_lock(dsn: str) -> bool:
    """Looks until it is so, for ten seconds at most."""
    until = time.monotonic() + 10
    waiting = b"SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with psycopg.connect(dsn, autocommit=True) as conn:
        while not (found := conn.execute(waiting).fetchone()) and time.monotonic() < until:
            pass
    return found is not None


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_second_call_gets_the_first_ones_result(dsn: str, autocommit: bool, level: psycopg.IsolationLevel) -> None:
    with psycopg.connect(dsn, autocommit=autocommit, row_factory=dict_row) as conn:
        conn.isolation_level = level
        assert pay(conn, amount=20) == {"paid": 20}
        assert pay(conn, amount=99) == {"paid": 20}
        assert conn.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        assert count(dsn) == (1, 1)


async def test_an_async_connection_does_the_same(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert [await apay(conn), await apay(conn)] == [{"paid": 20}, {"paid": 20}]
    assert count(dsn) == (1, 1)


async def test_an_async_connection_in_a_plain_with_is_refused(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        with pytest.raises(rk.ParameterTypeError, match="async with"):
            ledger(conn).once("a").__enter__()


@pytest.mark.parametrize("autocommit", [False, True])
def test_an_exception_undoes_the_effect_and_the_record_and_propagates(dsn: str, autocommit: bool) -> None:
    """The first use: the table that was made goes with it, and is made again."""
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        with pytest.raises(ZeroDivisionError):
            write_and_fail(conn)
        assert count(dsn) == (0, 0)
        assert pay(conn) == {"paid": 20}
        assert count(dsn) == (1, 1)


def test_a_block_joins_an_open_transaction_and_undoes_only_its_own_part(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO effect VALUES (0)")
        with pytest.raises(ZeroDivisionError):
            write_and_fail(conn)
        pay(conn)
        assert count(dsn) == (0, 0)
        conn.commit()
        assert count(dsn) == (2, 1)
        conn.execute("INSERT INTO effect VALUES (0)")
        pay(conn, "b")
        conn.rollback()
    assert count(dsn) == (2, 1)


def test_a_body_that_forgets_to_look_has_no_second_effect(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        for _ in range(2):
            with ledger(conn).once("a"):
                conn.execute("INSERT INTO effect VALUES (1)")
    assert count(dsn) == (1, 1)


def test_the_callers_own_statement_timeout_is_in_force_inside_and_after(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("SET statement_timeout = '7s'")
        conn.commit()
        with ledger(conn, wait=3).once("a"):
            assert conn.execute("SHOW statement_timeout").fetchone() == ("7s",)
        assert conn.execute("SHOW statement_timeout").fetchone() == ("7s",)


def test_a_key_with_another_fingerprint_is_refused_with_both(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        with ledger(conn).once("a", fingerprint="f1"):
            pass
        with pytest.raises(rk.KeyConflictError) as caught:
            ledger(conn).once("a", fingerprint="f2").__enter__()
        assert (caught.value.recorded, caught.value.given) == ("f1", "f2")
        assert conn.info.transaction_status is psycopg.pq.TransactionStatus.IDLE


def commit_inside(conn: psycopg.Connection[Any], how: Callable[[], object]) -> None:
    with ledger(conn).once("a"):
        conn.execute("INSERT INTO effect VALUES (1)")
        how()


def test_a_commit_inside_of_the_block_is_refused_by_the_driver_and_undone(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        with pytest.raises(psycopg.ProgrammingError):
            commit_inside(conn, conn.commit)
        assert pay(conn) == {"paid": 20}
    assert count(dsn) == (1, 1)


def test_a_commit_as_a_statement_is_told(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn, pytest.raises(rk.IdempotencyError, match="ended its own"):
        commit_inside(conn, lambda: conn.execute("COMMIT"))


def test_a_failed_transaction_is_not_joined(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        with pytest.raises(psycopg.errors.UndefinedTable):
            conn.execute("SELECT * FROM nothing_here")
        with pytest.raises(rk.IdempotencyError, match="roll it back"):
            pay(conn)
        conn.rollback()
        assert pay(conn) == {"paid": 20}


def test_a_table_of_another_shape_is_named(dsn: str) -> None:
    with psycopg.connect(dsn) as conn, pytest.raises(rk.StoreVersionError, match="not a ledger"):
        ledger(conn, table="effect").once("a").__enter__()


def test_a_role_that_may_not_write_is_named(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        pay(conn)
        conn.read_only = True
        with pytest.raises(rk.StoreUnavailableError, match="may not be written"):
            pay(conn, "b")


def test_a_connection_that_is_cut_is_named_and_the_key_runs_on_another(dsn: str) -> None:
    with psycopg.connect(dsn) as one, psycopg.connect(dsn, autocommit=True) as two:
        block = ledger(one).once("a")
        block.__enter__()
        one.execute("INSERT INTO effect VALUES (1)")
        two.execute("SELECT pg_terminate_backend(%s, 5000)", (one.info.backend_pid,))
        with pytest.raises(rk.StoreUnavailableError, match="whether it was committed is not known"):
            block.__exit__(None, None, None)
        assert pay(two) == {"paid": 20}
        one.close()
    assert count(dsn) == (1, 1)


@pytest.mark.parametrize("table_is_there", [True, False])
@pytest.mark.parametrize("first_ends", ["well", "badly"])
async def test_a_second_caller_waits_for_the_first(dsn: str, first_ends: str, table_is_there: bool) -> None:
    connect = psycopg.AsyncConnection.connect
    async with await connect(dsn) as one, await connect(dsn) as two:
        if table_is_there:
            async with ledger(one).once("makes the table"):
                pass
        block = ledger(one).once("a")
        claim = await block.__aenter__()
        await one.execute("INSERT INTO effect VALUES (1)")
        claim.result = "first"
        later = asyncio.create_task(apay(two))
        assert await asyncio.to_thread(somebody_waits_for_a_lock, dsn)
        assert not later.done()
        if first_ends == "well":
            await block.__aexit__(None, None, None)
        else:
            await block.__aexit__(ValueError, ValueError(), None)
        assert await later == ("first" if first_ends == "well" else {"paid": 20})
    assert count(dsn)[0] == 1


@pytest.mark.parametrize("wait", [0, 0.05])
def test_a_wait_is_bounded_and_a_joined_transaction_survives_it(dsn: str, wait: float) -> None:
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        pay(one, "makes the table")
        with ledger(one).once("a"):
            with pytest.raises(rk.KeyInProgressError, match="another transaction"):
                pay(two, wait=wait)
            two.execute("INSERT INTO effect VALUES (2)")
            with pytest.raises(rk.KeyInProgressError):
                pay(two, wait=wait)
            two.commit()
    assert count(dsn) == (2, 2)


def test_other_keys_do_not_wait(dsn: str) -> None:
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        pay(one, "makes the table")
        with ledger(one).once("a"):
            assert pay(two, "b", wait=5) == {"paid": 20}


async def test_a_task_that_is_cancelled_while_it_waits_leaves_its_connection_usable(dsn: str) -> None:
    connect = psycopg.AsyncConnection.connect
    async with await connect(dsn) as one, await connect(dsn) as two:
        await apay(one, "makes the table")
        async with ledger(one).once("a"):
            later = asyncio.create_task(apay(two))
            assert await asyncio.to_thread(somebody_waits_for_a_lock, dsn)
            later.cancel()
            with pytest.raises(asyncio.CancelledError):
                await later
            assert two.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
            assert await apay(two, "b") == {"paid": 20}


def test_under_serializable_the_later_caller_fails_retryably_and_then_sees_the_result(dsn: str) -> None:
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        pay(one, "makes the table")
        one.isolation_level = two.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        tries: list[int] = []

        @rk.retry(on=psycopg.errors.SerializationFailure, attempts=3, base_delay=0)
        def later() -> Any:
            tries.append(1)
            return pay(two, amount=99)

        block = ledger(one).once("a")
        claim = block.__enter__()
        claim.result = "first"
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(later)
            assert somebody_waits_for_a_lock(dsn)
            block.__exit__(None, None, None)
            assert (answer.result(10), len(tries)) == ("first", 2)
    assert count(dsn) == (1, 2)


def race(dsn: str, callers: int, work: Callable[[Any], object]) -> None:
    start = Barrier(callers)

    def caller() -> None:
        with psycopg.connect(dsn) as conn:
            start.wait(10)
            work(conn)

    with ThreadPoolExecutor(callers) as threads:
        for called in [threads.submit(caller) for _ in range(callers)]:
            called.result(60)


def test_sixteen_callers_of_each_key_have_one_effect_each(dsn: str) -> None:
    """The table is not there yet: making it is part of the race."""
    keys = [f"key-{n}" for n in range(8)]
    answers: list[Any] = []
    race(dsn, 16, lambda conn: answers.extend(pay(conn, key) for key in keys))
    assert count(dsn) == (len(keys), len(keys))
    assert answers == [{"paid": 20}] * 16 * len(keys)


def test_control_callers_that_look_and_then_act_have_two_effects(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        pay(conn, "makes the table")
    both_looked = Barrier(2)

    def naive(conn: Any) -> None:
        if conn.execute("SELECT key FROM reefknot_ledger WHERE key = 'a'").fetchone() is None:
            both_looked.wait(10)
            conn.execute("INSERT INTO effect VALUES (1)")
            conn.execute("INSERT INTO reefknot_ledger VALUES ('a', '', 'null') ON CONFLICT DO NOTHING")

    race(dsn, 2, naive)

    assert count(dsn)[0] == 1 + 2


def die_everywhere(variant: str, dsn: str) -> list[tuple[int, int]]:
    done = run_cold(sys.executable, "-W", "error", DYING, variant, "postgres", dsn)
    assert done.returncode == 0, done.stderr
    return [(effects, records) for effects, records in json.loads(done.stdout)]


def test_killed_at_any_exchange_and_restarted_there_is_one_effect_and_one_record(dsn: str) -> None:
    counts = die_everywhere("txn", dsn)
    assert len(counts) >= 8
    assert set(counts) == {(1, 1)}


@pytest.mark.parametrize(("variant", "wrong"), [("effect_first", 2), ("record_first", 0)])
def test_control_a_record_outside_the_transaction_doubles_or_loses_it(dsn: str, variant: str, wrong: int) -> None:
    counts = die_everywhere(variant, dsn)
    assert wrong in {effects for effects, _ in counts}
