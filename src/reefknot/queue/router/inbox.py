"""
The router's inbox: heartbeats, acks and results of workers.

Each updates the health of its worker. An ack moves its assignment on, or brings it back to be sent elsewhere; a result
ends it. Late messages about an assignment that is elsewhere by now change nothing but health. The inbox waits for
nothing but room.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.core.limits import Grant
from reefknot.queue.model.admission import RejectReason, tells_unknown_type
from reefknot.queue.model.messages import (
    ACK,
    BETWEEN_ATTEMPTS,
    HEARTBEAT,
    NOT_STARTED,
    STARTED,
    AckStatus,
    ExecAssignmentAck,
    ExecResult,
    Heartbeat,
    ResultStatus,
)
from reefknot.queue.model.results import unrun_result
from reefknot.queue.model.routing import too_late_everywhere
from reefknot.queue.model.work import record_id
from reefknot.queue.port.transport import Delivery
from reefknot.queue.router.completion import Acknowledge, Completion
from reefknot.queue.router.dispatch import REFUSED_FOR_S, SHARED, Dispatcher
from reefknot.queue.router.health import HealthTable
from reefknot.queue.router.pending import Pending, RouterContext
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.tasks import BoundedTasks

DONE_S = 10.0

_acks = msgspec.json.Decoder(ExecAssignmentAck)
_results = msgspec.json.Decoder(ExecResult)
_beats = msgspec.json.Decoder(Heartbeat)
_FULL = ("Queue ", "Failed to queue")
"""How a baseline's refusal begins that is about its queue: it gives no reason."""


