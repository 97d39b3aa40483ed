"""
Completion: the end of an assignment at its router.

A worker over the same store has written its result there: the router forgets the assignment and resolves its caller.
The result of any other worker, and an end that the router decides (expired, refused everywhere, unknown class or type),
is written first, in batches. If the write fails, no caller gets a result: the claim runs out, and the assignment is
routed again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from msgspec import Struct, structs

from reefknot.audit.assignments import completed_event
from reefknot.audit.journal import about_assignment
from reefknot.audit.model.event import Event, Quarantined
from reefknot.audit.port import AuditEntry
from reefknot.errors import StoreUnavailableError
from reefknot.queue.execution.tracing import WorkTrace, routed_trace
from reefknot.queue.model.messages import ExecResult, ResultStatus, encode
from reefknot.queue.model.results import answer_of, cancel_reason
from reefknot.queue.model.work import Quarantine, WorkCancelled, WorkDone, WorkFailed, WorkRejected
from reefknot.queue.port.work_queue import Settlement
from reefknot.queue.router.pending import Pending, RouterContext
from reefknot.runtime.log import error_text, logger, printable
from reefknot.runtime.tasks import Batcher
from reefknot.runtime.timeouts import STORE_S

BATCH = 256


Acknowledge = Callable[[], Awaitable[None]]
"""Acknowledges the message that brought a result."""


class _RouterEnd(Struct, frozen=True):
    """An end that this router writes. `done` acknowledges the message that brought it."""

    settlement: Settlement
    """With the id of the record."""
    result: ExecResult
    counted: str
    done: Acknowledge | None = None
    trace: WorkTrace | None = None
    """The trace of an end that this router makes; a worker traces its own."""


def _foreign_end(pending: Pending, result: ExecResult, body: str) -> WorkDone | WorkFailed | WorkCancelled:
    """The end that the result of a worker with a store of its own means; `body` is the result as it is kept."""
    match result.status:
        case ResultStatus.SUCCESS:
            return WorkDone(body)
        case ResultStatus.CANCELLED:
            return WorkCancelled(body, pending.cancel_reason or cancel_reason(result.error_message))
        case _:
            return WorkFailed(None, body, result.status.value)


class Completion:
    """Ends assignments, and counts them by status."""

    def __init__(
        self, context: RouterContext, *, resolve: Callable[[str, ExecResult], None], freed: Callable[[], None]
    ) -> None:
        self._context = context
        self._resolve = resolve
        self._freed = freed
        self.counts: Counter[str] = Counter()
        """By status of the result; `rejected` are those that no worker took."""
        self.batch: Batcher[_RouterEnd] = Batcher("results could not be kept", self._keep, most=BATCH)

    def finish(self, pending: Pending, result: ExecResult) -> bool:
        """Forget an assignment whose result is in the store. False when it was forgotten already."""
        table = self._context.table
        if table.get(pending.id) is not pending:
            return False
        table.remove(pending)
        self.counts[result.status.value] += 1
        self._resolve(pending.id, result)
        self._freed()
        return True

    def finish_foreign(self, pending: Pending, result: ExecResult, done: Acknowledge | None) -> None:
        """Write the result of a worker that has a store of its own."""
        if self._context.table.get(pending.id) is not pending:
            return
        self._context.table.remove(pending)
        if result.status is ResultStatus.SUCCESS:  # which has no error, whatever the worker says
            result = structs.replace(result, error_code=None, error_message=None)
        body = encode(result)
        held, entries = pending.held, self._entries(pending, result, body)
        settlement = Settlement(held.id, held.owner, held.fence, _foreign_end(pending, result, body.decode()), entries)
        self.batch.put(_RouterEnd(settlement, result, result.status.value, done))

    def end(self, pending: Pending, result: ExecResult, event: Event) -> None:
        """End an assignment that this router holds."""
        if not self._context.table.remove(pending):
            return
        body = encode(result)
        held, entries = pending.held, self._entries(pending, result, body, event)
        settled = WorkRejected(body.decode(), result.status.value)
        counted = "rejected" if result.status is ResultStatus.ERROR else result.status.value
        settlement = Settlement(held.id, held.owner, held.fence, settled, entries)
        self.batch.put(_RouterEnd(settlement, result, counted, trace=self._trace(pending)))

    def set_aside(self, pending: Pending, result: ExecResult, reason: str) -> None:
        """Quarantine an assignment that this router holds. Its caller gets the result."""
        if not self._context.table.remove(pending):
            return
        body, held = encode(result), pending.held
        about = about_assignment(pending.assignment, self._context.clock.wall())
        entries = self._entries(pending, result, body, Quarantined(**about, reason=reason))
        settled = Quarantine(reason, None, body.decode())
        settlement = Settlement(held.id, held.owner, held.fence, settled, entries)
        self.batch.put(_RouterEnd(settlement, result, result.status.value, trace=self._trace(pending)))

    def _trace(self, pending: Pending) -> WorkTrace | None:
        return routed_trace(pending.assignment, pending.held.fence, self._since_ms(pending))

    def _since_ms(self, pending: Pending) -> int:
        """The time at which this router took the assignment in, in milliseconds UTC."""
        clock = self._context.clock
        return int((clock.wall() - (clock.now() - pending.since)) * 1000)

    def _entries(self, pending: Pending, result: ExecResult, body: bytes, *events: Event) -> tuple[AuditEntry, ...]:
        """The events of an end, the last of which covers its result. An end of the router's own had no attempt."""
        wall, since_ms = self._context.clock.wall(), self._since_ms(pending)
        attempts = 0 if events else None
        covered = completed_event(result, body, wall, since_ms=since_ms, attempts=attempts)
        return tuple(self._context.journal.entries([*events, covered]))

    async def _keep(self, ends: list[_RouterEnd]) -> None:
        try:
            kept = await self._settle(ends)
        finally:
            self._freed()
        for one, ours in zip(ends, kept, strict=True):
            if ours:
                self.counts[one.counted] += 1
                if one.trace is not None:
                    one.trace.ended_with(one.result, quarantined=isinstance(one.settlement.settled, Quarantine))
                self._resolve(one.settlement.id, one.result)
            else:
                await self._resolve_from_store(one.settlement.id)
        async with asyncio.timeout(STORE_S):
            await asyncio.gather(*(one.done() for one in ends if one.done is not None))

    async def _resolve_from_store(self, work_id: str) -> None:
        """Resolve the caller of an assignment that this router does not hold, if it has ended."""
        async with asyncio.timeout(STORE_S):
            item = await self._context.work.get(work_id)
        result = None if item is None else answer_of(item)
        if result is not None:
            self._resolve(work_id, result)

    async def _settle(self, ends: list[_RouterEnd]) -> list[bool]:
        """Write all in one step; if that fails for another reason than the store's absence, each by itself."""
        try:
            async with asyncio.timeout(STORE_S):
                return await self._context.work.settle([one.settlement for one in ends])
        except (StoreUnavailableError, TimeoutError):
            raise
        except Exception:
            if len(ends) == 1:
                raise
        return [await self._settle_alone(one) for one in ends]

    async def _settle_alone(self, end: _RouterEnd) -> bool:
        try:
            async with asyncio.timeout(STORE_S):
                (kept,) = await self._context.work.settle([end.settlement])
        except Exception as error:
            name = printable(end.settlement.id, most=200)
            logger().error("router: the result of %s was not stored; it is routed again (%s)", name, error_text(error))
            return False
        return kept
