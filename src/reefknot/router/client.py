"""
The client: submits work through a store, and waits for its result.

A client talks to the store alone. A submission is kept whether a router is running yet or not, and its result waits in
the store until it is asked for.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any

from reefknot.audit.assignments import ended_event
from reefknot.audit.journal import Journal, envelope
from reefknot.core.canonical import canonical
from reefknot.core.checks import number
from reefknot.core.messages import (
    AssignmentOptions,
    Cancel,
    Correlation,
    ExecAssignment,
    ExecResult,
    InvalidMessage,
    Job,
    encode,
    written_assignment,
)
from reefknot.core.overload.submission import SubmissionRules
from reefknot.core.results import cancel_reason
from reefknot.core.work import is_ingestion, visible_state
from reefknot.errors import ParameterError, ParameterTypeError, ResultPendingError
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.router.context import cancelled_event
from reefknot.router.submissions import SUBMIT_ARGUMENTS, Submissions, validated
from reefknot.runtime.seeds import new_id

DEFAULT_WAIT = 60.0
LONGEST_DEADLINE_S = 1e9
LONGEST_DELAY_S = 10 * 365 * 86_400.0

HasRouter = Callable[[Store], Awaitable[bool]]
"""Whether a router is running over a store."""


class Handle:
    """A submitted assignment: its result, once there is one, and a way to cancel it."""

    def __init__(
        self,
        submissions: Submissions,
        store: Store,
        assignment: ExecAssignment,
        result_wait: float,
        has_router: HasRouter | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        self.assignment_id = assignment.assignment_id
        self.tenant_id = assignment.tenant_id
        self.is_new = is_new
        """Whether this submission made the job. Otherwise a job of this id was there, and it stays as it was."""
        self._record_id = assignment.record_id
        self._wait = submissions.result if assignment.options.deadline_ms is None else submissions.result_by_deadline
        self._has_router = has_router
        self._submissions = submissions
        self._store = store
        self._result_wait = result_wait

    async def result(self, timeout: float | None = None) -> ExecResult:
        """
        The result, waited for at most `timeout` seconds (default: the assignment's deadline and a second, else a
        minute).

        Whatever died meanwhile, an assignment with a deadline has its result a second after that at the latest.
        """
        seconds = self._result_wait if timeout is None else number("timeout", timeout, most=inf, unit=" of seconds")
        result = await self._wait(self._record_id, seconds)
        if result is None:
            raise ResultPendingError(assignment_id=self.assignment_id, seconds=seconds)
        return result

    async def status(self) -> str:
        """The state as `job list` shows it: `pending`, `running`, `succeeded`, `failed`, `cancelled`, …"""
        from reefknot.runtime.processes import owner_is_gone

        item = await self._submissions.find(self._record_id)
        if item is None:
            return "unknown"
        now = self._store.moment()
        return visible_state(item, now, gone=(item.owner,) if owner_is_gone(item.owner) else ()).value

    async def cancel(self, reason: str = "") -> None:
        """Cancel it, whether a router is running or not. Its result then says `cancelled`."""
        cancel = Cancel(self.assignment_id, reason or None, self.tenant_id)
        await cancel_assignment(self._submissions, self._store, cancel, has_router=self._has_router)


class Client:
    """Submits work through a store. `async with rk.connect("sqlite:state.db") as client:`"""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        size: int = 1000,
        has_router: HasRouter | None = None,
    ) -> None:
        """
        `has_router` tells whether a router is running; without it, one is assumed.

        `size` bounds what may wait, for each resource class, until a router says how much may.
        """
        self.store = store
        self._submissions = Submissions(store.work, clock, rules=SubmissionRules(size), journal=Journal(store.audit))
        self._has_router = has_router

    async def submit(
        self,
        job_type: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        attempt_timeout: float | None = None,
        retries: int | None = None,
        priority: int | str = 0,
        resource_class: str | None = None,
        assignment_id: str | None = None,
        tenant_id: str | None = None,
        trace_id: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> Handle:
        """
        Submit one step. Accepted means kept; a full queue raises `QueueFullError` with `retry_after`.

        With `delay` (seconds) or `at` (a time; without a zone it is local) it is due then, and not before.
        `deadline` counts from there, in seconds, waiting included; `timeout` is the time of all executions, from the
        first one on, `attempt_timeout` that of one. The same `assignment_id` twice is one piece of
        work, for each tenant its own.
        """
        if inputs is not None and not isinstance(inputs, Mapping):
            raise ParameterTypeError("inputs", inputs, "a mapping of names to JSON values, or None")
        own_id = new_id()
        assignment = ExecAssignment(
            assignment_id=own_id if assignment_id is None else assignment_id,
            request_id=own_id,
            job=Job(job_type, dict(inputs or {})),
            tenant_id=tenant_id,
            resource_class=resource_class,
            correlation=None if trace_id is None else Correlation(trace_id),
            options=AssignmentOptions(
                priority=priority,
                deadline_ms=_milliseconds("deadline", deadline),
                timeout_ms=_milliseconds("timeout", timeout),
                attempt_timeout_ms=_milliseconds("attempt_timeout", attempt_timeout),
                retry_count=retries,
            ),
        )
        return await self._submit(validated(assignment, SUBMIT_ARGUMENTS)[0], self._due_at(delay, at))

    async def hand_in(
        self,
        assignment: ExecAssignment | Mapping[str, Any],
        *,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> Handle:
        """
        Submit an assignment as it is: a record, or its fields as a mapping, as a line of a file has them.

        In a mapping the ids may be left out, and an unknown field is refused with the one that may be meant.
        """
        given = assignment if isinstance(assignment, ExecAssignment) else _from_fields(assignment)
        return await self._submit(validated(given)[0], self._due_at(delay, at))

    def _due_at(self, delay: float | None, at: datetime | None) -> int:
        """The due time that a caller asks for, in milliseconds UTC; 0 for now."""
        if delay is not None and at is not None:
            raise ParameterError("at", at, "not together with delay; give one of them")
        if at is not None and not isinstance(at, datetime):
            raise ParameterTypeError("at", at, "a datetime; without a zone it is local")
        if at is not None:
            if at.timestamp() - self._submissions.wall() > LONGEST_DELAY_S:
                raise ParameterError("at", at, "a time within the next ten years")
            return int(at.timestamp() * 1000)
        if delay is None:
            return 0
        seconds = number("delay", delay, most=LONGEST_DELAY_S, unit=" of seconds")
        return int((self._submissions.wall() + seconds) * 1000) if seconds else 0

    async def _submit(self, checked: ExecAssignment, due_at: int = 0) -> Handle:
        is_new = await self._submissions.submit(checked, due_at=due_at)
        deadline = checked.options.deadline_ms
        result_wait = DEFAULT_WAIT if deadline is None else deadline / 1000 + 1.0
        result_wait += max(0.0, due_at / 1000 - self._submissions.wall())
        return Handle(self._submissions, self.store, checked, result_wait, self._has_router, is_new=is_new)

    async def cancel(
        self,
        assignment_id: str,
        reason: str = "",
        *,
        tenant_id: str | None = None,
        who: str = "caller",
        events: Sequence[AuditEntry] = (),
    ) -> bool:
        """Cancel it, wherever it is. True when that is done, False when a router was asked to do it."""
        cancel = Cancel(assignment_id, reason or None, tenant_id)
        return await cancel_assignment(
            self._submissions, self.store, cancel, has_router=self._has_router, who=who, events=events
        )

    async def run(self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> ExecResult:
        """Submit, and wait for the result."""
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
    Cancel by the router that has it, or in the store itself when none is running or has it. True: it is done.

    A router that starts later obeys what it was asked while none was there.
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


def _milliseconds(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    return max(1, round(number(name, seconds, most=LONGEST_DEADLINE_S, above=True, unit=" of seconds") * 1000))
