"""
Submissions: validated, kept in the store, claimed by a router, and answered.

A submission is a work item of the class `ROUTER`: accepted means kept, whether a router runs or not. The worker that
accepts it moves the same record to its own class, and ends it. A caller therefore finds the result in the store,
whichever process wrote it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import inf

from msgspec import Struct, structs

from reefknot.audit.assignments import briefly_about, completed_event, ended_event, submitted_event, vanished_events
from reefknot.audit.journal import Journal, about_item
from reefknot.audit.model.event import Admission, Dropped, Quarantined, Requeued
from reefknot.audit.port import AuditEntry
from reefknot.core.canonical import record_fingerprint
from reefknot.core.clock import Clock
from reefknot.core.failure import ErrorCode
from reefknot.errors import KeyConflictError, QueueFullError, UnknownJobError
from reefknot.queue.execution.events import expired_event
from reefknot.queue.execution.settling import Claims
from reefknot.queue.execution.tracing import submitting
from reefknot.queue.model.admission import Reject, RejectReason
from reefknot.queue.model.messages import (
    AckStatus,
    ExecAssignment,
    ExecResult,
    InvalidMessage,
    Job,
    ResultStatus,
    encode,
    read_assignment,
    resource_class,
)
from reefknot.queue.model.results import (
    DROPPED,
    UNREADABLE_SUBMISSION,
    answer_of,
    assignment_of,
    item_of,
    overdue_reason,
    unrun_result,
)
from reefknot.queue.model.submission import SCHEDULE_MESSAGE, SubmissionRules
from reefknot.queue.model.work import (
    NO_EXTRA,
    ROUTER,
    Extra,
    Quarantine,
    WorkItem,
    assignment_and_tenant,
    is_ingestion,
    is_over,
    requeued_at,
)
from reefknot.queue.port.control import Control
from reefknot.queue.port.work_queue import (
    FIRST_FENCE,
    Enqueue,
    Enqueued,
    Held,
    Outcome,
    Settlement,
    Taken,
    WorkClaim,
    WorkQueue,
)
from reefknot.queue.router.health import FleetClasses
from reefknot.queue.router.pending import ClaimedSubmission, RouterContext
from reefknot.queue.router.settings import CALLER_LATE_S, LEASE_S
from reefknot.runtime.processes import own_identity
from reefknot.runtime.tasks import Batcher
from reefknot.runtime.timeouts import STORE_S

BATCH = 200
SOON_MS = 100
"""What another process submits counts as due when it is due this soon: its clock may differ a little."""
REFUSALS_S = 1.0
"""How often refusals are written down: the first one at once, and then the number of the others."""
Events = Sequence[Sequence[AuditEntry]]
"""By item."""
_NEVER = 1_000_000_000
"""No crash limit: that a router vanished says nothing about the work."""


def check_same_job(assignment: ExecAssignment, known: Job) -> None:
    """
    `KeyConflictError` unless `known` is the job of the assignment: the same id is the same work.

    Jobs are compared as they are written: a tuple is a list there, and 1, 1.0 and true, alike in Python, are not.
    """
    recorded, given = record_fingerprint(known), record_fingerprint(assignment.job)
    if recorded != given:
        raise KeyConflictError(assignment.assignment_id, recorded=recorded, given=given, is_job=True)


# ---- the store ------------------------------------------------------------------------------------------------------


class NewJob(Struct, frozen=True):
    """A job to submit: for `due_at` (ms UTC) or for now."""

    assignment: ExecAssignment
    due_at: int = 0
    extra: Extra = NO_EXTRA


class Submissions:
    """Submissions in a store. Clients and routers use the same."""

    def __init__(
        self,
        work: WorkQueue,
        clock: Clock,
        *,
        rules: SubmissionRules,
        lease: float = LEASE_S,
        journal: Journal | None = None,
        control: Control | None = None,
    ) -> None:
        """`rules` hold where no router has published its own; by `control` it knows the classes of steps."""
        self._work = work
        self._clock = clock
        self._rules = rules
        self._lease = lease
        self.claims = Claims(work, lease)
        self._journal = journal or Journal(None)
        self._classes = None if control is None else FleetClasses(control, clock)
        self._identity = own_identity()
        self._unwritten: Counter[tuple[str, str]] = Counter()
        """Refusals since the last event, by reason and resource class."""
        self._written_at = -inf

    async def submit(self, assignment: ExecAssignment, *, due_at: int = 0, extra: Extra = NO_EXTRA) -> bool | Taken:
        """
        Keep a job, for `due_at` (ms UTC) or for now.

        False when it is there already, `Taken` when another one holds its key; `QueueFullError` when it is refused.
        """
        await self.learn_classes()
        with submitting(assignment) as traced:
            (kept,) = await self.enqueue([self._item_of(NewJob(assignment, due_at, extra), traced)])
            return await self._is_new(assignment, kept)

    async def submit_many(self, jobs: Sequence[NewJob]) -> list[bool | Taken | QueueFullError | KeyConflictError]:
        """Keep these in one step. The answer for each is that of `submit`, or its error."""
        await self.learn_classes()
        items, answers = list[WorkItem](), list[bool | Taken | QueueFullError | KeyConflictError]()
        for job in jobs:
            with submitting(job.assignment) as traced:  # not around the call: the spans would be one inside the other
                items.append(self._item_of(job, traced))
        for job, kept in zip(jobs, await self.enqueue(items), strict=True):
            try:
                answers.append(await self._is_new(job.assignment, kept))
            except (QueueFullError, KeyConflictError) as error:
                answers.append(error)
        return answers

    def _item_of(self, job: NewJob, traced: ExecAssignment) -> WorkItem:
        item = self.item(traced, encode(traced), due_at=job.due_at)
        return item if job.extra is NO_EXTRA else structs.replace(item, extra=job.extra)

    async def check_known(self, records: Sequence[str]) -> None:
        """`UnknownJobError` for the first of these that is no job."""
        for record in records:
            if await self.find(record) is None:
                name, tenant = assignment_and_tenant(record)
                raise UnknownJobError(name, tenant_id=tenant)

    async def _is_new(self, assignment: ExecAssignment, kept: Outcome) -> bool | Taken:
        """Whether a submission made the job; its error when it was refused, or its id has another job."""
        if isinstance(kept, Reject):
            raise self.refused(assignment, kept)
        if kept is Enqueued.DUPLICATE:
            await self.check_same_job(assignment)
        return kept if isinstance(kept, Taken) else kept is Enqueued.ACCEPTED

    async def enqueue(
        self, items: Sequence[WorkItem], *, owner: str = "", given: tuple[SubmissionRules, Events] | None = None
    ) -> list[Outcome]:
        """
        Keep these in one step. With an `owner` they are its own at once, and need not be claimed.

        The rules and the events of each are `given` for those of another submitter.
        """
        rules, events = given or (self._rules, [(one,) for one in self._submitted(items)])
        submitted = {item.id: of_item for item, of_item in zip(items, events, strict=True)}
        terms = Enqueue(rules, owner, self._lease, lambda item: submitted[item.id], self._dropped)
        async with asyncio.timeout(STORE_S):
            return await self._work.enqueue(items, terms)

    def _submitted(self, items: Sequence[WorkItem]) -> list[AuditEntry]:
        wall = self._clock.wall()
        return self._journal.entries([submitted_event(item, wall, self._identity) for item in items])

    def refused(self, assignment: ExecAssignment, verdict: Reject) -> QueueFullError:
        """The error for a refused caller. The event says how many were refused since the last one."""
        pool = self.class_of(assignment)
        self._unwritten[verdict.reason.value, pool] += 1
        now = self._clock.now()
        if now - self._written_at >= REFUSALS_S:
            self._written_at = now
            number, self._unwritten = self._unwritten, Counter()
            event = Admission(
                **briefly_about(assignment, self._clock.wall()),
                status=AckStatus.REJECTED.value,
                reason=verdict.reason.value,
                resource_class=ROUTER,
                queue_depth=verdict.depth,
                overload_status=None,
                inputs={"refused": {f"{reason} {pool}": count for (reason, pool), count in number.items()}},
            )
            self._journal.write_soon(event)
        is_full = verdict.reason is RejectReason.QUEUE_FULL
        wait, reason = verdict.retry_after_ms / 1000, "queue is full" if is_full else "would miss deadline"
        if verdict.message == SCHEDULE_MESSAGE:
            reason = "too much work is scheduled"
        limit = max(verdict.depth, self._rules.size)
        return QueueFullError(depth=verdict.depth, limit=limit, retry_after=wait, reason=reason)

    def item(self, assignment: ExecAssignment, body: bytes, *, due_at: int = 0) -> WorkItem:
        """
        The work item of a submission; its deadline begins when it is due, by default now.

        A class that no worker has is warned of.
        """
        pool = self.class_of(assignment)
        if self._classes is not None:
            self._classes.warn_of(assignment, pool)
        due_at = max(due_at, int(self._clock.wall() * 1000))
        return structs.replace(item_of(assignment, body, ROUTER, begins_at=due_at, due_at=due_at), pool=pool)

    async def learn_classes(self) -> None:
        """Read which classes there are, if that was not done just now."""
        if self._classes is not None:
            await self._classes.refresh()

    def class_of(self, assignment: ExecAssignment) -> str:
        """The resource class of an assignment, by what is known of its step."""
        return resource_class(assignment) if self._classes is None else self._classes.class_of(assignment)

    async def check_same_job(self, assignment: ExecAssignment) -> None:
        """`KeyConflictError` when the id was used with another job."""
        item = await self.find(assignment.record_id)
        if item is not None and item.payload:
            of_source = is_ingestion(item)  # which is no assignment, whatever its kind is called
            known = Job(item.kind, {"ingestion_job": item.id}) if of_source else assignment_of(item).job
            check_same_job(assignment, known)

    async def claim(self, n: int, owner: str, only: Collection[str] | None = None) -> list[ClaimedSubmission]:
        """Claim submissions without an owner; with `only`, just these records."""
        await self.learn_classes()
        wanted = WorkClaim(
            owner, classes=(ROUTER,), lease=self._lease, only=only, crash_limit=_NEVER, crash_events=self._crashed
        )
        async with asyncio.timeout(STORE_S):
            items = await self._work.claim(n, wanted)
        claimed = []
        for item in items:
            held = Held.of(item)
            waits = item.extra.waits > 0
            read = assignment_of(item) if waits else read_assignment(item.payload)
            if isinstance(read, InvalidMessage):
                await self.set_aside(item, held, f"{UNREADABLE_SUBMISSION}: {read.message}")
            else:
                seen = item.fence > FIRST_FENCE
                was_accepted = bool(item.admission)
                again_at, number = requeued_at(item), item.generation
                claimed.append(
                    ClaimedSubmission(
                        read,
                        held,
                        item.deadline_at,
                        seen,
                        b"" if waits else item.payload,
                        was_accepted,
                        again_at,
                        number,
                        item if waits else None,
                    )
                )
        return claimed

    async def recall(self, classes: Sequence[str]) -> int:
        """Bring back what is queued for workers that are gone. Returns how many assignments that were."""
        async with asyncio.timeout(STORE_S):
            return await self._work.recall(classes, crash_events=self._worker_crashed)

    def wall(self) -> float:
        return self._clock.wall()

    async def find(self, work_id: str) -> WorkItem | None:
        """The record of this id."""
        async with asyncio.timeout(STORE_S):
            return await self._work.get(work_id)

    async def answer(self, work_id: str) -> ExecResult | None:
        """The result, if the assignment has ended."""
        return answer_of(await self.find(work_id))

    async def result(self, work_id: str, timeout: float) -> ExecResult | None:
        """The result as soon as there is one, or None after `timeout` seconds."""
        return answer_of(await self._work.ended(work_id, timeout))

    async def ended_by_deadline(self, work_id: str, timeout: float) -> WorkItem | None:
        """
        The item as soon as it has ended, or None after `timeout` seconds.

        An assignment that has not ended soon after its deadline is ended here: its router and worker may be gone.
        """
        ends = self._clock.now() + timeout
        while (left := ends - self._clock.now()) > 0:
            overdue_in = await self._overdue_in(work_id)
            item = await self._work.ended(work_id, min(left, max(0.0, overdue_in)))
            if item is not None or overdue_in > left:
                return item
            if await self._overdue_in(work_id) <= 0:  # else a person gave it another deadline meanwhile
                await self._expire(work_id)
        item = await self.find(work_id)
        return item if item is not None and is_over(item) else None

    async def _overdue_in(self, assignment_id: str) -> float:
        """Seconds until a caller may end the assignment itself; infinite without a deadline."""
        item = await self.find(assignment_id)
        if item is None or item.deadline_at is None or is_over(item):
            return inf
        return item.deadline_at / 1000 + CALLER_LATE_S - self._clock.wall()

    async def _expire(self, assignment_id: str) -> None:
        item = await self.find(assignment_id)
        if item is None:
            return
        wall, reason = self._clock.wall(), overdue_reason(item)
        events = [expired_event(assignment_of(item), wall), ended_event(item, wall, cancelled=reason)]
        async with asyncio.timeout(STORE_S):
            entries = self._journal.entries(events)
            await self._work.cancel(assignment_id, reason=reason, who="caller", events=entries)

    async def set_aside(self, item: WorkItem, held: Held, reason: str) -> None:
        """Quarantine a submission that cannot be read. Its caller gets a result, and the log an event."""
        result = unrun_result(assignment_of(item), ResultStatus.ERROR, ErrorCode.internal_error, reason)
        wall, body = self._clock.wall(), encode(result)
        event = Quarantined(**about_item(item, wall), reason=reason)
        ended = completed_event(result, body, wall, since_ms=item.created_at, attempts=0)
        settled = Quarantine(reason, None, body.decode())
        entries = tuple(self._journal.entries([event, ended]))
        async with asyncio.timeout(STORE_S):
            await self._work.settle([Settlement(held.id, held.owner, held.fence, settled, entries)])

    def _dropped(self, item: WorkItem) -> list[AuditEntry]:
        wall = self._clock.wall()
        event = Dropped(**about_item(item, wall), reason=DROPPED, resource_class=item.pool)
        return self._journal.entries([event, ended_event(item, wall)])

    def _worker_crashed(self, item: WorkItem) -> list[AuditEntry]:
        return self._journal.entries(vanished_events(item, self._clock.wall()))

    def _crashed(self, item: WorkItem) -> list[AuditEntry]:
        about = about_item(item, self._clock.wall())
        return self._journal.entries([Requeued(**about, reason="its router vanished", generation=item.generation)])


# ---- callers of this process ----------------------------------------------------------------------------------------


class _LocalSubmission(Struct, frozen=True, eq=False):
    """A submission that is being kept."""

    assignment: ExecAssignment
    body: bytes
    kept: asyncio.Future[Outcome]


class LocalCallers:
    """
    Callers in the router's own process, and the results they wait for.

    Their submissions are kept in batches. While there is room they are this router's from the start; else they wait in
    the store until it, or another router, has room. The same holds for what other processes hand over to this router.
    """

    def __init__(
        self,
        context: RouterContext,
        submissions: Submissions,
        *,
        on_claimed: Callable[[], None],
        on_left: Callable[[], None],
    ) -> None:
        self._context = context
        self._submissions = submissions
        self.claims = True
        """Whether what is submitted becomes this router's."""
        self._on_claimed = on_claimed
        self._on_left = on_left
        self._callers: dict[str, asyncio.Future[ExecResult]] = {}
        """By the id of the record."""
        self._jobs: dict[str, Job] = {}
        self._undecided: set[str] = set()
        """Those whose submission is being kept: a result that comes meanwhile is one of an earlier submission."""
        self.batch: Batcher[_LocalSubmission] = Batcher("submissions could not be kept", self._keep, most=BATCH)

    async def submit(self, assignment: ExecAssignment, body: bytes) -> asyncio.Future[ExecResult]:
        """Keep an assignment, or raise `QueueFullError` with the time to come back. Returns the future result."""
        name = assignment.record_id
        future = self._callers.get(name)
        if future is not None and not future.done():
            check_same_job(assignment, self._jobs[name])
            return future
        future = asyncio.get_running_loop().create_future()
        self._callers[name], self._jobs[name] = future, assignment.job
        self._undecided.add(name)
        arrival = _LocalSubmission(assignment, body, asyncio.get_running_loop().create_future())
        self.batch.put(arrival)
        try:
            if not self.batch.served:  # a submission is stored even when its router does not run
                await self.batch.finish()
            kept = await arrival.kept
            if isinstance(kept, Reject):
                raise self._submissions.refused(assignment, kept)
            if kept is Enqueued.DUPLICATE:
                await self._submissions.check_same_job(assignment)
                self._join(name, await self._submissions.find(name))
                self._on_left()  # it may have lost its router
        except BaseException as error:
            self._forget(name)
            if not future.done():  # another caller of the same id waits for this very future
                future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
                future.exception()
            raise
        return future

    async def _keep(self, arrivals: list[_LocalSubmission]) -> None:
        """Keep a batch, even of callers that have left: whether it was kept is not known to one that left."""
        await self._submissions.learn_classes()
        items = [self._submissions.item(one.assignment, one.body) for one in arrivals]
        owner = self._owner_of(len(items))
        try:
            answers = await self._submissions.enqueue(items, owner=owner)
        except BaseException as error:
            for one in arrivals:
                if not one.kept.done():
                    one.kept.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            raise
        for one, item, kept in zip(arrivals, items, answers, strict=True):
            if kept is Enqueued.ACCEPTED and owner:
                self._claimed(one.assignment, item, owner, one.body)
            if kept is Enqueued.ACCEPTED:
                self._undecided.discard(item.id)
            if not one.kept.done():
                one.kept.set_result(kept)
        (self._on_claimed if owner else self._on_left)()

    def _owner_of(self, number: int) -> str:
        """The owner of so much new work: this router, as far as it has room for it."""
        has_room = len(self._context.table) + number <= self._context.settings.rules.size
        return self._context.owner if has_room and self.claims else ""

    def _claimed(self, assignment: ExecAssignment, item: WorkItem, owner: str, body: bytes) -> None:
        """Look after what was enqueued for this router."""
        claimed = ClaimedSubmission(assignment, Held(item.id, owner, FIRST_FENCE), item.deadline_at, False, body)
        self._context.table.add(claimed, item.pool, self._context.clock.now())

    async def take_over(self, items: Sequence[WorkItem], rules: SubmissionRules, events: Events) -> list[Outcome]:
        """Keep what another process submits. What is due, and can be read, is this router's from the start."""
        soon = int(self._context.clock.wall() * 1000) + SOON_MS
        due = [item for item in items if item.due_at <= soon and not item.extra.waits]
        all_read = [(item, read_assignment(item.payload)) for item in due]
        read = {item.id: one for item, one in all_read if isinstance(one, ExecAssignment)}
        # A claim sets aside what cannot be read, and waits for what is due later.
        owner = self._owner_of(len(items)) if len(read) == len(items) else ""
        answers = await self._submissions.enqueue(items, owner=owner, given=(rules, events))
        for item, kept in zip(items, answers, strict=True):
            if kept is Enqueued.ACCEPTED and owner:
                self._claimed(read[item.id], item, owner, item.payload)
        (self._on_claimed if owner else self._on_left)()
        return answers

    def _join(self, name: str, item: WorkItem | None) -> None:
        """Let a caller wait for the result of what was submitted before, as it stands in the store."""
        self._undecided.discard(name)
        pending = self._context.table.get(name)
        if item is not None and pending is not None:  # run again since: an earlier result may still be on its way
            pending.requeued_at = max(pending.requeued_at, requeued_at(item))
        result = answer_of(item)
        if result is not None:
            self.resolve(name, result)

    def names(self) -> list[str]:
        """The records whose callers wait here."""
        return list(self._callers)

    def elsewhere(self) -> list[str]:
        """The records whose callers wait here, and that this router does not look after."""
        return [name for name in self._callers if self._context.table.get(name) is None]

    async def answer_from_store(self, work_id: str) -> None:
        """Resolve the caller of an assignment that has ended in the store."""
        stored = await self._submissions.answer(work_id)
        if stored is not None:
            self.resolve(work_id, stored)

    def resolve(self, work_id: str, result: ExecResult) -> None:
        """Give a result to its caller, if it waits here."""
        if work_id in self._undecided:
            return
        future = self._forget(work_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _forget(self, name: str) -> asyncio.Future[ExecResult] | None:
        self._undecided.discard(name)
        self._jobs.pop(name, None)
        return self._callers.pop(name, None)
