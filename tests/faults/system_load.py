"""
A whole system under a load that does not wait for it, and what came of every single request.

    python -m tests.faults.system_load < plan.json > findings.json

It runs in a process of its own, so that memory and time are the system's. The load is open: requests come by the clock,
whether earlier ones were answered or not, and nobody who is refused comes back.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.assembly.system import System, running_system
from reefknot.config.settings import load_settings
from reefknot.core.messages import ACK, ExecAssignment, ExecAssignmentAck, Job, Options
from reefknot.errors import QueueFullError
from reefknot.ports.audit_log import AuditQuery

ROOT = Path(__file__).parents[2]
PAGE_BYTES = 4096
SLICE_S = 0.01
_acks = msgspec.json.Decoder(ExecAssignmentAck)


class Load(Struct, frozen=True):
    """What is done to a system."""

    folder: str
    port: int
    per_second: float
    seconds: float
    deadline_ms: int
    queue_v2: bool = True
    queue_size: int = 100
    slots: int = 8
    told: bool = True
    """Whether requests carry their deadline; the callers give up after it in any case."""
    warm_s: float = 1.0


class Findings(Struct, frozen=True):
    """What came of it."""

    offered: int
    ended: dict[str, int]
    """How each request ended: a result's status, or `refused` by the router."""
    goodput: float
    """Requests a second that succeeded within their deadline, after the first second."""
    p99_s: float
    """Of all that were taken in and given a result."""
    slowest_s: float
    retry_after: list[float]
    """The shortest and the longest that a refused caller was told."""
    acks: dict[str, int]
    """By status and reason."""
    refused_unacked: int
    events: dict[str, int]
    """Admission events by who, status and reason."""
    rss_mb: list[float]
    """While it ran: after a third, and at the end."""
    deepest: int
    largest_lag_s: float


def loaded(load: Load, *, within: float = 120.0) -> Findings:
    """Carry out a plan in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.system_load"],
        input=msgspec.json.encode(load),
        cwd=ROOT,
        capture_output=True,
        timeout=within,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Findings)


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


class _Run:
    """One load on one system."""

    def __init__(self, load: Load, system: System) -> None:
        self.load = load
        self.system = system
        self.ends: list[tuple[str, float, float]] = []
        """Status, when it came, how long it took."""
        self.waits: list[float] = []
        self.acks: Counter[str] = Counter()
        self.deepest = 0
        self.memory: list[float] = []
        self.lag = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        hearing = loop.create_task(self._hear_acks())
        began, sent, load = loop.time(), 0, self.load
        total = round(load.per_second * load.seconds)
        while sent < total:
            now = loop.time() - began
            for number in range(sent, min(total, int(now * load.per_second))):
                task = loop.create_task(self._ask(number, began))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                sent = number + 1
            self._watch(now)
            await asyncio.sleep(SLICE_S)
            self.lag = max(self.lag, loop.time() - began - now - SLICE_S)
        self.memory.append(rss_mb())
        await asyncio.wait_for(asyncio.gather(*list(self._tasks)), 60.0)
        hearing.cancel()

    def _watch(self, now: float) -> None:
        self.deepest = max(self.deepest, *(worker.pools["io"].depth() for worker in self.system.workers))
        if not self.memory and now >= self.load.seconds / 3:
            self.memory.append(rss_mb())

    async def _ask(self, number: int, began: float) -> None:
        load, loop = self.load, asyncio.get_running_loop()
        came = loop.time()
        options = Options(deadline_ms=load.deadline_ms if load.told else None, retry_count=0)
        job = Job("http.request", {"url": f"http://127.0.0.1:{load.port}/{number}"})
        try:
            answer = await self.system.submit(ExecAssignment(f"a-{number}", f"r-{number}", job, options=options))
            status = (await answer).status.value
        except QueueFullError as full:
            status = "refused"
            self.waits.append(full.retry_after or 0.0)
        self.ends.append((status, came - began, loop.time() - came))

    async def _hear_acks(self) -> None:
        async for delivery in self.system._transport.subscribe(ACK, limit=1_000_000):
            ack = _acks.decode(delivery.body)
            self.acks[f"{ack.status.value} {ack.reason or ''}".strip()] += 1

    def findings(self, events: dict[str, int]) -> Findings:
        load = self.load
        limit = load.deadline_ms / 1000
        good = [one for one in self.ends if one[0] == "success" and one[2] <= limit and one[1] >= load.warm_s]
        taken = sorted(took for status, _, took in self.ends if status != "refused")
        return Findings(
            offered=len(self.ends),
            ended=dict(Counter(status for status, _, _ in self.ends)),
            goodput=len(good) / (load.seconds - load.warm_s),
            p99_s=taken[int(len(taken) * 0.99) - 1],
            slowest_s=taken[-1],
            retry_after=[min(self.waits, default=0.0), max(self.waits, default=0.0)],
            acks=dict(self.acks),
            refused_unacked=0,
            events=events,
            rss_mb=self.memory,
            deepest=self.deepest,
            largest_lag_s=self.lag,
        )


async def _events(system: System) -> dict[str, int]:
    """How admissions are on record."""
    found: Counter[str] = Counter()
    after = 0
    while page := await system.store.audit.read(AuditQuery(after=after, event_type="admission")):
        after = page[-1].sequence
        for one in page:
            event: dict[str, Any] = json.loads(one.entry.body)
            who = "router" if event["resource_class"] == "router" else "worker"
            found[f"{who} {event['status']} {event.get('reason') or ''}".strip()] += 1
    return dict(found)


async def _main(load: Load) -> Findings:
    queue = {
        "enabled": load.queue_v2,
        "max_queue_size": load.queue_size,
        "resource_pools": {"io": {"max_concurrency": load.slots}},
    }
    file = {
        "worker": {"queue": {"v2": queue}, "retries": {"v2": {"enabled": True}}},
        "blocks": {"http": {"allow": ["127.0.0.1"]}},
    }
    Path(load.folder, "reefknot.json").write_text(json.dumps(file))
    settings = load_settings("reefknot.json", environ={}, cwd=Path(load.folder))
    async with running_system(f"sqlite:{load.folder}/state.db", settings, drain=0.0) as system:
        await asyncio.sleep(0.2)
        run = _Run(load, system)
        await run.run()
        return run.findings(await _events(system))


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_main(plan))))
