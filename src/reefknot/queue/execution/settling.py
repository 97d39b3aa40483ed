"""
Claims of work, and reports of ended attempts to the store.

A claim is never forgotten: one whose claimer ends meanwhile goes back. Reports go in batches: what has ended by the
time the store is free goes in together. A step that was run is reported even while its process ends, so that its effect
is not repeated because its report was cut off. A report that the store does not take is tried again for as long as the
lease lasts.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from reefknot.audit.assignments import vanished_events
from reefknot.audit.journal import Journal
from reefknot.audit.port import AuditEntry
from reefknot.core.clock import Clock
from reefknot.queue.family import named
from reefknot.queue.model.follow_ups import awaited
from reefknot.queue.model.messages import ExecResult
from reefknot.queue.model.results import result_or_gone
from reefknot.queue.model.work import Interrupted, Snooze, TryAgain, WorkItem
from reefknot.queue.port.work_queue import Held, Settlement, WorkQueue
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.timeouts import STORE_S, Timeouts

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_PAGE = 50

C = TypeVar("C")


class AwaitedResults:
    """The results of all work that an item has waited for, in order, in pages."""

    def __init__(self, work: WorkQueue, item: WorkItem) -> None:
        self._work = work
        self._item = item
        self.loop = asyncio.get_running_loop()

    async def __aiter__(self) -> AsyncIterator[list[ExecResult]]:
        records = awaited(self._item)
        known = await named(self._work, records)
        for at in range(0, len(records), _PAGE):
            page = records[at : at + _PAGE]
            ids = [known[one].id if one in known else one for one in page]
            async with asyncio.timeout(STORE_S):
                found = await asyncio.gather(*map(self._work.get, ids))
            yield [result_or_gone(*one) for one in zip(found, ids, strict=True)]


class Claims:
    """Keeps and returns the claims of one owner: a worker, a router, an orchestrator."""

    def __init__(self, work: WorkQueue, lease: float) -> None:
        self._work = work
        self._lease = lease

    async def finish(self, claim: Coroutine[Any, Any, list[C]], held: Callable[[C], Held | None]) -> list[C]:
        """The outcome of a claim, which is never cut off: when its caller is cancelled meanwhile, it goes back."""
        task = asyncio.get_running_loop().create_task(claim)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with suppress(Exception):  # whatever the store says, the caller ends; without an answer the leases run out
                if late := [claimed for one in await task if (claimed := held(one)) is not None]:
                    await self.give_back(late)
            raise

    async def give_back(self, held: list[Held]) -> list[bool]:
        """Return claims that will not be reported on; that spends nothing. False: the claim was lost already."""
        async with asyncio.timeout(STORE_S):
            return await self._work.settle([Settlement(one.id, one.owner, one.fence, Interrupted()) for one in held])

    async def renew(self, held: list[Held]) -> list[Held]:
        """Renew leases. Returns the claims that were lost, whose work must stop."""
        if not held:
            return []
        async with asyncio.timeout(STORE_S):
            kept = await self._work.renew(held, lease=self._lease)
        return [one for one, is_ours in zip(held, kept, strict=True) if not is_ours]


class OwnerContext(Struct, frozen=True, kw_only=True):
    """The context of one owner of work, a worker or an orchestrator: its names, its store, clock and journal."""

    name: str
    """The name at the beginning of its log lines."""
    owner: str
    """The name under which this incarnation holds work."""
    lease: float
    work: WorkQueue
    journal: Journal
    clock: Clock
    timeouts: Timeouts
    seed: int | None = None

    @property
    def claims(self) -> Claims:
        return Claims(self.work, self.lease)

    def crash_events(self, item: WorkItem) -> Iterable[AuditEntry]:
        """The events of an item whose owner vanished. Called where the store runs, perhaps in another thread."""
        return self.journal.entries(vanished_events(item, self.clock.wall()))


class Holder(Protocol):
    """The pool that holds the claim of an attempt."""

    def settled(self, work_id: str, fence: int) -> None: ...

    def due_again(self, item: WorkItem, due_at: int) -> None: ...


class EndedAttempt(Struct, frozen=True):
    """An attempt that is over: its report to the store, and what follows when the report is kept."""

    item: WorkItem
    settlement: Settlement
    pool: Holder
    body: bytes | None = None
    """The result to publish."""
    to: str = ""
    """The end that the result concerns, if it concerns one alone."""
    end_trace: Callable[[], None] | None = None


class Settling:
    """Settles the ended attempts of one owner."""

    def __init__(
        self, context: OwnerContext, publish: Callable[[list[EndedAttempt]], Awaitable[None]] | None = None
    ) -> None:
        """`publish` gets what was kept of a batch, after its pools have heard of it."""
        self._context = context
        self._publish = publish
        self._ended: list[EndedAttempt] = []
        self._is_settling = False
        self.reporting: set[asyncio.Task[None]] = set()
        """Reports that are being kept and published."""
        self.error: Exception | None = None
        """The error for which the store refused a report, until it keeps one again."""

    def report(self, ended: EndedAttempt) -> None:
        """Queue a report for the store. From here on it does not depend on its slot any more."""
        self._ended.append(ended)
        if not self._is_settling:
            self._is_settling = True
            self._start(self._settle_all)

    async def finished(self) -> None:
        """Wait until all reports are kept, at most as long as a store call may take."""
        ends = self._context.clock.now() + STORE_S
        while self.reporting and self._context.clock.now() < ends:
            await asyncio.wait(set(self.reporting), timeout=ends - self._context.clock.now())

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to keep or publish reports. What a step cancels begins again; at the end of the loop it does not."""
        loop = asyncio.get_running_loop()

        def ended(task: asyncio.Task[None]) -> None:
            self.reporting.discard(task)
            if task.cancelled():
                loop.call_later(_FIRST_PAUSE, self._start, work)

        task = loop.create_task(work())
        self.reporting.add(task)
        task.add_done_callback(ended)

    async def _settle_all(self) -> None:
        """Settle batch by batch, until nothing is left; results are published while the next batch is kept."""
        while True:
            batch, self._ended = self._ended, []
            try:
                kept = await self._settle(batch)
            except asyncio.CancelledError:
                self._ended = batch + self._ended
                raise
            except BaseException:
                self._is_settling = False  # the next report begins with a task of its own
                raise
            self._start(partial(self._after, kept))
            if not self._ended:
                self._is_settling = False
                return

    async def _settle(self, batch: list[EndedAttempt]) -> list[EndedAttempt]:
        """Report a batch. Returns what was kept; when the store does not say, each report is retried by itself."""
        try:
            with self._context.timeouts.timeout(STORE_S):
                answers = await self._context.work.settle([one.settlement for one in batch])
        except Exception as error:
            self._log_not_kept(batch[0], error, more=len(batch) - 1)
            for one in batch:
                self._start(partial(self._settle_alone, one))
            return []
        self.error = None
        for one, kept in zip(batch, answers, strict=True):
            self._hear(one, kept)
        return [one for one, kept in zip(batch, answers, strict=True) if kept]

    async def _settle_alone(self, one: EndedAttempt) -> None:
        """Retry until the store takes the report, at most as long as the lease lasts."""
        ends, pause = self._context.clock.now() + self._context.lease, _FIRST_PAUSE
        kept = False
        while self._context.clock.now() + pause < ends:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)
            try:
                with self._context.timeouts.timeout(STORE_S):
                    (kept,) = await self._context.work.settle([one.settlement])
                self.error = None
                break
            except Exception as error:
                self.error = error
                self._log_not_kept(one, error)
        self._hear(one, kept)
        await self._after([one] if kept else [])

    def _hear(self, one: EndedAttempt, kept: bool) -> None:
        """Let go of the claim, and of its trace if this was the end; what is due again gets its place back."""
        one.pool.settled(one.item.id, one.item.fence)
        if not kept:
            logger().info("%s: lease of %s lost; its result is dropped", self._context.name, one.settlement.id)
            return
        if one.end_trace is not None and one.settlement.is_kept_as_reported:
            one.end_trace()
        settled = one.settlement.kept_as
        if isinstance(settled, TryAgain | Snooze):
            one.pool.due_again(one.item, settled.due_at)

    async def _after(self, kept: list[EndedAttempt]) -> None:
        if self._publish is not None and (ended := [one for one in kept if one.settlement.is_kept_as_reported]):
            await self._publish(ended)

    def _log_not_kept(self, one: EndedAttempt, error: Exception, more: int = 0) -> None:
        others = f" and {more} more" if more else ""
        text = "%s: the report of %s%s was not kept (%s)"
        logger().error(text, self._context.name, one.settlement.id, others, error_text(error))
