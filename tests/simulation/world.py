"""
The whole system in one seeded run: callers, routers, workers, a store, and whatever goes wrong.

`run(seed)` gives a `Story` that holds every broken promise. The same seed gives the same story.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.failure import ErrorCode
from reefknot.errors import QueueFullError, StoreError
from reefknot.queue.model import messages
from reefknot.queue.model import work as core
from reefknot.queue.model.admission import RejectionPolicy, Rules
from reefknot.queue.model.destination_health import DestinationRules
from reefknot.queue.model.submission import Capacity, SubmissionRules
from reefknot.queue.port.work_queue import Settlement
from reefknot.queue.router.service import Router
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.router.submissions import Submissions
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from reefknot.steps.port import BlockContext
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing import run_virtual
from tests.simulation.promises import check_at_the_end, check_bounds
from tests.simulation.sea import Crashed, JumpingClock, Process, Sea, StoreThrough, Weather

STORM_S = 40.0
CALM_S = 260.0
LEASE_S = 6.0
SIZE = 8
TIGHT = 2
"""Places for submissions in every fourth run: there they are refused, and displaced."""
SLOTS = {"cpu": 2, "io": 2}
BREAKER = DestinationRules(longest_rest=8.0, max_outage=20.0)
"""What a step answers depends on the attempt, which an outage does not spend: so it is given up within the calm."""
TROUBLES = ("crash", "crash", "freeze", "freeze", "stop", "drain", "rest", "jump", "nothing")


@dataclass
class Story:
    """What happened in one run."""

    seed: int
    broken: list[str] = field(default_factory=list)
    handed_in: dict[str, messages.ExecAssignment] = field(default_factory=dict)
    refused: int = 0
    cancelled: set[str] = field(default_factory=set)
    results: dict[str, messages.ExecResult] = field(default_factory=dict)
    executions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    happened: list[str] = field(default_factory=list)
    ended_at: float = 0.0
    broker: dict[str, int] = field(default_factory=dict)
    """What went wrong at the broker, in a run that has one."""

    def __str__(self) -> str:
        lines = "\n  ".join(self.broken[:12])
        return (
            f"seed {self.seed}: {len(self.broken)} promises broken "
            f"(again: SIMULATION_SEED={self.seed} pytest tests/simulation -k one_seed)\n  {lines}"
        )


class SimBlock:
    """Does what its inputs say, attempt by attempt."""

    type = "sim.step"

    def __init__(self, story: Story, process: Process) -> None:
        self._story = story
        self._process = process

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return str(inputs["place"])

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> messages.StepResult:
        self._story.executions[context.assignment_id] += 1
        plan = inputs["plan"]
        seconds, what = plan[min(context.attempt, len(plan)) - 1]
        await asyncio.sleep(seconds)
        await self._process.hop()
        if what == "ok":
            return messages.StepResult(outputs={"id": context.assignment_id})
        if what == "raise":
            raise ConnectionError("refused")
        code = ErrorCode.resource_unavailable if what == "busy" else ErrorCode.permission_denied
        return messages.StepResult(messages.StepStatus.ERROR, code, error_message=what)

    async def close(self) -> None: ...


class Member:
    """One process: a router or a worker, alive or not."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.process: Process | None = None
        self.store: Any = None
        self.part: Any = None

    async def start(self) -> None:
        """As a supervisor does it: a process that cannot start because of its store is started again."""
        while True:
            try:
                await self._start()
                return
            except StoreError:
                self.crash()
                await asyncio.sleep(1.0)

    async def _start(self) -> None:
        world = self.world
        self.process = Process(world.rng, world.sea.weather)
        self.store = await world.store_of(self.process)
        near = StoreThrough(self.store, self.process)
        self.part = world.make(self.name, near, self.process, world.port_of(self.process, self.store))
        with contextlib.suppress(Crashed):
            await self.part.start()

    def crash(self) -> None:
        """As kill -9 does it: nothing is tidied up."""
        if self.process is not None:
            self.process.dead = True
            self.process.thaw()
        if self.part is not None:
            self.part.services.cancel()
        self.world.left_over.append(self.store)
        self.part = None

    async def stop(self) -> None:
        if self.part is not None:
            part, self.part = self.part, None
            with contextlib.suppress(Crashed):
                await part.stop()
                if self.store is not self.world.store:
                    await self.store.close()


