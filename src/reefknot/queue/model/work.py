"""
Work items, from accepted to ended: the record of one, and the moves that change it.

    pending ──▶ running ──▶ succeeded
       ▲ ▲         │ ├────▶ failed ──▶ pending | quarantined     another try, or none
       │ └─────────┘ └────▶ quarantined                          crashed too often
       ├── quarantined ───▶ discarded                            a person's decision
       └── failed, cancelled                                     a person's decision
    pending, running ─────▶ cancelled                             or failed, when the deadline has passed

`MOVES` is the only table of moves; every other move is an error. Four counters say why an item ran or did not: attempts
(its step ran), snoozes (it was postponed), interruptions (shutdown) and crashes (its owner vanished). Only attempts are
spent by failures. An item that has crashed is a suspect, and runs alone from then on: of all that ran when a process
died, only the one that kills it again is to blame. The payload is bytes and is never touched.

An assignment has one record for its whole life. A submission waits in the class `ROUTER`; the worker that accepts it
moves it to a class of its own (`assigned`), runs it there, and its end is the caller's result.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, structs

from reefknot.core.time import Moment
from reefknot.errors import IllegalMoveError
from reefknot.queue.model.admission import Arrival
from reefknot.queue.model.notes import Noted, Notes
from reefknot.queue.model.submission import EXPIRED, OVERDUE, Stage

CRASH_LIMIT = 3
LONGEST_HISTORY = 100
SCHEDULED = "scheduled"
"""The reason of a submission that was made for later, until a router claims it at its due time."""
ROUTER = "router"
"""The resource class of submissions that no worker has accepted yet."""
INGEST = "ingest."
"""Before the name of a source: the resource class of its jobs, which are no assignments."""


def record_id(assignment_id: str, tenant_id: str | None) -> str:
    """
    The id of an assignment's record: unique among all tenants, as the assignment's id is within one.

    Without a tenant it is the assignment's id; with one it is `tenant|id`. No two pairs have the same record.
    """
    if tenant_id:
        return f"{tenant_id.replace('%', '%25').replace('|', '%7C')}|{assignment_id}"
    return f"|{assignment_id}" if "|" in assignment_id else assignment_id


def assignment_and_tenant(record: str) -> tuple[str, str | None]:
    """The assignment's id and its tenant: the inverse of `record_id`."""
    tenant, bar, name = record.partition("|")
    if not bar:
        return record, None
    return name, tenant.replace("%7C", "|").replace("%25", "%") or None


def step_key(record: str, generation: int) -> str:
    """The idempotency key that a step gets: the same in all attempts of a run, a new one after a requeue."""
    return f"{record}/{generation}"


class WorkState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"
    DISCARDED = "discarded"


_S = WorkState
MOVES: dict[WorkState, frozenset[WorkState]] = {
    _S.PENDING: frozenset({_S.RUNNING, _S.CANCELLED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.SUCCEEDED, _S.FAILED, _S.PENDING, _S.QUARANTINED, _S.CANCELLED}),
    _S.FAILED: frozenset({_S.PENDING, _S.QUARANTINED}),
    _S.QUARANTINED: frozenset({_S.PENDING, _S.DISCARDED}),
    _S.SUCCEEDED: frozenset(),
    _S.CANCELLED: frozenset({_S.PENDING}),
    _S.DISCARDED: frozenset(),
}

# Nothing more happens by itself, and no person has to act.
ENDED = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.DISCARDED})


class Budget(Struct, frozen=True, gc=False, array_like=True):
    """The cost of retrying so far. Cleared when the work ends."""

    attempts: int = 0
    failure_type: str | None = None
    first_attempt_at: int | None = None
    last_attempt_at: int | None = None
    total_delay_ms: int = 0
    trigger: str | None = None
    last_delay: float = 0.0
    """The wait before the next attempt as it was decided, in seconds."""
    progress: int = 0
    """How far the work had come when it last failed: a number that grows, such as that of the pages kept."""


