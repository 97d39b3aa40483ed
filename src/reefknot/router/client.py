"""
A caller's side: hand in work, and come back for its result.

The client talks to the store alone. What it hands in is kept, whether a router is running yet or not; the result waits
in the store until somebody asks for it.
"""

from collections.abc import Mapping
from typing import Any

from reefknot.core.messages import (
    Cancel,
    Correlation,
    ExecAssignment,
    ExecResult,
    InvalidMessage,
    Job,
    Options,
    encode,
    read_assignment,
)
from reefknot.errors import ParameterError, ParameterTypeError, ResultPendingError
from reefknot.execution.journal import event_id
from reefknot.ports.clock import Clock
from reefknot.ports.store import Store
from reefknot.router.desk import Desk, work_id

DEFAULT_WAIT = 60.0


class Handle:
    """One submitted assignment."""

    def __init__(self, desk: Desk, store: Store, assignment: ExecAssignment, wait: float) -> None:
        self.assignment_id = assignment.assignment_id
        self._desk = desk
        self._store = store
        self._wait = wait

    async def result(self, timeout: float | None = None) -> ExecResult:
        """The result, waited for at most `timeout` seconds (default: the deadline it was given, else a minute)."""
        seconds = self._wait if timeout is None else timeout
        result = await self._desk.result(self.assignment_id, seconds)
        if result is None:
            raise ResultPendingError(assignment_id=self.assignment_id, seconds=seconds)
        return result

    async def status(self) -> str:
        """Where it is: `pending`, `running`, `succeeded`, `failed`, `cancelled`, …"""
        item = await self._store.work.get(work_id(self.assignment_id))
        return "unknown" if item is None else item.state.value

    async def cancel(self, reason: str = "") -> None:
        """Ask for it to be called off. Its result then says `cancelled`."""
        body = encode_cancel(self.assignment_id, reason)
        await self._store.control.post("cancel", target="router", body=body)


class Client:
    """Hands in work through a store. `async with rk.connect("sqlite:state.db") as client:`"""

    def __init__(self, store: Store, clock: Clock, *, size: int = 1000) -> None:
        self.store = store
        self._desk = Desk(store.work, clock, size=size)

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
        assignment = ExecAssignment(
            assignment_id=assignment_id or event_id(),
            request_id=event_id(),
            job=Job(job_type, dict(inputs or {})),
            tenant_id=tenant_id,
            resource_class=resource_class,
            correlation=None if trace_id is None else Correlation(trace_id),
            options=Options(
                priority=priority,
                deadline_ms=_milliseconds("deadline", deadline),
                timeout_ms=_milliseconds("timeout", timeout),
                retry_count=retries,
            ),
        )
        return await self.hand_in(assignment)

    async def hand_in(self, assignment: ExecAssignment) -> Handle:
        """Hand in an assignment as it is."""
        checked = read_assignment(encode(assignment))
        if isinstance(checked, InvalidMessage):
            raise ParameterError(checked.field or "assignment", assignment.assignment_id, checked.message)
        await self._desk.hand_in(checked)
        deadline = assignment.options.deadline_ms
        return Handle(self._desk, self.store, checked, DEFAULT_WAIT if deadline is None else deadline / 1000 + 1.0)

    async def run(self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> ExecResult:
        """Hand in and wait."""
        handle = await self.submit(job_type, inputs, **options)
        return await handle.result()


def encode_cancel(assignment_id: str, reason: str) -> str:
    return encode(Cancel(assignment_id, reason or None)).decode()


def _milliseconds(name: str, seconds: float | None) -> int | None:
    accepted = "a number of seconds above 0, or None"
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ParameterTypeError(name, seconds, accepted)
    if not 0 < seconds < 1e9:
        raise ParameterError(name, seconds, accepted)
    return max(1, round(seconds * 1000))
