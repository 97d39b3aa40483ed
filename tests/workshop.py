"""
A router and workers in one virtual loop, with steps that do what a test tells them.

The fixture `shop` is opened in the virtual time of its test, and `with_shop(story)` runs a story by itself. The shop
hears every ack and every result.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import structs

from reefknot.audit.model.event import AnyEvent, decode
from reefknot.audit.port import AuditQuery
from reefknot.core.clock import Clock
from reefknot.core.failure import ErrorCode
from reefknot.queue.model import messages
from reefknot.queue.model.destination_health import DestinationRules
from reefknot.queue.pauses import Pauses
from reefknot.queue.router.service import Router
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import WorkerSettings, default_settings
from reefknot.runtime.clocks import LoopClock
from reefknot.steps.port import Block, BlockContext
from reefknot.stores.memory import MemoryStore
from reefknot.stores.memory.store import MemoryTransport
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing import run_virtual
from tests.stories import InLoop

Member = TypeVar("Member", Worker, Router)
Outcome = messages.StepResult | Exception | Callable[[], Awaitable[messages.StepResult]]
OK = messages.StepResult(outputs={"done": True})
DENIED = messages.StepResult(messages.StepStatus.ERROR, ErrorCode.permission_denied, error_message="not allowed")
REFUSED = ConnectionError("refused")
NO_BREAKER = DestinationRules(enabled=False)
"""For stories in which several jobs fail, and whose subject is something else than an outage."""


def http(status: int, **metadata: Any) -> messages.StepResult:
    return messages.StepResult(
        messages.StepStatus.ERROR,
        ErrorCode.http_error,
        error_message="failed",
        metadata={"http_status_code": status, **metadata},
    )


class Step:
    """A block that gives what it was told: one outcome for each attempt, the last one for all that follow."""

    def __init__(self, *outcomes: Outcome, name: str = "test.step", seconds: float = 0.01) -> None:
        self.type = name
        self.outcomes = outcomes or (OK,)
        self.seconds = seconds
        self.began: list[tuple[str, float]] = []
        self.contexts: list[BlockContext] = []

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return str(inputs.get("place", "somewhere"))

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> messages.StepResult:
        self.began.append((context.assignment_id, asyncio.get_running_loop().time()))
        self.contexts.append(context)
        await asyncio.sleep(inputs.get("seconds", self.seconds))
        outcome = self.outcomes[min(context.attempt, len(self.outcomes)) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome if isinstance(outcome, messages.StepResult) else await outcome()

    async def close(self) -> None: ...

    def times(self, name: str) -> list[float]:
        return [round(at, 3) for one, at in self.began if one == name]


def work(
    name: str, payload: dict[str, Any] | None = None, *, job: str = "test.step", **options: Any
) -> messages.ExecAssignment:
    return messages.ExecAssignment(
        name, f"r-{name}", messages.Job(job, payload or {}), options=messages.AssignmentOptions(**options)
    )


class Shop:
    """What a test has in its hands."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.transport = MemoryTransport()
        self.acks: list[messages.ExecAssignmentAck] = []
        self.results: list[messages.ExecResult] = []
        self._heard = self.transport.subscribe(messages.ACK, messages.RESULT, limit=100_000)
        self._ears = [asyncio.create_task(self._hear())]
        self.members: list[Worker | Router] = []
        self._common: dict[str, Any] = {"store": store, "transport": self.transport, "clock": clock}

    async def _hear(self) -> None:
        async for delivery in self._heard:
            with suppress(msgspec.DecodeError):
                if delivery.subject == messages.ACK:
                    self.acks.append(msgspec.json.decode(delivery.body, type=messages.ExecAssignmentAck))
                else:
                    self.results.append(msgspec.json.decode(delivery.body, type=messages.ExecResult))

    async def worker(
        self,
        name: str = "w1",
        *blocks: Block,
        settings: WorkerSettings | None = None,
        seed: int = 1,
        pauses: Pauses | None = None,
        **changes: Any,
    ) -> Worker:
        known = {block.type: block for block in blocks} or {"test.step": Step()}
        used = settings or default_settings(**changes)
        return await self._joined(Worker(name, settings=used, blocks=known, seed=seed, pauses=pauses, **self._common))

    async def router(self, router_id: str = "router", *, pauses: Pauses | None = None, **settings: Any) -> Router:
        bounds, more = RouterSettings(**settings), {**self._common, "pauses": pauses}
        return await self._joined(Router(settings=bounds, router_id=router_id, seed=1, **more))

    async def _joined(self, member: Member) -> Member:
        self.members.append(member)
        await member.start()
        return member

    def use_queue(self, member: Worker | Router, queue: Any) -> None:
        """Let a member speak to `queue` instead of the store's own work queue."""
        structs.force_setattr(member._context, "work", queue)

    async def send(self, *assignments: messages.ExecAssignment | bytes, to: str = "w1") -> None:
        """As a router sends, and let it be taken in."""
        for one in assignments:
            body = one if isinstance(one, bytes) else messages.encode(one)
            await self.transport.publish(messages.assign_subject(to), body)
        await asyncio.sleep(0.001)

    def vanish(self, member: Worker | Router) -> None:
        """As kill -9: its tasks end where they are."""
        if isinstance(member, Worker):
            for pool in member.pools.values():
                pool.cancel_all()
        member.services.cancel()
        for task in list(member._background._tasks):
            task.cancel()
        self.members.remove(member)

    async def events(self, kind: type[Any] | None = None) -> list[AnyEvent]:
        found = [decode(kept.entry.body) for kept in await self.store.audit.read(AuditQuery(limit=100_000))]
        return [event for event in found if kind is None or isinstance(event, kind)]

    def result(self, name: str) -> messages.ExecResult:
        (found,) = [one for one in self.results if one.assignment_id == name]
        return found

    def seconds(self, name: str) -> float:
        """How long its last attempt took."""
        took = self.result(name).latency_ms
        assert isinstance(took, int | float)
        return took / 1000

    def ack(self, name: str) -> messages.ExecAssignmentAck:
        return [one for one in self.acks if one.assignment_id == name][-1]

    def heard(self, *subjects: str) -> list[bytes]:
        """Everything that is sent to these subjects from now on, as it comes."""
        bodies: list[bytes] = []
        line = self.transport.subscribe(*subjects, limit=100_000)

        async def listen() -> None:
            async for delivery in line:
                bodies.append(delivery.body)  # noqa: PERF401 - as it comes, not at the end

        self._ears.append(asyncio.create_task(listen()))
        return bodies

    async def close(self) -> None:
        for member in self.members:
            await member.stop()
        for ear in self._ears:
            ear.cancel()


@asynccontextmanager
async def opened(path: str | None = None) -> AsyncIterator[Shop]:
    loop: Any = asyncio.get_running_loop()
    clock = LoopClock(loop)
    store: Store = MemoryStore(clock) if path is None else await SqliteStore(path, clock, inline=True).start()
    shop = Shop(store, clock)
    try:
        yield shop
    finally:
        await shop.close()
        await store.close()


def with_shop(story: Callable[[Shop], Awaitable[None]], path: str | None = None) -> None:
    async def main() -> None:
        async with opened(path) as shop:
            await story(shop)

    run_virtual(main())


@pytest.fixture
def shop() -> InLoop:
    return InLoop(opened)
