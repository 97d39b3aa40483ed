"""
Where work goes out, and where it is looked after until its result is there.

    waiting → choose a worker → send → acked → … → result
       ▲            │ nobody can: it waits          │ worker gone, refused, silent
       └────────────┴───────────────────────────────┘

Silence is asked about: a result that was sent and lost is in the worker's store, and comes when the assignment is sent
again. What was called off, or whose deadline is over, is not sent any more.
"""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

import msgspec

from reefknot.core.audit.event import Event, OperatorAction, Requeued, Routing, TimeoutOccurred, timestamp
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import (
    ASSIGN,
    CANCEL,
    FLEET,
    Cancel,
    ExecAssignment,
    Fleet,
    ResultStatus,
    assign_subject,
    encode,
)
from reefknot.core.overload.admission import RejectReason
from reefknot.core.retry.draw import draw, key_number
from reefknot.core.routing import Chosen, Nobody, Why, choose_worker
from reefknot.execution import chance
from reefknot.execution.journal import Journal, event_id
from reefknot.ports.clock import Clock
from reefknot.ports.transport import Transport
from reefknot.ports.work_queue import WorkQueue
from reefknot.router.desk import ended_here
from reefknot.router.health import HealthTable
from reefknot.router.pending import Pending, PendingTable

PUBLISH_S = 10.0
ACK_WITHIN_S = 10.0
ASK_AGAIN_S = 15.0
LATE_S = 30.0
"""What was in a worker's hands is asked for that long after its deadline, or after a router took it on again: it may
have been done in time."""
FLEET_EVERY_S = 5.0
REFUSED_FOR_S = 1.0
"""How long a worker that refused is left alone when it did not say."""
SHARED = ""
"""The worker id of whoever listens on the shared subject."""

End = Callable[..., Awaitable[None]]