NO_BUDGET = Budget()


class HistoryEntry(Struct, frozen=True, gc=False, array_like=True):
    """An entry of the history: what happened, when, why, and by whom."""

    at: int
    what: str
    why: str = ""
    who: str = ""
    ran_ms: int = 0  # how long the attempt that this ended had run


class Extra(Struct, frozen=True, gc=False, omit_defaults=True):
    """Fields that only some work has. The record is stored as a JSON object, empty for most."""

    notes: Noted | None = None
    """What its step has said of itself."""

    held_at: int = 0
    """Since when it waits at its router for a limit or a pause (ms UTC): that time is not counted."""
    # Follow-ups: see `reefknot.queue.model.follow_ups`.
    parent: str = ""
    """The record whose step, or whose gather, this follows."""
    depth: int = 0
    """The number of follow-ups in a row up to this one."""
    children: int = 0
    """The number of its follow-ups and of its gather's children that are stored."""
    gathers: int = 0
    """The number of children that it waits for."""
    after: tuple[str, ...] = ()
    """The records of other jobs that it waits for."""
    over: int = 0
    """How many of the first that it waits for have succeeded."""
    return_failures: bool = False
    """Whether it runs although some of them have failed."""
    root: str = ""
    """The record that its children's ids are derived from, if that is an earlier version of it."""
    # Unique work: see `reefknot.queue.model.unique`.
    unique: str = ""
    """Its key, of which a tenant has one job at a time."""
    unique_ms: int = 0
    """How long after its creation it holds the key although it has ended."""

    @property
    def waits(self) -> int:
        """The number of other jobs that the work waits for, or has waited for."""
        return self.gathers + len(self.after)


NO_EXTRA = Extra()


class WorkItem(Struct, frozen=True, gc=False, array_like=True):
    """A piece of work as it is stored. `failure` and `result` are JSON text; times are milliseconds UTC."""

    id: str  # see `record_id`
    kind: str
    resource_class: str = "cpu"
    source: str = ""
    tenant_id: str | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    priority: int = 0
    state: WorkState = WorkState.PENDING
    due_at: int = 0
    deadline_at: int | None = None
    created_at: int = 0
    updated_at: int = 0
    generation: int = 0
    attempts: int = 0
    snoozes: int = 0
    interruptions: int = 0
    crashes: int = 0
    owner: str = ""
    fence: int = 0
    lease_until: int = 0
    lease_ms: int = 0
    reason: str = ""
    failure: str | None = None
    result: str | None = None
    budget: Budget = NO_BUDGET
    history: tuple[HistoryEntry, ...] = ()
    admission: str = ""
    """The terms of the worker's admission, as JSON text: see `reefknot.queue.worker.records.AdmittedAs`."""
    pool: str = ""
    """The resource class whose slots run it, independent of its holder: `io` for `router` and for `io@worker-1`."""
    payload: bytes = b""
    extra: Extra = NO_EXTRA

    @property
    def family_id(self) -> str:
        """The record that the ids of its children are derived from."""
        return self.extra.root or self.id

    @property
    def assignment_id(self) -> str:
        """The assignment's own id, unique within its tenant."""
        return assignment_and_tenant(self.id)[0]


class WorkDone(Struct, frozen=True, gc=False):
    """Report of success."""

    result: str | None = None


class WorkFailed(Struct, frozen=True, gc=False):
    """Report of a final failure on which no person has to act."""

    failure: str | None = None
    result: str | None = None
    reason: str = ""
    ran: bool = True
    """False: its time was over before the step ran again. Spends no attempt."""


class WorkRejected(Struct, frozen=True, gc=False):
    """Report of an end without a run: no worker accepted the item, or its deadline was over before."""

    result: str | None = None
    reason: str = ""


class WorkCancelled(Struct, frozen=True, gc=False):
    """Report of a worker with a store of its own that the item was cancelled there."""

    result: str | None = None
    reason: str = ""


