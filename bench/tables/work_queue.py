"""The durable work queue: enqueue, claim, complete, each on disk."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from time import perf_counter

import apsw
import huey

from bench.measure import Contestant, Effort, measure
from bench.table import MICROSECONDS, Run, Table
from bench.verdict import AtMostTimes
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.sqlite import SqliteStore
from tools.postgres_server import ServerError

GROUP = 100
RAW = f"raw SQLite, FULL, batches of {GROUP}"
OURS = f"reefknot, batches of {GROUP}"
SINGLES = "reefknot, 64 feeders one by one, one claimer"
HUEY = "huey, fsync"
PROCRASTINATE = "procrastinate, PostgreSQL, one worker, 10 at once"

PAYLOAD = b'{"url":"https://example.org/","method":"GET"}'
ROUND = 10 * GROUP
"""Jobs in one batch. The figures are for one job."""
WARM = 10
"""Batches after which the logs of the first two have begun anew: one that grows is synced in twice the time."""
_FEW = 20
_DEFERRED = 50
"""Enough that starting its worker, some 20 ms, hardly counts; few enough that the table takes seconds."""

_numbers = count()


def raw(folder: Path) -> Contestant:
    """Three transactions for a hundred jobs."""
    connection = apsw.Connection(str(folder / "raw.db"))
    connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE job (seq INTEGER PRIMARY KEY, state TEXT, due INTEGER, owner TEXT, fence INTEGER, lease INTEGER, "
        "payload BLOB, result TEXT)"
    )
    connection.execute("CREATE INDEX due ON job (due, seq) WHERE state = 'pending'")

    def group() -> None:
        connection.execute("BEGIN IMMEDIATE")
        rows = [(PAYLOAD,)] * GROUP
        connection.executemany("INSERT INTO job VALUES (NULL, 'pending', 0, NULL, 0, 0, ?, NULL)", rows)
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        taken = connection.execute(
            "UPDATE job SET state = 'running', owner = 'me', fence = fence + 1, lease = 60 WHERE seq IN "
            "(SELECT seq FROM job WHERE state = 'pending' AND due <= 1 ORDER BY due, seq LIMIT ?) "
            "RETURNING seq, fence, payload",
            (GROUP,),
        ).fetchall()
        connection.execute("COMMIT")
        assert len(taken) == GROUP
        connection.execute("BEGIN IMMEDIATE")
        done = [(row[0], row[1]) for row in taken]
        connection.executemany("UPDATE job SET state = 'done', result = '1' WHERE seq = ? AND fence = ?", done)
        connection.execute("COMMIT")

    def batch(times: int) -> float:
        began = perf_counter()
        for _ in range(times * ROUND // GROUP):
            group()
        return (perf_counter() - began) / ROUND

    return Contestant(RAW, batch)


def ours(store: SqliteStore, runner: asyncio.Runner) -> Contestant:
    async def all_of(times: int) -> float:
        began = perf_counter()
        for _ in range(times * ROUND // GROUP):
            await store.work.enqueue([_item() for _ in range(GROUP)])
            taken = await store.work.claim(GROUP, WorkClaim(owner="me", classes=("io",)))
            assert len(taken) == GROUP
            await _complete(store, taken)
        return (perf_counter() - began) / ROUND

    return Contestant(OURS, lambda times: float(runner.run(all_of(times))))


def singles(store: SqliteStore, runner: asyncio.Runner) -> Contestant:
    """As a service has it: work comes one by one from many sides, one claimer takes what is there."""

    async def all_of(times: int) -> float:
        wanted = times * ROUND
        items = iter([_item() for _ in range(wanted)])

        async def feeder() -> None:
            for item in items:
                await store.work.enqueue([item])

        async def claimer() -> None:
            done = 0
            while done < wanted:
                taken = await store.work.claim(GROUP, WorkClaim(owner="me", classes=("io",)))
                if not taken:
                    await store.work.wait(1.0, classes=("io",))
                    continue
                await _complete(store, taken)
                done += len(taken)

        began = perf_counter()
        await asyncio.gather(claimer(), *(feeder() for _ in range(64)))
        return (perf_counter() - began) / ROUND

    return Contestant(SINGLES, lambda times: float(runner.run(all_of(times))))


def _item() -> WorkItem:
    return WorkItem(f"{next(_numbers):012}", "http.request", "io", payload=PAYLOAD)


async def _complete(store: SqliteStore, taken: list[WorkItem]) -> None:
    reports = [Settlement(item.id, item.owner, item.fence, WorkDone("1")) for item in taken]
    assert all(await store.work.settle(reports))


def with_huey(folder: Path) -> Contestant:
    """Its own queue, driven by hand: no consumer process, so nothing but the storage is measured."""
    queue = huey.SqliteHuey(filename=str(folder / "huey.db"), fsync=True, results=True)

    @queue.task()  # type: ignore[untyped-decorator]  # huey has no types
    def work(payload: bytes) -> int:
        return 1

    def batch(times: int) -> float:
        began = perf_counter()
        for _ in range(times * _FEW):
            work(PAYLOAD)
            assert queue.execute(queue.dequeue()) == 1
        return (perf_counter() - began) / _FEW

    return Contestant(HUEY, batch)


def with_procrastinate(stack: ExitStack, runner: asyncio.Runner) -> Contestant | str:
    """The contestant, or the sentence that says why there is none: PostgreSQL does not start on every machine."""
    try:
        from bench import postgres_queue

        peer = postgres_queue.with_procrastinate(PROCRASTINATE, runner, jobs=_DEFERRED, payload=PAYLOAD.decode())
        return stack.enter_context(peer)
    except (ImportError, LookupError, OSError, subprocess.SubprocessError, ServerError) as error:
        reason = " ".join(str(error).split())
        return f"procrastinate was not measured: {reason}."


def run(effort: Effort) -> Run:
    rounds = max(3, effort.rounds // 15)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = stack.enter_context(asyncio.Runner())
        store = runner.run(SqliteStore(folder / "state.db", SystemClock()).start())
        stack.callback(lambda: runner.run(store.close()))
        contestants = [raw(folder), ours(store, runner), singles(store, runner), with_huey(folder)]
        for one in contestants[:2]:
            one.batch(WARM)
        procrastinate = with_procrastinate(stack, runner)
        if isinstance(procrastinate, Contestant):
            contestants.append(procrastinate)
        timings = measure(contestants, rounds=rounds, batch_seconds=None)
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    missing = (procrastinate,) if isinstance(procrastinate, str) else ()
    return Run(timings, (f"Jobs each second: {rate}.", *missing))


TABLES = (
    Table(
        name="work-queue",
        title="Durable work queue",
        about=(
            "A job is put into the queue, claimed with a lease and a fence, and completed with its result, each step "
            "on disk (`synchronous=FULL`). The raw figure is SQLite with three transactions for a hundred jobs: no "
            "ids, no duplicates seen, no history. Both have written for a while before, so that their logs grow no "
            "more. huey takes one job at a time, and a job it has taken is gone if its worker dies. procrastinate gets "
            "fifty jobs in one call; its worker fetches and finishes each alone, ten in hand at once, and keeps no "
            "results. Its PostgreSQL runs on the same machine and syncs every commit."
        ),
        unit=MICROSECONDS,
        reference=RAW,
        targets={OURS: (AtMostTimes(1 / 0.3, RAW), AtMostTimes(1 / 5, HUEY))},
        packages=("reefknot", "apsw", "huey", "procrastinate"),
        run=run,
    ),
)
