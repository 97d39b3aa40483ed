"""Pages of the dashboard over a large store, and a worker that fifty browsers watch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from bench.measure import FULL, Effort, Timing
from bench.operators import EVENTS, ITEMS, filled, percentiles
from bench.table import MICROSECONDS, MILLISECONDS, Run, Table
from bench.verdict import AtMostSeconds, AtMostTimes, Target
from reefknot.app.system import System, running_system
from reefknot.console.cli.run import IN_FLIGHT, BatchRun
from reefknot.console.cli.serve import Shutdown
from reefknot.console.dashboard.security import SiteAccess
from reefknot.console.dashboard.server import build_app, prepare, serving
from reefknot.console.dashboard.site import Site
from reefknot.core.redaction import Redactor
from reefknot.policy.settings import load_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.steps.port import BlockContext
from reefknot.steps.python import block
from reefknot.stores.sqlite import SqliteStore

TOKEN = "token-of-the-benchmark"
PORT = 8321
LONGEST_P95_S = 0.3
LARGEST_GROWTH_MB = 8.0
REQUESTS = 2000
VIEWERS = 50
SLOWER = 1.05
ROUND = 8000
"""Assignments in one file. The figures are for one of them."""
UNWATCHED, WATCHED = "no browser watches", f"{VIEWERS} browsers watch"
GATES = {"WORKER_RETRIES_V2_ENABLED": "true", "WORKER_QUEUE_V2_ENABLED": "true"}


def addresses(items: int) -> dict[str, str]:
    """Every page, by name, and the filters with the longest ways."""
    held = items // 20 * 10 + 9
    return {
        "overview": "/",
        "alerts": "/alerts",
        "work": "/work",
        "work, failed": "/work?state=failed",
        "work of a rare tenant": "/work?tenant=tenant-rare",
        "work with a rare error": "/work?error=the+rare+failure",
        "a job's story": f"/work/job-{items // 20 * 10}",
        "quarantine": "/quarantine",
        "a quarantined job": f"/quarantine/job-{held}?tenant=tenant-{held % 100}",
        "policies": "/policies",
        "what if": "/policies?target=block:http&status=429",
        "workers": "/workers",
        "sources": "/sources",
        "audit": "/audit",
        "audit by text": "/audit?text=of+none",
        "verify": "/audit/verify",
        "replay": "/audit/replay",
        "health": "/health",
    }


# ---- pages -----------------------------------------------------------------------------------------------------------


async def request(app: Any, target: str) -> int:
    """Ask the application, as the server does; returns the size of a page."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", f"127.0.0.1:{PORT}".encode()), (b"authorization", f"Bearer {TOKEN}".encode())],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", PORT),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] == 200, (target, sent[0])
    return sum(len(one.get("body", b"")) for one in sent[1:])