class TryAgain(Struct, frozen=True, gc=False):
    """Report of a failure after which the item is due again at `due_at`. Spends an attempt."""

    due_at: int
    failure: str | None = None
    failure_type: str | None = None
    delay_ms: int = 0
    reason: str = ""
    began_at: int | None = None
    """When the attempt began; the time budget counts from the first one's beginning."""
    delay: float = 0.0
    """The wait as it was decided, in seconds."""
    progress: int = 0
    """See `Budget.progress`; progress since the last failure gives the item its full number of attempts again."""


class Snooze(Struct, frozen=True, gc=False):
    """
    Report that the item was postponed, perhaps by a `failure`. Spends no attempt; `waited_ms` do not count as its time.
    """

    due_at: int
    reason: str = ""
    waited_ms: int = 0
    failure_type: str | None = None
    """The type of the failure that postponed it, if one did."""
    failure: str | None = None


class Waits(Struct, frozen=True, gc=False):
    """
    Report of a router that other work is not over which the item waits for: it is looked at again. Spends nothing.
    """

    due_at: int
    over: int
    """See `Extra.over`."""


class Interrupted(Struct, frozen=True, gc=False):
    """Report of an owner that shuts down: the item is due for others at once."""

    reason: str = "shutdown"


class Returned(Struct, frozen=True, gc=False):
    """
    Report of a worker that cannot run the item: it is a submission again, for a worker that can. Spends no attempt.
    """

    reason: str
    is_held: bool = False
    """Whether it waits for a limit or a pause, which is not counted as its time."""


class Quarantine(Struct, frozen=True, gc=False):
    """Report of a failure after which only a person can requeue the item."""

    reason: str
    failure: str | None = None
    result: str | None = None


Settled = (
    WorkDone
    | WorkFailed
    | WorkRejected
    | WorkCancelled
    | TryAgain
    | Snooze
    | Waits
    | Interrupted
    | Returned
    | Quarantine
)


def moved(item: WorkItem, state: WorkState) -> WorkState:
    """The new state, if the table allows the move."""
    if state not in MOVES[item.state]:
        raise IllegalMoveError(old=item.state, new=state)
    return state


def accepted(item: WorkItem, now: Moment, *, is_claimed: bool = False) -> WorkItem:
    """
    A new item as it enters the queue, whatever state the caller had it in.

    A submission that is due later is scheduled, unless its router claims it at once, or a worker had accepted it
    before: then it only waits for its retry.
    """
    is_later = item.due_at > now.wall or item.extra.waits > 0
    is_scheduled = item.resource_class == ROUTER and is_later and not (is_claimed or item.admission)
    return WorkItem(
        id=item.id,
        kind=item.kind,
        resource_class=item.resource_class,
        source=item.source,
        tenant_id=item.tenant_id or None,
        correlation_id=item.correlation_id,
        trace_id=item.trace_id,
        priority=item.priority,
        due_at=item.due_at or now.wall,
        deadline_at=item.deadline_at,
        created_at=now.wall,
        updated_at=now.wall,
        reason=SCHEDULED if is_scheduled else "",
        history=(HistoryEntry(item.due_at, "due", SCHEDULED),) if is_scheduled else (),
        admission=item.admission,
        pool=item.pool or pool_of(item.resource_class),
        payload=item.payload,
        extra=item.extra,
    )


def pool_of(resource_class: str) -> str:
    """The resource class without the worker: `io` for `io@worker-1`."""
    return resource_class.rpartition("@")[0] or resource_class


def stage_of(item: WorkItem) -> Stage | None:
    """The stage at which an open item is counted; None for one that has ended."""
    if item.state not in (WorkState.PENDING, WorkState.RUNNING):
        return None
    if item.resource_class == ROUTER:
        is_scheduled = item.state is WorkState.PENDING and item.reason == SCHEDULED
        return Stage.SCHEDULED if is_scheduled else Stage.SUBMITTED
    return Stage.QUEUED if item.state is WorkState.PENDING else Stage.RUNNING


