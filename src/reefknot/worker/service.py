"""
A worker: takes assignments in, runs them as steps, reports back, and says how it is.

    intake ──▶ queue ──▶ slot: one attempt ──▶ settle ──▶ publish the result
                 ▲                          └─▶ due again: the place is kept, the slot is free

Everything it accepted is in its store. A worker that comes back under its id finds its work there.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    ACK,
    ASSIGN,
    CANCEL,
    HEARTBEAT,
    RESULT,
    Cancel,
    ClassHealth,
    ExecResult,
    Heartbeat,
    StepResult,
    StepStatus,
    assign_subject,
    encode,
)
from reefknot.core.overload.admission import Degradation
from reefknot.core.overload.level import OverloadStatus
from reefknot.core.redaction import Redactor
from reefknot.core.work import HandBack, WorkItem, WorkState
from reefknot.execution import report
from reefknot.execution.journal import Journal, event_id
from reefknot.ports.block import Block
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.ports.transport import Delivery, Transport
from reefknot.ports.work_queue import Settlement
from reefknot.worker.intake import Envelope, Intake
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.settings import WorkerSettings
from reefknot.worker.step import Report, Steps

PAGE = 500
PUBLISH_S = 10.0

_envelopes = msgspec.json.Decoder(Envelope)
_cancels = msgspec.json.Decoder(Cancel)


class ClassSnapshot(Struct, frozen=True):
    """One resource class of a worker at one moment."""

    status: OverloadStatus
    depth: int
    size: int | None
    active: int
    capacity: int
    oldest_age_s: float


class WorkerSnapshot(Struct, frozen=True):
    """A worker at one moment."""

    worker_id: str
    draining: bool
    classes: dict[str, ClassSnapshot]


class Worker:
    """One worker over a store and a transport."""

    def __init__(
        self,
        worker_id: str,
        *,
        settings: WorkerSettings,
        store: Store,
        transport: Transport,
        blocks: Mapping[str, Block],
        clock: Clock,
        secrets: tuple[str, ...] = (),
        seed: int | None = None,
        shared_subject: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.settings = settings
        self._store = store
        self._transport = transport
        self._blocks = blocks
        self._clock = clock
        self._subjects = (assign_subject(worker_id), *((ASSIGN,) if shared_subject else ()))
        self.journal = Journal(store.audit, redactor=Redactor(secrets))
        self.steps = Steps(worker_id, settings, blocks=blocks, clock=clock, seed=seed)
        self._owner = f"{worker_id}#{event_id()}"
        self.pools = {name: self._pool(name) for name in settings.concurrency}
        self.intake = Intake(
            worker_id,
            settings,
            pools=self.pools,
            known=blocks,
            work=store.work,
            journal=self.journal,
            clock=clock,
        )
        self._tasks: list[asyncio.Task[Any]] = []
        self._cancelled: set[str] = set()

    def _pool(self, name: str) -> Pool:
        return Pool(
            name,
            queue_name=f"{name}@{self.worker_id}",
            owner=self._owner,
            slots=self.settings.slots_for(name),
            rules=self.settings.rules_for(name),
            bounded=self.settings.queue_v2,
            work=self._store.work,
            clock=self._clock,
            lease=self.settings.lease,
            run=self._run,
        )

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find what was accepted before, then listen."""
        await self._recover()
        assignments = self._transport.subscribe(*self._subjects)
        cancels = self._transport.subscribe(CANCEL)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(pool.serve(), name=f"{self.worker_id} {pool.name}") for pool in self.pools.values()
        ]
        self._tasks += [
            loop.create_task(self._listen(assignments), name=f"{self.worker_id} intake"),
            loop.create_task(self._hear_cancels(cancels), name=f"{self.worker_id} cancels"),
            loop.create_task(self._beat(), name=f"{self.worker_id} heartbeat"),
            loop.create_task(self._renew(), name=f"{self.worker_id} leases"),
            loop.create_task(self._sweep(), name=f"{self.worker_id} expiry"),
        ]

    async def _recover(self) -> None:
        """Queue places of work that an earlier life under this id accepted; running work comes back by its lease."""
        after = ""
        while True:
            items = await self._store.work.find(state=WorkState.PENDING, after=after, limit=PAGE)
            for item in items:
                pool = next((one for one in self.pools.values() if one.queue_name == item.resource_class), None)
                if pool is not None:
                    pool.put(self._place(item))
            if len(items) < PAGE:
                return
            after = items[-1].id

    def _place(self, item: WorkItem) -> Queued:
        now, wall = self._clock.now(), self._clock.wall()
        expires = float("inf") if item.deadline_at is None else now + item.deadline_at / 1000 - wall
        return Queued(item.id, item.priority, now, now + item.due_at / 1000 - wall, expires)

    async def drain(self, seconds: float | None = None) -> int:
        """Take nothing new, finish what runs, and hand back what did not finish in time. Answers how many went back."""
        self.intake.draining = True
        for pool in self.pools.values():
            pool.paused = True
        running = [task for pool in self.pools.values() for task in pool.running.values()]
        if running:
            await asyncio.wait(running, timeout=self.settings.drain if seconds is None else seconds)
        return await self._hand_back()

    async def _hand_back(self) -> int:
        held = [one for pool in self.pools.values() for one in pool.held.values()]
        tasks = [task for pool in self.pools.values() for task in pool.running.values()]
        for task in tasks:
            task.cancel()
        if held:
            back = [Settlement(one.id, one.owner, one.fence, HandBack()) for one in held]
            await self._store.work.settle(back)
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(held)

    async def stop(self) -> None:
        """End at once; what runs goes back to the queue and spends nothing."""
        self.intake.draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hand_back()

    def snapshot(self) -> WorkerSnapshot:
        now = self._clock.now()
        classes = {
            name: ClassSnapshot(
                pool.status(), pool.depth(), pool.queue.size, pool.active, pool.slots, pool.queue.oldest_age(now)
            )
            for name, pool in self.pools.items()
        }
        return WorkerSnapshot(self.worker_id, self.intake.draining, classes)

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def _listen(self, deliveries: Any) -> None:
        async for delivery in deliveries:
            await self._survive(self._take(delivery), "an assignment could not be taken in")

    async def _take(self, delivery: Delivery) -> None:
        taken = await self.intake.take(delivery.body, delivery.headers)
        if taken.dropped is not None:
            ack, result = taken.dropped
            await self._publish(ACK, encode(ack), ack.assignment_id)
            await self._publish(RESULT, encode(result), f"{result.assignment_id}/dropped")
        await self._publish(ACK, encode(taken.ack), taken.ack.assignment_id)
        if taken.duplicate:
            await self._say_again(taken.ack.assignment_id)
        if delivery.done is not None:
            await delivery.done()

    async def _say_again(self, work_id: str) -> None:
        """A repeated assignment that has ended gets its stored result once more."""
        item = await self._store.work.get(work_id)
        if item is not None and item.result is not None and item.state is not WorkState.PENDING:
            await self._publish(RESULT, item.result.encode(), f"{item.id}/{item.generation}")

    async def _hear_cancels(self, deliveries: Any) -> None:
        async for delivery in deliveries:
            with suppress(msgspec.DecodeError):
                await self._survive(self._cancel(_cancels.decode(delivery.body)), "a cancellation failed")

    async def _cancel(self, cancel: Cancel) -> None:
        work_id = cancel.assignment_id
        pool = next((one for one in self.pools.values() if work_id in one.queue or work_id in one.running), None)
        if pool is None:
            return
        item = await self._store.work.get(work_id)
        reason = cancel.reason or "cancelled"
        if item is None or not await self._store.work.cancel(work_id, reason=reason, who="cancel message"):
            return
        pool.queue.remove(work_id)
        task = pool.running.get(work_id)
        if task is not None:
            self._cancelled.add(work_id)
            task.cancel()
        envelope = _envelopes.decode(item.payload)
        step = StepResult(StepStatus.CANCELLED, ErrorCode.cancelled_by_user, error_message=reason)
        await self._tell(item, self.steps.result(envelope.assignment, step, retries_used=item.attempts), pool, envelope)

    # ---- run --------------------------------------------------------------------------------------------------------

    async def _run(self, item: WorkItem) -> None:
        """One attempt of one claimed item, settled."""
        envelope = _envelopes.decode(item.payload)
        pool = self.pools[item.resource_class.partition("@")[0]]
        change = Degradation(envelope.skip_retries, envelope.timeout_factor, envelope.skip_circuit_breaker)
        began = self._clock.now()
        outcome = await self.steps.attempt(item, envelope.assignment, change)
        pool.served((self._clock.now() - began) * 1000)
        await self._settle(item, outcome, pool, envelope)

    async def _settle(self, item: WorkItem, outcome: Report, pool: Pool, envelope: Envelope) -> None:
        result = None if outcome.result is None else self._completed(outcome.result, pool, envelope)
        settled = outcome.settled
        if result is not None and hasattr(settled, "result"):
            settled = msgspec.structs.replace(settled, result=encode(result).decode())
        entries = tuple(self.journal.entries(outcome.events))
        (kept,) = await self._store.work.settle([Settlement(item.id, item.owner, item.fence, settled, entries)])
        if not kept:
            report.logger().warning("%s: the lease of %s was lost; its report was refused", self.worker_id, item.id)
            return
        if result is not None:
            await self._publish(RESULT, encode(result), f"{item.id}/{item.generation}")
            return
        again = await self._store.work.get(item.id)
        if again is not None and again.state is WorkState.PENDING:
            pool.put(self._place(again))

    def _completed(self, result: ExecResult, pool: Pool, envelope: Envelope) -> ExecResult:
        """The overload fields, which the baseline withholds."""
        if not self.settings.queue_v2:
            return result
        return msgspec.structs.replace(result, queue_depth=envelope.queue_depth, overload_status=pool.status())

    async def _tell(self, item: WorkItem, result: ExecResult, pool: Pool, envelope: Envelope) -> None:
        done = self._completed(result, pool, envelope)
        await self._publish(RESULT, encode(done), f"{item.id}/{item.generation}")

    # ---- by the clock -----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._survive(self._publish(HEARTBEAT, encode(self.heartbeat()), ""), "a heartbeat was not sent")
            await asyncio.sleep(self.settings.heartbeat)

    def heartbeat(self) -> Heartbeat:
        classes = {
            name: ClassHealth(pool.status(), pool.depth(), pool.active, pool.slots) for name, pool in self.pools.items()
        }
        return Heartbeat(self.worker_id, int(self._clock.wall() * 1000), classes, self.intake.draining)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease / 3)
            for pool in self.pools.values():
                await self._survive(self._renew_pool(pool), "leases could not be renewed")

    async def _renew_pool(self, pool: Pool) -> None:
        for lost in await pool.renew():
            task = pool.running.get(lost)
            if task is not None:
                task.cancel()

    async def _sweep(self) -> None:
        """Work that expired while it waited is not run: it goes to a slot at once, which says so."""
        while True:
            await asyncio.sleep(self.settings.heartbeat)
            now = self._clock.now()
            for pool in self.pools.values():
                for late in pool.queue.expired(now):
                    pool.put(Queued(late.id, late.priority, late.since, 0.0))

    # ---- out --------------------------------------------------------------------------------------------------------

    async def _publish(self, subject: str, body: bytes, message_id: str) -> None:
        async with asyncio.timeout(PUBLISH_S):
            await self._transport.publish(subject, body, message_id=message_id)

    async def _survive(self, work: Awaitable[None], what: str) -> None:
        """One message, one heartbeat, one renewal may fail; the worker goes on."""
        try:
            await work
        except Exception as error:
            report.logger().error(
                "%s: %s (%s: %s)", self.worker_id, what, type(error).__name__, report.printable(str(error), most=300)
            )
