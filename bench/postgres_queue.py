"""
procrastinate on a PostgreSQL of its own, for the table of work queues.

Nothing here is imported before the table runs: without PostgreSQL, or without its client, the other contestants are
measured all the same. The server syncs every commit, as the stores beside it do; the test server does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import procrastinate
from procrastinate.types import JSONDict

from bench.measure import Contestant
from tools import postgres_server

SETTINGS = ("fsync=on", "synchronous_commit=on", "max_connections=20", "shared_buffers=64MB")
AT_ONCE = 10
"""Jobs the one worker has in hand. Its default, one at a time, is slower: it waits for every sync alone."""


@contextmanager
def with_procrastinate(name: str, runner: asyncio.Runner, *, jobs: int, payload: str) -> Iterator[Contestant]:
    """So many jobs deferred in one call, then its own worker until nothing is left. The figures are for one job."""
    with postgres_server.running(SETTINGS) as folder:
        connector = procrastinate.PsycopgConnector(conninfo=postgres_server.dsn(folder))
        app = procrastinate.App(connector=connector)
        ran: list[str] = []

        @app.task(name="work")
        async def work(payload: str) -> None:
            ran.append(payload)

        async def batch(times: int) -> float:
            ran.clear()
            wanted = times * jobs
            orders: list[JSONDict] = [{"payload": payload} for _ in range(wanted)]
            began = perf_counter()
            await work.batch_defer_async(*orders)
            await app.run_worker_async(
                wait=False, concurrency=AT_ONCE, listen_notify=False, install_signal_handlers=False
            )
            taken = perf_counter() - began
            assert len(ran) == wanted
            await all_finished(app)
            return taken / jobs

        runner.run(_open(app))
        try:
            yield Contestant(name, lambda times: float(runner.run(batch(times))))
        finally:
            runner.run(app.close_async())


async def _open(app: procrastinate.App) -> None:
    await app.open_async()
    await app.schema_manager.apply_schema_async()


async def all_finished(app: procrastinate.App) -> None:
    """Nothing waits, nothing is in hand, nothing failed; else the figure would be for less than the whole work."""
    left = [job.id for status in ("todo", "doing", "failed") for job in await _jobs(app, status)]
    if left:
        raise RuntimeError(f"procrastinate left {len(left)} jobs undone")


async def _jobs(app: procrastinate.App, status: str) -> list[procrastinate.jobs.Job]:
    return list(await app.job_manager.list_jobs_async(status=status))