class Dispatcher:
    """Sends, and sends again."""

    def __init__(
        self,
        *,
        table: PendingTable,
        health: HealthTable,
        transport: Transport,
        work: WorkQueue,
        journal: Journal,
        clock: Clock,
        end: End,
        seed: int | None,
        shared_subject: bool,
    ) -> None:
        self._table = table
        self._health = health
        self._transport = transport
        self._work = work
        self._journal = journal
        self._clock = clock
        self._end = end
        self._seed = seed
        self._shared = shared_subject
        self._draws = 0
        self._told_fleet = (0, -inf)

    # ---- out --------------------------------------------------------------------------------------------------------

    async def send_waiting(self) -> None:
        """Everything that waits here and that somebody can take."""
        events: list[Event] = []
        blocked: set[str] = set()
        for pending in self._table.next_waiting():
            if pending.worker_id is not None or self._table.get(pending.id) is not pending:
                continue  # somebody else saw to it while an earlier one was sent
            if await self._over(pending):
                continue
            if pending.resource_class not in blocked and not await self._send(pending, events):
                blocked.add(pending.resource_class)
        if events:
            await self._journal.write(*events)

    async def _over(self, pending: Pending) -> bool:
        """Whether it ends here: called off, or too late."""
        if pending.called_off is not None:
            await self.end_cancelled(pending)
            return True
        left = self._left_ms(pending)
        if left is None or left > 0:
            return False
        late = min(-left / 1000, self._clock.now() - pending.since)
        if pending.sent_before and late < LATE_S:
            return False
        message = "the deadline passed while the assignment waited at the router"
        event = TimeoutOccurred(
            **self.about(pending.assignment),
            operation=pending.assignment.job.type,
            attempt_number=0,
            timeout_seconds=(pending.assignment.options.deadline_ms or 0) / 1000,
            whole=True,
        )
        code = ErrorCode.cancelled_by_timeout
        await self._end(pending, ended_here(pending.assignment, ResultStatus.TIMEOUT, code, message), event)
        return True

    def _left_ms(self, pending: Pending) -> int | None:
        return None if pending.deadline_at is None else pending.deadline_at - int(self._clock.wall() * 1000)

    async def _send(self, pending: Pending, events: list[Event]) -> bool:
        """To a worker, if one can take it. False: nobody of its class can take anything now."""
        now = self._clock.now()
        workers = self._health.of_class(pending.resource_class, self._table.unspoken)
        willing = [one for one in workers if pending.not_before.get(one.worker_id, -inf) <= now]
        number = self._draw(pending)
        choice = choose_worker(willing, number, now)
        if isinstance(choice, Nobody) and self._shared and pending.not_before.get(SHARED, -inf) <= now:
            choice = Chosen(SHARED)
        if isinstance(choice, Nobody):
            here = {one.worker_id for one in workers if not one.gone(now)}
            if self._table.known_nowhere(pending, here):
                code = ErrorCode.invalid_input
                result = ended_here(pending.assignment, ResultStatus.ERROR, code, pending.refusal)
                await self._end(pending, result, self.event(pending, None, RejectReason.UNKNOWN_JOB_TYPE.value))
                return True
            return choice.why is Why.PASSED_OVER or len(willing) < len(workers)
        if choice.probe:
            self._health.probed(choice.worker_id, pending.resource_class, now)
        self._table.sent(pending, choice.worker_id, now)
        pending.unsure_before, pending.sent_before = pending.sent_before, True
        status = next((one.status.value for one in willing if one.worker_id == choice.worker_id), None)
        inputs = {"draw": number, "workers": len(workers), "willing": len(willing), "status": status}
        why = "probe" if choice.probe else "chosen"
        events.append(self.event(pending, choice.worker_id, why, {**inputs, "route": pending.route}))
        await self._publish_assignment(pending)
        return True

    async def _publish_assignment(self, pending: Pending) -> None:
        """With what is left of its deadline: the worker's clock for it begins when it takes it in."""
        left = self._left_ms(pending)
        assignment = pending.assignment
        if left is not None:
            options = msgspec.structs.replace(assignment.options, deadline_ms=max(1, left))
            assignment = msgspec.structs.replace(assignment, options=options)
        subject = assign_subject(pending.worker_id) if pending.worker_id else ASSIGN
        await self.publish(subject, encode(assignment), f"{pending.id}/{pending.held.fence}/{pending.route}")

    def _draw(self, pending: Pending) -> float:
        self._draws += 1
        seed = chance.process_seed if self._seed is None else self._seed
        return draw(seed, key_number(pending.id), self._draws)

    # ---- looking after ----------------------------------------------------------------------------------------------

    async def look_after(self) -> None:
        """Send again what was sent to a worker that is gone, and ask about what nobody spoke of for long."""
        now = self._clock.now()
        gone = self._health.gone(now)
        self._health.forget(now)
        for pending in self._table.sent_to(gone):
            await self._back(pending, "its worker is gone")
        for pending in self._table.silent(unacked_since=now - ACK_WITHIN_S, acked_since=now - ASK_AGAIN_S):
            if pending.acked:
                await self.ask_again(pending)
            else:
                await self._back(pending, "no ack arrived")
        await self._tell_fleet(now)

    async def began_anew(self, worker_id: str) -> None:
        """A worker restarted: what it was sent it has in its store, or never saw."""
        for pending in self._table.sent_to({worker_id}):
            if pending.acked:
                await self.ask_again(pending)
            else:
                await self._back(pending, "its worker began anew")

    async def ask_again(self, pending: Pending) -> None:
        """The same worker has it. It answers with the result, if there is one."""
        self._table.asked_again(pending, self._clock.now())
        if pending.called_off is not None:
            await self.publish(CANCEL, encode(Cancel(pending.id, pending.called_off)))
        await self._publish_assignment(pending)

    async def _back(self, pending: Pending, why: str) -> None:
        event = Requeued(**self.about(pending.assignment), reason=why, generation=pending.route)
        self._table.back(pending)
        await self._journal.write(event)

    async def end_cancelled(self, pending: Pending) -> None:
        """It is in nobody's hands. Should a worker that is gone still have it in this store, it is off there too."""
        reason = pending.called_off or "cancelled"
        async with asyncio.timeout(PUBLISH_S):
            await self._work.cancel(pending.id, reason=reason, who="router")
        code = ErrorCode.cancelled_by_user
        result = ended_here(pending.assignment, ResultStatus.CANCELLED, code, reason)
        await self._end(pending, result, self.cancelled_event(pending.assignment, reason))

    async def _tell_fleet(self, now: float) -> None:
        workers = self._health.live(now)
        told, at = self._told_fleet
        if workers and (workers != told or now - at >= FLEET_EVERY_S):
            self._told_fleet = workers, now
            await self.publish(FLEET, encode(Fleet(workers)))

    # ---- words ------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, body: bytes, message_id: str = "") -> None:
        async with asyncio.timeout(PUBLISH_S):
            await self._transport.publish(subject, body, message_id=message_id)

    def event(
        self, pending: Pending, worker_id: str | None, reason: str, inputs: dict[str, Any] | None = None
    ) -> Event:
        return Routing(**self.about(pending.assignment), worker_id=worker_id, reason=reason, inputs=inputs)

    def cancelled_event(self, assignment: ExecAssignment, reason: str) -> Event:
        about = self.about(assignment)
        details = {"reason": reason}
        return OperatorAction(**about, actor="caller", action="cancel", subject=about["work_id"], details=details)

    def about(self, assignment: ExecAssignment) -> dict[str, Any]:
        return {
            "timestamp": timestamp(self._clock.wall()),
            "event_id": event_id(),
            "tenant_id": assignment.tenant_id,
            "trace_id": assignment.trace_id,
            "correlation_id": assignment.request_id,
            "work_id": assignment.assignment_id,
        }