def arrival_of(item: WorkItem, now: Moment) -> Arrival:
    """A new item as admission sees it."""
    deadline = None if item.deadline_at is None else float(item.deadline_at - now.wall)
    return Arrival(item.priority, deadline, item.tenant_id or "")


def worker_class(resource_class: str, worker_id: str) -> str:
    """The class of one worker's own queue: `cpu@worker-1`."""
    return f"{resource_class}@{worker_id}"


def worker_of(resource_class: str) -> str:
    """The worker whose queue a class is; empty for any other class. A worker's id has no `@` in it."""
    return resource_class.rpartition("@")[2] if "@" in resource_class else ""


def is_workers(item: WorkItem) -> bool:
    """Whether a worker has accepted the item: only then its class names one."""
    return "@" in item.resource_class


def is_ingestion(item: WorkItem) -> bool:
    """Whether the item is a job of a source, and not an assignment."""
    return item.resource_class.startswith(INGEST) and not is_workers(item)


def is_unassigned(item: WorkItem) -> bool:
    """Whether the item is an open submission: accepted by no worker, and held by a router or unclaimed."""
    return item.resource_class == ROUTER and item.state in (WorkState.PENDING, WorkState.RUNNING)


def assigned(item: WorkItem, to: WorkItem, now: Moment) -> WorkItem:
    """
    The submission `item`, moved to the class of `to` with what admission changed. Its router's claim is void.

    Attempts and crashes at an earlier worker stay with it.
    """
    extra, budget, held_at = item.extra, item.budget, item.extra.held_at
    if held_at:
        extra = structs.replace(extra, held_at=0)
        began = budget.first_attempt_at
        moved_on = None if began is None else began + max(0, now.wall - held_at)
        budget = structs.replace(budget, first_attempt_at=moved_on)
    return structs.replace(
        item,
        extra=extra,
        budget=budget,
        resource_class=to.resource_class,
        pool=pool_of(to.resource_class),
        state=WorkState.PENDING,
        due_at=to.due_at,
        admission=to.admission,
        updated_at=now.wall,
        owner="",
        lease_until=0,
        reason=item.reason if held_at else "",
        payload=item.payload or to.payload,
    )


def recalled(item: WorkItem, now: Moment) -> WorkItem:
    """An item of a worker that is gone or cannot run it, as a submission again; `admission` refers to that worker."""
    return structs.replace(item, resource_class=ROUTER, admission=item.admission or "{}", updated_at=now.wall)


def transferred(item: WorkItem, resource_class: str, now: Moment, *, due_at: int | None = None) -> WorkItem:
    """The pending item in another class, due at `due_at` or at its former due time."""
    pool, due = pool_of(resource_class), item.due_at if due_at is None else due_at
    return structs.replace(item, resource_class=resource_class, pool=pool, due_at=due, updated_at=now.wall)


def accepted_for_worker(known: WorkItem | None, item: WorkItem, now: Moment) -> WorkItem | None:
    """
    The record of an assignment that a worker accepts; `known` is what the store has under its id.

    An open submission moves to the worker's class, if it is the same one. None: the id is taken.
    """
    if known is None:
        return accepted(item, now)
    same = known.kind == item.kind and known.correlation_id == item.correlation_id
    return assigned(known, item, now) if same and is_unassigned(known) else None


def started(item: WorkItem, *, owner: str, fence: int, lease_ms: int, now: Moment) -> WorkItem:
    """The item as claimed by an owner, for one attempt."""
    return structs.replace(
        item,
        state=moved(item, WorkState.RUNNING),
        owner=owner,
        fence=fence,
        lease_until=now.steady + lease_ms,
        lease_ms=lease_ms,
        updated_at=now.wall,
    )


