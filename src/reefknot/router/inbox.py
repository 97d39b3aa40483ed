"""
What the router hears: heartbeats, acks, results.

Each updates what is known of a worker. An ack moves its assignment on, or brings it back to be sent to somebody else; a
result ends it. Late words about an assignment that is elsewhere by now change nothing but health. Nothing here waits
for the store: what has to be kept is handed on, and the transport hears that a result was taken when it is kept.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import ACK, HEARTBEAT, AckStatus, ExecAssignmentAck, ExecResult, Heartbeat, ResultStatus
from reefknot.core.overload.admission import RejectReason
from reefknot.core.routing import too_late_everywhere
from reefknot.ports.clock import Clock
from reefknot.ports.transport import Delivery
from reefknot.router.admission import HealthTable
from reefknot.router.completion import DONE_S, Done, Ends
from reefknot.router.dispatch import REFUSED_FOR_S, SHARED, Dispatcher
from reefknot.router.pending import Pending, PendingTable
from reefknot.router.records import Records
from reefknot.router.submissions import ended_here
from reefknot.runtime.log import logger, printable
from reefknot.runtime.tasks import BoundedTasks

_acks = msgspec.json.Decoder(ExecAssignmentAck)
_results = msgspec.json.Decoder(ExecResult)
_beats = msgspec.json.Decoder(Heartbeat)
_FULL = ("Queue ", "Failed to queue")
"""How a refusal begins that is about the queue. The baseline, whose queue is never full, gives no reason at all."""


class Inbox:
    """Reads what workers say."""

    def __init__(
        self,
        *,
        table: PendingTable,
        health: HealthTable,
        dispatcher: Dispatcher,
        records: Records,
        clock: Clock,
        crew: BoundedTasks,
        ends: Ends,
        wake: Callable[[], None],
    ) -> None:
        self._table = table
        self._health = health
        self._dispatcher = dispatcher
        self._records = records
        self._clock = clock
        self._crew = crew
        self._ends = ends
        self._wake = wake
        self._restarted: list[str] = []

    async def listen(self, inbox: AsyncIterator[Delivery]) -> None:
        async for delivery in inbox:
            try:
                is_done = self._hear(delivery)
            except Exception as error:
                said = printable(f"{type(error).__name__}: {error}", most=300)
                logger().error("a message could not be read: %s (%s)", delivery.subject, said)
                continue
            if is_done and delivery.done is not None:
                await self._crew.start("a message could not be acknowledged", self._acknowledge, delivery)
            for worker_id in self._restarted:
                await self._crew.start("asking again failed", self._dispatcher.began_anew, worker_id)
            self._restarted.clear()
            await self._ends.gather.room()
            await self._records.gather.room()

    async def _acknowledge(self, delivery: Delivery) -> None:
        if delivery.done is not None:
            async with asyncio.timeout(DONE_S):
                await delivery.done()

    def _hear(self, delivery: Delivery) -> bool:
        """False when it is not over with yet: whoever it was handed to tells the transport."""
        if delivery.subject == ACK:
            self._hear_ack(_acks.decode(delivery.body))
        elif delivery.subject == HEARTBEAT:
            self._hear_heartbeat(_beats.decode(delivery.body))
        else:
            return not self._hear_result(_results.decode(delivery.body), delivery.done)
        return True

    def _hear_heartbeat(self, beat: Heartbeat) -> None:
        if self._health.heard_heartbeat(beat, self._clock.now()):
            self._restarted.append(beat.worker_id)
        self._wake()

    def _hear_ack(self, ack: ExecAssignmentAck) -> None:
        pending = self._table.get(ack.assignment_id)
        if pending is None:
            return
        if ack.worker_id is not None:
            self._health.heard_ack(ack.worker_id, pending.resource_class, ack, self._clock.now())
            if ack.worker_id != pending.worker_id and pending.worker_id != SHARED:
                return  # late: it was sent to somebody else meanwhile
        if pending.worker_id is None:
            return
        if ack.status is AckStatus.ACCEPTED:
            self._table.acked(pending)
        else:
            self._hear_refusal(pending, ack, pending.worker_id)
        if self._table.waiting:
            self._wake()

    def _hear_refusal(self, pending: Pending, ack: ExecAssignmentAck, worker_id: str) -> None:
        event = self._records.routing(pending, ack.worker_id or worker_id, f"refused: {ack.reason or ack.message}")
        reason = ack.reason
        if reason == RejectReason.DROPPED_OLDEST.value:
            return  # its result follows
        if reason is None and worker_id in self._health.draining:
            reason = RejectReason.DRAINING.value
        if reason is None or reason == RejectReason.INVALID.value:
            is_full = reason is None and (ack.message or "").startswith(_FULL)
            code = ErrorCode.system_overload if is_full else ErrorCode.invalid_input
            self._ends.soon(pending, ended_here(pending.assignment, ResultStatus.ERROR, code, ack.message or ""), event)
            return
        if reason == RejectReason.WOULD_MISS_DEADLINE.value and self._is_too_late(pending, ack.worker_id or worker_id):
            said = ended_here(pending.assignment, ResultStatus.ERROR, ErrorCode.system_overload, ack.message or "")
            self._ends.soon(pending, said, event)
            return
        wait = ack.retry_after_ms / 1000 if isinstance(ack.retry_after_ms, int) else REFUSED_FOR_S
        until = inf if reason == RejectReason.UNKNOWN_JOB_TYPE.value else self._clock.now() + wait
        self._table.refused(pending, ack.worker_id or worker_id, until, ack.message or "")
        self._records.put(event)

    def _is_too_late(self, pending: Pending, worker_id: str) -> bool:
        """Nobody has it, and nobody who takes work can do it in time."""
        pending.too_late_for.add(worker_id)
        workers = self._health.of_class(pending.resource_class, self._table.unspoken)
        return not pending.unsure_before and too_late_everywhere(workers, pending.too_late_for, self._clock.now())

    def _hear_result(self, result: ExecResult, done: Done | None) -> bool:
        """Whether it was waited for. Then it is kept before the transport hears of it."""
        pending = self._table.get(result.assignment_id)
        if pending is None:
            return False
        if result.worker_id is not None:
            self._health.heard_result(result.worker_id, pending.resource_class, result, self._clock.now())
        return self._ends.soon(pending, result, done=done) is not None
