"""
A caller's side: hand in work, and come back for its result.

The client talks to the store alone. What it hands in is kept, whether a router is running yet or not; the result waits
in the store until somebody asks for it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from reefknot.audit.journal import Journal, event_id
from reefknot.core.audit.event import Admission, OperatorAction, timestamp
from reefknot.core.messages import (
    AckStatus,
    AssignmentOptions,
    Cancel,
    Correlation,
    ExecAssignment,
    ExecResult,
    Job,
    encode,
)
from reefknot.core.overload.admission import RejectReason
from reefknot.errors import ParameterError, ParameterTypeError, QueueFullError, ResultPendingError
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.router.admission import Forecast, Told
from reefknot.router.submissions import ARGUMENTS, CLASS, Desk, as_it_travels

DEFAULT_WAIT = 60.0

Routed = Callable[[Store], Awaitable[bool]]
"""Whether a router is running over this store."""


class Handle:
    """One submitted assignment."""

    def __init__(
        self, desk: Desk, store: Store, assignment: ExecAssignment, wait: float, routed: Routed | None = None
    ) -> None:
        self.assignment_id = assignment.assignment_id
        self._routed = routed
        self._desk = desk
        self._store = store
        self._wait = wait

    async def result(self, timeout: float | None = None) -> ExecResult:
        """The result, waited for at most `timeout` seconds (default: the deadline it was given, else a minute)."""
        seconds = self._wait if timeout is None else _seconds("timeout", timeout)
        result = await self._desk.result(self.assignment_id, seconds)
        if result is None:
            raise ResultPendingError(assignment_id=self.assignment_id, seconds=seconds)
        return result

    async def status(self) -> str:
        """Where it is: `pending`, `running`, `succeeded`, `failed`, `cancelled`, …"""
        item = await self._desk.find(self.assignment_id)
        return "unknown" if item is None else item.state.value

    async def cancel(self, reason: str = "") -> None:
        """Have it called off, whether a router is running or not. Its result then says `cancelled`."""
        await call_off(self._desk, self._store, self.assignment_id, reason, routed=self._routed)


class Client:
    """Hands in work through a store. `async with rk.connect("sqlite:state.db") as client:`"""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        size: int = 1000,
        routed: Routed | None = None,
        told: Told | None = None,
    ) -> None:
        """
        `routed` tells whether a router is running; without it, one is taken to be on its way.

        `told` tells what routers last said: who has a deadline that none of them can hold is then refused here.
        """
        self.store = store
        self._size = size
        self._forecast = Forecast(store, clock, told)
        self._clock = clock
        self._desk = Desk(store.work, clock, size=size)
        self._routed = routed

    async def submit(
        self,
        job_type: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        retries: int | None = None,
        priority: int | str = 0,
        resource_class: str | None = None,
        assignment_id: str | None = None,
        tenant_id: str | None = None,
        trace_id: str | None = None,
    ) -> Handle:
        """
        Hand in one step. Accepted means kept; a full queue raises `QueueFullError` with `retry_after`.

        `deadline` counts from now, in seconds, waiting included; `timeout` from the first execution on. The same
        `assignment_id` twice is one piece of work.
        """
        if inputs is not None and not isinstance(inputs, Mapping):
            raise ParameterTypeError("inputs", inputs, "a mapping of names to JSON values, or None")
        assignment = ExecAssignment(
            assignment_id=event_id() if assignment_id is None else assignment_id,
            request_id=event_id(),
            job=Job(job_type, dict(inputs or {})),
            tenant_id=tenant_id,
            resource_class=resource_class,
            correlation=None if trace_id is None else Correlation(trace_id),
            options=AssignmentOptions(
                priority=priority,
                deadline_ms=_milliseconds("deadline", deadline),
                timeout_ms=_milliseconds("timeout", timeout),
                retry_count=retries,
            ),
        )
        return await self._hand_in(as_it_travels(assignment, ARGUMENTS)[0])

    async def hand_in(self, assignment: ExecAssignment) -> Handle:
        """Hand in an assignment as it is."""
        return await self._hand_in(as_it_travels(assignment)[0])

    async def _hand_in(self, checked: ExecAssignment) -> Handle:
        wait = await self._forecast.refusal(checked)
        if wait is not None and not await self._desk.has(checked.assignment_id):
            raise await self._refused(checked, wait)
        await self._desk.hand_in(checked)
        deadline = checked.options.deadline_ms
        wait = DEFAULT_WAIT if deadline is None else deadline / 1000 + 1.0
        return Handle(self._desk, self.store, checked, wait, self._routed)

    async def _refused(self, assignment: ExecAssignment, wait: float) -> QueueFullError:
        """It would miss its deadline. That is on record, as when a router refuses it."""
        reason = RejectReason.WOULD_MISS_DEADLINE.value
        event = Admission(
            timestamp=timestamp(self._clock.wall()),
            event_id=event_id(),
            tenant_id=assignment.tenant_id,
            trace_id=assignment.trace_id,
            correlation_id=assignment.request_id,
            work_id=assignment.assignment_id,
            status=AckStatus.REJECTED.value,
            reason=reason,
            resource_class="router",
        )
        await Journal(self.store.audit).write(event)
        depth = (await self.store.work.snapshot()).due.get(CLASS, 0)
        return QueueFullError(depth=depth, limit=self._size, retry_after=wait, reason=reason.replace("_", " "))

    async def cancel(
        self, assignment_id: str, reason: str = "", *, who: str = "caller", events: Sequence[AuditEntry] = ()
    ) -> bool:
        """Call it off, wherever it is. True when that is done, False when a router was asked to do it."""
        return await call_off(
            self._desk, self.store, assignment_id, reason, routed=self._routed, who=who, events=events
        )

    async def run(self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> ExecResult:
        """Hand in and wait."""
        handle = await self.submit(job_type, inputs, **options)
        return await handle.result()


async def call_off(
    desk: Desk,
    store: Store,
    assignment_id: str,
    reason: str = "",
    *,
    routed: Routed | None = None,
    who: str = "caller",
    events: Sequence[AuditEntry] = (),
) -> bool:
    """
    By the router that has it; in the store itself when none is running. True: it is done.

    A router that comes later hears what it was asked while none was there.
    """
    why = reason.strip()[:300] or "cancelled"
    if routed is not None and not await routed(store):
        entries = list(events) or Journal(None).entries([_cancelled(desk, assignment_id, why, who)])
        item = await desk.find(assignment_id)
        handed_in = item is not None and await store.work.cancel(item.id, reason=why, who=who, events=entries)
        # Of one that nobody handed in here, the worker's piece is all there is.
        taken = await store.work.cancel(assignment_id, reason=why, who=who, events=() if handed_in else entries)
        return handed_in or taken
    body = encode(Cancel(assignment_id, reason or None)).decode()
    await store.control.post("cancel", target="router", body=body, sender=who, events=events)
    return False


def _cancelled(desk: Desk, assignment_id: str, reason: str, who: str) -> OperatorAction:
    return OperatorAction(
        timestamp=timestamp(desk.wall()),
        event_id=event_id(),
        work_id=assignment_id,
        actor=who,
        action="cancel",
        subject=assignment_id,
        details={"reason": reason},
    )


def _seconds(name: str, seconds: float) -> float:
    accepted = "a number of seconds, 0 or more, or None"
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ParameterTypeError(name, seconds, accepted)
    if not seconds >= 0:  # not a number is not either
        raise ParameterError(name, seconds, accepted)
    return seconds


def _milliseconds(name: str, seconds: float | None) -> int | None:
    accepted = "a number of seconds above 0, or None"
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ParameterTypeError(name, seconds, accepted)
    if not 0 < seconds < 1e9:
        raise ParameterError(name, seconds, accepted)
    return max(1, round(seconds * 1000))