def visible_state(item: WorkItem, now: Moment, *, gone: Collection[str] = ()) -> WorkState:
    """
    The state of an item as people see it; `gone` are owners whose processes have ended.

    A claim is not yet an attempt: a submission that a router holds waits for a worker. Work whose owner is gone waits
    as well, for the claim that takes it back. A lease of an earlier boot ends later than any lease of this boot can.
    """
    if item.state is not WorkState.RUNNING:
        return item.state
    is_leased = now.steady < item.lease_until <= now.steady + item.lease_ms
    runs = item.resource_class != ROUTER and is_leased and item.owner not in gone
    return WorkState.RUNNING if runs else WorkState.PENDING


def is_over(item: WorkItem) -> bool:
    """Whether the item has its result: ended, or in quarantine until a person requeues it."""
    return item.state in ENDED or item.state is WorkState.QUARANTINED


def holds(item: WorkItem | None, *, owner: str, fence: int) -> bool:
    """Whether this owner, under this fence, still runs the item."""
    return item is not None and item.state is WorkState.RUNNING and item.owner == owner and item.fence == fence


def settle(item: WorkItem, settled: Settled, now: Moment) -> WorkItem:
    """The item after its owner reported. Whether it *is* the owner is asked with `holds`, before."""
    match settled:
        case WorkDone(result=result):
            return _ended(item, WorkState.SUCCEEDED, now, attempts=item.attempts + 1, result=result)
        case WorkFailed(failure=failure, result=result, reason=reason, ran=ran):
            noted, number = _with_history(item, now, "failed", reason), item.attempts + ran
            return _ended(noted, WorkState.FAILED, now, attempts=number, result=result, failure=failure, reason=reason)
        case WorkRejected(result=result, reason=reason):
            noted = _with_history(item, now, "rejected", reason)
            return _ended(noted, WorkState.FAILED, now, attempts=item.attempts, result=result, reason=reason)
        case WorkCancelled(result=result, reason=reason):
            noted = _with_history(item, now, "cancelled", reason)
            return _ended(noted, WorkState.CANCELLED, now, attempts=item.attempts, result=result, reason=reason)
        case TryAgain():
            return _again(item, settled, now)
        case Snooze(due_at=due_at, reason=reason, waited_ms=waited_ms, failure_type=kind, failure=failure):
            began = item.budget.first_attempt_at
            moved_on = None if began is None else began + waited_ms
            kind = kind or item.budget.failure_type
            budget = structs.replace(item.budget, first_attempt_at=moved_on, failure_type=kind)
            put_off = structs.replace(item, snoozes=item.snoozes + 1, failure=failure or item.failure, budget=budget)
            return _waiting(put_off, now, due_at=due_at, reason=reason)
        case Waits(due_at=due_at, over=over):
            looked = structs.replace(item, extra=structs.replace(item.extra, over=over))
            return _waiting(looked, now, due_at=due_at, reason=SCHEDULED)
        case Interrupted(reason=reason):
            back = structs.replace(item, interruptions=item.interruptions + (item.resource_class != ROUTER))
            return _waiting(back, now, due_at=min(item.due_at, now.wall), reason=reason)
        case Returned(reason=reason, is_held=is_held):
            extra = structs.replace(item.extra, held_at=now.wall) if is_held else item.extra
            back = structs.replace(recalled(item, now), extra=extra)
            return _waiting(back, now, due_at=min(item.due_at, now.wall), reason=reason)
        case _:
            spent = item if item.resource_class == ROUTER else _attempted(item, now)  # a router runs nothing
            noted = _with_history(spent, now, "quarantined", settled.reason)
            return _aside(noted, now, reason=settled.reason, failure=settled.failure, result=settled.result)


def with_notes(item: WorkItem, notes: Notes | None, now: Moment) -> WorkItem:
    """The running item with what its step has said."""
    if notes is None:
        return item
    known = item.extra.notes or Noted()
    return _noted(item, known.after(notes, now, began_at=item.updated_at))