def tenant_of(name: str) -> str | None:
    """The tenant of the assignment with this id: `a7`."""
    return [None, "x", "y"][int(name[1:]) % 3]


def record_of(name: str) -> str:
    return core.record_id(name, tenant_of(name))


class World:
    """Everything there is in one run."""

    troubles: tuple[str, ...] = TROUBLES
    most_pending = 30
    """Places of the router."""

    def __init__(self, seed: int, store: Store, clock: Clock, jumping: JumpingClock, **variant: Any) -> None:
        self.rng = Random(seed)
        self.store = store
        self.clock = clock
        self.jumping = jumping
        self.story = Story(seed)
        self.worker_class: type[Worker] = variant.get("worker_class", Worker)
        self.router_class: type[Router] = variant.get("router_class", Router)
        self.worker_options: dict[str, Any] = {}
        self.worker_clock: Clock = jumping if variant.get("jumping_workers") else clock
        self.sea = Sea(self.rng, Weather(lost=self.rng.choice([0.0, 0.02, 0.1]), late=self.rng.choice([0.0, 0.1])))
        self.policy = self.rng.choice(list(RejectionPolicy))
        names = [f"w{n}" for n in range(variant.get("workers") or self.rng.choice([1, 2, 3, 3]))]
        self.workers = [Member(self, name) for name in names]
        self.router = Member(self, "router")
        self.rules = SubmissionRules(TIGHT if seed % 4 == 3 else 30)
        self.submissions = Submissions(store.work, clock, rules=self.rules)
        self.callers: dict[str, tuple[Router, asyncio.Future[messages.ExecResult]]] = {}
        """Callers in a router's own process."""
        self.left_over: list[Any] = []
        """The stores of processes that are dead: their tasks stay where they were."""
        self.sea.on_send = self._accepted_means_kept
        if isinstance(store, MemoryStore):
            self._watch_fences(store)

    def _watch_fences(self, store: MemoryStore) -> None:
        """A report counts when it comes from whoever held the work at that moment, and from nobody else."""
        queue: Any = store.work
        settle = queue.settle

        async def watched(settlements: Sequence[Settlement]) -> list[bool]:
            before = {one.id: queue.table.items.get(one.id) for one in settlements}
            answers: list[bool] = await settle(settlements)
            for one, kept in zip(settlements, answers, strict=True):
                if kept and not core.holds(before[one.id], owner=one.owner, fence=one.fence):
                    self.story.broken.append(f"{one.id} has the report of a late owner on record")
            return answers

        queue.settle = watched

    def _accepted_means_kept(self, subject: str, body: bytes) -> None:
        if subject == messages.ACK and isinstance(self.store, MemoryStore):
            ack = msgspec.json.decode(body, type=messages.ExecAssignmentAck)
            item = self.store.work.table.items.get(record_of(ack.assignment_id))
            never_kept = item is None or (core.is_unassigned(item) and not item.admission)  # a recalled one has been
            if ack.status is messages.AckStatus.ACCEPTED and never_kept:
                self.story.broken.append(f"{ack.assignment_id} was accepted and is not kept")

    async def store_of(self, process: Process) -> Any:
        """The store as a process has it: the same one for all, or on a broker one of its own over the same streams."""
        return self.store

    def port_of(self, process: Process, store: Any) -> Any:
        """The transport as a process has it."""
        return self.sea.port(process)

    def make(self, name: str, store: Any, process: Process, port: Any) -> Any:
        common = {"store": store, "transport": port, "seed": self.rng.randrange(1 << 30)}
        rules = Rules(size=SIZE, policy=self.policy, max_defer_time_ms=2000)
        if name == "router":
            bounds = RouterSettings(rules=Rules(size=self.most_pending))
            return self.router_class(settings=bounds, clock=self.clock, **common)
        settings = default_settings(
            rules=rules, concurrency=SLOTS, lease=LEASE_S, quarantine_failed=self.story.seed % 5 == 0, breaker=BREAKER
        )
        blocks = {"sim.step": SimBlock(self.story, process)}
        named = {**common, **self.worker_options, "clock": self.worker_clock}
        return self.worker_class(name, settings=settings, blocks=blocks, **named)

    # ---- the run ----------------------------------------------------------------------------------------------------

    async def run(self) -> Story:
        await self.router.start()
        for worker in self.workers:
            await worker.start()
        stormy = [asyncio.create_task(self._callers()), asyncio.create_task(self._troubles())]
        beside = [asyncio.create_task(self._check()), asyncio.create_task(self._report_capacity())]
        await asyncio.gather(*stormy)
        await self._calm()
        await self._until_answered()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        self.story.ended_at = self.clock.now()
        for member in (self.router, *self.workers):
            await member.stop()
        await check_at_the_end(self)
        return self.story

    async def _report_capacity(self) -> None:
        """Publish the slots of those who are there, as a system does: so the store refuses by time as well."""
        while True:
            pools = [pool for one in self.workers if one.part is not None for pool in one.part.pools.values()]
            slots: Counter[str] = Counter()
            for pool in pools:
                slots[pool.name] += pool.slots
            await self.store.control.report("system", "{}", keep=5.0, capacity=Capacity(dict(slots), self.rules))
            await asyncio.sleep(1.0)

    async def _callers(self) -> None:
        for number in range(self.rng.randint(8, 40)):
            await asyncio.sleep(self.rng.random() * 1.2)
            assignment = self._assignment(number)
            try:
                await self._hand_in(assignment)
            except QueueFullError:
                self.story.refused += 1
                continue
            self.story.handed_in[assignment.assignment_id] = assignment
            if self.rng.random() < 0.1:
                asyncio.get_running_loop().call_later(self.rng.random() * 5, self._cancel, assignment.assignment_id)

    async def _hand_in(self, assignment: messages.ExecAssignment) -> None:
        """Through the router's own door, or at the desk, as another process does. Who gets no answer goes there too."""
        router = self.router.part
        if router is not None and self.rng.random() < 0.5:
            with contextlib.suppress(Crashed, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(3.0):
                    self.callers[assignment.assignment_id] = router, await router.submit(assignment)
                return
        await self.submissions.submit(assignment)

    def _assignment(self, number: int) -> messages.ExecAssignment:
        rng = self.rng
        seconds, ends = [0.01, 0.1, 0.5, 2.0, 5.0], ["ok", "ok", "ok", "raise", "busy", "denied"]
        plan = [(rng.choice(seconds), rng.choice(ends)) for _ in range(4)]
        options = messages.AssignmentOptions(
            priority=rng.choice([0, 0, 0, 10, -10]),
            deadline_ms=rng.choice([None, None, 4000, 20000]),
            timeout_ms=rng.choice([None, None, 3000]),
            retry_count=rng.choice([None, 1, 6]),
        )
        job = messages.Job("sim.step", {"plan": plan, "place": rng.choice(["a", "b"])})
        named: dict[str, Any] = {"resource_class": rng.choice(["cpu", "io"]), "tenant_id": tenant_of(f"a{number}")}
        return messages.ExecAssignment(f"a{number}", f"r{number}", job, options=options, **named)

    def _cancel(self, assignment_id: str) -> None:
        if self.router.part is not None:
            self.story.cancelled.add(assignment_id)
            part, process = self.router.part, self.router.process
            task = asyncio.get_running_loop().create_task(
                part.cancel(assignment_id, "changed my mind", tenant_id=tenant_of(assignment_id))
            )
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            assert process is not None

    async def _troubles(self) -> None:
        ends = self.clock.now() + STORM_S
        while self.clock.now() < ends:
            await asyncio.sleep(self.rng.random() * 8)
            member = self.rng.choice([self.router, *self.workers])
            trouble = self.rng.choice(self.troubles)
            self.story.happened.append(f"{self.clock.now():.2f} {trouble} {member.name}")
            await getattr(self, f"_{trouble}")(member)

    async def _nothing(self, member: Member) -> None: ...

    async def _crash(self, member: Member) -> None:
        member.crash()
        await asyncio.sleep(self.rng.random() * 6)
        await member.start()

    async def _stop(self, member: Member) -> None:
        await member.stop()
        await asyncio.sleep(self.rng.random() * 6)
        await member.start()

    async def _drain(self, member: Member) -> None:
        if isinstance(member.part, Worker):
            await member.part.drain(self.rng.random())
        await self._stop(member)

    async def _rest(self, member: Member) -> None:
        """Drained, and at work again a while later."""
        part = member.part
        if isinstance(part, Worker):
            with contextlib.suppress(Crashed):
                await part.drain(self.rng.random())
                await asyncio.sleep(self.rng.random() * 8)
                part.resume()

    async def _freeze(self, member: Member) -> None:
        if member.process is not None:
            member.process.freeze()
            await asyncio.sleep(self.rng.random() * 20)
            member.process.thaw()

    async def _jump(self, member: Member) -> None:
        self.jumping.offset += self.rng.choice([-86_400.0, 86_400.0, -5.0, 3600.0])

    async def _calm(self) -> None:
        """The storm is over: everybody is there, and messages arrive. What was accepted must now come to its end."""
        self.sea.calm = True
        for member in (self.router, *self.workers):
            if member.part is None:
                await member.start()

    async def _until_answered(self) -> None:
        ends = self.clock.now() + CALM_S
        left = set(self.story.handed_in)
        while (left or self._untold()) and self.clock.now() < ends:
            for name in sorted(left):
                found = await self.submissions.answer(record_of(name))
                if found is not None:
                    self.story.results[name] = found
                    left.discard(name)
            await asyncio.sleep(1.0)
        self.story.broken += [f"the caller of {name} in the router's process was not told" for name in self._untold()]

    def _untold(self) -> list[str]:
        return [
            name
            for name, (router, future) in self.callers.items()
            if router is self.router.part and not future.done() and name in self.story.results
        ]

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            check_bounds(self)


@contextlib.asynccontextmanager
async def opened(seed: int, clock: Clock, store_class: type[MemoryStore]) -> AsyncIterator[Store]:
    """Every eighth seed on SQLite, the others in memory."""
    if seed % 8:
        yield store_class(clock)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = await SqliteStore(f"{folder}/state.db", clock, inline=True).start()
        try:
            yield store
        finally:
            await store.close()


def run(seed: int, **variant: Any) -> Story:
    """One whole run, in virtual time."""

    async def main(clock: Clock, jumping: JumpingClock) -> Story:
        async with opened(seed, clock, variant.get("store_class", MemoryStore)) as store:
            return await World(seed, store, clock, jumping, **variant).run()

    return simulated(main)


def simulated(story: Callable[[Clock, JumpingClock], Awaitable[Story]]) -> Story:
    """A story in virtual time, with the steady clock of its processes and the one that somebody sets."""

    async def main() -> Story:
        asyncio.get_running_loop().set_exception_handler(quiet)
        jumping = JumpingClock()
        return await story(SteadyClock(jumping), jumping)

    with silence():
        return run_virtual(main())


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """A scope without log lines: in a simulation everything goes wrong all the time."""
    logger = logging.getLogger("reefknot")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A process that was killed leaves its tasks as they were; everything else is a mistake."""
    if not isinstance(context.get("exception"), Crashed):
        loop.default_exception_handler(context)
