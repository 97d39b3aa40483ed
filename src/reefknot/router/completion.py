"""
Where a router's work ends: the answer is kept, and then told to whoever waits for it here.

Answers are kept in groups. One that cannot be kept is not told to anybody: its claim runs out, and the worker that has
the result is asked once more.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from reefknot.core.audit.event import Event
from reefknot.core.messages import ExecResult, ResultStatus
from reefknot.errors import StoreUnavailableError
from reefknot.router.pending import Pending, PendingTable
from reefknot.router.records import Records
from reefknot.router.submissions import Answer, Desk
from reefknot.runtime.batches import Batcher
from reefknot.runtime.log import logger, printable

AT_ONCE = 256
DONE_S = 10.0

Done = Callable[[], Awaitable[None]]


class _End:
    """One on its way to the store."""

    __slots__ = ("answer", "done", "kept")

    def __init__(self, answer: Answer, done: Done | None) -> None:
        self.answer = answer
        self.done = done
        self.kept: asyncio.Future[None] | None = None


class Ends:
    """Ends assignments."""

    def __init__(
        self,
        *,
        desk: Desk,
        table: PendingTable,
        records: Records,
        by_worker: Callable[[Pending, ExecResult], None],
        tell: Callable[[ExecResult], None],
        freed: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._table = table
        self._records = records
        self._by_worker = by_worker
        self._tell = tell
        self._freed = freed
        self.counts: Counter[str] = Counter()
        """How many there were of each end: a result's status, or `rejected` of what no worker took."""
        self.gather: Batcher[_End] = Batcher("results could not be kept", self._keep, most=AT_ONCE)

    def soon(self, pending: Pending, result: ExecResult, *events: Event, done: Done | None = None) -> _End | None:
        """It is over. `done` is called once its result is kept. None when it had ended already."""
        if self._table.get(pending.id) is not pending:
            return None
        if pending.worker_id is not None:
            self._by_worker(pending, result)
        self._table.remove(pending)
        # Only an end that the router itself made has an event of the router's.
        self.counts["rejected" if events and result.status is ResultStatus.ERROR else result.status.value] += 1
        entries = tuple(self._records.journal.entries(events)) if events else ()
        end = _End(Answer(pending.held, result, entries), done)
        self.gather.put(end)
        return end

    async def now(self, pending: Pending, result: ExecResult, *events: Event) -> None:
        """It is over, and its result is kept when this returns."""
        end = self.soon(pending, result, *events)
        if end is not None:
            end.kept = asyncio.get_running_loop().create_future()
            await end.kept

    async def _keep(self, ends: list[_End]) -> None:
        try:
            kept = await self._kept(ends)
        except BaseException as error:
            for one in ends:
                if one.kept is not None and not one.kept.done():
                    one.kept.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            raise
        finally:
            self._freed()
        for one, ours in zip(ends, kept, strict=True):
            if ours:
                self._tell(one.answer.result)
            if one.kept is not None and not one.kept.done():
                one.kept.set_result(None)
        dones = [one.done() for one in ends if one.done is not None]
        if dones:
            async with asyncio.timeout(DONE_S):
                await asyncio.gather(*dones)

    async def _kept(self, ends: list[_End]) -> list[bool]:
        """All in one step; if that fails for another reason than the store's absence, each by itself."""
        try:
            return await self._desk.answer([one.answer for one in ends])
        except (StoreUnavailableError, TimeoutError):
            raise
        except Exception:
            if len(ends) == 1:
                raise
        return [await self._kept_alone(one) for one in ends]

    async def _kept_alone(self, end: _End) -> bool:
        try:
            (kept,) = await self._desk.answer([end.answer])
        except Exception as error:
            said = printable(f"{end.answer.held.id}: {type(error).__name__}: {error}", most=300)
            logger().error("a result could not be kept: %s", said)
            return False
        return kept
