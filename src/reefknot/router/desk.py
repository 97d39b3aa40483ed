"""
Where callers hand in work, and where its result is kept until they fetch it.

A submission is a piece of work of the router's own, in the same store: handed in means kept, whether the router runs or
not. A router that comes back claims what it had taken on and sends it again; a worker that knows the assignment already
answers with the result it stored.
"""

import asyncio

import msgspec
from msgspec import Struct

from reefknot.core.messages import ExecAssignment, ExecResult, ResultStatus, encode
from reefknot.core.work import WorkDone, WorkFailed, WorkItem, WorkState
from reefknot.errors import QueueFullError
from reefknot.ports.audit_log import AuditEntry
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import Enqueued, Held, Settlement, WorkQueue

CLASS = "router"
STORE_S = 30.0
LOOK_S = 0.5
"""How often a caller looks when nothing wakes it."""

_results = msgspec.json.Decoder(ExecResult)
_assignments = msgspec.json.Decoder(ExecAssignment)
_ENDED = frozenset({WorkState.SUCCEEDED, WorkState.FAILED, WorkState.CANCELLED, WorkState.DISCARDED})


class TakenOn(Struct, frozen=True):
    """A submission that this router has claimed."""

    assignment: ExecAssignment
    held: Held


def work_id(assignment_id: str) -> str:
    """The submission's own id; the worker's piece of work has the assignment's."""
    return f"route/{assignment_id}"


class Desk:
    """Submissions in a store."""

    def __init__(self, work: WorkQueue, clock: Clock, *, size: int, lease: float = 60.0) -> None:
        self._work = work
        self._clock = clock
        self._size = size
        self._lease = lease

    async def hand_in(self, assignment: ExecAssignment, *, events: tuple[AuditEntry, ...] = ()) -> bool:
        """Keep it. False when it is there already; `QueueFullError` when there is no room."""
        deadline = assignment.options.deadline_ms
        wall = self._clock.wall()
        item = WorkItem(
            id=work_id(assignment.assignment_id),
            kind=assignment.job.type,
            resource_class=CLASS,
            tenant_id=assignment.tenant_id,
            correlation_id=assignment.request_id,
            trace_id=assignment.trace_id,
            priority=assignment.priority,
            due_at=int(wall * 1000),
            deadline_at=None if deadline is None else int(wall * 1000) + deadline,
            payload=encode(assignment),
        )
        async with asyncio.timeout(STORE_S):
            (kept,) = await self._work.enqueue([item], limit=self._size, events=events)
        if kept is Enqueued.FULL:
            raise QueueFullError(depth=self._size, limit=self._size)
        return kept is Enqueued.ACCEPTED

    async def claim(self, n: int, owner: str) -> list[TakenOn]:
        """What was handed in and is nobody's yet."""
        async with asyncio.timeout(STORE_S):
            items = await self._work.claim(n, owner=owner, classes=(CLASS,), lease=self._lease)
        return [TakenOn(_assignments.decode(item.payload), Held(item.id, item.owner, item.fence)) for item in items]

    async def renew(self, held: list[Held]) -> None:
        async with asyncio.timeout(STORE_S):
            await self._work.renew(held, lease=self._lease)

    async def answer(self, held: Held, result: ExecResult, *, events: tuple[AuditEntry, ...] = ()) -> bool:
        """Put the result where its caller finds it. False when somebody else took over."""
        text = encode(result).decode()
        succeeded = result.status is ResultStatus.SUCCESS
        settled = WorkDone(text) if succeeded else WorkFailed(None, text, result.status.value)
        async with asyncio.timeout(STORE_S):
            (kept,) = await self._work.settle([Settlement(held.id, held.owner, held.fence, settled, events)])
        return kept

    async def result(self, assignment_id: str, timeout: float) -> ExecResult | None:
        """The result as soon as there is one, or None after `timeout` seconds."""
        ends = self._clock.now() + timeout
        while True:
            item = await self._work.get(work_id(assignment_id))
            if item is not None and item.state in _ENDED and item.result is not None:
                return _results.decode(item.result)
            left = ends - self._clock.now()
            if left <= 0:
                return None
            await self._clock.asleep(min(LOOK_S, left, 0.01 if item is None else LOOK_S))

    async def wait(self, timeout: float) -> bool:
        return await self._work.wait(timeout, classes=(CLASS,))
