"""
Runs a claimed item's attempt, then settles and publishes it.

Reports go to the store in batches (`execution/settling.py`). Ends that need no slot (cancelled, dropped, expired,
crashed too often) are one store call with their event, and then a result. What is queued when the worker leaves ends
for it by `Drain`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os.path import basename

import msgspec

from reefknot.audit.assignments import completed_event, ended_event, submitted_event
from reefknot.audit.journal import about_item
from reefknot.audit.model.event import Dropped, Event, OperatorAction, Requeued
from reefknot.audit.port import AuditEntry
from reefknot.core.classify import classify
from reefknot.core.failure import ErrorCode
from reefknot.errors import StoreError
from reefknot.queue.execution.decision_log import ERROR
from reefknot.queue.execution.events import expired_event, quarantined_event
from reefknot.queue.execution.failures import raised_at
from reefknot.queue.execution.settling import EndedAttempt, Settling
from reefknot.queue.execution.tracing import WorkTrace, assignment_trace
from reefknot.queue.model.follow_ups import RefusedFollowUp
from reefknot.queue.model.messages import Cancel, ExecAssignmentAck, ExecResult, StepResult, StepStatus, encode
from reefknot.queue.model.results import (
    DROPPED,
    UNREADABLE_WORK,
    WORKER_FAILED,
    answer_of,
    assignment_of,
    cancel_reason,
)
from reefknot.queue.model.submission import EXPIRED, SubmissionRules
from reefknot.queue.model.work import (
    Quarantine,
    Settled,
    Snooze,
    WorkDone,
    WorkFailed,
    WorkItem,
    WorkState,
    is_workers,
)
from reefknot.queue.port.work_queue import FollowUps, Held, Settlement, WorkClaim, WorkFilter
from reefknot.queue.worker.attempt import StepRunner
from reefknot.queue.worker.context import WorkerContext, WorkerMessage
from reefknot.queue.worker.notes import AttemptNotes
from reefknot.queue.worker.pool import Pool, Queued
from reefknot.queue.worker.records import AcceptedWork, AttemptReport
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.timeouts import STORE_S
from reefknot.runtime.tracing import tracing

MOST_WATCHED = 10_000
MOST_REMEMBERED = 1_000
PAGE = 5000
OFFERED_AT_ONCE = 500
DRAINING = "its worker is draining"
NOTES_PAUSE_S = 2.0
"""Pause of work whose checkpoint cannot be read now; without it, it would begin from its start."""

DrainAck = Callable[[str, Pool], ExecAssignmentAck]


class Closing:
    """Runs what the pools of one worker have claimed, and closes what has ended."""

    def __init__(self, context: WorkerContext, pools: Mapping[str, Pool], steps: StepRunner) -> None:
        self._context = context
        self._pools = pools
        self._steps = steps
        self._clock = context.clock
        self.reports = Settling(context, self._publish)
        self.starts = steps.starts
        self._started: dict[tuple[str, int], AcceptedWork] = {}
        """Work that intake started, by id and fence: it need not be read again."""
        self._crashed: deque[str] = deque(maxlen=MOST_WATCHED)
        self._foreign: dict[str, str] = {}
        """Assignments that were sent here while another worker holds them: by id, the class that takes them later."""

    # ---- attempts ---------------------------------------------------------------------------------------------------

    def remember(self, item: WorkItem, work: AcceptedWork) -> None:
        """Keep an assignment that intake has read, until its attempt begins."""
        if len(self._started) >= MOST_REMEMBERED:  # those that were cancelled before they began
            del self._started[next(iter(self._started))]
        self._started[item.id, item.fence] = work

    async def run(self, item: WorkItem) -> bool:
        """Make one attempt of a claimed item, and report it. Returns whether its time is a service time."""
        pool = self._pools[item.resource_class.rpartition("@")[0]]
        try:
            work = self._started.pop((item.id, item.fence), None) or AcceptedWork.read(item)
        except msgspec.DecodeError as error:
            work, reason = AcceptedWork.stand_in(item), f"{UNREADABLE_WORK}: {error}"
            self._steps.log.ended(item, reason, attempts=item.attempts, level=ERROR)
            self._report(item, self._set_aside(item, work, reason), pool, work)
            return False
        trace = None if tracing.tracer is None else assignment_trace(item, work.assignment)
        task = pool.running.get(item.id) or asyncio.current_task()
        overdue_id = f"{item.id}#{item.fence}"
        try:
            notes = await AttemptNotes.of(self._context, item)
        except (StoreError, TimeoutError) as error:
            due, reason = int((self._clock.wall() + NOTES_PAUSE_S) * 1000), f"its checkpoint: {error_text(error)}"
            self._report(item, AttemptReport(Snooze(due, reason)), pool, work, trace)
            return False

        def overdue(make_report: Callable[[], AttemptReport]) -> None:
            """Report the attempt of a step that goes on. Its slot stays taken, and its job may run again in another."""
            if pool.claimed.get(item.id) != Held.of(item):
                return  # cancelled, or given back
            if task is not None and pool.running.get(item.id) is task:
                del pool.running[item.id]
                pool.running[overdue_id] = task
            self._report(item, make_report(), pool, work, trace, notes)

        report: AttemptReport | None
        try:
            report = await self._steps.attempt(item, work, trace, task, overdue, notes)
        except asyncio.CancelledError:
            await notes.stop()
            raise
        except Exception as error:  # a defect of ours: the assignment ends with it, and the worker goes on
            report = self._broken(item, work, error)
        finally:
            pool.running.pop(overdue_id, None)
            if trace is not None:
                trace.attempt_ended()
        if report is None:
            return False
        self._report(item, report, pool, work, trace, notes)
        return report.took_ms is not None

    def _broken(self, item: WorkItem, work: AcceptedWork, error: Exception) -> AttemptReport:
        text = printable(self._context.redactor(f"{type(error).__name__}: {error}"), most=300)
        where, name = basename(raised_at(error)) or "an unknown place", self._context.worker_id
        logger().error("%s: internal error in %s, %s; it goes to quarantine (%s)", name, item.id, where, text)
        return self._set_aside(item, work, WORKER_FAILED)

    def _set_aside(self, item: WorkItem, work: AcceptedWork, reason: str) -> AttemptReport:
        """Quarantine of an item that could not be run. It still gets its result and its event."""
        step = StepResult(StepStatus.ERROR, ErrorCode.internal_error, error_message=reason)
        failure = classify(reason, code=ErrorCode.internal_error)
        event = quarantined_event(work.assignment, self._clock.wall(), reason, failure)
        self._steps.counters.ended(ok=False, retried=item.attempts > 0)
        result = self._steps.result(work.assignment, step, retries_used=item.attempts)
        return AttemptReport(Quarantine(reason), (event,), result)

    def _report(
        self,
        item: WorkItem,
        report: AttemptReport,
        pool: Pool,
        work: AcceptedWork,
        trace: WorkTrace | None = None,
        notes: AttemptNotes | None = None,
    ) -> None:
        """Queue the report for the store. From here on it does not depend on the slot any more."""
        self.starts.ended(item, work, report)
        settled, events, body = report.settled, report.events, None
        if report.result is not None:
            result = self._with_overload(report.result, pool, work.admitted.queue_depth)
            body = encode(result)
            ended = completed_event(
                result,
                body,
                self._clock.wall(),
                since_ms=item.created_at,
                attempts=item.attempts if isinstance(settled, WorkFailed) and not settled.ran else None,
                worker_id=self._context.worker_id,
            )
            events = (*events, ended)
            if isinstance(settled, WorkDone):
                settled = WorkDone(body.decode())
            elif isinstance(settled, WorkFailed | Quarantine):
                settled = msgspec.structs.replace(settled, result=body.decode())
        entries = tuple(self._context.journal.entries(events)) if events else ()
        notice = None if body is None else self._context.notice(item.id, body, item.generation, work.sender)
        unsaved = None if notes is None else notes.end()
        follow = self._follow_ups(item, report.follow_ups) if report.follow_ups else None
        more = (entries, report.took_ms, notice, unsaved, follow)
        settlement = Settlement(item.id, item.owner, item.fence, settled, *more)
        end_trace = None
        if trace is not None and report.result is not None:
            end_trace = partial(trace.ended_with, report.result, quarantined=isinstance(settled, Quarantine))
        self.reports.report(EndedAttempt(item, settlement, pool, body, work.sender, end_trace))

    def _follow_ups(self, item: WorkItem, items: tuple[WorkItem, ...]) -> FollowUps:
        """
        The follow-ups of a successful attempt.

        If one of them is refused the whole job is tried again later; if other work has its id, the job has failed.
        """

        def refused(found: RefusedFollowUp) -> tuple[Settled, tuple[AuditEntry, ...]]:
            wall, verdict = self._clock.wall(), found.verdict
            name = f"follow-up {found.item.kind} ({found.item.assignment_id})"
            if verdict is None:
                report = self._set_aside(item, AcceptedWork(assignment_of(item)), f"{name}: other work has this id")
                return report.settled, tuple(self._context.journal.entries(report.events))
            why = f"{name} was refused: {verdict.message}"
            again = Requeued(**about_item(item, wall), reason=why, generation=item.generation)
            due_at = int(wall * 1000) + verdict.retry_after_ms
            return Snooze(due_at, why), tuple(self._context.journal.entries([again]))

        return FollowUps(items, SubmissionRules(), self._submitted, refused)

    def _submitted(self, item: WorkItem) -> Iterable[AuditEntry]:
        return self._context.journal.entries([submitted_event(item, self._clock.wall())])

    def _with_overload(self, result: ExecResult, pool: Pool, queue_depth: int) -> ExecResult:
        """The result with the overload fields, which the baseline withholds."""
        if not self._context.settings.queue_v2:
            return result
        return msgspec.structs.replace(result, queue_depth=queue_depth, overload_status=pool.status())

    # ---- settling ---------------------------------------------------------------------------------------------------

    async def _publish(self, kept: list[EndedAttempt]) -> None:
        """Publish the results that the store has not sent with their reports."""
        unsent = [one for one in kept if one.settlement.notice is None or not one.settlement.notice.is_sent]
        ends = [(one.item, one.body, one.to) for one in unsent if one.body is not None]
        await self._context.send_all(
            [WorkerMessage.of_result(item.id, body, item.generation, to) for item, body, to in ends]
        )

    async def release_prefetched(self, pools: list[Pool]) -> None:
        """Give back what was claimed ahead and no slot has begun."""
        held = [(pool, one) for pool in pools for one in pool.release_prefetched()]
        if held:
            await self._context.claims.give_back([one for _, one in held])
        for pool, one in held:
            pool.settled(one.id, one.fence)

    # ---- ends without a slot ----------------------------------------------------------------------------------------

    async def publish_result(self, work_id: str, *, again: bool = False) -> bool:
        """Publish the result of an assignment that has ended. False when it has not."""
        item = await self._get(work_id)
        result = answer_of(item)
        if item is None or result is None:
            return False
        if not again and item.result is None:  # cancelled, dropped, expired or crashed: not reported by an attempt
            is_aside, trace = item.state is WorkState.QUARANTINED, assignment_trace(item, assignment_of(item))
            if is_aside:
                self._steps.log.ended(item, f"quarantined: {item.reason}", attempts=item.attempts, level=ERROR)
            if trace is not None:
                trace.ended_with(result, quarantined=is_aside)
        if item.result is None and self._context.settings.queue_v2:
            pool = self._pools.get(item.resource_class.rpartition("@")[0]) or next(iter(self._pools.values()))
            depth = AcceptedWork.read(item).admitted.queue_depth if item.payload and item.admission else 0
            result = msgspec.structs.replace(
                self._with_overload(result, pool, depth), worker_id=self._context.worker_id
            )
        if again:
            await self._context.repeat_result(result)
        else:
            await self._context.send_result(work_id, encode(result), item.generation)
        return True

    async def cancel(self, cancel: Cancel) -> bool:
        """Cancel an assignment of this worker, queued or running. Its result is published once."""
        work_id = cancel.record_id
        pool = next((one for one in self._pools.values() if one.has(work_id)), None)
        if pool is None:
            return False
        reason = cancel_reason(self._context.redactor(cancel.reason or ""))
        item = await self._get(work_id)
        if item is None:
            return False
        event = OperatorAction(
            **about_item(item, self._clock.wall()),
            actor=self._context.worker_id,  # the person who asked is in an event of its own
            action="cancel",
            subject=cancel.assignment_id,
            details={"reason": reason},
        )
        await self._cancel(item, pool, reason, event)  # if it has ended already, that end is published
        pool.cancel(work_id)
        return await self.publish_result(work_id)

    async def drop(self, victim: str, pool: Pool) -> bool:
        """Cancel queued work to make room. False when it had ended by itself."""
        item = await self._get(victim)
        if item is None:
            return False
        event = Dropped(**about_item(item, self._clock.wall()), reason=DROPPED, resource_class=pool.name)
        return await self._cancel(item, pool, DROPPED, event)

    async def expire(self, late: Queued, pool: Pool) -> None:
        """End an assignment whose deadline passed while it waited, without waiting for a slot."""
        item = await self._get(late.id)
        if item is None or item.state is not WorkState.PENDING:
            return
        if item.attempts:  # an attempt says it better: it knows the last error
            pool.put(msgspec.structs.replace(late, due=0.0, expires=float("inf")))
            return
        event = expired_event(assignment_of(item), self._clock.wall(), item.attempts)
        if await self._cancel(item, pool, EXPIRED, event):
            self._steps.counters.expired += 1
            await self.publish_result(late.id)

    async def _cancel(self, item: WorkItem, pool: Pool, reason: str, event: Event) -> bool:
        ended = ended_event(item, self._clock.wall(), cancelled=reason)
        entries = self._context.journal.entries([event, ended])
        with self._context.timeouts.timeout(STORE_S):
            done = await self._context.work.cancel(item.id, reason=reason, events=entries)
        pool.queue.remove(item.id)
        return done

    # ---- crashes and duplicates -------------------------------------------------------------------------------------

    def crash_events(self, item: WorkItem) -> Iterable[AuditEntry]:
        """The events of an item whose owner vanished. Called where the store runs, perhaps in another thread."""
        if item.state is WorkState.QUARANTINED:
            self._crashed.append(item.id)
        return self._context.crash_events(item)

    async def publish_crashed(self) -> None:
        """Publish the results of work that crashed too often and is in quarantine now."""
        while self._crashed:
            await self.publish_result(self._crashed.popleft())

    async def answer_duplicate(self, work_id: str, pool: Pool) -> None:
        """Answer an assignment that the store has: with its result again, or by taking it over from a lost worker."""
        if pool.has(work_id) or await self.publish_result(work_id, again=True) or await self._take_over(work_id, pool):
            self._foreign.pop(work_id, None)
        elif len(self._foreign) < MOST_WATCHED:
            self._foreign[work_id] = pool.name

    async def recheck_foreign(self) -> None:
        """Check assignments again that were sent here while another worker had them."""
        for work_id, name in list(self._foreign.items()):
            await self.answer_duplicate(work_id, self._pools[name])

    async def _take_over(self, work_id: str, pool: Pool) -> bool:
        item = await self._get(work_id)
        if item is None:
            return True
        if item.state is WorkState.RUNNING and item.owner == self._context.owner:
            if not pool.has(work_id):  # started by a store call whose answer was lost
                pool.begin([item])
            return True
        if item.state is WorkState.RUNNING and item.resource_class != pool.queue_name:
            owner, classes = self._context.owner, (item.resource_class,)
            lost = WorkClaim(owner, classes, only=(work_id,), crash_events=self.crash_events)
            with self._context.timeouts.timeout(STORE_S):  # perhaps no other claim notices that its lease ran out
                await self._context.work.claim(0, lost)
            item = await self._get(work_id)
        if item is None or item.state is not WorkState.PENDING or pool.paused:
            return False
        with self._context.timeouts.timeout(STORE_S):
            if not await self._context.work.transfer(work_id, pool.queue_name):
                return False
        if not pool.has(work_id):
            pool.put(pool.queued(item))
        return True

    async def _get(self, work_id: str) -> WorkItem | None:
        """An item that a worker has accepted. A submission that waits for one is the routers' business."""
        with self._context.timeouts.timeout(STORE_S):
            item = await self._context.work.get(work_id)
        return item if item is not None and is_workers(item) else None