def resident_mb() -> float:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def _asked(folder: Path, items: int, events: int, times: int) -> tuple[Run, float]:
    path = await filled(folder, items=items, events=events)
    store = await SqliteStore(path, SystemClock()).start()
    access = SiteAccess(operator_token=TOKEN, port=PORT)
    app = build_app(Site(store, access=access, redactor=Redactor(), shown=f"sqlite:{path}"))
    timings: dict[str, Timing] = {}
    targets: dict[str, tuple[Target, ...]] = {}
    try:
        every = addresses(items)
        for name, target in every.items():
            found = await percentiles(lambda target=target: request(app, target), times)  # type: ignore[misc]
            timings |= {f"{name}, p50": Timing(found.p50, found.p50), f"{name}, p95": Timing(found.p95, found.p95)}
            targets[f"{name}, p95"] = (AtMostSeconds(LONGEST_P95_S),)
        asked, before = list(every.values()), resident_mb()
        for number in range(REQUESTS if times > 20 else REQUESTS // 10):
            await request(app, asked[number % len(asked)])
        growth = resident_mb() - before
    finally:
        await store.close()
    return Run(timings, targets=targets, columns=("p50", "p95")), growth


def run_pages(effort: Effort) -> Run:
    items, events, times = (ITEMS, EVENTS, 50) if effort is FULL else (10_000, 100_000, 10)
    with tempfile.TemporaryDirectory() as folder:
        found, growth = asyncio.run(_asked(Path(folder), items, events, times))
    if growth > LARGEST_GROWTH_MB:
        raise AssertionError(f"pages: memory grew by {growth:.1f} MB over {REQUESTS} requests")
    remark = f"{items:,} jobs, {events:,} events; memory grew by {growth:.1f} MB over the requests that followed."
    return Run(found.timings, (remark,), targets=found.targets, columns=found.columns)


# ---- viewers ---------------------------------------------------------------------------------------------------------

CLIENT = """
import asyncio, sys
host, port, token, number = "127.0.0.1", int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
VIEWS = ("overview", "work", "quarantine", "workers", "audit")

async def watch(place):
    reader, writer = await asyncio.open_connection(host, port)
    target = f"/live?view={VIEWS[place % len(VIEWS)]}"
    lines = f"GET {target} HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {token}", "", ""
    writer.write("\\r\\n".join(lines).encode())
    while data := await reader.read(1 << 20):
        if b"event: fragment" in data:
            seen.add(place)
        if len(seen) == number:
            print("all", flush=True)
            seen.add(-1)

seen = set()

async def main():
    await asyncio.gather(*map(watch, range(number)))

asyncio.run(main())
"""


@block("bench.watched")
async def nothing(inputs: Mapping[str, Any], context: BlockContext) -> dict[str, Any]:
    """A step that costs nothing, so that all the rest shows."""
    return {"number": inputs["number"]}


@asynccontextmanager
async def browsers(port: int) -> AsyncIterator[None]:
    """Fifty live streams in a process of their own, of which each has begun."""
    words = [sys.executable, "-c", CLIENT, str(port), TOKEN, str(VIEWERS)]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert (await process.stdout.readline()).strip() == b"all"
        yield
    finally:
        process.kill()
        await process.wait()


async def _batch(system: System, file: Path) -> tuple[float, float]:
    """The seconds of one assignment in a file of them, by the clock and of the processor."""
    batch = BatchRun(str(file), lambda _: None, IN_FLIGHT, new=True)
    began, used = perf_counter(), process_time()
    await batch.run(system, Shutdown(asyncio.Event()))
    assert batch.tally.ends["succeeded"] == ROUND
    return (perf_counter() - began) / ROUND, (process_time() - used) / ROUND


async def _watched(folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    file = folder / "assignments.jsonl"
    lines = [{"job": {"type": "bench.watched", "payload": {"number": number}}} for number in range(ROUND)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "token").write_text(TOKEN)
    (folder / "reefknot.yaml").write_text("dashboard: {port: 0, operator_token: file:token}\n")
    settings = load_settings(None, environ=GATES, cwd=folder)
    url = f"sqlite:{folder / 'state.db'}"
    taken: dict[str, list[tuple[float, float]]] = {UNWATCHED: [], WATCHED: []}
    async with running_system(url, settings, modules=(__name__,)) as system:
        how = prepare(settings)
        site = Site(system.store, access=how.access, redactor=Redactor(), settings=settings, shown=url)
        async with serving(site, how):
            await _batch(system, file)
            for _ in range(rounds):
                taken[UNWATCHED].append(await _batch(system, file))
                async with browsers(how.access.port):
                    taken[WATCHED].append(await _batch(system, file))
    return taken


def run_viewers(effort: Effort) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        taken = asyncio.run(_watched(Path(folder), 8 if effort is FULL else 2))
    wall = {name: median(one for one, _ in seconds) for name, seconds in taken.items()}
    used = {name: median(one for _, one in seconds) for name, seconds in taken.items()}
    remark = (
        f"Watched by {VIEWERS} browsers an assignment takes {wall[WATCHED] / wall[UNWATCHED]:.3f} times as long, and "
        f"{used[WATCHED] / used[UNWATCHED]:.3f} times the processor's time."
    )
    return Run({name: Timing(seconds, seconds) for name, seconds in wall.items()}, (remark,))


TABLES = (
    Table(
        name="pages",
        title="Pages of the dashboard",
        about=(
            "Every page, as the server makes it: the questions to the store, and the template. `rare` is what ten of "
            "the oldest jobs have, the longest way for a filter."
        ),
        unit=MILLISECONDS,
        reference="",
        targets={},
        packages=("reefknot", "apsw", "starlette", "jinja2"),
        run=run_pages,
    ),
    Table(
        name="viewers",
        title="A worker that browsers watch",
        about=(
            "An assignment through router, queue and worker in one process that also serves the dashboard, with "
            "no browser and with fifty browsers that watch five views; rounds of both take turns."
        ),
        unit=MICROSECONDS,
        reference=UNWATCHED,
        targets={WATCHED: (AtMostTimes(SLOWER, UNWATCHED),)},
        packages=("reefknot", "uvicorn"),
        run=run_viewers,
    ),
)
