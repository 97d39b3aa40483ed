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
from time import process_time
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.app.system import System, running_system
from reefknot.audit.port import AuditQuery
from reefknot.errors import QueueFullError
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model.messages import ACK, AssignmentOptions, ExecAssignment, ExecAssignmentAck, Job

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
    """Whether requests carry their deadline; the callers' patience ends with it in any case."""
    warm: int = 40
    """Requests that are made before, one after the other, so that the system knows how long a step takes."""
    rise_s: float = 0.5
    """What the queue takes to fill, and the system to learn how fast the service is. Promises are counted after it."""
    engine: str = ""
    """The URL of the store; without one it is a file in the folder."""
    side_by_side: int = 0
    """Not an open load but so many callers who wait for each answer: what the system can do at all."""


class Findings(Struct, frozen=True):
    """What came of it."""

    offered: int
    ended: dict[str, int]
    """How each request ended: a result's status, `refused` by the router, or `unanswered`."""
    goodput: float
    """Requests a second that succeeded within their deadline."""
    p99_s: float
    """Of all that were taken in after that."""
    slowest_s: float
    """Of all that were taken in."""
    retry_after: list[float]
    """The shortest and the longest that a refused caller was told."""
    refused_by_workers: int
    unacked: int
    """Admissions on record without an ack that says the same."""
    unrecorded: int
    """Refusals, by ack or by error, without an event that says the same."""
    rss_mb: list[float]
    """While it ran: after a third, and at the end."""
    deepest: int
    """What waited at the worker, at most."""
    stood_still_s: float
    """The longest time in which this process was due and the machine did not let it run."""
    starved: float
    """The share of all time that went that way."""


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
        """Status, when, and how long it took."""
        self.began = 0.0
        self.waits: list[float] = []
        self.said: Counter[tuple[str, str, str]] = Counter()
        """What workers and router told: who, which assignment, accepted or why not."""
        self.deepest = 0
        self.stood_still = 0.0
        self.starved = 0.0
        self._last = 0.0, 0.0
        self.memory: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop, load = asyncio.get_running_loop(), self.load
        hearing = loop.create_task(self._hear_acks())
        for number in range(load.warm):
            await self._ask(-1 - number)
        self.ends.clear()
        self.began = began = loop.time()
        self._last = began, process_time()
        await asyncio.gather(*(self._ask_on_and_on(1_000_000 * one) for one in range(1, load.side_by_side + 1)))
        sent, total = 0, round(load.per_second * load.seconds)
        while sent < total:
            now = loop.time() - began
            for number in range(sent, min(total, int(now * load.per_second))):
                task = loop.create_task(self._ask(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                sent = number + 1
            self._watch(now)
            await asyncio.sleep(SLICE_S)
        self.memory.append(rss_mb())
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=load.deadline_ms / 1000 + 2.0)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)

    async def _ask_on_and_on(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self.began + self.load.seconds:
            number += 1
            await self._ask(number)

    def _watch(self, now: float) -> None:
        before, self._last = self._last, (self.began + now, process_time())
        due = self._last[0] - before[0] - SLICE_S
        without = due - (self._last[1] - before[1])
        if without > SLICE_S:  # less is what a loop takes to come round
            self.stood_still = max(self.stood_still, without)
            self.starved += without
        self.deepest = max(self.deepest, *(worker.pools["io"].depth() for worker in self.system.workers))
        if not self.memory and now >= self.load.seconds / 3:
            self.memory.append(rss_mb())

    async def _ask(self, number: int) -> None:
        load, loop = self.load, asyncio.get_running_loop()
        came, status = loop.time(), "unanswered"
        options = AssignmentOptions(deadline_ms=load.deadline_ms if load.told else None, retry_count=0)
        job = Job("http.request", {"url": f"http://127.0.0.1:{load.port}/{number}"})
        try:
            answer = await self.system.submit(ExecAssignment(f"a{number}", f"r{number}", job, options=options))
            status = (await answer).status.value
        except QueueFullError as full:
            status = "refused"
            self.waits.append(full.retry_after or 0.0)
            self.said["router", "", "rejected"] += 1
        finally:
            self.ends.append((status, loop.time() - self.began, loop.time() - came))

    async def _hear_acks(self) -> None:
        async for delivery in self.system._transport.subscribe(ACK, limit=1_000_000):
            ack = _acks.decode(delivery.body)
            self.said["worker", ack.assignment_id, ack.reason or ack.status.value] += 1

    def _refused_last(self) -> int:
        """Refusals of the last second or so: they are counted by the next event, which never came."""
        ends = max((at for _, at, _ in self.ends), default=0.0)
        return sum(
            status == "refused" and at > ends - 2.5 - self.load.deadline_ms / 1000 for status, at, _ in self.ends
        )

    def findings(self, recorded: Counter[tuple[str, str, str]]) -> Findings:
        load = self.load
        limit = load.deadline_ms / 1000
        good = sum(s == "success" and took <= limit and load.rise_s < at <= load.seconds for s, at, took in self.ends)
        taken = [(at - took, took) for status, at, took in self.ends if status != "refused"]
        risen = sorted(took for came, took in taken if came >= load.rise_s)
        return Findings(
            offered=len(self.ends),
            ended=dict(Counter(status for status, _, _ in self.ends)),
            goodput=good / (load.seconds - load.rise_s),
            p99_s=risen[max(0, int(len(risen) * 0.99) - 1)] if risen else 0.0,
            slowest_s=max((took for _, took in taken), default=0.0),
            retry_after=[min(self.waits, default=0.0), max(self.waits, default=0.0)],
            refused_by_workers=sum(n for (who, _, why), n in self.said.items() if (who, why) != ("worker", "accepted"))
            - len(self.waits),
            unacked=(recorded - self.said).total(),
            unrecorded=max(0, (self.said - recorded).total() - self._refused_last()),
            rss_mb=self.memory,
            deepest=self.deepest,
            stood_still_s=self.stood_still,
            starved=self.starved / load.seconds,
        )


async def _recorded(system: System) -> Counter[tuple[str, str, str]]:
    """What the audit log says about admissions, in the same words."""
    found: Counter[tuple[str, str, str]] = Counter()
    after = 0
    while page := await system.store.audit.read(AuditQuery(after=after, event_type="admission")):
        after = page[-1].sequence
        for one in page:
            event: dict[str, Any] = json.loads(one.entry.body)
            if event.get("resource_class") == "router":
                found["router", "", event["status"]] += sum(event["inputs"]["refused"].values())
            else:
                found["worker", event["work_id"], event.get("reason") or event.get("status", "accepted")] += 1
    return found


def _settings(load: Load) -> Settings:
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
    return load_settings("reefknot.json", environ={}, cwd=Path(load.folder))


async def _main(load: Load) -> Findings:
    engine = load.engine or f"sqlite:{load.folder}/state.db"
    async with running_system(engine, _settings(load), drain=0.0) as system:
        await asyncio.sleep(0.2)
        run = _Run(load, system)
        await run.run()
        return run.findings(await _recorded(system))


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_main(plan))))
