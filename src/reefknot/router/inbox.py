"""
What the router hears: heartbeats, acks, results.

Each updates what is known of a worker. An ack moves its assignment on, or brings it back to be sent to somebody else; a
result ends it. Late words about an assignment that is elsewhere by now change nothing but health.
"""

from collections.abc import AsyncIterator, Callable
from math import inf

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    ACK,
    HEARTBEAT,
    AckStatus,
    ExecAssignmentAck,
    ExecResult,
    Heartbeat,
    ResultStatus,
)
from reefknot.core.overload.admission import RejectReason
from reefknot.execution.crew import Crew
from reefknot.execution.journal import Journal
from reefknot.ports.clock import Clock
from reefknot.ports.transport import Delivery
from reefknot.router.desk import ended_here
from reefknot.router.dispatch import REFUSED_FOR_S, SHARED, Dispatcher, End
from reefknot.router.health import HealthTable
from reefknot.router.pending import Pending, PendingTable

_acks = msgspec.json.Decoder(ExecAssignmentAck)
_results = msgspec.json.Decoder(ExecResult)
_beats = msgspec.json.Decoder(Heartbeat)


class Inbox:
    """Reads what workers say."""

    def __init__(
        self,
        *,
        table: PendingTable,
        health: HealthTable,
        dispatcher: Dispatcher,
        journal: Journal,
        clock: Clock,
        crew: Crew,
        end: End,
        wake: Callable[[], None],
    ) -> None:
        self._table = table
        self._health = health
        self._dispatcher = dispatcher
        self._journal = journal
        self._clock = clock
        self._crew = crew
        self._end = end
        self._wake = wake

    async def listen(self, inbox: AsyncIterator[Delivery]) -> None:
        async for delivery in inbox:
            if delivery.subject == HEARTBEAT:
                await self._crew.survive("a heartbeat could not be read", self._hear_heartbeat, delivery)
            else:
                await self._crew.run("a message could not be read", self._hear, delivery)

    async def _hear_heartbeat(self, delivery: Delivery) -> None:
        beat = _beats.decode(delivery.body)
        if self._health.heard_heartbeat(beat, self._clock.now()):
            await self._crew.run("asking again failed", self._dispatcher.began_anew, beat.worker_id)
        self._wake()
        if delivery.done is not None:
            await delivery.done()

    async def _hear(self, delivery: Delivery) -> None:
        if delivery.subject == ACK:
            await self._hear_ack(_acks.decode(delivery.body))
        else:
            await self._hear_result(_results.decode(delivery.body))
        if delivery.done is not None:
            await delivery.done()

    async def _hear_ack(self, ack: ExecAssignmentAck) -> None:
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
            await self._hear_refusal(pending, ack, pending.worker_id)
        self._wake()

    async def _hear_refusal(self, pending: Pending, ack: ExecAssignmentAck, worker_id: str) -> None:
        event = self._dispatcher.event(pending, ack.worker_id or worker_id, f"refused: {ack.reason or ack.message}")
        reason = ack.reason
        if reason == RejectReason.DROPPED_OLDEST.value:
            return  # its result follows
        if reason is None and worker_id in self._health.draining:
            reason = RejectReason.DRAINING.value
        if reason is None or reason == RejectReason.INVALID.value:
            code = ErrorCode.system_overload if reason is None else ErrorCode.invalid_input
            await self._end(pending, ended_here(pending.assignment, ResultStatus.ERROR, code, ack.message or ""), event)
            return
        wait = ack.retry_after_ms / 1000 if isinstance(ack.retry_after_ms, int) else REFUSED_FOR_S
        until = inf if reason == RejectReason.UNKNOWN_JOB_TYPE.value else self._clock.now() + wait
        self._table.refused(pending, ack.worker_id or worker_id, until, ack.message or "")
        await self._journal.write(event)

    async def _hear_result(self, result: ExecResult) -> None:
        pending = self._table.get(result.assignment_id)
        if pending is None:
            return
        if result.worker_id is not None:
            self._health.heard_result(result.worker_id, pending.resource_class, result, self._clock.now())
        await self._end(pending, result)
