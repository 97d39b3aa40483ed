"""
Where a caller of this process comes in: its work is kept, and its answer found again.

Submissions are kept in groups. As long as there is room to look after them they are this router's own from the first
moment on; otherwise they stand in the store until it, or another router, has room.
"""

import asyncio
from collections.abc import Callable

from reefknot.core.audit.event import Admission
from reefknot.core.messages import AckStatus, ExecAssignment, ExecResult, Job, resource_class
from reefknot.core.overload.admission import Reject, Rules
from reefknot.errors import QueueFullError
from reefknot.ports.clock import Clock
from reefknot.ports.work_queue import FIRST_FENCE, Enqueued, Held
from reefknot.router.desk import Desk, TakenOn, refuse_other
from reefknot.router.gather import Gather
from reefknot.router.pace import Door
from reefknot.router.pending import PendingTable
from reefknot.router.records import Records

AT_ONCE = 200


class _Newcomer:
    """One that is being kept."""

    __slots__ = ("assignment", "body", "kept")

    def __init__(self, assignment: ExecAssignment, body: bytes) -> None:
        self.assignment = assignment
        self.body = body
        self.kept: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()


class Entry:
    """Callers, and what they wait for."""

    def __init__(
        self,
        *,
        owner: str,
        desk: Desk,
        door: Door,
        table: PendingTable,
        records: Records,
        rules: Rules,
        clock: Clock,
        taken_on: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._desk = desk
        self._door = door
        self._table = table
        self._records = records
        self._rules = rules
        self._clock = clock
        self._taken_on = taken_on
        self._left = left
        self._callers: dict[str, asyncio.Future[ExecResult]] = {}
        self._jobs: dict[str, Job] = {}
        """What they wait for: the same id with another job is not the same work."""
        self.gather: Gather[_Newcomer] = Gather("submissions could not be kept", self._keep, most=AT_ONCE)

    async def submit(self, assignment: ExecAssignment, body: bytes) -> asyncio.Future[ExecResult]:
        """Take it on, or raise `QueueFullError` with the time to come back. The future is its result."""
        name = assignment.assignment_id
        future = self._callers.get(name)
        if future is not None and not future.done():
            refuse_other(assignment, self._jobs[name])
            return future
        answer = self._door.admission(assignment)
        if isinstance(answer, Reject) and not await self._desk.has(name):
            await self._records.journal.write(self._refusal(assignment, answer))
            wait, size = answer.retry_after_ms / 1000, self._rules.size
            why = answer.reason.value.replace("_", " ")
            raise QueueFullError(depth=self._door.waiting(), limit=size, retry_after=wait, reason=why)
        future = asyncio.get_running_loop().create_future()
        self._callers[name], self._jobs[name] = future, assignment.job
        self._door.unclaimed.add(name)
        newcomer = _Newcomer(assignment, body)
        self.gather.put(newcomer)
        try:
            if not self.gather.served:  # a router that does not run keeps what it is given all the same
                await self.gather.finish()
            kept = await newcomer.kept
            if kept is Enqueued.FULL:
                raise QueueFullError(depth=self._rules.size, limit=self._rules.size, retry_after=1.0)
            if kept is Enqueued.DUPLICATE:
                self._door.unclaimed.discard(name)
                await self._desk.refuse_another_job(assignment)
                await self.answer_from_record(name)
        except BaseException as error:
            self._forget(name)
            self._door.unclaimed.discard(name)
            if not future.done():  # whoever asked for the same meanwhile waits for this very future
                future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
                future.exception()
            raise
        return future

    async def _keep(self, newcomers: list[_Newcomer]) -> None:
        """Who is gone meanwhile is kept all the same: whether it was is not known to the one who left."""
        items = [self._desk.submission(one.assignment, one.body) for one in newcomers]
        owner = self._owner if len(self._table) + len(items) <= self._rules.size else ""
        try:
            answers = await self._desk.hand_in_all(items, owner=owner)
        except BaseException as error:
            for one in newcomers:
                if not one.kept.done():
                    one.kept.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            raise
        now = self._clock.now()
        for one, item, kept in zip(newcomers, items, answers, strict=True):
            if kept is Enqueued.ACCEPTED and owner:
                self._door.unclaimed.discard(one.assignment.assignment_id)
                held = Held(item.id, owner, FIRST_FENCE)
                taken = TakenOn(one.assignment, held, item.deadline_at, False, one.body)
                self._table.add(taken, resource_class(one.assignment), now)
            if not one.kept.done():
                one.kept.set_result(kept)
        (self._taken_on if owner else self._left)()

    async def answer_from_record(self, assignment_id: str) -> None:
        """The same assignment again: if it has ended, its stored result is the answer."""
        stored = await self._desk.look(assignment_id)
        if stored is not None:
            self.tell(stored)

    def elsewhere(self) -> list[str]:
        """Those whose callers wait here, and that this router does not look after."""
        return [name for name in self._callers if self._table.get(name) is None]

    def tell(self, result: ExecResult) -> None:
        """Whoever waits for it here."""
        self._door.unclaimed.discard(result.assignment_id)
        future = self._forget(result.assignment_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _forget(self, name: str) -> asyncio.Future[ExecResult] | None:
        self._jobs.pop(name, None)
        return self._callers.pop(name, None)

    def _refusal(self, assignment: ExecAssignment, answer: Reject) -> Admission:
        return Admission(
            **self._records.about(assignment),
            status=AckStatus.REJECTED.value,
            reason=answer.reason.value,
            resource_class="router",
            queue_depth=self._door.waiting(),
        )