class Inbox:
    """Reads what workers publish."""

    def __init__(
        self,
        context: RouterContext,
        health: HealthTable,
        dispatcher: Dispatcher,
        completion: Completion,
        *,
        tasks: BoundedTasks,
        wake: Callable[[], None],
    ) -> None:
        self._context = context
        self._table = context.table
        self._clock = context.clock
        self._health = health
        self._dispatcher = dispatcher
        self._completion = completion
        self._tasks = tasks
        self._wake = wake
        self._back: dict[str, str] = {}

    async def listen(self, deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            try:
                is_done = self._read(delivery)
            except Exception as error:
                text = error_text(error)
                logger().error("router: a message on %s is unreadable and ignored (%s)", delivery.subject, text)
                continue
            if is_done and delivery.done is not None:
                await self._tasks.start("a message could not be acknowledged", self._acknowledge, delivery)
            for worker_id, how in self._back.items():
                await self._tasks.start("a worker was not asked", self._dispatcher.worker_is_back, worker_id, how)
            self._back.clear()
            await self._completion.batch.room()

    async def _acknowledge(self, delivery: Delivery) -> None:
        if delivery.done is not None:
            async with asyncio.timeout(DONE_S):
                await delivery.done()

    def _read(self, delivery: Delivery) -> bool:
        """Whether the message can be acknowledged now. A foreign worker's result is, once it is written."""
        if delivery.subject == ACK:
            self._read_ack(_acks.decode(delivery.body))
        elif delivery.subject == HEARTBEAT:
            self._read_heartbeat(_beats.decode(delivery.body))
        else:
            return self._read_result(_results.decode(delivery.body), delivery.done)
        return True

    def _read_heartbeat(self, beat: Heartbeat) -> None:
        self._health.record_clock(beat, int(self._clock.wall() * 1000))
        if how := self._health.record_heartbeat(beat, self._clock.now()):
            self._back[beat.worker_id] = how
        self._wake()

    def _read_ack(self, ack: ExecAssignmentAck) -> None:
        pending = self._acknowledged(ack)
        if pending is None:
            return
        if ack.worker_id is not None:
            self._health.record_ack(ack.worker_id, pending.resource_class, ack, self._clock.now())
            if ack.worker_id != pending.worker_id and pending.worker_id != SHARED:
                return  # late: it was sent to another worker meanwhile
        if pending.worker_id is None:
            return
        if ack.status is AckStatus.ACCEPTED:
            self._table.acked(pending)
            if pending.grant is not None:
                self._read_start(pending.grant, ack, pending.worker_id)
        else:
            self._read_refusal(pending, ack, pending.worker_id)
        if self._table.waiting:
            self._wake()

    def _read_start(self, grant: Grant, ack: ExecAssignmentAck, worker_id: str) -> None:
        """Count a start that was granted. Workers with another store do not tell of it: it may begin at once."""
        if ack.message == STARTED or not self._health.shares_store(worker_id):
            grant.started()
        elif ack.message == NOT_STARTED:
            grant.refused()
        if ack.message in (NOT_STARTED, BETWEEN_ATTEMPTS):
            grant.ended()

    def _acknowledged(self, ack: ExecAssignmentAck) -> Pending | None:
        """The assignment that an ack means: of several tenants' the one at this worker, best the one not acked yet."""
        out = self._table.out(ack.assignment_id)
        if not out:
            return self._table.get(record_id(ack.assignment_id, None))
        return (
            out[0]
            if len(out) == 1
            else max(out, key=lambda one: (ack.worker_id in (None, one.worker_id) or not one.worker_id, not one.acked))
        )

    def _answered(self, result: ExecResult) -> Pending | None:
        """
        The assignment that a result means.

        Workers over this store tell the tenant. A result of another one that does not tell it means the assignment of
        the same request, and none while there are two.
        """
        own, out = self._table.get(result.record_id), self._table.out(result.assignment_id)
        if result.tenant_id or (own is not None and out == (own,)):
            return own
        meant = [
            one
            for one in out
            if one is own or not self._health.shares_store(one.worker_id or SHARED)
            if one.assignment.request_id == result.request_id
            if result.worker_id in (None, one.worker_id) or not one.worker_id
        ]
        return own if not meant else meant[0] if len(meant) == 1 else None

    def _read_refusal(self, pending: Pending, ack: ExecAssignmentAck, worker_id: str) -> None:
        worker_id = ack.worker_id or worker_id
        event = self._context.routing(pending, worker_id, f"refused: {ack.reason or ack.message}")
        reason = ack.reason
        if reason == RejectReason.DROPPED_OLDEST.value:
            return  # its result follows
        if reason is None and worker_id in self._health.draining:
            reason = RejectReason.DRAINING.value
        elif reason is None and tells_unknown_type(ack.message or ""):
            reason = RejectReason.UNKNOWN_JOB_TYPE.value
        is_full = reason is None and (ack.message or "").startswith(_FULL)
        is_too_late = reason == RejectReason.WOULD_MISS_DEADLINE.value and self._is_too_late(pending, worker_id)
        if reason is None or reason == RejectReason.INVALID.value or is_too_late:
            code = ErrorCode.system_overload if is_full or is_too_late else ErrorCode.invalid_input
            result = unrun_result(pending.assignment, ResultStatus.ERROR, code, ack.message or "")
            self._completion.end(pending, result, event)
            return
        wait = ack.retry_after_ms / 1000 if isinstance(ack.retry_after_ms, int) else REFUSED_FOR_S
        until = inf if reason == RejectReason.UNKNOWN_JOB_TYPE.value else self._clock.now() + wait
        self._table.refused(pending, worker_id, until, ack.message or "")
        self._context.journal.write_soon(event)

    def _is_too_late(self, pending: Pending, worker_id: str) -> bool:
        """Whether no worker has it, and none that accepts work can do it in time."""
        pending.too_late_for.add(worker_id)
        workers = self._health.of_class(pending.resource_class, self._table.unacked)
        held = pending.maybe_held_before_send
        return not held and too_late_everywhere(workers, pending.too_late_for, self._clock.now())

    def _read_result(self, result: ExecResult, done: Acknowledge | None) -> bool:
        pending = self._answered(result)
        if pending is None:
            return True
        if result.request_id != pending.assignment.request_id:
            self._read_mismatch(pending, result)
            return True
        if result.worker_id is not None:
            self._health.record_result(result.worker_id, pending.resource_class, result, self._clock.now())
        if self._health.shares_store(result.worker_id or pending.worker_id or SHARED):
            if result.timestamp is None or result.timestamp > pending.requeued_at:  # else an earlier generation's
                self._completion.finish(pending, result)
            return True
        self._completion.finish_foreign(pending, result, done)
        return False

    def _read_mismatch(self, pending: Pending, result: ExecResult) -> None:
        """Record a result that is of another request. It ends nothing: the assignment goes on waiting for its own."""
        given, own = printable(result.request_id, most=100), printable(pending.assignment.request_id, most=100)
        worker_id = result.worker_id or printable(result.provider_id, most=100)
        self._context.journal.write_soon(
            self._context.routing(pending, worker_id, f"result ignored: its request_id is {given}")
        )
        name = printable(pending.assignment.assignment_id, most=100)
        logger().warning("%s: a result with request_id %s is ignored: the assignment's is %s", name, given, own)