class Drain:
    """
    Gives up the queued work of one worker that is leaving, and offers it to the others.

    The work stays in the store, with its due time and its attempts. Its sender gets a rejecting ack, and the next
    worker that is sent it takes it over. If none does, it is still there when this worker resumes or restarts. The
    baseline's acks cannot say why work was refused: there the workers over the same store find it.
    """

    def __init__(self, context: WorkerContext, pools: Mapping[str, Pool], ack: DrainAck) -> None:
        self._context = context
        self._pools = pools
        self._ack = ack
        self._offered: set[str] = set()
        self.is_on = False
        """Whether the worker is leaving; a mere pause keeps its queue."""

    def begin(self) -> None:
        self.is_on = True
        self._offered.clear()

    @property
    def has_more(self) -> bool:
        """Whether work was queued since the last offer: it was on its way in, or its attempt is to be repeated."""
        return self.is_on and any(pool.queue.depth or pool.prefetched for pool in self._pools.values())

    async def offer(self) -> int:
        """Give up every place, and tell the senders. Returns the number of assignments offered."""
        for pool in self._pools.values():
            pool.queue.clear()
        free = [item for item in await self._queued() if item.id not in self._offered]
        self._offered.update(item.id for item in free)
        if not free:
            return 0
        wall = self._context.clock.wall()
        for start in range(0, len(free), OFFERED_AT_ONCE):
            some = free[start : start + OFFERED_AT_ONCE]
            events = [Requeued(**about_item(one, wall), reason=DRAINING, generation=one.generation) for one in some]
            await self._context.journal.write(*events)  # a log takes only so much at once
            if self._context.settings.queue_v2:
                await asyncio.gather(*(self._reject(item) for item in some))
        return len(free)

    async def _queued(self) -> list[WorkItem]:
        """The items that the store has queued for this worker; those handed back are in no pool's queue."""
        names = tuple(pool.queue_name for pool in self._pools.values())
        which, found, after = WorkFilter(state=WorkState.PENDING, classes=names), list[WorkItem](), ""
        while True:
            with self._context.timeouts.timeout(STORE_S):
                page = await self._context.work.search(which, after=after, limit=PAGE)
            found += page.items
            if not (after := page.after):
                return found

    async def _reject(self, item: WorkItem) -> None:
        pool = self._pools[item.resource_class.rpartition("@")[0]]
        await self._context.send_ack(self._ack(item.assignment_id, pool))