def _noted(item: WorkItem, noted: Noted) -> WorkItem:
    return structs.replace(item, extra=structs.replace(item.extra, notes=noted))


def lease_ran_out(item: WorkItem, now: Moment, *, crash_limit: int = CRASH_LIMIT) -> WorkItem:
    """
    The item after its owner vanished: back in the queue, or in quarantine when that has happened too often.

    Crashes since its last checkpoint count: a step that gets on is not what kills its processes.
    The time budget counts from the first start, however that attempt ended: running work was last changed by its claim.
    A router that vanishes says nothing about the work: neither a crash nor a start is counted.
    """
    if item.resource_class == ROUTER:
        lost = _with_history(item, now, "crashed", item.owner)
        return _waiting(lost, now, due_at=min(item.due_at, now.wall), reason="lease ran out")
    began = item.updated_at if item.budget.first_attempt_at is None else item.budget.first_attempt_at
    notes, before = item.extra.notes, item.crashes
    if notes is not None and notes.checkpoints > notes.at_crash:
        item, before = _noted(item, structs.replace(notes, at_crash=notes.checkpoints)), 0
    lost = structs.replace(item, crashes=before + 1, budget=structs.replace(item.budget, first_attempt_at=began))
    crashed = _with_history(lost, now, "crashed", item.owner)
    if crashed.crashes >= crash_limit:
        return _aside(crashed, now, reason=vanished_reason(crashed.crashes), failure=item.failure, result=None)
    return _waiting(crashed, now, due_at=min(item.due_at, now.wall), reason="lease ran out")


def vanished_reason(crashes: int) -> str:
    """The quarantine reason of an item whose owners vanished this many times."""
    return f"its owner vanished {crashes} times"


def cancel(item: WorkItem, now: Moment, *, reason: str, who: str) -> WorkItem:
    """The item after a person or its deadline ended it. A running attempt counts, and can no longer report."""
    to = WorkState.FAILED if reason in (EXPIRED, OVERDUE) else WorkState.CANCELLED
    ran_ms = runs_now(item) * max(0, now.wall - item.updated_at)
    noted = _with_history(item, now, to.value, reason, who, ran_ms)
    return _ended(noted, to, now, attempts=attempts_begun(item), reason=reason)


def runs_now(item: WorkItem) -> bool:
    """Whether an attempt of the item was begun and has not ended. It began with the claim, the item's last change."""
    return item.state is WorkState.RUNNING and item.resource_class != ROUTER


def attempts_begun(item: WorkItem) -> int:
    """The attempts that ended, and the one that runs."""
    return item.attempts + runs_now(item)


def is_suspect(item: WorkItem) -> bool:
    """Whether the item may have killed the process that ran it; a worker runs it alone."""
    return item.crashes > 0 and item.resource_class != ROUTER


def number_together(suspects: Sequence[bool]) -> int:
    """The number of items of a claim, in its order, that may run at the same time; a suspect runs only by itself."""
    return max(1, suspects.index(True)) if True in suspects else len(suspects)


def can_retry(item: WorkItem) -> bool:
    """Whether an operator may run the item again: it failed, timed out, was cancelled, or is in quarantine."""
    return item.state in (WorkState.FAILED, WorkState.CANCELLED, WorkState.QUARANTINED)


def requeued_at(item: WorkItem) -> int:
    """The time at which a person last requeued the item (ms UTC); 0 if never."""
    return next((one.at for one in reversed(item.history) if one.what == "requeued"), 0)


def requeue(item: WorkItem, now: Moment, *, who: str, why: str = "") -> WorkItem:
    """The item out of quarantine or after its end: under its own id, with a fresh budget and all of its time."""
    noted = _with_history(item, now, "requeued", why or item.reason, who)
    return structs.replace(
        noted,
        state=moved(item, WorkState.PENDING),
        generation=item.generation + 1,
        attempts=0,
        snoozes=0,
        interruptions=0,
        crashes=0,
        due_at=now.wall,
        deadline_at=deadline_again(item, now),
        updated_at=now.wall,
        reason="",
        failure=None,
        result=None,
        budget=NO_BUDGET,
    )


