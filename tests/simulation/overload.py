"""
Open load on a whole system in virtual time: what came of every request, by seed.

The system is the product's own, over a store that takes a moment for every call; a client of its own submits each
stream. The service behind the steps has so many places and needs so much time for each request. Arrivals and service
times are random: what holds for many seeds is no matter of luck.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import msgspec

from reefknot.app.system import System
from reefknot.audit.port import AuditQuery
from reefknot.errors import QueueFullError
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ACK, AssignmentOptions, ExecAssignment, ExecAssignmentAck, Job, StepResult
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import LoopClock
from reefknot.steps.port import BlockContext
from reefknot.stores.memory import MemoryStore
from reefknot.testing import run_virtual
from tests.faults.outside_load import Request, Stream
from tests.simulation.sea import Process, StoreThrough, Through, Weather
from tests.simulation.world import opened, silence

SLOTS = 8
SHAPE = 4.0
"""Of the gamma distribution of service times: half of the mean is their standard deviation."""
STORE = Weather(hops=0.002)
PATIENCE_S = 5.0
"""How long a client waits for an answer after its deadline."""


class Service:
    """
    A block whose destination has a fixed capacity: so many requests at once, so long for each.

    Whoever comes more waits in line. It does what it was asked even when nobody waits any more, as real services do.
    """

    type = "sim.service"

    def __init__(self, at_once: int, service_s: float, rng: Random) -> None:
        self.at_once = at_once
        self.pace = 1.0
        """The factor by which it is slower than it was."""
        self.ended: list[tuple[float, float]] = []
        """Of each request that was served: when it ended, and the seconds it took."""
        self._service_s = service_s
        self._rng = rng
        self._free = asyncio.Semaphore(at_once)
        self._at_work: set[asyncio.Task[None]] = set()

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "service"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        task = asyncio.get_running_loop().create_task(self._serve())
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        await asyncio.shield(task)
        return StepResult(outputs={"id": context.assignment_id})

    async def _serve(self) -> None:
        async with self._free:
            seconds = self.pace * self._rng.gammavariate(SHAPE, self._service_s / SHAPE)
            await asyncio.sleep(seconds)
            self.ended.append((asyncio.get_running_loop().time(), seconds))

    async def close(self) -> None: ...


class DistantStore(StoreThrough):
    """A store in another place than its user: every call takes a moment."""

    parts = (*StoreThrough.parts, "leases")

    def transport(self, *, keeps_shared: bool = False) -> Any:
        return Through(self._store.transport(keeps_shared=keeps_shared), self._process)


@dataclass
class Load:
    """The load of one run, and what came of it."""

    seed: int
    streams: Sequence[Stream]
    at_once: int = 8
    service_s: float = 0.08
    slow: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """A brown-out: when it begins, when it ends, and how much longer a request takes meanwhile."""
    unwatched: frozenset[str] = frozenset()
    """Streams whose results nobody waits for: a flood only has to come."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the workers, beside the slots."""
    found: dict[str, list[Request]] = field(default_factory=dict)
    served: list[tuple[float, float]] = field(default_factory=list)
    """Of each request that the service served: when it ended, and the seconds it took."""

    def capacity(self, begin: float, end: float) -> float:
        """Requests a second that the service could do in a part of the run, by the times that this seed drew."""
        took = [seconds for ended, seconds in self.served if begin <= ended < end]
        return self.at_once * len(took) / sum(took)

    def goodput(self, begin: float, end: float, *names: str) -> float:
        """Requests a second of these streams (default: all) that succeeded in time, and ended in a part of the run."""
        streams = [one for one in self.streams if one.name in (names or self.found)]
        every = [(one, found) for one in streams for found in self.found[one.name]]
        good = [one.came + one.took for stream, one in every if one.status == "success" and one.took <= stream.deadline]
        return sum(begin <= ended < end for ended in good) / (end - begin)

    def run(self) -> Self:
        """Run to the end, in virtual time."""
        with silence():
            run_virtual(self._run())
        return self

    async def _run(self) -> None:
        loop: Any = asyncio.get_running_loop()
        rng, clock = Random(self.seed), LoopClock(loop)
        service = Service(self.at_once, self.service_s, rng)
        begin, end, slower = self.slow
        loop.call_later(begin, setattr, service, "pace", slower)
        loop.call_later(end, setattr, service, "pace", 1.0)
        async with opened(self.seed, clock, MemoryStore) as store:
            settings = default_settings(concurrency={"io": SLOTS}, **self.settings)
            near = DistantStore(store, Process(rng, STORE))
            system = System(near, clock, settings=settings, blocks={service.type: service}, seed=self.seed)
            await system.start()
            self._began = loop.time()
            clients = [
                self._send(stream, Client(DistantStore(store, Process(rng, STORE)), clock), Random(rng.random()))
                for stream in self.streams
            ]
            async with self._watched(system):
                await asyncio.gather(*clients)
            await system.stop()
        self.served = [(ended - self._began, seconds) for ended, seconds in service.ended]

    @asynccontextmanager
    async def _watched(self, system: System) -> AsyncIterator[None]:
        """A scope in which the system is under load."""
        yield

    async def _send(self, stream: Stream, client: Client, rng: Random) -> None:
        loop = asyncio.get_running_loop()
        due = self._began + stream.begins_s
        ends = due + stream.seconds
        tasks: list[asyncio.Task[None]] = []
        while (due := due + rng.expovariate(stream.per_second)) < ends:
            await asyncio.sleep(due - loop.time())
            tasks.append(loop.create_task(self._ask(stream, client, f"{stream.name}-{stream.begins_s}-{len(tasks)}")))
        await asyncio.gather(*tasks)

    async def _ask(self, stream: Stream, client: Client, name: str) -> None:
        loop = asyncio.get_running_loop()
        came, status = loop.time(), "unanswered"
        kept = came
        try:
            limits: dict[str, Any] = {"deadline": stream.deadline, "timeout": stream.timeout, "retries": 0}
            kind: dict[str, Any] = {"priority": stream.priority, "tenant_id": stream.tenant}
            handle = await client.submit(Service.type, resource_class="io", assignment_id=name, **limits, **kind)
            kept = loop.time()
            if stream.name not in self.unwatched:
                result = await handle.result(stream.deadline + PATIENCE_S)
                status = result.status.value if result.status.value != "error" else str(result.error_code)
        except QueueFullError as full:
            kept, status = loop.time(), f"refused: {full.reason}"
        request = Request(status, came - self._began, kept - came, loop.time() - came)
        self.found.setdefault(stream.name, []).append(request)


