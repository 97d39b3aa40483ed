"""
Intake: deliveries in batches → known? → admitted → kept → acknowledged.

Everything that has arrived by the time the store is free forms one batch: each message is read once, and one store call
keeps them all. Admission is asked once for each, and again only if the store refused the batch: then they are taken in
one by one. An arrival for which a slot is free is started by the same store call. Refusals, evictions and duplicates
are handled outside the batch, a bounded number at a time. What has no place here goes back to a transport that keeps it
for other workers too. Nothing is acknowledged before it is kept, and a message that fails does not affect others.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, structs

from reefknot.audit.assignments import RulesRecorder
from reefknot.audit.model.event import Event
from reefknot.audit.port import AuditEntry
from reefknot.errors import StoreError, StoreUnavailableError
from reefknot.queue.model.admission import (
    LONGEST_WAIT_MS,
    Accept,
    AcceptDropping,
    Admission,
    Defer,
    Degrade,
    OverloadStatus,
    Reject,
    RejectReason,
)
from reefknot.queue.model.messages import (
    AckStatus,
    ExecAssignment,
    ExecAssignmentAck,
    InvalidMessage,
    read_assignment,
    resource_class,
)
from reefknot.queue.model.results import DROPPED_MESSAGE, is_same_job
from reefknot.queue.model.work import WorkItem, WorkState, assignment_and_tenant, is_unassigned
from reefknot.queue.port.transport import Delivery
from reefknot.queue.port.work_queue import Held
from reefknot.queue.worker.admission import (
    AdmissionVerdict,
    Admitted,
    IntakeResult,
    SharedRoom,
    WorkerAdmission,
    with_own_class,
)
from reefknot.queue.worker.closing import Closing
from reefknot.queue.worker.context import WorkerContext, WorkerMessage
from reefknot.queue.worker.pool import Pool, starting
from reefknot.queue.worker.records import AcceptedWork, AdmittedAs, admission_event
from reefknot.runtime.tasks import BoundedTasks, run_in_background
from reefknot.runtime.timeouts import STORE_S
from reefknot.steps.port import Block, own_classes

MOST_WAITING = 256
"""Deliveries that were read and are not being taken in yet; beyond that the transport waits."""
STORE_WAIT_MS = 1000
"""When a worker whose store failed may be asked again."""
_NOT_TAKEN = "an assignment could not be taken in"
_OTHER_JOB = "assignment_id: it was used with another job; the same id is the same work: give the new job its own"
_RETURNED = "Worker is draining, assignment handed back"
_FAILED = "Failed to queue assignment"
_FAILED_AS = {
    AcceptDropping: "Failed to queue assignment after dropping oldest",
    Defer: "Failed to queue deferred assignment",
    Degrade: "Failed to queue degraded assignment",
}


class Intake:
    """Admits assignments into the pools of one worker."""

    def __init__(
        self,
        context: WorkerContext,
        pools: Mapping[str, Pool],
        closing: Closing,
        *,
        known: Mapping[str, Block],
        tasks: BoundedTasks,
    ) -> None:
        self._context = context
        self._v2 = context.settings.queue_v2
        self._pools = pools
        self._closing = closing
        self._tasks = tasks
        self._rules = RulesRecorder(context.clock, enabled=self._v2)
        self._arrived: list[Delivery] = []
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._admissions = WorkerAdmission(pools, known, v2=self._v2)
        self._deciding = 0
        """Deliveries of the batch that is taken in for which nothing is decided yet."""
        self.shared_room = SharedRoom(
            pools, self._admissions, lambda: len(self._arrived) + self._deciding, clock=context.clock
        )
        self._classes = own_classes(known.values())

    @property
    def draining(self) -> bool:
        return self._admissions.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._admissions.draining = draining
        self.shared_room.update()

    # ---- deliveries -------------------------------------------------------------------------------------------------

    async def listen(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Read deliveries, as far as there is room for them."""
        async for delivery in deliveries:
            while len(self._arrived) >= MOST_WAITING:
                self._room.clear()
                await self._room.wait()
            self._arrived.append(delivery)
            self._some.set()

    async def serve(self) -> None:
        """Take in what has arrived, batch by batch."""
        while True:
            self._deciding = 0
            self.shared_room.update()
            await self._some.wait()
            self._some.clear()
            batch, self._arrived = self._arrived, []
            self._room.set()
            self._deciding = len(batch)
            await self._tasks.run_logged(_NOT_TAKEN, self._take_batch, batch)

    async def _take_batch(self, batch: list[Delivery]) -> None:
        admitted, seen = list[tuple[Admitted, Delivery]](), set[str]()
        repeated: list[tuple[ExecAssignment, Delivery]] = []
        for delivery in batch:
            wall_ms = int(self._context.clock.wall() * 1000) if delivery.headers else None
            read = read_assignment(delivery.body, delivery.headers, wall_ms)
            read = with_own_class(read, self._classes)
            self._closing.starts.arrived(read, delivery.headers)
            if isinstance(read, ExecAssignment) and read.assignment_id in seen:
                repeated.append((read, delivery))
                self._deciding -= 1
                continue
            answer: Admitted | AdmissionVerdict | None = None
            if isinstance(read, ExecAssignment) and isinstance(pool := self._admissions.pool_of(read), Pool):
                while self._admissions.undecided(read, pool):
                    if admitted:
                        await self._keep_batch(admitted)
                        admitted = []
                    else:
                        await pool.entered()
                answer = self.admit_now(read, pool, _body(delivery), delivery.sender)
            if isinstance(answer, Admitted):
                seen.add(answer.work.assignment.assignment_id)  # of several tenants one at a time: see `events_to_keep`
                admitted.append((answer, delivery))
                if delivery.back is not None:
                    self.shared_room.took(answer.pool)
            elif delivery.back is not None and (after := self.shared_room.back_after(answer)) is not None:
                await self._tasks.start("an assignment could not be given back", delivery.back, after)
            else:
                await self._tasks.start(_NOT_TAKEN, self._take_alone, read, delivery, answer)
            self._deciding -= 1
        if admitted:
            await self._keep_batch(admitted)
        for assignment, delivery in repeated:  # now that the first of the same id is kept
            await self._tasks.start(_NOT_TAKEN, self._take_alone, assignment, delivery)

    async def _keep_batch(self, admitted: list[tuple[Admitted, Delivery]]) -> None:
        try:
            results = await self.keep([one for one, _ in admitted])
        except Exception:
            if len(admitted) == 1:
                raise
            for one, delivery in admitted:  # one by one: perhaps only one of them is bad
                await self._tasks.start(_NOT_TAKEN, self._take_alone, one.work.assignment, delivery)
            return
        answered = [(result, delivery) for result, (_, delivery) in zip(results, admitted, strict=True)]
        await self._tasks.start("acks could not be sent", self._answer_all, answered)

    async def _answer_all(self, answered: list[tuple[IntakeResult, Delivery]]) -> None:
        plain = [(result, delivery) for result, delivery in answered if result.is_plain]
        for result, delivery in answered:
            if not result.is_plain:
                await self._tasks.run_logged(_NOT_TAKEN, self._answer, result, delivery)
        sent = await self._context.send_all(WorkerMessage.of_ack(one.ack, given.sender) for one, given in plain)
        for (_, delivery), is_sent in zip(plain, sent, strict=True):
            if is_sent and delivery.done is not None:
                await self._tasks.run_logged(_NOT_TAKEN, delivery.done)

    async def _answer(self, result: IntakeResult, delivery: Delivery) -> None:
        if result.evicted is not None:
            victim, ack = result.evicted
            await self._context.send_ack(ack)
            await self._closing.publish_result(victim)
        await self._context.send_ack(result.ack)
        if result.duplicate is not None:
            await self._closing.answer_duplicate(*result.duplicate)
        if delivery.done is not None:
            await delivery.done()

    async def _take_alone(
        self, read: ExecAssignment | InvalidMessage, delivery: Delivery, answer: AdmissionVerdict | None = None
    ) -> None:
        await self._answer(await self.take(read, _body(delivery), answer), delivery)

    # ---- admission --------------------------------------------------------------------------------------------------

    def admit_now(
        self, read: ExecAssignment, pool: Pool, body: bytes = b"", sender: str = ""
    ) -> Admitted | AdmissionVerdict | None:
        """
        Admit an assignment that is new here, and reserve its place.

        A verdict (reject, or drop another) needs the store first; None: it is known.
        """
        if pool.has(read.record_id):
            return None
        verdict = self._admissions.decide(read, pool, self._context.clock.now())
        if isinstance(verdict.answer, Reject | AcceptDropping):
            return verdict
        return self._reserve(read, body, pool, verdict, sender)

    async def take(
        self, read: ExecAssignment | InvalidMessage, body: bytes = b"", verdict: AdmissionVerdict | None = None
    ) -> IntakeResult:
        """
        Take in one message, with everything that may have to be asked.

        If the store does not answer, the ack says so. The baseline sends no such ack, because it refuses nothing; a
        sender without an ack sends again.
        """
        try:
            return await self._take(read, body, verdict)
        except (StoreError, TimeoutError):
            if isinstance(read, InvalidMessage) or not self._v2:
                raise
            return self._not_kept(read, self._pools[resource_class(read)], _FAILED)

    async def _take(
        self, read: ExecAssignment | InvalidMessage, body: bytes, verdict: AdmissionVerdict | None
    ) -> IntakeResult:
        if isinstance(read, InvalidMessage):
            return await self._refuse(read.assignment_id, read.ack_status, RejectReason.INVALID, read.message)
        pool = self._admissions.pool_of(read)
        if not isinstance(pool, Pool):
            return await self._refuse(read.assignment_id, AckStatus.REJECTED, *pool, assignment=read)
        while verdict is None and self._admissions.undecided(read, pool):
            await pool.entered()
        if pool.has(read.record_id):
            self._admissions.give_back(verdict, read, pool)
            return await self._duplicate(read, pool)
        verdict = verdict or self._admissions.decide(read, pool, self._context.clock.now())
        answer = verdict.answer
        if isinstance(answer, Reject | AcceptDropping):
            try:
                with self._context.timeouts.timeout(STORE_S):
                    known = await self._context.work.get(read.record_id)
            except BaseException:
                self._admissions.give_back(verdict, read, pool)
                raise
            if known is not None and not self._is_for_others(known, answer, pool):
                self._admissions.give_back(verdict, read, pool)
                return await self._duplicate(read, pool)
        if isinstance(answer, Reject):
            refusal, wait = (AckStatus.REJECTED, answer.reason, answer.message), answer.retry_after_ms
            about: dict[str, Any] = {"assignment": read, "pool": pool, "inputs": verdict.inputs}
            return await self._refuse(read.assignment_id, *refusal, wait=wait, **about)
        if isinstance(answer, AcceptDropping):
            return await self._evict_and_keep(answer, read, body, pool, verdict)
        return (await self.keep([self._reserve(read, body, pool, verdict)]))[0]

    def _is_for_others(self, known: WorkItem, answer: Admission, pool: Pool) -> bool:
        """Whether an arrival that admission refuses is no duplicate of ours: still open, or queued for a worker."""
        if is_unassigned(known):
            return True
        waits = known.state is WorkState.PENDING and isinstance(answer, Reject)
        return waits and (self.draining or known.resource_class != pool.queue_name)

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def _reserve(
        self, assignment: ExecAssignment, body: bytes, pool: Pool, verdict: AdmissionVerdict, sender: str = ""
    ) -> Admitted:
        """The arrival with its place, which is reserved before the first await, so that no other arrival takes it."""
        answer = verdict.answer
        assert not isinstance(answer, Reject)
        pool.reserve(assignment.priority)
        try:
            met = pool.measured()
            terms = self._closing.starts.admitted(assignment, AdmittedAs.by(answer, assignment, met))
            work = AcceptedWork(assignment, terms, sender)
            item = work.as_item(body, pool.queue_name, answer, int(self._context.clock.wall() * 1000))
            event = self._event(
                assignment, AckStatus.ACCEPTED, None, pool, message=answer.message, inputs=verdict.inputs, met=met
            )
            ack = self._ack(assignment.assignment_id, AckStatus.ACCEPTED, answer.message, pool=pool, met=met)
        except BaseException:
            pool.release(assignment.priority)
            raise
        return Admitted(work, pool, item, ack, event, _FAILED_AS.get(type(answer), _FAILED), verdict.at)

    async def keep(self, batch: Sequence[Admitted]) -> list[IntakeResult]:
        """Keep admitted assignments in one store call, and start those that free slots can take."""
        start = self._startable(batch)
        with starting([one.pool for one in batch if one.item.id in start]):
            return await self._keep(batch, start)

    async def _keep(self, batch: Sequence[Admitted], start: set[str]) -> list[IntakeResult]:
        rules, placed = self._rules.missing([one.pool for one in batch]), 0
        try:
            entries = self._context.journal.entries([*rules, *(one.event for one in batch)])
            kept = await self._assign([one.item for one in batch], start, entries)
        except (StoreError, TimeoutError) as error:
            is_away = isinstance(error, StoreUnavailableError | TimeoutError)
            if not self._v2 or not (is_away or len(batch) == 1):
                raise
            return [self._not_kept(one.work.assignment, one.pool, one.failure) for one in batch]
        else:
            for one, item in zip(batch, kept, strict=True):
                placed += 1
                self._place(one, item)
        finally:
            for one in batch[placed:]:
                one.pool.release(one.work.assignment.priority)
        if any(kept):
            self._rules.written(rules)
        both = zip(batch, kept, strict=True)
        known = self._duplicate
        return [await known(a.work.assignment, a.pool) if b is None else IntakeResult(a.ack) for a, b in both]

    async def _assign(self, items: list[WorkItem], start: set[str], entries: list[AuditEntry]) -> list[WorkItem | None]:
        """Accept these in the store. If the worker ends meanwhile, what was started goes back and spends nothing."""
        context, lease = self._context, self._context.settings.lease

        async def assigned() -> list[WorkItem | None]:
            with context.timeouts.timeout(STORE_S):
                return await context.work.assign(items, start=start, owner=context.owner, lease=lease, events=entries)

        return await context.claims.finish(assigned(), _held_if_started)

    def _startable(self, batch: Sequence[Admitted]) -> set[str]:
        """The ids of arrivals for which their pools have a free slot now."""
        arrivals = Counter(one.pool.name for one in batch)
        free = {name: self._pools[name].can_start(number) for name, number in arrivals.items()}
        start, wall_ms = set[str](), self._context.clock.wall() * 1000
        for one in batch:
            if free[one.pool.name] > 0 and one.item.due_at <= wall_ms:
                free[one.pool.name] -= 1
                start.add(one.item.id)
        return start

    def _place(self, one: Admitted, item: WorkItem | None) -> None:
        """Give kept work a slot or a place in the queue for its reserved one; None: it was known already."""
        one.pool.release(one.work.assignment.priority)
        if item is None:
            return
        self._closing.starts.kept(one.work)
        if item.state is WorkState.RUNNING:
            self._closing.remember(item, one.work)
            one.pool.begin([item])
        elif not one.pool.has(item.id):
            one.pool.put(structs.replace(one.pool.queued(item), since=one.since))

    async def _evict_and_keep(
        self, answer: AcceptDropping, assignment: ExecAssignment, body: bytes, pool: Pool, verdict: AdmissionVerdict
    ) -> IntakeResult:
        """Drop the victim, which gets an ack, a result and an event like every end, and keep the arrival."""
        try:
            dropped = await self._closing.drop(answer.victim, pool)
        except BaseException:
            self._admissions.give_back(verdict, assignment, pool)
            raise
        pool.release(assignment.priority)
        (result,) = await self.keep([self._reserve(assignment, body, pool, verdict)])
        if not dropped:
            return result
        (name, _), reason = assignment_and_tenant(answer.victim), RejectReason.DROPPED_OLDEST
        ack = self._ack(name, AckStatus.REJECTED, DROPPED_MESSAGE, pool=pool, reason=reason)
        return structs.replace(result, evicted=(answer.victim, ack))

    async def _duplicate(self, assignment: ExecAssignment, pool: Pool) -> IntakeResult:
        """Duplicate delivery: ack ACCEPTED whatever the queue's level. Another job under the same id is rejected."""
        work_id = assignment.record_id
        known = await self._known_under(work_id, pool)
        if known is not None and is_unassigned(known) and pool.forget(work_id):
            return await self.take(assignment)  # a router took it back while this worker was silent, or it was returned
        if known is not None and not is_same_job(known, assignment):
            refusal = AckStatus.REJECTED, RejectReason.INVALID, _OTHER_JOB
            return await self._refuse(assignment.assignment_id, *refusal, assignment=assignment, pool=pool)
        ack = self._ack(assignment.assignment_id, AckStatus.ACCEPTED, Accept().message, pool=pool)
        return IntakeResult(ack, duplicate=(work_id, pool))

    async def _known_under(self, work_id: str, pool: Pool) -> WorkItem | None:
        try:
            with self._context.timeouts.timeout(STORE_S):
                return await self._context.work.get(work_id)
        except (StoreError, TimeoutError):
            if not pool.has(work_id):
                raise
            return None  # it is held here, and still is while the store is away

    def _not_kept(self, assignment: ExecAssignment, pool: Pool, message: str) -> IntakeResult:
        """Reject because the store failed. If it was kept after all, it is found when it is sent again."""
        reason = RejectReason.OVERLOADED
        event = self._event(assignment, AckStatus.REJECTED, reason, pool, message=message)
        run_in_background(self._context.journal.write(event), "writing down a refusal")
        ack = self._ack(
            assignment.assignment_id, AckStatus.REJECTED, message, pool=pool, reason=reason, wait=STORE_WAIT_MS
        )
        return IntakeResult(ack)

    async def _refuse(
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
    ) -> IntakeResult:
        event = self._event(assignment or assignment_id, status, reason, pool, message=message, inputs=inputs)
        await self._rules.write(self._context.journal, event, [pool] if pool and inputs else [])
        return IntakeResult(self._ack(assignment_id, status, message, pool=pool, reason=reason, wait=wait))

    def drain_ack(self, assignment_id: str, pool: Pool) -> ExecAssignmentAck:
        """The rejecting ack of work that was accepted before this worker had to leave."""
        reason, wait = RejectReason.DRAINING, LONGEST_WAIT_MS
        return self._ack(assignment_id, AckStatus.REJECTED, _RETURNED, pool=pool, reason=reason, wait=wait)

    # ---- records ----------------------------------------------------------------------------------------------------

    def _ack(
        self,
        assignment_id: str,
        status: AckStatus,
        message: str,
        *,
        pool: Pool | None = None,
        reason: RejectReason | None = None,
        wait: int | None = None,
        met: tuple[int, OverloadStatus] | None = None,
    ) -> ExecAssignmentAck:
        if not self._v2:
            return ExecAssignmentAck(assignment_id, status, message)
        if pool is None:  # it belongs to no class: then the fullest one stands for the worker
            pool = max(self._pools.values(), key=lambda one: (one.status().severity, one.depth()))
        depth, level = met or pool.measured()
        return ExecAssignmentAck(
            assignment_id,
            status,
            message,
            overload_status=level,
            queue_depth=depth,
            worker_id=self._context.worker_id,
            reason=None if reason is None else reason.value,
            retry_after_ms=UNSET if wait is None else wait,
        )

    def _event(
        self,
        assignment: ExecAssignment | str,
        status: AckStatus,
        reason: RejectReason | None,
        pool: Pool | None,
        *,
        message: str,
        inputs: dict[str, Any] | None = None,
        met: tuple[int, OverloadStatus] | None = None,
    ) -> Event:
        """The event of an admission; of a message that is no assignment, by its id."""
        if met is None and pool is not None:
            met = pool.measured()
        return admission_event(
            assignment,
            self._context.clock.wall(),
            status=status,
            reason=reason,
            worker_id=self._context.worker_id,
            resource_class=None if pool is None else pool.name,
            met=met,
            inputs=inputs | pool.level_inputs(met[0]) if inputs and pool and met else {},
            message=message,
        )


def _body(delivery: Delivery) -> bytes:
    """The assignment's bytes for the store; "" with headers, which override the body, so that it is encoded again."""
    return b"" if delivery.headers else delivery.body


def _held_if_started(item: WorkItem | None) -> Held | None:
    return Held.of(item) if item is not None and item.state is WorkState.RUNNING else None