def deadline_again(item: WorkItem, now: Moment) -> int | None:
    """The deadline of an item that has all of its time again."""
    due_at = next((one.at for one in item.history if one.what == "due"), 0)
    began = requeued_at(item) or max(item.created_at, due_at)
    return None if item.deadline_at is None else now.wall + item.deadline_at - began


def discard(item: WorkItem, now: Moment, *, who: str, reason: str) -> WorkItem:
    """The item after an operator discarded it."""
    noted = _with_history(item, now, "discarded", reason, who)
    return structs.replace(noted, state=moved(item, WorkState.DISCARDED), updated_at=now.wall)


def _attempted(item: WorkItem, now: Moment, began_at: int | None = None) -> WorkItem:
    budget = structs.replace(
        item.budget,
        attempts=item.budget.attempts + 1,
        first_attempt_at=item.budget.first_attempt_at or began_at or now.wall,
        last_attempt_at=now.wall,
    )
    return structs.replace(item, attempts=item.attempts + 1, budget=budget)


def attempts_since_progress(item: WorkItem, progress: int) -> int:
    """The attempts that count for an item that has come this far: none of those before its latest progress."""
    return 0 if progress > item.budget.progress else item.attempts


def _again(item: WorkItem, again: TryAgain, now: Moment) -> WorkItem:
    counted = attempts_since_progress(item, again.progress)
    budget = structs.replace(item.budget, attempts=min(item.budget.attempts, counted))
    spent = _attempted(structs.replace(item, attempts=counted, budget=budget), now, again.began_at)
    failed = structs.replace(
        _with_history(spent, now, "retry", again.reason),
        state=moved(item, WorkState.FAILED),
        failure=again.failure,
        budget=structs.replace(
            spent.budget,
            failure_type=again.failure_type,
            total_delay_ms=spent.budget.total_delay_ms + again.delay_ms,
            trigger=again.reason or None,
            last_delay=again.delay,
            progress=max(again.progress, item.budget.progress),
        ),
    )
    return _waiting(failed, now, due_at=again.due_at, reason=again.reason)


def _with_history(item: WorkItem, now: Moment, what: str, why: str = "", who: str = "", ran_ms: int = 0) -> WorkItem:
    new = HistoryEntry(now.wall, what, why, who, ran_ms)
    return structs.replace(item, history=(*item.history, new)[-LONGEST_HISTORY:])


def _released(item: WorkItem, state: WorkState, now: Moment, reason: str, **more: Any) -> WorkItem:
    """The item in another state, with no owner."""
    state = moved(item, state)
    return structs.replace(item, state=state, updated_at=now.wall, owner="", lease_until=0, reason=reason, **more)


def _waiting(item: WorkItem, now: Moment, *, due_at: int, reason: str) -> WorkItem:
    return _released(item, WorkState.PENDING, now, reason, due_at=due_at)


def _ended(item: WorkItem, state: WorkState, now: Moment, *, reason: str = "", **ends: Any) -> WorkItem:
    """The item with its attempts, its result and its failure, where there are any, no owner, and no budget any more."""
    return structs.replace(item, state=moved(item, state), updated_at=now.wall, reason=reason, **(_ENDED | ends))


_ENDED = {"owner": "", "lease_until": 0, "budget": NO_BUDGET, "result": None, "failure": None}


def _aside(item: WorkItem, now: Moment, *, reason: str, failure: str | None, result: str | None) -> WorkItem:
    """The item in quarantine: its attempts stay visible, its budget is that of a new job."""
    return _released(item, WorkState.QUARANTINED, now, reason, failure=failure, result=result, budget=NO_BUDGET)
