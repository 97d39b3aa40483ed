"""
The client: submits work through a store, finds jobs by their ids, and waits for their results.

A client talks to the store alone. A submission is stored whether a router is running yet or not, and its result stays
in the store until it is read, by the process that submitted it or by another one.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Any, Protocol, Unpack, cast

from msgspec import Struct

from reefknot.audit.assignments import ended_event
from reefknot.audit.journal import Journal, about_item, envelope
from reefknot.audit.model.event import OperatorAction, Requeued
from reefknot.audit.port import AuditEntry
from reefknot.core import checks
from reefknot.core.canonical import canonical, record_fingerprint
from reefknot.core.clock import Clock
from reefknot.errors import (
    KeyConflictError,
    NotJsonError,
    OperationError,
    ParameterError,
    ParameterTypeError,
    QueueFullError,
    ResultPendingError,
    UnknownJobError,
)
from reefknot.queue.family import open_family
from reefknot.queue.model.arguments import (
    ITEM_FIELDS,
    OPTIONS,
    SubmitItem,
    SubmitOptions,
    check_names,
    due_time,
    validated,
    written,
)
from reefknot.queue.model.follow_ups import after_ids
from reefknot.queue.model.message_schema import written_assignment
from reefknot.queue.model.messages import Cancel, ExecAssignment, ExecResult, InvalidMessage, encode
from reefknot.queue.model.results import answer_of, cancel_reason
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.transitions import Requeue, is_replaced, next_record
from reefknot.queue.model.unique import extra_of, unique_of
from reefknot.queue.model.work import WorkItem, assignment_and_tenant, is_ingestion, is_over, record_id, visible_state
from reefknot.queue.port.work_queue import Taken, WorkFilter
from reefknot.queue.router.pending import cancelled_event
from reefknot.queue.router.submissions import NewJob, Submissions
from reefknot.runtime.seeds import new_id
from reefknot.stores.port import Store

DEFAULT_WAIT = 60.0
LONGEST_REASON = 500
MOST_AT_ONCE = 10_000
"""Jobs of one `submit_many`: they are stored in one transaction, for which other writers wait."""

_ITEMS = "a list of mappings with the arguments of submit, or of pairs (job_type, inputs)"

HasRouter = Callable[[Store], Awaitable[bool]]
"""Whether a router is running over a store."""

# ---- one job ---------------------------------------------------------------------------------------------------------


class _Patience(Struct, frozen=True):
    """The time for which the end of a job is waited for by default, and whether the job has a deadline of its own."""

    seconds: float
    has_deadline: bool


def _patience_for(item: WorkItem, wall: float) -> _Patience:
    """The default wait for a job that was found by its id."""
    if item.deadline_at is not None:
        return _Patience(max(0.0, item.deadline_at / 1000 - wall) + 1.0, True)
    return _Patience(DEFAULT_WAIT + max(0.0, item.due_at / 1000 - wall), False)


class Handle:
    """
    A job by its id: its state, its result once there is one, and ways to cancel it and to run it again.

    `submit` returns one for the job that it made, and `client.job(id)` one for a job of any process.
    """

    def __init__(
        self,
        client: "Client",
        assignment_id: str,
        tenant_id: str | None = None,
        *,
        is_new: bool = False,
        patience: _Patience | None = None,
    ) -> None:
        self.assignment_id = assignment_id
        self.tenant_id = tenant_id
        self.is_new = is_new
        """Whether this submission created the job. If not, one with this id or key existed and was left unchanged."""
        self._client = client
        self._record_id = record_id(assignment_id, tenant_id)
        self._patience = patience
        """Known from the submission; None for a job that has to be read first."""

    async def result(self, timeout: float | timedelta | None = None) -> ExecResult:
        """
        The result, waited for at most `timeout` seconds (default: the assignment's deadline and a second, else a
        minute).

        Even if processes die in the meantime, an assignment with a deadline has its result at most a second after it.
        `UnknownJobError` at once for an id that no job has, `ResultPendingError` when the time is over.
        """
        item = await self._ended(timeout)
        answer = None if is_ingestion(item) else answer_of(item)
        if answer is None:
            text = f"{self.assignment_id} is a job of a source, and has no result of a step; wait() tells how it ended"
            raise OperationError(text, "conflict")
        return answer

    async def wait(self, timeout: float | timedelta | None = None) -> str:
        """
        The state at the job's end, waited for as `result` does: `succeeded`, `failed`, `cancelled`, `quarantined`, …

        A job that failed is no error here.
        """
        return (await self._ended(timeout)).state.value

    async def _ended(self, timeout: float | timedelta | None) -> WorkItem:
        """The job once it has ended."""
        given = None if timeout is None else checks.seconds("timeout", timeout, or_zero=True, most=inf)
        patience = self._patience
        if patience is None:
            found = await self._found()
            if is_over(found):
                return found
            patience = _patience_for(found, self._client.submissions.wall())
        seconds = patience.seconds if given is None else given
        client = self._client
        wait = client.submissions.ended_by_deadline if patience.has_deadline else client.store.work.ended
        item = await wait(self._record_id, seconds)
        if item is None:
            raise ResultPendingError(assignment_id=self.assignment_id, seconds=seconds)
        return item

    async def _found(self) -> WorkItem:
        item = await self._client.submissions.find(self._record_id)
        if item is None:
            raise UnknownJobError(self.assignment_id, tenant_id=self.tenant_id)
        return item

    async def latest(self) -> "Handle":
        """
        The job that runs in place of this one: its latest version, after a requeue with an edited payload; else itself.

        An edited requeue discards `order-7`, and `order-7~2` runs. An id that no job has stays as it is.
        """
        record = self._record_id
        item = await self._client.submissions.find(record)
        while item is not None and is_replaced(item):
            record = next_record(record)
            item = await self._client.submissions.find(record)
        return self if record == self._record_id else self._client.job(*assignment_and_tenant(record))

    async def status(self) -> str:
        """The state as `job list` shows it: `pending`, `running`, `succeeded`, …; `unknown` for no such job."""
        from reefknot.runtime.processes import owner_is_gone

        item = await self._client.submissions.find(self._record_id)
        if item is None:
            return "unknown"
        now = self._client.store.moment()
        return visible_state(item, now, gone=(item.owner,) if owner_is_gone(item.owner) else ()).value

    async def cancel(self, reason: str = "", *, tree: bool = False) -> None:
        """
        Cancel it, whether a router is running or not. Its result then says `cancelled`.

        With `tree`, so are the jobs that follow it or wait for it, and those that follow these.
        """
        found = await self._found()
        if not tree:
            await self._client.cancel(self.assignment_id, reason, tenant_id=self.tenant_id)
            return
        for item in await open_family(self._client.store.work, found):
            await self._client.cancel(item.assignment_id, reason, tenant_id=item.tenant_id)

    async def retry(self, reason: str = "") -> None:
        """
        Run it again, as `reefknot job retry` does: under its own id, with a fresh budget, as soon as a router has it.

        A job that failed, timed out, was cancelled, or is in quarantine may; any other is an `OperationError`.
        """
        item, store = await self._found(), self._client.store
        wall, who = self._client.submissions.wall(), "caller"
        reason = checks.text("reason", reason)[:LONGEST_REASON]
        why = f"retried by {who}{f': {reason}' if reason else ''}"
        about, subject = about_item(item, wall), item.assignment_id
        action = OperatorAction(**about, actor=who, action="retry", subject=subject, details={"reason": why})
        again = Requeued(**about, reason=why, generation=item.generation + 1)
        events = Journal(None).entries([action, again])
        if not await store.work.change(WorkFilter(ids=(item.id,)), Requeue(who, reason), events=events):
            may = "only one that failed, timed out, was cancelled or is in quarantine runs again"
            raise OperationError(f"{self.assignment_id} is {await self.status()}: {may}", "conflict")


# ---- the client ------------------------------------------------------------------------------------------------------


class Client:
    """Submits work through a store. `async with rk.connect("sqlite:state.db") as client:`"""

    def __init__(self, store: Store, clock: Clock, *, size: int = 1000, has_router: HasRouter | None = None) -> None:
        """
        `has_router` tells whether a router is running; without it, one is assumed.

        `size` bounds what may wait, for each resource class, until a router says how much may.
        """
        self.store = store
        self.submissions = Submissions(
            store.work, clock, rules=SubmissionRules(size), journal=Journal(store.audit), control=store.control
        )
        self._has_router = has_router

    async def submit(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> Handle:
        """
        Submit one step. An accepted step is stored; a full queue raises `QueueFullError` with `retry_after`.

        The options are those of `SubmitOptions`: `deadline`, `timeout`, `attempt_timeout`, `retries`, `priority`,
        `resource_class`, `assignment_id`, `tenant_id`, `trace_id`, `delay`, `at`, `after`, `unique`, `for_`.
        """
        job = self._written(job_type, inputs, options)
        await self.submissions.check_known(job.extra.after)
        kept = await self.submissions.submit(job.assignment, due_at=job.due_at, extra=job.extra)
        return self._handle(job.assignment, job.due_at, kept)

    async def submit_many(
        self, items: Iterable[SubmitItem | tuple[str, Mapping[str, Any] | None]]
    ) -> list[Handle | QueueFullError | KeyConflictError]:
        """
        Submit many steps in one transaction, each a mapping of the arguments of `submit`, or `(job_type, inputs)`.

        Returns an answer for each, in their order: its handle, the `QueueFullError` that refused it, or the
        `KeyConflictError` of an id that has another job. An invalid item raises a `ParameterError` with its place, such
        as `items[3].deadline`, before anything is stored.
        """
        jobs = self._written_items(items)
        here = {one.assignment.record_id for one in jobs}
        await self.submissions.check_known([name for one in jobs for name in one.extra.after if name not in here])
        answers = await self.submissions.submit_many(jobs) if jobs else []
        return [
            answer if isinstance(answer, Exception) else self._handle(one.assignment, one.due_at, answer)
            for one, answer in zip(jobs, answers, strict=True)
        ]

    def job(self, assignment_id: str, tenant_id: str | None = None) -> Handle:
        """The job with this id, from whatever process. Nothing is read yet: its calls refuse an unknown id."""
        checks.text("assignment_id", assignment_id, "the id of a job")
        if tenant_id is not None:
            checks.text("tenant_id", tenant_id, "the name of a tenant, or None")
        return Handle(self, assignment_id, tenant_id)

    async def hand_in(
        self,
        assignment: ExecAssignment | Mapping[str, Any],
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        unique: str | None = None,
        for_: float | timedelta | None = None,
    ) -> Handle:
        """
        Submit an assignment as it is: a record, or its fields as a mapping, as a line of a file has them.

        In a mapping the ids may be left out, and an unknown field is refused with the one that may be meant. The other
        options are those of `submit`.
        """
        given = assignment if isinstance(assignment, ExecAssignment) else _from_fields(assignment)
        checked, due_at = validated(given)[0], due_time(delay, at, self.submissions.wall())
        extra = extra_of((), unique_of({"unique": unique, "for_": for_}))
        return self._handle(checked, due_at, await self.submissions.submit(checked, due_at=due_at, extra=extra))

    def _written(self, job_type: str, inputs: Mapping[str, Any] | None, options: SubmitOptions) -> NewJob:
        """The job of a caller's arguments, checked."""
        check_names(options, OPTIONS)
        assignment = written(job_type, inputs, options, new_id())
        due_at = due_time(options.get("delay"), options.get("at"), self.submissions.wall())
        return NewJob(assignment, due_at, extra_of(after_ids(options.get("after"), assignment), unique_of(options)))

    def _written_items(self, items: Iterable[Any]) -> list[NewJob]:
        """The assignments of `submit_many`, or the first mistake in them with its place."""
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            raise ParameterTypeError("items", items, _ITEMS)
        jobs: list[NewJob] = []
        first: dict[str, int] = {}
        for place, item in enumerate(items):
            if place >= MOST_AT_ONCE:
                raise ParameterError(
                    "items", f"more than {MOST_AT_ONCE}", f"at most {MOST_AT_ONCE}; give them in parts"
                )
            try:
                job = self._written_item(item)
                assignment = job.assignment
                known = first.setdefault(assignment.record_id, place)
                if known < place and not _is_same_job(jobs[known].assignment, assignment):
                    text = f"an id of its own; items[{known}] has it with another job"
                    raise ParameterError("assignment_id", assignment.assignment_id, text)
            except ParameterError as error:
                error.parameter = f"items[{place}].{error.parameter}" if error.parameter else f"items[{place}]"
                error.args = (f"{error.parameter}={error.problem}",)
                raise
            except NotJsonError as error:
                raise NotJsonError(f"items[{place}].{error.path}", error.problem) from None
            jobs.append(job)
        for place, job in enumerate(jobs):
            later = next((name for name in job.extra.after if first.get(name, -1) >= place), None)
            if later is not None:
                text = (
                    f"an earlier item: items[{first[later]}] comes later, and jobs that wait for each other are a cycle"
                )
                raise ParameterError(f"items[{place}].after", assignment_and_tenant(later)[0], text)
        return jobs

    def _written_item(self, item: Any) -> NewJob:
        if isinstance(item, tuple) and len(item) == 2:
            return self._written(item[0], item[1], {})
        if not isinstance(item, Mapping):
            raise ParameterTypeError("", item, "a mapping with the arguments of submit, or a pair (job_type, inputs)")
        fields = dict(item)
        check_names(fields, ITEM_FIELDS)
        if "job_type" not in fields:
            raise ParameterError("job_type", None, "the type of a step; it is missing")
        options = cast("SubmitOptions", {name: fields[name] for name in fields if name in OPTIONS})
        return self._written(fields["job_type"], fields.get("inputs"), options)

    def _handle(self, checked: ExecAssignment, due_at: int, is_new: bool | Taken) -> Handle:
        if isinstance(is_new, Taken):
            return Handle(self, *assignment_and_tenant(is_new.id))
        deadline = checked.options.deadline_ms
        seconds = DEFAULT_WAIT if deadline is None else deadline / 1000 + 1.0
        seconds += max(0.0, due_at / 1000 - self.submissions.wall())
        patience = _Patience(seconds, deadline is not None)
        return Handle(self, checked.assignment_id, checked.tenant_id, is_new=is_new, patience=patience)

    async def cancel(
        self,
        assignment_id: str,
        reason: str = "",
        *,
        tenant_id: str | None = None,
        who: str = "caller",
        events: Sequence[AuditEntry] = (),
    ) -> bool:
        """Cancel the job, wherever it is. True when that is done, False when a router was asked to do it."""
        cancel = Cancel(assignment_id, reason or None, tenant_id)
        return await cancel_assignment(
            self.submissions, self.store, cancel, has_router=self._has_router, who=who, events=events
        )

    async def run(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> ExecResult:
        """Submit one step, with the options of `submit`, and wait for its result."""
        handle = await self.submit(job_type, inputs, **options)
        return await handle.result()


async def cancel_assignment(
    submissions: Submissions,
    store: Store,
    cancel: Cancel,
    *,
    has_router: HasRouter | None = None,
    who: str = "caller",
    events: Sequence[AuditEntry] = (),
) -> bool:
    """
    Cancel through the router that has the assignment, or in the store itself when no router has it. True: it is done.

    A router that starts later handles requests from before its start.
    """
    why, work_id = cancel_reason(cancel.reason), cancel.record_id
    item = await submissions.find(work_id)
    is_routed = item is None or not is_ingestion(item)
    if not is_routed or (has_router is not None and not await has_router(store)):
        wall = submissions.wall()
        about = envelope(wall=wall, tenant_id=cancel.tenant_id, work_id=cancel.assignment_id)
        entries = list(events) or Journal(None).entries([cancelled_event(about, why, who=who)])
        if item is not None:
            entries += Journal(None).entries([ended_event(item, wall, cancelled=why)])
        return await store.work.cancel(work_id, reason=why, who=who, events=entries)
    await store.control.post("cancel", target="router", body=encode(cancel).decode(), sender=who, events=events)
    return False


def _from_fields(fields: Mapping[str, Any]) -> ExecAssignment:
    """The assignment of a caller's mapping, or a `ParameterError` that names the field."""
    if not isinstance(fields, Mapping):
        raise ParameterTypeError("assignment", fields, "an ExecAssignment, or a mapping of its fields")
    canonical(dict(fields), "assignment")  # refuses what JSON cannot say, with its place
    found = written_assignment(fields, new_id(), new_id())
    if isinstance(found, InvalidMessage):
        raise ParameterError("assignment", fields, found.message)
    return found


def _is_same_job(one: ExecAssignment, other: ExecAssignment) -> bool:
    return record_fingerprint(one.job) == record_fingerprint(other.job)


# ---- for annotations -------------------------------------------------------------------------------------------------


class HandleLike(Protocol):
    """A job by its id, of a client or of a system under test."""

    assignment_id: str
    tenant_id: str | None
    is_new: bool

    async def result(self, timeout: float | timedelta | None = None) -> ExecResult: ...
    async def wait(self, timeout: float | timedelta | None = None) -> str: ...
    async def latest(self) -> "HandleLike": ...
    async def status(self) -> str: ...
    async def cancel(self, reason: str = "", *, tree: bool = False) -> None: ...
    async def retry(self, reason: str = "") -> None: ...


class ClientLike(Protocol):
    """A client, or a system under test in its place: the type to annotate code that submits work."""

    async def submit(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> HandleLike: ...
    async def submit_many(
        self, items: Iterable[SubmitItem | tuple[str, Mapping[str, Any] | None]]
    ) -> Sequence[HandleLike | QueueFullError | KeyConflictError]: ...
    async def run(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> ExecResult: ...
    def job(self, assignment_id: str, tenant_id: str | None = None) -> HandleLike: ...
