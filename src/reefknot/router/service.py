"""
The router: one assignment to one worker that can take it, and its answer back to the caller.

    submit → is there room here → keep it → choose a worker → send → ack → result → tell the caller

A rejected assignment goes to another worker or waits here; one whose worker is gone is sent again. The router's own
queue is bounded, and its caller is told when to come back.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from reefknot.core.audit.event import Event, Requeued, Routing, timestamp
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    ACK,
    ASSIGN,
    CANCEL,
    HEARTBEAT,
    RESULT,
    AckStatus,
    Cancel,
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    Heartbeat,
    JobType,
    ResultStatus,
    assign_subject,
    encode,
    resource_class,
)
from reefknot.core.overload.admission import Rules
from reefknot.core.overload.level import OverloadStatus, level
from reefknot.core.retry.draw import draw, key_number
from reefknot.core.routing import Chosen, Nobody, choose_worker
from reefknot.execution import chance, report
from reefknot.execution.journal import Journal, event_id
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.ports.transport import Delivery, Transport
from reefknot.router.desk import Desk
from reefknot.router.health import HealthTable
from reefknot.router.pending import Pending, PendingTable

PUBLISH_S = 10.0
TICK_S = 0.05
CLAIM_S = 0.25
RENEW_S = 20.0
BATCH = 200
ACK_WITHIN_S = 10.0
_FINAL_REASONS = frozenset({"invalid", "unknown_job_type"})

_acks = msgspec.json.Decoder(ExecAssignmentAck)
_results = msgspec.json.Decoder(ExecResult)
_beats = msgspec.json.Decoder(Heartbeat)


class RouterSnapshot(Struct, frozen=True):
    """The router at one moment."""

    waiting: int
    pending: int
    status: OverloadStatus
    workers: dict[str, dict[str, Any]]


class Router:
    """Routes assignments over a transport."""

    def __init__(
        self,
        *,
        store: Store,
        transport: Transport,
        clock: Clock,
        rules: Rules | None = None,
        seed: int | None = None,
        shared_subject: bool = False,
        router_id: str = "router",
    ) -> None:
        self.router_id = router_id
        self._transport = transport
        self._clock = clock
        self._journal = Journal(store.audit)
        self._rules = rules or Rules()
        self.desk = Desk(store.work, clock, size=self._rules.size)
        self._owner = f"{router_id}#{event_id()}"
        self._seed = seed
        self._shared = shared_subject
        self.health = HealthTable()
        self.table = PendingTable()
        self._wake = asyncio.Event()
        self._callers: dict[str, asyncio.Future[ExecResult]] = {}
        self._claim_soon = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self._draws = 0

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        inbox = self._transport.subscribe(ACK, RESULT, HEARTBEAT)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._listen(inbox), name="router inbox"),
            loop.create_task(self._take_on(), name="router desk"),
            loop.create_task(self._dispatch(), name="router dispatch"),
            loop.create_task(self._renew(), name="router leases"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def snapshot(self) -> RouterSnapshot:
        workers = {
            name: {one: msgspec.to_builtins(h) for one, h in by.items()} for name, by in self.health.everybody().items()
        }
        waiting = self.table.waiting
        return RouterSnapshot(
            waiting, len(self.table), level(waiting, self._rules.size, self._rules.thresholds), workers
        )

    # ---- callers ----------------------------------------------------------------------------------------------------

    async def submit(self, assignment: ExecAssignment) -> asyncio.Future[ExecResult]:
        """Take it on, or raise `QueueFullError` with the time to come back. The future is its result."""
        future = self._callers.get(assignment.assignment_id)
        if future is not None:
            return future
        future = asyncio.get_running_loop().create_future()
        self._callers[assignment.assignment_id] = future
        try:
            if not await self.desk.hand_in(assignment):
                await self._answer_from_record(assignment.assignment_id)
        except BaseException:
            self._callers.pop(assignment.assignment_id, None)
            raise
        self._claim_soon.set()
        return future

    async def _answer_from_record(self, assignment_id: str) -> None:
        """The same assignment again: if it has ended, its stored result is the answer."""
        stored = await self.desk.result(assignment_id, 0.0)
        if stored is not None:
            self._tell_caller(stored)

    async def cancel(self, assignment_id: str, reason: str | None = None) -> bool:
        """Call it off, wherever it is. False when it is not known here."""
        pending = self.table.get(assignment_id)
        if pending is None:
            return False
        if pending.worker_id is None:
            await self._end(
                pending, _failed(pending.assignment, ResultStatus.CANCELLED, ErrorCode.cancelled_by_user, reason or "")
            )
            return True
        await self._publish(CANCEL, encode(Cancel(assignment_id, reason)), "")
        return True

    async def _take_on(self) -> None:
        """Claim what callers handed in, here or in another process, as long as there is room to look after it."""
        while True:
            self._claim_soon.clear()
            room = self._rules.size - len(self.table)
            taken = await self._claimed(min(BATCH, room)) if room > 0 else 0
            if not taken:
                await self._until(self._claim_soon, CLAIM_S)

    async def _claimed(self, n: int) -> int:
        try:
            taken = await self.desk.claim(n, self._owner)
        except Exception as error:
            report.logger().error("router: the store cannot be read (%s)", report.printable(str(error), most=300))
            return 0
        now = self._clock.now()
        for one in taken:
            self.table.add(one.assignment, resource_class(one.assignment), now, one.held)
        if taken:
            self._wake.set()
        return len(taken)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            held = [one.held for one in self.table.everyone()]
            if held:
                await self._survive(self.desk.renew(held), "leases could not be renewed")

    async def _until(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    # ---- out --------------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            await self._survive(self._look_after(), "looking after pending work failed")
            for pending in self.table.next_waiting():
                if not await self._send(pending):
                    break
            await self._until(self._wake, TICK_S)

    async def _send(self, pending: Pending) -> bool:
        """To a worker, if one can take it. False: nobody can, and those behind it wait too."""
        now = self._clock.now()
        choice = choose_worker(self.health.of_class(pending.resource_class), self._draw(pending), now)
        if isinstance(choice, Nobody):
            if not self._shared:
                return False
            choice = Chosen("")
        if choice.worker_id:
            self.health.sent(choice.worker_id, pending.resource_class, now, probe=choice.probe)
        self.table.sent(pending, choice.worker_id, now)
        subject = assign_subject(choice.worker_id) if choice.worker_id else ASSIGN
        message_id = f"{pending.assignment.assignment_id}/{pending.route}"
        await self._survive(
            self._publish(subject, encode(pending.assignment), message_id), "an assignment could not be sent"
        )
        return True

    def _draw(self, pending: Pending) -> float:
        self._draws += 1
        seed = chance.process_seed if self._seed is None else self._seed
        return draw(seed, key_number(pending.assignment.assignment_id), self._draws)

    async def _look_after(self) -> None:
        """Send again what was sent to a worker that is gone, or that never answered."""
        now = self._clock.now()
        gone = self.health.gone(now)
        self.health.forget(now)
        for pending in self.table.sent_to(gone):
            await self._journal.write(self._requeued(pending, "its worker is gone"))
            self.table.back(pending)
        for pending in self.table.unanswered(now - ACK_WITHIN_S):
            await self._journal.write(self._requeued(pending, "no ack arrived"))
            self.table.back(pending)

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def _listen(self, inbox: Any) -> None:
        async for delivery in inbox:
            await self._survive(self._hear(delivery), "a message could not be read")

    async def _hear(self, delivery: Delivery) -> None:
        match delivery.subject:
            case subject if subject == HEARTBEAT:
                self.health.heard_heartbeat(_beats.decode(delivery.body), self._clock.now())
                self._wake.set()
            case subject if subject == ACK:
                await self._hear_ack(_acks.decode(delivery.body))
            case _:
                await self._hear_result(_results.decode(delivery.body))
        if delivery.done is not None:
            await delivery.done()

    async def _hear_ack(self, ack: ExecAssignmentAck) -> None:
        pending = self.table.get(ack.assignment_id)
        if pending is None:
            return
        worker_id = ack.worker_id or pending.worker_id or ""
        self.health.heard_ack(worker_id, pending.resource_class, ack, self._clock.now())
        if ack.status is AckStatus.ACCEPTED:
            self.table.acked(pending)
        elif ack.status is AckStatus.ERROR or ack.reason in _FINAL_REASONS or ack.reason is None:
            code = ErrorCode.invalid_input if ack.reason in _FINAL_REASONS else ErrorCode.system_overload
            await self._end(pending, _failed(pending.assignment, ResultStatus.ERROR, code, ack.message or ""))
        elif ack.reason != "dropped_oldest":
            await self._journal.write(self._event(pending.assignment, worker_id, f"rejected: {ack.reason}"))
            self.table.back(pending)
        self._wake.set()

    async def _hear_result(self, result: ExecResult) -> None:
        pending = self.table.get(result.assignment_id)
        if pending is None:
            return
        if result.worker_id is not None:
            self.health.heard_result(result.worker_id, pending.resource_class, result, self._clock.now())
        await self._end(pending, result)

    async def _end(self, pending: Pending, result: ExecResult) -> None:
        """Keep the answer, then tell whoever waits for it here."""
        self.table.remove(pending)
        if await self.desk.answer(pending.held, result):
            self._tell_caller(result)
        self._wake.set()
        self._claim_soon.set()

    def _tell_caller(self, result: ExecResult) -> None:
        future = self._callers.pop(result.assignment_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _event(self, assignment: ExecAssignment, worker_id: str | None, reason: str) -> Event:
        return Routing(**self._about(assignment), worker_id=worker_id, reason=reason)

    def _requeued(self, pending: Pending, reason: str) -> Event:
        return Requeued(**self._about(pending.assignment), reason=reason, generation=pending.route)

    def _about(self, assignment: ExecAssignment) -> dict[str, Any]:
        return {
            "timestamp": timestamp(self._clock.wall()),
            "event_id": event_id(),
            "tenant_id": assignment.tenant_id,
            "trace_id": assignment.trace_id,
            "correlation_id": assignment.request_id,
            "work_id": assignment.assignment_id,
        }

    async def _publish(
        self, subject: str, body: bytes, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        async with asyncio.timeout(PUBLISH_S):
            await self._transport.publish(subject, body, headers=headers, message_id=message_id)

    async def _survive(self, work: Awaitable[None], what: str) -> None:
        try:
            await work
        except Exception as error:
            report.logger().error(
                "router: %s (%s)", what, report.printable(f"{type(error).__name__}: {error}", most=300)
            )


def _failed(assignment: ExecAssignment, status: ResultStatus, code: ErrorCode, message: str) -> ExecResult:
    return ExecResult(
        assignment_id=assignment.assignment_id,
        request_id=assignment.request_id,
        status=status,
        provider_id=(assignment.executor and assignment.executor.provider_id) or "router",
        job=JobType(assignment.job.type),
        latency_ms=0,
        cost=0,
        trace_id=assignment.trace_id,
        tenant_id=assignment.tenant_id,
        error_code=code.wire,
        error_message=message or None,
    )
