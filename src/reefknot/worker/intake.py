"""
What is said at a worker's door: the ack, and the event that goes on record. The baseline's acks say less.

An assignment at the door.

    read it → do we know the step → do we have it already → is there room → keep it → say so

Accepted means kept: the ack goes out after the store has it. Admission and the place it gives are one step, between two
awaits. Every refusal names its reason, is on record, and never stops the worker.

Deliveries on their way in.

What has arrived by the time the store is free goes in together: one reading, one admission each, one step of the store
for all. Whatever needs more than that (a refusal, a victim, something known already) goes beside the group, several at
once and never more. Nothing is acked before it is kept, and a message that fails harms no other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from msgspec import UNSET, Struct, structs

from reefknot.audit.journal import Journal, event_id
from reefknot.core.audit.event import Admission as AdmissionEvent
from reefknot.core.audit.event import Event, timestamp
from reefknot.core.messages import (
    AckStatus,
    ExecAssignment,
    ExecAssignmentAck,
    InvalidMessage,
    encode,
    read_assignment,
    resource_class,
)
from reefknot.core.overload.admission import (
    LONGEST_WAIT_MS,
    Accept,
    AcceptDropping,
    Admission,
    Defer,
    Degradation,
    Degrade,
    Newcomer,
    QueueView,
    Reject,
    RejectReason,
    admit,
)
from reefknot.core.work import WorkItem, WorkState
from reefknot.errors import StoreError, StoreUnavailableError
from reefknot.ports.clock import Clock
from reefknot.ports.transport import Delivery
from reefknot.ports.work_queue import Enqueued, WorkQueue
from reefknot.runtime.tasks import BoundedTasks, run_in_background
from reefknot.runtime.timeouts import STORE_S, Timeouts
from reefknot.worker.pool import Pool
from reefknot.worker.queue import Queued
from reefknot.worker.records import DROPPED_MESSAGE, Envelope, is_same_work
from reefknot.worker.settings import WorkerSettings


class Answers:
    """Words for what admission decided."""

    def __init__(self, worker_id: str, *, pools: Mapping[str, Pool], v2: bool, clock: Clock) -> None:
        self._worker_id = worker_id
        self._pools = pools
        self._v2 = v2
        self._clock = clock

    def ack(
        self,
        assignment_id: str,
        status: AckStatus,
        message: str,
        *,
        pool: Pool | None = None,
        reason: RejectReason | None = None,
        wait: int | None = None,
    ) -> ExecAssignmentAck:
        if not self._v2:
            return ExecAssignmentAck(assignment_id, status, message)
        if pool is None:  # it belongs to no class: then the fullest one speaks for the worker
            pool = max(self._pools.values(), key=lambda one: (one.status().severity, one.depth()))
        return ExecAssignmentAck(
            assignment_id,
            status,
            message,
            overload_status=pool.status(),
            queue_depth=pool.depth(),
            worker_id=self._worker_id,
            reason=None if reason is None else reason.value,
            retry_after_ms=UNSET if wait is None else wait,
        )

    def event(
        self,
        assignment: ExecAssignment | None,
        status: AckStatus,
        reason: RejectReason | None,
        pool: Pool | None,
        *,
        assignment_id: str = "",
        message: str = "",
        inputs: dict[str, Any] | None = None,
    ) -> Event:
        return AdmissionEvent(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=None if assignment is None else assignment.tenant_id,
            trace_id=None if assignment is None else assignment.trace_id,
            correlation_id=None if assignment is None else assignment.request_id,
            work_id=assignment_id if assignment is None else assignment.assignment_id,
            status=status.value,
            reason=None if reason is None else reason.value,
            resource_class=None if pool is None else pool.name,
            queue_depth=None if pool is None else pool.depth(),
            overload_status=None if pool is None else pool.status().value,
            inputs={**(inputs or {}), "message": message[:300]},
        )


_OTHER_WORK = "assignment_id: it was used with another job; the same id is the same work: give the new job its own"
_FAILED = "Failed to queue assignment"
_FAILED_AS = {
    AcceptDropping: "Failed to queue assignment after dropping oldest",
    Defer: "Failed to queue deferred assignment",
    Degrade: "Failed to queue degraded assignment",
}
STORE_WAIT_MS = 1000
"""When a worker whose store failed may be asked again."""
_DRAINING = "Worker is draining, rejecting assignment"
_GIVEN_BACK = "Worker is draining, assignment handed back"


class Drops(Protocol):
    """Who gives up queued work to make room."""

    async def drop(self, victim: str, pool: Pool) -> bool: ...


class Taken(Struct, frozen=True):
    """What came of one message at the door."""

    ack: ExecAssignmentAck
    dropped: ExecAssignmentAck | None = None
    """Another assignment had to make room: its ack. Its result follows from what is kept of it."""
    known_in: str | None = None
    """The store had it already; the class it was sent for."""


class Admitted(Struct, frozen=True):
    """An assignment that has its place in a pool and is not kept yet."""

    assignment: ExecAssignment
    pool: Pool
    ack: ExecAssignmentAck
    """What will be said once it is kept; it tells the queue as it was when the place was given."""
    item: WorkItem
    event: Event
    failure: str
    """What will be said if it cannot be kept."""


class Intake:
    """Admits assignments into a worker's pools."""

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        *,
        pools: Mapping[str, Pool],
        known: Mapping[str, object],
        work: WorkQueue,
        journal: Journal,
        clock: Clock,
        drops: Drops,
        limits: Timeouts,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._pools = pools
        self._known = known
        self._work = work
        self._journal = journal
        self._clock = clock
        self._drops = drops
        self._limits = limits
        self._answers = Answers(worker_id, pools=pools, v2=settings.queue_v2, clock=clock)
        self.draining = False

    def at_once(self, read: ExecAssignment | InvalidMessage) -> Admitted | None:
        """Its place, if it is new here and nothing has to be asked before it comes in; else it is for `take`."""
        if isinstance(read, InvalidMessage) or self._cannot_run(read) is not None:
            return None
        pool = self._pools[resource_class(read)]
        if pool.has(read.assignment_id):
            return None
        answer, inputs = self._admission(read, pool)
        if isinstance(answer, Reject | AcceptDropping):
            return None
        return self._admitted(read, pool, answer, inputs)

    async def keep(self, group: Sequence[Admitted]) -> list[Taken]:
        """Keep them in one step of the store. What it does not take has lost its place."""
        try:
            entries = self._journal.entries([one.event for one in group])
            with self._limits.timeout(STORE_S):
                kept = await self._work.enqueue([one.item for one in group], events=entries)
        except (StoreError, TimeoutError) as error:
            is_away = isinstance(error, StoreUnavailableError | TimeoutError)
            if not self._settings.queue_v2 or not (is_away or len(group) == 1):
                raise
            kept = None
        finally:
            for one in group:
                one.pool.entering -= 1
        if kept is None:
            return [self._not_kept(one.assignment, one.pool, one.failure) for one in group]
        return [await self._kept(one, answer) for one, answer in zip(group, kept, strict=True)]

    async def _kept(self, one: Admitted, answer: Enqueued) -> Taken:
        if answer is Enqueued.DUPLICATE:
            return await self._again(one.assignment, one.pool)
        if not one.pool.has(one.item.id):
            one.pool.put(self._place(one.item))
        return Taken(one.ack)

    async def take(self, read: ExecAssignment | InvalidMessage) -> Taken:
        """
        One message, with everything that may have to be asked, from its reading to its ack.

        A store that cannot be asked is said so. Not by the baseline: it refuses nothing, and whoever hears no ack sends
        it again.
        """
        try:
            return await self._take(read)
        except (StoreError, TimeoutError):
            if isinstance(read, InvalidMessage) or not self._settings.queue_v2:
                raise
            return self._not_kept(read, self._pools[resource_class(read)], _FAILED)

    def _not_kept(self, assignment: ExecAssignment, pool: Pool, message: str) -> Taken:
        """Perhaps the store has it all the same: then it is found there when it is sent again. No log is waited for."""
        reason = RejectReason.OVERLOADED
        event = self._answers.event(assignment, AckStatus.REJECTED, reason, pool, message=message)
        run_in_background(self._journal.write(event), "writing down a refusal")
        ack = self._answers.ack(
            assignment.assignment_id, AckStatus.REJECTED, message, pool=pool, reason=reason, wait=STORE_WAIT_MS
        )
        return Taken(ack)

    async def _take(self, read: ExecAssignment | InvalidMessage) -> Taken:
        if isinstance(read, InvalidMessage):
            return await self._refused(read.assignment_id, read.ack_status, RejectReason.INVALID, read.message)
        mistake = self._cannot_run(read)
        if mistake is not None:
            return await self._refused(read.assignment_id, AckStatus.REJECTED, *mistake, assignment=read)
        pool = self._pools[resource_class(read)]
        if pool.has(read.assignment_id):
            return await self._again(read, pool)
        answer, inputs = self._admission(read, pool)
        if isinstance(answer, Reject | AcceptDropping):
            with self._limits.timeout(STORE_S):
                known = await self._work.get(read.assignment_id)
            if known is not None and not self._stays_there(known, answer, pool):
                return await self._again(read, pool)
            answer, inputs = self._admission(read, pool)  # the queue may have changed meanwhile
        if isinstance(answer, Reject):
            return await self._refused(
                read.assignment_id,
                AckStatus.REJECTED,
                answer.reason,
                answer.message,
                assignment=read,
                pool=pool,
                wait=answer.retry_after_ms,
                inputs=inputs,
            )
        if isinstance(answer, AcceptDropping):
            return await self._in_place_of(answer, read, pool, inputs)
        (taken,) = await self.keep([self._admitted(read, pool, answer, inputs)])
        return taken

    def _stays_there(self, known: WorkItem, answer: Admission, pool: Pool) -> bool:
        """It waits in the store, for whoever has room: not for a worker that has none, or is leaving."""
        waits = known.state is WorkState.PENDING and isinstance(answer, Reject)
        return waits and (self.draining or known.resource_class != pool.queue_name)

    def given_back(self, assignment_id: str, pool: Pool) -> ExecAssignmentAck:
        """It was accepted before this worker had to leave: somebody else may have it."""
        reason, wait = RejectReason.DRAINING, LONGEST_WAIT_MS
        return self._answers.ack(assignment_id, AckStatus.REJECTED, _GIVEN_BACK, pool=pool, reason=reason, wait=wait)

    async def _again(self, assignment: ExecAssignment, pool: Pool) -> Taken:
        """It was taken in before: accepted is what it is, whatever the queue looks like now. Other work is not."""
        known = await self._known_under(assignment.assignment_id, pool)
        if known is not None and not is_same_work(known, assignment):
            mistake = RejectReason.INVALID, _OTHER_WORK
            return await self._refused(
                assignment.assignment_id, AckStatus.REJECTED, *mistake, assignment=assignment, pool=pool
            )
        ack = self._answers.ack(assignment.assignment_id, AckStatus.ACCEPTED, Accept().message, pool=pool)
        return Taken(ack, known_in=pool.name)

    async def _known_under(self, assignment_id: str, pool: Pool) -> WorkItem | None:
        try:
            with self._limits.timeout(STORE_S):
                return await self._work.get(assignment_id)
        except (StoreError, TimeoutError):
            if not pool.has(assignment_id):
                raise
            return None  # it is here; that the store is away makes it nobody else's

    def _cannot_run(self, assignment: ExecAssignment) -> tuple[RejectReason, str] | None:
        if assignment.job.type not in self._known:
            known = ", ".join(sorted(self._known))
            return RejectReason.UNKNOWN_JOB_TYPE, f"job.type: {assignment.job.type!r} is not known here; known: {known}"
        if assignment.job.payload_ref is not None:
            return RejectReason.INVALID, "job.payload_ref: this worker has no resolver for references; send job.payload"
        name = resource_class(assignment)
        if name not in self._pools:
            return RejectReason.INVALID, f"resource_class: {name!r} is not known here; known: {', '.join(self._pools)}"
        return None

    def _admission(self, assignment: ExecAssignment, pool: Pool) -> tuple[Admission, dict[str, Any]]:
        """The answer, and everything it was made of."""
        deadline = assignment.options.deadline_ms
        newcomer = Newcomer(assignment.priority, None if deadline is None else float(deadline))
        view = pool.view(draining=self.draining)
        if self._settings.queue_v2:
            answer = admit(view, newcomer, pool.rules)
        elif self.draining:
            answer = Reject(RejectReason.DRAINING, _DRAINING, LONGEST_WAIT_MS)
        else:
            answer = Accept()
        return answer, self._inputs(view, newcomer, pool)

    def _inputs(self, view: QueueView, newcomer: Newcomer, pool: Pool) -> dict[str, Any]:
        if not self._settings.queue_v2:
            return {"view": view}
        return {"view": view, "newcomer": newcomer, "rules": pool.rules}

    def _admitted(
        self,
        assignment: ExecAssignment,
        pool: Pool,
        answer: Accept | AcceptDropping | Defer | Degrade,
        inputs: dict[str, Any],
    ) -> Admitted:
        """With its place, which is taken before anything is awaited, so that nobody else gets it."""
        pool.entering += 1
        try:
            item = self._item(assignment, pool, answer)
            event = self._answers.event(
                assignment, AckStatus.ACCEPTED, None, pool, message=answer.message, inputs=inputs
            )
            ack = self._answers.ack(item.id, AckStatus.ACCEPTED, answer.message, pool=pool)
        except BaseException:
            pool.entering -= 1
            raise
        return Admitted(assignment, pool, ack, item, event, _FAILED_AS.get(type(answer), _FAILED))

    async def _in_place_of(
        self, answer: AcceptDropping, assignment: ExecAssignment, pool: Pool, inputs: dict[str, Any]
    ) -> Taken:
        """The one that goes gets an ack, a result and an event, like every end."""
        pool.entering += 1
        place = pool.queue.remove(answer.victim)
        try:
            gone = await self._drops.drop(answer.victim, pool)
        except (StoreError, TimeoutError):
            if place is not None:
                pool.put(place)
            raise
        finally:
            pool.entering -= 1
        (taken,) = await self.keep([self._admitted(assignment, pool, answer, inputs)])
        if not gone:
            return taken
        reason = RejectReason.DROPPED_OLDEST
        ack = self._answers.ack(answer.victim, AckStatus.REJECTED, DROPPED_MESSAGE, pool=pool, reason=reason)
        return structs.replace(taken, dropped=ack)

    def _item(self, assignment: ExecAssignment, pool: Pool, answer: Admission) -> WorkItem:
        wall = self._clock.wall()
        delay_ms = answer.milliseconds if isinstance(answer, Defer) else 0
        deadline = assignment.options.deadline_ms
        return WorkItem(
            id=assignment.assignment_id,
            kind=assignment.job.type,
            resource_class=pool.queue_name,
            tenant_id=assignment.tenant_id,
            correlation_id=assignment.request_id,
            trace_id=assignment.trace_id,
            priority=assignment.priority,
            due_at=int(wall * 1000) + delay_ms,
            deadline_at=None if deadline is None else int(wall * 1000) + deadline,
            payload=encode(_envelope(assignment, answer, pool)),
        )

    def _place(self, item: WorkItem) -> Queued:
        now, wall = self._clock.now(), self._clock.wall()
        expires = float("inf") if item.deadline_at is None else now + item.deadline_at / 1000 - wall
        wait = item.due_at / 1000 - wall
        return Queued(item.id, item.priority, now, now + wait if wait >= 0.001 else now, expires)

    async def _refused(
        self,
        assignment_id: str,
        status: AckStatus,
        reason: RejectReason,
        message: str,
        *,
        assignment: ExecAssignment | None = None,
        pool: Pool | None = None,
        wait: int | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> Taken:
        event = self._answers.event(
            assignment, status, reason, pool, assignment_id=assignment_id, message=message, inputs=inputs
        )
        await self._journal.write(event)
        return Taken(self._answers.ack(assignment_id, status, message, pool=pool, reason=reason, wait=wait))


def _envelope(assignment: ExecAssignment, answer: Admission, pool: Pool) -> Envelope:
    change = answer.change if isinstance(answer, Degrade) else Degradation()
    skips = assignment.options.skip_circuit_breaker or change.skip_circuit_breaker
    depth, status = pool.depth(), pool.status()
    return Envelope(assignment, change.skip_retries, change.timeout_factor, skips, depth, status)


MOST_WAITING = 256
"""Deliveries that were read and are not being taken in yet; beyond that the transport waits."""
_NOT_TAKEN_IN = "an assignment could not be taken in"

Tell = Callable[[Taken, Delivery], Coroutine[Any, Any, None]]


class Door:
    """Brings a worker's deliveries to its intake."""

    def __init__(self, intake: Intake, crew: BoundedTasks, tell: Tell) -> None:
        self._intake = intake
        self._crew = crew
        self._tell = tell
        self._arrived: list[Delivery] = []
        self._come = asyncio.Event()
        self._room = asyncio.Event()

    async def listen(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Read what is sent, as far as there is room for it."""
        async for delivery in deliveries:
            while len(self._arrived) >= MOST_WAITING:
                self._room.clear()
                await self._room.wait()
            self._arrived.append(delivery)
            self._come.set()

    async def serve(self) -> None:
        """Take in what has arrived, group by group."""
        while True:
            await self._come.wait()
            self._come.clear()
            group, self._arrived = self._arrived, []
            self._room.set()
            await self._crew.run_logged(_NOT_TAKEN_IN, self._take_group, group)

    async def _take_group(self, group: list[Delivery]) -> None:
        plain: list[tuple[Admitted, Delivery]] = []
        again: list[tuple[ExecAssignment, Delivery]] = []
        seen: set[str] = set()
        for delivery in group:
            read = read_assignment(delivery.body, delivery.headers)
            if isinstance(read, ExecAssignment) and read.assignment_id in seen:
                again.append((read, delivery))
                continue
            admitted = self._intake.at_once(read)
            if admitted is None:
                await self._crew.start(_NOT_TAKEN_IN, self._take_alone, read, delivery)
            else:
                seen.add(admitted.item.id)
                plain.append((admitted, delivery))
        if plain:
            await self._keep(plain)
        for known, delivery in again:  # now that the first of the same name is kept
            await self._crew.start(_NOT_TAKEN_IN, self._take_alone, known, delivery)

    async def _keep(self, plain: list[tuple[Admitted, Delivery]]) -> None:
        try:
            taken = await self._intake.keep([admitted for admitted, _ in plain])
        except Exception:
            if len(plain) == 1:
                raise
            for admitted, delivery in plain:  # one by one: perhaps only one of them is bad
                await self._crew.start(_NOT_TAKEN_IN, self._take_alone, admitted.assignment, delivery)
            return
        told = [(one, delivery) for one, (_, delivery) in zip(taken, plain, strict=True)]
        await self._crew.start("acks could not be sent", self._tell_all, told)

    async def _tell_all(self, told: list[tuple[Taken, Delivery]]) -> None:
        for taken, delivery in told:
            await self._crew.run_logged(_NOT_TAKEN_IN, self._tell, taken, delivery)

    async def _take_alone(self, read: ExecAssignment | InvalidMessage, delivery: Delivery) -> None:
        await self._tell(await self._intake.take(read), delivery)
