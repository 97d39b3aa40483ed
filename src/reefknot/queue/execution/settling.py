"""
Claims of work, and reports of ended attempts to the store.

A claim is never forgotten: one whose claimer ends meanwhile goes back. Reports go in batches: what has ended by the
time the store is free goes in together. A step that was run is reported even while its process ends, so that its effect
is not repeated because its report was cut off. A report that the store does not take is tried again for as long as the
lease lasts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from reefknot.core.clock import Clock
from reefknot.queue.model.work import Interrupted
from reefknot.queue.port.work_queue import Held, Settlement, WorkQueue
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.timeouts import STORE_S, Timeouts

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0

C = TypeVar("C")


class Claims:
    """Keeps and returns the claims of one owner: a worker, a router, an orchestrator."""

    def __init__(self, work: WorkQueue, lease: float) -> None:
        self._work = work
        self._lease = lease

    async def finish(self, claim: Coroutine[Any, Any, list[C]], held: Callable[[C], Held]) -> list[C]:
        """The outcome of a claim, which is never cut off: when its caller is cancelled meanwhile, it goes back."""
        task = asyncio.get_running_loop().create_task(claim)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with suppress(Exception):  # whatever the store says, the caller ends; without an answer the leases run out
                late = await task
                if late:
                    await self.give_back([held(one) for one in late])
            raise

    async def give_back(self, held: list[Held]) -> list[bool]:
        """Return claims that nobody will report on; that spends nothing. False: the claim was lost already."""
        async with asyncio.timeout(STORE_S):
            return await self._work.settle([Settlement(one.id, one.owner, one.fence, Interrupted()) for one in held])

    async def renew(self, held: list[Held]) -> list[Held]:
        """Renew leases. Returns the claims that were lost, whose work must stop."""
        if not held:
            return []
        async with asyncio.timeout(STORE_S):
            kept = await self._work.renew(held, lease=self._lease)
        return [one for one, is_ours in zip(held, kept, strict=True) if not is_ours]


class EndedAttempt(Protocol):
    """An attempt that is over."""

    @property
    def settlement(self) -> Settlement: ...


A = TypeVar("A", bound=EndedAttempt)


class Settling(Generic[A]):
    """Settles the ended attempts of one owner."""

    def __init__(
        self,
        name: str,
        work: WorkQueue,
        *,
        clock: Clock,
        timeouts: Timeouts,
        lease: float,
        settled: Callable[[A, bool], None],
        publish: Callable[[list[A]], Awaitable[None]] | None = None,
    ) -> None:
        """`settled` hears whether each report was kept, at once; `publish` gets the kept ones of a batch, later."""
        self._name = name
        self._work = work
        self._clock = clock
        self._timeouts = timeouts
        self._lease = lease
        self._settled = settled
        self._publish = publish
        self._ended: list[A] = []
        self._is_settling = False
        self.reporting: set[asyncio.Task[None]] = set()
        """Reports that are being kept and published."""
        self.error: Exception | None = None
        """The error for which the store refused a report, until it keeps one again."""

    def report(self, ended: A) -> None:
        """Queue a report for the store. From here on it does not depend on its slot any more."""
        self._ended.append(ended)
        if not self._is_settling:
            self._is_settling = True
            self._start(self._settle_all)

    async def finished(self) -> None:
        """Wait until all reports are kept, at most as long as a store call may take."""
        ends = self._clock.now() + STORE_S
        while self.reporting and self._clock.now() < ends:
            await asyncio.wait(set(self.reporting), timeout=ends - self._clock.now())

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
        """Settle batch by batch, until nothing is left; results are published beside the next batch."""
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

    async def _settle(self, batch: list[A]) -> list[A]:
        """Report a batch. Returns what was kept; when the store does not say, each report is retried by itself."""
        try:
            with self._timeouts.timeout(STORE_S):
                answers = await self._work.settle([one.settlement for one in batch])
        except Exception as error:
            self._log_not_kept(batch[0], error, more=len(batch) - 1)
            for one in batch:
                self._start(partial(self._settle_alone, one))
            return []
        self.error = None
        for one, kept in zip(batch, answers, strict=True):
            self._hear(one, kept)
        return [one for one, kept in zip(batch, answers, strict=True) if kept]

    async def _settle_alone(self, one: A) -> None:
        """Retry until the store takes the report, at most as long as the lease lasts."""
        ends, pause = self._clock.now() + self._lease, _FIRST_PAUSE
        kept = False
        while self._clock.now() + pause < ends:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)
            try:
                with self._timeouts.timeout(STORE_S):
                    (kept,) = await self._work.settle([one.settlement])
                self.error = None
                break
            except Exception as error:
                self.error = error
                self._log_not_kept(one, error)
        self._hear(one, kept)
        await self._after([one] if kept else [])

    def _hear(self, one: A, kept: bool) -> None:
        self._settled(one, kept)
        if not kept:
            logger().info("%s: the lease of %s was lost; its report was refused", self._name, one.settlement.id)

    async def _after(self, kept: list[A]) -> None:
        if kept and self._publish is not None:
            await self._publish(kept)

    def _log_not_kept(self, one: A, error: Exception, more: int = 0) -> None:
        others = f" and {more} more" if more else ""
        text = "%s: the report of %s%s was not kept (%s)"
        logger().error(text, self._name, one.settlement.id, others, error_text(error))
