"""Durable idempotency: claim a key, record its result, both on disk before the next step."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import apsw
import diskcache
import redis
import redis.asyncio

from bench.measure import FULL, Contestant, Effort, measure
from bench.table import MICROSECONDS, Run, Table
from bench.tables.growth import fill_keys, made
from bench.verdict import AheadOf, AtMostSeconds, AtMostTimes
from reefknot.idempotency.model import Claimed, Done
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore

CALLERS = 64
RAW = f"raw SQLite, FULL, {CALLERS} at a time"
OURS = f"reefknot, {CALLERS} callers"
BUSY = f"reefknot, {CALLERS} callers, busy loop"
LONE = "reefknot, one caller"
GROWN = f"reefknot, {CALLERS} callers, a million keys"
DISKCACHE = "diskcache, FULL"
REDIS = f"Redis, AOF always, {CALLERS} callers"

RESULT = '{"status":"charged","amount":1250}'
ROUND = 16 * CALLERS
"""Keys in one batch: sixteen for every caller. The figures are for one key."""

KEYS = 1_000_000
_keys = (sha256(b"%d" % number).hexdigest() for number in count())


AT = 1_700_000_000_000
_RAW_CLAIM = (
    "INSERT INTO record VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, 0, NULL, NULL, NULL, ?, ?, ?) ON CONFLICT (key) DO NOTHING"
)
_RAW_RECORD = (
    "UPDATE record SET state = ?, result = ?, updated_at = ?, expires_at = ? WHERE key = ? AND owner = ? AND fence = 1"
)


def raw(folder: Path) -> Contestant:
    """
    The same rows and nothing else: one transaction for all claims of a group, one for all results.

    Every caller has to be told whether it got the key, so every row is a statement of its own.
    """
    connection = apsw.Connection(str(folder / "raw.db"))
    connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE record (seq INTEGER PRIMARY KEY, key TEXT UNIQUE, state TEXT, owner TEXT, fence INTEGER, "
        "lease_until INTEGER, lease_ms INTEGER, fingerprint TEXT, guard INTEGER, result TEXT, failure TEXT, "
        "metadata TEXT, created_at INTEGER, updated_at INTEGER, expires_at INTEGER)"
    )

    def batch(times: int) -> float:
        groups = [[next(_keys) for _ in range(CALLERS)] for _ in range(times * ROUND // CALLERS)]
        began = perf_counter()
        for keys in groups:
            connection.execute("BEGIN IMMEDIATE")
            for key in keys:
                connection.execute(_RAW_CLAIM, (key, "in_progress", key, 1, AT, 60_000, key, AT, AT, AT))
                assert connection.changes() == 1
            connection.execute("COMMIT")
            connection.execute("BEGIN IMMEDIATE")
            for key in keys:
                connection.execute(_RAW_RECORD, ("done", RESULT, AT, AT, key, key))
                assert connection.changes() == 1
            connection.execute("COMMIT")
        return (perf_counter() - began) / ROUND

    return Contestant(RAW, batch)


def by_callers(
    name: str, runner: asyncio.Runner, once: Callable[[str], Awaitable[object]], *, callers: int, busy: bool = False
) -> Contestant:
    """So many callers at once, each one claim and one record after the other."""
    number = ROUND * callers // CALLERS

    async def all_of(times: int) -> float:
        keys = iter([next(_keys) for _ in range(times * number)])

        async def caller() -> None:
            for key in keys:
                await once(key)

        spinning = asyncio.create_task(_spin()) if busy else None
        began = perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        taken = perf_counter() - began
        if spinning is not None:
            spinning.cancel()
        return taken / number

    return Contestant(name, lambda times: float(runner.run(all_of(times))))


async def _spin() -> None:
    """A loop that is never idle: 0.1 ms of Python, over and over."""
    while True:
        sum(range(5_000))
        await asyncio.sleep(0)


def ours(store: SqliteStore) -> Callable[[str], Awaitable[object]]:
    keys = store.idempotency

    async def once(key: str) -> object:
        answer = await keys.claim(key, owner=key, fingerprint=key)
        assert isinstance(answer, Claimed)
        return await keys.finish(answer.claim, Done(RESULT))

    return once


_FEW = ROUND // CALLERS
WARM = {CALLERS: 12, 1: CALLERS}
"""Batches, by the number of callers, after which every log has begun anew: one that grows is synced in twice the time,
and no log grows for long."""


def with_diskcache(folder: Path) -> Contestant:
    cache = diskcache.Cache(str(folder / "diskcache"), sqlite_synchronous=2, eviction_policy="none")

    def batch(times: int) -> float:
        keys = [next(_keys) for _ in range(times * _FEW)]
        began = perf_counter()
        for key in keys:
            assert cache.add(key, "in progress", expire=60)
            cache.set(key, RESULT)
        return (perf_counter() - began) / _FEW

    return Contestant(DISKCACHE, batch)


def with_redis(client: Any) -> Callable[[str], Awaitable[object]]:
    async def once(key: str) -> object:
        assert await client.set(key, "in progress", nx=True, ex=60)
        return await client.set(key, RESULT)

    return once


@contextmanager
def redis_server(program: str, folder: Path) -> Iterator[int]:
    """A server of our own, every write on disk before its answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    options = (
        *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)),
        *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
    )
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(host="127.0.0.1", port=port) as client:
            until = time.monotonic() + 10
            while not _answers(client):
                if time.monotonic() > until:
                    raise TimeoutError("redis-server did not answer within 10 s")
                time.sleep(0.02)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def run(effort: Effort) -> Run:
    rounds = max(3, effort.rounds // 15)
    program = shutil.which("redis-server")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = stack.enter_context(asyncio.Runner())

        def once(name: str, keys: int = 0) -> Callable[[str], Awaitable[object]]:
            """In a file of its own, with so many keys in it: nobody is to write in another's."""
            if keys:
                runner.run(made(folder / f"{name}.db"))
                fill_keys(folder / f"{name}.db", keys)
            store = runner.run(SqliteStore(folder / f"{name}.db", SystemClock()).start())
            stack.callback(lambda: runner.run(store.close()))
            return ours(store)

        contestants = [
            raw(folder),
            by_callers(OURS, runner, once("ours"), callers=CALLERS),
            by_callers(BUSY, runner, once("busy"), callers=CALLERS, busy=True),
            by_callers(LONE, runner, once("lone"), callers=1),
            by_callers(GROWN, runner, once("grown", KEYS if effort is FULL else 0), callers=CALLERS),
            with_diskcache(folder),
        ]
        if program is not None:
            port = stack.enter_context(redis_server(program, folder))
            client = redis.asyncio.Redis(host="127.0.0.1", port=port, max_connections=CALLERS)
            stack.callback(lambda: runner.run(client.aclose()))
            contestants.append(by_callers(REDIS, runner, with_redis(client), callers=CALLERS))
        for one in contestants:
            one.batch(WARM[1 if one.name in (LONE, DISKCACHE) else CALLERS])
        timings = measure(contestants, rounds=rounds, batch_seconds=None)
    missing = () if program else ("Redis was not measured: there is no `redis-server` on the path.",)
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    share = timings[RAW].middle / timings[OURS].middle
    middle = (
        f"By the middle batch, which no lucky disk decides, {CALLERS} callers reach {share:.0%} of the raw figure and "
        f"{1 / timings[BUSY].middle:,.0f} a second with a busy loop."
    )
    return Run(timings, (f"Claims with their results each second: {rate}.", middle, *missing))


TABLES = (
    Table(
        name="idempotency",
        title="Durable idempotency",
        about=(
            "A key is claimed and its result recorded, each on disk (`synchronous=FULL`, an fsync) before the next "
            "step. Callers that come together share a transaction. The raw figure is SQLite with the same rows "
            "and the same two transactions for 64 keys, an answer for each of them, and nothing else: no loop, no "
            "thread, no decisions. All have written for a while before, so that their logs grow no more. diskcache has "
            "no shared transactions, Redis shares its fsyncs among the callers of one turn."
        ),
        unit=MICROSECONDS,
        reference=RAW,
        targets={
            OURS: (AtMostTimes(1 / 0.55, RAW), AheadOf((DISKCACHE,))),
            BUSY: (AtMostSeconds(100e-6),),
            LONE: (AtMostTimes(1.0, DISKCACHE),),
            GROWN: (AtMostTimes(1 / 0.8, OURS),),
        },
        packages=("reefknot", "apsw", "diskcache", "redis"),
        run=run,
    ),
)