@dataclass
class Accounts(Load):
    """The load of callers in the router's own process, and what router, workers and audit log say of each request."""

    told: bool = True
    """Whether requests carry their deadline."""
    waits: list[float] = field(default_factory=list)
    """What those who were refused heard: when to come back."""
    said: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Who said of which assignment that it was accepted, or why not."""
    recorded: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """The same, in the words of the audit log."""
    deepest: int = 0
    """What waited at the worker, at most."""

    @asynccontextmanager
    async def _watched(self, system: System) -> AsyncIterator[None]:
        self._system = system
        beside = [asyncio.create_task(self._hear()), asyncio.create_task(self._measure())]
        yield
        for task in beside:
            task.cancel()
        after = 0
        while page := await system.store.audit.read(AuditQuery(after=after, event_type="admission")):
            after = page[-1].sequence
            for one in page:
                self._record(json.loads(one.entry.body))

    async def _hear(self) -> None:
        async for delivery in self._system._transport.subscribe(ACK, limit=1_000_000):
            ack = msgspec.json.decode(delivery.body, type=ExecAssignmentAck)
            self.said["worker", ack.assignment_id, ack.reason or ack.status.value] += 1

    async def _measure(self) -> None:
        while True:
            self.deepest = max(self.deepest, *(worker.pools["io"].depth() for worker in self._system.workers))
            await asyncio.sleep(0.01)

    def _record(self, event: dict[str, Any]) -> None:
        if event.get("resource_class") == "router":
            self.recorded["router", "", event["status"]] += sum(event["inputs"]["refused"].values())
        else:
            self.recorded["worker", event["work_id"], event.get("reason") or event.get("status", "accepted")] += 1

    async def _ask(self, stream: Stream, client: Client, name: str) -> None:
        loop = asyncio.get_running_loop()
        came, status = loop.time(), "refused"
        deadline_ms = round(stream.deadline * 1000) if self.told else None
        options = AssignmentOptions(deadline_ms=deadline_ms, retry_count=0)
        asked = ExecAssignment(name, f"r-{name}", Job(Service.type), options=options, resource_class="io")
        try:
            status = (await (await self._system.submit(asked))).status.value
        except QueueFullError as full:
            self.waits.append(full.retry_after or 0.0)
            self.said["router", "", "rejected"] += 1
        took = loop.time() - came
        self.found.setdefault(stream.name, []).append(Request(status, came - self._began, took, took))
