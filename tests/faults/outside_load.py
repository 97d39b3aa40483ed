"""
Open load from other processes on a running `reefknot up`, through `rk.connect`, and what came of every request.

    python -m tests.faults.outside_load < plan.json > findings.json

Nothing is warmed up, and nothing of the system runs in the process that measures: this is where a user stands. Requests
come by the clock, whether earlier ones were answered or not, and nobody who is refused comes back.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, structs

import reefknot as rk
from reefknot.console.nats_servers import running_nats
from reefknot.errors import QueueFullError
from tests.faults import broken

ROOT = Path(__file__).parents[2]
SLICE_S = 0.01
PAGE_BYTES = 4096
STARTED_WITHIN_S = 30.0
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tenant": ({"tenant": "a"}, {"tenant": "b"}),
    "priority": ({"priority": -10}, {"priority": 20}),
}
BEGINS_S = 2.0
"""How long the clients have to start."""


class Stream(Struct, frozen=True):
    """One kind of request, sent by a process of its own."""

    name: str
    per_second: float
    seconds: float
    port: int
    deadline: float = 2.0
    timeout: float | None = None
    priority: int = 0
    tenant: str | None = None
    begins_s: float = 0.0
    """When it begins, after the others."""


class Request(Struct, frozen=True, array_like=True):
    """What came of one request; times are seconds."""

    status: str
    came: float
    """When it was sent, counted from the beginning of all streams."""
    submit_s: float
    took: float


class Plan(Struct, frozen=True):
    """What one client process does."""

    engine: str
    stream: Stream
    starts_at: float
    """Wall time at which all streams begin."""
    variant: str = ""
    """The broken variant to measure, see `tests.faults.broken`."""


@contextmanager
def engine_at(folder: Path, on: str) -> Iterator[str]:
    """
    The URL of a new store: a file in the folder, or, on `nats`, one at a server of its own.

    A lone server syncs its disk five times for a batch: on a slow one that is measured, and not reefknot. So its files
    are in memory, as the batches of a cluster are; `NATS_ON_DISK=1` puts them on the disk.
    """
    if on == "sqlite":
        yield f"sqlite:{folder / 'state.db'}"
        return
    place = None if os.environ.get("NATS_ON_DISK") else "/dev/shm"
    with TemporaryDirectory(dir=place) as name, running_nats(Path(name)) as (server,):
        yield server.url


class Up(NamedTuple):
    """A running system: the URL of its store, and its process."""

    url: str
    pid: int

    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


@contextmanager
def system(folder: Path, *, slots: int = 8, size: int = 1000, variant: str = "", on: str = "sqlite") -> Iterator[Up]:
    """A `reefknot up` in a process of its own, over a file or on a NATS server."""
    queue = {"enabled": True, "max_queue_size": size, "resource_pools": {"io": {"max_concurrency": slots}}}
    worker = {"queue": {"v2": queue}, "retries": {"v2": {"enabled": True}}}
    settings = {"worker": worker, "blocks": {"http": {"allow": ["127.0.0.1"]}}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reefknot.json").write_text(json.dumps(settings))
    program = ["tests.faults.broken", variant] if variant else ["reefknot"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with engine_at(folder, on) as engine, (folder / "up.log").open("wb") as log:
        command = [sys.executable, "-m", *program, "up", "--config", "reefknot.json", "--engine", engine]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        try:
            _until_up(process, engine, folder)
            yield Up(engine, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _until_up(process: subprocess.Popen[bytes], engine: str, folder: Path) -> None:
    ends = time.monotonic() + STARTED_WITHIN_S
    command = [sys.executable, "-m", "reefknot", "worker", "list", "--engine", engine, "--json"]
    while time.monotonic() < ends:
        assert process.poll() is None, (folder / "up.log").read_text()
        asked = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        if asked.returncode == 0 and b"healthy" in asked.stdout:
            return
        time.sleep(0.1)
    raise AssertionError((folder / "up.log").read_text())


def sent(engine: str, *streams: Stream, variant: str = "") -> dict[str, list[Request]]:
    """Send all streams at the same time, each from its own process."""
    starts_at = time.time() + BEGINS_S
    command = [sys.executable, "-m", "tests.faults.outside_load"]
    running = []
    for stream in streams:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(Plan(engine, stream, starts_at, variant)))
        process.stdin.close()
        process.stdin = None
        running.append((stream, process))
    found: dict[str, list[Request]] = {}
    for stream, process in running:
        out, _ = process.communicate(timeout=stream.begins_s + stream.seconds + stream.deadline + 60)
        assert process.returncode == 0
        found.setdefault(stream.name, []).extend(msgspec.json.decode(out, type=list[Request]))
    return found


def goodput(requests: list[Request], deadline: float, begin: float, end: float) -> float:
    """Requests a second that succeeded within their deadline, of those that ended between `begin` and `end`."""
    good = [one for one in requests if one.status == "success" and one.took <= deadline]
    return sum(begin <= one.came + one.took < end for one in good) / (end - begin)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, int(len(values) * share) - 1)] if values else 0.0


def p99(requests: list[Request]) -> float:
    return percentile([one.took for one in requests], 0.99)


def served(requests: list[Request]) -> float:
    return sum(one.status == "success" for one in requests) / len(requests)


def two_kinds(kind: str, many: Stream, few: Stream) -> tuple[Stream, Stream]:
    """The same streams, of which the few are another tenant's, or have the higher priority."""
    of_many, of_few = KINDS[kind]
    return structs.replace(many, **of_many), structs.replace(few, **of_few)


def summary(requests: list[Request]) -> dict[str, int]:
    return dict(Counter(one.status for one in requests))


class _Sender:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.requests: list[Request] = []
        self._began = 0.0

    async def run(self) -> None:
        stream, loop = self.plan.stream, asyncio.get_running_loop()
        async with rk.connect(self.plan.engine) as client:
            await asyncio.sleep(max(0.0, self.plan.starts_at - time.time()))
            self._began = loop.time()
            await asyncio.sleep(stream.begins_s)
            began = loop.time()
            sent, total, tasks = 0, round(stream.per_second * stream.seconds), set[asyncio.Task[None]]()
            while sent < total:
                for _ in range(sent, min(total, int((loop.time() - began) * stream.per_second))):
                    task = loop.create_task(self._ask(client, sent))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    sent += 1
                await asyncio.sleep(SLICE_S)
            if tasks:
                await asyncio.wait(tasks, timeout=stream.deadline + 10)

    async def _ask(self, client: Any, number: int) -> None:
        stream, loop = self.plan.stream, asyncio.get_running_loop()
        came, kept, status = loop.time(), 0.0, "unanswered"
        options = {"deadline": stream.deadline, "timeout": stream.timeout, "priority": stream.priority, "retries": 0}
        try:
            handle = await client.submit(
                "http.request", {"url": f"http://127.0.0.1:{stream.port}/{number}"}, tenant_id=stream.tenant, **options
            )
            kept = loop.time() - came
            result = await handle.result(stream.deadline + 5)
            status = result.status.value if result.status.value != "error" else str(result.error_code)
        except QueueFullError as full:
            kept, status = loop.time() - came, f"refused: {full.reason}"
        except Exception as error:
            status = type(error).__name__
        finally:
            self.requests.append(Request(status, came - self._began, kept, loop.time() - came))


if __name__ == "__main__":
    sender = _Sender(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan))
    if sender.plan.variant:
        broken.break_product(sender.plan.variant)
    asyncio.run(sender.run())
    sys.stdout.buffer.write(msgspec.json.encode(sender.requests))
